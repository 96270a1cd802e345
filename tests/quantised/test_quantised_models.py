"""Models with quantised weights: their logits, their states, training, and the wrapper for transformers."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lineate.generation import generate
from lineate.generation.choice import Sampling
from lineate.layers import kinds
from lineate.models import HybridLM, loss
from lineate.models.config import ExpertsConfig
from lineate.planning.memory import plan_memory
from lineate.planning.models import Model, read_model
from lineate.quantised import FORMATS, shrink
from lineate.quantised.which import format_of, quantised_parameters
from lineate.serving.cache.identity import identity_of
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Request
from lineate.training.config import TrainConfig
from lineate.training.prepare import prepare
from tests.support import fresh
from tests.support.families import FAMILIES, build
from tests.support.quantised_weights import EXPERTS, VOCAB, WIDE, realistic, relative, sizes, tokens

ALL = tuple(FORMATS)
CLOSE = {"bfloat16": 0.004, "float16": 0.001, "int8": 0.01, "int4": 0.15, "fp8": 0.05}
"""The relative error of logits, over the float32 model."""


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def kept_bytes(model: HybridLM) -> int:
    """Return the bytes that a model's tensors take."""
    quantised = quantised_parameters(model)
    plain = (x for name, x in model.state_dict().items() if name not in quantised)
    return sum(x.nbytes for x in plain) + sum(x.nbytes_kept for x in quantised.values())


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("letter", [kind.letter for kind in kinds() if kind.built_in])
def test_logits_of_every_mixer(letter, form):
    model, ids = realistic(sizes(2 * letter)), tokens(2, 70)
    wanted = model(ids).logits
    out = shrink(model, form)(ids[:, :50])
    assert relative(out.logits, wanted[:, :50]) < CLOSE[form]
    parts = [out.logits]
    for i in range(50, 70):
        out = model(ids[:, i : i + 1], state=out.state)
        parts.append(out.logits)
    made = torch.cat(parts, 1)
    assert relative(made, wanted) < CLOSE[form]
    assert relative(made, model(ids).logits) < (1e-4 if form != "int4" else 0.01)  # steps and the whole pass


@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_of_every_family(family, tmp_path):
    pytest.importorskip("transformers")
    theirs = build(family, **WIDE[family])
    theirs.get_input_embeddings().weight.mul_(8)  # of order one, of which each layer adds a part, as in realistic()
    for name, x in theirs.named_parameters():
        if family == "olmo_hybrid" and ("post_attention_" in name or "post_feedforward_" in name):
            x.mul_(0.25)  # norms of what a layer adds, which would be of order one too
    if theirs.config.tie_word_embeddings:
        theirs.tie_weights()
    theirs.save_pretrained(tmp_path)
    plain = HybridLM.from_pretrained(tmp_path, progress=False)
    ids = tokens(2, 40)
    quantised = HybridLM.from_pretrained(tmp_path, progress=False, weights="int8")
    assert format_of(quantised) == FORMATS["int8"] and quantised.dtype == torch.float32
    assert relative(quantised(ids).logits, plain(ids).logits) < CLOSE["int8"]
    shrunk = shrink(plain, "int8")
    for name, x in quantised_parameters(quantised).items():
        assert torch.equal(x.codes, shrunk.get_parameter(name).codes), name
        assert torch.equal(x.scales, shrunk.get_parameter(name).scales), name


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_experts_one_by_one_and_sorted(form, kind):
    experts = ExpertsConfig(6, 2, 32, shared_size=32, scores="sigmoid", groups=2, active_groups=1, kind=kind)
    model = realistic(sizes("G", experts=experts))
    feed = model.layers[0].feed
    x = torch.randn(9, model.config.hidden_size)
    wanted = feed(x)
    shrink(model, form)
    made = feed(x)
    assert relative(made, wanted) < {"bfloat16": 0.01, "float16": 0.002, "int8": 0.02, "int4": 0.3, "fp8": 0.1}[form]
    single = torch.cat([feed(row[None]) for row in x])
    assert relative(single, made) < 1e-5


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_greedy_tokens_of_the_engine_are_those_of_generate(form):
    model = shrink(realistic(sizes("GA", experts=EXPERTS)), form)
    prompts = [tokens(1, 5 + 7 * n, seed=n)[0].tolist() for n in range(3)]
    greedy = Sampling(temperature=0)
    alone = [[int(x) for x in generate(model, [prompt], 8, sampling=[greedy])] for prompt in prompts]
    engine = Engine(model, slots=3, context=128, spacing=64)
    handles = [engine.submit(Request(tuple(prompt), greedy, max_new_tokens=8)) for prompt in prompts]
    while engine.step():
        pass
    assert [list(handle.result(0)[0].tokens) for handle in handles] == alone


LIGHT = """
import sys, torch
from lineate.generation import generate
from lineate.models import HybridLM
for form in FORMS:
    model = HybridLM.from_pretrained(FOLDER, weights=form, progress=False)
    list(generate(model, torch.tensor([[1, 2, 3]]), 3, temperature=0, stop=()))
print([x for x in ("sympy", "torch._dynamo", "torch.distributed.tensor") if x in sys.modules])
"""


@pytest.mark.cover
def test_loading_and_generating_import_nothing_large(tmp_path):
    """torch imports 500 modules, 40 MB, when a tensor class like ours is first dispatched; loading must not need it."""
    realistic(sizes("GA", experts=EXPERTS)).save_pretrained(tmp_path)
    done = fresh.run(f"FORMS, FOLDER = {ALL!r}, {str(tmp_path)!r}" + LIGHT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]"]


def test_identity_tells_formats_apart():
    model = realistic(sizes("GA"))
    found = {identity_of(model)}
    for form in ALL:
        quantised = shrink(copy.deepcopy(model), form)
        found |= {identity_of(quantised), identity_of(copy.deepcopy(quantised).to(torch.bfloat16))}
        assert identity_of(quantised) == identity_of(copy.deepcopy(quantised))
    assert len(found) == 1 + 2 * len(ALL)
    one, other = (shrink(realistic(sizes("GA"), seed), "int8") for seed in (0, 1))
    assert identity_of(one) != identity_of(other)


@pytest.mark.parametrize("form", [None, *ALL])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_bytes_are_allocated_bytes(form, dtype, tmp_path):
    config = sizes("GKMAST", experts=EXPERTS, dense_layers=(0,), tie_embeddings=False, vocab_size=100)
    config = replace(config, prediction=True)
    HybridLM(config).save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False, dtype=dtype, weights=form)
    plan = plan_memory(read_model(tmp_path, dtype, weights=form))
    assert plan.weights == kept_bytes(model)
    if form is not None:
        model.save_pretrained(tmp_path / "quantised")  # whose config.json says the format
        assert plan_memory(read_model(tmp_path / "quantised")).weights == kept_bytes(model)
        assert plan_memory(read_model(config, weights=form)).model == Model(
            "lineate", config, torch.float32, "config", form
        )


def test_loss_of_a_large_vocabulary_is_made_in_blocks(monkeypatch):
    model = shrink(realistic(sizes("G")), "int8")
    ids, targets = tokens(2, 30), tokens(2, 30, seed=1).masked_fill(tokens(2, 30, seed=2) < 20, -100)
    with torch.enable_grad():
        norm = model.norm.weight
        whole = model.loss_sum(ids, targets)
        (wanted,) = torch.autograd.grad(whole, norm)
        monkeypatch.setattr(loss, "AT_ONCE", 7 * VOCAB)
        made = model.loss_sum(ids, targets)
        (got,) = torch.autograd.grad(made, norm)
    torch.testing.assert_close(made, whole)
    torch.testing.assert_close(got, wanted)


def test_full_training_of_small_weights_is_refused(tmp_path):
    shrink(HybridLM(sizes("G", vocab_size=256)), "int8").save_pretrained(tmp_path / "quantised")
    (tmp_path / "text.txt").write_text("some words to train on\n" * 50)
    config = TrainConfig(
        model=str(tmp_path / "quantised"), data=(str(tmp_path / "text.txt"),), out=str(tmp_path / "run")
    )
    with pytest.raises(ValueError, match=r"weights that can be trained, got .*frozen in int8; train the checkpoint"):
        prepare(config)
    assert not (tmp_path / "run").exists()


def test_transformers_runs_a_small_model_but_reads_and_writes_none(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    from lineate.integrations.auto import LineateForCausalLM

    model = shrink(realistic(sizes("GA")), "int8")
    ids = tokens(2, 12)
    wrapped = LineateForCausalLM.from_hybrid(model)
    assert torch.equal(wrapped(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"cannot write quantised weights; use model\.to_hybrid"):
        wrapped.save_pretrained(tmp_path / "theirs")
    wrapped.to_hybrid().save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"cannot read weights of int8; use .*from_hybrid\("):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
