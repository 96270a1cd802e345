"""HybridLM inside transformers: generate, Trainer, the Auto classes and the evaluation harness on our own model."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from tests.support import families

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache  # noqa: E402

from lineate import layers  # noqa: E402
from lineate.integrations.auto import LineateCache, LineateConfig, LineateForCausalLM  # noqa: E402
from lineate.models import (  # noqa: E402
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    MemoryConfig,
    RwkvConfig,
)

VOCAB = 61
CONFIGS = {
    "GGA": HybridConfig(
        vocab_size=VOCAB, hidden_size=32, n_layers=3, pattern="GGA", linear=LinearConfig(2, 4, 8, 12),
        attention=AttentionConfig(4, 2, 8, rotary_dim=4), feed=FeedConfig(40), pad_token_id=0, initializer_range=0.3,
        zero_centred_norm=True,
    ),
    "KM": HybridConfig(
        vocab_size=VOCAB, hidden_size=32, n_layers=2, pattern="KM", linear=LinearConfig(2, 2, 8, 8),
        latent=LatentConfig(2, 16, 8, 4, 8), feed=FeedConfig(40), dense_layers=(0,),
        experts=ExpertsConfig(4, 2, 16, shared_size=16, scores="sigmoid"), tie_embeddings=True, pad_token_id=0,
        initializer_range=0.3, eos_token_ids=(VOCAB - 1,),
    ),
    "DRL": HybridConfig(
        vocab_size=VOCAB, hidden_size=32, n_layers=3, pattern="DRL", linear=LinearConfig(2, 2, 8, 8),
        feed=FeedConfig(40), pad_token_id=0, initializer_range=0.3,
    ),
    "VVG": HybridConfig(
        vocab_size=VOCAB, hidden_size=32, n_layers=3, pattern="VVG", linear=LinearConfig(2, 2, 8, 8), norm="layer",
        rwkv=RwkvConfig(2, 8, value_dim=6, decay_rank=4, rate_rank=4, value_rank=4, gate_rank=4), embedding_norm=True,
        feed=FeedConfig(40, "channel_mix"), pad_token_id=0, initializer_range=0.3,
    ),
}  # fmt: skip


def build(name):
    torch.manual_seed(0)
    return LineateForCausalLM(LineateConfig.from_hybrid(CONFIGS[name])).eval()


def ids(*shape, seed=1):
    return torch.randint(1, VOCAB - 1, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(model, prompt, steps):
    """Decode greedily with our own loop."""
    out, made = model(prompt), [prompt]
    for _ in range(steps):
        made.append(out.logits[:, -1:].argmax(-1))
        out = model(made[-1], state=out.state)
    return torch.cat(made, 1)


def test_the_same_logits_and_seeds_as_hybrid_lm():
    torch.manual_seed(0)
    plain = HybridLM(CONFIGS["GGA"]).eval()
    model = build("GGA")
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())
    x = ids(2, 9)
    assert torch.equal(model(x).logits, plain(x).logits)
    assert torch.equal(model(x, logits_to_keep=2).logits, plain(x).logits[:, -2:])
    shared = LineateForCausalLM.from_hybrid(plain)
    assert torch.equal(shared(x).logits, plain(x).logits)
    assert shared.embed is plain.embed and shared.to_hybrid().layers is plain.layers
    assert shared.config.hybrid == plain.config and not shared.training


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_our_own_loop(name):
    model, prompt = build(name), ids(2, 7)
    own = greedy(model.to_hybrid(), prompt, 12)
    made = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(made, own)
    without = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, use_cache=False)
    assert torch.equal(without, own)


@pytest.mark.parametrize("name", CONFIGS)
def test_padded_batches_are_single_texts(name):
    model, lengths, n = build(name), (3, 9, 6), 9
    texts = [ids(1, length, seed=length) for length in lengths]
    left = torch.cat([torch.nn.functional.pad(x, (n - x.shape[1], 0)) for x in texts])
    mask = torch.stack([torch.arange(n) >= n - length for length in lengths]).long()
    made = model.generate(left, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=None)
    for row, text in zip(made, texts, strict=True):
        alone = model.generate(text, max_new_tokens=10, do_sample=False, eos_token_id=None)
        assert torch.equal(row[n:], alone[0, text.shape[1] :])
    out = model(left.flip(1), attention_mask=mask.flip(1))  # right-padded
    for row, text in zip(out.logits, texts, strict=True):
        torch.testing.assert_close(row[: text.shape[1]], model(text.flip(1)).logits[0], rtol=1e-5, atol=1e-5)
    kept = model(left, attention_mask=mask, logits_to_keep=1).logits
    torch.testing.assert_close(kept, model(left, attention_mask=mask).logits[:, -1:], rtol=1e-5, atol=1e-6)


def best_of_beams(model, prompt, beams, steps):
    """Run beam search by its definition, without a cache or an end token."""
    kept = [(0.0, prompt)]
    for _ in range(steps):
        options = []
        for score, text in kept:
            log_p = model(text).logits[0, -1].log_softmax(-1)
            for p, token in zip(*log_p.topk(beams), strict=True):
                options.append((score + float(p), torch.cat((text, token.view(1, 1)), 1)))
        kept = sorted(options, key=lambda option: -option[0])[:beams]
    return kept[0][1]


@pytest.mark.parametrize("name", ["GGA", "KM"])
@torch.no_grad()
def test_beam_search(name):
    model, prompt = build(name), ids(2, 5)
    made = model.generate(prompt, max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None)
    for row, text in zip(made, prompt, strict=True):
        assert torch.equal(row[None], best_of_beams(model, text[None], 3, 6))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    padded = model.generate(
        prompt, attention_mask=mask, max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None
    )
    assert torch.equal(padded[0, 5:][None], best_of_beams(model, prompt[:1, 2:], 3, 6)[:, 3:])


def test_sampling():
    model, prompt = build("GGA"), ids(1, 5)
    many = model.generate(prompt, max_new_tokens=4, do_sample=True, top_k=0, num_return_sequences=64)
    assert many.shape == (64, 9) and len({tuple(row.tolist()) for row in many}) > 8
    one = model.generate(prompt, max_new_tokens=4, do_sample=True, top_k=1)
    assert torch.equal(one, greedy(model.to_hybrid(), prompt, 4))


def test_eos_ends_a_text():
    model, prompt = build("KM"), ids(1, 5)
    assert model.generation_config.eos_token_id == [VOCAB - 1]
    eos = int(greedy(model.to_hybrid(), prompt, 3)[0, 6])
    made = model.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=eos)
    assert int(made[0, -1]) == eos and made.shape[1] < 35


def test_continues_from_past_key_values():
    model, prompt, more = build("GGA"), ids(2, 6), ids(2, 4, seed=3)
    both = torch.cat((prompt, more), 1)
    whole = model.generate(both, max_new_tokens=8, do_sample=False)
    cache = model(prompt).past_key_values
    assert cache.get_seq_length() == 6 and cache.batch_size == 2
    kept = copy.copy(cache)
    assert torch.equal(model.generate(both, past_key_values=cache, max_new_tokens=8, do_sample=False), whole)
    assert cache.get_seq_length() == 17 and kept.get_seq_length() == 6  # it moved on in place; the copy did not
    out = model.generate(
        both, past_key_values=kept, max_new_tokens=8, do_sample=False, return_dict_in_generate=True
    )  # fmt: skip
    assert torch.equal(out.sequences, whole) and out.past_key_values is kept
    cache = LineateCache()
    chunked = model.generate(both, past_key_values=cache, max_new_tokens=8, do_sample=False, prefill_chunk_size=3)
    assert torch.equal(chunked, whole)
    step = model(more, past_key_values=model(prompt).past_key_values).logits
    torch.testing.assert_close(step, model(both).logits[:, 6:], rtol=1e-5, atol=1e-5)


def test_a_padded_batch_continues():
    # In float32, roundings would grow to 4e-5.
    model, prompt, more = build("GGA").double(), ids(2, 6), ids(2, 3, seed=3)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4], mask[1, 8] = 0, 0  # padding on the left of the first part, and on the right of the second
    cache = model(prompt, attention_mask=mask[:, :6]).past_key_values
    for given in (mask, mask[:, 6:]):  # for past and new tokens, or for the new ones alone
        out = model(more, attention_mask=given, past_key_values=copy.copy(cache)).logits
        first = model(torch.cat((prompt[:1, 4:], more[:1]), 1)).logits[0, 2:]
        second = model(torch.cat((prompt[1:], more[1:, :2]), 1)).logits[0, 6:]
        torch.testing.assert_close(out[0], first, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(out[1, :2], second, rtol=1e-9, atol=1e-9)


def test_the_cache_selects_rows():
    model, prompt = build("GGA").double(), ids(3, 6)
    cache = model(prompt).past_key_values
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([5, 0]))
    step = ids(2, 1)
    out = model(step, past_key_values=cache).logits[:, 0]
    whole = model(torch.cat((prompt[[2, 0]], step), 1)).logits[:, -1]
    torch.testing.assert_close(out, whole, rtol=1e-9, atol=1e-9)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"cannot be cropped.*copy\.copy"):
        cache.crop(1)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1


@pytest.mark.parametrize("name", CONFIGS)
def test_folders_are_read_both_ways(name, tmp_path):
    model, x = build(name), ids(2, 9)
    model.save_pretrained(tmp_path / "theirs")
    model.to_hybrid().save_pretrained(tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        config = AutoConfig.from_pretrained(folder)
        assert isinstance(config, LineateConfig) and config.hybrid == CONFIGS[name]
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert isinstance(loaded, LineateForCausalLM)
        assert torch.equal(loaded(x).logits, model(x).logits)
        assert loaded.generation_config.eos_token_id == model.config.eos_token_id
        plain = HybridLM.from_pretrained(folder, progress=False)
        assert torch.equal(plain(x).logits, model(x).logits) and plain.config == CONFIGS[name]


@pytest.mark.cover
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_a_published_family_generates(family, tmp_path):
    theirs, x = families.build(family), ids(2, 9)
    theirs.save_pretrained(tmp_path / "theirs")
    model = LineateForCausalLM.from_hybrid(HybridLM.from_pretrained(tmp_path / "theirs", progress=False))
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    made = theirs.generate(x, **options)
    assert torch.equal(model.generate(x, **options), made)
    model.save_pretrained(tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert loaded.config.family == family and torch.equal(loaded.generate(x, **options), made)


def test_half_precision_keeps_the_decay_in_float32(tmp_path):
    build("KM").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, x in model.state_dict().items():
        exact = name.endswith(("A_log", "dt_bias", "router_bias"))
        assert x.dtype == (torch.float32 if exact else torch.bfloat16), name
    assert model.generate(ids(1, 5), max_new_tokens=4).shape == (1, 9)


def test_missing_tensors_are_initialised(tmp_path):
    build("KM").save_pretrained(tmp_path)
    kept = drop_tensors(tmp_path, "layers.0.mixer", "layers.0.feed_norm", "layers.1.feed_norm")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in kept.items())
    assert all(bool(x.isfinite().all()) for x in loaded.state_dict().values())
    assert torch.equal(loaded.layers[1].feed_norm.weight, torch.ones(32))
    assert loaded.layers[0].mixer.A_log.exp().min() >= 1


class OwnMixer(layers.GatedLinearAttention):
    """A mixer with parameters and a buffer of its own, which torch.nn.init does not fill."""

    def add_gates(self):
        super().add_gates()
        self.gain = torch.nn.Parameter(torch.full((self.value_heads,), 3.0))
        self.shift = torch.nn.Parameter(torch.empty(self.value_heads))
        self.register_buffer("turns", torch.arange(4.0), persistent=False)

    def reset_parameters(self):
        with torch.no_grad():
            self.shift.uniform_(5, 6)


@pytest.fixture
def own_mixer():
    """A user's mixer of the letter Z, until the test ends."""
    with layers.registry.temporary_rows():
        layers.register(layers.MixerKind("Z", "own", "Own", LinearConfig, OwnMixer.from_config))
        yield


@pytest.mark.parametrize("lacks", [(), ("gain", "shift"), ("shift",), ("in_proj",)])
def test_missing_tensors_of_a_users_mixer_are_initialised(tmp_path, own_mixer, lacks):
    """Loaded tensors are left unchanged, also by a reset_parameters that writes in place."""
    config = replace(CONFIGS["DRL"], pattern="ZR", mixers={"own": LinearConfig(2, 2, 8, 8)})
    model = HybridLM(config)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(7)
    model.save_pretrained(tmp_path)
    kept = drop_tensors(tmp_path, *(f"layers.0.mixer.{name}" for name in lacks))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in kept.items())
    assert (len(kept) < len(model.state_dict())) == bool(lacks)
    mixer, std = loaded.layers[0].mixer, config.initializer_range
    assert torch.equal(mixer.turns, torch.arange(4.0)) and torch.equal(loaded.layers[2].mixer.turns, torch.arange(4.0))
    if "gain" in lacks:
        assert torch.equal(mixer.gain, torch.full((2,), 3.0))
    if "shift" in lacks:
        assert 5 <= mixer.shift.min() <= mixer.shift.max() <= 6
    if "in_proj" in lacks:
        assert 0.9 * std < mixer.in_proj.weight.std() < 1.1 * std
    assert loaded(ids(1, 5)).logits.isfinite().all()


@pytest.mark.parametrize("letter", "TPNCE")
def test_missing_tensors_of_a_memory_that_learns_are_initialised(tmp_path, letter):
    """They have the values that a new model begins with, as far as those are fixed."""
    torch.manual_seed(0)
    model = HybridLM(replace(CONFIGS["DRL"], pattern=letter, memory=MemoryConfig(2, 8), linear=None))
    model.save_pretrained(tmp_path)
    own = {name for name, _ in model.layers[0].mixer.named_parameters() if "proj" not in name and "norm." not in name}
    kept = drop_tensors(tmp_path, *(f"layers.0.mixer.{name}" for name in own - {"conv.weight"}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(kept) < len(model.state_dict())
    for name, x in model.state_dict().items():
        found = loaded.state_dict()[name]
        if name in kept or bool((x == x.flatten()[0]).all()):
            assert torch.equal(found, x), name
        else:  # drawn again
            assert found.isfinite().all() and 0.2 < found.std() / x.std() < 5, name


def drop_tensors(folder, *prefixes):
    """Take the tensors whose names begin so out of a folder's checkpoint; return the others."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if not (prefixes and name.startswith(prefixes))}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return kept


def test_resized_embeddings():
    for name in ("GGA", "KM"):
        model = build(name)
        model.resize_token_embeddings(VOCAB + 3)
        assert model.config.hybrid.vocab_size == VOCAB + 3
        assert model(ids(1, 4)).logits.shape[-1] == VOCAB + 3
        assert model(torch.tensor([[VOCAB + 2]])).logits.isfinite().all()


def test_config_round_trip_and_unknown_keys(tmp_path):
    for config in CONFIGS.values():
        theirs = LineateConfig.from_hybrid(config)
        assert theirs.hybrid == config
        assert LineateConfig.from_dict(theirs.to_dict()).hybrid == config
        assert LineateConfig(**json.loads(theirs.to_json_string())).hybrid == config
        assert theirs.num_hidden_layers == config.n_layers and theirs.tie_word_embeddings == config.tie_embeddings
    values = CONFIGS["GGA"].to_dict()
    with pytest.raises(ValueError, match="unknown keys 'hiden_size'; known are vocab_size"):
        LineateConfig(**values, hiden_size=3)
    with pytest.raises(ValueError, match=r"config.linear has unknown keys 'head'"):
        LineateConfig(**(values | {"linear": {"head": 3}}))
    with pytest.raises(ValueError, match="n_layers must be at least 1, got 0"):
        LineateConfig(**(values | {"n_layers": 0}))
    config = LineateConfig(**values)
    config.eos_token_id = 5
    assert config.hybrid.eos_token_ids == (5,) and config.eos_token_id == [5]
    assert [f for f in LineateConfig.__annotations__ if f in values] == list(values)


def test_errors():
    model, x = build("GGA"), ids(2, 5)
    with pytest.raises(TypeError, match="must be a LineateCache or None, got DynamicCache"):
        model(x, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"attention_mask must have shape .* = \(2, 5\), got \(2, 4\)"):
        model(x, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="not padding, got only 0"):
        model(x, attention_mask=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="attention_mask must be bool, or 1 for tokens and 0 for padding"):
        model(x, attention_mask=torch.tensor([[0.0, 0, 0, 0, -1e9]] * 2))
    with pytest.raises(ValueError, match="input_ids must lie in"):
        model(x + VOCAB)
    with pytest.raises(ValueError, match="return_dict"):
        model(x, return_dict=False)
    with pytest.raises(ValueError, match="logits_to_keep must be 0 with labels"):
        model(x, labels=x, logits_to_keep=1)
    with pytest.raises(ValueError, match="position_ids must count from 0"):
        model(x[:1], position_ids=torch.tensor([[0, 1, 3, 4, 5]]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'output_attentions'"):
        model(x, output_attentions=True)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(x[:1], assistant_model=build("GGA"), max_new_tokens=3)


def test_loss_of_packed_and_padded_texts():
    model, a, b = build("GGA"), ids(1, 5, seed=5), ids(1, 4, seed=6)
    losses = [model(x, labels=x).loss for x in (a, b)]
    mean = (4 * losses[0] + 3 * losses[1]) / 7
    packed = torch.cat((a, b), 1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    out = model(packed, labels=packed, position_ids=positions)
    torch.testing.assert_close(out.loss, mean)
    torch.testing.assert_close(out.logits[:, 5:], model(b).logits, rtol=1e-5, atol=1e-5)
    padded = torch.cat((a, torch.nn.functional.pad(b, (1, 0))))
    mask = torch.ones_like(padded)
    mask[1, 0] = 0
    torch.testing.assert_close(model(padded, attention_mask=mask, labels=padded).loss, mean)
    for options in ({"attention_mask": mask}, {}):
        own = padded if options else a
        loss = model(own, labels=own, **options).loss
        whole = model(own, labels=own, num_items_in_batch=torch.tensor(14), **options).loss
        torch.testing.assert_close(whole, loss * (7 if options else 4) / 14)


def test_gradient_checkpointing():
    model, x = build("GGA").train(), ids(2, 9)
    model(x, labels=x).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    calls = []
    model.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))
    model(x, labels=x).loss.backward()
    assert len(calls) == 2  # once in the forward, once again in the backward
    for p, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, grad)
    assert model(x).past_key_values is None


@pytest.mark.slow
def test_trainer_learns_saves_and_resumes(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    rows = [{"input_ids": [(i + j) % 17 for j in range(6 + i % 5)]} for i in range(48)]

    def train(folder, collate, resume=None, **options):
        torch.manual_seed(0)
        model = LineateForCausalLM(LineateConfig.from_hybrid(replace(CONFIGS["GGA"], initializer_range=0.05)))
        arguments = TrainingArguments(
            folder, max_steps=12, save_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
            report_to=[], use_cpu=True, seed=0, disable_tqdm=True, lr_scheduler_type="constant", **options,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], data_collator=collate)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def collate(batch):
        n = max(len(row["input_ids"]) for row in batch)
        x = torch.tensor([[0] * (n - len(row["input_ids"])) + row["input_ids"] for row in batch])
        mask = torch.tensor([[0] * (n - len(row["input_ids"])) + [1] * len(row["input_ids"]) for row in batch])
        return {"input_ids": x, "attention_mask": mask, "labels": x.masked_fill(mask == 0, -100)}

    trainer, losses = train(tmp_path / "a", collate, gradient_checkpointing=True, gradient_accumulation_steps=2)
    assert losses[-1] < 0.6 * losses[0]
    assert trainer.evaluate()["eval_loss"] < 0.6 * losses[0]
    again, resumed = train(
        tmp_path / "a", collate, resume=str(tmp_path / "a/checkpoint-6"), gradient_checkpointing=True,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    assert resumed == losses
    for name, x in trainer.model.state_dict().items():
        torch.testing.assert_close(x, again.model.state_dict()[name])
    x = torch.tensor([rows[0]["input_ids"]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a/checkpoint-12").eval()
    torch.testing.assert_close(loaded(x).logits, trainer.model.eval()(x).logits)
    plain = HybridLM.from_pretrained(tmp_path / "a/checkpoint-12", progress=False)
    assert torch.equal(plain(x).logits, loaded(x).logits)

    packing = DataCollatorWithFlattening()  # one row of sequences, separated by position_ids
    assert train(tmp_path / "b", packing)[1][-1] < 0.6 * losses[0]


def byte_tokenizer():
    """Return a tokenizer with two special tokens and one for every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@pytest.mark.slow
@torch.no_grad()
def test_lm_evaluation_harness(tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = replace(CONFIGS["GGA"], vocab_size=len(tokenizer))
    LineateForCausalLM(LineateConfig.from_hybrid(config)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    harness = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=3)
    model = harness.model
    assert isinstance(model, LineateForCausalLM)
    pairs = [("the cat", " sat"), ("a", " much longer continuation"), ("one two three", " four")]
    scores = harness.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    options = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    texts = harness.generate_until(
        [Instance("generate_until", {}, (prompt, options), i) for i, (prompt, _) in enumerate(pairs)]
    )
    for (prompt, more), (score, _), text in zip(pairs, scores, texts, strict=True):
        x = torch.tensor([tokenizer(prompt + more).input_ids])
        log_p = model(x).logits.log_softmax(-1)[0, :-1].gather(1, x[0, 1:, None])[-len(more) :].sum()
        assert score == pytest.approx(float(log_p), rel=1e-4)
        made = model.generate(x[:, : len(prompt)], max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        assert text == tokenizer.decode(made, skip_special_tokens=True)
