// A decoding step on a CPU: one token a row through a run of parts of a model, in float32; memories may be bfloat16.
//
//   rule        x += out(norm(mix(convolution, gates, memory)) * act(z)),  the input of mix being in(norm(x));
//               a memory is decayed, then corrected or added to; every mixer of layers/step/spec.py is such a part
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
#include "step.h"
#include "step_rule.h"
#include "threads.h"
#include "vectors.h"

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
