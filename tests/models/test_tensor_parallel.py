"""Tensor parallelism: ranks that each hold some heads equal one process that holds all, in logits, states, gradients.

Four processes (gloo) are started once and run every fast case, and once for the slow ones. Every rank also has the
whole model, from the same seed, and compares.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lineate.generation import generate
from lineate.layers import GatedDeltaNet, Memory, TensorSpec
from lineate.layers.linear import LINEAR_SHARD
from lineate.layers.registry import MixerKind, letters, register, temporary_rows
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
)
from lineate.models.presets import PRESETS
from lineate.models.sharding import (
    model_ranges,
    rank_config,
    share_out_model,
    sum_shared_gradients,
    tensor_sizes,
    whole_model,
    whole_state,
)
from lineate.parallel.tensor.ranks import Ranks
from lineate.parallel.tensor.shards import Cut, Part, Shard, share_out
from lineate.training.distributed import World
from tests.support.ranks import run_ranks

RANKS = 4
VOCAB = 61
BASE = HybridConfig(
    vocab_size=VOCAB, hidden_size=24, n_layers=2, pattern="GA",
    linear=LinearConfig(4, 8, 8, 6, decay_rank=5, gate_rank=7),
    mamba=MambaConfig(8, 5, 7, groups=2),
    memory=MemoryConfig(4, 10, chunk=4, window=5),
    rwkv=RwkvConfig(4, 6, 5, decay_rank=5, rate_rank=3, value_rank=4, gate_rank=7),
    attention=AttentionConfig(8, 2, 10, rotary_dim=4),
    latent=LatentConfig(4, rank=9, nope_dim=6, rope_dim=4, value_dim=5, rope_theta=100.0, gate="head"),
    feed=FeedConfig(20),
)  # fmt: skip
EXPERTS = ExpertsConfig(4, 2, 8, shared_size=12, shared_gate=True)
MODELS = {
    **{f"letter {letter}": replace(BASE, pattern=letter) for letter in "LRDGKSTPNCEAMHOQJUVIF"},
    "feature maps": replace(BASE, pattern="L", linear=replace(BASE.linear, feature_map="product")),  # type: ignore[type-var]
    "channel mix": replace(
        BASE, n_layers=3, pattern="VVG", feed=FeedConfig(20, kind="channel_mix"), norm="layer", embedding_norm=True,
    ),
    "one norm over the heads of a key": replace(
        BASE, pattern="U",
        linear=replace(BASE.linear, heads=4, writes=3, group_norm=True, forgets=False),  # type: ignore[type-var]
    ),
    "one norm over all heads": replace(
        BASE, pattern="O", linear=replace(BASE.linear, norm="all", rope_theta=100.0, key_dim=8),  # type: ignore[type-var]
    ),
    "all rules, tied": replace(BASE, n_layers=8, pattern="LRDGKSAM", tie_embeddings=True),
    "experts": replace(BASE, n_layers=3, pattern="KGA", experts=EXPERTS, dense_layers=(0,)),
    "sigmoid experts": replace(BASE, experts=replace(EXPERTS, scores="sigmoid", kind="relu2", shared_gate=False)),
    "prediction": replace(BASE, prediction=True),
    "norms after, of all heads": replace(
        BASE, norm_after="A", attention=replace(BASE.attention, kv_heads=4, qk_norm="full")  # type: ignore[type-var]
    ),
    "biases, mixer only": replace(
        BASE, pattern="SA", mixer_only=(0,), mamba=replace(BASE.mamba, bias=True, norm_groups=4),  # type: ignore[type-var]
        attention=replace(BASE.attention, bias=True, gated=False, qk_norm=None),  # type: ignore[type-var]
    ),
    "scales": replace(BASE, embedding_scale=3.0, residual_scale=0.7, logit_scale=0.5),
    "bounded gates of full rank": replace(
        BASE, pattern="KG",
        linear=replace(BASE.linear, decay_rank=0, gate_rank=0, gate_lower_bound=-5.0),  # type: ignore[type-var]
    ),
}  # fmt: skip
FAST = (
    "letter G", "letter K", "letter S", "letter T", "letter A", "letter M", "channel mix", "experts",
    "norms after, of all heads",
)  # fmt: skip
CASES: dict[str, Callable[[Ranks, Path], None]] = {}
SIZE_OF: dict[str, int] = {}
SLOW: set[str] = set()


def case(name: str, size: int, slow: bool = False):
    def add(run):
        CASES[name], SIZE_OF[name] = run, size
        if slow:
            SLOW.add(name)
        return run

    return add


def make_model(config: HybridConfig, dtype: torch.dtype = torch.float32) -> HybridLM:
    torch.manual_seed(0)
    model = HybridLM(config)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" in name and x.dim() == 1:
                nn.init.uniform_(x, 0.5, 1.5)
            elif name.endswith("bias") and "dt_bias" not in name:
                nn.init.normal_(x, std=0.1)
            elif x.dim() >= 2 and "conv" not in name:
                x.mul_(3)
    return model.to(dtype)


def draw_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def check_close(got: Tensor, wanted: Tensor, what: str, most: float = 1e-5) -> None:
    scale = max(1.0, float(wanted.abs().max()))
    error = float((got - wanted).abs().max()) / scale
    assert got.shape == wanted.shape and error <= most, f"{what}: {error:.1e} of {scale:.2g}"


def held(model: HybridLM, whole: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return this rank's share of tensors of the whole model."""
    ranges = model_ranges(model, ranks.rank, ranks.size)
    return {name: ranges[name].of(x) if name in ranges else x for name, x in whole.items()}


def equal_model(config: HybridConfig, dtype: torch.dtype, most: float) -> Callable[[Ranks, Path], None]:
    def run(ranks: Ranks, folder: Path) -> None:
        whole = make_model(config, dtype)
        shared = share_out_model(whole, ranks)
        # reading and stepping
        ids = draw_ids(2, 37)
        with torch.no_grad():
            one, own = whole(ids), shared(ids)
            check_close(own.logits, one.logits, "logits", most)
            for step in range(3):
                token = draw_ids(2, 1, seed=step + 5)
                one, own = whole(token, one.state), shared(token, own.state)
                check_close(own.logits, one.logits, f"logits of step {step}", most)
            bounds = torch.tensor([0, 5, 5, 23, 37])
            packed = whole(ids[:1], cu_seqlens=bounds).logits
            check_close(shared(ids[:1], cu_seqlens=bounds).logits, packed, "packed logits", most)
        # the same bits on every rank
        parts = [torch.empty_like(own.logits) for _ in range(ranks.size)]
        dist.all_gather(parts, own.logits, group=ranks.group)
        assert all(torch.equal(part, parts[0]) for part in parts)
        # gradients
        targets = draw_ids(2, 37, seed=2)
        targets[0, 3:9] = -100
        total, shared_total = whole.loss_sum(ids, targets), shared.loss_sum(ids, targets)
        check_close(shared_total, total, "loss", most)
        total.backward()
        shared_total.backward()
        compare_gradients(whole, shared, ranks, most)
        whole.zero_grad()
        shared.zero_grad()
        whole(ids, labels=ids).loss.backward()  # type: ignore[union-attr]
        shared(ids, labels=ids).loss.backward()  # type: ignore[union-attr]
        compare_gradients(whole, shared, ranks, most)
        # as planned
        own_config = rank_config(config, ranks.size, ranks.rank)
        planned = HybridLM(own_config)
        assert sum(x.numel() for x in shared.parameters()) == sum(x.numel() for x in planned.parameters())
        assert shared.state_nbytes(3, 100) == planned.to(dtype).state_nbytes(3, 100)
        # back together
        state = whole_state(shared)
        if ranks.rank == 0:
            for name, x in whole.state_dict().items():
                assert torch.equal(state[name], x), name

    return run


def compare_gradients(whole: HybridLM, shared: HybridLM, ranks: Ranks, most: float) -> None:
    sum_shared_gradients(shared)
    unused = {name: x for name, x in whole.named_parameters() if x.grad is None}
    wanted = held(whole, {name: x.grad for name, x in whole.named_parameters() if x.grad is not None}, ranks)
    for name, x in shared.named_parameters():
        if name in unused:
            assert x.grad is None or not x.grad.any(), name
            continue
        assert x.grad is not None, name
        check_close(x.grad, wanted[name], f"gradient of {name}", most)


for _name, _config in MODELS.items():
    # Memories that learn amplify rounding.
    _exact = (torch.float64, 1e-11) if set(_config.letters) & set("TPNCE") else (torch.float32, 1e-5)
    case(f"{_name}, 2 ranks", 2, slow=_name not in FAST)(equal_model(_config, *_exact))
    case(f"{_name}, 4 ranks", 4, slow=True)(equal_model(_config, *_exact))
case("all rules, float64", 4)(equal_model(MODELS["all rules, tied"], torch.float64, 1e-13))


@case("greedy tokens and samples", 2)
def _tokens(ranks: Ranks, folder: Path) -> None:
    whole = make_model(MODELS["experts"])
    shared = share_out_model(whole, ranks)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
        wanted = torch.stack(list(generate(whole, prompts, 24, **options)))
        assert torch.equal(torch.stack(list(generate(shared, prompts, 24, **options))), wanted)


@dataclass(frozen=True)
class MeanConfig:
    heads: int
    head_dim: int


class Mean(nn.Module):
    """A mixer of a user's own: y = out_proj(sigmoid(gate) * sum of all values so far), heads apart from each other."""

    def __init__(self, hidden_size: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.in_proj = nn.Linear(hidden_size, heads * head_dim + heads)
        self.out_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)
        self.scale = nn.Parameter(torch.rand(head_dim))

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("total", (self.heads, self.head_dim), self.in_proj.weight.dtype),)

    def forward(
        self, x: Tensor, state: Memory | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        v, gate = self.in_proj(x).split((self.heads * self.head_dim, self.heads), -1)
        v = v.unflatten(-1, (self.heads, self.head_dim)) * self.scale
        bounds = [(row, 0, x.shape[1]) for row in range(len(x))]
        if cu_seqlens is not None:
            bounds = [(0, *pair) for pair in pairwise(cu_seqlens.tolist())]
        rows, totals = [], []
        for n, (row, start, end) in enumerate(bounds):
            before = v.new_zeros(self.heads, self.head_dim) if state is None else state["total"][n]
            sums = before + v[row, start:end].cumsum(0)
            rows.append(sums)
            totals.append(sums[-1] if end > start else before)
        y = torch.stack(rows) if cu_seqlens is None else torch.cat(rows)[None]
        y = y * gate.sigmoid()[..., None]
        return self.out_proj(y.flatten(2)), Memory({"total": torch.stack(totals)})


def mean_cuts(mixer: Mean) -> dict[str, Cut]:
    channels, heads = Part(mixer.heads * mixer.head_dim, mixer.heads), Part(mixer.heads, mixer.heads)
    into = {f"in_proj.{name}": Cut(0, (channels, heads)) for name in ("weight", "bias")}
    return into | {"out_proj.weight": Cut(1, (channels,))}


MEAN = MixerKind(
    letter="Z", name="mean_of_values", label="mean of values", config=MeanConfig,
    make=lambda model, config: Mean(model.hidden_size, config.heads, config.head_dim),
    shard=Shard(lambda config, ranks: replace(config, heads=share_out("the heads", config.heads, ranks)), mean_cuts),
)  # fmt: skip


@case("mixers of one's own", 2)
def _own(ranks: Ranks, folder: Path) -> None:
    with temporary_rows():
        register(MEAN)
        linear = {"config": LinearConfig, "section": "linear", "make": GatedDeltaNet.from_config, "shard": LINEAR_SHARD}
        register(MixerKind(letter="Y", name="another_delta", label="another delta", **linear))
        config = replace(BASE, n_layers=3, pattern="ZYA", mixers={"mean_of_values": MeanConfig(4, 5)})
        equal_model(config, torch.float32, 1e-5)(ranks, folder)


def test_a_mixer_that_does_not_say_how_it_is_shared_out_is_refused() -> None:
    with temporary_rows():
        register(replace(MEAN, shard=None))
        config = replace(BASE, pattern="ZA", mixers={"mean_of_values": MeanConfig(4, 5)})
        says = r"mean of values \(letter Z\), which does not say how it is shared out, got 2 .*; use 1 rank$"
        with pytest.raises(ValueError, match=says):
            rank_config(config, 2)
        with pytest.raises(TypeError, match=r"shard must be Shard\(divide, cuts\) or None, got 3"):
            register(replace(MEAN, letter="X", name="other", shard=3))  # type: ignore[arg-type]


@case("guessed tokens", 2)
def _trail(ranks: Ranks, folder: Path) -> None:
    whole = make_model(MODELS["all rules, tied"])
    shared = share_out_model(whole, ranks)
    with torch.no_grad():
        one, own = whole(draw_ids(2, 9)), shared(draw_ids(2, 9))
        guesses = draw_ids(2, 4, seed=3)
        one_out, own_out = whole.trail(guesses, one.state), shared.trail(guesses, own.state)
        check_close(own_out.logits, one_out.logits, "logits of guesses")
        counts = torch.tensor([1, 3])
        token = draw_ids(2, 1, seed=4)
        wanted = whole(token, one_out.trail.after(counts)).logits
        check_close(shared(token, own_out.trail.after(counts)).logits, wanted, "logits after them")


@case("a checkpoint", 4)
def _checkpoint(ranks: Ranks, folder: Path) -> None:
    whole = make_model(MODELS["experts"])
    if ranks.rank == 0:
        whole.save_pretrained(folder / "saved")
    dist.barrier(ranks.group)
    shared = HybridLM.from_pretrained(folder / "saved", ranks=ranks)
    for name, x in held(whole, whole.state_dict(), ranks).items():
        assert torch.equal(shared.state_dict()[name], x), name
    assert shared.ranks is ranks and shared.config == whole.config
    again = whole_model(shared)
    if ranks.rank == 0:
        assert again is not None
        again.save_pretrained(folder / "again")
        assert (folder / "again" / "model.safetensors").read_bytes() == (
            folder / "saved" / "model.safetensors"
        ).read_bytes()
    with pytest.raises(ValueError, match=f"share of rank {ranks.rank} of 4; gather it first"):
        shared.save_pretrained(folder / f"rank{ranks.rank}")


def work(names: list[str], folder: str) -> dict[str, str]:
    """Run the cases on this rank; return what failed."""
    wait = timedelta(seconds=60)  # for a rank whose case has failed
    dist.init_process_group("gloo")
    sizes = sorted({SIZE_OF[name] for name in names})
    groups = {size: dist.new_group(list(range(size)), timeout=wait) for size in sizes}
    failed: dict[str, str] = {}
    for n, name in enumerate(names):
        if dist.get_rank() < SIZE_OF[name]:
            own = Path(folder) / str(n)
            own.mkdir(exist_ok=True)
            try:
                CASES[name](Ranks(groups[SIZE_OF[name]]), own)
            except Exception:
                failed[name] = traceback.format_exc()
                break  # the other ranks may wait for this one in the middle of the case
    return failed


RESULTS: dict[bool, dict[str, str]] = {}


def failures(slow: bool, folder: Path) -> dict[str, str]:
    if slow not in RESULTS:
        names = [name for name in CASES if (name in SLOW) == slow]
        found: dict[str, str] = {}
        for rank, failed in enumerate(run_ranks(RANKS, work, names, str(folder))):
            for name, text in failed.items():
                found[name] = found.get(name, "") + f"rank {rank}: {text}\n"
                found |= {later: f"not reached, because of: {name}" for later in names[names.index(name) + 1 :]}
        RESULTS[slow] = found
    return RESULTS[slow]


@pytest.mark.cover
@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_ranks_equal_one_process(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert name not in (failed := failures(False, tmp_path_factory.mktemp("ranks"))), failed[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name in SLOW])
def test_ranks_equal_one_process_slow(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert name not in (failed := failures(True, tmp_path_factory.mktemp("ranks"))), failed[name]


# training on a mesh


def train(context: int, tensor: int, shard: str, steps: int) -> dict[str, Any]:
    """Train a model on rows that the data ranks share out; return losses, norms and the weights."""
    from lineate.training.context import context_parallel  # noqa: F401  (imported by World.wrap)
    from lineate.training.sharded import full_state

    world = World.start("cpu", shard, context, tensor)
    model = world.wrap(make_model(MODELS["all rules, tied"], torch.float64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        rows, targets = draw_ids(4, 24, seed=10 + step), draw_ids(4, 24, seed=50 + step)
        own = slice(world.data_rank * 4 // world.data_size, (world.data_rank + 1) * 4 // world.data_size)
        width = 24 // world.context_size
        part = slice(world.context_rank * width, (world.context_rank + 1) * width)
        total = model.loss_sum(rows[own, part], targets[own, part])
        (total / targets.numel()).backward()
        world.finish_gradients(model)
        norms.append(float(world.clip(model, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(world.sum(total)) / targets.numel())
    found = whole_state(model) if tensor > 1 else full_state(model)
    return {"losses": losses, "norms": norms, "weights": {name: x.clone() for name, x in found.items()}}


@pytest.fixture(scope="module")
def trained_alone() -> dict[str, Any]:
    return train(1, 1, "none", 5)


@pytest.mark.cover
@pytest.mark.parametrize(
    ("size", "context", "tensor", "shard"),
    [
        (2, 1, 2, "none"),
        (4, 1, 2, "full"),
        pytest.param(4, 2, 2, "none", marks=pytest.mark.slow),
        pytest.param(4, 2, 2, "full", marks=pytest.mark.slow),
        pytest.param(4, 1, 4, "none", marks=pytest.mark.slow),
        pytest.param(8, 2, 2, "full", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_trains_as_one_process(
    trained_alone: dict[str, Any], size: int, context: int, tensor: int, shard: str
) -> None:
    for rank, found in enumerate(run_ranks(size, train, context, tensor, shard, 5)):
        assert found["losses"] == pytest.approx(trained_alone["losses"], rel=1e-8), rank
        assert found["norms"] == pytest.approx(trained_alone["norms"], rel=1e-6), rank  # summed in float32
        if rank == 0:
            for name, x in trained_alone["weights"].items():
                check_close(found["weights"][name], x, name, 1e-6)


def train_on_text(folder: str, model: str, out: str, tensor: int) -> None:
    from lineate.training.config import TrainConfig
    from lineate.training.prepare import prepare

    trainer = prepare(
        TrainConfig(
            out=out, cache=f"{folder}/cache", data=(f"{folder}/text.txt",), model=model, length=32, rows=4, steps=3,
            warmup=1, optimizer="adamw", lr=1e-3, tensor=tensor, device="cpu", eval_every=2, sample_every=2,
            validation_fraction=0.5, save_every=2, tokenizer="bytes",
        )
    )  # fmt: skip
    trainer.run()
    trainer.close()


@pytest.mark.slow
def test_a_saved_model_is_trained_by_ranks_as_by_one_process(tmp_path: Path) -> None:
    """The flag --tensor: a rank loads its share, evaluates, samples, saves; the finished model is whole."""
    (tmp_path / "text.txt").write_text("".join(f"{n} and {n + 1} make {2 * n + 1}\n" for n in range(3000)))
    make_model(replace(MODELS["experts"], vocab_size=300)).save_pretrained(tmp_path / "model")
    train_on_text(str(tmp_path), str(tmp_path / "model"), str(tmp_path / "one"), 1)
    run_ranks(2, train_on_text, str(tmp_path), str(tmp_path / "model"), str(tmp_path / "two"), 2)
    one, two = (HybridLM.from_pretrained(tmp_path / run / "model", progress=False) for run in ("one", "two"))
    for (name, x), y in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        check_close(y, x, name, 1e-4)
    assert "checkpoints" in {path.name for path in (tmp_path / "two").iterdir()}


# what cannot be shared out


@pytest.mark.parametrize(
    ("changed", "ranks", "message"),
    [
        ({}, 3, "Gated DeltaNet .letter G.: tensor must divide the key heads = 4, got 3; use 2 ranks"),
        ({"pattern": "M"}, 8, "latent attention .letter M.: tensor must divide the heads = 4, got 8; use 4 ranks"),
        ({"feed": FeedConfig(18)}, 4, "tensor must divide feed.size = 18, got 4; use 2 ranks"),
        ({"experts": ExpertsConfig(4, 2, 6)}, 4, "tensor must divide experts.size = 6, got 4; use 2 ranks"),
        ({"pattern": "A", "feed": FeedConfig(9)}, 4, "tensor must divide feed.size = 9, got 4; use 1 rank$"),
        ({"vocab_size": 3}, 4, "tensor must be at most vocab_size = 3, got 4; use 2 ranks"),
        ({}, 0, "tensor must be a number of ranks, at least 1, got 0"),
        ({}, True, "tensor must be a number of ranks, at least 1, got True"),
    ],
)
def test_what_does_not_divide_is_refused(changed: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_config(replace(BASE, **changed), ranks)


@pytest.mark.parametrize("name", PRESETS)
def test_the_number_of_ranks_that_is_advised_can_share_the_model(name: str) -> None:
    config = PRESETS[name]()
    sizes = tensor_sizes(config, 64)
    assert sizes[0] == 1
    for ranks in (3, 5, 6, 8, 64):
        if ranks in sizes:
            continue
        with pytest.raises(ValueError, match=r"got \d+; use \d+ ranks?$") as refused:
            rank_config(config, ranks)
        advised = int(str(refused.value).split()[-2])
        assert advised == max(n for n in sizes if n < ranks)
        assert rank_config(config, advised).n_layers == config.n_layers


def test_every_letter_can_be_shared_out() -> None:
    for letter in letters():
        assert rank_config(replace(BASE, pattern=letter), 2).letters == letter * 2


@pytest.mark.parametrize(("vocab", "ranks"), [(61, 4), (64, 4), (5, 4), (9, 8), (4, 4)])
def test_every_token_is_on_one_rank(vocab: int, ranks: int) -> None:
    config = replace(BASE, vocab_size=vocab, pattern="A", attention=AttentionConfig(8, 8, 4), feed=FeedConfig(16))
    assert sum(rank_config(config, ranks, rank).vocab_size for rank in range(ranks)) == vocab
