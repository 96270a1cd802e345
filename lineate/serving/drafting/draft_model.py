"""The drafter that is a smaller model of the same vocabulary."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lineate.models import HybridLM
from lineate.serving.drafting.drafter import DraftRow, Known
from lineate.serving.drafting.stepwise import Pass, StepwiseDrafter, padded, states_nbytes


class _Read(Known):
    """How many tokens of a sequence its state has read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0


class DraftModel(StepwiseDrafter[_Read]):
    """Guess with a smaller model of the same vocabulary, which draws with the noise that the larger one will use.

    Its state of every sequence has read the tokens that were chosen. Guesses continue it and are discarded; the next
    call reads those that were right, of all rows in one pass.

    Args:
        model: the smaller model, of any family or pattern, in eval mode.
        vocab_size: tokens of the larger model's vocabulary, which must be the same.
    """

    def __init__(self, model: HybridLM, vocab_size: int) -> None:
        if model.config.vocab_size != vocab_size:
            raise ValueError(
                f"model must have the vocabulary of the model that it guesses for, {vocab_size} tokens, got "
                f"{model.config.vocab_size}"
            )
        super().__init__()
        self.model = model

    def row_nbytes(self, tokens: int, guesses: int) -> int:
        """Return the most bytes of the smaller model's states for a sequence; see BaseDrafter.

        Args:
            tokens: The most tokens of a sequence.
            guesses: The most guesses for it at a time.
        """
        memories = self.model.state_nbytes(1, 0)
        return states_nbytes(memories, self.model.state_nbytes(1, 1) - memories, tokens, guesses)

    def _prepare(self, row: DraftRow, most: int) -> int:
        length = self._known.setdefault(row.key, _Read()).pace.next_length(row.ids, most)
        if not length or len(row.ids) < 2:
            return 0
        self._keep_up(row)
        return length

    def _keep_up(self, row: DraftRow) -> None:
        """Read the prompt, or the tokens that a row missed without guesses, except the last ones."""
        first = self._known[row.key].read
        if row.key in self._states and len(row.ids) - first <= self.AT_ONCE:
            return
        state = self._states.pop(row.key)
        for start in range(first, len(row.ids) - 1, self.PIECE):
            piece = torch.tensor([row.ids[start : min(start + self.PIECE, len(row.ids) - 1)]], device=self.model.device)
            state = self.model(piece, state=state, last_only=True).state
        assert state is not None
        self._states.add(row.key, state)
        self._known[row.key].read = len(row.ids) - 1

    def _read_pending(self, rows: Sequence[DraftRow]) -> Pass:
        pending = [list(row.ids[self._known[row.key].read :]) for row in rows]
        ids, counts = padded(pending, self.model.device)
        out = self.model.trail(ids, self._states.take([row.key for row in rows]))
        for row in rows:
            self._known[row.key].read = len(row.ids)
        return Pass(out.trail.after(counts), out.logits[torch.arange(len(rows)), counts - 1])

    def _read_guesses(self, tokens: Tensor, last: Pass) -> Pass:
        out = self.model(tokens, state=last.state)
        return Pass(out.state, out.logits[:, -1])
