"""The computation of a training step: batches to losses and gradients, without changing the weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from lineate.generation import generate
from lineate.models import HybridLM
from lineate.text import Detokenizer, Tokenizer
from lineate.training.batches import NO_TARGET, Batch
from lineate.training.config import TrainConfig
from lineate.training.distributed import World
from lineate.training.order import ShuffledBatches

SAMPLE_TOKENS = 160


@dataclass(kw_only=True)
class Learner:
    """A model with its data and its optimiser at one step, and the losses and gradients computed from them."""

    config: TrainConfig
    world: World
    tokenizer: Tokenizer
    batches: ShuffledBatches
    """Training batches."""
    validation: ShuffledBatches
    model: HybridLM
    optimizer: torch.optim.Optimizer
    step: int = 0
    """How many steps are done."""
    sequences: int = 0
    """Micro-batches with fewer packed sequences get empty ones, so that CUDA graphs have bounds of one shape."""
    _ahead: tuple[int, list[Batch]] = (-1, [])
    """A step and its micro-batches, which the CPU prepared while a GPU computed the previous step."""

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the mean loss over this step's tokens, into the parameters' .grad.

        Returns:
            The mean loss and the number of tokens in it, the same on every rank.
        """
        world = self.world
        self.optimizer.zero_grad(set_to_none=True)
        pieces = self.next_pieces()
        count = world.sum(count_targets(pieces)).clamp(min=1)
        total = torch.zeros((), device=world.device)
        for piece in pieces:
            part = self._loss_sum(piece.to(world.device))
            (part / count).backward()
            total += part.detach()
        world.finish_gradients(self.model)
        total = world.sum(total)
        self.fetch_ahead()
        return total / count, count

    def next_pieces(self) -> list[Batch]:
        """Return this rank's micro-batches of this step, on the CPU."""
        made, pieces = self._ahead
        return pieces if made == self.step else self._fetch(self.step)

    def fetch_ahead(self) -> None:
        """Prepare the micro-batches of the next step, while a GPU computes this one."""
        self._ahead = self.step + 1, self._fetch(self.step + 1)

    def share_of_loss(self, ids: Tensor, targets: Tensor, cu_seqlens: Tensor, count: Tensor) -> Tensor:
        """Return the summand of a micro-batch in the mean loss of a step, for GraphedStep.

        Args:
            ids: The tokens `1 n`.
            targets: What follows each, `1 n`.
            cu_seqlens: The bounds of the sequences.
            count: The number of targets in all micro-batches of the step.
        """
        return self._loss_sum(Batch(ids, targets, cu_seqlens)) / count

    def pieces(self, batches: ShuffledBatches, step: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches of a step.

        Args:
            batches: Training or validation batches.
            step: The step, from 0.
        """
        world, many = self.world, self.config.accumulate
        for n in range(many):
            batch = batches.batch(step, world.data_rank * many + n, world.data_size * many)
            yield batch.shard(world.context_rank, world.context_size) if world.context_size > 1 else batch

    def _fetch(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step of training, ready to be copied to the device."""
        pieces = [piece.padded(self.sequences) for piece in self.pieces(self.batches, step)]
        return [piece.pinned() for piece in pieces] if self.world.device.type == "cuda" else pieces

    def logits(self, piece: Batch) -> Tensor:
        """Return the logits `1 n vocab` of a micro-batch that is on the device.

        Args:
            piece: The micro-batch.
        """
        with self._autocast():
            return self.model(piece.ids, cu_seqlens=piece.cu_seqlens, continues=piece.continues).logits

    def evaluate(self) -> float:
        """Return the mean loss over the first eval_batches validation batches, or over all if there are fewer."""
        some = min(self.config.eval_batches, -(-self.validation.epoch_rows // self.config.rows))
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        count = torch.zeros((), dtype=torch.int64, device="cpu")
        for n in range(some):
            for piece in self.pieces(self.validation, n):
                with torch.no_grad():
                    total += self._loss_sum(piece.to(self.world.device))
                count += (piece.targets != NO_TARGET).sum()
        return float(self.world.sum(total)) / max(1, int(self.world.sum(count)))

    def sample(self, tokens: int = SAMPLE_TOKENS) -> str:
        """Return config.prompt and the text with which the model continues it; the same for the same weights.

        Args:
            tokens: The most tokens to generate.
        """
        before = self.tokenizer.start or (self.tokenizer.end,)
        prompt = self.tokenizer.encode(self.config.prompt)
        start = torch.tensor([[*before, *prompt]], device="cpu")
        with self._autocast(), torch.compiler.set_stance("force_eager"):
            drawn = generate(self.model, start, tokens, temperature=0.8, top_p=0.95, seed=self.config.seed)
            ids = [int(token) for token in drawn]
        ids = list(takewhile(lambda token: token not in self.tokenizer.ends, ids))
        known = [i for i in ids if i < self.tokenizer.vocab_size]  # the model's vocabulary may be larger
        text = Detokenizer(self.tokenizer, after=prompt)
        return self.config.prompt + "".join(map(text.push, known)) + text.finish()

    def _loss_sum(self, piece: Batch) -> Tensor:
        with self._autocast():
            return self.model.loss_sum(piece.ids, piece.targets, piece.cu_seqlens, piece.continues)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")


def count_targets(pieces: Sequence[Batch]) -> Tensor:
    """Return the number of tokens of micro-batches that have a target, on their device."""
    return torch.stack([(piece.targets != NO_TARGET).sum() for piece in pieces]).sum()
