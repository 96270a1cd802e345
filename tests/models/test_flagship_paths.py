"""The two published families with experts, at sizes that all kernels take, against transformers: all ways to read.

Prompts at once and split anywhere, tokens through a `Decoder` (on a GPU a CUDA graph) with 1, 5 and 70 rows, and an
engine with kept states and guesses. In float32 the logits are transformers'; bfloat16 has a budget.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lineate.decoding import Decoder
from lineate.generation.choice import Sampling
from lineate.models import HybridLM
from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import PromptLookup
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Request

transformers = pytest.importorskip("transformers")

from tests.support.families import FAMILIES, build  # noqa: E402
from tests.support.marks import slow_but  # noqa: E402

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
VOCAB, PROMPT, NEW = 96, 400, 12
DIFFERENT = 5
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": dict(
        vocab_size=VOCAB, hidden_size=256, moe_intermediate_size=128, shared_expert_intermediate_size=128,
        num_experts=16, num_experts_per_tok=4, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "kimi_linear": dict(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=320, moe_intermediate_size=128, num_local_experts=16,
        num_experts_per_tok=4, n_shared_experts=1, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=128,
        qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64,
        linear_attn_config=dict(
            head_dim=64, num_heads=4, short_conv_kernel_size=4, full_attn_layers=[4], kda_layers=[1, 2, 3, 5]
        ),
    ),
}  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = [
    pytest.mark.cover, pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("family", SIZES)
]  # fmt: skip
Load = Callable[..., HybridLM]


@cache
def theirs(family: str) -> Any:
    if not hasattr(transformers, FAMILIES[family].config):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return build(family, **SIZES[family])


@cache
@torch.no_grad()
def expected(family: str) -> Tensor:
    """Return transformers' logits of 70 rows."""
    return theirs(family)(draw(DIFFERENT)).logits.repeat(14, 1, 1)


def draw(rows: int) -> Tensor:
    """Return PROMPT + NEW tokens of rows, of which DIFFERENT are different."""
    drawn = torch.randint(VOCAB, (DIFFERENT, PROMPT + NEW), generator=torch.Generator().manual_seed(0))
    return drawn.repeat(14, 1)[:rows]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        theirs(family).save_pretrained(path)
        return path

    return lambda family, device, dtype="float32": HybridLM.from_pretrained(
        folder(family), dtype=dtype, device=device, progress=False
    )


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu().double() - wanted.double()).norm() / wanted.double().norm())


@torch.no_grad()
def test_a_prompt_may_be_split_anywhere(family: str, device: str, load: Load) -> None:
    model, ids, wanted = load(family, device), draw(2).to(device), expected(family)[:2]
    for cuts in ((), (399,), (1, 2, 3), (64, 128, 320), (63, 65, 200, 201, 399), (17, 81, 398, 399, 400)):
        found, state = [], None
        for begin, end in pairwise((0, *cuts, PROMPT + NEW)):
            out = model(ids[:, begin:end], state=state)
            found.append(out.logits)
            state = out.state
        assert relative(torch.cat(found, 1), wanted) < 2e-5, cuts


@pytest.mark.parametrize("rows", slow_but([1, 5, 70], [1, 5]))
@torch.no_grad()
def test_rows_of_a_decoder_are_as_if_alone(family: str, device: str, rows: int, load: Load) -> None:
    model, ids, wanted = load(family, device), draw(rows).to(device), expected(family)[:rows]
    decoder = Decoder(model, model(ids[:, :PROMPT], last_only=True).state, room=NEW)
    found = torch.cat([decoder(ids[:, t : t + 1]) for t in range(PROMPT, PROMPT + NEW)], 1)
    assert relative(found, wanted[:, PROMPT:]) < 2e-5
    more = model(ids[:, :1], state=decoder.state).logits
    again = model(torch.cat((ids, ids[:, :1]), 1)).logits[:, -1:]
    assert relative(more, again.cpu()) < 2e-5, "the state after the tokens"


@pytest.mark.parametrize("rows", slow_but([1, 5, 70], [1, 5]))
@torch.no_grad()
def test_bfloat16_is_as_near_as_that_of_transformers(family: str, device: str, rows: int, load: Load) -> None:
    """A token with nearly equal scores may go to another expert, there as here."""
    model, ids, wanted = load(family, device, "bfloat16"), draw(rows).to(device), expected(family)[:rows]
    out = model(ids[:, :PROMPT])
    decoder = Decoder(model, out.state, room=NEW)
    found = torch.cat([out.logits, *(decoder(ids[:, t : t + 1]) for t in range(PROMPT, PROMPT + NEW))], 1)
    own = load(family, "cpu", "bfloat16")
    few = slice(min(rows, 2))
    rounded = own(ids[few].cpu()).logits.float()  # one rounding of every product, as transformers has
    budget = max(3e-2, 1.5 * relative(rounded, wanted[few]))
    assert relative(found[:, :PROMPT].float(), wanted[:, :PROMPT]) < budget
    assert relative(found[:, PROMPT:].float(), wanted[:, PROMPT:]) < 2 * budget


@torch.no_grad()
def test_kept_states_and_guesses_change_no_token(family: str, device: str, load: Load) -> None:
    model, ids = load(family, device), draw(3)
    prompts = [tuple(ids[row, :n].tolist()) for row, n in ((0, 200), (1, 64), (2, 131), (0, 130), (0, 200))]
    prompts.append(prompts[0][:150] + prompts[1])  # begins like the first one
    wanted = []
    for prompt in prompts:
        made = model.generate([prompt], NEW, temperature=0, stop=())
        for _ in made:
            pass
        wanted += made.tokens
    for drafter in (None, PromptLookup(n=1)):
        engine = Engine(
            model, slots=4, context=512, spacing=64, cache=StateCache(2**28, 64, poison=True), drafter=drafter,
            poison=True,
        )  # fmt: skip
        for _ in range(2):
            handles = []
            for prompt in prompts:
                handles.append(engine.submit(Request(prompt, Sampling(temperature=0), max_new_tokens=NEW)))
                engine.step()
            while engine.step():
                pass
            assert [handle.result(0)[0].tokens for handle in handles] == wanted
        assert engine.stats.cached_tokens > 0
