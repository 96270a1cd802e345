"""Regular expressions by which published tokenizers cut a text into pieces before they join bytes within each."""

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+",
    r"\p{{N}}",
    r" ?[^\s{letters}\p{{N}}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
QWEN2 = "|".join(_QWEN).format(letters=r"\p{L}")
"""Qwen2 to Qwen3-Next: words, single digits, signs, spaces."""
QWEN35 = "|".join(_QWEN).format(letters=r"\p{L}\p{M}")
"""Qwen3.5: marks, such as accents, belong to words too."""

_LETTERS = r"\p{{{}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]"
_LOWER, _UPPER = f"[{_LETTERS.format('Ll')}]", f"[{_LETTERS.format('Lu}' + chr(92) + 'p{Lt')}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Kimi: Chinese, other words, up to three digits, signs, spaces."""
