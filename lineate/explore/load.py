"""Recall against load: pairs are written once into memories of equal bytes, and all are queried.

Nothing is trained. The free settings of each memory (rate, decay, ridge, length of keys) are the best of a few, chosen
for every load on other pairs: by the share recalled, then by the error.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from lineate.explore.findings import size
from lineate.explore.memories import RecallSetting, pairs
from lineate.explore.pictures import Numbers, Picture, PictureOptions
from lineate.figures import label_of, line_of
from lineate.layers import MixerKind, linear
from lineate.layers import ttt as ttt_mixers
from lineate.layers.attention import SOFTMAX
from lineate.layers.lact import KIND as LACT
from lineate.layers.least_squares import KIND as LEAST_SQUARES
from lineate.layers.titans import KIND as TITANS
from lineate.memory.lact import lact, lact_state
from lineate.memory.least_squares import least_squares
from lineate.memory.titans import titans, titans_state
from lineate.memory.ttt import ttt
from lineate.system.threads import one_thread
from lineate.torch_ops.tracing import cpu_by_default

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOADS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""How many pairs are written for every key channel of a plain matrix."""

LearnedState = dict[str, Tensor]


@dataclass(frozen=True)
class MemoryUnderLoad:
    """A memory of one head that is queried for every pair written into it; k and v are `b n d`."""

    kind: MixerKind
    """The row of the mixer that has it."""
    answer: Callable[..., tuple[Tensor, LearnedState]]
    """A function of k, v and the setting's numbers that returns the answers and the state that gave them."""
    settings: tuple[tuple[float, ...], ...] = ((),)
    scaled: bool = True
    """Whether an answer has the size of a value."""

    def nbytes(self, channels: int) -> int:
        """Return the bytes of the state."""
        k = torch.zeros(1, 16, 1, channels)
        return sum(x.nbytes for x in self.answer(k, k, *self.settings[0])[1].values())

    def widest(self, budget: int) -> int:
        """Return the most channels whose state has at most `budget` bytes; a float32 matrix needs the fewest bytes."""
        low, high = 2, math.isqrt(budget // 4) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.nbytes(middle) <= budget else (low, middle)
        return low


@cpu_by_default
def compute(options: PictureOptions) -> Numbers:
    """Return errors and shares of right answers of every memory, for every load."""
    channels, trials = (32, 2) if options.quick else (128, 4)
    budget = channels * channels * 4
    setting = RecallSetting(key_dim=channels, trials=trials, seed=options.seed)
    counts = [round(load * channels) for load in LOADS]  # multiples of TTT's chunk
    cache = MemoryUnderLoad(SOFTMAX, partial(_softmax, kept=budget // (2 * channels * 2)))
    found: dict[str, Any] = {}
    with torch.inference_mode(), one_thread():
        for memory in (cache, *MEMORIES):
            width = channels if memory is cache else memory.widest(budget)
            own = replace(setting, key_dim=width)
            rows = [_measure(memory, own, count) for count in counts]
            found[memory.kind.name] = {
                "channels": width,
                "state_bytes": budget if memory is cache else memory.nbytes(width),
                "relative_error": [row[0] for row in rows] if memory.scaled else None,
                "share_recalled": [row[1] for row in rows],
                "setting": [row[2] for row in rows],
            }
    return {
        "units": {"load": "pairs / channels of a plain matrix", "relative_error": "|answer - value| / |value|"},
        "state_bytes": budget, "channels": channels, "trials": trials, "seed": options.seed,
        "similarity": setting.similarity, "load": list(LOADS), "pairs": counts, "memories": found,
    }  # fmt: skip


def _measure(memory: MemoryUnderLoad, setting: RecallSetting, count: int) -> tuple[float, float, list[float]]:
    """Return the error, the share recalled, and the setting that was best on other pairs."""
    chosen = memory.settings[0]
    if len(memory.settings) > 1:
        k, v = pairs(setting, count, torch.Generator().manual_seed(setting.seed + 1))
        scores = {s: _score(memory.answer(k, v, *s)[0], v) for s in memory.settings}
        chosen = max(scores, key=lambda s: (round(scores[s][1], 2), -scores[s][0]))
    k, v = pairs(setting, count, setting.generator())
    return (*_score(memory.answer(k, v, *chosen)[0], v), list(chosen))


def _score(y: Tensor, v: Tensor) -> tuple[float, float]:
    """Return |y - v| / |v| and how often the value nearest by cosine is the right one.

    These are infinity and 0 if y is not finite.
    """
    if not y.isfinite().all():
        return math.inf, 0.0
    y, v = y[:, :, 0], v[:, :, 0]
    nearest = (F.normalize(y, dim=-1) @ F.normalize(v, dim=-1).mT).argmax(-1)
    right = (nearest == torch.arange(v.shape[1])).double().mean()
    return float((y - v).norm() / v.norm()), float(right)


def _full(k: Tensor, value: float) -> Tensor:
    return torch.full(k.shape[:3], value)


def _read(S: Tensor, k: Tensor) -> tuple[Tensor, LearnedState]:
    return (k[:, :, 0] @ S[:, 0]).unsqueeze(2), {"S": S}


def _linear(k: Tensor, v: Tensor) -> tuple[Tensor, LearnedState]:
    return _read(lineate.linear_attention(k, k, v).state, k)


def _gated_linear(k: Tensor, v: Tensor, keep: float) -> tuple[Tensor, LearnedState]:
    return _read(lineate.gated_linear_attention(k, k, v, _full(k, math.log(keep))).state, k)


def _delta(k: Tensor, v: Tensor, rate: float) -> tuple[Tensor, LearnedState]:
    return _read(lineate.delta_rule(k, k, v, _full(k, rate)).state, k)


def _gated_delta(k: Tensor, v: Tensor, rate: float, keep: float) -> tuple[Tensor, LearnedState]:
    return _read(lineate.gated_delta_rule(k, k, v, _full(k, math.log(keep)), _full(k, rate)).state, k)


def _kimi(k: Tensor, v: Tensor, rate: float, keep: float) -> tuple[Tensor, LearnedState]:
    """Kimi Delta Attention whose channels keep between 1 and `keep`, evenly in the logarithm."""
    log_decay = torch.linspace(0, math.log(keep), k.shape[-1]).expand(k.shape)
    return _read(lineate.kimi_delta_attention(k, k, v, log_decay, _full(k, rate)).state, k)


def _least_squares(k: Tensor, v: Tensor, ridge: float) -> tuple[Tensor, LearnedState]:
    state = least_squares(k, k, v, None, ridge=ridge)[1]
    return _read(state["S"], k)[0], state


def _softmax(k: Tensor, v: Tensor, kept: int) -> tuple[Tensor, LearnedState]:
    """Softmax attention over a cache of the last `kept` pairs in bfloat16."""
    cache = {"keys": k[:, -kept:].bfloat16(), "values": v[:, -kept:].bfloat16()}
    q, keys, values = (x.float().transpose(1, 2) for x in (k, *cache.values()))
    return F.scaled_dot_product_attention(q, keys, values, scale=RecallSetting.softmax_scale).transpose(1, 2), cache


def _first_weights(sizes: Sequence[int]) -> list[Tensor]:
    """Return `1 n m` for each pair of neighbours in sizes, always the same, with deviation 1 / sqrt(n)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, m, generator=generator) * n**-0.5 for n, m in pairwise(sizes)]


def _ttt(k: Tensor, v: Tensor, rate: float, length: float, expand: int) -> tuple[Tensor, LearnedState]:
    """TTT in chunks of 4.

    Values have the length of its norm's output, and keys are longer, because its bias affects all keys equally.
    """
    d = k.shape[-1]
    state: LearnedState = {}
    for i, weight in enumerate(_first_weights([d, *([expand * d] if expand else []), d]), 1):
        state |= {f"weight{i}": weight, f"bias{i}": torch.zeros(1, weight.shape[-1])}
    k, norm, size = length * k, (torch.ones(1, d), torch.zeros(1, d)), d**0.5
    state = ttt(k, k, size * v, _full(k, rate), *norm, state, chunk=4)[1]
    return ttt(k, k, k, _full(k, 0.0), *norm, state, chunk=4)[0] / size, state


def _titans(k: Tensor, v: Tensor, rate: float) -> tuple[Tensor, LearnedState]:
    d = k.shape[-1]
    none = _full(k, 0.0)
    state = titans(k, k, v, _full(k, rate), none, none, titans_state([torch.zeros(1, d, d)], len(k)), chunk=4)[1]
    held = {name: x.clone() for name, x in state.items()}
    return titans(k, k, k, none, none, none, state, chunk=4)[0], held


def _lact(k: Tensor, v: Tensor, rate: float, muon: float) -> tuple[Tensor, LearnedState]:
    d, rates = k.shape[-1], _full(k, rate)[..., None].expand(*k.shape[:3], 3)
    first = lact_state(_first_weights([d] * 4), len(k))
    state = lact(k, k, d**0.5 * v, rates, _full(k, 0.0), first, chunk=min(16, k.shape[1]), muon=muon == 1)[1]
    return lact(k, k, k, torch.zeros_like(rates), None, state, chunk=2**40)[0], state


def _grid(*choices: tuple[float, ...]) -> tuple[tuple[float, ...], ...]:
    return tuple(product(*choices))


MEMORIES = (
    MemoryUnderLoad(linear.LINEAR_KIND, _linear),
    MemoryUnderLoad(linear.GATED_LINEAR_KIND, _gated_linear, _grid((0.9999, 0.998, 0.99, 0.95))),
    MemoryUnderLoad(linear.DELTA_KIND, _delta, _grid((1.0, 0.6, 0.3, 0.1, 0.03))),
    MemoryUnderLoad(linear.GATED_DELTA_KIND, _gated_delta, _grid((1.0, 0.6, 0.3, 0.1), (0.9999, 0.99))),
    MemoryUnderLoad(linear.KIMI_DELTA_KIND, _kimi, _grid((1.0, 0.6, 0.3, 0.1), (0.9999, 0.98))),
    MemoryUnderLoad(LEAST_SQUARES, _least_squares, ((1e-1,), (1e-4,))),
    MemoryUnderLoad(ttt_mixers.TTT_LINEAR_KIND, partial(_ttt, expand=0), ((0.3, 6.0), (0.1, 6.0), (0.03, 6.0))),
    MemoryUnderLoad(ttt_mixers.TTT_MLP_KIND, partial(_ttt, expand=4), ((0.05, 3.0), (0.1, 6.0))),
    MemoryUnderLoad(TITANS, _titans, _grid((1.0, 0.5, 0.2, 0.05))),
    MemoryUnderLoad(LACT, _lact, ((1.0, 1), (1.0, 0), (0.3, 0)), scaled=False),
)


MATRICES = (
    "softmax_attention", "linear_attention", "gated_linear_attention", "delta_rule", "gated_delta_rule",
    "kimi_delta_attention", "least_squares",
)  # fmt: skip
OTHERS = ("delta_rule", "ttt_linear", "ttt_mlp", "titans", "lact")


def draw(numbers: Numbers) -> "Figure":
    """Draw errors on the left and shares recalled on the right; matrices and a cache above, models that learn below."""
    from matplotlib import pyplot as plt

    memories, loads = numbers["memories"], [f"{x:g}" if x >= 1 else f"1/{1 / x:g}" for x in numbers["load"]]
    figure = plt.figure(figsize=(8, 9))
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.08, 1))
    for part, names in zip(parts, (MATRICES, OTHERS), strict=True):
        left, right = part.subplots(1, 2)
        for axes, what in ((left, "relative_error"), (right, "share_recalled")):
            _lines(axes, numbers["load"], {name: memories[name][what] for name in names})
            axes.set_xscale("log", base=2)
            axes.set_xticks(numbers["load"], loads)
            axes.minorticks_off()
            axes.set_xlabel(f"load: pairs / {numbers['channels']} channels")
        left.axhline(1, color="gray", linewidth=1, zorder=0)
        left.annotate(
            "no answer at all", (0.01, 1), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", color="#555555", fontsize="small",
        )  # fmt: skip
        left.set(ylabel="relative error of all pairs", ylim=(-0.04, None))
        right.set(ylabel="share of pairs recalled", ylim=(-0.03, 1.05))
        labels = [_label(name, numbers) for name in names]
        part.legend(right.get_lines(), labels, loc="outside lower center", ncols=3)
        if names is MATRICES:
            _title_matrices(left, right, numbers)
        else:
            _title_others(left, right, numbers)
    figure.suptitle(
        f"{size(numbers['state_bytes'])} of state each, in brackets the channels that fit; random pairs, keys of mean "
        f"cosine {numbers['similarity']:g}",
        fontsize="medium",
    )
    return figure


def _label(name: str, numbers: Numbers) -> str:
    if name == "softmax_attention":
        return f"softmax, last {numbers['state_bytes'] // (2 * 2 * numbers['channels'])} pairs"
    return f"{label_of(name)} ({numbers['memories'][name]['channels']})"


def _lines(axes: "Axes", load: list[float], lines: dict[str, list[float | None] | None]) -> None:
    for name, values in lines.items():
        shown = [math.nan] * len(load) if values is None else [math.nan if x is None else x for x in values]
        axes.plot(load, shown, **line_of(name), label=label_of(name))


def _title_matrices(left: "Axes", right: "Axes", numbers: Numbers) -> None:
    error, share = ({name: memory[what] for name, memory in numbers["memories"].items()}
                    for what in ("relative_error", "share_recalled"))  # fmt: skip
    last = f"{numbers['load'][-1]:g}"
    left.set_title(
        f"Error at load {last}: {error['linear_attention'][-1]:.1f} when adding,\n{error['delta_rule'][-1]:.2f} when "
        f"correcting, {error['least_squares'][-1]:.2f} least squares"
    )
    right.set_title(
        f"Recalled at load {last}: {share['linear_attention'][-1]:.0%} when adding,\n{share['delta_rule'][-1]:.0%} "
        f"when correcting, {share['softmax_attention'][-1]:.0%} by a cache"
    )


def _title_others(left: "Axes", right: "Axes", numbers: Numbers) -> None:
    """Set the titles of the memories that learn, at the load of 1 or the nearest one."""
    at = min(range(len(numbers["load"])), key=lambda i: abs(math.log(numbers["load"][i])))
    share = {name: numbers["memories"][name]["share_recalled"][at] for name in OTHERS}
    best = max(OTHERS[1:], key=lambda name: share[name])
    load = f"{numbers['load'][at]:g}"
    left.set_title("Memories that learn by gradient steps,\nand DeltaNet again (LaCT has no scale)")
    right.set_title(
        f"Recalled at load {load}: {share['delta_rule']:.0%} by DeltaNet,\n{share[best]:.0%} by {label_of(best)}, the "
        "best of the others"
    )


PICTURE = Picture(
    "recall",
    "Recall against load",
    "Recall of every rule and memory at equal bytes of state, as more pairs are written.",
    compute,
    draw,
    uses=("seed", "quick"),
)
