"""The numbers of a plan as tables in the terminal."""

from typing import TYPE_CHECKING

from lineate.planning.fitted import fitted_notes, fitted_rows
from lineate.planning.report import MOST_RATE, RANDOM_RATE, PlanNumbers, cache_kinds, middle
from lineate.planning.units import (
    show_bytes,
    show_count,
    show_flops,
    show_number,
    show_rate,
    show_seconds,
    show_tokens,
)

if TYPE_CHECKING:
    from rich.console import Console

Rows = list[list[str]]
WORDS = ("", "limit", "mixer")
"""Headings of the columns that hold words."""


def print_report(report: PlanNumbers, console: "Console", layers: bool = False) -> None:
    """Print all tables of make_report."""
    m = report["model"]
    say(console, headline(m), style="bold")
    say(console, weights_line(report["weights"]))
    say(console, state_line(report["state_of_a_sequence"]))
    if report["ranks"] is not None:
        say(console, ranks_line(report["ranks"]))
    if m["longest_trained_tokens"] is not None:
        say(console, f"Made for sequences of up to {m['longest_trained_tokens']:,} tokens.")
    table(console, f"State, {sequences(report['batch'])}", *context_rows(report))
    if report["against_batch"]:
        table(console, "Weights and state against the number of sequences", *batch_rows(report))
    table(console, f"State of the same sizes with other mixers, {sequences(report['batch'])}", *variant_rows(report))
    say(console, crossover_line(report["crossover"]))
    again = "four forwards: layers are run twice" if report["recompute"] else "three forwards"
    table(console, f"Operations per token (training: {again})", *flops_rows(report))
    say(
        console,
        "As torch's counter has them, attention over all pairs; at least: causal pairs alone. A multiply-add is 2.",
    )
    if report["ranks"] is not None:
        table(console, f"What a rank receives from others, {sequences(report['batch'])}", *received_rows(report))
    if len(report["fits"]) == len(report["variants"]) and not any(x["weights_fit"] for x in report["fits"]):
        room = f"{memory(report['fits'][0])} ({report['fits'][0]['hardware']})"
        say(console, f"\nThe weights alone do not fit into {room}.", style="bold")
    elif report["fits"]:
        table(console, *fit_table(report))
        if report["times"]:
            if len(report["fits"]) == len(report["variants"]):
                table(console, *rate_table(report))
            say(console, rate_note(report))
    if report["times"]:
        machines = {x["hardware"] for x in report["times"]}
        where = f"{machines.pop()}, " if len(machines) == 1 else ""
        table(console, f"Times that no program can beat, {where}{sequences(report['batch'])}", *time_rows(report))
        say(console, time_note(report))
        if rows := fitted_rows(report):
            title = f"Times of lineate, fitted to measurements, {sequences(report['batch'])}"
            table(console, title, *rows)
        for sentence in fitted_notes(report):
            say(console, sentence)
    if report["training"] is not None:
        table(console, training_title(report["training"]), *training_rows(report["training"]))
        if report["training"]["times"]:
            say(console, training_note(report["training"]))
    if layers:
        table(console, "Every layer, one sequence", *layer_rows(report))


def print_teaching(report: PlanNumbers, console: "Console") -> None:
    """Print the table and the sentences of make_teaching_report."""
    m = report["model"]
    heads = m["taught_heads"]
    say(console, headline(m), style="bold")
    say(
        console,
        f"Simplified formulas: emb_dim {m['hidden_size']}, {heads} heads of {m['hidden_size'] // heads}, "
        f"{m['n_layers']} layers, {m['dtype']}; GB = 10^9 bytes.",
    )
    if report.get("assumed"):
        taken = " ".join(f"{name} {value}" for name, value in report["assumed"].items())
        say(console, f"Not given, so taken: {taken}.")
    head = ["tokens"]
    for x in report["teaching"].values():
        head += [x["formula"], "exact"]
    rows = [
        [show_tokens(tokens)]
        + [f"{x[key][i] / 1e9:.4f}" for x in report["teaching"].values() for key in ("formula_bytes", "exact_bytes")]
        for i, tokens in enumerate(report["contexts_tokens"])
    ]
    table(console, f"GB of state by the formulas, and exactly, {sequences(report['batch'])}", head, rows)
    say(console, "How and why the exact bytes differ:")
    for sentence in report["differences"]:
        say(console, f"- {sentence}")


def table(console: "Console", title: str, head: list[str], rows: Rows) -> None:
    """Print a table with words to the left and numbers to the right; nothing is cut."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in head:
        words = name in WORDS
        made.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=words)
    for row in rows:
        made.add_row(*row)
    console.print()
    say(console, title, style="bold")
    console.print(made)


def say(console: "Console", text: str, style: str | None = None) -> None:
    console.print(text, style=style)


def headline(m: PlanNumbers) -> str:
    """Return the model in a line."""
    rules = ", ".join(f"{n} x {rule}" for rule, n in m["rules"].items())
    active = f", {show_count(m['active_parameters'])} active per token" if m["experts"] else ""
    name = "Numbers" if m["origin"] == "numbers" else m["name"]
    kept = f", large weights in {m['weights']}" if "weights" in m else ""
    return (
        f"{name}: {m['n_layers']} layers ({rules}) of {m['hidden_size']} channels, "
        f"{show_count(m['parameters'])} parameters{active}, {m['dtype']}{kept}"
    )


def weights_line(w: PlanNumbers) -> str:
    parts = {"mixers": "mixers_bytes", "feed-forward": "feed_forward_bytes", "embedding": "embedding_bytes"}
    text = ", ".join(f"{name} {show_bytes(w[key])}" for name, key in parts.items())
    head = f"head {show_bytes(w['head_bytes'])}" if w["head_bytes"] else "head tied to the embedding"
    return f"Weights: {show_bytes(w['total_bytes'])} ({text}, {head})."


def ranks_line(r: PlanNumbers) -> str:
    """Return a description of the ranks that share the model."""
    kinds = {"tensor": "tensor ranks", "context": "context ranks", "replicas": "replicas"}
    how = " x ".join(f"{r[key]:,} {word}" for key, word in kinds.items() if r[key] > 1)
    whole = f"{show_count(r['whole_parameters'])} parameters, {show_bytes(r['whole_weights_bytes'])}"
    text = f"All numbers are those of one rank of {r['ranks']:,} ({how}); the whole model has {whole}."
    if r["replicas"] > 1:
        text += f" The batches and tokens a second of all replicas are {r['replicas']:,} times those below."
    return text


def received_rows(report: PlanNumbers) -> tuple[list[str], Rows]:
    """Return the bytes that a rank receives for a decoded token, a prefill and a training step, by purpose."""
    r, training = report["ranks"], report["training"] or {}
    lengths = report["contexts_tokens"]
    found = {"decode a token": r["decode_received"]}
    found |= {f"prefill {show_tokens(n)}": x for n, x in zip(lengths, r["prefill_received"], strict=True)}
    if "received" in training:
        found[f"training, {show_tokens(training['tokens_per_step'])}"] = training["received"]
    names = {"sums": ("sums", "logits"), "segments": ("context",), "gradients": ("gradients", "shared_gradients")}
    parts = {
        name: [sum(x[f"{key}_bytes"] for key in keys) for x in found.values()] for name, keys in names.items()
    }  # fmt: skip
    parts = {name: numbers for name, numbers in parts.items() if any(numbers)}
    rows = [
        [
            what,
            *(show_bytes(numbers[i]) for numbers in parts.values()),
            show_bytes(x["total_bytes"]),
            f"{x['collectives']:,}",
        ]
        for i, (what, x) in enumerate(found.items())
    ]
    return ["", *parts, "all", "collectives"], rows


def state_line(s: PlanNumbers) -> str:
    """Return a description of the state of one sequence."""
    recurrent, conv = (show_bytes(s[f"{key}_bytes"]) for key in ("recurrent", "convolution"))
    fixed = show_bytes(s["recurrent_bytes"] + s["convolution_bytes"])
    cache = f"{show_bytes(s['cache_bytes_per_token'])} of cache per token ({s['cache_dtype']})"
    if not s["recurrent_bytes"]:
        return f"A sequence keeps {cache}."
    text = f"{fixed} (recurrent state {recurrent} {s['state_dtype']}, convolutions {conv} {s['conv_dtype']})"
    return f"A sequence keeps {text}" + (f" + {cache}." if s["cache_bytes_per_token"] else ", whatever its length.")


def sequences(batch: int) -> str:
    return "one sequence" if batch == 1 else f"{batch:,} sequences"


def context_rows(report: PlanNumbers) -> tuple[list[str], Rows]:
    """Return bytes by kind against the length, without the kinds that the model lacks."""
    names = {key: kind for kind, key in cache_kinds().items()}
    names |= {"recurrent_bytes": "recurrent", "convolution_bytes": "convolution", "state_bytes": "all state"}
    names["total_bytes"] = "with weights"
    shown = [key for key in names if any(row[key] for row in report["against_context"])]
    rows = [[show_tokens(row["tokens"])] + [show_bytes(row[key]) for key in shown] for row in report["against_context"]]
    return ["tokens", *(names[key] for key in shown)], rows


def batch_rows(report: PlanNumbers) -> tuple[list[str], Rows]:
    totals = report["against_batch"]
    rows = [
        [show_tokens(tokens)] + [show_bytes(x[i]) for x in totals.values()]
        for i, tokens in enumerate(report["contexts_tokens"])
    ]
    return ["tokens", *(f"batch {int(batch):,}" for batch in totals)], rows


def variant_rows(report: PlanNumbers) -> tuple[list[str], Rows]:
    sides = report["variants"]
    rows = [
        [show_tokens(tokens)] + [show_bytes(x["state_bytes"][i]) for x in sides.values()]
        for i, tokens in enumerate(report["contexts_tokens"])
    ]
    rows.append(["weights"] + [show_bytes(x["weights_bytes"]) for x in sides.values()])
    return ["tokens", *sides], rows


def crossover_line(x: PlanNumbers) -> str:
    return (
        f"From {x['tokens']:,} tokens on, a layer of {x['linear_rule']} ({show_bytes(x['linear_layer_bytes'])}) "
        f"keeps less than one of {x['full_rule']} ({show_bytes(x['full_layer_bytes_per_token'])} per token)."
    )


def flops_rows(report: PlanNumbers) -> tuple[list[str], Rows]:
    keys = {
        "prefill": "prefill_executed", "at least": "prefill_least", "decode": "decode_executed",
        "training": "training_executed",
    }  # fmt: skip
    rows = [[show_tokens(row["tokens"])] + [show_flops(row[key]) for key in keys.values()]
            for row in report["flops_per_token"]]  # fmt: skip
    return ["tokens", *keys], rows


def fit_table(report: PlanNumbers) -> tuple[str, list[str], Rows]:
    """Return title, headings and rows: every length and the other mixers for one machine, else the middle length."""
    fits = [x for x in report["fits"] if x["of"] == report["own"]]
    batch, contexts = sequences(report["batch"]), report["contexts_tokens"]
    if len(fits) > 1:
        at = contexts.index(middle(report))
        head = ["", "memory", f"longest context, {batch}", f"largest batch at {show_tokens(middle(report))}"]
        return (
            "What fits, weights and state",
            [*head, "most tokens/s"],
            [[x["hardware"], memory(x), longest(x), largest(x, at), rate(x, at)] for x in fits],
        )
    rows = [[f"tokens, {batch}"] + [longest(x) for x in report["fits"]]]
    rows += [[f"batch at {show_tokens(n)}"] + [largest(x, i) for x in report["fits"]] for i, n in enumerate(contexts)]
    title = f"What fits into {memory(fits[0])} ({fits[0]['hardware']}), weights and state"
    return title, ["", *(x["of"] for x in report["fits"])], rows


def rate_table(report: PlanNumbers) -> tuple[str, list[str], Rows]:
    """Return title, headings and rows: the rate of decoding the largest batch at every length, for one machine."""
    rows = [
        [f"at {show_tokens(n)}"] + [rate(x, i) for x in report["fits"]]
        for i, n in enumerate(report["contexts_tokens"])
    ]  # fmt: skip
    title = f"Tokens a second of these batches ({report['fits'][0]['hardware']}), at most"
    return title, ["", *(x["of"] for x in report["fits"])], rows


def rate_note(report: PlanNumbers) -> str:
    """Describe the rates, and those with experts chosen at random."""
    text = "Tokens a second: the largest batch over the least time of its decoding step."
    at = report["contexts_tokens"].index(middle(report))
    shown = [x for x in report["fits"] if x["of"] == report["own"] and x[MOST_RATE][at] is not None]
    if not report["model"]["experts"] or not shown:
        return text
    rates = ", ".join(f"{x['hardware']} {rate(x, at, RANDOM_RATE)}" for x in shown)
    return (
        f"{text} Experts: as if all sequences chose the same; if each chooses at random, at "
        f"{show_tokens(middle(report))} tokens at most: {rates}."
    )


def memory(x: PlanNumbers) -> str:
    return show_rate(x["memory_bytes"], "B")


def longest(x: PlanNumbers) -> str:
    if not x["weights_fit"]:
        return "weights do not fit"
    return "any" if x["any_length_fits"] else show_tokens(x["longest_context_tokens"])


def largest(x: PlanNumbers, at: int) -> str:
    return f"{x['largest_batch'][at]:,}" if x["weights_fit"] else "-"


def rate(x: PlanNumbers, at: int, key: str = MOST_RATE) -> str:
    return "-" if x[key][at] is None else show_number(x[key][at])


def time_rows(report: PlanNumbers) -> tuple[list[str], Rows]:
    """Return headings and rows: every length for one machine, the middle one for several."""
    times = {(x["hardware"], x["tokens"], x["what"]): x for x in report["times"] if x["of"] == report["own"]}
    machines = list(dict.fromkeys(x["hardware"] for x in report["times"]))
    lengths = report["contexts_tokens"] if len(machines) == 1 else [middle(report)]
    rows = []
    for machine in machines:
        for tokens in lengths:
            row = [machine if len(machines) > 1 else show_tokens(tokens)]
            for what in ("prefill", "decode"):
                x = times[machine, tokens, what]
                row += [show_seconds(x["least_seconds"]), x["limit"].removeprefix("memory ")]
            rows.append(row)
    if len(machines) == 1:
        return ["tokens", "prefill", "limit", "decode a token", "limit"], rows
    return ["", f"prefill {show_tokens(lengths[0])}", "limit", "decode a token", "limit"], rows


def time_note(report: PlanNumbers) -> str:
    text = "Least operations at the peak matrix rate, or least bytes at the peak bandwidth, whichever takes longer."
    if report["ranks"] is not None:
        text = f"{text.removesuffix(', whichever takes longer.')} or at the rate of the link, whichever takes longest."
    if not all(x["weights_fit"] for x in report["fits"]):
        text += " Where the weights do not fit: as if they did."
    random = [
        x for x in report["times"]
        if (x["what"], x["of"], x["tokens"]) == ("decode, experts at random", report["own"], middle(report))
    ]  # fmt: skip
    if random and report["batch"] > 1:
        x = random[0]
        text += (
            f" Experts: as if all sequences chose the same; if each chooses at random, {x['hardware']} decodes at "
            f"{middle(report):,} tokens in {show_seconds(x['least_seconds'])} at least."
        )
    return text


def training_title(t: PlanNumbers) -> str:
    precision = "float32" if t["precision"] == "float32" else f"{t['precision']} autocast"
    return f"Training, {t['tokens_per_step']:,} tokens a step on one device, {t['optimizer']}, {precision}"


def training_rows(t: PlanNumbers) -> tuple[list[str], Rows]:
    rows = []
    for name in ("parameters", "gradients", "optimizer", "casts", "activations", "logits"):
        again = t["activations_recomputed_bytes" if name == "activations" else f"{name}_bytes"]
        if t[f"{name}_bytes"] or again:
            rows.append([name, show_bytes(t[f"{name}_bytes"]), show_bytes(again)])
    rows.append(["all", show_bytes(t["total_bytes"]), show_bytes(t["total_recomputed_bytes"])])
    return ["", "all activations kept", "layers recomputed"], rows


def training_note(t: PlanNumbers) -> str:
    times = ", ".join(
        f"{x['hardware']} {show_seconds(x['least_seconds'])} ({x['limit'].removeprefix('memory ')})" for x in t["times"]
    )
    return f"A step on sequences of {t['text_tokens']:,} tokens takes at least: {times}."


def layer_rows(report: PlanNumbers) -> tuple[list[str], Rows]:
    head = ["layer", "mixer", "weights", "recurrent", "convolution", "cache/token"]
    rows = [
        [str(x["index"]), x["rule"]]
        + [show_bytes(x[f"{key}_bytes"]) for key in ("weights", "recurrent", "convolution")]
        + [show_bytes(x["cache_bytes_per_token"])]
        for x in report["layers"]
    ]  # fmt: skip
    return head, rows
