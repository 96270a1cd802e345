"""Published rules that are cases of lineate's rows: a row with gates, keys or values that depend on one another."""

from collections.abc import Sequence
from dataclasses import dataclass

from lineate.recognise.general import Erase
from lineate.recognise.measuring import TOLERANCE, Response, coefficients, difference
from lineate.recognise.rules import Row
from lineate.rule import GATED_LINEAR


@dataclass(frozen=True)
class Case:
    """A published rule."""

    key: str
    """Its name in --json."""
    name: str
    what: str
    """How it is the row."""


_CASES = (
    Case(
        "hgrn2",
        "HGRN2",
        "Gated linear attention with k = 1 - decay: the key channels that forget most are written most.",
    ),
    Case(
        "mlstm",
        "mLSTM",
        "Gated linear attention with an input gate, which is folded into v. A normaliser is the memory of a value "
        "channel that is always 1. A stabiliser only scales both; without it exp of the input gate must stay in the "
        "range of float32.",
    ),
    Case(
        "rwkv-7",
        "RWKV-7",
        "It reads S before its decay and erases along the vector that it reads with, times a gate; the probe of the "
        "row reads the decayed S, so it is divided by the decay. That is safe: RWKV-7's decay is at least "
        "exp(-exp(-1/2)) = 0.545. Its output has no factor 1/sqrt(k): scale=1.",
    ),
    Case(
        "comba",
        "Comba",
        "It compares with S before its decay, as Comba's published kernels do, with a probe that is smaller than the "
        "key. The op compares after the decay, so the probe is divided by the decay.",
    ),
)
CASES = {case.key: case for case in _CASES}
"""Cases by their names in --json."""


def case_of(
    row: Row, decay: str | None, decay_shape: str, write: str | None, responses: Sequence[Response]
) -> str | None:
    """Return the case of a row that is gated linear attention.

    HGRN2 writes 1 - decay under v; mLSTM has an exponential input gate, of which the decay is no function.

    Args:
        row: the row.
        decay: the decay as a formula.
        decay_shape: "one", "number" or "key".
        write: the strength of the write as a formula.
        responses: the measured responses.
    """
    if row.rule is not GATED_LINEAR:
        return None
    if write is not None and write.startswith("exp(") and write != decay and decay_shape == "number":
        return "mlstm"
    for r in responses:
        c = coefficients(r)
        if c is None or difference(r.offset / r.token.v, 1 - c.decay) > TOLERANCE:
            return None
    return "hgrn2"


def case_of_erase(erase: Erase, decay_shape: str, along_key: bool) -> str | None:
    """Return the case of a rule by its erase.

    Args:
        erase: its direction and its probe.
        decay_shape: "one", "number" or "key".
        along_key: whether it erases along the key that it writes.
    """
    if not erase.before_decay:
        return None
    if along_key:
        return "comba" if decay_shape == "number" else None
    return "rwkv-7" if erase.one_vector else None
