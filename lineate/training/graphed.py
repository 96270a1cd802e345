"""A whole step of an optimiser as one CUDA graph, so that a step costs the host one launch.

    no gradients -> of each micro-batch: loss, backward -> norm, clipping -> update, unless loss or norm is not finite

The graph reads its micro-batches and learning rates from memory of its own, into which every step copies. All shapes
are those of the example that it was made with; what a graph cannot serve runs launch by launch, with the same kernels.
"""

import gc
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lineate.decoding.capturing import CAPTURES, capture_stream, captured
from lineate.layers.learning import LearningMixer
from lineate.models.block import Block
from lineate.parallel.context.segments import Context
from lineate.parallel.tensor.ranks import Ranks
from lineate.training.optim import can_be_called_off

Item = Tensor | float | None
"""An argument of the loss; a number reaches it as a tensor without dimensions, float32."""
MicroBatches = Sequence[Sequence[Item]]
"""The arguments of the loss for each micro-batch."""
TRIALS = 3
"""Steps before a capture: the first compiles kernels, the second records launches (kernels/tape.py)."""

logger = logging.getLogger(__name__)


class Taken:
    """The result of a step: tensors on the device, valid until the next step.

    Args:
        numbers: The loss and the norm of the gradients before clipping, float64.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    @property
    def loss(self) -> Tensor:
        """The sum of the losses of all micro-batches."""
        return self.numbers[0]

    @property
    def norm(self) -> Tensor:
        """The norm of all gradients together, before clipping."""
        return self.numbers[1]


class WholeStep:
    """Steps of an optimiser, launch by launch; their updates are called off by a number on the device.

    Args:
        model: As for GraphedStep, like all others.
        optimizer: Its optimiser.
        loss: Returns the loss of one micro-batch.
        clip: The largest norm of all gradients together; None: no clipping.
        halts: Whether all steps after one that is not finite change nothing either.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Tensor],
        clip: float | None,
        halts: bool,
    ) -> None:
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be above 0, got {clip}; None leaves the gradients unchanged")
        self.params = [x for x in model.parameters() if x.requires_grad]
        if not self.params:
            raise ValueError("model must have parameters that need gradients, got none")
        known = set(self.params)
        others = {x for group in optimizer.param_groups for x in group["params"] if x.requires_grad} - known
        if others:
            raise ValueError(
                f"optimizer must train parameters of model alone, got {len(others)} that model does not have, whose "
                "gradients no step would clear or clip; let model hold them as well"
            )
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.clip, self.halts = math.inf if clip is None else float(clip), halts
        self.device = self.params[0].device
        self.halted = torch.zeros((), dtype=torch.bool, device=self.device)
        """Whether updates are called off, whatever the numbers."""
        self.updating = False
        """Whether the last step has begun to change the parameters."""
        self.skips_on_device = can_be_called_off(optimizer)
        self.rates = [self._rate(group["lr"]) for group in optimizer.param_groups] if self.skips_on_device else []
        """The tensors of the learning rates, one for each group; none where the host decides about updates."""
        self.take_rates()

    def _rate(self, lr: float | Tensor) -> Tensor:
        """Return a learning rate as a tensor that a graph can read: the given one if it is such a tensor."""
        if isinstance(lr, Tensor) and (lr.dim(), lr.dtype, lr.device) == (0, torch.float32, self.device):
            return lr
        return torch.full((), float(lr), dtype=torch.float32, device=self.device)

    def take_rates(self) -> None:
        """Copy learning rates that were put in place of the tensors into these."""
        for group, own in zip(self.optimizer.param_groups, self.rates, strict=False):
            if (given := group["lr"]) is not own:
                own.copy_(given) if isinstance(given, Tensor) else own.fill_(given)
                group["lr"] = own

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of all groups, without waiting for the device."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def moved(self, items: Sequence[Item]) -> list[Tensor | None]:
        """Return the arguments of the loss on the device."""

        def moved(x: Item) -> Tensor | None:
            if x is None or isinstance(x, Tensor):
                return x if x is None else x.to(self.device, non_blocking=x.is_pinned())
            return torch.full((), x, dtype=torch.float32, device=self.device)

        return [moved(x) for x in items]

    def run(self, batches: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """Make a step; return its loss and norm, float64."""
        self.updating = False
        self.forget_gradients()  # so that a graph's gradients lie in its own memory, and are written anew
        losses = []
        for items in batches:
            part = self.loss(*items)
            if not isinstance(part, Tensor) or part.dim():
                got = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else repr(part)
                raise ValueError(f"loss must return a tensor without dimensions, got {got}")
            part.backward()
            losses.append(part.detach())
            del part  # its nodes for gradients belong to this stream
        norm = nn.utils.clip_grad_norm_(self.params, self.clip)
        numbers = torch.stack([torch.stack(losses).sum().double(), norm.double()])
        self._update(numbers)
        return numbers

    @torch.no_grad()
    def _update(self, numbers: Tensor) -> None:
        """Make the optimiser's step, unless the numbers are not finite or an earlier step has halted this one."""
        off = ~numbers.isfinite().all() | self.halted
        self.updating = True
        if self.skips_on_device:
            self.optimizer.found_inf = off.float()  # type: ignore[attr-defined]
            try:
                self.optimizer.step()
            finally:
                self.optimizer.found_inf = None  # type: ignore[attr-defined]
        elif not bool(off):
            self.optimizer.step()
        if self.halts:
            self.halted.copy_(off)

    def forget_gradients(self) -> None:
        """Free the memory of all gradients."""
        for x in self.params:
            x.grad = None


class GraphedStep:
    """Steps of an optimiser, each one replay of a CUDA graph that is captured when this object is made.

        step = GraphedStep(model, optimizer, loss, [(ids, targets)], clip=1.0)
        print(step.why or "captured")
        for ids, targets in batches:
            taken = step([(ids, targets)], lr=schedule(n))      # taken.loss, taken.norm: nothing waits for the GPU

    Making it runs TRIALS steps whose updates are called off: afterwards parameters, buffers, random numbers and the
    optimiser's state are as before (state that its first step makes is there, with its first values). It then holds the
    memory of a step until `release`, which a step without the graph calls if the GPU has no memory for both.

    The update of a step whose loss or norm is not finite changes nothing. For an optimiser that cannot leave an update
    out on the device (any but Muon and torch's AdamW with fused=True), the host reads both numbers first.

    A graph repeats the launches of the example: the loss must not read numbers from the device, nor depend on anything
    but its arguments, the model and random numbers of torch's default generator; Python code in it, hooks of modules
    included, runs only in the trials and the capture. The optimiser's state must be loaded before, as loading it
    releases the graph, and parameters and state may later be changed in place alone. Learning rates are in the tensors
    `group["lr"]`, which torch's schedulers fill, and into which numbers put in their place are copied; other options
    of the optimiser are fixed.

    Args:
        model: What is trained.
        optimizer: Its optimiser, of no other parameters.
        loss: Returns the loss of one micro-batch, without dimensions; a step has the gradients of their sum. Autocast
            is entered inside.
        example: Micro-batches as those of all steps: tensors on any device, or numbers.
        clip: The largest norm of all gradients together; None: no clipping.
        halts: Whether all steps after one that is not finite change nothing either, until `resume`.
        graph: Whether to capture a graph; False: steps run launch by launch.
    """

    why: str | None
    """Why there is no graph, or no longer one; None if there is one."""
    missed: int = 0
    """How many steps ran without the graph, because their micro-batches had other shapes."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Tensor],
        example: MicroBatches,
        *,
        clip: float | None = None,
        halts: bool = False,
        graph: bool = True,
    ) -> None:
        _check_micro_batches("example", example)
        self.whole = WholeStep(model, optimizer, loss, clip, halts)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._numbers = torch.empty(0)
        self._static: list[list[Tensor | None]] = []
        self._gradients: list[Tensor | None] = []
        self.why = "graph=False" if not graph else obstacle(model, optimizer)
        if self.why is None:
            self.why = self._capture(example)
            if self.why is not None:
                logger.warning("steps run without a CUDA graph: %s", self.why)
            else:
                optimizer.register_load_state_dict_post_hook(_releases(self))

    def __call__(self, batches: MicroBatches, lr: float | None = None) -> Taken:
        """Make a step; with a graph the host only queues it, on the current stream.

        Args:
            batches: The micro-batches. Tensors on the CPU should be pinned.
            lr: The learning rate of all groups, rounded to float32; None: as it stands in the groups.
        """
        self.whole.take_rates()
        if lr is not None:
            self.whole.set_rate(lr)
        if self._graph is not None and self.fits(batches):
            for items, own in zip(batches, self._static, strict=True):
                _fill(own, items)
            self._graph.replay()
            torch.autograd.graph.increment_version(self.whole.params)  # as optimisers do, which write in place
            return Taken(self._numbers)
        _check_micro_batches("batches", batches)
        moved = [self.whole.moved(items) for items in batches]
        if self._graph is None:
            return Taken(self.whole.run(moved))
        self.missed += 1
        if self.missed == 1:
            logger.warning("a step runs without its CUDA graph: its micro-batches have other shapes (logged once)")
        try:
            numbers = self.whole.run(moved)
        except torch.OutOfMemoryError:
            if self.whole.updating:
                raise
        else:
            self._show_gradients()
            return Taken(numbers)
        self.release("the GPU has no memory for the graph and for a step without it")
        return Taken(self.whole.run(moved))

    def fits(self, batches: MicroBatches) -> bool:
        """Whether the graph serves these micro-batches; False without a graph."""
        if self._graph is None or len(batches) != len(self._static):
            return False
        pairs = zip(batches, self._static, strict=True)
        return all(len(items) == len(own) and all(map(_alike, items, own)) for items, own in pairs)

    def resume(self) -> None:
        """Let steps change the model again after one that was not finite, if it halts."""
        self.whole.halted.zero_()
        self._show_gradients()

    def release(self, why: str) -> None:
        """Free the memory of the graph, if there is one; from now on steps run launch by launch.

        Args:
            why: The reason, which becomes `why`.
        """
        if self._graph is None:
            return
        torch.cuda.synchronize(self.whole.device)
        self.whole.forget_gradients()
        self._graph, self._static, self._gradients, self._numbers = None, [], [], torch.empty(0)
        self.why = why
        torch.cuda.empty_cache()
        logger.warning("steps run without a CUDA graph from now on: %s", why)

    def _show_gradients(self) -> None:
        """Let .grad be the graph's gradients, so that no others are kept."""
        if self._graph is not None:
            for x, gradient in zip(self.whole.params, self._gradients, strict=True):
                x.grad = gradient

    def _capture(self, example: MicroBatches) -> str | None:
        """Capture the graph; return why there is none if CUDA refuses."""
        whole, device = self.whole, self.whole.device
        index = torch.cuda.current_device() if device.index is None else device.index
        static = [[None if x is None else x.clone() for x in whole.moved(items)] for items in example]
        gc.collect()  # nodes of earlier backward passes would make the capture depend on another stream
        with CAPTURES, torch.cuda.device(index):
            drawn = _try_out(whole, static, index)
            if drawn == "on the CPU":
                return "the loss draws random numbers on the CPU, which a graph would repeat"
            try:
                with captured(device, draws=drawn is not None) as graph, _capturable(whole.optimizer):
                    numbers = whole.run(static)
            except BaseException as error:
                whole.forget_gradients()
                if not isinstance(error, RuntimeError):  # of CUDA, or of torch where it sees the capture
                    raise
                return _refusal(error)
        self._graph, self._static, self._numbers = graph, static, numbers
        self._gradients = [x.grad for x in whole.params]
        return None


def _releases(step: GraphedStep) -> Callable[[torch.optim.Optimizer], None]:
    """Return a hook that releases the graph of a step, whose optimiser has new tensors for its state."""
    found = weakref.ref(step)

    def release(optimizer: torch.optim.Optimizer) -> None:
        if (alive := found()) is not None:
            alive.release("the optimiser's state was loaded after the graph was made")

    return release


def _try_out(whole: WholeStep, static: list[list[Tensor | None]], index: int) -> str | None:
    """Make steps that change nothing, on the stream of captures; return where they drew random numbers."""
    stream, current = capture_stream(index), torch.cuda.current_stream()
    buffers = [(x, x.detach().clone()) for x in whole.model.buffers()]
    states = torch.cuda.get_rng_state(index), torch.get_rng_state()
    whole.halted.fill_(True)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            for _ in range(TRIALS):
                whole.run(static)
    finally:
        current.wait_stream(stream)
        with torch.no_grad():
            for x, before in buffers:
                x.copy_(before)
        whole.halted.zero_()
        whole.forget_gradients()
        now = torch.cuda.get_rng_state(index), torch.get_rng_state()
        torch.cuda.set_rng_state(states[0], index)
        torch.set_rng_state(states[1])
    if not torch.equal(now[1], states[1]):
        return "on the CPU"
    return None if torch.equal(now[0], states[0]) else "on the GPU"


@contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Tell torch's AdamW that its step is captured; outside of a capture it would warn."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in groups]
    try:
        for group in groups:
            group["capturable"] = True
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value


def obstacle(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Return why no graph can be captured of steps of this model and optimiser; None if none is known.

    Args:
        model: What is trained, on its device.
        optimizer: Its optimiser.
    """
    params = [*model.parameters()]
    if any(isinstance(x, DTensor) for x in params):
        return "the weights are sharded over ranks, which exchange them in every step"
    if (why := obstacle_of_devices({str(x.device) for x in params})) is not None:
        return why
    if not can_be_called_off(optimizer):
        kind = type(optimizer).__name__
        return f"the optimiser must be Muon or torch's AdamW with fused=True, it is {kind}"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on around the step; enter it inside the loss, whose casts belong to the graph"
    found = (_obstacle_in(x) for x in model.modules())
    return next(filter(None, found), None)


def obstacle_of_devices(devices: set[str]) -> str | None:
    """Return why no graph can be captured with weights on these devices; None if it can."""
    one = len(devices) == 1 and all(x.startswith("cuda") for x in devices)
    return None if one else f"a graph needs all weights on one GPU, they are on {', '.join(sorted(devices))}"


def _obstacle_in(module: nn.Module) -> str | None:
    """Return why a module cannot be captured in a step of training; None if nothing is known against it."""
    name = type(module).__name__
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        return f"{name} is compiled by torch.compile"
    others = getattr(module, "ranks", None), getattr(module, "context", None)
    if isinstance(module, DistributedDataParallel) or any(isinstance(x, Ranks | Context) for x in others):
        return f"ranks exchange numbers in {name}"
    if isinstance(module, Block) and module.recompute:
        return "recomputed blocks read the state of the random generator, which a capture forbids"
    if isinstance(module, LearningMixer):
        return f"the host computes where the memory of {name} learns"
    return None


def _check_micro_batches(name: str, given: MicroBatches) -> None:
    """Raise unless an argument has micro-batches, each with its own items."""
    wrong = next((x for x in (given, *given) if isinstance(x, Tensor | str) or not isinstance(x, Sequence)), None)
    if wrong is not None:
        got = f"a {type(wrong).__name__}" + (" among them" if wrong is not given else "")
        raise TypeError(
            f"{name} must be a list of micro-batches, each a list of tensors or numbers, got {got}; "
            "write [(ids, targets)] for one micro-batch"
        )
    if not given:
        raise ValueError(f"{name} must have at least one micro-batch, got none")


def _alike(given: Item, own: Tensor | None) -> bool:
    """Whether an argument can be copied to where the graph reads it, without a change of shape or dtype."""
    if given is None or own is None:
        return given is own
    if isinstance(given, Tensor):
        return given.shape == own.shape and given.dtype == own.dtype
    return own.dim() == 0 and own.dtype is torch.float32


def _fill(own: Sequence[Tensor | None], items: Sequence[Item]) -> None:
    """Copy arguments to where the graph reads them."""
    for into, given in zip(own, items, strict=True):
        if into is None:
            continue
        if isinstance(given, Tensor):
            into.copy_(given, non_blocking=given.is_pinned())
        else:
            assert given is not None
            into.fill_(given)


def _refusal(error: RuntimeError) -> str:
    """Return a sentence about a capture that failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the GPU has no memory for the graph of a step"
    first = str(error).strip().partition("\n")[0]
    return f"the step cannot be captured ({first}); the host may read a number from the GPU in it"
