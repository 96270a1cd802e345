"""The admitted requests: prompts that are being read, and rows that decode together.

On a GPU, the next step begins as soon as the tokens of the last one are known, before they are delivered, so that the
device computes while the host delivers. Rows join and leave while it does; a token of a row that has left is dropped.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import Drafter
from lineate.serving.engine.answers import MOST_ANSWERS, Answer
from lineate.serving.engine.continuation import Chosen, Continuation, Lineup, NextTokens, PromptLogprobs, choose
from lineate.serving.engine.guessing import choose_guessed, padded, propose
from lineate.serving.engine.planning import Need
from lineate.serving.engine.pool import Pool
from lineate.serving.engine.reading import Reading
from lineate.serving.engine.requests import Event, Failed, Handle, TokenLogprob

KEEPING = ("stop", "length", "timeout")
"""Answers with these ends are read again in pieces, so that the next turn finds their state in the cache."""

logger = logging.getLogger(__name__)


class Job:
    """An admitted request: first its prompt is read, then its continuations run.

    Args:
        handle: The handle of the request.
        total: The most tokens of a continuation, with the prompt.
        deadline: The time of its timeout; None: never.
        since: When it was admitted.
        reading: Its prompt.
    """

    def __init__(self, handle: Handle, total: int, deadline: float | None, since: float, reading: Reading) -> None:
        self.handle, self.total, self.deadline, self.since = handle, total, deadline, since
        self.reading: Reading | None = reading
        self.running: list[Continuation] = []
        self.prompt: PromptLogprobs | None = None
        """The log-probabilities of its prompt, if they were requested."""
        self.leader: tuple[Reading, int] | None = None
        """An earlier prompt with the same beginning, and its shared length; this one waits until that is read."""

    @property
    def need(self) -> Need:
        """Its memory needs from now on."""
        prompt = len(self.handle.request.ids)
        if self.reading is None:
            return Need(len(self.running), prompt, self.total, False)
        return Need(self.handle.request.n, prompt, self.total, True)

    def new_continuations(self, limit: int = 0, cached_tokens: int = 0) -> list[Continuation]:
        """Return its continuations, before their first token."""
        return [Continuation(self.handle, n, limit, cached_tokens) for n in range(self.handle.request.n)]


class Batch:
    """Reads prompts piece by piece, and decodes all running rows together.

    Args:
        pool: The rows.
        cache: Keeps states between requests; None: none are kept.
        drafter: Guesses tokens; None: there are no guesses.
        most_guesses: The most guesses for each row in a step.
        clock: Returns seconds.
        overlap: Whether a step begins before the tokens of the last one are delivered; not with a drafter.
        failed: Called with an exception that the batch survives, and with the message to log it with.
    """

    def __init__(
        self,
        pool: Pool,
        cache: StateCache | None,
        drafter: Drafter | None,
        most_guesses: int,
        clock: Callable[[], float],
        overlap: bool,
        failed: Failed,
    ) -> None:
        self.pool, self.cache, self.clock, self.failed = pool, cache, clock, failed
        self.overlap = overlap and drafter is None
        self.drafter, self.most_guesses = drafter, most_guesses
        self.jobs: list[Job] = []
        self.reading: deque[Job] = deque()
        """The jobs whose prompts are being read; the first is the next."""
        self.rows: list[tuple[Job, Continuation]] = []
        """The continuation in each row of the pool."""
        self._lineup: Lineup | None = None  # the lineup of these rows, after their first step
        self._under_way: NextTokens | None = None  # the running step, whose tokens were not taken
        self.answers: deque[Answer] = deque(maxlen=MOST_ANSWERS)
        """Texts with answers that are still to be read in pieces, the oldest first."""
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.service_seconds = 1.0
        """The duration of a request from its admission, averaged over the last ones."""

    def add(self, job: Job) -> None:
        """Admit a job, for which the pool has room; it waits for an earlier prompt with the same beginning."""
        assert job.reading is not None
        if job.reading.cache is not None:
            others = [x.reading for x in self.reading if x.reading is not None and x.reading.cache is not None]
            ahead = [(other, job.reading.shared_stop(other)) for other in others]
            job.leader = max(ahead, key=lambda each: each[1], default=None)
        watchers: list[Callable[[int, Tensor], None]] = []
        if self.drafter is not None and self.drafter.needs_hidden:
            keys, ids = [row.key for row in job.new_continuations()], job.reading.ids
            watchers.append(lambda start, hidden: self._observe(keys, ids, start, hidden))
        if (top := job.handle.request.prompt_logprobs) is not None:
            job.prompt = PromptLogprobs(self.pool.model, job.reading.ids, top)
            watchers.append(job.prompt.read)
        if watchers:
            job.reading.on_read = lambda start, hidden: _call_all(watchers, start, hidden)
        self.jobs.append(job)
        self.reading.append(job)

    def pause_answers(self) -> None:
        """Free the states of answers that are being read again, for a request."""
        for answer in self.answers:
            answer.pause()

    def end_what_is_due(self, now: float) -> None:
        """End continuations that were cancelled or stopped, and requests whose time is over.

        Args:
            now: The time with which all deadlines of a step are compared.
        """
        due = [job for job in self.jobs if job.handle.ending or (job.deadline is not None and now >= job.deadline)]
        for job in due:
            ending, over = job.handle.ending, is_over(job.deadline, now)
            if job.reading is None:
                for row in list(job.running):
                    if over or row.index in ending:
                        finished = ending.get(row.index, "timeout")
                        self._leave(row, finished)
                        self.finish(row, finished)
            elif over or len(ending) == job.handle.request.n:  # otherwise the remaining ones need the prompt
                rows = job.new_continuations(cached_tokens=job.reading.cached_tokens)
                self._end_reading(job)
                for row in rows:
                    self.finish(row, ending.get(row.index, "timeout"))
                self._forget(job)

    def read(self) -> bool:
        """Read one piece of the prompt whose turn it is; return False if there is none."""
        job = self._next_to_read()
        if job is None:
            return False
        reading = job.reading
        assert reading is not None
        tokens = reading.read
        try:
            if not reading.begun:
                reading.look_up()
                self.counts.update(prompt_tokens=len(reading.ids), cached_tokens=reading.cached_tokens)
                job.handle.progress.begin(reading.position, self.clock())
            reading.advance()
            job.handle.progress.note(reading.position, self.clock())
            if reading.done:
                self._start(job, reading)
        except Exception as error:
            self.failed(error, "request %d failed while its prompt was read", job.handle.number)
            self.fail(job, error)
        self.counts["read_tokens"] += reading.read - tokens
        return True

    def read_answer(self, make: Callable[[tuple[int, ...]], Reading]) -> None:
        """Read the next piece of the oldest answer, and keep the state after it.

        Args:
            make: Returns the reading of a text.
        """
        answer = self.answers[0]
        over = True
        try:
            before = answer.read
            over = answer.advance(make)
            self.counts["reread_tokens"] += answer.read - before
        except Exception as error:
            self.failed(error, "the state of %d tokens, after an answer, was not kept", len(answer.ids))
        if over:
            self.answers.popleft()

    def _next_to_read(self) -> Job | None:
        for _ in range(len(self.reading)):
            job = self.reading[0]
            self.reading.rotate(-1)
            if job.leader is None or job.leader[0].position >= job.leader[1] or job.leader[0].released:
                job.leader = None
                return job
        return None

    def _start(self, job: Job, reading: Reading) -> None:
        """Choose the first token of all continuations, and let the unfinished ones join the pool."""
        assert reading.logits is not None and reading.state is not None
        rows = job.new_continuations(job.total - len(reading.ids), reading.cached_tokens)
        for row in rows:
            row.begin(len(reading.logits))
        found = (
            choose(rows, reading.logits.expand(len(rows), -1)) if job.total > len(reading.ids) else [None] * len(rows)
        )
        events = []
        for row, chosen in zip(rows, found, strict=True):
            if chosen is None or row.index in job.handle.ending:  # without tokens to generate, only the prompt was read
                events.append(row.event(finished=job.handle.ending.get(row.index, "length")))
            else:
                events.append(self._take(row, chosen if isinstance(chosen, Exception) else [chosen]))
        if job.prompt is not None:
            events = [replace(event, prompt=tuple(job.prompt.entries)) for event in events]
        going = [row for row, event in zip(rows, events, strict=True) if event.finished is None]
        if going:
            self.pool.join(reading.state, len(going))
        self._end_reading(job)
        job.running = going
        self.rows += [(job, row) for row in going]
        self._lineup = None
        for row, event in zip(rows, events, strict=True):
            self._read_again(row, event.finished)
            self._tell(row, event)
        if not going:
            self._forget(job)

    def _end_reading(self, job: Job) -> None:
        """Free the state of a prompt that is read or cancelled."""
        assert job.reading is not None
        self.reading.remove(job)
        job.reading.release()
        job.reading = None

    def decode(self) -> None:
        """Take the next token of every row, or several if they were guessed, and deliver them.

        If a step is running, its tokens are taken. With `overlap`, the next one begins before anything is delivered.
        """
        step = self._under_way
        if not self.rows:
            self._under_way = None
            return
        failed = None
        try:
            if self.drafter is not None:
                taken = self._take_guessed(self.drafter)
            else:
                self._under_way = step = step or self._begin_step()
                tokens = step.wait()  # if this is interrupted, the next call waits for the same step
                self._under_way = None
                if self.overlap and step.all_go_on and step.lineup is self._lineup:
                    failed = self._go_on(step)  # freeing a row is cheap before the next step begins
                taken = self._take_next(step.lineup.rows, tokens)
        except Exception as error:
            self._fail_step(error)
            return
        self.counts["steps"] += 1
        events = [(row, x) for row, x in taken if not isinstance(x, int)]
        try:  # a row that has ended is not read further
            for row, event in events:
                if event.finished is not None:
                    self._leave(row, event.finished)
        except Exception as error:
            failed = error
        if self.overlap and self.rows and self._under_way is None and failed is None:
            failed = self._go_on(step)
        self.counts["new_tokens"] += len(taken) - len(events)
        for row, x in taken:
            if not isinstance(x, int):
                self._tell(row, x)
                continue
            try:  # an inlined, shorter _tell for a token in the middle of an answer
                row.handle.put(Event(row.index, (x,), (), None, None, row.cached_tokens))
            except BaseException:
                self._give_up(row.handle)
        if failed is not None:
            self._fail_step(failed)

    def _go_on(self, step: NextTokens | None) -> Exception | None:
        """Begin the next step; return its exception, which is handled after the tokens were delivered."""
        try:
            self._under_way = self._begin_step(step)
        except Exception as error:
            return error
        return None

    def _begin_step(self, before: NextTokens | None = None) -> NextTokens:
        """Read the last token of every row, and begin to choose the next ones; a GPU may still be computing.

        Args:
            before: The step before, whose tokens may still be on the device.
        """
        if before is not None and before.lineup is self._lineup and before.drawn is not None:
            logits = self.pool.step(before.drawn)  # the same rows, in the same order
        else:
            logits = self.pool.step([row.ids[-1] for _, row in self.rows])
        if self._lineup is None:
            self._lineup = Lineup([row for _, row in self.rows], logits.device)
        return self._lineup.choose(logits, self.pool.positions)

    def _take_next(
        self, rows: Sequence[Continuation], tokens: Sequence[int | Chosen | Exception]
    ) -> list[tuple[Continuation, int | Event]]:
        """Add the tokens to the remaining rows; return the tokens, or an event where there is more to report."""
        taken: list[tuple[Continuation, int | Event]] = []
        for row, x in zip(rows, tokens, strict=True):
            if row.over:
                continue
            if isinstance(x, int):
                finished = row.take(x)
                taken.append((row, x if finished is None else row.event((x,), finished=finished)))
            else:
                taken.append((row, self._take(row, x if isinstance(x, Exception) else [x])))
        return taken

    def _take_guessed(self, drafter: Drafter) -> list[tuple[Continuation, int | Event]]:
        """Read the last token of every row with guesses, if there are any; return an event of every row."""
        rows, lengths = [row for _, row in self.rows], list(self.pool.lengths)
        taken = [self._take(row, x) for row, x in zip(rows, self._choose_guessed(drafter, rows), strict=True)]
        if self.pool.on_trail:  # only chosen tokens have been read, except the last one
            self.pool.accept([len(event.tokens) for event in taken])
        hidden = self.pool.hidden
        if drafter.needs_hidden and hidden is not None:
            for n, (row, event) in enumerate(zip(rows, taken, strict=True)):
                self._observe([row.key], row.ids, lengths[n], hidden[n, : len(event.tokens)])
        return list(zip(rows, taken, strict=True))

    def _choose_guessed(self, drafter: Drafter, rows: list[Continuation]) -> list[list[Chosen] | Exception]:
        """Read the last token of every row, with guesses if there are any; return the tokens that follow."""
        guesses = propose(drafter, rows, self.most_guesses, self.pool.model.config.vocab_size, self.failed)
        if guesses is None:
            logits = self.pool.step([row.ids[-1] for row in rows])
            return [x if isinstance(x, Exception) else [x] for x in choose(rows, logits)]
        found = choose_guessed(rows, self.pool.trail(padded(rows, guesses)), guesses)
        self.counts["guesses"] += sum(len(own.tokens) for own in guesses)
        self.counts["right_guesses"] += sum(len(own) - 1 for own in found if not isinstance(own, Exception))
        return found

    def _take(self, row: Continuation, chosen: list[Chosen] | Exception) -> Event:
        """Add chosen tokens to a continuation up to its end; return the event."""
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        finished = None
        try:
            if isinstance(chosen, Exception):
                raise chosen
            for token, logprob in chosen:
                finished = row.take(token)
                tokens.append(token)
                logprobs += [] if logprob is None else [logprob]
                if finished is not None:
                    break
        except Exception as error:  # from the model's logits or from the guide
            logger.error("request %d failed: %s", row.handle.number, error)
            return row.event(tokens, logprobs, "error", _text(error))
        return row.event(tokens, logprobs, finished)

    def _tell(self, row: Continuation, event: Event) -> None:
        """Count an event, and deliver it; a continuation that has ended has no more events, even after a failure."""
        if row.index in row.handle.ended:
            return
        self.counts["new_tokens"] += len(event.tokens)
        if event.finished is not None:
            self.finished[event.finished] += 1
            row.handle.ended.add(row.index)
            self._forget_guesses(row)
        try:
            row.handle.put(event)
        except BaseException:  # the listener is gone; asyncio's CancelledError is not an Exception
            self._give_up(row.handle)

    def _give_up(self, handle: Handle) -> None:
        """Cancel a request whose listener has just failed."""
        logger.exception("the listener of request %d failed; the request is cancelled", handle.number)
        handle.cancel()

    def _leave(self, row: Continuation, finished: str) -> None:
        """Remove a row from the pool; its answer will be read again, for the next turn."""
        at = next(n for n, (_, each) in enumerate(self.rows) if each is row)
        job = self.rows[at][0]
        self.pool.leave(at)
        last = self.rows.pop()
        if at < len(self.rows):
            self.rows[at] = last
        row.over, self._lineup = True, None
        job.running.remove(row)
        if not job.running:
            self._forget(job)
        self._read_again(row, finished)

    def _read_again(self, row: Continuation, finished: str | None) -> None:
        """Queue an answer whose text has more whole pieces than its prompt; drop shorter ones of the same text."""
        if self.cache is None or finished not in KEEPING:
            return
        spacing = self.cache.spacing
        ids = tuple(row.ids[: len(row.ids) - len(row.ids) % spacing])
        prompt = len(row.handle.request.ids)
        if len(ids) > prompt:
            new = Answer(ids, prompt - prompt % spacing)
            self.answers = deque((x for x in self.answers if x.ids != ids[: len(x.ids)]), MOST_ANSWERS)
            self.answers.append(new)

    def _observe(self, keys: list[tuple[int, int]], ids: Sequence[int], start: int, hidden: Tensor) -> None:
        """Pass the inputs of the model's head to the drafter."""
        assert self.drafter is not None
        try:
            for key in keys:
                self.drafter.observe(key, ids, start, hidden)
        except Exception as error:
            self.failed(error, "the drafter could not observe what was read")

    def _forget_guesses(self, row: Continuation) -> None:
        try:
            if self.drafter is not None:
                self.drafter.forget(row.key)
        except Exception as error:
            self.failed(error, "the drafter could not forget request %d", row.handle.number)

    def finish(self, row: Continuation, finished: str, error: Exception | None = None) -> None:
        """Notify the handle that a continuation has ended."""
        self._tell(row, row.event(finished=finished, error=None if error is None else _text(error)))

    def _forget(self, job: Job) -> None:
        self.jobs.remove(job)
        self.service_seconds += 0.1 * (self.clock() - job.since - self.service_seconds)

    def fail(self, job: Job, error: Exception) -> None:
        """End all continuations of a job; those that run are still in the pool."""
        if job.reading is not None:
            self._end_reading(job)
        for row in job.new_continuations():
            self.finish(row, "error", error)
        if job in self.jobs:
            self._forget(job)

    def _fail_step(self, error: Exception) -> None:
        self.failed(error, "a decoding step failed, and with it %d continuations", len(self.rows))
        self.fail_rows(error)

    def fail_rows(self, error: Exception) -> None:
        """End all running continuations, and empty the pool in any state."""
        rows, self.rows = self.rows, []
        self._lineup = self._under_way = None
        for job, row in rows:
            self.finish(row, "error", error)
            if row in job.running:
                job.running.remove(row)
            if not job.running and job in self.jobs:
                self._forget(job)
        self.pool.clear()

    def fail_all(self, error: Exception) -> None:
        """End all admitted requests."""
        self.answers.clear()
        for job in list(self.jobs):
            self.fail(job, error)
        self.fail_rows(error)


def _call_all(watchers: Sequence[Callable[[int, Tensor], None]], start: int, hidden: Tensor) -> None:
    for watch in watchers:
        watch(start, hidden)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def is_over(deadline: float | None, now: float) -> bool:
    """Whether a deadline has passed."""
    return deadline is not None and now >= deadline
