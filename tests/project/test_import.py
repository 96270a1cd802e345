"""`import lineate` needs only torch."""

import pytest

from tests.support import fresh

OPTIONAL = ("triton", "typer", "rich", "matplotlib", "transformers", "einops", "safetensors", "gradio", "fastapi")

BLOCK = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Blocked())
"""

USE = """
import torch, lineate
q = torch.randn(1, 20, 2, 4, requires_grad=True)
log_decay, beta = -torch.rand(1, 20, 2), torch.rand(1, 20, 2)
for form in ("recurrent", "chunkwise", "parallel"):
    out, state = lineate.gated_delta_rule(q, q, q, log_decay, beta, form=form, normalize_qk=True)
    out.sum().backward()
print(lineate.explain(q, q, q, log_decay, beta).rule)
"""


def python(code: str, **environment: str) -> str:
    done = fresh.run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.cover
def test_import_and_use_with_everything_optional_blocked():
    assert python(BLOCK + USE) == "gated_delta_rule"


@pytest.mark.cover
def test_the_block_blocks():
    assert "blocked" in python(BLOCK + "try:\n    import rich\nexcept ImportError as error:\n    print(error)")


WITHOUT_TRITON = """
import torch, lineate
q = torch.ones(1, 20, 1, 4)
gate = torch.zeros(1, 20, 1)
assert lineate.explain(q, q, q, gate, gate).backend != "triton"
lineate.fused_delta_rule(q, q, q, gate, gate, gate[0, 0])
lineate.decode(q[:, :1], q[:, :1], q[:, :1], gate[:, :1], gate[:, :1], state=torch.zeros(1, 1, 4, 4))
for call in (
    lambda: lineate.gated_delta_rule(q, q, q, gate, gate, backend="triton"),
    lambda: lineate.fused_delta_rule(q, q, q, gate, gate, gate[0, 0], backend="triton"),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""


@pytest.mark.cover
def test_without_triton_everything_else_works_and_a_request_says_so():
    missing = "No module named 'triton' (blocked)"
    message = f"backend='triton' cannot serve this call: triton is not installed ({missing}); use backend='torch'"
    assert python(BLOCK + WITHOUT_TRITON, TRITON_INTERPRET="1").splitlines() == [message] * 2


@pytest.mark.cover
def test_without_a_gpu_a_request_for_triton_says_so():
    message = (
        "backend='triton' cannot serve this call: the triton kernels need CUDA tensors, got cpu; use backend='torch'"
    )
    assert python(BLOCK + WITHOUT_TRITON, TRITON_INTERPRET="0").splitlines() == [message] * 2


@pytest.mark.cover
def test_triton_is_imported_at_its_first_use_only():
    """Neither importing lineate nor calls that torch or C serve import it (torch itself does so in some call)."""
    code = """
import sys, torch
before = "triton" in sys.modules
import lineate
assert ("triton" in sys.modules) == before == False
x, gate = torch.ones(1, 20, 1, 4), torch.zeros(1, 20, 1)
lineate.gated_delta_rule(x, x, x, gate, gate)
lineate.fused_delta_rule(x, x, x, gate, gate, gate[0, 0])
lineate.explain(x, x, x, gate, gate)
lineate.decode(x[:, :1], x[:, :1], x[:, :1], gate[:, :1], gate[:, :1], state=torch.zeros(1, 1, 4, 4))
print(any(name.startswith("lineate.kernels.") for name in sys.modules))
"""
    assert python(code) == "False"


@pytest.mark.cover
def test_import_adds_nothing_heavy():
    """It loads only lineate itself and the standard library, beyond what torch has already loaded."""
    code = """
import sys, torch
before = set(sys.modules)
import lineate
added = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
torch_parts = {".".join(name.split(".")[:2]) for name in set(sys.modules) - before if name.startswith("torch.")}
print(sorted(added - {"torch"}), sorted(torch_parts & {"torch._dynamo", "torch._inductor", "torch.onnx"}))
"""
    assert python(code) == "['lineate'] []"


@pytest.mark.cover
def test_calls_import_no_compiler():
    """An op of torch.library imports torch._dynamo at its first call, which takes seconds; eager calls avoid it."""
    code = """
import sys, torch, lineate
from lineate.layers import GatedDeltaNet, KimiDeltaAttention
x, gate = torch.ones(1, 20, 1, 4, requires_grad=True), torch.zeros(1, 20, 1)
for backend in ("auto", "torch"):
    lineate.gated_delta_rule(x, x, x, gate, gate, backend=backend).output.sum().backward()
    with torch.no_grad():
        lineate.kimi_delta_attention(x, x, x, gate[..., None].expand(-1, -1, -1, 4), gate, backend=backend)
for layer in (GatedDeltaNet(8, 2), KimiDeltaAttention(8, 2)):
    y, state = layer(torch.ones(1, 20, 8))
    layer(torch.ones(1, 1, 8), state)[0].sum().backward()
print("torch._dynamo" in sys.modules)
"""
    assert python(code) == "False"


@pytest.mark.cover
def test_models_import_no_tensors_of_many_ranks():
    """Importing them takes a second and 40 MB, which only training on several ranks needs."""
    code = "import sys, lineate.models, lineate.serving.engine.engine; print('torch.distributed.tensor' in sys.modules)"
    assert python(code) == "False"


@pytest.mark.cover
def test_import_compiles_nothing(tmp_path):
    """The C code is built at first use, neither at import nor by explain of a call that it does not serve."""
    code = f"""
import os
os.environ["LINEATE_CACHE"] = {str(tmp_path / "cache")!r}
import torch, lineate
x = torch.ones(1, 3, 1, 2, dtype=torch.float64)
lineate.linear_attention(x, x, x, backend="torch")
print(os.path.exists(os.environ["LINEATE_CACHE"]))
"""
    assert python(code) == "False"


@pytest.mark.cover
def test_public_names():
    code = "import lineate; print(*sorted(lineate.__all__)); print(all(hasattr(lineate, x) for x in lineate.__all__))"
    assert python(code).splitlines() == [
        "Attended AttendedStates KeyValueCache Plan Ring UnstableMemoryWarning attend_keeping_states "
        "attention_matrix decay_gate decode delta_rule diagonal_plus_low_rank explain fused_delta_rule "
        "gated_delta_product gated_delta_rule gated_delta_rule_2 gated_linear_attention kimi_delta_attention "
        "linear_attention rate_of_key softmax_attention",
        "True",
    ]
