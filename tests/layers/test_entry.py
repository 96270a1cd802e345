"""Every mixer raises its own message about a wrong input or state, in place of an error from inside torch."""

import pytest
import torch
from torch import Tensor, nn

from lineate.layers import GatedDeltaNet, LayerState, Memory, TokenCache
from lineate.layers.registry import kind_of
from lineate.layers.registry import letters as all_letters
from lineate.models import (
    AttentionConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
    RwkvConfig,
    preset,
)
from lineate.models.hybrid import make_mixer
from lineate.parallel.context.segments import Segment, Told, check_splits
from lineate.training.config import TrainConfig
from lineate.training.context import context_parallel
from lineate.training.distributed import World
from lineate.training.prepare import prepare

LETTERS = all_letters()
MEMORY_LETTERS = "".join(letter for letter in LETTERS if kind_of(letter).learns)

HIDDEN = 16
letters = pytest.mark.parametrize("letter", LETTERS)


def make(letter: str, heads: int = 2) -> nn.Module:
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=9, hidden_size=HIDDEN, n_layers=1, pattern=letter, linear=LinearConfig(heads, 2 * heads, 8, 6),
        mamba=MambaConfig(2 * heads, 6, 8),
        rwkv=RwkvConfig(heads, 8, value_dim=6),
        memory=MemoryConfig(heads, 8, chunk=4), attention=AttentionConfig(2 * heads, heads, 8, rotary_dim=4),
        latent=LatentConfig(2, rank=5 * heads, nope_dim=6, rope_dim=4, value_dim=5), feed=FeedConfig(8),
    )  # fmt: skip
    return make_mixer(config, letter)


def tokens(b: int = 2, t: int = 3) -> Tensor:
    return torch.randn(b, t, HIDDEN, generator=torch.Generator().manual_seed(b + t))


def changed(state: LayerState, change) -> LayerState:
    """Return the state with all floating tensors changed."""
    tensors = {name: change(state[name]) if state[name].is_floating_point() else state[name] for name in state.names}
    return Memory(tensors) if isinstance(state, Memory) else TokenCache(tensors, state.lengths)


@letters
@torch.no_grad()
def test_wrong_inputs(letter):
    mixer, x = make(letter), tokens()
    for wrong, error, message in (
        ([[1.0]], TypeError, "x must be a torch.Tensor, got list"),
        (x[0], ValueError, r"x must have shape \(b, t, hidden\) with at least one token, got \(3, 16\)"),
        (x[:, :0], ValueError, r"x must have shape .* with at least one token, got \(2, 0, 16\)"),
        (x[:0], ValueError, r"x must have shape .* with at least one token, got \(0, 3, 16\)"),
        (x[..., 1:], ValueError, r"x must have shape \(b, t, hidden\) = \(b, t, 16\), got \(2, 3, 15\)"),
        (x.double(), ValueError, "x must have the dtype of the layer, float32, got float64"),
        (x.long(), ValueError, "x must have the dtype of the layer, float32, got int64"),
        (x.to("meta"), ValueError, "x must be on the device of the layer, cpu, got meta"),
    ):
        for state in (None, mixer(x)[1]):
            with pytest.raises(error, match=message):
                mixer(wrong, state)
    with pytest.raises(TypeError, match=r"cu_seqlens must be a torch\.Tensor"):
        mixer(x[:1], cu_seqlens=[0, 3])


@letters
@torch.no_grad()
def test_wrong_states(letter):
    mixer, x = make(letter), tokens()
    state = mixer(x)[1]
    kind, other = ("TokenCache", "G") if isinstance(state, TokenCache) else ("Memory", "A")
    for wrong, error, message in (
        (state["position"] if "position" in state.names else state[state.names[0]], TypeError, f"must be a {kind} or"),
        (make(other)(x)[1], TypeError, f"state must be a {kind} or None, got "),
        (make(letter, 4)(x)[1], ValueError, r"state\['\w+'\] must have shape \(2, .*it is another layer's"),
        (mixer(tokens(3))[1], ValueError, r"state must have 2 rows, as many as .*, got 3; state.select"),
        (changed(state, Tensor.double), ValueError, r"state\['\w+'\] must be float32, got float64; continue under the"),
        (changed(state, Tensor.bfloat16), ValueError, r"state\['\w+'\] must be float32, got bfloat16"),
        (changed(state, lambda y: y.to("meta")), ValueError, r"state\['\w+'\] must be on the device of x, cpu, got"),
    ):
        if "bfloat16" in message and all(torch.bfloat16 in spec.dtypes for spec in mixer.state_spec):
            continue  # its only tensor is a memory that may be narrow
        for _ in range(2):  # a state that passed the check changes nothing
            with pytest.raises(error, match=message):
                mixer(x, wrong)
            mixer(x, state)
    with pytest.raises(ValueError, match="state must have 3 rows"):
        mixer(x[:1], state, cu_seqlens=torch.tensor([0, 1, 1, 3]))


class _Ranks:
    """The fields of a Context, without a process group."""

    rank, size = 0, 2


def _segment(x: Tensor, packed: bool) -> Segment:
    bounds = torch.tensor([0, 1, x.shape[1]]) if packed else None
    told = (Told(x.shape[0], 0, 0, x.shape[1], 0), Told(x.shape[0], 1, 0, x.shape[1], 0))
    return Segment(_Ranks(), bounds, (0, x.shape[1]) if bounds is None else tuple(bounds.tolist()), told)


CANNOT_SPLIT = r"split over ranks .* must be .*KimiDeltaAttention \(K\).*, got {}, whose memory cannot be handed"


@pytest.mark.parametrize("letter", MEMORY_LETTERS)
@torch.no_grad()
def test_memories_that_learn_cannot_be_split_over_ranks(letter):
    """All of them give one message, for a segment and for a layer or model that is set up for ranks."""
    mixer, x = make(letter), tokens(1)
    message = CANNOT_SPLIT.format(type(mixer).__name__)
    state = mixer(x)[1]
    for packed in (False, True):
        for given in (None, state):
            with pytest.raises(ValueError, match=message):
                mixer(x, given, _segment(x, packed))
    for model in (mixer, HybridLM(preset("tiny", pattern="GA" + letter, vocab_size=9))):
        with pytest.raises(ValueError, match=message):
            context_parallel(model, None)
    mixer.context = _Ranks()
    with pytest.raises(ValueError, match=message):
        mixer(x)


def test_the_message_names_every_mixer_that_can_be_split_over_ranks():
    """It gives their letters too; these are the mixers whose class has a `context`."""
    with pytest.raises(ValueError) as error:
        check_splits(make("T"))
    assert all(hasattr(type(make(letter)), "context") for letter in "LRDGKSAM")
    for letter in LETTERS:
        mixer = make(letter)
        if hasattr(type(mixer), "context"):
            assert letter not in MEMORY_LETTERS
            check_splits(mixer)
            assert f"{type(mixer).__name__} ({letter})" in str(error.value)


class _OwnMixer(nn.Module):
    state_spec = ()


def test_own_mixers_without_a_context_cannot_be_split():
    """They would compute each rank's part as if it were a sequence of its own."""
    model = HybridLM(preset("tiny", pattern="G", vocab_size=9))
    model.layers[0].mixer = _OwnMixer()
    with pytest.raises(ValueError, match=CANNOT_SPLIT.format("_OwnMixer")):
        context_parallel(model, None)


@pytest.mark.parametrize(("options", "name"), [
    ({"model": "tiny", "pattern": "GGGT"}, "TTTLinear"), ({"model": "tiny", "pattern": "CN"}, "LaCT, Titans"),
    ({"model": "FOLDER"}, "LeastSquares"),
])  # fmt: skip
def test_training_says_it_before_anything_is_computed(tmp_path, monkeypatch, options, name):
    HybridLM(preset("tiny", pattern="GE", vocab_size=257)).save_pretrained(tmp_path / "model")
    options = {key: str(tmp_path / "model") if x == "FOLDER" else x for key, x in options.items()}
    monkeypatch.setattr(World, "start", None)
    config = TrainConfig(**options, context=2, out=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=CANNOT_SPLIT.format(name)):
        prepare(config)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(("letter", "other"), [("A", "M"), ("M", "A"), ("G", "E"), ("E", "G"), ("T", "P"), ("N", "T")])
@torch.no_grad()
def test_states_of_other_layers(letter, other):
    mixer, x = make(letter), tokens()
    with pytest.raises(ValueError, match=r"state must have .*, got .*; it is another layer's"):
        mixer(x, make(other)(x)[1])


@pytest.mark.parametrize("letter", "LGKTNEAM")
@torch.no_grad()
def test_dtype_of_a_state_under_autocast(letter):
    """Under autocast only the dtype that autocast produces is accepted; without autocast that dtype is refused."""
    mixer, x = make(letter), tokens()
    exact = mixer(x)[1]
    with torch.autocast("cpu", torch.bfloat16):
        state = mixer(x)[1]
        mixer(x, mixer(x, state)[1])
        with pytest.raises(ValueError, match="continue under the same autocast and model dtype"):
            mixer(x, exact)
        with pytest.raises(ValueError, match=r"got (torch\.)?float64; continue under"):
            mixer(x, changed(exact, Tensor.double))
    mixer(x, exact)
    with pytest.raises(ValueError, match="float32, got bfloat16; continue under the same autocast"):
        mixer(x, state)


@letters
@torch.no_grad()
def test_a_layer_that_was_converted(letter):
    """A layer that passed the check before its conversion is checked again."""
    mixer, x = make(letter), tokens()
    state = mixer(x)[1]
    mixer(x, state)
    mixer.double()
    with pytest.raises(ValueError, match=r"must be float64, got float32; continue under the same"):
        mixer(x.double(), state)
    mixer(x.double(), mixer(x.double())[1])


class _Adapted(nn.Module):
    """A wrapper of a linear layer with another one in parallel, and no weight of its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inner = linear

    def forward(self, x):
        return self.inner(x)


def _adapt(mixer):
    mixer.in_proj = _Adapted(mixer.in_proj)


def _fetch(mixer):
    """Keep its weight on the meta device except while it runs, as in an offloaded model."""
    linear, weight = mixer.in_proj, mixer.in_proj.weight

    def before(*_):
        linear.weight = weight

    def after(*_):
        linear.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)

    linear.register_forward_pre_hook(before)
    linear.register_forward_hook(after)
    after()


def _convert(mixer):
    """Give x in another dtype, which a hook converts."""
    mixer.in_proj.register_forward_pre_hook(lambda module, args: (args[0].to(module.weight.dtype),))
    mixer.double()


@pytest.mark.parametrize("change", [_adapt, _fetch, _convert])
@torch.no_grad()
def test_projections_that_are_not_plain_are_left_alone(change):
    """Projections that are wrapped, fetched or converted by hooks choose their own dtypes; streaming still works."""
    torch.manual_seed(0)
    mixer, x = GatedDeltaNet(16, 2, key_dim=4, value_dim=4), torch.randn(1, 9, 16)
    if change is _convert:
        mixer.double()
        expected = mixer(x.double())[0]
        mixer.float()
    else:
        expected = mixer(x)[0]
    change(mixer)
    state, found = None, []
    for part in x.split(3, 1):
        y, state = mixer(part, state)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-5, atol=1e-6)
