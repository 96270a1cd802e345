"""The triangular system of one chunk."""

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)
MOST_STEP, MOST_SQUARE, MOST_BETA = tl.constexpr(2.1), tl.constexpr(1e4), tl.constexpr(100.0)


@triton.jit
def first_wild_row(beta, squares, C: tl.constexpr):
    """Return the first wild row, or C: in all rows before it, `invert` stays in float16's range. squares: |k|^2.

    A step multiplies the state by I - beta k k^T. With 0 <= beta |k|^2 <= 2 that never grows, and the entries of the
    inverse are at most beta_i |k_i| |k_j| <= 1449; 2.1 leaves room for rounding: 32 rows, all that is multiplied in
    float16, grow by 1.1^31 = 19 at most. Rows before the first wild one never depend on it, so the treatment of wild
    rows changes no bit of the past.
    """
    tame = (beta >= 0.0) & (beta <= MOST_BETA) & (squares <= MOST_SQUARE) & (beta * squares <= MOST_STEP)
    return tl.min(tl.where(tame, C, tl.arange(0, C)), 0)


@triton.jit
def invert(A, C: tl.constexpr, PRODUCTS: tl.constexpr):
    """Return (I + A)^{-1} for A [C, C] strictly lower triangular, by exact block doubling.

    X holds the inverses of the diagonal blocks of size s. Two neighbours merge as

        [X1   0 ]            Y = X2 A21 X1
        [-Y   X2]

    and Y of all pairs at once is X A X, of which only the blocks (2, 1) are used. Up to 16 x 16, the diagonal blocks
    are a separate batch, one per warp. PRODUCTS: "tf32x3" is exact to float32; "fp16" is faster, and exact to 11 bits
    if no row is wild.
    """
    SMALL: tl.constexpr = "tf32" if PRODUCTS == "fp16" else PRODUCTS
    block = tl.arange(0, C // BLOCK)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(A, (C // BLOCK, BLOCK, C // BLOCK, BLOCK)), 0.0), 2)
    i = tl.arange(0, BLOCK)[None, :, None]
    j = tl.arange(0, BLOCK)[None, None, :]
    X = tl.where(i == j, 1.0, tl.where((i == j + 1) & (i % 2 == 1), -diagonal, 0.0))
    for level in tl.static_range(1, 4):
        X = _merge(X, diagonal, i, j, 1 << level, SMALL)
    X = tl.reshape(tl.where(same, X[:, :, None, :], 0.0), (C, C))
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    for level in tl.static_range(4, 6):
        if (1 << level) < C:
            X = _merge(X, A, i, j, 1 << level, PRODUCTS)
    return X


@triton.jit
def _merge(X, A, i, j, S: tl.constexpr, PRODUCTS: tl.constexpr):
    """Return the inverses of blocks of 2 S from those of blocks of S."""
    if PRODUCTS == "fp16":
        half = X.to(tl.float16)
        Y = tl.dot(tl.dot(half, A.to(tl.float16)).to(tl.float16), half)
    else:
        Y = tl.dot(tl.dot(X, A, input_precision=PRODUCTS), X, input_precision=PRODUCTS)
    merged = (i // (2 * S) == j // (2 * S)) & (i // S > j // S)
    return tl.where(merged, -Y, X)
