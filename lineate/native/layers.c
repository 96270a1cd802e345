// RMSNorm and the gated unit, for a CPU in float32: the same equations as lineate/layers.
//
//   RMSNorm             x / sqrt(mean x^2 + eps) * (offset + weight) * act(gate)
//   glu                 silu(gate) * up
//
// A unit of work is a block of rows. What a unit computes depends on nothing but its own inputs, and sums over tokens go
// block by block in one order: the bits are the same in any batch and number of threads.
#include <math.h>
#include <stdlib.h>
#include "threads.h"
#include "vectors.h"

enum { NO_MEMORY = 1 };

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
