// A decoding step on a CPU: one token a row through a run of parts of a model, in float32; memories may be bfloat16.
//
//   rule        x += out(norm(mix(convolution, gates, memory)) * act(z)),  the input of mix being in(norm(x));
//               a memory is decayed, then corrected or added to; every mixer of layers/step_spec.py is such a part
//   attention   x += out(softmax(q keys^T) values * sigmoid(gate)),        q | gate | k | v = in(norm(x))
//   feed        x += out(silu(gate) * up),                                 gate | up = in(norm(x))
//   head        made = in(norm(x)),                                        the last part, if there is one
//
// x is given, or made of rows of a table of embeddings.
// The equations are those of lineate/layers. A part is a few stages of units: heads, or tiles of a product. Threads take
// units until a stage has none left, and wait for each other between stages; one that comes late joins where the others
// are. What a unit computes depends on its own row alone: the bits are the same in any batch and number of threads.
// A thread begins with a range of units of its own, as memory is read faster by threads that read far from each other.
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include "products.h"
#include "threads.h"
#include "vectors.h"

enum { NO_MEMORY = 1, NO_SUCH_ROW = 2 };
enum { RULE, ATTENTION, FEED, HEAD };        // parts
enum { NONE, SILU, SIGMOID };                // activations
enum { PLAIN, UNIT, MAP };                   // how the rule uses q and k: as they are, of norm 1, elu(x) + 1
enum { NO_DECAY, SPEED, ROOT, STEPPED };      // functions from the raw decay to the decay
enum { ENTER, LOW_RANK, MIX, LEAVE, STAGES };  // stages
enum { FLOAT8 = 3, BITS_4 = 4, BITS_8 = 8, ABSENT = -1 };  // kinds of weights beyond those of products.h
enum { WIDEST = 512 };                       // channels of a head

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
    i64 activation, norm_groups, gate_first;                       // norm_groups: of all heads; 0: one norm a head
    double beta_scale, lower_bound;                                // lower_bound 0: there is none
    double temperature, step_least, step_most;
    i64 at_decay, at_gate, at_write;  // columns of what `in` makes
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

typedef struct {  // the input of a product, as a thread has it
    Product plain;
    Rounded rounded;
} Input;

INLINE int is_coded(const Step *a, const Linear *w) {
    return w->kind >= FLOAT8 || (a->rounded && w->kind == FLOAT16 && lineate_halves_serve(a->rows, w->size));
}

INLINE Product plain_of(const Step *a, const Linear *w, const float *x, float *y) {
    return (Product){a->rows, w->out, w->size, 1, w->kind, x, w->weight, w->size, y, NULL};
}

INLINE Quantised quantised_of(const Step *a, const Linear *w, const float *x, float *y) {
    const i64 bits = w->kind == BITS_4 ? 4 : w->kind == FLOAT16 ? 16 : 8;
    const i64 planes = w->kind == FLOAT8 ? 0 : w->kind == BITS_8 && !a->rounded ? 2 : 1;
    return (Quantised){a->rows, w->out, w->size, bits, planes, 1, x, w->weight, w->scales, y};
}

static i64 units_of(const Step *a, const Linear *w) {
    if (w->kind == ABSENT) return 0;
    const Product plain = plain_of(a, w, NULL, NULL);
    const Quantised quantised = quantised_of(a, w, NULL, NULL);
    return is_coded(a, w) ? lineate_quantised_units(&quantised) : lineate_product_units(&plain);
}

// ---- inputs of products --------------------------------------------------------------------------------------------

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

// y = norm(x), a norm for each group of all heads' channels; where the gate follows, times the activated gate.
static void normalize_groups(const Part *p, const float *x, const float *gate, float *y) {
    const i64 size = p->out.size / p->norm_groups;
    const int gated = p->activation != NONE && !p->gate_first;
    for (i64 at = 0; at < p->out.size; at += size) {
        const Norm norm = {p->out_norm.weight + at, p->out_norm.eps, p->out_norm.offset};
        normalize(&norm, x + at, gated ? gate + at : NULL, y + at, size);
    }
}

static void unite(const float *x, float *y, i64 size) {  // silu(gate) * up
    SWEEP(size, {
        vec gate[FEW];
        EACH gate[k] = load(x + c + k * LANES, n);
        silus(gate, count);
        EACH store(y + c + k * LANES, gate[k] * load(x + size + c + k * LANES, n), n);
    });
}

// Gets the rows that a product reads into the thread's scratch, rounded if the weight is coded.
static Input enter(const Team *team, const Part *part, const Linear *w, const float *x, i64 row_size, int stage,
                   float *y, char *scratch) {
    const i64 rows = team->call.rows;
    float *own = (float *)scratch;
    for (i64 row = 0; row < rows; row++) {
        const float *from = x + row * row_size;
        float *to = own + row * w->size;
        if (stage == ENTER) normalize(&part->norm, from, NULL, to, w->size);
        else if (stage == LEAVE && part->kind == FEED) unite(from, to, w->size);
        else if (stage == LEAVE && part->norm_groups)
            normalize_groups(part, from, team->entered + row * part->in.out + part->at_gate, to);
        else memcpy(to, from, w->size * sizeof(float));
    }
    Input input = {.plain = plain_of(&team->call, w, own, y)};
    float *after = own + rows * team->widest;  // x arranged, or rounded
    if (is_coded(&team->call, w)) {
        const Quantised quantised = quantised_of(&team->call, w, own, y);
        input.rounded = lineate_quantised_place(&quantised, after);
        for (i64 row = 0; row < rows; row++) lineate_quantised_round(&input.rounded, row);
    } else {
        input.plain.arranged = after;
        if (!lineate_product_arrange(&input.plain)) input.plain.arranged = NULL;
    }
    return input;
}

static void multiply(const Team *team, const Linear *w, const Input *input, i64 unit, float *add_to) {
    const i64 rows = team->call.rows;
    const int coded = is_coded(&team->call, w);
    i64 first, last;
    if (coded) {
        lineate_quantised_unit(&input->rounded, unit);
        lineate_quantised_columns(&input->rounded.call, unit, &first, &last);
    } else {
        lineate_product_unit(&input->plain, unit);
        lineate_product_columns(&input->plain, unit, &first, &last);
    }
    float *y = coded ? input->rounded.call.y : input->plain.y;
    for (i64 row = 0; row < rows; row++) {
        float *made = y + row * w->out, *sum = add_to + row * w->out;
        if (w->bias)
            for (i64 c = first; c < last; c++) made[c] += w->bias[c];
        if (add_to)
            for (i64 c = first; c < last; c++) sum[c] += made[c];
    }
}

// ---- embeddings ----------------------------------------------------------------------------------------------------

static void look_up(const Step *a, float *x) {
    const Linear *w = a->table;
    for (i64 row = 0; row < a->rows; row++) {
        float *to = x + row * a->hidden;
        if (w->kind >= FLOAT8) {
            const Quantised quantised = quantised_of(a, w, NULL, to);
            lineate_quantised_row(&quantised, a->ids[row], to);
        } else {
            const Product plain = plain_of(a, w, NULL, to);
            lineate_product_row(&plain, a->ids[row], to);
        }
    }
}

static int has_rows(const Step *a) {
    for (i64 row = 0; row < a->rows; row++)
        if (a->ids[row] < 0 || a->ids[row] >= a->table->out) return 0;
    return 1;
}

// ---- the rule ------------------------------------------------------------------------------------------------------

enum { MOST_TAPS = 8 };

// y_c = sum_i w_ci x_ic; where the compiler knows how many taps there are, it multiplies vectors of channels.
INLINE void add_taps(float *restrict y, const float *w, const float *const *x, i64 width, i64 taps) {
    for (i64 c = 0; c < width; c++) {
        float sum = 0;
        for (i64 i = 0; i < taps; i++) sum += w[c * taps + i] * x[i][c];
        y[c] = sum;
    }
}

// Convolves channels first .. first + width of a row, and keeps the inputs of the next token.
static void convolve(const Part *p, const float *new, i64 row, i64 first, i64 width, float *y) {
    const i64 taps = p->taps;
    if (!taps) {
        memcpy(y, new + first, width * sizeof(float));
        return;
    }
    const float *from = p->conv_from + row * p->from_row + first * p->from_channel;
    float *to = p->conv_to + row * p->to_row + first * p->to_channel;
    const float *w = p->conv + first * taps;
    const int dense = p->from_channel == 1 && p->to_channel == 1;
    const float *x[MOST_TAPS];
    float kept[MOST_TAPS][WIDEST];
    for (i64 i = 0; i + 1 < taps; i++) {
        x[i] = dense ? from + i * p->from_tap : kept[i];
        for (i64 c = 0; !dense && c < width; c++) kept[i][c] = from[c * p->from_channel + i * p->from_tap];
    }
    x[taps - 1] = new + first;
    if (taps == 4) add_taps(y, w, x, width, 4);
    else add_taps(y, w, x, width, taps);
    if (p->conv_bias)
        for (i64 c = 0; c < width; c++) y[c] += p->conv_bias[first + c];
    for (i64 i = 0; i + 1 < taps; i++) {  // in this order, as they may be the memory that was read
        if (dense) memmove(to + i * p->to_tap, x[i + 1], width * sizeof(float));
        for (i64 c = 0; !dense && c < width; c++) to[c * p->to_channel + i * p->to_tap] = x[i + 1][c];
    }
    SWEEP(width, {
        vec z[FEW];
        EACH z[k] = load(y + c + k * LANES, n);
        silus(z, count);
        EACH store(y + c + k * LANES, z[k], n);
    });
}

INLINE float dot(const float *x, const float *y, i64 size) {
    vec sum[FEW] = {0};
    SWEEP(size, EACH sum[k] += load(x + c + k * LANES, n) * load(y + c + k * LANES, n));
    return total((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

static void make_unit(float *x, i64 size, float scale) {
    const float factor = scale / sqrtf(square_sum(x, size) + 1e-6f);
    for (i64 i = 0; i < size; i++) x[i] *= factor;
}

static void map_features(float *x, i64 size) {  // elu(x) + 1
    SWEEP(size, {
        vec z[FEW], e[FEW];
        EACH z[k] = load(x + c + k * LANES, n);
        EACH e[k] = -z[k];
        exponentials(e, count);
        EACH {
            const ivec above = z[k] > 0;
            store(x + c + k * LANES, (vec)((above & (ivec)(z[k] + 1.f)) | (~above & (ivec)e[k])), n);
        }
    });
}

// q and k of a key head as the rule uses them; q is scaled.
INLINE void find_keys(const Part *p, const float *new, i64 row, i64 head, float *q, float *k) {
    const i64 keys = p->key_dim;
    const float scale = p->scaled ? 1.f / sqrtf((float)keys) : 1.f;
    convolve(p, new, row, head * keys, keys, q);
    convolve(p, new, row, (p->heads + head) * keys, keys, k);
    if (p->features == UNIT) {
        make_unit(q, keys, scale);
        make_unit(k, keys, 1.f);
        return;
    }
    if (p->features == MAP) map_features(q, keys), map_features(k, keys);
    for (i64 i = 0; i < keys; i++) q[i] *= scale;
}

// Whether value heads are units of their own, as there are fewer key heads than threads: their q and k are found before.
INLINE int is_apart(const Step *a, const Part *p) { return p->shared > 1 && a->rows * p->heads < a->threads; }

static void prepare_keys(const Team *team, const Part *p, i64 unit) {
    const i64 row = unit / p->heads, head = unit % p->heads, keys = p->key_dim;
    float *new = team->entered + row * p->in.out, q[WIDEST], k[WIDEST];
    find_keys(p, new, row, head, q, k);
    memcpy(new + head * keys, q, keys * sizeof(float));
    memcpy(new + (p->heads + head) * keys, k, keys * sizeof(float));
}

INLINE float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// The decay of a raw gate with a bias.
static float decay_of(const Part *p, float gate, float A_log) {
    const float speed = expf(A_log);
    if (p->lower_bound != 0) return expf((float)p->lower_bound / (1.f + expf(-speed * gate)));
    return expf(-speed * softplus(gate));
}

// sigmoid(gate)^(1 / temperature)
static float root_of(const Part *p, float gate) {
    return expf(((gate < 0 ? gate : 0) - log1pf(expf(-fabsf(gate)))) / (float)p->temperature);
}

// The decays of a value head, one a key channel; returns what its value is multiplied by.
INLINE float find_decays(const Part *p, const float *gates, i64 each, float *decay) {
    const i64 keys = p->key_dim, count = p->per_channel ? keys : 1, first = each * count;
    float factor = 1;
    for (i64 i = 0; i < count; i++) {
        if (p->decays == NO_DECAY) decay[i] = 1;
        else if (p->decays == ROOT) decay[i] = root_of(p, gates[first + i]);
        else if (p->decays == SPEED) decay[i] = decay_of(p, gates[first + i] + p->dt_bias[first + i], p->A_log[each]);
        else {
            float step = softplus(gates[first + i] + p->dt_bias[first + i]);
            step = step < (float)p->step_least ? (float)p->step_least : step;
            factor = step > (float)p->step_most ? (float)p->step_most : step;
            decay[i] = expf(-expf(p->A_log[each]) * factor);
        }
    }
    for (i64 i = count; i < keys; i++) decay[i] = decay[0];
    return factor;
}

#if defined(__AVX512F__) || defined(__ARM_NEON)  // 32 registers
enum { COLUMNS = 8 };  // vectors of columns of the memory that are read at a time
#else
enum { COLUMNS = 4 };
#endif
// Numbers of the memory between what is fetched and what is read, as processors stop at pages; and whether lines that
// will be written are fetched: processors that write whole lines without reading them lose by that. FETCH_HEAD: whether
// the memory of the next head is fetched while this one's is written.
#if defined(__ARM_NEON)
enum { AHEAD = 2048, FETCH_WRITTEN = 0, FETCH_HEAD = 1 };
#else
enum { AHEAD = 4096, FETCH_WRITTEN = 1, FETCH_HEAD = 0 };
#endif

// n numbers of a memory from place `at` on; narrow is known to the compiler.
INLINE vec load_memory(const void *S, i64 at, i64 n, int narrow) {
    if (!narrow) return load((const float *)S + at, n);
    half_vec y = {0};
    if (__builtin_constant_p(n) && n == LANES)
        y = *(const half_vec *)((const uint16_t *)S + at);
    else
        memcpy(&y, (const uint16_t *)S + at, n * sizeof(uint16_t));
    return widen_bfloat16(y);
}

// Rounds to the nearest bfloat16, ties to even, as torch does; nothing is added to NaN, whose bits might overflow.
INLINE void store_memory(void *T, i64 at, vec x, i64 n, int narrow) {
    if (!narrow) {
        store((float *)T + at, x, n);
        return;
    }
    const uvec bits = (uvec)x, number = (uvec)(x == x);
    const uvec rounded = (bits + (number & (((bits >> 16) & 1) + 0x7fff))) >> 16;
    const half_vec y = __builtin_convertvector(rounded, half_vec);
    if (__builtin_constant_p(n) && n == LANES)
        *(half_vec *)((uint16_t *)T + at) = y;
    else
        memcpy((uint16_t *)T + at, &y, n * sizeof(uint16_t));
}

// What the decayed memory answers to k and q in n * LANES columns (less in the last vector), from place `at` on. T will
// be written.
INLINE void read_columns(const void *S, const void *T, i64 at, const float *k, const float *q, i64 keys, i64 width,
                         int vectors, i64 last, float *of_k, float *of_q, int narrow) {
    const i64 bytes = narrow ? 2 : 4;
    vec a[COLUMNS] = {0}, b[COLUMNS] = {0};
    for (i64 i = 0; i < keys; i++, at += width)
        _Pragma("GCC unroll 8") for (int j = 0; j < vectors; j++) {
            if (j * LANES % (64 / bytes) == 0) {
                __builtin_prefetch((const char *)S + (at + AHEAD + j * LANES) * bytes);
                if (FETCH_WRITTEN) __builtin_prefetch((const char *)T + (at + j * LANES) * bytes, 1);
            }
            const vec s = load_memory(S, at + j * LANES, j + 1 == vectors ? last : LANES, narrow);
            a[j] += k[i] * s;
            b[j] += q[i] * s;
        }
    _Pragma("GCC unroll 8") for (int j = 0; j < vectors; j++) {
        store(of_k + j * LANES, a[j], j + 1 == vectors ? last : LANES);
        store(of_q + j * LANES, b[j], j + 1 == vectors ? last : LANES);
    }
}

// n * LANES columns (less in the last vector) of a memory that only accumulates, from place `at` on, in one pass:
// T = decay S + k v^T, and what T answers to q.
INLINE void add_columns(const void *S, void *T, i64 at, const float *decay, const float *k, const float *q,
                        const float *v, i64 keys, i64 width, int vectors, i64 last, float *of_q, int narrow) {
    const i64 bytes = narrow ? 2 : 4;
    vec sum[COLUMNS] = {0}, value[COLUMNS];
    _Pragma("GCC unroll 8") for (int j = 0; j < vectors; j++) value[j] =
        load(v + j * LANES, j + 1 == vectors ? last : LANES);
    for (i64 i = 0; i < keys; i++, at += width)
        _Pragma("GCC unroll 8") for (int j = 0; j < vectors; j++) {
            const i64 n = j + 1 == vectors ? last : LANES, place = at + j * LANES;
            if (j * LANES % (64 / bytes) == 0) {
                __builtin_prefetch((const char *)S + (place + AHEAD) * bytes);
                if (FETCH_WRITTEN) __builtin_prefetch((const char *)T + (place + AHEAD) * bytes, 1);
            }
            const vec s = decay[i] * load_memory(S, place, n, narrow) + k[i] * value[j];
            store_memory(T, place, s, n, narrow);
            sum[j] += q[i] * s;
        }
    _Pragma("GCC unroll 8") for (int j = 0; j < vectors; j++)
        store(of_q + j * LANES, sum[j], j + 1 == vectors ? last : LANES);
}

// The rule of one row: a key head with all of its value heads, or a value head. narrow and corrects are known to the
// compiler.
INLINE void mix_memory(const Team *team, const Part *p, i64 unit, int narrow, int corrects) {
    const i64 keys = p->key_dim, width = p->value_dim, columns = width + p->divides, values = p->heads * p->shared;
    const int apart = is_apart(&team->call, p);
    const i64 row = unit / (apart ? values : p->heads), own = unit % (apart ? values : p->heads);
    const i64 begin = apart ? own : own * p->shared, end = begin + (apart ? 1 : p->shared), head = begin / p->shared;
    float *new = team->entered + row * p->in.out;
    float q[WIDEST], k[WIDEST], v[WIDEST], decay[WIDEST], dk[WIDEST], dq[WIDEST], of_k[WIDEST], of_q[WIDEST];
    if (apart) {
        memcpy(q, new + head * keys, keys * sizeof(float));
        memcpy(k, new + (p->heads + head) * keys, keys * sizeof(float));
    } else
        find_keys(p, new, row, head, q, k);
    const float common = corrects ? dot(q, k, keys) : 0;
    const float *gates = p->decay.kind == ABSENT ? new + p->at_decay : team->decay + row * p->decay.out;
    const float *opened = p->gate.kind == ABSENT ? new + p->at_gate : team->gate + row * p->gate.out;
    for (i64 each = begin; each < end; each++) {
        convolve(p, new, row, 2 * p->heads * keys + each * width, width, v);
        const float factor = find_decays(p, gates, each, decay);
        const i64 bytes = narrow ? 2 : 4, first = each * keys * columns;
        const void *S = (const char *)p->memory_from + (row * p->memory_from_row + first) * bytes;
        void *T = (char *)p->memory_to + (row * p->memory_to_row + first) * bytes;
        i64 c = 0;
        if (corrects) {
            for (i64 i = 0; i < keys; i++) dk[i] = decay[i] * k[i], dq[i] = decay[i] * q[i];
            const float beta = (float)p->beta_scale / (1.f + expf(-new[p->at_write + each]));
            for (; c + COLUMNS * LANES <= width; c += COLUMNS * LANES)
                read_columns(S, T, c, dk, dq, keys, width, COLUMNS, LANES, of_k + c, of_q + c, narrow);
            for (; c < width; c += LANES)
                read_columns(S, T, c, dk, dq, keys, width, 1, least(LANES, width - c), of_k + c, of_q + c, narrow);
            for (c = 0; c < width; c++) {
                v[c] = beta * (v[c] - of_k[c]);
                of_q[c] += common * v[c];
            }
            for (i64 i = 0; i < keys; i++) {
                const float d = decay[i], key = k[i];
                for (i64 line = 0; FETCH_HEAD && line < width * bytes; line += 64)
                    __builtin_prefetch((const char *)S + (keys + i) * width * bytes + line, 0, 2);
                SWEEP(width, EACH {
                    const i64 at = c + k * LANES, place = i * width + at;
                    store_memory(T, place, d * load_memory(S, place, n, narrow) + key * load(v + at, n), n, narrow);
                });
            }
        } else {
            float *value = of_k;
            for (i64 i = 0; i < width; i++) value[i] = factor * v[i];
            if (p->divides) value[width] = 1;
            for (; c + COLUMNS * LANES <= columns; c += COLUMNS * LANES)
                add_columns(S, T, c, decay, k, q, value + c, keys, columns, COLUMNS, LANES, of_q + c, narrow);
            for (; c + FEW * LANES <= columns; c += FEW * LANES)
                add_columns(S, T, c, decay, k, q, value + c, keys, columns, FEW, LANES, of_q + c, narrow);
            for (; c + LANES <= columns; c += LANES)
                add_columns(S, T, c, decay, k, q, value + c, keys, columns, 1, LANES, of_q + c, narrow);
            if (c < columns)
                add_columns(S, T, c, decay, k, q, value + c, keys, columns, 1, columns - c, of_q + c, narrow);
            if (p->divides) {  // kept away from 0, as ops.divide_by_last does
                const float sum = fabsf(of_q[width]) < 1e-6f ? copysignf(1e-6f, of_q[width]) : of_q[width];
                for (i64 i = 0; i < width; i++) of_q[i] /= sum;
            }
            for (i64 i = 0; p->skip && i < width; i++) of_q[i] += p->skip[each] * v[i];
        }
        float *out = team->mixed + (row * values + each) * width, *open = of_k;
        if (p->activation != NONE) {
            const float *z = opened + each * width;
            if (p->norm_groups && !p->gate_first) open = new + p->at_gate + each * width;  // for normalize_groups
            SWEEP(width, {
                vec gate[FEW], on[FEW], off[FEW];
                EACH gate[k] = load(z + c + k * LANES, n);
                sigmoids(gate, on, off, count);
                if (p->activation == SILU) EACH on[k] *= gate[k];
                EACH store(open + c + k * LANES, on[k], n);
            });
        }
        if (!p->norm_groups) normalize(&p->out_norm, of_q, p->activation == NONE ? NULL : open, out, width);
        else if (p->activation == NONE || !p->gate_first) memcpy(out, of_q, width * sizeof(float));
        else
            for (i64 i = 0; i < width; i++) out[i] = of_q[i] * open[i];
    }
}

static void mix_head(const Team *team, const Part *p, i64 unit) {
    if (p->corrects && p->memory_narrow) mix_memory(team, p, unit, 1, 1);
    else if (p->corrects) mix_memory(team, p, unit, 0, 1);
    else if (p->memory_narrow) mix_memory(team, p, unit, 1, 0);
    else mix_memory(team, p, unit, 0, 0);
}

// ---- attention -----------------------------------------------------------------------------------------------------

static void turn(const Part *p, i64 row, float *x) {
    const i64 half = p->rotary / 2;
    const float *cos = p->cos + row * half, *sin = p->sin + row * half;
    for (i64 i = 0; i < half; i++) {
        const float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

// Tokens whose keys or values stay in the nearest caches while all queries of their head read them.
enum { NEAR = 32 };
enum { SUMS = LANES == 8 ? 8 : 16 };  // vectors of sums that stay in registers

// sum += weight_j value_j for the tokens from first on, `tokens` of them, `apart` numbers from one to the next
INLINE void add_values(float *sum, const float *weights, const float *values, i64 tokens, i64 apart, i64 d) {
    i64 c = 0;
    for (; c + SUMS * LANES <= d; c += SUMS * LANES) {
        vec own[SUMS];
        _Pragma("GCC unroll 16") for (int k = 0; k < SUMS; k++) own[k] = load(sum + c + k * LANES, LANES);
        for (i64 j = 0; j < tokens; j++)
            _Pragma("GCC unroll 16") for (int k = 0; k < SUMS; k++)
                own[k] += weights[j] * load(values + j * apart + c + k * LANES, LANES);
        _Pragma("GCC unroll 16") for (int k = 0; k < SUMS; k++) store(sum + c + k * LANES, own[k], LANES);
    }
    for (; c + LANES <= d; c += LANES) {
        vec own = load(sum + c, LANES);
        for (i64 j = 0; j < tokens; j++) own += weights[j] * load(values + j * apart + c, LANES);
        store(sum + c, own, LANES);
    }
    if (c < d) {
        const i64 n = d - c;
        vec own = load(sum + c, n);
        for (i64 j = 0; j < tokens; j++) own += weights[j] * load(values + j * apart + c, n);
        store(sum + c, own, n);
    }
}

// The room that attend_head needs, in numbers: queries, sums and scores of the queries of a head
INLINE i64 attention_room(const Part *p, i64 tokens) {
    return p->query_heads / p->kv_heads * (2 * p->head_dim + (tokens / LANES + 1) * LANES);
}

// scores_j = q . key_j scale, with the bits of `dot`: four keys at a time, for which q is loaded once
INLINE void score_keys(float *scores, const float *q, const float *keys, i64 tokens, i64 apart, i64 d, float scale) {
    enum { KEYS = 4, STEP = FEW * LANES };
    i64 j = 0;
    for (; d % STEP == 0 && j + KEYS <= tokens; j += KEYS) {
        vec sum[KEYS][FEW] = {0};
        for (i64 c = 0; c < d; c += STEP) {
            vec own[FEW];
            _Pragma("GCC unroll 4") for (int k = 0; k < FEW; k++) own[k] = load(q + c + k * LANES, LANES);
            _Pragma("GCC unroll 4") for (int i = 0; i < KEYS; i++)
                _Pragma("GCC unroll 4") for (int k = 0; k < FEW; k++)
                    sum[i][k] += own[k] * load(keys + (j + i) * apart + c + k * LANES, LANES);
        }
        _Pragma("GCC unroll 4") for (int i = 0; i < KEYS; i++)
            scores[j + i] = total((sum[i][0] + sum[i][1]) + (sum[i][2] + sum[i][3])) * scale;
    }
    for (; j < tokens; j++) scores[j] = dot(q, keys + j * apart, d) * scale;
}

static void attend_head(const Team *team, const Part *p, i64 unit, float *room) {
    const i64 row = unit / p->kv_heads, head = unit % p->kv_heads, d = p->head_dim, tokens = p->lengths[row] + 1;
    const i64 group = p->query_heads / p->kv_heads, wide = p->query_heads * d, span = (tokens / LANES + 1) * LANES;
    const float *new = team->entered + row * p->in.out;
    const float *gates = new + wide, *of_keys = new + (p->gated ? 2 : 1) * wide, *of_values = of_keys + p->kv_heads * d;
    const float *keys = p->keys + row * p->keys_row + head * d, *values = p->values + row * p->values_row + head * d;
    float *key = p->keys + row * p->keys_row + (tokens - 1) * p->keys_token + head * d;
    float *queries = room, *sums = queries + group * d, *scores = sums + group * d;
    normalize(&p->k_norm, of_keys + head * d, NULL, key, d);
    turn(p, row, key);
    memcpy(p->values + row * p->values_row + (tokens - 1) * p->values_token + head * d, of_values + head * d,
           d * sizeof(float));
    for (i64 i = 0; i < group; i++) {
        normalize(&p->q_norm, new + (head * group + i) * d, NULL, queries + i * d, d);
        turn(p, row, queries + i * d);
    }
    for (i64 first = 0; first < tokens; first += NEAR)
        for (i64 i = 0; i < group; i++)
            score_keys(scores + i * span + first, queries + i * d, keys + first * p->keys_token,
                       least(NEAR, tokens - first), p->keys_token, d, (float)p->scale);
    for (i64 i = 0; i < group; i++) {
        float *own = scores + i * span, most = -INFINITY;
        for (i64 j = 0; j < tokens; j++) most = own[j] > most ? own[j] : most;
        SWEEP(tokens, {
            vec e[FEW];
            EACH e[k] = most - load(own + c + k * LANES, n);
            exponentials(e, count);
            EACH store(own + c + k * LANES, e[k], n);
        });
    }
    memset(sums, 0, group * d * sizeof(float));
    for (i64 first = 0; first < tokens; first += NEAR)
        for (i64 i = 0; i < group; i++)
            add_values(sums + i * d, scores + i * span + first, values + first * p->values_token,
                       least(NEAR, tokens - first), p->values_token, d);
    for (i64 i = 0; i < group; i++) {
        float all = 0, *out = team->mixed + row * wide + (head * group + i) * d;
        for (i64 j = 0; j < tokens; j++) all += scores[i * span + j];
        for (i64 c = 0; c < d; c++) {
            const float opened = p->gated ? 1.f / (1.f + expf(-gates[(head * group + i) * d + c])) : 1.f;
            out[c] = sums[i * d + c] / all * opened;
        }
    }
}

// ---- stages --------------------------------------------------------------------------------------------------------

// Whether units of a stage are left that no thread has taken.
static int has_units(const Team *team, const Stage *s) {
    const i64 units = s->units, ranges = team->call.threads;
    for (i64 range = 0; range < ranges; range++)
        if (range_first(units, ranges, range) + atomic_load(&s->next[range]) < range_first(units, ranges, range + 1))
            return 1;
    return 0;
}

INLINE void pause_a_moment(i64 *spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
    if (++*spins % 1024 == 0) sched_yield();
}

static void work(const void *call, i64 thread) {
    const Team *team = call;
    char *scratch = team->scratch + thread * team->scratch_bytes;
    for (i64 i = 0; i < team->stages; i++) {
        Stage *s = team->stage + i;
        const Part *p = team->call.part + s->part;
        if (has_units(team, s)) {
            Input input, more;
            if (s->stage == ENTER)
                input = enter(team, p, &p->in, team->call.x, team->call.hidden, ENTER,
                              p->kind == HEAD ? p->made : team->entered, scratch);
            const i64 decays = s->stage == LOW_RANK ? units_of(&team->call, &p->decay) : 0;
            const i64 gates = s->stage == LOW_RANK ? units_of(&team->call, &p->gate) : 0;
            if (s->stage == LOW_RANK) {
                if (decays)
                    input = enter(team, p, &p->decay, team->entered + p->at_decay, p->in.out, LOW_RANK, team->decay,
                                  scratch);
                if (gates)
                    more = enter(team, p, &p->gate, team->entered + p->at_gate, p->in.out, LOW_RANK, team->gate,
                                 scratch + team->scratch_bytes / 2);
            }
            if (s->stage == LEAVE)
                input = enter(team, p, &p->out, p->kind == FEED ? team->entered : team->mixed,
                              p->kind == FEED ? p->in.out : p->out.size, LEAVE, team->left, scratch);
            i64 range = thread, tried = 0;
            for (i64 unit; (unit = take_unit(s->next, s->units, team->call.threads, &range, &tried)) >= 0;) {
                if (s->stage == ENTER) multiply(team, &p->in, &input, unit, NULL);
                else if (s->stage == LEAVE) multiply(team, &p->out, &input, unit, team->call.x);
                else if (s->stage == LOW_RANK && unit < decays) multiply(team, &p->decay, &input, unit, NULL);
                else if (s->stage == LOW_RANK && unit < decays + gates)
                    multiply(team, &p->gate, &more, unit - decays, NULL);
                else if (s->stage == LOW_RANK) prepare_keys(team, p, unit - decays - gates);
                else if (p->kind == RULE) mix_head(team, p, unit);
                else attend_head(team, p, unit, (float *)scratch);
                atomic_fetch_add(&s->done, 1);
            }
        }
        for (i64 spins = 0; atomic_load(&s->done) < s->units;) pause_a_moment(&spins);
    }
}

INLINE void widen_to(i64 *widest, i64 size) { *widest = most(*widest, size); }

int lineate_step(const Step *a) {
    i64 entered = 1, low = 1, gate = 1, mixed = 1, left = 1, widest = 1, room = 1;
    const i64 threads = most(1, a->threads);
    if (!a->x && !has_rows(a)) return NO_SUCH_ROW;
    Stage *stage = calloc(a->parts * STAGES, sizeof(Stage) + threads * sizeof(atomic_llong));
    if (!stage) return NO_MEMORY;
    atomic_llong *taken = (atomic_llong *)(stage + a->parts * STAGES);
    i64 stages = 0;
    for (i64 i = 0; i < a->parts; i++) {
        const Part *p = a->part + i;
        const i64 low_rank = p->kind == RULE ? units_of(a, &p->decay) + units_of(a, &p->gate) : 0;
        const int apart = p->kind == RULE && is_apart(a, p);
        const i64 heads = p->kind == RULE ? p->heads * (apart ? p->shared : 1) : p->kind == ATTENTION ? p->kv_heads : 0;
        const i64 keys = apart ? p->heads * a->rows : 0;
        const i64 units[STAGES] = {units_of(a, &p->in), low_rank + keys, heads * a->rows, units_of(a, &p->out)};
        for (i64 j = 0; j < STAGES; j++)
            if (units[j]) {
                stage[stages].part = i, stage[stages].stage = j, stage[stages].units = units[j];
                stage[stages].next = taken + stages * threads;
                stages++;
            }
        if (p->kind != HEAD) widen_to(&entered, p->in.out);
        widen_to(&widest, p->in.size);
        widen_to(&mixed, p->out.size), widen_to(&widest, p->out.size);
        widen_to(&left, p->out.out);
        if (low_rank) {
            widen_to(&low, p->decay.out), widen_to(&gate, p->gate.out);
            widen_to(&widest, p->decay.size), widen_to(&widest, p->gate.size);
        }
        for (i64 row = 0; p->kind == ATTENTION && row < a->rows; row++)
            widen_to(&room, attention_room(p, p->lengths[row] + 1));
    }
    const i64 more = most(lineate_quantised_scratch(a->rows, widest), a->rows * widest * (i64)sizeof(float));
    const i64 own = a->rows * widest * (i64)sizeof(float) + more + 128;
    const i64 scratch = 2 * (most(own, room * (i64)sizeof(float)) / 64 + 1) * 64;
    const i64 buffers = a->rows * (entered + low + gate + mixed + left + (a->x ? 0 : a->hidden)) + 80;
    float *memory = malloc(buffers * sizeof(float) + threads * scratch + 64);
    if (!memory) {
        free(stage);
        return NO_MEMORY;
    }
    Team team = {.call = *a, .stages = stages, .stage = stage, .entered = memory, .widest = widest,
                 .scratch = (char *)(((uintptr_t)(memory + buffers) + 63) / 64 * 64), .scratch_bytes = scratch};
    team.call.threads = threads;
    team.decay = team.entered + a->rows * entered;
    team.gate = team.decay + a->rows * low;
    team.mixed = team.gate + a->rows * gate;
    team.left = team.mixed + a->rows * mixed;
    if (!a->x) look_up(a, team.call.x = team.left + a->rows * left);
    lineate_spread(work, &team, threads, INT64_MAX / 4, threads);
    free(memory);
    free(stage);
    return 0;
}
