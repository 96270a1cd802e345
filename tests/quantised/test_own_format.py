"""A format of a user's own, as CONTRIBUTING.md describes one: registered from outside, it does all that others do."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.generation import generate
from lineate.models import HybridLM
from lineate.models.config import ExpertsConfig
from lineate.models.inspect import describe
from lineate.models.quantizing import quantize_checkpoint
from lineate.models.sharding import model_ranges
from lineate.parallel.tensor.ranks import Ranks
from lineate.planning import plan_memory, read_model
from lineate.quantised import BY_BITS, FORMATS, Format, QuantisedWeight, TooLargeError, quantize, shrink
from lineate.quantised.format import temporary_formats
from lineate.quantised.which import format_of, name_of_bits, quantised_parameters
from lineate.serving.cache.identity import identity_of
from lineate.text import Bytes
from tests.support import fresh
from tests.support.quantised_weights import EXPERTS, realistic, relative, sizes, tokens

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "CONTRIBUTING.md"


class Place(Ranks):
    """A rank that only loads."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def program() -> str:
    """Return the program of the recipe."""
    section = RECIPE.read_text().split("## A quantisation format")[1]
    found = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def form() -> Iterator[Format]:
    """Run the program of the recipe; return the format that it registers."""
    with temporary_formats():
        before = set(FORMATS)
        exec(compile(program(), "CONTRIBUTING.md", "exec"), {})
        (name,) = set(FORMATS) - before
        yield FORMATS[name]
    assert set(FORMATS) == before


def values(weight: Tensor) -> Tensor:
    """Return the numbers of a weight, in float32."""
    return (weight.decoded() if isinstance(weight, QuantisedWeight) else weight).detach().float()


def decoded(model: HybridLM) -> HybridLM:
    """Return a model with the same numbers in float32."""
    plain = copy.deepcopy(model)
    for name in quantised_parameters(model):
        owner, _, key = name.rpartition(".")
        plain.get_submodule(owner).register_parameter(key, nn.Parameter(values(model.get_parameter(name))))
    return plain


def reference(x: Tensor) -> Tensor:
    """Return what the format rounds a weight to, computed in float64 from its definition."""
    columns = x.shape[-1]
    groups = F.pad(x.double(), (0, -columns % 64)).unflatten(-1, (-1, 64))
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (most - least) / 15
    return (((groups - least) / step).round() * step + least).flatten(-2)[..., :columns]


@pytest.mark.parametrize("shape", [(48, 128), (7, 32), (40, 160), (3, 20, 64)])
def test_a_weight(form: Format, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) + 1.0
    kept = quantize(x, form.name)
    assert kept.format is form and kept.nbytes_kept == form.nbytes(shape)
    assert relative(kept.decoded(), reference(x)) < 1e-6
    plain = form.from_tiles(kept.codes, kept.scales, shape[-2])
    assert int(plain[0].max()) == 15 and plain[1].shape[-1] == 2 * -(-shape[-1] // 64)
    assert all(torch.equal(a, b) for a, b in zip(form.to_tiles(*plain), (kept.codes, kept.scales), strict=True))
    ids = torch.tensor([[0, shape[-2] - 1]])
    one = kept if len(shape) == 2 else kept[1]
    assert torch.equal(F.embedding(ids, one), values(one)[ids])
    for rows in (1, 5, 70):
        inputs = torch.randn(rows, shape[-1], requires_grad=True)
        y = F.linear(inputs, one)
        assert relative(y.detach(), inputs.detach() @ values(one).T) < 1e-6
        (dx,) = torch.autograd.grad(y, inputs, torch.ones_like(y))
        assert relative(dx, values(one).sum(0).expand_as(inputs)) < 1e-5
    inputs = inputs.detach()
    assert relative(F.linear(inputs.double(), one), inputs.double() @ values(one).double().T) < 1e-12
    run = torch.compile(lambda x: F.linear(x, one), fullgraph=True, backend="eager")
    assert torch.equal(run(inputs), y.detach())


def test_a_number_that_it_cannot_keep(form: Format) -> None:
    with pytest.raises(TooLargeError, match="x must have finite numbers to be kept in int4-pairs"):
        quantize(torch.full((16, 64), torch.inf), form)


@pytest.mark.parametrize(("pattern", "experts"), [("GK", None), ("GA", EXPERTS), ("MD", None)])
@torch.no_grad()
def test_a_model_decodes_as_its_numbers(form: Format, pattern: str, experts: ExpertsConfig | None) -> None:
    model = shrink(realistic(sizes(pattern, experts=experts)), form.name)
    assert format_of(model) is form
    plain, ids = decoded(model), tokens(2, 12)
    assert relative(model(ids).logits, plain(ids).logits) < 1e-5
    found, wanted = model(ids), plain(ids)
    for _ in range(3):  # a step, one token a row
        found, wanted = model(ids[:, :1], state=found.state), plain(ids[:, :1], state=wanted.state)
        assert relative(found.logits, wanted.logits) < 1e-5
    made, other = ([int(x) for x in generate(each, ids[:1], 12, temperature=0)] for each in (model, plain))
    assert made == other
    assert identity_of(model) != identity_of(plain)
    again = shrink(model, "int8")
    assert format_of(again) is FORMATS["int8"] and relative(again(ids).logits, plain(ids).logits) < 0.1


@pytest.mark.parametrize("how", ["saved", "quantize_checkpoint", "rounded while loading"])
def test_files_and_ranks(form: Format, how: str, tmp_path: Path) -> None:
    """A folder has the format's name; each of two ranks reads codes that decode to its part of the whole weights."""
    config = sizes("GA", hidden_size=128)
    plain, folder, options = realistic(config), tmp_path / "model", {}
    plain.save_pretrained(tmp_path / "plain")
    model = shrink(plain, form.name)
    if how == "saved":
        model.save_pretrained(folder)
    elif how == "quantize_checkpoint":
        quantize_checkpoint(tmp_path / "plain", folder, form.name, progress=False)
    else:
        folder, options = tmp_path / "plain", {"weights": form.name}
    whole, wanted = HybridLM.from_pretrained(folder, progress=False, **options), model.state_dict()
    assert format_of(whole) is form
    for name, x in whole.state_dict().items():
        y = wanted[name]
        if isinstance(x, QuantisedWeight):
            assert torch.equal(x.codes, y.codes) and torch.equal(x.scales, y.scales), name
        else:
            assert torch.equal(x, y), name
    if not options:
        assert json.loads((folder / "config.json").read_text())["weights"] == form.name
        found = describe(folder)
        assert found.weights == form.name and found.loaded_bytes == found.weight_bytes[form.flag]
    for rank in range(2):
        share = HybridLM.from_pretrained(folder, progress=False, ranks=Place(rank, 2), **options)
        ranges, own, kept = model_ranges(whole, rank, 2), share.state_dict(), 0
        for name, x in whole.state_dict().items():
            kept += isinstance(own[name], QuantisedWeight) and own[name].format is form
            part = ranges[name].of(values(x)) if name in ranges else values(x)
            assert torch.equal(values(own[name]), part), name
        assert kept > 5


def test_a_folder_without_the_row(form: Format, tmp_path: Path) -> None:
    shrink(realistic(sizes("G")), form).save_pretrained(tmp_path)
    del FORMATS[form.name]
    with pytest.raises(ValueError, match=r"must be one of bfloat16, .*, got 'int4-pairs'"):
        HybridLM.from_pretrained(tmp_path, progress=False)
    FORMATS[form.name] = form


def test_bits_and_plans(form: Format, tmp_path: Path) -> None:
    assert BY_BITS["4-pairs"] == name_of_bits("4-pairs") == form.name
    model = shrink(realistic(sizes("GA")), form.name)
    model.save_pretrained(tmp_path)
    kept = sum(x.nbytes_kept if isinstance(x, QuantisedWeight) else x.nbytes for x in model.state_dict().values())
    assert plan_memory(read_model(tmp_path, "float32", weights=form.name)).weights == kept


def test_the_command_line_imports_it(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    (tmp_path / "pairs_module.py").write_text(program())
    realistic(sizes("G", vocab_size=257)).save_pretrained(tmp_path / "plain")
    Bytes().save(tmp_path / "plain")
    for words in (
        ["quantize", "plain", "out", "--bits", "4-pairs"],
        ["generate", "out", "-p", "ab", "--tokens", "3", "--raw"],
    ):
        done = fresh.command(tmp_path, "--import", "pairs_module", *words)
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["weights"] == "int4-pairs"
