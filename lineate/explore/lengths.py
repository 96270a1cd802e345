"""Time and memory against the length of the text, measured now on this machine."""

import platform
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from lineate.explore.cost import CostSetting, measure_cost
from lineate.explore.findings import size
from lineate.explore.forgetting import number
from lineate.explore.pictures import Numbers, Picture, PictureOptions
from lineate.system.threads import one_thread
from lineate.torch_ops.tracing import cpu_by_default

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_TOKENS, MOST_TOKENS = 256, 2**20


@cpu_by_default
def compute(options: PictureOptions) -> Numbers:
    """Measure the demo's last scene, up to `tokens` tokens; lengths that would take too long are skipped."""
    setting = CostSetting(seed=options.seed, seconds=10.0)
    if options.quick:
        setting = replace(setting, head_dim=32, lengths=(FEWEST_TOKENS, 1024, 4096), rounds=3, decode_rounds=2)
    if options.tokens is not None:
        if not 4 * FEWEST_TOKENS <= options.tokens <= MOST_TOKENS:
            raise ValueError(
                f"--tokens must be {4 * FEWEST_TOKENS} .. {MOST_TOKENS} for cost, the longest text, "
                f"got {options.tokens}"
            )
        lengths = [options.tokens]
        while lengths[0] >= 4 * FEWEST_TOKENS:
            lengths.insert(0, lengths[0] // 4)
        setting = replace(setting, lengths=tuple(lengths))
    with one_thread():
        found = asdict(measure_cost(setting))
    units = {"bytes": "float32 state, bfloat16 cache", "lengths": "tokens"}
    return found | {"units": units, "machine": platform.machine(), "torch": torch.__version__, "seed": options.seed}


def draw(numbers: Numbers) -> "Figure":
    """Draw bytes of state, time of the next token and time of reading a token, against the length of the text."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator

    from lineate.figures import label_of, line_of

    lengths = numbers["lengths"]
    first, last = lengths[0], lengths[-1]
    figure, ((held, words), (decode, prefill)) = plt.subplots(2, 2, figsize=(8, 7.4))
    for axes, what in ((held, "bytes"), (decode, "decode_microseconds"), (prefill, "prefill_microseconds")):
        for rule, values in numbers[what].items():
            axes.plot(lengths, values, **line_of(rule), label=label_of(rule))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2 if axes is held else 10)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.yaxis.set_major_locator(LogLocator(4) if axes is held else LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _, own=axes: size(y) if own is held else f"{y:g}"))
        axes.minorticks_off()
    fixed, cache = numbers["bytes"]["linear_attention"], numbers["bytes"]["softmax_attention"]
    held.set(xlabel="tokens of text", ylabel="bytes of state", ylim=(fixed[0] / 3, None))
    held.annotate("all five of fixed size", (first, fixed[0]), xytext=(0, -16), textcoords="offset points")
    held.set_title(f"State at {last} tokens: {size(fixed[-1])},\na cache: {size(cache[-1])}")
    for axes, what, title, xlabel in (
        (decode, "decode_microseconds", "The next token", "tokens before it"),
        (prefill, "prefill_microseconds", "Reading", "tokens of text"),
    ):
        softmax, kimi = (numbers[what][rule] for rule in ("softmax_attention", "kimi_delta_attention"))
        axes.set(xlabel=xlabel, ylabel="microseconds a token")
        axes.set_title(
            f"{title}, {first} to {last} tokens:\nsoftmax x{number(softmax[-1] / softmax[0])}, "
            f"Kimi Delta x{number(kimi[-1] / kimi[0])}"
        )
    words.axis("off")
    words.legend(*held.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0, 1))
    words.text(
        0, 0,
        f"one layer, {numbers['heads']} heads of {numbers['head_dim']} channels\nCPU ({numbers['machine']}), "
        f"{numbers['threads']} thread, medians\nstate float32, cache bfloat16;\ntimes with both in float32",
        fontsize="small", color="#555555", va="bottom", transform=words.transAxes,
    )  # fmt: skip
    return figure


PICTURE = Picture(
    "cost",
    "Time and memory against length",
    "Bytes of state, time of the next token and of reading, for every rule and softmax attention, measured now.",
    compute,
    draw,
    uses=("tokens", "seed", "quick"),
)
