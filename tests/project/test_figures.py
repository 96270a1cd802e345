"""Figures in the documentation are those in bench/results."""

import json
import math
from pathlib import Path
from statistics import fmean

import pytest

from lineate.tasks.model import label

ROOT = Path(__file__).parents[2]


def _rows(page, columns, section=""):
    """Return the cells of tables with this many columns, by the first one; section: only from it to the next bold."""
    text = (ROOT / page).read_text()
    text = text[text.index(section) :]
    if section:
        text = text[: text.find("\n**", 2)]
    lines = [line.strip()[1:-1].split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [x.strip() for x in cells[1:]] for cells in lines if len(cells) == columns}


def _results(file):
    return json.loads((ROOT / "bench/results" / file).read_text())


def test_training():
    shown, compared = _rows("docs/training.md", 10), _rows("docs/training.md", 4)
    text = {row["pattern"]: row for row in _results("train-text-h200.json")["results"]}
    steps = {row["pattern"]: row for row in _results("train-h200.json")["results"]}
    assert set(text) == set(steps) == set(shown) - {"P", "---"}
    for name, row in text.items():
        _, parameters, *losses, gib, rate, ms, gib_64k = shown[name]
        wanted = [f"{row['validation_loss'][at]:.{n}f}".lstrip("0") for at, n in (("100", 2), ("200", 2), ("400", 3))]
        assert (name, losses, gib) == (name, wanted, f"{row['most_gpu_mib'] / 1024:.1f}")
        step = steps[name]
        assert (parameters, rate) == (f"{step['parameters'] / 1e6:.1f}M", f"{step['tokens_per_s'] / 1e3:.0f}k"), name
        assert (ms, gib_64k) == (f"{step['ms']:.0f}", f"{step['peak_mib'] / 1024:.1f}"), name
    both = {(row["pattern"], row["side"]): row for row in _results("train-fla-h200.json")["results"]}
    for name, (theirs, ours, ratio) in compared.items():
        if name not in ("P", "---"):
            fla, own = both[name, "fla"], both[name, "lineate"]
            assert [theirs, ours] == [f"{x['ms']:.0f} ms, {x['peak_mib'] / 1024:.1f} GiB" for x in (fla, own)], name
            assert ratio == f"{fla['ms'] / own['ms']:.2f}x", name


@pytest.mark.parametrize("file", ["recall", "recall-kda", "parity", "overwriting", "overwriting-kda"])
def test_tasks(file):
    task = file.removesuffix("-kda")
    page = (ROOT / "docs/tasks.md").read_text()
    section = page[page.index(f"**{task.capitalize()}**", page.index("## Measured")) :].partition("![")[0]
    by_rule: dict[str, list] = {}
    for cell in _results(f"tasks/{file}.json")["cells"]:
        by_rule.setdefault(cell["rule"], []).append(cell)
    for rule, cells in by_rule.items():
        line = next(line for line in section.splitlines() if line.startswith(f"| {label(rule)} |"))
        shown = [part.strip() for part in line.strip("| ").split("|")][1:]
        steps = " ".join(f"{cell['steps']}{'!' * (cell['stopped'] == 'minutes')}" for cell in cells)
        accuracy = [cell["accuracy"] for cell in cells]
        at = [[cell["by_length"][n] for cell in cells] for n in cells[0]["by_length"]]
        if task == "parity":
            assert shown == [*map(_each, at), steps]
        else:
            assert shown == [_percent(fmean(accuracy)), _each(accuracy), steps, *(_percent(fmean(x)) for x in at)]


def _each(parts):
    return " ".join(map(_percent, parts))


def _percent(part):
    """Return a percentage, rounded down."""
    return f"{math.floor(1000 * part) / 10:.1f}"


def test_memories():
    results = _results("memory-cpu-neoverse-n1.json")
    recall, exact = _rows("docs/memory.md", 7), _rows("docs/memory.md", 4)
    for row in results["recall"]:
        channels, size, *shares = recall[row["name"]]
        assert (channels, size) == (str(row["d"]), str(row["bytes"]))
        shown = dict(zip((64, 256, 512, 1024), shares, strict=True))
        assert shown.get(row["n"], f"{row['accuracy']:.2f}") == f"{row['accuracy']:.2f}", row
    for row in results["exact"]:
        if str(row["n"]) in exact:
            *least_squares, delta = map(float, exact[str(row["n"])])  # float64, float32
            found = least_squares[row["dtype"] == "float32"]
            assert (found, delta) == (pytest.approx(row["least squares"], rel=0.04), round(row["DeltaNet"], 2))
    cost = _rows("docs/memory.md", 5, "![Time and state")
    base = next(row["forward_us"] for row in results["cost"] if row["name"] == "Gated DeltaNet")
    faster = {row["name"]: f"{row['speed_up']:.0f}" for row in results["forms"]}
    for row in results["cost"]:
        forward, step, speed_up, kib = cost[row["name"]]
        assert forward.split()[0] == f"{row['forward_us'] / base:.1f}", row
        assert (step, kib) == (f"{row['step_us'] / row['forward_us']:.0f}", f"{row['memory'] / 1024:.0f}"), row
        assert speed_up == faster.get(row["name"], "-"), row


def test_memories_on_a_gpu():
    """The figures of each of our layers come from one run."""
    shown = _rows("docs/memory.md", 5, "**On a GPU**")
    rows = [row for run in _results("memory-gpu-h200.json")["runs"] for row in run["results"]]
    for name in ("TTT-Linear", "TTT-MLP", "Titans", "Titans MLP", "LaCT", "least squares"):
        forward, train, _, mib = shown[name]
        found = [row for row in rows if row["name"] == ("LaCT 4 heads" if name == "LaCT" else name)]
        assert any(
            abs(float(forward) - row["forward_ms"]) < 0.051  # stored with one digit more
            and abs(float(train) - row["train_ms"]) < (0.051 if "." in train else 0.5)
            and mib == f"{row.get('train_mib', 0):.0f}"
            for row in found
        ), name


def _faster(ratio):
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x".lstrip("0")


def _digits(x):
    """Return three digits, without a zero before the point."""
    return (f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 1 else f"{x:.3f}").lstrip("0")


def _cpu(machine, rule, who, what, table="prefill", tokens=2048):
    file = f"cpu-{machine}{'-decode' if table == 'decode' else ''}.json"
    (row,) = [
        row for row in _results(file)["times"][table]
        if (row["rule"], row["who"], row["what"], row["t"]) == (rule, who, what, tokens)
    ]  # fmt: skip
    return 1000 * row["min"]


def _gpu(case, who):
    found = [row for row in _results("gpu-h200.json")["results"] if (row["case"], row["who"]) == (case, who)]
    return found[0] if found else None


def test_readme():
    n1 = ("neoverse-n1", "gdn")
    (token,) = [
        row for row in _results("models-gpu-h200.json")["results"]
        if (row["model"], row["what"]) == ("GGGA", "decode 1 rows after 1024")
    ]  # fmt: skip
    trained = "gdn forward+backward 1,32768,16,64"
    again = [row for run in _results("gpu-h200-again.json")["runs"] for row in run["results"]]
    wanted = {
        "Gated DeltaNet, 2048 tokens, forward": [
            _cpu(*n1, who, "forward") for who in ("lineate", "transformers")
        ],
        "Gated DeltaNet, 2048 tokens, forward+backward": [
            _cpu(*n1, who, "forward+backward") for who in ("lineate", "transformers")
        ],
        "Gated DeltaNet, 16384 tokens, forward": [
            _cpu(*n1, "lineate", "forward", "scaling", 16384),
            _cpu("neoverse-n1", "softmax", "SDPA", "forward", "scaling", 16384),
        ],
        "Kimi Delta Attention, 2048 tokens, forward": [
            _cpu("neoverse-n1", "kda", who, "forward") for who in ("lineate", "transformers")
        ],
        "Gated DeltaNet 1, 32768, 16, 64, forward": _flashinfer("1x32768, 16/64"),
        "Gated DeltaNet 1, 8192, 16, 32, forward": _flashinfer("1x8192, 16/32"),
        "Gated DeltaNet 4 packed of 8192, 16, 64, forward": _flashinfer("4x8192, 16/64"),
        "Gated DeltaNet 1, 32768, 16, 64, forward+backward": [
            *(row["graph_ms"] for row in again if (row["case"], row["who"]) == (trained, "ours")),
            _gpu(trained, "fla")["graph_ms"],
        ],
        "Kimi Delta Attention 1, 8192, 16, 16, forward": _cudnn(8192, 16, 1, "forward"),
        "Kimi Delta Attention 1, 32768, 12, 12, forward": _cudnn(32768, 12, 1, "forward"),
        "Kimi Delta Attention 1, 8192, 96, 96, forward+backward": _cudnn(8192, 96, 1, "forward+backward"),
        "a token of a Qwen3-Next-like model of 8 layers, CUDA graph": [token["graph"], token["transformers"]],
    }  # fmt: skip
    shown = _rows("README.md", 6)
    assert {name for name in shown if shown[name][0] in ("CPU", "GPU")} == {*wanted}
    for name, (ours, theirs) in wanted.items():
        _, _, lineate, other, faster = shown[name]
        assert (lineate, other.split()[-1], faster) == (_digits(ours), _digits(theirs), _faster(theirs / ours)), name


def test_speed_on_a_cpu():
    names = {"Gated DeltaNet": "gdn", "Kimi Delta Attention": "kda"}
    rows = {name: cells for name, cells in _rows("docs/speed.md", 4).items() if name.split(", ")[0] in names}
    assert len(rows) == 7
    for name, (*shown, other) in rows.items():
        rule, what = names[name.split(", ")[0]], name.split(", ")[1]
        table, tokens = ("scaling", 16384) if "16384" in name else ("prefill", 2048)
        if what == "one token":
            table, what, tokens = "decode", "step", 1
        for machine, cell in zip(("neoverse-n1", "xeon-avx512"), shown, strict=True):
            if cell != "not run":
                ours = _cpu(machine, rule, "lineate", what, table, tokens)
                theirs = _cpu(machine, "softmax" if other == "SDPA" else rule, other, what, table, tokens)
                ms = f"{ours:.2f}".lstrip("0") if ours < 1 else _digits(ours)
                assert cell == f"{ms} ms, {_faster(theirs / ours)} faster", (name, machine)


def test_speed_on_a_gpu():
    shown = {name: cells for name, cells in _rows("docs/speed.md", 6).items() if name[0] in "gkdl"}
    assert set(shown) == {row["case"] for row in _results("gpu-h200.json")["results"]} - {
        "gdn decode 1,1,32,32", "kda decode 1,1,32,32",
    }  # fmt: skip
    for case, (ours, fla, others, *mib) in shown.items():
        for figure, memory, who in ((ours, mib[0], "ours"), (fla, mib[1], "fla")):
            row = _gpu(case, who)
            wanted = ("not run", "") if row is None else (_digits(row["graph_ms"]), f"{row['extra_bytes'] / 2**20:.0f}")
            assert (figure, memory) == wanted, (case, who)
        found = {who: _gpu(case, who.lower()) for who in ("FlashQLA", "FlashKDA", "SDPA")}
        assert others == ", ".join(f"{who} {_digits(row['graph_ms'])}" for who, row in found.items() if row), case


def test_latest_speed_on_a_gpu():
    """A case's last run counts; its peer may be of an earlier one."""
    rows = [row for run in _results("gpu-h200-again.json")["runs"] for row in run["results"]]
    last = {(row["case"], row["who"]): row for row in rows}
    rules = ("gdn ", "kda ", "delta ", "linear ")
    shown = {name: cells for name, cells in _rows("docs/speed.md", 4).items() if name.startswith(rules)}
    assert set(shown) == {case for case, who in last if who == "ours"}
    for case, (now, events, peer) in shown.items():
        ours, theirs = last[case, "ours"], last.get((case, "flashkda"))
        assert (now, events) == (_digits(ours["graph_ms"]), _digits(ours["event_ms"])), case
        assert peer == (f"FlashKDA {_digits(theirs['graph_ms'])}" if theirs else ""), case


def _prefill():
    """Return the times of lineate (True) and of the faster of FlashInfer's two paths, in a graph and from Python."""
    found = {}
    for row in _results("prefill-gpu-h200.json")["results"]:
        lengths = row["lengths"] or [row["t"]]
        name = "+".join(map(str, lengths)) if len(set(lengths)) > 1 else f"{len(lengths)}x{lengths[0]}"
        sides = found.setdefault(f"{name}, {row['h']}/{row['hv']}", {})
        side, times = row["who"] == "ours", (row["graph_ms"], row["event_ms"])
        sides[side] = tuple(map(min, sides.get(side, times), times))
    return found


def _flashinfer(case):
    times = _prefill()[case]
    return times[True][0], times[False][0]


def _cudnn(tokens, heads, sequences, what):
    (row,) = [
        row for row in _results("kda-cudnn-gpu-h200.json")["results"]
        if (row["tokens"], row["heads"], row["sequences"], row["what"]) == (tokens, heads, sequences, what)
    ]  # fmt: skip
    return row["lineate_ms"], row["cudnn_ms"]


def test_prefill_compared_with_flashinfer():
    """The table shows the faster of FlashInfer's two paths, in a graph and from Python each."""
    page = (ROOT / "bench/results/README.md").read_text()
    lines = page.split("## Prefill compared with FlashInfer")[1].split("\n## ")[0].splitlines()
    shown = {cells[1].strip(): [x.strip() for x in cells[2:-1]] for line in lines if len(cells := line.split("|")) == 8}
    for name, times in _prefill().items():
        (ours, event), (theirs, their_event) = times[True], times[False]
        wanted = [_digits(ours), _digits(theirs), f"{theirs / ours:.2f}x", _digits(event), _digits(their_event)]
        assert shown[name] == wanted, name


def test_peers_in_words():
    """README.md and docs/speed.md name the number of shapes on which each peer is ahead, and the ratios."""
    speed, readme = (" ".join((ROOT / page).read_text().split()) for page in ("docs/speed.md", "README.md"))
    ratios = sorted(theirs / ours for ours, theirs in map(_flashinfer, _prefill()))
    ahead, behind = [x for x in ratios if x > 1.02], [x for x in ratios if x < 0.98 - 0.005]
    assert f"{len(ratios)} shapes: lineate is ahead on {len(ahead)}, by {ahead[0]:.2f}x to {ahead[-1]:.2f}x" in speed
    assert f"FlashInfer 0.7.2 is ahead on {len(behind)} of {len(ratios)} prefill shapes" in readme
    slow, fast = (f"{x:.2f}x".lstrip("0") for x in (behind[0], behind[-1]))
    assert f"at {slow} to {fast} of its speed on three" in speed and f"{slow} to {fast} of its speed" in readme
    rows = _results("kda-cudnn-gpu-h200.json")["results"]
    for what, place in (("forward", "forward lineate"), ("forward+backward", "Forward and backward it")):
        ratios = sorted(row["cudnn_ms"] / row["lineate_ms"] for row in rows if row["what"] == what)
        ahead = [x for x in ratios if x > 1]
        assert f"{place} is ahead on {len(ahead)}, by {ahead[0]:.2f}x to {ahead[-1]:.2f}x" in speed
    assert "on 3 of 9 shapes" in readme and "on 1 of 9 forward and backward" in readme


def test_kimi_delta_attention_next_to_cudnn():
    page = (ROOT / "bench/results/README.md").read_text()
    lines = page.split("## Kimi Delta Attention next to cuDNN")[1].split("\n## ")[0].splitlines()
    shown = {cells[1].strip(): [x.strip() for x in cells[2:-1]] for line in lines if len(cells := line.split("|")) == 9}
    for row in _results("kda-cudnn-gpu-h200.json")["results"]:
        cells = shown[f"{row['tokens']}, {row['heads']}, {row['sequences']}"]
        ours, theirs = row["lineate_ms"], row["cudnn_ms"]
        wanted = [_digits(ours), _digits(theirs), f"{theirs / ours:.2f}x"]
        assert cells[3 * (row["what"] != "forward") :][:3] == wanted, row


def test_speed_of_models():
    """GPU tables are in ms; CPU tables say how many times faster than transformers."""
    shown = _rows("docs/speed.md", 4)
    for row in _results("models-gpu-h200.json")["results"]:
        what = "prefill 8192" if row["what"].startswith("prefill") else f"a token of {row['what'].split()[1]} row"
        (cells,) = [
            cells for name, cells in shown.items()
            if f"({row['model']})" in name and name.removesuffix("s").endswith(what)
        ]  # fmt: skip
        wanted = [row["transformers"], row["lineate"], row.get("graph")]
        assert cells == ["" if x is None else f"{_digits(x)} ms" for x in wanted], row["what"]
    shown = _rows("docs/speed.md", 3)
    for column, machine in enumerate(("neoverse-n1", "xeon-avx512")):
        for pattern, name in (("KKKM", "Kimi"), ("GGGA", "Qwen3-Next")):
            found = [row for row in _results(f"models-cpu-{machine}.json")["results"] if pattern in row["model"]]
            cells = shown[f"`HybridLM`, {name}-like, 8 layers: prefill 2048, decode"]
            assert cells[column] == ", ".join(_faster(row["faster_by_minimum"]) for row in found), (machine, name)


def test_loading():
    shown = _rows("bench/results/README.md", 5, "## Loading")
    for name, row in _results("loading-cpu-xeon.json")["cases"].items():
        sizes = [f"{max(0, row[f'{key}_bytes']) / 1e6:,.0f}" for key in ("file", "planned", "peak", "above")]
        assert shown[name] == sizes, name
        assert row["above_bytes"] < row["largest_bytes"]  # never a second copy of a tensor
