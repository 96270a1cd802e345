// x weight^T for a weight of float16, in the arithmetic of float16, for callers that allow rounded rows of x.
//
//   x_c   ~= scale q_c         q is float16, of at most 64 in size; the scale is a power of two
//   y_r    = scale sum_g (sum_c weight_rc q_c)      g: 8 columns c, 8 apart; inner sums in float16, the others in float
//
// Some processors multiply sixteen pairs of float16 a cycle and widen two numbers. Widening the sums of eight products
// instead of every weight keeps up with the memory. They are two sums of four products, which are rounded less than one
// sum of eight. The bits of a row of y depend on its row of x alone.
// Where y is not finite, by a weight or by an inner sum that float16 has no number for, it is computed again in float.
#include <string.h>
#include "products.h"
#include "vectors.h"

#if defined(__ARM_NEON) && defined(__aarch64__) && defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
enum { SPAN = 32, WEIGHTS = 2, ROWS = 4, UNIT = 64 };  // columns, tile, weights of a unit
enum { MOST_ROWS = 16 };  // more rows are not rounded
enum { AHEAD = 16384, AHEAD_ALONE = 1024 };            // bytes between what is fetched and what is multiplied

int lineate_halves_serve(i64 rows, i64 size) { return rows <= MOST_ROWS && size > 0 && size % SPAN == 0; }

void lineate_halves_round(const Rounded *w, i64 row) {
    const i64 size = w->call.size;
    const float *x = w->call.x + row * size;
    float16_t *q = (float16_t *)w->q + row * size;
    uint32x4_t sizes = vdupq_n_u32(0);  // bits of |x|, which are ordered as the floats are
    for (i64 c = 0; c < size; c += 4) sizes = vmaxq_u32(sizes, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + c))));
    const int32_t exponent = (int32_t)most(vmaxvq_u32(sizes) >> 23, 8);  // 255: infinity or NaN
    const uint32_t up = (uint32_t)(127 + 127 + 5 - exponent) << 23, down = (uint32_t)(exponent - 5) << 23;
    const uint32_t unknown = 0x7fc00000;  // NaN, so that y is computed again
    float factor, scale;
    memcpy(&factor, exponent == 255 ? &unknown : &up, 4);
    memcpy(&scale, exponent == 255 ? &unknown : &down, 4);
    for (i64 c = 0; c < size; c += 8) {
        const float16x4_t low = vcvt_f16_f32(vmulq_n_f32(vld1q_f32(x + c), factor));
        vst1q_f16(q + c, vcvt_high_f16_f32(low, vmulq_n_f32(vld1q_f32(x + c + 4), factor)));
    }
    w->scale[row * w->groups] = scale;
}

static float exact(const float *x, const float16_t *weight, i64 size) {
    float32x4_t sum = vdupq_n_f32(0);
    for (i64 c = 0; c < size; c += 4) sum = vfmaq_f32(sum, vld1q_f32(x + c), vcvt_f32_f16(vld1_f16(weight + c)));
    return total((vec)sum);
}

#define EACH_ROW _Pragma("GCC unroll 4") for (int i = 0; i < rows; i++)
#define EACH_WEIGHT _Pragma("GCC unroll 2") for (int j = 0; j < weights; j++)
// part = sum_c weight_c q_c over 32 columns, for eight of them at a time
#define MULTIPLY_SPAN(part, at)                                                                            \
    _Pragma("GCC unroll 4") for (int k = 0; k < SPAN; k += 8) {                                            \
        float16x8_t own[WEIGHTS];                                                                          \
        EACH_WEIGHT own[j] = vld1q_f16(weight + j * size + (at) + k);                                      \
        EACH_ROW {                                                                                         \
            const float16x8_t x = vld1q_f16(q + i * size + (at) + k);                                      \
            EACH_WEIGHT part[i][j] = k ? vfmaq_f16(part[i][j], own[j], x) : vmulq_f16(own[j], x);          \
        }                                                                                                  \
    }
INLINE void multiply_tile(const Rounded *w, i64 row, i64 first, int rows, int weights) {
    const i64 size = w->call.size, out = w->call.out;
    const float16_t *q = (const float16_t *)w->q + row * size;
    const float16_t *weight = (const float16_t *)w->call.codes + first * size;
    float32x4_t sum[ROWS][WEIGHTS];
    float16x8_t part[ROWS][WEIGHTS], more[ROWS][WEIGHTS];
    EACH_ROW EACH_WEIGHT sum[i][j] = vdupq_n_f32(0);
    i64 c = 0;
    for (; c + 2 * SPAN <= size; c += 2 * SPAN) {
        _Pragma("GCC unroll 4") for (int j = 0; j < 2 * weights; j++) {
            const char *own = (const char *)(weight + weights * c) + j * 64;
            if (weights == 1) __builtin_prefetch(own + AHEAD_ALONE, 0, 3);
            else __builtin_prefetch(own + AHEAD, 0, 2);
        }
        MULTIPLY_SPAN(part, c);
        MULTIPLY_SPAN(more, c + SPAN);
        EACH_ROW EACH_WEIGHT {
            part[i][j] += more[i][j];
            sum[i][j] += vcvt_f32_f16(vget_low_f16(part[i][j]));
            sum[i][j] += vcvt_high_f32_f16(part[i][j]);
        }
    }
    if (c < size) {
        MULTIPLY_SPAN(part, c);
        EACH_ROW EACH_WEIGHT {
            sum[i][j] += vcvt_f32_f16(vget_low_f16(part[i][j]));
            sum[i][j] += vcvt_high_f32_f16(part[i][j]);
        }
    }
    EACH_ROW EACH_WEIGHT {
        float *y = w->call.y + (row + i) * out + first + j;
        *y = total((vec)sum[i][j]) * w->scale[(row + i) * w->groups];
        if (!(*y - *y == 0)) *y = exact(w->call.x + (row + i) * size, weight + j * size, size);
    }
}

void lineate_halves_unit(const Rounded *w, i64 unit) {
    const i64 last = least((unit + 1) * UNIT, w->call.out), rows = w->call.rows;
    i64 first = unit * UNIT;
    for (; first + WEIGHTS <= last; first += WEIGHTS) {
        i64 row = 0;
        for (; row + ROWS <= rows; row += ROWS) multiply_tile(w, row, first, ROWS, WEIGHTS);
        for (; row + 2 <= rows; row += 2) multiply_tile(w, row, first, 2, WEIGHTS);
        for (; rows > 1 && row < rows; row++) multiply_tile(w, row, first, 1, WEIGHTS);
        for (i64 j = 0; rows == 1 && j < WEIGHTS; j++)  // line by line, as memory is read fastest
            multiply_tile(w, 0, first + j, 1, 1);
    }
    for (; first < last; first++)
        for (i64 row = 0; row < rows; row++) multiply_tile(w, row, first, 1, 1);
}
#else
enum { UNIT = 64 };
int lineate_halves_serve(i64 rows, i64 size) { return 0; }
void lineate_halves_round(const Rounded *w, i64 row) {}
void lineate_halves_unit(const Rounded *w, i64 unit) {}
#endif

i64 lineate_halves_units(i64 out) { return blocks(out, UNIT); }

void lineate_halves_columns(i64 out, i64 unit, i64 *first, i64 *last) {
    *first = unit * UNIT, *last = least(*first + UNIT, out);
}
