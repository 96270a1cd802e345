"""How a quantised weight is stored: a row of FORMATS says what its numbers are, how they lie, and what multiplies them.

Codes of 8 and 4 bits lie in tiles of 16 rows, in the order in which a processor multiplies them (native/quantised.c):
group by group of 32 columns, in each group step by step, and a step has 4 columns of all 16 rows.

    codes   `... tiles groups 8 16 4` uint8     8 bits: 8 steps
            `... tiles groups 4 16 4` uint8     4 bits: step s in the low half of a byte, step s + 4 in its high half
    scales  `... tiles scales 16`               a format's `factors` for each `group` of columns, in its own dtype

Rows are filled up to whole tiles with codes of zero and scales of 0. Files have the same layout as memory.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lineate import checks
from lineate.kernels.coded import CodedKernel
from lineate.native import quantised as native
from lineate.quantised.rounding import (
    FLOAT8_GROUP,
    GROUP,
    are_float8_numbers,
    check_half,
    float8_numbers,
    integers,
    round_to_float8,
    round_to_integers,
)

TILE = 16
"""Rows whose codes lie side by side."""
BLOCK = 32
"""Columns whose codes lie together; those of a weight in codes are a multiple of it."""
STEP = 4
"""Columns of a row that lie side by side."""


@dataclass(frozen=True, eq=False)
class Format:
    """A way to store a weight `... rows columns`: in a dtype of 16 bits, or in codes and scales.

    Args:
        name: Of the format; config.json of a checkpoint has it.
        bits: Of a number.
        dtype: Of the numbers, if they are stored in the weight's shape; None: they are codes and scales.
        round: Rounds a weight `... rows columns` to codes of this shape, one a byte, and scales `... rows scales`.
        numbers: Returns the numbers of codes `... columns` and scales `... scales`, in float32.
        zero: The code that rows are filled up with.
        group: Columns that share scales.
        factors: Scales of a group: 1, or 2 if it has a scale and a zero point.
        scales_dtype: Of the scales.
        are_numbers: Whether all codes of a file are numbers; None: every code is.
        flag: How --bits names the format; None: it does not.
        product: How the C code multiplies by the codes; None: they are decoded before a product on a CPU.
        kernel: How kernels multiply by the codes; None: they are decoded before a product on a GPU.
    """

    name: str
    bits: int
    dtype: torch.dtype | None = None
    round: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    numbers: Callable[[Tensor, Tensor], Tensor] | None = None
    zero: int = 0
    group: int = GROUP
    factors: int = 1
    scales_dtype: torch.dtype = torch.float16
    are_numbers: Callable[[Tensor], bool] | None = None
    flag: int | str | None = None
    product: native.CodedProduct | None = None
    kernel: CodedKernel | None = None

    def __post_init__(self) -> None:
        functions = [f is not None for f in (self.round, self.numbers)]
        if functions != [self.dtype is None] * 2:
            raise ValueError(f"format {self.name!r} must have either a dtype or both round and numbers")
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", self.name):
            raise ValueError(f"name must have lower-case letters, digits, '.', '_' and '-' only, got {self.name!r}")
        flag = self.flag
        if isinstance(flag, bool) or (isinstance(flag, str) and not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", flag)):
            raise ValueError(f"flag must be a number or a lower-case word, got {flag!r}")
        for name, value in (("bits", self.bits), ("group", self.group), ("factors", self.factors)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of format {self.name!r} must be an int of at least 1, got {value!r}")
        if self.dtype is None and self.bits not in (4, 8):
            raise ValueError(f"format {self.name!r} must have codes of 4 or 8 bits, got {self.bits}")

    def __reduce__(self) -> tuple[Any, ...]:
        return find_format, (self.name,)

    @property
    def has_codes(self) -> bool:
        """Whether weights are codes and scales."""
        return self.dtype is None

    @property
    def codes_dtype(self) -> torch.dtype:
        return self.dtype or torch.uint8

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this shape, `... rows columns`, can be stored so."""
        return len(shape) >= 2 and (self.dtype is not None or shape[-1] % BLOCK == 0) and 0 not in shape

    def scale_count(self, columns: int) -> int:
        """Return how many scales a row of this number of columns has."""
        return -(-columns // self.group) * self.factors

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the shapes of the codes and of the scales, None if there are none, of a weight of this shape."""
        if self.dtype is not None:
            return shape, None
        *front, rows, columns = shape
        tiles = -(-rows // TILE)
        return (*front, tiles, columns // BLOCK, self.bits, TILE, STEP), (
            *front,
            tiles,
            self.scale_count(columns),
            TILE,
        )

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight of this shape."""
        codes, scales = self.shapes(shape)
        factors = 0 if scales is None else torch.Size(scales).numel() * self.scales_dtype.itemsize
        return torch.Size(codes).numel() * self.codes_dtype.itemsize + factors

    def holds(self, codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> bool:
        """Whether C and kernels, which see addresses alone, may read these as a weight of this shape."""
        if codes.device != scales.device:
            return False
        whole = self.shapes(shape) == (tuple(codes.shape), tuple(scales.shape))
        return whole and (codes.dtype, scales.dtype) == (self.codes_dtype, self.scales_dtype)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Round a weight `... rows columns` to codes and scales in tiles, or to its dtype and None.

        Raise TooLargeError for numbers that the format cannot stand for.
        """
        if self.dtype is None:
            return self.to_tiles(*self.to_codes(x))
        numbers = x.detach().to(self.dtype)
        check_half(numbers)
        return numbers, None

    def to_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round a weight to codes of its shape, one a byte, and scales `... rows scales`."""
        assert self.round is not None, f"{self.name} has no codes"
        return self.round(x)

    def decode(self, codes: Tensor, scales: Tensor, rows: int) -> Tensor:
        """Return the weight `... rows columns` of these tiles, in float32."""
        assert self.numbers is not None, f"{self.name} has no codes"
        return self.numbers(*self.from_tiles(codes, scales, rows))

    def decode_rows(self, codes: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
        """Return these rows of a weight `rows columns` in float32, `... columns`, as an embedding looks them up."""
        assert self.numbers is not None, f"{self.name} has no codes"
        tile, row = ids // TILE, ids % TILE
        found = codes[tile, :, :, row]  # ... groups steps 4
        if self.bits == 4:
            found = torch.cat([found & 15, found >> 4], -2)
        return self.numbers(found.flatten(-3), scales[tile, :, row])

    def to_tiles(self, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Put codes `... rows columns`, one a byte, and scales `... rows scales` into tiles."""
        *front, rows, columns = codes.shape
        more = -rows % TILE
        if more:
            codes = torch.cat([codes, codes.new_full((*front, more, columns), self.zero)], -2)
            scales = torch.cat([scales, scales.new_zeros(*front, more, scales.shape[-1])], -2)
        tiles = codes.unflatten(-2, (-1, TILE)).unflatten(-1, (-1, BLOCK // STEP, STEP))  # ... tiles 16 groups 8 4
        tiles = tiles.movedim(-4, -2)
        tiles = (tiles[..., :4, :, :] | tiles[..., 4:, :, :] << 4) if self.bits == 4 else tiles
        return tiles.contiguous(), scales.unflatten(-2, (-1, TILE)).transpose(-1, -2).contiguous()

    def from_tiles(self, codes: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return codes `... rows columns`, one a byte, and scales `... rows scales`: to_tiles backwards."""
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], -3)
        plain = codes.movedim(-2, -4).flatten(-3).flatten(-3, -2)  # ... tiles 16 groups 8 4
        return plain[..., :rows, :], scales.transpose(-1, -2).flatten(-3, -2)[..., :rows, :]


FORMATS: dict[str, Format] = {}
"""The formats by name; register_format adds one."""
BY_BITS: dict[int | str, str] = {}
"""The format that a number of bits, or a word, of --bits stands for."""


def register_format(form: Format) -> Format:
    """Add a format, so that `quantize`, checkpoints and --bits find it by its name, and return it.

    Args:
        form: The format; its name and its flag must be new.

    >>> register_format(Format("int4-pairs", 4, round=round_pairs, numbers=pairs, group=64, factors=2, flag="4-pairs"))
    """
    if not isinstance(form, Format):
        raise TypeError(f"form must be a Format, got {type(form).__name__}")
    if form.name in FORMATS:
        raise ValueError(f"a format must have a name of its own, got {form.name}, which is there; choose another")
    for flag, name in BY_BITS.items():
        if str(flag) == str(form.flag):
            raise ValueError(f"a format must have a flag of its own, got {form.flag}, which is {name}")
    FORMATS[form.name] = form
    if form.flag is not None:
        BY_BITS[form.flag] = form.name
    return form


@contextmanager
def temporary_formats() -> Iterator[None]:
    """Remove, at the end of a `with` block, the formats that were registered inside of it, as tests of one need."""
    before = set(FORMATS)
    try:
        yield
    finally:
        for name in FORMATS.keys() - before:
            flag = FORMATS.pop(name).flag
            if flag is not None:
                BY_BITS.pop(flag, None)


def find_format(form: str | Format, argument: str = "weights") -> Format:
    """Return a format by its name; raise ValueError, which names the argument, if there is none of this name."""
    if isinstance(form, Format):
        if FORMATS.get(form.name) is not form:  # weights, files and ops know it by its name
            raise ValueError(f"{argument} must be a registered format, got {form.name!r}; call register_format first")
        return form
    checks.check_choice(argument, form, tuple(FORMATS))
    return FORMATS[form]


register_format(Format("bfloat16", 16, torch.bfloat16, flag=16))
register_format(Format("float16", 16, torch.float16))
INT8 = register_format(
    Format(
        "int8", 8, round=partial(round_to_integers, bits=8), numbers=partial(integers, bits=8), zero=128, flag=8,
        product=native.INT8, kernel=CodedKernel(8),
    )
)  # fmt: skip
INT4 = register_format(
    Format(
        "int4", 4, round=partial(round_to_integers, bits=4), numbers=partial(integers, bits=4), zero=8, flag=4,
        product=native.INT4, kernel=CodedKernel(4),
    )
)  # fmt: skip
FP8 = register_format(
    Format(
        "fp8", 8, round=round_to_float8, numbers=float8_numbers, group=FLOAT8_GROUP, scales_dtype=torch.float32,
        are_numbers=are_float8_numbers, flag="fp8", product=native.FLOAT8, kernel=CodedKernel(8, float8=True),
    )
)  # fmt: skip
