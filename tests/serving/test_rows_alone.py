"""On a CPU, a decoding step gives a row the same bits alone and in any small batch, whatever the others have read."""

from dataclasses import replace

import pytest
import torch

from lineate.models import (
    AttentionConfig,
    FeedConfig,
    HybridConfig,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
)
from lineate.native.build import available
from lineate.quantised.which import quantised_parameters, shrink
from lineate.serving.engine.pool import Pool
from lineate.system import processor
from tests.support.marks import slow_but
from tests.support.serving_models import CONFIG, EXPERTS, VOCAB, prompt
from tests.support.small_models import random_model

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler")
MOST, CAPACITY, STEPS = 16, 384, 4
LATENT = LatentConfig(3, rank=20, nope_dim=14, rope_dim=6, value_dim=10, rope_theta=100.0)
FULL = AttentionConfig(4, 2, 18, rotary_dim=10, qk_norm="full")
ODD = LinearConfig(2, 4, 10, 6)


def one(letter: str, **changes) -> HybridConfig:
    return replace(CONFIG, hidden_size=96, pattern=letter, n_layers=1, **changes)


CASES = {
    "latent": one("M", latent=LATENT),
    "latent, a gate a head": one("M", latent=replace(LATENT, gate="head")),
    "latent, a gate a channel": one("M", latent=replace(LATENT, gate="channel", rope_theta=None)),
    "attention": one("A", attention=replace(FULL, qk_norm="head")),
    "attention, full norm": one("A", attention=FULL),
    "attention, full norm, no gate": one("A", attention=replace(FULL, gated=False)),
    "attention, plain": one("A", attention=AttentionConfig(3, 3, 24, qk_norm=None, gated=False, bias=True)),
    "gated delta": one("G", linear=ODD),
    "kimi": one("K", linear=replace(ODD, decay_rank=5, gate_rank=7)),
    "kimi, bounded": one("K", linear=replace(ODD, gate_lower_bound=-5.0)),
    "mamba": one("S", mamba=MambaConfig(6, 5, 7, groups=2, norm_groups=3, bias=True)),
    "linear": one("L", linear=ODD),
    "gated linear": one("R", linear=replace(ODD, decay_rank=5)),
    "delta": one("D", linear=ODD),
    "gated delta, exact rate": one("G", linear=replace(ODD, rate="exact")),
    "comba": one("Q", linear=ODD),
    "gated delta 2": one("J", linear=replace(ODD, decay_rank=5, gate_rank=7)),
    "gated delta product": one("U", linear=replace(ODD, writes=3)),
    "preconditioned": one("I", linear=ODD),
    "least squares": one("E", linear=ODD),
    "titans": one("T", memory=MemoryConfig(3, 10)),
    "titans, mlp": one("T", memory=MemoryConfig(3, 10, titans="mlp")),
    "ttt, linear": one("P", memory=MemoryConfig(3, 10)),
    "ttt, mlp": one("N", memory=MemoryConfig(3, 10)),
    "lact": one("C", memory=MemoryConfig(3, 10)),
    "feed": one("A", attention=FULL, feed=FeedConfig(50)),
    "experts": one("A", attention=FULL, experts=replace(EXPERTS, size=20), zero_centred_norm=False),
}
BATCHES = (1, 2, 3, 8, 16)
WEIGHTS = ("float32", "bfloat16", "bfloat16 direct", "float16 direct", "int8", "int4")
"""How weights are kept, and "direct": torch is to have 16-bit products, whatever this processor has."""


@pytest.fixture(autouse=True)
def own_processor():
    """Forget the properties of the processor that a test has set, when the test ends."""
    yield
    processor.forget()


@pytest.mark.parametrize("how", slow_but(WEIGHTS, ["float32", "bfloat16 direct", "int4"]))
@pytest.mark.parametrize(
    "case", slow_but(CASES, ["latent, a gate a head", "attention, full norm", "mamba", "titans", "experts"])
)
@torch.no_grad()
def test_each_row_decodes_as_if_it_were_alone(case, how, monkeypatch):
    """Rows of 40 to 295 tokens."""
    weights, _, direct = how.partition(" ")
    for name in ("LINEATE_CPU_BF16", "LINEATE_CPU_FP16"):
        monkeypatch.setenv(name, "1" if direct else "0")
    processor.forget()
    lm = random_model(CASES[case])
    if weights.startswith("int"):
        shrink(lm, weights)
        assert quantised_parameters(lm)
    else:
        lm = lm.to(getattr(torch, weights))
    states = [lm(torch.tensor([prompt(40 + 17 * row, seed=row)])).state for row in range(MOST)]
    new = torch.randint(VOCAB, (STEPS, MOST), generator=torch.Generator().manual_seed(0)).tolist()

    def decode(first: int, rows: int) -> torch.Tensor:
        """Return the logits of some rows in all steps, `rows step vocab`."""
        pool = Pool(lm, rows, CAPACITY)
        for state in states[first : first + rows]:
            pool.join(state)
        return torch.stack([pool.step(ids[first : first + rows]).clone() for ids in new], 1)

    alone = torch.cat([decode(row, 1) for row in range(MOST)])
    for rows in BATCHES:
        for first in (0, MOST - rows):
            assert torch.equal(decode(first, rows), alone[first : first + rows]), (rows, first)
