"""A decoding step in C (step.c): its parts as ctypes structures, and the call."""

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from lineate.native.build import library
from lineate.native.quantised import CodedProduct

RULE, ATTENTION, FEED, HEAD = range(4)
ACTIVATIONS = ("none", "silu", "sigmoid")
FEATURES = ("plain", "unit", "map")
DECAY_GATES = ("none", "speed", "sigmoid", "step")
ABSENT = -1
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
WIDEST_HEAD = 512
MOST_TAPS = 8
MOST_WRITES = 8


class Linear(ctypes.Structure):
    """A projection; the words of Linear in step.c."""

    _fields_ = (
        ("kind", c_int64), ("out", c_int64), ("size", c_int64),
        ("weight", c_void_p), ("scales", c_void_p), ("bias", c_void_p),
    )  # fmt: skip


class Norm(ctypes.Structure):
    """An RMSNorm; without a weight there is none."""

    _fields_ = (("weight", c_void_p), ("eps", c_double), ("offset", c_double))


class Part(ctypes.Structure):
    """A mixer or a feed-forward with its norm and residual, or the head; the words of Part in step.c."""

    _fields_ = (
        ("kind", c_int64), ("norm", Norm), ("entry", Linear), ("exit", Linear),
        ("heads", c_int64), ("shared", c_int64), ("key_dim", c_int64), ("value_dim", c_int64), ("taps", c_int64),
        ("conv", c_void_p), ("conv_bias", c_void_p), ("A_log", c_void_p), ("dt_bias", c_void_p), ("skip", c_void_p),
        ("out_norm", Norm), ("corrects", c_int64), ("features", c_int64), ("scaled", c_int64), ("decays", c_int64),
        ("per_channel", c_int64), ("divides", c_int64), ("writes", c_int64), ("channel_rates", c_int64),
        ("activation", c_int64), ("norm_groups", c_int64), ("gate_first", c_int64),
        ("beta_scale", c_double), ("lower_bound", c_double), ("temperature", c_double),
        ("step_least", c_double), ("step_most", c_double),
        ("at_decay", c_int64), ("at_gate", c_int64), ("at_write", c_int64), ("at_erase", c_int64),
        ("decay", Linear), ("gate", Linear),
        ("query_heads", c_int64), ("kv_heads", c_int64), ("head_dim", c_int64), ("rotary", c_int64),
        ("gated", c_int64), ("q_norm", Norm), ("k_norm", Norm), ("scale", c_double), ("cos", c_void_p),
        ("sin", c_void_p),
        ("conv_from", c_void_p), ("conv_to", c_void_p),
        ("from_row", c_int64), ("from_channel", c_int64), ("from_tap", c_int64),
        ("to_row", c_int64), ("to_channel", c_int64), ("to_tap", c_int64),
        ("memory_from", c_void_p), ("memory_to", c_void_p), ("memory_from_row", c_int64), ("memory_to_row", c_int64),
        ("memory_narrow", c_int64),
        ("keys", c_void_p), ("values", c_void_p), ("keys_row", c_int64), ("keys_token", c_int64),
        ("values_row", c_int64), ("values_token", c_int64), ("lengths", c_void_p), ("made", c_void_p),
    )  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64), ("hidden", c_int64), ("parts", c_int64), ("threads", c_int64), ("rounded", c_int64),
        ("x", c_void_p), ("part", POINTER(Part)), ("ids", c_void_p), ("table", POINTER(Linear)),
    )  # fmt: skip


def plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return a projection whose weight `out size`, dense, has 16 or 32 bits."""
    return Linear(
        _KINDS[weight.dtype], *weight.shape, weight.data_ptr(), None, None if bias is None else bias.data_ptr()
    )


def coded_linear(
    coded: CodedProduct, codes: Tensor, scales: Tensor, shape: tuple[int, int], bias: Tensor | None
) -> Linear:
    """Return a projection whose weight of this shape is in codes (lineate/quantised)."""
    address = None if bias is None else bias.data_ptr()
    return Linear(coded.kind, *shape, codes.data_ptr(), scales.data_ptr(), address)


def no_linear() -> Linear:
    """Return the place of a projection that is not there."""
    return Linear(ABSENT, 0, 0, None, None, None)


def run(x: Tensor, parts: "ctypes.Array[Part]", rounded: bool = False) -> None:
    """Run the parts one after the other on x `rows hidden`, dense, which is overwritten, as are their states.

    Args:
        x: what the first part reads.
        parts: mixers and feed-forwards.
        rounded: whether products with int8 and float16 weights may round their rows further, which is faster.
    """
    rows, hidden = x.shape
    _run(_Step(rows, hidden, len(parts), torch.get_num_threads(), rounded, x.data_ptr(), parts))


def run_tokens(ids: Tensor, table: Linear, parts: "ctypes.Array[Part]", made: Tensor, rounded: bool = False) -> bool:
    """Run the parts, of which the last one is the head, on embeddings; return whether all ids are in the table.

    Args:
        ids: of the tokens, `rows` int64, dense.
        table: the embeddings.
        parts: mixers and feed-forwards, then the head.
        made: where the head's product goes, float32 `rows out`, dense.
        rounded: see `run`.
    """
    parts[len(parts) - 1].made = made.data_ptr()
    step = _Step(
        ids.shape[0], table.size, len(parts), torch.get_num_threads(), rounded, None, parts, ids.data_ptr(),
        ctypes.pointer(table),
    )  # fmt: skip
    return _run(step)


_NO_SUCH_ROW = 2


def _run(step: _Step) -> bool:
    failed = library("products").lineate_step(ctypes.byref(step))
    if failed not in (0, _NO_SUCH_ROW):
        raise MemoryError(f"no memory for the scratch space of a step of {step.rows} rows and {step.hidden} channels")
    return not failed
