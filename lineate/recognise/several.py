"""Several writes a token, as in Gated DeltaProduct: the decay, the order of the writes and their strengths.

    S' = Diag(a) S          S = S - b_j k_j (S^T k_j - v_j)^T     for one j after the other

What an empty memory holds after the token is the sum of w_j v_j^T. The last write has w_j = b_j k_j; an earlier one is
what the later erases leave of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from lineate.recognise.evaluation import Token
from lineate.recognise.measuring import TOLERANCE, Response, difference, pattern, written_as


@dataclass(frozen=True)
class Writes:
    """The writes of a token."""

    keys: tuple[str, ...]
    """The names of the keys in the order of the writes; "" is the first key, which has no name in a token."""
    values: tuple[str, ...]
    """The names of the values."""
    decays: tuple[Tensor, ...]
    """The decay of each token, [k]."""
    strengths: tuple[Tensor, ...]
    """The strengths of each token's writes, [n]."""

    def key(self, token: Token) -> Tensor:
        """Return the keys of a token, [n, k]."""
        return torch.stack([token.others[x] if x else token.k for x in self.keys])

    def value(self, token: Token) -> Tensor:
        """Return the values of a token, [n, v]."""
        return torch.stack([token.others[x] if x else token.v for x in self.values])

    def formulas(self, tokens: Sequence[Token]) -> tuple[str | None, tuple[str | None, ...]]:
        """Return the decay and the strengths as formulas of the gates."""
        one = pattern([x[:, None] for x in self.decays]) in ("one", "number")
        decay = written_as([x[0] if one else x for x in self.decays], tokens)
        strengths = zip(*(x.unbind() for x in self.strengths), strict=True)
        return decay, tuple(written_as(x, tokens) for x in strengths)


def find_writes(responses: Sequence[Response], keys: Sequence[str], values: Sequence[str]) -> Writes | None:
    """Return the writes of a rule; None if it is none of n delta rules after one decay.

    Args:
        responses: The measured responses.
        keys: The names of the other keys.
        values: The names of the other values.
    """
    if not keys or len(keys) != len(values) or not all(r.linear for r in responses):
        return None
    K, V = responses[0].S.shape
    if len(keys) >= min(K, V):
        return None
    for some in permutations(("", *values)):
        for order in permutations(("", *keys)):
            writes = Writes(order, some, (), ())
            found = [_gates(r, writes) for r in responses]
            if all(x is not None for x in found):
                decays, strengths = zip(*(x for x in found if x is not None), strict=True)
                return Writes(order, some, decays, strengths)
    return None


def _gates(response: Response, writes: Writes) -> tuple[Tensor, Tensor] | None:
    """Return the decay [k] and the strengths [n] with which writes in this order have a response."""
    k, v = writes.key(response.token), writes.value(response.token)
    written = torch.linalg.lstsq(v.mT, response.offset.mT).solution  # n k
    if difference(written.mT @ v, response.offset) > TOLERANCE:
        return None
    later = torch.eye(k.shape[1], dtype=torch.float64)  # the erases of later writes
    strengths: list[Tensor] = []
    for j in reversed(range(len(k))):
        left = later @ k[j]
        strength = (written[j] @ left) / (left @ left)
        if (written[j] - strength * left).abs().max() > TOLERANCE or strength.abs() < TOLERANCE:
            return None
        strengths.insert(0, strength)
        later = later @ (torch.eye(k.shape[1], dtype=torch.float64) - strength * torch.outer(k[j], k[j]))
    transition = response.transition[:, 0, :, 0]
    decay = (transition / later).nan_to_num().mean(0) if later.abs().min() > TOLERANCE else transition.diagonal()
    made = torch.einsum("xz,yp->xyzp", later * decay, torch.eye(response.S.shape[1], dtype=torch.float64))
    return None if difference(made, response.transition) > TOLERANCE else (decay, torch.stack(strengths))
