// The parts of a decoding step (step.c), as step.py fills them in, and what their stages share.
#pragma once
#include <math.h>
#include <stdatomic.h>
#include "products.h"
#include "vectors.h"

enum { NO_MEMORY = 1, NO_SUCH_ROW = 2 };
enum { RULE, ATTENTION, FEED, HEAD };        // parts
enum { NONE, SILU, SIGMOID };                // activations
enum { PLAIN, UNIT, MAP };                   // how the rule uses q and k: as they are, of norm 1, elu(x) + 1
enum { NO_DECAY, SPEED, ROOT, STEPPED };      // functions from the raw decay to the decay
enum { ENTER, LOW_RANK, MIX, LEAVE, STAGES };  // stages
enum { FLOAT8 = 3, BITS_4 = 4, BITS_8 = 8, ABSENT = -1 };  // kinds of weights beyond those of products.h
enum { WIDEST = 512 };                       // channels of a head
enum { MOST_WRITES = 8 };                    // of a token

typedef struct {
    i64 kind, out, size;
    const void *weight;  // out size, dense, or codes in tiles
    const void *scales;
    const float *bias;
} Linear;

typedef struct {
    const float *weight;  // NULL: there is no norm
    double eps, offset;   // multiplies by offset + weight
} Norm;

typedef struct {  // words of 64 bits, filled in by step.py
    i64 kind;
    Norm norm;
    Linear in, out;
    // rule: key heads, the value heads of each, their channels, taps of the convolution
    i64 heads, shared, key_dim, value_dim, taps;
    const float *conv, *conv_bias, *A_log, *dt_bias, *skip;  // conv_bias, skip: NULL: there is none
    Norm out_norm;
    i64 corrects, features, scaled, decays, per_channel, divides;  // divides: by the memory's last column, of sums of k
    i64 writes, channel_rates;  // of a token; whether erase and write have a rate for each channel instead of one beta
    i64 activation, norm_groups, gate_first;                       // norm_groups: of all heads; 0: one norm a head
    double beta_scale, lower_bound;                                // lower_bound 0: there is none
    double temperature, step_least, step_most;
    i64 at_decay, at_gate, at_write, at_erase;  // columns of what `in` makes
    Linear decay, gate;              // of low rank, from these columns; ABSENT: the columns themselves
    // attention: query heads, heads of keys and values
    i64 query_heads, kv_heads, head_dim, rotary, gated;
    Norm q_norm, k_norm;
    double scale;
    const float *cos, *sin;  // rows rotary/2
    // states
    const float *conv_from;
    float *conv_to;
    i64 from_row, from_channel, from_tap, to_row, to_channel, to_tap;
    const void *memory_from;  // rows value heads k v, dense after the row
    void *memory_to;
    i64 memory_from_row, memory_to_row, memory_narrow;  // narrow: bfloat16, not float32
    float *keys, *values;  // rows tokens heads d, dense after the token
    i64 keys_row, keys_token, values_row, values_token;
    const i64 *lengths;  // tokens of each row before this one
    float *made;         // head: rows out
} Part;

typedef struct {
    i64 rows, hidden, parts, threads, rounded;  // rounded: rows may be rounded further, which is faster
    float *x;                                   // rows hidden; NULL: rows of the table
    const Part *part;
    const i64 *ids;       // rows
    const Linear *table;  // of embeddings, hidden numbers each
} Step;

typedef struct {
    i64 part, stage, units;
    atomic_llong done, *next;  // next: units of each thread's range that were taken
} Stage;

typedef struct {
    Step call;
    i64 stages;
    Stage *stage;
    float *entered, *decay, *gate, *mixed, *left;  // rows of what the stages make
    i64 widest;                                    // inputs of a product
    char *scratch;                                 // of each thread
    i64 scratch_bytes;
} Team;

INLINE float square_sum(const float *x, i64 size) {
    vec sum[FEW] = {0};
    SWEEP(size, EACH {
        const vec z = load(x + c + k * LANES, n);
        sum[k] += z * z;
    });
    return total((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// y = norm(x) * more, where more may be NULL; x and y may be the same.
static void normalize(const Norm *norm, const float *x, const float *more, float *y, i64 size) {
    if (!norm->weight) {
        if (y != x) memcpy(y, x, size * sizeof(float));
        return;
    }
    const float factor = 1.f / sqrtf(square_sum(x, size) / (float)size + (float)norm->eps);
    const float offset = (float)norm->offset;
    SWEEP(size, EACH {
        const i64 at = c + k * LANES;
        vec z = load(x + at, n) * factor * (load(norm->weight + at, n) + offset);
        if (more) z *= load(more + at, n);
        store(y + at, z, n);
    });
}

INLINE float dot(const float *x, const float *y, i64 size) {
    vec sum[FEW] = {0};
    SWEEP(size, EACH sum[k] += load(x + c + k * LANES, n) * load(y + c + k * LANES, n));
    return total((sum[0] + sum[1]) + (sum[2] + sum[3]));
}
