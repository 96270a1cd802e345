"""The table of cases of the rules of the general row, as tests/support/cases.py has it for the rules with one key."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from lineate.call import Inputs, Options, Request
from lineate.forms.general import general_row
from lineate.ops.rules import attend
from lineate.rule import DIAGONAL_PLUS_LOW_RANK, GATED_DELTA_2, GATED_DELTA_PRODUCT, Rule
from tests.support.cases import Result, Row, Shape, errors, oracle, recurrent

F64 = torch.float64
B, T, H, HV, K, V = 2, 53, 2, 4, 6, 5
SMALL = Shape(B, T, H, HV, K, V)

CASES = [
    *((GATED_DELTA_2, decay, 1) for decay in ("head", "channel")),
    *((DIAGONAL_PLUS_LOW_RANK, decay, 1) for decay in ("none", "head", "channel")),
    *((GATED_DELTA_PRODUCT, decay, n) for decay, n in itertools.product(("none", "head"), (1, 2, 3))),
]
IDS = [f"{rule.name}-{decay}-{n}" for rule, decay, n in CASES]


def drawn(
    rule: Rule, decay: str, n: int = 1, *, t: int = T, hv: int = HV, seed: int = 0, shape: Shape | None = None
) -> dict[str, Tensor]:
    """Draw float64 inputs of a rule: decays of .2 to 1 with a reset, gates over all of their ranges, a first state."""
    generator = torch.Generator().manual_seed(seed)
    b, t, h, hv, key_dim, value_dim = shape or Shape(B, t, H, hv, K, V)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=F64)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=F64)

    several = (n,) if rule.writes else ()
    inputs = {
        "q": normal(b, t, h, key_dim),
        "k": normal(b, t, *several, h, key_dim),
        "v": normal(b, t, *several, hv, value_dim),
    }
    inputs |= {name: F.normalize(inputs[name], dim=-1) for name in ("q", "k")}
    if decay != "none":
        log_decay = -1.6 * uniform(b, t, hv, *((key_dim,) if decay == "channel" else ()))
        log_decay[0, t // 3, -1] = -torch.inf
        log_decay[:, t // 2] *= 1e-12
        log_decay[-1, t // 5, 0] = -50
        inputs["log_decay"] = log_decay
    if rule is GATED_DELTA_PRODUCT:
        inputs["beta"] = 2 * uniform(b, t, n, hv)
    if rule is GATED_DELTA_2:
        inputs |= {"erase": 2 * uniform(b, t, hv, key_dim), "write": uniform(b, t, hv, value_dim)}
    if rule is DIAGONAL_PLUS_LOW_RANK:
        probe = F.normalize(normal(b, t, hv, key_dim), dim=-1)
        offset = 0.1 * normal(1, 1, hv, key_dim) * probe.abs()
        inputs |= {"probe": probe, "direction": probe * uniform(b, t, hv, key_dim) + offset}
    return inputs | {"state": normal(b, hv, key_dim, value_dim)}


def call(rule: Rule, inputs: dict[str, Tensor], form: str = "auto", **keywords: object) -> lineate.Attended:
    tensors = {name: inputs.get(name) for name in Inputs.NAMES}
    return attend(rule, Inputs.of(tensors), Request(form=form, **keywords))


def row(rule: Rule, decay: str) -> Row:
    """Return the rule as a row of tests/support/cases.py, whose op takes cu_seqlens among the options."""

    def op(form: str, cu_seqlens: Tensor | None = None, **arguments: object) -> lineate.Attended:
        tensors = {name: x for name, x in arguments.items() if name in Inputs.NAMES}
        options = {name: x for name, x in arguments.items() if name not in Inputs.NAMES}
        return call(rule, tensors | {"cu_seqlens": cu_seqlens}, form, **options)

    return Row(rule.name, op, decay, True)


def narrow(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the inputs rounded to `dtype`, but for the state, which is never below float32."""
    return {name: x.to(torch.float32 if name == "state" else dtype) for name, x in inputs.items()}


def assert_in_budget(
    rule: Rule, inputs: dict[str, Tensor], got: Result, chunk_size: int, what: object = "", native: float = 0.0,
    **options: object,
) -> None:  # fmt: skip
    """Check a result in float32 against the float64 recurrence, with the budget of tests/support/cases.budget.

    It is twice the error of the recurrent form in float32, plus u sqrt(n) kappa, where T = I + M has the erasing side.
    native: what a GPU's products add to u sqrt(n).
    """
    case = row(rule, "")
    expected = oracle(case, inputs, **options)
    single = {name: x.float() for name, x in inputs.items()}
    writes = inputs["k"].shape[2] if rule.writes else 1
    terms = min(chunk_size, inputs["q"].shape[1]) * writes + inputs["q"].shape[-1] + inputs["v"].shape[-1]
    added = (2**-24 * terms**0.5 + native) * _condition(rule, inputs, chunk_size, **options)
    reference = recurrent(case, single, backend="torch", **options)
    limits = {name: 2 * error + added for name, error in errors(reference, expected).items()}
    for name in limits:
        source = {"output": "v"}.get(name, name.removeprefix("d"))
        if source != "state" and inputs[source].dtype in (torch.bfloat16, torch.float16):
            limits[name] += torch.finfo(inputs[source].dtype).eps / 2
    found = errors(got, expected)
    broken = {name: f"{x:.2e} > {limits[name]:.2e}" for name, x in found.items() if not x <= limits[name]}
    assert not broken, f"{what}: {broken}"


def _condition(
    rule: Rule, inputs: dict[str, Tensor], chunk_size: int, *, normalize_qk: bool = False,
    cu_seqlens: Tensor | None = None,
) -> float:  # fmt: skip
    """Return the largest |T|_F |T^-1|_F / m among the chunks of m writes, with T = I + M of what is erased."""
    if cu_seqlens is not None:
        texts = (
            {name: x if name == "state" else x[:, start:end] for name, x in inputs.items()}
            for start, end in itertools.pairwise(cu_seqlens.tolist()) if start < end
        )  # fmt: skip
        return max(_condition(rule, text, chunk_size, normalize_qk=normalize_qk) for text in texts)
    given = Inputs.of({name: None if name not in inputs else inputs[name].double() for name in Inputs.NAMES})
    row_ = general_row(given, Options(rule, 1.0, normalize_qk))
    m, step = row_.e.shape[1], chunk_size * row_.writes
    largest = 1.0
    for start in range(0, m, step):
        e, d = (x[:, start : start + step].transpose(1, 2) for x in (row_.e, row_.d))  # b hv m k
        size = e.shape[2]
        if row_.log_decay is None:
            M = e @ d.mT
        else:
            G = row_.log_decay[:, start : start + step].clamp(min=-1e3).transpose(1, 2).cumsum(2)  # b hv m 1|k
            between = (G.unsqueeze(3) - G.unsqueeze(2)).clamp(max=0).exp()  # b hv m m 1|k
            M = torch.einsum("bhik,bhijk,bhjk->bhij", e, between.expand(*between.shape[:-1], e.shape[-1]), d)
        T = M.tril(-1) + torch.eye(size, dtype=F64)
        norms = torch.linalg.matrix_norm(T) * torch.linalg.matrix_norm(torch.linalg.inv(T))
        largest = max(largest, norms.max().item() / size)
    return largest
