// Products of few rows of x with a weight of 16 or 32 bits, on a CPU: product is x weight^T, combine is x weight.
//
// A unit of work is a block of rows of the weight, or of its columns. What a unit computes depends on nothing but its own
// inputs, and sums go in one order: the bits are the same in any batch and number of threads.
#include <stdlib.h>
#include "products.h"
#include "threads.h"
#include "vectors.h"

// A tile is so many rows of the weight by so many of x: its sums stay in registers. On ARM processors a single row of x
// takes fewer rows of the weight (ALONE, ALONE_HALVES of 16 bits), whose lines come from memory in better order. Eight
// rows have code of their own (product_neon.h, product_avx512.h).
#if defined(__ARM_NEON) && defined(__aarch64__)
enum { TILE_WEIGHTS = 4, TILE_ROWS = 4, ALONE = 1, ALONE_HALVES = 2 };
#elif defined(__AVX512F__)
enum { TILE_WEIGHTS = 4, TILE_ROWS = 4, ALONE = 4, ALONE_HALVES = 4 };
#else
enum { TILE_WEIGHTS = 4, TILE_ROWS = 2, ALONE = 4, ALONE_HALVES = 4 };
#endif
#if defined(__AVX512F__)
enum { WIDENS_FLOAT16 = 1 };
INLINE vec widen_float16(half_vec x) { return (vec)_mm512_cvtph_ps((__m256i)x); }
#elif defined(__AVX2__) && defined(__F16C__)
enum { WIDENS_FLOAT16 = 1 };
INLINE vec widen_float16(half_vec x) { return (vec)_mm256_cvtph_ps((__m128i)x); }
#elif defined(__ARM_NEON) && defined(__aarch64__)
enum { WIDENS_FLOAT16 = 1 };
INLINE vec widen_float16(half_vec x) { return (vec)vcvt_f32_f16((float16x4_t)x); }
#else
enum { WIDENS_FLOAT16 = 0 };
INLINE vec widen_float16(half_vec x) { return (vec){0}; }
#endif

// n numbers from the one at place `at` on
INLINE vec widen(const void *x, i64 at, i64 n, int kind) {
    if (kind == FLOAT32) return load((const float *)x + at, n);
    half_vec y = {0};
    if (__builtin_constant_p(n) && n == LANES)
        y = *(const half_vec *)((const uint16_t *)x + at);
    else
        memcpy(&y, (const uint16_t *)x + at, n * sizeof(uint16_t));
    return kind == FLOAT16 ? widen_float16(y) : widen_bfloat16(y);
}

// Two vectors of numbers from the one at place `at` on: some processors widen both halves of a vector faster than one.
#if defined(__ARM_NEON) && defined(__aarch64__)
enum { WIDENS_PAIRS = 1 };
INLINE void widen_pair(const void *x, i64 at, int kind, vec *first, vec *second) {
    if (kind == FLOAT32) {
        *first = load((const float *)x + at, LANES), *second = load((const float *)x + at + LANES, LANES);
        return;
    }
    const uint16x8_t y = vld1q_u16((const uint16_t *)x + at), zero = vdupq_n_u16(0);
    if (kind == FLOAT16) {
        *first = (vec)vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(y)));
        *second = (vec)vcvt_high_f32_f16(vreinterpretq_f16_u16(y));
    } else {
        *first = (vec)vzip1q_u16(zero, y), *second = (vec)vzip2q_u16(zero, y);
    }
}
#else
enum { WIDENS_PAIRS = 0 };
INLINE void widen_pair(const void *x, i64 at, int kind, vec *first, vec *second) {}
#endif

// The same for float16 with integers, since only one unit of some processors converts, and slowly. It is wrong where a
// number is infinite or NaN, after which a lane of `unknown` is NaN.
#if defined(__aarch64__) && defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
enum { WIDENS_WITH_INTEGERS = 1 };
typedef float16x8_t Unknown;
INLINE void widen_with_integers(const void *x, i64 at, vec *first, vec *second, Unknown *unknown) {
    const int16x8_t y = vld1q_s16((const int16_t *)x + at);
    const uint32x4_t kept = vdupq_n_u32(0x8fffffff);  // without the copies of the sign in the exponent
    const uint32x4_t low = vandq_u32(vreinterpretq_u32_s32(vshll_n_s16(vget_low_s16(y), 13)), kept);
    const uint32x4_t high = vandq_u32(vreinterpretq_u32_s32(vshll_high_n_s16(y, 13)), kept);
    *first = (vec)low * 0x1p112f, *second = (vec)high * 0x1p112f;
    *unknown = vfmaq_f16(*unknown, vreinterpretq_f16_s16(y), vdupq_n_f16(0));
}
INLINE int is_known(Unknown unknown) { return vminvq_u16(vceqzq_f16(unknown)) != 0; }
#else
enum { WIDENS_WITH_INTEGERS = 0 };
typedef int Unknown;
INLINE void widen_with_integers(const void *x, i64 at, vec *first, vec *second, Unknown *unknown) {}
INLINE int is_known(Unknown unknown) { return 1; }
#endif

// The sum of the lanes, pair by pair: four steps, each of which waits for the one before, instead of fifteen.
INLINE float paired_total(vec x) {
#if defined(__ARM_NEON) && defined(__aarch64__)
    const float32x2_t pairs = vadd_f32(vget_low_f32((float32x4_t)x), vget_high_f32((float32x4_t)x));
    return vpadds_f32(pairs);
#else
    typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
    quad y = *(const quad *)&x;
    if (LANES == 16) {
        const quad *z = (const quad *)&x;
        y = (z[0] + z[2 % (LANES / 4)]) + (z[1 % (LANES / 4)] + z[3 % (LANES / 4)]);
    } else if (LANES == 8) {
        y += ((const quad *)&x)[1 % (LANES / 4)];
    }
    return (y[0] + y[2]) + (y[1] + y[3]);
#endif
}

#define EACH_ROW _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)
#define EACH_WEIGHT _Pragma("GCC unroll 4") for (int j = 0; j < weights; j++)
// Fetches as many lines of the rows of the weight that come next: the same columns, or one line after the other, which an
// ARM processor reads faster from memory. One row of x has them fetched into the nearest cache, so many bytes ahead.
#if defined(__ARM_NEON)
enum { AHEAD = 1024, AHEAD_HALVES = 16384 };
#define FETCH_NEXT                                                                                                     \
    EACH_WEIGHT {                                                                                                      \
        const char *own = (const char *)a->weight + j * 64;                                                            \
        if (rows == 1)                                                                                                 \
            __builtin_prefetch(own + (at + weights * c) * bytes + (kind == FLOAT32 ? AHEAD : AHEAD_HALVES), 0, 3);     \
        else                                                                                                           \
            __builtin_prefetch(own + (at + weights * (a->weight_row + c)) * bytes, 0, 2);                              \
    }
#else
#define FETCH_NEXT \
    EACH_WEIGHT __builtin_prefetch((const char *)a->weight + (at + (weights + j) * a->weight_row + c) * bytes)
#endif
#define ADD_PRODUCTS(column, n, w)                       \
    EACH_ROW {                                           \
        vec z = load(x + i * a->size + (column), n);     \
        EACH_WEIGHT sum[i][j] += z * (w)[j];             \
    }
// Returns whether all is done; `mixed`: a quarter of the numbers is widened with integers, which it may not be.
INLINE int product_tile(const Product *a, i64 row, i64 first, int rows, int weights, int kind, int mixed) {
    const float *x = a->x + row * a->size;
    const i64 at = first * a->weight_row;  // of the first weight
    const i64 whole = a->size / LANES * LANES, rest = a->size - whole;
    vec sum[TILE_ROWS][TILE_WEIGHTS] = {0}, w[TILE_WEIGHTS];
    Unknown unknown = {0};
    const i64 bytes = kind == FLOAT32 ? 4 : 2;
    i64 c = 0;
    if (WIDENS_PAIRS) {
        const i64 chunk = rows == 1 ? 64 / bytes : 2 * LANES;
        for (; c + chunk <= whole; c += chunk) {
            if (c * bytes % 64 == 0) FETCH_NEXT;
            _Pragma("GCC unroll 4") for (i64 k = c; k < c + chunk; k += 2 * LANES) {
                vec more[TILE_WEIGHTS];
                EACH_WEIGHT {
                    const i64 own = at + j * a->weight_row + k;
                    if (mixed && k == c + 6 * LANES) widen_with_integers(a->weight, own, &w[j], &more[j], &unknown);
                    else widen_pair(a->weight, own, kind, &w[j], &more[j]);
                }
                ADD_PRODUCTS(k, LANES, w);
                ADD_PRODUCTS(k + LANES, LANES, more);
            }
        }
    }
    for (; c < whole; c += LANES) {
        if (c * bytes % 64 == 0) FETCH_NEXT;
        EACH_WEIGHT w[j] = widen(a->weight, at + j * a->weight_row + c, LANES, kind);
        ADD_PRODUCTS(c, LANES, w);
    }
    if (rest) {
        EACH_WEIGHT w[j] = widen(a->weight, at + j * a->weight_row + whole, rest, kind);
        ADD_PRODUCTS(whole, rest, w);
    }
    EACH_ROW
        EACH_WEIGHT a->y[(row + i) * a->out + first + j] = paired_total(sum[i][j]);
    return !mixed || is_known(unknown);
}

// One row of x times a few rows of the weight.
INLINE void product_alone(const Product *a, i64 row, i64 first, int weights, int kind) {
    if (WIDENS_WITH_INTEGERS && kind == FLOAT16 && product_tile(a, row, first, 1, weights, kind, 1)) return;
    product_tile(a, row, first, 1, weights, kind, 0);
}

// The same of float16 with x from lineate_product_arrange: of eight numbers four are converted, and four become numbers
// 2^112 times too small with two integer operations, which keeps both units of a processor busy. The sums have the same
// bits. It is wrong where one of the latter is infinite or NaN: returns whether all of them are below 2, which costs the
// vector units nothing to find out.
#if defined(__ARM_NEON) && defined(__aarch64__)
enum { SCALES_ROWS = 1, MOST_LARGE = 2 };  // MOST_LARGE: rows with large numbers after which others are not tried
INLINE int product_scaled(const Product *a, i64 first) {
    enum { WEIGHTS = ALONE_HALVES, CHUNK = 8 * LANES };
    const uint16_t *weight = (const uint16_t *)a->weight + first * a->weight_row;
    const uint32x4_t kept = vdupq_n_u32(0x8fffffff);  // without the copies of the sign in the exponent
    const i64 whole = a->size / LANES * LANES, rest = a->size - whole;
    const float *x = a->x;
    const int rows = 1, weights = WEIGHTS;
    vec sum[1][WEIGHTS] = {0}, w[WEIGHTS];
    uint64_t large = 0;
    i64 c = 0;
    for (; c + CHUNK <= whole; c += CHUNK) {
        EACH_WEIGHT __builtin_prefetch((const char *)(weight + WEIGHTS * c) + j * 64 + AHEAD_HALVES, 0, 3);
        _Pragma("GCC unroll 4") for (i64 k = c; k < c + CHUNK; k += 2 * LANES) {
            const vec low = load(a->arranged + k, LANES), high = load(a->arranged + k + LANES, LANES);
            EACH_WEIGHT {
                const uint16_t *own = weight + j * a->weight_row + k;
                const uint16x8_t y = vld1q_u16(own);
                uint64_t four;  // not from y, which is in a vector register
                __asm__("ldr %0, %1" : "=r"(four) : "m"(*(const uint64_t(*)[1])(own + LANES)));
                large |= four;
                const uint32x4_t wide = vreinterpretq_u32_s32(vshll_high_n_s16(vreinterpretq_s16_u16(y), 13));
                sum[0][j] += low * (vec)vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(y)));
                sum[0][j] += high * (vec)vandq_u32(wide, kept);
            }
        }
    }
    const i64 at = first * a->weight_row;
    for (; c < whole; c += LANES) {
        EACH_WEIGHT w[j] = widen(a->weight, at + j * a->weight_row + c, LANES, FLOAT16);
        ADD_PRODUCTS(c, LANES, w);
    }
    if (rest) {
        EACH_WEIGHT w[j] = widen(a->weight, at + j * a->weight_row + whole, rest, FLOAT16);
        ADD_PRODUCTS(whole, rest, w);
    }
    EACH_WEIGHT a->y[first + j] = paired_total(sum[0][j]);
    return !(large & 0x4000400040004000);
}
#else
enum { SCALES_ROWS = 0, MOST_LARGE = 0 };
INLINE int product_scaled(const Product *a, i64 first) { return 0; }
#endif

#if defined(__ARM_NEON) && defined(__aarch64__)
#include "product_neon.h"
#define TAKES_MANY 1
#elif defined(__AVX512F__)
#include "product_avx512.h"
#define TAKES_MANY 1
#else
#define TAKES_MANY 0
enum { SUM_ROWS = 8, SUM_WEIGHTS = 3 };
#endif
enum { MANY_WEIGHTS = 4 * SUM_WEIGHTS, UNIT_ELEMENTS = 65536 };  // a unit has whole groups of so many rows of the weight

INLINE int takes_many(const Product *a) { return TAKES_MANY && a->rows >= SUM_ROWS && a->size >= 2 * LANES; }

INLINE i64 product_weights(const Product *a) {  // rows of the weight of a unit: whole tiles
    const i64 tile = takes_many(a) ? MANY_WEIGHTS : TILE_WEIGHTS;
    return tile * (1 + UNIT_ELEMENTS / (tile * most(a->size, 1)));
}

#if TAKES_MANY
// rows of the weight of a unit that has several blocks
enum { MOST_WEIGHTS = MANY_WEIGHTS * (1 + UNIT_ELEMENTS / (MANY_WEIGHTS * NEAR_COLUMNS)) };

// Eight rows of x, which lineate_product_arrange has laid out, times rows first .. last of the weight, three at a time;
// returns the first row of the weight that is left. A block of columns of x stays in the nearest cache meanwhile.
INLINE i64 product_many(const Product *a, i64 row, i64 first, i64 last, int kind) {
    const i64 columns = a->size / SUM_COLUMNS * SUM_COLUMNS, bytes = kind == FLOAT32 ? 4 : 2;
    const char *weight = (const char *)a->weight;
    float sums[MOST_WEIGHTS / SUM_WEIGHTS][SUM_ROWS][SUM_WEIGHTS][LANES] __attribute__((aligned(64)));
    const i64 end = first + (last - first) / SUM_WEIGHTS * SUM_WEIGHTS;
    for (i64 c = 0; c < columns; c += NEAR_COLUMNS)
        for (i64 j = first; j < end; j += SUM_WEIGHTS) {
            float(*own)[SUM_WEIGHTS][LANES] = sums[columns > NEAR_COLUMNS ? (j - first) / SUM_WEIGHTS : 0];
            if (!c) memset(own, 0, sizeof sums[0]);
            sum_products(own, a->arranged + row * columns + c * SUM_ROWS, weight + (j * a->weight_row + c) * bytes,
                         a->weight_row * bytes, least(NEAR_COLUMNS, columns - c), kind);
            if (c + NEAR_COLUMNS < columns) continue;
            for (i64 d = columns; d < a->size; d += LANES) {
                const i64 n = least(a->size - d, LANES);
                for (int i = 0; i < SUM_ROWS; i++)
                    for (int k = 0; k < SUM_WEIGHTS; k++) {
                        const vec w = widen(weight, (j + k) * a->weight_row + d, n, kind);
                        store(own[i][k], load(own[i][k], LANES) + load(a->x + (row + i) * a->size + d, n) * w, LANES);
                    }
            }
            _Pragma("GCC unroll 8") for (int i = 0; i < SUM_ROWS; i++)
                _Pragma("GCC unroll 3") for (int k = 0; k < SUM_WEIGHTS; k++)
                    a->y[(row + i) * a->out + j + k] = paired_total(load(own[i][k], LANES));
        }
    return end;
}

// LANES columns of one row after the other
static void arrange_rows(const void *call, i64 group) {
    const Product *a = call;
    const i64 columns = a->size / SUM_COLUMNS * SUM_COLUMNS;
    const float *from = a->x + group * SUM_ROWS * a->size;
    float *to = a->arranged + group * SUM_ROWS * columns;
    for (i64 c = 0; c < columns; c += LANES)
        for (int i = 0; i < SUM_ROWS; i++, to += LANES) store(to, load(from + i * a->size + c, LANES), LANES);
}
#else
INLINE i64 product_many(const Product *a, i64 row, i64 first, i64 last, int kind) { return first; }
static void arrange_rows(const void *call, i64 group) {}
#endif

int lineate_product_arrange(const Product *a) {
    if (takes_many(a)) {
        lineate_spread(arrange_rows, a, a->rows / SUM_ROWS, a->rows * a->size, a->threads);
        return 1;
    }
    if (!SCALES_ROWS || a->kind != FLOAT16 || a->rows != 1) return 0;
    int fits = 1;
    for (i64 c = 0; c < a->size; c++) {
        a->arranged[c] = c / LANES % 2 ? a->x[c] * 0x1p112f : a->x[c];
        fits &= a->x[c] < 0x1p15f && a->x[c] > -0x1p15f;
    }
    return fits;
}

// Rows of x from `from` on, times all rows of the weight of a unit.
INLINE void product_few(const Product *a, i64 from, i64 begin, i64 end, int kind) {
    i64 large = 0;
    for (i64 first = begin; first < end; first += TILE_WEIGHTS) {
        i64 row = from;
        if (end - first >= TILE_WEIGHTS) {
            for (; row + TILE_ROWS <= a->rows; row += TILE_ROWS)
                product_tile(a, row, first, TILE_ROWS, TILE_WEIGHTS, kind, 0);
            for (; row + 2 <= a->rows; row += 2) product_tile(a, row, first, 2, TILE_WEIGHTS, kind, 0);
            const int scaled = SCALES_ROWS && kind == FLOAT16 && a->rows == 1 && a->arranged;
            for (i64 j = 0; scaled && j < TILE_WEIGHTS; j += ALONE_HALVES) {
                if (large < MOST_LARGE && product_scaled(a, first + j)) continue;
                product_alone(a, 0, first + j, ALONE_HALVES, kind);
                large++;
            }
            for (; row < a->rows && !scaled; row++)
                for (i64 j = 0; j < TILE_WEIGHTS; j += kind == FLOAT32 ? ALONE : ALONE_HALVES)
                    product_alone(a, row, first + j, kind == FLOAT32 ? ALONE : ALONE_HALVES, kind);
        } else {
            for (; row < a->rows; row++)
                for (i64 j = first; j < end; j++) product_alone(a, row, j, 1, kind);
        }
    }
}

INLINE void product_unit(const Product *a, i64 unit, int kind) {
    const i64 size = product_weights(a), begin = unit * size, end = least(begin + size, a->out);
    i64 row = 0;
    if (takes_many(a) && a->arranged)
        for (; row + SUM_ROWS <= a->rows; row += SUM_ROWS) {
            const i64 left = product_many(a, row, begin, end, kind);
            for (i64 j = left; j < end; j++)
                for (i64 i = row; i < row + SUM_ROWS; i++) product_alone(a, i, j, 1, kind);
        }
    if (row < a->rows) product_few(a, row, begin, end, kind);
}

i64 lineate_product_units(const Product *a) { return blocks(a->out, product_weights(a)); }

void lineate_product_columns(const Product *a, i64 unit, i64 *first, i64 *last) {
    const i64 size = product_weights(a);
    *first = unit * size, *last = least(*first + size, a->out);
}

void lineate_product_unit(const void *call, i64 unit) {
    const Product *a = call;
    if (a->kind == BFLOAT16) product_unit(a, unit, BFLOAT16);
    else if (a->kind == FLOAT16) product_unit(a, unit, FLOAT16);
    else product_unit(a, unit, FLOAT32);
}

void lineate_product_row(const Product *a, i64 row, float *to) {
    const i64 at = row * a->weight_row;
    SWEEP(a->size, EACH store(to + c + k * LANES, widen(a->weight, at + c + k * LANES, n, a->kind), n));
}

int lineate_product(const Product *a) {
    if (a->kind == FLOAT16 && !WIDENS_FLOAT16) return 1;
    Product call = *a;
    call.arranged = takes_many(a) ? aligned_alloc(64, blocks(a->rows * a->size * (i64)sizeof(float), 64) * 64) : NULL;
    if (call.arranged) lineate_product_arrange(&call);
    const i64 elements = a->out * a->size * most(a->rows / SUM_ROWS, 1);
    lineate_spread(lineate_product_unit, &call, lineate_product_units(&call), elements, a->threads);
    free(call.arranged);
    return 0;
}

enum { TILE_COLUMNS = 4 * LANES };

// Columns at `first` of so many rows of x weight; n of them are there: TILE_COLUMNS, or LANES, or less.
INLINE void combine_tile(const Product *a, i64 row, i64 first, int rows, i64 n, int kind) {
    const int weights = n == TILE_COLUMNS ? 4 : 1;
    const i64 width = n == TILE_COLUMNS ? LANES : n;
    const float *x = a->x + row * a->out;
    i64 at = first;
    vec sum[TILE_ROWS][4] = {0}, w[4];
    for (i64 c = 0; c < a->out; c++, at += a->weight_row) {
        EACH_WEIGHT w[j] = widen(a->weight, at + j * LANES, width, kind);
        EACH_ROW EACH_WEIGHT sum[i][j] += x[i * a->out + c] * w[j];
    }
    EACH_ROW EACH_WEIGHT store(a->y + (row + i) * a->size + first + j * LANES, sum[i][j], width);
}

INLINE void combine_columns(const Product *a, i64 first, i64 n, int kind) {
    i64 row = 0;
    for (; row + TILE_ROWS <= a->rows; row += TILE_ROWS) combine_tile(a, row, first, TILE_ROWS, n, kind);
    for (; row < a->rows; row++) combine_tile(a, row, first, 1, n, kind);
}

INLINE void combine_unit(const Product *a, i64 unit, int kind) {
    i64 first = unit * TILE_COLUMNS;
    if (a->size - first >= TILE_COLUMNS) {
        combine_columns(a, first, TILE_COLUMNS, kind);
        return;
    }
    for (; first + LANES <= a->size; first += LANES) combine_columns(a, first, LANES, kind);
    if (first < a->size) combine_columns(a, first, a->size - first, kind);
}

static void combine_bfloat16(const void *call, i64 unit) { combine_unit(call, unit, BFLOAT16); }
static void combine_float16(const void *call, i64 unit) { combine_unit(call, unit, FLOAT16); }
static void combine_float32(const void *call, i64 unit) { combine_unit(call, unit, FLOAT32); }

int lineate_combine(const Product *a) {
    if (a->kind == FLOAT16 && !WIDENS_FLOAT16) return 1;
    void (*const work[])(const void *, i64) = {combine_bfloat16, combine_float16, combine_float32};
    lineate_spread(work[a->kind], a, blocks(a->size, TILE_COLUMNS), a->out * a->size, a->threads);
    return 0;
}
