"""Warns if a correcting rule's memory can grow: S = (I - beta k k^T) S + ... is stable for beta |k|^2 in [0, 2].

With keys that are not normalised the memory overflows silently. On a CPU, where checking is cheap, each process warns
once.
"""

import os
import sys
import warnings

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.checks import is_concrete
from lineate.rule import compute_dtype, normalize

ROUNDING = 0.02
"""How far beta |k|^2 may leave [0, 2]: unit keys in bfloat16 have |k|^2 up to 1 + 2^-8."""
TOKENS_A_LOOK = 16
"""Shorter calls are checked once per this number of tokens: a check takes a tenth of the time of a one-token call."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_warned = False
_unseen = TOKENS_A_LOOK  # tokens since the last check; the first call is checked


class UnstableMemoryWarning(RuntimeWarning):
    """beta |k|^2 left [0, 2] in a rule that corrects: its memory may grow with every token until it overflows."""


def watch_writes(k: Tensor, beta: Tensor | None, normalize_qk: bool) -> None:
    """Warn if beta |k|^2 leaves [0, 2]; k `b t h k`, beta `b t hv` or `b t hv v`, None for rules that do not correct.

    Nothing is checked on a GPU, while compiling or recording, and after the warning. The native backend checks in C.
    """
    if beta is None or normalize_qk or not _looks(k.shape[1], k, beta):
        return
    k, beta = k.detach(), beta.detach()
    least, most = torch.aminmax(beta)
    if least >= 0 and most * _squares(k).max() <= 2:
        return  # then every product is in the range, and need not be computed
    warn_unstable(k, beta)


def watch_erasing(inputs: Inputs, options: Options) -> None:
    """Warn if e . d leaves [0, 2] in a call of the general row (forms/general.py), as beta |k|^2 in watch_writes.

    With one decay a a head, what is read along d is multiplied by a (1 - e . d), so that e . d may reach 1 + 1 / a. A
    rule that compares before it decays, such as Comba, needs that.
    """
    if options.rule.writes and inputs.beta is not None:
        watch_writes(inputs.k.flatten(1, 2), inputs.beta.flatten(1, 2), options.normalize_qk)
        return
    gates = [x for x in (inputs.erase, inputs.probe, inputs.direction) if x is not None]
    if gates and _looks(inputs.k.shape[1], inputs.k, *gates):
        warn_erasing(inputs, options)


def warn_erasing(inputs: Inputs, options: Options) -> None:
    """Warn as watch_erasing does, however many tokens were checked before."""
    k, erase, probe, direction = (x if x is None else x.detach() for x in _erasing(inputs))
    log_decay = inputs.log_decay
    per_head = log_decay is not None and log_decay.dim() == 3
    decay = log_decay.detach().to(compute_dtype(log_decay.dtype)).exp() if per_head and log_decay is not None else None
    assert k is not None
    if options.rule.writes and inputs.beta is not None:
        warn_unstable(k.flatten(1, 2), inputs.beta.detach().flatten(1, 2))
    elif erase is not None:
        k = k.to(compute_dtype(k.dtype)).repeat_interleave(erase.shape[2] // k.shape[2], 2)  # b t hv k
        k = normalize(k) if options.normalize_qk else k
        sizes, remedy = (erase * k * k).sum(-1), "pass normalize_qk=True, and erase in [0, 2]"
        _warn_outside("sum(erase * k^2)", sizes, remedy, decay)
    elif probe is not None and direction is not None:
        probe = probe.to(compute_dtype(probe.dtype))
        _warn_outside("probe . direction", (probe * direction).sum(-1), "make them smaller", decay)


def _erasing(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return inputs.k, inputs.erase, inputs.probe, inputs.direction


def _looks(tokens: int, *tensors: Tensor) -> bool:
    """Whether this call is checked: on a CPU, once per TOKENS_A_LOOK tokens, until there was a warning."""
    global _unseen
    if torch.compiler.is_compiling() or _warned:
        return False
    _unseen += tokens
    if _unseen < TOKENS_A_LOOK or not all(is_concrete(x) for x in tensors):
        return False
    _unseen = 0
    return True


def forget() -> None:
    """Check the next call and warn again, as a new process would."""
    global _warned, _unseen
    _warned, _unseen = False, TOKENS_A_LOOK


def warn_unstable(k: Tensor, beta: Tensor) -> None:
    """Warn, the first time; where warnings are errors, every time."""
    with torch.no_grad():
        _warn_outside("beta |k|^2", _sizes(k, beta), "pass normalize_qk=True")


def _warn_outside(name: str, sizes: Tensor, remedy: str, decay: Tensor | None = None) -> None:
    """Warn, the first time, if |decay (1 - size)| is above 1 for a size; None is a decay of 1. NaN does not count."""
    global _warned
    factors = (sizes - 1).abs() if decay is None else (sizes - 1).abs() * decay
    if _warned or not bool((factors > 1 + ROUNDING).any()):
        return
    worst = sizes.flatten()[factors.flatten().nan_to_num(nan=0.0).argmax()].item()
    warnings.warn(
        f"{name} must stay in [0, 2] for a rule that corrects, got {worst:.4g}: the memory may grow with every "
        f"token until it overflows; {remedy} (said once; warnings.filterwarnings('ignore', "
        "category=lineate.UnstableMemoryWarning) silences it)",
        UnstableMemoryWarning,
        stacklevel=_callers_level(),
    )
    _warned = True


def _sizes(k: Tensor, beta: Tensor) -> Tensor:
    """Return beta |k|^2, in the shape of beta."""
    squares = _squares(k).repeat_interleave(beta.shape[2] // k.shape[2], dim=2)  # b t hv
    return beta * (squares if beta.dim() == 3 else squares.unsqueeze(-1))


def _squares(k: Tensor) -> Tensor:
    return torch.linalg.vector_norm(k, dim=-1, dtype=torch.promote_types(k.dtype, torch.float32)).square_()


def _callers_level() -> int:
    """Return the stacklevel, seen from warn_unstable, of the first frame outside of this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def _is_inside(filename: str) -> bool:
    return filename.startswith((_PACKAGE, os.path.dirname(torch.__file__) + os.sep))
