"""The steps of the reference: the gradient of one pair, the update of each optimiser, and the end of a chunk."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lineate.memory.parts import NamedWeights, clip, orthogonalise, renormalise, row_norms
from lineate.memory.rules import MemoryRule, MemoryState


def gradient(rule: MemoryRule, at: NamedWeights, k: Tensor, v: Tensor) -> NamedWeights:
    """Return the gradient of one pair's loss with respect to the learned weights, itself differentiable.

    Args:
        rule: The memory.
        at: The weights at which the gradient is taken.
        k: The key `k`.
        v: The value `v`.
    """
    names = rule.model.learned
    outer = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: the gradient goes only through the loss's own use of the weights, even if k and v depend on them.
        point = [at[name].view_as(at[name]) for name in names]
        point = [x if x.requires_grad else x.detach().requires_grad_() for x in point]
        loss = rule.loss(rule.model, {**at, **dict(zip(names, point, strict=True))}, k, v)
        _check_loss(rule, loss)
        found = torch.autograd.grad(loss, point, create_graph=outer)
    gradients = dict(zip(names, found, strict=True))
    return gradients if rule.clip is None else clip(gradients, rule.clip)


def _check_loss(rule: MemoryRule, loss: Tensor) -> None:
    """Check that the result of a loss is one number that depends on the learned weights."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss of {rule.name} must return a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"loss of {rule.name} must return one number, got shape {tuple(loss.shape)}; sum it")
    if not loss.requires_grad:
        raise ValueError(
            f"loss of {rule.name} must depend on {', '.join(rule.model.learned)}, which {rule.model.name} learns; "
            "it is called as (model, weights, k, v) and reads model(weights, k)"
        )


def _sgd(
    rule: MemoryRule, k: Tensor, v: Tensor, gates: NamedWeights, weights: NamedWeights, state: MemoryState
) -> MemoryState:
    """Take W = decay W - rate G; with momentum M = eta M - rate G, W = decay W + M; or a function's steps."""
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
        result = rule.optimiser(gradients, state.momentum, gates)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise TypeError(
                f"optimiser must return a pair, got {type(result).__name__}; "
                "it is called as (gradients, carried, gates) -> (steps, carried)"
            )
        steps, momentum = result
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
    """Add to the sums only; the weights are written at the end of the chunk."""
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


def take_step(
    rule: MemoryRule, k: Tensor, v: Tensor, gates: NamedWeights, weights: NamedWeights, state: MemoryState
) -> MemoryState:
    """Return the state after one token.

    Args:
        rule: The memory.
        k: The key `k`.
        v: The value `v`.
        gates: The token's gates by name.
        weights: The initial weights.
        state: The state before the token.
    """
    step = STEPS[rule.optimiser] if isinstance(rule.optimiser, str) else _sgd
    return step(rule, k, v, gates, weights, state)


def end_chunk(rule: MemoryRule, weights: NamedWeights, state: MemoryState) -> MemoryState:
    """Return the state at the start of the next chunk."""
    if rule.optimiser == "muon":
        mean = state.sums["momentum"] / rule.chunk
        changes = {name: state.sums[name] + mean * state.momentum[name] for name in rule.model.learned}
        new = {**state.start, **{name: state.start[name] + orthogonalise(x) for name, x in changes.items()}}
        if rule.renormalises:
            new.update({name: renormalise(new[name], row_norms(weights[name])) for name in rule.model.learned})
        return MemoryState(new, new, zeros_like(state.sums), changes)
    return MemoryState(state.weights, state.weights, zeros_like(state.sums), state.momentum, state.hessian)


def _rate(gates: Mapping[str, Tensor], name: str) -> Tensor | float:
    return gates.get(f"rate.{name}", gates.get("rate", 1.0))


def zeros_like(tensors: NamedWeights) -> NamedWeights:
    """Return zeros by the same names."""
    return {name: torch.zeros_like(x) for name, x in tensors.items()}
