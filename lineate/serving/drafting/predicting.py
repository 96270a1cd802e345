"""The drafter that guesses with the model's own head of multi-token prediction (models/prediction.py).

Entry i of the prediction head is computed from token i + 1 and from the input of the model's head for token i, which
the model therefore provides (`observe`). Guesses continue the prediction head's own cache and are discarded; the
entries of chosen tokens are recomputed in the next call, from the actual inputs of the model's head.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lineate.layers import TensorSpec
from lineate.models import HybridLM
from lineate.serving.drafting.drafter import DraftRow, Known
from lineate.serving.drafting.stepwise import Pass, StepwiseDrafter, padded, states_nbytes


class _Observed(Known):
    """Inputs of the model's head for the tokens of a sequence from index `first` on that have no entries yet."""

    def __init__(self, first: int, hidden: Tensor) -> None:
        super().__init__()
        self.first, self.hidden = first, hidden

    @property
    def end(self) -> int:
        return self.first + self.hidden.shape[0]

    def take(self, count: int) -> Tensor:
        """Remove and return the first `count` vectors."""
        taken, self.hidden = self.hidden[:count], self.hidden[count:]
        self.first += count
        return taken


class PredictionDrafter(StepwiseDrafter[_Observed]):
    """Guess with the head of multi-token prediction of the model that verifies.

    If the beginning of a sequence was not observed, because a cache had its state, only the rest is used.

    Args:
        model: a model whose checkpoint has the weights, so that model.prediction is not None.
    """

    needs_hidden = True

    def __init__(self, model: HybridLM) -> None:
        if model.prediction is None:
            raise ValueError(
                "model must have a head of multi-token prediction, got none; its checkpoint has no such weights that "
                "lineate can read, or it was loaded with prediction=False"
            )
        super().__init__()
        self.model, self.head = model, model.prediction

    def row_nbytes(self, tokens: int, guesses: int) -> int:
        """Return the most bytes of the head's cache, and of the observed vectors that it has not read; see BaseDrafter.

        Args:
            tokens: The most tokens of a sequence.
            guesses: The most guesses for it at a time.
        """
        specs: tuple[TensorSpec, ...] = self.head.block.mixer.state_spec  # type: ignore[assignment]
        memories = sum(spec.nbytes(0) for spec in specs)
        token = sum(spec.nbytes(1) for spec in specs) - memories
        observed = 2 * min(tokens, self.PIECE) * self.model.config.hidden_size * self.model.dtype.itemsize
        return states_nbytes(memories, token, tokens, guesses) + observed

    @torch.no_grad()
    def observe(self, key: Hashable, ids: Sequence[int], start: int, hidden: Tensor) -> None:
        """Receive the inputs of the model's head for final tokens of a sequence; entries of prompts are computed here.

        Args:
            key: names the sequence.
            ids: its known tokens, at least those of the whole prompt.
            start: the index of the first of these tokens.
            hidden: `n hidden`, one vector per token; the tensor is kept, not copied.
        """
        known = self._known.get(key)
        if known is None or start > known.end:  # earlier tokens were not observed
            self.forget(key)
            self._known[key] = known = _Observed(start, hidden)
        else:
            new = hidden[known.end - start :]
            known.hidden = torch.cat((known.hidden, new)) if known.hidden.shape[0] else new
        if known.hidden.shape[0] > self.AT_ONCE:
            self._keep_up(key, ids)

    def _prepare(self, row: DraftRow, most: int) -> int:
        known = self._known.get(row.key)
        if known is None:
            return 0
        length = known.pace.next_length(row.ids, most)
        if not length or known.end != len(row.ids) - 1 or not known.hidden.shape[0]:
            return 0  # guessing pauses, or inputs of the model's head are missing
        if row.key not in self._states or known.hidden.shape[0] > self.AT_ONCE:
            self._keep_up(row.key, row.ids)
        return length if row.key in self._states else 0

    def _keep_up(self, key: Hashable, ids: Sequence[int]) -> None:
        """Compute the entries of a sequence except the last one, whose prediction is needed."""
        known, state = self._known[key], self._states.pop(key)
        count = min(known.hidden.shape[0], len(ids) - 1 - known.first) - 1
        while count > 0:
            tokens = ids[known.first + 1 : known.first + 1 + min(count, self.PIECE)]
            hidden = known.take(len(tokens))
            _, state = self.head(self.model.embed(torch.tensor([tokens], device=hidden.device)), hidden[None], state)
            count -= len(tokens)
        if state is not None:
            self._states.add(key, state)

    def _read_pending(self, rows: Sequence[DraftRow]) -> Pass:
        """Compute the entries of all rows up to their last tokens in one pass."""
        known = [self._known[row.key] for row in rows]
        tokens, counts = padded(
            [row.ids[own.first + 1 :] for row, own in zip(rows, known, strict=True)], self.model.device
        )
        hidden = torch.nn.utils.rnn.pad_sequence([own.take(own.hidden.shape[0]) for own in known], batch_first=True)
        x, trailed = self.head.trail(self.model.embed(tokens), hidden, self._states.take([row.key for row in rows]))
        last = x[torch.arange(len(rows)), counts - 1]
        return Pass(trailed.after(counts), self.model.logits(last), last)

    def _read_guesses(self, tokens: Tensor, last: Pass) -> Pass:
        """Compute one entry per row from the head's own predictions."""
        assert last.hidden is not None
        predicted, state = self.head(self.model.embed(tokens), last.hidden[:, None], last.state)
        return Pass(state, self.model.logits(predicted[:, -1]), predicted[:, -1])
