// The rules of the general row for a CPU, in float32: the same equations and names as forms/general_chunk.py, but for the
// sign of e, which is -e here, so that every line is a sum. c tokens with n writes each are m = n c writes.
//
// One unit of work is one key head of one sequence, as in chunkwise.c. The readers are q (c rows) above e (m rows); the
// writers are k, and d above which it lies where what is erased is not k. Scores are P above M, for each writer w:
//
//   P_ij = sum_x q_ix w_jx e^{G_ix - G_jx}  (write j is of token i or an earlier one)
//   M_ij = the same with e_i for q_i        (j < i)
//
//   d = k:   (I - M) R = U + Er S              O = Qr S + P R                S_next = e^{G_c} S + Kw^T R
//   d != k:  (I - M_d) R = Er S + M U          O = Qr S + P U + P_d R        S_next = e^{G_c} S + Kw^T U + Dw^T R
#include "rules.h"

// ---- the call ------------------------------------------------------------------------------------------------------

typedef struct {  // words of 64 bits, filled in by general.py; k, v and beta have n t tokens: all writes
    i64 b, t, h, group, key_dim, value_dim, chunk, sequences;
    i64 decay, writes, normalize, threads;
    Tensor q, k, v, log_decay, beta, erase, write, probe, direction, output;  // a gate that is absent has no data
    Tensor doutput, dq, dk, dv, dlog_decay, dbeta, derase, dwrite, dprobe, ddirection;
    const float *state, *dfinal;      // sequences hv k v
    float *final, *states, *dstate;   // states: n b hv k v, or NULL
    const i64 *starts, *first_chunk;  // sequences + 1, sequences; NULL: every row is one sequence
    double scale;
} Call;

INLINE int has(const Tensor *x) { return x->data != NULL; }
INLINE int sides(const Call *a) { return 1 + has(&a->direction); }  // how many writers there are

// ---- scratch memory ------------------------------------------------------------------------------------------------

typedef struct {
    i64 c, m, rows, wide, all;        // tokens and writes at work, room for them, and for both
    i64 K, V, ldk, ldv, ldc, ldw;     // padded dims; leading dimensions
    float *X, *W;                     // all, K: q (scaled) above e; 2 wide, K: k above d
    float *XR, *WW;                   // the same with decay, as readers and writers of S
    const float *readers, *writers;   // X and W, or XR and WW
    float *ER, *EW, *last, *decay;    // c, K: e^{G_i}, e^{G_c - G_j}; K: e^{G_c}; c, K: e^{log_decay} per channel
    float *D;                         // c, m: e^{G_i - G_j} per head
    float *carry, *span, *reach, *T;  // as in chunkwise.c: wide, K; block, K; 2 blocks, K; a right operand, transposed
    float *raw, *SC;                  // all, wide: plain products of a key head; 2 all, wide: P above M, of k above d
    float *RD, *values;               // all, V: reads of S; 2 wide, V: what the writers are multiplied by
    float *beta, *norm, *gate;        // wide; rows + wide; K or V
    float *S;                         // group, K, V
    float *dU, *dSC, *dX, *dW, *dG;   // backward: wide, V; as SC, X and W; c, K
    float *IX, *IW, *sums, *dS;       // backward: inside of the chunk, as X and W; rows + wide, K: of the group; group, K, V
    double *G;                        // c
    ivec positive;                    // whether any log_decay was above 0
    int unstable;                     // whether any e . d was outside [0, 2]
    void *memory;
} Scratch;

static int allocate(Scratch *s, const Call *a, int mode) {
    const i64 T = mode != RECURRENT, B = mode == BACKWARD, tokens = least(a->chunk, a->t);
    s->positive = (ivec){0};
    s->unstable = 0;
    s->rows = T ? up(tokens, PAD_ROWS) : 1, s->wide = T ? up(tokens * a->writes, PAD_ROWS) : a->writes;
    s->all = s->rows + s->wide;
    s->K = up(a->key_dim, PAD_COLS), s->V = up(a->value_dim, PAD_COLS);
    s->ldk = s->K + SKEW, s->ldv = s->V + SKEW, s->ldc = up(s->wide, PAD_COLS) + SKEW;
    s->ldw = s->ldk > s->ldc ? s->ldk : s->ldc;
    const i64 rk = s->rows * s->ldk, ak = s->all * s->ldk, wk = 2 * s->wide * s->ldk, wv = s->wide * s->ldv;
    const i64 scores = s->all * s->ldc, state = T * a->group * s->K * s->ldv;
    const Part plan[] = {
        {&s->X, ak},          {&s->W, wk},          {&s->XR, ak},       {&s->WW, T * wk},     {&s->ER, rk},
        {&s->EW, rk},         {&s->last, s->ldk},   {&s->decay, rk},    {&s->D, s->rows * s->ldc},
        {&s->carry, rk},      {&s->span, BLOCK * s->ldk},               {&s->reach, 2 * BLOCK * s->ldk},
        {&s->T, T * (s->K > s->V ? s->K : s->V) * s->ldw},              {&s->raw, T * scores},
        {&s->SC, 2 * T * scores},                   {&s->RD, s->all * s->ldv},                {&s->values, 2 * wv},
        {&s->beta, s->ldc},   {&s->norm, s->all},   {&s->gate, s->K > s->V ? s->K : s->V},    {&s->S, state},
        {(float **)&s->G, 2 * s->rows},
        {&s->dU, B * wv},     {&s->dSC, 2 * B * scores},                {&s->dX, B * ak},     {&s->dW, B * wk},
        {&s->dG, B * rk},     {&s->IX, B * ak},     {&s->IW, wk},       {&s->sums, B * ak},   {&s->dS, B * state},
    };
    return allot(plan, sizeof plan / sizeof *plan, &s->memory);
}

// ---- what a chunk needs besides the state --------------------------------------------------------------------------

// Loads n rows of a key head, normalised if requested, and scaled; rows up to `room` are zero.
static void load_rows(Scratch *s, const Call *a, float *to, float *norms, const Tensor *from, i64 row, i64 start, i64 n, i64 room,
                      i64 head, float scale) {
    for (i64 i = 0; i < n; i++) {
        float *x = to + i * s->ldk;
        get(x, from, row, start + i, head, a->key_dim, s->K);
        norms[i] = a->normalize ? 1.f / sqrtf(dot(x, x, s->K) + 1e-6f) : 1.f;
        if (norms[i] * scale != 1.f) scale_to(x, x, norms[i] * scale, s->K);
    }
    clear(to + n * s->ldk, (room - n) * s->ldk);
}

// Loads q and k of one key head.
static void load_keys(Scratch *s, const Call *a, i64 row, i64 start, i64 c, i64 head) {
    s->c = c, s->m = c * a->writes;
    load_rows(s, a, s->X, s->norm, &a->q, row, start, c, s->rows, head, (float)a->scale);
    load_rows(s, a, s->W, s->norm + s->rows, &a->k, row, start * a->writes, s->m, s->wide, head, 1);
}

INLINE float *e_of(const Scratch *s) { return s->X + s->rows * s->ldk; }
INLINE float *d_of(const Scratch *s) { return s->W + s->wide * s->ldk; }

// Loads e, with its sign changed, and d of one value head.
static void load_erasing(Scratch *s, const Call *a, i64 row, i64 start, i64 head) {
    const i64 K = s->K, ldk = s->ldk;
    const int looks = !(has(&a->beta) && a->normalize);  // beta |k|^2 of unit keys is beta: see forms/stability.py
    for (i64 i = 0; i < s->m; i++) {
        float *e = e_of(s) + i * ldk, *k = s->W + i * ldk, *d = k;
        if (has(&a->probe)) {
            get(e, &a->probe, row, start + i, head, a->key_dim, K);
            scale_to(e, e, -1, K);
        } else if (has(&a->erase)) {
            get(e, &a->erase, row, start + i, head, a->key_dim, K);
            for (i64 x = 0; x < K; x += LANES) store(e + x, -load(e + x) * load(k + x));
        } else {
            get(s->beta + i, &a->beta, row, start * a->writes + i, head, 1, 1);
            scale_to(e, k, -s->beta[i], K);
        }
        if (has(&a->direction)) get(d = d_of(s) + i * ldk, &a->direction, row, start + i, head, a->key_dim, K);
        if (looks) {
            float gate = 0.f;  // one decay a head multiplies 1 - e . d
            if (a->decay == HEAD && i % a->writes == 0) get(&gate, &a->log_decay, row, start + i / a->writes, head, 1, 1);
            s->unstable |= fabsf(-dot(e, d, K) - 1.f) * expf(gate) > 1.02f;
        }
    }
    clear(e_of(s) + s->m * ldk, (s->wide - s->m) * ldk);
    if (has(&a->direction)) clear(d_of(s) + s->m * ldk, (s->wide - s->m) * ldk);
}

// Computes e^{G_i}, e^{G_c - G_j}, e^{G_c}, and D, from this value head's log_decay; per head, ER and EW have one column.
static void load_decay(Scratch *s, const Call *a, i64 row, i64 start, i64 head) {
    const i64 c = s->c, n = a->writes, K = s->K, ldk = s->ldk;
    if (a->decay == CHANNEL) {
        load_channel_decay(s->decay, &a->log_decay, row, start, head, c, a->key_dim, K, ldk, &s->positive);
        channel_factors(s->ER, s->EW, s->last, s->decay, c, K, ldk);
        return;
    }
    if (a->decay == NONE) {
        fill(s->last, 1, K);
        return;
    }
    double sum = 0;  // in double, what follows a reset keeps its digits; e^-1000 is as much 0 as e^-inf
    for (i64 i = 0; i < c; i++) {
        float x;
        get(&x, &a->log_decay, row, start + i, head, 1, 1);
        s->positive[0] |= x > 0;
        s->G[i] = sum += x < -1000.f ? -1000. : x;
    }
    for (i64 i = 0; i < c; i++) {
        float *D = s->D + i * s->ldc;
        for (i64 j = 0; j <= i; j++) D[j] = (float)(s->G[i] - s->G[j]);
        for (i64 j = 0; j <= i; j += LANES) store(D + j, exponential(load(D + j)));
        for (i64 j = n * (i + 1) - 1; n > 1 && j >= 0; j--) D[j] = D[j / n];
        s->ER[i * ldk] = (float)exp(s->G[i]), s->EW[i * ldk] = (float)exp(sum - s->G[i]);
    }
    fill(s->last, (float)exp(sum), K);
}

// y = x times the factors of each row's token; n rows a token. y may be x.
static void with_factors(const Scratch *s, const Call *a, float *y, const float *x, const float *factors, i64 tokens, i64 n) {
    for (i64 i = 0; i < tokens * n; i++) {
        const float *f = factors + i / n * s->ldk;
        if (a->decay == CHANNEL) times(y + i * s->ldk, x + i * s->ldk, f, s->K);
        else scale_to(y + i * s->ldk, x + i * s->ldk, *f, s->K);
    }
}

// How many writes row r of the scores sees; rows past the last are as those before them.
INLINE i64 seen(const Scratch *s, const Call *a, i64 r) { return least(r < s->rows ? a->writes * (r + 1) : r - s->rows, s->m); }
INLINE i64 token_of(const Scratch *s, const Call *a, i64 r) { return r < s->rows ? r : (r - s->rows) / a->writes; }
INLINE int is_row(const Scratch *s, i64 r) { return r < s->rows ? r < s->c : r - s->rows < s->m; }

// Computes products of q and of e with a writer, without decay, in tiles that have a pair j <= i.
static void plain_products(Scratch *s, const Call *a, const float *q, const float *e, const float *w, float *to) {
    transpose(s->wide, s->K, w, s->ldk, s->T, s->ldw);
    for (i64 r = 0; r < s->all; r += PAD_ROWS) {
        const i64 columns = least(r < s->rows ? a->writes * (r + PAD_ROWS) : r - s->rows + PAD_ROWS, s->wide);
        const float *left = r < s->rows ? q + r * s->ldk : e + (r - s->rows) * s->ldk;
        multiply(PAD_ROWS, up(columns, TILE), s->K, left, s->ldk, 1, s->T, s->ldw, to + r * s->ldc, s->ldc, 0);
    }
}

// Computes the products that the value heads of a group share, where e is beta k.
static void shared_products(Scratch *s, const Call *a) {
    if (has(&a->beta)) plain_products(s, a, s->X, s->W, s->W, s->raw);
}

static void head_scores(Scratch *s, const Call *a) {
    for (int side = 0; side < sides(a); side++) {
        float *to = s->SC + side * s->all * s->ldc, *from = has(&a->beta) ? s->raw : to;
        if (from == to) plain_products(s, a, s->X, e_of(s), s->W + side * s->wide * s->ldk, to);
        for (i64 r = 0; r < s->all; r++) {
            if (!is_row(s, r)) continue;
            float *score = to + r * s->ldc, *raw = from + r * s->ldc;
            const i64 stop = seen(s, a, r), whole = up(stop, LANES);
            const float factor = has(&a->beta) && r >= s->rows ? -s->beta[r - s->rows] : 1, *D = s->D + token_of(s, a, r) * s->ldc;
            if (a->decay == NONE) scale_to(score, raw, factor, whole);
            else
                for (i64 j = 0; j < whole; j += LANES) store(score + j, factor * load(raw + j) * load(D + j));
            clear(score + stop, s->ldc - stop);
        }
    }
}

INLINE float sum_of(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
#endif
}

// Row i of the scores with the writes [start, i] of its block, pair by pair.
INLINE void score_row(Scratch *s, i64 i, i64 start, const int sides) {
    const i64 K = s->K, ldk = s->ldk, own = i - start;
    const float *q = s->X + i * ldk, *e = e_of(s) + i * ldk, *k = s->W, *d = d_of(s);
    vec sum[4][BLOCK];
    for (int what = 0; what < 2 * sides; what++)
        for (i64 j = 0; j <= own; j++) sum[what][j] = (vec){0};
    for (i64 x = 0; x < K; x += 2 * LANES) {
        const vec q0 = load(q + x), q1 = load(q + x + LANES), e0 = load(e + x), e1 = load(e + x + LANES);
        vec w0 = (vec){0} + 1.f, w1 = w0;  // e^{G_i - G_j}
        for (i64 j = i; j >= start; j--) {
            const i64 at = j * ldk + x;
            if (j < i) w0 *= load(s->decay + at + ldk), w1 *= load(s->decay + at + ldk + LANES);
            const vec k0 = w0 * load(k + at), k1 = w1 * load(k + at + LANES);
            sum[0][j - start] += q0 * k0 + q1 * k1, sum[1][j - start] += e0 * k0 + e1 * k1;
            if (sides == 2) {
                const vec d0 = w0 * load(d + at), d1 = w1 * load(d + at + LANES);
                sum[2][j - start] += q0 * d0 + q1 * d1, sum[3][j - start] += e0 * d0 + e1 * d1;
            }
        }
    }
    for (int what = 0; what < 2 * sides; what++) {
        float *score = s->SC + (what * s->rows + i) * s->ldc;  // wide is rows: one write a token
        const i64 stop = own + 1 - what % 2;                     // M has no j = i
        for (i64 j = 0; j < stop; j++) score[start + j] = sum_of(sum[what][j]);
        clear(score + start + stop, s->ldc - start - stop);
    }
}

// Readers of the rows [start, stop) about the border before them: span = e^{G_i - G_border}, reach = span q and span e.
static void reach_back(Scratch *s, i64 start, i64 stop) {
    const i64 K = s->K, ldk = s->ldk;
    span_block(s->span, s->decay, start, stop, K, ldk);
    for (i64 i = start; i < stop; i++)
        for (int which = 0; which < 2; which++)
            times(s->reach + (which * BLOCK + i - start) * ldk, s->X + (which * s->rows + i) * ldk, s->span + (i - start) * ldk,
                  K);
}

// Scores per channel, as in chunkwise.c: between blocks of 16 rows they are products about the border before the reader's
// block; inside a block they are computed pair by pair. There is one write a token.
static void channel_scores(Scratch *s, const Call *a) {
    const i64 c = s->c, K = s->K, ldk = s->ldk, ldc = s->ldc, rows = s->rows;
    for (i64 start = 0; start < c; start += BLOCK) {
        const i64 stop = least(start + BLOCK, c), here = up(stop - start, PAD_ROWS);
        if (start) reach_back(s, start, stop);
        else span_block(s->span, s->decay, start, stop, K, ldk);
        for (int side = 0; start && side < sides(a); side++) {
            float *carried = s->IW;
            for (i64 j = 0; j < start; j++) times(carried + j * ldk, s->carry + j * ldk, s->W + (side * rows + j) * ldk, K);
            transpose(start, K, carried, ldk, s->T, s->ldw);
            for (int which = 0; which < 2; which++)
                multiply(here, up(start, TILE), K, s->reach + which * BLOCK * ldk, ldk, 1, s->T, s->ldw,
                         s->SC + ((2 * side + which) * rows + start) * ldc, ldc, 0);
        }
        for (i64 i = start; i < stop; i++)
            if (has(&a->direction)) score_row(s, i, start, 2);
            else score_row(s, i, start, 1);
        carry_on(s->carry, s->span, s->decay, start, stop, K, ldk);
    }
}

// Computes all of the above for one value head.
static void prepare(Scratch *s, const Call *a, i64 row, i64 start, i64 head) {
    load_erasing(s, a, row, start, head);
    load_decay(s, a, row, start, head);
    if (a->decay == CHANNEL) channel_scores(s, a);
    else head_scores(s, a);
    s->readers = s->X, s->writers = s->W;
    if (a->decay == NONE) return;
    const i64 wide = s->wide * s->ldk;
    with_factors(s, a, s->XR, s->X, s->ER, s->c, 1);
    with_factors(s, a, s->XR + s->rows * s->ldk, e_of(s), s->ER, s->c, a->writes);
    for (int side = 0; side < sides(a); side++) with_factors(s, a, s->WW + side * wide, s->W + side * wide, s->EW, s->c, a->writes);
    s->readers = s->XR, s->writers = s->WW;
}

// Loads U: v times beta, or times write, or v.
static void load_values(Scratch *s, const Call *a, i64 row, i64 start, i64 head) {
    for (i64 i = 0; i < s->m; i++) {
        float *u = s->values + i * s->ldv;
        get(u, &a->v, row, start * a->writes + i, head, a->value_dim, s->V);
        if (has(&a->beta)) scale_to(u, u, s->beta[i], s->V);
        if (has(&a->write)) {
            get(s->gate, &a->write, row, start + i, head, a->value_dim, s->V);
            times(u, u, s->gate, s->V);
        }
    }
}

INLINE float *solved_of(const Scratch *s, const Call *a) { return s->values + (sides(a) - 1) * s->wide * s->ldv; }
INLINE float *scores_of(const Scratch *s, int side) { return s->SC + side * s->all * s->ldc; }
INLINE float *last_M(const Scratch *s, const Call *a) { return scores_of(s, sides(a) - 1) + s->rows * s->ldc; }

// U and R by forward substitution, 8 rows at a time; RD below holds Er S.
static void solve(Scratch *s, const Call *a, i64 row, i64 start, i64 head) {
    const i64 m = s->m, V = s->V, ldv = s->ldv, ldc = s->ldc;
    const float *reads = s->RD + s->rows * ldv, *M = last_M(s, a);
    float *R = solved_of(s, a);
    load_values(s, a, row, start, head);
    if (sides(a) == 2) {
        const float *Mk = scores_of(s, 0) + s->rows * ldc;
        for (i64 i = 0; i < m; i++) scale_to(R + i * ldv, reads + i * ldv, 1, V);
        for (i64 i = 0; i < m; i += PAD_ROWS)
            multiply(PAD_ROWS, V, least(i + PAD_ROWS, m), Mk + i * ldc, ldc, 1, s->values, ldv, R + i * ldv, ldv, 1);
    } else
        for (i64 i = 0; i < m; i++) add_scaled(R + i * ldv, reads + i * ldv, 1, V);
    for (i64 first = 0; first < m; first += PAD_ROWS) {
        if (first) multiply(PAD_ROWS, V, first, M + first * ldc, ldc, 1, R, ldv, R + first * ldv, ldv, 1);
        for (i64 i = first + 1; i < least(first + PAD_ROWS, m); i++)
            for (i64 j = first; j < i; j++) add_scaled(R + i * ldv, R + j * ldv, M[i * ldc + j], V);
    }
}

// ---- forward -------------------------------------------------------------------------------------------------------

static void forward_chunk(Scratch *s, const Call *a, i64 row, i64 start, i64 head, float *S) {
    const i64 c = s->c, K = s->K, V = s->V, ldv = s->ldv;
    prepare(s, a, row, start, head);
    multiply(s->all, V, K, s->readers, s->ldk, 1, S, ldv, s->RD, ldv, 0);
    solve(s, a, row, start, head);
    for (int side = 0; side < sides(a); side++)  // O = Qr S + P U + ...
        for (i64 i = 0; i < c; i += PAD_ROWS)
            multiply(PAD_ROWS, V, least(a->writes * (i + PAD_ROWS), s->m), scores_of(s, side) + i * s->ldc, s->ldc, 1,
                     s->values + side * s->wide * ldv, ldv, s->RD + i * ldv, ldv, 1);
    for (i64 i = 0; i < c; i++) put(&a->output, row, start + i, head, s->RD + i * ldv, a->value_dim);
    if (a->decay != NONE)
        for (i64 p = 0; p < K; p++) scale_to(S + p * ldv, S + p * ldv, s->last[p], V);
    for (int side = 0; side < sides(a); side++)
        multiply(K, V, s->m, s->writers + side * s->wide * s->ldk, 1, s->ldk, s->values + side * s->wide * ldv, ldv, S, ldv, 1);
}

static void forward_sequence(Scratch *s, const Call *a, i64 sequence, i64 key_head) {
    const i64 hv = a->h * a->group, size = a->key_dim * a->value_dim, one = s->K * s->ldv;
    const i64 row = a->starts ? 0 : sequence, begin = a->starts ? a->starts[sequence] : 0;
    const i64 end = a->starts ? a->starts[sequence + 1] : a->t;
    i64 chunk = a->first_chunk ? a->first_chunk[sequence] : 0;
    for (i64 j = 0; j < a->group; j++)
        get_state(s->S + j * one, s->ldv, a->state + (sequence * hv + key_head * a->group + j) * size,
                  a->key_dim, a->value_dim, s->K);
    for (i64 start = begin; start < end; start += a->chunk, chunk++) {
        load_keys(s, a, row, start, least(a->chunk, end - start), key_head);
        if (a->decay != CHANNEL) shared_products(s, a);
        for (i64 j = 0; j < a->group; j++) {
            i64 head = key_head * a->group + j;
            if (a->states) put_state(a->states + ((chunk * a->b + row) * hv + head) * size, s->S + j * one, s->ldv,
                                     a->key_dim, a->value_dim);
            forward_chunk(s, a, row, start, head, s->S + j * one);
        }
    }
    for (i64 j = 0; j < a->group; j++)
        put_state(a->final + (sequence * hv + key_head * a->group + j) * size, s->S + j * one, s->ldv,
                  a->key_dim, a->value_dim);
}

// ---- backward ------------------------------------------------------------------------------------------------------
//
// With Y = dO above Z, which is kept in RD, and values u of each writer w (R of k, if it is erased; else U of k, R of d):
//   d = k:   Z = (I - M)^{-T} (P^T dO + Kw dS_next)            dU = Z
//   d != k:  Z = (I - M_d)^{-T} (P_d^T dO + Dw dS_next)        dU = P^T dO + Kw dS_next + M^T Z
//   d[P; M] = tril(Y u^T)      d[Qr; Er] = Y S^T      d(writer) = u dS_next^T      dS = e^{G_c} dS_next + [Qr; Er]^T Y

// to = P^T dO + (writer) dS_next.
static void arriving(const Scratch *s, const Call *a, int side, const float *dS, float *to) {
    const i64 ldv = s->ldv, ldc = s->ldc;
    for (i64 j = 0; j < s->m; j += PAD_ROWS) {
        const i64 first = j / a->writes;
        multiply(PAD_ROWS, s->V, s->c - first, scores_of(s, side) + first * ldc + j, 1, ldc, s->RD + first * ldv, ldv,
                 to + j * ldv, ldv, 0);
    }
    multiply(s->wide, s->V, s->K, s->writers + side * s->wide * s->ldk, s->ldk, 1, dS, ldv, to, ldv, 1);
}

// Z = (I - M)^{-T} Z.
static void solve_transposed(const Scratch *s, const float *M, float *Z) {
    const i64 m = s->m, V = s->V, ldv = s->ldv, ldc = s->ldc;
    for (i64 first = (m - 1) / PAD_ROWS * PAD_ROWS; first >= 0; first -= PAD_ROWS) {
        const i64 next = first + PAD_ROWS, stop = least(next, m);
        if (next < m)
            multiply(PAD_ROWS, V, m - next, M + next * ldc + first, 1, ldc, Z + next * ldv, ldv, Z + first * ldv, ldv, 1);
        for (i64 i = stop - 2; i >= first; i--)
            for (i64 j = i + 1; j < stop; j++) add_scaled(Z + i * ldv, Z + j * ldv, M[j * ldc + i], V);
    }
}

// dSC = tril(Y u^T).
static void scores_gradient(Scratch *s, const Call *a, int side) {
    float *to = s->dSC + side * s->all * s->ldc;
    transpose(s->wide, s->V, s->values + side * s->wide * s->ldv, s->ldv, s->T, s->ldw);
    for (i64 r = 0; r < s->all; r += PAD_ROWS) {
        const i64 columns = least(r < s->rows ? a->writes * (r + PAD_ROWS) : r - s->rows + PAD_ROWS, s->wide);
        multiply(PAD_ROWS, up(columns, TILE), s->V, s->RD + r * s->ldv, s->ldv, 1, s->T, s->ldw, to + r * s->ldc, s->ldc, 0);
        for (i64 i = r; i < r + PAD_ROWS; i++) clear(to + i * s->ldc + seen(s, a, i), s->ldc - seen(s, a, i));
    }
}

// The gradient of G through readers, writers and the state; rows are tokens.
static void factors_gradient(Scratch *s, const Call *a, const float *S, const float *dS) {
    const i64 c = s->c, K = s->K, V = s->V, ldk = s->ldk, ldv = s->ldv;
    for (i64 i = 0; i < c; i++) times(s->dG + i * ldk, s->readers + i * ldk, s->dX + i * ldk, K);
    for (i64 i = 0, at = s->rows * ldk; i < s->m; i++, at += ldk)
        add_times(s->dG + i / a->writes * ldk, s->readers + at, s->dX + at, K);
    float *end = s->dG + (c - 1) * ldk;  // G_c also stands in every writer but those of the last token, and beside S
    for (int side = 0; side < sides(a); side++)
        for (i64 i = 0; i < (c - 1) * a->writes; i++) {
            const i64 at = (side * s->wide + i) * ldk;
            float *own = s->dG + i / a->writes * ldk;
            for (i64 x = 0; x < K; x += LANES) {
                vec written = load(s->writers + at + x) * load(s->dW + at + x);
                store(own + x, load(own + x) - written);
                store(end + x, load(end + x) + written);
            }
        }
    for (i64 p = 0; p < K; p++) end[p] += s->last[p] * dot(S + p * ldv, dS + p * ldv, V);
}

// Adds to dX and dW what arrives through the scores; the gradient of G goes into the first channel of dG.
static void head_scores_backward(Scratch *s, const Call *a) {
    const i64 c = s->c, m = s->m, n = a->writes, K = s->K, ldk = s->ldk, ldc = s->ldc, rows = s->rows;
    for (int side = 0; side < sides(a); side++) {
        float *dSC = s->dSC + side * s->all * ldc, *w = s->W + side * s->wide * ldk, *dw = s->dW + side * s->wide * ldk;
        for (i64 r = 0; a->decay != NONE && r < s->all; r++) {
            if (!is_row(s, r)) continue;
            const i64 token = token_of(s, a, r), stop = seen(s, a, r);
            const float *score = scores_of(s, side) + r * ldc, *D = s->D + token * ldc;
            float *d = dSC + r * ldc, sum = 0;
            for (i64 j = 0; j < n * token; j++) {  // there is no decay between the writes of one token
                const float pair = d[j] * score[j];
                sum += pair;
                s->dG[j / n * ldk] -= pair;
            }
            s->dG[token * ldk] += sum;
            for (i64 j = 0; j < stop; j++) d[j] *= D[j];
        }
        for (i64 r = 0; r < s->all; r += PAD_ROWS)
            multiply(PAD_ROWS, K, seen(s, a, r + PAD_ROWS - 1), dSC + r * ldc, ldc, 1, w, ldk, s->dX + r * ldk, ldk, 1);
        for (i64 j = 0; j < m; j += PAD_ROWS) {
            const i64 first = j / n;
            multiply(PAD_ROWS, K, c - first, dSC + first * ldc + j, 1, ldc, s->X + first * ldk, ldk, dw + j * ldk, ldk, 1);
            multiply(PAD_ROWS, K, m - j, dSC + (rows + j) * ldc + j, 1, ldc, e_of(s) + j * ldk, ldk, dw + j * ldk, ldk, 1);
        }
    }
}

// Row i with the writes [start, i) of its block, pair by pair.
INLINE void score_row_backward(Scratch *s, i64 i, i64 start, const int sides) {
    const i64 ldk = s->ldk, ldc = s->ldc, rows = s->rows;
    const float *k = s->W, *d = d_of(s), *dP = s->dSC + i * ldc, *dM = dP + rows * ldc;
    const float *dPd = dM + rows * ldc, *dMd = dPd + rows * ldc;
    float *dk = s->IW, *dd = s->IW + rows * ldk;
    for (i64 x = 0; x < s->K; x += LANES) {
        const i64 own = i * ldk + x;
        const vec q = load(s->X + own), e = load(e_of(s) + own);
        vec w = (vec){0} + 1.f, dq = {0}, de = {0};  // w = e^{G_i - G_j}
        for (i64 j = i - 1; j >= start; j--) {
            const i64 at = j * ldk + x;
            w *= load(s->decay + at + ldk);
            vec kept = w * load(k + at);
            dq += dP[j] * kept, de += dM[j] * kept;
            store(dk + at, load(dk + at) + w * (dP[j] * q + dM[j] * e));
            if (sides == 2) {
                kept = w * load(d + at);
                dq += dPd[j] * kept, de += dMd[j] * kept;
                store(dd + at, load(dd + at) + w * (dPd[j] * q + dMd[j] * e));
            }
        }
        store(s->IX + own, load(s->IX + own) + dq);
        store(s->IX + rows * ldk + own, load(s->IX + rows * ldk + own) + de);
    }
}

static void channel_scores_backward(Scratch *s, const Call *a) {
    const i64 c = s->c, K = s->K, ldk = s->ldk, ldc = s->ldc, rows = s->rows;
    float *carried = s->WW, *dcarried = s->XR;  // readers and writers are not needed any more
    clear(s->IX, s->all * ldk), clear(s->IW, sides(a) * rows * ldk);
    for (i64 start = 0; start < c; start += BLOCK) {
        const i64 stop = least(start + BLOCK, c), here = up(stop - start, PAD_ROWS);
        reach_back(s, start, stop);
        for (int side = 0; start && side < sides(a); side++) {
            for (i64 j = 0; j < start; j++) times(carried + j * ldk, s->carry + j * ldk, s->W + (side * rows + j) * ldk, K);
            for (int which = 0; which < 2; which++) {
                const float *d = s->dSC + ((2 * side + which) * rows + start) * ldc;
                multiply(here, K, start, d, ldc, 1, carried, ldk, s->IX + (which * rows + start) * ldk, ldk, side);
                multiply(start, K, stop - start, d, 1, ldc, s->reach + which * BLOCK * ldk, ldk, dcarried, ldk, which);
            }
            for (i64 j = 0; j < start; j++)
                add_times(s->IW + (side * rows + j) * ldk, dcarried + j * ldk, s->carry + j * ldk, K);
        }
        for (i64 i = start; i < stop; i++) {
            for (int which = 0; which < 2; which++) {
                float *to = s->IX + (which * rows + i) * ldk;
                times(to, to, s->span + (i - start) * ldk, K);
            }
            if (has(&a->direction)) score_row_backward(s, i, start, 2);
            else score_row_backward(s, i, start, 1);
        }
        carry_on(s->carry, s->span, s->decay, start, stop, K, ldk);
    }
    for (i64 i = 0; i < c; i++) {
        float *dG = s->dG + i * ldk;  // G_i stands beside q_i and e_i, -G_j beside the writers
        for (int which = 0; which < 2; which++) {
            const i64 at = (which * rows + i) * ldk;
            add_times(dG, s->X + at, s->IX + at, K);
            add_scaled(s->dX + at, s->IX + at, 1, K);
        }
        for (int side = 0; side < sides(a); side++) {
            const i64 at = (side * rows + i) * ldk;
            const float own = s->dSC[(2 * side * rows + i) * ldc + i];  // a token's own pair has no decay in it
            for (i64 x = 0; x < K; x += LANES) store(dG + x, load(dG + x) - load(s->W + at + x) * load(s->IW + at + x));
            add_scaled(s->dW + at, s->IW + at, 1, K);
            add_scaled(s->dW + at, s->X + i * ldk, own, K);
            add_scaled(s->dX + i * ldk, s->W + at, own, K);
        }
    }
}

// Stores the gradients of one value head, from those of e, the writers and U; adds those of q and k to the group's.
static void store_head(Scratch *s, const Call *a, i64 row, i64 start, i64 head, const float *dU) {
    const i64 K = s->K, V = s->V, ldk = s->ldk, n = a->writes;
    float *gate = s->gate;
    for (i64 i = 0; i < s->c; i++) add_scaled(s->sums + i * ldk, s->dX + i * ldk, 1, K);
    for (i64 i = 0; i < s->m; i++) {
        const i64 at = start * n + i;
        const float *de = s->dX + (s->rows + i) * ldk, *k = s->W + i * ldk, *du = dU + i * s->ldv;
        float *dk = s->sums + (s->rows + i) * ldk, *v = s->values + i * s->ldv;
        add_scaled(dk, s->dW + i * ldk, 1, K);
        if (has(&a->direction)) put(&a->ddirection, row, at, head, s->dW + (s->wide + i) * ldk, a->key_dim);
        if (has(&a->probe)) {
            scale_to(gate, de, -1, K);
            put(&a->dprobe, row, at, head, gate, a->key_dim);
        } else if (has(&a->erase)) {
            get(gate, &a->erase, row, at, head, a->key_dim, K);
            for (i64 x = 0; x < K; x += LANES) {
                store(dk + x, load(dk + x) - load(gate + x) * load(de + x));
                store(gate + x, -load(de + x) * load(k + x));
            }
            put(&a->derase, row, at, head, gate, a->key_dim);
        }
        get(v, &a->v, row, at, head, a->value_dim, V);
        if (has(&a->beta)) {
            const float dbeta = dot(du, v, V) - dot(de, k, K);
            put(&a->dbeta, row, at, head, &dbeta, 1);
            add_scaled(dk, de, -s->beta[i], K);
            scale_to(v, du, s->beta[i], V);
            du = v;
        } else if (has(&a->write)) {
            get(gate, &a->write, row, at, head, a->value_dim, V);
            times(v, v, du, V);
            put(&a->dwrite, row, at, head, v, a->value_dim);
            times(v, gate, du, V);
            du = v;
        }
        put(&a->dv, row, at, head, du, a->value_dim);
    }
    if (a->decay == NONE) return;
    for (i64 i = s->c - 1; i >= 0; i--) {  // log_decay_t is part of every G_i with i >= t
        float *dG = s->dG + i * ldk;
        if (i < s->c - 1) add_scaled(dG, dG + ldk, 1, K);
        if (a->decay == CHANNEL) {  // nothing flows through a decay of exactly 0
            for (i64 x = 0; x < K; x++) gate[x] = s->decay[i * ldk + x] == 0 ? 0 : dG[x];
            put(&a->dlog_decay, row, start + i, head, gate, a->key_dim);
        } else {
            float x, sum = 0;
            get(&x, &a->log_decay, row, start + i, head, 1, 1);
            for (i64 p = 0; p < K; p++) sum += dG[p];
            if (x == -INFINITY) sum = 0;
            put(&a->dlog_decay, row, start + i, head, &sum, 1);
        }
    }
}

static void backward_chunk(Scratch *s, const Call *a, i64 row, i64 start, i64 head, const float *S, float *dS) {
    const i64 c = s->c, m = s->m, K = s->K, V = s->V, ldk = s->ldk, ldv = s->ldv, ldc = s->ldc, rows = s->rows;
    float *Y = s->RD, *Z = Y + rows * ldv, *dU = Z;
    prepare(s, a, row, start, head);
    multiply(s->wide, V, K, s->readers + rows * ldk, ldk, 1, S, ldv, Z, ldv, 0);
    solve(s, a, row, start, head);

    for (i64 i = 0; i < c; i++) get(Y + i * ldv, &a->doutput, row, start + i, head, a->value_dim, V);
    arriving(s, a, sides(a) - 1, dS, Z);
    solve_transposed(s, last_M(s, a), Z);
    if (sides(a) == 2) {
        const float *M = scores_of(s, 0) + rows * ldc;
        arriving(s, a, 0, dS, dU = s->dU);
        for (i64 j = 0; j < m; j += PAD_ROWS)
            multiply(PAD_ROWS, V, m - j, M + j * ldc + j, 1, ldc, Z + j * ldv, ldv, dU + j * ldv, ldv, 1);
    }

    for (int side = 0; side < sides(a); side++) scores_gradient(s, a, side);
    transpose(K, V, S, ldv, s->T, s->ldw);
    multiply(s->all, K, V, Y, ldv, 1, s->T, s->ldw, s->dX, ldk, 0);
    transpose(K, V, dS, ldv, s->T, s->ldw);
    for (int side = 0; side < sides(a); side++)
        multiply(s->wide, K, V, s->values + side * s->wide * ldv, ldv, 1, s->T, s->ldw, s->dW + side * s->wide * ldk, ldk, 0);
    if (a->decay != NONE) {
        factors_gradient(s, a, S, dS);
        for (i64 p = 0; p < K; p++) scale_to(dS + p * ldv, dS + p * ldv, s->last[p], V);
        with_factors(s, a, s->dX, s->dX, s->ER, c, 1);
        with_factors(s, a, s->dX + rows * ldk, s->dX + rows * ldk, s->ER, c, a->writes);
        for (i64 side = 0, at = 0; side < sides(a); side++, at += s->wide * ldk)
            with_factors(s, a, s->dW + at, s->dW + at, s->EW, c, a->writes);
    }
    multiply(K, V, c, s->readers, 1, ldk, Y, ldv, dS, ldv, 1);
    multiply(K, V, m, s->readers + rows * ldk, 1, ldk, Z, ldv, dS, ldv, 1);

    if (a->decay == CHANNEL) channel_scores_backward(s, a);
    else head_scores_backward(s, a);
    store_head(s, a, row, start, head, dU);
}

// From the gradient of x^ = x norm to that of x: norm (dx^ - x^ (x^ . dx^)); X holds scale q^, W k^.
static void store_rows(const Scratch *s, const Call *a, const Tensor *to, const float *xs, const float *norms, float *ds, i64 row,
                       i64 start, i64 n, i64 head, float scale) {
    for (i64 i = 0; i < n; i++) {
        const float *x = xs + i * s->ldk;
        float *d = ds + i * s->ldk, along = a->normalize && scale != 0 ? dot(x, d, s->K) / scale : 0;
        for (i64 p = 0; p < s->K; p++) d[p] = norms[i] * (scale * d[p] - x[p] * along);
        put(to, row, start + i, head, d, a->key_dim);
    }
}

static void backward_sequence(Scratch *s, const Call *a, i64 sequence, i64 key_head) {
    const i64 hv = a->h * a->group, size = a->key_dim * a->value_dim, one = s->K * s->ldv;
    const i64 row = a->starts ? 0 : sequence, begin = a->starts ? a->starts[sequence] : 0;
    const i64 end = a->starts ? a->starts[sequence + 1] : a->t;
    const i64 first = a->first_chunk ? a->first_chunk[sequence] : 0, chunks = (end - begin + a->chunk - 1) / a->chunk;
    for (i64 j = 0; j < a->group; j++)
        get_state(s->dS + j * one, s->ldv, a->dfinal + (sequence * hv + key_head * a->group + j) * size,
                  a->key_dim, a->value_dim, s->K);
    for (i64 n = chunks - 1; n >= 0; n--) {
        const i64 start = begin + n * a->chunk;
        load_keys(s, a, row, start, least(a->chunk, end - start), key_head);
        if (a->decay != CHANNEL) shared_products(s, a);
        clear(s->sums, s->all * s->ldk);
        for (i64 j = 0; j < a->group; j++) {
            const i64 head = key_head * a->group + j;
            get_state(s->S, s->ldv, a->states + (((first + n) * a->b + row) * hv + head) * size,
                      a->key_dim, a->value_dim, s->K);
            backward_chunk(s, a, row, start, head, s->S, s->dS + j * one);
        }
        store_rows(s, a, &a->dq, s->X, s->norm, s->sums, row, start, s->c, key_head, (float)a->scale);
        store_rows(s, a, &a->dk, s->W, s->norm + s->rows, s->sums + s->rows * s->ldk, row, start * a->writes, s->m, key_head, 1);
    }
    for (i64 j = 0; j < a->group; j++)
        put_state(a->dstate + (sequence * hv + key_head * a->group + j) * size, s->dS + j * one, s->ldv,
                  a->key_dim, a->value_dim);
}

// ---- recurrent -----------------------------------------------------------------------------------------------------

// y_r = S^T x_r for n rows x, four rows of S at a time, which stay in cache; S [key_dim, columns] is dense.
static void read_state(const Scratch *s, const Call *a, const float *S, const float *x, float *y, i64 n) {
    const i64 columns = a->value_dim, whole = columns / LANES * LANES, ldk = s->ldk, ldv = s->ldv;
    clear(y, n * ldv);
    i64 p = 0;
    for (; p + 4 <= a->key_dim; p += 4, S += 4 * columns) {
        i64 r = 0;
        for (; r + 2 <= n; r += 2) {
            const float *one = x + r * ldk + p, *two = one + ldk;
            float *by_one = y + r * ldv, *by_two = by_one + ldv;
            for (i64 v = 0; v < whole; v += LANES) {
                vec sum_one = load(by_one + v), sum_two = load(by_two + v);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const vec row = load(S + i * columns + v);
                    sum_one += one[i] * row, sum_two += two[i] * row;
                }
                store(by_one + v, sum_one), store(by_two + v, sum_two);
            }
        }
        for (; r < n; r++)
            for (i64 v = 0; v < whole; v += LANES) {
                vec sum = load(y + r * ldv + v);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) sum += x[r * ldk + p + i] * load(S + i * columns + v);
                store(y + r * ldv + v, sum);
            }
        for (r = 0; r < n; r++)
            for (i64 v = whole; v < columns; v++)
                for (int i = 0; i < 4; i++) y[r * ldv + v] += x[r * ldk + p + i] * S[i * columns + v];
    }
    for (; p < a->key_dim; p++, S += columns)
        for (i64 r = 0; r < n; r++)
            for (i64 v = 0; v < columns; v++) y[r * ldv + v] += x[r * ldk + p] * S[v];
}

// to = e^{log_decay} from + sum_j w_j u_j^T for n writers.
INLINE void write_state(const Scratch *s, const Call *a, const float *from, float *to, const i64 n) {
    const i64 columns = a->value_dim, whole = columns / LANES * LANES;
    for (i64 p = 0; p < a->key_dim; p++, from += columns, to += columns) {
        const float kept = s->last[p], *w = s->W + p, *u = s->values;
        for (i64 v = 0; v < whole; v += LANES) {
            vec sum = kept * load(from + v);
            for (i64 j = 0; j < n; j++) sum += w[j * s->ldk] * load(u + j * s->ldv + v);
            store(to + v, sum);
        }
        for (i64 v = whole; v < columns; v++) {
            float sum = kept * from[v];
            for (i64 j = 0; j < n; j++) sum += w[j * s->ldk] * u[j * s->ldv + v];
            to[v] = sum;
        }
    }
}

// One token: all that its n writes and its q read of S' is read at once; the writes then see each other. `to` may be
// `from`. The output is in RD.
static void recurrent_token(Scratch *s, const Call *a, const float *from, float *to) {
    const i64 K = s->K, V = s->V, ldk = s->ldk, ldv = s->ldv, n = a->writes;
    float *R = solved_of(s, a), *reads = s->RD + ldv;
    for (i64 r = 0; r <= n; r++) times(s->XR + r * ldk, s->X + r * ldk, s->last, K);  // S'^T e = S^T (e^{log_decay} e)
    read_state(s, a, from, s->XR, s->RD, n + 1);
    if (sides(a) == 2) scale_to(R, reads, 1, V);
    else
        for (i64 i = 0; i < n; i++) {
            add_scaled(R + i * ldv, reads + i * ldv, 1, V);
            for (i64 j = 0; j < i; j++) add_scaled(R + i * ldv, R + j * ldv, dot(e_of(s) + i * ldk, s->W + j * ldk, K), V);
        }
    const i64 writers = sides(a) == 2 ? 2 : n;  // k above d: one write a token
    for (i64 j = 0; j < writers; j++) add_scaled(s->RD, s->values + j * ldv, dot(s->X, s->W + j * ldk, K), V);
    if (writers == 1) write_state(s, a, from, to, 1);
    else if (writers == 2) write_state(s, a, from, to, 2);
    else write_state(s, a, from, to, writers);
}

static void recurrent_sequence(Scratch *s, const Call *a, i64 sequence, i64 key_head) {
    const i64 hv = a->h * a->group, size = a->key_dim * a->value_dim;
    const i64 row = a->starts ? 0 : sequence, begin = a->starts ? a->starts[sequence] : 0;
    const i64 end = a->starts ? a->starts[sequence + 1] : a->t;
    for (i64 j = 0; j < a->group; j++) {
        const i64 head = key_head * a->group + j;
        const float *from = a->state + (sequence * hv + head) * size;
        float *S = a->final + (sequence * hv + head) * size;
        if (begin == end) memcpy(S, from, size * sizeof(float));
        for (i64 i = begin; i < end; i++, from = S) {
            load_keys(s, a, row, i, 1, key_head);
            load_erasing(s, a, row, i, head);
            load_decay(s, a, row, i, head);
            load_values(s, a, row, i, head);
            recurrent_token(s, a, from, S);
            put(&a->output, row, i, head, s->RD, a->value_dim);
        }
    }
}

// ---- threads -------------------------------------------------------------------------------------------------------

typedef void (*Work)(Scratch *, const Call *, i64 sequence, i64 key_head);

typedef struct {
    Job job;
    const Call *call;
    Work work;
    int mode;
} Task;

static int run(Job *job) {
    const Task *task = (const Task *)job;
    const Call *call = task->call;
    Scratch scratch;
    if (allocate(&scratch, call, task->mode)) return NO_MEMORY;
    for (i64 i; (i = next_unit(job)) >= 0;) task->work(&scratch, call, i / call->h, i % call->h);
    free(scratch.memory);
    return (any(scratch.positive) ? POSITIVE_DECAY : 0) | (scratch.unstable ? UNSTABLE : 0);
}

static int start(const Call *call, Work work, int mode) {
    Task task = {.job = {.run = run, .units = call->sequences * call->h}, .call = call, .work = work, .mode = mode};
    i64 tokens = call->sequences * (call->starts ? 1 : call->t);
    i64 work_in_all = tokens * call->h * call->group * call->key_dim * call->value_dim;
    return run_job(&task.job, mode == RECURRENT ? useful_threads(call->threads, work_in_all) : call->threads);
}

int lineate_general_forward(const Call *call) { return start(call, forward_sequence, FORWARD); }
int lineate_general_backward(const Call *call) { return start(call, backward_sequence, BACKWARD); }
int lineate_general_recurrent(const Call *call) { return start(call, recurrent_sequence, RECURRENT); }
