"""The contestants of the benchmarks: the inputs of each rule, our ops, and other packages' versions of them.

RuleInputs are like those of a trained layer: unit q and k, beta in (0, 1), a log_decay of about -0.05 per token.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from bench.timing import Call
from lineate.figures import kind_named
from lineate.rule import ONE_KEY_RULES, DecayShape, Rule


def _words() -> Iterator[tuple[str, tuple[Rule, DecayShape]]]:
    for rule in ONE_KEY_RULES:
        kind = kind_named(rule.name)
        word = (kind.short or kind.name).removesuffix("net")  # "deltanet" is "delta" in the results
        for decay in rule.decays:
            also = len(rule.decays) > 1 and decay == "channel"
            yield (f"{word} per channel" if also else word), (rule, decay)


EQUATION: dict[str, tuple[Rule, DecayShape]] = dict(_words())
"""The rules by their names in the results, and the decay with which each is measured."""
OPS: dict[str, Callable[..., Any]] = {word: getattr(lineate, rule.name) for word, (rule, _) in EQUATION.items()}
"""The public op of each rule."""
RULE_WORDS = (*OPS, "softmax")


@dataclass(frozen=True)
class RuleInputs:
    """The arguments of one rule: q, k `b t h k`; v `b t hv v`; the gates it takes; a state `b hv k v` or None."""

    rule: str
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    state: Tensor | None = None

    @property
    def gates(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.log_decay, self.beta) if x is not None)

    def first(self, t: int) -> "RuleInputs":
        """Return the inputs of the first t tokens, without a copy."""
        return self.map(lambda y: y[:, :t])

    def map(self, change: Callable[[Tensor], Tensor]) -> "RuleInputs":
        """Return the inputs with `change` applied to every tensor except the state."""
        q, k, v = (change(y) for y in (self.q, self.k, self.v))
        log_decay, beta = (None if y is None else change(y) for y in (self.log_decay, self.beta))
        return RuleInputs(self.rule, q, k, v, log_decay, beta, self.state)


def make_inputs(
    rule: str,
    t: int,
    *,
    b: int = 1,
    h: int = 16,
    hv: int = 16,
    dim: int = 128,
    dtype: torch.dtype = torch.float32,
    with_state: bool = False,
    resets: bool = False,
) -> RuleInputs:
    """Return random inputs, the same every time; log_decay stays float32, as in models.

    With resets every 16th log_decay is -50.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (F.normalize(normal(b, t, h, dim), dim=-1).to(dtype) for _ in range(2))
    v = normal(b, t, hv, dim).to(dtype)
    equation, decay = EQUATION.get(rule, (None, "none"))
    beta = normal(b, t, hv).sigmoid().to(dtype) if equation is not None and equation.corrects else None
    log_decay = None
    if decay == "head":
        log_decay = F.logsigmoid(normal(b, t, hv) + 3)
    elif decay == "channel":
        log_decay = F.logsigmoid(normal(b, t, hv, dim) + 3)
    if resets and log_decay is not None:
        log_decay[:, ::16] = -50.0
    state = normal(b, hv, dim, dim) if with_state else None
    return RuleInputs(rule, q, k, v, log_decay, beta, state)


@cache
def transformers_functions() -> dict[str, Callable[..., Any]]:
    """Return transformers' own torch fallbacks, without the wrapper that may swap in kernels.

    The result is empty if transformers is not installed.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers.models.kimi_linear import modeling_kimi_linear as kimi
            from transformers.models.qwen3_next import modeling_qwen3_next as qwen
        except ImportError:
            return {}
    return {
        "gdn chunk": inspect.unwrap(qwen.torch_chunk_gated_delta_rule),
        "gdn recurrent": inspect.unwrap(qwen.torch_recurrent_gated_delta_rule),
        "kda chunk": inspect.unwrap(kimi.chunk_kimi_delta_attention),
        "kda recurrent": inspect.unwrap(kimi.recurrent_kimi_delta_attention),
    }


def ours(x: RuleInputs, **options: Any) -> Call:
    """Return a call of the public op; options are its keywords."""
    if x.rule == "softmax":
        return lambda: lineate.softmax_attention(x.q, x.k, x.v, **options)
    return lambda: OPS[x.rule](x.q, x.k, x.v, *x.gates, state=x.state, **options)


def ours_in_torch(x: RuleInputs) -> Call:
    """Return a call of the public op without native code."""
    return ours(x, backend="torch")


def theirs(x: RuleInputs, form: str = "chunk") -> Call | None:
    """Return a call of transformers' fallback, "chunk" or "recurrent"; None if it has none for this rule.

    For DeltaNet, this is its gated rule without decay.
    """
    function = transformers_functions().get(f"{'gdn' if x.rule == 'delta' else x.rule} {form}")
    if function is None:
        return None
    log_decay = torch.zeros_like(x.v[..., 0], dtype=torch.float32) if x.log_decay is None else x.log_decay
    group = x.v.shape[2] // x.q.shape[2]

    def call() -> Any:
        q, k = (y if group == 1 else y.repeat_interleave(group, dim=2) for y in (x.q, x.k))  # as its models do
        return function(q, k, x.v, log_decay, x.beta, initial_state=x.state, output_final_state=True)

    return call


def token_loop(x: RuleInputs) -> Call:
    """Return a call of the equation as one would first write it, as a loop over tokens."""

    def call() -> tuple[Tensor, Tensor]:
        b, t, h, dim = x.q.shape  # h = hv
        state = torch.zeros(b, h, dim, x.v.shape[-1]) if x.state is None else x.state
        outputs = []
        for i in range(t):
            q, k, v = x.q[:, i] * dim**-0.5, x.k[:, i], x.v[:, i]
            if x.log_decay is not None:
                state = x.log_decay[:, i].exp().reshape(b, h, -1, 1) * state
            if x.beta is not None:
                v = x.beta[:, i, :, None] * (v - torch.einsum("bhk,bhkv->bhv", k, state))
            state = state + k[..., None] * v[..., None, :]
            outputs.append(torch.einsum("bhk,bhkv->bhv", q, state))
        return torch.stack(outputs, dim=1), state

    return call


def in_pieces(x: RuleInputs, size: int) -> Call:
    """Return a call of ours that takes one piece after another, each from the state that the previous one left."""

    def call() -> tuple[Tensor, Tensor | None]:
        state, outputs = x.state, []
        for start in range(0, x.q.shape[1], size):
            q, k, v, *gates = (y[:, start : start + size] for y in (x.q, x.k, x.v, *x.gates))
            output, state = OPS[x.rule](q, k, v, *gates, state=state)
            outputs.append(output)
        return torch.cat(outputs, dim=1), state

    return call


def one_by_one(x: RuleInputs) -> Call:
    """Return a call of ours for one row of the batch and one value head at a time."""

    def call() -> tuple[Tensor, Tensor]:
        (b, _, h), hv = x.q.shape[:3], x.v.shape[2]
        rows = []
        for i in range(b):
            heads = []
            for j in range(hv):
                own, key_head = (slice(i, i + 1), slice(None), slice(j, j + 1)), j * h // hv
                q, k = (y[i : i + 1, :, key_head : key_head + 1] for y in (x.q, x.k))
                heads.append(OPS[x.rule](q, k, x.v[own], *(y[own] for y in x.gates)))
            rows.append((torch.cat([y[0] for y in heads], dim=2), torch.cat([y[1] for y in heads], dim=1)))
        return torch.cat([y[0] for y in rows]), torch.cat([y[1] for y in rows])

    return call


def sdpa(x: RuleInputs) -> Call:
    """Return a call of torch's scaled_dot_product_attention, causal, in the layout that suits it best."""
    q, k, v = (y.transpose(1, 2).contiguous() for y in (x.q, x.k, x.v))  # b h t k
    return lambda: (F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2),)


def forward(call: Call | None) -> Call | None:
    """Return the call without gradients, or None if there is no call."""
    return None if call is None else torch.no_grad()(call)


def forward_backward(make: Callable[[RuleInputs], Call | None], x: RuleInputs) -> Call | None:
    """Return a call that adds the gradients of all inputs, for a fixed random gradient of the output."""
    x = x.map(lambda y: y.detach().requires_grad_())
    leaves = (x.q, x.k, x.v, *x.gates)
    call = make(x)
    weight = torch.randn(x.v.shape, generator=torch.Generator().manual_seed(1)).to(x.v.dtype)
    if call is None:
        return None

    def train() -> list[Tensor]:
        output = call()[0]
        return [output.detach(), *torch.autograd.grad(output, leaves, weight)]

    return train


def tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    return [] if result is None else [y for part in result for y in tensors(part)]


def difference(got: Any, want: Any) -> tuple[float, float]:
    """Return the largest absolute difference of two results, and the largest relative to its tensor's largest entry."""
    absolute = relative = 0.0
    for a, b in zip(tensors(got), tensors(want), strict=False):  # SDPA returns no state
        if a.shape != b.shape or not bool(a.isfinite().all()):
            return float("inf"), float("inf")
        error = float((a.float() - b.float()).abs().max())
        absolute, relative = max(absolute, error), max(relative, error / max(float(b.abs().max()), 1e-30))
    return absolute, relative
