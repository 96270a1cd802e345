"""Drafters guess the tokens that follow; the model reads all guesses in one pass and keeps those that it would choose.

    guesses = drafter.propose(rows, most=4)                  # a few tokens for each row
    out = model.trail(ids, state)                            # row r of ids: its last token, then its guesses
    chosen = verify(out.logits, guesses, sampling, positions)
    state = out.trail.after(torch.tensor([len(tokens) for tokens in chosen]))

A token is a pure function of its logits, the options, the seed and its position (generation/choice.py). So verify
compares a guess with the very token that plain decoding would choose there: guesses change how fast tokens come, never
which. A drafter that is a model draws with the same noise, and so guesses right more often than by chance.
"""

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lineate.generation import Sampling, choose_tokens
from lineate.layers import TokenCache
from lineate.models import HybridLM, ModelState


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
    """Guesses tokens; what it guesses never changes which tokens are generated."""

    needs_hidden: bool
    """Whether it wants to observe what the model's head reads."""

    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        """Return at most so many guesses for each row, the next token first; an empty list if it has none.

        Args:
            rows: the sequences.
            most: the most tokens for each.
        """
        ...

    def observe(self, key: Hashable, ids: Sequence[int], start: int, hidden: Tensor) -> None:
        """Take what the model's head read for tokens of a sequence that are final; only if needs_hidden.

        Args:
            key: names the sequence.
            ids: its tokens as far as they are known, those of the whole prompt at least.
            start: the index of the first of these tokens.
            hidden: `n hidden`, one vector a token; the tensor is kept, not copied.
        """
        ...

    def forget(self, key: Hashable) -> None:
        """Drop all that is kept of a sequence, which has ended.

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
        counts = [_with(seen[row], guesses[row][:i]) for row, i in at]
    values = logits[where]
    # A wrong guess may leave the model without finite logits; that must only matter if the guess was right.
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


def _with(seen: Mapping[int, int] | None, more: Sequence[int]) -> Mapping[int, int] | None:
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
        """Learn how many of the last guesses were right, and return how many tokens to guess now."""
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
        """Remember what was guessed for the tokens from this position on."""
        self._position, self._guessed = position, guesses

    def _learn(self, right: int, guessed: int) -> None:
        if right == guessed:
            self.length = max(self.length, 2 * guessed)
        else:
            self.length = right + 1
        self._misses = 0 if right else self._misses + 1
        if self._misses > 1:
            self._pause = min(2 ** (self._misses - 1), self.LONGEST_PAUSE)


class _Index:
    """The places of all n-grams of a sequence: every place points to the one before it that has the same n-gram."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.ids = array("q")
        self.pace = Pace()
        self._last: dict[tuple[int, ...], int] = {}  # the n-gram -> the index after its last place
        self._before = array("q")  # that index -> the index after the place before, or 0

    def extend(self, ids: Sequence[int]) -> None:
        """Add the tokens that are new, each in constant time."""
        for token in ids[len(self.ids) :]:
            end = len(self.ids)  # the n-gram that ends before this token is followed by something now
            self._before.append(0)
            if end >= self.n:
                gram = tuple(self.ids[end - self.n :])
                self._before[end] = self._last.get(gram, 0)
                self._last[gram] = end
            self.ids.append(token)

    def guess(self, most: int, tries: int, longest: int) -> list[int]:
        """Return what followed the longest match of the last tokens; among equally long ones, the latest."""
        ids, end = self.ids, len(self.ids)
        place = self._last.get(tuple(ids[end - self.n :]), 0) if end >= self.n else 0
        best, length = 0, 0
        for _ in range(tries):
            if not place:
                break
            own = self.n
            while own < longest and own < place and ids[place - own - 1] == ids[end - own - 1]:
                own += 1
            if own > length:
                best, length = place, own
            place = self._before[place]
        if not best:
            return []
        found = list(ids[best : best + most])
        while len(found) < most:  # it repeats itself: what follows is the guess's own beginning
            found.append(found[best + len(found) - end])
        return found


class PromptLookup:
    """Guess that a sequence goes on as it did where its last tokens stood before, in the prompt or in what follows.

    It needs no model, and serves texts that repeat themselves: code that is edited, documents that are quoted.

    Args:
        n: tokens that a match must have; each new token is indexed in constant time.
        longest: tokens of a match that are compared; the longest match is taken.
        tries: places that are compared, beginning with the latest.
    """

    needs_hidden = False

    def __init__(self, n: int = 2, longest: int = 32, tries: int = 32) -> None:
        for name, value in (("n", n), ("longest", longest), ("tries", tries)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        self.n, self.longest, self.tries = n, longest, tries
        self._rows: dict[Hashable, _Index] = {}

    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        """Return at most so many guesses for each row; see Drafter.

        Args:
            rows: the sequences.
            most: the most tokens for each.
        """
        found = []
        for row in rows:
            index = self._rows.setdefault(row.key, _Index(self.n))
            index.extend(row.ids)
            length = index.pace.next_length(row.ids, most)
            guesses = index.guess(length, self.tries, self.longest) if length else []
            index.pace.note(len(row.ids), guesses)
            found.append(guesses)
        return found

    def observe(self, key: Hashable, ids: Sequence[int], start: int, hidden: Tensor) -> None:
        """Ignore what the model's head read.

        Args:
            key: names the sequence.
            ids: its tokens.
            start: the index of the first of these tokens.
            hidden: one vector a token.
        """

    def forget(self, key: Hashable) -> None:
        """Drop the index of a sequence.

        Args:
            key: names the sequence.
        """
        self._rows.pop(key, None)


class RowStates:
    """The states of several sequences as one batch, which is put together anew only if other sequences are wanted."""

    def __init__(self) -> None:
        self._keys: tuple[Hashable, ...] = ()
        self._batch: ModelState | None = None
        self._single: dict[Hashable, ModelState] = {}

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


def taken_back(base: ModelState, last: ModelState) -> ModelState:
    """Return the state `base`, after it was continued to `last`, which is given up together with what lies between.

    Memories are values, so base still has its own. Caches free the room of the tokens that were added.
    """
    layers = tuple(
        new.cut(old.n, old.lengths) if isinstance(old, TokenCache) and isinstance(new, TokenCache) else old
        for old, new in zip(base.layers, last.layers, strict=True)
    )
    return ModelState(layers, base.lengths)


class DraftModel:
    """Guess with a smaller model of the same vocabulary, which draws with the noise that the larger one will use.

    Its state of every sequence has read the tokens that were chosen. Guesses continue it and are given up; the next
    call reads those that were right, of all rows in one pass.

    Args:
        model: the smaller model, of any family or pattern, in eval mode.
        vocab_size: tokens of the larger model's vocabulary, which must be the same.
    """

    needs_hidden = False
    AT_ONCE = 16
    """Rows that have fallen behind by more tokens are read alone."""
    PIECE = 2048
    """Prompts are read in pieces of so many tokens."""

    def __init__(self, model: HybridLM, vocab_size: int) -> None:
        if model.config.vocab_size != vocab_size:
            raise ValueError(
                f"model must have the vocabulary of the model that it guesses for, {vocab_size} tokens, got "
                f"{model.config.vocab_size}"
            )
        self.model = model
        self._states = RowStates()
        self._read: dict[Hashable, int] = {}
        self._paces: dict[Hashable, Pace] = {}

    @torch.no_grad()
    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        """Return at most so many guesses for each row; see Drafter.

        Args:
            rows: the sequences.
            most: the most tokens for each.
        """
        guesses: list[list[int]] = [[] for _ in rows]
        lengths = [self._paces.setdefault(row.key, Pace()).next_length(row.ids, most) for row in rows]
        able = [n for n, row in enumerate(rows) if lengths[n] and len(row.ids) > 1]
        if not able:
            return guesses
        own = [rows[n] for n in able]
        for row in own:
            self._keep_up(row)
        base, logits = self._read_pending(own)
        now = base
        for step in range(max(lengths[n] for n in able)):
            if step:
                out = self.model(torch.tensor([guesses[n][-1:] for n in able], device=logits.device), state=now)
                now, logits = out.state, out.logits[:, -1]
            for n, token in zip(able, draw(logits, own, [guesses[n] for n in able]), strict=True):
                guesses[n].append(token)
        self._states.put(taken_back(base, now))
        for n in able:
            guesses[n] = guesses[n][: lengths[n]]
            self._paces[rows[n].key].note(len(rows[n].ids), guesses[n])
        return guesses

    def _keep_up(self, row: DraftRow) -> None:
        """Read the prompt, or what a row missed while nothing was guessed for it, all but the last tokens."""
        first = self._read.get(row.key, 0)
        if row.key in self._states and len(row.ids) - first <= self.AT_ONCE:
            return
        state = self._states.pop(row.key)
        for start in range(first, len(row.ids) - 1, self.PIECE):
            piece = torch.tensor([row.ids[start : min(start + self.PIECE, len(row.ids) - 1)]], device=self.model.device)
            state = self.model(piece, state=state, last_only=True).state
        assert state is not None
        self._states.add(row.key, state)
        self._read[row.key] = len(row.ids) - 1

    def _read_pending(self, rows: Sequence[DraftRow]) -> tuple[ModelState, Tensor]:
        """Read what each row has not read yet, in one pass; return the state, and the logits of the last tokens."""
        pending = [list(row.ids[self._read[row.key] :]) for row in rows]
        ids, counts = padded(pending, self.model.device)
        out = self.model.trail(ids, self._states.take([row.key for row in rows]))
        for row in rows:
            self._read[row.key] = len(row.ids)
        return out.trail.after(counts), out.logits[torch.arange(len(rows)), counts - 1]

    def observe(self, key: Hashable, ids: Sequence[int], start: int, hidden: Tensor) -> None:
        """Ignore what the larger model's head read.

        Args:
            key: names the sequence.
            ids: its tokens.
            start: the index of the first of these tokens.
            hidden: one vector a token.
        """

    def forget(self, key: Hashable) -> None:
        """Drop the state of a sequence.

        Args:
            key: names the sequence.
        """
        self._states.pop(key)
        self._read.pop(key, None)
        self._paces.pop(key, None)


def draw(logits: Tensor, rows: Sequence[DraftRow], guesses: Sequence[Sequence[int]]) -> list[int]:
    """Choose the next guess of every row as the token after its guesses so far would be chosen."""
    seen = [_with(row.seen, own) for row, own in zip(rows, guesses, strict=True)]
    positions = torch.tensor([row.position + len(own) for row, own in zip(rows, guesses, strict=True)])
    return choose_tokens(logits.nan_to_num(), [row.sampling for row in rows], positions, seen).tolist()


def padded(tokens: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows of tokens, filled with 0 to the longest one, and their lengths, on a CPU."""
    longest = max(map(len, tokens))
    ids = torch.tensor([[*own, *[0] * (longest - len(own))] for own in tokens], device=device)
    return ids, torch.tensor([len(own) for own in tokens])
