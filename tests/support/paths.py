"""The places where tests run kernels: Triton's interpreter on a CPU, and a GPU in three dtypes."""

from typing import NamedTuple

import pytest
import torch

from tests.support.cases import interpreted


class Path(NamedTuple):
    """Where the kernels run, and the dtype of q, k and v, or of all tensors."""

    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return "interpreter" if self.device == "cpu" else f"gpu-{str(self.dtype).removeprefix('torch.')}"


INTERPRETER = Path("cpu", torch.float32)
GPU = [Path("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
BF16 = GPU[1]


def param(path: Path, *values: object, slow: bool = False) -> object:
    marks = [interpreted if path.device == "cpu" else pytest.mark.gpu, *([pytest.mark.slow] if slow else [])]
    return pytest.param(path, *values, id="-".join(map(str, (path, *values))), marks=marks)


PATHS = [param(path) for path in (INTERPRETER, *GPU)]
ONE_EACH = [param(INTERPRETER), param(BF16)]
GPU_ONLY = [param(path) for path in GPU]
