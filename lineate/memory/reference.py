"""The sequential reference: it takes the gradient and the step of each token, written for clarity, not for speed.

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

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from lineate.memory.parts import NamedWeights
from lineate.memory.rules import MemoryRule, MemoryState
from lineate.memory.steps import end_chunk, take_step, zeros_like


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
        state: The result of an earlier call, to continue; None: no token was read.
        ridge: The initial ridge of least squares.

    Returns:
        y `t v`, and the state.
    """
    if state is None:
        state = initial_state(rule, weights, k.shape[-1], ridge)
    outputs = []
    for i in range(k.shape[0]):
        now = {name: x if name == "position" else x[i] for name, x in gates.items()}
        state = take_step(rule, k[i], v[i], now, weights, state)
        read = state.start if rule.optimiser == "muon" else state.weights
        outputs.append(rule.model(read, q[i]))
        if state.position == rule.chunk:
            state = end_chunk(rule, weights, state)
    return torch.stack(outputs) if outputs else v.new_zeros(0, v.shape[-1]), state


def initial_state(rule: MemoryRule, weights: NamedWeights, key_dim: int, ridge: float = 1.0) -> MemoryState:
    """Return the state before the first token.

    Args:
        rule: The memory.
        weights: The initial weights of one head.
        key_dim: Channels of a key.
        ridge: The initial ridge of least squares.
    """
    learned = {name: weights[name] for name in rule.model.learned}
    state = MemoryState(weights, weights)
    if rule.optimiser in ("positioned sgd", "muon"):
        state.sums = zeros_like(learned)
    if rule.optimiser in ("momentum", "muon") or not isinstance(rule.optimiser, str):
        state.momentum = zeros_like(learned)
    if rule.optimiser == "muon":
        state.sums["momentum"] = next(iter(weights.values())).new_zeros(())
    if rule.optimiser == "least squares":
        first = next(iter(weights.values()))
        state.hessian = ridge * torch.eye(key_dim, dtype=first.dtype, device=first.device)
    return state


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
        weights: The initial weights of each head, `hv ...`, or of each row and head, `rows hv ...`; a weight whose
            name begins with b, and gamma, has one dimension of its own, every other one two.
        state: The result of an earlier call, to continue; None: no token was read.
        cu_seqlens: The bounds of sequences packed into one row (b = 1), `n_seqs + 1`; the rows of the state are then
            these sequences.
        ridge: The initial ridge of least squares.

    Returns:
        y `b t hv v`, and the state, whose tensors are `rows hv ...`.
    """
    _check_call(rule, gates, weights)
    _check_gates(gates, v)
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
    """Check that the rule uses every given gate, and that its required gates are given."""
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


def _check_gates(gates: Mapping[str, Tensor], v: Tensor) -> None:
    """Check that every gate has a value for each token and head."""
    wanted = tuple(v.shape[:3])
    for name, x in gates.items():
        if name == "position":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"gates[{name!r}] must be a tensor (b, t, hv, ...) = {wanted} ..., got {type(x).__name__}")
        if x.dim() < 3 or any(own < size for own, size in zip(x.shape, wanted, strict=False)):
            raise ValueError(f"gates[{name!r}] must have shape (b, t, hv, ...) = {wanted} ..., got {tuple(x.shape)}")


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
