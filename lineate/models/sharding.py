"""A model divided among ranks (tensor parallelism): some heads, channels and tokens of the vocabulary on each.

    ranks = Ranks(group)                                             # lineate.parallel.tensor.ranks
    model = HybridLM.from_pretrained(folder, ranks=ranks)            # reads this rank's share alone
    model = share_out_model(model, ranks)                            # from a whole model that every rank has

A rank's model is an ordinary one of `rank_config`, so its weights and states have the bytes of that configuration. All
ranks read the same tokens and get the same logits, to the bit. After a backward, gradients of parameters that several
ranks hold are partial sums: `sum_shared_gradients` adds them up.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lineate.layers.registry import MixerKind, kind_of
from lineate.models.config import HybridConfig
from lineate.models.memoryless import without_memory
from lineate.models.scaling import make_norm
from lineate.parallel.tensor.ranks import Ranks
from lineate.parallel.tensor.shards import Cut, share_out

AnyModel = TypeVar("AnyModel", bound=nn.Module)


MOST_ADVISED = 4096
"""The largest number of ranks that messages about an invalid number suggest."""


def rank_config(config: HybridConfig, ranks: int, rank: int = 0) -> HybridConfig:
    """Return the configuration of one rank's share of a model; if it cannot be shared out, say how many ranks can.

    Args:
        config: of the whole model.
        ranks: how many ranks share it.
        rank: whose; only the vocabulary depends on it, if its size does not divide.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"tensor must be a number of ranks, at least 1, got {ranks!r}")
    try:
        return divide_config(config, ranks, rank)
    except ValueError as error:
        # All parts can be divided among this number of ranks, not only this one.
        fewer = next(n for n in range(min(ranks, MOST_ADVISED), 0, -1) if _divides(config, n))
        raise ValueError(f"{error}; use {fewer} rank{'s' if fewer > 1 else ''}") from None


def tensor_sizes(config: HybridConfig, most: int) -> list[int]:
    """Return the numbers of ranks, up to `most`, that can share a model; 1 is always the first."""
    return [ranks for ranks in range(1, most + 1) if _divides(config, ranks)]


def _divides(config: HybridConfig, ranks: int) -> bool:
    try:
        return divide_config(config, ranks) is not None
    except ValueError:
        return False


def divide_config(config: HybridConfig, ranks: int, rank: int = 0) -> HybridConfig:
    """Return the configuration of one rank's share, as rank_config does; an error only says what does not divide.

    Args:
        config: of the whole model.
        ranks: how many ranks share it, at least 1.
        rank: whose.
    """
    if ranks == 1:
        return config
    changed: dict[str, Any] = {}
    own: dict[str, Any] = {}
    kinds = config.mixer_kinds()
    if config.prediction and kind_of("A") not in kinds:
        kinds = [*kinds, kind_of("A")]
    for kind in kinds:
        divided = _divided(kind, config.part(kind), ranks)
        if kind.section is None:
            own[kind.name] = divided
        else:
            changed[kind.section] = divided
    if config.feed is not None:
        changed["feed"] = replace(config.feed, size=share_out("feed.size", config.feed.size, ranks))
    if (experts := config.experts) is not None:
        size, shared = share_out("experts.size", experts.size, ranks), experts.shared_size
        shared = share_out("experts.shared_size", shared, ranks) if shared else 0
        changed["experts"] = replace(experts, size=size, shared_size=shared)
    first, last = vocabulary_range(config.vocab_size, rank, ranks)
    return replace(config, vocab_size=last - first, mixers=config.mixers | own, **changed)


def _divided(kind: MixerKind, config: Any, ranks: int) -> Any:
    if kind.shard is None:
        raise ValueError(
            f"tensor must be 1 for {kind.label} (letter {kind.letter}), which does not say how it is shared out, got "
            f"{ranks} (a shard of its MixerKind would say it)"
        )
    try:
        return kind.shard.divide(config, ranks)
    except ValueError as error:
        raise ValueError(f"{kind.label} (letter {kind.letter}): {error}") from None


def vocabulary_range(vocab: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first and the last + 1 token of a rank; the last rank may have fewer than the others."""
    if vocab < ranks:
        raise ValueError(f"tensor must be at most vocab_size = {vocab}, got {ranks}")
    step = -(-vocab // ranks)
    if step * (ranks - 1) >= vocab:
        step = vocab // ranks  # the last rank has more
        return rank * step, vocab if rank == ranks - 1 else (rank + 1) * step
    return rank * step, min((rank + 1) * step, vocab)


class SharedEmbedding(nn.Embedding):
    """An embedding of which every rank has some tokens; the vectors are summed over the ranks.

    Args:
        config: of the whole model; the summed vectors are scaled or normalised as it says.
        ranks: the ranks.
    """

    def __init__(self, config: HybridConfig, ranks: Ranks) -> None:
        self.first, last = vocabulary_range(config.vocab_size, ranks.rank, ranks.size)
        super().__init__(last - self.first, config.hidden_size)
        self.scale, self.ranks = config.embedding_scale, ranks
        self.norm = make_norm(config) if config.embedding_norm else None

    def forward(self, input: Tensor) -> Tensor:
        own = input - self.first
        there = (own >= 0) & (own < self.num_embeddings)
        x = super().forward(own.where(there, 0)) * there[..., None]
        x = self.ranks.leave(x)
        if self.norm is not None:
            normed: Tensor = self.norm(x)
            return normed
        return x if self.scale == 1 else x * self.scale


def gather_logits(own: Tensor, vocab: int, ranks: Ranks) -> Tensor:
    """Return the logits of all tokens `b t vocab`, from those of this rank's tokens."""
    bounds = (vocabulary_range(vocab, rank, ranks.size) for rank in range(ranks.size))
    return ranks.gather(own, [last - first for first, last in bounds])


def set_ranks(model: nn.Module, ranks: Ranks) -> None:
    """Tell all parts of a rank's model that read it about the ranks."""
    for module in model.modules():
        if hasattr(type(module), "ranks"):
            module.ranks = ranks  # type: ignore[assignment]


def model_cuts(model: nn.Module) -> dict[str, Cut]:
    """Return how the parameters and buffers of a whole HybridLM are shared out; those without a cut are on all ranks.

    The vocabulary is cut by `vocabulary_range`, not by a Cut; see `model_ranges`.

    Args:
        model: the whole model; it may be on the meta device.
    """
    config: HybridConfig = model.config  # type: ignore[assignment]
    blocks: list[tuple[str, str, Any]] = [
        (f"layers.{n}.", letter, block)
        for n, (letter, block) in enumerate(zip(config.letters, model.layers, strict=True))  # type: ignore[arg-type]
    ]
    if model.prediction is not None:
        blocks.append(("prediction.block.", "A", model.prediction.block))  # type: ignore[union-attr]
    cuts: dict[str, Cut] = {}
    for prefix, letter, block in blocks:
        shard = kind_of(letter).shard
        assert shard is not None  # rank_config has raised otherwise
        cuts |= {f"{prefix}mixer.{name}": cut for name, cut in shard.cuts(block.mixer).items()}
        if block.feed is not None:
            cuts |= {f"{prefix}feed.{name}": cut for name, cut in block.feed.cuts().items()}
    return cuts


_KNOWN_CUTS: WeakKeyDictionary[nn.Module, dict[str, Cut]] = WeakKeyDictionary()


def _cuts_of(model: nn.Module) -> dict[str, Cut]:
    """Return the cuts by which a rank's model was made."""
    if model not in _KNOWN_CUTS:
        _KNOWN_CUTS[model] = model_cuts(without_memory(type(model), model.config))  # type: ignore[arg-type]
    return _KNOWN_CUTS[model]


class Held(NamedTuple):
    """A rank's share of a parameter.

    Args:
        dim: the dimension that is cut.
        ranges: the first and the last + 1 index of each piece of the whole dimension, one after another.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's share of a whole tensor, as a new one."""
        return torch.cat([whole.narrow(self.dim, first, last - first) for first, last in self.ranges], self.dim)


def model_ranges(model: nn.Module, rank: int, ranks: int) -> dict[str, Held]:
    """Return which part of every parameter a rank holds; parameters that are not named are whole on all ranks.

    Args:
        model: the whole model; it may be on the meta device.
        rank: the place of the rank.
        ranks: how many there are.
    """
    held = {name: Held(cut.dim, tuple(cut.ranges(rank, ranks))) for name, cut in model_cuts(model).items()}
    config: HybridConfig = model.config  # type: ignore[assignment]
    tokens = Held(0, (vocabulary_range(config.vocab_size, rank, ranks),))
    return held | {"embed.weight": tokens} | ({} if model.head is None else {"head.weight": tokens})


def share_out_model(model: AnyModel, ranks: Ranks) -> AnyModel:
    """Return this rank's share of a model that every rank has; its tensors are copies.

    Args:
        model: the whole model.
        ranks: the ranks that share it.
    """
    rank_config(model.config, ranks.size, ranks.rank)  # type: ignore[arg-type]
    held = model_ranges(model, ranks.rank, ranks.size)
    shared = without_memory(partial(type(model), ranks=ranks), model.config)  # type: ignore[arg-type]
    tensors = {name: held[name].of(x) if name in held else x.clone() for name, x in model.state_dict().items()}
    shared.load_state_dict(tensors, assign=True)
    wanted = {name: x.requires_grad for name, x in model.named_parameters()}
    for name, x in shared.named_parameters():
        x.requires_grad_(wanted[name])
    return shared.train(model.training)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Gather the weights of a model that ranks share, on the CPU of their first rank; all ranks must call it.

    Args:
        model: a HybridLM with ranks; with FSDP, all processes of the mesh must call it.

    Returns:
        The whole tensors by name on rank 0 of the ranks, an empty dict on the others.
    """
    ranks: Ranks = model.ranks  # type: ignore[assignment]
    empty = without_memory(type(model), model.config)  # type: ignore[arg-type]
    held = [model_ranges(empty, rank, ranks.size) for rank in range(ranks.size)]
    shapes = {name: x.shape for name, x in empty.state_dict().items()}
    whole: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        x = x.full_tensor() if _is_dtensor(x) else x.detach()
        if name not in held[0]:
            if ranks.rank == 0:
                whole[name] = x.cpu()
            continue
        made = torch.empty(shapes[name], dtype=x.dtype, device="cpu") if ranks.rank == 0 else None
        for rank, part in enumerate(ranks.send_to_first(x, [_shape_of(each[name], shapes[name]) for each in held])):
            assert made is not None
            start, own = 0, held[rank][name]
            for first, last in own.ranges:
                made.narrow(own.dim, first, last - first).copy_(part.narrow(own.dim, start, last - first))
                start += last - first
        if made is not None:
            whole[name] = made
    return whole


def whole_model(model: AnyModel) -> AnyModel | None:
    """Return the whole model on the first of its ranks, and None on the others; all ranks must call it.

    Args:
        model: a HybridLM with ranks.
    """
    state = whole_state(model)
    if model.ranks.rank != 0:  # type: ignore[union-attr]
        return None
    whole = without_memory(type(model), model.config)  # type: ignore[arg-type]
    whole.load_state_dict(state, assign=True)
    return whole.train(model.training)


def _shape_of(held: Held, shape: torch.Size) -> tuple[int, ...]:
    own = list(shape)
    own[held.dim] = sum(last - first for first, last in held.ranges)
    return tuple(own)


class _Shared(NamedTuple):
    """Channels of a parameter that several ranks hold: those of one part of a cut, or a whole parameter."""

    parameter: nn.Parameter
    dim: int
    start: int
    """The first of them in this rank's parameter."""
    stop: int
    whole: int
    """How many the part has on all ranks together."""
    offset: int
    """The first of them in the part."""


def _shared(model: nn.Module, also_around: bool = False) -> Iterator[_Shared]:
    """Find what several ranks hold within the mixers and feed-forwards, or also around them."""
    ranks: Ranks = model.ranks  # type: ignore[assignment]
    cuts = _cuts_of(model)
    for name, x in model.named_parameters():
        inside = ".mixer." in name or ".feed." in name
        around = also_around and name not in ("embed.weight", "head.weight")
        if not x.requires_grad or not (inside or around):
            continue
        if name not in cuts:
            yield _Shared(x, 0, 0, x.shape[0], x.shape[0], 0)
            continue
        start = 0
        for part in cuts[name].parts:
            first, last = part.range(ranks.rank, ranks.size)
            if last > first and part.held_by_several(ranks.size):
                yield _Shared(x, cuts[name].dim, start, start + last - first, part.width, first)
            start += last - first


def sum_shared_gradients(model: nn.Module) -> None:
    """Add up the gradients of what several ranks hold, after a backward; all ranks must call it.

    Args:
        model: a HybridLM with ranks; with FSDP, its gradients may be sharded over other dimensions of the mesh.
    """
    ranks: Ranks | None = getattr(model, "ranks", None)
    if ranks is None:
        return
    found = [(each, *_gradient(each.parameter)) for each in _shared(model)]
    buffers: list[Tensor] = []
    for each, gradient, row in found:
        shape = list(each.parameter.shape)
        shape[each.dim] = each.whole
        buffer = torch.zeros(shape, dtype=each.parameter.dtype, device=gradient.device)
        _place(buffer, each, gradient, row, into=True)
        buffers.append(buffer)
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):  # in the same order on all ranks
        own = [n for n, buffer in enumerate(buffers) if buffer.dtype == dtype]
        flat = ranks.sum_in_place(torch.cat([buffers[n].flatten() for n in own]))
        for n, part in zip(own, flat.split([buffers[n].numel() for n in own]), strict=True):
            each, gradient, row = found[n]
            _place(part.view_as(buffers[n]), each, gradient, row, into=False)


@torch.no_grad()
def square_of_gradients(model: nn.Module) -> Tensor:
    """Return this process's summand of the squared norm of all gradients; what several ranks hold counts once.

    Args:
        model: a HybridLM with ranks, after `sum_shared_gradients`; with FSDP, shards of its gradients add up too.
    """
    ranks: Ranks = model.ranks  # type: ignore[assignment]
    found = [x for x in model.parameters() if x.grad is not None]
    exact = torch.float64 if model.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=exact, device=found[0].device if found else None)
    for x in found:
        total += _gradient(x)[0].to(exact).square().sum()
    for each in _shared(model, also_around=True):
        gradient, row = _gradient(each.parameter)
        holders = ranks.size * (each.stop - each.start) / each.whole
        total -= (1 - 1 / holders) * _own(each, gradient, row).to(exact).square().sum()
    return total


def _gradient(x: nn.Parameter) -> tuple[Tensor, int]:
    """Return the gradient that this process has of a parameter, and its first row; a missing one becomes 0."""
    if x.grad is None:
        x.grad = torch.zeros_like(x)
    if not _is_dtensor(x.grad):
        return x.grad, 0
    grad: Any = x.grad
    local, mesh, rows = grad.to_local(), grad.device_mesh, x.shape[0]
    step = -(-rows // mesh.size())
    return local, min(mesh.get_local_rank() * step, rows)


def _is_dtensor(x: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # FSDP imports it, which takes a second and 40 MB
    return module is not None and isinstance(x, module.DTensor)


def _place(buffer: Tensor, each: _Shared, gradient: Tensor, row: int, *, into: bool) -> None:
    """Copy the shared channels of a gradient whose first row is `row` into a buffer of the whole part, or back."""
    own = _own(each, gradient, row)
    if each.dim == 0:
        there = buffer[each.offset + max(row - each.start, 0) :][: len(own)]
    else:
        there = buffer[row : row + len(gradient)].narrow(each.dim, each.offset, each.stop - each.start)
    if into:
        there.copy_(own)
    else:
        own.copy_(there)


def _own(each: _Shared, gradient: Tensor, row: int) -> Tensor:
    """Return the shared channels of a gradient whose first row is `row`; it may have none of them."""
    if each.dim:
        return gradient.narrow(each.dim, each.start, each.stop - each.start)
    first, last = max(each.start, row), min(each.stop, row + len(gradient))
    return gradient[first - row : last - row] if first < last else gradient[:0]
