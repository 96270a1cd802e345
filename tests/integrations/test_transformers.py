"""transformers' own models with and without lineate: logits, gradients, caches, packed and padded rows."""

import sys
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lineate.integrations import transformers as integration  # noqa: E402
from lineate.integrations.transformers import MODEL_PATCHES, disable, enable, enabled, is_enabled  # noqa: E402

warnings.filterwarnings("ignore", module="transformers")
transformers.logging.set_verbosity_error()
VOCAB = 97
NAMES = [family.name for family in MODEL_PATCHES]
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
QWEN = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
KIMI = {
    "num_hidden_layers": 4,
    "layer_types": LAYERS,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_key_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_token": 2,
}
OLMO = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": LAYERS,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
}
MODELS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**QWEN, **EXPERTS}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**QWEN, **EXPERTS}),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", KIMI),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", OLMO),
}


def build(family, attention="sdpa"):
    """Return a tiny random model with every norm, gate and bias away from its initial value."""
    config, model, options = MODELS[family]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SHARED, **options})
    made._attn_implementation = attention
    built = getattr(transformers, model)(made).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if name.endswith("conv1d.weight"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return built


def tokens(*shape, seed=1):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def restarting(lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def apart(got, want):
    return (got - want).abs().max().item()


@pytest.fixture(autouse=True)
def _disabled():
    disable()
    yield
    disable()


@pytest.fixture(params=NAMES)
def model(request):
    return build(request.param)


@pytest.mark.cover
@pytest.mark.parametrize("t", [1, 75, 150])
def test_logits_and_gradients(model, t):
    ids = tokens(2, t)
    found = []
    for on in (False, True):
        if on:
            enable()
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens(2, t, seed=2).flatten()).backward()
        found.append((logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    (want, wanted), (got, gradients) = found
    assert apart(got, want) < 1e-5
    assert gradients.keys() == wanted.keys()
    if t == 1:  # softmax over one key: the gradients of q and k are only rounding
        wanted = {n: g for n, g in wanted.items() if "self_attn.q_" not in n and "self_attn.k_" not in n}
    worst = max(apart(gradients[n], g) / max(1e-3, g.abs().max().item()) for n, g in wanted.items())
    assert worst < 1e-4
    print(f"{apart(got, want):.1e} logits, {worst:.1e} of the largest entry of each gradient")


def test_prefill_then_decode(model):
    """Any way to cut a sequence into calls gives the logits of one call, and those of transformers."""
    ids = tokens(2, 40)
    with torch.no_grad():
        want = model(ids).logits
        enable()
        for cuts in ((30, 1, 1, 1, 7), (1, 2, 37), (3, 1, 36)):
            cache, parts = None, []
            for part in ids.split(cuts, dim=1):
                out = model(part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                parts.append(out.logits)
            assert apart(torch.cat(parts, 1), want) < 1e-5


def test_a_cache_passes_between_both(model):
    """A cache filled without lineate continues with it, and the reverse."""
    ids = tokens(1, 30)
    with torch.no_grad():
        want = model(ids).logits
        cache = model(ids[:, :10], use_cache=True).past_key_values
        with enabled():
            assert apart(model(ids[:, 10:20], past_key_values=cache).logits, want[:, 10:20]) < 1e-5
        for i in range(20, 30):
            with enabled() if i % 2 else warnings.catch_warnings():
                assert apart(model(ids[:, i : i + 1], past_key_values=cache).logits, want[:, i : i + 1]) < 1e-5


def test_greedy_tokens(model):
    ids = tokens(2, 12)
    ask = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **ask)
    enable()
    got = model.generate(ids, **ask)
    assert got.shape == (2, 28)
    assert torch.equal(got, want)


LENGTHS = (5, 1, 40, 2, 27)


def separate(model, ids, lengths):
    return torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], 1)


@pytest.mark.cover
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", NAMES)
def test_packed_rows(family, attention):
    """Rows are packed by positions, cu_seq_lens or both; with and without a cache; in two rows; with a mask of ones."""
    model = build(family, attention)
    ids, positions = tokens(1, sum(LENGTHS)), restarting(LENGTHS)
    borders = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    cu = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 40, "max_length_k": 40}
    with torch.no_grad():
        want = separate(model, ids, LENGTHS)
        with enabled():
            assert apart(separate(model, ids, LENGTHS), want) < 1e-5
            for use_cache in (False, True):
                for given in ({"position_ids": positions}, cu, {**cu, "position_ids": positions}):
                    assert apart(model(ids, use_cache=use_cache, **given).logits, want) < 1e-5
            ones = torch.ones_like(ids)
            assert apart(model(ids, attention_mask=ones, position_ids=positions).logits, want) < 1e-5
            other, lengths = tokens(1, sum(LENGTHS), seed=3), (sum(LENGTHS) - 30, 30)
            both = torch.cat((positions, restarting(lengths)))
            want = torch.cat((want, separate(model, other, lengths)))
            assert apart(model(torch.cat((ids, other)), position_ids=both).logits, want) < 1e-5


def test_transformers_still_leaks(model):
    """Without lineate, packed sequences affect each other in transformers; once this fails, our wrapper can go."""
    ids = tokens(1, sum(LENGTHS))
    with torch.no_grad():
        got = model(ids, position_ids=restarting(LENGTHS), use_cache=False).logits
        assert apart(got, separate(model, ids, LENGTHS)) > 1e-3


def test_packed_gradients(model):
    ids, positions = tokens(1, sum(LENGTHS)), restarting(LENGTHS)
    enable()
    found = []
    for run in (lambda: model(ids, position_ids=positions).logits, lambda: separate(model, ids, LENGTHS)):
        model.zero_grad()
        run().square().mean().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, want in found[1].items():
        assert apart(found[0][name], want) < 1e-5 * max(1.0, want.abs().max().item()), name


def test_a_packed_row_continues_its_last_text(model):
    """The cached states of the linear layers are those of the last sequence alone."""
    ids = tokens(1, sum(LENGTHS))
    enable()
    with torch.no_grad():
        packed = model(ids, position_ids=restarting(LENGTHS), use_cache=True).past_key_values
        alone = model(ids[:, -LENGTHS[-1] :], use_cache=True).past_key_values
    for i in (0, 1):
        assert apart(packed.get_conv_state(i)[..., 1:], alone.get_conv_state(i)[..., 1:]) < 1e-5
        assert apart(packed.get_recurrent_state(i), alone.get_recurrent_state(i)) < 1e-5


@pytest.mark.cover
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(model, side):
    """Rows of 30, 3, 17 and 29 tokens: prefill, two calls of several tokens, then one token, equal each row alone."""
    lengths, steps = (30, 3, 17, 29), (4, 2, 1, 1)
    rows = [tokens(1, n + sum(steps), seed=n) for n in lengths]
    enable()
    with torch.no_grad():
        want = [model(row).logits for row in rows]
        ids, mask = torch.zeros(4, 30, dtype=torch.long), torch.zeros(4, 30, dtype=torch.long)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            where = slice(30 - n, 30) if side == "left" else slice(0, n)
            ids[i, where], mask[i, where] = row[0, :n], 1
        at = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(ids, attention_mask=mask, position_ids=at, use_cache=True)
        for i, n in enumerate(lengths):
            assert apart(out.logits[i, mask[i].bool()], want[i][0, :n]) < 1e-5
        seen = 0
        for step in steps:
            part = torch.cat([row[:, n + seen : n + seen + step] for row, n in zip(rows, lengths, strict=True)])
            mask = torch.cat((mask, torch.ones(4, step, dtype=torch.long)), 1)
            at = mask.cumsum(1)[:, -step:] - 1
            out = model(part, attention_mask=mask, position_ids=at, past_key_values=out.past_key_values)
            for i, n in enumerate(lengths):
                assert apart(out.logits[i], want[i][0, n + seen : n + seen + step]) < 1e-5
            seen += step


def test_packed_and_padded(model):
    """Rows have several sequences, and padding at their end, which has no effect.

    Sequences do not affect each other.
    """
    lengths = ((12, 8), (6, 5, 4))
    ids, mask, at = tokens(2, 20), torch.ones(2, 20, dtype=torch.long), torch.zeros(2, 20, dtype=torch.long)
    mask[1, 15:] = 0
    at[0], at[1, :15] = restarting(lengths[0]), restarting(lengths[1])
    enable()
    with torch.no_grad():
        got = model(ids, attention_mask=mask, position_ids=at)
        for i, n in enumerate((20, 15)):
            assert apart(got.logits[i : i + 1, :n], separate(model, ids[i : i + 1, :n], lengths[i])) < 1e-5
        alone = model(ids[1:, 11:15], use_cache=True).past_key_values
    assert apart(got.past_key_values.get_recurrent_state(0)[1:], alone.get_recurrent_state(0)) < 1e-5
    assert apart(got.past_key_values.get_conv_state(0)[1:, :, 1:], alone.get_conv_state(0)[..., 1:]) < 1e-5


def test_gradient_checkpointing(model):
    ids, positions = tokens(1, sum(LENGTHS)), restarting(LENGTHS)
    enable()
    model.train()
    found = []
    for checkpoint in (False, True):
        if checkpoint:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_gradients_through_a_cache(model):
    """The backward goes through a prefill and a continuation, which overwrites the cached states."""
    ids = tokens(1, 12)
    enable()
    first = model(ids[:, :8], use_cache=True)
    second = model(ids[:, 8:], past_key_values=first.past_key_values)
    (first.logits.sum() + second.logits.sum()).backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(ids, use_cache=False).logits.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert apart(got[name], parameter.grad) < 1e-4 * max(1.0, parameter.grad.abs().max().item()), name


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_bfloat16(family):
    """The distance from float32 is at most twice that of transformers in bfloat16."""
    model, ids = build(family), tokens(2, 80)
    with torch.no_grad():
        want = model(ids).logits
        model.bfloat16()
        model.config.dtype = torch.bfloat16
        theirs = (model(ids).logits.float() - want).norm()
        enable()
        assert (model(ids).logits.float() - want).norm() < 2 * theirs
        cache = model(ids[:, :70], use_cache=True).past_key_values
        assert cache.get_recurrent_state(0).dtype == torch.float32
        model(ids[:, 70:71], past_key_values=cache)


def classes():
    modules = [(sys.modules[f"transformers.models.{f.name}.modeling_{f.name}"], f) for f in MODEL_PATCHES]
    return [getattr(module, name) for module, f in modules for name in (f.layer, f.model)]


def test_enable_and_disable():
    enable()
    disable()
    before = [owner.__dict__["forward"] for owner in classes()]
    report = enable()
    ours = [owner.__dict__["forward"] for owner in classes()]
    assert all(a is not b for a, b in zip(before, ours, strict=True))
    assert enable() is report and is_enabled()
    assert [owner.__dict__["forward"] for owner in classes()] == ours
    assert list(report.families) == NAMES and not report.skipped
    assert "Qwen3NextGatedDeltaNet.forward" in str(report) and f"{len(NAMES)} families run on lineate" in str(report)
    disable()
    disable()
    assert not is_enabled()
    assert all(a is owner.__dict__["forward"] for a, owner in zip(before, classes(), strict=True))


def test_context_manager():
    enable()
    disable()
    before = [owner.__dict__["forward"] for owner in classes()]
    with pytest.raises(KeyError), enabled() as report:
        assert report.families and is_enabled()
        raise KeyError
    assert [owner.__dict__["forward"] for owner in classes()] == before
    enable()
    with enabled():
        pass
    assert is_enabled()


def test_some_families_missing(monkeypatch):
    monkeypatch.setattr(
        integration, "MODEL_PATCHES", (*MODEL_PATCHES[:1], MODEL_PATCHES[1].__class__("gone", "A", "B", max))
    )
    report = enable()
    assert list(report.families) == ["qwen3_next"] and "gone" in report.skipped["gone"]
    assert "left as it is" in str(report)
    disable()
    monkeypatch.setattr(integration, "MODEL_PATCHES", integration.MODEL_PATCHES[1:])
    with pytest.raises(ImportError, match=r"transformers must have one of gone, got .* upgrade"):
        enable()
    assert not is_enabled()


def test_a_class_that_inherits_its_forward_is_left_as_it_is(monkeypatch):
    """disable() could not restore such a class; the other families are enabled."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    heir = type("Heir", (modeling.Qwen3_5GatedDeltaNet,), {})
    monkeypatch.setattr(modeling, "Qwen3_5GatedDeltaNet", heir)
    report = enable()
    assert "Heir must define forward itself" in report.skipped["qwen3_5"]
    assert len(report.families) == len(NAMES) - 1 and "forward" not in vars(heir)


def test_old_or_missing_transformers(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr("transformers.cache_utils.Cache.update_conv_state")
        with pytest.raises(ImportError, match=r"without Cache.update_conv_state; run pip install -U transformers"):
            enable()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'lineate\[hf\]'"):
        enable()
    assert not is_enabled()


def test_bad_borders():
    model, ids = build("qwen3_5"), tokens(1, 10)
    enable()
    with pytest.raises(ValueError, match="cu_seq_lens_q must go up from 0 to at most"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 7, 12]))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values must be empty for packed sequences"):
        model(ids, past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 5, 10]))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_compiles(family):
    model, ids = build(family), tokens(1, 40)
    enable()
    with torch.no_grad():
        assert apart(torch.compile(model)(ids, use_cache=False).logits, model(ids, use_cache=False).logits) < 1e-5


def test_packed_texts_on_a_cache_that_has_seen_tokens_are_refused(model):
    """This holds whichever way their borders are given; without borders the same call succeeds."""
    enable()
    with torch.no_grad():
        cache = model(tokens(1, 2), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="past_key_values must be empty for packed sequences"):
            model(tokens(1, 6), past_key_values=cache, position_ids=torch.tensor([[2, 3, 4, 0, 1, 2]]))
        model(tokens(1, 6), past_key_values=cache, position_ids=torch.arange(2, 8)[None])
