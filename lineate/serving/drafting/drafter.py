"""The interface of drafters: the sequences that they guess for, the verification of guesses, a base class."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lineate.generation import Sampling, choose_tokens


@dataclass(frozen=True)
class DraftRow:
    """A sequence whose next tokens are to be guessed.

    Args:
        key: names the sequence in all calls until `forget`.
        ids: its tokens so far, the prompt included; the model has read all but the last. In later calls only tokens
            are added, those that were chosen.
        sampling: how its tokens are chosen.
        seen: how often each token was generated, as choose_tokens takes it, if the options have penalties.
    """

    key: Hashable
    ids: Sequence[int]
    sampling: Sampling
    seen: Mapping[int, int] | None = None

    @property
    def position(self) -> int:
        """The index of the token that is guessed first."""
        return len(self.ids)


class Drafter(Protocol):
    """Guesses tokens; its guesses do not change which tokens are generated.

    (With memories in bfloat16 it may, where two tokens are nearly as likely.)

    One that keeps tensors for each sequence also has row_nbytes, as BaseDrafter has, so that they are part of the
    memory plan.
    """

    needs_hidden: bool
    """Whether it needs to observe the inputs of the model's head."""

    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        """Return at most `most` guesses for each row, the next token first; an empty list if it has none.

        Args:
            rows: the sequences.
            most: the most tokens for each.
        """
        ...

    def observe(self, key: Hashable, ids: Sequence[int], start: int, hidden: Tensor) -> None:
        """Receive the inputs of the model's head for final tokens of a sequence; only called if needs_hidden.

        Args:
            key: names the sequence.
            ids: its known tokens, at least those of the whole prompt.
            start: the index of the first of these tokens.
            hidden: `n hidden`, one vector per token; the tensor is kept, not copied.
        """
        ...

    def forget(self, key: Hashable) -> None:
        """Free all data of a sequence, which has ended.

        Args:
            key: names the sequence.
        """
        ...


def verify(
    logits: Tensor,
    guesses: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    positions: Sequence[int],
    seen: Sequence[Mapping[int, int] | None] | None = None,
    allowed: Tensor | None = None,
) -> list[list[int]]:
    """Return the tokens that plain decoding would choose: the guesses that are right, and one token after them.

    A row keeps as many tokens of its trail as it has chosen tokens: its last token before, and the right guesses.

    Args:
        logits: `rows t vocab`, those of each row's last token and of its guesses; t is at least 1 + the most guesses.
        guesses: the guesses of each row.
        sampling: the options of each row.
        positions: the index of the first guess of each row in its sequence.
        seen: for each row that has penalties, how often each token was generated before.
        allowed: which tokens may be chosen, `rows t vocab` bool; None for all.
    """
    at = [(row, i) for row, own in enumerate(guesses) for i in range(len(own) + 1)]
    where = torch.tensor(at, device=logits.device).T.unbind()
    counts = None
    if seen is not None:
        counts = [with_more(seen[row], guesses[row][:i]) for row, i in at]
    values = logits[where]
    # A wrong guess may give logits that are not finite, which is an error only if the guess was right.
    spoilt = ~values.amax(-1).isfinite()
    options, places = [sampling[row] for row, _ in at], torch.tensor([positions[row] + i for row, i in at])
    permitted = None if allowed is None else allowed[where]
    tokens = choose_tokens(values.masked_fill(spoilt[:, None], 0), options, places, counts, permitted).tolist()
    chosen: list[list[int]] = [[] for _ in guesses]
    for n, ((row, i), token, bad) in enumerate(zip(at, tokens, spoilt.tolist(), strict=True)):
        if list(guesses[row][:i]) != chosen[row]:
            continue  # a guess before this one was wrong
        if bad:
            token = int(choose_tokens(values[n : n + 1], options[n : n + 1], places[n : n + 1]))  # as plain decoding
        chosen[row].append(token)
    return chosen


def with_more(seen: Mapping[int, int] | None, more: Sequence[int]) -> Mapping[int, int] | None:
    """Return the counts after more tokens."""
    if seen is None or not more:
        return seen
    counts = dict(seen)
    for token in more:
        counts[token] = counts.get(token, 0) + 1
    return counts


class Pace:
    """How many tokens to guess for a sequence: more while guesses are right, and none for a while if they are not."""

    LONGEST_PAUSE = 16

    def __init__(self) -> None:
        self.length = 2
        self._guessed: list[int] = []
        self._position = 0
        self._misses = self._pause = 0

    def next_length(self, ids: Sequence[int], most: int) -> int:
        """Update with the number of right guesses, and return how many tokens to guess now."""
        guessed, start = self._guessed, self._position
        if guessed and len(ids) > start:
            right = 0
            while right < len(guessed) and start + right < len(ids) and ids[start + right] == guessed[right]:
                right += 1
            self._learn(right, len(guessed))
        self._guessed = []
        if self._pause:
            self._pause -= 1
            return 0
        return min(self.length, most)

    def note(self, position: int, guesses: list[int]) -> None:
        """Record the guesses for the tokens from this position on."""
        self._position, self._guessed = position, guesses

    def _learn(self, right: int, guessed: int) -> None:
        if right == guessed:
            self.length = max(self.length, 2 * guessed)
        else:
            self.length = right + 1
        self._misses = 0 if right else self._misses + 1
        if self._misses > 1:
            self._pause = min(2 ** (self._misses - 1), self.LONGEST_PAUSE)


class Known:
    """The data of a drafter about one sequence; a drafter with more data derives its own class."""

    def __init__(self) -> None:
        self.pace = Pace()


K = TypeVar("K", bound=Known)


class BaseDrafter(Generic[K]):
    """A base class of drafters that keeps data of each sequence until the sequence has ended."""

    needs_hidden = False

    def __init__(self) -> None:
        self._known: dict[Hashable, K] = {}

    def row_nbytes(self, tokens: int, guesses: int) -> int:
        """Return the most bytes that its tensors take for a sequence; without tensors 0.

        Args:
            tokens: The most tokens of a sequence.
            guesses: The most guesses for it at a time.
        """
        return 0

    def observe(self, key: Hashable, ids: Sequence[int], start: int, hidden: Tensor) -> None:
        """Ignore the inputs of the model's head; see Drafter.

        Args:
            key: names the sequence.
            ids: its tokens.
            start: the index of the first of these tokens.
            hidden: one vector a token.
        """

    def forget(self, key: Hashable) -> None:
        """Free all data of a sequence.

        Args:
            key: names the sequence.
        """
        self._known.pop(key, None)
