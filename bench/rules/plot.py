"""Draw the JSON of bench.rules.cpu or bench.rules.gpu: time and memory against length.

python -m bench.rules.plot bench/out/cpu.json bench/out/cpu.png
"""

import json
import sys
from pathlib import Path
from typing import Any

from lineate.layers import kinds

CPU_LINES = {
    ("softmax", "SDPA"): ("torch SDPA", "#888888", "s"),
    ("gdn", "transformers"): ("transformers", "#e08214", "^"),
    ("kda", "lineate"): ("lineate", "#35978f", "o"),
    ("gdn", "lineate"): ("lineate", "#1f4e9c", "o"),
}
"""By a mixer's short name and contestant: whose code it is, and a colour and marker that tell contestants apart."""
GPU_LINES = {
    "sdpa": ("softmax", "torch SDPA, flash", "#888888", "s"),
    "fla": ("gdn", "fla", "#e08214", "^"),
    "flashqla": ("gdn", "FlashQLA", "#35978f", "v"),
    "ours": ("gdn", "lineate", "#1f4e9c", "o"),
}
"""By contestant: the short name of the mixer that it runs, whose code it is, and a colour and marker."""


def draw(source: Path, target: Path) -> None:
    """Draw two panels against length: time, and memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = json.loads(source.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    ticks, text = gpu_panels(data, left, right) if "results" in data else cpu_panels(data, left, right)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
        axis.minorticks_off()
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False, fontsize=9)
        axis.yaxis.set_major_formatter(_plain)
    figure.suptitle(text, fontsize=8.5, color="#555555", x=0.01, y=-0.02, ha="left", va="top")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150, bbox_inches="tight", pad_inches=0.15)
    plt.close(figure)


def gpu_panels(data: dict[str, Any], left: Any, right: Any) -> tuple[list[int], str]:
    """Draw forward time in a graph (or between events), and the bytes that a call adds to the allocator's peak."""
    from bench.rules.gpu_cases import CASES, floor_ms

    measured = [r for r in data["results"] if r["group"] == "length" and r["event_ms"] is not None]
    for who, (name, whose, colour, marker) in GPU_LINES.items():
        points = sorted((r["t"], r["graph_ms"] or r["event_ms"], r["extra_bytes"] / 2**20)
                        for r in measured if r["who"] == who)  # fmt: skip
        if points:
            lengths, times, extra = zip(*points, strict=True)
            style = {"color": colour, "marker": marker, "markersize": 5, "label": f"{_label(name)} ({whose})"}
            left.plot(lengths, times, **style)
            right.plot(lengths, extra, **style)
    ticks = sorted({r["t"] for r in measured})
    floors = [(c.t, floor_ms(c, data["ceilings"])) for c in CASES if c.group == "length" and c.t in ticks]
    if floors and data["ceilings"]:
        left.plot(*zip(*floors, strict=True), color="#1f4e9c", linestyle=":", label="floor of Gated DeltaNet")
    left.set_title("forward time", loc="left")
    left.set_ylabel("milliseconds")
    right.set_title("extra memory of a call, result included", loc="left")
    right.set_ylabel("MiB")
    head, shape = data["header"], next((r for r in measured), {"b": 1, "h": 16, "hv": 32})
    versions = ", ".join(f"{name} {version}" for name, version in head.get("versions", {}).items())
    return ticks, (
        f"b {shape['b']}, {shape['h']} key and {shape['hv']} value heads of 128 (softmax: {shape['hv']}), bfloat16; "
        f"{head.get('gpu', '?')}, {head.get('date', '?')}; medians in a CUDA graph\n{versions}"
    )


def cpu_panels(data: dict[str, Any], left: Any, right: Any) -> tuple[list[int], str]:
    """Draw forward time, and the bytes that one layer keeps between tokens."""
    ticks: list[int] = []
    for (rule, who), (whose, colour, marker) in CPU_LINES.items():
        points = [(p["t"], p["min"]) for p in data["times"].get("scaling", ()) if (p["rule"], p["who"]) == (rule, who)]
        if points:
            lengths, seconds = zip(*points, strict=True)
            label = f"{_label(rule)} ({whose})"
            left.plot(lengths, seconds, color=colour, marker=marker, markersize=5, label=label)
            ticks = max(ticks, list(lengths), key=len)
    left.set_title("forward time", loc="left")
    left.set_ylabel("seconds")

    kept = [p["t"] for p in data["state_bytes"]]
    for name, label, colour, marker in (
        ("cache", "key/value cache of softmax attention", "#888888", "s"),
        ("state", "state of Gated DeltaNet or KDA", "#1f4e9c", "o"),
    ):
        mebibytes = [p[name] / 2**20 for p in data["state_bytes"]]
        right.plot(kept, mebibytes, color=colour, marker=marker, markersize=5, label=label)
    right.set_title("memory kept for the next token, one layer", loc="left")
    right.set_ylabel("MiB")
    right.set_ylim(bottom=0.5)

    return ticks, caption(data)


def caption(data: dict[str, Any]) -> str:
    shape, machine, threads = data["shape"], data["machine"], data["settings"]["threads"]
    return (
        f"b {shape['b']}, {shape['hv']} heads of {shape['k']}, {shape['dtype']}; {machine['cpu']} ({machine['arch']}), "
        f"{threads} thread{'s' if threads > 1 else ''}, torch {data['versions']['torch']}; fastest of the rounds"
    )


def _label(short: str) -> str:
    return next(kind.label for kind in kinds() if kind.short == short)


def _plain(value: float, position: int) -> str:
    return f"{value:g}"


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
