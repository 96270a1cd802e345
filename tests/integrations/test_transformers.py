"""transformers' own models with and without lineate: logits, gradients, caches, and how it is switched on and off."""

import sys
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lineate.integrations import transformers as integration  # noqa: E402
from lineate.integrations.transformers import (  # noqa: E402
    MODEL_PATCHES,
    OLDEST,
    disable,
    enable,
    enabled,
    is_enabled,
)
from tests.support.transformers_models import MODELS, NAMES, VOCAB, apart, build, call, gradients, split, tokens  # noqa: E402

pytestmark = pytest.mark.usefixtures("disabled")


def compare(model, ids):
    """Return the largest difference of logits, and of gradients relative to the largest entry of each."""
    aims = tokens(*ids.shape, seed=2).flatten()
    logits = []

    def loss():
        logits.append(model(ids, use_cache=False).logits)
        return torch.nn.functional.cross_entropy(logits[-1].flatten(0, 1), aims)

    wanted = gradients(model, loss)
    with enabled():
        got = gradients(model, loss)
    assert got.keys() == wanted.keys()
    if ids.shape[1] == 1:  # softmax over one key: the gradients of q and k are only rounding
        wanted = {n: g for n, g in wanted.items() if "self_attn.q_" not in n and "self_attn.k_" not in n}
    worst = max(apart(got[n], g) / max(1e-3, g.abs().max().item()) for n, g in wanted.items())
    return apart(logits[1], logits[0]), worst


SLOW = pytest.mark.slow


@pytest.mark.parametrize("t", [pytest.param(1, marks=SLOW), 75, pytest.param(300, marks=SLOW)])
def test_logits_and_gradients(model, t):
    logits, worst = compare(model, tokens(2, t))
    assert logits < 1e-5
    assert worst < 1e-4
    print(f"{logits:.1e} logits, {worst:.1e} of the largest entry of each gradient")


LIMITS = (0.02, 0.05)
VARIANTS = {
    "qwen4 with a sigmoid": ("qwen4_exp", {"output_gate_type": "sigmoid"}),
    "bailing without a bound": ("bailing_hybrid", {"kda_safe_gate": False}),
    "glm without a bound": ("glm5_next", {"linear_lower_bound": None}),
    "glm with a bound of -1": ("glm5_next", {"linear_lower_bound": -1.0}),
    "olmo with beta up to 2": ("olmo_hybrid", {"linear_allow_neg_eigval": True}),
    "limits of dt": ("mamba2", {"time_step_limit": LIMITS}),
    "limits of dt and biases": ("bamba", {"time_step_limit": LIMITS, "mamba_proj_bias": True}),
    "no bias": ("granitemoehybrid", {"mamba_conv_bias": False, "time_step_limit": (0.0, 0.05)}),
    "norm, then gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "gate, then norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "a lower limit": ("zamba2", {"time_step_min": 0.05, "add_bias_linear": True}),
    "one group": ("nemotron_h", {"n_groups": 1, "time_step_min": 0.05}),
}


@pytest.mark.cover
@pytest.mark.parametrize("variant", [name for name, (family, _) in VARIANTS.items() if family in NAMES])
def test_variants_of_a_family(variant):
    """The switches of a configuration: bounds, limits, biases, and the order of norm and gate; one row, and calls."""
    family, changes = VARIANTS[variant]
    model = build(family, **changes)
    logits, worst = compare(model, tokens(1, 70))
    assert logits < 1e-5 and worst < 1e-4
    ids = tokens(1, 20)
    with torch.no_grad():
        want = split(model, ids, (13, 1, 1, 5))
        enable()
        assert apart(split(model, ids, (13, 1, 1, 5)), want) < 1e-5


@pytest.mark.parametrize(
    "cuts", [(30, 1, 1, 8), pytest.param((1, 2, 37), marks=SLOW), pytest.param((3, 1, 36), marks=SLOW)]
)  # fmt: skip
def test_prefill_then_decode(model, cuts):
    """Calls one after the other give the logits of transformers in the same calls."""
    ids = tokens(2, 40)
    with torch.no_grad():
        want = split(model, ids, cuts)
        enable()
        assert apart(split(model, ids, cuts), want) < 1e-5


def test_a_cache_passes_between_both(kind):
    """A cache filled without lineate continues with it, and the reverse."""
    ids, cuts = tokens(1, 30), (10, 10, *[1] * 10)
    with torch.no_grad():
        want = split(kind, ids, cuts)
        cache, at = None, 0
        for i, part in enumerate(ids.split(cuts, dim=1)):
            with enabled() if i % 2 else warnings.catch_warnings():
                positions = torch.arange(at, at + cuts[i])[None]
                logits, cache = call(kind, part, cache, use_cache=True, position_ids=positions)
            assert apart(logits, want[:, at : at + cuts[i]]) < 1e-5
            at += cuts[i]


@pytest.mark.cover
@pytest.mark.parametrize("padding", [0, pytest.param(5, marks=SLOW)])
def test_greedy_tokens(model, padding):
    """32 tokens, also of a row that is padded on the left."""
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :padding] = 0
    ask = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    want = model.generate(ids, **ask)
    enable()
    got = model.generate(ids, **ask)
    assert got.shape == (2, 44)
    assert torch.equal(got, want)


def test_gradient_checkpointing(kind):
    ids = tokens(1, 24)
    enable()
    kind.train()
    found = []
    for checkpoint in (False, True):
        if checkpoint:
            kind.gradient_checkpointing_enable()
        found.append(gradients(kind, lambda: kind(ids, labels=ids, use_cache=False).loss))
    kind.gradient_checkpointing_disable()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_gradients_through_a_cache(kind):
    """The backward goes through a prefill and a continuation, which overwrites the cached states."""
    ids = tokens(1, 12)
    enable()
    got = gradients(kind, lambda: split(kind, ids, (8, 4)).sum())
    for name, want in gradients(kind, lambda: call(kind, ids, use_cache=False)[0].sum()).items():
        assert apart(got[name], want) < 1e-4 * max(1.0, want.abs().max().item()), name


@pytest.mark.parametrize("family", [x for x in ("qwen3_next", "kimi_linear", "bailing_hybrid", "bamba") if x in NAMES])
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
        assert cache.layers[0].recurrent_states[0].dtype == torch.float32
        model(ids[:, 70:71], past_key_values=cache)


@pytest.mark.slow
@pytest.mark.parametrize("family", [x for x in ("qwen3_5", "kimi_linear", "mamba2") if x in NAMES])
def test_compiles(family):
    model, ids = build(family), tokens(1, 40)
    enable()
    with torch.no_grad():
        assert apart(torch.compile(model)(ids, use_cache=False).logits, model(ids, use_cache=False).logits) < 1e-5


def classes():
    modules = [
        (sys.modules[f"transformers.models.{f.name}.modeling_{f.name}"], f) for f in MODEL_PATCHES if f.name in NAMES
    ]
    parts = ("layer", "model", "latent", "unpacked")
    return [getattr(module, getattr(f, part)) for module, f in modules for part in parts if getattr(f, part)]


def test_every_family_has_a_model():
    assert [family.name for family in MODEL_PATCHES] == list(MODELS) and VOCAB > 2


def test_enable_and_disable():
    enable()
    disable()
    before = [owner.__dict__["forward"] for owner in classes()]
    report = enable()
    ours = [owner.__dict__["forward"] for owner in classes()]
    assert all(a is not b for a, b in zip(before, ours, strict=True))
    assert enable() is report and is_enabled()
    assert [owner.__dict__["forward"] for owner in classes()] == ours
    assert list(report.families) == NAMES
    assert sorted(report.skipped) == sorted(set(MODELS) - set(NAMES))  # of an older transformers
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
    gone = MODEL_PATCHES[1].__class__("gone", "A", "B", MODEL_PATCHES[1].parts)
    monkeypatch.setattr(integration, "MODEL_PATCHES", (*MODEL_PATCHES[:1], gone))
    report = enable()
    assert list(report.families) == ["qwen3_next"] and "gone" in report.skipped["gone"]
    assert "unchanged: " in str(report)
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
        patch.setattr(transformers, "__version__", f"{OLDEST[0]}.{OLDEST[1] - 1}.3")
        with pytest.raises(ImportError, match=r"must be 5.\d+ or newer, got 5.\d+.3; run pip install -U transformers"):
            enable()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'lineate\[hf\]'"):
        enable()
    assert not is_enabled()
