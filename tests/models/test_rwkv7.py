"""RWKV-7: checkpoints of both layouts have the logits of the authors' recurrence, and models keep their promises."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lineate.decoding import Decoder
from lineate.layers import Carried
from lineate.models import FeedConfig, HybridConfig, HybridLM, RwkvConfig, preset
from lineate.models.config import AttentionConfig
from lineate.models.files.checkpoint import save
from lineate.models.files.safetensors import CheckpointError
from lineate.models.inspect import describe
from lineate.models.sharding import model_ranges
from lineate.parallel.tensor.ranks import Ranks
from lineate.planning import plan_memory, read_model
from lineate.planning.activations import saved_by
from lineate.planning.compute import plan_flops
from tests.support.rwkv import Sizes, as_fla, draw, fla_config, logits_of

SIZES = Sizes()
LAYOUTS = ("authors", "authors, all tensors", "fla", "fla, one x_x")


def ids_of(t: int, vocab: int = SIZES.vocab, rows: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, t), generator=torch.Generator().manual_seed(5))


def write(folder: Path, layout: str, sizes: Sizes = SIZES, **changes) -> Path:
    tensors = draw(sizes)
    if layout.startswith("fla"):
        save(folder, as_fla(tensors, fused="x_x" in layout), fla_config(sizes, **changes))
        return folder
    if "all" in layout:  # the first layer has tensors that nothing reads
        tensors |= {f"blocks.0.att.v{n}": tensors[f"blocks.1.att.v{n}"] for n in range(3)}
    save(folder, tensors, {"model_type": "rwkv7"} | changes)
    return folder


def small(**changes) -> HybridConfig:
    """Return a model of V alone in which no two sizes are equal."""
    given = {
        "vocab_size": 31, "hidden_size": 20, "n_layers": 3, "pattern": "V", "norm": "layer", "norm_eps": 1e-5,
        "rwkv": RwkvConfig(2, 8, value_dim=6, decay_rank=5, rate_rank=7, value_rank=9, gate_rank=3),
        "feed": FeedConfig(36, "channel_mix"), "embedding_norm": True,
    }  # fmt: skip
    return HybridConfig(**{**given, **changes})


def made(config: HybridConfig, dtype: torch.dtype = torch.float64) -> HybridLM:
    """Return a model whose parameters are all random."""
    torch.manual_seed(0)
    model = HybridLM(config)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.2 * torch.randn_like(x))
    return model.to(dtype).eval()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_authors_recurrence(tmp_path, layout):
    model = HybridLM.from_pretrained(write(tmp_path / "model", layout), progress=False)
    ids = ids_of(40)
    expected = logits_of(draw(SIZES), ids[0])
    with torch.no_grad():
        found = model(ids)
        torch.testing.assert_close(found.logits[0].double(), expected, rtol=2e-5, atol=2e-5)
        state, steps = None, []
        for i in range(40):
            out = model(ids[:, i : i + 1], state=state)
            state = out.state
            steps.append(out.logits[0])
    torch.testing.assert_close(torch.cat(steps).double(), expected, rtol=2e-5, atol=2e-5)


def test_logits_in_bfloat16_are_within_its_rounding(tmp_path):
    """The error is at most twice that of the authors' program in bfloat16, and one rounding."""
    model = HybridLM.from_pretrained(write(tmp_path / "model", "authors"), dtype="bfloat16", progress=False)
    ids, tensors = ids_of(40), {name: x.bfloat16() for name, x in draw(SIZES).items()}
    exact, rounded = logits_of(tensors, ids[0]), logits_of(tensors, ids[0], torch.bfloat16)
    with torch.no_grad():
        found = model(ids).logits[0].double()
    budget = 2 * (rounded.double() - exact).norm() + 2**-9 * exact.norm()
    assert (found - exact).norm() <= budget


@pytest.mark.parametrize("layout", ["authors", "fla"])
def test_a_folder_is_described_planned_saved_and_read_again(tmp_path, layout):
    folder = write(tmp_path / "model", layout)
    found = describe(folder)
    assert found.problem is None and found.family == "rwkv7" and found.config.letters == "VVV"
    assert found.config.rwkv == RwkvConfig(3, 8, None, 5, 6, 7, 10, pytest.approx(8e-5))
    assert found.parameters == sum(x.numel() for x in draw(SIZES).values()) and not found.ignored_bytes
    model = HybridLM.from_pretrained(folder, progress=False)
    plan = plan_memory(read_model(folder))
    assert plan.weights == sum(x.nbytes for x in model.parameters())
    assert plan.state(2, 9) == model(ids_of(9, rows=2)).state.nbytes == model.state_nbytes(2)
    model.save_pretrained(tmp_path / "own")
    again = HybridLM.from_pretrained(tmp_path / "own", progress=False)
    assert again.config == model.config
    assert torch.equal(again(ids_of(9)).logits, model(ids_of(9)).logits)


class Place(Ranks):
    """A rank that only loads."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("layout", ["authors", "fla, one x_x"])
def test_a_rank_reads_its_heads(tmp_path, layout):
    folder = write(tmp_path / "model", layout, Sizes(feed=42))
    whole = HybridLM.from_pretrained(folder, progress=False)
    for rank in range(3):
        share = HybridLM.from_pretrained(folder, progress=False, ranks=Place(rank, 3))
        ranges, found = model_ranges(whole, rank, 3), share.state_dict()
        assert share.state_nbytes(1) < whole.state_nbytes(1)
        for name, x in whole.state_dict().items():
            assert torch.equal(found[name], ranges[name].of(x) if name in ranges else x), name


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("fla", {"hidden_act": "relu"}, "hidden_act = 'sqrelu', got 'relu'"),
        ("fla", {"attn": {"layers": [1], "num_heads": 2}}, "must have attn = None"),
        ("fla", {"norm_bias": False}, "norm_bias = True"),
        ("fla", {"head_dim": 7}, "num_heads x head_dim = hidden_size = 24, got 3 x 7"),
        ("fla", {"value_dim": [24, 48, 24]}, "same value_dim in all 3 layers"),
        ("fla", {"value_dim": [24]}, "same value_dim in all 3 layers"),
        ("authors", {"num_hidden_layers": 4}, r"missing .*\n +blocks.3.att"),
        ("authors", {"v_low_rank_dim": 8}, "misshapen"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, layout, changes, message):
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        HybridLM.from_pretrained(write(tmp_path / "model", layout, **changes), progress=False)


def test_ranks_that_the_config_leaves_open_are_the_authors(tmp_path):
    sizes = {"hidden_size": 2048, "head_dim": 64, "num_heads": None, "value_dim": None, "intermediate_size": None}
    ranks = {f"{x}_low_rank_dim": None for x in ("decay", "a", "v", "gate")}
    (tmp_path / "config.json").write_text(json.dumps(fla_config(SIZES) | sizes | ranks))
    config = read_model(tmp_path).config
    assert config.rwkv == RwkvConfig(32, 64, None, 128, 128, 64, 224, 64e-5)
    assert config.feed == FeedConfig(8192, "channel_mix")


def test_values_of_other_widths_than_keys(tmp_path):
    """fla allows values that are wider than keys; a model of ours saved in its layout is read to the same logits."""
    model = made(small(hidden_size=16, rwkv=RwkvConfig(2, 8, value_dim=16, value_rank=9)), torch.float32)
    own = model.state_dict()
    tensors = {"model.embeddings.weight": own["embed.weight"], "lm_head.weight": own["head.weight"]}
    names = {"embed.norm.": "model.layers.0.pre_norm.", "norm.": "model.norm."}
    inside = {
        "mixer_norm.": "attn_norm.", "feed_norm.": "ffn_norm.", "feed.shift": "ffn.x_k", "feed.up_proj": "ffn.key",
        "feed.down_proj": "ffn.value", "mixer.q_proj": "attn.r_proj", "mixer.k_proj": "attn.k_proj",
        "mixer.v_proj": "attn.v_proj", "mixer.out_proj": "attn.o_proj", "mixer.norm.": "attn.g_norm.",
        "mixer.erase_scale": "attn.k_k", "mixer.rate_scale": "attn.k_a", "mixer.bonus": "attn.r_k",
        "mixer.decay.": "attn.w_lora.lora.", "mixer.rate.": "attn.a_lora.lora.",
        "mixer.value_mix.": "attn.v_lora.lora.", "mixer.gate.": "attn.g_lora.lora.", "down.weight": "0.weight",
        "up.weight": "2.weight", "offset": "2.bias",
        "mixer.shift_": "attn.x_", "x_q": "x_r", "x_decay": "x_w", "x_rate": "x_a", "x_gate": "x_g",
    }  # fmt: skip
    for name, x in own.items():
        to = next((name.replace(a, b) for a, b in names.items() if name.startswith(a)), name)
        if name.startswith("layers."):
            for a, b in inside.items():
                to = to.replace(a, b)
            tensors[f"model.{to}"] = x.view(2, 8) if to.endswith("r_k") else x
        elif to != name:
            tensors[to] = x
    sizes = replace(SIZES, vocab=31, hidden=16, heads=2, feed=36, decay=64, rate=64, value=9, gate=128)
    save(tmp_path, tensors, fla_config(sizes, value_dim=32))
    again = HybridLM.from_pretrained(tmp_path, progress=False)
    eps = model.config.rwkv.norm_eps
    assert again.config.rwkv == RwkvConfig(2, 8, 16, 64, 64, 9, 128, pytest.approx(8e-5))
    for block in again.layers:
        block.mixer.norm.eps = eps
    torch.testing.assert_close(again(ids_of(9, 31)).logits, model(ids_of(9, 31)).logits)


MODELS = {
    "alone": small,
    "with other mixers": lambda: small(
        n_layers=4, pattern="GVVD", linear=preset("tiny").linear, norm="rms", embedding_norm=False
    ),
    "with attention": lambda: small(
        pattern="VAV", attention=AttentionConfig(2, 1, 10, rotary_dim=4), feed=FeedConfig(36, "relu2")
    ),
    "a shift in the feed-forward alone": lambda: small(pattern="GGD", linear=preset("tiny").linear),
}
models = pytest.mark.parametrize("name", MODELS)


@models
def test_split_anywhere_equals_whole(name):
    model, ids = made(MODELS[name]()), ids_of(30, 31, rows=2)
    with torch.no_grad():
        whole = model(ids)
        for cuts in ([1], [29], [3, 4, 17]):
            state, parts = None, []
            for start, end in zip([0, *cuts], [*cuts, 30], strict=True):
                out = model(ids[:, start:end], state=state)
                state = out.state
                parts.append(out.logits)
            torch.testing.assert_close(torch.cat(parts, 1), whole.logits, rtol=1e-9, atol=1e-9)
            for got, wanted in zip(state.layers, whole.state.layers, strict=True):
                for key in wanted.names:
                    torch.testing.assert_close(got[key], wanted[key], rtol=1e-9, atol=1e-9)


@models
def test_packed_sequences_equal_separate_ones(name):
    model, ids, more = made(MODELS[name]()), ids_of(24, 31), ids_of(3, 31, rows=4)
    bounds = torch.tensor([0, 5, 5, 6, 24])
    with torch.no_grad():
        packed = model(ids, cu_seqlens=bounds)
        continued = model(more, state=packed.state).logits
        for row, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            alone = model(torch.cat((ids[:, start:end], more[row : row + 1]), 1)).logits
            torch.testing.assert_close(packed.logits[:, start:end], alone[:, :-3], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(continued[row : row + 1], alone[:, -3:], rtol=1e-9, atol=1e-9)


@pytest.mark.cover
@models
def test_a_decoder_and_a_speculative_pass_equal_the_model(name):
    model, ids = made(MODELS[name](), torch.float32), ids_of(14, 31, rows=2)
    with torch.no_grad():
        expected = model(ids).logits
        state = model(ids[:, :6]).state
        decoder = Decoder(model, state, room=8)
        steps = [decoder(ids[:, i : i + 1]) for i in range(6, 14)]
        torch.testing.assert_close(torch.cat(steps, 1), expected[:, 6:], rtol=1e-4, atol=1e-4)
        passed = model.trail(ids[:, 6:11], state)
        torch.testing.assert_close(passed.logits, expected[:, 6:11], rtol=1e-4, atol=1e-4)
        after = passed.trail.after(torch.tensor([2, 5]))
        for row, kept in enumerate((8, 11)):
            one = model(ids[row : row + 1, kept : kept + 1], state=after.select(torch.tensor([row]))).logits
            torch.testing.assert_close(one[0], expected[row, kept : kept + 1], rtol=1e-4, atol=1e-4)


def test_generation_continues_as_the_model_does():
    model, ids = made(small(), torch.float32), ids_of(5, 31)
    found = model.generate(ids, 6, temperature=0).run()[0]
    for _ in range(6):
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    assert found == ids[0, 5:].tolist()


@pytest.mark.cover
@pytest.mark.parametrize("recompute", [False, True])
def test_every_parameter_is_trained(recompute):
    """Gradients reach the first layer through the values that it hands on; recomputed blocks have the same."""
    model, ids = made(small()).train(), ids_of(12, 31)
    model(ids, labels=ids).loss.backward()
    expected = {name: x.grad.clone() for name, x in model.named_parameters()}
    assert all(grad.abs().sum() > 0 for grad in expected.values())
    model.zero_grad()
    for block in model.layers:
        block.recompute = recompute
    model(ids, labels=ids).loss.backward()
    for name, x in model.named_parameters():
        torch.testing.assert_close(x.grad, expected[name], msg=name)
    step, weight = 1e-6, model.layers[0].mixer.v_proj.weight
    with torch.no_grad():
        losses = []
        for sign in (1, -2):
            weight[3, 4] += sign * step
            losses.append(model(ids, labels=ids).loss)
    torch.testing.assert_close((losses[0] - losses[1]) / (2 * step), expected["layers.0.mixer.v_proj.weight"][3, 4],
                               rtol=1e-5, atol=1e-7)  # fmt: skip


@pytest.mark.slow
def test_the_model_is_compiled_in_one_graph():
    """Carried values do not break the graph, and have gradients there."""
    model, ids = made(small(), torch.float32), ids_of(12, 31)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(ids, labels=ids).loss
    torch.testing.assert_close(loss, model(ids, labels=ids).loss)
    weight = model.layers[0].mixer.v_proj.weight
    (found,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(found, torch.autograd.grad(model(ids, labels=ids).loss, weight)[0])


def test_plans_equal_what_is_allocated_and_counted():
    """The first layer, which mixes no values, has fewer weights and operations than the others."""
    from torch.utils.flop_counter import FlopCounterMode

    config = small()
    model = made(config, torch.float32)
    plan, flops = plan_memory(read_model(config)), plan_flops(read_model(config))
    assert plan.weights == sum(x.nbytes for x in model.parameters())
    assert plan.layers[0].weights < plan.layers[1].weights == plan.layers[2].weights
    first, later = flops.layers[0], flops.layers[1]
    assert later.projections - first.projections == 2 * 9 * (20 + 12)
    for layer in plan.layers:
        assert layer.conv == 2 * 20 * 4 and layer.memory == 2 * 8 * 6 * 4 and not layer.cache_per_token
    for t in (1, 50):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(ids_of(t, 31))
        assert counter.get_total_flops() == flops.forward(t, t)


@pytest.mark.parametrize("changes", [{}, {"norm": "rms"}, {"feed": FeedConfig(36)}, {"pattern": "GV"}], ids=str)
def test_planned_activations_are_what_the_backward_keeps(changes):
    """They are those of the blocks in float32; a block of V has what its mixer keeps, which is measured."""
    config = small(linear=preset("tiny").linear, **changes)
    model, found = made(config, torch.float32), []
    parameters = {x.untyped_storage().data_ptr() for x in model.parameters()}
    for t in (128, 256):
        x, carried, kept = torch.zeros(1, t, 20, requires_grad=True), Carried(), {}
        for block in model.layers:
            own = {}
            with torch.autograd.graph.saved_tensors_hooks(partial(note, own), lambda y: y):
                x, _ = block(x, None, None, carried)
            kept |= own
        found.append(sum(size for name, (size, _) in kept.items() if name not in parameters))
    planned = sum(saved_by(config, layer, False).total for layer in range(config.n_layers))
    shared = 4 * 12 * (config.letters.count("V") - 1)  # the first values, which all layers keep, are one tensor
    assert (found[1] - found[0]) / 128 == pytest.approx(planned - shared, rel=0.01)


def note(found: dict, x: torch.Tensor) -> torch.Tensor:
    """Note the storage of a tensor that autograd saves, which is kept so that its address is not used again."""
    storage = x.untyped_storage()
    found[storage.data_ptr()] = storage.nbytes(), x
    return x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pattern": "VA", "attention": AttentionConfig(2, 1, 10)},
            "feed.kind must be 'swiglu' or 'relu2' in a layer of .* got 'channel_mix' with 'A' in layer 1",
        ),
        ({"logit_scale": 2.0}, "norm must be 'rms' with zero_centred_norm or a logit_scale, got 'layer'"),
        ({"embedding_scale": 2.0}, "embedding_scale must be 1 with embedding_norm, got 2.0"),
        ({"rwkv": None}, "rwkv must be given for the letter 'V'"),
        ({"norm": "batch"}, "norm must be one of 'rms', 'layer', got 'batch'"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)
