"""Layers of transformers with a delta rule: Gated DeltaNet and Kimi Delta Attention."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lineate.call import Inputs, RawGates
from lineate.integrations.transformers_layers import Projected
from lineate.layers.mixer import attend_raw_or_decode
from lineate.native import layers as native
from lineate.rule import GATED_DELTA, KIMI_DELTA, compute_dtype

CLOSED_GATE = -1e4
"""A raw gate that neither forgets nor writes: its softplus and sigmoid are 0, in float16 too."""


@dataclass(frozen=True)
class DeltaParts:
    """The names of the parts of a layer with a delta rule; a dotted name refers to a submodule.

    Where several projections are named, q, k and v have one each; the gates are the last of a chain (a low rank).
    """

    heads: tuple[str, str, str, str] = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    """The sizes h, hv, k and v."""
    qkv: tuple[str, ...] = ("in_proj_qkv",)
    """The projections to q | k | v."""
    output_gate: tuple[str, ...] = ("in_proj_z",)
    """The projections to the output gate, `hv*v`."""
    gate: tuple[str, ...] = ("in_proj_a",)
    """The projections to the decay's gate: `hv`, or `hv*k` for one decay per key channel."""
    write: str = "in_proj_b"
    """The projection to the logit of beta, `hv`."""
    grouped: bool = False
    """Whether qkv also has the output gate, and write also the decay's gate, each with columns grouped by key head."""
    decay: str | None = None
    """The submodule with A_log and dt_bias; None: the layer itself."""
    lower_bound: str | None = None
    """The lower bound of a bounded decay; None, or an attribute that is None, means no bound."""
    bounded: str | None = None
    """A switch without which lower_bound has no effect."""
    doubles_beta: str | None = None
    """A switch with which beta reaches 2, not 1."""
    norm: str = "norm"
    """The gated norm."""
    out: str = "out_proj"
    """The output projection."""

    @property
    def borrowed(self) -> tuple[str, ...]:
        return ("conv1d",) if self.decay is None else ("conv1d", self.decay)

    def project(self, layer: Any, x: Tensor, mask: Tensor | None) -> Projected:
        qkv, output_gate, gate, write = self._grouped(layer, x) if self.grouped else self._separate(layer, x)
        if gate.shape[-1] != write.shape[-1]:
            gate = gate.unflatten(-1, (write.shape[-1], -1))  # b t hv k
        if mask is not None:
            shut = ~mask
            write = write.masked_fill(shut[..., None], CLOSED_GATE)
            gate = gate.masked_fill(shut.view(*shut.shape, *[1] * (gate.dim() - 2)), CLOSED_GATE)
        return Projected(qkv, (gate, write), output_gate)

    def attend(
        self, layer: Any, mixed: Tensor, gates: tuple[Tensor, ...], state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        h, hv, k, v = sizes(layer, self.heads)
        parts = mixed.split([h * k, h * k, hv * v], dim=-1)
        q, keys, values = (y.unflatten(-1, (n, d)) for y, n, d in zip(parts, (h, h, hv), (k, k, v), strict=True))
        gate, write = gates
        owner = layer if self.decay is None else getattr(layer, self.decay)
        A_log, dt_bias = owner.A_log.flatten(), owner.dt_bias.view(gate.shape[2:])
        if state is not None:
            state = state.to(compute_dtype(values.dtype))
        inputs = Inputs(
            q=q, k=keys, v=values, log_decay=gate, beta=write, state=state, cu_seqlens=cu_seqlens, A_log=A_log,
            dt_bias=dt_bias,
        )  # fmt: skip
        beta_scale = 2.0 if self.doubles_beta is not None and getattr(layer, self.doubles_beta) else 1.0
        rule = KIMI_DELTA if gate.dim() == 4 else GATED_DELTA
        return attend_raw_or_decode(rule, inputs, RawGates(True, True, beta_scale, self._bound(layer)), in_place=True)

    def finish(self, layer: Any, output: Tensor, output_gate: Tensor) -> Tensor:
        normed = _gated_norm(getattr(layer, self.norm), output, output_gate.view(output.shape))
        result: Tensor = getattr(layer, self.out)(normed.flatten(2))
        return result

    def _bound(self, layer: Any) -> float | None:
        """Return the lower bound of log_decay, if this layer has one."""
        if self.lower_bound is None or (self.bounded is not None and not attrgetter(self.bounded)(layer)):
            return None
        bound: float | None = attrgetter(self.lower_bound)(layer)
        return bound

    def _separate(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q | k | v, the output gate, the decay's gate and the logit of beta, of separate projections."""
        parts = [getattr(layer, name)(x) for name in self.qkv]
        qkv = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return qkv, _chain(layer, self.output_gate, x), _chain(layer, self.gate, x), getattr(layer, self.write)(x)

    def _grouped(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same of projections grouped by key head: (q, k, v, output gate) and (write, gate)."""
        b, t = x.shape[:2]
        h, hv, k, v = sizes(layer, self.heads)
        wide = hv // h * v  # value columns of a key head's group
        parts = getattr(layer, self.qkv[0])(x).view(b, t, h, 2 * (k + wide)).split([k, k, wide, wide], dim=-1)
        qkv = torch.cat([part.reshape(b, t, -1) for part in parts[:3]], dim=-1)
        write, gate = (y.reshape(b, t, hv) for y in getattr(layer, self.write)(x).view(b, t, h, -1).chunk(2, dim=-1))
        return qkv, parts[3].reshape(b, t, -1), gate, write


def sizes(layer: Any, names: tuple[str, str, str, str]) -> tuple[int, int, int, int]:
    """Return the sizes h, hv, k and v of a layer."""
    h, hv, k, v = (getattr(layer, name) for name in names)
    return h, hv, k, v


def _chain(layer: Any, names: tuple[str, ...], x: Tensor) -> Tensor:
    for name in names:
        x = attrgetter(name)(layer)(x)
    return x


def _gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Apply the layer's own norm; on a CPU in one fused pass, unless the norm has hooks or was replaced."""
    plain = type(norm).__name__.endswith("RMSNormGated") and "forward" not in norm.__dict__
    hooked = norm._forward_hooks or norm._forward_pre_hooks
    if plain and not hooked and norm.activation in ("silu", "sigmoid") and native.serves(x, norm.weight, gate):
        return native.gated_rms_norm(x, norm.weight, gate, norm.variance_epsilon, norm.activation)
    normed: Tensor = norm(x, gate)
    return normed
