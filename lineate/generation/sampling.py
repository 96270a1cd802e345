"""Continue sequences token by token, from prompts of any lengths or from a state."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.decoding import Decoder
from lineate.generation.choice import Sampling, check_sampling, choose_tokens
from lineate.generation.defaults import SamplingFlags
from lineate.layers import Memory
from lineate.layers.step.supported_modules import runs_own_forward
from lineate.models import HybridLM, ModelState
from lineate.models.checks import check_ids, check_mask, check_state
from lineate.native.product import MOST_ROWS

FEWEST_DECODED, MOST_ROOM = 8, 256
"""A decoder is prepared for at least as many tokens, and has room for as many at first."""

Prompts = Tensor | Sequence[Tensor | Sequence[int]]
"""Token ids `b t`, or one sequence of ids a row, of any lengths."""


class Detokenizer(Protocol):
    """The part of a tokenizer that stream_text needs."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with U+FFFD for an incomplete character."""
        ...


def choose(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw the next token of every row with a generator; choose_tokens has more options and needs no generator.

    Args:
        logits: Logits `b vocab`.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw only from the k likeliest tokens; 0 for all.
        top_p: Draw only from the likeliest tokens whose probabilities together reach p, at least one token.
        generator: Source of random numbers; torch's default if None.

    Returns:
        Tokens `b`.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < logits.shape[-1]:
        sorted_logits[:, top_k:] = -torch.inf
    probabilities = sorted_logits.softmax(-1)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # probability of all likelier tokens
        probabilities = probabilities.masked_fill(before >= top_p, 0)  # always keeps the likeliest token
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return order.gather(-1, drawn)[:, 0]


def generate(
    model: HybridLM,
    ids: Prompts,
    max_new_tokens: int = 256,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | Sequence[int] = 0,
    sampling: Sequence[Sampling] | None = None,
    stop: Collection[int] | None = None,
    state: ModelState | None = None,
    attention_mask: Tensor | None = None,
    earlier: Sequence[Sequence[int]] | None = None,
) -> "Generation":
    """Continue sequences: yield the next token of every row until every row has reached a stop token.

        for token in generate(model, ids, 20): ...                              # b
        made = generate(model, [[1, 2, 3], [4, 5]], 20, seed=[0, 1])            # prompts of any lengths
        tokens = torch.stack(list(made), 1)                                     # b 20
        more = generate(model, made.last[:, None], 20, state=made.state)        # goes on where it ended

    A row that has stopped repeats its stop token. A row's tokens depend on its prompt, its options and its seed alone,
    not on the other rows: rows with the same prompt and seed are the same. Options of None are those of the checkpoint
    (model.sampling_defaults); what it does not name is neutral. On a CPU the model must stay unchanged while tokens are
    generated (see Decoder): a change takes effect in the next call of generate.

    Args:
        model: The model.
        ids: Prompts `b t`, or a sequence of prompts, each a sequence of ids or a tensor `t`.
        max_new_tokens: The most tokens to yield.
        temperature: Divides the logits; 0 takes the likeliest token; 1 is neutral.
        top_k: Draw only from the k likeliest tokens; 0 for all.
        top_p: Draw only from the likeliest tokens whose probabilities together reach p; 1 for all.
        min_p: Draw only from tokens with at least this part of the likeliest token's probability; 0 for all.
        repetition_penalty: Makes tokens of ids, and those that were generated, less likely if above 1.
        seed: Seed of the draws, of all rows or of each.
        sampling: The options of each row, in place of those above.
        stop: Tokens that end a row; None for those of the model's checkpoint (model.end_tokens), () for none.
        state: What the model has read before ids, one row a prompt, such as Generation.state; it is not changed.
        attention_mask: `b t`, 1, and 0 for padding before or after a row's tokens.
        earlier: The tokens of each row that the state has read, for the repetition penalty.

    Returns:
        An iterator over tokens `b`, which has the state when it has ended.
    """
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    given = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    options = SamplingFlags(given).resolve(getattr(model, "sampling_defaults", None), Sampling())
    prompts, bounds = _prompts(model, ids, attention_mask)
    rows = prompts.shape[0] if bounds is None else len(bounds) - 1
    if sampling is None:
        seeds = [seed] * rows if isinstance(seed, int) else list(seed)
        if len(seeds) != rows:
            raise ValueError(f"seed must be an int or have one for each of the {rows} rows, got {len(seeds)}")
        sampling = [replace(options, seed=own) for own in seeds]
    elif len(sampling) != rows:
        raise ValueError(f"sampling must have one entry for each of the {rows} rows, got {len(sampling)}")
    check_state(state, model.layers, rows)
    if stop is None:
        stop = model.end_tokens
    made = Generation(model, (prompts, bounds), max_new_tokens, list(sampling), stop, state)
    if earlier is not None:
        made.count_earlier(earlier)
    return made


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
        """Reads the tokens after the prompt, where C computes the model; it then has the state."""
        self._begun: int | Tensor = 0
        """The tokens of each row when the decoder began."""
        self._reads = 0
        """How many of its calls this has used."""
        self._decodes = True
        """Whether a decoder may be prepared for these rows; it is asked once."""
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
        """The model's state after all tokens of every row but the last; None before the first token."""
        self._shown = True
        now = self._now()
        if not self._ended:
            return now
        going = {n: i for i, n in enumerate(self._going)}
        states = [self._ended[n] if n in self._ended else _row(now, going[n]) for n in range(len(self.tokens))]
        return ModelState.join(states)

    def _now(self) -> ModelState | None:
        """Return the state of the rows that go on."""
        return self._state if self._decoder is None else self._decoder.state_before(self._reads)

    def run(self) -> list[list[int]]:
        """Generate up to the end, and return the new tokens of each row, its stop token included."""
        for _ in self:
            pass
        return self.tokens

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Tensor:
        """Return the next token of every row, `b`."""
        if not self._left or not self._going:
            raise StopIteration
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
            return (self._decoder(self._next) if logits is None else logits)[:, -1], None
        state = self._state if self._spare is None else _over(self._state, self._spare)
        out = self._model(self._next, state, self._bounds, last_only=True)
        return out.logits[:, -1] if self._bounds is None else out.logits[0], out.state

    def _prepare(self, state: ModelState) -> None:
        """Let a decoder read from now on, if C computes the model and enough tokens are left."""
        model = self._model
        if self._left < FEWEST_DECODED or state.rows > MOST_ROWS or self._next.shape[1] != 1:
            return
        self._decodes = False  # asked once
        if not self._next.is_cpu or not runs_own_forward(model) or model._compiled_call_impl is not None:
            return
        decoder = Decoder(model, state, min(self._left, MOST_ROOM))
        if decoder.computes_all:
            self._decoder, self._begun, self._reads = decoder, state.lengths, 0
            self._state = self._spare = None

    @property
    def _lengths(self) -> int | Tensor:
        """The tokens of each row with the one that the decoder has read."""
        return self._begun + self._reads + 1

    def _drop(self, stopped: list[bool], tokens: Tensor) -> Tensor:
        """Keep the states of rows that have stopped, and return the tokens of those that go on."""
        self._spare = None  # it has other rows
        self._decodes = self._decodes or self._decoder is not None
        self._state, self._decoder = self._now(), None
        for i, n in enumerate(self._going):
            if stopped[i]:
                self._ended[n] = _row(self._state, i)
        left = [i for i, over in enumerate(stopped) if not over]
        self._going = [self._going[i] for i in left]
        if not left:
            self._state = None
            return tokens[:0]
        at = torch.tensor(left, device=tokens.device)
        assert self._state is not None
        self._state = self._state.select(at)
        return tokens[at]


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


def _prompts(model: HybridLM, ids: Prompts, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return prompts of one length as `b t`, and others packed, `1 t`, with the bounds of each."""
    vocab, device = model.config.vocab_size, model.device
    if isinstance(ids, Tensor):
        check_ids(ids, vocab, "ids")
        kept = None if mask is None else check_mask(mask, ids)
        if kept is None:
            return ids.to(device), None
        lengths = kept.sum(1).tolist()
        packed = ids[kept]
    else:
        if mask is not None:
            raise ValueError("attention_mask needs ids of shape (b, t), got a sequence of prompts; leave it out")
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise TypeError(f"ids must be a torch.Tensor or a sequence of prompts, got {type(ids).__name__}")
        prompts = [_prompt(x, n) for n, x in enumerate(ids)]
        if not prompts:
            raise ValueError("ids must have at least one prompt, got none")
        lengths = [len(x) for x in prompts]
        packed = torch.cat(prompts)
    if not all(lengths):
        raise ValueError(f"ids must have at least one token in every row, got none in row {lengths.index(0)}")
    check_ids(packed[None], vocab, "ids")
    packed = packed.to(device)
    if len(set(lengths)) == 1:
        return packed.view(len(lengths), -1), None
    bounds = F.pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0))
    return packed[None], bounds


def _prompt(ids: Tensor | Sequence[int], row: int) -> Tensor:
    """Return one prompt of a sequence of them as a tensor."""
    if isinstance(ids, Tensor):
        if ids.dim() != 1:
            raise ValueError(f"ids must be tensors of shape (t,) in a sequence of prompts, got {tuple(ids.shape)}")
        return ids.cpu()
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise TypeError(f"ids must have a sequence of token ids in every row, got {type(ids).__name__} in row {row}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"ids must have ints in every row, got {token!r} in row {row}")
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def stream_text(tokenizer: Detokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield text as tokens arrive, held back while a character is incomplete.

    Args:
        tokenizer: Anything with decode(ids).
        tokens: The token ids of one sequence.
    """
    ids: list[int] = []
    done = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd") and text != done:
            yield text[len(done) :]
            done = text
            if text.endswith("\n"):  # forget the finished line, or decoding would take quadratic time
                ids, done = [], ""
    if ids and (rest := tokenizer.decode(ids)[len(done) :]):
        yield rest
