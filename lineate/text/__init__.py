"""Text and tokens: tokenizers, chat templates, and text while it is generated."""

from lineate.text.base import Tokenizer
from lineate.text.chat import DEFAULT_STOPS, DEFAULT_TEMPLATE, ChatError, ChatTemplate
from lineate.text.numbered import Numbered
from lineate.text.published import PublishedTokenizer
from lineate.text.stream import Detokenizer, StopStrings
from lineate.text.tokenizer import BPE, Bytes, has_tokenizer, load_tokenizer, make_tokenizer

__all__ = [
    "Tokenizer",
    "Bytes",
    "BPE",
    "Numbered",
    "PublishedTokenizer",
    "load_tokenizer",
    "make_tokenizer",
    "has_tokenizer",
    "ChatTemplate",
    "ChatError",
    "DEFAULT_TEMPLATE",
    "DEFAULT_STOPS",
    "Detokenizer",
    "StopStrings",
]
