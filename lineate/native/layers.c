// The parts of a layer around the op, for a CPU in float32: the same equations as lineate/layers.
//
//   short convolution   y_tc = sum_i w_ci x_{t-past+i,c}, past = size - 1;  silu(y)
//   RMSNorm             x / sqrt(mean x^2 + eps) * (offset + weight) * act(gate)
//   glu                 silu(gate) * up
//   product, combine    x weight^T and x weight of few rows, the weight of 16 or 32 bit
//
// A unit of work is a slab of channels or a block of rows. What a unit computes depends on nothing but its own inputs,
// and sums over tokens go block by block in one order: the bits are the same in any batch and number of threads.
#include <math.h>
#include <stdlib.h>
#include "products.h"
#include "threads.h"
#include "vectors.h"

enum { NO_MEMORY = 1 };

// ---- short convolution ---------------------------------------------------------------------------------------------

enum { SIZES = 4, SLAB = 512, BLOCK = 64 };  // taps; channels of a unit; tokens summed in float

typedef struct {  // words of 64 bits, filled in by layers.py; strides in elements, the last dimension of x and dy dense
    i64 b, t, channels, size, sequences, threads;
    const float *x, *weight, *state;  // b t channels; channels size; sequences channels past, or NULL
    i64 x_row, x_token, state_row, state_channel, state_tap;
    const i64 *starts;  // sequences + 1, or NULL: every row is one sequence
    float *y, *final;   // b t channels; sequences past channels
    const float *dy, *dfinal;
    i64 dy_row, dy_token;
    float *dx, *dweight, *dstate;  // as x, weight and final; dstate may be NULL
} Conv;

typedef struct {                                    // of one unit
    i64 first, n;                                   // channels
    float weight[SIZES][SLAB];                      // tap by tap
    float front[SIZES][SLAB], unused[SIZES][SLAB];  // the inputs before the first token; where no gradient is wanted
    float carry[SIZES][SLAB], dweight[SIZES][SLAB];
    double sums[SIZES][SLAB];
} Slab;

typedef struct {
    i64 row, begin, n;  // tokens
    const float *front[SIZES];
} Sequence;

INLINE i64 slab_width(const Conv *a) {
    i64 width = blocks(blocks(a->channels, 4 * a->threads), 64) * 64;
    return most(least(width, SLAB), 64);
}

INLINE void load_weight(Slab *s, const Conv *a, int size) {
    const float *w = a->weight + s->first * size;
    for (i64 c = 0; c < s->n; c++)
        for (int i = 0; i < size; i++) s->weight[i][c] = w[c * size + i];
}

INLINE Sequence find_sequence(Slab *s, const Conv *a, i64 sequence, int past) {
    Sequence found = {.row = sequence, .n = a->t};
    const i64 *start = a->starts ? a->starts + sequence : NULL;
    if (start) found.row = 0, found.begin = start[0], found.n = start[1] - start[0];
    const float *from = a->state ? a->state + sequence * a->state_row + s->first * a->state_channel : NULL;
    for (int i = 0; i < past; i++) {
        found.front[i] = s->front[i];
        if (!from) memset(s->front[i], 0, s->n * sizeof(float));
        else if (a->state_channel == 1) found.front[i] = from + i * a->state_tap;
    }
    if (from && a->state_channel == past && a->state_tap == 1)
        for (i64 c = 0; c < s->n; c++)
            for (int i = 0; i < past; i++) s->front[i][c] = from[c * past + i];
    else if (from && a->state_channel != 1)
        for (i64 c = 0; c < s->n; c++)
            for (int i = 0; i < past; i++) s->front[i][c] = from[c * a->state_channel + i * a->state_tap];
    return found;
}

// Returns the slab's inputs at a token, which may lie before the first.
INLINE const float *inputs(const Slab *s, const Conv *a, const Sequence *sequence, int past, i64 token) {
    if (token < 0) return sequence->front[token + past];
    return a->x + sequence->row * a->x_row + (sequence->begin + token) * a->x_token + s->first;
}

// Computes y at `tokens` tokens or, if tokens is 1, `vectors` vectors of channels.
INLINE void convolve(vec *y, const Slab *s, const float *const *x, int size, int tokens, int vectors, i64 c, i64 n) {
    const int count = tokens * vectors;
    EACH y[k] = (vec){0};  // of a product and a product a compiler could fuse either one with the sum
#pragma GCC unroll 4
    for (int i = 0; i < size; i++)
        EACH {
            const i64 at = c + k / tokens * LANES;
            y[k] += load(s->weight[i] + at, LANES) * load(x[i + k % tokens] + at, n);
        }
}

INLINE void forward_vectors(const Slab *s, const float *const *x, float *const *out, int size, int tokens, int vectors,
                            i64 c, i64 n) {
    const int count = tokens * vectors;
    vec y[FEW];
    convolve(y, s, x, size, tokens, vectors, c, n);
    silus(y, count);
    EACH store(out[k % tokens] + c + k / tokens * LANES, y[k], n);
}

INLINE void forward_tokens(const Slab *s, const Conv *a, const Sequence *sequence, i64 token, int size, int tokens) {
    const float *x[FEW + SIZES];
    float *out[FEW];
    const i64 channels = s->n;
    for (int j = 0; j < tokens + size - 1; j++) x[j] = inputs(s, a, sequence, size - 1, token - size + 1 + j);
    for (int k = 0; k < tokens; k++)
        out[k] = a->y + (sequence->row * a->t + sequence->begin + token + k) * a->channels + s->first;
    if (tokens == 1) SWEEP(channels, forward_vectors(s, x, out, size, 1, count, c, n));
    else {
        i64 c = 0;
        for (; c + LANES <= channels; c += LANES) forward_vectors(s, x, out, size, tokens, 1, c, LANES);
        if (c < channels) forward_vectors(s, x, out, size, tokens, 1, c, channels - c);
    }
}

INLINE void forward_slab(Slab *s, const Conv *a, int size) {
    load_weight(s, a, size);
    for (i64 i = 0; i < a->sequences; i++) {
        Sequence sequence = find_sequence(s, a, i, size - 1);
        i64 token = 0;
        for (; token + FEW <= sequence.n; token += FEW) forward_tokens(s, a, &sequence, token, size, FEW);
        for (; token < sequence.n; token++) forward_tokens(s, a, &sequence, token, size, 1);
        for (int j = 0; j < size - 1; j++)
            memcpy(a->final + (i * (size - 1) + j) * a->channels + s->first,
                   inputs(s, a, &sequence, size - 1, sequence.n - size + 1 + j), s->n * sizeof(float));
    }
}

// Token by token: dy = dout silu'(y), dw_i += dy x_i, dx_i += w_i dy. dx is finished where no later token reads.
INLINE void backward_vector(Slab *s, const float *const *x, const float *const *dout, float *const *dx, int size,
                            int tokens, i64 c, i64 n) {
    const int past = size - 1, count = tokens;
    vec y[FEW], dy[FEW], window[FEW + SIZES];
    convolve(y, s, x, size, tokens, 1, c, n);
    silus_and_slopes(y, dy, tokens);
    EACH dy[k] *= load(dout[k] + c, n);
#pragma GCC unroll 8
    for (int j = 0; j < past + tokens; j++) window[j] = j < past ? load(s->carry[j] + c, LANES) : (vec){0};
#pragma GCC unroll 4
    for (int i = size - 1; i >= 0; i--) {
        vec w = load(s->weight[i] + c, LANES), dw = load(s->dweight[i] + c, LANES);
        EACH {
            window[k + i] += w * dy[k];
            dw += dy[k] * load(x[k + i] + c, n);
        }
        store(s->dweight[i] + c, dw, LANES);
    }
    EACH store(dx[k] + c, window[k], n);
#pragma GCC unroll 4
    for (int j = 0; j < past; j++) store(s->carry[j] + c, window[tokens + j], LANES);
}

// Returns the address of the gradient of the inputs at a token.
INLINE float *gradients(Slab *s, const Conv *a, const Sequence *sequence, i64 which, int past, i64 token) {
    if (token >= 0) return a->dx + (sequence->row * a->t + sequence->begin + token) * a->channels + s->first;
    if (!a->dstate) return s->unused[token + past];
    return a->dstate + (which * past + token + past) * a->channels + s->first;
}

INLINE void backward_tokens(Slab *s, const Conv *a, const Sequence *sequence, i64 which, i64 token, int size, int tokens) {
    const int past = size - 1;
    const float *x[FEW + SIZES], *dout[FEW];
    float *dx[FEW];
    for (int j = 0; j < tokens + past; j++) x[j] = inputs(s, a, sequence, past, token - past + j);
    for (int k = 0; k < tokens; k++) {
        dout[k] = a->dy + sequence->row * a->dy_row + (sequence->begin + token + k) * a->dy_token + s->first;
        dx[k] = gradients(s, a, sequence, which, past, token - past + k);
    }
    i64 c = 0;
    for (; c + LANES <= s->n; c += LANES) backward_vector(s, x, dout, dx, size, tokens, c, LANES);
    if (c < s->n) backward_vector(s, x, dout, dx, size, tokens, c, s->n - c);
}

INLINE void add_up(Slab *s, int size) {
    for (int i = 0; i < size; i++) {
        for (i64 c = 0; c < s->n; c++) s->sums[i][c] += s->dweight[i][c];
        memset(s->dweight[i], 0, sizeof s->dweight[i]);
    }
}

INLINE void backward_slab(Slab *s, const Conv *a, int size) {
    const int past = size - 1;
    load_weight(s, a, size);
    memset(s->sums, 0, sizeof s->sums);
    memset(s->dweight, 0, sizeof s->dweight);
    for (i64 i = 0; i < a->sequences; i++) {
        Sequence sequence = find_sequence(s, a, i, past);
        memset(s->carry, 0, sizeof s->carry);
        for (i64 start = 0; start < sequence.n; start += BLOCK) {
            const i64 stop = least(start + BLOCK, sequence.n);
            i64 token = start;
            for (; token + FEW <= stop; token += FEW) backward_tokens(s, a, &sequence, i, token, size, FEW);
            for (; token < stop; token++) backward_tokens(s, a, &sequence, i, token, size, 1);
            add_up(s, size);
        }
        for (int j = 0; j < past; j++) {
            float *to = gradients(s, a, &sequence, i, past, sequence.n - past + j);
            const float *more = a->dfinal ? a->dfinal + (i * past + j) * a->channels + s->first : NULL;
            for (i64 c = 0; c < s->n; c++) to[c] = s->carry[j][c] + (more ? more[c] : 0);
        }
    }
    for (i64 c = 0; c < s->n; c++)
        for (int i = 0; i < size; i++) a->dweight[(s->first + c) * size + i] = (float)s->sums[i][c];
}

#define FOR_SIZE(work)                                     \
    const Conv *a = call;                                  \
    Slab s;                                                \
    const i64 width = slab_width(a);                       \
    s.first = unit * width;                                \
    s.n = least(width, a->channels - s.first);             \
    if (s.n % LANES) memset(s.weight, 0, sizeof s.weight); \
    switch (a->size) {                                     \
        case 1: work(&s, a, 1); break;                     \
        case 2: work(&s, a, 2); break;                     \
        case 3: work(&s, a, 3); break;                     \
        case 4: work(&s, a, 4); break;                     \
    }

static void convolve_forward(const void *call, i64 unit) { FOR_SIZE(forward_slab) }
static void convolve_backward(const void *call, i64 unit) { FOR_SIZE(backward_slab) }

int lineate_convolution(const Conv *a) {
    lineate_spread(convolve_forward, a, blocks(a->channels, slab_width(a)), a->b * a->t * a->channels, a->threads);
    return 0;
}

int lineate_convolution_backward(const Conv *a) {
    lineate_spread(convolve_backward, a, blocks(a->channels, slab_width(a)), a->b * a->t * a->channels, a->threads);
    return 0;
}

// ---- RMSNorm, with or without a gate -------------------------------------------------------------------------------

enum { NORM_ROWS = 64 };  // of a unit
enum { NO_GATE, SILU, SIGMOID };

typedef struct {  // i j k size: rows in three dimensions, each dense; strides in elements
    const float *data;
    i64 i, j, k;
} Rows;

typedef struct {
    i64 j, k, rows, size, act, threads;  // rows = i j k
    Rows x, gate, dy;
    const float *weight;
    float *y, *dx, *dgate, *dweight;  // dense
    double eps, offset;
    float *parts;  // units size: sums of dweight
} Norm;

INLINE const float *row_of(const Rows *x, const Norm *a, i64 row) {
    i64 rest = row / a->k;
    return x->data + rest / a->j * x->i + rest % a->j * x->j + row % a->k * x->k;
}

INLINE void add_squares(vec *sum, const float *x, i64 c, int count, i64 n) {
    EACH {
        vec y = load(x + c + k * LANES, n);
        sum[k] += y * y;
    }
}

// 1 / sqrt(mean x^2 + eps)
INLINE float inverse_norm(const float *x, const Norm *a) {
    vec sum[FEW] = {0};
    SWEEP(a->size, add_squares(sum, x, c, count, n));
    return 1.f / sqrtf(total((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)a->size + (float)a->eps);
}

// value = act(z), slope = act'(z)
INLINE void activate(const vec *z, vec *value, vec *slope, int act, int count) {
    EACH value[k] = z[k];
    if (act == SILU) silus_and_slopes(value, slope, count);
    if (act == SIGMOID) {
        sigmoids(z, value, slope, count);
        EACH slope[k] *= value[k];
    }
}

INLINE void norm_vectors(const Norm *a, const float *x, const float *gate, float *y, float r, int act, i64 c, int count,
                         i64 n) {
    vec z[FEW], value[FEW], slope[FEW];
    if (act) {
        EACH z[k] = load(gate + c + k * LANES, n);
        activate(z, value, slope, act, count);
    }
    EACH {
        const i64 at = c + k * LANES;
        vec out = load(x + at, n) * r * (load(a->weight + at, n) + (float)a->offset);
        if (act) out *= value[k];
        store(y + at, out, n);
    }
}

INLINE void norm_rows(const Norm *a, i64 unit, int act) {
    for (i64 row = unit * NORM_ROWS; row < least((unit + 1) * NORM_ROWS, a->rows); row++) {
        const float *x = row_of(&a->x, a, row), *gate = act ? row_of(&a->gate, a, row) : NULL;
        float *y = a->y + row * a->size, r = inverse_norm(x, a);
        SWEEP(a->size, norm_vectors(a, x, gate, y, r, act, c, count, n));
    }
}

// With u = x r: dgate = dy u w act', du = dy act w (into dx), dweight += dy act u; sum += du u.
INLINE void norm_slopes(const Norm *a, const float *x, const float *gate, const float *dy, float *dx, float *dgate,
                        float *dweight, vec *sum, float r, int act, i64 c, int count, i64 n) {
    vec z[FEW], value[FEW], slope[FEW];
    if (act) {
        EACH z[k] = load(gate + c + k * LANES, n);
        activate(z, value, slope, act, count);
    }
    EACH {
        const i64 at = c + k * LANES;
        vec u = load(x + at, n) * r, w = load(a->weight + at, n) + (float)a->offset, d = load(dy + at, n);
        if (act) {
            store(dgate + at, d * (u * w) * slope[k], n);
            d *= value[k];
        }
        vec du = d * w;
        store(dweight + at, load(dweight + at, n) + d * u, n);
        store(dx + at, du, n);
        sum[k] += du * u;
    }
}

INLINE void norm_rows_backward(const Norm *a, i64 unit, int act) {
    float *dweight = a->parts + unit * a->size;
    memset(dweight, 0, a->size * sizeof(float));
    for (i64 row = unit * NORM_ROWS; row < least((unit + 1) * NORM_ROWS, a->rows); row++) {
        const float *x = row_of(&a->x, a, row), *dy = row_of(&a->dy, a, row);
        const float *gate = act ? row_of(&a->gate, a, row) : NULL;
        float *dx = a->dx + row * a->size, *dgate = act ? a->dgate + row * a->size : NULL;
        const float r = inverse_norm(x, a);
        vec sum[FEW] = {0};
        SWEEP(a->size, norm_slopes(a, x, gate, dy, dx, dgate, dweight, sum, r, act, c, count, n));
        const float along = total((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)a->size * r;
        for (i64 c = 0; c < a->size; c++) dx[c] = r * (dx[c] - x[c] * along);
    }
}

static void norm_forward(const void *call, i64 unit) {
    const Norm *a = call;
    if (a->act == NO_GATE) norm_rows(a, unit, NO_GATE);
    else if (a->act == SILU) norm_rows(a, unit, SILU);
    else norm_rows(a, unit, SIGMOID);
}

static void norm_backward(const void *call, i64 unit) {
    const Norm *a = call;
    if (a->act == NO_GATE) norm_rows_backward(a, unit, NO_GATE);
    else if (a->act == SILU) norm_rows_backward(a, unit, SILU);
    else norm_rows_backward(a, unit, SIGMOID);
}

int lineate_norm(const Norm *a) {
    lineate_spread(norm_forward, a, blocks(a->rows, NORM_ROWS), a->rows * a->size, a->threads);
    return 0;
}

int lineate_norm_backward(const Norm *given) {
    Norm a = *given;
    const i64 units = blocks(a.rows, NORM_ROWS);
    double *sums = calloc(most(a.size, 1), sizeof(double));
    a.parts = malloc(most(units * a.size, 1) * sizeof(float));
    if (a.parts && sums) {
        lineate_spread(norm_backward, &a, units, a.rows * a.size, a.threads);
        for (i64 unit = 0; unit < units; unit++)
            for (i64 c = 0; c < a.size; c++) sums[c] += a.parts[unit * a.size + c];
        for (i64 c = 0; c < a.size; c++) a.dweight[c] = (float)sums[c];
    }
    const int failed = a.parts && sums ? 0 : NO_MEMORY;
    free(a.parts), free(sums);
    return failed;
}

// ---- glu -----------------------------------------------------------------------------------------------------------

typedef struct {
    i64 rows, size, threads;  // size: of gate and of up
    const float *x, *dy;      // rows 2*size, rows size: dense rows
    i64 x_row, dy_row;
    float *y, *dx;  // dense
} Glu;

INLINE i64 glu_rows(const Glu *a) { return 1 + 16384 / most(a->size, 1); }  // of a unit

INLINE void glu_vectors(const float *gate, const float *up, float *y, i64 c, int count, i64 n) {
    vec z[FEW];
    EACH z[k] = load(gate + c + k * LANES, n);
    silus(z, count);
    EACH store(y + c + k * LANES, z[k] * load(up + c + k * LANES, n), n);
}

INLINE void glu_slopes(const float *gate, const float *up, const float *dy, float *dgate, float *dup, i64 c, int count,
                       i64 n) {
    vec z[FEW], slope[FEW];
    EACH z[k] = load(gate + c + k * LANES, n);
    silus_and_slopes(z, slope, count);
    EACH {
        const i64 at = c + k * LANES;
        vec d = load(dy + at, n);
        store(dgate + at, d * load(up + at, n) * slope[k], n);
        store(dup + at, d * z[k], n);
    }
}

static void glu_forward(const void *call, i64 unit) {
    const Glu *a = call;
    const i64 size = a->size, rows = glu_rows(a);
    for (i64 row = unit * rows; row < least((unit + 1) * rows, a->rows); row++) {
        const float *x = a->x + row * a->x_row;
        float *y = a->y + row * size;
        SWEEP(size, glu_vectors(x, x + size, y, c, count, n));
    }
}

static void glu_backward(const void *call, i64 unit) {
    const Glu *a = call;
    const i64 size = a->size, rows = glu_rows(a);
    for (i64 row = unit * rows; row < least((unit + 1) * rows, a->rows); row++) {
        const float *x = a->x + row * a->x_row, *dy = a->dy + row * a->dy_row;
        float *dx = a->dx + row * 2 * size;
        SWEEP(size, glu_slopes(x, x + size, dy, dx, dx + size, c, count, n));
    }
}

int lineate_glu(const Glu *a) {
    lineate_spread(glu_forward, a, blocks(a->rows, glu_rows(a)), a->rows * a->size, a->threads);
    return 0;
}

int lineate_glu_backward(const Glu *a) {
    lineate_spread(glu_backward, a, blocks(a->rows, glu_rows(a)), a->rows * a->size, a->threads);
    return 0;
}

// ---- products of few rows --------------------------------------------------------------------------------------------

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
