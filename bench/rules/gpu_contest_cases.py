"""The shapes and the peers of bench/rules/gpu_contest.py, and its tables. This module needs neither GPU nor torch."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.rules.gpu_cases import (
    CONTESTANTS,
    FORWARD,
    SEQUENCES,
    TRAIN,
    UNIFORM,
    Case,
    device_ms,
    least_bytes,
    prefill,
)
from bench.rules.gpu_tables import HOST_BOUND, WRONG, milliseconds, ratio

KDA_SHAPES = (
    (2048, 12, 1),
    (4096, 12, 1),
    (8192, 12, 4),
    (8192, 16, 1),
    (8192, 24, 1),
    (8192, 32, 1),
    (16384, 16, 8),
    (32768, 12, 1),
    (8192, 96, 1),
    # A model of 96 heads: on one of 8 GPUs a document of 128k tokens, 16 short prompts together, and 8 rows of
    # training; on one GPU a short prompt.
    (131072, 12, 1),
    (16384, 12, 16),
    (65536, 12, 8),
    (1024, 96, 1),
)
"""Tokens, heads, and the number of equally long sequences that are packed."""


def kda(tokens: int, heads: int, sequences: int, what: str, decay: str = UNIFORM) -> Case:
    """Return a case of Kimi Delta Attention; every sequence begins with a state that is not zero."""
    lengths = sequences * (tokens // sequences,) if sequences > 1 else ()
    return Case("kda", "kda", what, 1, tokens, heads, heads, lengths=lengths, resumed=True, decay=decay)


def tables(decay: str = UNIFORM) -> dict[str, tuple[Case, ...]]:
    """Return the cases of the two tables; `decay` is that of Kimi Delta Attention."""
    shapes = tuple(kda(*shape, what, decay) for what in (FORWARD, TRAIN) for shape in KDA_SHAPES)
    return {"gdn": tuple(prefill(*x) for x in SEQUENCES), "kda": shapes}


TABLES = tuple(tables())
TITLES = {
    "gdn": "Gated DeltaNet, forward, bfloat16, heads of 128, several sequences packed",
    "kda": "Kimi Delta Attention, bfloat16, heads of 128, a first state that is not zero",
}


def shape_of(case: Case) -> str:
    """Return how --shapes and the tables name a case: tokens, heads, sequences for KDA, as 8192,12,4."""
    if case.rule == "kda":
        return f"{case.t},{case.h},{len(case.lengths) or case.b}"
    return case.shape.replace(" ", ",")


@dataclass(frozen=True)
class Peer:
    """A package that is measured in turns with lineate, in one process of its own."""

    paths: Callable[[Case], Mapping[str, str]]
    """The package's paths for a case by their names, each with its adapter's key; none if it has no such op."""
    prepares: float
    """About how many seconds it compiles and tunes, for an estimate."""
    tunes: bool = False
    """Whether it chooses kernels by timing them, so that nothing else may run then."""

    def can(self, case: Case) -> bool:
        return bool(self.paths(case))


def _flashinfer(case: Case) -> dict[str, str]:
    return {"single": "flashinfer", "segments": "flashinfer-cp"} if case.rule == "gdn" else {}


def _fla(case: Case) -> dict[str, str]:
    return {"": "fla", "bounded decay": "fla-safe"} if case.decay == UNIFORM else {"": "fla"}


PEERS = {
    "flashinfer": Peer(_flashinfer, 40),
    "cudnn": Peer(lambda case: {"": "cudnn"} if case.rule == "kda" else {}, 15),
    "attn-gym": Peer(lambda case: {"": "attn-gym"}, 120, tunes=True),
    "flashqla": Peer(lambda case: {"": "flashqla"} if case.rule == "gdn" else {}, 90),
    "fla": Peer(_fla, 180, tunes=True),
}  # fmt: skip
"""The peers by their keys in CONTESTANTS, which names their packages."""
NOBODY = "nobody"  # the peer of a process that measures lineate alone
STARTS = 25.0  # about how many seconds a process needs to import, and lineate to compile its kernels
PAIR = 1.6  # about how many seconds the measurements of one case take


def choose(
    names: Collection[str], whats: Collection[str], shapes: Collection[str], decay: str = UNIFORM
) -> list[tuple[str, Case]]:
    """Return the cases of the named tables, with the table of each; empty filters choose all."""
    found = [(name, case) for name, cases in tables(decay).items() if name in names for case in cases]
    return [
        (name, case) for name, case in found
        if (not shapes or shape_of(case) in shapes) and (not whats or case.what in whats)
    ]  # fmt: skip


def unknown_shapes(shapes: Collection[str]) -> list[str]:
    known = {shape_of(case) for cases in tables().values() for case in cases}
    return [x for x in shapes if x not in known]


def estimate(peers: Sequence[str], cases: Sequence[tuple[str, Case]]) -> float:
    """Return about how many seconds a run takes on a machine on which nothing is compiled."""
    together = [PEERS[who].prepares for who in peers if who != NOBODY and not PEERS[who].tunes]
    alone = [PEERS[who].prepares for who in peers if who != NOBODY and PEERS[who].tunes]
    pairs = sum(who == NOBODY or PEERS[who].can(case) for who in peers for _, case in cases)
    return STARTS + max(together, default=0.0) + sum(alone) + PAIR * pairs


def bound_ms(case: Case, copy_bytes_per_second: float) -> float:
    """Return the time to read and write the tensors once at the rate of a copy."""
    return 1e3 * least_bytes(case) / copy_bytes_per_second


COLUMNS = [
    "shape", "peer", "lineate graph", "peer graph", "peer / lineate", "lineate Python", "peer Python", "peer / lineate",
    "host: lineate, peer", "bound", "lineate / bound", "peer / bound", "errors: lineate, peer", "note",
]  # fmt: skip
Record = Mapping[str, Any]


def row(record: Record) -> list[str]:
    """Return the cells of one record: lineate and one peer on one case. Ratios above 1 say that lineate is faster."""
    own, peer, bound = record.get("lineate") or {}, record.get("peer") or {}, record.get("bound_ms")
    graphs, python = (device_ms(own or None), device_ms(peer or None)), (own.get("event_ms"), peer.get("event_ms"))
    return [
        shape_of(case_of(record)), label(record),
        milliseconds(own.get("graph_ms")), milliseconds(peer.get("graph_ms")), ratio(graphs[1], graphs[0]),
        milliseconds(python[0]), milliseconds(python[1]), ratio(python[1], python[0]),
        f"{milliseconds(own.get('host_ms'))}, {milliseconds(peer.get('host_ms'))}",
        milliseconds(bound), ratio(graphs[0], bound), ratio(graphs[1], bound),
        f"{worst(record, 'lineate')}, {worst(record, 'peer')}", notes(record),
    ]  # fmt: skip


def case_of(record: Record) -> Case:
    """Return the case of a record."""
    known = {name: record[name] for name in Case.__dataclass_fields__ if name in record}
    return Case(**{**known, "lengths": tuple(known.get("lengths", ()))})


def label(record: Record) -> str:
    who = record["who"]
    name = "(alone)" if who == NOBODY else CONTESTANTS[who].label
    return f"{name}, {record['path']}" if record.get("path") else name


def worst(record: Record, side: str) -> str:
    """Return the largest relative error of a side: from float32, or else the peer's difference from lineate."""
    values = (record.get("errors") or {}).get(side) or {}
    if values:
        return f"{max(values.values()):.1e}"
    other = (record.get("differences") or {}) if side == "peer" else {}
    return f"{max(other.values()):.1e} from lineate" if other else "-"


def notes(record: Record) -> str:
    """Return what a reader must know of a record besides its numbers."""
    if record.get("failed"):
        return record["failed"]
    found = []
    for side, name in (("lineate", "lineate"), ("peer", "the peer")):
        result = record.get(side)
        if not result:
            continue
        if result["graph_ms"] is None:
            found.append(f"no graph of {name} ({result.get('graph_error', 'not tried')})")
        elif result["event_ms"] > HOST_BOUND * result["graph_ms"]:
            found.append(f"host bounds {name}")
        for named, values in (("error", record.get("errors", {}).get(side)), ("difference", differ(record, side))):
            wrong = [name for name, x in (values or {}).items() if x > WRONG]
            if wrong:
                found.append(f"{named.upper()} of {name} in {', '.join(wrong)}")
    return "; ".join([*found, *record.get("plans", ())])


def differ(record: Record, side: str) -> Mapping[str, float]:
    return record.get("differences") or {} if side == "peer" else {}


def summary(records: Sequence[Record]) -> list[str]:
    """Return a line for each peer: on how many cases lineate is ahead, and the geometric mean of the ratios."""
    lines = []
    for who in dict.fromkeys(r["who"] for r in records):
        for what in dict.fromkeys(r["what"] for r in records):
            parts = []
            for kind, time in (("graphs", device_ms), ("from Python", lambda x: x["event_ms"])):
                pairs = [
                    (time(r["peer"]), time(r["lineate"]))
                    for r in records if (r["who"], r["what"]) == (who, what) and r.get("peer") and r.get("lineate")
                ]  # fmt: skip
                ratios = [a / b for a, b in pairs if a and b]
                if ratios:
                    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                    ahead = sum(x > 1 for x in ratios)
                    parts.append(f"{kind}: ahead on {ahead} of {len(ratios)}, {mean:.2f}x, least {min(ratios):.2f}x")
            if parts:
                lines.append(f"{what}, {CONTESTANTS[who].label} / lineate: " + "; ".join(parts))
    return lines


def headings(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Return the records by table and by what is computed, in the order of the tables."""
    order = {(name, case.what, shape_of(case)): n
             for n, (name, case) in enumerate(choose(TABLES, (), ()))}  # fmt: skip
    peers = [*PEERS, NOBODY]
    found: dict[tuple[str, str], list[Record]] = {}
    ranked = sorted(records, key=lambda r: (order[r["table"], r["what"], shape_of(case_of(r))], peers.index(r["who"])))
    for record in ranked:
        found.setdefault((record["table"], record["what"]), []).append(record)
    return found
