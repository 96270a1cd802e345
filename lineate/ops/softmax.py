"""Softmax attention in the same shapes; its memory, the key/value cache, grows with every token."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lineate import checks
from lineate.native.low_precision_matmul import attention
from lineate.rule import compute_dtype, normalize


class KeyValueCache(NamedTuple):
    """The state of softmax attention: all keys and values so far."""

    keys: Tensor
    """`b t h k`, as they came (normalised if normalize_qk)."""
    values: Tensor
    """`b t hv v`."""
    cu_seqlens: Tensor | None = None
    """The bounds of the packed sequences in the cache, or None."""

    @property
    def nbytes(self) -> int:
        """The bytes that keys and values take."""
        return self.keys.nbytes + self.values.nbytes

    def __repr__(self) -> str:
        """Show shapes only: values would fill the screen, and printing them would wait for a GPU."""
        keys, values = (f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in (self.keys, self.values))
        packed = "" if self.cu_seqlens is None else f", {self.cu_seqlens.shape[0] - 1} packed sequences"
        return f"KeyValueCache(keys {keys}, values {values} on {self.keys.device}{packed}, nbytes={self.nbytes})"


def softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: KeyValueCache | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float,
    normalize_qk: bool,
) -> tuple[Tensor, KeyValueCache]:
    """Return the output and the new cache; with p tokens in the cache, token i sees the first p + i + 1 keys.

    q, k `b t h k`; v `b t hv v`.
    """
    if normalize_qk:
        dtype = compute_dtype(v.dtype)
        q, k = (normalize(x.to(dtype)).to(v.dtype) for x in (q, k))
    if cu_seqlens is None:
        if state is not None:
            k, v = torch.cat((state.keys, k), dim=1), torch.cat((state.values, v), dim=1)
        return _attend(q, k, v, scale), KeyValueCache(k, v)

    outputs, keys, values, lengths = [], [], [], [0]
    bounds = cu_seqlens.tolist()
    old = None if state is None or state.cu_seqlens is None else state.cu_seqlens.tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        own_k, own_v = k[:, start:end], v[:, start:end]
        if state is not None and old is not None:
            own_k = torch.cat((state.keys[:, old[i] : old[i + 1]], own_k), dim=1)
            own_v = torch.cat((state.values[:, old[i] : old[i + 1]], own_v), dim=1)
        if end > start:
            outputs.append(_attend(q[:, start:end], own_k, own_v, scale))
        keys.append(own_k)
        values.append(own_v)
        lengths.append(lengths[-1] + own_k.shape[1])
    ends = torch.tensor(lengths, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.cat(outputs, dim=1), KeyValueCache(torch.cat(keys, dim=1), torch.cat(values, dim=1), ends)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Run q `b t h k` over keys `b p+t h k`, whose last t tokens are those of q; repeat key heads for value heads."""
    t, total = q.shape[1], k.shape[1]
    group = v.shape[2] // q.shape[2]
    q, k = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (q, k))
    mask = None
    if 1 < t < total:
        mask = torch.ones(t, total, dtype=torch.bool, device=q.device).tril(total - t)
    causal = 1 < t == total
    return attention(q, k, v.transpose(1, 2), mask, causal=causal, scale=scale).transpose(1, 2)


def check_cache(cache: KeyValueCache | None, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check the cache of softmax attention, `b p h k` and `b p hv v`; it must be packed exactly when the call is."""
    if cache is None:
        return
    if not isinstance(cache, KeyValueCache):
        raise TypeError(f"state must be a lineate.KeyValueCache or None, got {type(cache).__name__}")
    for name, old, new in (("keys", cache.keys, k), ("values", cache.values, v)):
        if old.dim() != 4 or old.shape[0] != new.shape[0] or old.shape[2:] != new.shape[2:]:
            expected = f"({new.shape[0]}, p, {new.shape[2]}, {new.shape[3]})"
            raise ValueError(f"state.{name} must have shape {expected} for p cached tokens, got {tuple(old.shape)}")
        if old.dtype != new.dtype:
            raise ValueError(
                f"state.{name} must be {checks.named(new.dtype)} like the inputs, got {checks.named(old.dtype)}"
            )
        checks.check_device(f"state.{name}", old, new)
    if (cache.cu_seqlens is None) != (cu_seqlens is None):
        raise ValueError("state must come from a call with cu_seqlens exactly when this one has it")
    if cu_seqlens is not None and cache.cu_seqlens is not None and cache.cu_seqlens.shape != cu_seqlens.shape:
        raise ValueError(
            f"state must hold {cu_seqlens.shape[0] - 1} sequences like cu_seqlens, got {cache.cu_seqlens.shape[0] - 1}"
        )
