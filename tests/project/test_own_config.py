"""A configuration of a user's mixer may have dataclasses inside; what config.json cannot hold is refused."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch import nn

from lineate.layers import MixerKind, register, registry
from lineate.models import FeedConfig, HybridConfig, HybridLM


@dataclass(frozen=True)
class Other:
    """Sizes of another class."""

    width: int


@dataclass
class Thawed:
    """Sizes that are not frozen."""

    width: int = 1


@dataclass(frozen=True)
class Loose:
    """A configuration with one inside that is not frozen."""

    thawed: Thawed


class Nothing(nn.Module):
    """A mixer without tensors."""

    state_spec = ()


@pytest.fixture
def kind() -> Iterator[MixerKind]:
    with registry.temporary_rows():
        yield MixerKind("Y", "nothing", "Nothing", Other, lambda model, config: Nothing())


@dataclass(frozen=True)
class Inner:
    """Sizes inside other sizes."""

    width: int
    kernels: tuple[int, ...] | None = None
    twice: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "twice", 2 * self.width)


@dataclass(frozen=True)
class Middle:
    """Sizes with other sizes inside, one of which may be left out."""

    inner: Inner
    other: Inner | None = None
    named: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Outer:
    """Sizes two levels deep, and fields of types that config.json cannot hold."""

    middle: Middle = Middle(Inner(3))
    pair: tuple = (1, 2)
    two: Inner | Other | None = None
    listed: list[int] | None = None
    anything: Any | None = None


def nested(kind: MixerKind, **given: Any) -> HybridConfig:
    register(replace(kind, config=Outer))
    return HybridConfig(9, 8, 1, "Y", feed=FeedConfig(4), mixers={"nothing": Outer(**given)})


@pytest.mark.parametrize("middle", [
    Middle(Inner(3)), Middle(Inner(4, (2, 5)), Inner(6)), Middle(Inner(1), named={"a": 1}),
])  # fmt: skip
def test_a_configuration_may_have_dataclasses_inside(kind, tmp_path, middle):
    config = nested(kind, middle=middle)
    written = json.loads(json.dumps(config.to_dict()))
    assert written["mixers"]["nothing"]["fields"]["middle"]["inner"]["width"] == middle.inner.width
    again = HybridConfig.from_dict(written)
    assert again == config and again.mixers["nothing"].middle == middle and again.mixers["nothing"].pair == (1, 2)
    HybridLM(config).save_pretrained(tmp_path)
    assert HybridLM.from_pretrained(tmp_path, progress=False).config == config


def test_what_a_configuration_says_of_dataclasses_inside(kind):
    for given, error, message in (
        ({"middle": Middle(Inner(0))}, ValueError, "Inner.width must be at least 1, got 0"),
        ({"middle": Middle(Inner(2, (1.5,)))}, TypeError, "every number of Inner.kernels must be an int"),
        ({"middle": Middle(Other(2))}, TypeError, "Middle.inner must be a Inner, got Other"),
        ({"middle": Inner}, TypeError, "Outer.middle must be a Middle, got <class"),
        ({"two": 3}, TypeError, "Outer.two must be a Inner or a Other, got 3"),
        ({"listed": [1]}, TypeError, r"Outer.listed must be declared as .*, got list\[int\] \| None; change"),
        ({"anything": 3}, TypeError, r"Outer.anything must be declared as .*, got .*Any.*; change"),
    ):
        with pytest.raises(error, match=message):
            nested(kind, **given)
    register(replace(kind, config=Loose))
    with pytest.raises(TypeError, match=r"Loose.thawed must be a value of a frozen dataclass, got Thawed; use @data"):
        HybridConfig(9, 8, 1, "Y", feed=FeedConfig(4), mixers={"nothing": Loose(Thawed())})
    written = nested(kind).to_dict()
    fields = written["mixers"]["nothing"]["fields"]
    for middle, error, message in (
        ({"inner": {"width": 3, "hight": 2}}, ValueError, r"\['nothing'\].middle.inner has unknown keys 'hight'"),
        ({"inner": {}}, ValueError, r"\['nothing'\].middle.inner must have width, got none"),
        ({"inner": [3]}, TypeError, r"Middle.inner must be a Inner, got \[3\]"),
        ([], TypeError, r"Outer.middle must be a Middle, got \[\]"),
    ):
        entry = {**written["mixers"]["nothing"], "fields": {**fields, "middle": middle}}
        with pytest.raises(error, match=message):
            HybridConfig.from_dict({**written, "mixers": {"nothing": entry}})


@pytest.mark.parametrize(("given", "why"), [
    ({"two": Inner(3)}, r"two would be \{'width': 3, 'kernels': None\}, not Inner\(width=3, "),
    ({"middle": Middle(Inner(3), named={1: 2})}, r"middle would be .*\{'1': 2\}\), not .*\{1: 2\}\)"),
    ({"pair": (1, {2})}, "Object of type set is not JSON serializable"),
    ({"pair": (1, (2, 3))}, r"pair would be \(1, \[2, 3\]\), not \(1, \(2, 3\)\)"),
])  # fmt: skip
def test_a_configuration_that_could_not_be_read_back_is_not_written(kind, tmp_path, given, why):
    config = nested(kind, **given)
    message = rf"mixers\['nothing'\] cannot be written to config.json and read back: {why}.*; use fields of bool, int"
    with pytest.raises(ValueError, match=message):
        HybridLM(config).save_pretrained(tmp_path / "model")
    assert not list(tmp_path.rglob("*.safetensors"))
