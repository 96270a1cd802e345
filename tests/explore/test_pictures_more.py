"""Forgetting, recall and cost: numbers against hand-made cases and other code, and figures drawn from numbers alone."""

import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lineate.explore import forgetting, lengths, load, memories, pictures, subject
from lineate.explore.command import make
from lineate.explore.cost import CostSetting, MeasuredCost
from lineate.explore.memories import DEMO_RULES, FIXED_SIZE, RecallSetting
from lineate.explore.pictures import PictureOptions
from lineate.models import HybridLM
from lineate.models.presets import preset
from tests.support.marks import slow_but

pytest.importorskip("matplotlib", reason="pictures are drawn with it")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.text import Text

from lineate.figures import label_of, styled


@pytest.fixture(scope="module")
def recalled() -> dict[str, Any]:
    return load.compute(PictureOptions(quick=True))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> HybridLM:
    """Return a model with untrained layers of all kinds that forget, with the same decay for every token."""
    torch.manual_seed(0)
    made = HybridLM(preset("tiny", "GKRL")).eval()
    with torch.no_grad():
        for block in made.layers:
            block.mixer.in_proj.weight.zero_()
    monkeypatch.setattr(
        forgetting,
        "open_subject",
        lambda options: subject.Subject(made.config, lambda: made, "m", False, lambda text: [1] * 9, str),
    )
    return made


def drawn(name: str, numbers: dict[str, Any], tmp_path: Path) -> Figure:
    """Draw a figure from the numbers as the JSON file gives them back."""
    pictures.save_numbers(name, numbers, tmp_path / "numbers.json")
    with styled():
        return pictures.find(name).draw(pictures.load_numbers(name, tmp_path / "numbers.json"))


def check_text(figure: Figure) -> None:
    """Check that axes with numbers have labels, that no text leaves the figure, and that no two titles touch."""
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    ticks = {id(x) for axes in figure.axes for x in (*axes.get_xticklabels(), *axes.get_yticklabels())}
    for text in figure.findobj(Text):
        if id(text) not in ticks and text.get_visible() and text.get_text().strip():
            box = text.get_window_extent()
            assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, text.get_text()
    shown = [axes for axes in figure.axes if axes.axison and axes.get_label() != "<colorbar>"]
    boxes = [axes._left_title.get_window_extent() for axes in shown]  # type: ignore[attr-defined]
    for n, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[n + 1 :])
    for axes in shown:
        assert axes.get_xlabel() and (axes.get_ylabel() or axes.images)
    plt.close(figure)


def titles(figure: Figure) -> str:
    return " ".join(" ".join(axes.get_title("left").split()) for axes in figure.axes)


def test_the_pictures_name_options_there_are() -> None:
    known = {field.name for field in fields(PictureOptions)}
    for name in ("forgetting", "recall", "cost"):
        picture = pictures.find(name)
        assert picture.name == name and set(picture.uses) <= known and picture.help.endswith(".")


def test_half_lives_are_the_tokens_until_half_is_left() -> None:
    decay = torch.tensor([0.5, 0.5**0.01, 1.0, 0.0, 0.25])
    assert forgetting.half_life(decay.log()).tolist() == pytest.approx(
        [1, 100, forgetting.LONGEST_HALF_LIFE, 0, 0.5], rel=1e-4
    )
    after = torch.full((7,), -0.099).cumsum(0).exp()  # what remains after 1 .. 7 tokens
    assert forgetting.half_life(torch.tensor(-0.099)).item() == pytest.approx(7, rel=1e-3)
    assert after[-1] == pytest.approx(0.5, abs=1e-3)
    assert [forgetting.number(x) for x in (0.123, 99.7, 12345, 2e9)] == ["0.12", "100", "12000", "1e9 or more"]


def test_forgetting_finds_the_decay_of_every_head_and_channel(model: HybridLM) -> None:
    with torch.no_grad():
        heads = torch.tensor([10.0, 300.0])
        model.layers[0].mixer.A_log.copy_((math.log(2) / heads).log())  # type: ignore[union-attr, operator]
        model.layers[0].mixer.dt_bias.fill_(math.log(math.e - 1))  # type: ignore[union-attr, operator]  # softplus 1
        channels = torch.linspace(2, 50, 128).view(2, 64)
        model.layers[1].mixer.A_log.zero_()  # type: ignore[union-attr, operator]
        model.layers[1].mixer.dt_bias.copy_((math.log(2) / channels).expm1().log())  # type: ignore[union-attr, operator]
    found = forgetting.compute(PictureOptions())
    assert found["letters"] == "GKRL" and found["tokens"] == 9
    assert [(x["layer"], x["letter"], x["decay"]) for x in found["layers"]] == [
        (0, "G", "per head"), (1, "K", "per channel"), (2, "R", "per channel"),
    ]  # fmt: skip
    for name in ("half_life_quarter", "half_life_median", "half_life_three_quarters"):
        first, second, third = (torch.tensor(layer[name]) for layer in found["layers"])
        torch.testing.assert_close(first, heads[:, None], rtol=1e-3, atol=0)
        torch.testing.assert_close(second, channels, rtol=1e-3, atol=0)
        bias = model.layers[2].mixer.decay_proj.bias.view(2, 64)  # type: ignore[union-attr]
        expected = math.log(2) * 16 / torch.nn.functional.softplus(-bias)
        torch.testing.assert_close(third, expected.detach(), rtol=1e-3, atol=0)


def test_forgetting_orders_the_quartiles_of_a_text() -> None:
    found = forgetting.compute(
        PictureOptions(model="tiny", pattern="GK", tokens=101, text="some words, some others; " * 8)
    )
    ids, _ = subject.open_subject(PictureOptions(model="tiny", pattern="GK")).read(
        PictureOptions(text="some words, some others; " * 8), 101
    )
    traced = subject.trace(subject.open_subject(PictureOptions(model="tiny", pattern="GK")).model, ids)
    for layer, other in zip(found["layers"], traced, strict=True):
        assert other.log_decay is not None
        low, middle, high = (
            torch.tensor(layer[f"half_life_{name}"]) for name in ("quarter", "median", "three_quarters")
        )
        assert (low <= middle).all() and (middle <= high).all() and (low < high).any()
        half_lives = math.log(2) / -other.log_decay.flatten(1)
        torch.testing.assert_close(middle.flatten(), half_lives.median(0).values, rtol=1e-3, atol=0)


def test_forgetting_refuses_what_it_cannot_show() -> None:
    with pytest.raises(
        ValueError, match=r"needs a layer of R, G, K, S, V, Q, U, J, H, I, F or O, and tiny, untrained has only LA"
    ):
        forgetting.compute(PictureOptions(model="tiny", pattern="LLLA"))
    with pytest.raises(ValueError, match=r"--tokens must be at least 2 for forgetting, got 1"):
        forgetting.compute(PictureOptions(tokens=1))


@pytest.mark.cover
@pytest.mark.parametrize("pattern", slow_but(["GGGA", "GKRA", "K"], ["GKRA"]))
def test_forgetting_is_drawn(pattern: str, tmp_path: Path) -> None:
    numbers = forgetting.compute(PictureOptions(model="tiny", pattern=pattern, tokens=64))
    figure = drawn("forgetting", numbers, tmp_path)
    assert len(figure.axes) == (1 if pattern == "GGGA" else 3)
    named = [text.get_text().partition(",")[0] for text in figure.axes[0].get_legend().get_texts()]
    assert named == list(dict.fromkeys(label_of(layer["rule"]) for layer in numbers["layers"]))
    lines = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
    for line, layer in zip(lines, numbers["layers"], strict=True):
        expected = [torch.tensor(own).quantile(0.5).item() for own in layer["half_life_median"]]
        assert list(line.get_ydata()) == pytest.approx(expected)
    check_text(figure)
    first = numbers["layers"][0]
    first["half_life_median"] = [[1234.0 for _ in head] for head in first["half_life_median"]]
    figure = drawn("forgetting", numbers, tmp_path)
    assert "1200 in layer 0" in titles(figure) or pattern == "K"
    plt.close(figure)


@pytest.mark.cover
def test_forgetting_of_many_layers_is_drawn(tmp_path: Path) -> None:
    half_lives = [[2.0 + head] for head in range(32)]
    keys = ("half_life_quarter", "half_life_median", "half_life_three_quarters")
    layers = [
        {"layer": n, "letter": "G", "rule": "gated_delta_rule", "decay": "per head"} | dict.fromkeys(keys, half_lives)
        for n in range(48)
        if n % 4 != 3
    ]
    numbers = {"model": "large", "letters": "GGGA" * 12, "tokens": 512, "layers": layers}
    check_text(drawn("forgetting", numbers, tmp_path))


@pytest.mark.cover
def test_memories_fill_the_bytes_they_may_have(recalled: dict[str, Any]) -> None:
    budget = recalled["state_bytes"]
    assert budget == recalled["channels"] ** 2 * 4
    for memory in load.MEMORIES:
        name = memory.kind.name
        width = recalled["memories"][name]["channels"]
        assert memory.nbytes(width) == recalled["memories"][name]["state_bytes"] <= budget < memory.nbytes(width + 1)
    kept = recalled["memories"]["softmax_attention"]["state_bytes"] // (2 * recalled["channels"] * 2)
    share = recalled["memories"]["softmax_attention"]["share_recalled"]
    for count, found in zip(recalled["pairs"], share, strict=True):
        assert found == pytest.approx(min(1, kept / count), abs=0.05)


@pytest.mark.cover
def test_recall_is_what_the_demo_measures(recalled: dict[str, Any]) -> None:
    setting = RecallSetting(key_dim=recalled["channels"], trials=recalled["trials"], seed=recalled["seed"])
    for index, count in enumerate(recalled["pairs"]):
        keys, values = memories.pairs(setting, count, setting.generator())
        for rule, own in (("linear_attention", []), ("delta_rule", [1.0])):
            if recalled["memories"][rule]["setting"][index] == own:
                error = memories.recall_error(memories.write(rule, None, keys, values), keys, values, setting)
                assert recalled["memories"][rule]["relative_error"][index] == pytest.approx(error, rel=1e-3)
    assert recalled["memories"]["delta_rule"]["setting"][0] == [1.0]


@pytest.mark.cover
def test_correcting_holds_more_than_adding(recalled: dict[str, Any]) -> None:
    found = recalled["memories"]
    assert found["delta_rule"]["relative_error"][-1] < 0.6 * found["linear_attention"]["relative_error"][-1]
    assert max(found["least_squares"]["relative_error"][:2]) < 0.01
    assert found["lact"]["relative_error"] is None
    for memory in found.values():
        assert len(memory["share_recalled"]) == len(recalled["load"]) and min(memory["share_recalled"]) >= 0


@pytest.mark.parametrize("memory", load.MEMORIES, ids=lambda memory: memory.kind.name)
def test_reading_writes_nothing_and_later_pairs_matter(memory: load.MemoryUnderLoad) -> None:
    """The answers are the same twice; a memory of other values answers differently."""
    setting = RecallSetting(key_dim=16, trials=2)
    k, v = memories.pairs(setting, 16, setting.generator())
    _, other = memories.pairs(setting, 16, torch.Generator().manual_seed(9))
    with torch.inference_mode():
        first, second, third = (memory.answer(k, x, *memory.settings[0])[0] for x in (v, v, other))
    assert first.shape == v.shape and torch.equal(first, second) and not torch.allclose(first, third, atol=1e-3)


@pytest.mark.cover
def test_recall_is_drawn(recalled: dict[str, Any], tmp_path: Path) -> None:
    figure = drawn("recall", recalled, tmp_path)
    error = recalled["memories"]["linear_attention"]["relative_error"][-1]
    assert f"Error at load 4: {error:.1f} when adding" in titles(figure)
    check_text(figure)


@pytest.mark.cover
def test_a_memory_that_blew_up_is_left_out(recalled: dict[str, Any], tmp_path: Path) -> None:
    titans = recalled["memories"]["titans"] | {"relative_error": [math.inf] * len(recalled["load"])}
    check_text(drawn("recall", recalled | {"memories": recalled["memories"] | {"titans": titans}}, tmp_path))


def fake_cost(setting: CostSetting) -> MeasuredCost:
    grows = tuple(float(length) for length in setting.lengths)
    same = (50.0,) * len(grows)
    times = dict.fromkeys(FIXED_SIZE, same) | {"softmax_attention": grows}
    sizes = dict.fromkeys(FIXED_SIZE, (131072,) * len(grows)) | {
        "softmax_attention": tuple(1024 * length for length in setting.lengths)
    }
    return MeasuredCost(setting.heads, setting.head_dim, 1, setting.lengths, sizes, times, times)


@pytest.mark.cover
def test_cost_measures_up_to_the_tokens_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "measure_cost", fake_cost)
    assert lengths.compute(PictureOptions())["lengths"] == (256, 1024, 4096, 16384)
    numbers = lengths.compute(PictureOptions(tokens=5000))
    assert numbers["lengths"] == (312, 1250, 5000)
    figure = drawn("cost", numbers, tmp_path)
    assert "State at 5000 tokens: 128 KiB, a cache: 4.883 MiB" in titles(figure)
    assert "softmax x16, Kimi Delta x1" in titles(figure)
    check_text(figure)
    for tokens in (1023, 2**20 + 1):
        with pytest.raises(ValueError, match=rf"--tokens must be 1024 .. 1048576 for cost, .* got {tokens}"):
            lengths.compute(PictureOptions(tokens=tokens))


@pytest.mark.cover
def test_cost_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = lengths.measure_cost
    monkeypatch.setattr(
        lengths,
        "measure_cost",
        lambda setting: measure(replace(setting, lengths=(256, 512), rounds=1, decode_rounds=1)),
    )
    threads = torch.get_num_threads()
    numbers = lengths.compute(PictureOptions(quick=True))
    assert torch.get_num_threads() == threads and numbers["threads"] == 1
    assert set(numbers["bytes"]) == set(DEMO_RULES) and numbers["bytes"]["delta_rule"] == (2 * 32 * 32 * 4,) * 2
    check_text(drawn("cost", numbers, tmp_path))


@pytest.mark.parametrize("wrong", [0, None, "x", []])
def test_edited_numbers_are_refused_in_plain_words(wrong: object, tmp_path: Path) -> None:
    numbers = asdict(fake_cost(CostSetting())) | {"machine": "x"}
    numbers["decode_microseconds"]["softmax_attention"] = [wrong, 1, 2, 3]
    pictures.save_numbers("cost", numbers, tmp_path / "edited.json")
    with pytest.raises(ValueError, match=r"damaged or of another version .* make it again: lineate picture cost"):
        make(pictures.find("cost"), PictureOptions(), tmp_path, ("png",), tmp_path / "edited.json")
    plt.close("all")


def test_the_gallery_shows_every_picture() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "gallery.md").read_text(encoding="utf-8")
    images = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert {f"images/picture-{name}.png" for name in pictures.MODULES} <= set(images)
    for name in pictures.MODULES:
        assert f"    lineate picture {name}\n" in text
    for image in images:
        assert (docs / image).is_file() and (docs / image).stat().st_size <= 150 * 1024, image
