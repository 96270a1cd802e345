"""The allocated bytes of a model: weights, and the state of each sequence.

Nothing is estimated: the model is made without memory for its tensors (on torch's meta device), and its own parameters
and state_spec are added up.

    state(batch, tokens) = batch * (memory + conv + tokens * cache_per_token)        total = weights + state
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor, nn

from lineate.layers import MixerKind, MixtureOfExperts, TensorSpec, kind_of
from lineate.layers.state import INPUTS
from lineate.models.config import HybridConfig
from lineate.models.hybrid import HybridLM, empty_model
from lineate.models.inspect import idle_parameters
from lineate.models.loss import AT_ONCE, most_bytes
from lineate.models.nbytes import weight_bytes
from lineate.planning.activations import ends, saved_by
from lineate.planning.models import Model, check_size, dtype_of
from lineate.torch_ops.dtypes import full_name


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer; all but the weights for one sequence."""

    index: int
    """Which layer it is, from 0."""
    letter: str
    """The letter of its mixer."""
    rule: str
    """Its rule in words."""
    weights: int
    """Bytes of the whole block: mixer, feed-forward, norms."""
    feed: int
    """Bytes of the feed-forward, which are included in the weights."""
    memory: int
    """Recurrent state; of LaCT also its window's keys and values, which are bounded."""
    computed: int
    """The same bytes while the layer computes, in float32."""
    conv: int
    """Last inputs of the short convolution, or of token shifts."""
    cache_per_token: int
    """Bytes by which the cache grows with each token; 0 where nothing grows."""
    cache: str
    """"keys and values", "latent", or "" where nothing grows."""

    def state(self, tokens: int) -> int:
        """Return the bytes of one sequence after `tokens` tokens."""
        return self.memory + self.conv + tokens * self.cache_per_token


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a model; memory, conv and cache_per_token for one sequence."""

    model: Model
    """The model that is planned."""
    layers: tuple[LayerMemory, ...]
    """Bytes of each layer."""
    embedding: int
    """Bytes of the embedding."""
    head: int
    """Bytes of the head; 0 if it is the embedding (tied)."""
    norm: int
    """Bytes of the norm before the head; the other norms are in their layers."""
    parameters: int
    """The number of parameters, not bytes; a tied embedding counts once."""
    active_parameters: int
    """The number of parameters that one token is multiplied with; of the experts, only those it is routed to."""
    state_dtype: torch.dtype
    """Dtype of the recurrent state."""
    conv_dtype: torch.dtype
    """Dtype of the convolution state."""
    cache_dtype: torch.dtype
    """Dtype of the cache."""
    prediction: int = 0
    """Bytes of the head of multi-token prediction, which only guessing runs; 0 if there is none."""

    @property
    def weights(self) -> int:
        return self.embedding + self.head + self.norm + self.prediction + sum(layer.weights for layer in self.layers)

    @property
    def memory(self) -> int:
        return sum(layer.memory for layer in self.layers)

    @property
    def conv(self) -> int:
        return sum(layer.conv for layer in self.layers)

    @property
    def cache_per_token(self) -> int:
        return sum(layer.cache_per_token for layer in self.layers)

    def cache(self, batch: int, tokens: int, kind: str | None = None) -> int:
        """Return the bytes of `batch` sequences of `tokens` tokens; kind: count only layers with this kind of cache."""
        check_size("batch", batch, 0)
        check_size("tokens", tokens, 0)
        return batch * tokens * sum(x.cache_per_token for x in self.layers if kind in (None, x.cache))

    def state(self, batch: int, tokens: int) -> int:
        """Return the bytes of all that is not weights: memories, convolutions and caches."""
        return batch * (self.memory + self.conv) + self.cache(batch, tokens)

    def total(self, batch: int, tokens: int) -> int:
        """Return the bytes of weights and state."""
        return self.weights + self.state(batch, tokens)


def empty_of(config: HybridConfig, dtype: torch.dtype = torch.float32) -> HybridLM:
    """Return a model without memory for its tensors, which is kept and must not be changed."""
    return _empty(config, tuple(config.mixer_kinds()), dtype)


@lru_cache(8)
def _empty(config: HybridConfig, kinds: tuple[MixerKind, ...], dtype: torch.dtype) -> HybridLM:
    """kinds: the rows of its mixers, of which a user's own may be registered again."""
    return empty_model(config).to(dtype)


@lru_cache(64)
def plan_memory(
    model: Model, state_dtype: str = "float32", conv_dtype: str | None = None, cache_dtype: str | None = None
) -> MemoryPlan:
    """Return the bytes of a model, equal to what HybridLM.from_pretrained and a forward pass allocate.

    A serving engine may keep its state in other dtypes: with conv_dtype="float32" the convolution state equals the one
    that servers log. The tokens in a cache are counted, not the room that its buffer has for more.

    Args:
        model: The model to plan.
        state_dtype: Dtype of the recurrent state, which layers compute in float32 whatever the model's dtype is;
            "bfloat16" applies to the memories that `lineate serve --state-dtype bfloat16` keeps so; others are float32.
        conv_dtype: Dtype of the convolution state; None is the model's.
        cache_dtype: Dtype of the cache; None is the model's.
    """
    dtypes = _Dtypes(
        dtype_of(state_dtype, "state_dtype"),
        dtype_of(conv_dtype or model.dtype, "conv_dtype"),
        dtype_of(cache_dtype or model.dtype, "cache_dtype"),
    )
    computed = replace(dtypes, state=torch.float32)
    empty = empty_of(model.config, torch.bfloat16)  # bfloat16 stands for the model's dtype in its state
    dtype, form = model.dtype, model.formats
    layers = []
    idle = 0
    for index, (block, specs) in enumerate(zip(empty.layers, empty.state_spec, strict=True)):
        kind = kind_of(model.config.letters[index])
        grows = [spec for spec in specs if "t" in spec.shape]
        fixed = [spec for spec in specs if spec not in grows and spec.name not in INPUTS]
        layers.append(
            LayerMemory(
                index=index,
                letter=kind.letter,
                rule=kind.label,
                weights=weight_bytes(block, dtype, form, f"layers.{index}."),
                feed=weight_bytes(block.feed, dtype, form, f"layers.{index}.feed.")  # type: ignore[arg-type]
                if block.feed is not None
                else 0,
                memory=sum(map(dtypes.nbytes, fixed)),
                computed=sum(map(computed.nbytes, fixed)),
                conv=sum(dtypes.nbytes(spec) for spec in specs if spec.name in INPUTS),
                cache_per_token=sum(dtypes.nbytes(spec, 1) for spec in grows),
                cache=kind.cache,
            )
        )
        idle += idle_parameters(block)
    parameters = sum(x.numel() for x in empty.parameters())
    if empty.prediction is not None:
        idle += sum(x.numel() for x in empty.prediction.parameters())
    return MemoryPlan(
        model=model,
        layers=tuple(layers),
        embedding=weight_bytes(empty.embed, dtype, form, "embed."),
        head=0 if empty.head is None else weight_bytes(empty.head, dtype, form, "head."),
        norm=weight_bytes(empty.norm, dtype),
        parameters=parameters,
        active_parameters=parameters - idle,
        state_dtype=dtypes.state,
        conv_dtype=dtypes.conv,
        cache_dtype=dtypes.cache,
        prediction=0 if empty.prediction is None else weight_bytes(empty.prediction, dtype, form, "prediction."),
    )


@dataclass(frozen=True)
class _Dtypes:
    """The dtype of each part of a state."""

    state: torch.dtype
    conv: torch.dtype
    cache: torch.dtype

    def nbytes(self, spec: TensorSpec, tokens: int = 0) -> int:
        """Return the bytes of one tensor of a model in bfloat16, were it in these dtypes; counters stay integers."""
        dtype = spec.dtype
        if spec.name in INPUTS:
            dtype = self.conv
        elif dtype == torch.bfloat16:
            dtype = self.cache
        elif dtype.is_floating_point:
            kept = self.state is not torch.bfloat16 or torch.bfloat16 in spec.dtypes
            dtype = self.state if kept else dtype
        return prod(tokens if size == "t" else int(size) for size in spec.shape) * dtype.itemsize


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one step of training on one device."""

    parameters: int
    """Parameters and buffers, in float32."""
    gradients: int
    """Gradients, in float32."""
    optimizer: int
    """The optimiser state of each parameter, in float32."""
    casts: int
    """Copies of the weights in bfloat16 that autocast keeps until the backward; with recomputation, until it ends."""
    activations: int
    """The tensors of the blocks that autograd saves for the backward."""
    activations_recomputed: int
    """The same if every block keeps only its input and is recomputed: inputs, and one whole block."""
    logits: int
    """Logits, their log-probabilities and gradients, at most 2^26 at a time (models/loss.py)."""
    by_layer: tuple[int, ...]
    """Activations of each layer."""

    def total(self, recompute: bool = False) -> int:
        kept = self.activations_recomputed if recompute else self.activations
        return self.parameters + self.gradients + self.optimizer + self.casts + kept + self.logits


def plan_training(
    model: Model, tokens_per_step: int, dtype: str = "bfloat16", optimizer: str = "adamw"
) -> TrainingMemory:
    """Return the bytes of a step on `tokens_per_step` tokens (batch times length).

    Parameters, gradients and optimiser are float32, as `lineate train` has them. Activations are counted in
    planning/activations.py: the tensors that autograd saves, each storage once.

    Args:
        model: The model to train.
        tokens_per_step: Tokens of a step.
        dtype: "float32", or "bfloat16" for products under autocast.
        optimizer: "adamw" keeps two numbers a parameter, "muon" one for the matrices inside the blocks.
    """
    check_size("tokens_per_step", tokens_per_step)
    dtype = full_name(dtype)
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'float32' or 'bfloat16' (autocast), got {dtype!r}")
    if optimizer not in ("adamw", "muon"):
        raise ValueError(f"optimizer must be 'adamw' or 'muon', got {optimizer!r}")
    config, half = replace(model.config, prediction=False), dtype == "bfloat16"  # `lineate train` leaves it out
    empty = empty_of(config)
    everything = {name: x.numel() for name, x in empty.named_parameters()}
    matrices = _matrices(empty)
    inside = {name: n for name, n in matrices.items() if name.startswith("layers.")}
    moments = inside if optimizer == "muon" else {}
    parameters = sum(everything.values())
    steps = 4 * (len(everything) - len(moments))  # AdamW counts its steps, in float32, for each tensor
    saved = [saved_by(config, layer, half) for layer in range(config.n_layers)]
    by_layer = tuple(round(tokens_per_step * x.total) for x in saved)
    around = tokens_per_step * ends(config, half)
    inputs = tokens_per_step * sum(x.residual for x in saved)
    return TrainingMemory(
        parameters=4 * parameters + sum(x.nbytes for x in empty.buffers()),
        gradients=4 * parameters,
        optimizer=8 * parameters - 4 * sum(moments.values()) + steps,
        casts=2 * sum(matrices.values()) if half else 0,
        activations=sum(by_layer) + around,
        activations_recomputed=inputs + around + round(tokens_per_step * max(x.total - x.residual for x in saved)),
        logits=_logits(config, tokens_per_step, model.split.tensor > 1),
        by_layer=by_layer,
    )


def _logits(config: HybridConfig, tokens: int, shared: bool) -> int:
    """Return the bytes of logits and of tensors derived from them; ranks that share a head compute them in pieces."""
    vocab, hidden = config.vocab_size, config.hidden_size
    if not shared:
        return most_bytes(tokens, vocab, hidden)
    return 12 * vocab * min(tokens, max(1, AT_ONCE // vocab)) + 4 * hidden * (tokens + vocab)


def _matrices(model: HybridLM) -> dict[str, int]:
    """Count the weights that products read: linear layers, experts, and the head (or the embedding for it)."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            found |= {f"{prefix}.{name}": getattr(module, name) for name in ("experts_gate_up", "experts_down")}
        elif isinstance(module, nn.Linear):
            found[f"{prefix}.weight"] = module.weight
    if model.head is None:
        found["embed.weight"] = model.embed.weight
    return {name: x.numel() for name, x in found.items() if min(x.shape[-2:]) > 1}
