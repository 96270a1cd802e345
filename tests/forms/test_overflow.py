"""Keys without unit length warn once, on every CPU path, never for stable calls, and never in place of a result."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lineate
from lineate.forms import stability
from lineate.native.build import available
from tests.support.cases import FORWARD_PATHS, ROWS, Row, interpreted, unit
from tests.support.fresh import run as run_freshly

CORRECTING = [row for row in ROWS if row.corrects]
TRITON = pytest.param({"form": "auto", "backend": "triton"}, id="triton", marks=[interpreted, pytest.mark.slow])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Let the warning begin as in a new process, for each test and for those of other files."""
    stability.forget()
    yield
    stability.forget()


def tokens(t: int = 20, *, width: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(1, t, 2, width, generator=torch.Generator().manual_seed(seed))


def gates(row: Row, q: Tensor, beta: float = 1.0) -> dict[str, Tensor]:
    found = {"beta": q.new_full(q.shape[:3], beta)}
    if row.decay != "none":
        found["log_decay"] = q.new_zeros(q.shape if row.decay == "channel" else q.shape[:3])
    return found


def quiet(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", lineate.UnstableMemoryWarning)
        return call()


@pytest.mark.parametrize("path", [*FORWARD_PATHS, TRITON])
@pytest.mark.parametrize("row", CORRECTING, ids=str)
def test_random_keys_are_named(row: Row, path: dict[str, str]) -> None:
    q = tokens()
    with pytest.warns(lineate.UnstableMemoryWarning, match=r"beta \|k\|\^2 must stay in \[0, 2\].*normalize_qk=True"):
        row.op(q, q, q, **gates(row, q), **path)
    quiet(lambda: row.op(q, q, q, **gates(row, q), **path))  # only once per process


@pytest.mark.parametrize("path", FORWARD_PATHS[:4])
def test_training_and_packed_texts(path: dict[str, str]) -> None:
    q = tokens().requires_grad_()
    with pytest.warns(lineate.UnstableMemoryWarning):
        out = lineate.delta_rule(q, q, q, torch.ones(1, 20, 2), cu_seqlens=torch.tensor([0, 4, 20]), **path).output
    quiet(out.sum().backward)


@pytest.mark.cover
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=[interpreted])])
@pytest.mark.parametrize("raw", [False, True], ids=["gates", "raw gates"])
def test_decoding(backend: str, raw: bool) -> None:
    """Token by token, one of 16 is checked, so 20 tokens are enough wherever they begin."""
    q, state = tokens(), torch.zeros(1, 2, 16, 16)
    quiet(lambda: lineate.decode(*[unit(q[:, :1])] * 3, None, torch.ones(1, 1, 2), state=state, backend=backend))
    with pytest.warns(lineate.UnstableMemoryWarning):
        for i in range(20):
            now = q[:, i : i + 1]
            lineate.decode(now, now, now, None, torch.ones(1, 1, 2), state=state, backend=backend, raw_gates=raw)


def test_other_doors() -> None:
    q = tokens()
    ones = torch.ones(1, 20, 2)
    calls = (
        lambda: lineate.attention_matrix(q, q, None, ones),
        lambda: lineate.fused_delta_rule(q, q, q, ones, ones, torch.zeros(2), normalize_qk=False),
        lambda: lineate.delta_rule(q, q, q, torch.ones(1, 20, 2, 16)),  # a rate per value channel
        lambda: lineate.delta_rule(unit(q), unit(q), q, -0.1 * ones),
        lambda: lineate.delta_rule(unit(q), unit(q), q, 2.1 * ones),
        lambda: lineate.delta_rule(q.double(), q.double(), q.double(), ones.double()),
    )
    for call in calls:
        stability.forget()
        with pytest.warns(lineate.UnstableMemoryWarning):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("row", CORRECTING, ids=str)
def test_stable_calls_are_not_named(row: Row, dtype: torch.dtype) -> None:
    """The cases: unit keys rounded to their dtype, rates of 0, 1 and exactly 2, normalised keys of any size, NaN."""
    for seed in range(20):
        k = unit(tokens(seed=seed, width=2 + 9 * seed)).to(dtype)
        for beta in (0.0, 1.0, 2.0):
            quiet(lambda k=k, beta=beta: row.op(k, k, k, **gates(row, k, beta)))
    q = tokens().to(dtype)
    quiet(lambda: row.op(q, q, q, **gates(row, q), normalize_qk=True))
    quiet(lambda: row.op(q * torch.nan, q * torch.nan, q, **gates(row, q)))


def test_rules_that_only_add_are_not_named() -> None:
    q = tokens()
    quiet(lambda: lineate.linear_attention(q, q, q))
    quiet(lambda: lineate.decode(q, q, q, -torch.ones(1, 20, 2), state=torch.zeros(1, 2, 16, 16)))


@pytest.mark.parametrize("path", FORWARD_PATHS)
def test_warnings_that_are_errors_change_no_result(path: dict[str, str]) -> None:
    q, ones = tokens(), torch.ones(1, 20, 2)
    for _ in range(2):  # every time
        with pytest.raises(lineate.UnstableMemoryWarning):
            quiet(lambda: lineate.delta_rule(q, q, q, ones, **path))
    with pytest.warns(lineate.UnstableMemoryWarning):
        after = lineate.delta_rule(q, q, q, ones, **path)
    expected = lineate.delta_rule(q, q, q, ones, **path)
    assert torch.equal(after.output, expected.output) and torch.equal(after.state, expected.state)


def test_an_error_in_decode_leaves_the_state() -> None:
    q, state = tokens(1), torch.randn(1, 2, 16, 16)
    before = state.clone()
    with pytest.raises(lineate.UnstableMemoryWarning):
        quiet(lambda: lineate.decode(q, q, q, None, torch.ones(1, 1, 2), state=state))
    assert torch.equal(state, before)


def test_it_names_the_line_that_called() -> None:
    q = tokens()
    for form in ("chunkwise", "recurrent", "parallel"):
        stability.forget()
        with pytest.warns(lineate.UnstableMemoryWarning) as found:
            lineate.delta_rule(q, q, q, torch.ones(1, 20, 2), form=form)
        assert found[0].filename == __file__


def test_vmap_and_compiled_forms_do_not_look() -> None:
    q, ones = tokens(), torch.ones(1, 20, 2)
    quiet(lambda: torch.func.vmap(lambda x: lineate.delta_rule(x[None], x[None], x[None], ones).output)(q))
    quiet(lambda: torch.func.vmap(lambda beta: lineate.delta_rule(q, q, q, beta).output)(ones[None]))


SCRIPT = """
import torch, lineate
q = torch.randn(1, 20, 2, 16)
for _ in range(3):
    lineate.delta_rule(q, q, q, torch.ones(1, 20, 2))
"""


IGNORED = """
import warnings
warnings.simplefilter("ignore", RuntimeWarning)
"""


@pytest.mark.cover
@pytest.mark.parametrize("before, said", [("", 1), (IGNORED, 0)], ids=["shown", "ignored"])
def test_once_a_process(before: str, said: int) -> None:
    done = run_freshly(before + SCRIPT)
    assert done.returncode == 0 and done.stderr.count("UnstableMemoryWarning:") == said


@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_decay_per_head_stabilises_larger_erases(form, backend):
    """A step multiplies the memory along the key by decay (1 - erase), here by -1.81, and by -0.67."""
    if backend == "native" and not available("general"):
        pytest.skip("no C compiler")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 8, generator=generator) for _ in range(3))
    erase, write = torch.full_like(q, 3.0), torch.ones_like(v)
    options = {"normalize_qk": True, "form": form, "backend": backend}
    for log_decay, warns in ((-0.1, True), (-1.1, False)):
        stability.forget()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", lineate.UnstableMemoryWarning)
            lineate.gated_delta_rule_2(q, k, v, torch.full((1, 40, 2), log_decay), erase, write, **options)
        assert [x.category for x in found] == [lineate.UnstableMemoryWarning] * warns
