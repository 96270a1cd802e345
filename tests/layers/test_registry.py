"""Rows of the registry: their counts are the measured ones, and what a rule is traced with gives its output."""

import pickle
import sys
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import lineate
from lineate.layers import kind_of, kinds, register, registry
from lineate.layers.configs import LatentConfig, LinearConfig
from lineate.layers.costs.measuring import kept_bytes, operations_of
from lineate.layers.registry import ORDER, Sizes
from lineate.models import preset
from lineate.rule import DIAGONAL_PLUS_LOW_RANK

LINEAR = "".join(kind.letter for kind in kinds() if kind.section == "linear")
CONFIG = LinearConfig(heads=2, value_heads=4, key_dim=16, value_dim=8)


@pytest.mark.parametrize("letter", [x for x in LINEAR + "AM" if kind_of(x).operations])
def test_measured_operations_are_the_counted_ones(letter):
    """They are measured on torch's meta device, and extrapolated to long sequences."""
    kind, model = kind_of(letter), preset("tiny", pattern=letter)
    part = CONFIG if letter in LINEAR else model.part(kind)
    counted, measured = kind.operations, operations_of(replace(kind, operations=None), model)
    products = counted.projections(model, part)
    made = measured.projections(model, part) - products  # latent attention makes keys and values as it mixes
    assert (made > 0) == (letter == "M")
    for tokens in (64, 100, 1536, 5000, 2**18):
        found = measured.mixing(part, tokens, "executed") + tokens * made
        assert found == counted.mixing(part, tokens, "executed"), tokens
    for context in (63, 2**18) if letter in LINEAR else ():
        assert measured.mixing_one(part, context, "executed") == counted.mixing_one(part, context, "executed")


FULL_RANK = replace(CONFIG, decay_rank=0, gate_rank=0)
NO_GATE = replace(CONFIG, gate_activation="none")


@pytest.mark.parametrize(
    ("letter", "config"),
    [(x, CONFIG) for x in LINEAR if kind_of(x).kept_bytes]
    + [("K", FULL_RANK)]
    + [(x, NO_GATE) for x in "LRDG"]
    + [(x, replace(CONFIG, rate=rate)) for x in "LDGK" for rate in ("exact", "kaczmarz")],
)
def test_measured_bytes_are_the_counted_ones(letter, config):
    kind = kind_of(letter)
    measured = kept_bytes(replace(kind, kept_bytes=None), Sizes(32), config, half=False)
    assert measured == pytest.approx(kind.kept_bytes(config, False), rel=0.02)
    measured = operations_of(replace(kind, operations=None), Sizes(32)).projections(Sizes(32), config)
    assert measured == kind.operations.projections(Sizes(32), config)


@pytest.mark.parametrize("letter", [x for x in LINEAR + "S" if kind_of(x).step])
def test_rows_declare_their_steps(letter):
    """A step names the rule that the mixer runs, and columns of the widths that in_proj makes."""
    kind = kind_of(letter)
    mixer = kind.make(Sizes(32), preset("tiny", pattern="S").mamba if letter == "S" else CONFIG)
    step = kind.step
    assert step is not None and step.mixer is type(mixer) and registry.step_of(mixer) is step
    assert step.rule.name == (kind.rule or kind.name)
    widths = dict(zip(step.columns, mixer.splits[1:], strict=True))
    inputs = mixer.rule_inputs(*mixer.enter(torch.randn(1, 3, 32))[:4])
    assert inputs.gates() == step.rule.gates
    numbers = {name: getattr(inputs, name)[0, 0].numel() for name in inputs.gates()}
    assert widths.get("write") == numbers.get("beta", numbers.get("write"))
    assert widths.get("erase") == numbers.get("erase")
    shape = "none" if inputs.log_decay is None else "head" if inputs.log_decay.dim() == 3 else "channel"
    assert shape == step.decay
    if "rate" in mixer.options:  # a step normalises keys
        assert registry.step_of(kind.make(Sizes(32), replace(CONFIG, rate="exact"))) is None
    mixer.__class__ = type("Own", (type(mixer),), {})
    assert registry.step_of(mixer) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": "channel"}, "decay must be one of head with gated_delta_rule, got 'channel'"),
        (
            {"columns": ("gate", "write")},
            r"columns must have each of decay, gate, write once .* got \('gate', 'write'\)",
        ),
        ({"columns": ("gate", "gate", "decay", "write")}, "columns must have each of decay, gate, write once"),
        ({"decay_gate": "none"}, "decay_gate must be 'none' if decay is, and only then, got 'none' with 'head'"),
        ({"skips": True}, "skips must be left out with gated_delta_rule: steps compute it for rules that accumulate"),
        ({"decay_gate": "step"}, "decay_gate 'step' must be left out with gated_delta_rule"),
        (
            {"rule": DIAGONAL_PLUS_LOW_RANK},
            "rule must have gates that are columns of in_proj, got diagonal_plus_low_rank with probe, direction",
        ),
    ],
)
def test_a_step_is_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(kind_of("G").step, **changes)


@pytest.mark.parametrize("letter", [x for x in LINEAR if kind_of(x).trace])
def test_a_trace_gives_the_output_of_the_rule(letter):
    torch.manual_seed(0)
    kind, x = kind_of(letter), torch.randn(1, 21, 32)
    mixer = kind.make(Sizes(32), CONFIG)
    found = kind.trace(mixer, x)
    caught = []
    mixer.norm.register_forward_pre_hook(lambda norm, inputs: caught.append(inputs[0]))
    _, state = mixer(x)
    options = {"feature_map": "identity", "normalize": True} if letter == "L" else {}
    output, memory = getattr(lineate, kind.rule or kind.name)(**found.given(), **options)
    torch.testing.assert_close(output, caught[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory, state["memory"], rtol=1e-4, atol=1e-5)
    if kind.name.endswith("rule") or letter == "K":
        torch.testing.assert_close(F.normalize(found.k, dim=-1), found.k, rtol=1e-4, atol=1e-4)


def test_every_row_says_how_it_looks_and_is_called():
    rows = kinds()
    for name in ("letter", "name", "label"):
        assert len({getattr(kind, name) for kind in rows}) == len(rows), name
    assert len({kind.short or kind.name for kind in rows}) == len(rows)
    looks = {kind.look for kind in rows}
    assert len(looks) == len(rows) - 1  # latent attention is drawn as the softmax attention that it is
    assert [kind.letter for kind in rows if kind.grows] == ["A", "M"]
    assert "".join(kind.letter for kind in rows if kind.learns) == "TPNCE"
    assert all(kind.built_in for kind in rows)
    assert all(kind.operations and kind.kept_bytes for kind in rows if kind.letter in ORDER)


@pytest.fixture
def empty_place():
    """Undo the registrations of a test when it ends."""
    with registry.temporary_rows():
        yield


def test_a_row_of_lineates_own_parts_belongs_to_who_registers_it(empty_place):
    """Its checkpoint must name the module to import, although every function of the row is lineate's."""
    kind = register(replace(kind_of("G"), letter="W", name="renamed", short=None))
    assert not kind.built_in and kind.module == __name__ and kind_of("G").built_in
    saved = preset("tiny", pattern="WA").to_dict()
    assert saved["mixers"]["renamed"]["import"] == __name__


def test_threads_may_register_and_read(empty_place):
    """A thread that reads while another registers sees a whole table."""
    failed: list[Exception] = []
    before = sys.getswitchinterval()

    def run(job) -> None:
        try:
            job()
        except Exception as error:
            failed.append(error)

    def add(free: str) -> None:
        for letter in free:
            register(replace(kind_of("G"), letter=letter, name=f"row_{letter}", short=None))

    def read() -> None:
        for _ in range(300):
            assert len(kinds()) >= len(ORDER)

    jobs = [*(lambda free=free: add(free) for free in ("BW", "Y", "XZ")), *[read] * 3]
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert failed == []


def test_a_configuration_pickled_before_there_were_mixers_is_whole():
    config = preset("tiny")
    state = {name: value for name, value in vars(config).items() if name != "mixers"}
    old = object.__new__(type(config))
    old.__setstate__(state)
    assert old == config == pickle.loads(pickle.dumps(config)) and repr(old) == repr(config)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_costs_of_gated_latent_attention(gate):
    kind, model = kind_of("M"), Sizes(32)
    for value_dim in (12, 24):  # narrower than the keys, and as wide
        config = LatentConfig(4, rank=20, nope_dim=16, rope_dim=8, value_dim=value_dim, gate=gate)
        measured = operations_of(replace(kind, operations=None), model)
        count = measured.projections(model, config) - 2 * 20 * 4 * (16 + value_dim)  # up_proj belongs to the mixing
        assert count == kind.operations.projections(model, config)
        kept = kept_bytes(replace(kind, kept_bytes=None), model, config, half=False)
        assert kept == pytest.approx(kind.kept_bytes(config, False), rel=0.01)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("letter", "GKUQIF")
def test_all_gates_per_head_are_a_separate_product(letter, monkeypatch):
    """On a GPU no product has rows of an odd size; U has the logits of its writes too, I and F those of key heads."""
    mixer = kind_of(letter).make(Sizes(16), LinearConfig(heads=1, value_heads=5, key_dim=8, value_dim=16))
    x, widths, linear = torch.randn(2, 5, 16), [], F.linear
    wanted = mixer.project(x)

    def counted(y, weight):
        widths.append(len(weight))
        return linear(y.as_subclass(torch.Tensor), weight)

    monkeypatch.setattr(F, "linear", counted)
    found = mixer.project(x.as_subclass(OnGpu))
    assert len(widths) == 2 and widths[0] % 8 == 0 and sum(widths) % 8
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected)
