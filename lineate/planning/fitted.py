"""The table of the fitted times of lineate, next to their bounds, and the sentences below it."""

from lineate.planning.report import PlanNumbers, middle
from lineate.planning.units import show_seconds, show_tokens

KINDS = ("prefill", "decode")
MOST_OUTSIDE = 3
"""The most reasons for an extrapolation that are named."""


def fitted_rows(report: PlanNumbers) -> tuple[list[str], list[list[str]]] | None:
    """Return headings and rows: every length for one machine, the middle one for several; None without fitted times."""
    times, several = _shown(report), _several(report)
    found = {(x["hardware"], x["tokens"], x["what"]): x for x in times if x["fitted_seconds"] is not None}
    rows = []
    for machine, tokens in dict.fromkeys((machine, tokens) for machine, tokens, _ in found):
        row = [machine if several else show_tokens(tokens)]
        for what in KINDS:
            x = found.get((machine, tokens, what))
            row += ["", ""] if x is None else [_time(x), f"{x['fitted_seconds'] / x['least_seconds']:.1f}x"]
        rows.append(row)
    name = f"prefill {show_tokens(middle(report))}" if several else "prefill"
    head = ["" if several else "tokens", name, "of the bound", "decode a token", "of the bound"]
    return (head, rows) if rows else None


def fitted_notes(report: PlanNumbers) -> list[str]:
    """Describe the measurements behind fitted times, what is outside their range, and what has no fitted time."""
    times = _shown(report)
    fitted = [x for x in times if x["fitted_seconds"] is not None]
    notes = [
        _about(machine, [x for x in fitted if x["hardware"] == machine], report)
        for machine in dict.fromkeys(x["hardware"] for x in fitted)
    ]
    if outside := list(dict.fromkeys(words for x in fitted for words in x["outside"])):
        more = f"; and {len(outside) - MOST_OUTSIDE} more (--json)" if len(outside) > MOST_OUTSIDE else ""
        named = "; ".join(outside[:MOST_OUTSIDE])
        notes.append(f"* Extrapolated beyond the measurements, with an unknown error: {named}{more}.")
    without = [x for x in times if x["why_not"] is not None]
    for reason in dict.fromkeys(x["why_not"] for x in without):
        own = [x for x in without if x["why_not"] == reason]
        machines, kinds = (", ".join(dict.fromkeys(x[key] for x in own)) for key in ("hardware", "what"))
        notes.append(f"No fitted time of lineate on {machines} ({kinds}): {reason}.")
    return notes


def _about(machine: str, times: list[PlanNumbers], report: PlanNumbers) -> str:
    """Describe the measurements and errors of the fit of a machine."""
    found, kinds = report["fits_of_times"][machine], {x["what"]: x for x in times}
    counts = {"prefill": "prompts", "decode": "decoding steps"}
    numbers = " and ".join(f"{found[f'{what}_measurements']} {counts[what]}" for what in kinds)
    medians = " and ".join(f"{x['median_error']:.0%} ({what})" for what, x in kinds.items())
    text = (
        f"Fitted to {numbers} of lineate on {machine}, the newest of {found['date']}. ± is the largest error of a "
        f"measurement that the fit did not have; the median is {medians}."
    )
    new = {what: found[f"{what}_new_model_largest_error"] for what in kinds}
    if known := [f"{error:.0%} ({what})" for what, error in new.items() if error is not None]:
        text += f" Of a model that the fit did not have it is up to {' and '.join(known)}."
    if report["model"]["experts"]:
        text += " Every token chooses its experts at random, in these bounds too."
    return text


def _time(x: PlanNumbers) -> str:
    """Return a fitted time with its largest error, or with a star outside the measured range."""
    seconds = show_seconds(x["fitted_seconds"])
    return f"{seconds} *" if x["outside"] else f"{seconds} ± {x['largest_error']:.0%}"


def _several(report: PlanNumbers) -> bool:
    return len({x["hardware"] for x in report["fitted"]}) > 1


def _shown(report: PlanNumbers) -> list[PlanNumbers]:
    """Return the times of the model itself that the table has."""
    own = [x for x in report["fitted"] if x["of"] == report["own"]]
    return [x for x in own if not _several(report) or x["tokens"] == middle(report)]
