"""The calls of bench/record/record.py that run memories that learn, and layers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from record_cases import DTYPES, Case, Draw, find, gradients
from torch import Tensor, nn

import lineate.memory
from lineate import layers

# Memories that learn -------------------------------------------------------------------------------------------------

# name: the function, the widths of its model between d and d (None: it starts empty), keywords
MEMORIES: dict[str, tuple[str, tuple[int, ...] | None, dict[str, Any]]] = {
    "ttt linear": ("ttt", (), {"chunk": 8}),
    "ttt mlp": ("ttt", (24,), {"chunk": 8}),
    "ttt recomputed": ("ttt", (24,), {"chunk": 4, "recompute_chunks": 2}),
    "titans empty": ("titans", None, {}),
    "titans linear": ("titans", (), {"chunk": 8, "clip": 1.0}),
    "titans mlp": ("titans", (16,), {"chunk": 8, "clip": 1.0}),
    "titans residual": ("titans", (16,), {"chunk": 8, "residual": True, "norm": True}),
    "lact muon": ("lact", (14,), {"chunk": 8}),
    "lact plain": ("lact", (14,), {"chunk": 16, "muon": False}),
    "least squares": ("least_squares", None, {}),
    "least squares recurrent": ("least_squares", None, {"form": "recurrent", "chunk": 8}),
    "least squares chunkwise": ("least_squares", None, {"form": "chunkwise", "chunk": 16, "restore": False}),
}


def run_memory(
    draw: Draw, memory: str, how: str = "plain", dtype: str = "float32", d: int = 12, t: int = 45
) -> Any:  # fmt: skip
    """Return outputs, states and gradients; "split" makes two calls, the first of which ends inside a chunk."""
    function, widths, keywords = MEMORIES[memory]
    kind, (b, h) = DTYPES[dtype], (2, 2)
    bounds = None
    if how == "packed":
        b, t = 1, 2 * t
        bounds = torch.tensor([0, 1, 1, t // 2 - 7, t], device=draw.device)
    rows = b if bounds is None else 4
    q, k = (F.normalize(draw(b, t, h, d), dim=-1) for _ in range(2))
    tokens = {"q": q, "k": k, "v": draw(b, t, h, d)}
    weights: dict[str, Tensor] = {}
    if function == "ttt":
        tokens["rate"] = draw(b, t, h).sigmoid() * 0.3
        weights = {"norm_weight": 1 + 0.3 * draw(h, d), "norm_bias": 0.3 * draw(h, d)}
        for i, (n, m) in enumerate(zip((d, *widths), (*widths, d), strict=True)):
            weights |= {f"weight{i + 1}": 0.5 * draw(h, n, m), f"bias{i + 1}": 0.5 * draw(h, m)}
    elif function == "titans":
        tokens |= {name: draw(b, t, h).sigmoid() * 0.5 for name in ("theta", "eta", "alpha")}
        if widths is not None:
            shapes = zip((d, *widths), (*widths, d), strict=True)
            weights = {f"{i}": draw(h, n, m) * n**-0.5 for i, (n, m) in enumerate(shapes)}
    elif function == "lact":
        tokens |= {"rates": 0.1 * draw(b, t, h, 3).exp(), "momentum": draw(b, t, h).sigmoid()}
        shapes = ((widths[0], d), (d, widths[0]), (widths[0], d))
        weights = {f"{i}": draw(h, *shape) * shape[1] ** -0.5 for i, shape in enumerate(shapes)}
    else:
        tokens |= {"log_decay": F.logsigmoid(draw(b, t, h) + 4), "beta": draw(b, t, h).sigmoid() + 0.1}
    tokens = {name: x.to(kind).requires_grad_() for name, x in tokens.items()}
    weights = {name: x.to(torch.float64 if dtype == "float64" else torch.float32) for name, x in weights.items()}
    weights = {name: x.requires_grad_() for name, x in weights.items()}

    op = partial(find(function, "lineate.memory"), cu_seqlens=bounds, **keywords)
    if function == "ttt":
        op = partial(op, norm_weight=weights["norm_weight"], norm_bias=weights["norm_bias"])
        state = {name: x for name, x in weights.items() if "norm" not in name}
    elif weights:
        state = find(f"{function}_state", "lineate.memory")(list(weights.values()), rows)
    else:
        state = None
    ends = {"split": (t // 2, t), "tokens": (1, 2, 3)}.get(how, (t,))
    outputs, start = [], 0
    for end in ends:
        part = {name: x[:, start:end] for name, x in tokens.items()}
        y, state = op(**part, state=state)
        outputs.append(y)
        start = end
    results = [*outputs, *(x for x in state.values() if x.is_floating_point())]
    return {"outputs": outputs, "state": state, "grads": gradients(draw, results, tokens | weights)}


def run_reference(draw: Draw, rule: str, packed: bool) -> Any:
    """Run the sequential reference of one rule, with every gate that it reads."""
    from lineate.memory import RULES as TABLE

    chosen = TABLE[rule]
    chosen = replace(chosen, chunk=min(chosen.chunk, 4)) if chosen.chunk > 1 else chosen
    b, t, h, d, e = 1 if packed else 2, 11, 2, 5, 6
    sizes = {
        "S": (d, d), "W": (d, d), "b": (d,), "W1": (d, e), "b1": (e,), "W2": (e, d), "b2": (d,), "W0": (e, d),
    }  # fmt: skip
    if chosen.renormalises:
        sizes |= {"W1": (d, e), "W2": (e, d)}
    names = (*chosen.model.learned, *(("gamma", "beta") if chosen.optimiser == "positioned sgd" else ()))
    weights = {name: (0.4 * draw(h, *sizes.get(name, (d,)), dtype=torch.float64)).requires_grad_() for name in names}
    gates = {"rate": draw(b, t, h, dtype=torch.float64).sigmoid()}
    if "head" in chosen.forgetting or "channel" in chosen.forgetting:
        channel = (d,) if "head" not in chosen.forgetting else ()
        gates["log_decay"] = F.logsigmoid(draw(b, t, h, *channel, dtype=torch.float64) + 2)
    if chosen.optimiser in ("momentum", "muon"):
        gates["momentum"] = draw(b, t, h, dtype=torch.float64).sigmoid()
    if chosen.optimiser == "positioned sgd":
        gates["position"] = 0.1 * draw(4, dtype=torch.float64)
    leaves = {name: draw(b, t, h, d, dtype=torch.float64).requires_grad_() for name in "qkv"}
    bounds = torch.tensor([0, 1, 1, t]) if packed else None
    y, state = lineate.memory.run_reference(chosen, *leaves.values(), gates, weights, cu_seqlens=bounds)
    return {"y": y, "state": state, "grads": gradients(draw, [y], leaves | weights)}


def memory_cases(device: str) -> dict[str, Case]:
    """Return cases of the chunked memories and the reference."""
    cases: dict[str, Case] = {}
    sizes = {"d": 64, "t": 512} if device == "cuda" else {}
    for memory in MEMORIES:
        for how in ("plain", "packed", "split", "tokens"):
            for dtype in ("float32", "bfloat16") if device == "cuda" else DTYPES:
                cases[f"memory/{memory}/{how} {dtype}"] = partial(
                    run_memory, memory=memory, how=how, dtype=dtype, **sizes
                )
    for rule in lineate.memory.RULES if device == "cpu" else ():
        for packed in (False, True):
            cases[f"reference/{rule}/{'packed' if packed else 'plain'}"] = partial(
                run_reference, rule=rule, packed=packed
            )
    return cases


# Layers --------------------------------------------------------------------------------------------------------------

HEADS = {"value_heads": 4, "key_dim": 8, "value_dim": 12}
# name: the class, keywords besides hidden_size and heads
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LinearAttention": ("LinearAttention", HEADS),
    "LinearAttention identity": ("LinearAttention", {"feature_map": "identity", "conv_size": 0}),
    "GatedLinearAttention": ("GatedLinearAttention", HEADS | {"decay_rank": 6}),
    "DeltaNet": ("DeltaNet", HEADS | {"beta_scale": 2.0}),
    "GatedDeltaNet": ("GatedDeltaNet", HEADS),
    "GatedDeltaNet sigmoid": ("GatedDeltaNet", {"gate_activation": "sigmoid", "conv_size": 0, "beta_scale": 2.0}),
    "KimiDeltaAttention": ("KimiDeltaAttention", HEADS | {"decay_rank": 6, "gate_rank": 10}),
    "KimiDeltaAttention plain": ("KimiDeltaAttention", {"conv_size": 2}),
    "LeastSquares": ("LeastSquares", {"chunk": 16}),
    "TTTLinear": ("TTTLinear", {}),
    "TTTLinear bare": ("TTTLinear", {"conv_size": 0, "rope_theta": None, "chunk": 8}),
    "TTTMLP": ("TTTMLP", {"expand": 2}),
    "TTTMLP recomputed": ("TTTMLP", {"chunk": 4, "recompute_chunks": 2}),
    "Titans": ("Titans", {}),
    "Titans mlp": ("Titans", {"memory": "mlp", "residual": True, "memory_norm": True, "chunk": 8}),
    "LaCT": ("LaCT", {"chunk": 16, "window": 8}),
    "LaCT without attention": ("LaCT", {"chunk": 8, "window": 0, "conv_size": 4, "muon": False}),
    "GatedAttention": ("GatedAttention", {"kv_heads": 1, "rotary_dim": 8}),
    "GatedAttention full": ("GatedAttention", {"gated": False, "qk_norm": "full", "bias": True}),
    "GatedAttention bare": ("GatedAttention", {"qk_norm": None, "zero_centred_norm": True}),
    "LatentAttention": ("LatentAttention", {"rank": 20, "nope_dim": 8, "rope_dim": 6, "value_dim": 10}),
    "LatentAttention rotary": (
        "LatentAttention", {"rank": 20, "nope_dim": 8, "rope_dim": 6, "value_dim": 10, "rope_theta": 1e4}
    ),
}  # fmt: skip
FEEDS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "SwiGLU": ("SwiGLU", (48, 36), {}),
    "MixtureOfExperts": ("MixtureOfExperts", (48, 6, 3, 20), {"shared_size": 12, "shared_gate": True}),
    "MixtureOfExperts sigmoid": (
        "MixtureOfExperts", (48, 8, 2, 20),
        {"scores": "sigmoid", "groups": 4, "active_groups": 2, "scale": 2.4, "shared_size": 12},
    ),
    "MixtureOfExperts raw": ("MixtureOfExperts", (48, 6, 2, 20), {"renormalize": False}),
    "RMSNorm": ("RMSNorm", (48,), {}),
    "RMSNorm zero-centred": ("RMSNorm", (48,), {"zero_centred": True}),
    "GatedRMSNorm": ("GatedRMSNorm", (48,), {}),
    "GatedRMSNorm sigmoid": ("GatedRMSNorm", (48,), {"activation": "sigmoid"}),
    "ShortConvolution": ("ShortConvolution", (48,), {}),
    "ShortConvolution 3": ("ShortConvolution", (48, 3), {}),
}  # fmt: skip


@torch.no_grad()
def fill(module: nn.Module, draw: Draw) -> nn.Module:
    """Give every weight a random value of a size that keeps results of order one; no norm is left neutral."""
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        noise = draw(*x.shape)
        if name.endswith("A_log"):
            noise = noise.clamp(-1.5, 1)
        elif name.endswith("dt_bias"):
            noise = noise - 1
        elif "norm" in name or isinstance(module, layers.RMSNorm | layers.GatedRMSNorm):
            noise = 1 + 0.3 * noise
        elif x.dim() >= 2:
            noise = noise * (0.5 if "conv" in name else x.shape[-1] ** -0.5)
        else:
            noise = 0.3 * noise
        if x.is_floating_point():
            x.copy_(noise)
    return module.to(draw.device)


def first_weights(draw: Draw, make: Callable[[], nn.Module]) -> Any:
    """Return the initial weights of a new layer, what it prints, and its state."""
    torch.manual_seed(5)
    module = make()
    return {"weights": module, "repr": repr(module), "state": repr(getattr(module, "state_spec", None))}


def run_mixer(draw: Draw, make: Callable[[], nn.Module], how: str, width: int = 48, t: int = 75) -> Any:
    """Return outputs, state and gradients of a mixer."""
    dtype = torch.bfloat16 if "bfloat16" in how else torch.float32
    mixer = fill(make(), draw).to(dtype)
    packed = "packed" in how
    x = draw(1, 2 * t, width, dtype=dtype) if packed else draw(2, t, width, dtype=dtype)
    x.requires_grad_()
    bounds = torch.tensor([0, 1, 1, t - 9, 2 * t], device=draw.device) if packed else None
    outputs = []
    with torch.autocast(draw.device, torch.bfloat16, enabled="autocast" in how):
        if how == "tokens":
            with torch.no_grad():
                y, state = mixer(x)
                for i in range(5):
                    y, state = mixer(x[:, i : i + 1], state)
                    outputs.append(y)
            return {"outputs": outputs, "state": state}
        if how == "split":
            y, state = mixer(x[:, : t // 2 + 1])
            outputs.append(y)
            y, state = mixer(x[:, t // 2 + 1 :], state)
        else:
            y, state = mixer(x, cu_seqlens=bounds)
            if packed:  # the second call continues the sequences
                outputs.append(y)
                y, state = mixer(x, state, bounds)
    outputs.append(y)
    grads = gradients(draw, outputs, {"x": x, **dict(mixer.named_parameters())})
    return {"outputs": outputs, "state": state, "grads": grads}


def run_feed(draw: Draw, make: Callable[[], nn.Module], how: str, width: int = 48) -> Any:
    """Return output and gradients of a feed-forward, norm or convolution."""
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    module = fill(make(), draw).to(dtype)
    given = {"x": draw(2, 33, width, dtype=dtype)}
    if isinstance(module, layers.GatedRMSNorm):
        given["gate"] = draw(2, 33, width, dtype=dtype)
    given = {name: x.requires_grad_() for name, x in given.items()}
    with torch.autocast(draw.device, torch.bfloat16, enabled=how == "autocast"):
        found = module(*given.values())
    found = found if isinstance(found, tuple) else (found,)
    return {"found": found, "grads": gradients(draw, list(found), given | dict(module.named_parameters()))}


def layer_cases(device: str) -> dict[str, Case]:
    """Return cases of every class of lineate.layers; on a GPU, also with heads of 128 channels."""
    cases: dict[str, Case] = {}
    for name, (kind, keywords) in MIXERS.items():
        make = partial(getattr(layers, kind), 48, 2, **keywords)
        cases[f"layers/{name}/new"] = partial(first_weights, make=make)
        for how in ("plain", "split", "packed", "tokens", "bfloat16", "bfloat16 packed", "autocast"):
            cases[f"layers/{name}/{how}"] = partial(run_mixer, make=make, how=how)
            if device == "cuda" and keywords.keys() <= HEADS.keys() | {"decay_rank", "gate_rank", "beta_scale"}:
                wide = keywords | {"key_dim": 128, "value_dim": 128} if "key_dim" in keywords else keywords
                cases[f"layers/{name}/{how} wide"] = partial(
                    run_mixer, make=partial(getattr(layers, kind), 256, 2, **wide), how=how, width=256, t=4096
                )
    for name, (kind, sizes, keywords) in FEEDS.items():
        make = partial(getattr(layers, kind), *sizes, **keywords)
        cases[f"layers/{name}/new"] = partial(first_weights, make=make)
        for how in ("plain", "bfloat16", "autocast"):
            cases[f"layers/{name}/{how}"] = partial(run_feed, make=make, how=how)
    return cases
