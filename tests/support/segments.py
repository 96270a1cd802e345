"""Segments of sequences on ranks that must equal one process with all tokens: layouts, mixers, a model, comparisons.

Four processes (gloo) run many cases one after another. The first of a case's ranks also computes the whole, by itself,
and the others are sent its results.
"""

import json
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lineate.layers import (
    HGRN2,
    Comba,
    DeltaNet,
    GatedAttention,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    LatentAttention,
    LayerState,
    LinearAttention,
    Mamba2,
    Memory,
    PreconditionedGatedDeltaNet,
    Retention,
    TokenCache,
)
from lineate.models import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    ModelState,
)
from lineate.parallel.context import carry
from lineate.parallel.context import segments as context
from lineate.training.context import context_parallel
from tests.support.ranks import from_first, run_ranks, summed

RANKS = 4
HIDDEN, VOCAB = 24, 61
SIZES = {"value_heads": 4, "key_dim": 8, "value_dim": 6}
MIXERS = {
    "linear": lambda: LinearAttention(HIDDEN, 2, **SIZES),
    "gated linear": lambda: GatedLinearAttention(HIDDEN, 2, **SIZES, decay_rank=5),
    "delta": lambda: DeltaNet(HIDDEN, 2, **SIZES, beta_scale=2.0),
    "gated delta": lambda: GatedDeltaNet(HIDDEN, 2, **SIZES),
    "gated delta, no convolution": lambda: GatedDeltaNet(HIDDEN, 2, **SIZES, conv_size=0),
    "gated delta, exact rate": lambda: GatedDeltaNet(HIDDEN, 2, **SIZES, rate="exact"),
    "kimi": lambda: KimiDeltaAttention(HIDDEN, 2, **SIZES, decay_rank=5, gate_rank=7),
    "mamba": lambda: Mamba2(HIDDEN, 6, head_dim=5, state_dim=7, groups=2, norm_groups=3),
    "hgrn2": lambda: HGRN2(HIDDEN, 2, **SIZES),
    "gdn2": lambda: GatedDeltaNet2(HIDDEN, 2, **SIZES),
    "comba": lambda: Comba(HIDDEN, 2, **SIZES),
    "preconditioned": lambda: PreconditionedGatedDeltaNet(HIDDEN, 2, **SIZES),
    "product": lambda: GatedDeltaProduct(HIDDEN, 2, **SIZES, writes=2, beta_scale=2.0),
    "retention": lambda: Retention(HIDDEN, 2, **SIZES, norm="all", conv_size=4).requires_grad_(),
    "features": lambda: LinearAttention(HIDDEN, 2, **SIZES, feature_map="product", normalize=False),
    "attention": lambda: GatedAttention(HIDDEN, 4, kv_heads=2, head_dim=10, rotary_dim=6),
    "latent": lambda: LatentAttention(HIDDEN, 3, rank=9, nope_dim=6, rope_dim=4, value_dim=5, rope_theta=100.0),
}
WIDE = {
    "wide attention": lambda: GatedAttention(HIDDEN, 4, kv_heads=2, head_dim=16, rotary_dim=8),
    "wide latent": lambda: LatentAttention(HIDDEN, 3, rank=9, nope_dim=8, rope_dim=8, value_dim=5, rope_theta=100.0),
}
"""Heads of 16 channels, with which one launch on a GPU serves queries that are the last of many keys."""
MODEL = HybridConfig(
    vocab_size=VOCAB, hidden_size=HIDDEN, n_layers=8, pattern="LRDGKSAM",
    linear=LinearConfig(2, 4, 8, 6),
    mamba=MambaConfig(6, 5, 7, groups=2),
    attention=AttentionConfig(4, 2, 10, rotary_dim=4),
    latent=LatentConfig(3, rank=9, nope_dim=6, rope_dim=4, value_dim=5, rope_theta=100.0),
    feed=FeedConfig(20), experts=ExpertsConfig(4, 2, 8), dense_layers=(0, 1, 2, 3, 4, 5), tie_embeddings=True,
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Which tokens each rank has, and where sequences begin and end."""

    cuts: tuple[int, ...]
    texts: tuple[int, ...] | None = None
    """Bounds of packed sequences; None: two rows, each over all ranks."""
    state: bool = False
    """Whether every sequence continues one of its own length."""

    @property
    def rows(self) -> int:
        return 2 if self.texts is None else len(self.texts) - 1

    def until(self, rank: int) -> tuple[Tensor | None, list[int]]:
        """Return cu_seqlens of all tokens up to the rank's last, and the sequences (rows) that it has a part of."""
        start, end = self.cuts[rank : rank + 2]
        if self.texts is None:
            return None, [0, 1]
        bounds = [x for x in self.texts if x < end] + [end]
        return torch.tensor(bounds), [i for i, x in enumerate(bounds[1:]) if x > start]

    def part(self, rank: int) -> tuple[Tensor | None, bool]:
        """Return the rank's own cu_seqlens, and whether its first sequence began before."""
        start, end = self.cuts[rank : rank + 2]
        if self.texts is None:
            return None, rank > 0
        inside = [x for x in self.texts if start < x < end]
        return torch.tensor([start, *inside, end]) - start, start not in self.texts


LAYOUTS = {
    "rows, odd lengths": Layout((0, 11, 24, 29, 37)),
    "rows, state": Layout((0, 11, 24, 29, 37), state=True),
    "rows, one token each": Layout((0, 1, 2, 3, 4), state=True),
    "rows, tiny segments": Layout((0, 2, 3, 5, 12)),
    "rows, many chunks": Layout((0, 71, 135, 206, 301), state=True),
    "packed, one over three ranks": Layout((0, 9, 20, 31, 43), (0, 4, 29, 30, 43), state=True),
    "packed, one over all ranks": Layout((0, 9, 20, 31, 43), (0, 5, 40, 43)),
    "packed, ends at the edges": Layout((0, 9, 20, 31, 43), (0, 3, 9, 31, 43), state=True),
    "packed, nothing continues": Layout((0, 9, 20, 31, 43), (0, 9, 20, 25, 31, 43)),
    "packed, tiny": Layout((0, 1, 2, 6, 9), (0, 3, 4, 4, 5, 7, 9), state=True),
    "packed, one text": Layout((0, 5, 6, 7, 20), (0, 20), state=True),
    "1 rank": Layout((0, 17), (0, 5, 17), state=True),
    "2 ranks": Layout((0, 7, 17), (0, 5, 13, 17), state=True),
    "3 ranks": Layout((0, 7, 8, 17), state=True),
}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.to(torch.get_default_device(), dtype)


def draw_ids(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(VOCAB, shape, generator=generator, device="cpu").to(torch.get_default_device())


def randomize(module: nn.Module) -> None:
    for name, x in module.named_parameters():
        if "norm" in name:
            nn.init.uniform_(x, 0.5, 1.5)


def make_mixer(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    mixer = (MIXERS | WIDE)[name]()
    randomize(mixer)
    return mixer.to(dtype)


def make_model(dtype: torch.dtype) -> HybridLM:
    torch.manual_seed(0)
    model = HybridLM(MODEL)
    randomize(model)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() >= 2 and "conv" not in name:
                x.mul_(5)
    return model.to(dtype)


def pasts(layout: Layout) -> Tensor:
    """Return the bounds of the sequences that come before, one per row."""
    lengths = [4, 4] if layout.texts is None else [(3 * i + 2) % 5 for i in range(layout.rows)]
    return torch.tensor([0, *lengths]).cumsum(0)


def leaves(state: LayerState) -> tuple[LayerState, dict[str, Tensor]]:
    tensors = {name: state[name].detach().clone().requires_grad_() for name in state.names}
    return Memory(tensors) if isinstance(state, Memory) else TokenCache(tensors, state.lengths), tensors


def own_rows(state: LayerState, rows: list[int], continues: bool, packed: bool) -> LayerState:
    """Return the rank's rows; those of sequences that began earlier are NaN, because they must be ignored."""
    state = state.select(torch.tensor(rows))
    if continues:
        for name in state.names:
            state[name].data[: 1 if packed else None] = torch.nan
    return state


def weigh(state: LayerState, rows: list[int], seed: int) -> Tensor:
    """Return a random linear function of these rows, without the entries after a cache's last token."""
    total = torch.zeros(())
    for n, name in enumerate(state.names):
        for i, row in enumerate(rows):
            x = state[name][row]
            if isinstance(state, TokenCache):
                x = x[: state.lengths if isinstance(state.lengths, int) else int(state.lengths[row])]
            total = total + (x * draw(*x.shape, seed=1000 * seed + 10 * i + n, dtype=x.dtype)).sum()
    return total


DIFFERENCES: list[str] = []
"""The differences of the running case. A rank that stopped at its first one would leave the others in a collective."""


def close(what: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    if got.shape != expected.shape:
        DIFFERENCES.append(f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    elif got.numel():
        error = (got - expected).abs().max().item()
        if got.is_cuda and got.dtype == torch.float32:
            tolerance = max(tolerance, 2e-3)  # the kernels multiply in tf32
        limit = tolerance * max(1.0, expected.abs().max().item())
        if not error <= limit:
            DIFFERENCES.append(f"{what}: off by {error:.2e}, allowed {limit:.2e}")


def run_mixer(
    name: str, layout: Layout, group: dist.ProcessGroup, dtype: torch.dtype, tolerance: float,
    recompute=False, compiled=False,
):  # fmt: skip
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    packed = layout.texts is not None
    b, t = 1 if packed else 2, layout.cuts[-1]
    whole, split = make_mixer(name, dtype), make_mixer(name, dtype)
    x = draw(b, t, HIDDEN, seed=1, dtype=dtype).requires_grad_()
    weights = draw(b, t, HIDDEN, seed=2, dtype=dtype)
    initial, tensors = None, {}
    if layout.state:
        before = pasts(layout)
        with torch.no_grad():
            past = draw(1, int(before[-1]), HIDDEN, seed=3, dtype=dtype)
            _, initial = whole(past, None, before) if packed else whole(past.unflatten(1, (2, -1))[0])
        initial, tensors = leaves(initial)

    def in_one_process() -> dict[str, Any]:
        """The output, functions of the states of every rank's texts at the end of its segment, and all gradients."""
        bounds = None if layout.texts is None else torch.tensor(layout.texts)
        output, _ = whole(x, initial, bounds)
        state_losses = []
        for other in range(size):
            cu_seqlens, rows = layout.until(other)
            texts = layout.rows if not packed else len(cu_seqlens) - 1
            first = None if initial is None else initial.select(torch.arange(texts))
            _, state = whole(x[:, : layout.cuts[other + 1]], first, cu_seqlens)
            state_losses.append(weigh(state, rows, other))
        wanted = [x, *tensors.values(), *whole.parameters()]
        gradients = torch.autograd.grad((output * weights).sum() + sum(state_losses), wanted)
        return {"output": output, "states": state_losses, "gradients": gradients}

    expected = from_first(group, in_one_process)

    # This rank's part.
    context_parallel(split, group)
    start, end = layout.cuts[rank : rank + 2]
    cu_seqlens, continues = layout.part(rank)
    state = None
    if initial is not None and not (continues and not packed and rank % 2):  # None is as good as rows that are ignored
        state = own_rows(initial, layout.until(rank)[1], continues, packed)
    mine = x.detach()[:, start:end].clone().requires_grad_()
    segment = cu_seqlens
    if packed or recompute:
        seen = getattr(state, "lengths", 0)
        segment = split.context.segment(mine, cu_seqlens, continues, seen)
    run = (lambda *args: checkpoint(split, *args, use_reentrant=False)) if recompute else split
    run = torch.compile(split, backend="aot_eager") if compiled else run
    output, state = run(mine, state, segment)
    loss = weigh(state, list(range(state.rows)), rank)
    close("state", loss, expected["states"][rank], 10 * tolerance)
    loss = loss + (output * weights[:, start:end]).sum()
    own = torch.autograd.grad(
        loss, [mine, *tensors.values(), *split.parameters()], allow_unused=True, materialize_grads=True
    )
    close("output", output, expected["output"][:, start:end], tolerance)
    close("gradient of x", own[0], expected["gradients"][0][:, start:end], tolerance)
    names = [*(f"state {n}" for n in tensors), *(n for n, _ in split.named_parameters())]
    for what, got, gradient in zip(names, summed(own[1:], group), expected["gradients"][1:], strict=True):
        close(f"gradient of {what}", got, gradient, tolerance)


def run_model(
    layout: Layout, group: dist.ProcessGroup, dtype: torch.dtype, tolerance: float, recompute=False, shard=False
):
    rank = dist.get_rank(group)
    packed = layout.texts is not None
    b, t = 1 if packed else 2, layout.cuts[-1]
    whole, split = make_model(dtype), make_model(dtype)
    ids, targets = draw_ids(b, t, seed=4), draw_ids(b, t, seed=5)
    initial, tensors = None, []
    if layout.state:
        before = pasts(layout)
        past = draw_ids(1, int(before[-1]), seed=6)
        with torch.no_grad():
            made = whole(past, cu_seqlens=before) if packed else whole(past.view(2, -1))
        pairs = [leaves(layer) for layer in made.state.layers]
        initial = ModelState(tuple(layer for layer, _ in pairs), made.state.lengths)
        tensors = [x for _, found in pairs for x in found.values()]

    def in_one_process() -> dict[str, Any]:
        bounds = None if layout.texts is None else torch.tensor(layout.texts)
        out = whole(ids, initial, bounds)
        loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(loss, [*tensors, *whole.parameters()])
        layers = [{name: layer[name] for name in layer.names} for layer in out.state.layers]
        return {"logits": out.logits, "gradients": gradients, "lengths": out.state.lengths, "layers": layers}

    expected = from_first(group, in_one_process)

    context_parallel(split, group)
    for block in split.layers:
        block.recompute = recompute
    if shard:
        mesh = DeviceMesh.from_group(group, torch.get_default_device().type)
        for module in (*split.layers, split):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    start, end = layout.cuts[rank : rank + 2]
    (cu_seqlens, continues), rows = layout.part(rank), layout.until(rank)[1]
    state = None
    if initial is not None:
        layers = tuple(own_rows(layer, rows, continues, packed) for layer in initial.layers)
        state = ModelState(layers, initial.select(torch.tensor(rows)).lengths)
    out = split(ids[:, start:end], state, cu_seqlens, continues=continues)
    loss = F.cross_entropy(out.logits.flatten(0, 1), targets[:, start:end].flatten(), reduction="sum") / targets.numel()
    loss.backward()
    close("logits", out.logits, expected["logits"][:, start:end], tolerance)
    names = [*(f"state {n}" for n in range(len(tensors))), *(n for n, _ in split.named_parameters())]
    own = [torch.zeros_like(x) if x.grad is None else x.grad for x in (*tensors, *split.parameters())]
    totals = iter(summed([x for x in own if not isinstance(x, DTensor)], group))
    own = [x.full_tensor() if isinstance(x, DTensor) else next(totals) for x in own]
    for what, got, gradient in zip(names, own, expected["gradients"], strict=True):
        close(f"gradient of {what}", got, gradient, tolerance)
    if packed:  # the states of sequences that end here, and how many tokens they have seen
        ends = torch.tensor(layout.texts[1:])
        here = [(i, row) for i, row in enumerate(rows) if start < ends[row] <= end]
        for i, row in here:
            assert out.state.lengths[i] == expected["lengths"][row]
    else:
        assert int(torch.as_tensor(out.state.lengths).max()) == end + (4 if layout.state else 0)
        if rank == RANKS - 1:
            for got, layer in zip(out.state.layers, expected["layers"], strict=True):
                for name in got.names:
                    close(f"state {name}", got[name], layer[name], tolerance)


Run = Callable[[dist.ProcessGroup], None]


class Cases:
    """The function that each rank runs, by name; the group of a case has as many ranks as the case needs."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.sizes: dict[str, int] = {}
        self.slow: list[str] = []

    def __call__(self, name: str, size: int = RANKS, slow: bool = False) -> Callable[[Run], Run]:
        def add(run: Run) -> Run:
            self.runs[name], self.sizes[name] = run, size
            if slow:
                self.slow.append(name)
            return run

        return add

    @property
    def fast(self) -> list[str]:
        return [name for name in self.runs if name not in self.slow]

    def run(self, folder: Path, device: str, names: Sequence[str]) -> None:
        """Run the cases on a rank, and write down what failed."""
        torch.set_default_device(device)
        for message in ("mkldnn_matmul failed", "FSDP2-wrapped module"):  # torch's own warnings
            warnings.filterwarnings("ignore", message)
        carry.READ_AT_ONCE = 16  # so that short sequences are summed in several pieces
        if device == "cuda":
            if torch.cuda.device_count() < RANKS:
                through_gloo()
            else:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=60))
        rank = dist.get_rank()
        groups = {size: dist.new_group(list(range(size))) for size in range(1, RANKS + 1)}
        failures: dict[str, str] = {}
        for name in names:
            DIFFERENCES.clear()
            try:
                if rank < self.sizes[name]:
                    self.runs[name](groups[self.sizes[name]])
                failures[name] = "; ".join(DIFFERENCES)
            except BaseException:  # the other ranks may wait for this one, so no later case can run
                failures[name] = traceback.format_exc()
                break
            finally:
                Path(folder, f"{rank}.json").write_text(json.dumps(failures))


class Arrived:
    """A tensor in place of Pending, without anything to wait for."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def wait(self) -> Tensor:
        return self.x


def through_gloo() -> None:
    """Send tensors of a GPU by gloo, with copies: NCCL needs a GPU for every rank."""
    gather, exchange = context.Context.gather_later, context.Context.exchange_later
    scatter_sum = context.Context.scatter_sum

    def copied(self, x: Tensor) -> Tensor:
        return x.cpu() if self.size > 1 else x

    context.Context.gather_later = lambda self, x: Arrived(gather(self, copied(self, x)).wait().to(x.device))
    context.Context.scatter_sum = lambda self, x: scatter_sum(self, copied(self, x)).to(x.device)
    context.Context.exchange_later = lambda self, x, sends, receives: Arrived(
        exchange(self, copied(self, x), sends, receives).wait().to(x.device)
    )


def start_ranks(run: Callable[..., None], folder: Path, device: str, names: Sequence[str]) -> list[dict[str, str]]:
    """Run run(folder, device, names) on all ranks; return for each a mapping from each case to what failed or ""."""
    with suppress(Exception):  # in that case some results are missing
        run_ranks(RANKS, run, folder, device, names)
    found = [Path(folder, f"{rank}.json") for rank in range(RANKS)]
    return [json.loads(x.read_text()) if x.exists() else {} for x in found]


def on_ranks(run: Callable[..., None], device: str, names: Sequence[str]) -> Any:
    """Return a fixture of a module: what failed in those of these cases that were asked for, on each rank."""

    @pytest.fixture(scope="module")
    def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
        items = [item for item in request.session.items if item.parent is request.node]
        asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
        return start_ranks(run, tmp_path_factory.mktemp("ranks"), device, [name for name in names if name in asked])

    return started


def check(failures: list[dict[str, str]], name: str) -> None:
    for rank, results in enumerate(failures):
        if name not in results:
            last, why = next(reversed(results.items()), ("none", ""))
            pytest.fail(f"rank {rank} never came to this case; the last to end was {last}: {why or 'it passed'}")
        assert not results[name], f"rank {rank}: {results[name]}"


@contextmanager
def received_bytes(received: list[int]) -> Iterator[None]:
    """Add the bytes that this rank receives from others in each collective."""
    gather, exchange = context.Context.gather_later, context.Context.exchange_later
    scatter_sum = context.Context.scatter_sum

    def counted_gather(self, x):
        received.append(x.nbytes * (self.size - 1))
        return gather(self, x)

    def counted_sum(self, x):
        received.append(x[0].nbytes * (self.size - 1))
        return scatter_sum(self, x)

    def counted_exchange(self, x, sends, receives):
        others = sum(receives) - receives[self.rank]
        received.append(others * x.shape[1:].numel() * x.itemsize)
        return exchange(self, x, sends, receives)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context.Context, "gather_later", counted_gather)
        patch.setattr(context.Context, "scatter_sum", counted_sum)
        patch.setattr(context.Context, "exchange_later", counted_exchange)
        yield
