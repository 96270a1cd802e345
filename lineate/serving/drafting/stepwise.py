"""Guessing with a model, token by token: the base of drafters that read their own guesses."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from lineate.generation import choose_tokens
from lineate.layers import TokenCache
from lineate.models import ModelState
from lineate.serving.drafting.drafter import BaseDrafter, DraftRow, K, with_more


def states_nbytes(memories: int, token: int, tokens: int, guesses: int) -> int:
    """Return the most bytes of the states of one sequence while guesses are computed and batches are rebuilt.

    Args:
        memories: The bytes of its memories.
        token: The bytes of its caches for each token.
        tokens: The most tokens that it has.
        guesses: The most guesses at a time.
    """
    # Memories: alone and in a batch, after each token of a pass, and after a guess. Caches: a batch has the room of its
    # longest row; one that grows is copied into half as much room again.
    return memories * (4 + guesses) + token * (5 * (tokens + guesses + 1) // 2 + 64)


class RowStates:
    """The states of several sequences as one batch, which is rebuilt only for other sequences."""

    def __init__(self) -> None:
        self._keys: tuple[Hashable, ...] = ()
        self._batch: ModelState | None = None
        self._single: dict[Hashable, ModelState] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        held = [*self._single.values(), *([] if self._batch is None else [self._batch])]
        return sum(x.nbytes for state in held for layer in state.layers for x in layer.tensors.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys or key in self._single

    def take(self, keys: Sequence[Hashable]) -> ModelState:
        """Return the states of these sequences as one batch, in this order."""
        if self._batch is None or tuple(keys) != self._keys:
            self._part()
            self._batch = ModelState.join([self._single.pop(key) for key in keys])
            self._keys = tuple(keys)
        return self._batch

    def put(self, state: ModelState) -> None:
        """Replace the states of the batch that was taken last."""
        self._batch = state

    def pop(self, key: Hashable) -> ModelState | None:
        """Remove one sequence and return its state, or None if there is none."""
        if key in self._keys:
            self._part()
        return self._single.pop(key, None)

    def add(self, key: Hashable, state: ModelState) -> None:
        """Add a sequence with a state of one row."""
        self._single[key] = state

    def _part(self) -> None:
        """Cut the batch into states of one row."""
        if self._batch is not None:
            for row, key in enumerate(self._keys):
                self._single[key] = self._batch.select(torch.tensor([row]))
        self._batch, self._keys = None, ()


@dataclass(frozen=True)
class Pass:
    """The results of one pass over all rows.

    Args:
        state: the states after it.
        logits: `rows vocab`, for the tokens that follow.
        hidden: `rows hidden`, if the next pass needs it besides the tokens.
    """

    state: ModelState
    logits: Tensor
    hidden: Tensor | None = None


class StepwiseDrafter(BaseDrafter[K], ABC, Generic[K]):
    """Guesses one token after another for all rows at once, each from a pass that reads the guess before it.

    The states of sequences have read tokens that were chosen. Guesses continue them and are discarded. A subclass
    defines how many guesses a row may have, and computes the logits of the next tokens.
    """

    AT_ONCE = 16
    """Rows that are behind by more tokens are read separately."""
    PIECE = 2048
    """Tokens of a piece of a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._states = RowStates()

    @property
    def nbytes(self) -> int:
        """The bytes of the states of all sequences."""
        return self._states.nbytes

    @torch.no_grad()
    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        """Return at most `most` guesses for each row; see Drafter.

        Args:
            rows: the sequences.
            most: the most tokens for each.
        """
        lengths = [self._prepare(row, most) for row in rows]
        able = [row for row, length in zip(rows, lengths, strict=True) if length]
        drawn: list[list[int]] = [[] for _ in able]
        if able:
            first = last = self._read_pending(able)
            for step in range(max(lengths)):
                if step:
                    tokens = torch.tensor([own[-1:] for own in drawn], device=last.logits.device)
                    last = self._read_guesses(tokens, last)
                for own, token in zip(drawn, draw(last.logits, able, drawn), strict=True):
                    own.append(token)
            self._states.put(taken_back(first.state, last.state))
        ahead = iter(drawn)
        guesses = [next(ahead)[:length] if length else [] for length in lengths]
        for row, own in zip(rows, guesses, strict=True):
            if own:
                self._known[row.key].pace.note(len(row.ids), own)
        return guesses

    @abstractmethod
    def _prepare(self, row: DraftRow, most: int) -> int:
        """Return how many tokens to guess for a row; unless it is 0, the row has a state that is nearly up to date."""

    @abstractmethod
    def _read_pending(self, rows: Sequence[DraftRow]) -> Pass:
        """Read the unread tokens of each row in one pass."""

    @abstractmethod
    def _read_guesses(self, tokens: Tensor, last: Pass) -> Pass:
        """Read one guess a row, `rows 1`, after an earlier pass."""

    def forget(self, key: Hashable) -> None:
        """Free all data of a sequence, including its state.

        Args:
            key: names the sequence.
        """
        super().forget(key)
        self._states.pop(key)


def taken_back(base: ModelState, last: ModelState) -> ModelState:
    """Return to the state `base` from `last`, which is discarded together with all states in between.

    Memories are values, so those of base are unchanged. Caches free the room of the tokens that were added.
    """
    layers = tuple(
        new.cut(old.n, old.lengths) if isinstance(old, TokenCache) and isinstance(new, TokenCache) else old
        for old, new in zip(base.layers, last.layers, strict=True)
    )
    return ModelState(layers, base.lengths)


def draw(logits: Tensor, rows: Sequence[DraftRow], guesses: Sequence[Sequence[int]]) -> list[int]:
    """Choose the next guess of every row with its sampling options."""
    seen = [with_more(row.seen, own) for row, own in zip(rows, guesses, strict=True)]
    positions = torch.tensor([row.position + len(own) for row, own in zip(rows, guesses, strict=True)])
    return choose_tokens(logits.nan_to_num(), [row.sampling for row in rows], positions, seen).tolist()


def padded(tokens: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows of tokens, filled with 0 to the longest one, and their lengths, on a CPU."""
    longest = max(map(len, tokens))
    ids = torch.tensor([[*own, *[0] * (longest - len(own))] for own in tokens], device=device)
    return ids, torch.tensor([len(own) for own in tokens])
