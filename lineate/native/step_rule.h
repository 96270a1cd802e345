// The rule of a mixer with a memory, for one token of a row: convolution, features, decay, write and read, norm and gate.
// layers/step/spec.py says which of these a mixer has.
#pragma once
#include "step.h"

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

// Key `write` of a key head as the rule uses it.
INLINE void find_key(const Part *p, const float *new, i64 row, i64 head, i64 write, float *k) {
    const i64 keys = p->key_dim;
    convolve(p, new, row, ((1 + write) * p->heads + head) * keys, keys, k);
    if (p->features == UNIT) make_unit(k, keys, 1.f);
    else if (p->features == MAP) map_features(k, keys);
}

// q and the first key of a key head as the rule uses them; q is scaled.
INLINE void find_keys(const Part *p, const float *new, i64 row, i64 head, float *q, float *k) {
    const i64 keys = p->key_dim;
    const float scale = p->scaled ? 1.f / sqrtf((float)keys) : 1.f;
    find_key(p, new, row, head, 0, k);
    convolve(p, new, row, head * keys, keys, q);
    if (p->features == UNIT) {
        make_unit(q, keys, scale);
        return;
    }
    if (p->features == MAP) map_features(q, keys);
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
    for (i64 j = 1; j < p->writes; j++) {
        find_key(p, new, row, head, j, k);
        memcpy(new + ((1 + j) * p->heads + head) * keys, k, keys * sizeof(float));
    }
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

// What the output projection reads of one head: norm(y) * act(z). room: for the activated gate; kept: where it stays for
// normalize_groups.
INLINE void leave_head(const Part *p, float *kept, const float *z, i64 width, float *y, float *room, float *out) {
    float *open = room;
    if (p->activation != NONE) {
        if (p->norm_groups && !p->gate_first) open = kept;
        SWEEP(width, {
            vec gate[FEW], on[FEW], off[FEW];
            EACH gate[k] = load(z + c + k * LANES, n);
            sigmoids(gate, on, off, count);
            if (p->activation == SILU) EACH on[k] *= gate[k];
            EACH store(open + c + k * LANES, on[k], n);
        });
    }
    if (!p->norm_groups) normalize(&p->out_norm, y, p->activation == NONE ? NULL : open, out, width);
    else if (p->activation == NONE || !p->gate_first) memcpy(out, y, width * sizeof(float));
    else
        for (i64 i = 0; i < width; i++) out[i] = y[i] * open[i];
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
        float *out = team->mixed + (row * values + each) * width;
        leave_head(p, new + p->at_gate + each * width, opened + each * width, width, of_q, of_k, out);
    }
}

// rate_c = scale sigmoid(x_c)
static void find_rates(const float *x, float scale, i64 size, float *rate) {
    SWEEP(size, {
        vec z[FEW], on[FEW], off[FEW];
        EACH z[k] = load(x + c + k * LANES, n);
        sigmoids(z, on, off, count);
        EACH store(rate + c + k * LANES, scale * on[k], n);
    });
}

// The same for several writes a token, each of which corrects what the ones before it have left, and for rates of the
// channels (erase, write). All writes read the decayed memory S' and what the others have written by their keys alone:
//   r_j = beta_j (v_j - S'^T e_j - sum_{i<j} (e_j . k_i) r_i)      o = S'^T q + sum_j (k_j . q) r_j
//   T = S' + sum_j k_j r_j^T
INLINE void mix_writes(const Team *team, const Part *p, i64 unit, int narrow) {
    const i64 keys = p->key_dim, width = p->value_dim, values = p->heads * p->shared, writes = p->writes;
    const int apart = is_apart(&team->call, p);
    const i64 row = unit / (apart ? values : p->heads), own = unit % (apart ? values : p->heads);
    const i64 begin = apart ? own : own * p->shared, end = begin + (apart ? 1 : p->shared), head = begin / p->shared;
    float *new = team->entered + row * p->in.out;
    float q[WIDEST], key[MOST_WRITES][WIDEST], value[MOST_WRITES][WIDEST], decay[WIDEST], probe[WIDEST], rate[WIDEST];
    float dk[WIDEST], dq[WIDEST], of_k[WIDEST], of_q[WIDEST];
    if (apart) {
        memcpy(q, new + head * keys, keys * sizeof(float));
        for (i64 j = 0; j < writes; j++)
            memcpy(key[j], new + ((1 + j) * p->heads + head) * keys, keys * sizeof(float));
    } else {
        find_keys(p, new, row, head, q, key[0]);
        for (i64 j = 1; j < writes; j++) find_key(p, new, row, head, j, key[j]);
    }
    const float *gates = p->decay.kind == ABSENT ? new + p->at_decay : team->decay + row * p->decay.out;
    const float *opened = p->gate.kind == ABSENT ? new + p->at_gate : team->gate + row * p->gate.out;
    for (i64 each = begin; each < end; each++) {
        find_decays(p, gates, each, decay);
        const i64 bytes = narrow ? 2 : 4, first = each * keys * width;
        const void *S = (const char *)p->memory_from + (row * p->memory_from_row + first) * bytes;
        void *T = (char *)p->memory_to + (row * p->memory_to_row + first) * bytes;
        for (i64 i = 0; i < keys; i++) dq[i] = decay[i] * q[i];
        for (i64 j = 0; j < writes; j++) {
            float *v = value[j], beta = 1;
            convolve(p, new, row, (1 + writes) * p->heads * keys + (j * values + each) * width, width, v);
            memcpy(probe, key[j], keys * sizeof(float));
            if (p->channel_rates) {
                find_rates(new + p->at_erase + each * keys, (float)p->beta_scale, keys, rate);
                for (i64 i = 0; i < keys; i++) probe[i] *= rate[i];
                find_rates(new + p->at_write + each * width, 1, width, rate);
                for (i64 i = 0; i < width; i++) v[i] *= rate[i];
            } else
                beta = (float)p->beta_scale / (1.f + expf(-new[p->at_write + j * values + each]));
            for (i64 i = 0; i < keys; i++) dk[i] = decay[i] * probe[i];
            i64 c = 0;
            for (; c + COLUMNS * LANES <= width; c += COLUMNS * LANES)
                read_columns(S, T, c, dk, dq, keys, width, COLUMNS, LANES, of_k + c, of_q + c, narrow);
            for (; c < width; c += LANES)
                read_columns(S, T, c, dk, dq, keys, width, 1, least(LANES, width - c), of_k + c, of_q + c, narrow);
            for (i64 i = 0; i < j; i++) {
                const float shared = dot(probe, key[i], keys);
                for (c = 0; c < width; c++) of_k[c] += shared * value[i][c];
            }
            for (c = 0; c < width; c++) v[c] = beta * (v[c] - of_k[c]);
        }
        for (i64 j = 0; j < writes; j++) {
            const float common = dot(q, key[j], keys);
            for (i64 c = 0; c < width; c++) of_q[c] += common * value[j][c];
        }
        for (i64 i = 0; i < keys; i++) {
            const float d = decay[i];
            float at_i[MOST_WRITES];
            for (i64 j = 0; j < writes; j++) at_i[j] = key[j][i];
            SWEEP(width, EACH {
                const i64 at = c + k * LANES, place = i * width + at;
                vec sum = d * load_memory(S, place, n, narrow);
                for (i64 j = 0; j < writes; j++) sum += at_i[j] * load(value[j] + at, n);
                store_memory(T, place, sum, n, narrow);
            });
        }
        float *out = team->mixed + (row * values + each) * width;
        leave_head(p, new + p->at_gate + each * width, opened + each * width, width, of_q, of_k, out);
    }
}

static void mix_head(const Team *team, const Part *p, i64 unit) {
    if (p->writes > 1 || p->channel_rates) {
        if (p->memory_narrow) mix_writes(team, p, unit, 1);
        else mix_writes(team, p, unit, 0);
    } else if (p->corrects && p->memory_narrow) mix_memory(team, p, unit, 1, 1);
    else if (p->corrects) mix_memory(team, p, unit, 0, 1);
    else if (p->memory_narrow) mix_memory(team, p, unit, 1, 0);
    else mix_memory(team, p, unit, 0, 0);
}
