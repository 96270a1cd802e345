"""A step that was queued on a GPU and whose loss the CPU has not read yet."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Seen:
    """The numbers of a step after the CPU has read them."""

    loss: float
    norm: float
    """Of the gradients."""

    @property
    def bad(self) -> str | None:
        """A description of the number that is not finite; None if the step was good."""
        if not math.isfinite(self.loss):
            return f"the loss ({self.loss})"
        return None if math.isfinite(self.norm) else f"the norm of the gradients ({self.norm})"


class Unseen:
    """A step that was queued.

    Args:
        step: Its number, from 0.
        lr: Its learning rate.
        tokens: How many tokens its loss is the mean of.
        numbers: Its loss and the norm of its gradients, on any device, which the next step may overwrite. They are
            copied without waiting for it.
    """

    def __init__(self, step: int, lr: float, tokens: int, numbers: Tensor) -> None:
        self.step, self.lr, self.tokens = step, lr, tokens
        self._copied: torch.cuda.Event | None = None
        if not numbers.is_cuda:
            self._numbers = numbers.clone()
        else:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(numbers.device))

    def look(self) -> Seen:
        """Wait until the numbers are there, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        return Seen(*self._numbers.tolist())
