"""Functions that show the GPU benchmark's JSON as tables."""

from typing import Any

from bench import timing
from bench.rules.gpu_cases import CASES, CONTESTANTS, HEAD_DIM, device_ms, floor_ms

HOST_BOUND = 1.25  # time between events divided by time in a graph
WRONG = 3e-2  # the relative error above which a bfloat16 result is not of the same function


def times(result: dict[str, Any]) -> str:
    graph = "no graph" if result["graph_ms"] is None else f"{milliseconds(result['graph_ms'])} ms in a graph"
    return f"{graph}, {milliseconds(result['event_ms'])} between events"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def notes(result: dict[str, Any]) -> str:
    if result.get("failed"):
        return result["failed"]
    found = []
    if result["graph_ms"] is None:
        found.append(f"no graph ({result.get('graph_error', 'not tried')})")
    elif result["event_ms"] > HOST_BOUND * result["graph_ms"]:
        found.append("host bound")
    if result.get("error", 0) > WRONG:
        found.append("WRONG RESULT")
    if result.get("check_error"):
        found.append(f"not checked ({result['check_error']})")
    if path := [p for p in result.get("path", ()) if " -> " in p]:
        found.append("part of it by " + ", ".join(sorted({p.split(" -> ")[1] for p in path})))
    return "; ".join(found)


def show(data: dict[str, Any], groups: list[str]) -> None:
    """Print the header and then the tables."""
    for line in header(data):
        print(line)
    found = {(r["group"], r["case"], r["who"]): r for r in data["results"]}
    for group in groups:
        rows = []
        for case in (c for c in CASES if c.group == group):
            own = device_ms(found.get((group, case.name, "ours")))
            least = floor_ms(case, data["ceilings"])
            name = case.name
            for who, contestant in CONTESTANTS.items():
                if (result := found.get((group, case.name, who))) is None:
                    continue
                device = device_ms(result)
                rows.append([
                    name, contestant.label, milliseconds(result["graph_ms"]), milliseconds(result["event_ms"]),
                    "-" if not device or not own else f"{device / own:.2f}",
                    "-" if not device or not least else f"{device / least:.1f}",
                    f"{result['extra_bytes'] / 2**20:.0f}" if result.get("extra_bytes") is not None else "-",
                    f"{result['first_call_s']:.1f}" if result.get("cold") else "-",
                    f"{result['error']:.1e}" if result.get("error") is not None else "-",
                    notes(result),
                ])  # fmt: skip
                name = ""
            if least is not None and not name:
                rows.append(["", "floor", milliseconds(least), "-", "-", "1.0", "-", "-", "-", ""])
        if rows:
            columns = ["b, t, h, hv", "", "graph ms", "events ms", "x lineate", "x floor", "extra MiB",
                       "first call s", "error", "note"]  # fmt: skip
            timing.show(f"{group}: bfloat16, k = v = {HEAD_DIM}; x: multiples of the time", columns, rows)
    wanted = [row for row in data["targets"] if row["measured"] is not None]
    if wanted:
        timing.show(
            "Targets (H200), graph times", ["", "wanted", "measured", "verdict"],
            [[r["target"], r["wanted"], f"{r['measured']:.3g}", r["verdict"]] for r in wanted],
        )  # fmt: skip


def header(data: dict[str, Any]) -> list[str]:
    head = data["header"]
    versions = ", ".join(f"{name} {version}" for name, version in head.get("versions", {}).items())
    machine = f"{head.get('gpu', '?')}, driver {head.get('driver', '?')}, CUDA {head.get('cuda', '?')}"
    lines = [f"{head.get('date', '?')}, {machine}"]
    lines.append(versions)
    if data["ceilings"]:
        copy, product = (data["ceilings"][k] / 1e12 for k in ("copy_bytes_per_second", "matrix_flop_per_second"))
        lines.append(f"ceilings: copy {copy:.2f} TB/s read and written, bfloat16 8192^3 product {product:.0f} TFLOP/s")
    handed: dict[str, list[str]] = {}
    for name, path in head.get("paths", {}).items():
        for step in path:
            handed.setdefault(step, []).append(name)
    for step, names in handed.items():
        lines.append(f"path of fla: {step} ({', '.join(names)})")
    for name, why in head.get("absent", {}).items():
        lines.append(f"{name}: {why}")
    return lines
