"""The drafter that guesses with the model's own head of multi-token prediction (models/prediction.py).

Entry i of the head is made from token i + 1 and from what the model's head read for token i. So the model must say
what that was (`observe`). Guesses continue the head's own cache and are given up; the entries of tokens that were
chosen are made again in the next call, from what the model's head really read.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lineate.models import HybridLM, ModelState
from lineate.serving.drafting import DraftRow, Pace, RowStates, draw, padded, taken_back


class _Observed:
    """What the model's head read for the tokens of a sequence from index `first` on, whose entries are not made yet."""

    def __init__(self, first: int, hidden: Tensor) -> None:
        self.first, self.hidden = first, hidden
        self.pace = Pace()

    @property
    def end(self) -> int:
        return self.first + self.hidden.shape[0]

    def take(self, count: int) -> Tensor:
        """Remove and return the first so many vectors."""
        taken, self.hidden = self.hidden[:count], self.hidden[count:]
        self.first += count
        return taken


class PredictionDrafter:
    """Guess with the head of multi-token prediction of the model that verifies.

    A sequence whose beginning was not observed, because a cache had its state, is guessed from what was.

    Args:
        model: a model whose checkpoint has the weights, so that model.prediction is not None.
    """

    needs_hidden = True
    AT_ONCE = 16
    """Rows with more entries to make are read alone."""
    PIECE = 2048
    """Prompts are read in pieces of so many tokens."""

    def __init__(self, model: HybridLM) -> None:
        if model.prediction is None:
            raise ValueError(
                "model must have a head of multi-token prediction, got none; its checkpoint has no such weights that "
                "lineate can read, or it was loaded with prediction=False"
            )
        self.model, self.head = model, model.prediction
        self._states = RowStates()
        self._observed: dict[Hashable, _Observed] = {}

    @torch.no_grad()
    def observe(self, key: Hashable, ids: Sequence[int], start: int, hidden: Tensor) -> None:
        """Take what the model's head read for tokens of a sequence that are final; entries of prompts are made here.

        Args:
            key: names the sequence.
            ids: its tokens as far as they are known, those of the whole prompt at least.
            start: the index of the first of these tokens.
            hidden: `n hidden`, one vector a token; the tensor is kept, not copied.
        """
        known = self._observed.get(key)
        if known is None or start > known.end:  # nothing is known of the tokens before
            self.forget(key)
            self._observed[key] = known = _Observed(start, hidden)
        else:
            new = hidden[known.end - start :]
            known.hidden = torch.cat((known.hidden, new)) if known.hidden.shape[0] else new
        if known.hidden.shape[0] > self.AT_ONCE:
            self._keep_up(key, ids)

    @torch.no_grad()
    def propose(self, rows: Sequence[DraftRow], most: int) -> list[list[int]]:
        """Return at most so many guesses for each row; see Drafter.

        Args:
            rows: the sequences.
            most: the most tokens for each.
        """
        guesses: list[list[int]] = [[] for _ in rows]
        lengths = [self._length(row, most) for row in rows]
        able = [n for n in range(len(rows)) if lengths[n]]
        if not able:
            return guesses
        own = [rows[n] for n in able]
        base, x = self._read_pending(own)  # rows hidden
        now = base
        for step in range(max(lengths[n] for n in able)):
            if step:
                ids = torch.tensor([guesses[n][-1:] for n in able], device=x.device)
                predicted, now = self.head(self.model.embed(ids), x[:, None], now)
                x = predicted[:, -1]
            tokens = draw(self.model.logits(x), own, [guesses[n] for n in able])
            for n, token in zip(able, tokens, strict=True):
                guesses[n].append(token)
        self._states.put(taken_back(base, now))
        for n in able:
            guesses[n] = guesses[n][: lengths[n]]
            self._observed[rows[n].key].pace.note(len(rows[n].ids), guesses[n])
        return guesses

    def _length(self, row: DraftRow, most: int) -> int:
        """Return how many tokens to guess: none if the model's head was not observed as far as it must have read."""
        known = self._observed.get(row.key)
        if known is None:
            return 0
        length = known.pace.next_length(row.ids, most)
        if not length or known.end != len(row.ids) - 1 or not known.hidden.shape[0]:
            return 0
        if row.key not in self._states or known.hidden.shape[0] > self.AT_ONCE:
            self._keep_up(row.key, row.ids)
        return length if row.key in self._states else 0

    def _keep_up(self, key: Hashable, ids: Sequence[int]) -> None:
        """Make the entries of a sequence but for the last one, whose prediction is wanted."""
        known, state = self._observed[key], self._states.pop(key)
        count = min(known.hidden.shape[0], len(ids) - 1 - known.first) - 1
        while count > 0:
            tokens = ids[known.first + 1 : known.first + 1 + min(count, self.PIECE)]
            hidden = known.take(len(tokens))
            _, state = self.head(self.model.embed(torch.tensor([tokens], device=hidden.device)), hidden[None], state)
            count -= len(tokens)
        if state is not None:
            self._states.add(key, state)

    def _read_pending(self, rows: Sequence[DraftRow]) -> tuple[ModelState, Tensor]:
        """Make the entries of all rows up to their last tokens in one pass; return the state and the last results."""
        known = [self._observed[row.key] for row in rows]
        tokens, counts = padded(
            [row.ids[own.first + 1 :] for row, own in zip(rows, known, strict=True)], self.model.device
        )
        hidden = torch.nn.utils.rnn.pad_sequence([own.take(own.hidden.shape[0]) for own in known], batch_first=True)
        x, trailed = self.head.trail(self.model.embed(tokens), hidden, self._states.take([row.key for row in rows]))
        return trailed.after(counts), x[torch.arange(len(rows)), counts - 1]

    def forget(self, key: Hashable) -> None:
        """Drop all that is kept of a sequence.

        Args:
            key: names the sequence.
        """
        self._states.pop(key)
        self._observed.pop(key, None)
