"""Published families in the engine: batched, cached and guessed requests yield the tokens of transformers' models."""

import pytest
import torch

from lineate.generation.choice import Sampling
from lineate.models import HybridLM
from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import PromptLookup
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Request
from tests.support.families import FAMILIES, VOCAB, build
from tests.support.marks import slow_but
from tests.support.serving_models import SPACING

pytest.importorskip("transformers")


@pytest.mark.cover
@pytest.mark.parametrize("family", slow_but(FAMILIES, ("qwen3_5_moe", "kimi_linear")))
@torch.no_grad()
def test_tokens_are_those_of_transformers(family, tmp_path):
    theirs = build(family)
    theirs.save_pretrained(tmp_path)
    lm = HybridLM.from_pretrained(tmp_path, progress=False)
    drawn = torch.randint(VOCAB, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [drawn[:5], drawn[:70], [*drawn[:66], 3, 4], drawn]
    engine = Engine(
        lm, slots=3, context=256, spacing=SPACING, cache=StateCache(2**26, SPACING, poison=True),
        drafter=PromptLookup(n=1), poison=True,
    )  # fmt: skip
    handles = []
    for ids in prompts:
        handles.append(engine.submit(Request(tuple(ids), Sampling(temperature=0), max_new_tokens=4)))
        engine.step()
        engine.step()
    while engine.step():
        pass
    for ids, handle in zip(prompts, handles, strict=True):
        for token in handle.result(0)[0].tokens:
            assert token == theirs(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item()
            ids = [*ids, token]
    assert sum(handle.result(0)[0].cached_tokens for handle in handles) >= 2 * SPACING
