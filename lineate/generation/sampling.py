"""Continue sequences token by token, from prompts of any lengths or from a state."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.checks import check_flag
from lineate.decoding.invariant import check_invariant
from lineate.generation.choice import Sampling, check_sampling
from lineate.generation.defaults import SamplingFlags
from lineate.generation.generated import Generation
from lineate.models import HybridLM, ModelState
from lineate.models.checks import check_ids, check_mask, check_state

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
    batch_invariant: bool = False,
) -> Generation:
    """Continue sequences: yield the next token of every row until every row has reached a stop token.

        for token in generate(model, ids, 20): ...                              # b
        made = generate(model, [[1, 2, 3], [4, 5]], 20, seed=[0, 1])            # prompts of any lengths
        tokens = torch.stack(list(made), 1)                                     # b 20
        more = generate(model, made.last[:, None], 20, state=made.state)        # goes on where it ended

    A row that has stopped repeats its stop token. A row's tokens depend on its prompt, its options and its seed alone,
    not on the other rows: rows with the same prompt and seed are the same. Options of None are those of the checkpoint
    (model.sampling_defaults); what it does not name is neutral. The model must stay unchanged while tokens are
    generated (see Decoder, which reads them where it can): a change takes effect in the next call of generate.

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
        batch_invariant: Whether a row has the same logits, to the bit, alone and among any other rows; see Decoder.

    Returns:
        An iterator over tokens `b`, which has the state when it has ended.
    """
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    check_flag("batch_invariant", batch_invariant)
    if batch_invariant:
        check_invariant(model)
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
    made = Generation(model, (prompts, bounds), max_new_tokens, list(sampling), stop, state, batch_invariant)
    if earlier is not None:
        made.count_earlier(earlier)
    return made


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
