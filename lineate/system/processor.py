"""Tells which 16-bit dtypes this CPU multiplies in hardware; low_precision_matmul.py serves the others."""

import functools
import os
from pathlib import Path

import torch

from lineate.torch_ops.tracing import constant_in_graphs

_SWITCHES = {torch.bfloat16: "LINEATE_CPU_BF16", torch.float16: "LINEATE_CPU_FP16"}
_FEATURES = {torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"}, torch.float16: {"avx512_fp16", "amx_fp16"}}
"""The names in /proc/cpuinfo. ARM's float16 is not among them: it also sums in float16, which lineate avoids."""


@constant_in_graphs
def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has products in dtype and torch uses them; two environment variables override this.

    LINEATE_CPU_BF16 and LINEATE_CPU_FP16 are 1 (use torch's products) or 0 (go through float32).
    """
    return _multiplies(dtype)


def forget() -> None:
    """Clear the cached answers of `multiplies`, so that its next call checks the processor and the environment."""
    _multiplies.cache_clear()


@functools.cache
def _multiplies(dtype: torch.dtype) -> bool:
    if dtype not in _SWITCHES:
        return True
    chosen = os.environ.get(_SWITCHES[dtype], "")
    if chosen not in ("", "0", "1"):
        raise ValueError(f"{_SWITCHES[dtype]} must be 0 or 1, got {chosen!r}; leave it unset to let lineate look")
    return chosen == "1" if chosen else library_multiplies(dtype) and bool(_FEATURES[dtype] & instruction_sets())


def library_multiplies(dtype: torch.dtype) -> bool:
    """Whether this build of torch has a library for such products; on x86 it may emulate them."""
    if not torch.backends.mkldnn.is_available():
        return False
    kind = "bf16" if dtype is torch.bfloat16 else "fp16"
    known = getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", None)
    return known is not None and bool(known())


def instruction_sets() -> set[str]:
    """Return the instruction sets of the first core, as Linux names them; elsewhere what torch knows about an x86."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        return {"avx512_bf16"} if known is not None and known() else set()
    for line in lines:
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(words.split())
    return set()


@constant_in_graphs
def why_wide(dtype: torch.dtype) -> str | None:
    """Return a clause that says that products in dtype go through float32 on this CPU, or None if they do not."""
    if multiplies(dtype):
        return None
    name = str(dtype).removeprefix("torch.")
    return f"{name}: this processor has no {name} products; computed through float32"
