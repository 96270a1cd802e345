"""The names that an expression may use and the parts they play, and the symbols of papers that stand for them."""

import re
import unicodedata
from dataclasses import dataclass

STATES = ("S", "M", "W", "H", "h", "state", "memory", "recurrent_state", "last_recurrent_state")
"""Names of the memory; each may have one of the endings below."""
STATE_ENDINGS = ("_prev", "_old", "_last", "_new", "_next")
CELL = "C"
"""The memory in mLSTM's notation, where an expression assigns it; the query of Mamba-2 elsewhere."""
KEYS, VALUES, QUERIES = ("k", "key", "B"), ("v", "value", "x"), ("q", "query", "C", "r")
"""Names of the three vectors; B, x and C are Mamba-2's, r is RWKV's."""
OTHER_KEYS = ("kk", "kappa", "k_hat", "p", "probe", "direction")
"""Names of another vector over the key channels: RWKV-7's removal key, Comba's probe, the two of the general row."""
DECAYS = (
    "a", "alpha", "g", "gamma", "lam", "decay", "w", "f", "forget", "log_decay", "A", "A_log", "dt", "dt_bias", "wd",
    "weight_decay", "forget_gate",
)  # fmt: skip
"""Names that usually belong to forgetting. Which part a gate plays is measured, not taken from its name."""
RATES = (
    "b", "beta", "eta", "lr", "mu", "theta", "rate", "i", "eps", "d", "erase", "write", "input_gate",
)  # fmt: skip
"""Names that usually belong to writing."""
SECOND_STATES = ("m", "mom", "momentum", "velocity", "vel", "z", "n", "P")
"""Names of a second state: momentum, sums of keys, covariances."""
SIZES = ("K", "V", "d", "d_k", "d_v", "dk", "dv", "dim", "n")
"""Names that may stand for a size inside eye(...)."""
MODULES = ("np", "numpy", "torch", "jnp", "jax", "F", "nn", "functional", "linalg", "math", "special")
"""Modules whose name may stand before a function; they are only read as text."""

LETTERS = {
    "\N{GREEK SMALL LETTER ALPHA}": "alpha",
    "\N{GREEK SMALL LETTER BETA}": "beta",
    "\N{GREEK SMALL LETTER GAMMA}": "gamma",
    "\N{GREEK SMALL LETTER LAMDA}": "lam",
    "\N{GREEK SMALL LETTER ETA}": "eta",
    "\N{GREEK SMALL LETTER KAPPA}": "kappa",
    "\N{GREEK SMALL LETTER MU}": "mu",
    "\N{MICRO SIGN}": "mu",
    "\N{GREEK SMALL LETTER THETA}": "theta",
    "\N{GREEK SMALL LETTER SIGMA}": "sigmoid",
    "\N{GREEK SMALL LETTER EPSILON}": "eps",
    "\N{GREEK CAPITAL LETTER DELTA}": "dt",
}
SIGNS = {
    "\N{MODIFIER LETTER CAPITAL T}": ".T",
    "\N{DOWN TACK}": ".T",
    "\N{SUPERSCRIPT TWO}": "**2",
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{MULTIPLICATION SIGN}": "*",
    "\N{CIRCLED DOT OPERATOR}": "*",
    "\N{RING OPERATOR}": "*",
    "\N{ASTERISK OPERATOR}": "*",
    "\N{CIRCLED TIMES}": "%",
    "\N{MIDDLE DOT}": "//",
    "\N{DOT OPERATOR}": "//",
    "\N{BULLET OPERATOR}": "//",
    "\N{LEFTWARDS ARROW}": "=",
    "\N{VULGAR FRACTION ONE HALF}": "(1/2)",
    "\N{NO-BREAK SPACE}": " ",
}
"""Signs and what they are read as. Two operators of Python that no rule needs stand for an outer and an inner product,
because they bind as * and @ do."""


class Refused(ValueError):
    """An expression that is not evaluated; the message says what was expected, what came, and what to do."""


@dataclass(frozen=True)
class Part:
    """The part that a free name plays."""

    kind: str
    """"state", "second state", "key", "value", "query", "other key", "other value" or "gate"."""
    base: str
    """The name without an ending such as _prev: names of one memory have one base."""


def part_of(name: str) -> Part | None:
    """Return the part of a name; None if it has none."""
    base = name
    for ending in STATE_ENDINGS:
        base = base.removesuffix(ending)
    kinds = {
        "state": STATES, "key": KEYS, "value": VALUES, "query": QUERIES, "other key": OTHER_KEYS,
        "gate": DECAYS + RATES,
    }  # fmt: skip
    for kind, names in kinds.items():
        if name in names or (kind == "state" and base in names):
            return Part(kind, base)
    if base in SECOND_STATES:
        return Part("second state", base)
    numbered = NUMBERED.fullmatch(name)
    part = None if numbered is None else part_of(numbered[1])
    return Part(part.kind, name) if part is not None and part.kind in ("key", "value", "gate") else None


def numbered_alike(name: str, other: str) -> bool:
    """Whether two names are one name with different numbers, as k1 and k2."""
    one, two = NUMBERED.fullmatch(name), NUMBERED.fullmatch(other)
    return one is not None and two is not None and one[1] == two[1]


NUMBERED = re.compile(r"([A-Za-z]\w*?)_?([1-9])")
"""A name with a number: one of the writes of a token, as in Gated DeltaProduct."""


def known_names() -> tuple[str, ...]:
    """Return every name that needs no definition, for messages."""
    return STATES + KEYS + VALUES + QUERIES + OTHER_KEYS + DECAYS + RATES + ("I",)


SUBSCRIPT = re.compile(
    r"_\{\s*t\s*(?:[-+\N{MINUS SIGN}]\s*1\s*)?\}|\[\s*t\s*(?:[-+]\s*1\s*)?\]|_t-1(?!\w)|_t(?!\w)"
    r"|\N{LATIN SUBSCRIPT SMALL LETTER T}(?:[\N{SUBSCRIPT MINUS}\N{SUBSCRIPT PLUS SIGN}]\N{SUBSCRIPT ONE})?"
)
"""The number of a token, as in S_t, S_{t-1}, S[t-1]: names mean the last value they were given, so it is left out."""


DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")


def plain(text: str) -> str:
    """Return an expression in ASCII: S_{t-1}^T is S.T, a Greek alpha is alpha; other characters are refused."""
    for operator, instead in (("%", "outer(x, y)"), ("//", "/"), ("\\", "one statement a line")):
        if operator in text:
            raise Refused(f"expected + - * / @ ** between values, got {operator!r}; write {instead}")
    text = re.sub(r"_\{\s*t\s*,\s*([1-9])\s*\}", r"\1", text)
    text = SUBSCRIPT.sub("", text)
    for digit in range(1, 10):
        text = text.replace(unicodedata.lookup(f"SUBSCRIPT {DIGITS[digit]}"), str(digit))
    text = re.sub(r"\^\s*(?:T\b|\{T\}|\N{DOWN TACK})", ".T", text)
    text = re.sub(r"\blambda\b(?!\s*[\w\s,*]*:)", "lam", text).replace(":=", "=")
    for letter, name in LETTERS.items():
        text = re.sub(rf"{letter}(?![^\W\d])", name, text)
    for sign, code in SIGNS.items():
        text = text.replace(sign, code)
    for c in text:
        if not (c.isascii() and (c.isprintable() or c in "\n\t")):
            name = unicodedata.name(c, "a control character")
            raise Refused(
                f"expected ASCII, Greek letters or signs such as those of an outer product, got U+{ord(c):04X} ({name})"
            )
    return text
