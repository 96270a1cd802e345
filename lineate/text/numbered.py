"""The tokenizer of a model without one, such as a model with random weights: every id has a text of its own."""

from pathlib import Path

from lineate.text.tokenizer import Bytes


class Numbered(Bytes):
    """Bytes and end-of-text as in `Bytes`; any other id n has the text "<n>", which is encoded as bytes.

    Args:
        size: The number of ids, at least those of `Bytes`.
    """

    def __init__(self, size: int) -> None:
        if size < Bytes.vocab_size:
            raise ValueError(f"size must be at least {Bytes.vocab_size}, 256 bytes and end-of-text, got {size}")
        self.vocab_size = size
        self.name = self.identity = f"numbered:{size}"

    def token_bytes(self, token: int) -> bytes:
        self._check(token)
        return super().token_bytes(token) if token < Bytes.vocab_size else b"<%d>" % token

    def save(self, folder: Path) -> None:
        """Raise ValueError: the ids stand for no vocabulary that a folder could have."""
        raise ValueError(f"tokenizer '{self.name}' has no files and cannot be saved to {folder}; use 'bytes'")
