"""The hybrid language model: embedding, blocks of mixer and feed-forward, norm, head.

x = x + mixer(norm(x))      x = x + feed(norm(x))
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate import checks
from lineate.layers import Carried, LinearMixer, ShortConvolution, TensorSpec
from lineate.layers.formats import StateFormat, convert
from lineate.layers.projection import multiply, project
from lineate.models.block import Block, make_mixer
from lineate.models.checks import check_context, check_ids, check_labels, check_mask, check_state
from lineate.models.config import HybridConfig
from lineate.models.files.saving import check_described
from lineate.models.loss import check_targets, head_loss, loss_sum, shared_head_loss
from lineate.models.memoryless import without_memory
from lineate.models.prediction import PredictionHead
from lineate.models.pretrained import SHARD_BYTES, load_pretrained, write_pretrained
from lineate.models.reading import piece_of, read_pieces
from lineate.models.sampling_defaults import SamplingDefaults
from lineate.models.scaling import make_embedding, make_last_norm
from lineate.models.sharding import SharedEmbedding, gather_logits, rank_config, set_ranks, vocabulary_range
from lineate.models.state import ModelState
from lineate.models.stepping import Ends, NativeSteps
from lineate.models.trail import ModelTrail, TrailOutput
from lineate.native.low_precision_matmul import linear
from lineate.parallel.context.segments import Bounds, Context, Segment
from lineate.parallel.tensor.ranks import Ranks

if TYPE_CHECKING:
    from lineate.generation.generated import Generation

__all__ = ["HybridLM", "LMOutput", "check_saveable", "empty_model", "make_mixer", "next_token_loss", "save_pretrained"]


class LMOutput(NamedTuple):
    """The result of a language model.

    Args:
        logits: `b t vocab`.
        state: the model's state after the last token, to continue from.
        loss: mean cross-entropy of the next tokens, if labels were given, else None.
    """

    logits: Tensor
    state: ModelState
    loss: Tensor | None


def drawn_mixer(config: HybridConfig, letter: str, layer: int | None = None) -> nn.Module:
    """Make the mixer of a pattern's letter, with weights as in a new model; layer: as in make_mixer."""
    mixer = make_mixer(config, letter, layer)
    draw_weights(mixer, config.initializer_range)
    return mixer


@torch.no_grad()
def draw_weights(model: nn.Module, deviation: float) -> None:
    """Draw the weights that the layers do not draw themselves, except those on the meta device."""
    for module in model.modules():
        for name, x in module.named_parameters(recurse=False):
            if isinstance(module, ShortConvolution) or x.is_meta:
                continue
            if x.dim() >= 2 and name in ("weight", "experts_gate_up", "experts_down"):
                x.normal_(0, deviation)
            elif name == "bias":
                x.zero_()
        if isinstance(module, LinearMixer) and hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]


class HybridLM(nn.Module):
    """A language model whose layers have the mixers of config.pattern.

        out = model(input_ids)                        # LMOutput(logits, state, loss)
        out = model(next_ids, state=out.state)        # continue
        out = model(packed_ids, cu_seqlens=bounds)    # b = 1: sequences that never see each other
        out = model(padded_ids, attention_mask=mask)  # padding, left or right, is left out

    >>> model = HybridLM.from_pretrained("folder or hub name")

    Args:
        config: sizes of its parts, and which layer has which mixer.
        ranks: the ranks that share the model, each with some heads; None: this process has all of it.
    """

    context: Context | None = None
    """If set, every call has this rank's segment of sequences that are split over ranks (docs/scaling.md)."""
    ranks: Ranks | None = None
    """If set, this is one rank's share of the model; all ranks make the same calls (models/sharding.py)."""
    sampling_defaults: SamplingDefaults | None = None
    """The sampling options that the checkpoint names, which `generate`, chat and the server begin with."""

    def __init__(self, config: HybridConfig, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.config = config
        if ranks is not None and ranks.size > 1:
            own = rank_config(config, ranks.size, ranks.rank)
            self.embed: nn.Embedding = SharedEmbedding(config, ranks)
        else:
            own, ranks = config, None
            self.embed = make_embedding(config)
        self.layers = nn.ModuleList(Block(own, layer) for layer in range(config.n_layers))
        self.norm = make_last_norm(config)
        self.head = None if config.tie_embeddings else nn.Linear(config.hidden_size, own.vocab_size, bias=False)
        self.prediction = PredictionHead(own) if config.prediction else None
        """Predicts tokens after the next (models/prediction.py), if the checkpoint has the weights."""
        self._steps = NativeSteps()
        if ranks is not None:
            set_ranks(self, ranks)
        if self.embed.weight.device.type != "meta":
            draw_weights(self, config.initializer_range)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_steps", NativeSteps())  # a model that 0.1.0 has pickled whole has none

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a text: those of config.json and generation_config.json; none for a new model."""
        return frozenset(self.config.eos_token_ids)

    def reset_parameters(self) -> None:
        """Draw all weights as in a new model, for one made on the meta device; the same seed gives the same bits.

        Weights are normal with deviation config.initializer_range; the layers draw decays, norms and convolutions.
        """

        def reset(module: nn.Module) -> None:
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

        self.apply(reset)  # children before their parent, in the order of construction
        draw_weights(self, self.config.initializer_range)

    @property
    def state_spec(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """Every layer's state: name, shape and dtype of its tensors, for one row."""
        return tuple(block.state_specs for block in self.layers)  # type: ignore[misc]

    def state_nbytes(self, rows: int = 1, tokens: int = 0, state_dtype: str | torch.dtype | None = None) -> int:
        """Return the bytes of the state of `rows` rows after `tokens` tokens; see convert_state."""
        specs = StateFormat.of(state_dtype).specs(self.state_spec)
        return rows * sum(spec.nbytes(tokens) for layer in specs for spec in layer)

    def convert_state(self, state: ModelState, state_dtype: str | torch.dtype | None = None) -> ModelState:
        """Return a state whose memories are kept in a dtype; what continues it keeps them so, and computes in float32.

        Args:
            state: LMOutput.state of an earlier call; it is not changed.
            state_dtype: "bfloat16" takes half the bytes where a layer's memory can be kept so, and rounds it to the
                nearest after every call; "float32" or None: as the layers compute it.
        """
        check_state(state, self.layers, state.rows)
        specs = StateFormat.of(state_dtype).specs(self.state_spec)
        return ModelState(tuple(map(convert, state.layers, specs)), state.lengths)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def forward(
        self,
        input_ids: Tensor,
        state: ModelState | None = None,
        cu_seqlens: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        last_only: bool = False,
        continues: bool | None = None,
    ) -> LMOutput:
        """Read tokens, and return the logits of the token that follows each.

        Args:
            input_ids: `b t`; with cu_seqlens `1 t`.
            state: LMOutput.state of an earlier call, to continue its sequences; None: they begin here.
            cu_seqlens: where sequences packed into one row begin and end, `n_seqs + 1`.
            labels: `b t`, the tokens themselves, -100 where none is to be learnt; each is predicted from those before.
            attention_mask: `b t`, 1, and 0 for padding before or after a row's tokens; logits there are 0.
            last_only: whether only the last token of every row has logits, `b 1 vocab`, which is all that generating
                needs; of packed sequences `1 n_seqs vocab`, where those of an empty one are 0. Long prompts are then
                read in pieces on a GPU, without gradients (models/reading.py): memory grows with the state alone.
            continues: whether the first packed sequence began on an earlier rank, under context parallelism.
        """
        if cu_seqlens is None and labels is None and attention_mask is None and not continues:
            stepped = self._step(input_ids, state)
            if stepped is not None:
                return stepped
        check_ids(input_ids, self.config.vocab_size)
        checks.check_cu_seqlens(cu_seqlens, *input_ids.shape)
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.long()
        if last_only and labels is not None:
            raise ValueError("last_only=True makes no logits to compare labels with; pass one of the two")
        check_context(self.context, labels, attention_mask, continues)
        if attention_mask is not None:
            if cu_seqlens is not None:
                raise ValueError(
                    "attention_mask and cu_seqlens cannot be used together; packed sequences have no padding"
                )
            return self._padded(input_ids, state, labels, attention_mask, last_only)
        piece = None
        if last_only and self.context is None:
            others = [x for x in (self.embed, self.head) if x is not None]
            piece = piece_of(input_ids, self.layers, others, alone=self.ranks is None)
        if piece is not None and (cu_seqlens is None or cu_seqlens.diff().all()):
            check_state(state, self.layers, input_ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
            x, state = read_pieces(self._read, input_ids, state, cu_seqlens, piece)
        else:
            x, state = self._read(input_ids, state, cu_seqlens, continues)
            if last_only:
                x = x[:, -1:] if cu_seqlens is None else _last_of_each(x, cu_seqlens)
        logits = self.logits(x)
        return LMOutput(logits, state, None if labels is None else next_token_loss(logits, labels, cu_seqlens))

    def _step(self, input_ids: Tensor, state: ModelState | None) -> LMOutput | None:
        """Run one token of every row in C; None where that cannot be done, or arguments are wrong."""
        if not isinstance(state, ModelState) or not isinstance(input_ids, Tensor) or not self.is_plain:
            return None
        stepped = self._steps.read_tokens(self.ends, self.layers, input_ids, state.layers)
        return None if stepped is None else LMOutput(stepped[0], ModelState(tuple(stepped[1]), state.lengths + 1), None)

    @property
    def carries(self) -> bool:
        """Whether layers hand something on to later ones in addition to the residual stream."""
        return self.config.carries

    @property
    def ends(self) -> Ends:
        """The modules around the blocks."""
        return Ends(self.embed, self.norm, self.head)

    @property
    def is_plain(self) -> bool:
        """Whether forward runs the code of this class on one device: no subclass, no method set on the model."""
        return (
            type(self) is HybridLM
            and self.context is None
            and self.ranks is None
            and _METHODS.isdisjoint(self.__dict__)
            and self.embed.num_embeddings == self.config.vocab_size
        )

    def loss_sum(
        self, input_ids: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, continues: bool | None = None
    ) -> Tensor:
        """Return the sum of -log p(target) in float32, for training; the logits are made a few at a time.

        Args:
            input_ids: `b t`; with cu_seqlens `1 t`.
            targets: `b t`, what follows each token, already shifted; -100 where nothing is to be learnt.
            cu_seqlens: where sequences packed into one row begin and end, `n_seqs + 1`.
            continues: whether the first packed sequence began on an earlier rank, under context parallelism.
        """
        check_ids(input_ids, self.config.vocab_size)
        checks.check_cu_seqlens(cu_seqlens, *input_ids.shape)
        check_context(self.context, None, None, continues)
        x, _ = self._read(input_ids, None, None if cu_seqlens is None else cu_seqlens.long(), continues)
        weight = self.embed.weight if self.head is None else self.head.weight
        if self.ranks is None:
            return head_loss(x, weight, targets)
        first, _ = vocabulary_range(self.config.vocab_size, self.ranks.rank, self.ranks.size)
        check_targets(targets, x, self.config.vocab_size)
        return shared_head_loss(x, weight, targets, first, self.ranks)

    def _read(
        self, input_ids: Tensor, state: ModelState | None, cu_seqlens: Tensor | None, continues: bool | None = None
    ) -> tuple[Tensor, ModelState]:
        """Return the input of the head for these tokens."""
        rows = input_ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        check_state(state, self.layers, rows)
        bounds: Bounds = cu_seqlens
        if self.context is not None:
            bounds = self.context.segment(input_ids, cu_seqlens, continues, 0 if state is None else state.lengths)
        return self.hidden(self.embed(input_ids), state, bounds)

    def hidden(
        self, x: Tensor, state: ModelState | None = None, cu_seqlens: Bounds = None
    ) -> tuple[Tensor, ModelState]:
        """Return the input of the head, from embeddings x `b t hidden`."""
        if state is not None and cu_seqlens is None and x.shape[1] == 1 and x.is_cpu:
            stepped = self._steps.read(self.ends, self.layers, x, state.layers)
            if stepped is not None:
                return self.norm(stepped[0]), ModelState(tuple(stepped[1]), state.lengths + 1)
        new, carried = [], (Carried(),) if self.carries else ()
        for n, block in enumerate(self.layers):
            x, layer = block(x, None if state is None else state.layers[n], cu_seqlens, *carried)
            new.append(layer)
        seen = 0 if state is None else state.lengths
        if isinstance(cu_seqlens, Segment):
            return self.norm(x), ModelState(tuple(new), cu_seqlens.lengths_after(seen))
        more = x.shape[1] if cu_seqlens is None else cu_seqlens.diff()
        return self.norm(x), ModelState(tuple(new), seen + more)

    def generate(
        self,
        ids: Tensor | Sequence[Tensor | Sequence[int]],
        max_new_tokens: int = 256,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | Sequence[int] = 0,
        stop: Collection[int] | None = None,
        state: ModelState | None = None,
        attention_mask: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> "Generation":
        """Continue sequences, as lineate.generation.generate does, which has all details.

            rows = model.generate([[1, 2, 3], [4, 5]], 20).run()      # the new tokens of each row
            for token in model.generate(ids, 20): ...                 # or the next token of every row, `b`

        Options of None are those that the checkpoint names (sampling_defaults); what it does not name is neutral.

        Args:
            ids: prompts `b t`, or a sequence of prompts of any lengths.
            max_new_tokens: the most tokens of a row.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draw only from the k likeliest tokens; 0 for all.
            top_p: draw only from the likeliest tokens whose probabilities together reach p.
            min_p: draw only from tokens with at least this part of the likeliest token's probability.
            repetition_penalty: above 1, tokens that occurred become less likely.
            seed: seed of the draws, of all rows or of each.
            stop: tokens that end a row; None for end_tokens, () for none.
            state: what the model has read before ids, such as Generation.state.
            attention_mask: `b t`, 1, and 0 for padding before or after a row's tokens.
            batch_invariant: whether a row has the same logits, to the bit, alone and among any other rows.
        """
        from lineate.generation.sampling import generate

        return generate(
            self, ids, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed, stop=stop, state=state, attention_mask=attention_mask,
            batch_invariant=batch_invariant,
        )  # fmt: skip

    @torch.no_grad()
    def trail(self, input_ids: Tensor, state: ModelState, keep: str = "auto") -> TrailOutput:
        """Read guessed tokens in one pass; every row then keeps as many of them as it likes. There are no gradients.

            out = model.trail(guesses, state)       # logits as those of single steps, within rounding
            state = out.trail.after(counts)         # row r after its first counts[r] guesses; nothing is read again

        Args:
            input_ids: `b t`, guesses for the tokens that follow.
            state: LMOutput.state of an earlier call; it is not changed.
            keep: what linear rules keep, "auto", "states" or "inputs": see lineate.layers.trail.trail.
        """
        check_ids(input_ids, self.config.vocab_size)
        if not isinstance(state, ModelState):
            raise TypeError(f"state must be a ModelState, got {type(state).__name__}; pass LMOutput.state of a prefill")
        check_state(state, self.layers, input_ids.shape[0])
        if self.context is not None:
            raise ValueError("model must not be under context parallelism to guess tokens; use a copy on one device")
        x, trails, carried = self.embed(input_ids), [], Carried() if self.carries else None
        for block, layer in zip(self.layers, state.layers, strict=True):
            x, trailed = block.trail(x, layer, keep, carried)  # type: ignore[operator]
            trails.append(trailed)
        x = self.norm(x)
        return TrailOutput(self.logits(x), ModelTrail(tuple(trails), state.lengths, *input_ids.shape), x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of what the head reads."""
        if self.ranks is not None:
            x = self.ranks.enter(x)
            own = linear(x, self.embed.weight) if self.head is None else project(self.head, x)
            return gather_logits(own, self.config.vocab_size, self.ranks)
        if self.head is not None:
            return project(self.head, x)
        if self.embed.weight.is_meta and not x.is_meta:  # torch would return a meta tensor, which has no values
            raise RuntimeError("embed, which is the head too, must not be offloaded; keep it on a device")
        return multiply(x, self.embed.weight)

    def _padded(
        self,
        input_ids: Tensor,
        state: ModelState | None,
        labels: Tensor | None,
        attention_mask: Tensor,
        last_only: bool,
    ) -> LMOutput:
        """Run the model on rows without their padding, as packed sequences."""
        kept = check_mask(attention_mask, input_ids)
        if kept is None:
            return self(input_ids, state, labels=labels, last_only=last_only)
        if labels is not None:
            check_labels(labels, input_ids.shape)
        lengths = kept.sum(1)
        bounds = F.pad(lengths.cumsum(0), (1, 0))
        packed = self(input_ids[kept][None], state, bounds, last_only=last_only)
        if last_only:
            return LMOutput(packed.logits.transpose(0, 1), packed.state, None)
        logits = packed.logits.new_zeros(*input_ids.shape, packed.logits.shape[-1])
        logits = logits.masked_scatter(kept[..., None], packed.logits[0])
        loss = None if labels is None else next_token_loss(packed.logits, labels[kept][None], bounds)
        return LMOutput(logits, packed.state, loss)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        progress: bool = True,
        prediction: bool = True,
        weights: str | None = None,
        ranks: Ranks | None = None,
        sampling_defaults: bool = True,
    ) -> "HybridLM":
        """Make a model in eval mode from a checkpoint.

        Decays (A_log, dt_bias, past_A_log, past_dt_bias, lower_bound) and router_bias are float32 whatever the dtype
        is; model.to(dtype) would round them too.

        Args:
            name: a folder with config.json and safetensors, a GGUF file or a folder with one, or a name on the Hugging
                Face hub.
            dtype: a torch.dtype or its name, such as "bfloat16" or "bf16"; None or "auto": as stored.
            device: where the weights are loaded to.
            progress: whether a bar is shown while they are read, if there is a terminal.
            prediction: whether the weights that predict further tokens are read too, if there are any.
            weights: a format that large weights are kept in, "bfloat16", "float16", "int8", "int4" or "fp8"
                (docs/quantised-weights.md); dtype is then that of all others, by default float32 on a CPU and bfloat16
                on a GPU. None: as stored.
            ranks: the ranks that share the model; this one reads its share alone. None: all of it.
            sampling_defaults: whether the sampling options of generation_config.json, or of a GGUF file's metadata,
                become `model.sampling_defaults`.
        """
        return load_pretrained(HybridLM, name, dtype, device, progress, prediction, weights, ranks, sampling_defaults)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, which from_pretrained reads back to the same bits.

        A model that was loaded from a folder with a tokenizer brings it along: its files are copied unchanged, and so
        is generation_config.json, unless `sampling_defaults` has been changed since: it is then written into that file.
        The configuration must describe the model: a mixer of another class, or a setting changed after construction,
        is refused.

        Args:
            folder: where they are written; it is made if need be.
        """
        save_pretrained(self, folder)


_METHODS = frozenset(("hidden", "logits"))
"""What somebody may have set on a model, and a step in C would go around."""


def empty_model(config: HybridConfig) -> HybridLM:
    """Make a model on the meta device, without memory for its tensors."""
    return without_memory(HybridLM, config)


def save_pretrained(model: HybridLM, folder: str | Path, max_shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json and safetensors; raise if the configuration does not describe the model."""
    check_saveable(model)
    write_pretrained(model, model.config, model.dtype, folder, max_shard_bytes)


def check_saveable(model: HybridLM) -> None:
    """Raise if its configuration and its tensors would not reproduce this model."""
    if model.ranks is not None:
        raise ValueError(
            f"model must be whole to be saved, got the share of rank {model.ranks.rank} of {model.ranks.size}; gather "
            "it first with lineate.models.sharding.whole_model"
        )
    check_described(model, empty_model(model.config))


def _last_of_each(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return each sequence's last token, 0 for empty ones: x `1 t hidden` -> `1 n_seqs hidden`."""
    last = x[:, (cu_seqlens[1:] - 1).clamp(min=0)]
    return last * (cu_seqlens.diff() > 0)[None, :, None]


def next_token_loss(logits: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the mean of -log p(label_{t+1} | ..t) in float32; no sequence's first token is predicted from another."""
    check_labels(labels, logits.shape[:2])
    labels = labels.long()
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1][cu_seqlens.diff() > 0]
        labels = labels.index_fill(1, starts.long(), -100)
    total, count = loss_sum(logits[:, :-1], labels[:, 1:], "labels")
    return total / count.clamp(min=1)
