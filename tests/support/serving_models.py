"""Tiny models of many patterns, prompts, and what a request yields when it has an engine to itself."""

from dataclasses import replace
from functools import cache

import torch

from lineate.generation.choice import Sampling
from lineate.models import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
    RwkvConfig,
)
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Request
from tests.support.small_models import random_model

VOCAB, SPACING = 61, 64
CONFIG = HybridConfig(
    vocab_size=VOCAB, hidden_size=32, n_layers=4, pattern="GGGA",
    linear=LinearConfig(2, 4, 16, 16),
    attention=AttentionConfig(4, 2, 16, rotary_dim=8),
    latent=LatentConfig(4, rank=24, nope_dim=16, rope_dim=8, value_dim=16, rope_theta=10000.0),
    mamba=MambaConfig(4, 16, 16, groups=2),
    memory=MemoryConfig(heads=2, head_dim=16),
    rwkv=RwkvConfig(2, 16, decay_rank=8, rate_rank=8, value_rank=8, gate_rank=8),
    feed=FeedConfig(48), zero_centred_norm=True,
)  # fmt: skip
EXPERTS = ExpertsConfig(8, 2, 16, shared_size=16, shared_gate=True)
PATTERNS = {
    "GGGA": CONFIG,
    "KKKM, experts": replace(CONFIG, pattern="KKKM", experts=EXPERTS, dense_layers=(0,), tie_embeddings=True),
    "LRDG": replace(CONFIG, pattern="LRDG"),
    "TPNC": replace(CONFIG, pattern="TPNC"),
    "SSA": replace(CONFIG, pattern="SSA", n_layers=3),
    "VVA": replace(CONFIG, pattern="VVA", n_layers=3),
    "EA": replace(CONFIG, pattern="EA", n_layers=2),
    "UJA": replace(CONFIG, pattern="UJA", n_layers=3),
    "HOA": replace(CONFIG, pattern="HOA", n_layers=3, linear=LinearConfig(2, 4, 16, 16, rope_theta=100.0)),
    "DKA, rates": replace(CONFIG, pattern="DKA", n_layers=3, linear=LinearConfig(2, 4, 16, 16, rate="exact")),
    "QQA": replace(CONFIG, pattern="QQA", n_layers=3),
    "IFA": replace(CONFIG, pattern="IFA", n_layers=3),
    "attention alone": replace(CONFIG, pattern="A", n_layers=2),
}

SMALL = {pattern: replace(CONFIG, pattern=pattern, n_layers=2) for pattern in ("GA", "KM", "TE", "PL")}
"""Two layers each, for tests that make many steps."""


@cache
def model(pattern: str) -> HybridLM:
    return random_model((PATTERNS | SMALL)[pattern])


def prompt(length: int, seed: int = 0, begins: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return a random prompt of n tokens, the first of which are given."""
    drawn = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return (*begins, *drawn[len(begins) :])


@cache
def alone(pattern: str, ids: tuple[int, ...], sampling: Sampling, tokens: int) -> tuple[int, ...]:
    """Return what a request yields that is the only one of a new engine without a cache."""
    engine = Engine(model(pattern), slots=1, context=1024, spacing=SPACING)
    handle = engine.submit(Request(ids, sampling, max_new_tokens=tokens))
    while engine.step():
        pass
    return tuple(handle.result(0)[0].tokens)


class Counting:
    """A guide: each token is the next number, up to a last one."""

    def __init__(self, next_token: int, last: int) -> None:
        self.next_token, self.last = next_token, last

    @property
    def finished(self) -> bool:
        return self.next_token > self.last

    def allowed(self, vocab: int) -> torch.Tensor:
        return torch.arange(vocab) == self.next_token

    def advance(self, token: int) -> None:
        if token == 13:
            raise RuntimeError("13 is refused")
        assert token == self.next_token
        self.next_token += 1

    def rollback(self, count: int) -> None:
        self.next_token -= count

    def copy(self) -> "Counting":
        return Counting(self.next_token, self.last)

    @property
    def grammar(self) -> str:
        """The data from which other ranks make the same guide."""
        return f"{self.next_token} {self.last}"

    @staticmethod
    def read(grammar: str) -> "Counting":
        return Counting(*map(int, grammar.split()))
