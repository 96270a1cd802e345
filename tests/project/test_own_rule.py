"""A user's own mixer (examples/own_rule.py) is trained, resumed, planned, pictured, saved and loaded."""

import importlib.util
import json
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineate.layers import (
    GatedLinearAttention,
    Memory,
    MixerKind,
    TensorSpec,
    TokenCache,
    kind_of,
    kinds,
    register,
    registry,
)
from lineate.models import FeedConfig, HybridConfig, HybridLM, LinearConfig
from lineate.planning import decode_bytes, plan_flops, plan_memory, plan_training, read_model
from lineate.tasks.model import parse_rule
from lineate.torch_ops.flops import Heads
from lineate.training.prepare import prepare, train
from lineate.training.report import read_metrics
from tests.support import fresh
from tests.support.marks import slow_but
from tests.support.runs import assert_same_bits, everything, make_config

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
    return HybridConfig(257, 32, 2, "Z", mixers={"own": SIZES}, feed=FeedConfig(48))


@pytest.mark.cover
def test_the_example_runs_and_is_short(unregistered, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "operations a token" in capsys.readouterr().out
    assert (tmp_path / "out/pictures/state.png").is_file()
    assert len(EXAMPLE.read_text().splitlines()) < 40
    written = json.loads((tmp_path / "out/own_rule/config.json").read_text())["mixers"]["own"]
    assert (written["letter"], written["import"]) == ("Z", "own_rule")


def test_it_is_the_equation(config):
    """It equals the recurrence of the example's first line, token by token, in float64."""
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


@pytest.mark.cover
@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], ["bfloat16"]))
def test_it_trains_and_resumes(config, tmp_path, dtype):
    make_config(tmp_path)  # writes the documents
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


@pytest.mark.cover
def test_it_is_planned(config):
    """Operations are measured: they are those of gated linear attention with one decay per head, at any length."""
    model = read_model(config)
    layer, keys = plan_flops(model).layers[0], 2 * 16
    assert layer.projections == 2 * 32 * (3 * keys + keys + 2 + keys)
    heads = Heads(2, 2, 16, 16, corrects=False, per_channel=False)
    for tokens in (64, 100, 2048, 2048 + 64, 100_000, 2**20 + 17):
        assert layer.mixing(tokens) == layer.mixing(tokens, "least") == heads.chunkwise(tokens), tokens
    assert {layer.mixing_one(context) for context in (0, 1, 63, 5000, 10**6)} == {heads.recurrent(1)}
    memory = plan_memory(model)
    assert memory.memory == 2 * 2 * 16 * 16 * 4 and memory.cache_per_token == 0
    assert memory.layers[0].rule == "own Mamba" and decode_bytes(memory, 1, 10).state == 2 * memory.memory + memory.conv
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
    with pytest.raises(ValueError, match=r"layers\.1\.mixer must be OwnMamba, got GatedLinearAttention"):
        model.save_pretrained(tmp_path)


@pytest.mark.cover
def test_loading_without_registration_names_the_import(config, tmp_path):
    HybridLM(config).save_pretrained(tmp_path)
    code = f"from lineate.models import HybridLM; HybridLM.from_pretrained({str(tmp_path)!r})"
    run = fresh.run(code)
    assert run.returncode == 1
    assert (
        "config has the mixer 'own', letter 'Z', which is not registered; register it first: import own_rule, or, "
        "on the command line, lineate --import own_rule ..." in run.stderr
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
    """A mixer made from Sizes."""


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
    with pytest.raises(ValueError, match=r"register it first: import the module .*, lineate --import MODULE \.\.\."):
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
        ({"section": "lineer"}, ValueError, "section must be one of linear, mamba, .*, got 'lineer'; leave it out"),
        ({"section": "linear"}, TypeError, "config must be LinearConfig with section='linear', got Sizes; leave"),
        ({"make": 3}, TypeError, r"make must be a function of \(model, config\), got 3"),
        ({"make": None}, TypeError, r"make must be a function of \(model, config\), got None"),
        ({"make": lambda model: None}, TypeError, r"make must be a function of \(model, config\), got <function"),
        ({"trace": 3}, TypeError, r"trace must be a function of \(mixer, x\), got 3"),
        ({"kept_bytes": 3.5}, TypeError, r"kept_bytes must be a function of \(config, half\), got 3.5"),
        ({"operations": 3}, TypeError, "operations must be Operations.* or None, got 3; None: they are measured"),
        ({"step": 3}, TypeError, r"step must be StepSpec\(...\) or None, got 3; None: decoding calls the mixer"),
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


def answers(x: Tensor, answer: str) -> Any:
    """Return a right or a wrong answer of a forward to x."""
    memory = torch.zeros(x.shape[0], 3, 2)
    return {
        "right": (x, Memory({"memory": memory})), "list": [x, Memory({"memory": memory})],
        "y": x, "nothing": None, "one": (x,), "three": (x, Memory({"memory": memory}), memory),
        "swapped": (Memory({"memory": memory}), x), "no state": (x, None), "dict": (x, {"memory": memory}),
        "narrow": (x[..., :1], Memory({"memory": memory})), "name": (x, Memory({"S": memory})),
        "more": (x, Memory({"memory": memory, "S": memory})), "shape": (x, Memory({"memory": memory.mT})),
        "rows": (x, Memory({"memory": memory.repeat(2, 1, 1)})), "cache": (x, TokenCache({"memory": x}, x.shape[1])),
    }[answer]  # fmt: skip


class Answering(nn.Module):
    """A mixer that returns what the test asks for."""

    state_spec = (TensorSpec("memory", (3, 2), torch.float32),)

    def __init__(self, answer: str = "right"):
        super().__init__()
        self.answer = answer

    def forward(self, x, state=None, cu_seqlens=None):
        return answers(x, self.answer)


def make_answering(kind: MixerKind, answer: str) -> HybridLM:
    register(replace(kind, make=lambda model, config: Answering(answer)))
    return HybridLM(HybridConfig(9, 8, 2, "GY", linear=SIZES, feed=FeedConfig(4), mixers={"nothing": Sizes(1)}))


WRONG_ANSWERS = [
    ("y", TypeError, r"got a Tensor of shape \(1, 3, 8\); write return y, Memory\(\{'memory': \.\.\.\}\)"),
    ("nothing", TypeError, "got None; write"),
    ("one", TypeError, "got a tuple of 1; write"),
    ("three", TypeError, "got a tuple of 3; write"),
    ("swapped", TypeError, "got a Memory for y; write"),
    ("no state", TypeError, "got None for state; write"),
    ("dict", TypeError, "got a dict for state; write"),
    ("cache", TypeError, "got a TokenCache for state; write"),
    ("narrow", ValueError, r"got y of shape \(1, 3, 1\); write"),
    ("name", ValueError, "got a state with S; write"),
    ("more", ValueError, "got a state with memory, S; write"),
    ("shape", ValueError, r"got memory of shape \(1, 2, 3\); write"),
    ("rows", ValueError, r"got memory of shape \(2, 3, 2\); write"),
]
EXPECTED = (
    r"forward of Answering must return \(y, state\), with y of the shape of x, \(1, 3, 8\), and state a Memory as its "
    r"state_spec says: memory \(1, 3, 2\); "
)


@pytest.mark.parametrize(("answer", "error", "message"), WRONG_ANSWERS, ids=[case[0] for case in WRONG_ANSWERS])
def test_what_a_model_says_of_a_forward_that_returns_something_else(kind, answer, error, message):
    model, ids = make_answering(kind, answer), torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(error, match=EXPECTED + message):
        model(ids)
    model.layers[1].recompute = True
    with pytest.raises(error, match=EXPECTED + message):
        model(ids)


@pytest.mark.cover
@pytest.mark.parametrize("answer", ["right", "list"])
def test_a_forward_that_returns_a_pair_passes(kind, answer):
    model, ids = make_answering(kind, answer), torch.zeros(2, 3, dtype=torch.long)
    state = model(ids).state
    assert model(ids, state=state).state.layers[1]["memory"].shape == (2, 3, 2)


@pytest.mark.slow
def test_the_results_of_a_forward_are_checked_in_compiled_models(kind):
    model, ids = make_answering(kind, "right"), torch.zeros(1, 3, dtype=torch.long)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
    model.layers[1].mixer.answer = "no state"
    torch._dynamo.reset()
    with pytest.raises(TypeError, match=EXPECTED + "got None for state"):
        torch.compile(model, backend="eager")(ids)


def test_the_planner_checks_the_results_of_a_forward(kind):
    model = make_answering(kind, "right")
    assert plan_flops(read_model(model.config)).layers[1].mixing(100) == 0
    for answer, message in (("y", "got a Tensor of shape"), ("no state", "got None for state")):
        register(replace(kind, make=lambda model, config, answer=answer: Answering(answer)))
        with pytest.raises(TypeError, match=f"forward of Answering must return .*{message}"):
            plan_flops(read_model(model.config)).layers[1].mixing(100)


class Growing(nn.Module):
    """A mixer that remembers its inputs, or as many of their channels and copies as a test asks for."""

    state_spec = (TensorSpec("inputs", ("t", 8), torch.float32),)
    width, extra = 8, 0

    def forward(self, x, state=None, cu_seqlens=None):
        new = {"inputs": x.repeat(1 + self.extra, 1, 1)[..., : self.width]}
        return x, TokenCache.of(new, cu_seqlens) if state is None else state.append(new)


def test_what_a_model_says_of_a_wrong_cache(kind):
    register(replace(kind, make=lambda model, config: Growing()))
    model = HybridLM(HybridConfig(9, 8, 1, "Y", feed=FeedConfig(4), mixers={"nothing": Sizes(1)}))
    ids, mixer = torch.zeros(1, 3, dtype=torch.long), model.layers[0].mixer
    state = model(ids, state=model(ids).state).state
    assert state.layers[0]["inputs"].shape == (1, 6, 8)
    assert model(ids, cu_seqlens=torch.tensor([0, 1, 3])).state.rows == 2
    expected = r"and state a TokenCache as its state_spec says: inputs \(1, t, 8\); got "
    mixer.width = 4
    with pytest.raises(ValueError, match=expected + r"inputs of shape \(1, 3, 4\); write return y, TokenCache\.of\("):
        model(ids)
    mixer.width, mixer.extra = 8, 1
    with pytest.raises(ValueError, match=expected + "a TokenCache of 2 rows"):
        model(ids)


class Stateless(nn.Module):
    """A mixer that remembers nothing."""

    state_spec = ()

    def forward(self, x, state=None, cu_seqlens=None):
        return x, Memory({})


@pytest.mark.parametrize("pattern", ["YG", "GY", "Y"])
def test_a_mixer_may_have_no_state(kind, pattern):
    """Its layers neither say nor ask how many rows there are."""
    register(replace(kind, make=lambda model, config: Stateless()))
    sizes = {"linear": SIZES, "feed": FeedConfig(4), "mixers": {"nothing": Sizes(1)}}
    model = HybridLM(HybridConfig(9, 8, 2, pattern, **sizes)).eval()
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    whole = model(ids)
    first = model(ids[:, :2])
    torch.testing.assert_close(model(ids[:, 2:], state=first.state).logits, whole.logits[:, 2:])
    one, other = (first.state.select(torch.tensor([row])) for row in (1, 0))
    torch.testing.assert_close(model(ids[1:, 2:], state=one).logits, whole.logits[1:, 2:])
    again = model(ids[:, 2:].flip(0), state=type(one).join([one, other]))
    torch.testing.assert_close(again.logits, whole.logits[:, 2:].flip(0))
    assert "no tensors" in repr(first.state)
    if "G" in pattern:
        with pytest.raises(ValueError, match="state must have 1 rows"):
            model(ids[:1], state=first.state)


def test_a_row_may_name_the_rule_that_it_runs(unregistered):
    """Then beta in (0, 2) can be asked for if the rule has a beta; the rule is then called by the row's name."""
    row = MixerKind("Y", "twice", "Twice", LinearConfig, GatedLinearAttention.from_config, section="linear")
    register(row)
    with pytest.raises(ValueError, match="'twice-2' has no beta, only deltanet, gdn"):
        parse_rule("twice-2")
    register(replace(row, rule="gated_delta_rule"))
    assert parse_rule("twice-2") == ("Y", 2.0, None) and parse_rule("twice") == ("Y", 1.0, None)


def test_a_users_kind_may_share_a_section(unregistered):
    """Its sizes are where those of the built-in mixers are; the file still says what to import."""
    register(MixerKind("X", "mine", "Mine", LinearConfig, lambda *sizes: GatedLinearAttention.from_config(*sizes),
                       section="linear"))  # fmt: skip
    config = HybridConfig(9, 8, 1, "X", linear=SIZES, feed=FeedConfig(4))
    written = config.to_dict()
    assert written["mixers"] == {"mine": {"letter": "X", "import": __name__}}
    assert HybridConfig.from_dict(written) == config
    assert isinstance(HybridLM(config).layers[0].mixer, GatedLinearAttention)


def test_no_kind_of_the_users_leaves_no_mark():
    config = HybridConfig(9, 8, 1, "R", linear=SIZES, feed=FeedConfig(4))
    assert "mixers" not in config.to_dict() and registry.letters().startswith("LRDGKSTPNCEAM")
    assert all(kind.built_in for kind in kinds())
