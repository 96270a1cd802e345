"""The pictures show what the ops and the model compute, are legible, and say what is wrong with bad input."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from tests.support import fresh
from tests.support.marks import slow_but

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from matplotlib.axes import Axes
from matplotlib.text import Text
from PIL import Image
from typer.testing import CliRunner

from lineate import figures
from lineate.cli import build_app
from lineate.explore import attention, growth, state
from lineate.explore.command import make, options_for, read_text
from lineate.explore.memories import FIXED_SIZE
from lineate.explore.pictures import MODULES, PictureOptions, find, load_numbers, save_numbers
from lineate.explore.subject import open_subject, run_rule, trace
from lineate.generation import builtin
from lineate.models import HybridLM, preset
from lineate.system.folders import cache_folder

OURS = ("state", "attention", "growth")


@pytest.fixture(autouse=True)
def quick_small_model(monkeypatch, tmp_path):
    """Leave the built-in model untrained and the user's cache alone."""
    monkeypatch.setattr(builtin, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(builtin, "STEPS", 0)


@pytest.fixture
def run():
    return lambda *words: CliRunner().invoke(build_app(), ["picture", *map(str, words)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a folder with a model and no tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    HybridLM(preset("tiny", "KA", vocab_size=32)).save_pretrained(folder)
    return folder


def numbers_of(name, **options):
    return find(name).compute(PictureOptions(**options))


# What is computed


def test_every_picture_is_found_and_uses_options_that_exist():
    for name in MODULES:
        picture = find(name)
        assert picture.name == name and picture.title and "\n" not in picture.help
        assert set(picture.uses) <= {f.name for f in fields(PictureOptions)}


@pytest.mark.parametrize("letter", "LRDGKJUVQIF")
def test_the_trace_is_what_the_layer_computes(letter):
    """The rule applied to the trace gives the memory in the model's own state, and `steps` ends at the same."""
    options = PictureOptions(model="tiny", pattern=letter, seed=3)
    subject = open_subject(options)
    ids, _ = subject.read(options, 37)
    traces = trace(subject.model, ids)
    assert [found.layer for found in traces] == [0, 1, 2, 3]
    with torch.no_grad():
        layers = subject.model(ids).state.layers
        for found in traces:
            memory = layers[found.layer]["memory"][0]
            memory = memory[..., :-1] if letter == "L" else memory  # linear attention's last column sums the keys
            torch.testing.assert_close(run_rule(found)[1], memory, rtol=1e-4, atol=1e-5)
            one = found.head(1)
            torch.testing.assert_close(state.steps(one)[0][-1], memory[1], rtol=1e-4, atol=1e-5)


def test_the_trace_knows_which_key_head_serves_a_value_head():
    torch.manual_seed(0)
    config = preset("tiny", "K")
    config = replace(config, linear=replace(config.linear, heads=2, value_heads=4, value_dim=24))
    model = HybridLM(config)
    found = trace(model, torch.arange(9)[None])[2]
    whole = run_rule(found)[1]
    for head in range(4):
        torch.testing.assert_close(run_rule(found.head(head))[1][0], whole[head])


def test_watching_leaves_the_model_as_it_was():
    model = HybridLM(preset("tiny"))
    before = [set(vars(block.mixer)) for block in model.layers]
    trace(model, torch.arange(5)[None])
    assert [set(vars(block.mixer)) for block in model.layers] == before


def test_state_only_kimi_delta_ends_as_wanted():
    found = state.write_four()
    off = found["off"]
    assert [off[rule][1] for rule in FIXED_SIZE] == [0] * 5  # two different keys: no rule fails
    third = {rule: values[2] for rule, values in off.items()}
    assert third["linear_attention"] == pytest.approx(3**0.5, abs=1e-3)  # A's old value, three cells, is still there
    assert third["gated_linear_attention"] == pytest.approx((6 * 0.25) ** 0.5, abs=1e-3)  # half of it, and of B's
    assert third["delta_rule"] == third["gated_delta_rule"] == third["kimi_delta_attention"] == 0
    last = {rule: values[3] for rule, values in off.items()}
    assert last["delta_rule"] == pytest.approx(2**0.5, abs=1e-3)  # A's new value cannot be forgotten
    assert last["gated_delta_rule"] == pytest.approx(3**0.5, abs=1e-3)  # B is forgotten too
    assert last["kimi_delta_attention"] == 0


def test_attention_of_the_hand_made_tokens():
    found = attention.read_all()
    names = found["tokens"]

    def weight(rule, reader, value):
        return found["matrices"][rule][names.index(reader)][names.index(value)]

    assert weight("linear_attention", "?A", "A") == weight("linear_attention", "?A", "A'") == 1
    assert weight("delta_rule", "?A", "A") == 0 and weight("delta_rule", "?A", "A'") == 1
    assert weight("delta_rule", "?C", "C") == 1 and abs(weight("delta_rule", "?C", "B")) < 1e-6
    assert weight("gated_linear_attention", "?A", "A") == pytest.approx(attention.FADE_A_TOKEN**5, abs=1e-3)
    for value in ("A", "B", "C", "A'"):
        assert weight("gated_delta_rule", "?A", value) == weight("gated_delta_rule", "?B", value) == 0
    assert weight("kimi_delta_attention", "?A", "A'") == 0
    assert weight("kimi_delta_attention", "?B", "B") == weight("delta_rule", "?B", "B") == pytest.approx(0.64)
    for row in found["matrices"]["softmax_attention"]:
        assert sum(row) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("letter", "LRDGKJUVQIF")
def test_attention_of_the_models_own_rule_is_what_it_computes(letter):
    options = PictureOptions(model="tiny", pattern=letter, layer=1, head=1, tokens=13)
    found = attention.read_model(options)
    subject = open_subject(options)
    one = trace(subject.model, subject.read(options, 13)[0], [1])[0].head(1)
    matrix = torch.tensor(found["matrices"][one.rule])
    read = run_rule(one)[0]
    if letter == "L":
        read = read / run_rule(replace(one, v=torch.ones_like(one.v)))[0]
    values = one.values if one.write is None else one.values * one.write
    torch.testing.assert_close(matrix @ values[:, 0], read[:, 0], rtol=2e-3, atol=2e-3)
    assert len(found["matrices"]) == (6 if letter in "LRDGK" else 7) and len(found["words"]) == 13
    assert matrix.shape == (13, 13 * found["writes"]) and found["writes"] == (2 if letter == "U" else 1)


def test_several_writes_are_tokens_for_a_rule_with_one():
    """Under Gated DeltaNet two writes a token are what Gated DeltaProduct computes; linear attention adds them."""
    options = PictureOptions(model="tiny", pattern="U", tokens=9)
    subject = open_subject(options)
    one = trace(subject.model, subject.read(options, 9)[0], [1])[0].head(0)
    torch.testing.assert_close(
        attention.rule_matrix(one, "gated_delta_rule"), attention.rule_matrix(one, one.op), rtol=1e-4, atol=1e-5
    )
    for name in ("gated_delta_rule", "linear_attention", "kimi_delta_attention"):
        other = one.under(name)
        output, memory = run_rule(other)
        weighted = attention.rule_matrix(one, name) @ other.values[:, 0]
        torch.testing.assert_close(weighted, output[:, 0], rtol=1e-4, atol=1e-5)
        states, written, corrected, forgotten = state.steps(other)
        torch.testing.assert_close(states[-1], memory[0], rtol=1e-4, atol=1e-5)
        assert len(states) == len(forgotten) == 9 and len(written) == len(corrected) == 18
    weights = attention.rule_matrix(one, "softmax_attention")
    assert weights.shape == (9, 18) and (weights[0, :2] > 0).all() and not weights[0, 2:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))


@pytest.mark.parametrize(("letter", "rule"), [("I", "gated_delta_rule"), ("F", "kimi_delta_attention")])
def test_a_rate_of_writing_is_the_beta_of_another_rule(letter, rule):
    """Without preconditioning, a layer with it computes the rule that it is made from."""
    subject = open_subject(PictureOptions(model="tiny", pattern=letter))
    for layer in subject.model.layers:
        layer.mixer.precondition = 1 + 1e-12
    one = trace(subject.model, torch.arange(40)[None], [1])[0]
    torch.testing.assert_close(run_rule(one.under(rule))[0], run_rule(one)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("letter", "JV")
def test_norms_of_erasing_and_writing_separately(letter):
    """They are those of d (S'^T e)^T and k u^T, which are not the same share of what is old and what is new."""
    options = PictureOptions(model="tiny", pattern=letter, tokens=7)
    subject = open_subject(options)
    one = trace(subject.model, subject.read(options, 7)[0], [2])[0].head(1)
    states, written, erased, forgotten = state.steps(one)
    k, v, a = one.k[:, 0], one.v[:, 0], one.log_decay[:, 0].exp()
    e = one.erase[:, 0] * k if letter == "J" else one.probe[:, 0]
    d, u = (k, one.write[:, 0] * v) if letter == "J" else (one.direction[:, 0], v)
    before = torch.zeros(k.shape[1], v.shape[1])
    for i in range(7):
        kept = a[i][:, None] * before
        old = torch.outer(d[i], kept.T @ e[i])
        torch.testing.assert_close(erased[i], old.norm())
        torch.testing.assert_close(written[i], torch.outer(k[i], u[i]).norm())
        torch.testing.assert_close(forgotten[i], (before - kept).norm())
        before = kept - old + torch.outer(k[i], u[i])
        torch.testing.assert_close(states[i], before)


def test_growth_is_that_of_one_long_run_and_tells_bounded_from_unbounded():
    found = numbers_of("growth", tokens=5000, seed=1)
    assert found["places"][0] == 1 and found["places"][-1] == 5000
    powers = {rule: growth.exponent(found["places"], norm) for rule, norm in found["norm"].items()}
    assert powers.pop("linear_attention") == pytest.approx(0.5, abs=0.1)
    assert all(power < growth.FLAT for power in powers.values())
    setting = replace(growth.SETTING, seed=1)
    pieces = list(growth.stream_pairs(setting, found["places"]))
    k, v = (torch.cat([piece[n] for piece in pieces]) for n in (0, 1))
    assert len(k) == 5000
    assert (k[::50] @ k[::50].transpose(1, 2))[:, 0, 0].mean() == pytest.approx(1, abs=1e-4)
    for rule in FIXED_SIZE:
        whole = run_rule(growth.add_gates(rule, k, v))[1].norm(dim=(1, 2)).mean()
        assert found["norm"][rule][-1] == pytest.approx(float(whole), rel=1e-3)


def test_growth_of_a_model_is_the_norm_of_its_state():
    options = PictureOptions(model="tiny", pattern="GA", tokens=100, text="some text of a user. " * 9)
    found = growth.grow_model(options)
    subject = open_subject(options)
    with torch.no_grad():
        memory = subject.model(subject.read(options, 1)[0]).state.layers[2]["memory"][0]
    assert [layer["layer"] for layer in found["layers"]] == [0, 2] and found["places"][-1] == 100
    assert found["layers"][1]["norm"][-1] == pytest.approx(float(memory.norm(dim=(1, 2)).mean()), rel=1e-3)


def test_the_norm_of_linear_attention_leaves_out_the_sum_of_its_keys():
    options = PictureOptions(model="tiny", pattern="L", tokens=50, text="some text of a user. " * 9)
    grown = growth.grow_model(options)["layers"][0]["norm"][-1]
    heads = [numbers_of("state", **vars(replace(options, layer=0, head=n)))["model"]["norm"][-1] for n in (0, 1)]
    assert open_subject(options).config.linear.value_heads == 2
    assert grown == pytest.approx(sum(heads) / 2, rel=1e-3)


@pytest.mark.parametrize("letter", ["L", "D", "G", "K"])
def test_a_rule_that_is_said_to_be_as_another_is(letter):
    found = numbers_of("attention", model="tiny", pattern=letter, tokens=12)["model"]
    assert bool(found["same"]) == (letter != "K")
    for rule, other in found["same"].items():
        own, others = (torch.tensor(found["matrices"][name]) for name in (rule, other))
        assert torch.allclose(own, others, rtol=1e-3, atol=1e-6)


def test_exponent():
    places = [1, 10, 100, 1000, 4000]
    assert growth.exponent(places, [3 * n**0.5 for n in places]) == pytest.approx(0.5)
    assert growth.exponent(places, [7.0] * 5) == 0 == growth.exponent(places, [0.0] * 5)


def test_a_checkpoint_without_tokenizer_reads_random_tokens(checkpoint):
    found = numbers_of("state", model=str(checkpoint), tokens=20, layer=2, head=1)
    assert found["model"]["tokens"] == 20 and found["model"]["layer"] == 2 and "rules" not in found
    assert found["model"] == numbers_of("state", model=str(checkpoint), tokens=20, layer=2, head=1)["model"]


def test_a_checkpoint_with_a_published_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    from lineate.text import make_tokenizer

    make_tokenizer("bpe:260", ["some words and some more words"]).save(tmp_path)
    (tmp_path / "tokenizer_kind.json").unlink()  # it is ours; other tokenizers have only tokenizer.json
    HybridLM(preset("tiny", "G", vocab_size=260)).save_pretrained(tmp_path)
    options = PictureOptions(model=str(tmp_path), text="some words")
    ids, words = open_subject(options).read(options, 50)
    assert "".join(words) == "some words" and ids.shape == (1, len(words))
    HybridLM(preset("tiny", "G", vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="only 50; its tokenizer is another's"):
        open_subject(options).read(options, 50)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="one of the tokenizers library"):
        open_subject(options)


# The built-in model


def test_all_commands_have_the_same_built_in_model():
    """A picture without a model shows the one that `lineate chat` talks to."""
    subject = open_subject(PictureOptions())
    assert subject.config == builtin.builtin_config() and subject.trained
    model, _ = builtin.builtin_model()
    assert all(torch.equal(x, subject.model.state_dict()[name]) for name, x in model.state_dict().items())


def test_the_cache_is_where_the_user_wants_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LINEATE_CACHE", raising=False)
    assert cache_folder() == tmp_path / "lineate"
    monkeypatch.setenv("LINEATE_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


# What is drawn


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Return a function that gives the folder of a picture, with or without a model, made at its first use."""
    folders = {}

    def get(name, kind):
        if (name, kind) not in folders:
            options = PictureOptions(tokens=300 if name == "growth" else 40)
            if kind == "model":
                options = PictureOptions(model="tiny", pattern="GK", tokens=12)
            folders[name, kind] = out = tmp_path_factory.mktemp(f"{name}-{kind}")
            make(find(name), options, out, ("png", "svg"))
        return folders[name, kind]

    return get


CASES = slow_but(
    [(name, kind) for name in OURS for kind in ("default", "model")],
    [("state", "model"), ("attention", "model"), ("growth", "default")],
)


@pytest.mark.cover
@pytest.mark.parametrize("case", CASES)
def test_the_files_are_whole(drawn, case):
    name, out = case[0], drawn(*case)
    with Image.open(out / f"{name}.png") as image:
        image.load()
        assert image.width == 1200
    assert (out / f"{name}.png").stat().st_size < 150_000
    ElementTree.parse(out / f"{name}.svg")
    text = (out / f"{name}.json").read_text()
    found = json.loads(text, parse_constant=lambda number: pytest.fail(f"{number} is not JSON"))
    assert found["picture"] == name and "units" in text


@pytest.mark.cover
def test_the_same_numbers_give_the_same_bytes(drawn, tmp_path):
    name, out = "growth", drawn("growth", "default")
    paths = make(find(name), PictureOptions(), tmp_path, ("png", "svg"), out / f"{name}.json")
    assert [path.name for path in paths] == [f"{name}.png", f"{name}.svg"]
    assert paths[0].read_bytes() == (out / f"{name}.png").read_bytes()


def _unseen(figure):
    """Return hidden texts, and the labels of ticks beyond the ends of an axis, which exist but are not drawn."""
    hidden = {x for x in figure.findobj(Text) if not x.get_visible()}
    for axes in figure.findobj(Axes):
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            beyond = [x for x in ticks if not axes.axison or not low <= x.get_loc() <= high]
            hidden |= {label for tick in beyond for label in (tick.label1, tick.label2)}
    return hidden


@pytest.mark.cover
@pytest.mark.parametrize("case", CASES)
def test_no_text_is_cut_off_or_on_another(drawn, case):
    name, out = case[0], drawn(*case)
    with figures.styled():
        figure = find(name).draw(load_numbers(name, out / f"{name}.json"))
        figure.draw_without_rendering()
        width, height = figure.bbox.width, figure.bbox.height
        unseen = _unseen(figure)
        boxes = [(x.get_text(), x.get_window_extent()) for x in figure.findobj(Text) if x not in unseen]
    boxes = [(text, box) for text, box in boxes if text.strip()]
    for text, box in boxes:
        assert box.x0 > -3 and box.y0 > -3 and box.x1 < width + 3 and box.y1 < height + 3, text
    for n, (text, box) in enumerate(boxes):
        for other, second in boxes[:n]:
            across = min(box.x1, second.x1) - max(box.x0, second.x0)
            down = min(box.y1, second.y1) - max(box.y0, second.y0)
            assert across < 4 or down < 4, (text, other)


@pytest.mark.parametrize("name", ["state", "attention"])
def test_one_token_can_be_drawn(name):
    with figures.styled():
        find(name).draw(numbers_of(name, model="tiny", pattern="R", tokens=1)).draw_without_rendering()


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        ([1.0] * 8, "has levelled off: norm 1 in the second quarter, 1 in the last of 8 tokens"),
        ([float(n) for n in range(8)], "still grows: norm 2.5 in the second quarter, 6.5 in the last of 8 tokens"),
        ([float(9 - n) for n in range(8)], "falls: norm 6.5 in the second quarter, 2.5 in the last of 8 tokens"),
        ([0.0] * 8, "has levelled off: norm 0 in the second quarter, 0 in the last of 8 tokens"),
        ([0.5], "norm 0.5 after 1 token"),
        ([0.5, 0.25], "norm 0.25 after 2 tokens"),
    ],
)
def test_how_a_norm_goes(norm, said):
    assert state.how_it_goes(norm) == said


@pytest.mark.parametrize("name", ["state", "attention", "growth", "forgetting"])
def test_the_name_of_a_folder_is_no_formula_and_not_too_long(name, tmp_path):
    folder = tmp_path / ("a very long name of a folder with a checkpoint, and more of it " + "a$b_{c$")
    HybridLM(preset("tiny", "KA", vocab_size=32)).save_pretrained(folder)
    numbers = numbers_of(name, model=str(folder), tokens=12)
    with figures.styled():
        figure = find(name).draw(numbers)
        figure.draw_without_rendering()
        said = [x.get_text() for x in figure.findobj(Text)]
    assert any("more of it a$b_{c$" in text and "very long" not in text for text in said)


@pytest.mark.cover
def test_titles_say_what_the_numbers_say(drawn):
    numbers = numbers_of("state", tokens=12)
    numbers["rules"]["off"]["kimi_delta_attention"][-1] = 1.0
    del numbers["model"]
    grown = load_numbers("growth", drawn("growth", "default") / "growth.json")
    grown["norm"] |= dict.fromkeys(("delta_rule", "gated_delta_rule"), grown["norm"]["linear_attention"])
    grown["norm"]["kimi_delta_attention"] = [place**-0.5 for place in grown["places"]]
    count = sum(growth.exponent(grown["places"], norm) >= growth.FLAT for norm in grown["norm"].values())
    assert count >= 3
    with figures.styled():
        said = [x.get_text() for x in find("state").draw(numbers).findobj(Text)]
        assert any("no rule holds exactly" in text for text in said)
        said = [x.get_text() for x in find("growth").draw(grown).findobj(Text)]
        assert any(f"tokens {count} of 5 states still grow" in text.replace("\n", " ") for text in said)
        assert "Kimi Delta Attention: falls like t^-0.50" in said


def test_not_a_number_is_null_in_json(tmp_path):
    save_numbers("growth", {"norm": [1.0, float("nan"), float("inf")]}, tmp_path / "growth.json")
    assert load_numbers("growth", tmp_path / "growth.json") == {"norm": [1.0, None, None]}


# The command


@pytest.mark.cover
def test_the_command_prints_what_it_wrote(run, tmp_path):
    done = run("state", "--quick", "--out", tmp_path / "new" / "folder", "--format", "svg")
    assert done.exit_code == 0, done.output
    assert [Path(line).name for line in done.output.split()] == ["state.svg", "state.json"]
    assert all(Path(line).is_file() for line in done.output.split())


def test_list(run):
    done = run("list")
    assert done.exit_code == 0 and [line.split()[0] for line in done.output.splitlines()] == list(MODULES)


BAD = [
    (["sate"], "did you mean 'state'?"),
    (["state", "--model", "qwen"], "which is neither"),
    (["state", "--model", "tny"], "did you mean 'tiny'?"),
    (["state", "--model", "qwen3-next-80b"], "folder of its checkpoint"),
    (["state", "--model", "{tmp}"], "has no model yet"),
    (["state", "--model", "{file}"], "not a folder"),
    (["state", "--model", "{broken}"], "config.json"),
    (["state", "--pattern", "GGGA"], "add --model tiny"),
    (["state", "--model", "tiny", "--pattern", "XYZ"], "pattern"),
    (["state", "--model", "tiny", "--pattern", "A"], "needs a layer of"),
    (["state", "--model", "{checkpoint}", "--pattern", "G"], "--pattern is for presets"),
    (["state", "--model", "{checkpoint}", "--text", "words and words"], "needs a tokenizer"),
    (["state", "--text", "missing.txt"], "does not exist"),
    (["attention", "--text", "no/such/file"], "does not exist"),
    (["state", "--text", "{tmp}"], "is a folder"),
    (["state", "--text", "{binary}"], "not UTF-8"),
    (["state", "--text", "{file}"], "is empty"),
    (["state", "--text", " "], "an empty one"),
    (["state", "--layer", "5"], "--layer must be one of 0 (K), 1 (G), 2 (K), 3 (G), 4 (K), got 5"),
    (["attention", "--layer", "99"], "--layer must be one of"),
    (["state", "--layer", "-1"], "--layer must be at least 0, got -1"),
    (["attention", "--head", "2"], "--head must lie in 0 .. 1"),
    (["state", "--tokens", "0"], "--tokens must be at least 1"),
    (["state", "--tokens", "5000"], "--tokens must be at most 2048"),
    (["attention", "--quick", "--tokens", "300"], "--tokens must be at most 256"),
    (["state", "--quick", "--layer", "7"], "--layer must be one of"),
    (["growth", "--tokens", "3"], "at least 10"),
    (["growth", "--model", "tiny", "--text", "short"], "at least 10 tokens"),
    (["growth", "--seed", "-1"], "--seed must be at least 0"),
    (["growth", "--head", "1"], "--head has no meaning for growth"),
    (["growth", "--text", "some words"], "needs a model"),
    (["state", "--out", "{file}/below"], "--out must be a folder that can be written"),
    (["state", "--format", "pdf"], "--format must be of png, svg"),
    (["state", "--format", ""], "--format must be of png, svg"),
    (["growth", "--from", "missing.json"], "--from must be a picture's JSON file"),
    (["growth", "--from", "{binary}"], "--from must be a picture's JSON file"),
    (["growth", "--from", "{json}"], "no picture's numbers"),
    (["growth", "--from", "{other}"], "the numbers of the picture 'state'"),
    (["state", "--from", "{other}"], "damaged or of another version"),
    (["state", "--from", "{other}", "--quick"], "leave out --quick"),
    (["all", "--from", "{other}"], "name one picture"),
    (["all", "--tokens", "200"], "--tokens has another range in every picture"),
    (["state", "--text", ""], "an empty one"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line_before_any_work(run, tmp_path, monkeypatch, checkpoint, words, said):
    monkeypatch.setattr(builtin, "builtin_model", lambda: pytest.fail("worked before complaining"))
    monkeypatch.chdir(tmp_path)
    places = {name: tmp_path / name for name in ("tmp", "file", "binary", "json", "other", "broken")}
    places["tmp"].mkdir()
    places["broken"].mkdir()
    (places["broken"] / "config.json").write_text("{")
    (places["broken"] / "model.safetensors").write_bytes(b"")
    places["file"].write_text("")
    places["binary"].write_bytes(b"\xff\xfe\x00")
    places["json"].write_text("[1, 2]")
    places["other"].write_text('{"picture": "state", "rules": {"wanted": 3}}')
    words = [word.format(**places, checkpoint=checkpoint) for word in words]
    if "--out" not in words:
        words += ["--out", tmp_path / "out"]
    done = run(*words)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("lineate: ") and said in line, line
    assert not list(tmp_path.glob("out/*.*"))


def test_all_pictures_take_a_text_and_a_layer():
    given = {"text": "some words", "layer": 2}
    chosen = {name: options_for(find(name), given, several=True) for name in MODULES}
    assert chosen["state"].layer == 2 and chosen["state"].text == "some words"
    assert chosen["growth"] == PictureOptions()  # it shows the rules, and reads no text
    assert options_for(find("growth"), given | {"model": "tiny"}, several=True).text == "some words"


def test_text_is_a_text_or_a_file(tmp_path):
    (tmp_path / "some words").write_text("from the file")
    assert read_text(str(tmp_path / "some words")) == "from the file"
    for text in ("def", "a sentence about missing.txt", "x" * 5000, "1/2 of it", "nul\0"):
        assert read_text(text) == text


def test_a_text_changes_what_is_seen():
    one, other = (numbers_of("attention", model="tiny", text=text)["model"] for text in ("def mean", "class A:"))
    assert one["words"] == list("def mean") and one["matrices"] != other["matrices"]


@pytest.mark.cover
def test_matplotlib_is_imported_only_to_draw():
    code = (
        "import sys; from lineate.explore import attention, command, growth, state\n"
        "assert not {'matplotlib', 'typer', 'rich'} & set(sys.modules)"
    )
    fresh.run(code).check_returncode()
