// Vectors of floats for a CPU: whole ones, and ends of rows that are not whole; exponentials of a few at a time.
// The end of a row that is not a whole vector is computed as one filled up with zeros.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t half_vec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 most(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 blocks(i64 n, i64 size) { return (n + size - 1) / size; }

// n is LANES, known to the compiler, or less. No loop: where a product and a sum are in two blocks of code, a compiler
// does not fuse them, and the bits would not be those of a whole vector.
// A whole vector is no memcpy either, which gcc copies by halves over the stack, and the processor then waits for both.
INLINE vec load(const float *x, i64 n) {
    if (__builtin_constant_p(n) && n == LANES) return *(const vec *)x;
    vec y = {0};
    memcpy(&y, x, n * sizeof(float));
    return y;
}

INLINE void store(float *x, vec y, i64 n) {
    if (__builtin_constant_p(n) && n == LANES)
        *(vec *)x = y;
    else
        memcpy(x, &y, n * sizeof(float));
}

// bfloat16 as float32. gcc widens a vector of 64 bits number by number, and one of 256 bits by halves, so it is told how.
INLINE vec widen_bfloat16(half_vec x) {
#if defined(__ARM_NEON)
    return (vec)vshlq_n_u32(vmovl_u16((uint16x4_t)x), 16);
#elif defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#else
    return (vec)(__builtin_convertvector(x, uvec) << 16);
#endif
}

INLINE float total(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

// The functions below work on a few vectors at a time, step by step. Each result depends on the one before it, with a
// long latency; a processor that interleaves four such chains is twice as fast as with one after another.
enum { FEW = 4 };
#define EACH _Pragma("GCC unroll 4") for (int k = 0; k < count; k++)

// Clamps x to the bounds; NaN stays NaN.
INLINE vec within(vec x, vec bound) {
#if defined(__ARM_NEON)
    return (vec)vmaxq_f32(vminq_f32((float32x4_t)x, (float32x4_t)bound), (float32x4_t)-bound);
#else
    ivec above = x > bound, below = x < -bound;
    x = (vec)((above & (ivec)bound) | (~above & (ivec)x));
    return (vec)((below & (ivec)-bound) | (~below & (ivec)x));
#endif
}

// x = e^-x, as if x were within -87 .. 87, where neither it nor its inverse is denormal; NaN stays NaN.
INLINE void exponentials(vec *x, int count) {
    const vec magic = (vec){0} + 12582912.f;  // brings n to the last bits
    vec n[FEW], p[FEW], square[FEW], more[FEW];
    EACH x[k] = within(x[k], (vec){0} + 87.f);
    EACH p[k] = magic - x[k] * 1.44269504088896341f;
    EACH n[k] = p[k] - magic;
    EACH x[k] = x[k] + n[k] * 0.693359375f;
    EACH x[k] = x[k] - n[k] * 2.12194440e-4f;              // now what was e^-x is 2^n e^-x, and |x| < log(2) / 2
    EACH n[k] = (vec)(((uvec)p[k] << 23) + (127u << 23));  // 2^n
    EACH square[k] = x[k] * x[k];
    EACH more[k] = 4.1668388993e-2f - x[k] * 8.3687454462e-3f;  // (e^-x - 1 + x) / x^2, to 4e-9 of e^-x
    EACH p[k] = 4.9999994040e-1f - x[k] * 1.6666521132e-1f;
    EACH more[k] = more[k] + square[k] * 1.3814540580e-3f;
    EACH p[k] = p[k] + more[k] * square[k];
    EACH p[k] = 1.f - p[k] * x[k];
    EACH p[k] = 1.f - p[k] * x[k];
    EACH x[k] = p[k] * n[k];
}

// on = sigmoid(x), off = sigmoid(-x): each to its last digits.
INLINE void sigmoids(const vec *x, vec *on, vec *off, int count) {
    EACH off[k] = x[k];
    exponentials(off, count);
    EACH on[k] = 1.f / (off[k] + 1.f);
    EACH off[k] *= on[k];
}

// x = silu(x)
INLINE void silus(vec *x, int count) {
    vec e[FEW];
    EACH e[k] = x[k];
    exponentials(e, count);
    EACH x[k] = x[k] / (e[k] + 1.f);
}

// x = silu(x), slope = silu'(x)
INLINE void silus_and_slopes(vec *x, vec *slope, int count) {
    vec on[FEW], off[FEW];
    sigmoids(x, on, off, count);
    EACH slope[k] = on[k] * (x[k] * off[k] + 1.f);
    EACH x[k] = x[k] * on[k];
}

// Runs a statement for all of a row: c is where it starts, count how many vectors, n how many numbers each has.
#define SWEEP(size, ...)                                    \
    do {                                                    \
        i64 c = 0;                                          \
        for (; c + FEW * LANES <= (size); c += FEW * LANES) {\
            enum { count = FEW, n = LANES };                \
            __VA_ARGS__;                                    \
        }                                                   \
        for (; c + LANES <= (size); c += LANES) {           \
            enum { count = 1, n = LANES };                  \
            __VA_ARGS__;                                    \
        }                                                   \
        if (c < (size)) {                                   \
            enum { count = 1 };                             \
            const i64 n = (size) - c;                       \
            __VA_ARGS__;                                    \
        }                                                   \
    } while (0)
