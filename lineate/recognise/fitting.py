"""Recognises a row of lineate.rule.RULES by its op: gates are fitted so that one token of it has the measured response.

The five rows of the table are found from their decay, erase and write (matching.py). Any other row, whatever its gates,
is compared through its recurrent form alone: Levenberg and Marquardt's method finds the gates of each token for which
the new memory is the measured one, for an empty memory, for every unit matrix and for a random one.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lineate.call import Inputs, Options, Request
from lineate.forms.recurrent import READS, recurrent
from lineate.ops.rules import attend
from lineate.recognise.measuring import TOLERANCE, Response, difference, pattern, reduced, written_as
from lineate.rule import Rule

STARTS, STEPS, EPSILON = (0.5, 0.9, 0.2, 1.3), 60, 1e-6
"""Gates from which the search starts; its steps; the step of the differences that give its Jacobian."""
Gates = Mapping[str, Tensor]
"""The gates of a token by name, each [], [k], [v] or [k, v]."""
Misfit = Callable[[Tensor], Tensor]
"""Gates `n g` -> the differences `n d` of their responses from the measured one."""


def fit_row(rule: Rule, responses: Sequence[Response]) -> tuple[list[Gates], float] | None:
    """Return the gates of each token and the largest difference from lineate's op, or None if the rule is another one.

    Args:
        rule: A row whose op has a recurrent form.
        responses: The measured responses.
    """
    found: list[Gates] = []
    largest = 0.0
    for response in responses:
        gates = _fitted(rule, response)
        if gates is None:
            return None
        gates = {name: x.clamp(max=0) if name == "log_decay" else x for name, x in gates.items()}
        largest = max(largest, difference(from_op(rule, response, gates), response.new))
        found.append(gates)
    return (found, largest) if largest < TOLERANCE else None


def formulas(found: Sequence[Gates], responses: Sequence[Response]) -> tuple[tuple[str, str | None, str], ...]:
    """Return the name, the formula and the shape of each gate of a row; a formula is None if it is not a simple one.

    Args:
        found: The gates of each token.
        responses: The measured responses.
    """
    K, V = responses[0].S.shape
    tokens = [r.token for r in responses]
    rows = []
    for name in found[0]:
        arrays = [_spread(gates[name], K, V, _letters(name)) for gates in found]
        kind = pattern(arrays)
        values = [reduced(x, kind) for x in arrays]
        text = written_as(values, tokens)
        if text is None and name == "log_decay":
            text = written_as([x.exp() for x in values], tokens)
            text = None if text is None else f"log({text})"
        rows.append((name, text, kind))
    return tuple(rows)


def _letters(name: str) -> str:
    """Return the dimensions of a gate after those of heads, in the largest of its shapes: "", "k", "v" or "k v"."""
    field = next(x for x in Inputs.FIELDS if x.name == name)
    return max((x.removeprefix("b t hv").strip() for x in field.shapes if x.startswith("b t hv")), key=len)


def _sizes(rule: Rule, K: int, V: int) -> dict[str, tuple[int, ...]] | None:
    """Return the shape of each gate of a token, the largest that the rule takes; None if it is of another kind."""
    found = {}
    for name in rule.gates:
        letters = _letters(name).split()
        if name == "log_decay" and "channel" not in rule.decays:
            letters = []
        if any(x not in ("k", "v") for x in letters):
            return None
        found[name] = tuple(K if x == "k" else V for x in letters)
    return found


def _spread(x: Tensor, K: int, V: int, letters: str) -> Tensor:
    """Return a gate as an array [k, v]."""
    if x.dim() == 1 and letters == "k":
        x = x[:, None]
    return x.expand(K, V)


def _fitted(rule: Rule, response: Response) -> Gates | None:
    """Return the gates with which one token of the recurrent form has this response; None if there are none."""
    K, V = response.S.shape
    if not response.linear or any(name not in READS for name in rule.gates):
        return None
    sizes = _sizes(rule, K, V)
    if sizes is None:
        return None
    units = torch.eye(K * V, dtype=torch.float64).view(-1, K, V)
    states = torch.cat((torch.zeros_like(units[:1]), units, response.S[None]))  # m k v
    made = torch.einsum("xypq,mpq->mxy", response.transition, states) + response.offset
    counts = [math.prod(size) for size in sizes.values()]

    def gates_of(x: Tensor) -> dict[str, Tensor]:
        parts = x.split(counts, -1)
        return {name: part.unflatten(-1, size or (1,)) for (name, size), part in zip(sizes.items(), parts, strict=True)}

    def misfit(x: Tensor) -> Tensor:
        """Return the differences `n (m k v)` for gates `n g`."""
        n, m = len(x), len(states)
        gates = {name: y.repeat_interleave(m, 0)[:, None, None] for name, y in gates_of(x).items()}  # (n m) 1 1 ...
        gates = {name: y if sizes[name] else y[..., 0] for name, y in gates.items()}
        k, v = (y.expand(n * m, 1, 1, -1) for y in (response.token.k, response.token.v))
        inputs = Inputs(q=k, k=k, v=v, state=states.repeat(n, 1, 1).unsqueeze(1)).replace(**gates)
        _, after = recurrent(inputs, Options(rule, 1.0))
        return after[:, 0].view(n, -1) - made.flatten()

    for start in STARTS:
        x = torch.cat([
            torch.full((count,), -start if name == "log_decay" else start, dtype=torch.float64)
            for name, count in zip(sizes, counts, strict=True)
        ])  # fmt: skip
        x = _least_squares(misfit, x)
        if misfit(x[None]).abs().max() < TOLERANCE * made.abs().max():
            return {name: y.squeeze(0) if sizes[name] else y.view(()) for name, y in gates_of(x[None]).items()}
    return None


def _least_squares(misfit: Misfit, x: Tensor) -> Tensor:
    """Return the x [g] of a least sum of squares near the given one, by Levenberg and Marquardt's method."""
    damping, error = 1e-3, misfit(x[None])[0]
    nudges = EPSILON * torch.eye(len(x), dtype=torch.float64)
    for _ in range(STEPS):
        J = (misfit(x + nudges) - misfit(x - nudges)).mT / (2 * EPSILON)
        normal, slope = J.mT @ J, J.mT @ error
        scale = normal.diagonal().max().clamp(min=1e-300)
        if not (normal.isfinite().all() and slope.isfinite().all()):
            break
        step = torch.linalg.solve(normal + damping * scale * torch.eye(len(x), dtype=torch.float64), slope)
        tried = misfit((x - step)[None])[0]
        if tried.isfinite().all() and tried.square().sum() < error.square().sum():
            x, error, damping = x - step, tried, max(damping / 10, 1e-14)
        else:
            damping *= 10
        if damping > 1e6 or error.abs().max() < 1e-14:
            break
    return x


def from_op(rule: Rule, response: Response, gates: Gates) -> Tensor:
    """Return the memory after one token of lineate's op, with its checks; k and v are [k] and [v], or of n writes."""
    k, v = response.token.k, response.token.v
    k, v = (x[None, None] if x.dim() == 3 else x[None, None, None] for x in (k, v))  # b t h k
    given = {name: x[None, None] if k.dim() == 5 and x.dim() == 2 else x[None, None, None] for name, x in gates.items()}
    q = response.token.q[None, None, None]
    inputs = Inputs(q=q, k=k, v=v, state=response.S[None, None]).replace(**given)
    return attend(rule, inputs, Request(form="recurrent", backend="torch")).state[0, 0]
