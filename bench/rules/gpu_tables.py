"""Functions that show the GPU benchmark's JSON as tables."""

from typing import Any

from bench import timing
from bench.rules.gpu_cases import CASES, CONTESTANTS, HEAD_DIM, PREFILL, VARIANTS, Case, device_ms, floor_ms

HOST_BOUND = 1.25  # time between events divided by time in a graph
WRONG = 3e-2  # the relative error above which a bfloat16 result is not of the same function


def times(result: dict[str, Any]) -> str:
    graph = "no graph" if result["graph_ms"] is None else f"{milliseconds(result['graph_ms'])} ms in a graph"
    host = f", {milliseconds(result['host_ms'])} of the host" if result.get("host_ms") is not None else ""
    return f"{graph}, {milliseconds(result['event_ms'])} between events{host}"


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
        if group in (PREFILL, VARIANTS):
            for title, table in PREFILL_TABLES[group].items():
                columns, rows = table(data)
                if rows:
                    timing.show(f"{group}: Gated DeltaNet forward, {title}", columns, rows)
            continue
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


MEASURED = ("graph_ms", "event_ms", "host_ms")
Results = dict[tuple[str, str, str], dict[str, Any]]


def measured(data: dict[str, Any]) -> Results:
    """Return the results by group, case and contestant."""
    return {(r["group"], r["case"], r["who"]): r for r in data["results"]}


def best_of_flashinfer(found: Results, case: Case) -> tuple[dict[str, Any] | None, str]:
    """Return the result of the faster of FlashInfer's two paths, and which one it is."""
    paths = {"single": "flashinfer", "segments": "flashinfer-cp"}
    results = {name: found.get((case.group, case.name, who)) for name, who in paths.items()}
    fit = {name: r for name, r in results.items() if r is not None and device_ms(r) is not None}
    if not fit:
        return None, "; ".join(dict.fromkeys(r["failed"] for r in results.values() if r and r.get("failed")))
    name = min(fit, key=lambda name: device_ms(fit[name]) or 0.0)
    return fit[name], name


def ratio(above: float | None, below: float | None) -> str:
    return "-" if not above or not below else f"{above / below:.2f}"


def prefill_table(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the cases that FlashInfer runs too. Ratios above 1 say that lineate is faster."""
    found, rows = measured(data), []
    for case in (c for c in CASES if c.group == PREFILL):
        ours, plain = (found.get((PREFILL, case.name, who)) for who in ("ours", "portable"))
        peer, path = best_of_flashinfer(found, case)
        if not any((ours, plain, peer, path)):
            continue
        own, other, least = device_ms(ours), device_ms(peer), floor_ms(case, data["ceilings"])
        cells = [number(ours, "graph_ms"), number(peer, "graph_ms"), ratio(other, own), path]
        cells += [number(ours, "event_ms"), number(ours, "host_ms"), number(peer, "event_ms"), number(peer, "host_ms")]
        cells += [number(plain, "graph_ms"), ratio(device_ms(plain), own), milliseconds(least), ratio(own, least)]
        rows.append([case.shape, *cells])
    columns = ["sequences, h/hv", "lineate graph", "FlashInfer graph", "FlashInfer / lineate", "its path",
               "lineate events", "host", "FlashInfer events", "host", "plain Triton graph", "/ lineate", "floor",
               "lineate / floor"]  # fmt: skip
    return columns, rows


def accuracy_table(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of errors, of FlashInfer's differences from lineate, and of what went wrong."""
    found, rows = measured(data), []
    whos = ("ours", "portable", "flashinfer", "flashinfer-cp")
    for case in (c for c in CASES if c.group == PREFILL):
        results = {who: found.get((PREFILL, case.name, who)) for who in whos}
        if not any(results.values()):
            continue
        errors = [scientific([r["error"]] if r and r.get("error") is not None else []) for r in results.values()]
        differ = [scientific((results[who] or {}).get("differences", [])) for who in whos[2:]]
        texts = (f"{CONTESTANTS[who].label}: {text}" for who, r in results.items() if r and (text := notes(r)))
        rows.append([case.shape, *errors, *differ, "; ".join(texts)])
    columns = ["sequences, h/hv", "lineate", "plain Triton", "FlashInfer", "its segments",
               "FlashInfer differs: output, state", "its segments differ", "note"]  # fmt: skip
    return columns, rows


def variants_table(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of lineate's variants: packed or single and as a batch, given and raw gates."""
    found, rows = measured(data), []
    for case in (c for c in CASES if c.group == PREFILL):
        same = [c for c in CASES if c.group == VARIANTS and c.shape == case.shape]
        cells, texts = [], []
        for raw in (False, True):
            for batch in (False, True):
                fitting = (c for c in (case, *same) if c.raw == raw and (c.b > 1) == batch)
                result = next((r for c in fitting if (r := found.get((c.group, c.name, "ours")))), None)
                cells.append(" / ".join(number(result, key) for key in MEASURED) if result else "-")
                if result and (text := notes(result)):
                    texts.append(f"{'batch' if batch else 'packed'}{', raw' if raw else ''}: {text}")
        if any(cell != "-" for cell in cells) or texts:
            rows.append([case.shape, *cells, "; ".join(texts)])
    return ["sequences, h/hv", "packed", "batch", "packed, raw gates", "batch, raw gates", "note"], rows


def number(result: dict[str, Any] | None, key: str) -> str:
    return milliseconds((result or {}).get(key))


def scientific(values: list[float]) -> str:
    return ", ".join(f"{x:.1e}" for x in values) or "-"


PREFILL_TABLES = {
    PREFILL: {
        f"bfloat16, k = v = {HEAD_DIM}, several sequences packed, ms": prefill_table,
        "relative errors against float32, and differences between contestants": accuracy_table,
    },
    VARIANTS: {"ms in a graph / between events / of the host": variants_table},
}
"""The tables of a group by their titles."""


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
