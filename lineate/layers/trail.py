"""Trails: one pass over guessed tokens, from which every row may take back as many as it likes.

    y, trailed = trail(mixer, x, state)       # x `b t hidden`; y as from mixer(x, state)
    state = trailed.after(counts)             # row r as it is after the first counts[r] tokens of x; 0: as it was given

Speculative decoding reads a few guessed tokens and keeps those that were guessed well. A memory of fixed size cannot be
shortened, so a trail knows the memory after every token:

    linear rules   projections, convolution, norm and output run once over all tokens; only the rule goes token by token
    attention      one pass; entries of rejected tokens are overwritten with zeros, and the lengths are set back
    other mixers   the mixer itself, token by token, so that this holds for every mixer

Rejected tokens leave nothing behind, even if they were not finite.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.call import Inputs, Slots
from lineate.layers.counts import Counts, count_up, nowhere, places
from lineate.layers.entry import check_call
from lineate.layers.mixer import LinearMixer
from lineate.layers.projection import runs_own_forward
from lineate.layers.state import LayerState, Memory, TokenCache
from lineate.ops.rounding import round_memory
from lineate.rule import compute_dtype

KEPT = ("auto", "states", "inputs")


class Trail(Protocol):
    """The states of a layer after each of the tokens of one pass."""

    def after(self, counts: Tensor | Counts, into: Mapping[str, Tensor] | None = None) -> LayerState:
        """Return the state whose row r has read the first counts[r] tokens; 0 is the state that was given.

        On a GPU nothing waits for the device. Counts on a CPU avoid copies, and keep the caches as short as can be.

        Args:
            counts: `rows`, int, each in 0 .. t. Counts share what several layers compute from them.
            into: tensors `rows ...` that a memory is written to, by name; they may be those of the state that was
                given, and then the trail must not be used again. Caches are always cut in place, at the first call.
        """
        ...


@torch.no_grad()
def trail(mixer: nn.Module, x: Tensor, state: LayerState, keep: str = "auto") -> tuple[Tensor, Trail]:
    """Run a mixer on guessed tokens, and return y `b t hidden` and the states after each token. There are no gradients.

    Args:
        mixer: any mixer of the registry.
        x: `b t hidden`, t tokens that follow those of the state in every row.
        state: what the mixer returned; it is not changed.
        keep: what a linear rule keeps: "states", the memory after every token, or "inputs", from which `after` runs the
            rule once more, in one launch and without memory for t states; "auto" is "inputs" on a GPU. Both give the
            same bits there. Other mixers do not read it.
    """
    checks.check_choice("keep", keep, KEPT)
    if not isinstance(state, Memory | TokenCache):
        raise TypeError(
            f"state must be a Memory or a TokenCache, got {type(state).__name__}; read the first token of every row "
            "with the mixer itself"
        )
    if getattr(mixer, "context", None) is not None:
        raise ValueError("mixer must not be under context parallelism to guess tokens; use a copy on one device")
    if isinstance(state, TokenCache):
        return _cached(mixer, x, state)
    state = Memory(state.tensors, seeds=state.seeds)  # nothing may be overwritten before the tokens are chosen
    if isinstance(mixer, LinearMixer) and type(mixer).forward is LinearMixer.forward and runs_own_forward(mixer):
        return _linear(mixer, x, state, keep)
    return trail_each(lambda token, before: mixer(x[:, token], before), x.shape[1], state)


@torch.no_grad()
def trail_each(
    run: Callable[[slice, Memory], tuple[Tensor, LayerState]], t: int, state: LayerState
) -> tuple[Tensor, Trail]:
    """Run t tokens one by one, and return their outputs `b t hidden` and the states after each; without gradients.

    Args:
        run: runs one token, as a slice of all, from a state; returns `b 1 hidden` and the next state, a Memory.
        t: how many tokens there are.
        state: before the first; a Memory.
    """
    assert isinstance(state, Memory)
    state = Memory(state.tensors, seeds=state.seeds)  # nothing may be overwritten before the tokens are chosen
    outputs, states = [], [state]
    for i in range(t):
        y, now = run(slice(i, i + 1), states[-1])
        assert isinstance(now, Memory)
        outputs.append(y)
        seeds = None if state.seeds is None else state.seeds + (i + 1)
        states.append(Memory(now.tensors, seeds=seeds))
    stored = {name: Stored([each[name] for each in states]) for name in state.names}
    return torch.cat(outputs, 1), MemoryTrail(stored, t)


@dataclass(frozen=True)
class Stored:
    """One tensor of a memory after 0 .. t tokens.

    Args:
        versions: t + 1 tensors `rows ...`, or one `t+1 rows ...`.
    """

    versions: Sequence[Tensor] | Tensor

    @property
    def rows(self) -> int:
        return self.versions[0].shape[0]

    def after(self, counts: Counts, into: Tensor | None) -> Tensor:
        """Return the tensor whose row r has read counts[r] tokens."""
        versions = self.versions
        if counts.tensor.device.type == "cpu":
            wanted = counts.tensor.tolist()
            if all(n == wanted[0] for n in wanted):
                chosen = versions[wanted[0]]
            else:
                chosen = torch.stack([versions[n][row] for row, n in enumerate(wanted)])
        else:
            stacked = versions if isinstance(versions, Tensor) else torch.stack(list(versions))  # t+1 rows ...
            chosen = stacked[counts.on(stacked.device), count_up(self.rows, stacked.device)]
        return chosen if into is None else into.copy_(chosen)


@dataclass(frozen=True)
class MemoryTrail:
    """The states of a mixer whose memory was kept after every token.

    Args:
        tensors: by name.
        t: tokens of the trail.
    """

    tensors: Mapping[str, Stored]
    t: int

    @torch.no_grad()
    def after(self, counts: Tensor | Counts, into: Mapping[str, Tensor] | None = None) -> Memory:
        """Return the memory whose row r has read the first counts[r] tokens; see Trail."""
        counts = Counts.of(counts, next(iter(self.tensors.values())).rows, self.t)
        return Memory({name: x.after(counts, None if into is None else into[name]) for name, x in self.tensors.items()})


def _linear(mixer: LinearMixer, x: Tensor, state: Memory, keep: str) -> tuple[Tensor, Trail]:
    """Run a mixer with a linear rule: everything but the rule runs once over all tokens."""
    check_call(mixer, x, state, None)
    entered = mixer.enter(x, state)
    taps = None
    if mixer.conv is not None:
        taps = torch.cat((state["conv"], entered.raw.transpose(1, 2)), 2)  # rows channels size-1+t
    qkv, gates, memory, seeds = entered[:3], entered.gates, state["memory"], state.seeds
    kept: Stored | Replay
    if not mixer.runs_rule_alone:
        output, z, kept = _attend_each(mixer, qkv, gates, memory, seeds)
    else:
        inputs, z = mixer.rule_inputs(*qkv, gates), mixer.output_gate(gates)
        if keep == "inputs" or (keep == "auto" and x.is_cuda):
            kept = Replay(mixer, inputs, memory, seeds)
            output = kept.read()
        elif x.is_cuda:
            output, kept = _slot_each(mixer, inputs, memory, seeds)
        else:
            output, kept = _step_each(mixer, inputs, memory, seeds)
        output = mixer.read(output, qkv[2])
    return mixer.leave(output, z), LinearTrail(taps, kept, x.shape[1])


def _attend_each(
    mixer: LinearMixer, qkv: tuple[Tensor, Tensor, Tensor], gates: list[Tensor], memory: Tensor, seeds: Tensor | None
) -> tuple[Tensor, Tensor, Stored]:
    """Run mixer.attend token by token; return its outputs, the output gates, and the memory after 0 .. t tokens."""
    outputs, versions, narrow = [], [memory], memory.dtype != compute_dtype(qkv[2].dtype)
    for i in range(qkv[0].shape[1]):
        now = slice(i, i + 1)
        q, k, v = (x[:, now] for x in qkv)
        own = [gate[:, now] for gate in gates]
        if narrow:
            seed = None if seeds is None else seeds + i
            (output, after), z = mixer.attend_narrow(q, k, v, own, versions[-1], None, False, seed)
        else:
            (output, after), z = mixer.attend(q, k, v, own, versions[-1], None, False)
        outputs.append((output, z))
        versions.append(after)
    output, z = (torch.cat(each, 1) for each in zip(*outputs, strict=True))
    return output, z, Stored(versions)


def _step_each(
    mixer: LinearMixer, inputs: Inputs, memory: Tensor, seeds: Tensor | None
) -> tuple[Tensor, Stored]:  # fmt: skip
    """Run the rule token by token, as decoding does; return its outputs, and the memory after 0 .. t tokens."""
    outputs, versions, wide = [], [memory], compute_dtype(inputs.v.dtype)
    for i in range(inputs.q.shape[1]):
        output, after = mixer.run_rule(inputs.at(slice(i, i + 1), versions[-1].to(wide)))
        if memory.dtype != wide:
            after = round_memory(after, None if seeds is None else seeds + i).to(memory.dtype)
        outputs.append(output)
        versions.append(after)
    return torch.cat(outputs, 1), Stored(versions)


def _slot_each(
    mixer: LinearMixer, inputs: Inputs, memory: Tensor, seeds: Tensor | None
) -> tuple[Tensor, Stored]:  # fmt: skip
    """Run the rule in one launch that writes the memory after every token; return the output and the memories."""
    rows, t = inputs.q.shape[:2]
    versions = memory.new_empty(t + 1, *memory.shape)
    versions[0] = memory
    slots = torch.arange((t + 1) * rows, device=memory.device).view(t + 1, rows)
    pool = versions.view(-1, *memory.shape[1:])
    output = _decode(mixer, inputs, pool, slots[1:].T.contiguous(), seeds)
    return output, Stored(versions)


def _decode(mixer: LinearMixer, inputs: Inputs, pool: Tensor, slots: Tensor, seeds: Tensor | None) -> Tensor:
    """Run the rule from the first rows of a pool, and write the memory after token i of row r to pool[slots[r, i]]."""
    return mixer.decode(inputs, pool, Slots(slots, count_up(slots.shape[0], slots.device), seeds))


@dataclass(frozen=True)
class Replay:
    """The inputs of a linear rule in a speculative pass.

    The memory after any accepted tokens is recomputed from them in one launch, so no intermediate memory is stored.

    Args:
        mixer: the mixer of the rule.
        inputs: the rule's arguments, without a state.
        memory: `rows hv k v`, before the first token.
        seeds: `rows`, of the first token, if a bfloat16 memory is rounded stochastically.
    """

    mixer: LinearMixer
    inputs: Inputs
    memory: Tensor
    seeds: Tensor | None

    @property
    def rows(self) -> int:
        return self.memory.shape[0]

    def read(self) -> Tensor:
        """Return the rule's output of all tokens; no memory is written."""
        rows, t = self.inputs.q.shape[:2]
        slots = nowhere(rows, t, self.memory.device)
        return _decode(self.mixer, self.inputs, self.memory, slots, self.seeds)

    def after(self, counts: Counts, into: Tensor | None) -> Tensor:
        """Return the memory whose row r has read counts[r] tokens."""
        if into is None:
            into = self.memory.clone()
        elif into.data_ptr() != self.memory.data_ptr():
            into.copy_(self.memory)
        slots = counts.own_slots(self.inputs.q.shape[1], into.device)
        _decode(self.mixer, self.inputs, into, slots, self.seeds)
        return into


@dataclass(frozen=True)
class LinearTrail:
    """The states of a mixer with a linear rule.

    Args:
        taps: the convolution's inputs, `rows channels size-1+t`, those of the given state first; None: it has none.
        memory: the memory after every token, or what it is made from.
        t: tokens of the trail.
    """

    taps: Tensor | None
    memory: Stored | Replay
    t: int

    @torch.no_grad()
    def after(self, counts: Tensor | Counts, into: Mapping[str, Tensor] | None = None) -> Memory:
        """Return the memory whose row r has read the first counts[r] tokens; see Trail."""
        counts = Counts.of(counts, self.memory.rows, self.t)
        tensors = {}
        if self.taps is not None:
            at = counts.taps(self.taps.shape[2] - self.t, self.taps.device).expand(-1, self.taps.shape[1], -1)
            if into is None or into["conv"].dtype != self.taps.dtype:
                last = self.taps.gather(2, at)  # rows channels size-1
                tensors["conv"] = last if into is None else into["conv"].copy_(last)
            else:
                tensors["conv"] = torch.gather(self.taps, 2, at, out=into["conv"])
        tensors["memory"] = self.memory.after(counts, None if into is None else into["memory"])
        return Memory(tensors)


class _Noted(TokenCache):
    """A cache that notes the next entries, and puts zeros where they are not finite.

    Attention multiplies the entries of later tokens by 0, which would spread what is not finite to earlier tokens.
    """

    def __init__(self, cache: TokenCache) -> None:
        vars(self).update(vars(cache))
        self.cache = cache
        self.new: dict[str, Tensor] = {}
        self.finite: Tensor | None = None

    def append(self, new: dict[str, Tensor]) -> TokenCache:
        self.new = new
        highest = (torch.linalg.vector_norm(x.flatten(2), torch.inf, -1) for x in new.values())  # rows t
        self.finite = reduce(torch.maximum, highest) < torch.inf  # nor is NaN less
        return self.cache.append({name: _where(self.finite, x) for name, x in new.items()})


def _where(kept: Tensor, entries: Tensor) -> Tensor:
    """Return entries `rows t ...` with zeros where a token is not kept."""
    return torch.where(kept.view(*kept.shape, *[1] * (entries.dim() - 2)), entries, 0)


def _cached(mixer: nn.Module, x: Tensor, state: TokenCache) -> tuple[Tensor, Trail]:
    """Run a mixer that keeps an entry a token: in one pass, since entries can be taken back."""
    first = state[state.names[0]]  # packed rows are padded here
    given = _Noted(state)
    y, appended = mixer(x, given)
    if given.finite is not None:
        spoilt = (~given.finite).cumsum(1) > 0  # a token that is not finite spoils itself and those after it
        y = torch.where(spoilt[..., None], torch.nan, y)
        new = given.new
    else:  # a mixer that joins the entries itself
        at = places(state.lengths, first.shape[0], x.shape[1], first.device)
        new = {name: appended[name][at] for name in appended.names}
    return y, CacheTrail(state, appended, new)


class CacheTrail:
    """The states of a mixer that keeps an entry a token.

    Args:
        given: the cache before the trail.
        appended: the cache with all its tokens.
        new: the entries of these tokens, `rows t ...`.
    """

    def __init__(self, given: TokenCache, appended: TokenCache, new: dict[str, Tensor]) -> None:
        self.given, self.new = given, new
        self._appended: TokenCache | None = appended
        self.t = next(iter(new.values())).shape[1]

    @torch.no_grad()
    def after(self, counts: Tensor | Counts, into: Mapping[str, Tensor] | None = None) -> TokenCache:
        """Return the cache whose row r has the first counts[r] tokens; see Trail. Later calls copy the cache."""
        counts = Counts.of(counts, self.given.rows, self.t)
        cache, self._appended = self._appended, None
        if cache is None or not cache.writable:
            cache = self.given.copy(self.t)
        first = cache[cache.names[0]]
        at = counts.places(self.given.lengths, first.shape[0], self.t, first.device)
        kept = counts.kept(self.t, first.device)
        for name, entries in self.new.items():
            cache[name].index_put_(at, _where(kept, entries))
        lengths, n = self._lengths_after(counts, first.device)
        return cache.cut(min(n, cache.n), lengths)

    def _lengths_after(self, counts: Counts, device: torch.device) -> tuple[int | Tensor, int]:
        """Return the tokens of each row, and a bound of them, exact if it can be known without waiting."""
        given, numbers = self.given.lengths, counts.tensor
        if numbers.device.type != "cpu":
            return given + counts.on(device), self.given.n + self.t
        most = int(numbers.max())
        if isinstance(given, int):
            same = most == int(numbers.min())
            return given + most if same else given + counts.on(device), given + most
        lengths = given + counts.on(device)
        return lengths, int(lengths.max()) if lengths.device.type == "cpu" else self.given.n + most
