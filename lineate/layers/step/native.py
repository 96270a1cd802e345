"""A decoding step of mixers and feed-forwards on a CPU, in C: one token a row, without torch between the products.

    x = x + out_proj(mix(in_proj(norm(x))))      x = x + down(glu(gate_up(norm(x))))

torch needs 20 to 40 calls for this, which for one row take longer than reading 4-bit weights does. A part has the words
of native/step.c that stay; `bind` adds the addresses of a call's states.
"""

import ctypes
import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lineate.layers.attention import GatedAttention
from lineate.layers.convolution import ShortConvolution
from lineate.layers.feed import SwiGLU
from lineate.layers.mamba2 import GroupedGatedNorm
from lineate.layers.mixer import LinearMixer
from lineate.layers.norm import GatedRMSNorm, RMSNorm
from lineate.layers.projection import runs_own_forward
from lineate.layers.registry import step_of
from lineate.layers.rope import frequencies
from lineate.layers.state import CacheInPlace, LayerState, Memory, TokenCache
from lineate.layers.step.spec import StepSpec
from lineate.layers.step.supported_modules import KNOWN, are_unchanged
from lineate.native import product as products
from lineate.native import step as native
from lineate.native.build import available
from lineate.native.step import Linear, Norm, Part
from lineate.quantised import QuantisedWeight
from lineate.rule import GATED_DELTA_2, GATED_DELTA_PRODUCT
from lineate.torch_ops.elementwise import elementwise
from lineate.torch_ops.tracing import PLAIN_TENSORS, is_eager

KEPT = (torch.float32, torch.bfloat16)
"""The dtypes of memories; a step rounds bfloat16 ones to the nearest."""


class _Unfit(Exception):
    """Raised inside for a part that has no step in C."""


@dataclass(frozen=True)
class Recorded:
    """A part of a step, and what it was read from.

    Args:
        part: The words that stay.
        mixer: The mixer whose states are bound to it; None for others.
        modules: All modules, whose parts and parameters must still be there.
    """

    part: Part
    mixer: nn.Module | None
    modules: tuple[nn.Module, ...]

    @property
    def memory_names(self) -> tuple[str, ...]:
        """The tensors of the memory that the part reads and writes; none if it has a cache, or no state."""
        if self.part.kind != native.RULE:
            return ()
        return ("conv", "memory") if self.part.taps else ("memory",)


def serves(x: Tensor) -> bool:
    """Whether a step in C may run on x `rows 1 hidden`: a CPU, float32, few rows, no gradients, no compiler."""
    return x.dtype is torch.float32 and x.dim() == 3 and _serves(x)


def serves_ids(ids: Tensor) -> bool:
    """The same of tokens `rows 1`."""
    return ids.dtype is torch.int64 and ids.dim() == 2 and _serves(ids)


def _serves(x: Tensor) -> bool:
    if not x.is_cpu or not is_eager(x) or x.shape[1] != 1:  # (a graph is for all sizes, so none is asked in one)
        return False
    if not 0 < x.shape[0] <= products.MOST_ROWS:  # torch multiplies more rows faster
        return False
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or _has_any_global_hook():
        return False
    return are_unchanged() and available("products")


def record_mixer(norm: nn.Module, mixer: nn.Module) -> Recorded | None:
    """Return the part x + mixer(norm(x)), if C computes it."""
    try:
        spec = step_of(mixer)
        if spec is not None:
            assert isinstance(mixer, LinearMixer)
            part, modules = _rule_part(mixer, spec, _channels(norm))
        elif type(mixer) is GatedAttention:
            part, modules = _attention_part(mixer, _channels(norm))
        else:
            return None
        part.norm = _norm(norm, part.entry.size)
        return _recorded(part, mixer, [norm, mixer, *modules])
    except _Unfit:
        return None


def record_feed(norm: nn.Module | None, feed: nn.Module | None) -> Recorded | None:
    """Return the part x + feed(norm(x)), if C computes it."""
    if type(feed) is not SwiGLU or type(feed.down_proj) is not nn.Linear or norm is None:
        return None
    try:
        hidden, size = _channels(norm), feed.down_proj.weight.shape[1]
        part = Part(
            kind=native.FEED, norm=_norm(norm, hidden), entry=_linear(feed.gate_up_proj, 2 * size, hidden),
            exit=_linear(feed.down_proj, hidden, size),
        )  # fmt: skip
        return _recorded(part, None, [norm, feed, feed.gate_up_proj, feed.down_proj])
    except _Unfit:
        return None


def record_head(embed: nn.Module, norm: nn.Module, head: nn.Module | None) -> tuple[Recorded, Linear] | None:
    """Return the part head(norm(x)) and the embedding table, if C computes them; head=None takes the table as the head.

    The embedding must return rows of the table unchanged.
    """
    if type(embed) is not nn.Embedding or embed.max_norm is not None or embed.weight.dtype is not torch.float32:
        return None
    try:
        hidden, weight = _channels(norm), embed.weight
        table = _weight(weight, None, weight.shape[0], hidden)
        coded = weight.format.product if isinstance(weight, QuantisedWeight) else None
        looks_up = coded is None or coded.looks_up
        if not looks_up or (head is not None and type(head) is not nn.Linear):
            return None
        part = Part(
            kind=native.HEAD, norm=_norm(norm, hidden), exit=native.no_linear(),
            entry=table if head is None else _linear(head, head.weight.shape[0], hidden),
        )  # fmt: skip
        return _recorded(part, None, [embed, norm, *([] if head is None else [head])]), table
    except _Unfit:
        return None


def bind(part: Part, recorded: Recorded, state: LayerState, shared: dict[Hashable, Any]) -> LayerState | None:
    """Add the addresses of a state to a part; return the new state, which the step fills, or None if it is unfit.

    Args:
        part: The part, which is changed.
        recorded: The part as it was read, and its mixer.
        state: The mixer's state; it is overwritten if the call owns it.
        shared: What all parts of a step share; it keeps tensors alive until the step has run.
    """
    if isinstance(state, Memory):
        return _bind_memory(part, recorded, state, shared) if tuple(state.tensors) == recorded.memory_names else None
    return _bind_cache(part, recorded, state, shared) if part.kind == native.ATTENTION else None


def _bind_memory(part: Part, recorded: Recorded, state: Memory, shared: dict[Hashable, Any]) -> Memory | None:
    rows, heads, given = shared["rows"], part.heads * part.shared, state.tensors
    memory, columns = given.get("memory"), part.value_dim + part.divides
    if memory is None or memory.shape != (rows, heads, part.key_dim, columns):
        return None
    if state.seeds is not None or state.ring is not None:
        return None
    assert isinstance(recorded.mixer, LinearMixer)
    if not _is_dense(memory, 3, KEPT if recorded.mixer.narrows else KEPT[:1]):
        return None
    new = memory if state.owned else _spare(state, "memory", 3)
    if new is None:
        new = torch.empty_like(memory, memory_format=torch.contiguous_format)
    part.memory_from, part.memory_from_row = memory.data_ptr(), memory.stride(0)
    part.memory_to, part.memory_to_row = new.data_ptr(), new.stride(0)
    part.memory_narrow = memory.dtype is torch.bfloat16
    made = {"memory": new}
    if part.taps:
        keys, values = part.heads * part.key_dim, heads * part.value_dim
        past, channels = given.get("conv"), keys + part.writes * (keys + values)
        if past is None or past.shape != (rows, channels, part.taps - 1) or not _is_dense(past, 0):
            return None
        kept = past if state.owned else _spare(state, "conv", 0)
        if kept is None:
            kept = past.new_empty(rows, part.taps - 1, channels).transpose(1, 2)
        part.conv_from, (part.from_row, part.from_channel, part.from_tap) = past.data_ptr(), past.stride()
        part.conv_to, (part.to_row, part.to_channel, part.to_tap) = kept.data_ptr(), kept.stride()
        made = {"conv": kept, **made}
    return Memory(made)


def _spare(state: Memory, name: str, dims: int) -> Tensor | None:
    """Return the tensor that the caller offers for a new one, if it is dense in its last dims."""
    found = None if state.into is None else state.into.get(name)
    given = state.tensors[name]
    if found is None or found.shape != given.shape or not _is_dense(found, dims, (given.dtype,)):
        return None
    return found


def _bind_cache(part: Part, recorded: Recorded, state: TokenCache, shared: dict[Hashable, Any]) -> TokenCache | None:
    rows, size = shared["rows"], (part.kv_heads, part.head_dim)
    given, lengths, new, kept = state.tensors, state.lengths, state, state
    if state.rows != rows or tuple(given) != ("keys", "values"):
        return None
    if any(x.dtype is not torch.float32 for x in given.values()):
        return None
    if isinstance(state, CacheInPlace):
        if state.t != 1:
            return None
        new = state.appended()
    else:
        if any(x.shape[2:] != size for x in given.values()):
            return None
        longer = state.extended(1)
        if longer is None:
            place = shared.get("place")  # append copies these numbers to where the step writes
            if place is None or place.shape[2:] != size:
                place = shared["place"] = torch.zeros(rows, 1, *size, dtype=torch.float32, device="cpu")
            longer = state.append({"keys": place, "values": place})
        new = kept = longer
    keys, values = kept.tensors["keys"], kept.tensors["values"]
    if keys.shape[2:] != size or values.shape[2:] != size or not (_is_dense(keys, 2) and _is_dense(values, 2)):
        return None
    part.keys, part.keys_row, part.keys_token = keys.data_ptr(), keys.stride(0), keys.stride(1)
    part.values, part.values_row, part.values_token = values.data_ptr(), values.stride(0), values.stride(1)
    part.lengths = _shared_lengths(lengths, rows, shared)
    if part.rotary:
        assert isinstance(recorded.mixer, GatedAttention)
        part.cos, part.sin = _shared_turns(lengths, recorded.mixer, rows, shared)
    return new


def _shared_lengths(lengths: int | Tensor, rows: int, shared: dict[Hashable, Any]) -> int:
    """Return the address of the lengths of all rows."""
    key = "lengths", lengths if isinstance(lengths, int) else id(lengths)
    if key not in shared:
        if isinstance(lengths, int):
            made = (ctypes.c_int64 * rows)(*[lengths] * rows)
            shared[key] = ctypes.addressof(made), made
        else:
            own = lengths.to(torch.int64).contiguous()
            shared[key] = own.data_ptr(), own, lengths
    found: int = shared[key][0]
    return found


TURNS = 64
"""Tokens whose angles are computed at a time."""


def _shared_turns(
    lengths: int | Tensor, mixer: GatedAttention, rows: int, shared: dict[Hashable, Any]
) -> tuple[int, int]:
    """Return the addresses of the cosines and sines of all rows."""
    key = "turns", mixer.rotary_dim, mixer.rope_theta, lengths if isinstance(lengths, int) else id(lengths)
    if key not in shared:
        if isinstance(lengths, int) and rows == 1:
            both = _turns(mixer.rotary_dim, mixer.rope_theta, lengths // TURNS)
            at = lengths % TURNS * mixer.rotary_dim // 2 * 4
        else:
            own, at = _frequencies(mixer.rotary_dim, mixer.rope_theta), 0
            angles = own[None] * lengths if isinstance(lengths, int) else lengths[:, None].to(torch.float32) * own
            cos, sin = (elementwise(turn, angles).expand(rows, -1).contiguous() for turn in (torch.cos, torch.sin))
            both = cos, sin
        shared[key] = (both[0].data_ptr() + at, both[1].data_ptr() + at), both, lengths
    found: tuple[int, int] = shared[key][0]
    return found


def turn_on(shared: dict[Hashable, Any]) -> None:
    """Compute the cosines and sines of lengths that have changed in place, where a bound step reads them.

    Args:
        shared: The same as in `bind`, which got caches whose lengths are a tensor.
    """
    for what, found in shared.items():
        if isinstance(what, tuple) and what[0] == "turns":
            _, (cos, sin), lengths = found
            angles = lengths[:, None].to(torch.float32) * _frequencies(what[1], what[2])
            cos.copy_(elementwise(torch.cos, angles))
            sin.copy_(elementwise(torch.sin, angles))


@lru_cache(16)
def _turns(dim: int, theta: float, block: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of a block of tokens, `tokens dim/2`."""
    with torch.inference_mode(False):
        at = torch.arange(block * TURNS, (block + 1) * TURNS, dtype=torch.float32, device="cpu")
        angles = at[:, None] * _frequencies(dim, theta)
        return angles.cos(), angles.sin()


@cache
def _frequencies(dim: int, theta: float) -> Tensor:
    with torch.inference_mode(False):
        return frequencies(dim, theta, torch.float32, torch.device("cpu"))


# ---- words that stay


def _rule_part(mixer: LinearMixer, spec: StepSpec, hidden: int) -> tuple[Part, list[nn.Module]]:
    if max(mixer.key_dim, mixer.memory_columns) > native.WIDEST_HEAD or mixer.scale not in (None, 1):
        raise _Unfit
    known = not spec.rule.general or spec.rule in (GATED_DELTA_2, GATED_DELTA_PRODUCT)
    if not known or mixer.writes > native.MOST_WRITES:
        raise _Unfit
    keys, values = mixer.value_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    decays = keys if spec.decay == "channel" else mixer.value_heads
    part = Part(
        kind=native.RULE, entry=_linear(mixer.in_proj, sum(mixer.splits), hidden),
        exit=_linear(mixer.out_proj, hidden, values), heads=mixer.heads,
        shared=mixer.value_heads // mixer.heads, key_dim=mixer.key_dim, value_dim=mixer.value_dim,
        corrects=spec.rule.corrects, scaled=mixer.scale is None, divides=spec.divides,
        features=native.FEATURES.index(_features(mixer, spec)), decays=native.DECAY_GATES.index(spec.decay_gate),
        writes=mixer.writes, channel_rates=spec.rule is GATED_DELTA_2, per_channel=spec.decay == "channel",
        temperature=mixer.temperature,
        activation=native.ACTIVATIONS.index(mixer.norm.activation), beta_scale=mixer.beta_scale,
        lower_bound=mixer.gate_lower_bound or 0.0, decay=native.no_linear(), gate=native.no_linear(),
    )  # fmt: skip
    if spec.decay_gate in ("speed", "step"):
        part.A_log, part.dt_bias = _parameter(mixer, "A_log", mixer.value_heads), _parameter(mixer, "dt_bias", decays)
    if spec.decay_gate == "step":
        part.step_least, part.step_most = mixer.step_least, math.inf if mixer.step_most is None else mixer.step_most
    if spec.skips:
        part.skip = _parameter(mixer, "D", mixer.value_heads)
    modules = [mixer.in_proj, mixer.out_proj, mixer.norm]
    grouped = spec.grouped or isinstance(mixer.norm, GroupedGatedNorm)
    _set_norm(part, mixer.norm, mixer.value_heads if grouped else 0)
    return part, modules + _set_convolution(part, mixer) + _set_columns(part, mixer, spec)


def _features(mixer: LinearMixer, spec: StepSpec) -> str:
    """Return how the rule uses q and k; a feature map may be the identity."""
    if spec.features != "map":
        return spec.features
    if mixer.feature_map not in ("identity", "elu+1") or not mixer.normalize or mixer.sum_to_one:
        raise _Unfit
    return "plain" if mixer.feature_map == "identity" else "map"


def _set_norm(part: Part, norm: nn.Module, heads: int) -> None:
    """Set the output norm; with `heads` it is one over groups of their channels."""
    if not heads:
        part.out_norm = _norm(norm, part.value_dim)
        return
    if not isinstance(norm, GroupedGatedNorm) or norm.groups < 1 or norm.weight.shape[0] % norm.groups:
        raise _Unfit
    part.out_norm = Norm(_dense(norm.weight, heads * part.value_dim), norm.eps, 0.0)
    part.norm_groups, part.gate_first = norm.groups, norm.gate_first


def _set_convolution(part: Part, mixer: LinearMixer) -> list[nn.Module]:
    """Set the short convolution, if the mixer has one; return it."""
    conv = mixer.conv
    if conv is None:
        return []
    if type(conv) is not ShortConvolution or conv.weight.shape[1] > native.MOST_TAPS:
        raise _Unfit
    part.taps = conv.weight.shape[1]
    part.conv = _dense(conv.weight, part.taps * mixer.width)
    if conv.bias is not None:
        part.conv_bias = _dense(conv.bias, mixer.width)
    return [conv]


def _set_columns(part: Part, mixer: LinearMixer, spec: StepSpec) -> list[nn.Module]:
    """Set where in_proj's columns of the gates begin, and their projections of low rank; return those."""
    keys, values = mixer.value_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    sizes = {
        "gate": 0 if mixer.norm.activation == "none" else values,
        "decay": keys if spec.decay == "channel" else mixer.value_heads,
        "write": values if spec.rule is GATED_DELTA_2 else mixer.value_heads * mixer.writes,
        "erase": keys,
    }
    modules, at = [], mixer.width
    for column, made in zip(spec.columns, mixer.splits[1:], strict=True):
        low = getattr(mixer, f"{column}_proj") if column in spec.low_rank else None
        if low is not None:
            setattr(part, column, _linear(low, sizes[column], made))
            modules.append(low)
        elif made != sizes[column]:
            raise _Unfit
        setattr(part, f"at_{column}", at if made else 0)
        at += made
    return modules


def _attention_part(mixer: GatedAttention, hidden: int) -> tuple[Part, list[nn.Module]]:
    if mixer.head_dim > native.WIDEST_HEAD or mixer.qk_norm == "full":
        raise _Unfit
    wide, narrow = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    part = Part(
        kind=native.ATTENTION, entry=_linear(mixer.in_proj, (2 if mixer.gated else 1) * wide + 2 * narrow, hidden),
        exit=_linear(mixer.out_proj, hidden, wide), query_heads=mixer.heads, kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim, rotary=mixer.rotary_dim, gated=mixer.gated, scale=mixer.scale,
    )  # fmt: skip
    modules: list[nn.Module] = [mixer.in_proj, mixer.out_proj]
    if mixer.qk_norm is not None:
        part.q_norm, part.k_norm = _norm(mixer.q_norm, mixer.head_dim), _norm(mixer.k_norm, mixer.head_dim)
        modules += [mixer.q_norm, mixer.k_norm]
    return part, modules


def _recorded(part: Part, mixer: nn.Module | None, modules: list[nn.Module]) -> Recorded:
    for module in modules:
        if type(module) not in KNOWN or not runs_own_forward(module) or module.__dict__.get("context") is not None:
            raise _Unfit
    return Recorded(part, mixer, tuple(modules))


def _channels(norm: nn.Module) -> int:
    """Return how many numbers a norm before a part reads."""
    if type(norm) is not RMSNorm:
        raise _Unfit
    return norm.weight.shape[0]


def _norm(module: nn.Module, size: int) -> Norm:
    if not isinstance(module, RMSNorm | GatedRMSNorm):
        raise _Unfit
    return Norm(_dense(module.weight, size), module.eps, float(getattr(module, "zero_centred", False)))


def _linear(module: nn.Module, out: int, size: int) -> Linear:
    """Return a projection of `size` numbers to `out`; C reads addresses, so that every size must be as expected."""
    if type(module) is not nn.Linear:
        raise _Unfit
    return _weight(module.weight, module.bias, out, size)


def _weight(weight: Tensor, bias: Tensor | None, out: int, size: int) -> Linear:
    if weight.shape != (out, size):
        raise _Unfit
    if bias is not None:
        _dense(bias, out)
    if isinstance(weight, QuantisedWeight):
        codes, scales, form = weight.codes, weight.scales, weight.format
        if scales is not None:
            dense = codes.is_cpu and codes.is_contiguous() and scales.is_contiguous()
            if form.product is None or not dense or not form.holds(codes, scales, (out, size)):
                raise _Unfit
            return native.coded_linear(form.product, codes, scales, (out, size), bias)
        weight = codes
        if not products.widens(weight.dtype):
            raise _Unfit
    elif type(weight) not in PLAIN_TENSORS or weight.dtype is not torch.float32:
        raise _Unfit
    if not weight.is_cpu or not weight.is_contiguous() or weight.shape != (out, size):
        raise _Unfit
    return native.plain_linear(weight, bias)


def _parameter(mixer: nn.Module, name: str, count: int) -> int:
    return _dense(getattr(mixer, name), count)


def _dense(x: Tensor, count: int) -> int:
    """Return the address of a parameter of so many numbers that C reads."""
    if type(x) not in PLAIN_TENSORS or x.dtype is not torch.float32 or not x.is_cpu or not x.is_contiguous():
        raise _Unfit
    if x.numel() != count:
        raise _Unfit
    return x.data_ptr()


def _is_dense(x: Tensor, dims: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether x is a plain tensor of one of these dtypes on a CPU, dense in its last dims."""
    if type(x) not in PLAIN_TENSORS or x.dtype not in dtypes or not x.is_cpu or x.is_neg():
        return False
    if x.is_contiguous():
        return True
    size = 1
    for dim in range(x.dim() - 1, x.dim() - 1 - dims, -1):
        if x.shape[dim] != 1 and x.stride(dim) != size:
            return False
        size *= x.shape[dim]
    return True
