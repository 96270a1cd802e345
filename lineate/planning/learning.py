"""Operations of the memories that learn while they read: TTT (T, P), Titans (N), LaCT (C), least squares (E).

c is the chunk, d the channels of a head, n and m the sizes of a matrix of the memory. Executed are the products of
lineate.memory, for whole chunks; least is the recurrence: a token's output for k, its gradients, its output for q.
"""

from itertools import pairwise

from lineate.memory.least_squares import TOGETHER
from lineate.models.config import HybridConfig, MemoryConfig

CHUNKS = {"T": 16, "P": 16, "N": 16, "C": 2048, "E": 64}
"""Of a mixer whose config has none."""
_QUERIES = 512  # that share one mask in LaCT's attention


def learned(config: HybridConfig, letter: str, tokens: int, convention: str) -> int:
    """Of a whole text, without projections."""
    memory = _memory(config)
    heads, c = memory.heads, chunk_of(memory, letter)
    if convention == "least":
        return heads * tokens * _least(memory, letter) + _window(memory, letter, tokens, executed=False)
    if letter in "NE" and tokens == 1:
        return learned_one(config, letter, 0, convention)
    chunks, whole = -(-tokens // c), tokens // c
    d = memory.head_dim
    if letter == "C":
        orthogonal = 3 * 5 * 3 * 2 * d**3  # three matrices, five steps of three products
        return heads * (tokens * 18 * d * d + whole * orthogonal) + _window(memory, letter, tokens, executed=True)
    if letter == "E":
        parts = [min(TOGETHER, chunks - first) for first in range(0, chunks, TOGETHER)]
        states = sum(4 * n * (n + 1) * d * d + 6 * (n + 1) * d**3 for n in parts) + 2 * d**3
        return heads * (chunks * (10 * c * d * d + 6 * c * c * d) + states)
    made = sum(2 * c * n * m for n, m in matrices(memory, letter))
    back = made - 2 * c * matrices(memory, letter)[0][0] * matrices(memory, letter)[0][1]
    inside = sum(2 * c * c * (n + m) for n, m in matrices(memory, letter))  # scores, and what they weigh
    if letter == "N":
        gates = 2 * c**3 + 2 * c * c if c > 1 else 0
        return heads * chunks * (5 * made + back + inside + gates)
    begun = 2 * made + back + sum(2 * c * m for _, m in matrices(memory, letter)) if tokens % c else 0
    return heads * (chunks * (3 * made + back + inside) + begun)


def learned_one(config: HybridConfig, letter: str, context: int, convention: str) -> int:
    """Of one token after so many, inside a chunk."""
    memory = _memory(config)
    heads, d = memory.heads, memory.head_dim
    if convention == "least" or letter in "TP":
        near = min(context + 1, window_of(memory, letter))
        return heads * (_least(memory, letter) + 4 * d * near)
    if letter == "C":
        return heads * (18 * d * d + 4 * d * window_of(memory, letter))
    if letter == "E":
        return heads * (6 * d * d + 2 * d)  # the writes are no matrix products
    made = sum(2 * n * m for n, m in matrices(memory, letter))
    back = made - 2 * matrices(memory, letter)[0][0] * matrices(memory, letter)[0][1]
    return heads * (5 * made + back + sum(2 * (n + m) for n, m in matrices(memory, letter)))


def matrices(memory: MemoryConfig, letter: str) -> list[tuple[int, int]]:
    """Of one head's memory."""
    d = memory.head_dim
    wide = {"P": [4 * d], "N": [2 * d] if memory.titans == "mlp" else []}.get(letter, [])
    return list(pairwise([d, *wide, d]))


def chunk_of(memory: MemoryConfig, letter: str) -> int:
    return CHUNKS[letter] if memory.chunk is None else memory.chunk


def window_of(memory: MemoryConfig, letter: str) -> int:
    """Tokens that LaCT's attention sees; 0 of the others."""
    if letter != "C":
        return 0
    return chunk_of(memory, letter) if memory.window is None else memory.window


def _memory(config: HybridConfig) -> MemoryConfig:
    assert config.memory is not None
    return config.memory


def _least(memory: MemoryConfig, letter: str) -> int:
    """Of one head and token."""
    square = memory.head_dim**2
    if letter in "CE":
        return {"C": 18, "E": 10}[letter] * square
    sizes = [n * m for n, m in matrices(memory, letter)]
    return 6 * sum(sizes) + 2 * sum(sizes[1:])


def _window(memory: MemoryConfig, letter: str, tokens: int, executed: bool) -> int:
    """LaCT's attention over its window; executed: each block of queries sees all keys that one of them sees."""
    window = window_of(memory, letter)
    if not window:
        return 0
    near = min(tokens, window)
    pairs = near * (near + 1) // 2 + (tokens - near) * near
    if executed:
        starts = range(0, tokens, _QUERIES)
        ends = [(start, min(start + _QUERIES, tokens)) for start in starts]
        pairs = sum((stop - start) * (stop - max(start - window + 1, 0)) for start, stop in ends)
    return 4 * memory.heads * memory.head_dim * pairs
