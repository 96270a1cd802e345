"""A row of a product has the same bits alone and among others, whatever processor the compiler tunes for."""

import ctypes
import os
import shutil

import pytest
import torch

from lineate.native import build, product
from lineate.native.compiler import compiler_command

COMPILER = shutil.which("gcc")
pytestmark = pytest.mark.skipif(os.name != "posix" or COMPILER is None, reason="needs a POSIX system and gcc")
TUNED = f"{COMPILER} --param=avoid-fma-max-bits=512"
"""How gcc is told not to fuse a product into the sum of a loop, as its tuning for some processors does."""


def test_the_own_flag_comes_after_the_tuning():
    command = compiler_command(TUNED)
    own = next(n for n, word in enumerate(command) if word == "--param=avoid-fma-max-bits=0")
    assert own > command.index("--param=avoid-fma-max-bits=512")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_with_that_tuning(dtype, tmp_path_factory, monkeypatch):
    code = build.load_or_build(compiler_command(TUNED), tmp_path_factory.getbasetemp(), build.SUBJECTS["products"])

    def c_function(name: str):
        found = code[f"lineate_{name}"]
        found.argtypes, found.restype = [ctypes.c_char_p], ctypes.c_int
        return found

    monkeypatch.setattr(product, "c_function", c_function)
    generator = torch.Generator().manual_seed(0)
    for columns in (48, 256, 600):
        x = torch.randn(16, columns, generator=generator)
        weight = torch.randn(100, columns, generator=generator).to(dtype)
        alone = torch.cat([product.product(row, weight) for row in x.split(1)])
        for rows in (2, 3, 4, 8, 9, 16):
            assert torch.equal(product.product(x[:rows], weight), alone[:rows]), (columns, rows)
