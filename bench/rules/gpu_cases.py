"""The cases of the GPU benchmark, their contestants, floors and targets. This module needs neither GPU nor torch."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FORWARD, TRAIN, STEP = "forward", "forward+backward", "decode"
SINGLE, NARROW, BY_CHANCE = "float32", "bfloat16", "bfloat16, stochastic"  # states of a decoding step
TRAINED, UNIFORM = "trained", "uniform"  # log decays: mostly weak, as in trained layers; uniform between -5 and 0
HEAD_DIM = 128  # k = v
COUNTED_CHUNK = 64  # the chunk length of the operation count


@dataclass(frozen=True)
class Case:
    """One computation: bfloat16 q, k, v; float32 log_decay and beta."""

    group: str
    """The name by which --only selects it."""
    rule: str
    what: str
    """FORWARD, TRAIN or STEP."""
    b: int
    t: int
    h: int
    hv: int
    raw: bool = False
    """Whether gates are bfloat16 before their activations; norm, softplus and sigmoid are then part of the work."""
    target: float | None = None
    """Milliseconds that our version should take at most."""
    lengths: tuple[int, ...] = ()
    """The tokens of sequences that are packed into one row (b = 1, t = their sum); empty if b rows have t tokens."""
    state: str = SINGLE
    """The dtype of the state of a decoding step, and how it is rounded if not to the nearest."""
    resumed: bool = False
    """Whether a forward begins with a state that is not zero."""
    decay: str = TRAINED
    """How log decays are drawn: TRAINED or UNIFORM."""

    @property
    def name(self) -> str:
        raw = " from raw gates" if self.raw else ""
        if self.lengths:
            return f"{self.rule} {self.what}{raw} {self.tokens},{self.h},{self.hv} packed"
        state = "" if self.state == SINGLE else f" {self.state}"
        return f"{self.rule} {self.what}{raw} {self.b},{self.t},{self.h},{self.hv}{state}"

    @property
    def tokens(self) -> str:
        """Return the sequences in words: 8x4096, or 1024+7168."""
        lengths = self.lengths or self.b * (self.t,)
        return f"{len(lengths)}x{lengths[0]}" if len(set(lengths)) == 1 else "+".join(map(str, lengths))

    @property
    def shape(self) -> str:
        """Return the sequences and heads: 8x4096 32/32. It is the same packed and as a batch."""
        return f"{self.tokens} {self.h}/{self.hv}"

    @property
    def batch(self) -> tuple[str, str]:
        """Return the name of the batch; the cases of one batch share a process."""
        return self.group, self.what

    def record(self) -> dict[str, Any]:
        return {"case": self.name, **asdict(self)}


PREFILL, VARIANTS = "prefill", "prefill-variants"  # groups: gates given, packed; as a batch, and from raw gates
SEQUENCES = (
    (1 * (32768,), 16, 64),
    (4 * (8192,), 16, 64),
    (8 * (4096,), 32, 32),
    (8 * (8192,), 16, 32),
    (1 * (32768,), 16, 48),
    (1 * (8192,), 16, 48),
    (1 * (8192,), 16, 32),
    ((1024, 7168), 16, 32),
    (1 * (2048,), 16, 32),
    (1 * (131072,), 16, 32),
    (1 * (32768,), 2, 8),
    (1 * (8192,), 2, 8),
    ((6144, 2048), 4, 16),
    (8 * (1024,), 2, 8),
    (1 * (2048,), 2, 8),
)
"""The sequences, key heads and value heads of the prefill of served models, whole and on one of several GPUs."""


def prefill(lengths: tuple[int, ...], h: int, hv: int, raw: bool = False) -> Case:
    """Return the case of these sequences; several sequences are packed."""
    packed = lengths if len(lengths) > 1 else ()
    return Case(VARIANTS if raw else PREFILL, "gdn", FORWARD, 1, sum(lengths), h, hv, raw=raw, lengths=packed)


def as_batch(lengths: tuple[int, ...], h: int, hv: int, raw: bool = False) -> Case:
    """Return the case of equally long sequences as the rows of a batch."""
    return Case(VARIANTS, "gdn", FORWARD, len(lengths), lengths[0], h, hv, raw=raw)


BATCHES = tuple(x for x in SEQUENCES if len(x[0]) > 1 and len(set(x[0])) == 1)
GUESSED = (2, 4, 8)  # tokens of a step that speculation reads
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
CASES = (
    Case("gdn", "gdn", FORWARD, 1, 32768, 16, 64, target=1.40),
    Case("gdn", "gdn", FORWARD, 8, 4096, 32, 32, target=0.60),
    Case("gdn", "gdn", FORWARD, 1, 8192, 16, 32, target=0.28),
    Case("gdn", "gdn", FORWARD, 1, 32768, 2, 8, target=0.32),
    Case("gdn", "gdn", TRAIN, 1, 8192, 16, 32, target=1.1),
    Case("gdn", "gdn", TRAIN, 1, 32768, 16, 64, target=7.0),
    Case("kda", "kda", FORWARD, 1, 8192, 96, 96, raw=True, target=1.3),
    Case("kda", "kda", FORWARD, 1, 8192, 96, 96),
    Case("kda", "kda", TRAIN, 1, 8192, 96, 96, target=7.0),
    Case("delta", "delta", FORWARD, 8, 4096, 32, 32),
    Case("delta", "delta", TRAIN, 8, 4096, 32, 32),
    Case("linear", "linear", FORWARD, 8, 4096, 32, 32),
    Case("linear", "linear", TRAIN, 8, 4096, 32, 32),
    Case("decode", "gdn", STEP, 256, 1, 32, 32),
    Case("decode", "kda", STEP, 256, 1, 32, 32),
    Case("decode", "gdn", STEP, 1, 1, 32, 32, target=0.012),
    Case("decode", "kda", STEP, 1, 1, 32, 32, target=0.012),
    *(Case("decode", rule, STEP, 256, t, 32, 32) for rule in ("gdn", "kda") for t in GUESSED),
    *(Case("decode", rule, STEP, 256, t, 32, 32, state=NARROW) for rule in ("gdn", "kda") for t in (1, *GUESSED)),
    *(Case("decode", rule, STEP, 256, 1, 32, 32, state=BY_CHANCE) for rule in ("gdn", "kda")),
    *(Case("decode", rule, STEP, 1, 1, 32, 32, state=NARROW) for rule in ("gdn", "kda")),
    *(Case("length", "gdn", FORWARD, 1, t, 16, 32) for t in LENGTHS),
    *(prefill(*x) for x in SEQUENCES),
    *(as_batch(*x) for x in BATCHES),
    *(prefill(*x, raw=True) for x in SEQUENCES),
    *(as_batch(*x, raw=True) for x in BATCHES),
)
GROUPS = tuple(dict.fromkeys(case.group for case in CASES))
NEEDED_FASTER = 1.5  # times faster than fla, for DeltaNet and linear attention
NEEDED_MEMORY = 0.5  # as a share of fla's extra memory, for GDN forward+backward at the last of its shapes
NEEDED_DECODE = 1.12  # as a multiple of the floor, for a decoding step of batch 256


@dataclass(frozen=True)
class Contestant:
    """A contestant: its name, the package that it needs, the cases that it can do, and the switches of its process."""

    label: str
    package: str
    can: Callable[[Case], bool]
    environment: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    """Other packages that must be there."""


def is_prefill(case: Case) -> bool:
    return case.group in (PREFILL, VARIANTS)


def is_given_kda(case: Case) -> bool:
    """Whether this is a forward or a training step of Kimi Delta Attention whose decay and beta are given."""
    return case.rule == "kda" and case.what != STEP and not case.raw


# fla hands calls to other packages if it finds them. This is off here, as they are contestants themselves; TileLang
# stays on where fla wants it, because fla refuses the gated backward of Triton 3.4 to 3.7 on Hopper.
FLA_ALONE = {"FLA_FLASH_QLA": "0", "FLA_FLASH_KDA": "0"}
DSL = ("nvidia_cutlass_dsl", "tvm_ffi")  # the compiler of FlashInfer's kernels for Hopper
CONTESTANTS = {
    "ours": Contestant("lineate", "lineate", lambda case: True),
    "ours-bounded": Contestant("lineate, bounded gate", "lineate", lambda case: case.rule == "kda" and case.raw),
    # Its single launch, and its path for few heads, which cuts sequences into segments ("context parallel").
    "flashinfer": Contestant("FlashInfer", "flashinfer", lambda case: case.group == PREFILL, also=DSL),
    "flashinfer-cp": Contestant(
        "FlashInfer, context parallel", "flashinfer", lambda case: case.group == PREFILL, also=DSL
    ),
    # What GPUs other than Hopper's run (lineate/kernels/portable), on this one.
    "portable": Contestant("lineate, plain Triton", "lineate", lambda case: case.group == PREFILL),
    # The frontend's own kernels, which are compiled by NVRTC and need CUDA's headers (CUDA_HOME).
    "cudnn": Contestant("cuDNN", "cudnn", lambda case: is_given_kda(case) and case.h == case.hv),
    "attn-gym": Contestant(
        "attention-gym",
        "attn_gym",
        lambda case: (case.rule == "gdn" and case.what != STEP and not is_prefill(case)) or is_given_kda(case),
        also=DSL,
    ),
    # Its steps return a new state, in float32.
    "fla": Contestant("fla", "fla", lambda case: not is_prefill(case) and case.state == SINGLE, FLA_ALONE),
    # The same kernels, which may do more with the bounded gate lower_bound * sigmoid(exp(A_log) (gate + dt_bias)).
    "fla-bounded": Contestant("fla, bounded gate", "fla", lambda case: case.rule == "kda" and case.raw, FLA_ALONE),
    "flashqla": Contestant(
        "FlashQLA",
        "flash_qla",
        lambda case: case.rule == "gdn" and case.what != STEP and not is_prefill(case),
    ),
    "flashkda": Contestant("FlashKDA, bounded gate", "flash_kda", lambda case: case.rule == "kda" and case.raw),
    "sdpa": Contestant(
        "softmax (SDPA, flash)",
        "torch",
        lambda case: case.rule == "gdn" and case.what == FORWARD and not is_prefill(case),
    ),
}


def least_bytes(case: Case) -> float:
    """Return the bytes that must move.

    Every input is read once and every output written once; the backward reads all inputs again. A decoding step reads
    and writes the state once, however many tokens it has.
    """
    from bench.rules.contestants import EQUATION  # (this imports lineate, whose import is timed)

    per_token = case.h / case.hv
    rule, decay = EQUATION[case.rule]
    gates = (2 if case.raw else 4) * (rule.corrects + {"none": 0, "head": 1, "channel": HEAD_DIM}[decay])
    qk, value = 2 * 2 * HEAD_DIM * per_token, 2 * HEAD_DIM  # q and k; one of v, o, dv and do
    token = qk + 2 * value + gates
    if case.what == TRAIN:
        token += (qk + 2 * value + gates) + (qk + value + gates)  # reads with do; writes all gradients
    number = 4 if case.state == SINGLE else 2
    state = number * HEAD_DIM * HEAD_DIM * (len(case.lengths) or case.b) * case.hv
    states = 1 + (case.what == STEP) + case.resumed * (1 + (case.what == TRAIN))  # the backward reads the first again
    return token * case.b * case.t * case.hv + states * state


def operations(case: Case) -> float:
    """Return the floating-point operations of the chunk map with chunks of 64.

    For a decoding step, they are those of the token equation.
    """
    if case.what == STEP:
        per_token = 7 * HEAD_DIM * HEAD_DIM
    elif case.rule == "linear":
        per_token = 4 * HEAD_DIM * HEAD_DIM + 4 * COUNTED_CHUNK * HEAD_DIM if case.what == FORWARD else 610e3
    elif case.what == FORWARD:
        per_token = (
            6 * HEAD_DIM * HEAD_DIM + 8 * COUNTED_CHUNK * HEAD_DIM + 2.2e3
        )  # the last term is the triangular solve
    else:
        per_token = 745e3 if case.rule != "kda" else 1.15e6
    return per_token * case.b * case.t * case.hv


def floor_ms(case: Case, ceilings: Mapping[str, float] | None) -> float | None:
    """Return a time that no version can beat by much.

    It is the time of the bytes or of the operations at the measured ceilings, whichever is larger.
    """
    if not ceilings:
        return None
    return 1e3 * max(
        least_bytes(case) / ceilings["copy_bytes_per_second"], operations(case) / ceilings["matrix_flop_per_second"]
    )


def device_ms(result: Mapping[str, Any] | None) -> float | None:
    """Return the device's time: that of a graph's replays if it could be captured, else that between events."""
    if result is None:
        return None
    return result["event_ms"] if result.get("graph_ms") is None else result["graph_ms"]


def targets(results: list[dict[str, Any]], ceilings: Mapping[str, float] | None) -> list[dict[str, Any]]:
    """Return the promises of the library on an H200."""
    found = {(r["group"], r["case"], r["who"]): r for r in results if r.get("event_ms") is not None}
    lines: list[tuple[str, str, float, float | None]] = []
    for case in CASES:
        ours, fla = (found.get((case.group, case.name, who)) for who in ("ours", "fla"))
        own, other = device_ms(ours), device_ms(fla)
        if case.target is not None:
            lines.append((f"{case.name}, ms", "<=", case.target, own))
        if case.rule in ("delta", "linear"):
            ratio = None if own is None or other is None else other / own
            lines.append((f"{case.name}, times faster than fla", ">=", NEEDED_FASTER, ratio))
        if case == next(c for c in reversed(CASES) if (c.group, c.what) == ("gdn", TRAIN)):
            ratio = ours["extra_bytes"] / fla["extra_bytes"] if ours and fla else None
            lines.append((f"{case.name}, extra memory / fla's", "<=", NEEDED_MEMORY, ratio))
        if case.what == STEP and case.b > 1 and case.t == 1 and case.state == SINGLE:
            least = floor_ms(case, ceilings)
            ratio = None if own is None or least is None else own / least
            lines.append((f"{case.name}, time / floor", "<=", NEEDED_DECODE, ratio))
    rows = []
    for name, sign, wanted, got in lines:
        reached = None if got is None else got >= wanted if sign == ">=" else got <= wanted
        verdict = {None: "not measured", True: "ok", False: "short"}[reached]
        rows.append({"target": name, "wanted": f"{sign} {wanted:g}", "measured": got, "verdict": verdict})
    return rows
