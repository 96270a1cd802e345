"""HybridLM: every letter of a pattern, states, packed and padded sequences, loss, configurations."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.layers import RMSNorm
from lineate.layers.registry import letters as all_letters
from lineate.models import (
    PRESETS,
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
    ModelState,
    RwkvConfig,
    preset,
)

LETTERS = all_letters()

VOCAB = 61
CONFIG = HybridConfig(
    vocab_size=VOCAB, hidden_size=32, n_layers=4, pattern="GGGA",
    linear=LinearConfig(2, 4, 8, 6),
    mamba=MambaConfig(6, 5, 7, groups=2, norm_groups=3),
    memory=MemoryConfig(2, 8, chunk=7),
    rwkv=RwkvConfig(2, 7, value_dim=5, decay_rank=4, rate_rank=6, value_rank=9, gate_rank=3),
    attention=AttentionConfig(4, 2, 10, rotary_dim=4),
    latent=LatentConfig(3, rank=9, nope_dim=6, rope_dim=4, value_dim=5),
    feed=FeedConfig(40),
)  # fmt: skip
EXPERTS = ExpertsConfig(6, 2, 12, shared_size=8, shared_gate=True)
CASES = {
    "GGGA": CONFIG,
    "KKKM, experts": replace(CONFIG, pattern="KKKM", experts=EXPERTS, dense_layers=(0,), tie_embeddings=True),
    "LRDGKAM": replace(CONFIG, pattern="LRDGKAM", n_layers=7),
    "SSA": replace(CONFIG, pattern="SSA", n_layers=3),
    "VVD, channel mix": replace(
        CONFIG, pattern="VVD", n_layers=3, norm="layer", embedding_norm=True, feed=FeedConfig(40, "channel_mix")
    ),
    "TPNCE": replace(CONFIG, pattern="TPNCE", n_layers=5),
    "mixers alone, scales": replace(
        CONFIG,
        pattern="SAG",
        mixer_only=(0, 2),
        residual_scale=0.5,
        embedding_scale=3.0,
        logit_scale=0.2,
        attention=AttentionConfig(4, 2, 10, gated=False, qk_norm=None, scale=0.4),
        feed=FeedConfig(40, "relu2"),
    ),
    "no feed-forward": replace(CONFIG, pattern="SM", mixer_only=(0, 1, 2, 3), feed=None, tie_embeddings=True),
    "norm after": replace(CONFIG, pattern="GA", norm_after="A", zero_centred_norm=True),
}
cases = pytest.mark.parametrize("case", CASES)


def make(case: str) -> HybridLM:
    torch.manual_seed(0)
    model = HybridLM(CASES[case]).double().eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" in name:
                x.uniform_(0.5, 1.5)
            elif x.dim() >= 2 and "conv" not in name:
                x.mul_(8)
    return model


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


@cases
@torch.no_grad()
def test_prefill_then_token_by_token_equals_the_full_pass(case):
    model, ids = make(case), draw(2, 80)
    full = model(ids)
    out = model(ids[:, :70])
    logits = [out.logits]
    for t in range(70, 80):
        out = model(ids[:, t : t + 1], state=out.state)
        logits.append(out.logits)
    close(torch.cat(logits, 1), full.logits)
    assert out.state.lengths == full.state.lengths == 80
    assert out.state.nbytes == full.state.nbytes == model.state_nbytes(rows=2, tokens=80)


@cases
@torch.no_grad()
def test_packed_texts_equal_separate_runs_and_continue(case):
    model, ids, lengths = make(case), draw(1, 75), (5, 0, 1, 69)
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    packed = model(ids, cu_seqlens=bounds)
    assert packed.state.lengths.tolist() == list(lengths)
    more = draw(4, 3, seed=1)
    next_logits = model(more, state=packed.state).logits
    for row, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        alone = model(torch.cat((ids[:, start:end], more[row : row + 1]), 1)).logits
        close(packed.logits[:, start:end], alone[:, : end - start])
        close(next_logits[row : row + 1], alone[:, end - start :])


@cases
@torch.no_grad()
def test_padded_batches_equal_unpadded_rows(case):
    model, ids = make(case), draw(3, 40)
    mask = torch.ones_like(ids)
    mask[0, :15], mask[1, 30:] = 0, 0
    out = model(ids, attention_mask=mask, labels=ids)
    alone = [model(ids[:1, 15:]), model(ids[1:2, :30]), model(ids[2:])]
    close(out.logits[0, 15:], alone[0].logits[0])
    close(out.logits[1, :30], alone[1].logits[0])
    close(out.logits[2], alone[2].logits[0])
    assert out.logits[0, :15].eq(0).all()
    nexts = draw(3, 1, seed=2)
    continued = model(nexts, state=out.state)
    for row in range(3):
        close(continued.logits[row], model(nexts[row : row + 1], state=alone[row].state).logits[0])
    everything = model(ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(everything.logits, model(ids).logits)


@cases
@torch.no_grad()
def test_logits_of_the_last_tokens(case):
    model, ids = make(case), draw(2, 12)
    full = model(ids)
    last = model(ids, last_only=True)
    close(last.logits, full.logits[:, -1:])
    bounds = torch.tensor([0, 5, 5, 24])
    packed = model(ids.view(1, -1), cu_seqlens=bounds)
    last = model(ids.view(1, -1), cu_seqlens=bounds, last_only=True)
    close(last.logits[:, [0, 2]], packed.logits[:, [4, 23]])
    assert last.logits[:, 1].eq(0).all() and last.logits.shape == (1, 3, VOCAB)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 9:] = 0, 0
    padded = model(ids, attention_mask=mask)
    last = model(ids, attention_mask=mask, last_only=True)
    close(last.logits[:, 0], padded.logits[[0, 1], [11, 8]])


@cases
def test_loss_and_gradients(case):
    model, ids = make(case), draw(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    for name, x in model.named_parameters():
        assert x.grad is not None and x.grad.isfinite().all(), name
    packed = model(ids.view(1, -1), cu_seqlens=torch.tensor([0, 9, 18]), labels=labels.view(1, -1))
    torch.testing.assert_close(packed.loss, out.loss)
    padded = F.pad(ids, (3, 0))
    mask = F.pad(torch.ones_like(ids), (3, 0))
    again = model(padded, attention_mask=mask, labels=F.pad(labels, (3, 0), value=7))
    torch.testing.assert_close(again.loss, out.loss)
    small = model(ids.int().view(1, -1), cu_seqlens=torch.tensor([0, 9, 18]).int(), labels=labels.int().view(1, -1))
    torch.testing.assert_close(small.loss, out.loss)
    assert small.state.lengths.dtype == torch.int64
    none = model(ids, labels=torch.full_like(ids, -100)).loss
    assert none == 0 and not none.isnan()


@cases
@torch.no_grad()
def test_states_are_values(case):
    model, ids = make(case), draw(2, 20)
    start = model(ids[:, :10]).state
    first = model(ids[:, 10:11], state=start)
    other = model(ids[:, 15:16], state=start)
    assert torch.equal(model(ids[:, 10:11], state=start).logits, first.logits)
    assert not torch.equal(first.logits, other.logits)
    swapped = model(ids[[1, 0], 11:12], state=first.state.select(torch.tensor([1, 0])))
    close(swapped.logits[0], model(ids[:, :12]).logits[1, 11:])


@cases
@torch.no_grad()
def test_rows_come_and_go(case):
    """A sequence read alone and two of other lengths, read packed, continue together as each would alone."""
    model, ids = make(case), draw(3, 20)
    packed = model(torch.cat((ids[0, :5], ids[1, :9]))[None], cu_seqlens=torch.tensor([0, 5, 14])).state
    alone = model(ids[2:, :7]).state
    states = [packed.select(torch.tensor([1])), alone, packed.select(torch.tensor([0]))]
    joined = ModelState.join(states)
    assert joined.rows == 3 and joined.lengths.tolist() == [9, 7, 5]
    order, lengths = [1, 2, 0], [9, 7, 5]
    token = torch.stack([ids[row, n] for row, n in zip(order, lengths, strict=True)])[:, None]
    out = model(token, state=joined)
    for i, (row, n) in enumerate(zip(order, lengths, strict=True)):
        close(out.logits[i], model(ids[row : row + 1, : n + 1]).logits[0, -1:])
    even = ModelState.join([alone, alone])
    assert even.lengths == 7 and even.rows == 2
    close(model(ids[2:, 7:8].expand(2, 1), state=even).logits[1], model(ids[2:, :8]).logits[0, -1:])


def test_a_head_that_is_elsewhere():
    model = HybridLM(replace(CONFIG, pattern="G", n_layers=1, tie_embeddings=True))
    model.embed.to("meta")
    with pytest.raises(RuntimeError, match="embed, which is the head too, must not be offloaded"):
        model.logits(torch.randn(1, 2, CONFIG.hidden_size))


def test_states_that_cannot_be_joined():
    with torch.no_grad():
        model = HybridLM(replace(CONFIG, pattern="GA", n_layers=2))
        one, wide = model(draw(1, 3)).state, model.double()(draw(1, 3)).state
    for states, message in (
        (iter(()), "states must be one or more of one model, with as many layers each, got none"),
        ([one, ModelState(one.layers[:1], 3)], "with as many layers each, got 2, 1"),
        ([one, ModelState(one.layers[::-1], 3)], "states must be of one layer, got a Memory of .* and a TokenCache"),
        ([one, wide], "states must agree in .*; convert or move one"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelState.join(states)


REMADE = {letter: replace(CONFIG, pattern=letter, n_layers=1) for letter in LETTERS} | {
    "experts": replace(CONFIG, pattern="GM", experts=replace(EXPERTS, scores="sigmoid"), tie_embeddings=True),
    "zero-centred, Titans MLP": replace(
        CONFIG, pattern="NA", memory=MemoryConfig(2, 8, titans="mlp"), zero_centred_norm=True
    ),
    "bias": replace(CONFIG, pattern="A", attention=AttentionConfig(4, 2, 10, bias=True)),
}


@pytest.mark.parametrize("case", REMADE)
def test_weights_of_a_model_made_on_the_meta_device(case):
    """They are those of a new model, to the bit."""
    torch.manual_seed(0)
    expected = HybridLM(REMADE[case]).state_dict()
    with torch.device("meta"):
        model = HybridLM(REMADE[case])
    model.to_empty(device="cpu")
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(torch.nan)
    torch.manual_seed(0)
    model.reset_parameters()
    for name, x in model.state_dict().items():
        assert torch.equal(x, expected[name]), name


def test_scales_and_layers_without_a_feed_forward():
    model, ids = make("mixers alone, scales"), draw(2, 20)
    assert [block.feed is None for block in model.layers] == [True, False, True, False]
    with torch.no_grad():
        x = 3.0 * model.embed.weight[ids]
        for block in model.layers:
            x = x + 0.5 * block.mixer(block.mixer_norm(x))[0]
            if block.feed is not None:
                y = block.feed_norm(x) @ block.feed.up_proj.weight.T
                x = x + 0.5 * (y.relu() ** 2 @ block.feed.down_proj.weight.T)
        plain = RMSNorm(32).double()
        plain.load_state_dict(model.norm.state_dict())
        torch.testing.assert_close(model(ids).logits, 0.2 * model.head(plain(x)))
        total = model.loss_sum(ids[:, :-1], ids[:, 1:]) / (2 * 19)
        torch.testing.assert_close(total, model(ids, labels=ids).loss, check_dtype=False)


def test_the_scale_of_attention():
    """A scale of 1/sqrt(head_dim) is the default."""
    config = replace(CONFIG, pattern="A", attention=AttentionConfig(4, 2, 10, scale=10**-0.5))
    one, other = HybridLM(config), HybridLM(replace(config, attention=AttentionConfig(4, 2, 10)))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(draw(1, 9)).logits, other(draw(1, 9)).logits)
    third = HybridLM(replace(config, attention=AttentionConfig(4, 2, 10, scale=2.0)))
    third.load_state_dict(one.state_dict())
    assert not torch.allclose(third(draw(1, 9)).logits, other(draw(1, 9)).logits, atol=1e-6)


def test_a_pattern_is_tiled():
    assert replace(CONFIG, n_layers=6).letters == "GGGAGG"
    kinds = [type(block.mixer).__name__ for block in make("LRDGKAM").layers]
    assert kinds == [
        "LinearAttention", "GatedLinearAttention", "DeltaNet", "GatedDeltaNet", "KimiDeltaAttention", "GatedAttention",
        "LatentAttention",
    ]  # fmt: skip
    kinds = [type(block.mixer).__name__ for block in make("TPNCE").layers]
    assert kinds == ["TTTLinear", "TTTMLP", "Titans", "LaCT", "LeastSquares"]


def test_config_as_json():
    for config in (*CASES.values(), *(make() for make in PRESETS.values())):
        assert HybridConfig.from_dict(config.to_dict()) == config
    values = CONFIG.to_dict()
    with pytest.raises(ValueError, match="config has unknown keys 'layers'; known are vocab_size, hidden_size"):
        HybridConfig.from_dict({**values, "layers": 3})
    with pytest.raises(ValueError, match="config must have vocab_size, hidden_size, n_layers, got none of the name 'h"):
        HybridConfig.from_dict({"vocab_size": 5, "n_layers": 2})
    with pytest.raises(ValueError, match=r"config\.linear has unknown keys 'head'"):
        HybridConfig.from_dict({**values, "linear": {**values["linear"], "head": 3}})


PUBLISHED = {
    "qwen3-next-80b": 79.67,
    "qwen3-5-27b": 26.90,
    "qwen3-5-35b-a3b": 34.66,
    "kimi-linear-48b": 49.12,
    "olmo-hybrid-7b": 7.43,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    with torch.device("meta"):
        model = HybridLM(preset(name))
    count = sum(x.numel() for x in model.parameters()) / 1e9
    if name in PUBLISHED:
        assert count == pytest.approx(PUBLISHED[name], abs=0.006)
        with pytest.raises(ValueError, match="cannot be changed"):
            preset(name, pattern="A")
    else:
        assert preset(name, pattern="KM", vocab_size=99).letters[:2] == "KM"


@cases
@torch.no_grad()
def test_saved_states_are_loaded(case, tmp_path):
    """torch.load reads them with its defaults, under which it runs no code of the file."""
    model, ids = make(case), draw(1, 12)
    for given in ({}, {"cu_seqlens": torch.tensor([0, 5, 12])}):
        state = model(ids, **given).state
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt")
        nexts = draw(state.rows, 1, seed=1)
        assert torch.equal(model(nexts, state=loaded).logits, model(nexts, state=state).logits)


@torch.no_grad()
def test_padding_on_both_sides():
    model, ids = make("GGGA"), draw(2, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]])
    for given in (mask, mask.bool(), mask.double()):
        out = model(ids, attention_mask=given)
        close(out.logits[:1, 2:6], model(ids[:1, 2:6]).logits)
        assert out.state.lengths.tolist() == [4, 0]


def test_state_bytes_of_a_real_server():
    """A server's log for Qwen3.5-27B with 4 sequences: 576 MiB of memory; 64 KiB of keys and values per token."""
    with torch.device("meta"):
        model = HybridLM(preset("qwen3-5-27b")).to(torch.bfloat16)
    specs = [spec for layer in model.state_spec for spec in layer]
    assert 4 * sum(spec.nbytes() for spec in specs if spec.name == "memory") == 576 * 2**20
    assert sum(spec.nbytes(1) for spec in specs if spec.name in ("keys", "values")) == 64 * 2**10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pattern": "GGX"},
            "pattern must be made of the letters L, R, D, G, K, S, T, P, N, C, E, A, M, .*got 'GGX'",
        ),
        ({"pattern": ""}, "pattern must be made of the letters"),
        ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"linear": None}, "linear must be given for the letter 'G'"),
        ({"attention": None}, "attention must be given for the letter 'A'"),
        ({"feed": None}, "feed must be given"),
        ({"dense_layers": (4,)}, r"dense_layers must lie in 0 \.\. 3"),
        ({"mixer_only": (-1,)}, r"mixer_only must lie in 0 \.\. 3"),
        ({"mixer_only": (0, 1), "dense_layers": (1,), "experts": EXPERTS}, "no layer of dense_layers, got 1 in both"),
        ({"mixer_only": (0, 1), "feed": None}, "feed must be given"),
        (
            {"feed": FeedConfig(8, "gelu")},
            "FeedConfig.kind must be one of 'swiglu', 'relu2', 'channel_mix', got 'gelu'",
        ),
        ({"residual_scale": 0.0}, "residual_scale must be finite and above 0, got 0.0"),
        ({"norm_after": "Z"}, "norm_after must be made of the letters"),
        ({"linear": LinearConfig(3, 4, 8, 8)}, "value_heads must be a multiple of heads = 3, got 4"),
        ({"linear": LinearConfig(2, 4, 0, 8)}, "LinearConfig.key_dim must be at least 1, got 0"),
        ({"linear": LinearConfig(2, 4, 8, 8, gate_activation="relu")}, "gate_activation must be one of"),
        ({"attention": AttentionConfig(4, 3, 8)}, "heads must be a multiple of kv_heads = 3, got 4"),
        ({"attention": AttentionConfig(4, 2, 8, rotary_dim=3)}, "rotary_dim must be even and at most head_dim = 8"),
        ({"experts": ExpertsConfig(8, 2, 8, groups=8, scores="sigmoid")}, "groups must leave at least 2 experts"),
        ({"experts": ExpertsConfig(8, 4, 8, groups=4, scores="sigmoid")}, "groups must leave at least 2 experts"),
        ({"experts": ExpertsConfig(4, 5, 8)}, "active must be at most count = 4, got 5"),
        ({"norm_eps": -1.0}, "norm_eps must be finite and above 0, got -1.0"),
        ({"norm_eps": float("nan")}, "norm_eps must be finite and above 0, got nan"),
        ({"initializer_range": -1}, "initializer_range must be finite and at least 0, got -1"),
        (
            {"linear": LinearConfig(2, 4, 8, 6, gate_lower_bound=5.0)},
            "LinearConfig.gate_lower_bound must be finite and below 0, got 5.0",
        ),
        ({"linear": LinearConfig(2, 4, 8, 6, norm_eps=0.0)}, "LinearConfig.norm_eps must be finite and above 0"),
        ({"attention": AttentionConfig(4, 2, 8, rope_theta=float("inf"))}, "AttentionConfig.rope_theta must be finite"),
        ({"latent": LatentConfig(3, 9, 6, 4, 5, rope_theta=-2.0)}, "LatentConfig.rope_theta must be finite and above"),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


def test_bad_calls():
    model, ids = make("GGGA"), draw(2, 5)
    state = model(ids).state
    added = F.pad(torch.zeros(2, 3), (0, 2), value=-1e9)
    hole = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]])
    for arguments, error, message in (
        ({"input_ids": ids.float()}, ValueError, "input_ids must be int32 or int64, got float32"),
        ({"input_ids": ids[0]}, ValueError, r"input_ids must have shape \(b, t\)"),
        ({"input_ids": ids + VOCAB}, ValueError, r"input_ids must lie in 0 \.\. 60"),
        ({"input_ids": [[1]]}, TypeError, "input_ids must be a torch.Tensor, got list"),
        ({"input_ids": ids[:1], "state": state}, ValueError, "state must have 1 rows, .* got 2"),
        ({"input_ids": ids, "state": 3}, TypeError, "state must be a ModelState or None, got int"),
        ({"input_ids": ids, "state": make("LRDGKAM")(ids).state}, ValueError, "state must have 4 layers, got 7"),
        ({"input_ids": ids, "state": make("KKKM, experts")(ids).state}, ValueError, "state of layer 3 must have keys"),
        ({"input_ids": ids, "attention_mask": ids * 0}, ValueError, "attention_mask must have a token"),
        ({"input_ids": ids, "labels": ids[:, 1:]}, ValueError, r"labels must have shape \(b, t\) = \(2, 5\)"),
        ({"input_ids": ids, "attention_mask": ids[:1]}, ValueError, r"attention_mask must have shape \(b, t\)"),
        ({"input_ids": ids, "cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens needs the sequences packed"),
        ({"input_ids": ids, "attention_mask": ids.tolist()}, TypeError, "attention_mask must be a torch.Tensor, got l"),
        ({"input_ids": ids, "attention_mask": added}, ValueError, r"attention_mask must be bool, .* \(mask == 0\)"),
        ({"input_ids": ids, "attention_mask": 2 - hole}, ValueError, "attention_mask must be bool, or 1 for tokens"),
        ({"input_ids": ids, "attention_mask": hole / 0}, ValueError, "attention_mask must be bool, or 1 for tokens"),
        ({"input_ids": ids, "attention_mask": hole}, ValueError, "padding before or after the tokens of a row, got"),
        ({"input_ids": ids, "attention_mask": hole.bool()}, ValueError, "padding before or after the tokens of a row"),
        ({"input_ids": ids, "labels": ids.tolist()}, TypeError, "labels must be a torch.Tensor, got list"),
        ({"input_ids": ids, "labels": ids + VOCAB}, ValueError, r"labels must lie in 0 \.\. 60, or be -100 for none"),
        ({"input_ids": ids, "labels": -1 - ids}, ValueError, r"labels must lie in 0 \.\. 60"),
    ):
        with pytest.raises(error, match=message):
            model(**arguments)
    with pytest.raises(ValueError, match="preset must be one of tiny"):
        preset("huge")
