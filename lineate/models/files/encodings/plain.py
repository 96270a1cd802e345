"""Codes that are numbers themselves, one an element, row by row: float8 and int8."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lineate.models.files.encodings.encoded import Encoded, Source, Stored
from lineate.quantised.format import FP8, Format
from lineate.quantised.rounding import FLOAT8

__all__ = ["FLOAT8", "PlainCodes", "SignedCodes", "float8_format"]


@dataclass(frozen=True)
class PlainCodes(Encoded):
    """A tensor of float8 or int8 numbers that are multiplied by scales, one a block, in row-major order."""

    @property
    def zero(self) -> int:
        return 0

    def _codes(self, source: Source, matrix: int, first: int, last: int) -> Tensor:
        height, width = self.shape[-2:]
        rows = Stored(self.codes.name, replace(self.stored, shape=(self.stored.nbytes // width, width)))
        return source.rows(rows, matrix * height + first, matrix * height + last)

    def _unsigned(self, codes: Tensor) -> Tensor:
        return codes.view(torch.uint8)

    def _codes_text(self) -> str:
        return str(self.stored.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class SignedCodes(PlainCodes):
    """A tensor of int8 numbers; the codes of the format are larger by 128."""

    def _unsigned(self, codes: Tensor) -> Tensor:
        return codes.view(torch.uint8) ^ 128


def float8_format(scales: Stored) -> Format | None:
    """Return the format of float8 with these scales; None if they are too precise for it."""
    return FP8 if scales.entry.dtype.itemsize <= torch.float32.itemsize else None
