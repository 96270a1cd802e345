"""The head of multi-token prediction: its equations, its tensors in published checkpoints, saving and loading."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.models import HybridLM
from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.loading import MismatchError
from lineate.models.inspect import describe
from lineate.planning import plan_memory, read_model
from tests.support.marks import slow_but
from tests.support.odd_models import EXPERTS, odd

transformers = pytest.importorskip("transformers")

from tests.support.families import Tensors, build, rewrite  # noqa: E402

QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
HIDDEN, HEADS, KV, DIM, SIZE, EXPERT, SHARED = 48, 4, 2, 16, 36, 20, 28


def tensors_of(family: str, fused: bool = False, prefix: str = "mtp.") -> Tensors:
    """Return random tensors of the head under the published names."""
    torch.manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (HIDDEN, 2 * HIDDEN),
        "layers.0.self_attn.q_proj": (2 * HEADS * DIM, HIDDEN),
        "layers.0.self_attn.k_proj": (KV * DIM, HIDDEN),
        "layers.0.self_attn.v_proj": (KV * DIM, HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, HEADS * DIM),
    }
    if family == "qwen3_5":
        shapes |= {f"layers.0.mlp.{name}_proj": (SIZE, HIDDEN) for name in ("gate", "up")}
        shapes["layers.0.mlp.down_proj"] = (HIDDEN, SIZE)
    else:
        shapes["layers.0.mlp.gate"] = (6, HIDDEN)
        shapes["layers.0.mlp.shared_expert_gate"] = (1, HIDDEN)
        for part, size in (*((f"experts.{e}", EXPERT) for e in range(6)), ("shared_expert", SHARED)):
            shapes |= {f"layers.0.mlp.{part}.{name}_proj": (size, HIDDEN) for name in ("gate", "up")}
            shapes[f"layers.0.mlp.{part}.down_proj"] = (HIDDEN, size)
    found = {f"{prefix}{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = {"pre_fc_norm_embedding": HIDDEN, "pre_fc_norm_hidden": HIDDEN, "norm": HIDDEN}
    norms |= {"layers.0.input_layernorm": HIDDEN, "layers.0.post_attention_layernorm": HIDDEN}
    norms |= {"layers.0.self_attn.q_norm": DIM, "layers.0.self_attn.k_norm": DIM}
    found |= {f"{prefix}{name}.weight": 0.3 * torch.randn(size) for name, size in norms.items()}
    if fused:
        one = f"{prefix}layers.0.mlp.experts"
        parts = {key: [found.pop(f"{one}.{e}.{key}_proj.weight") for e in range(6)] for key in ("gate", "up", "down")}
        found[f"{one}.gate_up_proj"] = torch.cat((torch.stack(parts["gate"]), torch.stack(parts["up"])), 1)
        found[f"{one}.down_proj"] = torch.stack(parts["down"])
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for family in QWEN:
        found[family] = tmp_path_factory.mktemp(family)
        build(family).save_pretrained(found[family])
    return found


def with_head(source: Path, target: Path, tensors: Tensors, config=None) -> Path:
    return rewrite(source, target, lambda own: own.update(tensors), config)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotate the first 4 channels of x `t heads 16`: the first two with the second two."""
    angles = torch.arange(x.shape[0])[:, None, None] * theta ** (-torch.arange(2) / 2)
    a, b = x[..., :2], x[..., 2:4]
    both = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
    return torch.cat((*both, x[..., 4:]), -1)


def unit(x: Tensor, w: Tensors, name: str) -> Tensor:
    gated = F.silu(x @ w[f"{name}.gate_proj.weight"].T) * (x @ w[f"{name}.up_proj.weight"].T)
    return gated @ w[f"{name}.down_proj.weight"].T


def restated(w: Tensors, embedded: Tensor, hidden: Tensor, theta: float, dense: bool) -> Tensor:
    """Return the head's results for one sequence `t hidden`, from the published tensors alone."""
    w = {name.removeprefix("mtp."): x for name, x in w.items()}
    t = embedded.shape[0]
    both = rms(embedded, w["pre_fc_norm_embedding.weight"]), rms(hidden, w["pre_fc_norm_hidden.weight"])
    x = torch.cat(both, -1) @ w["fc.weight"].T
    y = rms(x, w["layers.0.input_layernorm.weight"])
    inside = "layers.0.self_attn"
    q, gate = (y @ w[f"{inside}.q_proj.weight"].T).view(t, HEADS, 2 * DIM).chunk(2, -1)
    k, v = ((y @ w[f"{inside}.{name}_proj.weight"].T).view(t, KV, DIM) for name in "kv")
    norms = w[f"{inside}.q_norm.weight"], w[f"{inside}.k_norm.weight"]
    q, k = (turned(rms(z, norm), theta) for z, norm in zip((q, k), norms, strict=True))
    k, v = (z.repeat_interleave(HEADS // KV, 1) for z in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * DIM**-0.5
    scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
    read = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v) * gate.sigmoid()
    x = x + read.flatten(1) @ w[f"{inside}.o_proj.weight"].T
    y = rms(x, w["layers.0.post_attention_layernorm.weight"])
    if dense:
        x = x + unit(y, w, "layers.0.mlp")
    else:
        weights, chosen = (y @ w["layers.0.mlp.gate.weight"].T).softmax(-1).topk(3)
        weights = weights / weights.sum(-1, keepdim=True)
        for i in range(t):
            for weight, e in zip(weights[i], chosen[i].tolist(), strict=True):
                x[i] += weight * unit(y[i], w, f"layers.0.mlp.experts.{e}")
        shared = unit(y, w, "layers.0.mlp.shared_expert")
        x = x + (y @ w["layers.0.mlp.shared_expert_gate.weight"].T).sigmoid() * shared
    return rms(x, w["norm.weight"])


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("layout", slow_but(("one by one", "fused", "model.mtp."), ("fused",)))
@torch.no_grad()
def test_the_head_of_a_checkpoint_computes_the_equations(family, layout, folders, tmp_path):
    if layout == "fused" and family == "qwen3_5":
        layout = "one by one"  # it has no experts
    prefix = layout if layout == "model.mtp." else "mtp."
    folder = with_head(folders[family], tmp_path, tensors_of(family, layout == "fused", prefix))
    model = HybridLM.from_pretrained(folder, progress=False)
    assert model.prediction is not None and model.config.prediction
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(0))
    hidden, _ = model.hidden(model.embed(ids))
    embedded = model.embed(ids[:, 1:])
    attention = model.config.attention
    assert attention is not None and attention.rotary_dim == 4
    got, state = model.prediction(embedded, hidden[:, :-1])
    for row in range(2):
        raw = tensors_of(family)
        wanted = restated(raw, embedded[row], hidden[row, :-1], attention.rope_theta, family == "qwen3_5")
        torch.testing.assert_close(got[row], wanted, atol=1e-5, rtol=0)
    assert state.lengths == 11
    parts, state = [], None
    for i in range(11):  # token by token, and from a trail
        x, state = model.prediction(embedded[:, i : i + 1], hidden[:, i : i + 1], state)
        parts.append(x)
    torch.testing.assert_close(torch.cat(parts, 1), got, atol=1e-5, rtol=0)
    _, before = model.prediction(embedded[:, :6], hidden[:, :6])
    x, trailed = model.prediction.trail(embedded[:, 6:9], hidden[:, 6:9], before)
    torch.testing.assert_close(x, got[:, 6:9], atol=1e-5, rtol=0)
    after = trailed.after(torch.tensor([1, 3]))
    more = embedded[torch.arange(2), torch.tensor([7, 9])], hidden[torch.arange(2), torch.tensor([7, 9])]
    x, _ = model.prediction(more[0][:, None], more[1][:, None], after)
    torch.testing.assert_close(x[:, 0], got[torch.arange(2), torch.tensor([7, 9])], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", QWEN)
@torch.no_grad()
def test_the_model_itself_is_not_changed(family, folders, tmp_path):
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(0))
    plain = HybridLM.from_pretrained(folders[family], progress=False)
    assert plain.prediction is None and not plain.config.prediction
    folder = with_head(folders[family], tmp_path / "with", tensors_of(family))
    both = HybridLM.from_pretrained(folder, progress=False)
    without = HybridLM.from_pretrained(folder, progress=False, prediction=False)
    assert without.prediction is None
    for model in (both, without):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert without.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("family", QWEN)
def test_it_is_planned_and_described(family, folders, tmp_path):
    plain, found = describe(folders[family]), describe(with_head(folders[family], tmp_path, tensors_of(family)))
    assert found.problem is None and found.ignored_bytes == 0
    assert found.parameters - plain.parameters == sum(x.numel() for x in tensors_of(family).values())
    assert found.active_parameters == plain.active_parameters  # a token runs it only when tokens are guessed
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    planned = plan_memory(read_model(tmp_path))
    assert planned.weights == sum(x.nbytes for x in model.state_dict().values())
    assert planned.active_parameters == found.active_parameters


@pytest.mark.parametrize("family", QWEN)
def test_saved_and_reloaded_to_the_same_bits(family, folders, tmp_path):
    model = HybridLM.from_pretrained(with_head(folders[family], tmp_path / "a", tensors_of(family)), progress=False)
    model.save_pretrained(tmp_path / "b")
    again = HybridLM.from_pretrained(tmp_path / "b", progress=False)
    assert again.config == model.config and again.prediction is not None
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, x in model.state_dict().items():
        assert torch.equal(x, again.state_dict()[name]), name
    without = HybridLM.from_pretrained(tmp_path / "b", progress=False, prediction=False)
    assert without.prediction is None and not any("prediction" in name for name in without.state_dict())
    model.prediction = None
    with pytest.raises(ValueError, match="prediction must be PredictionHead, got nothing"):
        model.save_pretrained(tmp_path / "c")


def test_saved_by_transformers_and_reloaded(tmp_path):
    from lineate.integrations.auto import LineateForCausalLM

    model = HybridLM(odd("GA", prediction=True))
    LineateForCausalLM.from_hybrid(model).save_pretrained(tmp_path)
    again = LineateForCausalLM.from_pretrained(tmp_path).to_hybrid()
    assert again.config == model.config
    for name, x in model.state_dict().items():
        assert torch.equal(x, again.state_dict()[name]), name
    assert HybridLM.from_pretrained(tmp_path, progress=False).prediction is not None


DAMAGES = {
    "fc": ("mtp.fc.weight", (48, 48), r"mtp\.fc\.weight: expected shape \(48, 96\), got \(48, 48\)"),
    "norm": ("mtp.norm.weight", (47,), r"mtp\.norm\.weight: expected shape \(48,\), got \(47,\)"),
    "embedding norm": ("mtp.pre_fc_norm_embedding.weight", (1,), r"mtp\.pre_fc_norm_embedding\.weight: expected"),
    "attention": ("mtp.layers.0.self_attn.q_proj.weight", (64, 48), r"q_proj\.weight: expected shape \(128, 48\)"),
    "dtype": ("mtp.pre_fc_norm_hidden.weight", "int64", r"pre_fc_norm_hidden\.weight: expected a floating dtype"),
    "missing": ("mtp.layers.0.self_attn.v_proj.weight", None, r"missing \(1\):\s+mtp\.layers\.0\.self_attn\.v_proj"),
}


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors_are_named(family, damage, folders, tmp_path):
    name, change, message = DAMAGES[damage]
    tensors = tensors_of(family)
    if change is None:
        del tensors[name]
    elif change == "int64":
        tensors[name] = tensors[name].long()
    else:
        tensors[name] = torch.zeros(change)
    folder = with_head(folders[family], tmp_path, tensors)
    with pytest.raises(MismatchError, match=message):
        HybridLM.from_pretrained(folder, progress=False)
    assert HybridLM.from_pretrained(folder, progress=False, prediction=False).prediction is None


@pytest.mark.parametrize("more", ("mtp.layers.1.input_layernorm.weight", "mtp.embed_tokens.weight"))
def test_heads_of_another_kind_are_left_out(more, folders, tmp_path):
    tensors = tensors_of("qwen3_5") | {more: torch.zeros(48)}
    folder = with_head(folders["qwen3_5"], tmp_path, tensors)
    assert HybridLM.from_pretrained(folder, progress=False).prediction is None


def test_a_vision_language_checkpoint(folders, tmp_path):
    def change(own: Tensors) -> None:
        for name in [name for name in own if name.startswith("model.")]:
            own[name.replace("model.", "model.language_model.", 1)] = own.pop(name)
        own.update(tensors_of("qwen3_5"))

    text = Checkpoint.open(folders["qwen3_5"]).config
    config = {"model_type": "qwen3_5", "text_config": text | {"mtp_num_hidden_layers": 1}}
    model = HybridLM.from_pretrained(rewrite(folders["qwen3_5"], tmp_path, change, config), progress=False)
    assert model.prediction is not None
    assert torch.equal(model.prediction.norm.weight, tensors_of("qwen3_5")["mtp.norm.weight"])


def test_new_models_have_a_head_that_trains():
    torch.manual_seed(0)
    model = HybridLM(odd("GA", prediction=True, experts=EXPERTS))
    assert model.prediction is not None
    assert 0.01 < model.prediction.in_proj.weight.std().item() < 0.03
    hidden, _ = model.hidden(model.embed(torch.arange(10)[None]))
    x, _ = model.prediction(model.embed(torch.arange(1, 10)[None]), hidden[:, :-1])
    model.logits(x).logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in model.prediction.parameters())
    same = HybridLM(odd("GA", prediction=True, experts=EXPERTS))
    torch.manual_seed(0)
    same.reset_parameters()
    assert same.prediction is not None
    assert torch.equal(same.prediction.in_proj.weight, model.prediction.in_proj.weight)


def test_configurations_are_checked():
    with pytest.raises(ValueError, match="attention must be given for the block of prediction, got None"):
        odd("G", prediction=True, attention=None)
    with pytest.raises(
        ValueError, match=r"hidden must have the shape \(b, t, hidden\) of the embeddings, \(1, 2, 30\)"
    ):
        HybridLM(odd("GA", prediction=True)).prediction(torch.zeros(1, 2, 30), torch.zeros(1, 3, 30))  # type: ignore[misc]
