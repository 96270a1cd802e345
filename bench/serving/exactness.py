"""Whether a cache of states, or other clients, ever change an answer: tokens and log-probabilities, and what they cost.

    python -m bench.serving.exactness [--device cuda] [--prompts 40] [--json FILE]

For each family and format of weights, a random model of its shape answers three requests that begin alike: a prompt P
with one token, P + X, and the next turn, P + X + answer + Y. The reference reads every prompt whole, in an engine with
one row and without a cache. It is compared with an engine of one row with a cache, and with one of eight rows with a
cache, to which all clients send at once. Tokens are drawn greedily and from a seed.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.timing import cpu_model, show
from lineate.generation.choice import Sampling
from lineate.models import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    preset,
)  # fmt: skip
from lineate.quantised.which import shrink
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Completion, Request

VOCAB, HIDDEN, NEW, CONTEXT = 512, 256, 24, 1024
SAMPLINGS = {"greedy": Sampling(temperature=0), "seeded": Sampling(temperature=1.0, seed=7)}
FORMS = ("float32", "bfloat16", "float16", "int8", "int4")
"""bfloat16 is the dtype of the whole model; the others are formats of its weights next to float32."""


def configs() -> dict[str, HybridConfig]:
    """Return the shape of each family with few channels and layers: its mixers, norms, experts and router."""
    small = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layers": 4, "max_position": CONTEXT}
    linear = LinearConfig(2, 4, 64, 64)
    softmax = AttentionConfig(4, 2, 64, rotary_dim=16, rope_theta=1e7)
    experts = ExpertsConfig(16, 4, 64, shared_size=64)
    names = ("kimi-linear-48b", "qwen3-next-80b", "qwen3-5-27b", "olmo-hybrid-7b")
    kimi, qwen_next, qwen, olmo = (preset(name) for name in names)
    return {
        "Kimi Linear": replace(
            kimi, **small, pattern="KKKM", feed=FeedConfig(512),
            linear=replace(linear, heads=4, norm_eps=1e-5, gate_activation="sigmoid"),
            latent=LatentConfig(4, rank=64, nope_dim=32, rope_dim=16, value_dim=32),
            experts=replace(experts, scores="sigmoid", scale=2.446),
        ),
        "Qwen3-Next": replace(
            qwen_next, **small, linear=linear, attention=softmax, experts=replace(experts, shared_gate=True)
        ),
        "Qwen3.5": replace(qwen, **small, linear=linear, attention=softmax, feed=FeedConfig(512)),
        "OLMo-Hybrid": replace(
            olmo, **small, linear=LinearConfig(4, 4, 48, 96, beta_scale=2.0, norm_eps=1e-5), feed=FeedConfig(512),
            attention=AttentionConfig(4, 4, 64, gated=False, qk_norm="full"),
        ),
    }  # fmt: skip


def make_model(config: HybridConfig, form: str, device: str) -> HybridLM:
    """Return a random model whose layers matter: matrices are enlarged and norms are not 1."""
    torch.manual_seed(0)
    model = HybridLM(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" in name:
                x.uniform_(-0.5, 0.5) if config.zero_centred_norm and "mixer.norm" not in name else x.uniform_(0.5, 1.5)
            elif x.dim() >= 2 and "conv" not in name:
                x.mul_(3)
    if form == "bfloat16" or device == "cuda":
        model = model.to(torch.bfloat16)
    model = model.to(device)
    if form not in ("float32", "bfloat16"):
        shrink(model, form)
    return model


@dataclass
class Texts:
    """The texts of one client.

    Args:
        prompt: P.
        more: X.
        turn: Y.
    """

    prompt: tuple[int, ...]
    more: tuple[int, ...]
    turn: tuple[int, ...]


def texts(count: int) -> list[Texts]:
    """Return as many clients, with prompts of 10 to 400 tokens."""
    drawn = torch.Generator().manual_seed(5)

    def some(least: int, most: int) -> tuple[int, ...]:
        length = int(torch.randint(least, most, (), generator=drawn))
        return tuple(torch.randint(VOCAB, (length,), generator=drawn).tolist())

    return [Texts(some(10, 400), some(1, 40), some(1, 40)) for _ in range(count)]


class Clients:
    """An engine and the answers that it gave.

    Args:
        model: The model.
        rows: The rows of the engine; with one, a client waits for the answer before the next asks.
        cached: Whether there is a cache.
        spacing: The tokens of a piece.
    """

    def __init__(self, model: HybridLM, rows: int, cached: bool, spacing: int) -> None:
        cache = StateCache(2**30, spacing) if cached else None
        self.engine = Engine(model, slots=rows, context=CONTEXT, spacing=spacing, cache=cache)
        self.rows = rows
        self.seconds = 0.0
        self.answers: list[Completion] = []

    def ask(self, prompts: list[tuple[int, ...]], sampling: Sampling, new: int) -> list[Completion]:
        """Return the answers to one prompt of each client."""
        requests = [Request(ids, sampling, max_new_tokens=new, logprobs=0) for ids in prompts]
        found: list[Completion] = []
        for at in range(0, len(requests), 1 if self.rows == 1 else len(requests)):
            begun = time.perf_counter()
            handles = [self.engine.submit(x) for x in requests[at : at + (1 if self.rows == 1 else len(requests))]]
            while any(len(handle.ended) < 1 for handle in handles):
                self.engine.step()
            self.seconds += time.perf_counter() - begun
            found += [handle.result(0)[0] for handle in handles]
            while self.engine.step():  # answers are read again while no request waits
                pass
        self.answers += found
        return found


def compare(model: HybridLM, given: list[Texts], sampling: Sampling, spacing: int) -> dict[str, float]:
    """Run all requests with the reference and the others; return what differs, what was reused, and the seconds."""
    sides = {
        "whole": Clients(model, 1, False, spacing),
        "cached": Clients(model, 1, True, spacing),
        "8 clients": Clients(model, 8, True, spacing),
    }
    turns: list[list[tuple[int, ...]]] = []
    for name, side in sides.items():
        side.ask([x.prompt for x in given], sampling, 1)
        second = [(*x.prompt, *x.more) for x in given]
        said = side.ask(second, sampling, NEW)
        if name == "whole":  # the same conversation for all sides, whatever they answered
            turns = [second, [(*ids, *x.tokens, *y.turn) for ids, x, y in zip(second, said, given, strict=True)]]
        side.ask(turns[1], sampling, NEW)
    whole = sides["whole"]
    asked = sum(len(ids) for ids in (*turns[0], *turns[1]))
    found: dict[str, float] = {"answers": len(whole.answers), "seconds whole": whole.seconds}
    for name, side in list(sides.items())[1:]:
        pairs = list(zip(side.answers, whole.answers, strict=True))
        found[f"{name}: other tokens"] = sum(x.tokens != y.tokens for x, y in pairs)
        found[f"{name}: logprob"] = max(
            abs(a.logprob - b.logprob)
            for x, y in pairs
            for a, b in zip(x.logprobs, y.logprobs, strict=True)
            if x.tokens == y.tokens
        )
        found[f"{name}: reused"] = sum(x.cached_tokens for x in side.answers[len(given) :])
        found[f"{name}: seconds"] = side.seconds
    found["asked"] = asked
    found["read again"] = getattr(sides["cached"].engine.stats, "reread_tokens", 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--spacing", type=int, default=None, help="tokens of a piece; 128 on a CPU, 1024 on a GPU")
    parser.add_argument("--families", default=None, help="names with commas between; all by default")
    parser.add_argument("--forms", default=",".join(FORMS), help="formats with commas between")
    parser.add_argument("--samplings", default=",".join(SAMPLINGS))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    if asked.device == "cpu":
        torch.set_num_threads(1)
    spacing = asked.spacing or (1024 if asked.device == "cuda" else 128)
    rows, wanted = [], None if asked.families is None else asked.families.split(",")
    given = texts(asked.prompts)
    for family, config in configs().items():
        for form in asked.forms.split(",") if wanted is None or family in wanted else ():
            model = make_model(config, form, asked.device)
            for name in asked.samplings.split(","):
                rows.append({"family": family, "form": form, "tokens": name} | compare(
                    model, given, SAMPLINGS[name], spacing
                ))  # fmt: skip
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    names = ["other tokens", "logprob", "reused"]
    head = ["family", "form", "tokens", *(f"{side}: {x}" for side in ("cached", "8 clients") for x in names), "time"]
    table = [
        [
            *(str(row[x]) for x in head[:3]),
            *(_shown(x, row) for x in head[3:-1]),
            f"{row['cached: seconds'] / row['seconds whole']:.2f}",
        ]
        for row in rows
    ]
    show(f"{asked.prompts} clients, pieces of {spacing}, {asked.device}", head, table)
    if asked.json is not None:
        about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "torch": torch.__version__, "spacing": spacing}
        machine = torch.cuda.get_device_name() if asked.device == "cuda" else cpu_model()
        asked.json.write_text(json.dumps(about | {"machine": machine, "rows": rows}, indent=1) + "\n")


def _shown(name: str, row: dict[str, object]) -> str:
    value = row[name]
    assert isinstance(value, int | float)
    if name.endswith("reused"):
        assert isinstance(row["asked"], int | float)
        return f"{value / row['asked']:.0%}"
    return f"{value:.1e}" if name.endswith("logprob") and value else f"{value:.0f}"


if __name__ == "__main__":
    main()
