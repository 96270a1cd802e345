"""Fit the times of lineate that `lineate plan` shows next to its lower bounds to the committed measurements.

    python -m bench.models.fit_plan [--results FOLDER] [--check]

It reads every flagships*.json (bench.models.flagships), serving-gpu-h200.json (decoding steps of bench.serving.gpu) and
small-weights-gpu-h200.json (bench.models.quantised_gpu), prints the measurements next to the fit, and writes
lineate/planning/estimates.json and the tables in docs/planning.md. Of measurements of the same shape, the newest
counts. --check writes nothing and exits with 1 if a file would change.

The fit minimises the sum of squared relative errors. No coefficient is negative, and none stands for a rate above the
machine's. Left out: the prediction for a measurement by the fit to all others; new model: that by the fit to all other
models, where these have all of its terms. A format of weights with fewer than LEAST_POINTS measurements is not fitted.
"""

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.models.quantised_gpu import TOKENS, config_of
from bench.serving.gpu import make_config
from bench.timing import show
from lineate.planning import HARDWARE, MemoryPlan, Model, plan_memory, read_model
from lineate.planning.estimates import FILE, decode_terms, prefill_terms, weights_format
from lineate.planning.hardware import Hardware, decode_bound, prefill_bound
from lineate.planning.units import show_rate, show_seconds
from lineate.quantised.format import find_format

ROOT = Path(__file__).parents[2]
RESULTS, DOCS = ROOT / "bench/results", ROOT / "docs/planning.md"
DEVICES = {"NVIDIA H200": "h200"}
"""The keys in HARDWARE of the devices that torch names."""
SERVING, QUANTISED = "GGGA, 24 x 2048", "GGGA, 24 x 4096"
"""The models of bench.serving.gpu and bench.models.quantised_gpu."""
LEAST_POINTS = 4
"""The fewest measurements of a format of weights that are fitted."""
BEGIN, END = "<!-- written by bench.models.fit_plan -->\n", "<!-- end -->\n"
DIGITS = 4
"""Significant digits of written numbers."""


@dataclass(frozen=True)
class Source:
    """The description of a file of results."""

    file: str
    device: str
    date: str
    versions: str


@dataclass(frozen=True)
class Point:
    """One measurement."""

    source: Source
    model: str
    """The name of the model."""
    form: str | None
    """The format of large weights; None: bfloat16."""
    what: str
    """"decode" or "prefill"."""
    batch: int
    tokens: int
    piece: int | None
    """Tokens that a prompt was read by at a time; None: all of them."""
    seconds: float

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that says what was measured."""
        return self.model, self.form, self.what, self.batch, self.tokens, self.piece

    @property
    def name(self) -> str:
        text = f"{self.batch:,} after {self.tokens:,}" if self.what == "decode" else f"{self.tokens:,}"
        return text if self.piece is None else f"{text} in pieces of {self.piece:,}"

    @property
    def plan(self) -> MemoryPlan:
        return plan_of(self.model, self.form)

    @property
    def weights(self) -> str:
        return weights_format(self.plan.model)

    def terms(self) -> dict[str, float]:
        if self.what == "decode":
            return decode_terms(self.plan, self.batch, self.tokens)
        return prefill_terms(self.plan, self.batch, self.tokens, self.piece)

    def bound(self, hardware: Hardware) -> float:
        """Return the lower bound of the time, with experts chosen at random."""
        if self.what == "decode":
            return decode_bound(self.plan, hardware, self.batch, self.tokens, "expected").seconds
        return prefill_bound(self.plan, hardware, self.batch, self.tokens).seconds


@lru_cache
def plan_of(name: str, form: str | None) -> MemoryPlan:
    """Return the plan of a preset or of a model of another bench, in bfloat16 with weights of a format."""
    configs = {SERVING: make_config, QUANTISED: lambda: config_of(4096, 24)}
    if name in configs:
        return plan_memory(Model(name, configs[name](), torch.bfloat16, "config", weights=form))
    return plan_memory(read_model(name, "bfloat16", weights=form))


def read_points(folder: Path) -> list[Point]:
    """Return the measurements of all files, and of those of the same thing the newest."""
    points: dict[tuple[Any, ...], Point] = {}
    found = [x for file in sorted(folder.glob("flagships*.json")) for x in flagships(file)]
    found += [x for read in (serving, quantised) for x in read(folder)]
    for point in sorted(found, key=lambda x: x.source.date):
        points[point.key] = point
    if not points:
        raise ValueError(f"{folder} must have results of bench.models.flagships, got none")
    return list(points.values())


def flagships(file: Path) -> Iterator[Point]:
    """Yield the measurements of a file of bench.models.flagships."""
    found = json.loads(file.read_text())
    about = found["about"]
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "triton") if name in about)
    source = Source(file.name, device_of(about["gpu"], file), about["date"], versions)
    for x in found["records"]:
        if "ms" in x:
            form = None if x["weights"] == "bf16" else find_format(x["weights"]).name
            if (shape := shape_of(x["what"])) is None:
                print(f"{file.name}: {x['what']!r} is neither a decoding step nor a prompt, and is not fitted")
            else:
                yield Point(source, x["model"], form, *shape, x["ms"] / 1e3)


def shape_of(what: str) -> tuple[str, int, int, int | None] | None:
    """Return the kind of step, sequences, tokens and tokens of a piece of a record's text; None for other records."""
    text = what.replace(",", "")
    if match := re.fullmatch(r"decode (\d+) after (\d+)", text):
        return "decode", int(match[1]), int(match[2]), None
    if match := re.fullmatch(r"prefill (\d+)", text):
        return "prefill", 1, int(match[1]), None
    if match := re.fullmatch(r"read (\d+) in pieces of (\d+)", text):
        return "prefill", 1, int(match[1]), int(match[2])
    return None


def serving(folder: Path) -> Iterator[Point]:
    """Yield the decoding steps of bench.serving.gpu, as the device takes them."""
    for header, found in headed(folder / "serving-gpu-h200.json"):
        for x in found["results"]:
            if x["what"] == "decode":
                yield Point(header, SERVING, None, "decode", x["rows"], x["length"], None, x["device_seconds"])


def quantised(folder: Path) -> Iterator[Point]:
    """Yield the decoding steps of bench.models.quantised_gpu."""
    for header, found in headed(folder / "small-weights-gpu-h200.json"):
        for x in found["steps"]:
            form = None if x["form"] == "bfloat16" else x["form"]
            yield Point(header, QUANTISED, form, "decode", x["rows"], TOKENS, None, x["ms"] / 1e3)


def headed(file: Path) -> Iterator[tuple[Source, dict[str, Any]]]:
    """Yield the header and the content of a file, if it exists."""
    if file.is_file():
        found = json.loads(file.read_text())
        header = found["header"]
        versions = header.get("versions") or {"torch": header["torch"]}
        words = ", ".join(f"{name} {value}" for name, value in versions.items())
        yield Source(file.name, device_of(header["gpu"], file), header["date"], words), found


def device_of(gpu: str, file: Path) -> str:
    if gpu not in DEVICES:
        raise ValueError(f"{file.name} must be of one of {', '.join(DEVICES)}, got {gpu!r}; add it to DEVICES")
    return DEVICES[gpu]


def fitted_formats(points: Sequence[Point]) -> list[Point]:
    """Return the measurements with weights in a format of which there are enough."""
    counts = {form: sum(x.weights == form for x in points) for form in {x.weights for x in points}}
    return [x for x in points if counts[x.weights] >= LEAST_POINTS]


class Fit:
    """A fit of terms to measurements of one kind of step.

    Args:
        points: The measurements.
        hardware: The machine that they were made on.
    """

    def __init__(self, points: Sequence[Point], hardware: Hardware) -> None:
        self.points, self.hardware = points, hardware
        amounts = [x.terms() for x in points]
        self.names = list(dict.fromkeys(name for terms in amounts for name in terms))
        if len(points) <= len(self.names):
            raise ValueError(
                f"{len(self.names)} coefficients need more measurements, got {len(points)}; measure more with "
                "bench.models.flagships"
            )
        self.seconds = torch.tensor([x.seconds for x in points], dtype=torch.float64)
        rows = [[terms.get(name, 0) for name in self.names] for terms in amounts]
        self.amounts = torch.tensor(rows, dtype=torch.float64)
        self.least = torch.tensor([self.least_of(name) for name in self.names], dtype=torch.float64)
        self.bounds = torch.tensor([x.bound(hardware) for x in points], dtype=torch.float64)
        self.coefficients = self.solve(list(range(len(points))))
        self.fitted = self.predict(self.coefficients)
        self.left_out = self.left({i: [i] for i in range(len(points))})
        self.new_model = self.left({i: self.of_model(x.model) for i, x in enumerate(points)})
        self.known = [self.has_terms(i, self.of_model(x.model)) for i, x in enumerate(points)]

    def least_of(self, name: str) -> float:
        """Return the smallest coefficient of a term: that of the machine's peak rates."""
        if name.startswith("bytes"):
            return 1 / self.hardware.bandwidth
        # a decoding step multiplies while it reads, so its products need not add anything
        prompts = self.points[0].what == "prefill" and name.startswith("operations")
        return 1 / self.hardware.rate(torch.bfloat16) if prompts else 0.0

    def of_model(self, model: str) -> list[int]:
        return [i for i, x in enumerate(self.points) if x.model == model]

    def has_terms(self, index: int, group: list[int]) -> bool:
        """Return whether the measurements outside a group have all terms that a measurement has."""
        others = [i for i in range(len(self.points)) if i not in group]
        return bool((self.amounts[others].any(0) | (self.amounts[index] == 0)).all())

    def solve(self, kept: list[int]) -> Tensor:
        """Return the coefficients that fit some of the measurements best."""
        relative = self.amounts[kept] / self.seconds[kept, None]
        return self.least + nonnegative(relative, 1 - relative @ self.least)

    def predict(self, coefficients: Tensor) -> Tensor:
        return torch.maximum(self.amounts @ coefficients, self.bounds)

    def left(self, groups: Mapping[int, list[int]]) -> Tensor:
        """Return the prediction for each measurement by the fit to all that are not in its group."""
        solved: dict[tuple[int, ...], Tensor] = {}
        found = []
        for i, group in groups.items():
            if tuple(group) not in solved:
                kept = [j for j in range(len(self.points)) if j not in group]
                solved[tuple(group)] = self.predict(self.solve(kept))
            found.append(solved[tuple(group)][i])
        return torch.stack(found)

    def errors(self, predicted: Tensor) -> list[float]:
        """Return |prediction / measured - 1| of each measurement."""
        return [abs(x) for x in (predicted / self.seconds - 1).tolist()]

    def new_errors(self) -> list[float]:
        """Return the errors of models of which the fit had no measurement, where it had all of their terms."""
        return [x for x, known in zip(self.errors(self.new_model), self.known, strict=True) if known]

    def numbers(self) -> dict[str, Any]:
        """Return what estimates.json has of this fit."""
        left, new = self.errors(self.left_out), self.new_errors()
        formats = {}
        for form in dict.fromkeys(x.weights for x in self.points):
            own = [i for i, x in enumerate(self.points) if x.weights == form]
            batches, tokens = ({getattr(self.points[i], key) for i in own} for key in ("batch", "tokens"))
            formats[form] = {
                "points": len(own),
                "median_error": rounded(statistics.median(left[i] for i in own)),
                "largest_error": rounded(max(left[i] for i in own)),
                "rows": [min(batches), max(batches)],
                "tokens": [min(tokens), max(tokens)],
            }
        return {
            "coefficients": {n: rounded(x) for n, x in zip(self.names, self.coefficients.tolist(), strict=True)},
            "largest": {n: round(x) for n, x in zip(self.names, self.amounts.amax(0).tolist(), strict=True)},
            "shortest_seconds": rounded(self.fitted.min().item()),
            "formats": formats,
            "new_model_median_error": rounded(statistics.median(new)) if new else None,
            "new_model_largest_error": rounded(max(new)) if new else None,
        }


def nonnegative(a: Tensor, b: Tensor) -> Tensor:
    """Return x >= 0 with the least |a x - b|, by the active sets of Lawson and Hanson."""
    scale = a.abs().amax(0).clamp(min=torch.finfo(a.dtype).tiny)
    a = a / scale
    x = torch.zeros(a.shape[1], dtype=a.dtype)
    free: list[int] = []
    while True:
        gradient = a.T @ (b - a @ x)
        gradient[free] = 0
        if gradient.max() <= 1e-10:
            return x / scale
        free.append(int(gradient.argmax()))
        while True:
            found = torch.linalg.lstsq(a[:, free], b[:, None], driver="gelsd").solution[:, 0]
            if (found > 0).all():
                break
            step = min(float(x[j] / (x[j] - y)) for j, y in zip(free, found, strict=True) if y <= 0)
            x[free] += step * (found - x[free])
            free = [j for j in free if x[j] > 1e-12]
            x[[j for j in range(len(x)) if j not in free]] = 0
        x[free] = found


def rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def make_fits(points: Sequence[Point]) -> dict[str, dict[str, Fit]]:
    """Return the fits by device and kind of step."""
    fits: dict[str, dict[str, Fit]] = {}
    for device in dict.fromkeys(x.source.device for x in points):
        fits[device] = {}
        for what in ("prefill", "decode"):
            own = [x for x in points if (x.source.device, x.what) == (device, what)]
            fits[device][what] = Fit(fitted_formats(own), HARDWARE[device])
    return fits


def file_of(fits: Mapping[str, Mapping[str, Fit]]) -> dict[str, Any]:
    """Return the content of estimates.json."""
    found = {}
    for device, times in fits.items():
        points = [x for fit in times.values() for x in fit.points]
        sources = {x.source.file: x.source for x in points}
        found[device] = {
            "written_by": "python -m bench.models.fit_plan",
            "date": max(x.date for x in sources.values())[:10],
            "sources": {x.file: f"{x.date[:10]}, {x.versions}" for x in sources.values()},
            "letters": "".join(sorted({letter for x in points for letter in x.plan.model.config.letters})),
            "times": {what: fit.numbers() for what, fit in times.items()},
        }
    return found


def tables_of(fits: Mapping[str, Mapping[str, Fit]]) -> str:
    """Return the tables of docs/planning.md."""
    lines = []
    for device, times in fits.items():
        hardware = HARDWARE[device]
        for what, fit in times.items():
            numbers = fit.numbers()
            lines += [f"| {what}, {hardware.name} | fitted |", "|---|---|"]
            pairs = zip(fit.names, fit.coefficients.tolist(), strict=True)  # unrounded, at most the machine's rates
            lines += [f"| {name} | {show_rate_of(name, x)} |" for name, x in pairs]
            lines += ["", "| weights | measurements | left out: median, largest error |", "|---|---|---|"]
            for form, x in numbers["formats"].items():
                lines.append(f"| {form} | {x['points']} | {x['median_error']:.0%}, {x['largest_error']:.0%} |")
            if new := fit.new_errors():
                text = f"median {statistics.median(new):.0%}, largest {max(new):.0%}"
                lines += ["", f"A whole model left out, where the others have all of its terms: {text}."]
            lines.append("")
    return "\n".join(lines)


def show_rate_of(name: str, seconds: float) -> str:
    """Return a coefficient as a rate, or as a time where it is not of bytes or operations."""
    if not name.startswith(("bytes", "operations")):
        return f"{show_seconds(seconds)} each" if seconds else "nothing"
    unit = "B/s" if name.startswith("bytes") else "FLOP/s"
    return show_rate(1 / seconds, unit) if seconds else "nothing"


def with_tables(text: str, tables: str) -> str:
    """Return the text of docs/planning.md with other tables."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{DOCS.name} must have the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def print_fit(what: str, fit: Fit, dropped: int) -> None:
    """Print the measurements next to the fit, and the coefficients."""
    columns = ["model", "weights", what, "bound", "measured", "fitted", "left out", "", "new model", ""]
    rows = []
    for i, x in enumerate(fit.points):
        times = [fit.bounds[i], fit.seconds[i], fit.fitted[i]]
        row = [x.model, x.weights, x.name, *(show_seconds(float(y)) for y in times)]
        for predicted, known in ((fit.left_out[i], True), (fit.new_model[i], fit.known[i])):
            ratio = float(predicted / fit.seconds[i])
            row += [show_seconds(float(predicted)), f"{ratio - 1:+.0%}"] if known else ["", ""]
        rows.append(row)
    note = f"; {dropped} in formats with fewer than {LEAST_POINTS} are left out" if dropped else ""
    show(f"{what}: {len(fit.points)} measurements, {len(fit.names)} coefficients{note}", columns, rows)
    for name, x, least in zip(fit.names, fit.coefficients.tolist(), fit.least.tolist(), strict=True):
        print(f"  {name}: {show_rate_of(name, x)}{' (the least that is allowed)' if x == least else ''}")
    for words, errors in (("left out", fit.errors(fit.left_out)), ("new model", fit.new_errors())):
        if errors:
            print(f"  {words}: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the measurements")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    args = parser.parse_args()
    points = read_points(args.results)
    fits = make_fits(points)
    for device, times in fits.items():
        for what, fit in times.items():
            own = [x for x in points if (x.source.device, x.what) == (device, what)]
            print_fit(what, fit, len(own) - len(fit.points))
    texts = {FILE: json.dumps(file_of(fits), indent=1) + "\n", DOCS: with_tables(DOCS.read_text(), tables_of(fits))}
    changed = [file for file, text in texts.items() if not file.is_file() or file.read_text() != text]
    if args.check:
        parser.exit(int(bool(changed)), "".join(f"{x.relative_to(ROOT)} is out of date\n" for x in changed))
    for file in changed:
        file.write_text(texts[file])
        print(f"wrote {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
