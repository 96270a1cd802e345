"""Decoding in a CUDA graph: the kernel launches of a step are recorded once, and one call replays them.

A decoding step of a small model makes a few hundred launches, each of which takes the host longer than the device. A
graph replays them without the host, at the same addresses. So memories and caches are updated in place, and the lengths
stay on the device.
"""

import torch
from torch import Tensor

from lineate.checks import check_flag
from lineate.generation import in_place
from lineate.generation.in_place import Graph, capture, read_in_place, round_up, state_in_place, write_back
from lineate.layers import Memory, TokenCache
from lineate.layers.formats import StateFormat
from lineate.models.checks import check_ids, check_state
from lineate.models.hybrid import HybridLM
from lineate.models.state import ModelState
from lineate.ops.rounding import NEAREST


class GraphedDecoder:
    """Decode one token of every row with each call; on a GPU in a CUDA graph.

        out = model(prompt, last_only=True)
        decoder = GraphedDecoder(model, out.state, room=512)
        logits = decoder(ids)                       # b 1 -> b 1 vocab; nothing waits for the device
        state = decoder.state                       # a ModelState, to continue in any other way

    The logits equal those of model(ids, state=...). Ids on a GPU are not checked. On a CPU the same steps run without a
    graph.

    The model's weights must stay at their addresses; new values written in place take effect. Decoders that run at the
    same time must use one CUDA stream, since torch's matrix products share their workspace.

    Args:
        model: The model.
        state: The state to continue from, such as LMOutput.state of a prefill; it is not changed.
        room: How many more tokens to allocate memory for. When they are used up, room doubles, the caches are copied
            and the graph is captured again.
        graph: Whether a GPU replays a graph; False launches the kernels of every step one by one, as for debugging.
        state_dtype: "bfloat16" keeps memories in half the bytes, where a layer's can be; None: as the state has them.
        state_rounding: How bfloat16 memories are rounded: "nearest", or "stochastic" with positions as seeds.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        model: HybridLM,
        state: ModelState,
        room: int,
        *,
        graph: bool = True,
        state_dtype: str | torch.dtype | None = None,
        state_rounding: str = NEAREST,
    ) -> None:
        if not isinstance(state, ModelState):
            raise TypeError(f"state must be a ModelState, got {type(state).__name__}; pass LMOutput.state of a prefill")
        check_state(state, model.layers, state.rows)
        if isinstance(room, bool) or not isinstance(room, int) or room < 1:
            raise ValueError(f"room must be an int of at least 1, the tokens to make room for, got {room!r}")
        check_flag("graph", graph)
        if model.context is not None:
            raise ValueError("model must not be under context parallelism to decode; use a copy on one device")
        self._format = StateFormat.of(state_dtype, state_rounding)
        if state_dtype is not None:
            state = model.convert_state(state, state_dtype)
        self.model, self.rows = model, state.rows
        device = model.device
        # Keep the weights alive even if the model is deleted: the graph reads them at their addresses.
        self._weights = [x.detach() for x in (*model.parameters(), *model.buffers())]
        self._autocast = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        self._even = isinstance(state.lengths, int)
        self._longest = int(state.lengths if isinstance(state.lengths, int) else state.lengths.max())
        self._room = room
        self._wants_graph = graph and model.ranks is None  # sums over ranks are not recorded
        self._ids = torch.zeros(self.rows, 1, dtype=torch.int64, device=device)
        self._lengths = torch.empty(self.rows, dtype=torch.int64, device=device)
        if isinstance(state.lengths, int):
            self._lengths.fill_(state.lengths)
        else:
            self._lengths.copy_(state.lengths)
        self._memories: dict[int, dict[str, Tensor]] = {}
        self._caches: dict[int, dict[str, Tensor]] = {}
        for n, layer in enumerate(state.layers):
            if isinstance(layer, Memory):
                kept = {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in layer.tensors.items()}
                self._memories[n] = {name: x.copy_(layer[name]) for name, x in kept.items()}
            else:
                self._caches[n] = {name: layer[name][:, : self._longest].to(device) for name in layer.names}
        self._capacity = self._window = 0
        self._graph: Graph | None = None
        self._widen()

    def __call__(self, ids: Tensor) -> Tensor:
        """Read one token of every row.

        Args:
            ids: Tokens `b 1`.

        Returns:
            Logits `b 1 vocab` in a new tensor, which later calls do not overwrite.
        """
        check_ids(ids, self.model.config.vocab_size)
        if ids.shape != (self.rows, 1):
            raise ValueError(f"ids must have shape (b, 1) = {(self.rows, 1)}, got {tuple(ids.shape)}")
        if self._caches and self._longest == self._window:
            self._widen()
        self._ids.copy_(ids)
        (logits,) = self._step() if self._graph is None else self._graph.replay()
        self._longest += 1
        return logits

    @property
    def captured(self) -> bool:
        """Whether the next call replays a CUDA graph."""
        return self._graph is not None

    @property
    def state(self) -> ModelState:
        """The state after the last call, as a copy that later calls do not change."""
        lengths = self._longest if self._even else self._lengths.clone()
        layers: list[Memory | TokenCache] = []
        for n in range(len(self.model.layers)):
            if n in self._memories:
                layers.append(Memory({name: x.clone() for name, x in self._memories[n].items()}))
            else:
                kept = {name: x[:, : self._longest].clone() for name, x in self._caches[n].items()}
                layers.append(TokenCache(kept, lengths))
        return ModelState(tuple(layers), lengths)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _step(self) -> tuple[Tensor, ...]:
        """Read self._ids and update memories and caches in place, without waiting for the device."""
        state = state_in_place(self._memories, self._caches, self._window, self._lengths, format=self._format)
        read = read_in_place(self.model, self._ids, state, self._autocast)
        write_back(self._memories, read.state)
        self._lengths += 1
        return (read.logits,)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _widen(self) -> None:
        """Widen the window that attention reads by at least one token, allocate memory if needed, and capture again."""
        self._graph = None  # frees the memory of the old graph
        needed = self._longest + 1
        if needed > self._capacity:
            if self._capacity:
                self._room *= 2
            self._capacity = round_up(self._longest + self._room, 64)
            for tensors in self._caches.values():
                for name, old in tensors.items():  # zeros, since masked entries must be finite
                    tensors[name] = old.new_zeros(self.rows, self._capacity, *old.shape[2:])
                    tensors[name][:, : self._longest] = old[:, : self._longest]
        # The window grows by at least an eighth, so that long sequences are not captured too often.
        self._window = min(self._capacity, round_up(needed + needed // 8, in_place.WINDOW_STEP))
        if self._ids.is_cuda and self._wants_graph:
            # Caches need not be put back after a trial run: steps only write after the last token.
            changing = [self._lengths, *(x for memory in self._memories.values() for x in memory.values())]
            self._graph = capture(self._step, changing, self._ids.device)
