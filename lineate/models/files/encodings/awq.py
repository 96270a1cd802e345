"""quant_method "awq", version "gemm", as AutoAWQ writes it: the transpose of a weight, in words along its rows.

X.qweight  int32 `columns rows / 8`    8 codes of 4 bits, of rows 0 2 4 6 1 3 5 7 of their 8 rows
X.qzeros   int32 `groups rows / 8`     codes of 0, in the same order
X.scales   `groups rows`
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lineate.models.files.encodings.bits import codes_of
from lineate.models.files.encodings.encoded import INTEGERS, Encoded, Source, Stored
from lineate.models.files.encodings.settings import Settings
from lineate.models.files.encodings.tensors import StoredTensors, placed, wrong_shape

EACH = 8
"""Codes of a word."""
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The positions in a word of the codes of its 8 rows."""


@dataclass(frozen=True)
class ShuffledCodes(Encoded):
    """Codes of the transpose, in words along the rows of the weight, whose order is that of a GPU's threads."""

    @property
    def by_rows(self) -> bool:
        return False

    def _codes(self, source: Source, matrix: int, first: int, last: int) -> Tensor:
        return self._unpacked(source, self.codes, first, last)

    def _scales(self, source: Source, matrix: int, first: int, last: int) -> Tensor:
        return source.columns(self.scales, first, last).float().t()

    def _zeros(self, source: Source, matrix: int, first: int, last: int) -> Tensor | None:
        assert self.zeros is not None
        return self._unpacked(source, self.zeros, first, last)

    @staticmethod
    def _unpacked(source: Source, stored: Stored, first: int, last: int) -> Tensor:
        """Return codes `rows stored-rows`."""
        words = source.columns(stored, first // EACH, (last - 1) // EACH + 1)
        codes = codes_of(words, 4)[..., PLACES].flatten(1)
        return codes[:, first % EACH : first % EACH + last - first].t()


def read(settings: Settings, tensors: StoredTensors) -> None:
    """Find the quantised weights and their scales."""
    settings.word("version", "checkpoint_format", "format", allowed=("gemm",), default="gemm")
    bits, size = settings.whole("bits", "w_bit"), settings.whole("group_size", "q_group_size", least=-1)
    if bits != 4 or size == 0:
        raise settings.error(f"must have bits = 4 and a group_size of -1 or above 0, got {bits} and {size}")
    for stem in tensors.stems(".qweight"):
        codes = Stored(f"{stem}.qweight", tensors.entries[f"{stem}.qweight"])
        scales, zeros = (tensors.need(codes.name, f"{stem}.{part}") for part in ("scales", "qzeros"))
        tensors.add(f"{stem}.weight", _encoded(codes, scales, zeros, size))
    tensors.check_scales(r"\.(scales|qzeros)$")


def _encoded(codes: Stored, scales: Stored, zeros: Stored, size: int) -> Encoded:
    if codes.entry.dtype != torch.int32 or len(codes.entry.shape) != 2:
        raise wrong_shape(codes, "int32 of 2 dimensions", "as AWQ has")
    columns, words = codes.entry.shape
    rows, group = words * EACH, columns if size == -1 else size
    if columns % max(1, group):
        raise wrong_shape(codes, f"of columns that groups of {group} divide", "one in each row of the file")
    groups = columns // max(1, group)
    if scales.entry.shape != (groups, rows) or not scales.entry.dtype.is_floating_point:
        why = f"one scale for {group} of the {columns} columns of {codes.name}"
        raise wrong_shape(scales, f"floats of shape {(groups, rows)}", why)
    if zeros.entry.shape != (groups, words) or zeros.entry.dtype != torch.int32:
        raise wrong_shape(zeros, f"int32 of shape {(groups, words)}", f"4 bits for each scale of {codes.name}")
    parts = {"codes": codes, "scales": scales, "zeros": zeros, "bits": 4, "form": INTEGERS[4], "block": (1, group)}
    return ShuffledCodes(**placed(codes, (rows, columns)), **parts)  # type: ignore[arg-type]
