"""The training loop: step, evaluate, sample, save. prepare.py makes a Trainer, and command.py runs it.

A run's folder has  config.json  metrics.jsonl  loss.png  tokenizer/  checkpoints/step-000100/  model/
"""

import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lineate.models import HybridLM
from lineate.models.files.safetensors import write_tensors
from lineate.models.hybrid import check_saveable
from lineate.models.sharding import whole_state
from lineate.system.processor import why_wide
from lineate.torch_ops.tracing import cpu_by_default
from lineate.training import checkpoint
from lineate.training.batches import Batch
from lineate.training.compiling import weigh
from lineate.training.config import CONFIG_FILE
from lineate.training.diagnosis import diagnose
from lineate.training.graphed import GraphedStep, MicroBatches
from lineate.training.learner import Learner, count_targets
from lineate.training.optim import can_be_called_off
from lineate.training.report import RunReporter, plot_loss
from lineate.training.stopping import Interrupted, Signals
from lineate.training.unseen import Seen, Unseen

Result = TypeVar("Result")

MAX_SKIPPED_STEPS = 10
"""After this many bad steps in a row a run stops even with on_bad_loss="skip"."""


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why. Checkpoints that were saved before are complete."""


@dataclass(kw_only=True)
class Trainer(Learner):
    """A run between two steps: a learner with its folder, its reports and its checkpoints.

    With runs_ahead, the CPU queues the gradients of a step before it reads the loss of the previous step, so that the
    GPU never waits for the CPU. A queued update changes nothing if the loss or the norm is not finite, and a bad step
    stops the run or is skipped, as without runs_ahead. The CPU always waits for the first step, which creates the
    optimiser's state, and for all steps with an optimiser whose updates cannot be skipped on the device.

    With whole_steps, the CPU queues the update as well before it reads the loss of the previous step. After a bad step
    no update changes anything until its loss is read; the step queued after it is then computed a second time.
    """

    report: RunReporter
    data: dict[str, int]
    """Sizes and checksums of the data, which must be the same when the run is resumed."""
    entropy: float
    """Entropy of single tokens in nats, the loss of the best model that ignores context."""
    threads: int = 0
    """How many threads torch computes with in this run."""
    threads_before: int = 0
    """How many it had before, which close() sets again; 0: nothing to set."""
    looked: int = 0
    """The last step after which the validation loss and the sample, if due, were computed."""
    saved: int = 0
    """The step of the newest checkpoint, from which a resumed run would continue."""
    position: int = 0
    """Size of metrics.jsonl, in bytes, when that checkpoint was saved."""
    best: float | None = None
    """Lowest validation loss so far."""
    skipped: int = 0
    """How many steps in a row, up to this one, were bad."""
    runs_ahead: bool = False
    """Whether train_step leaves reading its loss to the next one, or to settle."""
    whole_steps: bool = False
    """Whether a step, its update included, is queued at once, by a GraphedStep; config.graph says how."""
    no_graph: str | None = None
    """Why steps cannot be CUDA graphs, as far as known before the first one."""
    signals: Signals = field(default_factory=Signals)
    graphed: GraphedStep | None = None
    """Makes whole steps, from the first one on."""
    _unseen: Unseen | None = None
    _since: float = 0.0
    """When the loss of the last step was read, or the first step after a pause began."""

    def begin(self) -> None:
        """Save the configuration and the tokenizer, open the metrics, and print what the run will do."""
        config, view, sizes = self.config, self.batches.view, self.model.config
        out = Path(config.out)
        self.report.open(self.step, self.position, config.tensorboard)  # first, since it locks the folder
        if self.world.is_main:
            checkpoint.write_json(out / CONFIG_FILE, config.to_dict())  # with this file the folder counts as a run
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
        if config.graph == "auto" and self.no_graph is not None and self.world.device.type == "cuda":
            self.report.say(f"no CUDA graph: {self.no_graph}")

    @cpu_by_default
    def run(self) -> None:
        """Train from `step` to config.steps, then save the model and plot the loss.

        SIGINT and SIGTERM stop a single process between two steps, with a checkpoint; with several ranks they end the
        process at once.
        """
        self._check_saveable()  # fail now rather than at the first checkpoint
        with self.signals.listen(self._give_up) if self.world.size == 1 else nullcontext():
            try:
                self._train()
            except Interrupted:
                self.signals.busy = True  # so that the final checkpoint is not cut short
                with suppress(Interrupted):  # at a bad step, which is then left out
                    self.settle()
                self.looked = min(self.looked, self.step)
                if self.saved != self.step:
                    self.save()
                raise TrainingStopped(f"stopped at step {self.step}; {self._how_to_go_on()}") from None
        self._finish()

    def _train(self) -> None:
        """Make the remaining steps, and evaluate, sample and save after those where it is due."""
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
        """Report the last step if that was not done, close the report and leave the process group."""
        self._report_unseen()
        self.report.close()
        if self.threads_before:
            torch.set_num_threads(self.threads_before)
        self.world.close()

    def train_step(self) -> None:
        """Make one step of the optimiser."""
        if self._unseen is None:
            self._since = time.monotonic()
        lr = self.config.learning_rate(self.step)
        if self.whole_steps:
            numbers, tokens = self._whole_step(lr)
            if not self.settle():
                numbers, tokens = self._whole_step(lr)  # again: the bad step had halted this one
            ahead = self.runs_ahead
        else:
            numbers, tokens, ahead = self._step_in_parts(lr)
        self._unseen = Unseen(self.step, lr, tokens, numbers)
        self.step += 1
        if not ahead:
            self.settle()

    def _step_in_parts(self, lr: float) -> tuple[Tensor, int, bool]:
        """Queue the gradients, settle the previous step, then update; return also whether that waited for nothing."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        numbers, tokens = self._loss_and_norm()
        if not self.settle():
            numbers, tokens = self._loss_and_norm()  # again: the diagnosis has overwritten the gradients
        ahead = self.runs_ahead and bool(self.optimizer.state) and can_be_called_off(self.optimizer)
        if ahead:
            self.optimizer.found_inf = (~numbers.isfinite().all()).float()  # type: ignore[attr-defined]
            self.optimizer.step()
            self.optimizer.found_inf = None  # type: ignore[attr-defined]
        elif bool(numbers.isfinite().all()):
            self.optimizer.step()
        return numbers, tokens, ahead

    def _whole_step(self, lr: float) -> tuple[Tensor, int]:
        """Queue a whole step, unless a signal came before; return its loss and norm, and its tokens."""
        with self.signals.stoppable():  # until the update is queued, from where on the step counts
            pieces = self.next_pieces()
            count = max(1, int(count_targets(pieces)))
            batches = _items(pieces, count)
            if self.graphed is None:  # for as many sequences as most steps have, even if the first one has more
                example = [piece.joined(self.sequences) for piece in pieces] if self.sequences else pieces
                self.graphed = self._make_graphed(_items(example, count))
            if not self.graphed.fits(batches):  # with lengths that nothing needs to read from the GPU
                batches = _items([piece.to(self.world.device) for piece in pieces], count)
            missed, why = self.graphed.missed, self.graphed.why
        taken = self.graphed(batches, lr)
        if self.graphed.missed == 1 and not missed:
            most = max(len(piece.cu_seqlens) - 1 for piece in pieces)
            self.report.say(
                f"step {self.step + 1} runs without the CUDA graph: a micro-batch has {most} sequences, the graph is "
                f"for {self.sequences}; other such steps are not named"
            )
        if why is None and self.graphed.why is not None:
            self.report.say(f"no CUDA graph from now on: {self.graphed.why}")
        self.fetch_ahead()
        return taken.numbers, count

    def _beside_graph(self, work: Callable[[], Result]) -> Result:
        """Return the result of work; if the GPU has no memory for it, free that of the graph and try a second time."""
        try:
            return work()
        except torch.OutOfMemoryError:
            if self.graphed is None or self.graphed.why is not None:
                raise
        self.graphed.release("the GPU has no memory for the graph and for work between steps")
        self.report.say(f"no CUDA graph from now on: {self.graphed.why}")
        return work()

    def _make_graphed(self, batches: MicroBatches) -> GraphedStep:
        """Return the object that makes the steps of this run, and print how it makes them."""
        graph, clip = self.config.graph, self.config.clip or None
        made = GraphedStep(
            self.model, self.optimizer, self.share_of_loss, batches, clip=clip, halts=True, graph=graph != "off"
        )
        if graph == "on" and made.why is not None:
            raise TrainingStopped(f"graph = on is not possible: {made.why}; use --graph auto")
        if graph != "off":
            self.report.say("each step is one CUDA graph" if made.why is None else f"no CUDA graph: {made.why}")
        return made

    def settle(self) -> bool:
        """Read the loss of the last step, unless that is done, and report it.

        Returns:
            False if it was bad and was skipped; then the parameters' .grad are no longer those of a later step.
        """
        if self._unseen is None:
            return True
        unseen, self._unseen = self._unseen, None
        seen = unseen.look()
        if seen.bad is None:
            self.skipped = 0
        else:
            after, self.step = self.step, unseen.step
            try:
                self._bad_step(seen.bad)
            finally:  # also where the run stops, since this object may go on
                if self.graphed is not None:
                    self.graphed.resume()
            self.step = after
        self._report_step(unseen, seen)
        return seen.bad is None

    def _report_step(self, unseen: Unseen, seen: Seen) -> None:
        """Write the metrics of a step, and show it."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self.signals.took(seconds)
        step, tokens = unseen.step + 1, unseen.tokens
        values = {"loss": seen.loss, "lr": unseen.lr, "norm": seen.norm} if seen.bad is None else {"skipped": True}
        speed = {"tokens": tokens, "tokens_per_second": round(tokens / seconds, 1)}
        self.report.write({"step": step} | values | speed)
        self.report.step(step, seen.loss, unseen.lr, tokens, seconds)

    def _report_unseen(self) -> None:
        """Report the last step if its loss has not been read, without diagnosis: the run ends with another error."""
        if self._unseen is None:
            return
        unseen, self._unseen = self._unseen, None
        with suppress(RuntimeError):  # where the GPU has failed, which is the error that the run ends with
            seen = unseen.look()
            if seen.bad is None:
                self._report_step(unseen, seen)
            else:
                self.report.warn(f"{seen.bad} is not finite at step {unseen.step + 1}, which changed nothing")

    def _loss_and_norm(self) -> tuple[Tensor, int]:
        """Compute the gradients of this step and clip them; return the loss and their norm, and the tokens."""
        with self.signals.stoppable():
            mean, count = self.gradients()
            norm = self.world.clip(self.model, self.config.clip or math.inf)
            return torch.stack([mean.double(), norm.double()]), int(count)

    def save(self) -> bool:
        """Save a checkpoint of this step; return False if it could not be written."""
        self.settle()
        self._check_saveable()
        folder = Path(self.config.out) / "checkpoints"
        busy, self.signals.busy = self.signals.busy, True
        done = checkpoint.save(folder, self.step, self._write, self.world, self.config.keep, self.report.warn)
        self.signals.busy = busy
        if done:
            self.saved = self.step
        return done

    def _check_saveable(self) -> None:
        """Raise unless the configuration describes the model; one rank's share of it was made from that."""
        if self.model.ranks is None:
            check_saveable(self.model)

    def _write(self, folder: Path) -> None:
        """Write all files of a checkpoint. If one process writes it, it can also be loaded as a model."""
        checkpoint.write_state(folder, self.model, self.optimizer, self.world)  # all ranks take part
        if not self.world.is_main:
            return
        tensors, python = checkpoint.random_state(self.world.device)
        write_tensors(folder / "random.safetensors", tensors)
        state = {
            "step": self.step, "looked": self.looked, "config": self.config.to_dict(), "data": self.data,
            "metrics": self.report.position, "best": self.best, "skipped": self.skipped, "random": python,
            "threads": self.threads if self.world.device.type == "cpu" else None,
        }  # fmt: skip
        checkpoint.write_json(folder / checkpoint.RUN_STATE_FILE, state)
        checkpoint.write_json(folder / CONFIG_FILE, _model_config(self.model))
        self.tokenizer.save(folder)

    def _bad_step(self, what: str) -> None:
        """Report what is not finite; then stop the run, or skip this step."""
        with self.signals.stoppable():
            where, values = self._beside_graph(lambda: diagnose(self))
        message = f"{what} is not finite at step {self.step + 1}; {where}"
        self.skipped += 1
        if self.config.on_bad_loss == "skip" and not values and self.skipped < MAX_SKIPPED_STEPS:
            self.report.warn(f"{message}; the step is skipped")
            return
        many = f", {self.skipped} bad steps in a row" if self.skipped > 1 else ""
        skip = "" if values or self.config.on_bad_loss == "skip" else ", or with --on-bad-loss skip"
        raise TrainingStopped(f"{message}{many}; stopped: resume with a lower --lr{skip}")

    def _look(self, evaluate: bool, sample: bool) -> None:
        """Evaluate and sample, then record both at once: an interruption in between would record one of them twice."""
        # Rows that are split over ranks cannot be sampled. Otherwise rank 0 samples alone, unless weights are sharded.
        alone = self.world.shard != "full" and self.world.tensor_size == 1
        sample = sample and self.world.context_size == 1 and (self.world.is_main or not alone)
        loss, text = None, None
        if evaluate or sample:
            self.settle()
            with self.signals.stoppable():
                loss = self._beside_graph(self.evaluate) if evaluate else None
                text = self._beside_graph(self.sample) if sample else None
        self.looked = self.step
        if loss is not None:
            if math.isfinite(loss):
                self.best = loss if self.best is None else min(self.best, loss)
                self.report.write({"step": self.step, "validation_loss": loss})
            self.report.say(f"step {self.step}: validation loss {loss:.4f} nats per token")
        if text is not None:
            self.report.sample(self.step, text)

    def _how_to_go_on(self) -> str:
        """Name the command that resumes the run, and the step that it resumes from."""
        back = "" if self.saved == self.step else f", from step {self.saved}: later ones were not saved"
        return f"go on with lineate train --resume {self.config.out}{back}"

    def _give_up(self) -> None:
        """Print where to resume, before the process is ended in the middle of a step."""
        self.report.hide()
        done = self.step if self._unseen is None else self._unseen.step
        print(f"lineate: stopped at once after step {done}; {self._how_to_go_on()}", file=sys.stderr, flush=True)

    def _finish(self) -> None:
        """Save the model and plot the loss."""
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
        """Write the finished model and its tokenizer; all ranks must call it."""
        if self.world.is_main:
            self.tokenizer.save(folder)
            for left in folder.glob(".*.part"):  # left by a process that was killed
                left.unlink()
        if self.world.size == 1:
            self.model.save_pretrained(folder)
        else:
            from lineate.models.files.checkpoint import save
            from lineate.training.sharded import full_state

            self._check_saveable()
            tensors = full_state(self.model) if self.model.ranks is None else whole_state(self.model)
            if self.world.is_main:
                save(folder, tensors, _model_config(self.model))


def _model_config(model: HybridLM) -> dict[str, Any]:
    """Return the config.json that HybridLM.from_pretrained reads."""
    return {"model_type": "lineate", "dtype": "float32", **model.config.to_dict()}


def _items(pieces: Sequence[Batch], count: int) -> MicroBatches:
    """Return the arguments of share_of_loss for micro-batches with `count` targets in all."""
    return [(piece.ids, piece.targets, piece.cu_seqlens, float(count)) for piece in pieces]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
