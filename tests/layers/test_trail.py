"""Trails: guessed tokens in one pass, the state after any number of them, and nothing of the others."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lineate.call import Inputs
from lineate.layers import (
    GatedAttention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LinearMixer,
    Memory,
    TensorSpec,
    TokenCache,
)
from lineate.layers.registry import letters
from lineate.layers.trail import trail
from lineate.models import FeedConfig, HybridConfig, HybridLM, ModelState
from tests.support.odd_models import EXPERTS, odd

T = 5
PATTERNS = {letter: odd(letter) for letter in letters()} | {
    "GGGA": odd("GGGA", experts=EXPERTS, dense_layers=(0,)),
    "KM, norm after": odd("KM", norm_after="M", zero_centred_norm=True),
    "LRDGKSTPNCEAM": odd("LRDGKSTPNCEAM", tie_embeddings=True),
    "VGVV, channel mix": odd("VGVV", feed=FeedConfig(21, "channel_mix"), norm="layer", embedding_norm=True),
    "A, without positions": odd("A", attention=replace(odd("A").attention, rotary_dim=0, gated=False)),  # type: ignore[type-var]
    "G, no convolution": odd("G", linear=replace(odd("G").linear, conv_size=0)),  # type: ignore[type-var]
}
patterns = pytest.mark.parametrize("pattern", PATTERNS)
LENGTHS = {"one row": (9,), "even": (9, 9, 9, 9), "ragged": (3, 17, 1, 8)}
prompts = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def make(config: HybridConfig, dtype: torch.dtype = torch.float64) -> HybridLM:
    torch.manual_seed(0)
    model = HybridLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" in name:
                x.uniform_(0.5, 1.5)
            elif x.dim() >= 2 and "conv" not in name:
                x.mul_(6)
    return model


def draw(*shape: int, seed: int = 0, most: int = 61) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: HybridLM, lengths: tuple[int, ...], most: int = 61) -> ModelState:
    """Return the state after one prompt a row."""
    if len(set(lengths)) == 1:
        return model(draw(len(lengths), lengths[0], most=most).to(model.device)).state
    bounds = torch.tensor((0, *lengths)).cumsum(0).to(model.device)
    return model(draw(1, sum(lengths), most=most).to(model.device), cu_seqlens=bounds).state


@torch.no_grad()
def single_steps(model: HybridLM, ids: Tensor, state: ModelState) -> tuple[Tensor, list[ModelState]]:
    """Return the logits of tokens that are read one by one, and the states after 0 .. t of them."""
    logits, states = [], [state]
    for i in range(ids.shape[1]):
        out = model(ids[:, i : i + 1], state=states[-1])
        logits.append(out.logits)
        states.append(out.state)
    return torch.cat(logits, 1), states


def row_tensors(state: ModelState, row: int) -> list[Tensor]:
    """Return all that a row's state says: memories, and as many entries of caches as it has tokens."""
    found = [torch.as_tensor(state.lengths if isinstance(state.lengths, int) else int(state.lengths[row]))]
    for layer in state.layers:
        for name in layer.names:
            if isinstance(layer, TokenCache):
                length = layer.lengths if isinstance(layer.lengths, int) else int(layer.lengths[row])
                found.append(layer[name][row, :length].cpu())
            else:
                found.append(layer[name][row].cpu())
    return found


def error(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest value of each tensor."""
    assert [x.shape for x in got] == [x.shape for x in expected]
    worst = [0.0]
    for x, y in zip(got, expected, strict=True):
        assert x.isfinite().all()
        if x.numel():
            worst.append(float((x.double() - y.double()).abs().max() / (1 + y.double().abs().max())))
    return max(worst)


def counts_for(rows: int, seed: int = 0) -> Tensor:
    """Return counts with 0 and T among them, if there are as many rows."""
    return torch.tensor([0, T, *draw(rows, seed=seed, most=T + 1).tolist()][:rows] if rows > 1 else [seed % (T + 1)])


@pytest.mark.cover
@pytest.mark.slow(but="values")
@patterns
@prompts
@torch.no_grad()
def test_a_trail_equals_single_steps(pattern, lengths):
    model, rows = make(PATTERNS[pattern]), len(lengths)
    state, ids = read(model, lengths), draw(rows, T, seed=1)
    before = [row_tensors(state, row) for row in range(rows)]
    logits, states = single_steps(model, ids, state)
    for seed in range(3):
        out = model.trail(ids, state)
        assert error([out.logits], [logits]) < 1e-11
        counts = counts_for(rows, seed)
        after = out.trail.after(counts)
        more = draw(rows, 2, seed=2)
        continued = model(more, state=after)
        for row, n in enumerate(counts.tolist()):
            assert error(row_tensors(after, row), row_tensors(states[n], row)) < 1e-11
            alone = states[n].select(torch.tensor([row]))
            following = model(more[row : row + 1], state=alone).logits
            assert error([continued.logits[row : row + 1]], [following]) < 1e-11
            assert all(torch.equal(x, y) for x, y in zip(row_tensors(state, row), before[row], strict=True))


@pytest.mark.cover
@patterns
def test_rounding_is_that_of_single_steps(pattern):
    lengths = LENGTHS["ragged"]
    exact, model = make(PATTERNS[pattern]), make(PATTERNS[pattern]).float()
    ids, counts = draw(4, T, seed=1), counts_for(4)
    expected, exact_states = single_steps(exact, ids, read(exact, lengths))
    state = read(model, lengths)
    logits, states = single_steps(model, ids, state)
    out = model.trail(ids, state)
    assert error([out.logits], [expected]) < 2 * error([logits], [expected]) + 1e-5
    after = out.trail.after(counts)
    for row, n in enumerate(counts.tolist()):
        wanted = row_tensors(exact_states[n], row)
        assert error(row_tensors(after, row), wanted) < 2 * error(row_tensors(states[n], row), wanted) + 1e-5


@pytest.mark.parametrize("letter", "LRDGKSTPNCEV")
def test_memories_have_the_bits_of_single_steps(letter):
    """A single layer is given the same inputs, and on a CPU the same kernels run token by token."""
    mixer = make(odd(letter), torch.float32).layers[0].mixer
    x = torch.randn(3, 4 + T, 30, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, state = mixer(x[:, :4])
        states = [state]
        for i in range(4, 4 + T):
            states.append(mixer(x[:, i : i + 1], states[-1])[1])
        y, trailed = trail(mixer, x[:, 4:], state)
    for n in range(T + 1):
        after = trailed.after(torch.full((3,), n))
        for name in after.names:
            tolerance = 1e-6 if letter in "LRDGKS" else 0.0  # products over all tokens round otherwise
            assert (after[name] - states[n][name]).abs().max() <= tolerance * (1 + states[n][name].abs().max())


@pytest.mark.parametrize("letter", "RDGKS")
@pytest.mark.parametrize("into", ("nothing", "the state itself", "other tensors"))
def test_kept_inputs_give_the_memories_of_kept_states(letter, into):
    mixer = make(odd(letter)).layers[0].mixer
    x = torch.randn(4, 4 + T, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, state = mixer(x[:, :4])
    given = {name: y.clone() for name, y in state.tensors.items()}
    ys, found = [], []
    for keep in ("states", "inputs"):
        targets = {"nothing": None, "the state itself": dict(state.tensors)}.get(
            into, {name: torch.full_like(y, torch.nan) for name, y in given.items()}
        )
        y, trailed = trail(mixer, x[:, 4:], state, keep)
        assert all(torch.equal(state[name], given[name]) for name in given)
        ys.append(y)
        after = trailed.after(torch.tensor([2, 0, T, 1]), targets)
        found.append({name: after[name].clone() for name in after.names})
        if targets is not None:
            assert all(after[name] is targets[name] for name in after.names)
            for name in given:
                state[name].copy_(given[name])
    assert (ys[0] - ys[1]).abs().max() < 1e-12
    assert all((found[0][name] - found[1][name]).abs().max() < 1e-12 for name in given)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("poison", (torch.nan, torch.inf, 1e30), ids=("nan", "inf", "huge"))
@pytest.mark.parametrize("keep", ("states", "inputs"))
@pytest.mark.parametrize("pattern", [*letters(), "GGGA", "LRDGKSTPNCEAM"])
def test_nothing_of_rejected_tokens_remains(pattern, keep, poison):
    """Token 0 spoils everything that reads it; rows reject it at different places."""
    model = make(PATTERNS[pattern], torch.float32)
    with torch.no_grad():
        model.embed.weight[0] = poison
        if model.head is None:
            model.head = nn.Linear(30, 61, bias=False)  # a tied head would give token 0 a logit that is not finite
    tolerance = 0.0 if model.config.experts is None else 1e-5  # an expert's product rounds by the tokens that it gets
    lengths, counts = LENGTHS["ragged"], torch.tensor([0, 4, 2, 1])
    state = _read_clean(model, lengths)
    clean = draw(4, T, seed=1, most=60) + 1
    bad = clean.clone()
    for row, n in enumerate(counts.tolist()):
        bad[row, n:] = 0
    expected, got = model.trail(clean, state, keep), model.trail(bad, state, keep)
    for row, n in enumerate(counts.tolist()):
        assert torch.allclose(got.logits[row, :n], expected.logits[row, :n], rtol=tolerance, atol=tolerance)
    wanted, after = expected.trail.after(counts), got.trail.after(counts)
    more = draw(4, 3, seed=2, most=60) + 1
    with torch.no_grad():
        following, continued = model(more, state=wanted), model(more, state=after)
    for row in range(4):
        for x, y in zip(row_tensors(after, row), row_tensors(wanted, row), strict=True):
            assert torch.allclose(x, y, rtol=tolerance, atol=tolerance)
    assert continued.logits.isfinite().all()
    assert torch.allclose(continued.logits, following.logits, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def _read_clean(model: HybridLM, lengths: tuple[int, ...]) -> ModelState:
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    return model(draw(1, sum(lengths), most=60) + 1, cu_seqlens=bounds).state


def test_a_trail_can_be_used_again_and_beside_its_state():
    model = make(PATTERNS["GGGA"])
    state, ids = read(model, LENGTHS["ragged"]), draw(4, T, seed=1)
    _, states = single_steps(model, ids, state)
    trailed = model.trail(ids, state).trail
    chosen = [torch.tensor(x) for x in ([0, 2, 5, 1], [5, 5, 0, 3], [0, 0, 0, 0], [5, 5, 5, 5])]
    found = [trailed.after(counts) for counts in chosen]
    with torch.no_grad():
        others = [model(draw(4, 1, seed=n), state=each).state for n, each in enumerate([state, *found])]
    assert len(others) == 5
    for counts, after in zip(chosen, found, strict=True):
        for row, n in enumerate(counts.tolist()):
            assert error(row_tensors(after, row), row_tensors(states[n], row)) < 1e-11


@torch.no_grad()
def test_long_generation_by_trails_does_not_copy_its_cache():
    """The room of rejected tokens is used again: the cache grows by what is kept, in the same memory."""
    model = make(PATTERNS["A"], torch.float32)
    state = read(model, (9, 9))
    state = model(draw(2, 1), state=state).state  # from here on there is room
    addresses = set()
    for seed in range(20):
        state = model.trail(draw(2, 4, seed=seed), state).trail.after(torch.tensor([1, 2]))
        addresses.add(state.layers[0].tensors["keys"].data_ptr())
    assert len(addresses) == 1
    assert state.lengths.tolist() == [30, 50]
    assert state.layers[0].n == 50


class Pooled(TokenCache):
    """A window of larger tensors, into which new entries are written after each row's last token."""

    def append(self, new: dict[str, Tensor]) -> TokenCache:
        t = next(iter(new.values())).shape[1]
        at = self.lengths[:, None] + torch.arange(t)  # type: ignore[index]
        for name, x in new.items():
            self[name][torch.arange(self.rows)[:, None], at] = x
        return TokenCache({name: self[name] for name in self.names}, self.lengths + t)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("keep", ("states", "inputs"))
@pytest.mark.parametrize("pattern", ("GGGA", "KM, norm after", "LRDGKSTPNCEAM"))
@torch.no_grad()
def test_trails_inside_a_pool(pattern, keep):
    """Rows 0 .. 3 of larger tensors are trailed and cut in place, round after round; the rows after them stay."""
    model = make(PATTERNS[pattern])
    single = read(model, LENGTHS["ragged"])
    lengths = torch.tensor([*LENGTHS["ragged"], 0, 0])
    pool: list[dict[str, Tensor]] = []
    for layer in single.layers:
        cached = isinstance(layer, TokenCache)
        pool.append(
            {
                name: layer[name].new_zeros(6, *([64] if cached else []), *layer[name].shape[1 + cached :])
                for name in layer.names
            }
        )
        for name in layer.names:
            pool[-1][name][4:] = 7
            if cached:
                pool[-1][name][:4, : layer[name].shape[1]] = layer[name]
            else:
                pool[-1][name][:4] = layer[name]
    for seed in range(4):
        views = [{name: x[:4] for name, x in tensors.items()} for tensors in pool]
        layers = tuple(
            Pooled(own, lengths[:4]) if isinstance(layer, TokenCache) else Memory(own, owned=True)
            for own, layer in zip(views, single.layers, strict=True)
        )
        ids, counts = draw(4, T, seed=seed), counts_for(4, seed)
        out, expected = model.trail(ids, ModelState(layers, lengths[:4]), keep), model.trail(ids, single)
        assert error([out.logits], [expected.logits]) < 1e-11
        out.trail.after(counts, into=ModelState(layers, lengths[:4]))
        single = expected.trail.after(counts)
        lengths[:4] += counts
        now = [
            TokenCache(own, lengths[:4]) if isinstance(old, Pooled) else Memory(own)
            for own, old in zip(views, layers, strict=True)
        ]
        for row in range(4):
            assert error(row_tensors(ModelState(tuple(now), lengths[:4]), row), row_tensors(single, row)) < 1e-11
        assert all(bool((x[4:] == 7).all()) for tensors in pool for x in tensors.values())


class Skipping(LinearMixer):
    """A rule of a user's own, which adds v to what it reads."""

    gates = ("values", "heads")

    def rule_inputs(self, q, k, v, gates):
        return Inputs(q, k, v, log_decay=nn.functional.logsigmoid(gates[1]))

    def attend(self, q, k, v, *others):
        (y, memory), z = super().attend(q, k, v, *others)
        return (y + v, memory), z


class Doubling(GatedDeltaNet):
    """A mixer with a forward of its own."""

    def forward(self, x, state=None, cu_seqlens=None):
        y, state = super().forward(x, state, cu_seqlens)
        return 2 * y, state


class Mean(nn.Module):
    """The mean of all tokens so far."""

    state_spec = (TensorSpec("total", (30,), torch.float64), TensorSpec("seen", (1,), torch.float64))

    def forward(self, x, state=None, cu_seqlens=None):
        total, seen = (x.new_zeros(len(x), n) for n in (30, 1)) if state is None else (state["total"], state["seen"])
        totals = total[:, None] + x.cumsum(1)
        counts = seen[:, None] + torch.arange(1, x.shape[1] + 1, device=x.device)[None, :, None]
        return totals / counts, Memory({"total": totals[:, -1], "seen": counts[:, -1]})


class Newest(nn.Module):
    """A cache that is joined without append; a token reads the largest entry so far."""

    state_spec = (TensorSpec("entries", ("t", 30), torch.float64),)

    def forward(self, x, state=None, cu_seqlens=None):
        entries = x if state is None else torch.cat((state["entries"], x), 1)
        largest = entries.cummax(1).values[:, -x.shape[1] :]
        return largest, TokenCache({"entries": entries}, entries.shape[1])


OWN = {
    "attend": lambda: Skipping(30, 3, key_dim=8),
    "forward": lambda: Doubling(30, 3, value_heads=6, key_dim=8),
    "memory": Mean,
    "cache": Newest,
    "attention": lambda: GatedAttention(30, 5, kv_heads=1, head_dim=8),
    "bounded gates": lambda: KimiDeltaAttention(30, 3, key_dim=8, gate_lower_bound=-5.0),
}


@pytest.mark.parametrize("own", OWN)
@torch.no_grad()
def test_mixers_of_a_user(own):
    torch.manual_seed(0)
    mixer = OWN[own]().double()
    x = torch.randn(3, 4 + T, 30, dtype=torch.float64)
    _, state = mixer(x[:, :4])
    outputs, states = [], [state]
    for i in range(4, 4 + T):
        y, state = mixer(x[:, i : i + 1], states[-1])
        outputs.append(y)
        states.append(state)
    for keep in ("states", "inputs"):
        y, trailed = trail(mixer, x[:, 4:], states[0], keep=keep)
        assert (y - torch.cat(outputs, 1)).abs().max() < 1e-12
        after = trailed.after(torch.tensor([3, 0, T]))
        for row, n in enumerate((3, 0, T)):
            for name in after.names:
                wanted = states[n][name][row]
                got = after[name][row, : 4 + n] if isinstance(after, TokenCache) else after[name][row]
                assert (got - wanted).abs().max() < 1e-12


@torch.no_grad()
def test_hooks_of_a_mixer_run():
    mixer = GatedDeltaNet(30, 3, value_heads=6, key_dim=8).double()
    x = torch.randn(2, 4 + T, 30, dtype=torch.float64)
    _, state = mixer(x[:, :4])
    plain, _ = trail(mixer, x[:, 4:], state)
    mixer.register_forward_hook(lambda module, given, found: (3 * found[0], found[1]))
    hooked, _ = trail(mixer, x[:, 4:], state)
    assert (hooked - 3 * plain).abs().max() < 1e-12


@torch.no_grad()
def test_hooks_do_not_change_how_memories_are_rounded():
    mixer = GatedDeltaNet(30, 3, value_heads=6, key_dim=8)
    x = torch.randn(2, 4 + T, 30)
    _, state = mixer(x[:, :4])
    tensors = {name: y.bfloat16() if name == "memory" else y for name, y in state.tensors.items()}
    narrow = Memory(tensors, seeds=torch.tensor([4, 9]))
    found = []
    for hook in (False, True):
        if hook:
            mixer.register_forward_hook(lambda module, given, made: made)
        found.append(trail(mixer, x[:, 4:], narrow, keep="states")[1].after(torch.tensor([3, T])))
    plain, hooked = (after["memory"] for after in found)
    assert plain.dtype is torch.bfloat16
    assert (plain == hooked).float().mean() > 0.9  # the projections of all tokens at once round differently


@torch.no_grad()
def test_projections_run_once_over_all_tokens():
    mixer = make(odd("K")).layers[0].mixer
    seen: dict[str, list[int]] = {}
    for name in ("in_proj", "conv", "decay_proj", "gate_proj", "norm", "out_proj"):
        part = getattr(mixer, name)
        part.register_forward_pre_hook(
            lambda module, given, name=name: seen.setdefault(name, []).append(given[0].shape[1])
        )
    _, state = mixer(torch.zeros(2, 3, 30, dtype=torch.float64))
    seen.clear()
    trail(mixer, torch.randn(2, T, 30, dtype=torch.float64), state)
    assert seen == {name: [T] for name in ("in_proj", "conv", "decay_proj", "gate_proj", "norm", "out_proj")}


def test_inference_mode_and_grad_mode():
    model = make(PATTERNS["GGGA"])
    ids = draw(2, T, seed=1)
    with torch.inference_mode():
        state = model(draw(2, 9)).state
        trailed = model.trail(ids, state).trail
    _, states = single_steps(model, ids, state)
    for n in (2, 4):  # outside of inference mode nothing that was made in it may be overwritten
        after = trailed.after(torch.tensor([n, 0]))
        assert error(row_tensors(after, 0), row_tensors(states[n], 0)) < 1e-11
        assert error(row_tensors(after, 1), row_tensors(states[0], 1)) < 1e-11
    out = model.trail(ids, model(draw(2, 9)).state)
    assert not out.logits.requires_grad


def test_errors_name_the_argument():
    model = make(PATTERNS["GGGA"])
    state, ids = read(model, (9, 9)), draw(2, T)
    trailed = model.trail(ids, state).trail
    for counts, message in (
        (torch.tensor([1, 6]), r"counts must lie in 0 \.\. 5, the tokens of the trail, got 1 \.\. 6"),
        (torch.tensor([-1, 0]), r"got -1 \.\. 0"),
        (torch.tensor([1]), r"counts must be integers of shape \(rows,\) = \(2,\), got \(1,\)"),
        (torch.tensor([1.0, 1.0]), "counts must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            trailed.after(counts)
        with pytest.raises(ValueError, match=message):
            trailed.layers[0].after(counts)
    with pytest.raises(TypeError, match=r"counts must be a torch\.Tensor, got list"):
        trailed.after([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state must be a ModelState, got NoneType"):
        model.trail(ids, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state must be a Memory or a TokenCache, got NoneType"):
        trail(model.layers[0].mixer, torch.zeros(2, 1, 30).double(), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep must be"):
        model.trail(ids, state, "everything")
    with pytest.raises(ValueError, match="state must have 3 rows"):
        model.trail(draw(3, T), state)


@pytest.mark.gpu
@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("keep", ("auto", "states"))
@pytest.mark.parametrize("pattern", [*letters(), "GGGA", "LRDGKSTPNCEAM"])
@prompts
def test_trails_on_a_gpu(pattern, lengths, keep):
    exact, model = make(PATTERNS[pattern]), make(PATTERNS[pattern]).float().cuda()
    rows = len(lengths)
    ids, counts = draw(rows, T, seed=1), counts_for(rows, 2)
    expected, exact_states = single_steps(exact, ids, read(exact, lengths))
    state = read(model, lengths)
    logits, states = single_steps(model, ids.cuda(), state)
    for chosen in (counts, counts.cuda()):
        out = model.trail(ids.cuda(), state, keep)
        after = out.trail.after(chosen)
        assert error([out.logits.cpu()], [expected]) < 2 * error([logits.cpu()], [expected]) + 1e-4
        for row, n in enumerate(counts.tolist()):
            wanted = row_tensors(exact_states[n], row)
            assert error(row_tensors(after, row), wanted) < 2 * error(row_tensors(states[n], row), wanted) + 1e-4
