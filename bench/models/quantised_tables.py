"""The tables of bench.models.quantised_weights, from its JSON.

python -m bench.models.quantised_tables FILE
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.timing import OtherProcesses, show

OURS, LLAMA = "lineate", "llama.cpp"
ORDER = (OURS, "transformers", "torchao", LLAMA)


def sides_of(rows: list[dict[str, Any]], key: str) -> list[str]:
    """Return the contestants that any row has, in order."""
    return [side for side in ORDER if any(row[key].get(side) for row in rows)]


def ratio(found: dict[str, Any], of: Any) -> str:
    """Return how many times lineate's value is that of llama.cpp; "" if one of them is not there."""
    if not found.get(OURS) or not found.get(LLAMA):
        return ""
    return f"{of(found[OURS]) / of(found[LLAMA]):.2f}"


def decode_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows: ms of the median and of the fastest step, and ratios to llama.cpp's."""
    sides = sides_of(rows, "seconds")
    table = []
    for row in rows:
        found = row["seconds"]
        cells = [
            f"{1e3 * statistics.median(found[side]):.1f} {1e3 * min(found[side]):.1f}" if found.get(side) else ""
            for side in sides
        ]
        ratios = [ratio(found, statistics.median), ratio(found, min)]
        same = f"{100 * row['same'][LLAMA]:.0f}%" if LLAMA in row["same"] else ""
        table.append([row["form"], str(row["tokens"]), *cells, *ratios, same])
    return ["weights", "after", *sides, "ratio of medians", "of fastest", "same tokens"], table


def rate_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows: tokens per second of the fastest prompt, and lineate's as a multiple."""
    made = [
        {**row, "rates": {side: [row["tokens"] / s for s in found] for side, found in row["seconds"].items()}}
        for row in rows
    ]
    return _rates(made, "tokens", 0)


def batch_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows: tokens per second of all prompts together, the fastest round."""
    return _rates([{**row, "rates": row["tokens_per_second"]} for row in rows], "rows", 1)


def _rates(rows: list[dict[str, Any]], count: str, digits: int) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of rates; count: the column that distinguishes rows of one form."""
    sides = sides_of(rows, "rates")
    table = []
    for row in rows:
        rates = row["rates"]
        cells = [f"{max(rates[side]):.{digits}f}" if rates.get(side) else "" for side in sides]
        table.append([row["form"], str(row[count]), *cells, ratio(rates, statistics.median), ratio(rates, max)])
    return ["weights", count, *sides, "ratio of medians", "of fastest"], table


def memory_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows: MB resident, of the process's own and backed by files."""
    sides = sides_of(rows, "bytes")
    table = []
    for row in rows:
        found = {side: own["after"] for side, own in row["bytes"].items()}
        cells = [
            f"{found[side]['all'] / 1e6:.0f} ({found[side]['own'] / 1e6:.0f} + {found[side]['files'] / 1e6:.0f})"
            if side in found
            else ""
            for side in sides
        ]
        ratios = [ratio(found, lambda x: x["all"]), ratio(found, lambda x: x["own"])]
        before = row["bytes"].get(OURS, {}).get("before")
        table.append([row["form"], *cells, *ratios, f"{before['all'] / 1e6:.0f}" if before else ""])
    return ["weights", *sides, "ratio", "ratio of own", "lineate before loading"], table


def read_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows: GB/s of a plain read and of lineate's fastest and median step."""
    table = []
    for row in rows:
        seconds = (min(row["read_seconds"]), min(row["step_seconds"]), statistics.median(row["step_seconds"]))
        rates = [f"{row['bytes'] / s / 1e9:.1f}" for s in seconds]
        table.append([row["form"], f"{row['bytes'] / 1e6:.0f}", *rates, f"{100 * row['part']:.0f}%"])
    return ["weights", "MB a step", "plain read GB/s", "lineate, fastest step", "median step", "of the read"], table


def error_tables(data: dict[str, Any]) -> None:
    """Print what quantised weights change."""
    rows = data["random_models"]
    forms = [key for key in rows[0] if key not in ("model", "parameters")]
    table = [
        [row["model"], f"{row['parameters'] / 1e6:.1f}M", *(f"{100 * row[form]:.2f}%" for form in forms)]
        for row in rows
    ]
    show("error of logits relative to float32, random models", ["model", "parameters", *forms], table)
    trained_table(data)


def trained_table(data: dict[str, Any]) -> None:
    """Print what quantised weights change in a trained model."""
    first, *others = data["trained_model"]
    table = [["float32", "", "", "", "", "", f"{first['perplexity']:.4f}", ""]]
    for row in others:
        parts = [f"{100 * row[key]:.2f}%" for key in ("logits", "text", "own", "free")]
        until = f"{row['free_until']:.0f}"
        rise = f"{100 * row['perplexity_rise']:+.3f}%"
        table.append([row["form"], *parts, until, f"{row['perplexity']:.4f}", rise])
    about = data["header"]["training"]
    show(
        f"a model of {about['parameters'] / 1e6:.1f}M parameters trained for {about['steps']} steps: "
        f"{others[0]['positions']:,} positions of held-out text, {others[0]['tokens']:,} greedy tokens",
        ["weights", "logits", "same on text", "on own tokens", "free-running", "same until", "perplexity", "rise"],
        table,
    )


TABLES = {
    "decode": ("decoding, ms a step: median and fastest; ratios lineate : llama.cpp, lower is better", decode_table),
    "prefill": ("prompts, tokens per second; ratios lineate : llama.cpp, higher is better", rate_table),
    "batch": ("prompts together, tokens per second; ratios lineate : llama.cpp, higher is better", batch_table),
    "memory": ("resident MB (own + backed by files); ratios lineate : llama.cpp, lower is better", memory_table),
    "read": ("speed of reading weights", read_table),
}


def show_all(data: dict[str, Any]) -> None:
    """Print a table of each part that the JSON has."""
    for part, (title, make) in TABLES.items():
        if part in data:
            show(title, *make(data[part]))
    if "trained_model" in data:
        error_tables(data)
    for line in data["left_out"]:
        print(f"left out: {line}")
    busy = data["header"]["other_cores"]
    if busy is not None and busy > OtherProcesses.BUSY:
        print(f"other processes kept {busy:.1f} cores busy: the ratios cannot be trusted")


def main() -> None:
    show_all(json.loads(Path(sys.argv[1]).read_text()))


if __name__ == "__main__":
    main()
