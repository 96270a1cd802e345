"""A decoding step on a GPU with its fused launches equals the layers' own forward."""

import pytest
import torch

from lineate.decoding.in_place import capture, read_in_place, state_in_place
from lineate.layers import TokenCache
from lineate.models import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    ModelState,
    RwkvConfig,
)

pytestmark = pytest.mark.gpu
VOCAB = 97
CASES = {
    "heads of 128": HybridConfig(
        VOCAB, 256, 4, "GKA", linear=LinearConfig(2, 4, 128, 128), attention=AttentionConfig(4, 2, 64, rotary_dim=32),
        feed=FeedConfig(384), zero_centred_norm=True,
    ),
    "odd sizes": HybridConfig(
        VOCAB, 72, 3, "AGK", linear=LinearConfig(3, 3, 20, 12, conv_size=3),
        attention=AttentionConfig(3, 3, 24, rotary_dim=0, qk_norm=None, gated=False, bias=True), feed=FeedConfig(100),
    ),
    "latent attention": HybridConfig(
        VOCAB, 256, 4, "KMGM", linear=LinearConfig(2, 4, 64, 64, decay_rank=32, gate_rank=32), feed=FeedConfig(384),
        latent=LatentConfig(4, rank=96, nope_dim=32, rope_dim=16, value_dim=32, rope_theta=1e4),
        experts=ExpertsConfig(8, 3, 64, shared_size=64, shared_gate=True),
    ),
    "latent attention, no positions": HybridConfig(
        VOCAB, 72, 2, "KM", linear=LinearConfig(2, 2, 20, 12), feed=FeedConfig(100),
        latent=LatentConfig(3, rank=20, nope_dim=9, rope_dim=6, value_dim=11),
        experts=ExpertsConfig(6, 2, 40, scores="sigmoid", shared_size=24),
    ),
    "the general row": HybridConfig(
        VOCAB, 256, 3, "JUA", linear=LinearConfig(2, 4, 128, 128), attention=AttentionConfig(4, 2, 64, rotary_dim=32),
        feed=FeedConfig(384), zero_centred_norm=True,
    ),
    "the general row, odd sizes": HybridConfig(
        VOCAB, 72, 3, "UJU", linear=LinearConfig(
            2, 4, 20, 12, conv_size=3, writes=3, group_norm=True, decay_rank=5, gate_rank=7, beta_scale=2.0
        ), feed=FeedConfig(100),
    ),
    "without convolution": HybridConfig(
        VOCAB, 128, 2, "GA", linear=LinearConfig(1, 2, 32, 64, conv_size=0), feed=FeedConfig(256),
        attention=AttentionConfig(2, 1, 64, rotary_dim=64, qk_norm="full"),
    ),
}  # fmt: skip


CALLED = HybridConfig(
    VOCAB, 72, 6, "VVQOIF", linear=LinearConfig(2, 4, 20, 12), rwkv=RwkvConfig(2, 20, 12, 8, 8, 8, 16),
    feed=FeedConfig(100),
)  # fmt: skip
"""Mixers that have no step in few launches."""


def in_place(state: ModelState, room: int, lengths: torch.Tensor) -> tuple[dict, dict]:
    """Return memories and caches with room."""
    memories, caches = {}, {}
    for n, layer in enumerate(state.layers):
        if isinstance(layer, TokenCache):
            caches[n] = {
                name: layer[name].new_zeros(len(lengths), room, *layer[name].shape[2:]) for name in layer.names
            }
            for name, x in caches[n].items():
                x[:, : layer.n] = layer[name]
        else:
            memories[n] = {name: x.clone() for name, x in layer.tensors.items()}
    return memories, caches


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float, flips: bool, what: object) -> None:
    """Compare row by row. flips: in up to an eighth of the rows, rounding may choose another expert."""
    errors = ((found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).sort()[0]
    same = len(errors) - (len(errors) // 8 if flips else 0)
    assert float(errors[same - 1]) < bound and float(errors[-1]) < max(bound, 0.5 if flips else 0), (what, errors)


RUNS = [
    *((1, torch.float32, False), (1, torch.bfloat16, True), (5, torch.float32, True), (5, torch.bfloat16, False)),
    *((33, torch.bfloat16, True), (70, torch.float32, False), (70, torch.bfloat16, True)),
]


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize(("rows", "dtype", "graph"), RUNS)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_step_equals_forward(case, rows, dtype, graph):
    torch.manual_seed(rows)
    model = HybridLM(CASES[case]).to(dtype).cuda().eval()
    for name, x in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            x.add_(0.1 * torch.randn_like(x))
    state = model(torch.randint(VOCAB, (rows, 9), device="cuda")).state
    lengths = torch.full((rows,), 9, device="cuda")
    memories, caches = in_place(state, 40, lengths)
    ids = torch.randint(VOCAB, (rows, 1), device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        read = read_in_place(model, ids, state_in_place(memories, caches, 40, lengths), (False, torch.bfloat16))
        for n, own in memories.items():
            assert all(read.state.layers[n][name] is x for name, x in own.items()), "a memory was copied"
        lengths.add_(1)
        return (read.logits,)

    if graph:
        changing = [lengths, *(x for own in memories.values() for x in own.values())]
        recorded = capture(step, changing, torch.device("cuda"))
    bound = 2e-5 if dtype == torch.float32 else 3e-2
    flips = dtype == torch.bfloat16 and model.config.experts is not None
    for _ in range(6):
        ids.copy_(torch.randint(VOCAB, (rows, 1), device="cuda"))
        (found,) = recorded.replay() if graph else step()
        out = model(ids, state=state)
        state = out.state
        assert_near(found, out.logits, bound, flips, "logits")
    for n, layer in enumerate(state.layers):
        for name in layer.names:
            found = memories[n][name] if n in memories else caches[n][name][:, : layer.n]
            assert_near(found, layer[name], bound, flips, (n, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_mixers_that_are_called_decode_in_their_memory(dtype):
    """Only their other states, such as the last token of RWKV-7, are new tensors."""
    torch.manual_seed(0)
    model = HybridLM(CALLED).to(dtype).cuda().eval()
    state = model(torch.randint(VOCAB, (3, 9), device="cuda")).state
    lengths = torch.full((3,), 9, device="cuda")
    memories, caches = in_place(state, 40, lengths)
    for _ in range(4):
        ids = torch.randint(VOCAB, (3, 1), device="cuda")
        read = read_in_place(model, ids, state_in_place(memories, caches, 40, lengths), (False, torch.bfloat16))
        assert all(read.state.layers[n]["memory"] is own["memory"] for n, own in memories.items())
        for n, own in memories.items():
            own.update(read.state.layers[n].tensors)
        lengths.add_(1)
        out = model(ids, state=state)
        state = out.state
        assert_near(read.logits, out.logits, 2e-5 if dtype == torch.float32 else 3e-2, False, "logits")
