"""The engine: continuous batching of many requests over one model.

A step ends cancelled requests, admits waiting requests while their planned bytes fit, reads one piece of one prompt,
and decodes one token of every running row, or several that were guessed. Rows join and leave between any two tokens. On
a GPU the model's next step begins before the tokens of the last one are delivered (batch.py). If there is no other
work, a step reads a piece of an answer again, to keep a state for the next turn. The tokens of a request depend on its
prompt, its sampling options and its seed, never on other requests: prompts are read in fixed pieces (reading.py), and a
token is a pure function of its logits, the seed and its position (generation/choice.py).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lineate.checks import check_flag
from lineate.layers.formats import StateFormat
from lineate.models import HybridLM
from lineate.models.reading import CHUNK
from lineate.ops.rounding import NEAREST
from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import Drafter
from lineate.serving.engine.batch import Batch, Job, is_over
from lineate.serving.engine.continuation import Continuation
from lineate.serving.engine.planning import Need, Plan
from lineate.serving.engine.pool import Pool
from lineate.serving.engine.reading import Reading
from lineate.serving.engine.requests import EngineStopped, Handle, Listener, QueueFull, Request, TooLong

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """State and counts of an engine.

    Args:
        waiting: Requests in the queue.
        reading: Prompts that are being read.
        running: Rows that decode.
        waiting_answers: Answers that are still to be read again, for the next turn.
        steps: Steps that decoded.
        prompt_tokens: Tokens of all prompts that were admitted.
        cached_tokens: Those of them that were not read, because their state was kept.
        read_tokens: Tokens of prompts that were read before the first token of an answer was chosen.
        reread_tokens: Tokens of answers that were read again in pieces after they were decoded.
        new_tokens: Tokens that were generated.
        guesses: Tokens that were guessed.
        right_guesses: Those of them that were right.
        finished: Continuations that ended, by reason.
        pool_bytes: The bytes of the pool.
    """

    waiting: int
    reading: int
    running: int
    waiting_answers: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    read_tokens: int
    reread_tokens: int
    new_tokens: int
    guesses: int
    right_guesses: int
    finished: dict[str, int]
    pool_bytes: int


@dataclass(frozen=True)
class _Waiting:
    """A request in the queue."""

    handle: Handle
    total: int
    deadline: float | None


class Engine:
    """Run many requests at once.

        engine = Engine(model, slots=8, context=4096, cache=StateCache(2**30, 256))
        engine.start()
        handle = engine.submit(Request(ids, Sampling(temperature=0.7, seed=1), max_new_tokens=100))
        for event in handle.events():
            event.tokens

    Without start(), `step()` drives it; tests do so.

    Args:
        model: The model; it is put into eval mode.
        slots: The most rows that decode together.
        context: The most tokens of a prompt and its continuation together.
        memory_bytes: The most bytes for the states of running rows and of prompts being read; None: no limit. The cache
            has a budget of its own.
        spacing: The tokens of a piece of a prompt, a multiple of 64; the cache must have the same.
        queue: The most requests that wait.
        cache: Keeps states between requests; None: none are kept.
        drafter: Guesses tokens, which the model checks in one pass; None: one token a step. Guesses never change which
            tokens are chosen.
        most_guesses: The most guesses for each row in a step.
        overlap: Whether a step of the model begins before the tokens of the last one are delivered; None: on a GPU,
            where the device computes while the host delivers. A drafter prevents it. Tokens do not depend on it.
        state_dtype: "bfloat16" keeps the memories of running rows in half the bytes, for layers that support it; None:
            float32. Prompts are read, and their states are kept, in float32.
        state_rounding: The rounding of bfloat16 memories after every token: "nearest", or "stochastic", with random
            numbers that depend on a token's position alone.
        batch_invariant: Whether the bits of a row's logits may not depend on the other rows (docs/serving.md); not with
            a drafter.
        poison: Whether rows that are freed are overwritten with NaN, for tests.
        clock: Returns seconds, for deadlines.
    """

    def __init__(
        self,
        model: HybridLM,
        *,
        slots: int = 8,
        context: int = 4096,
        memory_bytes: int | None = None,
        spacing: int = 256,
        queue: int = 128,
        cache: StateCache | None = None,
        drafter: Drafter | None = None,
        most_guesses: int = 4,
        overlap: bool | None = None,
        state_dtype: str | torch.dtype | None = None,
        state_rounding: str = NEAREST,
        batch_invariant: bool = False,
        poison: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        sizes = {"slots": slots, "context": context, "spacing": spacing, "queue": queue, "most_guesses": most_guesses}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if spacing % CHUNK:
            raise ValueError(f"spacing must be a multiple of {CHUNK}, the chunk of the kernels, got {spacing}")
        if cache is not None and cache.spacing != spacing:
            raise ValueError(f"cache must have the engine's spacing, {spacing}, got {cache.spacing}")
        check_flag("batch_invariant", batch_invariant)
        if batch_invariant and drafter is not None:
            raise ValueError(
                "batch_invariant=True does not cover speculative passes, which read several tokens of a row at once; "
                "use it without a drafter"
            )
        self.model, self.spacing, self.queue, self.clock = model.eval(), spacing, queue, clock
        self.timer: Callable[[], float] = time.perf_counter
        """Returns seconds, for the time to read a piece of a prompt."""
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """Called with the exception of a step before the engine continues without it; if it raises, the step ends."""
        self.slots, self.context, self.cache = slots, context, cache
        drafted = getattr(drafter, "row_nbytes", None)
        self.plan = Plan(
            model, slots, context, memory_bytes, 0 if drafter is None else most_guesses,
            None if drafted is None else lambda tokens: drafted(tokens, most_guesses), state_dtype,
        )  # fmt: skip
        shape, format = self.plan.first_shape(), StateFormat.of(state_dtype, state_rounding)
        self.pool = Pool(
            model, shape.rows, shape.capacity, poison=poison, format=format, batch_invariant=batch_invariant
        )
        overlap = not self.pool.waits if overlap is None else overlap
        self._batch = Batch(self.pool, cache, drafter, most_guesses, lambda: self.clock(), overlap, self._failed)
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()  # guards the queue and the flags below
        self._stepping = threading.Lock()
        self._number = 0
        self._closed = False  # accepts no more requests
        self._thread: threading.Thread | None = None

    # Called by other threads.

    def submit(self, request: Request, listener: Listener | None = None) -> Handle:
        """Put a request into the queue; any thread may do so.

        Raises QueueFull, TooLong, EngineStopped, or ValueError for tokens that the model does not have.

        Args:
            request: The request.
            listener: Receives the events in the engine's thread, and must return soon; None: Handle.events yields them.
        """
        total = self.check(request)
        deadline = None if request.timeout is None else self.clock() + request.timeout
        with self._changed:
            self.check_open()
            self._number += 1
            handle = Handle(request, self._number, listener, self._wake)
            self._waiting.append(_Waiting(handle, total, deadline))
            self._changed.notify_all()
        return handle

    def check(self, request: Request) -> int:
        """Return how many tokens a continuation may have, with the prompt; raise TooLong or ValueError as submit does.

        Args:
            request: The request.
        """
        vocab = self.model.config.vocab_size
        low, high = min(request.ids), max(request.ids)
        if low < 0 or high >= vocab:
            raise ValueError(f"ids must lie in 0 .. {vocab - 1}, got {low} .. {high}")
        prompt, new = len(request.ids), request.max_new_tokens
        if request.n > self.slots:
            raise ValueError(f"n must be at most the engine's slots, {self.slots}, got {request.n}")
        most = self.plan.most_tokens(request.n, prompt)
        total = most if new is None else prompt + new
        if total > most or prompt >= most:
            asked = "" if new is None else f" and max_new_tokens = {new}"
            least = "the context" if most == self.context else "the memory"
            raise TooLong(f"a prompt of {prompt} tokens{asked} must fit into {least}, {most} tokens in all", most)
        return total

    def check_open(self, more: int = 0) -> None:
        """Raise EngineStopped or QueueFull if no request can be submitted now.

        Args:
            more: Requests that are about to be submitted, besides those that wait.
        """
        with self._changed:
            waiting = len(self._waiting) + more
            if self._closed:
                raise EngineStopped("the engine is stopping and accepts no more requests")
            if waiting >= self.queue:
                raise QueueFull(waiting, self._batch.service_seconds * waiting / self.slots + 1)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def stats(self) -> EngineStats:
        """State and counts of the engine; any thread may read them."""
        with self._changed:
            batch = self._batch
            return EngineStats(
                waiting=len(self._waiting),
                reading=len(batch.reading),
                running=len(batch.rows),
                waiting_answers=len(batch.answers),
                steps=batch.counts["steps"],
                prompt_tokens=batch.counts["prompt_tokens"],
                cached_tokens=batch.counts["cached_tokens"],
                read_tokens=batch.counts["read_tokens"],
                reread_tokens=batch.counts["reread_tokens"],
                new_tokens=batch.counts["new_tokens"],
                guesses=batch.counts["guesses"],
                right_guesses=batch.counts["right_guesses"],
                finished=dict(batch.finished),
                pool_bytes=self.pool.allocated,
            )

    @property
    def alive(self) -> bool:
        """Whether its thread runs; any thread may read it."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to serve in a thread of its own."""
        if self._thread is not None or self._closed:
            raise RuntimeError("the engine must be started once, before it is stopped")
        self._thread = threading.Thread(target=self._run, name="lineate-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more requests, and drop answers that wait to be read again; running requests continue."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """Accept no more requests, and return when the engine has ended; answers are not read again any more.

        Args:
            drain: Whether submitted requests are finished first; otherwise they end at once, as "shutdown".
            timeout: Seconds after which the remaining requests end as "shutdown"; None: never.
        """
        self.close()
        until = None if timeout is None else time.monotonic() + timeout
        if drain:
            while self._busy() and (until is None or time.monotonic() < until):
                if self._thread is None:
                    self.step()
                else:
                    with self._changed:
                        self._changed.wait(0.05)
        with self._changed:
            jobs = list(self._batch.jobs)  # one copy: the engine's thread changes it meanwhile
            handles = [x.handle for x in self._waiting] + [x.handle for x in jobs]
        for handle in handles:
            handle.shut_down()
        if self._thread is None:
            while self._busy():
                self.step()
        else:
            self._thread.join()
        self._batch.answers.clear()

    def _busy(self) -> bool:
        with self._changed:
            return bool(self._waiting or self._batch.jobs or (self._batch.answers and not self._closed))

    # Called in the engine's thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._busy() or self._closed):
                    self._changed.wait()
                if not self._busy():
                    return
            try:
                self.step()
            except Exception:  # the requests could not be ended with an error; later ones may work
                logger.exception("the engine could not recover from a failed step")

    def step(self) -> bool:
        """Make one step; return whether anything is left to do. Only one thread drives the engine."""
        with self._stepping:
            try:
                now = self.clock()
                self._end_waiting(now)
                self._batch.end_what_is_due(now)
                self._admit()
                idle = not self._batch.jobs
                self._batch.read()
                self._batch.decode()
                if idle:
                    self._read_answer()
            except Exception as error:  # an internal error: the admitted requests fail, and the engine continues
                self._failed(error, "a step of the engine failed")
                self._batch.fail_all(error)
            return self._busy()

    def _failed(self, error: Exception, message: str, *args: object) -> None:
        """Log the exception of a step, if the engine may continue without it."""
        self.on_failure(error)
        logger.error(message, *args, exc_info=error)

    def _end_waiting(self, now: float) -> None:
        """End requests that were cancelled, or whose time is over, before they were admitted."""
        with self._changed:
            due = [x for x in self._waiting if is_over(x.deadline, now) or len(x.handle.ending) == x.handle.request.n]
            for waiting in due:
                self._waiting.remove(waiting)
        for waiting in due:
            for n in range(waiting.handle.request.n):
                finished = waiting.handle.ending.get(n, "timeout")
                self._batch.finish(Continuation(waiting.handle, n, 0, 0), finished)

    def _admit(self) -> None:
        """Admit waiting requests in order, while all admitted ones fit into the memory."""
        while True:
            with self._changed:
                waiting = self._waiting[0] if self._waiting else None
            if waiting is None:
                return
            try:
                job = self._make_job(waiting)
            except Exception as error:
                self.on_failure(error)
                with self._changed:
                    self._waiting.popleft()
                for n in range(waiting.handle.request.n):
                    self._batch.finish(Continuation(waiting.handle, n, 0, 0), "error", error)
                raise
            if job is None:
                return
            with self._changed:
                self._waiting.popleft()
                self._batch.add(job)

    def _make_job(self, waiting: _Waiting) -> Job | None:
        """Make room in the pool for a request, and return its job; None if there is no room now."""
        request = waiting.handle.request
        self._batch.pause_answers()  # before the pool takes the memory of their states
        need = Need(request.n, len(request.ids), waiting.total, True)
        shape = self.plan.shape_for(self.pool, [*(job.need for job in self._batch.jobs), need])
        if shape is None:
            return None
        if (shape.rows, shape.capacity) != (self.pool.rows, self.pool.capacity):
            self.pool.resize(shape.rows, shape.capacity)
        cache = None if request.prompt_logprobs is not None else self.cache  # every token must be read
        reading = self._make_reading(request.ids, cache)
        return Job(waiting.handle, waiting.total, waiting.deadline, self.clock(), reading)

    def _make_reading(self, ids: tuple[int, ...], cache: StateCache | None) -> Reading:
        return Reading(self.model, ids, self.spacing, cache, clock=self.timer, failed=self._failed)

    def _read_answer(self) -> None:
        """Read a piece of an answer again, if its bytes fit."""
        if self._closed or not self._batch.answers:
            return
        if self.plan.has_room(self.pool, [Need(0, len(self._batch.answers[0].ids), 0, True)]):
            self._batch.read_answer(lambda ids: self._make_reading(ids, self.cache))
        else:  # the pool has grown since the prompt was read
            self._batch.answers.popleft()
