// x weight^T for weights of 8 or 4 bits, on a CPU: the layout of lineate/quantised.
//
//   weight_rc = scale_rg (code_rc - zero)     g = c / 32, zero = 128 for 8 bits, 8 for 4
//   x_c      ~= scale_g q_c                   q has 8 bits with a sign, or 15: 128 h + l, two planes of 8 bits
//   y_r       = sum_g scale_rg scale_g (sum_c code_rc q_c - zero sum_c q_c)
//
// Sums inside a group are exact, in 32 bits. Groups are added in float, one after the other: the bits of a row of y
// depend on nothing but its row of x, whatever the number of rows and threads is.
//
// Weights lie in tiles of 16 rows. A group of a tile is a sequence of steps of 16 rows by 4 columns: 64 bytes, of which
// a processor multiplies as many as it has in a register with 4 numbers of x. With 4 bits a byte has a code of step s in
// its low half, and one of step s + 4 in its high half.
//
// ARM processors with dot products of bytes have their own products, in quantised_neon.h.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "products.h"
#include "threads.h"
#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

typedef int64_t i64;
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
enum { TILE = 16, GROUP = 32, STEP = 64, NO_MEMORY = 1, NOT_SERVED = 2 };
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 blocks(i64 n, i64 size) { return (n + size - 1) / size; }

// ---- what a processor has ------------------------------------------------------------------------------------------
//
// BYTES of a register, TILES by ROWS whose sums are kept in registers, and whether codes of 8 bits are multiplied as
// they are (UNSIGNED), or made signed first, after which no zero is left.

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
enum { BYTES = 64, TILES = 2, ROWS = 6, UNSIGNED = 1 };
#elif defined(__AVX2__) && defined(__F16C__)
enum { BYTES = 32, TILES = 1, ROWS = 3, UNSIGNED = 0 };
#elif defined(__ARM_NEON) && defined(__aarch64__)
enum { BYTES = 16, TILES = 1, ROWS = 4, UNSIGNED = 0 };
#else
enum { BYTES = 16, TILES = 1, ROWS = 1, UNSIGNED = 0 };
#endif
enum { LANES = BYTES / 4, PARTS = STEP / BYTES };  // registers of a step
typedef uint8_t bytes __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef int8_t signed_bytes __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef int32_t ints __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef float vec __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));

// sum_r += sum_j w_rj x_j for the four columns j of each row; x repeats its four numbers for every row.
INLINE ints dot(ints sum, bytes w, ints x, int bits) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX2__) && defined(__F16C__)
    __m256i z = (__m256i)x, v = (__m256i)w;
    if (bits == 8) z = _mm256_sign_epi8(z, v), v = _mm256_abs_epi8(v);  // at most 2 * 128 * 127, which fits 16 bits
    z = _mm256_maddubs_epi16(v, z);
    return sum + (ints)_mm256_madd_epi16(z, _mm256_set1_epi16(1));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8((int8x16_t)x));
    int16x8_t high = vmull_high_s8((int8x16_t)w, (int8x16_t)x);
    return sum + (ints)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#else
    signed_bytes v = (signed_bytes)w, z = (signed_bytes)x;
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) sum[i] += v[4 * i + j] * z[4 * i + j];
    return sum;
#endif
}

INLINE vec widen(const uint16_t *x) {
    const halves y = *(const halves *)x;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (vec)_mm512_cvtph_ps((__m256i)y);
#elif defined(__AVX2__) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps((__m128i)y);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vec)vcvt_f32_f16((float16x4_t)y);
#else
    vec wide;
    for (int i = 0; i < LANES; i++) {
        const uint32_t sign = (uint32_t)(y[i] & 0x8000) << 16, rest = y[i] & 0x7fff;
        const uint32_t bits = rest >= 0x7c00 ? (rest << 13) + (224u << 23) : (rest << 13) + (112u << 23);
        float number;
        if (rest >= 0x400) {
            const uint32_t whole = sign | bits;
            memcpy(&number, &whole, 4);
        } else {
            number = (sign ? -1.f : 1.f) * (float)rest * 0x1p-24f;
        }
        wide[i] = number;
    }
    return wide;
#endif
}

INLINE vec to_float(ints x) { return __builtin_convertvector(x, vec); }

#if defined(__ARM_NEON) && defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "quantised_neon.h"
#else
// ---- x as integers -------------------------------------------------------------------------------------------------

enum { WIDE = 16 };  // numbers of x that are rounded at a time
typedef float floats __attribute__((vector_size(WIDE * 4), aligned(4), may_alias));
typedef int32_t words __attribute__((vector_size(WIDE * 4), aligned(4), may_alias));
typedef int8_t chars __attribute__((vector_size(WIDE), aligned(1), may_alias));

// The largest of the words.
INLINE int32_t largest_of(words x) {
    typedef int32_t half __attribute__((vector_size(WIDE * 2), aligned(4), may_alias));
    typedef int32_t four __attribute__((vector_size(16), aligned(4), may_alias));
    const half *y = (const half *)&x;
    const half above = y[0] > y[1], z = (above & y[0]) | (~above & y[1]);
    const four *v = (const four *)&z;
    const four higher = v[0] > v[1], w = (higher & v[0]) | (~higher & v[1]);
    int32_t most = w[0];
    for (int i = 1; i < 4; i++) most = w[i] > most ? w[i] : most;
    return most;
}

INLINE int32_t sum_of(words x) {
    typedef int32_t half __attribute__((vector_size(WIDE * 2), aligned(4), may_alias));
    typedef int32_t four __attribute__((vector_size(16), aligned(4), may_alias));
    const half *y = (const half *)&x, z = y[0] + y[1];
    const four *v = (const four *)&z, w = v[0] + v[1];
    return (w[0] + w[1]) + (w[2] + w[3]);
}

// Rounds a group of x to q = x / scale, of at most 127 in size, or 127 * 128 + 63 with two planes.
INLINE void round_group(const Rounded *w, i64 row, i64 group, int planes) {
    const float *x = w->call.x + row * w->call.size + group * GROUP;
    const float top = planes == 2 ? 127 * 128 + 63 : 127;
    const floats part[2] = {*(const floats *)x, *(const floats *)(x + WIDE)};
    const words size[2] = {(words)part[0] & 0x7fffffff, (words)part[1] & 0x7fffffff};  // ordered as the floats are
    const words above = size[0] > size[1];
    const int32_t bits = largest_of((above & size[0]) | (~above & size[1]));
    float most;
    memcpy(&most, &bits, 4);
    const float scale = most / top, inverse = most > 0 ? top / most : 0;  // NaN and infinity stay in scale
    int8_t *q = w->q + row * planes * w->call.size + group * GROUP;
    words sum = {0};
    for (int k = 0; k < 2; k++) {
        const words near = (words)(part[k] * inverse + 12582912.f) - 0x4B400000;  // the nearest integer: the last bits
        const words n = near & ((near > -32768) & (near < 32768));                // 0 where x is no number
        sum += n;
        if (planes == 2) {
            const words high = (n + 64) >> 7;
            *(chars *)(q + k * WIDE) = __builtin_convertvector(high, chars);
            *(chars *)(q + w->call.size + k * WIDE) = __builtin_convertvector(n - (high << 7), chars);
        } else {
            *(chars *)(q + k * WIDE) = __builtin_convertvector(n, chars);
        }
    }
    const i64 at = row * w->groups + group;
    w->scale[at] = scale;
    // With two planes the sum of the first is shifted by 7 later, which multiplies by 128, the zero of 8 bits.
    w->zero[at] = (w->call.bits == 4 ? -8 : !UNSIGNED ? 0 : planes == 2 ? -1 : -128) * sum_of(sum);
}

// ---- products ------------------------------------------------------------------------------------------------------

enum { FEW = 2, AHEAD = 4096 };  // rows of x that memory is too slow for; bytes of codes that are fetched ahead
enum { SPAN = 16 };  // groups that many rows of x are multiplied with before the next: they stay in the cache

// Adds the groups first .. last of `tiles` tiles times `rows` rows of x to y.
INLINE void multiply(const Rounded *w, i64 tile, i64 row, i64 first, i64 last, int tiles, int rows, int bits, int planes) {
    const i64 groups = w->groups, size = w->call.size, out = w->call.out;
    const i64 tile_bytes = groups * GROUP * TILE * bits / 8;
    vec sum[TILES][ROWS][PARTS];
    for (int t = 0; t < tiles; t++)
        UNROLL for (int r = 0; r < rows; r++) {
            const float *y = w->call.y + (row + r) * out + (tile + t) * TILE;
            const i64 n = least(TILE, out - (tile + t) * TILE);
            float whole[TILE] = {0};
            if (first) memcpy(whole, y, n * sizeof(float));
            UNROLL for (int p = 0; p < PARTS; p++) sum[t][r][p] = *(const vec *)(whole + p * LANES);
        }
    for (i64 g = first; g < last; g++) {
        ints part[TILES][ROWS][PARTS];
        UNROLL for (int r = 0; r < rows; r++) {
            const ints zero = (ints){0} + w->zero[(row + r) * groups + g];
            UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int p = 0; p < PARTS; p++) part[t][r][p] = zero;
        }
        const uint8_t *codes = w->call.codes + tile * tile_bytes + g * (GROUP * TILE * bits / 8);
        const int8_t *q = w->q + row * planes * size + g * GROUP;
        if (rows <= FEW)  // the next groups come from memory
            UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int s = 0; s < bits; s++)
                __builtin_prefetch(codes + t * tile_bytes + AHEAD + s * STEP);
        UNROLL for (int plane = 0; plane < planes; plane++, q += size) {
            if (plane)
                UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int r = 0; r < rows; r++)
                    UNROLL for (int p = 0; p < PARTS; p++) part[t][r][p] <<= 7;
            UNROLL for (int s = 0; s < bits; s++) {  // 8 steps, or 4 pairs of them
                bytes c[TILES][PARTS], more[TILES][PARTS];
                UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int p = 0; p < PARTS; p++) {
                    c[t][p] = *(const bytes *)(codes + t * tile_bytes + s * STEP + p * BYTES);
                    if (bits == 8 && !UNSIGNED) c[t][p] ^= 128;
                    if (bits == 4) more[t][p] = c[t][p] >> 4, c[t][p] &= 15;
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    int32_t four;
                    memcpy(&four, q + r * planes * size + s * 4, 4);
                    ints x = (ints){0} + four;
                    UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int p = 0; p < PARTS; p++)
                        part[t][r][p] = dot(part[t][r][p], c[t][p], x, bits);
                    if (bits == 4) {
                        memcpy(&four, q + r * planes * size + s * 4 + 16, 4);
                        x = (ints){0} + four;
                        UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int p = 0; p < PARTS; p++)
                            part[t][r][p] = dot(part[t][r][p], more[t][p], x, bits);
                    }
                }
            }
        }
        UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int p = 0; p < PARTS; p++) {
            const vec scale = widen((const uint16_t *)w->call.scales + ((tile + t) * groups + g) * TILE + p * LANES);
            UNROLL for (int r = 0; r < rows; r++)
                sum[t][r][p] += to_float(part[t][r][p]) * (scale * w->scale[(row + r) * groups + g]);
        }
    }
    for (int t = 0; t < tiles; t++)
        UNROLL for (int r = 0; r < rows; r++) {
            float *y = w->call.y + (row + r) * out + (tile + t) * TILE;
            const i64 n = least(TILE, out - (tile + t) * TILE);
            if (n == TILE) {
                UNROLL for (int p = 0; p < PARTS; p++) *(vec *)(y + p * LANES) = sum[t][r][p];
            } else {
                float whole[TILE];
                UNROLL for (int p = 0; p < PARTS; p++) *(vec *)(whole + p * LANES) = sum[t][r][p];
                memcpy(y, whole, n * sizeof(float));
            }
        }
}

INLINE void multiply_rows(const Rounded *w, i64 tile, i64 first, i64 last, int tiles, int bits, int planes) {
    i64 row = 0;
    for (; row + ROWS <= w->call.rows; row += ROWS) multiply(w, tile, row, first, last, tiles, ROWS, bits, planes);
    const i64 rest = w->call.rows - row;
    if (rest == 1) multiply(w, tile, row, first, last, tiles, 1, bits, planes);
    if (ROWS > 2 && rest == 2) multiply(w, tile, row, first, last, tiles, least(2, ROWS), bits, planes);
    if (ROWS > 3 && rest == 3) multiply(w, tile, row, first, last, tiles, least(3, ROWS), bits, planes);
    if (ROWS > 4 && rest == 4) multiply(w, tile, row, first, last, tiles, least(4, ROWS), bits, planes);
    if (ROWS > 5 && rest == 5) multiply(w, tile, row, first, last, tiles, least(5, ROWS), bits, planes);
}

INLINE void multiply_unit(const Rounded *w, i64 unit, int bits, int planes) {
    const i64 tile = unit * TILES, tiles = blocks(w->call.out, TILE) - tile;
    const i64 span = w->call.rows > ROWS ? SPAN : w->groups;
    for (i64 first = 0; first < w->groups; first += span) {
        const i64 last = least(first + span, w->groups);
        if (tiles >= TILES)
            multiply_rows(w, tile, first, last, TILES, bits, planes);
        else
            multiply_rows(w, tile, first, last, 1, bits, planes);
    }
}

INLINE i64 unit_tiles(const Quantised *a) { return TILES; }
#endif

// ---- a call --------------------------------------------------------------------------------------------------------

void lineate_quantised_round(const void *rounded, i64 row) {
    const Rounded *w = rounded;
    if (w->call.planes == 0) return;  // float8: x stays as it is
    if (w->call.bits == 16)
        lineate_halves_round(w, row);
    else if (w->call.planes == 2)
        for (i64 g = 0; g < w->groups; g++) round_group(w, row, g, 2);
    else
        for (i64 g = 0; g < w->groups; g++) round_group(w, row, g, 1);
}

i64 lineate_quantised_units(const Quantised *a) {
    if (a->bits == 16) return lineate_halves_units(a->out);
    return blocks(blocks(a->out, TILE), unit_tiles(a));
}

void lineate_quantised_columns(const Quantised *a, i64 unit, i64 *first, i64 *last) {
    if (a->bits == 16) {
        lineate_halves_columns(a->out, unit, first, last);
        return;
    }
    const i64 columns = unit_tiles(a) * TILE;
    *first = unit * columns, *last = least(*first + columns, a->out);
}

void lineate_quantised_unit(const void *rounded, i64 unit) {
    const Rounded *w = rounded;
    if (w->call.bits == 16) {
        lineate_halves_unit(w, unit);
        return;
    }
    const i64 tile = unit * unit_tiles(&w->call), last = least(tile + unit_tiles(&w->call), blocks(w->call.out, TILE));
    if (w->call.planes == 0)
        for (i64 t = tile; t < last; t++) lineate_float8_tile(&w->call, t);
    else if (w->call.bits == 4) multiply_unit(w, unit, 4, 1);
    else if (w->call.planes == 2) multiply_unit(w, unit, 8, 2);
    else multiply_unit(w, unit, 8, 1);
}

i64 lineate_quantised_scratch(i64 rows, i64 size) {
    return rows * (2 * size + size / GROUP * (i64)(sizeof(float) + sizeof(int32_t))) + 64;
}

Rounded lineate_quantised_place(const Quantised *a, void *scratch) {
    const i64 groups = a->size / GROUP, numbers = a->rows * groups;
    int8_t *q = scratch;
    float *scale = (float *)(q + numbers * (a->bits == 16 ? 2 : a->planes) * GROUP);
    return (Rounded){*a, groups, q, scale, (int32_t *)(scale + numbers)};
}

int lineate_quantised(const Quantised *a) {
    if (a->bits == 16 && !lineate_halves_serve(a->rows, a->size)) return NOT_SERVED;
    char *scratch = malloc(lineate_quantised_scratch(a->rows, a->size));
    if (!scratch) return NO_MEMORY;
    const Rounded w = lineate_quantised_place(a, scratch);
    lineate_spread(lineate_quantised_round, &w, a->rows, a->rows * a->size, a->threads);
    lineate_spread(lineate_quantised_unit, &w, lineate_quantised_units(a), a->out * a->size, a->threads);
    free(scratch);
    return 0;
}

// ---- rows of a weight ----------------------------------------------------------------------------------------------

typedef struct {  // filled in by quantised.py
    i64 count, size, bits;
    const i64 *ids;        // count
    const uint8_t *codes;  // tiles groups steps 16 4
    const uint16_t *scales;
    float *y;  // count size: the numbers of these rows
} Rows;

void lineate_quantised_row(const Quantised *a, i64 row, float *to) {
    const i64 groups = a->size / GROUP, tile = row / TILE, own = row % TILE;
    const int32_t zero = a->bits == 4 ? 8 : 128;
    for (i64 g = 0; g < groups; g++) {
        const i64 at = tile * groups + g;
        const uint8_t *codes = a->codes + at * a->bits * STEP + own * 4;
        const float scale = widen((const uint16_t *)a->scales + at * TILE + own / LANES * LANES)[own % LANES];
        float *y = to + g * GROUP;
        for (i64 s = 0; s < a->bits; s++)
            for (int j = 0; j < 4; j++) {
                const int32_t code = codes[s * STEP + j];
                y[s * 4 + j] = (float)((a->bits == 4 ? code & 15 : code) - zero) * scale;
                if (a->bits == 4) y[s * 4 + j + 16] = (float)((code >> 4) - zero) * scale;
            }
    }
}

int lineate_quantised_rows(const Rows *a) {
    const Quantised weight = {.size = a->size, .bits = a->bits, .codes = a->codes, .scales = a->scales};
    for (i64 i = 0; i < a->count; i++) lineate_quantised_row(&weight, a->ids[i], a->y + i * a->size);
    return 0;
}
