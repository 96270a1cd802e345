"""save_pretrained refuses what its config.json does not describe, and saves a model that only runs differently."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lineate.layers import GatedDeltaNet, RMSNorm, ShortConvolution, SwiGLU, Titans, TTTLinear
from lineate.models import HybridLM, preset
from lineate.models.config import ExpertsConfig
from lineate.models.hybrid import check_saveable
from lineate.training.distributed import World
from lineate.training.prepare import prepare
from tests.support.ranks import run_ranks
from tests.support.runs import make_config


class Doubled(GatedDeltaNet):
    """A mixer with the same tensors but other numbers."""

    def forward(self, x, state=None, cu_seqlens=None):
        y, state = super().forward(x, state, cu_seqlens)
        return 2 * y, state


class Half(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


class Other(HybridLM):
    def logits(self, x):
        return -super().logits(x)


SAME_NAME = type("GatedDeltaNet", (GatedDeltaNet,), {"__module__": "elsewhere"})


def build(pattern: str = "GGA", **changes) -> HybridLM:
    torch.manual_seed(0)
    config = replace(preset("tiny", pattern, vocab_size=32), n_layers=len(pattern), **changes)
    return HybridLM(config).eval()


def mixer_of(kind: type, *given, **named):
    def change(model):
        model.layers[0].mixer = kind(128, 2, *given, **named)

    return change


def assign(path: str, value):
    def change(model):
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value() if callable(value) else value)

    return change


def retype(path: str, kind: type):
    def change(model):
        model.get_submodule(path).__class__ = kind

    return change


def linear(inside: int, out: int, bias: bool = False):
    return lambda: nn.Linear(inside, out, bias=bias)


REFUSED = {
    # a part of another class
    "mixer": ("GGA", mixer_of(Doubled, key_dim=64), r"layers\.0\.mixer must be GatedDeltaNet, got Doubled"),
    "another rule's": ("GGA", mixer_of(TTTLinear), r"layers\.0\.mixer must be GatedDeltaNet, got TTTLinear"),
    "of the same name": ("GGA", retype("layers.1.mixer", SAME_NAME), "linear.GatedDeltaNet, got elsewhere"),
    "projection": ("GGA", retype("layers.0.mixer.in_proj", Half), r"mixer\.in_proj must be Linear, got Half"),
    "feed": ("GGA", assign("layers.1.feed", lambda: nn.Identity()), r"layers\.1\.feed must be SwiGLU, got Identity"),
    "norm": ("GGA", assign("layers.2.mixer_norm", lambda: nn.RMSNorm(128)), "must be lineate.*RMSNorm, got torch"),
    "last norm": ("GGA", assign("norm", lambda: nn.LayerNorm(128)), "norm must be RMSNorm, got LayerNorm"),
    "embedding": ("GGA", retype("embed", type("Mine", (nn.Embedding,), {})), "embed must be Embedding, got .*Mine"),
    "the model itself": ("GGA", lambda model: setattr(model, "__class__", Other), "model must be HybridLM, got Other"),
    "compiled part": ("GGA", lambda m: m.layers.__setitem__(0, torch.compile(m.layers[0])), r"module\.compile\(\)"),
    "parametrised": ("GGA", lambda m: parametrizations.weight_norm(m.layers[0].mixer.out_proj), "ParametrizedLinear"),
    # parts that are too many or too few
    "head beside a tied one": ("GGA", assign("head", linear(128, 32)), "head must be nothing, got Linear"),
    "no convolution": ("GGA", assign("layers.0.mixer.conv", None), "conv must be ShortConvolution, got nothing"),
    "one layer more": ("GGA", lambda m: m.layers.append(m.layers[0]), r"layers\.3 must be nothing, got Block"),
    "one layer less": ("GGA", lambda m: m.layers.__delitem__(2), r"layers\.2 must be Block, got nothing"),
    "extra part": ("GGA", lambda m: m.add_module("extra", nn.Identity()), "extra must be nothing, got Identity"),
    # tensors
    "bias": ("GGA", assign("layers.0.mixer.in_proj", linear(128, 516, True)), r"bias must have nothing, got"),
    "size": ("GGA", assign("layers.0.feed", lambda: SwiGLU(128, 64)), r"\.out_features must be 768, got 128"),
    "taps": ("GGA", assign("layers.0.mixer.conv", lambda: ShortConvolution(384, 3)), r"shape \(384, 4\), got shape"),
    "buffer": ("GGA", lambda m: m.norm.register_buffer("shift", torch.ones(128)), "norm.shift must have nothing, got"),
    # settings
    "rope": ("GGA", assign("layers.2.mixer.rope_theta", 5e5), r"rope_theta must be 10000.0, got 500000.0"),
    "gate": ("GGA", assign("layers.2.mixer.gated", False), r"layers\.2\.mixer\.gated must be True, got False"),
    "epsilon": ("GGA", assign("layers.0.mixer_norm", lambda: RMSNorm(128, 1e-3)), r"eps must be 1e-06, got 0.001"),
    "activation": ("GGA", assign("layers.0.mixer.norm.activation", "sigmoid"), "must be 'silu', got 'sigmoid'"),
    "beta": ("GGA", assign("layers.0.mixer.beta_scale", 2.0), r"beta_scale must be 1.0, got 2.0"),
    "beta, a tensor": ("GGA", assign("layers.0.mixer.beta_scale", torch.ones(900)), "must be 1.0, got a Tensor"),
    "feature map": ("L", assign("layers.0.mixer.feature_map", lambda: torch.relu), "'elu.1', got a builtin"),
    "order of norms": ("GGA", assign("layers.0.norm_after", True), r"norm_after must be False, got True"),
    "memory": ("N", mixer_of(Titans, clip=3.0, head_dim=64), r"layers\.0\.mixer\.clip must be 1.0, got 3.0"),
    "router": ("G", assign("layers.0.feed.renormalize", False), r"feed\.renormalize must be True, got False"),
    "configuration": ("GGA", lambda m: setattr(m, "config", replace(m.config, norm_eps=0.1)), "eps must be 0.1"),
    # methods of one object
    "forward": ("GGA", assign("layers.1.mixer.forward", lambda: torch.relu), r"mixer\.forward must be that of GatedD"),
    "another's": ("GGA", lambda m: setattr(m.layers[0].feed, "forward", m.layers[1].feed.forward), "that of SwiGLU"),
    "attend": ("GGA", assign("layers.1.mixer.attend", lambda: torch.relu), r"mixer\.attend must be that of GatedDelta"),
    "inside a block": ("GGA", assign("layers.1.mix_and_feed", lambda: torch.relu), "feed must be that of Block"),
    "logits": ("GGA", assign("logits", lambda: torch.relu), "model.logits must be that of HybridLM"),
    "class variable": ("GGA", assign("layers.0.mixer.gates", ("values",)), "gates must be that of GatedDeltaNet"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_configuration_does_not_describe_is_refused(case, tmp_path):
    pattern, change, message = REFUSED[case]
    model = build(pattern, **({"experts": ExpertsConfig(4, 2, 16)} if case == "router" else {}))
    check_saveable(model)
    change(model)
    with pytest.raises(ValueError, match=message) as error:
        model.save_pretrained(tmp_path / "folder")
    assert "configuration does not describe" in str(error.value) and "\n" not in str(error.value)
    assert "tensor(" not in str(error.value)
    assert not (tmp_path / "folder").exists()


def test_all_differences_are_counted(tmp_path):
    model = build()
    model.layers[0].mixer.beta_scale = model.layers[1].mixer.beta_scale = 2.0
    model.layers[2].mixer.gated = False
    with pytest.raises(ValueError, match=r"layers\.0\..* must be 1.0, got 2.0 \(and 2 more differences\)"):
        model.save_pretrained(tmp_path)


def test_what_is_on_no_device_is_refused(tmp_path):
    model = build()
    model.layers[1].to("meta")
    with pytest.raises(ValueError, match=r"cannot save layers\.1\..*, which is on the meta device"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def hooked(model: HybridLM) -> None:
    model.layers[0].register_forward_hook(lambda *_: None)
    model.layers[1].mixer.register_forward_pre_hook(lambda *_: None)


def compiled(model: HybridLM) -> None:
    model.layers[0].compile(backend="eager")
    model.layers[1].mixer.forward = torch.compile(model.layers[1].mixer.forward, backend="eager")


def recomputed(model: HybridLM) -> None:
    model.train()
    for block in model.layers:
        block.recompute = True


ALLOWED = {
    "as it is": lambda model: None,
    "hooks": hooked,
    "compiled in place": compiled,
    "recomputed in training": recomputed,
    "frozen": lambda model: model.requires_grad_(False),
    "notes": lambda model: setattr(model.layers[0].mixer, "remark", "mine"),
    "other numbers": lambda model: nn.init.normal_(model.norm.weight),
    "shared part": lambda model: setattr(model.layers[1], "feed", model.layers[0].feed),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_how_a_model_runs_does_not_matter(case, tmp_path):
    model, x = build(), torch.arange(12)[None]
    ALLOWED[case](model)
    before = torch.get_rng_state()
    model.save_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)  # a run continues after a save as it would have without it
    with torch.no_grad():
        found, expected = HybridLM.from_pretrained(tmp_path, progress=False)(x).logits, model.eval()(x).logits
    if case == "compiled in place":  # there torch multiplies the few rows
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("pattern", "LRDGKSTPNCEAM")
def test_every_letter_is_saved(pattern, tmp_path):
    model = build(pattern, tie_embeddings=False)
    model.save_pretrained(tmp_path)
    loaded = HybridLM.from_pretrained(tmp_path, progress=False)
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("pattern", "GK")
def test_the_lower_bound_of_gates_is_saved(pattern, tmp_path):
    linear = replace(preset("tiny", pattern).linear, gate_lower_bound=-5.0)
    model = build(pattern, linear=linear)
    assert model.layers[0].mixer.gate_lower_bound == -5.0 and not model.layers[0].mixer.A_log.any()
    model.save_pretrained(tmp_path)
    loaded = HybridLM.from_pretrained(tmp_path, progress=False)
    assert loaded.config == model.config and loaded.layers[0].mixer.gate_lower_bound == -5.0
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(model(tokens)[0], loaded(tokens)[0])


# training, accelerate and transformers


def test_a_run_is_refused_before_its_first_step(tmp_path):
    trainer = prepare(make_config(tmp_path))
    trainer.model.layers[0].mixer.beta_scale = 2.0
    for call in (trainer.run, trainer.save):
        with pytest.raises(ValueError, match=r"layers\.0\.mixer\.beta_scale must be 1.0, got 2.0"):
            call()
    trainer.close()
    assert trainer.step == 0 and not (tmp_path / "run/checkpoints").exists()


def test_offloaded_by_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model = build()
    accelerate.cpu_offload(model.layers[0])
    check_saveable(model)  # its parts are unchanged; only their weights are elsewhere
    model.layers[1].mixer.forward = torch.relu
    with pytest.raises(ValueError, match=r"layers\.1\.mixer\.forward"):
        check_saveable(model)


@pytest.mark.cover
def test_transformers_model(tmp_path):
    auto = pytest.importorskip("lineate.integrations.auto")
    model = auto.LineateForCausalLM.from_hybrid(build())
    model.gradient_checkpointing_enable()
    model.save_pretrained(tmp_path / "good")
    for change, message in (
        (lambda: setattr(model.layers[0].mixer, "beta_scale", 2.0), r"layers\.0\.mixer\.beta_scale must be 1.0, got 2"),
        (lambda: setattr(model, "forward", torch.relu), r"model\.forward must be that of LineateForCausalLM"),
    ):
        change()
        with pytest.raises(ValueError, match=message):
            model.save_pretrained(tmp_path / "bad")
        model.layers[0].mixer.beta_scale = 1.0
    assert not (tmp_path / "bad").exists()


def test_transformers_model_prepared_for_autocast(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    auto = pytest.importorskip("lineate.integrations.auto")
    model = auto.LineateForCausalLM.from_hybrid(build())
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    assert "forward" in vars(prepared)
    prepared.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").is_file()


def sharded(folder):
    world = World.start("cpu", shard="full")
    model = world.wrap(build())
    check_saveable(model)
    found = []
    for change in (lambda: None, lambda: setattr(model.layers[0].mixer, "forward", torch.relu)):
        change()
        with pytest.raises(ValueError) as error:
            model.save_pretrained(folder)
        found.append(str(error.value))
    return found


@pytest.mark.slow
def test_sharded_by_fsdp(tmp_path):
    pieces, changed = run_ranks(2, sharded, tmp_path)[0]
    assert "must be a plain tensor, got a DTensor; use lineate.training.sharded.save_distributed" in pieces
    assert "layers.0.mixer.forward must be that of GatedDeltaNet" in changed
