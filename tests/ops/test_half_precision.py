"""16-bit products on a CPU go through float32 if the processor has none: as exact as torch's, and never by torch's own.

The environment forces the choice, so that these tests run alike on processors with and without such products.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lineate
from lineate.layers import GatedDeltaNet, SwiGLU
from lineate.layers.projection import project
from lineate.layers.registry import letters as all_letters
from lineate.models import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
    RwkvConfig,
    loss,
    preset,
)
from lineate.models.inspect import describe, rows
from lineate.native import low_precision_matmul as half
from lineate.native import product as native
from lineate.native.build import available
from lineate.system import processor

LETTERS = all_letters()

BF16, F16 = torch.bfloat16, torch.float16
halves = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "attention")


def set_products(monkeypatch, value: str) -> None:
    for name in ("LINEATE_CPU_BF16", "LINEATE_CPU_FP16"):
        monkeypatch.setenv(name, value)
    processor.forget()


@pytest.fixture(autouse=True)
def own_processor():
    """Forget the properties of the processor that a test has set, when the test ends."""
    yield
    processor.forget()


@pytest.fixture
def without(monkeypatch):
    """Simulate a processor without 16-bit products."""
    set_products(monkeypatch, "0")


@pytest.fixture
def in_blocks(without, monkeypatch):
    """Simulate the same, with products in blocks also under a mode that records calls and for quantised weights."""
    monkeypatch.setattr(half, "is_eager", lambda *tensors: True)
    monkeypatch.setattr(half, "BLOCK", 64)
    monkeypatch.setattr(native, "MOST_ROWS", 2)


class Recorder(TorchDispatchMode):
    """Records the products that had a 16-bit operand."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in PRODUCTS or "attention" in name:
            self.products += 1
            if any(isinstance(x, Tensor) and x.dtype in (BF16, F16) for x in tree_leaves(args)):
                self.found.add(name)
        return func(*args, **(kwargs or {}))


# which processors


CPUS = {
    "Neoverse-N1": (
        "fp asimd evtstrm aes atomics fphp asimdhp cpuid asimdrdm asimddp",
        {BF16: False, F16: False},
    ),
    "Neoverse-V1": ("fp asimd fphp asimdhp sve i8mm svebf16 bf16", {BF16: True, F16: False}),
    "Cascade Lake": ("fpu sse2 avx2 f16c avx512f avx512bw avx512_vnni", {BF16: False, F16: False}),
    "Cooper Lake": ("fpu sse2 avx2 f16c avx512f avx512bw avx512_vnni avx512_bf16", {BF16: True, F16: False}),
    "Sapphire Rapids": ("avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8", {BF16: True, F16: True}),
    "unknown": ("", {BF16: False, F16: False}),
}


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("library", [True, False], ids=["oneDNN", "none"])
def test_what_a_processor_multiplies(cpu, library, monkeypatch):
    features, expected = CPUS[cpu]
    for name in ("LINEATE_CPU_BF16", "LINEATE_CPU_FP16"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processor, "instruction_sets", lambda: set(features.split()))
    monkeypatch.setattr(processor, "library_multiplies", lambda dtype: library)
    processor.forget()
    for dtype, multiplies in expected.items():
        assert processor.multiplies(dtype) == (multiplies and library)
    assert processor.multiplies(torch.float32)


def test_the_environment_decides(monkeypatch):
    for value in "10":
        set_products(monkeypatch, value)
        assert [processor.multiplies(dtype) for dtype in (BF16, F16)] == [value == "1"] * 2
    for dtype, name in ((BF16, "LINEATE_CPU_BF16"), (F16, "LINEATE_CPU_FP16")):
        monkeypatch.setenv(name, "yes")
        processor.forget()
        with pytest.raises(ValueError, match=f"{name} must be 0 or 1, got 'yes'; leave it unset"):
            processor.multiplies(dtype)


def test_where_torch_has_products_they_are_used(monkeypatch):
    set_products(monkeypatch, "1")
    module, x = nn.Linear(8, 8).to(BF16), torch.randn(3, 8, dtype=BF16)
    with Recorder() as recorder:
        half.linear(x, module.weight, module.bias)
    assert recorder.found == {"addmm"}


def test_explain_and_inspect_say_so(without, tmp_path):
    said = "bfloat16: this processor has no bfloat16 products; computed through float32"
    q, beta = torch.randn(1, 20, 2, 6, dtype=BF16), torch.rand(1, 20, 2, dtype=BF16)
    assert lineate.explain(q, q, q, beta=beta).reason.endswith("; " + said)
    assert "through" not in lineate.explain(q.float(), q.float(), q.float(), beta=beta.float()).reason
    for dtype in (BF16, torch.float32):
        HybridLM(preset("tiny")).to(dtype).save_pretrained(tmp_path / str(dtype))
    assert dict(rows(describe(tmp_path / str(BF16))))["on this CPU"] == said
    assert "on this CPU" not in dict(rows(describe(tmp_path / "torch.float32")))


# products


def bound(exact: Tensor, size: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Return the bound of one rounding to dtype, and float32 sums of k terms whose absolute values sum to size."""
    smallest = torch.finfo(dtype).smallest_normal
    return torch.finfo(dtype).eps / 2 * exact.abs() + (k + 2) * torch.finfo(torch.float32).eps * size + smallest


@halves
@pytest.mark.parametrize("n", [1, 2, 3, 17, 70])
@pytest.mark.parametrize("path", ["as it is", "blocks", "without C"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, n, path, strided, bias, without, monkeypatch):
    if path != "as it is":
        monkeypatch.setattr(half, "BLOCK", 64)
    if path == "without C":
        monkeypatch.setattr(native, "why_not", lambda *subjects: "switched off")
    torch.manual_seed(n)
    m, k = 150, 37
    x, d = torch.randn(n, k).to(dtype), torch.randn(n, m).to(dtype)
    weight = torch.randn(k, m).to(dtype).T if strided else torch.randn(m, k + 2).to(dtype)[:, 1:-1]
    b = torch.randn(m).to(dtype) if bias else None
    inputs = [y.detach().requires_grad_() for y in (x, weight, b) if y is not None]
    y = half.linear(*inputs)
    grads = torch.autograd.grad(y, inputs, d)
    with torch.no_grad():
        assert torch.equal(half.linear(*inputs), y)
    wide = [z.detach().double().requires_grad_() for z in inputs]
    exact = F.linear(*wide)
    expected = torch.autograd.grad(exact, wide, d.double())
    sizes = [z.detach().abs().requires_grad_() for z in wide]
    size = F.linear(*sizes)
    size_grads = torch.autograd.grad(size, sizes, d.double().abs())
    assert y.dtype == dtype
    assert (y.double() - exact).abs().le(bound(exact, size, k, dtype)).all()
    for got, want, of, terms in zip(grads, expected, size_grads, (m, n, n), strict=False):
        assert got.dtype == dtype
        assert (got.double() - want).abs().le(bound(want, of, terms, dtype)).all()


@pytest.mark.skipif(not available(), reason="no C compiler")
@halves
@pytest.mark.parametrize("k", [1, 3, 16, 63, 64, 65, 200])
def test_products_in_c(dtype, k):
    if dtype is F16 and native.product(torch.ones(1, 1), torch.ones(1, 1, dtype=F16)) is None:
        pytest.skip("this processor does not convert float16: left to torch")
    for m in (1, 3, 4, 7, 130):
        weight = torch.randn(m, k + 3).to(dtype)[:, 1 : k + 1]
        for n in (1, 2, 3, 4, 7, 16):
            x = torch.randn(n, k)
            torch.testing.assert_close(native.product(x, weight), x @ weight.float().T, rtol=1e-5, atol=1e-4)
            x = torch.randn(n, m)
            torch.testing.assert_close(native.combine(x, weight), x @ weight.float(), rtol=1e-5, atol=1e-4)
    x = torch.randn(2, k)
    assert native.product(torch.randn(native.MOST_ROWS + 1, k), weight) is None
    assert native.product(x, weight.double()) is None
    assert native.product(x, torch._neg_view(weight)) is None
    assert native.product(x, torch._efficientzerotensor(weight.shape, dtype=dtype)) is None
    assert torch.equal(native.product(torch._neg_view(x), weight), -native.product(x, weight))
    special = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, -0.0, torch.finfo(dtype).tiny / 4]]).to(dtype)
    got = native.combine(torch.ones(1, 1), special)
    assert torch.equal(got.nan_to_num(7.0), special.float().nan_to_num(7.0))


@halves
@pytest.mark.parametrize("heads, kv, t, n", [(4, 4, 5, 5), (4, 2, 5, 5), (4, 4, 1, 40), (2, 2, 3, 40)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention(dtype, heads, kv, t, n, masked, in_blocks):
    torch.manual_seed(t)
    q, k, v = (torch.randn(2, h, m, 8).to(dtype) for h, m in ((heads, t), (kv, n), (kv, n)))
    mask = torch.ones(2, 1, t, n, dtype=torch.bool).tril(n - t) if masked else None
    options = {"causal": 1 < t == n and not masked, "shared_keys": kv < heads, "scale": 0.3}
    got = half.attention(q, k, v, mask, **options)
    expected = F.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), attn_mask=mask, is_causal=options["causal"], scale=0.3, enable_gqa=kv < heads
    )
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=2e-6)


def test_wrong_operands_are_torchs_to_name(without):
    x = torch.randn(2, 8, dtype=BF16)
    for weight in (torch.randn(4, 8), torch.randn(4, 7, dtype=BF16)):
        with pytest.raises(RuntimeError, match=r"mat1 and mat2|same dtype"):
            half.linear(x, weight)


def test_second_derivatives_and_transforms(without):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8, dtype=BF16, requires_grad=True), torch.randn(4, 8, dtype=BF16, requires_grad=True)
    (dx,) = torch.autograd.grad(half.linear(x, weight).square().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(dx.sum(), weight)
    wide = [y.detach().float().requires_grad_() for y in (x, weight)]
    (dx,) = torch.autograd.grad(F.linear(*wide).square().sum(), wide[0], create_graph=True)
    (expected,) = torch.autograd.grad(dx.sum(), wide[1])
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.2)
    fixed = weight.detach()
    batched = torch.func.vmap(lambda y: half.linear(y, fixed))(x.detach())
    torch.testing.assert_close(batched, half.linear(x.detach(), fixed))
    value, tangent = torch.func.jvp(lambda y: half.linear(y, fixed), (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(value, batched)
    torch.testing.assert_close(tangent, half.linear(torch.ones_like(x), fixed).detach())


def test_under_autocast(without):
    """The result has autocast's dtype, gradients have those of their tensors; float64 is unchanged."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", BF16):
        y = half.linear(x, weight)
        y.float().square().sum().backward()  # the backward runs inside autocast, too
        assert half.linear(x.double(), weight.double()).dtype == torch.float64
    assert y.dtype == BF16
    assert torch.equal(y, F.linear(x, weight).to(BF16))
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, (2 * y.float()) @ weight)


# models


CONFIG = HybridConfig(
    vocab_size=61, hidden_size=32, n_layers=len(LETTERS), pattern=LETTERS,
    linear=LinearConfig(2, 4, 8, 6), memory=MemoryConfig(2, 8, chunk=7), mamba=MambaConfig(4, 6, 8, groups=2),
    rwkv=RwkvConfig(2, 8, value_dim=6),
    attention=AttentionConfig(4, 2, 10, rotary_dim=4),
    latent=LatentConfig(3, rank=9, nope_dim=6, rope_dim=4, value_dim=5), feed=FeedConfig(40),
)  # fmt: skip
EXPERTS = ExpertsConfig(6, 2, 12, shared_size=8, shared_gate=True)
MODELS = {
    "all letters": CONFIG,
    "experts": replace(CONFIG, pattern="GA", n_layers=2, experts=EXPERTS, tie_embeddings=True),
    "sigmoid experts": replace(CONFIG, pattern="KM", n_layers=2, experts=replace(EXPERTS, scores="sigmoid")),
}
models = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def run_all(model: HybridLM, ids: Tensor, autocast: bool = False) -> None:
    """Read, continue by one token and by several, packed and padded; run a training step."""
    with torch.autocast("cpu", BF16, enabled=autocast):
        with torch.no_grad():
            state = model(ids).state
            for more in (1, 1, 3):
                state = model(ids[:, :more], state=state).state
            model(ids[:1], cu_seqlens=torch.tensor([0, 4, ids.shape[1]]))
            model(ids, attention_mask=torch.ones_like(ids).tril(ids.shape[1] - 3))
        total = model.loss_sum(ids, ids)
    total.backward()


@pytest.mark.slow(but="values")
@models
@halves
@pytest.mark.parametrize("path", ["recorded", "in blocks"])
def test_a_model_has_no_products_of_16_bit(config, dtype, path, request):
    request.getfixturevalue("without" if path == "recorded" else "in_blocks")
    torch.manual_seed(0)
    model, ids = HybridLM(config).to(dtype), torch.randint(61, (2, 15))
    with Recorder() as recorder:
        run_all(model, ids)
    assert recorder.products > 10
    assert recorder.found == set()
    learned = [x for x in model.parameters() if x.requires_grad]  # the decays of retention are constants
    assert all(x.grad is not None and x.grad.isfinite().all() for x in learned)


@models
def test_training_under_autocast_has_no_products_of_16_bit(config, in_blocks):
    torch.manual_seed(0)
    model, ids = HybridLM(config), torch.randint(61, (2, 15))
    with Recorder() as recorder:
        run_all(model, ids, autocast=True)
    assert recorder.products > 10
    assert recorder.found == set()


@models
def test_a_model_is_as_near_to_float32_as_with_torchs_products(config, without, monkeypatch):
    torch.manual_seed(0)
    exact = HybridLM(config).eval().bfloat16().float()
    model, ids = copy.deepcopy(exact).bfloat16(), torch.randint(61, (2, 40))
    with torch.no_grad():
        expected = exact(ids).logits
        ours = (model(ids).logits - expected).square().mean().sqrt()
        set_products(monkeypatch, "1")
        torchs = (model(ids).logits - expected).square().mean().sqrt()
    assert ours < 1.2 * torchs


def test_logits_in_pieces(in_blocks, monkeypatch):
    """The loss that never holds all logits at once equals the one that does."""
    torch.manual_seed(0)
    model, ids = HybridLM(replace(CONFIG, pattern="G", n_layers=1)).bfloat16(), torch.randint(61, (2, 20))
    whole = model.loss_sum(ids, ids)
    whole.backward()
    expected = [x.grad.float() for x in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(loss, "AT_ONCE", 61 * 7)
    with Recorder() as recorder:
        total = model.loss_sum(ids, ids)
        total.backward()
    assert recorder.found == set()
    torch.testing.assert_close(total, whole, rtol=1e-3, atol=0)
    for x, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(x.grad.float(), want, rtol=0.1, atol=0.05 * float(want.abs().max()))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


class ByName(nn.Linear):
    """Calls torch with the names of its arguments."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input=input, weight=self.weight, bias=self.bias)


class Quantised(Tensor):
    """A weight with its own product."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return torch.full((*args[0].shape[:-1], args[1].shape[0]), 7.0, dtype=args[0].dtype)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_products_that_are_not_ours(without):
    """The cases are named arguments, weights of one dimension, and tensors with their own products."""
    x, module = torch.randn(3, 16, dtype=BF16), ByName(16, 4, dtype=BF16)
    torch.testing.assert_close(project(module, x), half.linear(x, module.weight, module.bias))
    torch.testing.assert_close(half.linear(x, module.weight[0]), F.linear(x, module.weight[0]))
    weight = torch.randn(4, 16, dtype=BF16).as_subclass(Quantised)
    assert half.linear(x, weight).eq(7).all()


def test_wrapped_and_hooked_projections(without):
    torch.manual_seed(0)
    mixer, x = GatedDeltaNet(16, 2, key_dim=4, value_dim=4).bfloat16(), torch.randn(1, 9, 16, dtype=BF16)
    seen = []
    mixer.out_proj.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    mixer.in_proj = Wrapped(mixer.in_proj)
    with Recorder() as recorder:
        y = mixer(x)[0]
        y.float().sum().backward()
    assert seen == [BF16]
    assert recorder.found == set()
    assert mixer.in_proj.inner.weight.grad is not None


@pytest.mark.cover
def test_compiled_in_one_graph(without):
    torch.manual_seed(0)
    feed, x = SwiGLU(16, 24).bfloat16(), torch.randn(2, 5, 16, dtype=BF16)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(feed, fullgraph=True, backend=keep)
    torch.testing.assert_close(compiled(x), feed(x))
    assert len(graphs) == 1
    assert graphs[0].count("float()") == 4  # x and the weight in both products
    torch._dynamo.reset()
