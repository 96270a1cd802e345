"""The tokens of `generate`, one of every row at a time."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from lineate.decoding import Decoder
from lineate.decoding.rows import can_be_recorded
from lineate.generation.choice import Sampling, choose_tokens
from lineate.layers import Memory
from lineate.layers.projection import runs_own_forward
from lineate.models import HybridLM, ModelState
from lineate.native.product import MOST_ROWS

FEWEST_DECODED, MOST_ROOM = 8, 256
"""On a CPU a decoder is prepared for at least as many tokens, and has room for as many at first."""
FEWEST_GRAPHED, MOST_GRAPHED_ROOM = 32, 1024
"""The same on a GPU, where recording a graph costs the time of a few tokens."""


class Generation(Iterator[Tensor]):
    """The tokens of `generate`, one of every row at a time.

    Args:
        model: The model.
        prompts: Ids `b t` and None, or packed ids `1 t` and the bounds of their sequences.
        max_new_tokens: The most tokens to yield.
        sampling: The options of each row.
        stop: Tokens that end a row.
        state: What the model has read before; None for nothing.
        batch_invariant: Whether the bits of a row's logits may not depend on the other rows.
    """

    def __init__(
        self,
        model: HybridLM,
        prompts: tuple[Tensor, Tensor | None],
        max_new_tokens: int,
        sampling: list[Sampling],
        stop: Collection[int],
        state: ModelState | None,
        batch_invariant: bool = False,
    ) -> None:
        ids, bounds = prompts
        self._invariant = batch_invariant
        rows = len(sampling)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        """The new tokens of each row, up to its stop token."""
        self.last = ids[:, -1].clone() if bounds is None else ids[0, bounds[1:] - 1]
        """The last token of every row, `b`: the next one to read."""
        self._model, self._sampling, self._stops = model, sampling, frozenset(map(int, stop))
        self._next, self._bounds, self._left = ids, bounds, max_new_tokens
        self._going = list(range(rows))
        self._state = state
        self._spare: ModelState | None = None
        """An earlier state that only this object holds: its memory is reused for the next one."""
        self._shown = state is not None
        """Whether the caller may hold the state."""
        self._decoder: Decoder | None = None
        """Reads the tokens after the prompt, where C or a CUDA graph computes the model; it then has the state."""
        self._decoded: list[int] = []
        """The rows that it began with."""
        self._begun: int | Tensor = 0
        """The tokens of each of these rows then."""
        self._reads = 0
        """How many of its calls this has used."""
        self._decodes = True
        """Whether a decoder may be prepared for these rows; it is asked once."""
        self._narrows = True
        """Whether the decoder may go on without rows that have stopped."""
        self._unseen: Tensor | None = None
        """The last tokens, until next returns them: it may be interrupted before."""
        self._chosen: list[int] | None = None
        """The same, until _book has added them to `tokens`."""
        self._booked = self._made = 0
        """How many of them it has added; the number of tokens before them of each row that goes on."""
        self._ended: dict[int, ModelState] = {}
        self._seen: list[dict[int, int] | None] = [None] * rows
        for n, own in enumerate(sampling):
            if own.penalised:
                prompt = ids[n] if bounds is None else ids[0, bounds[n] : bounds[n + 1]]
                self._seen[n] = dict.fromkeys(prompt.tolist(), 0)

    def count_earlier(self, tokens: Sequence[Sequence[int]]) -> None:
        """Let penalties count tokens that the state has read as those of the prompt.

        Args:
            tokens: The tokens of each row.
        """
        if len(tokens) != len(self._seen):
            raise ValueError(
                f"earlier must have one sequence for each of the {len(self._seen)} rows, got {len(tokens)}"
            )
        for seen, own in zip(self._seen, tokens, strict=True):
            if seen is not None:
                seen.update({token: 0 for token in map(int, own) if token not in seen})

    @property
    def state(self) -> ModelState | None:
        """The model's state after all tokens of every row but the last; None before the first token.

        If a call of next was interrupted on a GPU after the model had read its tokens, `tokens` has the next ones, too.
        """
        self._shown = True
        self._book()
        if self._decoder is not None and not self._decoder.rewinds(self._reads):
            self._advance()
        now = self._now()
        if not self._ended:
            return now
        going = {n: i for i, n in enumerate(self._going)}
        states = [self._ended[n] if n in self._ended else _row(now, going[n]) for n in range(len(self.tokens))]
        return ModelState.join(states)

    def _now(self) -> ModelState | None:
        """Return the state of the rows that go on."""
        decoder = self._decoder
        if decoder is None:
            return self._state
        state, rows = decoder.state_before(self._reads), self._rows_of(decoder)
        if rows == self._going:
            return state
        return state.select(torch.tensor(_places(self._going, rows), device="cpu"))

    def _rows_of(self, decoder: Decoder) -> list[int]:
        """Return the rows of the decoder: on a GPU also those that have stopped, as others need another graph."""
        return [self._decoded[row] for row in decoder.kept]

    def run(self) -> list[list[int]]:
        """Generate up to the end, and return the new tokens of each row, its stop token included."""
        for _ in self:
            pass
        return self.tokens

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Tensor:
        """Return the next token of every row, `b`."""
        self._book()
        if self._unseen is None:
            if not self._left or not self._going:
                if self._decoder is not None:
                    state = self._now()
                    self._state, self._decoder = state, None
                raise StopIteration
            self._advance()
        unseen, self._unseen = self._unseen, None
        assert unseen is not None
        return unseen

    def _advance(self) -> None:
        """Read the last token of every row, and choose the next one."""
        going, device = self._going, self.last.device
        with torch.no_grad():
            logits, read = self._read()
            lengths = self._lengths if read is None else read.lengths
            at = torch.full((len(going),), lengths, device=device) if isinstance(lengths, int) else lengths
            tokens = choose_tokens(logits, [self._sampling[n] for n in going], at, [self._seen[n] for n in going])
        chosen = tokens.tolist()  # waits for a GPU: after an interrupt here, the same is chosen again
        whole, following = len(going) == len(self.tokens), tokens[:, None]
        last = tokens if whole else self.last.index_copy(0, torch.tensor(going, device=device), tokens)
        # No call comes between these lines, so that an interrupt finds all of them done, or none.
        if read is None:
            self._reads = self._reads + 1
        else:
            self._spare = None if self._shown else self._state
            self._shown = False
            self._state = read
        self._bounds = None
        self._left = self._left - 1
        self.last = self._unseen = last
        self._next = following
        self._booked = 0
        self._chosen = chosen
        self._book()

    def _book(self) -> None:
        """Add the tokens that were chosen to those of each row, and drop the rows that they end.

        An interrupted call is continued by the next one: a row is added by lines between which there is no call.
        """
        chosen = self._chosen
        if chosen is None:
            return
        while self._booked < len(chosen):
            row, token = self._going[self._booked], chosen[self._booked]
            own, seen = self.tokens[row], self._seen[row]
            times = 0 if seen is None else seen.get(token, 0) + 1
            own[self._made :] = [token]
            if seen is not None:
                seen[token] = times
            self._booked = self._booked + 1
        if self._stops and not self._stops.isdisjoint(chosen):
            self._drop([token in self._stops for token in chosen])
        else:
            self._made = self._made + 1
            self._chosen = None

    def _read(self) -> tuple[Tensor, ModelState | None]:
        """Read the next tokens; return the logits of the last of each row, and the state unless the decoder has it."""
        if self._decoder is None and self._state is not None and self._bounds is None and self._decodes:
            self._prepare(self._state)
        decoder = self._decoder
        if decoder is not None:
            logits = decoder.repeat(self._reads)
            if logits is None:
                self._narrow(decoder)
            rows = self._rows_of(decoder)
            whole = rows == self._going
            if logits is None:
                logits = decoder(self._next if whole else self._last_of(rows))
            return (logits if whole else logits[_places(self._going, rows)])[:, -1], None
        if self._invariant:
            return self._read_each()
        state = self._state if self._spare is None else _over(self._state, self._spare)
        out = self._model(self._next, state, self._bounds, last_only=True)
        return out.logits[:, -1] if self._bounds is None else out.logits[0], out.state

    def _read_each(self) -> tuple[Tensor, ModelState]:
        """Read the prompt of each row by itself, since a prompt's bits depend on the shape of the call."""
        rows, logits, states = len(self._going), [], []
        for row in range(rows):
            ids = self._next[row : row + 1]
            if self._bounds is not None:
                ids = self._next[:, self._bounds[row] : self._bounds[row + 1]]
            state = None if self._state is None else _row(self._state, row)
            out = self._model(ids, state, last_only=True)
            logits.append(out.logits[:, -1])
            states.append(out.state)
        return torch.cat(logits), states[0] if rows == 1 else ModelState.join(states)

    def _last_of(self, rows: list[int]) -> Tensor:
        """Return the last tokens of these rows, `rows 1`."""
        return self.last[torch.tensor(rows, device=self.last.device)][:, None]

    def _prepare(self, state: ModelState) -> None:
        """Let a decoder read from now on, if C or a CUDA graph computes the model and enough tokens are left."""
        model, on_gpu = self._model, self._next.is_cuda
        room = min(self._left, MOST_GRAPHED_ROOM if on_gpu else MOST_ROOM)
        if self._invariant:
            if self._made:  # else these are prompts, of any length, after the caller's state
                self._use(Decoder(model, state, room, batch_invariant=True), state)
            return
        if self._left < (FEWEST_GRAPHED if on_gpu else FEWEST_DECODED) or self._next.shape[1] != 1:
            return
        if not on_gpu and state.rows > MOST_ROWS:
            return
        self._decodes = False  # asked once
        if not runs_own_forward(model) or model._compiled_call_impl is not None:
            return
        if not (can_be_recorded(model) if on_gpu else self._next.is_cpu):
            return
        try:
            decoder = Decoder(model, state, room)
        except torch.OutOfMemoryError:  # it needs a copy of the state
            return
        if decoder.computes_all or decoder.captured:
            self._use(decoder, state)

    def _use(self, decoder: Decoder, state: ModelState) -> None:
        """Let a decoder read from now on, after this state."""
        self._decoder, self._begun, self._reads, self._decoded = decoder, state.lengths, 0, list(self._going)
        self._state = self._spare = None

    @property
    def _lengths(self) -> int | Tensor:
        """The tokens of each row that goes on with the one that the decoder has read."""
        begun = self._begun
        if isinstance(begun, Tensor) and self._decoded != self._going:
            begun = begun[_places(self._going, self._decoded)]
        return begun + self._reads + 1

    def _drop(self, stopped: list[bool]) -> None:
        """Keep the states of rows that have stopped, and go on with the others."""
        decoder, ended = self._decoder, dict(self._ended)
        places = [] if decoder is None else _places(self._going, self._rows_of(decoder))
        for i, n in enumerate(self._going):
            if stopped[i]:
                ended[n] = _row(self._state, i) if decoder is None else decoder.row(places[i], self._reads)
        left = [i for i, over in enumerate(stopped) if not over]
        going = [self._going[i] for i in left]
        at = torch.tensor(left, dtype=torch.int64, device=self._next.device)
        following, state = self._next[at], None
        if decoder is None and left:
            assert self._state is not None
            state = self._state.select(at)
        # No call comes between these lines, so that an interrupt finds all of them done, or none.
        self._spare = None  # it has other rows
        self._state = state
        self._decoder = decoder if left else None
        self._ended = ended
        self._going = going
        self._next = following
        self._made = self._made + 1
        self._chosen = None

    def _narrow(self, decoder: Decoder) -> None:
        """Leave rows that have stopped out of the decoder, unless that needs another graph for little."""
        rows = self._rows_of(decoder)
        if rows == self._going or not self._narrows:
            return
        if decoder.captured and (2 * len(self._going) > len(rows) or self._left < FEWEST_GRAPHED):
            return
        try:
            decoder.keep(_places(self._going, rows), self._reads)
        except torch.OutOfMemoryError:  # it copies the state
            self._narrows = False


def _places(rows: list[int], among: list[int]) -> list[int]:
    """Return where these rows are among others."""
    found = {row: place for place, row in enumerate(among)}
    return [found[row] for row in rows]


def _over(state: ModelState | None, spare: ModelState) -> ModelState:
    """Return the state with the memory of another one for what follows it."""
    assert state is not None
    layers = tuple(
        Memory(one.tensors, into=other.tensors) if isinstance(one, Memory) and isinstance(other, Memory) else one
        for one, other in zip(state.layers, spare.layers, strict=True)
    )
    return ModelState(layers, state.lengths)


def _row(state: ModelState | None, row: int) -> ModelState:
    """Return one row of a state."""
    assert state is not None
    if state.rows == 1:
        return state
    one = state.select(torch.tensor([row], device="cpu"))
    return one if isinstance(one.lengths, int) else _trimmed(one, int(one.lengths[0]))


def _trimmed(state: ModelState, length: int) -> ModelState:
    """Return the state of one row with its length as an int, and its caches without the room of longer rows."""
    from lineate.layers import TokenCache

    layers = tuple(
        TokenCache({name: layer[name][:, :length].contiguous() for name in layer.names}, length)
        if isinstance(layer, TokenCache)
        else layer
        for layer in state.layers
    )
    return ModelState(layers, length)
