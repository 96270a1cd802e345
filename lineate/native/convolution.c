// The short convolution of a layer, for a CPU in float32: the same equation as lineate/layers/convolution.py.
//
//   y_tc = sum_i w_ci x_{t-past+i,c}, past = size - 1;  silu(y)
//
// A unit of work is a slab of channels. What a unit computes depends on nothing but its own inputs, and sums over tokens
// go block by block in one order: the bits are the same in any batch and number of threads.
#include "threads.h"
#include "vectors.h"

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
