"""The tokens of `generate`, one of every row at a time."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from lineate.decoding import Decoder
from lineate.decoding.rows import can_be_recorded
from lineate.generation.choice import Sampling, choose_tokens
from lineate.layers import Memory
from lineate.layers.step.supported_modules import runs_own_forward
from lineate.models import HybridLM, ModelState
from lineate.models.reading import read_prompt
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
    """

    def __init__(
        self,
        model: HybridLM,
        prompts: tuple[Tensor, Tensor | None],
        max_new_tokens: int,
        sampling: list[Sampling],
        stop: Collection[int],
        state: ModelState | None,
    ) -> None:
        ids, bounds = prompts
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
        """The rows of the decoder; on a GPU it goes on with rows that have stopped, since others need another graph."""
        self._begun: int | Tensor = 0
        """The tokens of each of its rows when it began."""
        self._reads = 0
        """How many of its calls this has used."""
        self._decodes = True
        """Whether a decoder may be prepared for these rows; it is asked once."""
        self._unseen: Tensor | None = None
        """The result of an interrupted call of next, which the state has had to complete."""
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
        if self._decoder is not None and not self._decoder.rewinds(self._reads):
            self._unseen = self._advance()
        now = self._now()
        if not self._ended:
            return now
        going = {n: i for i, n in enumerate(self._going)}
        states = [self._ended[n] if n in self._ended else _row(now, going[n]) for n in range(len(self.tokens))]
        return ModelState.join(states)

    def _now(self) -> ModelState | None:
        """Return the state of the rows that go on."""
        if self._decoder is None:
            return self._state
        state = self._decoder.state_before(self._reads)
        return state if self._decoded == self._going else state.select(torch.tensor(self._places()))

    def _places(self) -> list[int]:
        """Return where the rows that go on are in the decoder."""
        return [self._decoded.index(n) for n in self._going]

    def run(self) -> list[list[int]]:
        """Generate up to the end, and return the new tokens of each row, its stop token included."""
        for _ in self:
            pass
        return self.tokens

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Tensor:
        """Return the next token of every row, `b`."""
        if self._unseen is not None:
            unseen, self._unseen = self._unseen, None
            return unseen
        if not self._left or not self._going:
            raise StopIteration
        return self._advance()

    def _advance(self) -> Tensor:
        """Read the last token of every row, and choose the next one."""
        going, device = self._going, self.last.device
        with torch.no_grad():
            logits, read = self._read()
            lengths = self._lengths if read is None else read.lengths
            at = torch.full((len(going),), lengths, device=device) if isinstance(lengths, int) else lengths
            tokens = choose_tokens(logits, [self._sampling[n] for n in going], at, [self._seen[n] for n in going])
        chosen = tokens.tolist()  # waits for a GPU: an interrupt here leaves everything unchanged
        if read is None:
            self._reads += 1
        else:
            self._spare, self._shown = (None if self._shown else self._state), False
            self._state = read
        self._bounds, self._left = None, self._left - 1
        for n, token in zip(going, chosen, strict=True):
            self.tokens[n].append(token)
            if (seen := self._seen[n]) is not None:
                seen[token] = seen.get(token, 0) + 1
        whole = len(going) == len(self.tokens)
        self.last = tokens if whole else self.last.index_copy(0, torch.tensor(going, device=device), tokens)
        if self._stops and not self._stops.isdisjoint(chosen):
            tokens = self._drop([token in self._stops for token in chosen], tokens)
        self._next = tokens[:, None]
        return self.last

    def _read(self) -> tuple[Tensor, ModelState | None]:
        """Read the next tokens; return the logits of the last of each row, and the state unless the decoder has it."""
        if self._decoder is None and self._state is not None and self._bounds is None and self._decodes:
            self._prepare(self._state)
        if self._decoder is not None:
            logits = self._decoder.repeat(self._reads)
            whole = self._decoded == self._going
            if logits is None:
                logits = self._decoder(self._next if whole else self._last_of(self._decoded))
            return (logits if whole else logits[self._places()])[:, -1], None
        state = self._state if self._spare is None else _over(self._state, self._spare)
        out = read_prompt(self._model, self._next, state, self._bounds)
        return out.logits[:, -1] if self._bounds is None else out.logits[0], out.state

    def _last_of(self, rows: list[int]) -> Tensor:
        """Return the last tokens of these rows, `rows 1`."""
        return self.last[torch.tensor(rows, device=self.last.device)][:, None]

    def _prepare(self, state: ModelState) -> None:
        """Let a decoder read from now on, if C or a CUDA graph computes the model and enough tokens are left."""
        model, on_gpu = self._model, self._next.is_cuda
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
            decoder = Decoder(model, state, min(self._left, MOST_GRAPHED_ROOM if on_gpu else MOST_ROOM))
        except torch.OutOfMemoryError:  # it needs a copy of the state
            return
        if decoder.computes_all or decoder.captured:
            self._decoder, self._begun, self._reads, self._decoded = decoder, state.lengths, 0, list(self._going)
            self._state = self._spare = None

    @property
    def _lengths(self) -> int | Tensor:
        """The tokens of each row that goes on with the one that the decoder has read."""
        begun = self._begun
        if isinstance(begun, Tensor) and self._decoded != self._going:
            begun = begun[self._places()]
        return begun + self._reads + 1

    def _drop(self, stopped: list[bool], tokens: Tensor) -> Tensor:
        """Keep the states of rows that have stopped, and return the tokens of those that go on."""
        self._spare = None  # it has other rows
        places = self._places() if self._decoder is not None else []
        for i, n in enumerate(self._going):
            if stopped[i]:
                decoder = self._decoder
                self._ended[n] = _row(self._state, i) if decoder is None else decoder.row(places[i], self._reads)
        left = [i for i, over in enumerate(stopped) if not over]
        self._going = [self._going[i] for i in left]
        if not left:
            self._state = self._decoder = None
            return tokens[:0]
        at = torch.tensor(left, device=tokens.device)
        if self._decoder is None:
            assert self._state is not None
            self._state = self._state.select(at)
        else:
            self._narrow(self._decoder, [places[i] for i in left])
        return tokens[at]

    def _narrow(self, decoder: Decoder, kept: list[int]) -> None:
        """Keep these rows of the decoder alone, unless that needs another graph for few tokens or few rows less."""
        if decoder.captured and (2 * len(kept) > len(self._decoded) or self._left < FEWEST_GRAPHED):
            return
        decoder.keep(kept, self._reads)
        if isinstance(self._begun, Tensor):
            self._begun = self._begun[kept]
        self._decoded = [self._decoded[place] for place in kept]


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
