"""A decoding step of a block on a GPU: one token a row, its state overwritten, in few launches.

    x = x + out_proj(mix(in_proj(norm(x))))      x = x + down(glu(gate_up(norm(x))))

A step reads every weight and memory once, which takes microseconds a layer; so norms, gates, convolution and residuals
are computed inside the launches that read weights and memories (kernels/layers/products.py, token.py). With many rows
torch multiplies, and what surrounds the product is separate. In a batch-invariant step every product is one of
layers/invariant.py, and all numbers of rows take the same launches.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lineate.call import Inputs, Options, Slots
from lineate.kernels import DECODE_WRITES
from lineate.layers import invariant
from lineate.layers.attention import GatedAttention
from lineate.layers.entry import check_call
from lineate.layers.feed import MixtureOfExperts, SquaredReLU, SwiGLU, glu
from lineate.layers.gpu import coded, kernels_for, overlaps, uncoded
from lineate.layers.latent import LatentAttention
from lineate.layers.mamba2 import GroupedGatedNorm
from lineate.layers.mixer import LinearMixer
from lineate.layers.norm import RMSNorm
from lineate.layers.projection import project, runs_own_forward
from lineate.layers.registry import step_of
from lineate.layers.rope import frequencies
from lineate.layers.softmax import reads_own_length
from lineate.layers.state import CacheInPlace, LayerState, Memory
from lineate.layers.step.spec import StepSpec
from lineate.layers.step.supported_modules import KNOWN
from lineate.ops.rings import Ring
from lineate.quantised import QuantisedWeight
from lineate.torch_ops.invariance import is_batch_invariant
from lineate.torch_ops.tracing import PLAIN_TENSORS, is_eager


def is_step(x: Tensor, state: LayerState | None) -> bool:
    """Whether x `b t hidden` is one token a row on a GPU, after a state that may be overwritten, without gradients."""
    if not x.is_cuda or x.shape[1] != 1 or not x.is_contiguous():
        return False
    owned = isinstance(state, CacheInPlace) or (isinstance(state, Memory) and state.owned)
    return owned and runs_steps(x)


def runs_steps(x: Tensor) -> bool:
    """Whether the kernels of a step may run: on a GPU, without gradients, and without autocast."""
    if not x.is_cuda or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    return is_eager(x) and kernels_for(x) is not None


class Mixed(NamedTuple):
    """The result of a step of a mixer.

    Args:
        x: x + mixer(norm(x)), `rows 1 hidden`.
        normed: Its norm for the feed-forward, `rows hidden`, if this step computes it; otherwise None.
        state: The new state.
    """

    x: Tensor
    normed: Tensor | None
    state: LayerState


def mix_step(norm: RMSNorm, mixer: nn.Module, x: Tensor, state: LayerState, then: RMSNorm | None) -> Mixed | None:
    """Return x + mixer(norm(x)) and the new state, where is_step; None if this mixer has no such step.

    Args:
        norm: Of the mixer's input.
        mixer: The mixer.
        x: `rows 1 hidden`.
        state: The mixer's state, which is overwritten.
        then: The norm of the feed-forward that follows, if one does.
    """
    found = None
    spec = step_of(mixer)
    if spec is not None:
        assert isinstance(mixer, LinearMixer) and isinstance(state, Memory)
        found = _linear_step(norm, mixer, spec, x, state)
    elif type(mixer) is GatedAttention and isinstance(state, CacheInPlace):
        found = _attention_step(norm, mixer, x, state)
    elif type(mixer) is LatentAttention and isinstance(state, CacheInPlace):
        found = _latent_step(norm, mixer, x, state)
    if found is None:
        return None
    y, new = found
    total, normed = _leave(y, mixer.out_proj, x[:, 0], then if then is not None and _are_bare(then) else None)  # type: ignore[arg-type]
    return Mixed(total[:, None], normed, new)


def feed_step(norm: RMSNorm, feed: nn.Module, x: Tensor, normed: Tensor | None = None) -> Tensor | None:
    """Return x + feed(norm(x)), where is_step; None if this feed-forward has no such step.

    A mixture of experts adds x itself (kernels/layers/mixture.py); for one row the norm is part of its first launch.

    Args:
        norm: Of the feed-forward's input.
        feed: The feed-forward.
        x: `rows 1 hidden`.
        normed: norm(x) `rows hidden`, if it was made before.
    """
    if type(feed) is MixtureOfExperts and _are_bare(norm, feed):
        if len(x) == 1 and normed is None and not is_batch_invariant():
            made = feed.after(norm, x[:, 0])
            return None if made is None else made[:, None]
        return feed.add_to(x[:, 0], norm(x[:, 0]) if normed is None else normed)[:, None]
    if type(feed) is SquaredReLU and is_batch_invariant():  # it calls nothing but projections and elementwise functions
        normed = norm(x[:, 0]) if normed is None else normed
        return x + feed(normed)[:, None]
    if type(feed) is not SwiGLU or not _are_bare(norm, feed, feed.gate_up_proj, feed.down_proj):
        return None
    y = _enter(x[:, 0], norm, feed.gate_up_proj, normed, gated=True)
    total, _ = _leave(y, feed.down_proj, x[:, 0])
    return total[:, None]


def sum_and_norm(norm: RMSNorm, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return x + y `rows hidden`, where runs_steps, and its norm, if one launch computes both."""
    from lineate.kernels.layers import products  # triton, at its first use

    alike = x.dtype == y.dtype and x.shape[1] <= products.WIDEST
    if len(x) == 1 or not alike or not _are_bare(norm):
        return x + y, None
    around = (norm.weight, norm.eps, norm.zero_centred)
    return products.add_and_norm(x.contiguous(), y.contiguous()[None], around)


def _linear_step(
    norm: RMSNorm, mixer: LinearMixer, spec: StepSpec, x: Tensor, state: Memory
) -> tuple[Tensor, LayerState] | None:
    """Return what out_proj reads, `rows hv*v`, and the state."""
    from lineate.kernels.layers import token  # triton, at its first use

    memory, conv = state["memory"], mixer.conv
    if state.ring is not None and not _serves_ring(mixer, spec, state.ring):
        return None
    if not _serves_mixer(norm, mixer, spec) or not token.serves_memory(memory):
        return None
    if conv is not None and not state["conv"].is_contiguous():
        return None
    check_call(mixer, x, state, None)
    convolution = None if conv is None else (conv.weight, state["conv"])
    mixed, y = _convolved(x[:, 0], mixer.in_proj, norm, convolution, mixer.width, None if conv is None else conv.bias)
    if conv is None and is_batch_invariant():
        mixed = mixed.contiguous()  # strides of views choose kernels, and a single row has none
    _, *columns = y[:, None].split(mixer.splits, -1)
    q, k, v = mixer.split_heads(mixed[:, None])
    raw = dict(zip(spec.columns, columns, strict=True))
    _project_low(mixer, spec, raw)
    decay = raw.get("decay")
    if decay is not None and spec.decay == "channel":
        decay = decay.unflatten(-1, (mixer.value_heads, mixer.key_dim))
    biased = spec.decay_gate in ("speed", "step")
    inputs = Inputs(
        q=q, k=k, v=v, log_decay=decay, **_raw_gates(mixer, spec, raw), state=memory,
        A_log=_parameter(mixer, "A_log") if biased else None,
        dt_bias=_parameter(mixer, "dt_bias") if biased else None,
    )  # fmt: skip
    output = _mix(mixer, spec, inputs, raw["gate"], state)
    return output[:, 0], Memory(state.tensors)


def _serves_ring(mixer: LinearMixer, spec: StepSpec, ring: Ring) -> bool:
    """Whether the gates of a step are those that the ring was made for (LinearMixer.ring)."""
    return spec.decay_gate == "speed" and not spec.rule.general and mixer.rate == "beta" and ring.rule is spec.rule


def _raw_gates(mixer: LinearMixer, spec: StepSpec, raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gates of the rule besides its decay, raw, from the columns of in_proj."""
    if spec.rule.writes:
        return {"beta": raw["write"].unflatten(-1, (mixer.writes, mixer.value_heads))}  # b 1 n hv
    if "erase" not in raw:
        return {"beta": raw["write"]} if "write" in raw else {}
    keys, values = ((mixer.value_heads, size) for size in (mixer.key_dim, mixer.value_dim))
    return {"erase": raw["erase"].unflatten(-1, keys), "write": raw["write"].unflatten(-1, values)}


def _project_low(mixer: LinearMixer, spec: StepSpec, raw: dict[str, Tensor]) -> None:
    """Replace the gates that have a projection of low rank by its outputs; one row of two gates takes one launch."""
    from lineate.kernels.layers import products  # triton, at its first use

    low = {name: getattr(mixer, f"{name}_proj") for name in spec.low_rank}
    found = {name: module for name, module in low.items() if module is not None}
    pair = len(found) == 2 and not is_batch_invariant() and _are_bare(*found.values())
    if pair and all(module.bias is None for module in found.values()):
        (first, one), (second, other) = found.items()
        given = raw[first][:, 0], uncoded(one.weight), raw[second][:, 0], uncoded(other.weight)
        if products.serves_pair(*given):
            raw[first], raw[second] = (y[:, None] for y in products.product_pair(*given))
            return
    for name, module in found.items():
        raw[name] = project(module, raw[name])


def _parameter(mixer: LinearMixer, name: str) -> Tensor:
    found: Tensor = getattr(mixer, name)
    return found


def _serves_mixer(norm: RMSNorm, mixer: LinearMixer, spec: StepSpec) -> bool:
    """Whether kernels compute a mixer of this description: what they cannot read is left to its forward."""
    from lineate.kernels.layers.ops import SIZES
    from lineate.kernels.layers.token import WIDEST_GROUP

    parts = [norm, mixer, mixer.in_proj, mixer.norm, mixer.out_proj, *([] if mixer.conv is None else [mixer.conv])]
    if mixer.context is not None or mixer.in_proj.bias is not None or mixer.norm.activation == "none":
        return False
    mapped = spec.features == "map" and mixer.feature_map != "identity"
    if spec.divides or mapped or not _are_bare(*parts):
        return False
    if mixer.conv is not None and mixer.conv.weight.shape[1] not in SIZES:
        return False
    if mixer.writes > DECODE_WRITES:
        return False
    own = mixer.norm
    if not isinstance(own, GroupedGatedNorm):
        return not spec.grouped
    return own.groups > 0 and len(own.weight) // own.groups <= WIDEST_GROUP


def _mix(mixer: LinearMixer, spec: StepSpec, inputs: Inputs, z: Tensor, state: Memory) -> Tensor:
    """Return norm(o + D v) act(z) of one token a row, `rows 1 hv*v`; the memory or its ring is overwritten."""
    from lineate.kernels.layers import token  # triton, at its first use
    from lineate.kernels.portable.decode import decode
    from lineate.kernels.portable.launch_ring import decode_ring

    seeds = state.seeds
    own, scale = mixer.norm, mixer.key_dim**-0.5 if mixer.scale is None else mixer.scale
    options = Options(
        spec.rule, scale, True, beta_scale=mixer.beta_scale, raw_decay=True, raw_beta=True,
        lower_bound=mixer.gate_lower_bound,
    )  # fmt: skip
    if state.ring is not None:
        where = Slots(seeds=seeds if state["memory"].dtype is torch.bfloat16 else None)
        output = decode_ring(inputs, where, state.ring.tensors, options, settled=True)
        return own(output, z.unflatten(-1, (mixer.value_heads, mixer.value_dim))).flatten(2)
    if spec.rule.general:
        return _mix_general(mixer, inputs, options, z, Slots(seeds=seeds))
    many = len(inputs.q) > token.FEW_ROWS or is_batch_invariant()
    if many and spec.decay_gate == "speed":
        output = decode(inputs, Slots(seeds=seeds), options, settled=True)
        return own(output, z.unflatten(-1, (mixer.value_heads, mixer.value_dim))).flatten(2)
    does = token.Token(
        spec.features == "unit", spec.decay_gate, scale, mixer.beta_scale, mixer.gate_lower_bound, mixer.temperature,
        mixer.step_least, math.inf if mixer.step_most is None else mixer.step_most,
    )  # fmt: skip
    skip = _parameter(mixer, "D") if spec.skips else None
    if not isinstance(own, GroupedGatedNorm):
        return token.mix(inputs, does, (z, own.weight, own.eps, own.activation == "silu"), skip, seeds)
    output = token.mix(inputs, does, None, skip, seeds)
    return token.norm_groups(output, z, own.weight, groups=own.groups, eps=own.eps, gate_first=own.gate_first)


def _mix_general(mixer: LinearMixer, inputs: Inputs, options: Options, z: Tensor, where: Slots) -> Tensor:
    """Return norm(o) act(z) of one token a row of a rule of the general row, as _mix does."""
    from lineate.kernels.layers import token  # triton, at its first use
    from lineate.kernels.portable.decode_general import GatedNorm, decode_general

    own, norm = mixer.norm, None
    if not isinstance(own, GroupedGatedNorm) and (len(z) <= token.FEW_ROWS or is_batch_invariant()):
        norm = GatedNorm(z, own.weight, own.eps, own.activation == "silu")
    output = decode_general(inputs, where, options, settled=True, logits=True, norm=norm)
    if norm is not None:
        return output.flatten(2)
    if isinstance(own, GroupedGatedNorm):
        x = output.flatten(2)
        return token.norm_groups(x, z, own.weight, groups=own.groups, eps=own.eps, gate_first=own.gate_first)
    return own(output, z.unflatten(-1, (mixer.value_heads, mixer.value_dim))).flatten(2)


def _attention_step(
    norm: RMSNorm, mixer: GatedAttention, x: Tensor, state: CacheInPlace
) -> tuple[Tensor, LayerState] | None:
    """Return what out_proj reads, `rows heads*d`, and the state."""
    from lineate.kernels.layers import cached, token  # triton, at its first use

    norms = [] if mixer.qk_norm is None else [mixer.q_norm, mixer.k_norm]
    if mixer.context is not None or mixer.qk_norm == "full":
        return None
    if not _are_bare(norm, mixer, mixer.in_proj, mixer.out_proj, *norms):
        return None
    keys, values = state["keys"], state["values"]
    if not token.serves_caches(keys, values) or keys.dtype != x.dtype or not reads_own_length(mixer, 1):
        return None
    check_call(mixer, x, state, None)
    y = _enter(x[:, 0], norm, mixer.in_proj)[:, None]
    q, gate, k, v = y.split(mixer.splits, -1)
    q, k, v = (z.unflatten(-1, (-1, mixer.head_dim)) for z in (q, k, v))
    assert isinstance(state.lengths, Tensor)
    turning = _frequencies(mixer.rotary_dim, mixer.rope_theta, x.device) if mixer.rotary_dim else None
    weights = (mixer.q_norm.weight, mixer.k_norm.weight, mixer.q_norm.eps, mixer.q_norm.zero_centred) if norms else None
    q = token.place(q, k, v, weights, turning, state.lengths, keys, values)
    output = cached.cached_attention(
        q, keys, values, state.after, mixer.scale, gate if mixer.gated else None
    )  # fmt: skip
    return output.flatten(1), state.appended()


def _latent_step(
    norm: RMSNorm, mixer: LatentAttention, x: Tensor, state: CacheInPlace
) -> tuple[Tensor, LayerState] | None:
    """Return what out_proj reads, `rows heads*value`, and the state."""
    from lineate.kernels.layers.latent import place  # triton, at its first use

    cached, own = state["latent"], mixer.latent_norm
    if not mixer.absorbs or not _are_bare(norm, mixer, mixer.in_proj, own, mixer.up_proj, mixer.out_proj):
        return None
    if mixer.context is not None or cached.dtype != x.dtype or cached.stride(-1) != 1 or not mixer.reads_own_length(1):
        return None
    check_call(mixer, x, state, None)
    y = _enter(x[:, 0], norm, mixer.in_proj)
    q, latent, shared, gate = y.split(mixer.splits, -1)
    q, r = q.view(len(q), 1, mixer.heads, -1).split((mixer.nope_dim, mixer.rope_dim), -1)
    turning = None if mixer.rope_theta is None else _frequencies(mixer.rope_dim, mixer.rope_theta, x.device)
    assert isinstance(state.lengths, Tensor)
    if is_batch_invariant():  # a view of one row has other strides, by which kernels are chosen
        r = r.clone(memory_format=torch.contiguous_format)
    r = place(r, latent, shared, (own.weight, own.eps, own.zero_centred), turning, state.lengths, cached)
    after = state.appended()
    return mixer.opened(mixer.absorbed(q, r, after, None), gate[:, None])[:, 0], after


@cache
def _frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    return frequencies(dim, theta, torch.float32, device)


def _convolved(
    x: Tensor, module: nn.Linear, norm: RMSNorm, convolution: tuple[Tensor, Tensor] | None, width: int,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the first `width` channels of module(norm(x)), convolved, and all channels, the others not convolved.

    bias: of the convolution; products convolve without one.
    """
    from lineate.kernels.layers import products, quantised_products  # triton, at its first use
    from lineate.kernels.layers.ops import convolve_in_place

    weight, quantised = uncoded(module.weight), coded(module.weight)
    if is_batch_invariant():
        inside = False
    elif quantised is None:
        inside = products.serves_one(x, weight) or products.serves_few(x, weight)
    else:
        inside = quantised_products.serves(x, quantised)
    if convolution is None or (inside and bias is None):
        y = _enter(x, norm, module, convolution=convolution)
        return y[:, :width], y
    y = _enter(x, norm, module)
    return convolve_in_place(y[:, :width], *convolution, bias), y


def _enter(
    x: Tensor,
    norm: RMSNorm,
    module: nn.Linear,
    normed: Tensor | None = None,
    *,
    gated: bool = False,
    convolution: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return module(norm(x)) of x `rows k`; normed is norm(x), if it was made before.

    gated: silu of its first half times its second. convolution: the taps and last inputs of its first channels, for
    rows that a kernel of ours multiplies.
    """
    from lineate.kernels.layers import products, quantised_products  # triton, at its first use

    weight, quantised, bias = uncoded(module.weight), coded(module.weight), module.bias
    if is_batch_invariant():
        y = invariant.linear(norm(x) if normed is None else normed, module.weight, bias)
        return glu(y) if gated else y
    if quantised is not None and quantised_products.serves(x, quantised):
        gates = gated and bias is None and quantised_products.takes_gate(quantised)
        around = None
        if normed is None and quantised_products.takes_norm(x):
            normed, around = x, (norm.weight, norm.eps, norm.zero_centred)
        elif normed is None:
            normed = norm(x)
        y = quantised_products.multiply(normed, quantised, bias, norm=around, gated=gates, convolution=convolution)
        return glu(y) if gated and not gates else y
    if products.serves_one(x, weight) and not (gated and bias is not None):
        around = (norm.weight, norm.eps, norm.zero_centred)
        return products.product_one(x, weight, bias, norm=around, gated=gated, convolution=convolution)
    normed = norm(x) if normed is None else normed
    if bias is None and products.serves_few(normed, weight):
        return products.product_few(normed, weight, gated=gated, convolution=convolution)
    assert convolution is None
    y = F.linear(normed, weight, bias)
    return glu(y) if gated else y


def _leave(y: Tensor, module: nn.Linear, x: Tensor, then: RMSNorm | None = None) -> tuple[Tensor, Tensor | None]:
    """Return x + module(y) of y `rows k`, and its norm `then`, where it is made on the way."""
    from lineate.kernels.layers import products  # triton, at its first use

    if is_batch_invariant():
        return invariant.add_product(y, module, x, None if then is None else (then.weight, then.eps, then.zero_centred))
    weight, bias = uncoded(module.weight), module.bias
    if coded(weight) is not None:
        return _leave_quantised(y, module, x, then)
    if products.serves_one(y, weight):
        return products.product_one(y, weight, bias, residual=x), None
    if bias is not None:
        return x + F.linear(y, weight, bias), None
    if products.serves_few(y, weight) and x.shape[1] <= products.WIDEST:
        parts = products.product_few(y, weight, parts=products.parts_of(*weight.shape))
        around = None if then is None else (then.weight, then.eps, then.zero_centred)
        return products.add_and_norm(x, parts.view(-1, *x.shape), around)
    if overlaps(x.device):  # a graph that is being recorded has no other reader of x, so x may be overwritten
        return x.addmm_(y, weight.t()), None
    return torch.addmm(x, y, weight.t()), None


def _leave_quantised(y: Tensor, module: nn.Linear, x: Tensor, then: RMSNorm | None) -> tuple[Tensor, Tensor | None]:
    """Run _leave for a weight of 8 or 4 bits."""
    from lineate.kernels.layers import products, quantised_products  # triton, at its first use

    quantised = coded(module.weight)
    if quantised is None or not quantised_products.serves(y, quantised):
        return x + F.linear(y, module.weight, module.bias), None
    parts = 1 if module.bias is not None or x.shape[1] > products.WIDEST else quantised_products.parts_of(y, quantised)
    if (len(y) == 1 and parts == 1) or module.bias is not None:
        return quantised_products.multiply(y, quantised, module.bias, residual=x), None
    sums = quantised_products.multiply(y, quantised, parts=parts)
    if x.shape[1] > products.WIDEST:
        return x + sums, None
    around = None if then is None else (then.weight, then.eps, then.zero_centred)
    return products.add_and_norm(x, sums.view(-1, *x.shape), around)


def _are_bare(*modules: nn.Module) -> bool:
    """Whether calling these modules only runs the forward of a known class, on parameters that kernels can read."""
    if _has_any_global_hook():
        return False
    for module in modules:
        if KNOWN.get(type(module)) is not type(module).forward or not runs_own_forward(module):
            return False
        quantised = type(module) in (nn.Linear, MixtureOfExperts)
        known = (*PLAIN_TENSORS, QuantisedWeight) if quantised else PLAIN_TENSORS
        if not all(x is None or (type(x) in known and x.is_contiguous()) for x in module._parameters.values()):
            return False
    return True
