"""The C code under the address and undefined-behaviour sanitizers: a table of calls in a separate process.

The process runs this file. A sanitizer's report ends it, and its text is the test's message.
"""

import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.generation.choice import Sampling, choose_tokens
from lineate.layers.convolution import short_convolution
from lineate.layers.feed import MixtureOfExperts, glu
from lineate.layers.norm import GatedRMSNorm, RMSNorm
from lineate.native import build, layers
from lineate.native.compiler import compile_library, compiler_command
from lineate.native.product import combine
from lineate.native.product import product as multiply
from lineate.quantised import quantize, rounded_activations
from tests.support.cases import NATIVE_OBSTACLE, ROWS, Shape, bounds, convert, draw
from tests.support.general_cases import CASES, call, drawn, narrow

SANITIZE = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
"""The compiler's flags (at -O3 gcc takes minutes)."""
SHAPES = (
    Shape(1, 1, 1, 1, 1, 1),
    Shape(2, 5, 1, 3, 3, 7),
    Shape(1, 16, 2, 2, 16, 16),
    Shape(2, 33, 2, 4, 17, 31),
    Shape(1, 70, 1, 2, 33, 66),
)
TEXTS = (0, 1, 16, 0, 33, 20, 0)


def check_rules() -> None:
    """Run every rule forward and backward, and token by token: odd sizes, dtypes, packed sequences, gaps in memory."""
    shapes = [(shape, None) for shape in SHAPES] + [(Shape(1, sum(TEXTS), 2, 4, 6, 5), TEXTS)]
    for row, (shape, texts), dtype, normalize in product(ROWS, shapes, (torch.float32, torch.bfloat16), (False, True)):
        given = convert(draw(row, shape, texts=None if texts is None else len(texts)), dtype)
        given = {name: x if name == "state" else with_gaps(x) for name, x in given.items()}
        options = {"normalize_qk": normalize, "backend": "native"}
        if texts is not None:
            options["cu_seqlens"] = bounds(texts)
        row.op(**given, form="recurrent", **options)
        for chunk in (1, 16, 40):
            leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
            output, state = row.op(**leaves, form="chunkwise", chunk_size=chunk, **options)
            torch.autograd.grad((output.float().sum() + state.sum()), list(leaves.values()))


def check_general_rules() -> None:
    """Run the rules of the general row in the same ways."""
    shapes = [(shape, None) for shape in SHAPES] + [(Shape(1, sum(TEXTS), 2, 4, 6, 5), TEXTS)]
    for (rule, decay, n), (shape, texts), dtype in product(CASES, shapes, (torch.float32, torch.bfloat16)):
        given = narrow(drawn(rule, decay, n, shape=shape), dtype)
        if texts is not None:
            given["state"] = given["state"].repeat(len(texts), 1, 1, 1)
        given = {name: x if name == "state" else with_gaps(x) for name, x in given.items()}
        packed = {} if texts is None else {"cu_seqlens": bounds(texts)}
        call(rule, given | packed, "recurrent", backend="native")
        for chunk in (1, 16, 40):
            leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
            result = call(
                rule, leaves | packed, "chunkwise", backend="native", chunk_size=chunk, normalize_qk=chunk == 16
            )
            differentiate(result, list(leaves.values()))


def with_gaps(x: Tensor) -> Tensor:
    """Return x as part of a wider projection, to whose end it reaches."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    wide[..., 3:] = x
    return wide[..., 3:]


def differentiate(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    torch.autograd.grad(sum(x.sum() for x in outputs), leaves)


def check_layers() -> None:
    """Run convolution, norms and the gated unit: odd widths, one token, no token, packed sequences."""
    for b, t, channels, size, started in product((1, 2), (1, 2, 3, 37), (1, 7, 16, 33), (2, 3, 4), (False, True)):
        x, weight = with_gaps(torch.randn(b, t, channels)), torch.randn(channels, size)
        state = torch.randn(b, channels, size - 1) if started else None
        leaves = [x.requires_grad_() for x in (x, weight, state) if x is not None]
        differentiate(short_convolution(x, weight, state), leaves)
    for channels, size in product((1, 19), (2, 3, 4)):
        x, weight = torch.randn(1, sum(TEXTS), channels), torch.randn(channels, size)
        leaves = [y.requires_grad_() for y in (x, weight, torch.randn(len(TEXTS), channels, size - 1))]
        differentiate(short_convolution(*leaves, bounds(TEXTS)), leaves)
    for shape, size in product(((1,), (3, 5), (2, 3, 4), (2, 0, 3)), (1, 2, 15, 17, 130)):
        x, gate = (with_gaps(torch.randn(*shape, size)).requires_grad_() for _ in range(2))
        differentiate((RMSNorm(size)(x), GatedRMSNorm(size)(x, gate)), [x, gate])
        pair = with_gaps(torch.randn(*shape, 2 * size)).requires_grad_()
        differentiate((glu(pair),), [pair])


def check_products() -> None:
    """Multiply few rows by weights of every dtype, to the end of their memory."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for rows, (out, size), dtype in product((1, 2, 3, 4, 7, 16), ((1, 1), (3, 5), (5, 33), (260, 300)), dtypes):
        weight = with_gaps(torch.randn(out, size)).to(dtype)
        multiply(torch.randn(rows, size), weight)
        combine(torch.randn(rows, out), weight)


@torch.no_grad()
def check_quantised_weights() -> None:
    """Multiply rows by quantised weights, with rounded rows too, of sizes that fill no tile."""
    for rows, (out, size), form in product(
        (1, 3, 4, 9, 17), ((1, 32), (33, 64), (66, 1056)), ("float16", "int8", "int4")
    ):
        weight = quantize(torch.randn(out, size), form)
        F.linear(torch.randn(rows, size), weight)
        with rounded_activations():
            F.linear(torch.randn(rows, size), weight)


@torch.no_grad()
def check_experts() -> None:
    """Run few tokens through experts of every dtype and format, which lie at the end of their memory."""
    for rows, form in product((1, 3, 16), ("float32", "bfloat16", "float16", "int8", "int4", "fp8")):
        layer = MixtureOfExperts(32, 5, 2, 32)
        if form in ("int8", "int4", "fp8"):
            for name in ("experts_gate_up", "experts_down"):
                setattr(layer, name, nn.Parameter(quantize(getattr(layer, name), form), requires_grad=False))
        else:
            layer = layer.to(getattr(torch, form))
        layer(torch.randn(rows, 32).to(layer.router.weight.dtype))


def check_choices() -> None:
    """Draw from vocabularies that do not fill a block: equal logits, logits of -inf, limits of every kind."""
    kinds = {
        "temperature": (0.01, 1.0, 1e30),
        "top_k": (0, 2, 70, 10**9),
        "top_p": (1e-9, 0.6, 1.0),
        "min_p": (0.0, 1.0),
    }
    for vocab, values in product((1, 2, 63, 64, 65, 700), product(*kinds.values())):
        logits = with_gaps(torch.randn(4, vocab))
        logits[1], logits[2, 1:], logits[3] = 0.0, -torch.inf, logits[3].round()
        choose_tokens(logits, [Sampling(**dict(zip(kinds, values, strict=True)))] * 4, torch.arange(4))


if __name__ == "__main__":
    assert not NATIVE_OBSTACLE, NATIVE_OBSTACLE
    torch.manual_seed(0)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        check_rules()
        check_general_rules()
        check_layers()
        check_products()
        check_quantised_weights()
        check_experts()
        check_choices()
    assert layers.serves(torch.zeros(1))  # torch does not run in its place
    print("no report")


def runtime(compiler: list[str], name: str) -> str | None:
    """Return a library of the compiler's, by its full path."""
    found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


@pytest.mark.slow
def test_sanitizers_report_nothing(tmp_path):
    compiler = shutil.which("gcc")
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")  # torch throws exceptions, which the first one watches
    libraries = [None if compiler is None else runtime([compiler], name) for name in names]
    if None in libraries:
        pytest.skip("needs gcc with libasan and libubsan")
    cc = tmp_path / "cc"
    cc.write_text(f'#!/bin/sh\nexec {compiler} "$@" {SANITIZE}\n')
    cc.chmod(0o755)
    (tmp_path / "empty.c").write_text("int empty;\n")
    tried = [str(cc), "-shared", "-fPIC", str(tmp_path / "empty.c"), "-o", str(tmp_path / "empty.so")]
    if subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("needs gcc with -fsanitize=address,undefined")
    # Compiled here: in the other process the compiler would be watched, too.
    command = compiler_command(str(cc))
    for code in build.SUBJECTS.values():
        compile_library(command, tmp_path, build.prefix(command, code), code)
    environment = {
        **os.environ,
        "CC": str(cc),
        "LINEATE_CACHE": str(tmp_path),
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(Path(build.__file__).parents[2]),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0 and done.stdout.endswith("no report\n"), (done.stdout + done.stderr)[-6000:]
