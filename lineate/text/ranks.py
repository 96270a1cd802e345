"""A tiktoken model: a file of byte strings and their ranks, as Kimi Linear has, turned into a BPE of tokenizers.

tiktoken joins, among all neighbours whose joined bytes are a token, those of the lowest rank. The same follows from
one merge for every way to cut a token in two, in the order of the tokens' ranks.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lineate.models.files.pieces import KIMI
from lineate.models.files.safetensors import CheckpointError
from lineate.text.base import ALPHABET

RANKS_FILE = "tiktoken.model"
RESERVED = 256
"""Ids after the ranks that are special tokens."""
KIMI_CODE = "tokenization_kimi"
"""The module that Kimi's tokenizer_config.json names."""
LONGEST_TOKEN = 512


def engine_from_ranks(tokenizers: Any, file: Path, data: bytes, config: Mapping[str, Any]) -> Any:
    """Return a tokenizer of the tokenizers library; raise if config does not name a model whose pieces are known.

    Args:
        tokenizers: The library.
        file: The file of ranks, for messages.
        data: Its contents.
        config: The contents of tokenizer_config.json.
    """
    code = config.get("auto_map")
    if not isinstance(code, dict) or KIMI_CODE not in str(code.get("AutoTokenizer")):
        raise CheckpointError(
            f"{file}: expected tokenizer_config.json to name {KIMI_CODE}, got {str(code)!r:.80}; how another model "
            "cuts texts is only defined by its code: write tokenizer.json once, in a place where you trust that code"
        )
    ranks = _read_ranks(file, data)
    vocabulary = {_spelled(token): rank for token, rank in ranks.items()}
    merges = [(_spelled(a), _spelled(b)) for a, b in _merges(ranks)]
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(KIMI), "isolated")
    whole = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, whole])
    engine.decoder = tokenizers.decoders.ByteLevel()
    named = config.get("added_tokens_decoder")
    named = named if isinstance(named, dict) else {}
    special = []
    for token in range(len(ranks), len(ranks) + RESERVED):
        value = named.get(str(token))
        text = value.get("content") if isinstance(value, dict) else None
        special.append(text if isinstance(text, str) and text else f"<|reserved_token_{token}|>")
    engine.add_tokens([tokenizers.AddedToken(x, special=True, normalized=False) for x in special])
    return engine


def _read_ranks(file: Path, data: bytes) -> dict[bytes, int]:
    """Return the rank of every byte string; the ranks must count from 0, and every byte must have one."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            if int(rank) != len(found) or not token or len(token) > LONGEST_TOKEN or token in found:
                raise ValueError
            found[token] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{file}: line {number} must be a new token in base64 and its rank, {len(found)}, got {line!r:.80}"
            ) from None
    lacks = [byte for byte in range(256) if bytes((byte,)) not in found]
    if lacks:
        raise CheckpointError(f"{file}: expected a token for each of the 256 bytes, got none for {lacks[0]}")
    return found


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield each way to cut a token into two tokens, in the order of the ranks."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:n], token[n:]) for n in range(1, len(token)))
        yield from sorted(
            (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks),
            key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
        )


_CHARACTERS = {byte: character for character, byte in ALPHABET.items()}


def _spelled(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)
