"""The one table of cases: six rows of rules, shapes, special inputs, and the helpers that every test uses.

`draw` makes the inputs of a row; `run` returns the output, the state and all gradients, including the initial state's;
`errors` compares two results; `budget` returns how large an error rounding may explain. The oracle is the recurrent
form in float64.
"""

import hashlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import lineate

Inputs = dict[str, Tensor]
"""The tensors of one call by their argument names: q, k, v, and log_decay, beta, state where they apply."""
FORMS = ("recurrent", "chunkwise", "parallel")


def _native_obstacle() -> str:
    """Return why the native backend cannot run here, or an empty string."""
    x = torch.zeros(1, 1, 1, 1)
    try:
        lineate.explain(x, x, x, form="chunkwise", backend="native")
    except ValueError as reason:
        return str(reason)
    return ""


NATIVE_OBSTACLE = _native_obstacle()
needs_native = pytest.mark.skipif(bool(NATIVE_OBSTACLE), reason=NATIVE_OBSTACLE)
# Skip a test that needs kernels on a CPU where they cannot run.
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None,
    reason="needs triton and TRITON_INTERPRET=1, which tests/conftest.py sets where there is no GPU",
)


# The backends of the chunkwise form in float32 and below.
BACKENDS = ("torch",) if NATIVE_OBSTACLE else ("torch", "native")


def _path(form: str, backend: str) -> object:
    marks = [needs_native] if backend == "native" else []
    return pytest.param({"form": form, "backend": backend}, id=f"{form}-{backend}", marks=marks)


# Every way to compute in float32 and below, as keywords of an op; float64 has only the torch backend.
CHUNKWISE = [_path("chunkwise", "torch"), _path("chunkwise", "native")]
PATHS = [_path("recurrent", "torch"), *CHUNKWISE, _path("parallel", "torch")]
# The native recurrent form is for decoding: it has no gradients.
FORWARD_PATHS = [*PATHS, _path("recurrent", "native")]


@dataclass(frozen=True)
class Row:
    """One public op with one shape of log_decay."""

    name: str
    op: Callable[..., lineate.Attended]
    decay: str
    """'none', 'head' or 'channel'."""
    corrects: bool

    def __repr__(self) -> str:
        return self.name


LINEAR = Row("linear", lineate.linear_attention, "none", False)
GATED_LINEAR = Row("gated_linear", lineate.gated_linear_attention, "head", False)
GATED_LINEAR_CHANNEL = Row("gated_linear_channel", lineate.gated_linear_attention, "channel", False)
DELTA = Row("delta", lineate.delta_rule, "none", True)
GATED_DELTA = Row("gated_delta", lineate.gated_delta_rule, "head", True)
KIMI_DELTA = Row("kimi_delta", lineate.kimi_delta_attention, "channel", True)
ROWS = (LINEAR, GATED_LINEAR, GATED_LINEAR_CHANNEL, DELTA, GATED_DELTA, KIMI_DELTA)


class Shape(NamedTuple):
    """The sizes of one call."""

    b: int
    t: int
    h: int
    hv: int
    k: int
    v: int

    def __str__(self) -> str:
        return "-".join(f"{name}{size}" for name, size in self._asdict().items())


# k != v, k not a power of two, hv > h; t = 1, c - 1, c, c + 1 and 3c + 5 for chunks of 16 and of 64.
LENGTHS = (1, 2, 15, 16, 17, 3 * 16 + 5, 63, 64, 65, 3 * 64 + 5)
SHAPES = (*(Shape(2, t, 2, 4, 6, 5) for t in LENGTHS), Shape(2, 37, 1, 3, 1, 1), Shape(1, 70, 2, 2, 33, 66))
SMALL = Shape(2, 3 * 16 + 5, 2, 4, 6, 5)
LARGE = Shape(1, 3 * 64 + 5, 1, 2, 48, 40)
# The lengths of sequences packed into one row, for chunks of 16: one token, none (first, inside, last), one chunk, ...
TEXTS = (0, 1, 16, 0, 32, 1, 21, 0)
PACKED = Shape(1, sum(TEXTS), 2, 4, 6, 5)


def bounds(lengths: tuple[int, ...] | list[int] = TEXTS) -> Tensor:
    """Return the cu_seqlens of sequences with these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0)


def draw(row: Row, shape: Shape, special: str = "ordinary", *, texts: int | None = None, seed: int = 0) -> Inputs:
    """Draw float64 inputs of one call: unit q and k, decays of .3 to 1, beta in (0, 1), a state that is not 0."""
    b, t, h, hv, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    inputs = {
        "q": unit(normal(b, t, h, key_dim)),
        "k": unit(normal(b, t, h, key_dim)),
        "v": normal(b, t, hv, value_dim),
        "log_decay": -torch.exp(normal(b, t, hv, key_dim) - 2).clamp(max=1.2),
        "beta": torch.sigmoid(normal(b, t, hv)),
        "state": normal(b if texts is None else texts, hv, key_dim, value_dim),
    }
    if row.decay == "none":
        del inputs["log_decay"]
    elif row.decay == "head":
        inputs["log_decay"] = inputs["log_decay"][..., 0].contiguous()
    if not row.corrects:
        del inputs["beta"]
    SPECIALS[special](inputs)
    return inputs


def unit(x: Tensor) -> Tensor:
    """Return x / |x| over the last dimension."""
    return x / x.norm(dim=-1, keepdim=True)


def _reset(inputs: Inputs, value: float) -> None:
    """Make every 5th token forget everything, every 7th its first head or channel, and two tokens in succession."""
    inputs["log_decay"][:, 3::5] = value
    inputs["log_decay"][:, 5::7, ..., 0] = value
    inputs["log_decay"][:, 8:10] = value


def _nearly_parallel_keys(inputs: Inputs, cosine: float = 0.95) -> None:
    """Replace the keys by keys whose cosines with each other are `cosine` on average."""
    k = inputs["k"]
    common = unit(torch.ones_like(k))
    apart = unit(k - (k * common).sum(-1, keepdim=True) * common + 1e-9)
    inputs["k"] = unit(cosine**0.5 * common + (1 - cosine) ** 0.5 * apart)


def _parallel_keys_and_large_beta(inputs: Inputs) -> None:
    _nearly_parallel_keys(inputs)
    inputs["beta"].fill_(1.99)


SPECIALS: dict[str, Callable[[Inputs], object]] = {
    "ordinary": lambda x: None,
    "empty memory": lambda x: x.pop("state"),
    "zero decay": lambda x: x["log_decay"].zero_(),
    "reset -50": lambda x: _reset(x, -50.0),
    "reset -inf": lambda x: _reset(x, -torch.inf),
    "decay -200": lambda x: x["log_decay"].fill_(-200.0),
    "beta 0": lambda x: x["beta"].zero_(),
    "beta 0 at times": lambda x: x["beta"][:, ::2].zero_(),
    "beta 1": lambda x: x["beta"].fill_(1.0),
    "beta 1.99": lambda x: x["beta"].fill_(1.99),
    "parallel keys": _nearly_parallel_keys,
    "parallel keys, beta 1.99": _parallel_keys_and_large_beta,
}


def specials(row: Row) -> Iterator[str]:
    """Return the special inputs that the row's gates allow."""
    for name in SPECIALS:
        needs_decay = "decay" in name or "reset" in name
        if (row.decay != "none" or not needs_decay) and (row.corrects or "beta" not in name):
            yield name


SPECIAL_ROWS = [(row, special) for row in ROWS for special in specials(row)]


class Result(NamedTuple):
    """The results of one call, and its derivatives."""

    output: Tensor
    state: Tensor
    grads: dict[str, Tensor]


def run(
    row: Row,
    inputs: Inputs,
    form: str = "chunkwise",
    *,
    only: tuple[str, ...] | None = None,
    weighted: bool = True,
    **options: object,
) -> Result:
    """Run a call; differentiate sum(w * output) + sum(w' * state), w and w' fixed, by all inputs (or `only` some)."""
    leaves = {name: x.detach().clone().requires_grad_(only is None or name in only) for name, x in inputs.items()}
    output, state = row.op(**leaves, form=form, **options)
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    if not wanted:
        return Result(output, state, {})
    if weighted:
        loss = (output.double() * weights(output, 1)).sum() + (state.double() * weights(state, 2)).sum()
    else:
        loss = output.sum() + state.sum()
    grads = torch.autograd.grad(loss, list(wanted.values()))
    return Result(output.detach(), state.detach(), dict(zip(wanted, grads, strict=True)))


def oracle(row: Row, inputs: Inputs, **options: object) -> Result:
    """Run the recurrent form in float64, on exactly the numbers that the tested call gets."""
    return recurrent(row, convert(inputs, torch.float64), **options)


KEPT: dict[object, Result] = {}
MOST_KEPT = 32


def recurrent(row: Row, inputs: Inputs, **options: object) -> Result:
    """Run the recurrent form; cache results for the next form or backend that is compared on the same numbers."""
    key = (row.name, *((name, fingerprint(x)) for name, x in sorted({**inputs, **options}.items())))
    if key not in KEPT:
        if len(KEPT) >= MOST_KEPT:
            del KEPT[next(iter(KEPT))]
        KEPT[key] = run(row, inputs, "recurrent", **options)
    kept = KEPT[key]
    return Result(kept.output.clone(), kept.state.clone(), {name: x.clone() for name, x in kept.grads.items()})


def fingerprint(x: object) -> object:
    """Return a key that distinguishes tensors by their contents; return other values unchanged."""
    if not isinstance(x, Tensor):
        return x
    plain = x.detach().cpu().contiguous()
    return plain.dtype, plain.shape, hashlib.sha1(plain.numpy().tobytes()).digest()


def convert(inputs: Inputs, dtype: torch.dtype, gates: torch.dtype | None = None) -> Inputs:
    """Return the inputs rounded to `dtype`, the gates to `gates` if given; the state is never below float32."""
    state = torch.float64 if dtype == torch.float64 else torch.float32
    dtypes = {"state": state, "log_decay": gates or dtype, "beta": gates or dtype}
    return {name: x.to(dtypes.get(name, dtype)) for name, x in inputs.items()}


def weights(like: Tensor, seed: int) -> Tensor:
    """Return fixed random numbers exact in bfloat16, so that every dtype differentiates the same loss."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(-8, 9, like.shape, generator=generator).double() / 8


# Float32 has no relative accuracy left near its smallest number (1e-38): a memory that was decayed to e^-75 is 0 next
# to anything else, and the forms return 0. Errors of numbers below these are measured relative to these.
_SMALLEST = {torch.float64: 1e-180, torch.float32: 1e-20}


def relative_error(got: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return |got - expected| / max(|expected|, floor), 2-norms over all elements; inf if anything is not finite."""
    floor = max(floor, _SMALLEST.get(got.dtype, 1e-20))
    got, expected = got.double(), expected.double()
    if not got.isfinite().all():
        return float("inf")
    return (got - expected).norm().item() / max(expected.norm().item(), floor)


def errors(got: Result, expected: Result) -> dict[str, float]:
    """Return the relative errors of output, state and each gradient.

    dlog_decay is a sum of differences, dG_i = q_i dq_i + k_i dk_i(reader) - k_i dk_i(writer): at a reset the true value
    is about e^-50 and the terms are not, so its errors are measured against at least |dk| (k has unit length). Other
    gradients may cancel to exactly 0 (k = 1 with beta = 1 leaves nothing of the old state), so theirs are measured
    against at least a thousandth of the largest gradient.
    """
    floor = expected.grads["k"].norm().item() if "k" in expected.grads else 0.0
    least = 1e-3 * max((x.norm().item() for x in expected.grads.values()), default=0.0)
    found = {
        "output": relative_error(got.output, expected.output),
        "state": relative_error(got.state, expected.state),
    }
    for name, x in got.grads.items():
        found["d" + name] = relative_error(x, expected.grads[name], floor if name == "log_decay" else least)
    return found


def assert_within(found: dict[str, float], allowed: dict[str, float] | float, what: object = "") -> None:
    """Check that no error exceeds what is allowed; the message lists those that do."""
    limits = allowed if isinstance(allowed, dict) else dict.fromkeys(found, allowed)
    broken = {name: f"{x:.2e} > {limits[name]:.2e}" for name, x in found.items() if not x <= limits[name]}
    assert not broken, f"{what}: {broken}"


def assert_float64_agrees(got: Result, expected: Result, what: object = "") -> None:
    """Check what the forms promise in float64: 1e-12 on output and state, 1e-10 on every gradient."""
    found = errors(got, expected)
    assert_within(found, {name: 1e-12 if name in ("output", "state") else 1e-10 for name in found}, what)


def assert_same_bits(got: Result, expected: Result, what: object = "") -> None:
    """Check that all are equal to the last bit, with NaN equal to NaN."""
    pairs = [("output", got.output, expected.output), ("state", got.state, expected.state)]
    pairs += [("d" + name, x, expected.grads[name]) for name, x in got.grads.items()]
    broken = [name for name, x, y in pairs if not same_bits(x, y)]
    assert not broken, f"{what}: different bits in {broken}"


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether shape, dtype and elements are equal; NaN equals NaN, 0 equals -0 (an empty sum may have either sign)."""
    return x.dtype == y.dtype and torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7))


def budget(
    row: Row, inputs: Inputs, expected: Result, chunk_size: int, *, worst_case: bool = False, **options: object
) -> dict[str, float]:
    """Return how large relative errors of the chunkwise form may be in float32 arithmetic, as the sum of two terms:

    2 x the errors of the recurrent form in float32 on the same numbers, which show how sensitive the problem itself is;
    u sqrt(n) kappa, with u = 2^-24, which the chunkwise form adds. Its sums have at most n = c + k + v terms (tokens,
        then channels), whose rounding errors add up like sqrt(n). The triangular system T = I + beta M of a chunk
        multiplies independent errors, in the mean square, by kappa = |T|_F |T^-1|_F / c; without a correction T = I
        and kappa = 1.

    Outputs and gradients in bfloat16 or float16 are then rounded once more, by at most half an eps.

    A result of only a few numbers has no average, and may be a small difference of large ones, which the recurrent form
    gets right only by luck. `worst_case` is the bound for those: n instead of sqrt(n), the largest possible sum of n
    rounding errors, and for kappa at least how much the exact result moves, in units of u, when the inputs move by u.
    """
    single = {name: x.float() for name, x in inputs.items()}
    t, key_dim, value_dim = *inputs["k"].shape[1::2], inputs["v"].shape[-1]
    n = min(chunk_size, t) + key_dim + value_dim
    kappa = _condition(single, chunk_size, **options)
    moved = _sensitivity(row, single, expected, **options) if worst_case else {}
    terms = n if worst_case else n**0.5
    allowed = {}
    reference = recurrent(row, single, backend="torch", only=tuple(expected.grads), **options)
    for name, error in errors(reference, expected).items():
        allowed[name] = 2 * error + 2**-24 * terms * max(kappa, moved.get(name, 0.0))
        source = {"output": "v", "state": "state"}.get(name, name.removeprefix("d"))
        if source != "state" and inputs[source].dtype in (torch.bfloat16, torch.float16):
            allowed[name] += torch.finfo(inputs[source].dtype).eps / 2
    return allowed


def _sensitivity(row: Row, inputs: Inputs, expected: Result, **options: object) -> dict[str, float]:
    """Return how far exact results move, in units of u, if each input moves by u up or down; the most of 4 trials."""
    largest: dict[str, float] = {}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        moved = {
            name: x.double() * (1 + 2**-24 * (2 * torch.randint(0, 2, x.shape, generator=generator) - 1))
            for name, x in inputs.items()
        }
        for name, error in errors(oracle(row, moved, only=tuple(expected.grads), **options), expected).items():
            largest[name] = max(largest.get(name, 0.0), error * 2**24)
    return largest


def _condition(
    inputs: Inputs, chunk_size: int, cu_seqlens: Tensor | None = None, normalize_qk: bool = False, **_: object
) -> float:
    """Return the largest |T|_F |T^-1|_F / c among the chunks of the call."""
    if "beta" not in inputs:
        return 1.0
    inputs = {name: x.double() for name, x in inputs.items()}
    t, group = inputs["k"].shape[1], inputs["v"].shape[2] // inputs["k"].shape[2]
    beta = inputs["beta"].transpose(1, 2).unsqueeze(-1)  # b hv t 1
    k = inputs["k"].repeat_interleave(group, dim=2)
    M = lineate.attention_matrix(k, k, inputs.get("log_decay"), scale=1.0, normalize_qk=normalize_qk).tril(-1)
    T = beta * M + torch.eye(t, dtype=torch.float64)
    ends = [0, t] if cu_seqlens is None else cu_seqlens.tolist()
    largest = 1.0
    for start, end in itertools.pairwise(ends):
        for i in range(start, end, chunk_size):
            chunk = T[:, :, i : min(i + chunk_size, end), i : min(i + chunk_size, end)]
            norms = torch.linalg.matrix_norm(chunk) * torch.linalg.matrix_norm(torch.linalg.inv(chunk))
            largest = max(largest, norms.max().item() / chunk.shape[-1])
    return largest
