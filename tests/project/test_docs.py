"""The programs in the documentation run, and its links lead somewhere."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lineate
from lineate import layers
from lineate.layers import registry
from lineate.memory import run_reference
from lineate.models import HybridLM, preset
from lineate.quantised.format import temporary_formats
from lineate.rule import normalize, read
from lineate.tasks.model import ModelOptions, make_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench/results/README.md"])


def programs(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def _mixer_inputs():
    x = torch.randn(1, 12, 1024)
    ids = torch.randint(256, (2, 6))
    return {
        "x": x, "next_x": x[:, :1], "packed": x, "bounds": torch.tensor([0, 5, 12]), "input_ids": ids,
        "next_ids": ids[:, :1], "packed_ids": ids.view(1, 12), "padded_ids": ids,
        "mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6]),
    }  # fmt: skip


def _pairs():
    q, k, v = torch.randn(3, 1, 4, 2, 8)
    return {"q": q, "k": k, "v": v, "beta": torch.rand(1, 4, 2), "zeros": torch.zeros(2, 8, 8)}


@pytest.mark.parametrize(
    ("page", "count", "given"),
    [
        ("README.md", 1, dict),  # the second reads a checkpoint from the hub
        ("docs/from-fla.md", None, dict),
        ("docs/generate.md", None, dict),
        ("docs/quantised-weights.md", None, dict),
        ("docs/serving.md", None, dict),
        ("docs/exact-cache.md", None, dict),
        ("docs/models.md", 2, _mixer_inputs),  # the third changes transformers
        ("docs/memory.md", None, _pairs),
        ("docs/planning.md", None, dict),
    ],
)
def test_programs_run(page, count, given):
    """Run the first `count` programs, or all, in order: a later one may use what an earlier one made.

    `given` returns the names that a program uses without defining them.
    """
    names: dict[str, object] = given()
    found = programs(ROOT / page)[:count]
    assert found
    for text in found:
        exec(compile(text, page, "exec"), names)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as links write them after #."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def tree() -> set[str]:
    """Return the paths that the tree of docs/architecture.md names."""
    text = (ROOT / "docs/architecture.md").read_text()
    folders: list[str] = []
    named: set[str] = set()
    for line in text[text.index("## The tree") :].splitlines():
        if match := re.match(r"    ( *)(\S+(?:, \S+)*)(?:  |$)", line):
            folders, names = folders[: len(match[1]) // 2], match[2].split(", ")
            named |= {"/".join([*folders, name.rstrip("/")]) for name in names}
            if names[0].endswith("/"):
                folders.append(names[0].rstrip("/"))
    return named


def test_the_tree_is_there_and_whole():
    """The tree names every folder of lineate and every module at its top, and nothing that does not exist."""
    named = tree()
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
    package = ROOT / "lineate"
    modules = [file for file in package.glob("*.py") if file.name != "__init__.py"]
    folders = [file.parent for file in package.glob("**/__init__.py") if file.parent != package]
    paths = {file.relative_to(ROOT).as_posix() for file in (*modules, *folders)}
    assert sorted(paths - named) == []


def test_the_version_is_written_once():
    """It stands in lineate/__init__.py, where setuptools reads it; the changelog has an entry for it, with a date."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lineate.__version__"}
    heading = rf"^## {re.escape(lineate.__version__)} \(\d{{4}}-\d\d-\d\d\)$"
    assert re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def check_unit_descent(names: dict[str, Any]) -> None:
    """Check that the memory's chunked form is its rule, packed too, and that its mixer continues inside a chunk."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 40, 2, 6).double()
    rate, S = torch.rand(1, 40, 2).double(), torch.randn(2, 6, 6).double()
    bounds, rows = torch.tensor([0, 5, 5, 22, 40]), S.expand(4, -1, -1, -1)
    state = {"S": rows, "start": rows, "position": torch.zeros(4, dtype=torch.int64)}
    y, after = names["unit_descent"](q, k, v, rate, state, cu_seqlens=bounds)
    wanted, last = run_reference(names["rule"], q, k, v, {"rate": rate}, {"S": S}, cu_seqlens=bounds)
    torch.testing.assert_close((y, after["S"]), (wanted, last.weights["S"]), rtol=1e-12, atol=1e-12)
    mixer, x = names["UnitDescent"](24, 2, head_dim=6).double(), torch.randn(2, 30, 24).double()
    first, memory = mixer(x[:, :21])
    assert memory.names == tuple(spec.name for spec in mixer.state_spec)
    torch.testing.assert_close(torch.cat((first, mixer(x[:, 21:], memory)[0]), 1), mixer(x)[0], rtol=1e-12, atol=1e-12)
    assert names["learner"](torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.fixture
def unregistered():
    """Other tests must not see the rows of these programs."""
    with registry.temporary_rows(), temporary_formats():
        yield


@torch.no_grad()
def test_the_programs_of_contributing_md(unregistered):
    """The rule with several writes a token follows its equation; a model of it continues from its state."""
    names: dict[str, Any] = {}
    for text in programs(ROOT / "CONTRIBUTING.md"):
        exec(compile(text, "CONTRIBUTING.md", "exec"), names)
    assert names["y"].shape == (1, 10, 2, 8)  # the memory's output
    check_unit_descent(names)
    b, t, n, h, d = 2, 7, 3, 2, 4
    q, (k, v) = torch.randn(b, t, h, d).double(), torch.randn(2, b, t, n, h, d).double()
    log_decay, beta = -torch.rand(b, t, h).double(), 2 * torch.rand(b, t, n, h).double()
    output, state = names["interleaved_product"](q, k, v, log_decay, beta)
    S, unit = torch.zeros(b, h, d, d).double(), normalize(k)
    for i in range(t):
        S = log_decay[:, i].exp()[..., None, None] * S
        for j in range(n):
            error = v[:, i, j] - read(S, unit[:, i, j])
            S = S + (beta[:, i, j, :, None] * unit[:, i, j]).unsqueeze(-1) * error.unsqueeze(-2)
        torch.testing.assert_close(output[:, i], read(S, normalize(q[:, i])) / d**0.5)
    torch.testing.assert_close(state, S)
    model, ids = names["model"], torch.randint(256, (2, 20))
    first = model(ids[:, :11])
    continued = model(ids[:, 11:], state=first.state).logits
    torch.testing.assert_close(continued, model(ids).logits[:, 11:])


def _fla_weights(kind: str, h: int, hv: int, k: int, v: int, hidden: int) -> dict[str, torch.Tensor]:
    """Return random weights under the names and in the shapes of fla's layer."""
    sizes = {"q_proj": (h * k, hidden), "k_proj": (h * k, hidden), "v_proj": (hv * v, hidden), "b_proj": (hv, hidden)}
    if kind == "GatedDeltaNet":
        sizes |= {"g_proj": (hv * v, hidden), "a_proj": (hv, hidden), "o_proj": (hidden, hv * v)}
    else:
        sizes |= {"f_proj.0": (v, hidden), "f_proj.1": (hv * k, v), "g_proj.0": (v, hidden), "g_proj.1": (hv * v, v)}
        sizes |= {"o_proj": (hidden, hv * v)}
    sizes |= {f"{x}_conv1d": (hv * v if x == "v" else h * k, 1, 4) for x in "qkv"}
    weights = {f"{name}.weight": torch.randn(size) / size[-1] ** 0.5 for name, size in sizes.items()}
    rates = hv if kind == "GatedDeltaNet" else hv * k
    return weights | {
        "o_norm.weight": torch.rand(v), "A_log": torch.randn(hv), "dt_bias": torch.randn(rates),
        "g_proj.1.bias": torch.randn(hv * v),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["GatedDeltaNet", "KimiDeltaAttention"])
@torch.no_grad()
def test_weights_of_fla_load_as_from_fla_md_says(kind):
    """The loaded layer computes the same as fla's layer, which is written here with fla's names."""
    names: dict[str, Any] = {}
    for text in programs(ROOT / "docs/from-fla.md"):
        exec(compile(text, "from-fla.md", "exec"), names)
    h, hv, k, v = 2, 4, 16, 32
    own = {"gate_bias": True} if kind == "KimiDeltaAttention" else {}
    ours = getattr(layers, kind)(64, h, value_heads=hv, key_dim=k, value_dim=v, norm_eps=1e-5, **own)
    w, x = _fla_weights(kind, h, hv, k, v, 64), torch.randn(2, 30, 64)
    load = names["load_gated_delta_net" if kind == "GatedDeltaNet" else "load_kimi_delta_attention"]
    load(ours, w)

    def read(name):
        return x @ w[f"{name}_proj.weight"].mT if f"{name}_proj.weight" in w else (
            x @ w[f"{name}_proj.0.weight"].mT @ w[f"{name}_proj.1.weight"].mT
        )  # fmt: skip

    def conv(name):
        weight = w[f"{name}_conv1d.weight"]
        return F.silu(F.conv1d(F.pad(read(name).mT, (3, 0)), weight, groups=len(weight))).mT

    heads = [conv("q").unflatten(-1, (h, k)), conv("k").unflatten(-1, (h, k)), conv("v").unflatten(-1, (hv, v))]
    z, beta = read("g").unflatten(-1, (hv, v)), read("b").sigmoid()
    if kind == "GatedDeltaNet":
        log_decay = -w["A_log"].exp() * F.softplus(read("a") + w["dt_bias"])
        output, gate = lineate.gated_delta_rule(*heads, log_decay, beta, normalize_qk=True).output, F.silu(z)
    else:
        z = z + w["g_proj.1.bias"].view(hv, v)
        raw = (read("f") + w["dt_bias"]).unflatten(-1, (hv, k))
        log_decay = -w["A_log"].exp()[:, None] * F.softplus(raw)
        output, gate = lineate.kimi_delta_attention(*heads, log_decay, beta, normalize_qk=True).output, z.sigmoid()
    normed = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + 1e-5) * w["o_norm.weight"]
    torch.testing.assert_close(ours(x)[0], (normed * gate).flatten(2) @ w["o_proj.weight"].mT)


def _gate(mixer):
    return getattr(getattr(mixer, "norm", None), "activation", None)


def test_output_gates_are_as_models_md_says():
    made = {kind.__name__: kind(32, 2) for kind in (
        layers.LinearAttention, layers.GatedLinearAttention, layers.DeltaNet, layers.GatedDeltaNet,
        layers.KimiDeltaAttention, layers.Titans, layers.LeastSquares,
    )}  # fmt: skip
    assert {name: _gate(mixer) for name, mixer in made.items()} == {
        name: "sigmoid" if name == "KimiDeltaAttention" else "silu" for name in made
    }
    for pattern, expected in (("GGGA", "silu"), ("LRD", "silu"), ("KKKM", "sigmoid"), ("GK", "sigmoid")):
        model = HybridLM(preset("tiny", pattern=pattern))
        gates = {_gate(block.mixer) for block in model.layers} - {None}
        assert gates == {expected}, pattern
    assert {_gate(block.mixer) for block in HybridLM(make_config("kda", 20, ModelOptions())).layers} == {"silu"}


@pytest.mark.parametrize("kind", ["GatedDeltaNet", "KimiDeltaAttention", "GatedLinearAttention", "TTTLinear"])
@torch.no_grad()
def test_output_gates_gate(kind):
    """At z = 0, silu and gelu are 0, and a sigmoid is one half."""
    mixer, x = getattr(layers, kind)(32, 2, conv_size=0), torch.randn(1, 5, 32)
    mixer.out_proj.weight.copy_(torch.eye(32))
    z = {"GatedDeltaNet": slice(96, 128), "GatedLinearAttention": slice(112, 144), "TTTLinear": slice(96, 128)}
    weight = mixer.gate_proj.weight if kind == "KimiDeltaAttention" else mixer.in_proj.weight[z[kind]]
    weight.zero_()
    assert bool(mixer(x)[0].any()) == (kind == "KimiDeltaAttention")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), re.findall(
    r"^    \$ lineate (.*)\n((?:    (?!\$ ).*\n|\n(?=    ))*)", (ROOT / "docs/planning.md").read_text(), re.MULTILINE
))  # fmt: skip
def test_plans_print_what_is_shown(command, shown):
    run = subprocess.run(
        [sys.executable, "-m", "lineate.cli", *command.split()], capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    printed = {line.rstrip() for line in run.stdout.splitlines()}
    assert [line for line in shown.splitlines() if line.strip() and line[4:].rstrip() not in printed] == []
