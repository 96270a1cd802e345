"""A ring: the last tokens of each memory, so that decoding reads the memory at every token and writes it at every n-th.

    ring = Ring(q, k, v, log_decay, beta, state=pool, every=8)                     # for calls like this one
    output = decode(q, k, v, log_decay, beta, state=pool, slots=slots, ring=ring)  # every 8th token writes the pool
    ring.fold()                                                                    # now the pool has all tokens

A step of `decode` reads and writes each state once, which is nearly all of its time on a GPU. With a ring it reads the
state and the tokens since it was written, at most n - 1 of them (forms/ring.py has the equations), and writes the
state with the n-th. Between two folds the tensor `state` is old; the ring has what it lacks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lineate import checks
from lineate.call import Inputs, Options, RawGates, RingTensors, Slots, in_one_dtype, spread_decay
from lineate.dispatch import kernels_run, select_rule
from lineate.forms.ring import Entries
from lineate.forms.ring import fold as fold_entries
from lineate.ops.rounding import round_memory
from lineate.ops.slot_checks import check_decode_state, check_ring_slots
from lineate.rule import ONE_KEY_RULES, Rule, compute_dtype, decay_of_gate

EVERY = 8
"""The default number of tokens after which a state is written."""
MOST = 16
"""The most tokens of a ring: the entries that a program of the kernel has in registers."""


class Traffic(NamedTuple):
    """The bytes that a token moves per slot, without its inputs and its output.

    Args:
        plain: Reading and writing the state.
        ring: Reading the state and the entries, appending one, and writing the state every n-th time; the average.
    """

    plain: int
    ring: float

    @property
    def ratio(self) -> float:
        return self.ring / self.plain

    @property
    def saves(self) -> bool:
        """Whether a ring moves fewer bytes; the time of a step falls by less (docs/speed.md has what was measured)."""
        return self.ratio < 1


class Ring:
    """The tokens of every slot of a pool of states since the state was written.

    It serves calls of `decode` with one token a row, for the rule, sizes and dtypes that it was made for. Rows may be
    of any ages: each slot has its own number of entries. On a GPU that number is read on the device, so that calls may
    be recorded in a CUDA graph.

    It is empty at first. Of the call for which it is made, only shapes, dtypes and parameters count.

    Args:
        q: queries, `b 1 h k`.
        k: keys, `b 1 h k`.
        v: values, `b 1 hv v`.
        log_decay: `b 1 hv`, `b 1 hv k`, `hv`, or None.
        beta: `b 1 hv`, `b 1 hv v`, or None.
        state: the pool of states `n_slots hv k v`, to which the ring stays bound.
        every: the tokens after which the state of a slot is written, 1 .. 16.
        normalize_qk: as in `decode`.
        raw_gates: as in `decode`.
        A_log: as in `decode`; the ring keeps it where the gate is one per channel.
        dt_bias: as A_log.
        lower_bound: as in `decode`.
    """

    state: Tensor
    """The pool of states."""
    tensors: RingTensors
    """Its entries and counters."""
    rule: Rule
    """The rule whose tokens it has."""
    raw_decay: bool
    """Whether the log_decay per channel of its entries is a raw gate."""
    lower_bound: float | None
    """The lower bound of that gate."""
    counts: bool
    """Whether every call of `decode` counts its tokens. If not, the caller adds them to `tensors.tokens`, which rings
    of several layers can share, once after the calls of all layers."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        *,
        state: Tensor,
        every: int = EVERY,
        normalize_qk: bool = False,
        raw_gates: bool | str = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
    ) -> None:
        inputs = Inputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta, state=state, A_log=A_log, dt_bias=dt_bias)
        checks.check_which_raw(raw_gates)
        checks.check_flag("normalize_qk", normalize_qk)
        raw = RawGates(raw_gates in (True, "log_decay"), raw_gates in (True, "beta"), lower_bound=lower_bound)
        self.__dict__.update(vars(ring_of(inputs, every, raw, normalize_qk)))

    @classmethod
    def made(
        cls, state: Tensor, tensors: RingTensors, rule: Rule, raw_decay: bool, lower_bound: float | None, counts: bool
    ) -> "Ring":
        """Return a ring of these parts."""
        ring = object.__new__(cls)
        ring.state, ring.tensors, ring.rule = state, tensors, rule
        ring.raw_decay, ring.lower_bound, ring.counts = raw_decay, lower_bound, counts
        return ring

    @property
    def every(self) -> int:
        """The tokens after which the state is written."""
        return self.tensors.every

    @property
    def nbytes(self) -> int:
        """The bytes of its entries and counters."""
        return sum(x.nbytes for x in self.tensors.tensors if x is not None)

    @property
    def pending(self) -> Tensor:
        """How many tokens of each slot the state does not have, `n_slots`, int64, on the ring's device."""
        return (self.tensors.tokens - self.tensors.folded) % self.every

    @property
    def traffic(self) -> Traffic:
        """The bytes that a token moves per slot."""
        state, n = self.state[0].nbytes, self.every
        entry = sum(x[0].nbytes for x in self.tensors.tensors[:3] if x is not None) / n
        return Traffic(2 * state, state * (1 + 1 / n) + entry * ((n - 1) / 2 + (n - 1) / n))

    def __str__(self) -> str:
        found = self.traffic
        verdict = "fewer bytes, which is not a time: measure it" if found.saves else "saves no bytes"
        return (
            f"{self.rule.name}: the state is written every {self.every} tokens; a token moves {found.ring / 1024:,.1f} "
            f"KiB a slot instead of {found.plain / 1024:,.1f}, {found.ratio:.2f} of it\n"
            f"  {verdict}: the ring has {self.nbytes / self.tensors.tokens.shape[0] / 1024:,.1f} KiB a slot"
        )

    def part(self, slots: slice, state: Tensor | None = None) -> "Ring":
        """Return the ring of some slots, in the same memory.

        Args:
            slots: Which ones.
            state: A copy of their states, to which the new ring belongs; None: the states themselves.
        """
        own = self.tensors
        cut = {name: x[slots] for name in ("keys", "writes", "log_decay", "tokens", "folded")
               if (x := getattr(own, name)) is not None}  # fmt: skip
        state = self.state[slots] if state is None else state
        return Ring.made(state, own._replace(**cut), self.rule, self.raw_decay, self.lower_bound, self.counts)

    @torch.no_grad()
    def fold(self, slots: Tensor | None = None, *, seeds: Tensor | None = None) -> None:
        """Write all entries into the state, whose rings are then empty; nothing waits for the device.

        Args:
            slots: `rows`, int, each slot once; a negative one is skipped. None: all slots.
            seeds: `rows`, int: rounds a bfloat16 state stochastically, as in `decode`; None: to the nearest.
        """
        check_ring_slots(slots, seeds, self.state)
        self.write(slots, seeds)
        self.reset(slots)

    @torch.no_grad()
    def reset(self, slots: Tensor | None = None) -> None:
        """Drop the entries of slots whose state was set to another one.

        Args:
            slots: `rows`, int, each slot once; a negative one is skipped. None: all slots.
        """
        check_ring_slots(slots, None, self.state)
        tokens, folded = self.tensors.tokens, self.tensors.folded
        if slots is None:
            folded.copy_(tokens)
            return
        chosen = torch.zeros(len(folded) + 1, dtype=torch.bool, device=folded.device)
        inside = (slots >= 0) & (slots < len(folded))  # others are skipped on a GPU, where values are not checked
        chosen[torch.where(inside, slots, len(folded)).long()] = True
        folded.copy_(torch.where(chosen[:-1], tokens, folded))

    @torch.no_grad()
    def take_back(self, slot: int, tokens: int) -> None:
        """Forget the last tokens of a slot, which the state must not have yet; on a GPU this waits for the device.

        Args:
            slot: the slot.
            tokens: how many of its last tokens, at most `pending[slot]`.
        """
        if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < len(self.tensors.tokens):
            raise ValueError(f"slot must be one of 0 .. {len(self.tensors.tokens) - 1}, got {slot!r}")
        pending = int(self.pending[slot])
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= pending:
            raise ValueError(
                f"tokens must be between 0 and the {pending} that slot {slot} has read since its state was written, "
                f"got {tokens!r}; keep a copy of the state to go further back"
            )
        self.tensors.tokens[slot] -= tokens

    def write(self, slots: Tensor | None = None, seeds: Tensor | None = None) -> None:
        """Write all entries into the state as `fold`, and leave the counters to the caller."""
        if self.tensors.keys.is_cuda and kernels_run():
            from lineate.kernels.portable import launch_ring  # triton, at its first use

            options = Options(self.rule, 1.0, raw_decay=self.raw_decay, lower_bound=self.lower_bound)
            rows = len(self.state) if slots is None else len(slots)
            launch_ring.fold(self.state, Slots(slots, seeds=seeds), self.tensors, rows, options)
            return
        at = torch.arange(len(self.state), device=self.state.device) if slots is None else slots.long()
        kept = at >= 0
        at, seeds = at[kept], None if seeds is None else seeds[kept]
        dtype = compute_dtype(self.tensors.writes.dtype)
        new = fold_entries(self.state[at].to(dtype), self.entries(at, dtype))
        changed = self.pending[at] > 0
        if self.state.dtype != dtype:
            new = round_memory(new, seeds)
        self.state[at[changed]] = new[changed].to(self.state.dtype)

    def entries(self, slots: Tensor, dtype: torch.dtype) -> Entries:
        """Return the entries of these slots `rows hv every ...`, in this dtype."""
        own = self.tensors
        group = own.writes.shape[1] // own.keys.shape[1]
        keys = own.keys[slots].to(dtype).repeat_interleave(group, dim=1)
        log_decay = None
        if own.log_decay is not None:
            log_decay = own.log_decay[slots].to(dtype)
            if log_decay.dim() == 3:
                log_decay = log_decay.unsqueeze(-1)
            elif self.raw_decay:  # as `b t hv k`, which is what decay_of_gate takes
                log_decay = decay_of_gate(log_decay.transpose(1, 2), own.A_log, own.dt_bias, self.lower_bound)
                log_decay = log_decay.transpose(1, 2)
        return Entries(keys, own.writes[slots].to(dtype), log_decay, self.pending[slots][:, None])


def ring_of(
    inputs: Inputs,
    every: int,
    raw: RawGates,
    normalize_qk: bool,
    clock: tuple[Tensor, Tensor] | None = None,
    rule: Rule | None = None,
) -> Ring:
    """Return an empty ring.

    Args:
        inputs: A call of one token a row, with its state and, for raw gates, A_log and dt_bias.
        every: The tokens after which the state is written.
        raw: Whether log_decay is a raw gate, and its lower bound.
        normalize_qk: Whether q and k are normalised.
        clock: Counters of the tokens of each slot, and at its last fold, that the caller counts; None: its own.
        rule: The row of the rule; None: the one that takes the gates.
    """
    if isinstance(every, bool) or not isinstance(every, int) or not 1 <= every <= MOST:
        raise ValueError(f"every must be an int between 1 and {MOST}, the tokens of a ring, got {every!r}")
    state, plain = inputs.state, inputs.replace(state=None)
    inputs = in_one_dtype(plain if raw.raw_decay else spread_decay(plain)).replace(state=state)
    rule = select_rule(inputs) if rule is None else rule
    check_rule(rule)
    checks.check_inputs(rule, inputs)
    q, k, v, log_decay = inputs.q, inputs.k, inputs.v, inputs.log_decay
    if q.shape[1] != 1:
        raise ValueError(f"q must have one token a row, b 1 h k, as the calls that a ring is for, got t = {q.shape[1]}")
    check_decode_state(state, q, v, q.shape[0], pooled=True)
    checks.check_decode_gates(inputs, 1.0, raw.lower_bound, raw.which)
    assert state is not None
    slots, hv, key_dim, value_dim = state.shape
    per_channel = log_decay is not None and log_decay.dim() == 4
    decay = None
    if log_decay is not None:
        wide = (key_dim,) if per_channel else ()
        dtype = log_decay.dtype if per_channel else compute_dtype(v.dtype)
        decay = torch.zeros(slots, hv, every, *wide, dtype=dtype, device=state.device)
    keys = torch.zeros(slots, k.shape[2], every, key_dim, dtype=k.dtype, device=state.device)
    writes_dtype = _writes_dtype(rule, state.dtype, v.dtype, normalize_qk)
    writes = torch.zeros(slots, hv, every, value_dim, dtype=writes_dtype, device=state.device)
    tokens, folded = new_clock(slots, state.device) if clock is None else clock
    kept_raw = raw.raw_decay and per_channel
    A_log, dt_bias = (x if kept_raw else None for x in (inputs.A_log, inputs.dt_bias))
    if dt_bias is not None and dt_bias.dim() == 1 and dt_bias.shape[0] == hv * key_dim and key_dim > 1:
        dt_bias = dt_bias.view(hv, key_dim)
    tensors = RingTensors(keys, writes, decay, tokens, folded, every, A_log, dt_bias)
    bound = None if raw.lower_bound is None or not kept_raw else float(raw.lower_bound)
    return Ring.made(state, tensors, rule, kept_raw, bound, counts=clock is None)


def new_clock(slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return counters of the tokens of each slot, and at its last fold."""
    return torch.zeros(slots, dtype=torch.int64, device=device), torch.zeros(slots, dtype=torch.int64, device=device)


def check_rule(rule: Rule) -> None:
    """Raise if rings have no tokens of this rule."""
    if rule not in ONE_KEY_RULES:
        known = ", ".join(x.name for x in ONE_KEY_RULES)
        raise ValueError(f"ring must be one of a rule with one key a token ({known}), got {rule.name}; leave it None")


def _writes_dtype(rule: Rule, state: torch.dtype, values: torch.dtype, normalize_qk: bool) -> torch.dtype:
    """Return the dtype of the writes of a ring.

    Values that are written as they came are kept as they came. Others have the dtype of the state: rounding a write to
    bfloat16 moves the state by less than rounding the state does.
    """
    if not rule.corrects and not normalize_qk:
        return values
    return state
