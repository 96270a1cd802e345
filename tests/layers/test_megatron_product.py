"""Gated DeltaProduct as Megatron-LM has it: its tensors give the logits of its equations, written out in its layout."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.layers import GatedDeltaProduct
from lineate.layers.variants.delta_product import from_megatron
from lineate.models import FeedConfig, HybridConfig, HybridLM, LinearConfig

VOCAB, HIDDEN, LAYERS, FEED, CONV = 41, 24, 2, 20, 4
HEADS, GROUPS, STATE, DIM, WRITES = 4, 2, 6, 5, 3
CONFIG = HybridConfig(
    vocab_size=VOCAB, hidden_size=HIDDEN, n_layers=LAYERS, pattern="U", feed=FeedConfig(FEED), norm_eps=1e-5,
    linear=LinearConfig(GROUPS, HEADS, STATE, DIM, writes=WRITES, group_norm=True, norm_eps=1e-5),
)  # fmt: skip


def draw(seed: int) -> dict[str, Tensor]:
    """Return random tensors of one mixer, with Megatron's names and order of rows: z V K Q b a, and V K Q."""
    inner, keys = HEADS * DIM, GROUPS * STATE
    mixed = WRITES * inner + (WRITES + 1) * keys
    shapes = {
        "in_proj.weight": (inner + mixed + (WRITES + 1) * HEADS, HIDDEN), "conv1d.weight": (mixed, 1, CONV),
        "A_log": (HEADS,), "dt_bias": (HEADS,), "norm.weight": (inner,), "out_proj.weight": (HIDDEN, inner),
        "in_proj.layer_norm_weight": (HIDDEN,),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}
    found = {name: x * (1.5 * x.shape[-1] ** -0.5 if x.dim() > 1 else 1) for name, x in found.items()}
    return found | {"norm.weight": 1 + 0.3 * found["norm.weight"]}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def mix(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Run one mixer on x `t hidden`, head by head and write by write."""
    t, inner, keys = len(x), HEADS * DIM, GROUPS * STATE
    rows = x @ w["in_proj.weight"].T
    z, mixed = rows[:, :inner], rows[:, inner : -(WRITES + 1) * HEADS]
    b, a = rows[:, -(WRITES + 1) * HEADS : -HEADS], rows[:, -HEADS:]
    ahead = torch.cat((mixed.new_zeros(CONV - 1, mixed.shape[1]), mixed))
    mixed = F.silu(sum(ahead[j : j + t] * w["conv1d.weight"][:, 0, j] for j in range(CONV)))
    v = mixed[:, : WRITES * inner].view(t, WRITES, HEADS, DIM)
    k = mixed[:, WRITES * inner : WRITES * (inner + keys)].view(t, WRITES, GROUPS, STATE)
    q = mixed[:, WRITES * (inner + keys) :].view(t, GROUPS, STATE)
    beta, output = b.sigmoid().view(t, WRITES, HEADS), x.new_zeros(t, HEADS, DIM)
    for head in range(HEADS):
        group, S = head // (HEADS // GROUPS), x.new_zeros(STATE, DIM)
        for i in range(t):
            S = torch.exp(-w["A_log"][head].exp() * F.softplus(a[i, head] + w["dt_bias"][head])) * S
            for m in range(WRITES):
                key = k[i, m, group] * torch.rsqrt(k[i, m, group].square().sum() + 1e-6)
                S = S + beta[i, m, head] * torch.outer(key, v[i, m, head] - key @ S)
            query = q[i, group] * torch.rsqrt(q[i, group].square().sum() + 1e-6)
            output[i, head] = query @ S * STATE**-0.5
    gated = (output.flatten(1) * F.silu(z)).view(t, GROUPS, -1)
    return rms(gated, w["norm.weight"].view(GROUPS, -1)).flatten(1) @ w["out_proj.weight"].T


def logits_of(model: HybridLM, mixers: list[dict[str, Tensor]], ids: Tensor) -> Tensor:
    """Return the logits of a model `t vocab` whose other parts have the weights of `model`."""
    w = model.state_dict()
    x = w["embed.weight"][ids]
    for i, mixer in enumerate(mixers):
        x = x + mix(mixer, rms(x, w[f"layers.{i}.mixer_norm.weight"]))
        y = rms(x, w[f"layers.{i}.feed_norm.weight"])
        gate, up = (y @ w[f"layers.{i}.feed.gate_up_proj.weight"].T).split(FEED, -1)
        x = x + (F.silu(gate) * up) @ w[f"layers.{i}.feed.down_proj.weight"].T
    return rms(x, w["norm.weight"]) @ w["head.weight"].T


@torch.no_grad()
def test_logits_are_those_of_the_equations():
    torch.manual_seed(0)
    model = HybridLM(CONFIG).double()
    for name, x in model.named_parameters():
        if x.dim() > 1:
            torch.nn.init.normal_(x, std=1.5 * x.shape[-1] ** -0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(x, 0.5, 1.5)
    mixers = [draw(i) for i in range(LAYERS)]
    for block, tensors in zip(model.layers, mixers, strict=True):
        block.mixer.load_state_dict(from_megatron(block.mixer, tensors))
    ids = torch.randint(VOCAB, (1, 30), generator=torch.Generator().manual_seed(3))
    expected = logits_of(model, mixers, ids[0])
    most = expected.abs().max()
    first = model(ids[:, :13])
    state, parts = first.state, [first.logits[0]]
    for token in ids[:, 13:].split(1, 1):
        found = model(token, state=state)
        state, parts = found.state, [*parts, found.logits[0]]
    for found in (model(ids).logits[0], torch.cat(parts)):
        assert (found - expected).abs().max() <= 1e-12 * most
    assert (model.float()(ids).logits[0] - expected).abs().max() <= 2e-5 * most


def make(**changes) -> GatedDeltaProduct:
    options = {"writes": WRITES, "group_norm": True, "norm_eps": 1e-5} | changes
    return GatedDeltaProduct(HIDDEN, GROUPS, value_heads=HEADS, key_dim=STATE, value_dim=DIM, **options)


def test_refusals():
    tensors = draw(0)
    with pytest.raises(ValueError, match="gate_activation must be 'silu' with group_norm=True, got 'sigmoid'"):
        make(gate_activation="sigmoid")
    for changes in ({"group_norm": False}, {"forgets": False}, {"conv_size": 0}):
        with pytest.raises(ValueError, match="mixer must have a decay, a convolution and group_norm=True"):
            from_megatron(make(**changes), tensors)
    with pytest.raises(ValueError, match=r"tensors must have in_proj\.weight of shape \(\d+, 24\) .*, got \(\d+, 24\)"):
        from_megatron(make(writes=2), tensors)
    with pytest.raises(ValueError, match=r"tensors must have A_log of shape .*, got none"):
        from_megatron(make(), {name: x for name, x in tensors.items() if name != "A_log"})
    with pytest.raises(ValueError, match=r"tensors must have no bias .*, got conv1d\.bias"):
        from_megatron(make(), tensors | {"conv1d.bias": torch.zeros(3)})
