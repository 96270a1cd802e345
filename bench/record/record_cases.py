"""The calls of bench/record/record.py that run ops and decoding.

A case is a function of a Draw, which makes its random numbers, and returns tensors, texts and numbers in any nesting.
Names are "kind/what/how". Cases use only public names of lineate, so that its modules may move.
"""

import hashlib
import importlib
import os
import pkgutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import lineate

Case = Callable[["Draw"], Any]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class Draw:
    """Random tensors of one case, which are the same in every process, whichever cases run before it."""

    def __init__(self, name: str, device: str) -> None:
        self.seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        self.generator = torch.Generator().manual_seed(self.seed)
        self.device = device

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return numbers drawn from N(0, 1)."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.device, dtype)

    def ids(self, *shape: int, most: int = 90) -> Tensor:
        """Return token ids from 3 on."""
        return torch.randint(3, most, shape, generator=self.generator).to(self.device)


def make_cases(device: str, triton: bool) -> dict[str, Case]:
    """Return all cases by name."""
    from record_layers import layer_cases, memory_cases
    from record_models import command_cases, model_cases

    cases = op_cases(device) | decode_cases(device) | memory_cases(device) | layer_cases(device) | model_cases(device)
    if device == "cpu":
        cases |= command_cases()
    return cases | interpreted_cases() if triton else cases


def find(name: str, package: str) -> Any:
    """Return a function of this name from anywhere in a package, because its modules may have moved."""
    root = importlib.import_module(package)
    inside = pkgutil.walk_packages(root.__path__, package + ".")
    for module in (root, *(importlib.import_module(x.name) for x in inside if ".kernels" not in x.name)):
        found = vars(module).get(name)
        if callable(found):
            return found
    raise ImportError(f"there is no {name} in {package}")


def gradients(draw: Draw, results: list[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the gradients of a sum of all results with random weights."""
    wanted = [x for x in results if x.requires_grad]
    weights = [draw(*x.shape, dtype=x.dtype) for x in wanted]
    found = torch.autograd.grad(wanted, list(leaves.values()), weights, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


# The ops -------------------------------------------------------------------------------------------------------------

# name: the op, its decay ("", "head" or "channel"), whether it takes beta
RULES = {
    "linear_attention": ("linear_attention", "", False),
    "gated_linear_attention": ("gated_linear_attention", "head", False),
    "gated_linear_attention per channel": ("gated_linear_attention", "channel", False),
    "delta_rule": ("delta_rule", "", True),
    "gated_delta_rule": ("gated_delta_rule", "head", True),
    "kimi_delta_attention": ("kimi_delta_attention", "channel", True),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"packed": True},
    "state": {"state": True},
    "normalize_qk": {"normalize_qk": True},
    "grouped": {"group": 3},
    "views": {"views": True},
    "resets": {"resets": True},
    "all": {"packed": True, "state": True, "normalize_qk": True, "group": 2},
}
PATHS = [
    ("recurrent", "torch"), ("chunkwise", "torch"), ("parallel", "torch"), ("chunkwise", "native"), ("auto", "auto"),
]  # fmt: skip
SIZES = {"b": 2, "t": 150, "h": 2, "k": 24, "v": 20}
TOKEN = SIZES | {"b": 3, "t": 1}
WIDE = {"b": 1, "t": 4133, "h": 2, "k": 128, "v": 128}
"""Sizes for a GPU, with heads that its own kernels support."""
MEDIUM, ODD = WIDE | {"k": 64, "v": 64}, WIDE | {"t": 1061, "k": 60, "v": 100}
FEATURES: dict[str, dict[str, Any]] = {
    "elu+1": {"feature_map": "elu+1"},
    "normalize": {"feature_map": "elu+1", "normalize": True},
    "function": {"feature_map": lambda x: torch.cat((x.relu(), (-x).relu()), -1), "normalize": True},
}


def inputs(
    draw: Draw, rule: str, dtype: torch.dtype, sizes: dict[str, int], *, packed: bool = False, state: bool = False,
    group: int = 1, views: bool = False, resets: bool = False, grad: bool = True, more: int = 0, features: int = 1,
) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """Return the tensors of a call, which are leaves, and its keywords.

    more: the columns of a state besides those of v.
    """
    _, decay, beta = RULES[rule]
    b, t, h, k, v = sizes.values()
    if packed:
        b, t = 1, b * t
    hv = h * group
    q, keys, values = draw(b, t, h, k), F.normalize(draw(b, t, h, k), dim=-1), draw(b, t, hv, v)
    if views:  # as slices of a layer's fused projection
        whole = torch.cat((q.flatten(2), keys.flatten(2), values.flatten(2)), -1)
        split = zip(whole.split((h * k, h * k, hv * v), -1), (k, k, v), strict=True)
        q, keys, values = (x.unflatten(2, (-1, n)) for x, n in split)
    named = {"q": q, "k": keys, "v": values}
    if decay:
        named["log_decay"] = F.logsigmoid(draw(b, t, hv, *(k,) * (decay == "channel")) + 3)
    if beta:
        named["beta"] = draw(b, t, hv).sigmoid() * (1.9 if resets else 1)
    if resets and decay:
        named["log_decay"][:, ::7], named["log_decay"][:, 1::9] = -50.0, 0.0
    named = {name: x.to(dtype) for name, x in named.items()}
    keywords: dict[str, Any] = {}
    if packed:
        keywords["cu_seqlens"] = torch.tensor([0, 1, 1, 2 * t // 5, t], device=draw.device)
    if state:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        named["state"] = 0.3 * draw(4 if packed else b, hv, k * features, v + more, dtype=wide)
    if grad:
        named = {name: x.requires_grad_() for name, x in named.items()}
    return named, keywords


def run_op(
    draw: Draw, rule: str, dtype: str = "float32", sizes: dict[str, int] = SIZES, variant: str = "plain",
    grad: bool = True, autocast: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Return output, state and all gradients of one op."""
    drawn = dict(VARIANTS[variant])
    normalize_qk = drawn.pop("normalize_qk", False)
    if "feature_map" in options:
        drawn |= {
            "more": int(options.get("normalize", False)),
            "features": 2 if callable(options["feature_map"]) else 1,
        }
    named, keywords = inputs(draw, rule, DTYPES[dtype], sizes, grad=grad, **drawn)
    with torch.autocast(draw.device, torch.bfloat16, enabled=autocast), torch.set_grad_enabled(grad):
        found = getattr(lineate, RULES[rule][0])(**named, **keywords, normalize_qk=normalize_qk, **options)
    return found._asdict() | {"grads": gradients(draw, list(found), named) if grad else None}


def op_cases(device: str) -> dict[str, Case]:
    """Return cases of every op, form, backend, variant and dtype."""
    cases: dict[str, Case] = {}
    gpu = device == "cuda"
    paths = [("chunkwise", "triton"), ("chunkwise", "torch"), ("auto", "auto")] if gpu else PATHS
    for rule in RULES:
        for form, backend in paths:
            path = {"form": form, "backend": backend}
            where = f"ops/{rule}/{form} {backend}"
            for variant in VARIANTS:
                for dtype in ("bfloat16", "float32") if gpu else DTYPES:
                    slow = backend == "torch" and (gpu or dtype != "float32")
                    if (slow or (dtype == "float64" and backend == "native")) and variant not in ("plain", "all"):
                        continue
                    shape = {"sizes": WIDE} if gpu else {}
                    cases[f"{where} {variant} {dtype}"] = partial(
                        run_op, rule=rule, dtype=dtype, variant=variant, **shape, **path
                    )
                for size, sizes in (("64", MEDIUM), ("60x100", ODD)) if gpu and backend == "triton" else ():
                    cases[f"{where} {variant} bfloat16 {size}"] = partial(
                        run_op, rule=rule, dtype="bfloat16", variant=variant, sizes=sizes, **path
                    )
            cases[f"{where} autocast"] = partial(run_op, rule=rule, autocast=True, variant="all", **path)
            cases[f"{where} forward alone"] = partial(run_op, rule=rule, grad=False, variant="all", **path)
        for backend in ("triton", "torch") if gpu else ("native", "torch", "auto"):
            for dtype in ("bfloat16", "float32"):
                for variant in ("state", "grouped", "all"):
                    cases[f"ops/{rule}/recurrent {backend} forward {variant} {dtype}"] = partial(
                        run_op, rule=rule, dtype=dtype, grad=False, variant=variant, form="recurrent", backend=backend
                    )
                cases[f"ops/{rule}/token {backend} {dtype}"] = partial(
                    run_op, rule=rule, dtype=dtype, grad=False, sizes=TOKEN, variant="state", backend=backend
                )
        for form in ("chunkwise", "auto"):
            cases[f"ops/{rule}/{form} scale and chunk size"] = partial(
                run_op, rule=rule, form=form, scale=0.7, chunk_size=16, variant="state"
            )
        cases[f"matrix/{rule}"] = partial(run_matrix, rule=rule)
        cases[f"matrix/{rule} grouped"] = partial(run_matrix, rule=rule, group=2)
        cases[f"explain/{rule}"] = partial(explain, rule=rule)
        cases[f"transforms/{rule}"] = partial(transform, rule=rule)
    for form, backend in paths:
        for name, options in FEATURES.items():
            for variant in ("plain", "all"):
                cases[f"ops/linear_attention {name}/{form} {backend} {variant}"] = partial(
                    run_op, rule="linear_attention", variant=variant, form=form, backend=backend, **options
                )
    for variant in ("plain", "packed", "normalize_qk", "grouped", "views", "state"):
        for dtype in DTYPES:
            cases[f"ops/softmax_attention/{variant} {dtype}"] = partial(run_softmax, variant=variant, dtype=dtype)
    for rule in ("delta_rule", "gated_delta_rule"):
        cases[f"ops/{rule}/beta per value channel"] = partial(rate_per_channel, rule=rule)
    for name, wrong in WRONG.items():
        cases[f"messages/{name}"] = partial(refuse, wrong=wrong)
    return cases


def run_matrix(draw: Draw, rule: str, group: int = 1) -> Any:
    named, _ = inputs(draw, rule, torch.float32, SIZES | {"t": 60}, group=group)
    del named["v"]
    found = lineate.attention_matrix(**named, normalize_qk=True, scale=0.5)
    return {"matrix": found, "grads": gradients(draw, [found], named)}


def run_softmax(draw: Draw, variant: str, dtype: str) -> Any:
    drawn = dict(VARIANTS[variant])
    normalize_qk, state = drawn.pop("normalize_qk", False), drawn.pop("state", False)
    named, keywords = inputs(draw, "linear_attention", DTYPES[dtype], SIZES, **drawn)
    op = partial(lineate.softmax_attention, normalize_qk=normalize_qk, **keywords)
    found = op(**named)
    if state:
        found = op(**{name: x[:, :9] for name, x in named.items()}, state=found.state)
    return {"found": found, "grads": gradients(draw, [found.output, *found.state[:2]], named)}


def explain(draw: Draw, rule: str) -> Any:
    """Return the answers of lineate.explain for all forms and backends, whether or not Triton's interpreter is on."""
    with patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        return plans(draw, rule)


def plans(draw: Draw, rule: str) -> dict[str, str]:
    said = {}
    for t in (1, 150):
        for grad in (False, True):
            for dtype in DTYPES:
                named, _ = inputs(draw, rule, DTYPES[dtype], SIZES | {"t": t}, grad=grad)
                for form in ("auto", "recurrent", "chunkwise", "parallel"):
                    for backend in ("auto", "torch", "native", "triton"):
                        try:
                            text = str(lineate.explain(**named, form=form, backend=backend))
                        except ValueError as error:
                            text = f"ValueError: {error}"
                        said[f"t={t} grad={grad} {dtype} {form} {backend}"] = text
    return said


def transform(draw: Draw, rule: str) -> Any:
    """Return first and second derivatives of the torch forms, by torch.func."""
    named, _ = inputs(draw, rule, torch.float32, SIZES | {"t": 40})
    leaves = tuple(x.detach() for x in named.values())
    op = getattr(lineate, RULES[rule][0])

    def total(*tensors: Tensor, **options: Any) -> Tensor:
        return op(*tensors, normalize_qk=True, **options).output.square().sum()

    pushed = torch.func.jvp(lambda q: op(q, *leaves[1:]).output, (leaves[0],), (draw(*leaves[0].shape),))
    rows = tuple(torch.stack((x, x.flip(1))) for x in leaves)
    once = torch.autograd.grad(total(*named.values(), form="parallel"), list(named.values()), create_graph=True)
    twice = torch.autograd.grad(sum(x.square().sum() for x in once), list(named.values()))
    return {
        "jvp": pushed, "grad": torch.func.grad(total, tuple(range(len(leaves))))(*leaves),
        "vmap": torch.func.vmap(lambda *x: op(*x).output)(*rows), "twice": dict(zip(named, twice, strict=True)),
    }  # fmt: skip


def rate_per_channel(draw: Draw, rule: str) -> Any:
    named, _ = inputs(draw, rule, torch.float32, SIZES)
    named["beta"] = draw(*named["v"].shape).sigmoid().requires_grad_()
    found = getattr(lineate, rule)(**named, normalize_qk=True)
    return {"found": found, "grads": gradients(draw, list(found), named)}


# Calls that must be refused: each changes one thing about a call of gated_delta_rule.
WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "beta's shape": lambda x: {"beta": x["beta"][:, :-1]},
    "decay's shape": lambda x: {"log_decay": x["log_decay"][..., None]},
    "decay above 0": lambda x: {"log_decay": -x["log_decay"]},
    "heads": lambda x: {"v": x["v"][:, :, :1]},
    "dtypes": lambda x: {"v": x["v"].double()},
    "a list": lambda x: {"q": x["q"].tolist()},
    "form": lambda x: {"form": "chunked"},
    "backend": lambda x: {"backend": "cuda"},
    "chunk size": lambda x: {"chunk_size": 0},
    "state's shape": lambda x: {"state": x["q"].new_zeros(2, 2, 24, 24)},
    "state's dtype": lambda x: {"state": x["q"].new_zeros(2, 2, 24, 20, dtype=torch.float64)},
    "bounds": lambda x: {"cu_seqlens": torch.tensor([0, 10, 5, 150], device=x["q"].device)},
    "scale": lambda x: {"scale": "1"},
    "flag": lambda x: {"normalize_qk": 1},
}


def refuse(draw: Draw, wrong: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    named, _ = inputs(draw, "gated_delta_rule", torch.float32, SIZES, grad=False)
    return lineate.gated_delta_rule(**(named | wrong(named)))


# Decoding and raw gates ----------------------------------------------------------------------------------------------

DECODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalize_qk": {"normalize_qk": True, "scale": 0.4},
    "packed": {"packed": True},
    "slots": {"slots": [4, 0, 2]},
    "idle slots": {"slots": [4, -1, 2], "start_slots": [1, 1, -1]},
    "slot a token": {"slots": [[0, 1, 2], [3, -1, 4], [5, 6, 7]], "start_slots": [8, 9, 8]},
    "raw gates": {"raw_gates": True, "beta_scale": 2.0},
    "grouped": {"group": 2, "raw_gates": True, "normalize_qk": True},
}


def run_decode(draw: Draw, rule: str, how: dict[str, Any], dtype: str, backend: str, width: int = 24) -> Any:
    """Return the output, and the memory after the call."""
    how = dict(how)
    packed, group = how.pop("packed", False), how.pop("group", 1)
    named, keywords = inputs(
        draw, rule, DTYPES[dtype], {"b": 3, "t": 3, "h": 2, "k": width, "v": width}, packed=packed, group=group,
        grad=False,
    )  # fmt: skip
    hv = named["v"].shape[2]
    decay = named.get("log_decay")
    if how.get("raw_gates") and decay is not None:
        keywords |= {"A_log": draw(hv), "dt_bias": draw(*decay.shape[2:])}
    if named.get("beta") is None:
        how.pop("beta_scale", None)
    for name in ("slots", "start_slots"):
        if name in how:
            how[name] = torch.tensor(how[name], device=draw.device)
    wide = torch.float64 if dtype == "float64" else torch.float32
    rows = 10 if "slots" in how else 4 if packed else 3
    state = 0.3 * draw(rows, hv, width, width, dtype=wide)
    output = lineate.decode(**named, state=state, backend=backend, **keywords, **how)
    return {"output": output, "state": state}


def run_fused(
    draw: Draw, rule: str, variant: str, dtype: str, backend: str, sizes: dict[str, int] = SIZES, bias: bool = True
) -> Any:
    """Run lineate.fused_delta_rule forward and backward."""
    drawn = dict(VARIANTS[variant])
    drawn.pop("normalize_qk", None)
    named, keywords = inputs(draw, rule, DTYPES[dtype], sizes, **drawn)
    gate = draw(*named.pop("log_decay").shape, dtype=DTYPES[dtype])
    named |= {"gate": gate, "write": draw(*named.pop("beta").shape, dtype=DTYPES[dtype]), "A_log": draw(gate.shape[2])}
    if bias:
        named["dt_bias"] = draw(*gate.shape[2:])
    named = {name: x.detach().requires_grad_() for name, x in named.items()}
    found = lineate.fused_delta_rule(**named, **keywords, beta_scale=2.0, backend=backend)
    return found._asdict() | {"grads": gradients(draw, list(found), named)}


def decode_cases(device: str) -> dict[str, Case]:
    """Return cases of lineate.decode and lineate.fused_delta_rule."""
    cases: dict[str, Case] = {}
    gpu = device == "cuda"
    for rule in RULES:
        for name, how in DECODES.items():
            if how.get("raw_gates") and rule == "linear_attention":  # linear attention has no gates
                continue
            for dtype in ("float32", "bfloat16") if gpu or name != "plain" else DTYPES:
                for backend in ("triton", "torch") if gpu else ("auto",):
                    cases[f"decode/{rule}/{name} {backend} {dtype}"] = partial(
                        run_decode, rule=rule, how=how, dtype=dtype, backend=backend, width=128 if gpu else 24
                    )
    for rule in ("gated_delta_rule", "kimi_delta_attention"):
        for variant in ("plain", "packed", "state", "grouped", "all"):
            for dtype in ("float32", "bfloat16"):
                for backend in ("auto",) if gpu else ("auto", "torch", "native"):
                    cases[f"fused/{rule}/{variant} {backend} {dtype}"] = partial(
                        run_fused, rule=rule, variant=variant, dtype=dtype, backend=backend, bias=variant != "state",
                        **({"sizes": WIDE} if gpu else {}),
                    )  # fmt: skip
    return cases


def interpreted_cases() -> dict[str, Case]:
    """Return small cases of kernels in Triton's interpreter."""
    cases: dict[str, Case] = {}
    sizes = {"b": 1, "t": 75, "h": 1, "k": 12, "v": 9}
    for rule in RULES:
        for variant in ("plain", "packed", "resets", "all"):
            cases[f"interpreter/{rule}/chunkwise {variant}"] = partial(
                run_op, rule=rule, sizes=sizes, variant=variant, form="chunkwise", backend="triton"
            )
        cases[f"interpreter/{rule}/recurrent"] = partial(
            run_op, rule=rule, sizes=sizes | {"t": 9}, variant="all", form="recurrent", backend="triton", grad=False
        )
        for name, how in DECODES.items():
            if how.get("raw_gates") and rule == "linear_attention":
                continue
            cases[f"interpreter/{rule}/decode {name}"] = partial(
                run_decode, rule=rule, how=how, dtype="float32", backend="triton", width=9
            )
    for rule in ("gated_delta_rule", "kimi_delta_attention"):
        cases[f"interpreter/{rule}/fused"] = partial(
            run_fused, rule=rule, variant="all", dtype="float32", backend="triton", sizes=sizes
        )
    return cases
