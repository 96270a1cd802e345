"""The view "Learning": memories that learn while they read, and their prediction of each value before it is written.

A memory of `lineate.memory` reads pairs of key and value, one a token. Before each token is written, the memory is
queried for its value; the distance between answer and value is the loss that the chart shows. The optimiser, the rate,
the momentum, the chunk and the forgetting can be exchanged; model and loss are the memory's own. Everything runs
through `run_head`, the reference by autograd.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.figures import narrow_label_of
from lineate.layers import MixerKind
from lineate.layers.lact import KIND as LACT
from lineate.layers.least_squares import KIND as LEAST_SQUARES
from lineate.layers.linear import DELTA_KIND
from lineate.layers.titans import KIND as TITANS
from lineate.layers.ttt import TTT_LINEAR_KIND, TTT_MLP_KIND
from lineate.memory import MATRIX, MEMORY_RULES, MemoryRule, run_head
from lineate.memory.parts import NamedWeights
from lineate.memory.reference import initial_state
from lineate.torch_ops.tracing import cpu_by_default
from lineate.web.errors import invalid
from lineate.web.fields import Fields

ADAM = "adam"
OPTIMISERS = ("sgd", "momentum", "positioned sgd", "muon", "least squares", ADAM)
"""Those of `lineate.memory` that have a name, and one that is a function (see `adam`)."""
MOST_RATE, MOST_MOMENTUM = 4.0, 0.99
FEWEST_TOKENS, MOST_TOKENS = 16, 256
CHANNELS = (4, 8, 16)
CHUNKS = (1, 2, 4, 8, 16, 32)
MOST_SEED = 99
FARTHEST = 1e3
"""Larger losses are not sent: the memory has diverged."""
RIDGE = 0.01
"""The initial ridge of least squares."""
PAIRS, MAP, TURN = "pairs", "map", "turn"
TASKS = {
    PAIRS: "a few pairs, repeated",
    MAP: "new keys, values of one linear map",
    TURN: "as before, another map from half on",
}
"""What the memories read."""


@dataclass(frozen=True)
class Learner:
    """A memory of the view."""

    kind: MixerKind
    """The row of the mixer that has it."""
    rule: MemoryRule
    """Its row in MEMORY_RULES."""
    rates: dict[str, float]
    """The initial rate for each possible optimiser; its own one comes first."""
    weights: Callable[[int], NamedWeights]
    """The initial weights for a number of channels."""
    chunked: bool = True
    """Whether its tokens come in chunks; DeltaNet and least squares take every token."""
    stretched: bool = False
    """Whether values have length sqrt(channels), as the output of a norm or of random weights."""
    scaled: bool = True
    """Whether its answers have the size of values: a memory that learns a correlation has only their direction."""

    @property
    def own(self) -> str:
        """The optimiser of its row."""
        assert isinstance(self.rule.optimiser, str)
        return self.rule.optimiser


def adam(gradients: NamedWeights, carried: NamedWeights, gates: NamedWeights) -> tuple[NamedWeights, NamedWeights]:
    """Take Adam's steps, with betas 0.9 and 0.99: an example of an optimiser that is a function.

    Args:
        gradients: Of the learned weights, by name.
        carried: The means of the gradients by name, those of their squares, and the count of steps.
        gates: The gates of the token, of which `rate` is used.
    """
    first = next(iter(gradients.values()))
    count = carried.get("count", first.new_zeros(())) + 1
    found: NamedWeights = {"count": count}
    steps: NamedWeights = {}
    for name, x in gradients.items():
        mean = found[name] = 0.9 * carried[name] + 0.1 * x
        square = found[f"{name} squared"] = 0.99 * carried.get(f"{name} squared", torch.zeros_like(x)) + 0.01 * x * x
        mean, square = mean / (1 - 0.9**count), square / (1 - 0.99**count)
        steps[name] = -gates["rate"] * mean / (square.sqrt() + 1e-8)
    return steps, found


def _drawn(**shapes: Callable[[int], tuple[int, ...]]) -> Callable[[int], NamedWeights]:
    """Return a function that draws fixed random weights for a number of channels; vectors are 0, gamma is 1."""

    def draw(channels: int) -> NamedWeights:
        generator = torch.Generator().manual_seed(0)
        found = {}
        for name, shape in shapes.items():
            size = shape(channels)
            if len(size) == 1:
                found[name] = torch.full(size, float(name == "gamma"))
            else:
                fan_in = size[1] if name in ("W0", "W1", "W2") and "W0" in shapes else size[0]  # SwiGLU: W x
                found[name] = torch.randn(size, generator=generator) * fan_in**-0.5
        return found

    return draw


def _zeros(channels: int) -> NamedWeights:
    return {"S": torch.zeros(channels, channels)}


_ALL = (
    Learner(
        DELTA_KIND, MEMORY_RULES["DeltaNet"],
        {"sgd": 1.0, "momentum": 0.3, "positioned sgd": 1.0, "muon": 1.0, "least squares": 1.0, ADAM: 0.05},
        _zeros, chunked=False,
    ),
    Learner(
        LEAST_SQUARES, MEMORY_RULES["least squares"],
        {"least squares": 1.0, "sgd": 1.0, "momentum": 0.3, "positioned sgd": 1.0, "muon": 1.0, ADAM: 0.05},
        _zeros, chunked=False,
    ),
    Learner(
        TTT_LINEAR_KIND, MEMORY_RULES["TTT-Linear"],
        {"positioned sgd": 1.0, "sgd": 0.1, "momentum": 0.05, ADAM: 0.1},
        _drawn(W=lambda d: (d, d), b=lambda d: (d,), gamma=lambda d: (d,), beta=lambda d: (d,)), stretched=True,
    ),
    Learner(
        TTT_MLP_KIND, MEMORY_RULES["TTT-MLP"],
        {"positioned sgd": 0.05, "sgd": 0.02, "momentum": 0.01, ADAM: 0.02},
        _drawn(W1=lambda d: (d, 4 * d), b1=lambda d: (4 * d,), W2=lambda d: (4 * d, d), b2=lambda d: (d,),
               gamma=lambda d: (d,), beta=lambda d: (d,)), stretched=True,
    ),
    Learner(
        TITANS, MEMORY_RULES["Titans"],
        {"momentum": 0.3, "sgd": 0.5, "positioned sgd": 2.0, "muon": 1.0, "least squares": 1.0, ADAM: 0.05},
        _zeros,
    ),
    Learner(
        LACT, MEMORY_RULES["LaCT"],
        {"muon": 1.0, "sgd": 0.01, "momentum": 0.01, "positioned sgd": 0.1, ADAM: 0.01},
        _drawn(W0=lambda d: (d, d), W1=lambda d: (d, d), W2=lambda d: (d, d)), stretched=True, scaled=False,
    ),
)  # fmt: skip
LEARNERS = {each.kind.name: each for each in _ALL}
"""The memories by the names of their mixers; the first rate of each is that of its own optimiser."""


@dataclass(frozen=True)
class LearningRequest:
    """A request of the page: one memory on one task."""

    memory: str
    """A name of LEARNERS."""
    optimiser: str
    """One of its optimisers."""
    rate: float
    """The rate of a step."""
    momentum: float
    """For momentum and muon: the factor of the last step."""
    decay: float
    """The decay of the weights at each token, for sgd, momentum, least squares and adam."""
    chunk: int
    """Tokens whose gradients are taken at the same weights."""
    task: str
    """What it reads."""
    tokens: int
    """How many tokens."""
    channels: int
    """Channels of keys and values."""
    seed: int
    """The seed of all keys and values."""


def read_request(body: Fields) -> LearningRequest:
    """Read a body; raise ApiError with the name of the first field that is wrong.

    Args:
        body: The fields of the body.
    """
    body.needed("memory", f"one of {', '.join(LEARNERS)}")
    memory = body.word("memory", tuple(LEARNERS)) or ""
    learner = LEARNERS[memory]
    optimiser = body.word("optimiser", OPTIMISERS) or learner.own
    if optimiser not in learner.rates:
        why = "needs a plain matrix" if optimiser == "least squares" else "needs weights that are all matrices"
        raise invalid(
            "optimiser",
            f"optimiser must be one of {', '.join(learner.rates)} for {memory}, got {optimiser}, which {why}",
            "invalid_value",
        )
    asked = LearningRequest(
        memory, optimiser,
        rate=body.number("rate", learner.rates[optimiser], 0.0, MOST_RATE),
        momentum=body.number("momentum", 0.6, 0.0, MOST_MOMENTUM),
        decay=body.number("decay", 1.0, 0.5, 1.0),
        chunk=_among(body, "chunk", CHUNKS, 4),
        task=body.word("task", tuple(TASKS)) or PAIRS,
        tokens=body.whole("tokens", FEWEST_TOKENS, MOST_TOKENS) or 96,
        channels=_among(body, "channels", CHANNELS, 8),
        seed=body.whole("seed", 0, MOST_SEED) or 0,
    )  # fmt: skip
    body.finish()
    return asked


def _among(body: Fields, name: str, known: tuple[int, ...], usual: int) -> int:
    found = body.whole(name, known[0], known[-1]) or usual
    if found not in known:
        raise body.wrong(name, f"one of {', '.join(map(str, known))}")
    return found


def describe() -> dict[str, Any]:
    """Return the choices of the page: memories with their optimisers, tasks, and the limits of each field."""
    return {
        "memories": [
            {
                "name": name, "label": each.kind.label, "short": narrow_label_of(name),
                "letter": each.kind.letter, "color": each.kind.look.color,
                "model": each.rule.model.name, "loss": each.rule.loss.__name__.replace("_", " "),
                "rates": each.rates, "chunked": each.chunked, "scaled": each.scaled,
            }
            for name, each in LEARNERS.items()
        ],
        "tasks": [{"name": name, "label": label} for name, label in TASKS.items()],
        "limits": {
            "tokens": [FEWEST_TOKENS, MOST_TOKENS], "channels": list(CHANNELS), "chunk": list(CHUNKS),
            "rate": MOST_RATE, "momentum": MOST_MOMENTUM, "seed": MOST_SEED,
        },
    }  # fmt: skip


@lru_cache(maxsize=64)
@torch.no_grad()
@cpu_by_default
def run_learning(asked: LearningRequest) -> dict[str, Any]:
    """Return the losses of one memory: the distance of its answer from the value before each token is written.

    Args:
        asked: The memory, its optimiser, and its sequence.
    """
    learner = LEARNERS[asked.memory]
    k, v = pairs(asked)
    if learner.stretched:
        v = v * asked.channels**0.5
    rule, gates = _rule(learner, asked), _gates(asked)
    weights = learner.weights(asked.channels)
    state = initial_state(rule, weights, asked.channels, RIDGE)
    errors: list[float | None] = []
    angles: list[float | None] = []
    for i in range(asked.tokens):
        answer = rule.model(state.weights, k[i])
        error = float((answer - v[i]).square().sum() / v[i].square().sum())
        if not error < FARTHEST:  # NaN too
            break
        errors.append(round(error, 4))
        angles.append(round(1 - float(F.cosine_similarity(answer, v[i], dim=0)), 4))
        one = slice(i, i + 1)
        now = {name: x[one] if name != "position" else x for name, x in gates.items()}
        _, state = run_head(rule, k[one], k[one], v[one], now, weights, state, RIDGE)
    left = [None] * (asked.tokens - len(errors))
    return {
        "memory": asked.memory, "optimiser": asked.optimiser, "rate": asked.rate,
        "errors": errors + left if learner.scaled else None, "angles": angles + left,
        "ran_away_at": len(errors) + 1 if left else None,
    }  # fmt: skip


def pairs(asked: LearningRequest) -> tuple[Tensor, Tensor]:
    """Return keys and values `t d` of length 1.

    Args:
        asked: The task, how many tokens and channels, and the seed.
    """
    generator = torch.Generator().manual_seed(asked.seed)
    tokens, channels = asked.tokens, asked.channels

    def unit(count: int) -> Tensor:
        return F.normalize(torch.randn(count, channels, generator=generator), dim=-1)

    if asked.task == PAIRS:
        count = max(2, channels // 2)
        keys, values = unit(count), unit(count)
        rounds = math.ceil(tokens / count)
        order = torch.cat([torch.randperm(count, generator=generator) for _ in range(rounds)])[:tokens]
        return keys[order], values[order]
    keys = unit(tokens)
    maps = [torch.linalg.qr(torch.randn(channels, channels, generator=generator)).Q for _ in range(2)]
    turn = tokens // 2 if asked.task == TURN else tokens
    return keys, torch.cat((keys[:turn] @ maps[0], keys[turn:] @ maps[1]))


def _rule(learner: Learner, asked: LearningRequest) -> MemoryRule:
    """Return the memory's row with the chosen optimiser and chunk."""
    exact = asked.optimiser == "least squares" or (not learner.chunked and asked.optimiser != "muon")
    optimiser: Any = adam if asked.optimiser == ADAM else asked.optimiser
    assert asked.optimiser != "least squares" or learner.rule.model is MATRIX
    renormalises = learner.rule.renormalises and asked.optimiser == "muon"
    return replace(learner.rule, optimiser=optimiser, chunk=1 if exact else asked.chunk, renormalises=renormalises)


def _gates(asked: LearningRequest) -> dict[str, Tensor]:
    def same(value: float) -> Tensor:
        return torch.full((asked.tokens,), value)

    found = {"rate": same(asked.rate)}
    if asked.optimiser in ("momentum", "muon"):
        found["momentum"] = same(asked.momentum)
    if asked.decay < 1 and asked.optimiser not in ("positioned sgd", "muon"):
        found["log_decay"] = same(math.log(asked.decay))
    return found
