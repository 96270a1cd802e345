"""Tokenizers of published checkpoints: tokenizer.json, or the ranks of a tiktoken model; their code is never run."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.models.files.companions import (
    GENERATION,
    TOKENIZER_FILES,
    read_companions,
    read_file,
    write_companions,
)
from lineate.models.files.safetensors import CheckpointError, parse_json
from lineate.text.base import JSON_FILE, KIND_FILE, Tokenizer, library, utf8, vocabulary_bytes
from lineate.text.bounded import MARGIN
from lineate.text.chat import CHAT_FILE, read_chat
from lineate.text.longest import token_bound
from lineate.text.ranks import RANKS_FILE, engine_from_ranks

if TYPE_CHECKING:
    import numpy as np

CONFIG_FILE, MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that have a role."""
TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|end|>",
    "<|endofturn|>", "<|return|>",
)  # fmt: skip
"""Tokens that end a turn, in models whose chat template uses them."""
MOST_TOKENS = 2**22
PYTHON_REMEDY = (
    "write tokenizer.json once, in a place where you trust its code: "
    "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)


class PublishedTokenizer(Tokenizer):
    """The tokenizer of a published checkpoint, from the contents of its files.

    Args:
        files: The contents of tokenizer.json and the related files, by name.
        where: Their folder, for messages.
    """

    def __init__(self, files: Mapping[str, bytes], where: str = "the tokenizer") -> None:
        self._files, self._where = dict(files), where
        folder = Path(where)
        self._config = self._json(CONFIG_FILE)
        self._engine = self._make_engine()
        self._add_tokens()
        vocabulary: dict[str, int] = self._engine.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MOST_TOKENS:
            raise CheckpointError(f"{where}: expected at most {MOST_TOKENS:,} tokens, got ids up to {self.vocab_size}")
        self.name = f"published:{self.vocab_size}"
        self.identity = self._hash()
        added = self._engine.get_added_tokens_decoder()
        self._special = {token: x.content for token, x in added.items() if x.special}
        whole = json.loads(self._engine.to_str())
        spelled = self._spell(whole, vocabulary, {token: x.content for token, x in added.items()})
        self._bytes, self.longest_strip = spelled
        self.bound = token_bound(whole, self._bytes)
        names = {role: text for role in NAMED if (text := self._named(role)) is not None}
        self.chat = read_chat(folder, self._files, names)
        self._ends = self._find_ends(vocabulary, names)
        self._start = self._find_start(vocabulary, names)
        self._end = vocabulary.get(names.get("eos_token", ""), min(self._ends, default=None))

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder has a published tokenizer that can be read.

        Args:
            folder: The folder.
        """
        return any((folder / name).is_file() for name in (JSON_FILE, RANKS_FILE))

    @classmethod
    def open(cls, folder: Path) -> "PublishedTokenizer":
        """Read the tokenizer of a folder.

        Args:
            folder: The folder.
        """
        if not cls.is_in(folder):
            others = sorted(
                x.name for name in ("vocab.*", "*.model", "*.tiktoken", "merges.txt") for x in folder.glob(name)
            )
            got = f"; {', '.join(others[:3])} alone cannot be read: {PYTHON_REMEDY}" if others else ""
            raise FileNotFoundError(
                f"{folder} holds no tokenizer ({KIND_FILE} is missing, and so are {JSON_FILE} and {RANKS_FILE}){got}"
            )
        files = read_companions(folder)
        config = read_file(folder, "config.json")
        return cls(files if config is None else files | {"config.json": config}, str(folder))

    def __reduce__(self) -> Any:
        return PublishedTokenizer, (self._files, self._where)

    @property
    def end(self) -> int:  # type: ignore[override]
        """The id of end-of-text."""
        if self._end is None:
            raise ValueError(
                f"{self._where}: expected a token that ends a text, got none; name eos_token in {CONFIG_FILE}"
            )
        return self._end

    @property
    def ends(self) -> frozenset[int]:
        return self._ends

    @property
    def start(self) -> tuple[int, ...]:
        return self._start

    @property
    def special_texts(self) -> tuple[str, ...]:
        return tuple(self._special.values())

    def special_text(self, token: int) -> str | None:
        return self._special.get(token)

    def token_bytes(self, token: int) -> bytes:
        if token < 0:
            self._check(token)
        return self._bytes.get(token, b"")  # a model may have more rows than there are tokens

    def encode_many(self, texts: Sequence[str]) -> "list[np.ndarray]":
        import numpy as np

        return [np.array(ids, np.int64) for ids in self._encode(texts, True)]

    def encode(self, text: str) -> list[int]:
        return self._encode([text], True)[0]

    def encode_rendered(self, text: str) -> list[int]:
        return self._encode([text], False)[0]

    def _encode(self, texts: Sequence[str], plain: bool) -> list[list[int]]:
        for text in texts:
            utf8(text)
        engine = self._plain if plain else self._engine
        with _no_panic(self._where):
            return [x.ids for x in engine.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _independent(self, text: str, rendered: bool) -> tuple[int, int] | None:
        utf8(text)
        with _no_panic(self._where):
            engine = self._engine if rendered else self._plain
            found = engine.encode_batch([text], add_special_tokens=False)[0]  # encode would hold the interpreter's lock
        for at in range(len(text) - MARGIN, max(0, len(text) - MARGIN - 64), -1):  # a normaliser may drop characters
            if (word := found.char_to_word(at)) is not None:
                characters, tokens = found.word_to_chars(word), found.word_to_tokens(word)
                return None if not characters or not tokens or not characters[0] else (tokens[0], characters[0])
        return None

    def save(self, folder: Path) -> None:
        write_companions(Path(folder), {name: data for name, data in self._files.items() if name != "config.json"})

    def _make_engine(self) -> Any:
        """Return the tokenizer of the tokenizers library."""
        tokenizers = library("the tokenizer of a published checkpoint")
        if JSON_FILE not in self._files:
            return engine_from_ranks(tokenizers, self._file(RANKS_FILE), self._files[RANKS_FILE], self._config)
        text = self._files[JSON_FILE].decode("utf-8", "replace")
        try:
            with _no_panic(self._where):
                engine = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise CheckpointError(
                f"{self._file(JSON_FILE)}: expected one of the tokenizers library, got a file that it cannot read "
                f"({error!s:.200}); fetch it again, or update tokenizers"
            ) from None
        engine.no_padding()
        engine.no_truncation()
        return engine

    def _add_tokens(self) -> None:
        """Add the tokens that tokenizer_config.json and special_tokens_map.json have and tokenizer.json lacks."""
        tokenizers = library("the tokenizer of a published checkpoint")
        engine = self._engine
        known = engine.get_added_tokens_decoder()
        wanted = self._config.get("added_tokens_decoder") or {}
        for token, value in sorted(self._numbered(wanted).items()):
            if token in known and known[token].content == value["content"]:
                continue
            flags = {key: bool(value.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "special")}
            flags["normalized"] = bool(value.get("normalized", not flags["special"]))
            engine.add_tokens([tokenizers.AddedToken(value["content"], **flags)])
            if (got := engine.token_to_id(value["content"])) != token:
                raise CheckpointError(
                    f"{self._file(CONFIG_FILE)}: added token {value['content']!r:.80} must have the next free id, "
                    f"{got}, got {token}; this file and {JSON_FILE} belong to different checkpoints"
                )
        special = {x.content for x in engine.get_added_tokens_decoder().values() if x.special}
        more = [text for role in NAMED if (text := self._named(role)) is not None]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = self._config.get(key) or self._json(MAP_FILE).get(key) or ()
            more += [x for x in map(_content, listed.values() if isinstance(listed, dict) else listed) if x]
        engine.add_special_tokens([text for text in dict.fromkeys(more) if text not in special])
        self._plain = tokenizers.Tokenizer.from_str(engine.to_str())
        self._plain.encode_special_tokens = True  # special tokens within a text are ordinary text

    def _numbered(self, value: Any) -> dict[int, dict[str, Any]]:
        """Return added_tokens_decoder by id."""
        fits = isinstance(value, dict) and all(
            key.isdecimal() and len(key) < 10 and isinstance(x, dict) and isinstance(x.get("content"), str)
            for key, x in value.items()
        )
        if not fits:
            raise CheckpointError(
                f"{self._file(CONFIG_FILE)}: added_tokens_decoder must map ids to tokens, got {value!r:.80}"
            )
        return {int(key): x for key, x in value.items()}

    def _spell(
        self, whole: Mapping[str, Any], vocabulary: Mapping[str, int], added: Mapping[int, str]
    ) -> tuple[dict[int, bytes], int]:
        """Return the bytes of every token that is not special, and how many spaces a text may lose at its start."""
        decoder = whole.get("decoder") or {}
        parts = decoder.get("decoders", ()) if decoder.get("type") == "Sequence" else (decoder,)
        kinds = {part.get("type"): part for part in parts}
        strip, spell = 0, vocabulary_bytes
        if "ByteLevel" not in kinds:
            space = _space_of(kinds)
            if space is None:
                got = " and ".join(sorted(map(str, kinds))) if kinds != {None: {}} else "none"
                raise CheckpointError(
                    f"{self._file(JSON_FILE)}: expected a decoder of bytes (ByteLevel) or of pieces (Metaspace, or "
                    f"Replace with ByteFallback and Fuse), got {got}; use transformers, and give lineate its ids"
                )
            mark, strip = space

            def spell(token: str) -> bytes:
                if "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                    try:
                        return bytes((int(token[3:5], 16),))
                    except ValueError:
                        pass
                return token.replace(mark, " ").encode("utf-8", "replace")

        found = {token: spell(text) for text, token in vocabulary.items()}
        found |= {token: spell(text) for token, text in added.items()}
        return found | dict.fromkeys(self._special, b""), strip

    def _find_ends(self, vocabulary: Mapping[str, int], names: Mapping[str, str]) -> frozenset[int]:
        """Return the ids that end a text: those the configurations name, eos_token, and the end of a turn."""
        found: set[int] = set()
        for file in (GENERATION, "config.json"):
            values = self._json(file)
            inner = values.get("text_config")
            for place in (values, inner if isinstance(inner, dict) else {}):
                ids = place.get("eos_token_id")
                ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
                if not all(isinstance(x, int) and 0 <= x < 2**31 and not isinstance(x, bool) for x in ids):
                    raise CheckpointError(f"{self._file(file)}: eos_token_id must be an id or a list, got {ids!r:.80}")
                found |= set(ids)
        template = "" if self.chat is None else self.chat.source
        texts = [names.get("eos_token", ""), *(text for text in TURN_ENDS if text in template)]
        return frozenset(found | {vocabulary[text] for text in texts if text in vocabulary})

    def _find_start(self, vocabulary: Mapping[str, int], names: Mapping[str, str]) -> tuple[int, ...]:
        """Return the ids that come before a plain prompt, according to add_bos_token or else the post-processor."""
        first = vocabulary.get(names.get("bos_token", ""))
        given = self._config.get("add_bos_token")
        if given is not None:
            return (first,) if given and first is not None else ()
        with _no_panic(self._where):
            whole = self._engine.encode("a").ids
            body = self._engine.encode("a", add_special_tokens=False).ids
        begin = next((n for n in range(len(whole)) if whole[n : n + len(body)] == body), 0)
        return tuple(whole[:begin]) if body else ()

    def _named(self, role: str) -> str | None:
        value = self._config.get(role)
        return _content(self._json(MAP_FILE).get(role) if value is None else value)

    def _json(self, name: str) -> dict[str, Any]:
        """Return the contents of a JSON file; empty if there is none."""
        if name not in self._files:
            return {}
        try:
            value = parse_json(self._files[name])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self._file(name)}: expected JSON, got a file that is not ({error!s:.200})"
            ) from None
        if not isinstance(value, dict):
            raise CheckpointError(f"{self._file(name)}: expected a JSON object, got {type(value).__name__}")
        return value

    def _file(self, name: str) -> Path:
        return Path(self._where) / name

    def _hash(self) -> str:
        """Return the identity of this tokenizer: all files that determine the encoding of texts."""
        other = (CHAT_FILE, "chat_template.json")
        found = hashlib.sha256()
        for name in sorted(self._files.keys() & set(TOKENIZER_FILES) - set(other)):
            found.update(f"{name} {len(self._files[name])} ".encode() + self._files[name])
        return f"{self.name}-{found.hexdigest()}"


@contextmanager
def _no_panic(where: str) -> Iterator[None]:
    """Raise ValueError where the tokenizers library panics, which is not an Exception and would end a thread."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(
            f"{where}: the tokenizers library must encode any text, got a panic ({error!s:.200}); "
            "shorten the text, or use another tokenizer"
        ) from None


def _content(value: Any) -> str | None:
    """Return the text of a special token, which is a text or a dictionary."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None


def _space_of(kinds: Mapping[Any, Any]) -> tuple[str, int] | None:
    """Return the mark of a space and how many spaces are left out at the start, for decoders of pieces."""
    if set(kinds) == {"Metaspace"}:
        part = kinds["Metaspace"]
        never = part.get("prepend_scheme", "always") == "never" or part.get("add_prefix_space") is False
        return str(part.get("replacement", "\u2581")), 0 if never else 1
    if "Replace" in kinds and "Fuse" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        pattern = kinds["Replace"].get("pattern")
        strip = kinds.get("Strip", {"start": 0, "stop": 0, "content": " "})
        if isinstance(pattern, dict) and kinds["Replace"].get("content") == " " and strip.get("content") == " ":
            return (str(pattern["String"]), int(strip["start"])) if "String" in pattern and not strip["stop"] else None
    return None
