"""One call as the kernels see it: tensors in rows, texts and their chunks, and the choices that are made for it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lineate.kernels.hopper import channel as hopper_channel
from lineate.kernels.hopper import walk as hopper
from lineate.kernels.launching import ceil_div, next_power, start
from lineate.kernels.portable.layout import find_slots

CHUNK = 64


@dataclass(frozen=True)
class Texts:
    """Where the texts and their chunks lie; see layout.py."""

    count: int
    slots: int
    """At most: a packed text may end in part of a chunk, and how many do is known on the device alone."""
    bounds: Tensor | None
    first_slots: Tensor | None
    slot_texts: Tensor | None

    @property
    def packed(self) -> bool:
        return self.bounds is not None


def count_slots(t: int, texts: int) -> int:
    """How many chunks texts of t tokens in all can have."""
    return (t + texts * (CHUNK - 1)) // CHUNK


def find_texts(q: Tensor, cu_seqlens: Tensor | None) -> Texts:
    """Batch rows, or the texts packed into one; nothing waits for the device."""
    b, t = q.shape[:2]
    if cu_seqlens is None:
        return Texts(b, b * count_slots(t, 1), None, None, None)
    count = cu_seqlens.shape[0] - 1
    slots = count_slots(t, count)
    given = cu_seqlens.to(q.device).contiguous()
    bounds, first_slots = (torch.empty(count + 1, dtype=torch.int64, device=q.device) for _ in range(2))
    slot_texts = torch.empty(slots, dtype=torch.int64, device=q.device)
    with torch.cuda.device_of(q):
        start(find_slots, (ceil_div(slots, 64),))(
            given, bounds, first_slots, slot_texts, t, count, slots, BT=256, BS=64, C=CHUNK, num_warps=4
        )
    return Texts(count, slots, bounds, first_slots, slot_texts)


@dataclass(frozen=True)
class Gates:
    """The gates of a call, and how they are given."""

    log_decay: Tensor | None
    """`b t hv`, `b t hv k` or None; the raw gate if A_log is given."""
    beta: Tensor | None
    """`b t hv` or None; the raw logit if A_log is given."""
    A_log: Tensor | None = None
    """`hv`: log_decay = -exp(A_log) softplus(gate + dt_bias), beta = beta_scale sigmoid(logit)."""
    dt_bias: Tensor | None = None
    """`hv`, or `hv k`."""
    beta_scale: float = 1.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.log_decay, self.beta, self.A_log, self.dt_bias


@dataclass(frozen=True)
class Call:
    """One call: tensors in the order the kernels want, sizes, and compile-time choices."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    texts: Texts
    corrects: bool
    scale: float
    normalize_qk: bool

    @property
    def channel(self) -> bool:
        return self.gates.log_decay is not None and self.gates.log_decay.dim() == 4

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """t, h, hv, K, V."""
        return self.q.shape[1], self.q.shape[2], self.v.shape[2], self.q.shape[3], self.v.shape[3]

    @property
    def gates_outside(self) -> bool:
        """Whether gradients of raw gates are for ops.py: those per head; the kernels look after those per channel."""
        return self.gates.A_log is not None and not self.channel

    @cached_property
    def on_hopper(self) -> bool:
        """Whether the Gluon kernels take it."""
        return hopper.fits(self.q, self.k, self.v, self.texts.slots, self.texts.count)

    @cached_property
    def channel_on_hopper(self) -> bool:
        """Whether those for decay per channel do."""
        decay = self.gates.log_decay
        return self.on_hopper and decay is not None and self.channel and hopper_channel.fits(self.q, decay)

    @property
    def precision(self) -> str:
        """Of products in float32; narrower types multiply exactly."""
        return "tf32x3" if self.q.dtype == torch.float32 else "ieee"

    @property
    def always_tame(self) -> bool:
        """Whether no row can be wild: unit keys, and beta made here, from a logit (decay per channel can always be)."""
        return self.normalize_qk and self.gates.A_log is not None and not self.channel and self.gates.beta_scale <= 2.0

    @property
    def products(self) -> tuple[str, ...]:
        """Of the inverse, one launch each: float16's for tame rows, then float32's for those that are not.

        The 11 bits of float16's are more than bfloat16 inputs need; inputs in float16 have as many. Without an inverse
        the second launch is for rows that hopper_channel.py leaves.
        """
        if self.q.dtype != torch.bfloat16:
            return ("tf32x3",)
        if self.channel_on_hopper or (self.corrects and not self.always_tame):
            return "fp16", "tf32x3"
        return ("fp16",)

    @property
    def where(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
        """bounds, first_slots, slot_texts, t: what chunk_bounds takes."""
        return self.texts.bounds, self.texts.first_slots, self.texts.slot_texts, self.q.shape[1]


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    cu_seqlens: Tensor | None,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
) -> Call:
    gates = Gates(*(None if x is None else dense(x) for x in gates.tensors), gates.beta_scale)
    return Call(
        in_rows(q), in_rows(k), in_rows(v), gates, find_texts(q, cu_seqlens), corrects, scale, normalize_qk
    )  # fmt: skip


def in_rows(x: Tensor) -> Tensor:
    """x `b t heads k` such that token i of row b is at (b t + i) stride(1); a copy only if it is not."""
    b, t = x.shape[:2]
    even = x.stride(3) == 1 and x.stride(1) % 8 == 0 and x.stride(2) % 8 == 0 and x.data_ptr() % 16 == 0
    if even and (b == 1 or x.stride(0) == t * x.stride(1)):
        return x
    return dense(x)


def dense(x: Tensor) -> Tensor:
    """x without gaps; its strides are what its shape says, also where torch does not care, at sizes of 1."""
    return aligned(x.contiguous()).view(-1).view(x.shape)


def aligned(x: Tensor) -> Tensor:
    """x, as TMA can read it: a copy if it does not begin where 16 bytes do."""
    return x.clone() if x.data_ptr() % 16 else x


def power(n: int) -> int:
    """The tile that holds n: a power of two, at least 16."""
    return max(16, next_power(n))
