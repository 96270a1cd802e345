"""The training loop: step, evaluate, sample, save. prepare.py makes a Trainer, command.py runs it.

A run's folder:  config.json  metrics.jsonl  loss.png  tokenizer/  checkpoints/step-000100/  model/
"""

import math
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineate.generation import generate
from lineate.models import HybridLM
from lineate.models.families import check_saveable
from lineate.models.safetensors import write_tensors
from lineate.processor import why_wide
from lineate.tracing import cpu_by_default
from lineate.training import checkpoint
from lineate.training.batches import NO_TARGET, Batch
from lineate.training.compiling import weigh
from lineate.training.config import TrainConfig
from lineate.training.diagnosis import diagnose
from lineate.training.distributed import World
from lineate.training.order import ShuffledBatches
from lineate.training.report import RunReporter, plot_loss
from lineate.training.stopping import Interrupted, Signals
from lineate.training.tokenizer import Tokenizer

CONFIG_FILE = "config.json"
SAMPLE_TOKENS = 160
MAX_SKIPPED_STEPS = 10
"""Bad steps one after the other, at which on_bad_loss="skip" stops too."""


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why. What was saved before is whole."""


@dataclass
class Trainer:
    """A run between two steps."""

    config: TrainConfig
    world: World
    report: RunReporter
    tokenizer: Tokenizer
    data: dict[str, int]
    """What identifies the data: a resumed run must have the same."""
    batches: ShuffledBatches
    validation: ShuffledBatches
    model: HybridLM
    optimizer: torch.optim.Optimizer
    entropy: float
    """Of single tokens, in nats: what a model without context reaches."""
    step: int = 0
    """How many are done."""
    looked: int = 0
    """The last step after which the model was evaluated and sampled, where that was due."""
    saved: int = 0
    """Where a resumed run would go on: the step of the newest checkpoint."""
    position: int = 0
    """Of metrics.jsonl at that step."""
    best: float | None = None
    """Lowest validation loss."""
    skipped: int = 0
    """Bad steps in a row, up to this one."""
    signals: Signals = field(default_factory=Signals)
    _ahead: tuple[int, list[Batch]] = (-1, [])
    """A step and its micro-batches, made while a GPU computed the step before."""

    def begin(self) -> None:
        """Write down what the run is, and open its metrics."""
        config, view, sizes = self.config, self.batches.view, self.model.config
        out = Path(config.out)
        self.report.open(self.step, self.position, config.tensorboard)  # before all that another process would notice
        if self.world.is_main:
            checkpoint.write_json(out / CONFIG_FILE, config.to_dict())  # from here on the folder has a run
            self.tokenizer.save(out / "tokenizer")
        size = sum(x.numel() for x in self.model.parameters())
        ranks = f" on {self.world.size} ranks" if self.world.size > 1 else ""
        wide = why_wide(getattr(torch, config.dtype)) if self.world.device.type == "cpu" else None
        self.report.say(
            f"{config.model}: {sizes.n_layers} layers {sizes.letters}, {size / 1e6:.2f}M parameters, "
            f"{self.tokenizer.name}, {self.world.device.type}{ranks}, {config.dtype}, {config.optimizer}\n"
            f"{view.n_tokens:,} tokens of {view.n_documents:,} documents to learn from, "
            f"{self.validation.view.n_tokens:,} to validate with; unigram entropy {self.entropy:.3f} nats per token\n"
            f"steps {self.step} to {config.steps} of {config.rows} x {config.length} tokens, in {out}"
            + ("" if wide is None else f"\n{wide}, which is no faster than --dtype float32")
        )
        if config.compile:
            self.report.say(weigh(self))

    @cpu_by_default
    def run(self) -> None:
        """Train from `step` to config.steps, then save the model and draw the loss.

        SIGINT and SIGTERM end it between two steps, with a save; among several ranks, at once.
        """
        check_saveable(self.model)  # now, not when the first checkpoint is due
        with self.signals.listen(self._give_up) if self.world.size == 1 else nullcontext():
            try:
                self._train()
            except Interrupted:
                self.signals.busy = True  # until the end, which is near
                if self.saved != self.step:
                    self.save()
                raise TrainingStopped(f"stopped at step {self.step}; {self._how_to_go_on()}") from None
        self._finish()

    def _train(self) -> None:
        config = self.config
        if self.step == 0 and config.sample_every:
            self._look(False, True)
        while self.step < config.steps or self.looked < self.step:
            if self.looked == self.step:
                self.train_step()
            last = self.step == config.steps
            self._look(
                last or _due(self.step, config.eval_every),
                config.sample_every > 0 and (last or _due(self.step, config.sample_every)),
            )
            if (last or _due(self.step, config.save_every)) and self.saved != self.step:
                self.save()

    def close(self) -> None:
        self.report.close()
        self.world.close()

    def train_step(self) -> None:
        """One step of the optimiser."""
        started, config = time.monotonic(), self.config
        lr = config.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.signals.stoppable():
            mean, count = self.gradients()
            loss, norm = float(mean), float(self.world.clip(self.model, config.clip or math.inf))
        good = math.isfinite(loss) and math.isfinite(norm)
        if good:
            self.optimizer.step()
            self.skipped = 0
        else:
            self._bad_step(loss, norm)
        self.step += 1
        seconds, tokens = time.monotonic() - started, int(count)
        self.signals.took(seconds)
        values = (
            {"step": self.step, "loss": loss, "lr": lr, "norm": norm} if good else {"step": self.step, "skipped": True}
        )
        self.report.write(values | {"tokens": tokens, "tokens_per_second": round(tokens / seconds, 1)})
        self.report.step(self.step, loss, lr, tokens, seconds)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of the mean loss of this step's tokens, in the parameters' .grad.

        Returns the loss and how many tokens, the same on every rank.
        """
        world = self.world
        self.optimizer.zero_grad(set_to_none=True)
        made, pieces = self._ahead
        if made != self.step:
            pieces = list(self.pieces(self.batches, self.step))
        count = world.sum(torch.stack([(piece.targets != NO_TARGET).sum() for piece in pieces]).sum()).clamp(min=1)
        total = torch.zeros((), device=world.device)
        for piece in pieces:
            part = self._loss_sum(piece.to(world.device))
            (part / count).backward()
            total += part.detach()
        world.finish_gradients(self.model)
        total = world.sum(total)
        self._ahead = self.step + 1, list(self.pieces(self.batches, self.step + 1))
        return total / count, count

    def pieces(self, batches: ShuffledBatches, step: int) -> Iterator[Batch]:
        """This rank's micro-batches of a step."""
        world, many = self.world, self.config.accumulate
        for n in range(many):
            batch = batches.batch(step, world.data_rank * many + n, world.data_size * many)
            yield batch.shard(world.context_rank, world.context_size) if world.context_size > 1 else batch

    def logits(self, piece: Batch) -> Tensor:
        """`1 n vocab`, of a micro-batch on the device."""
        with self._autocast():
            return self.model(piece.ids, cu_seqlens=piece.cu_seqlens, continues=piece.continues).logits

    def evaluate(self) -> float:
        """Mean loss over the first eval_batches batches of the validation data, or all of it."""
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
        """The model's own text after config.prompt; the same for the same weights."""
        start = torch.tensor([[self.tokenizer.end, *self.tokenizer.encode(self.config.prompt)]], device="cpu")
        with self._autocast(), torch.compiler.set_stance("force_eager"):
            drawn = generate(self.model, start, tokens, temperature=0.8, top_p=0.95, seed=self.config.seed)
            ids = [int(token) for token in drawn]
        if self.tokenizer.end in ids:
            ids = ids[: ids.index(self.tokenizer.end)]
        known = [i for i in ids if i < self.tokenizer.vocab_size]  # a model's vocabulary may be larger
        return self.config.prompt + self.tokenizer.decode(known)

    def save(self) -> bool:
        """A checkpoint of this step; False if the disk refused."""
        check_saveable(self.model)
        folder = Path(self.config.out) / "checkpoints"
        busy, self.signals.busy = self.signals.busy, True
        done = checkpoint.save(folder, self.step, self._write, self.world, self.config.keep, self.report.warn)
        self.signals.busy = busy
        if done:
            self.saved = self.step
        return done

    def _write(self, folder: Path) -> None:
        """All files of a checkpoint; it is also a model's folder, unless several ranks wrote it."""
        checkpoint.write_state(folder, self.model, self.optimizer, self.world)  # all ranks at once, so it comes first
        if not self.world.is_main:
            return
        tensors, python = checkpoint.random_state(self.world.device)
        write_tensors(folder / "random.safetensors", tensors)
        state = {
            "step": self.step, "looked": self.looked, "config": self.config.to_dict(), "data": self.data,
            "metrics": self.report.position, "best": self.best, "skipped": self.skipped, "random": python,
        }  # fmt: skip
        checkpoint.write_json(folder / checkpoint.RUN_STATE_FILE, state)
        checkpoint.write_json(folder / CONFIG_FILE, _model_config(self.model))
        self.tokenizer.save(folder)

    def _bad_step(self, loss: float, norm: float) -> None:
        """Say what was not finite; then stop, or leave this step out."""
        what = f"the loss ({loss})" if not math.isfinite(loss) else f"the norm of the gradients ({norm})"
        with self.signals.stoppable():
            where, values = diagnose(self)
        message = f"{what} is not finite at step {self.step + 1}; {where}"
        self.skipped += 1
        if self.config.on_bad_loss == "skip" and not values and self.skipped < MAX_SKIPPED_STEPS:
            self.report.warn(f"{message}; the step is skipped")
            return
        many = f", {self.skipped} bad steps in a row" if self.skipped > 1 else ""
        skip = "" if values or self.config.on_bad_loss == "skip" else ", or with --on-bad-loss skip"
        raise TrainingStopped(f"{message}{many}; stopped: resume with a lower --lr{skip}")

    def _loss_sum(self, piece: Batch) -> Tensor:
        with self._autocast():
            return self.model.loss_sum(piece.ids, piece.targets, piece.cu_seqlens, piece.continues)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def _look(self, evaluate: bool, sample: bool) -> None:
        """Validation loss and a sample, where they are due; written down together, so that neither is there twice."""
        # A row split over ranks cannot be continued token by token; else only sharded weights need every rank.
        sample = sample and self.world.context_size == 1 and (self.world.is_main or self.world.shard == "full")
        loss, text = None, None
        if evaluate or sample:
            with self.signals.stoppable():
                loss = self.evaluate() if evaluate else None
                text = self.sample() if sample else None
        self.looked = self.step
        if loss is not None:
            if math.isfinite(loss):
                self.best = loss if self.best is None else min(self.best, loss)
                self.report.write({"step": self.step, "validation_loss": loss})
            self.report.say(f"step {self.step}: validation loss {loss:.4f} nats per token")
        if text is not None:
            self.report.sample(self.step, text)

    def _how_to_go_on(self) -> str:
        back = "" if self.saved == self.step else f", from step {self.saved}: later ones were not saved"
        return f"go on with lineate train --resume {self.config.out}{back}"

    def _give_up(self) -> None:
        """Say the last words of a process that is ended while it computes."""
        self.report.hide()
        print(f"lineate: stopped at once after step {self.step}; {self._how_to_go_on()}", file=sys.stderr, flush=True)

    def _finish(self) -> None:
        """The model, and the plot of its loss."""
        out, world = Path(self.config.out), self.world
        self.report.close()
        try:
            self._save_model(out / "model")
        except OSError as error:
            rest = f"the checkpoint of step {self.saved} is whole" if self.saved else "nor was any checkpoint"
            raise TrainingStopped(
                f"the model was not saved ({error.strerror or error}), {rest}; make room, then lineate train --resume "
                f"{out} goes on from step {self.saved}"
            ) from None
        if not world.is_main:
            return
        best = "" if self.best is None else f"best validation loss {self.best:.4f} nats per token\n"
        try:
            plot = f"the loss: {plot_loss(out, self.entropy)}\n"
        except (ModuleNotFoundError, OSError, ValueError) as error:
            plot = ""
            self.report.warn(f"no plot of the loss ({error})")
        if world.device.type == "cuda":
            best += f"most GPU memory {torch.cuda.max_memory_allocated(world.device) / 2**20:.0f} MiB\n"
        prompt = shlex.quote(self.config.prompt)
        self.report.say(f"{best}{plot}the model: {out / 'model'}; try lineate generate {out} --prompt {prompt}")

    def _save_model(self, folder: Path) -> None:
        if self.world.is_main:
            self.tokenizer.save(folder)
            for left in folder.glob(".*.part"):  # by a process that was killed
                left.unlink()
        if self.world.size == 1:
            self.model.save_pretrained(folder)
        else:
            from lineate.models.checkpoint import save
            from lineate.training.sharded import full_state

            check_saveable(self.model)
            tensors = full_state(self.model)
            if self.world.is_main:
                save(folder, tensors, _model_config(self.model))


def _model_config(model: HybridLM) -> dict[str, Any]:
    """config.json of a folder that HybridLM.from_pretrained reads."""
    return {"model_type": "lineate", "dtype": "float32", **model.config.to_dict()}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
