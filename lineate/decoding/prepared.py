"""A decoding step on a CPU that was read from the model once, and bound to states that stay where they are."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from lineate.decoding.in_place import Tensors, caches_in_place
from lineate.decoding.invariant import rows_together
from lineate.layers import LayerState, Memory
from lineate.layers.formats import AS_COMPUTED, StateFormat
from lineate.layers.step.native import turn_on
from lineate.layers.step.supported_modules import are_unchanged
from lineate.layers.step.unchanged import Unchanged
from lineate.models.checks import check_ids
from lineate.models.hybrid import HybridLM
from lineate.models.stepping import BoundStep, Recording, bind_states, run_blocks, run_tokens
from lineate.native.build import available
from lineate.native.product import MOST_ROWS
from lineate.ops.rounding import NEAREST
from lineate.torch_ops.invariance import batch_invariant
from lineate.torch_ops.tracing import is_eager


class PreparedStep:
    """Reads one token of every row; what C computes of the model is prepared before.

        step = PreparedStep.of(model)                    # None where C computes no part of it
        step.bind(memories, caches, window, lengths)     # False where C cannot use these tensors
        logits, hidden = step.read(ids)                  # updates memories, caches and lengths in place

    It assumes that the model stays unchanged: its modules, their settings and hooks, the addresses of the weights.
    Values that are written into the weights take effect. Tensors that were bound must stay at their addresses.

    Args:
        model: The model.
        hidden: Whether `read` returns the input of the head, too.
    """

    def __init__(self, model: HybridLM, hidden: bool) -> None:
        self.model = model
        self._recording = Recording(model.ends, model.layers)
        self.plan = self._recording.plan
        # The step reads weights at their addresses, so it keeps them even if the model gets others.
        self._weights = [x.detach() for x in (*model.parameters(), *model.buffers())]
        self.computes_all = self.plan.is_whole and not hidden
        """Whether C computes the logits from the ids, and no module is called."""
        called = {x.layer for run in self.plan.runs for x in run.sublayers if x.is_mixer and x.recorded is None}
        self._called = sorted(called)
        self._bound: BoundStep | None = None
        self.rows, self._invariant, self._most = 0, False, rows_together(model) or 0

    @staticmethod
    def of(model: HybridLM, hidden: bool = False) -> "PreparedStep | None":
        """Return the step of a model; None if C computes no part of it."""
        if not model.is_plain or not model.embed.weight.is_cpu or torch.is_autocast_enabled("cpu"):
            return None
        if _has_any_global_hook() or not are_unchanged() or not available("products"):
            return None
        made = PreparedStep(model, hidden)
        return made if made.plan.uses_native and made.plan.hidden == model.config.hidden_size else None

    @property
    def is_current(self) -> bool:
        """Whether the model is unchanged since, as far as C computes it."""
        return self.model.is_plain and self._recording.is_current(self.model.ends, self.model.layers)

    @property
    def is_bound(self) -> bool:
        """Whether `read` may be called."""
        return self._bound is not None

    def bind(
        self,
        memories: Mapping[int, dict[str, Tensor]],
        caches: Tensors,
        window: int,
        lengths: Tensor,
        format: StateFormat = AS_COMPUTED,
        invariant: bool = False,
    ) -> bool:
        """Use these tensors from now on; return whether C can.

        Args:
            memories: Tensors `rows ...` by layer and name; those of a module that is called are exchanged after a step.
            caches: Tensors `rows capacity ...` by layer and name.
            window: How many entries of the caches attention reads, where a module is called.
            lengths: The tokens that each row has, `rows`, int64.
            format: How the memories are kept.
            invariant: Whether a row's bits may not depend on the other rows; modules that are called then have few.
        """
        self._bound, self.rows, self._invariant = None, len(lengths), invariant
        if not reads_rows(self.rows, format) or (invariant and not self.computes_all and self.rows > self._most):
            return False
        self._memories, self._lengths, self._after = memories, lengths, lengths + 1
        self._shared: dict[Hashable, Any] = {}
        layers: dict[int, LayerState] = {n: Memory(own, owned=True) for n, own in memories.items()}
        layers |= caches_in_place(caches, window, 1, (lengths, self._after), self._shared)
        self._states = [layers[n] for n in range(len(layers))]
        self._bound = bind_states(self.plan, self._states, self.rows, self.computes_all)
        return self._bound is not None

    def unbind(self) -> None:
        """Forget the tensors, which may then be moved."""
        self._bound = None

    def accepts(self, ids: Tensor) -> bool:
        """Whether ids are a plain int64 tensor `rows 1` on the CPU, outside of torch.func and torch.compile."""
        return are_plain(ids, self.rows)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read ids `rows 1`; return the logits `rows 1 vocab`, and the input of the head unless C computes all.

        Args:
            ids: Tokens, such as `accepts` accepts them; an id that is not in the vocabulary changes nothing.
        """
        bound, hidden = self._bound, None
        assert bound is not None
        if self.computes_all:
            read = run_tokens(self.plan, bound, ids)
            if read is None:
                check_ids(ids, self.model.config.vocab_size)
            assert read is not None
            logits = read
        else:
            check_ids(ids, self.model.config.vocab_size)
            with batch_invariant(self._invariant):
                x = run_blocks(self.plan, bound, self.model.layers, self.model.embed(ids), self._states)
                for n in self._called:
                    self._exchange(n, bound.new[n])
                hidden = self.model.norm(x)
                logits = self.model.logits(hidden)
            self._shared.clear()
        self._lengths += 1
        self._after += 1
        turn_on(bound.shared)
        return logits, hidden

    def _exchange(self, layer: int, new: LayerState) -> None:
        """Keep the new memory of a module that was called."""
        if isinstance(new, Memory):
            memory = self._memories[layer]
            memory.update(new.tensors)
            self._states[layer] = Memory(memory, owned=True)


def reads_rows(rows: int, format: StateFormat) -> bool:
    """Whether C reads one token of this number of rows, with memories in this format."""
    return 0 < rows <= MOST_ROWS and format.rounding == NEAREST  # torch multiplies more rows faster


def are_plain(ids: Tensor, rows: int) -> bool:
    """Whether ids are a plain int64 tensor `rows 1` on the CPU, outside of torch.func and torch.compile."""
    return type(ids) is Tensor and ids.dtype is torch.int64 and ids.shape == (rows, 1) and ids.is_cpu and is_eager(ids)


class Verified:
    """Raises if a model is no longer as it was prepared, for the debug mode of a decoder."""

    def __init__(self, model: HybridLM) -> None:
        self._model, self._layers = model, list(model.layers)
        self._unchanged = Unchanged(self._layers, list(model.modules()))

    def check(self) -> None:
        """Raise if a module, a setting, a hook or the address of a weight has changed."""
        if list(self._model.layers) != self._layers or not self._unchanged(self._layers):
            raise RuntimeError(
                "model was changed after the decoder was prepared: a module, a setting, a hook, or where a weight is "
                "stored; call refresh()"
            )
