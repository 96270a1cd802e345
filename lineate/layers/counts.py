"""The number of tokens of a speculative pass that each row keeps, and values derived from it for all layers."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class Counts:
    """Numbers of kept tokens.

    Args:
        tensor: `rows`, int.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._made: dict[Hashable, Tensor | tuple[Tensor, Tensor]] = {}

    @staticmethod
    def of(counts: "Tensor | Counts", rows: int, t: int) -> "Counts":
        """Return counts of `rows` rows; raise unless each is an integer in 0 .. t. Values on a GPU are not read."""
        if isinstance(counts, Counts):  # they were checked when they were made
            return counts
        if not isinstance(counts, Tensor):
            raise TypeError(f"counts must be a torch.Tensor, got {type(counts).__name__}")
        if counts.shape != (rows,) or counts.is_floating_point() or counts.dtype == torch.bool:
            raise ValueError(f"counts must be integers of shape (rows,) = ({rows},), got {tuple(counts.shape)}")
        if counts.device.type == "cpu" and not torch.compiler.is_compiling() and rows:
            low, high = (int(n) for n in counts.aminmax())
            if low < 0 or high > t:
                raise ValueError(f"counts must lie in 0 .. {t}, the tokens of the trail, got {low} .. {high}")
        return Counts(counts)

    def on(self, device: torch.device) -> Tensor:
        """Return the numbers on a device, int64."""
        return self._once((device,), lambda: self.tensor.to(device, torch.int64))  # type: ignore[return-value]

    def kept(self, t: int, device: torch.device) -> Tensor:
        """Whether a row keeps each of t tokens, `rows t`."""
        return self._once(("kept", t, device), lambda: count_up(t, device) < self.on(device)[:, None])  # type: ignore[return-value]

    def own_slots(self, t: int, device: torch.device) -> Tensor:
        """Return the slot of the memory after each of t tokens: row r after its last kept one, -1 after others."""

        def make() -> Tensor:
            own = count_up(self.tensor.shape[0], device)[:, None]
            return torch.where(count_up(t, device) + 1 == self.on(device)[:, None], own, -1)

        return self._once(("slots", t, device), make)  # type: ignore[return-value]

    def taps(self, size: int, device: torch.device) -> Tensor:
        """Return which of a convolution's inputs are the last `size` that are kept, `rows 1 size`."""
        return self._once(  # type: ignore[return-value]
            ("taps", size, device), lambda: self.on(device)[:, None, None] + count_up(size, device)
        )

    def places(self, lengths: int | Tensor, rows: int, t: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `places` of the t entries after the first `lengths` ones."""
        known = lengths if isinstance(lengths, int) else (id(lengths), "id")  # the caller keeps it while this lives
        return self._once(("places", known, rows, t, device), lambda: places(lengths, rows, t, device))  # type: ignore[return-value]

    def _once(
        self, key: Hashable, make: Callable[[], Tensor | tuple[Tensor, Tensor]]
    ) -> Tensor | tuple[Tensor, Tensor]:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def places(lengths: int | Tensor, rows: int, t: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where the t entries after the first lengths[r] ones of every row lie: rows and positions, `rows t`."""
    steps = count_up(t, device)
    at = (steps + lengths).expand(rows, -1) if isinstance(lengths, int) else lengths[:, None] + steps
    return count_up(rows, device)[:, None].expand_as(at), at


def count_up(n: int, device: torch.device) -> Tensor:
    """Return 0, 1, ... n - 1, a shared tensor that must not be written."""
    return _constant("count", (n,), device)


def nowhere(rows: int, t: int, device: torch.device) -> Tensor:
    """Return -1 everywhere, `rows t`, a shared tensor that must not be written."""
    return _constant("nowhere", (rows, t), device)


_CONSTANTS: dict[tuple[str, tuple[int, ...], torch.device, bool], Tensor] = {}
"""They are never freed: recorded graphs read them at their addresses."""


def _constant(kind: str, sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a constant. On a GPU it is kept, since a launch takes as long as a small layer.

    A constant made while a graph is recorded exists only when that graph runs, so it is not kept.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return _make(kind, sizes, device)
    key = (kind, sizes, device, torch.is_inference_mode_enabled())
    found = _CONSTANTS.get(key)
    if found is None:
        found = _make(kind, sizes, device)
        if torch.cuda.is_current_stream_capturing():
            return found
        torch.cuda.current_stream(device).synchronize()  # other streams read it too
        _CONSTANTS[key] = found
    return found


def _make(kind: str, sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.arange(*sizes, device=device) if kind == "count" else torch.full(sizes, -1, device=device)
