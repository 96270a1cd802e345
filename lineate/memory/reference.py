"""The sequential reference: take the gradient, take the step. For clarity, not for speed.

For each token, from the weights W and W0, those at the start of its chunk:

    W' = decay W                                        forget
    G  = gradient of loss(f, k_t, v_t) at W' or at W0   compare (autograd)
    W  = W' - rate_t G, or the rule's optimiser         write: a named one, or any function (parts.Optimiser)
    y_t = f(q_t) with W (or with W0: "apply, then update")   read

Everything differentiates, through the inner gradients too. Gates, by name:

    rate         `t`: the step size beta, theta, eta or lr (absent: 1); "rate.W1" `t` for one weight alone
    log_decay    `t`, or `t k` for the rows of S: log of what is kept (Titans: log(1 - alpha))
    momentum     `t`: eta_t of Titans; LaCT takes the mean over the chunk
    position     `c`, the same for all tokens: TTT's learned_t, in max(0, 1/t + learned_t), t = 1 .. c in the chunk

A rule whose optimiser is a function takes gates of any name: they are the function's to read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from lineate import checks
from lineate.memory.chunks import check_chunk
from lineate.memory.parts import (
    Loss,
    MemoryModel,
    NamedWeights,
    Optimiser,
    check_name,
    clip,
    orthogonalise,
    renormalise,
    row_norms,
)
from lineate.names import nearest


@dataclass(frozen=True)
class MemoryRule:
    """One row of the table: model x loss x optimiser x forgetting x chunk."""

    name: str
    """What it is called in tables and messages."""
    model: MemoryModel
    """f."""
    loss: Loss
    """Any function of (model, weights, k, v); its gradient is taken by autograd."""
    optimiser: Literal["sgd", "positioned sgd", "momentum", "muon", "least squares"] | Optimiser = "sgd"
    """positioned: W_t = W0 - max(0, 1/t + learned_t) sum_s rate_s G_s; muon: once, at the end of the chunk.

    Or any function (gradients, carried, gates) -> (steps, carried): W = W' + steps, once a token.
    """
    forgetting: tuple[Literal["none", "head", "channel"], ...] = ("none",)
    """The shapes of log_decay it takes: per head `t`, per key channel `t k`."""
    chunk: int = 1
    """How many tokens share the weights at which the gradient is taken."""
    gradient_at: Literal["decayed", "start"] = "start"
    """The weights just decayed (chunk 1 only), or those at the start of the chunk."""
    clip: float | None = None
    """The largest length of one token's gradient over all weights."""
    renormalises: bool = False
    """Rows back to their initial lengths after each write."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.model, MemoryModel):
            raise TypeError(
                "model must be a lineate.memory.MemoryModel (MATRIX, AFFINE, TTT_MLP, MLP, SWIGLU, normed(model), "
                f"deep(n) or your own), got {type(self.model).__name__}"
            )
        if not callable(self.loss):
            raise TypeError(
                "loss must be a function of (model, weights, k, v): correlation, squared_error, reconstruction or your "
                f"own, got {self.loss!r}"
            )
        if not callable(self.optimiser) and self.optimiser not in tuple(STEPS):
            raise ValueError(
                f"optimiser must be one of {', '.join(map(repr, STEPS))}, or a function of (gradients, carried, "
                f"gates), got {self.optimiser!r}{nearest(str(self.optimiser), STEPS)}"
            )
        kinds = ("none", "head", "channel")
        if not isinstance(self.forgetting, tuple) or not self.forgetting:
            raise TypeError(
                f"forgetting must be a tuple of some of {', '.join(map(repr, kinds))}, got {self.forgetting!r}"
            )
        for kind in self.forgetting:
            checks.check_choice("forgetting", kind, kinds)
        check_chunk(self.chunk)
        checks.check_choice("gradient_at", self.gradient_at, ("decayed", "start"))
        if self.gradient_at == "decayed" and self.chunk != 1:
            raise ValueError(f"gradient_at='decayed' needs chunk=1, got {self.chunk}; use gradient_at='start'")
        if isinstance(self.clip, bool) or not isinstance(self.clip, int | float | None):
            raise TypeError(f"clip must be a number or None, got {type(self.clip).__name__}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0, got {self.clip}; None clips nothing")
        checks.check_flag("renormalises", self.renormalises)


@dataclass
class MemoryState:
    """Where one head stands (or, from run_reference, all: tensors `rows heads ...`, position `rows`)."""

    weights: NamedWeights
    """The weights after the last token."""
    start: NamedWeights
    """The weights at the start of the chunk."""
    sums: NamedWeights = field(default_factory=dict)
    """The sums of rate_s G_s over the chunk so far (positioned sgd, muon); muon also: "momentum", that of the gates."""
    momentum: NamedWeights = field(default_factory=dict)
    """S_t of Titans; the last chunk's dW of LaCT; what an optimiser that is a function carries."""
    hessian: Tensor | None = None
    """Least squares: sum of k k^T and the ridge, `k k`, the inverse of P."""
    position: int | Tensor = 0
    """How many tokens of the chunk are read."""


def run_head(
    rule: MemoryRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    weights: NamedWeights,
    state: MemoryState | None = None,
    ridge: float = 1.0,
) -> tuple[Tensor, MemoryState]:
    """Run one head of one sequence, token by token.

    Args:
        rule: The memory.
        q: Queries `t k`.
        k: Keys `t k`.
        v: Values `t v`.
        gates: The gates by name, `t ...` each; "position" is `c`.
        weights: The initial weights, which a rule that rescales rows also needs later.
        state: What an earlier call returned, to continue; None: no token was read.
        ridge: What least squares starts from.

    Returns:
        y `t v`, and the state.
    """
    if state is None:
        state = initial_state(rule, weights, k.shape[-1], ridge)
    outputs = []
    for i in range(k.shape[0]):
        now = {name: x if name == "position" else x[i] for name, x in gates.items()}
        step = STEPS[rule.optimiser] if isinstance(rule.optimiser, str) else _sgd
        state = step(rule, k[i], v[i], now, weights, state)
        read = state.start if rule.optimiser == "muon" else state.weights
        outputs.append(rule.model(read, q[i]))
        if state.position == rule.chunk:
            state = _end_chunk(rule, weights, state)
    return torch.stack(outputs) if outputs else v.new_zeros(0, v.shape[-1]), state


def initial_state(rule: MemoryRule, weights: NamedWeights, key_dim: int, ridge: float = 1.0) -> MemoryState:
    """Return the state before the first token.

    Args:
        rule: The memory.
        weights: The initial weights of one head.
        key_dim: Channels of a key.
        ridge: What least squares starts from.
    """
    learned = {name: weights[name] for name in rule.model.learned}
    state = MemoryState(weights, weights)
    if rule.optimiser in ("positioned sgd", "muon"):
        state.sums = _zeros(learned)
    if rule.optimiser in ("momentum", "muon") or not isinstance(rule.optimiser, str):
        state.momentum = _zeros(learned)
    if rule.optimiser == "muon":
        state.sums["momentum"] = next(iter(weights.values())).new_zeros(())
    if rule.optimiser == "least squares":
        first = next(iter(weights.values()))
        state.hessian = ridge * torch.eye(key_dim, dtype=first.dtype, device=first.device)
    return state


def gradient(rule: MemoryRule, at: NamedWeights, k: Tensor, v: Tensor) -> NamedWeights:
    """Return the gradient of one pair's loss by the learned weights, itself differentiable.

    Args:
        rule: The memory.
        at: The weights at which the gradient is taken.
        k: The key `k`.
        v: The value `v`.
    """
    names = rule.model.learned
    outer = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: only what the loss itself does with the weights counts, not what k and v may owe to them.
        point = [at[name].view_as(at[name]) for name in names]
        point = [x if x.requires_grad else x.detach().requires_grad_() for x in point]
        loss = rule.loss(rule.model, {**at, **dict(zip(names, point, strict=True))}, k, v)
        found = torch.autograd.grad(loss, point, create_graph=outer)
    gradients = dict(zip(names, found, strict=True))
    return gradients if rule.clip is None else clip(gradients, rule.clip)


def _sgd(
    rule: MemoryRule, k: Tensor, v: Tensor, gates: NamedWeights, weights: NamedWeights, state: MemoryState
) -> MemoryState:
    """Take W = decay W - rate G; with momentum M = eta M - rate G, W = decay W + M; or what a function steps."""
    kept = dict(state.weights)
    if "log_decay" in gates:
        decay = gates["log_decay"].exp()
        for name in rule.model.learned:
            kept[name] = (decay[:, None] if decay.dim() else decay) * kept[name]
    gradients = gradient(rule, kept if rule.gradient_at == "decayed" else state.start, k, v)
    momentum: NamedWeights = {}
    if isinstance(rule.optimiser, str):
        steps = {name: -_rate(gates, name) * x for name, x in gradients.items()}
        if rule.optimiser == "momentum":
            momentum = steps = {name: gates["momentum"] * state.momentum[name] + x for name, x in steps.items()}
    else:
        steps, momentum = rule.optimiser(gradients, state.momentum, gates)
        if set(steps) != set(gradients):
            raise ValueError(
                f"optimiser must return steps for {', '.join(gradients)}, got {', '.join(steps) or 'none'}; "
                "it is called as (gradients, carried, gates) -> (steps, carried)"
            )
    new = {**kept, **{name: kept[name] + x for name, x in steps.items()}}
    return MemoryState(new, state.start, {}, momentum, None, state.position + 1)


def _positioned(
    rule: MemoryRule, k: Tensor, v: Tensor, gates: NamedWeights, weights: NamedWeights, state: MemoryState
) -> MemoryState:
    """Take W_t = W0 - max(0, 1/t + learned_t) sum_{s <= t} rate_s G_s."""
    gradients = gradient(rule, state.start, k, v)
    sums = {name: state.sums[name] + _rate(gates, name) * x for name, x in gradients.items()}
    t = int(state.position) + 1
    factor: Tensor | float = 1 / t
    if "position" in gates:
        factor = (gates["position"][t - 1] + 1 / t).clamp(min=0)
    new = {**state.start, **{name: state.start[name] - factor * x for name, x in sums.items()}}
    return MemoryState(new, state.start, sums, {}, None, t)


def _muon(
    rule: MemoryRule, k: Tensor, v: Tensor, gates: NamedWeights, weights: NamedWeights, state: MemoryState
) -> MemoryState:
    """Add to the sums only: the write is at the end of the chunk."""
    gradients = gradient(rule, state.start, k, v)
    sums = {name: state.sums[name] - _rate(gates, name) * x for name, x in gradients.items()}
    sums["momentum"] = state.sums["momentum"] + gates.get("momentum", torch.zeros_like(state.sums["momentum"]))
    return MemoryState(state.start, state.start, sums, state.momentum, None, state.position + 1)


def _least_squares(
    rule: MemoryRule, k: Tensor, v: Tensor, gates: NamedWeights, weights: NamedWeights, state: MemoryState
) -> MemoryState:
    """Take H = lambda H + rate k k^T, S = S - H^-1 rate G: Newton's step, exact, since S was the minimum before."""
    assert state.hessian is not None
    hessian = state.hessian
    if "log_decay" in gates:
        hessian = gates["log_decay"].exp() * hessian
    rate = _rate(gates, "S")
    hessian = hessian + rate * k[:, None] * k
    step = torch.linalg.solve(hessian, rate * gradient(rule, state.weights, k, v)["S"])
    new = {"S": state.weights["S"] - step}
    return MemoryState(new, new, {}, {}, hessian, state.position + 1)


RuleStep = Callable[[MemoryRule, Tensor, Tensor, NamedWeights, NamedWeights, MemoryState], MemoryState]
STEPS: dict[str, RuleStep] = {
    "sgd": _sgd,
    "momentum": _sgd,
    "positioned sgd": _positioned,
    "muon": _muon,
    "least squares": _least_squares,
}
"""The optimisers that have a name."""


def _end_chunk(rule: MemoryRule, weights: NamedWeights, state: MemoryState) -> MemoryState:
    if rule.optimiser == "muon":
        mean = state.sums["momentum"] / rule.chunk
        changes = {name: state.sums[name] + mean * state.momentum[name] for name in rule.model.learned}
        new = {**state.start, **{name: state.start[name] + orthogonalise(x) for name, x in changes.items()}}
        if rule.renormalises:
            new.update({name: renormalise(new[name], row_norms(weights[name])) for name in rule.model.learned})
        return MemoryState(new, new, _zeros(state.sums), changes)
    return MemoryState(state.weights, state.weights, _zeros(state.sums), state.momentum, state.hessian)


def _rate(gates: Mapping[str, Tensor], name: str) -> Tensor | float:
    return gates.get(f"rate.{name}", gates.get("rate", 1.0))


def _zeros(tensors: NamedWeights) -> NamedWeights:
    return {name: torch.zeros_like(x) for name, x in tensors.items()}


def run_reference(
    rule: MemoryRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    weights: NamedWeights,
    state: MemoryState | None = None,
    cu_seqlens: Tensor | None = None,
    ridge: float = 1.0,
) -> tuple[Tensor, MemoryState]:
    """Run all rows and heads, token by token, with gradients by autograd: the oracle of all chunked forms.

    Args:
        rule: The memory: a row of MEMORY_RULES, a variant of one, or your own.
        q: Queries `b t h k`.
        k: Keys `b t h k`.
        v: Values `b t hv v`.
        gates: The gates by name, `b t hv ...` each; "position" is `c` or `hv c`.
        weights: The initial weights of each head, `hv ...`, or of each row and head, `rows hv ...`; matrices have two
            dimensions of their own, biases, gamma and beta one.
        state: What an earlier call returned, to continue; None: no token was read.
        cu_seqlens: The bounds of sequences packed into one row (b = 1), `n_seqs + 1`; the rows of the state are then
            these sequences.
        ridge: What least squares starts from.

    Returns:
        y `b t hv v`, and the state, whose tensors are `rows hv ...`.
    """
    _check_call(rule, gates, weights)
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    if cu_seqlens is None:
        sequences = [(row, 0, q.shape[1]) for row in range(q.shape[0])]
    else:
        sequences = [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    outputs, states = [], []
    for row, (b, start, end) in enumerate(sequences):
        by_head = []
        for head in range(heads):
            own_gates = {}
            for name, x in gates.items():
                if name == "position":
                    own_gates[name] = x[head] if x.dim() == 2 else x
                else:
                    own_gates[name] = x[b, start:end, head]
            y, after = run_head(
                rule,
                q[b, start:end, head // group],
                k[b, start:end, head // group],
                v[b, start:end, head],
                own_gates,
                {name: _of_head(name, x, row, head) for name, x in weights.items()},
                None if state is None else _select(state, row, head),
                ridge,
            )
            by_head.append(y)
            states.append(after)
        outputs.append(torch.stack(by_head, 1))  # t hv v
    y = torch.stack(outputs) if cu_seqlens is None else torch.cat(outputs)[None]
    return y, _gather(states, len(sequences), heads)


def _check_call(rule: MemoryRule, gates: Mapping[str, Tensor], weights: NamedWeights) -> None:
    """Check that the rule reads every gate, and that what it cannot do without is there."""
    if not isinstance(rule, MemoryRule):
        raise TypeError(f"rule must be a MemoryRule, such as MEMORY_RULES['DeltaNet'], got {type(rule).__name__}")
    known = ["rate", *(f"rate.{name}" for name in rule.model.learned)]
    known += ["log_decay"] * (rule.forgetting != ("none",))
    known += ["momentum"] * (rule.optimiser in ("momentum", "muon"))
    known += ["position"] * (rule.optimiser == "positioned sgd")
    for name in gates if isinstance(rule.optimiser, str) else ():
        if name not in known:
            raise ValueError(f"gates must be among {', '.join(known)} for {rule.name}, got {name!r}")
    if rule.optimiser == "momentum" and "momentum" not in gates:
        raise ValueError(f"gates must have 'momentum' for {rule.name}, got {', '.join(sorted(gates)) or 'none'}")
    if missing := [name for name in rule.model.learned if name not in weights]:
        given = ", ".join(weights) or "none"
        raise ValueError(f"weights must have {', '.join(missing)}, which {rule.model.name} learns, got {given}")


def _of_head(name: str, x: Tensor, row: int, head: int) -> Tensor:
    """Return one head's part of x `hv ...` or `rows hv ...`; biases, gamma and beta are vectors, all else matrices."""
    own = 1 if name.startswith("b") or name == "gamma" else 2
    return x[row, head] if x.dim() == own + 2 else x[head]


def _select(state: MemoryState, row: int, head: int) -> MemoryState:
    def own(tensors: NamedWeights) -> NamedWeights:
        return {name: x[row, head] for name, x in tensors.items()}

    return MemoryState(
        own(state.weights),
        own(state.start),
        own(state.sums),
        own(state.momentum),
        None if state.hessian is None else state.hessian[row, head],
        state.position if isinstance(state.position, int) else int(state.position[row]),
    )


def _gather(states: list[MemoryState], rows: int, heads: int) -> MemoryState:
    def stack(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors).unflatten(0, (rows, heads))

    def all_of(dicts: list[NamedWeights]) -> NamedWeights:
        return {name: stack([own[name] for own in dicts]) for name in dicts[0]}

    hessians = [state.hessian for state in states if state.hessian is not None]
    return MemoryState(
        all_of([state.weights for state in states]),
        all_of([state.start for state in states]),
        all_of([state.sums for state in states]),
        all_of([state.momentum for state in states]),
        stack(hessians) if hessians else None,
        torch.tensor([int(state.position) for state in states[::heads]], device="cpu"),
    )
