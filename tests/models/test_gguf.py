"""GGUF files of every architecture give the model that they were converted from; each type of blocks is exact."""

import warnings
from functools import cache
from pathlib import Path

import pytest
import torch

from bench.serving import gguf_writer
from lineate.models import HybridLM
from lineate.models.families import make_plan, read_config
from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.gguf import kept_formats
from lineate.models.files.gguf_blocks import TYPES
from lineate.models.files.safetensors import CheckpointError
from lineate.models.hybrid import empty_model
from lineate.models.opening import open_checkpoint
from lineate.models.quantizing import quantize_checkpoint
from lineate.models.sampling_defaults import SamplingDefaults
from lineate.quantised import QuantisedWeight
from lineate.quantised.format import FORMATS
from tests.support.families import VOCAB, build, rewrite

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
np = pytest.importorskip("numpy")
from tests.support import gguf_files  # noqa: E402

CLOSE = 1e-5
NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear")
BLOCKS = {number: kind for number, kind in TYPES.items() if kind.decode is not None}
# Sizes of which every weight's columns are whole blocks of 256.
WIDE = dict(
    hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
)  # fmt: skip


@cache
def theirs(name: str):
    return build(name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        theirs(name).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    build("qwen3_5", **WIDE).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(0))


def matrices(kind: str):
    """Return a rule that gives this type to all tensors that a quantiser would change."""

    def of(name: str, shape: tuple[int, ...]) -> str:
        small = ("ssm_conv1d", "ffn_gate_inp", "ssm_a", "ssm_alpha", "ssm_beta")
        return "F32" if len(shape) < 2 or any(x in name for x in small) else kind

    return of


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name, folders, tmp_path):
    file = gguf_files.write(tmp_path / "model.gguf", folders(name))
    model, ids = HybridLM.from_pretrained(file, progress=False), tokens(2, 75)
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(ids).logits, theirs(name)(ids).logits, atol=CLOSE, rtol=0)
    assert model.config.family == name
    assert HybridLM.from_pretrained(tmp_path, progress=False).config == model.config


@pytest.mark.parametrize("name", NAMES)
def test_tensors_equal_those_of_the_folder(name, folders, tmp_path):
    """Weights are the same bits; norms, decays and what follows from them are as close as float32 is."""
    file = gguf_files.write(tmp_path / "model.gguf", folders(name))
    ours = HybridLM.from_pretrained(file, progress=False).state_dict()
    for key, wanted in HybridLM.from_pretrained(folders(name), progress=False).state_dict().items():
        if "norm" in key or key.endswith("A_log"):
            torch.testing.assert_close(ours[key], wanted, atol=3e-7, rtol=3e-7)
        else:
            assert torch.equal(ours[key], wanted), key


def test_files_of_earlier_converters(folders, tmp_path):
    def one_projection(values, tensors):  # Qwen3-Next: in_proj_qkvz unchanged
        folder = Checkpoint.open(folders("qwen3_next"))
        for i in (0, 1, 2, 4):
            del tensors[f"blk.{i}.attn_qkv.weight"], tensors[f"blk.{i}.attn_gate.weight"]
            tensors[f"blk.{i}.ssm_in.weight"] = folder.read(f"model.layers.{i}.linear_attn.in_proj_qkvz.weight")

    def one_up_projection(values, tensors):  # Kimi Linear: kv_b_proj unchanged; dims of 1 left out
        del tensors["blk.3.attn_k_b.weight"], tensors["blk.3.attn_v_b.weight"]
        tensors["blk.3.attn_kv_b.weight"] = Checkpoint.open(folders("kimi_linear")).read(
            "model.layers.3.self_attn.kv_b_proj.weight"
        )
        for name, x in tensors.items():
            if name.endswith("ssm_a"):
                tensors[name] = x.view(-1, 1)
            elif "ssm_conv1d" in name:
                tensors[name] = x.squeeze(0)

    for name, change in (("qwen3_next", one_projection), ("kimi_linear", one_up_projection)):
        file = gguf_files.write(tmp_path / f"{name}.gguf", folders(name), change=change)
        ids = tokens(1, 40)
        logits = HybridLM.from_pretrained(file, progress=False)(ids).logits
        torch.testing.assert_close(logits, theirs(name)(ids).logits, atol=CLOSE, rtol=0)


def test_gate_and_up_of_experts_in_one_tensor(folders, tmp_path):
    def joined(values, tensors):
        for i in range(5):
            gate, up = (tensors.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up"))
            tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = torch.cat([gate, up], 1)

    file = gguf_files.write(tmp_path / "model.gguf", folders("qwen3_5_moe"), change=joined)
    ids = tokens(1, 40)
    logits = HybridLM.from_pretrained(file, progress=False)(ids).logits
    torch.testing.assert_close(logits, theirs("qwen3_5_moe")(ids).logits, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("number", BLOCKS, ids=lambda number: TYPES[number].name)
def test_blocks_decode_to_the_bits_of_the_package(number):
    """Random bytes, and scales of every kind: negative, subnormal, zero, the largest, infinite, NaN."""
    kind, rng = BLOCKS[number], np.random.default_rng(number)
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.size, kind.nbytes)
    blocks = rng.integers(0, 256, (4096, kind.nbytes), dtype=np.uint8)
    special = np.array([0.0, -0.0, 6e-8, -6e-8, 6e-5, 65504, -65504, np.inf, np.nan, -0.01], np.float16)
    places = (208,) if kind.name == "Q6_K" else (0, 2) if kind.name.endswith(("_1", "_K")) else (0,)
    for i, at in enumerate(places):
        blocks[:2000, at : at + 2] = np.resize(np.roll(special, 3 * i), 2000)[:, None].view(np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(number))
    got = kind.decode(torch.from_numpy(blocks)).numpy()
    assert got.dtype == np.float32 and got.shape == wanted.shape
    undefined = np.isnan(wanted)
    assert (np.isnan(got) == undefined).all()
    assert (got.view(np.int32) == wanted.view(np.int32))[~undefined].all()


@pytest.mark.parametrize("kind", [kind.name for kind in TYPES.values() if kind.name not in ("F32", "F16")])
def test_quantised_files_have_the_decoded_values(kind, wide, tmp_path):
    """Every tensor equals, to the bit, that of a file in which the package wrote the decoded values in F32."""
    file = gguf_files.write(tmp_path / "model.gguf", wide, matrices(kind))
    plain = gguf_files.write(tmp_path / "decoded.gguf", wide, matrices(kind), decoded=True)
    ours, wanted = open_checkpoint(file), open_checkpoint(plain)
    assert ours.config == wanted.config and ours.shapes == wanted.shapes
    assert file.stat().st_size < 0.6 * plain.stat().st_size
    for name in wanted.entries:
        assert torch.equal(ours.read(name).float(), wanted.read(name)), name


@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0", "Q5_K", "Q6_K"])
def test_the_default_device_does_not_matter(kind, wide, tmp_path):
    file = gguf_files.write(tmp_path / "model.gguf", wide, matrices(kind))
    wanted, ids = HybridLM.from_pretrained(file, progress=False), tokens(1, 9)
    with torch.device("meta"):
        found = HybridLM.from_pretrained(file, progress=False)
    assert torch.equal(found(ids).logits, wanted(ids).logits)


def test_half_precision_stays(wide, tmp_path):
    file = gguf_files.write(tmp_path / "model.gguf", wide, matrices("F16"))
    model = HybridLM.from_pretrained(file, progress=False)
    assert model.head.weight.dtype == torch.float16 and model.layers[0].mixer.A_log.dtype == torch.float32
    theirs = HybridLM.from_pretrained(wide, dtype="float16", progress=False)
    assert torch.equal(model.layers[1].mixer.out_proj.weight, theirs.layers[1].mixer.out_proj.weight)


@pytest.mark.parametrize(("kind", "form"), [("Q8_0", "int8"), ("Q4_0", "int4")])
def test_codes_and_scales_are_passed_on(kind, form, wide, tmp_path):
    checkpoint = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", wide, matrices(kind)))
    bits = {"int8": 8, "int4": 4}[form]
    kept = [name for name in checkpoint.entries if checkpoint.kept_as(name) is not None]
    assert {checkpoint.kept_as(name) for name in kept} == {form}
    assert any("out_proj" in name for name in kept) and any("in_proj_qkv" in name for name in kept)
    for name in kept:
        values = checkpoint.read(name)
        for rows in (None, (3, 21)):
            codes, scales = checkpoint.read_codes(name, rows)
            wanted = values if rows is None else values[slice(*rows)]
            assert codes.dtype == torch.uint8 and scales.dtype == torch.float16
            assert int(codes.max()) < 2**bits
            made = FORMATS[form].decode(*FORMATS[form].to_tiles(codes, scales), len(codes))
            assert torch.equal(made, wanted), name
    with pytest.raises(ValueError, match=r"model\.gguf: model\.norm\.weight in F32 has no codes"):
        checkpoint.read_codes("model.norm.weight")


def test_what_each_tensor_of_the_model_is_kept_as(wide, tmp_path):
    def kinds(name: str, shape: tuple[int, ...]) -> str:
        kind = "Q6_K" if name == "output.weight" else "F16" if "ffn_up" in name else "Q4_0"
        return "Q8_0" if "attn_k." in name or "ffn_gate" in name else matrices(kind)(name, shape)

    checkpoint = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", wide, kinds))
    config = read_config(checkpoint)
    plan = make_plan(checkpoint, config, empty_model(config))
    sources = {target: [piece.source for piece in pieces] for target, pieces in plan.pieces.items()}
    kept = kept_formats(checkpoint, sources)
    assert kept["head.weight"] == "int8" and kept["embed.weight"] == "int4"
    assert kept["layers.0.mixer.out_proj.weight"] == "int4"
    assert kept["layers.3.mixer.in_proj.weight"] == "int8"  # q and v in Q4_0, k in Q8_0
    assert kept["layers.0.feed.gate_up_proj.weight"] == "int8"  # Q8_0 and F16
    assert "norm.weight" not in kept and "layers.0.mixer.conv.weight" not in kept
    assert kept_formats(Checkpoint.open(wide), {"x": ["lm_head.weight"]}) == {}


@pytest.mark.parametrize(
    ("kind", "form", "close"), [("Q8_0", "int8", CLOSE), ("Q4_0", "int4", CLOSE), ("Q6_K", "int8", 0.02)]
)
def test_blocks_stay_quantised_in_the_model(kind, form, close, wide, tmp_path):
    """Q8_0 and Q4_0 are kept unchanged; Q6_K is rounded once more, to 8 bits."""

    def kinds(name: str, shape: tuple[int, ...]) -> str:
        gates = ("ssm_alpha", "ssm_beta")  # they share a weight with q, k, v and z
        return kind if any(x in name for x in gates) else matrices(kind)(name, shape)

    model = HybridLM.from_pretrained(gguf_files.write(tmp_path / "model.gguf", wide, kinds), progress=False)
    plain = HybridLM.from_pretrained(
        gguf_files.write(tmp_path / "decoded.gguf", wide, kinds, decoded=True), progress=False
    )
    quantised = {name: x for name, x in model.named_parameters() if isinstance(x, QuantisedWeight)}
    assert {x.format.name for x in quantised.values()} == {form}
    assert {"embed.weight", "head.weight", "layers.0.mixer.out_proj.weight", "layers.3.mixer.in_proj.weight"} <= set(
        quantised
    )
    for name, x in quantised.items():
        wanted = plain.get_parameter(name)
        if form == "int8" and kind != "Q8_0":
            assert (x.decoded() - wanted).abs().max() <= wanted.abs().max() / 200
        else:
            assert torch.equal(x.decoded(), wanted), name
    ids = tokens(1, 40)
    for name, x in quantised.items():
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner).register_parameter(key, torch.nn.Parameter(x.decoded()))
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=close, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_the_head_of_multi_token_prediction(name, folders, tmp_path):
    """It is the head that the folder has, which test_prediction.py compares with its equations."""
    tensors = prediction_tensors(name)
    folder = rewrite(folders(name), tmp_path / "folder", lambda own: own.update(tensors))
    file = gguf_files.write(tmp_path / "model.gguf", folder)
    ours, wanted = (HybridLM.from_pretrained(x, progress=False) for x in (file, folder))
    assert ours.config.prediction and ours.prediction is not None and ours.config == wanted.config
    for key, x in wanted.prediction.state_dict().items():
        torch.testing.assert_close(ours.prediction.state_dict()[key], x, atol=3e-7, rtol=3e-7)
    without = HybridLM.from_pretrained(file, progress=False, prediction=False)
    assert without.prediction is None
    torch.testing.assert_close(without(tokens(1, 9)).logits, theirs(name)(tokens(1, 9)).logits, atol=CLOSE, rtol=0)


def prediction_tensors(name: str) -> dict[str, torch.Tensor]:
    """Return a head made of the layer with attention."""
    layer = {key: x for key, x in theirs(name).state_dict().items() if key.startswith("model.layers.3.")}
    found = {key.replace("model.layers.3.", "mtp.layers.0."): x.clone() for key, x in layer.items()}
    hidden = theirs(name).config.hidden_size
    found["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden)
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return found | {f"mtp.{part}.weight": torch.randn(hidden) for part in norms}


def test_a_file_of_the_benchmarks_writer(tmp_path):
    """bench/serving/gguf_writer.py writes Qwen3-Next with dense feed-forwards as Qwen3.5; llama.cpp reads its files."""
    model = build("qwen3_next", mlp_only_layers=[0, 1, 2, 3, 4], linear_value_head_dim=8)
    gguf_writer.write_gguf(model, tmp_path / "model.gguf")
    ids = tokens(1, 40)
    logits = HybridLM.from_pretrained(tmp_path / "model.gguf", progress=False)(ids).logits
    torch.testing.assert_close(logits, model(ids).logits, atol=CLOSE, rtol=0)


def test_a_file_without_a_tokenizer_is_quantised(wide, tmp_path):
    file = gguf_files.write(tmp_path / "model.gguf", wide, matrices("Q8_0"))
    with pytest.warns(UserWarning, match=r"put the model.s tokenizer\.json next to the file; the new folder"):
        quantize_checkpoint(file, tmp_path / "without", "int4", progress=False)
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    (tmp_path / "tokenizer.json").write_text("{}")
    quantize_checkpoint(file, tmp_path / "with", "int4", progress=False)
    assert (tmp_path / "with" / "tokenizer.json").read_text() == "{}"
    one, other = (HybridLM.from_pretrained(tmp_path / name, progress=False) for name in ("without", "with"))
    assert torch.equal(one(tokens(1, 9)).logits, other(tokens(1, 9)).logits)


def test_parts_of_a_split_file(folders, tmp_path):
    gguf_files.write(tmp_path / "model.gguf", folders("qwen3_5"), split=9)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 3 and files[0].name.startswith("model-00001-of-")
    ids = tokens(1, 20)
    for name in (tmp_path, files[0], files[2]):
        logits = HybridLM.from_pretrained(name, progress=False)(ids).logits
        torch.testing.assert_close(logits, theirs("qwen3_5")(ids).logits, atol=CLOSE, rtol=0)
    files[1].unlink()
    with pytest.raises(ValueError, match=f"expected the {len(files)} parts of model, got no {files[1].name}; fetch"):
        HybridLM.from_pretrained(files[0])


def test_sampling_defaults(folders, tmp_path):
    given = {"sampling.temp": 0.6, "sampling.top_k": 20, "sampling.top_p": 0.95, "sampling.penalty_repeat": 1.05}
    file = gguf_files.write(tmp_path / "a.gguf", folders("qwen3_5"), general=given)
    expected = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no tokenizer
        model = HybridLM.from_pretrained(file, progress=False)
        assert model.sampling_defaults == expected  # the digits that a float32 has
        model.save_pretrained(tmp_path / "saved")
        quantize_checkpoint(file, tmp_path / "int8", "int8", progress=False)
    for place in ("saved", "int8"):
        assert HybridLM.from_pretrained(tmp_path / place, progress=False).sampling_defaults == expected
    wrong = gguf_files.write(tmp_path / "b.gguf", folders("qwen3_5"), general={"sampling.temp": -1.0})
    message = r"b\.gguf: general\.sampling\.temp must be a number from 0 to 100, got -1\.0"
    with pytest.raises(CheckpointError, match=message):
        HybridLM.from_pretrained(wrong, progress=False)
