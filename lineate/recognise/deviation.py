"""Says what keeps an update from being a row, where it is none of the relatives."""

from collections.abc import Sequence

import torch

from lineate.recognise.measuring import TOLERANCE, Response, coefficients, pattern


def needed_change(responses: Sequence[Response]) -> str:
    """Return the first words of the remedy of a rule that is neither a row nor a relative."""
    if not all(r.linear for r in responses):
        return "make the new memory linear in S: no function of S but products with gates, k and v"
    other = ~torch.eye(responses[0].S.shape[1], dtype=torch.bool)[None, :, None, :]  # 1 v 1 v
    if any((r.transition * other).abs().max() > TOLERANCE for r in responses):
        return "let every value channel be read alone: multiply S from the side of the keys"
    found = [coefficients(r) for r in responses]
    if any(x is None for x in found):
        return "erase one product of two vectors, such as outer(k, S.T @ k), after a decay of the key channels"
    decays = [x.decay for x in found if x is not None]
    if pattern(decays) not in ("one", "number", "key"):
        return "decay the whole of S or its key channels, not its value channels"
    if any(x.min() < -TOLERANCE or x.max() > 1 + TOLERANCE for x in decays):
        return "use a decay in [0, 1], such as exp(g) with g <= 0"
    if pattern([x.write for x in found if x is not None]) == "both":
        return "write one outer(k, v)"
    if any((x.erase - x.erase[:1]).abs().max() > TOLERANCE for x in found if x is not None):
        return "erase with the same strength in every value channel"
    return "erase along one vector what is read with one vector, and write outer(k, v)"
