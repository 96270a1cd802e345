"""A mixer of the user's own (examples/own_rule.py) is trained, resumed, planned, pictured, saved and loaded."""

import importlib.util
import json
import runpy
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from runs import assert_same_bits, everything, make_config
from torch import nn

from lineate.flops import Heads
from lineate.layers import GatedLinearAttention, MixerKind, kind_of, kinds, register, registry
from lineate.models import FeedConfig, HybridConfig, HybridLM, LinearConfig
from lineate.planning import decode_bytes, plan_flops, plan_memory, plan_training, read_model
from lineate.tasks.model import parse_rule
from lineate.training.prepare import prepare, train
from lineate.training.report import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples/own_rule.py"
SIZES = LinearConfig(heads=2, value_heads=2, key_dim=16, value_dim=16)


@pytest.fixture
def unregistered():
    """The rows as they were before the test, when it ends."""
    with registry.temporary_rows():
        yield


@pytest.fixture
def own_rule(unregistered, monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_rule", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_rule", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(own_rule) -> HybridConfig:
    return HybridConfig(257, 32, 2, "Z", mixers={"mamba2": SIZES}, feed=FeedConfig(48))


def test_the_example_runs_and_is_short(unregistered, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "operations a token" in capsys.readouterr().out
    assert (tmp_path / "out/pictures/state.png").is_file()
    assert len(EXAMPLE.read_text().splitlines()) < 40
    written = json.loads((tmp_path / "out/own_rule/config.json").read_text())["mixers"]["mamba2"]
    assert (written["letter"], written["import"]) == ("Z", "own_rule")


def test_it_is_the_equation(config):
    """The recurrence of the example's first line, token by token, in float64."""
    torch.manual_seed(0)
    mixer = HybridLM(config).double().layers[0].mixer
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    found = kind_of("Z").trace(mixer, x)
    dt = found.log_decay / -mixer.A_log.exp()
    state = torch.zeros(2, 16, 16, dtype=torch.float64)
    outputs = []
    for t in range(9):
        state = state * found.log_decay[0, t].exp()[:, None, None] + found.k[0, t, :, :, None] * found.v[0, t, :, None]
        outputs.append(
            (found.q[0, t, :, None] @ state)[:, 0] / 4 + mixer.D[:, None] * found.v[0, t] / dt[0, t, :, None]
        )
    mixed, *gates = mixer.project(x)
    q, k, v = mixer.split_heads(mixer.conv(mixed)[0])
    (output, memory), _ = mixer.attend(q, k, v, gates, None, None, False)
    torch.testing.assert_close(output[0], torch.stack(outputs), rtol=1e-5, atol=1e-6)  # dt is float32
    torch.testing.assert_close(memory[0], state, rtol=1e-5, atol=1e-6)
    whole, after = mixer(x)
    first, between = mixer(x[:, :5])
    second, last = mixer(x[:, 5:], between)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last["memory"], after["memory"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_trains_and_resumes(config, tmp_path, dtype):
    make_config(tmp_path)  # texts
    torch.manual_seed(7)
    HybridLM(config).save_pretrained(tmp_path / "own")
    options = {"model": str(tmp_path / "own"), "steps": 6, "dtype": dtype}
    plain = train(make_config(tmp_path, **options, out=str(tmp_path / "plain")))
    losses = [line["loss"] for line in read_metrics(tmp_path / "plain") if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]
    first = prepare(make_config(tmp_path, **options))
    for _ in range(4):
        first.train_step()
    assert first.save()
    first.close()
    resumed = train(make_config(tmp_path, **options), resume=True)
    assert resumed.step == 6
    assert_same_bits(everything(resumed), everything(plain))
    again = HybridLM.from_pretrained(tmp_path / "run/model", progress=False)
    assert_same_bits(again.state_dict(), resumed.model.state_dict())


def test_it_is_planned(config):
    """Operations are measured: those of gated linear attention with one decay a head, at any length."""
    model = read_model(config)
    layer, keys = plan_flops(model).layers[0], 2 * 16
    assert layer.projections == 2 * 32 * (3 * keys + keys + 2 + keys)
    heads = Heads(2, 2, 16, 16, corrects=False, per_channel=False)
    for tokens in (64, 100, 2048, 2048 + 64, 100_000, 2**20 + 17):
        assert layer.mixing(tokens) == layer.mixing(tokens, "least") == heads.chunkwise(tokens), tokens
    assert {layer.mixing_one(context) for context in (0, 1, 63, 5000, 10**6)} == {heads.recurrent(1)}
    memory = plan_memory(model)
    assert memory.memory == 2 * 2 * 16 * 16 * 4 and memory.cache_per_token == 0
    assert memory.layers[0].rule == "Mamba-2" and decode_bytes(memory, 1, 10).state == 2 * memory.memory + memory.conv
    training = plan_training(model, 1024, "float32")
    assert 0 < training.activations_recomputed < training.activations


@pytest.mark.parametrize("picture", ["state", "forgetting", "growth"])
def test_it_is_pictured(config, tmp_path, picture):
    pytest.importorskip("matplotlib")
    from lineate.explore.pictures import PictureOptions, find
    from lineate.figures import styled

    HybridLM(config).save_pretrained(tmp_path)
    found = find(picture)
    options = PictureOptions(model=str(tmp_path), tokens=24, **({"layer": 1} if "layer" in found.uses else {}))
    numbers = json.loads(json.dumps(found.compute(options)))
    with styled():
        found.draw(numbers)


def test_it_is_saved_and_loaded(config, tmp_path):
    model = HybridLM(config).eval()
    model.save_pretrained(tmp_path)
    again = HybridLM.from_pretrained(tmp_path, progress=False)
    assert again.config == config and type(again.layers[0].mixer) is type(model.layers[0].mixer)
    assert_same_bits(again.state_dict(), model.state_dict())
    model.layers[1].mixer = GatedLinearAttention.from_config(config, SIZES)
    with pytest.raises(ValueError, match=r"layers\.1\.mixer must be Mamba2, got GatedLinearAttention"):
        model.save_pretrained(tmp_path)


def test_loading_without_registration_names_the_import(config, tmp_path):
    HybridLM(config).save_pretrained(tmp_path)
    code = f"from lineate.models import HybridLM; HybridLM.from_pretrained({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert (
        "config has the mixer 'mamba2', letter 'Z', which is not registered; register it first: import own_rule"
        in run.stderr
    )


@dataclass(frozen=True)
class Sizes:
    """Fields of every kind that is checked."""

    width: int
    kernels: tuple[int, ...] = (2, 4)
    rate: float = 0.5
    shift: float = -1.0
    start: int = 0
    name: str | None = None
    sharp: bool = False


class Nothing(nn.Module):
    """Made of Sizes."""


@pytest.fixture
def kind(unregistered) -> MixerKind:
    return register(MixerKind("Y", "nothing", "Nothing", Sizes, lambda model, config: Nothing()))


def test_a_configuration_of_the_users_own_is_checked_and_kept(kind):
    config = HybridConfig(9, 8, 2, "YG", linear=SIZES, feed=FeedConfig(4), mixers={"nothing": Sizes(3, shift=-2.5)})
    written = json.loads(json.dumps(config.to_dict()))
    assert written["mixers"] == {"nothing": {
        "letter": "Y", "import": __name__, "fields":
        {"width": 3, "kernels": [2, 4], "rate": 0.5, "shift": -2.5, "start": 0, "name": None, "sharp": False},
    }}  # fmt: skip
    assert HybridConfig.from_dict(written) == config and hash(config) == hash(HybridConfig.from_dict(written))
    assert config.part(kind) == Sizes(3, shift=-2.5) and kind in config.mixer_kinds()
    for changes, error, message in (
        ({"width": 0}, ValueError, "Sizes.width must be at least 1, got 0"),
        ({"width": 2.5}, TypeError, "Sizes.width must be an int"),
        ({"kernels": (1, "a")}, TypeError, "every number of Sizes.kernels must be an int"),
        ({"rate": -1.0}, ValueError, "Sizes.rate must be finite and above 0, got -1.0"),
        ({"shift": float("inf")}, ValueError, "Sizes.shift must be finite, got inf"),
        ({"start": -1}, ValueError, "Sizes.start must be at least 0, got -1"),
        ({"name": 3}, TypeError, "Sizes.name must be text, got 3"),
        ({"sharp": 1}, TypeError, "Sizes.sharp must be true or false, got 1"),
    ):
        with pytest.raises(error, match=message):
            replace(config, mixers={"nothing": Sizes(**{"width": 3} | changes)})
    fields = written["mixers"]["nothing"]["fields"]
    for entry, message in (
        ({"letter": "Y", "import": "x", "fields": {**fields, "hight": 2}}, "has unknown keys 'hight'; known are width"),
        ({"letter": "Y", "import": "x", "fields": {}}, "must have width, got none of the name 'width'"),
        ({"letter": "X", "import": "x", "fields": fields}, "mixer 'nothing', letter 'X', which is not registered"),
        ({"letter": "Y", "import": "os; rm", "more": 3}, "must have letter, import and fields"),
        ([], "must have letter, import and fields"),
    ):
        with pytest.raises(ValueError, match=message):
            HybridConfig.from_dict({**written, "mixers": {"nothing": entry}})
    hostile = {"gone": {"letter": "Q", "import": "os; rm", "fields": {}}}
    with pytest.raises(ValueError, match="register it first: import the module that registers it"):
        HybridConfig.from_dict({**written, "mixers": hostile})


def test_what_a_configuration_says_of_missing_and_wrong_mixers(kind):
    sizes = {"vocab_size": 9, "hidden_size": 8, "n_layers": 1, "pattern": "Y", "feed": FeedConfig(4)}
    with pytest.raises(ValueError, match=r"mixers must have 'nothing' for the letter 'Y' .* give mixers="):
        HybridConfig(**sizes)
    with pytest.raises(ValueError, match="must have names of registered kinds"):
        HybridConfig(**sizes, mixers={"nothing": Sizes(1), "other": Sizes(1)})
    with pytest.raises(TypeError, match=r"mixers\['nothing'\] must be a Sizes, got"):
        HybridConfig(**sizes, mixers={"nothing": SIZES})
    with pytest.raises(TypeError, match="mixers must be a dict"):
        HybridConfig(**sizes, mixers=[("nothing", Sizes(1))])


def test_a_letter_and_a_name_have_one_row(kind):
    assert kinds()[-1] is kind and register(replace(kind, label="Again")) is kind_of("Y")
    for changes, message in (
        ({"letter": "G"}, "letter must be free, got 'G', which is Gated DeltaNet's; free are "),
        ({"letter": "X", "name": "titans"}, "name must be free, got 'titans', which is Titans's; choose another"),
        ({"letter": "X", "name": "x", "short": "gdn"}, "short must be free, got 'gdn', which is Gated DeltaNet's"),
        ({"letter": "X", "name": "gdn"}, "name must be free, got 'gdn', which is Gated DeltaNet's"),
    ):
        with pytest.raises(ValueError, match=message):
            register(replace(kind, **changes))
    assert kinds()[-1].letter == "Y"
    with pytest.raises(ValueError, match=r"letter must be one of .*, got 'X'; register it first"):
        kind_of("X")


@dataclass
class Thawed:
    """A configuration that is not frozen."""

    width: int = 1


def test_what_register_says_of_a_wrong_row(kind):
    for changes, error, message in (
        *(({"letter": x}, ValueError, f"letter must be one letter of A .. Z, got {x!r}; free are ") for x in
          ("GG", "q", "", "3", "\u00e9", 3, None)),
        ({"name": ""}, ValueError, "name must be text that is not empty, got ''; give one such as"),
        ({"label": 3}, ValueError, "label must be text that is not empty, got 3"),
        ({"short": 3}, ValueError, "short must be text that is not empty, got 3; .* or None"),
        ({"rule": "mamba"}, ValueError, "rule must be one of linear_attention, .*, got 'mamba'; leave it out"),
        ({"config": int}, TypeError, "config must be a dataclass .*, got <class 'int'>"),
        ({"config": Sizes(1)}, TypeError, r"config must be a dataclass \(the class, not a value of it\), got Sizes"),
        ({"config": Thawed}, TypeError, "config must be a frozen dataclass, got .*Thawed'>; declare it with"),
        ({"section": "lineer"}, ValueError, "section must be one of linear, memory, .*, got 'lineer'; leave it out"),
        ({"section": "linear"}, TypeError, "config must be LinearConfig with section='linear', got Sizes; leave"),
        ({"make": 3}, TypeError, r"make must be a function of \(model, config\), got 3"),
        ({"make": None}, TypeError, r"make must be a function of \(model, config\), got None"),
        ({"make": lambda model: None}, TypeError, r"make must be a function of \(model, config\), got <function"),
        ({"trace": 3}, TypeError, r"trace must be a function of \(mixer, x\), got 3"),
        ({"kept_bytes": 3.5}, TypeError, r"kept_bytes must be a function of \(config, half\), got 3.5"),
        ({"operations": 3}, TypeError, "operations must be Operations.* or None, got 3; None: they are measured"),
        ({"look": "red"}, TypeError, "look must be a Look, got 'red'; give Look"),
        ({"cache": True}, TypeError, "cache must be text, got True; give"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            register(replace(kind, **changes))
        assert kind_of("Y") is kind
    with pytest.raises(TypeError, match="kind must be a MixerKind, got 'Y'; give register"):
        register("Y")


@pytest.mark.parametrize("made, message", [
    (None, r"make of Nothing \(Y\) must return a torch.nn.Module, got None; return the mixer"),
    (nn.Identity(), "must return a module whose state_spec is a tuple of TensorSpec, got None of Identity; declare"),
])  # fmt: skip
def test_what_a_model_says_of_a_make_that_makes_no_mixer(kind, made, message):
    register(replace(kind, make=lambda model, config: made))
    with pytest.raises(TypeError, match=message):
        HybridLM(HybridConfig(9, 8, 1, "Y", feed=FeedConfig(4), mixers={"nothing": Sizes(1)}))


def test_a_row_may_name_the_rule_that_it_runs(unregistered):
    """Then beta in (0, 2) can be asked for if the rule has a beta; the word is that of the row."""
    row = MixerKind("Y", "twice", "Twice", LinearConfig, GatedLinearAttention.from_config, section="linear")
    register(row)
    with pytest.raises(ValueError, match="'twice-2' has no beta, only deltanet, gdn"):
        parse_rule("twice-2")
    register(replace(row, rule="gated_delta_rule"))
    assert parse_rule("twice-2") == ("Y", 2.0) and parse_rule("twice") == ("Y", 1.0)


def test_a_users_kind_may_share_a_section(unregistered):
    """Its sizes stand where those of the built-in mixers do; the file still says what to import."""
    register(MixerKind("X", "mine", "Mine", LinearConfig, lambda *sizes: GatedLinearAttention.from_config(*sizes),
                       section="linear"))  # fmt: skip
    config = HybridConfig(9, 8, 1, "X", linear=SIZES, feed=FeedConfig(4))
    written = config.to_dict()
    assert written["mixers"] == {"mine": {"letter": "X", "import": __name__}}
    assert HybridConfig.from_dict(written) == config
    assert isinstance(HybridLM(config).layers[0].mixer, GatedLinearAttention)


def test_no_kind_of_the_users_leaves_no_mark():
    config = HybridConfig(9, 8, 1, "R", linear=SIZES, feed=FeedConfig(4))
    assert "mixers" not in config.to_dict() and registry.letters().startswith("LRDGKTPNCEAM")
    assert all(kind.built_in for kind in kinds())
