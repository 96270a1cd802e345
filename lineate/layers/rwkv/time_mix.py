"""RWKV-7 "Goose": a memory with a decay, an erase direction and a learning rate per channel, behind a token shift.

    x^j = x_t + (x_{t-1} - x_t) * shift_j                       one mixture each for q, decay, k, v, rate and gate
    q = W_q x^q      k' = W_k x^k      v' = W_v x^v             per head; the authors write r for q
    log_decay = -e^(-1/2) sigmoid(decay(x^decay))               decay, rate, value_mix, gate: projections of low rank
    a = sigmoid(rate(x^rate))          g = gate(x^gate)
    e = unit(k' * erase_scale)         k = k' * (1 + (a - 1) * rate_scale)
    v = v' + (v'_first - v') * sigmoid(value_mix(x^v))          v'_first: of the first layer, whose v is v'
    S_t = Diag(exp(log_decay)) S_{t-1} - (a * e) (S_{t-1}^T e)^T + k v^T
    y = W_o ((norm(S_t^T q) + (q . (bonus * k)) v) * g)

The erase reads the memory before it decays, so the probe of `diagonal_plus_low_rank` is e / exp(log_decay). That is
safe, because exp(log_decay) is at least exp(-e^(-1/2)) = 0.545.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.call import Inputs, Request
from lineate.layers.by_hand import ByHand, HandMade, one_head
from lineate.layers.configs import RwkvConfig
from lineate.layers.entry import check_call
from lineate.layers.mixer import attend_or_decode
from lineate.layers.projection import project, project_out
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.rwkv.shift import mix_previous, previous_tokens, shift_spec, shift_weights
from lineate.layers.state import Carried, Memory, TensorSpec
from lineate.parallel.tensor.ranks import Ranks
from lineate.parallel.tensor.shards import Cut, Part, Shard, linear_cuts, share_out
from lineate.rule import DIAGONAL_PLUS_LOW_RANK, compute_dtype
from lineate.torch_ops.elementwise import elementwise

SHIFT = "shift"
"""The name of the last token in the state."""
FASTEST = -math.exp(-0.5)
"""The lower bound of log_decay."""
POWERS = {"q": 0.1, "decay": 0.45, "k": 0.35, "v": 0.35, "rate": 0.45, "gate": 0.1}
"""The mixtures of a token with the one before it, and the powers of their first weights (`shift_weights`)."""


class LowRank(nn.Module):
    """offset + up(activation(down(x))), a projection of low rank.

    Args:
        hidden_size: channels that come in.
        rank: channels in between.
        size: channels that go out.
        activation: of the channels in between; None: none.
        offset: whether an offset is added.
    """

    def __init__(
        self,
        hidden_size: int,
        rank: int,
        size: int,
        activation: Callable[[Tensor], Tensor] | None = None,
        *,
        offset: bool = True,
    ) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, size, bias=False)
        self.offset = nn.Parameter(torch.zeros(size)) if offset else None
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Project x `b t hidden`; in float32 where there is an offset, otherwise in the dtype of the weights."""
        inner = project(self.down, x)
        y = project(self.up, inner if self.activation is None else elementwise(self.activation, inner))
        return y if self.offset is None else y.to(compute_dtype(y.dtype)) + self.offset


class HeadNorm(nn.Module):
    """LayerNorm over the channels of each head, with a weight and a bias for all heads' channels, in float32.

    Args:
        size: channels of all heads.
        eps: added to the variance.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x `b t heads v`; the result has the same shape and the dtype of the computation."""
        dtype, shape = compute_dtype(x.dtype), x.shape[2:]
        y = F.layer_norm(x.to(dtype), shape[1:], eps=self.eps)
        return y * self.weight.to(dtype).view(shape) + self.bias.to(dtype).view(shape)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Entered(NamedTuple):
    """The inputs of the rule of RWKV-7, and what its output needs.

    Args:
        inputs: the arguments of the rule, without a state.
        gate: the output gate, `b t heads*v`.
        last: the last token of every row, `rows hidden`.
    """

    inputs: Inputs
    gate: Tensor
    last: Tensor


class RWKV7(nn.Module):
    """The time mix of RWKV-7: S = Diag(w) S - (a e) (S^T e)^T + k v^T; the state is the last token and S.

        first = RWKV7(512, heads=8, head_dim=64, value_rank=0)
        later = RWKV7(512, heads=8, head_dim=64)
        carried = Carried()                            # of lineate.layers.state; a model makes one for each call
        x, state = first(x, None, None, carried)
        x, state = later(x, None, None, carried)       # reads the values of the first layer

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: heads, of queries, keys and values.
        head_dim: channels of a key.
        value_dim: channels of a value; None is head_dim.
        decay_rank: width of the low-rank projection to the decay.
        rate_rank: width of the low-rank projection to the learning rate.
        value_rank: width of the low-rank projection that mixes values with those of the first layer; 0: it is that one.
        gate_rank: width of the low-rank projection to the output gate.
        norm_eps: epsilon of the output norm.
    """

    ranks: Ranks | None = None
    """If set, the other heads are on other ranks, and the result is this rank's summand (docs/scaling.md)."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        decay_rank: int = 64,
        rate_rank: int = 64,
        value_rank: int = 32,
        gate_rank: int = 128,
        norm_eps: float = 64e-5,
    ) -> None:
        super().__init__()
        self.heads, self.key_dim = heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.decay = LowRank(hidden_size, decay_rank, keys, torch.tanh)
        self.rate = LowRank(hidden_size, rate_rank, keys)
        self.value_mix = LowRank(hidden_size, value_rank, values) if value_rank else None
        self.gate = LowRank(hidden_size, gate_rank, values, torch.sigmoid, offset=False)
        for name in POWERS:
            self.register_parameter(f"shift_{name}", nn.Parameter(torch.empty(hidden_size)))
        self.erase_scale = nn.Parameter(torch.empty(keys))
        self.rate_scale = nn.Parameter(torch.empty(keys))
        self.bonus = nn.Parameter(torch.empty(keys))
        self.norm = HeadNorm(values, norm_eps)
        self.out_proj = nn.Linear(values, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters that are no matrices to the authors' first values for a layer in the middle of a model."""
        for name, power in POWERS.items():
            shift = self.get_parameter(f"shift_{name}")
            shift.copy_(shift_weights(len(shift), power))
        keys, values = (torch.linspace(0, 1, x.out_features, device="cpu") for x in (self.k_proj, self.v_proj))
        wave = torch.linspace(-1, 1, self.key_dim, device="cpu").repeat(self.heads)
        wave = wave * wave.abs()
        self.erase_scale.copy_(0.76 - 0.1 * keys)
        self.rate_scale.fill_(1.02)
        self.bonus.fill_(-0.04)
        for module, first in (
            (self.decay, 6 * keys**1.8 - 5.5 + 2.5 * wave),
            (self.rate, 0.4 * keys - 0.39 + 0.3 * wave),
            (self.value_mix, 0.93 - 0.4 * values),
        ):
            if module is not None and module.offset is not None:
                module.offset.copy_(first)

    @property
    def in_proj(self) -> nn.Linear:
        """A projection of the tokens that come in, by which calls are checked."""
        return self.q_proj

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        dtype = self.q_proj.weight.dtype
        memory = TensorSpec("memory", (self.heads, self.key_dim, self.value_dim), compute_dtype(dtype))
        return shift_spec(SHIFT, self.q_proj.in_features, dtype), memory

    def forward(
        self,
        x: Tensor,
        state: Memory | None = None,
        cu_seqlens: Tensor | None = None,
        carried: Carried | None = None,
    ) -> tuple[Tensor, Memory]:
        """Mix the tokens of x `b t hidden`; the state is the last token and the memory.

        Args:
            x: `b t hidden`; with cu_seqlens `1 t hidden`.
            state: what an earlier call returned, to continue its sequences; with None they begin here.
            cu_seqlens: where sequences packed into one row begin and end, `n_seqs + 1`.
            carried: what the layers of a call hand on: the first layer writes its values there, the others read them.
        """
        check_call(self, x, state, cu_seqlens)
        entered = self.enter(x, None if state is None else state[SHIFT], cu_seqlens, carried)
        inputs = entered.inputs.replace(state=None if state is None else state["memory"], cu_seqlens=cu_seqlens)
        owned = state is not None and state.owned
        output, memory = attend_or_decode(DIAGONAL_PLUS_LOW_RANK, inputs, Request(scale=1.0), in_place=owned)
        return self.leave(output, entered), Memory({SHIFT: entered.last, "memory": memory})

    def enter(
        self, x: Tensor, before: Tensor | None = None, cu_seqlens: Tensor | None = None, carried: Carried | None = None
    ) -> Entered:
        """Return what the rule reads of x `b t hidden`, and the output gate."""
        previous, last = previous_tokens(x, before, cu_seqlens)
        change, dtype = previous - x, compute_dtype(x.dtype)
        mixed = {name: mix_previous(x, change, getattr(self, f"shift_{name}")) for name in POWERS}
        q, k = project(self.q_proj, mixed["q"]), project(self.k_proj, mixed["k"])
        v = self._values(project(self.v_proj, mixed["v"]), mixed["v"], carried)
        log_decay = FASTEST * elementwise(torch.sigmoid, self.decay(mixed["decay"]).to(dtype))
        rate = elementwise(torch.sigmoid, self.rate(mixed["rate"]).to(dtype))
        wide = k.to(dtype)
        k = (wide * (1 + (rate - 1) * self.rate_scale)).to(k.dtype)
        q, k, log_decay, rate, erase = (
            y.unflatten(-1, (self.heads, self.key_dim)) for y in (q, k, log_decay, rate, wide * self.erase_scale)
        )
        erase = F.normalize(erase, dim=-1)
        inputs = Inputs(
            q=q, k=k, v=v.unflatten(-1, (self.heads, self.value_dim)), log_decay=log_decay,
            probe=erase * (-log_decay).exp(), direction=erase * rate,
        )  # fmt: skip
        return Entered(inputs, self.gate(mixed["gate"]), last)

    def _values(self, v: Tensor, x: Tensor, carried: Carried | None) -> Tensor:
        """Return the values `b t heads*v` of the projected v, mixed with those of the first layer.

        x: the tokens that v was projected from. carried: where the first layer writes its values.
        """
        if self.value_mix is None:
            if carried is not None:
                carried.first_value = v
            return v
        first = None if carried is None else carried.first_value
        if first is None or first.shape != v.shape:
            got = "none" if first is None else f"values of shape {tuple(first.shape)}"
            raise ValueError(
                f"carried must have the values of the first layer, of shape {tuple(v.shape)}, for a layer with "
                f"value_rank > 0, got {got}; pass one Carried() to the first layer, which has value_rank=0, and then "
                "to this one"
            )
        share = elementwise(torch.sigmoid, self.value_mix(x).to(compute_dtype(v.dtype)))
        return torch.lerp(v.to(share.dtype), first.to(share.dtype), share).to(v.dtype)

    def leave(self, output: Tensor, entered: Entered) -> Tensor:
        """Return out_proj((norm(output) + bonus) * gate) of the rule's output `b t heads v`."""
        q, k, v = entered.inputs.q, entered.inputs.k, entered.inputs.v
        y = self.norm(output)
        bonus = self.bonus.to(y.dtype).view(self.heads, self.key_dim)
        y = y + (q.to(y.dtype) * k.to(y.dtype) * bonus).sum(-1, keepdim=True) * v.to(y.dtype)
        return project_out(self.out_proj, (y.flatten(2) * entered.gate).to(v.dtype), self.ranks)

    def trace(self, x: Tensor, carried: Carried | None = None) -> Inputs:
        """Return the arguments of the rule on a sequence x `1 t hidden`, in the compute dtype, for the default scale.

        Args:
            x: `1 t hidden`.
            carried: what the layers of the call hand on; None for the first layer.
        """
        inputs = self.enter(x, None, None, carried).inputs
        inputs = inputs.map(lambda y: y.to(compute_dtype(y.dtype)), ("q", "k", "v"))
        return inputs.replace(q=inputs.q * self.key_dim**0.5)

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by heads; shifts and low ranks are whole on each."""
        keys, values = (
            Part(self.heads * self.key_dim, self.heads),
            Part(self.heads * self.value_dim, self.heads),
        )
        cuts = linear_cuts("out_proj", self.out_proj, 1, (values,))
        for name, part in (("q_proj", keys), ("k_proj", keys), ("v_proj", values)):
            cuts |= linear_cuts(name, getattr(self, name), 0, (part,))
        for name, part in (("decay", keys), ("rate", keys), ("value_mix", values), ("gate", values)):
            low = getattr(self, name)
            if low is not None:
                cuts |= linear_cuts(f"{name}.up", low.up, 0, (part,))
                cuts |= {} if low.offset is None else {f"{name}.offset": Cut(0, (part,))}
        cuts |= {name: Cut(0, (keys,)) for name in ("erase_scale", "rate_scale", "bonus")}
        return cuts | {f"norm.{name}": Cut(0, (values,)) for name in ("weight", "bias")}

    def stand_in(self, x: Tensor) -> Carried:
        """Return what an earlier layer would have handed on for x `b t hidden`, with zeros for its values."""
        return Carried(x.new_zeros(*x.shape[:2], self.heads * self.value_dim))


def _make(model: ModelSizes, x: RwkvConfig) -> RWKV7:
    return RWKV7(
        model.hidden_size, x.heads, x.head_dim, value_dim=x.value_dim, decay_rank=x.decay_rank,
        rate_rank=x.rate_rank, value_rank=x.value_rank, gate_rank=x.gate_rank, norm_eps=x.norm_eps,
    )  # fmt: skip


def _divide(x: RwkvConfig, ranks: int) -> RwkvConfig:
    """Return the sizes of one rank's share."""
    return replace(x, heads=share_out("the heads", x.heads, ranks))


def _by_hand(x: HandMade) -> Inputs:
    """Erase what the key holds at the rate `erase`, at most 1, then add; a channel keeps at least exp(FASTEST)."""
    log_decay, k = one_head(x.log_decays.clamp(min=FASTEST)), one_head(x.k)
    direction = one_head(x.erase.clamp(max=1.0)[:, None]) * k
    return Inputs(q=k, k=k, v=one_head(x.v), log_decay=log_decay, probe=k * (-log_decay).exp(), direction=direction)


KIND = register(
    MixerKind(
        letter="V",
        name="rwkv7",
        label="RWKV-7",
        config=RwkvConfig,
        section="rwkv",
        make=_make,
        trace=RWKV7.trace,
        by_hand=ByHand(_by_hand, "erases, then forgets; keeps at least .55"),
        look=Look("#661100", "d", (0, (3, 1, 1, 1))),
        rule="diagonal_plus_low_rank",
        shard=Shard(_divide, lambda mixer: mixer.cuts()),
        first=lambda x: replace(x, value_rank=0),
    )
)
