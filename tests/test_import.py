"""`import lineate` needs torch alone."""

import subprocess
import sys

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
    out, state = lineate.gated_delta_rule(q, q, q, log_decay, beta, form=form)
    out.sum().backward()
print(lineate.explain(q, q, q, log_decay, beta).rule)
"""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_and_use_with_everything_optional_blocked():
    assert python(BLOCK + USE) == "gated_delta_rule"


def test_the_block_blocks():
    assert "blocked" in python(BLOCK + "try:\n    import rich\nexcept ImportError as error:\n    print(error)")


def test_import_adds_nothing_heavy():
    """Only lineate itself and the standard library, beyond what torch has loaded already."""
    code = """
import sys, torch
before = set(sys.modules)
import lineate
added = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
torch_parts = {".".join(name.split(".")[:2]) for name in set(sys.modules) - before if name.startswith("torch.")}
print(sorted(added - {"torch"}), sorted(torch_parts & {"torch._dynamo", "torch._inductor", "torch.onnx"}))
"""
    assert python(code) == "['lineate'] []"


def test_import_compiles_nothing(tmp_path):
    """The C code is built at first use, not at import, and not by explain of a call it does not serve."""
    code = f"""
import os
os.environ["LINEATE_CACHE"] = {str(tmp_path / "cache")!r}
import torch, lineate
x = torch.ones(1, 3, 1, 2, dtype=torch.float64)
lineate.linear_attention(x, x, x, backend="torch")
print(os.path.exists(os.environ["LINEATE_CACHE"]))
"""
    assert python(code) == "False"


def test_public_names():
    code = "import lineate; print(*sorted(lineate.__all__)); print(all(hasattr(lineate, x) for x in lineate.__all__))"
    assert python(code).splitlines() == [
        "Attended KeyValueCache Plan attention_matrix delta_rule explain gated_delta_rule gated_linear_attention "
        "kimi_delta_attention linear_attention softmax_attention",
        "True",
    ]
