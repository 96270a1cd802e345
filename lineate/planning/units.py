"""Readable sizes: 80GB, 22.5 MiB, 128k tokens, 989 TFLOP/s."""

import re

DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
MOST_COUNTED = 2**40
"""The most tokens or sequences that are accepted; a larger number is treated as a typo."""


def read_bytes(text: str, flag: str) -> int:
    """Return bytes from 80GB, 80GiB or 512MB; a bare number is GB = 10^9 bytes."""
    wanted = f"{flag} must be a size such as 80GB, 79.6GiB or 80 (GB)"
    return int(_read(text, wanted, {**DECIMAL, **BINARY}, r"B?", DECIMAL["G"]))


def read_bandwidth(text: str, flag: str) -> float:
    """Return bytes a second from 3.35TB/s or 100GB/s; a bare number is GB/s."""
    wanted = f"{flag} must be a rate such as 3.35TB/s, 100GB/s or 100 (GB/s)"
    return _read(text, wanted, {**DECIMAL, **BINARY}, r"(B(/S)?)?", DECIMAL["G"])


def read_flops(text: str, flag: str) -> float:
    """Return operations a second from 989TFLOPS or 50GFLOP/s; a bare number is TFLOP/s."""
    wanted = f"{flag} must be a rate such as 989TFLOPS, 50GFLOPS or 989 (TFLOPS)"
    return _read(text, wanted, DECIMAL, r"(FLOPS?(/S)?)?", DECIMAL["T"])


def read_counts(text: str, flag: str) -> tuple[int, ...]:
    """Return numbers of tokens or sequences, with commas between, in rising order; 32k is 32768, 1M is 1048576."""
    wanted = f"{flag} must be whole numbers of at least 1 with commas between, such as 8,4096,32k"
    found = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,15})\s*([kKmM]?)\s*", word)
        if match is None:
            raise ValueError(f"{wanted}, got {text!r}")
        count = int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2].upper()]
        if not 1 <= count <= MOST_COUNTED:
            raise ValueError(f"{wanted}, and at most 2^40, got {text!r}")
        found.add(count)
    return tuple(sorted(found))


def show_bytes(n: float) -> str:
    """Return bytes in binary units: 22.5 MiB."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def show_count(n: float) -> str:
    """Return a number of parameters: 3.87B."""
    return _scaled(n, 1000, ("", "K", "M", "B", "T"), "")


def show_flops(n: float) -> str:
    """Return a number of operations: 7.75 GFLOP."""
    return _scaled(n, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def show_rate(n: float, unit: str) -> str:
    """Return a number with a decimal prefix and a unit: 4.8 TB/s."""
    return _scaled(n, 1000, tuple(prefix + unit for prefix in ("", "k", "M", "G", "T", "P")))


def show_number(n: float) -> str:
    """Return a number that needs no unit, in four digits at least: 12,345."""
    return f"{n:,.0f}" if n >= 1000 else f"{n:.4g}"


def show_seconds(n: float) -> str:
    """Return a time: 1.62 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if n >= size:
            return f"{n / size:.3g} {unit}" if n < 1000 else f"{n:,.0f} s"
    return f"{n * 1e9:.3g} ns"


def show_tokens(n: int) -> str:
    """Return a number of tokens: 65,536."""
    return f"{n:,}"


def _scaled(n: float, base: int, units: tuple[str, ...], space: str = " ") -> str:
    """Return four digits in the largest unit that leaves at least 1."""
    power = 0
    while abs(n) >= base and power < len(units) - 1:
        n, power = n / base, power + 1
    digits = f"{n:.4g}" if n < 10000 else f"{n:,.0f}"
    return f"{digits}{space}{units[power]}".rstrip()


def _read(text: str, wanted: str, prefixes: dict[str, int], unit: str, bare: int) -> float:
    words = "|".join(sorted(filter(None, prefixes), key=len, reverse=True))
    match = re.fullmatch(rf"\s*(\d+\.?\d*|\.\d+)([eE]\+?\d{{1,2}})?\s*({words})?({unit})\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{wanted}, got {text!r}")
    number = float(match[1] + (match[2] or ""))
    if match[3] is None and match[4] == "":
        number *= bare
    else:
        number *= prefixes[(match[3] or "").upper()]
    if not 1 <= number <= 1e21:
        raise ValueError(f"{wanted}, within reason, got {text!r}")
    return number
