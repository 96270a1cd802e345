"""GraphedStep without a GPU: a graph is faked by a function that runs the step on the graph's own memory."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lineate.training import graphed
from lineate.training.graphed import WholeStep


class FakeGraphs:
    """Takes the place of CUDA: notes which captures were asked for, and how many replays there were.

    Args:
        patch: Where torch and the module are patched.
        refuse: The error of every capture; None: captures succeed.
    """

    def __init__(self, patch: pytest.MonkeyPatch, refuse: Exception | None = None) -> None:
        self.draws: list[bool] = []
        self.replays, self.refuse = 0, refuse
        self.gpu = torch.Generator().manual_seed(3)
        """The generator of the GPU."""
        run = WholeStep.run

        def note(step: WholeStep, batches: Any) -> torch.Tensor:
            if not self.capturing:
                return run(step, batches)
            for x in step.params:  # a capture computes nothing, and gradients lie in the graph's memory
                x.grad = torch.zeros_like(x)
            numbers = torch.zeros(2, dtype=torch.float64)
            self.made.replay = lambda: self._replay(lambda: numbers.copy_(run(step, batches)))
            return numbers

        self.capturing, self.made = False, SimpleNamespace(replay=None)
        stream = SimpleNamespace(wait_stream=lambda other: None)
        parts: dict[str, Any] = {
            "current_device": lambda: 0, "device": lambda index: nullcontext(), "current_stream": lambda: stream,
            "stream": lambda stream: nullcontext(), "get_rng_state": lambda index: self.gpu.get_state(),
            "set_rng_state": lambda state, index: self.gpu.set_state(state), "synchronize": lambda device: None,
            "empty_cache": lambda: None,
        }  # fmt: skip
        for name, part in parts.items():
            patch.setattr(torch.cuda, name, part)
        patch.setattr(graphed, "capture_stream", lambda index: stream)
        patch.setattr(graphed, "captured", self._captured)
        patch.setattr(graphed, "obstacle_of_devices", lambda devices: None)
        patch.setattr(WholeStep, "run", note)

    @contextmanager
    def _captured(self, device: torch.device, draws: bool) -> Iterator[Any]:
        self.draws.append(draws)
        self.capturing, self.made = True, SimpleNamespace(replay=None)
        try:
            yield self.made
            if self.refuse is not None:
                raise self.refuse
        finally:
            self.capturing = False

    def _replay(self, run: Any) -> None:
        self.replays += 1
        run()
