"""The base class of the token mixers with a fixed-size memory, which all have the same parts.

q | k | v | ... = in_proj(x)         one projection for everything
q | k | v = silu(conv(q | k | v))    the short convolution
o, S = rule(q, k, v, gates, S)       lineate's ops
y = out_proj(norm(o) * act(z))       z: the output gate
"""

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate import checks
from lineate.call import Inputs, RawGates, Request, Slots
from lineate.dispatch import select_rule
from lineate.layers.configs import WRITING_RATES, LinearConfig
from lineate.layers.convolution import ShortConvolution, convolution_spec
from lineate.layers.entry import check_call
from lineate.layers.norm import GatedRMSNorm
from lineate.layers.projection import project, project_out
from lineate.layers.registry import ModelSizes
from lineate.layers.state import Memory, TensorSpec
from lineate.ops import Attended
from lineate.ops.decode_calls import DecodeRequest
from lineate.ops.decoding import decode_inputs
from lineate.ops.rates import rate_of_key
from lineate.ops.raw_gates import activated, attend_raw
from lineate.ops.ring_decoding import decode_with_ring
from lineate.ops.rings import Ring, ring_of
from lineate.ops.rounding import NEAREST, STOCHASTIC, round_memory
from lineate.ops.rules import attend
from lineate.parallel.context.carry import enter_convolution, run_rule
from lineate.parallel.context.segments import Bounds, Context, Segment, segment_of
from lineate.parallel.tensor.ranks import Ranks
from lineate.parallel.tensor.shards import Cut, Part, linear_cuts
from lineate.quantised.weight import QuantisedWeight
from lineate.rule import ONE_KEY_RULES, Rule, compute_dtype, normalize

PER_HEAD = ("heads", "key_heads", "writes")
"""The gates with a few columns for each head."""


class Entered(NamedTuple):
    """The inputs of a mixer's rule, before its gates are computed.

    Args:
        q: `b t h k`.
        k: `b t h k`.
        v: `b t hv v`.
        gates: the outputs of in_proj after q | k | v.
        raw: q | k | v before the convolution, `b t width`.
        conv: the convolution's last inputs; None: there is none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: list[Tensor]
    raw: Tensor
    conv: Tensor | None


class LinearMixer(nn.Module):
    """The base class of the mixers with a fixed-size memory.

    A subclass lists in `gates` the rows of in_proj after q | k | v, and returns the arguments of its rule from
    `rule_inputs`. Each of the `heads` key heads serves value_heads / heads value heads. By default the output gate of
    KimiDeltaAttention has a sigmoid, as in Kimi Linear; those of the others have silu, as in Qwen3-Next.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0 means no convolution.
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu" or "sigmoid"; "none": there is no output gate.
        decay_rank: width of the low-rank projection to the decay; None is value_dim, 0 is no such projection.
        gate_rank: width of the low-rank projection to the output gate; None is value_dim, 0 is no such projection.
        gate_bias: whether the projection behind gate_rank has a bias.
        bias: whether in_proj and out_proj have a bias.
        conv_bias: whether the short convolution has a bias.
        writes: keys and values a token.
    """

    gates: tuple[str, ...]
    """The width of each gate: "values" is hv*v (0 without an output gate), "written" is hv*v, "keys" is hv*k, "heads"
    is hv, "key_heads" is h, "writes" is hv for each write of a token, and the others are ranks."""
    options: ClassVar[tuple[str, ...]] = ()
    """Constructor arguments beyond those that all mixers share; LinearConfig has fields of the same names."""
    normalize_qk: bool = False
    """Whether the rule normalises q and k."""
    rate: str = "beta"
    """The rate of writing of a delta rule: "beta", or that of an unnormalised key in lineate.ops.rates.RATES."""
    beta_scale: float = 1.0
    """The upper bound of beta if it is made from a raw logit: beta lies in (0, beta_scale)."""
    gate_lower_bound: float | None = None
    """The lower bound of log_decay if it is made from a raw gate: log_decay lies in (gate_lower_bound, 0)."""
    scale: float | None = None
    """Multiplies what is read; None is 1/sqrt(k)."""
    temperature: float = 1.0
    """Divides log_decay = logsigmoid(raw gate) in gated linear attention."""
    feature_map: str = "identity"
    """The feature map of q and k in linear attention."""
    step_least: float = 0.0
    """The smallest step of Mamba-2."""
    step_most: float | None = None
    """The largest step of Mamba-2; None: there is no bound."""
    rule: ClassVar[Rule | None] = None
    """The row of the rule that it runs; None: the one that takes the gates of `rule_inputs`."""
    gates_alone: ClassVar[bool] = True
    """Whether one gate of `rule_inputs` can be replaced without the others, as `lineate explore` does."""
    narrows: ClassVar[bool] = True
    """Whether the memory may be kept in bfloat16 between tokens."""
    context: Context | None = None
    """If set, x is this rank's segment of sequences that are split over ranks (docs/scaling.md)."""
    ranks: Ranks | None = None
    """If set, the other heads are on other ranks, and the result is this rank's summand (docs/scaling.md)."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        gate_activation: str = "silu",
        decay_rank: int | None = None,
        gate_rank: int | None = None,
        gate_bias: bool = False,
        bias: bool = False,
        conv_bias: bool = False,
        writes: int = 1,
    ) -> None:
        super().__init__()
        checks.check_choice("gate_activation", gate_activation, ("silu", "sigmoid", "none"))
        value_heads = heads if value_heads is None else value_heads
        key_dim = hidden_size // heads if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        if value_heads % heads:
            raise ValueError(f"value_heads must be a multiple of heads = {heads}, got {value_heads}")
        self.heads, self.value_heads, self.key_dim, self.value_dim = heads, value_heads, key_dim, value_dim
        self.writes = writes
        self.width = (1 + writes) * heads * key_dim + writes * value_heads * value_dim  # of q | k | v
        self.decay_rank = value_dim if decay_rank is None else decay_rank
        self.gate_rank, self.gate_bias = value_dim if gate_rank is None else gate_rank, gate_bias
        widths = {
            "values": 0 if gate_activation == "none" else value_heads * value_dim, "heads": value_heads,
            "key_heads": heads, "writes": writes * value_heads, "keys": value_heads * key_dim,
            "written": value_heads * value_dim, "decay_rank": self.decay_rank or value_heads * key_dim,
            "gate_rank": self.gate_rank or value_heads * value_dim,
        }  # fmt: skip
        self.splits = (self.width, *(widths[gate] for gate in self.gates))
        self.in_proj = nn.Linear(hidden_size, sum(self.splits), bias=bias)
        self.conv = ShortConvolution(self.width, conv_size, bias=conv_bias) if conv_size else None
        self.norm = GatedRMSNorm(value_dim, norm_eps, activation=gate_activation)
        self.out_proj = nn.Linear(value_heads * value_dim, hidden_size, bias=bias)
        self.add_gates()

    @classmethod
    def from_config(cls, model: ModelSizes, config: LinearConfig) -> Self:
        """Make the mixer that a configuration describes, with the hidden size of the model."""
        common = ("value_heads", "key_dim", "value_dim", "conv_size", "norm_eps", "gate_activation")
        arguments: dict[str, Any] = {name: getattr(config, name) for name in (*common, *cls.options)}
        return cls(model.hidden_size, config.heads, **arguments)

    def add_gates(self) -> None:
        """Add the parameters that the gates have beyond in_proj, if there are any."""

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by heads; low ranks of gates are whole on each."""
        keys, values = (
            Part(self.heads * self.key_dim, self.heads),
            Part(self.value_heads * self.value_dim, self.value_heads),
        )
        mixed = (keys, *[keys] * self.writes, *[values] * self.writes)
        parts = [*mixed]
        for gate, width in zip(self.gates, self.splits[1:], strict=True):
            low = gate.endswith("_rank") and getattr(self, gate)
            count = self.writes if gate == "writes" else 1
            units = self.heads if gate == "key_heads" else self.value_heads
            parts += [Part(width // count, 0 if low else units)] * count
        cuts = linear_cuts("in_proj", self.in_proj, 0, tuple(parts))
        cuts |= linear_cuts("out_proj", self.out_proj, 1, (values,))
        if self.conv is not None:
            cuts["conv.weight"] = Cut(0, mixed)
            if self.conv.bias is not None:
                cuts["conv.bias"] = Cut(0, mixed)
        for name in ("A_log", "dt_bias", "D"):
            if (x := getattr(self, name, None)) is not None:
                cuts[name] = Cut(0, (Part(x.shape[0], self.value_heads),))
        for name in ("decay_proj", "gate_proj"):
            if (linear := getattr(self, name, None)) is not None:
                cuts |= linear_cuts(name, linear, 0, (Part(linear.out_features, self.value_heads),))
        return cuts

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        dtype = self.in_proj.weight.dtype
        wide, shape = compute_dtype(dtype), (self.value_heads, self.memory_rows, self.memory_columns)
        narrows = self.narrows and wide is torch.float32 and type(self).forward is LinearMixer.forward
        memory = TensorSpec("memory", shape, wide, (torch.bfloat16,) if narrows else ())
        return (*convolution_spec(self.conv, dtype), memory, *self.further_spec(wide))

    def further_spec(self, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """Return the tensors of the state besides those of every linear mixer; dtype: that of the memory.

        It is a method because torch.compile cannot read a property of the base class (`super().state_spec`).
        """
        return ()

    @property
    def memory_rows(self) -> int:
        return self.key_dim

    @property
    def memory_columns(self) -> int:
        return self.value_dim

    def forward(self, x: Tensor, state: Memory | None = None, cu_seqlens: Bounds = None) -> tuple[Tensor, Memory]:
        """Mix the tokens of x `b t hidden`; the state is the memory and the convolution's last inputs.

        Args:
            x: `b t hidden`; with cu_seqlens `1 t hidden`.
            state: what an earlier call returned, to continue its sequences; with None they begin here.
            cu_seqlens: where sequences packed into one row begin and end, `n_seqs + 1`.
        """
        check_call(self, x, state, cu_seqlens)
        if state is not None and state.ring is not None:
            return self._forward_with_ring(x, state)
        segment, packed = segment_of(self.context, x, cu_seqlens)
        q, k, v, gates, _, conv = self.enter(x, state, packed, segment)
        tensors = {} if conv is None else {"conv": conv}
        memory = None if state is None else state["memory"]
        owned = state is not None and state.owned and segment is None  # a segment's rule reads the memory several times
        bounds = packed if segment is None else segment
        if memory is None or memory.dtype == compute_dtype(v.dtype):
            (output, tensors["memory"]), z = self.attend(q, k, v, gates, memory, bounds, owned)
        else:
            assert state is not None
            seeds = state.seeds
            if seeds is not None and x.shape[1] > 1:
                seeds = seeds + (x.shape[1] - 1)  # those of the last token
            (output, tensors["memory"]), z = self.attend_narrow(q, k, v, gates, memory, bounds, owned, seeds)
        return self.leave(output, z), Memory(tensors)

    @property
    def takes_ring(self) -> bool:
        """Whether its memory may be written at every n-th token alone: it only runs a rule with one key."""
        if not self.runs_rule_alone or type(self).forward is not LinearMixer.forward or self.context is not None:
            return False
        return self.rule in ONE_KEY_RULES

    @torch.no_grad()
    def ring(self, memory: Tensor, every: int, clock: tuple[Tensor, Tensor]) -> Ring:
        """Return an empty ring of its memory `slots hv k v`, see lineate.Ring; only where takes_ring.

        Args:
            memory: The memories, which the ring stays bound to.
            every: The tokens after which they are written.
            clock: Counters `slots` of tokens, and of those at the last fold, which the caller advances.
        """
        x = torch.zeros(1, 1, self.in_proj.in_features, dtype=self.in_proj.weight.dtype, device=memory.device)
        entered = self.enter(x)
        inputs = self.rule_inputs(*entered[:4]).replace(state=memory)
        raw = inputs.A_log is not None
        kept = RawGates(raw, raw, lower_bound=self.gate_lower_bound if raw else None)
        return ring_of(inputs, every, kept, raw or self.normalize_qk, clock, self.rule_of(inputs))

    def _forward_with_ring(self, x: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """Mix one token of every row, which goes into the ring of the memory, or with it into the memory."""
        entered = self.enter(x, state)
        memory = state["memory"]
        seeds = state.seeds if memory.dtype is torch.bfloat16 else None
        inputs = self.rule_inputs(*entered[:4])
        output = self.read(self.decode(inputs, memory, Slots(seeds=seeds), state.ring), entered.v)
        tensors = {} if entered.conv is None else {"conv": entered.conv}
        return self.leave(output, self.output_gate(entered.gates)), Memory({**tensors, "memory": memory})

    def enter(
        self, x: Tensor, state: Memory | None = None, packed: Tensor | None = None, segment: Segment | None = None
    ) -> Entered:
        """Return what the rule reads of x `b t hidden`: projected, convolved, and cut into heads."""
        raw, *gates = self.project(x)
        mixed, conv = raw, None
        if self.conv is not None:
            inputs = None if state is None else state["conv"]
            if segment is not None:
                mixed, inputs = enter_convolution(segment, mixed, inputs, self.conv.weight.shape[1] - 1)
            mixed, conv = self.conv(mixed, inputs, packed)
        return Entered(*self.split_heads(mixed), gates, raw, conv)

    def leave(self, output: Tensor, z: Tensor) -> Tensor:
        """Return out_proj(norm(output) * act(z)) of the rule's output `b t hv v` and the output gate `b t hv*v`."""
        y = self.norm(output, z.unflatten(-1, (self.value_heads, self.value_dim)))
        return project_out(self.out_proj, y.flatten(2), self.ranks)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return in_proj(x), cut into q | k | v and the gates.

        On a GPU, a product of 16-bit matrices takes twice as long if the size of a row is not a multiple of 16 bytes.
        In that case the few columns of the gates per head, which come last, are computed by a separate product.
        """
        heads = len(list(takewhile(PER_HEAD.__contains__, reversed(self.gates))))
        aligned = sum(self.splits) % 8 == 0 or not heads or not x.is_cuda
        aligned = aligned or isinstance(self.in_proj.weight, QuantisedWeight)
        if aligned or x.shape[1] == 1 or type(self.in_proj) is not nn.Linear or self.in_proj.bias is not None:
            return project(self.in_proj, x).split(self.splits, -1)
        weight: Tensor = self.in_proj.weight
        wide, narrow = weight.split((sum(self.splits[:-heads]), sum(self.splits[-heads:])))
        return (
            *F.linear(x, wide).split(self.splits[:-heads], -1),
            *F.linear(x, narrow).split(self.splits[-heads:], -1),
        )

    def split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut q | k | v into heads."""
        keys = self.heads * self.key_dim
        q, k, v = mixed.split((keys, keys, self.width - 2 * keys), -1)
        q, k = (y.unflatten(-1, (self.heads, self.key_dim)) for y in (q, k))
        return q, k, v.unflatten(-1, (self.value_heads, self.value_dim))

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        """Return the arguments of the rule: its gates, or raw gates together with A_log.

        A mixer of your own overrides this method. Without a `rule`, it runs the one that takes the gates given here.
        """
        raise NotImplementedError(f"{type(self).__name__} must have rule_inputs, as every LinearMixer")

    def set_rate(self, rate: str) -> None:
        """Set the rate of writing; the keys are normalised for "beta" alone."""
        checks.check_choice("rate", rate, WRITING_RATES)
        self.rate, self.normalize_qk = rate, rate == "beta"

    def with_rate(self, inputs: Inputs) -> Inputs:
        """Return the arguments of a delta rule with its rate of writing; all but "beta" need activated gates."""
        if self.rate == "beta":
            return inputs
        if inputs.A_log is not None:
            inputs = activated(inputs, RawGates(beta_scale=self.beta_scale, lower_bound=self.gate_lower_bound))
        q, k, beta = inputs.q, inputs.k, inputs.beta
        assert beta is not None
        q = normalize(q.to(compute_dtype(q.dtype))).to(q.dtype)
        return inputs.replace(q=q, beta=rate_of_key(k, beta, self.rate))

    def output_gate(self, gates: Sequence[Tensor]) -> Tensor:
        """Return z `b t hv*v`, before its activation; unused values of that shape if there is no gate."""
        z = gates[self.gates.index("values")]
        if self.norm.activation == "none":
            return z.new_zeros(()).expand(*z.shape[:-1], self.value_heads * self.value_dim)
        return z

    def features(self, x: Tensor) -> Tensor:
        """Return q or k `b t h k` as the rule uses it."""
        return normalize(x) if self.normalize_qk else x

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], memory: Tensor | None, bounds: Bounds, owned: bool
    ) -> tuple[Attended[Tensor], Tensor]:
        """Run the rule, and return the output gate too. owned: whether the rule may overwrite the memory in place."""
        inputs = self.rule_inputs(q, k, v, gates).replace(state=memory)
        run = partial(self.run_rule, owned=owned)
        output, memory = run_rule(run, inputs, bounds, corrects=self.rule_of(inputs).corrects)
        return Attended(self.read(output, v), memory), self.output_gate(gates)

    def read(self, output: Tensor, v: Tensor) -> Tensor:
        """Return the rule's output `b t hv v` with what a mixer adds to it token by token; v is what the rule read."""
        return output

    def attend_narrow(
        self, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], memory: Tensor, bounds: Bounds, owned: bool,
        seeds: Tensor | None,
    ) -> tuple[Attended[Tensor], Tensor]:  # fmt: skip
        """Run attend in float32 from a bfloat16 memory; the new memory is rounded once, after the last token.

        seeds: `rows`, rounds stochastically; None: to the nearest.
        """
        alone = self.runs_rule_alone and q.shape[1] == 1 and bounds is None
        if alone and q.is_cuda and not torch.is_grad_enabled():
            memory = memory if owned else memory.clone()
            output = self.decode(self.rule_inputs(q, k, v, gates), memory, Slots(seeds=seeds))
            return Attended(self.read(output, v), memory), self.output_gate(gates)
        wide = memory.to(compute_dtype(v.dtype))
        (output, after), z = self.attend(q, k, v, gates, wide, bounds, bounds is None)
        return Attended(output, round_memory(after, seeds).to(memory.dtype)), z

    def decode(self, inputs: Inputs, pool: Tensor, where: Slots, ring: Ring | None = None) -> Tensor:
        """Run the rule of `attend` on a few tokens with lineate.decode, which updates the pool or the ring in place."""
        raw = inputs.A_log is not None
        request = DecodeRequest(
            scale=self.scale,
            normalize_qk=raw or self.normalize_qk,
            raw_gates=raw,
            beta_scale=self.beta_scale if raw else 1.0,
            lower_bound=self.gate_lower_bound if raw else None,
            rounding=NEAREST if where.seeds is None else STOCHASTIC,
        )
        inputs, rule = inputs.replace(state=pool), self.rule_of(inputs)
        if ring is not None:
            return decode_with_ring(rule, inputs, where, request, ring)
        return decode_inputs(rule, inputs, where, request)

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "rule_op" in cls.__dict__:
            raise TypeError(
                f"{cls.__name__} must override run_rule(inputs, owned) in place of rule_op, which is not called"
            )

    @property
    def runs_rule_alone(self) -> bool:
        """Whether `attend` only runs the rule of rule_inputs, so that `decode` may run it; a subclass may do more."""
        own = type(self)
        return own.attend is LinearMixer.attend and own.run_rule is LinearMixer.run_rule

    def rule_of(self, inputs: Inputs) -> Rule:
        """Return the row of the rule that these inputs are for."""
        return self.rule or select_rule(inputs)

    def run_rule(self, inputs: Inputs, owned: bool = False) -> Attended[Tensor]:
        """Run the rule on its inputs, with a state or without. owned: whether it may overwrite the state in place."""
        rule = self.rule_of(inputs)
        if inputs.A_log is not None:
            if self.scale is not None:
                raise ValueError(f"scale must be None for a rule from raw gates, got {self.scale}; scale q instead")
            raw = RawGates(beta_scale=self.beta_scale, lower_bound=self.gate_lower_bound)
            return attend_raw_or_decode(rule, inputs, raw, in_place=owned)
        return attend_or_decode(rule, inputs, Request(scale=self.scale, normalize_qk=self.normalize_qk), in_place=owned)

    def trace(self, x: Tensor) -> Inputs:
        """Return the inputs of the rule on a sequence x `1 t hidden`: features or unit keys, and activated gates."""
        entered = self.enter(x)
        q, k, v = (y.to(compute_dtype(y.dtype)) for y in entered[:3])
        inputs = self.rule_inputs(q, k, v, entered.gates)
        if inputs.A_log is not None:
            inputs = activated(inputs, RawGates(beta_scale=self.beta_scale, lower_bound=self.gate_lower_bound))
        return inputs.map(self.features, ("q", "k"))


def attend_or_decode(rule: Rule, inputs: Inputs, request: Request, in_place: bool) -> Attended[Tensor]:
    """Run a rule; one token a row on a GPU, without gradients, is decoded in its memory if that may be overwritten.

    Args:
        rule: its row.
        inputs: what the rule is called with.
        request: the scale, and whether q and k are normalised.
        in_place: whether the memory may be overwritten, and returned.
    """
    state, decodes = inputs.state, inputs.q.shape[1] == 1 and inputs.cu_seqlens is None and inputs.q.is_cuda
    if state is None or not in_place or not decodes or torch.is_grad_enabled():
        return attend(rule, inputs, request)
    made = DecodeRequest(scale=request.scale, normalize_qk=request.normalize_qk)
    return Attended(decode_inputs(rule, inputs, Slots(), made), state)


def attend_raw_or_decode(rule: Rule, inputs: Inputs, raw: RawGates, in_place: bool = False) -> Attended[Tensor]:
    """Run a rule from raw gates; for one token a row, a GPU kernel on a copy of the memory, or else the recurrent form.

    Args:
        rule: its row.
        inputs: what the rule is called with, its gates raw.
        raw: how the gates are made from them.
        in_place: whether that launch may overwrite the memory, and return it.
    """
    if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None:
        if not inputs.q.is_cuda:
            return attend(rule, activated(inputs, raw), Request(normalize_qk=True))
        state = inputs.state
        if state is not None and not torch.is_grad_enabled():
            state = state if in_place else state.clone()
            request = DecodeRequest(
                normalize_qk=True, raw_gates=True, beta_scale=raw.beta_scale, lower_bound=raw.lower_bound
            )  # fmt: skip
            return Attended(decode_inputs(rule, inputs.replace(state=state), Slots(), request), state)
    return attend_raw(rule, inputs, raw)
