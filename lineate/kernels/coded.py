"""How the kernels of layers/quantised_products.py read codes; this module needs no Triton, so that formats name it."""

from typing import NamedTuple


class CodedKernel(NamedTuple):
    """How kernels read the codes of a format.

    Args:
        bits: Of a code.
        float8: Whether codes are float8 with a scale of float32 for 128 columns. Otherwise they are integers, of which
            the middle one is 0, with a scale of float16 for 32 columns.
    """

    bits: int
    float8: bool = False
