// The chunkwise and recurrent forms for a CPU, in float32: the same equations and names as forms/chunkwise.py and rule.py.
//
// One unit of work is one key head of one sequence: its states stay in cache from the first token to the last, and its
// result depends on nothing else, so the bits are the same in any batch, order and number of threads.
//
//   Qr = e^G q     Kr = e^G k     Kw = e^{G_c - G} k                       readers of S, writers to the next S
//   P_ij = sum_x q_ix k_jx e^{G_ix - G_jx}  (j <= i)      M_ij = the same with k_i for q_i  (j < i)
//   E = V - Kr S          R = (I + beta M)^{-1} (beta E)      (rule only accumulates: R = V)
//   O = Qr S + P R        S_next = e^{G_c} S + Kw^T R
#include "rules.h"

// ---- the call ------------------------------------------------------------------------------------------------------

typedef struct {  // words of 64 bits, filled in by call.py
    i64 b, t, h, group, key_dim, value_dim, chunk, sequences;
    i64 decay, corrects, normalize, threads;
    Tensor q, k, v, log_decay, beta, output;        // forward
    Tensor doutput, dq, dk, dv, dlog_decay, dbeta;  // backward
    const float *state, *dfinal;                    // sequences hv k v
    float *final, *states, *dstate;                 // states: n b hv k v, or NULL
    const i64 *starts, *first_chunk;                // sequences + 1, sequences; NULL: every row is one sequence
    double scale;
} Call;

// ---- scratch memory ------------------------------------------------------------------------------------------------

typedef struct {
    i64 c, rows, K, V, ldk, ldv, ldc, ldw;  // tokens at work, room for them; padded dims; leading dimensions
    float *X;                               // 2 rows, K: q (scaled) above k
    float *XR, *KW;                         // 2 rows, K: readers Qr above Kr; rows, K: writers Kw
    float *ER, *EW, *last;                  // rows, K: e^{G_i}, e^{G_c - G_j}; K: e^{G_c}
    float *D, *decay;                       // rows, rows: e^{G_i - G_j} per head; rows, K: e^{log_decay} per channel
    float *carry, *W, *reach, *span;        // rows, K: e^{G_border - G_j}, times k; 2 blocks, K and block, K: readers
    float *T;                               // K, rows or V, max(K, rows): a right operand, transposed
    float *raw, *SC, *A;                    // 2 rows, rows: plain products; P above M; rows, rows: -beta M
    float *RD, *E, *R, *beta, *norm;        // 2 rows, V: reads of S; rows, V: error, writes; rows; 2 rows
    float *square;                          // rows: |k|^2, where it is looked at
    float *S;                               // group, K, V
    float *dR, *dSC, *dX, *dKW, *dk, *dG;   // backward: rows, V; 2 rows, rows; 2 rows, K; rows, K; rows, K; rows, K
    float *intra, *dW, *sums, *dS;          // backward: 3 rows, K; rows, K; 2 rows, K: over the group; group, K, V
    double *G;                              // rows
    ivec positive;                          // whether any log_decay was above 0
    int unstable;                           // whether any beta |k|^2 was outside [0, 2]
    void *memory;
} Scratch;

static int allocate(Scratch *s, const Call *a, int mode) {
    s->positive = (ivec){0};
    s->unstable = 0;
    s->rows = mode == RECURRENT ? 1 : up(least(a->chunk, a->t), PAD_ROWS);
    s->K = up(a->key_dim, PAD_COLS), s->V = up(a->value_dim, PAD_COLS);
    s->ldk = s->K + SKEW, s->ldv = s->V + SKEW, s->ldc = up(s->rows, PAD_COLS) + SKEW;
    s->ldw = s->ldk > s->ldc ? s->ldk : s->ldc;
    i64 rk = s->rows * s->ldk, rv = s->rows * s->ldv, rr = s->rows * s->ldc, B = mode == BACKWARD, T = mode != RECURRENT;
    i64 state = T * a->group * s->K * s->ldv;
    const Part plan[] = {
        {&s->X, 2 * rk},     {&s->XR, 2 * rk},  {&s->KW, rk},          {&s->ER, rk},           {&s->EW, rk},
        {&s->last, s->ldk},  {&s->D, rr},       {&s->decay, rk},       {&s->carry, rk},        {&s->W, rk},
        {&s->reach, 2 * BLOCK * s->ldk},        {&s->span, BLOCK * s->ldk},
        {&s->T, T * (s->K > s->V ? s->K : s->V) * s->ldw},                 {&s->raw, 2 * rr},      {&s->SC, 2 * rr},
        {&s->A, rr},         {&s->RD, 2 * rv},  {&s->E, rv},           {&s->R, rv},            {&s->beta, s->ldc},
        {&s->norm, 2 * s->ldc},                 {&s->S, state},        {(float **)&s->G, 2 * s->rows}, {&s->square, s->ldc},
        {&s->dR, B * rv},    {&s->dSC, B * 2 * rr},                    {&s->dX, B * 2 * rk},   {&s->dKW, B * rk},
        {&s->dk, B * rk},    {&s->dG, B * rk},  {&s->intra, B * 3 * rk},                       {&s->dW, B * rk},
        {&s->sums, B * 2 * rk},                 {&s->dS, B * state},
    };
    return allot(plan, sizeof plan / sizeof *plan, &s->memory);
}

// ---- what a chunk needs besides the state --------------------------------------------------------------------------

// Whether beta |k|^2 is checked: only for rules that correct, unless keys are normalised here. 1 % is for rounding.
INLINE int looks(const Call *a) { return a->corrects && !a->normalize; }
INLINE int is_unstable(float beta, float square) { return fabsf(beta * square - 1.f) > 1.02f; }

// Loads q and k of one key head, normalised if requested, q scaled; rows past c are zero.
static void load_keys(Scratch *s, const Call *a, i64 row, i64 start, i64 c, i64 head) {
    const Tensor *from[2] = {&a->q, &a->k};
    s->c = c;
    for (int which = 0; which < 2; which++)
        for (i64 i = 0; i < s->rows; i++) {
            float *x = s->X + (which * s->rows + i) * s->ldk;
            if (i >= c) {
                clear(x, s->K);
                continue;
            }
            get(x, from[which], row, start + i, head, a->key_dim, s->K);
            if (which && looks(a)) s->square[i] = dot(x, x, s->K);
            float norm = a->normalize ? 1.f / sqrtf(dot(x, x, s->K) + 1e-6f) : 1.f;
            s->norm[which * s->rows + i] = norm;
            scale_to(x, x, which ? norm : norm * (float)a->scale, s->K);
        }
}

// Computes e^{G_i}, e^{G_c - G_j}, e^{G_c}, and the factors of the scores, from this value head's log_decay.
static void load_decay(Scratch *s, const Call *a, i64 row, i64 start, i64 head) {
    const i64 c = s->c, K = s->K, ldk = s->ldk;
    if (a->decay == CHANNEL) {
        load_channel_decay(s->decay, &a->log_decay, row, start, head, c, a->key_dim, K, ldk, &s->positive);
        channel_factors(s->ER, s->EW, s->last, s->decay, c, K, ldk);
        return;
    }
    double sum = 0;  // in double, what follows a reset keeps its digits; e^-1000 is as much 0 as e^-inf
    for (i64 i = 0; i < c; i++) {
        float x = 0;
        if (a->decay == HEAD) get(&x, &a->log_decay, row, start + i, head, 1, 1);
        s->positive[0] |= x > 0;
        s->G[i] = sum += x < -1000.f ? -1000. : x;
    }
    for (i64 i = 0; i < c; i++) {
        float *D = s->D + i * s->ldc;
        for (i64 j = 0; j <= i; j++) D[j] = (float)(s->G[i] - s->G[j]);
        for (i64 j = 0; j <= i; j += LANES) store(D + j, exponential(load(D + j)));
        fill(s->ER + i * ldk, (float)exp(s->G[i]), K);
        fill(s->EW + i * ldk, (float)exp(sum - s->G[i]), K);
    }
    fill(s->last, (float)exp(sum), K);
}

// Computes q k^T and k k^T without decay, which the value heads of the group share.
static void plain_products(Scratch *s, const Call *a) {
    transpose(s->rows, s->K, s->X + s->rows * s->ldk, s->ldk, s->T, s->ldw);
    for (int which = 0; which <= a->corrects; which++)
        for (i64 i = 0; i < s->rows; i += PAD_ROWS) {
            i64 at = which * s->rows + i;
            multiply(PAD_ROWS, up(i + PAD_ROWS, TILE), s->K, s->X + at * s->ldk, s->ldk, 1, s->T, s->ldw,
                     s->raw + at * s->ldc, s->ldc, 0);
        }
}

static void head_scores(Scratch *s, const Call *a) {
    for (int which = 0; which <= a->corrects; which++)
        for (i64 i = 0; i < s->c; i++) {
            i64 at = (which * s->rows + i) * s->ldc;
            for (i64 j = 0; j <= i; j++) s->SC[at + j] = s->raw[at + j] * s->D[i * s->ldc + j];
            clear(s->SC + at + i + 1, s->ldc - i - 1);
        }
}

// Readers of the rows [start, stop) about the border before them: span = e^{G_i - G_border}, reach = span q and span k.
static void reach_back(Scratch *s, const Call *a, i64 start, i64 stop) {
    const i64 K = s->K, ldk = s->ldk;
    span_block(s->span, s->decay, start, stop, K, ldk);
    for (i64 i = start; i < stop; i++)
        for (int which = 0; which <= a->corrects; which++)
            times(s->reach + (which * BLOCK + i - start) * ldk, s->X + (which * s->rows + i) * ldk, s->span + (i - start) * ldk,
                  K);
}

// Scores between blocks of 16 rows are products about the border before the reader's block; inside a block they are
// computed pair by pair.
static void channel_scores(Scratch *s, const Call *a) {
    const i64 c = s->c, K = s->K, ldk = s->ldk, ldc = s->ldc, rows = s->rows;
    const float *q = s->X, *k = s->X + rows * ldk;
    clear(s->SC, 2 * rows * ldc);
    for (i64 start = 0; start < c; start += BLOCK) {
        const i64 stop = least(start + BLOCK, c), here = up(stop - start, PAD_ROWS);
        reach_back(s, a, start, stop);
        if (start) {
            for (i64 j = 0; j < start; j++) times(s->W + j * ldk, s->carry + j * ldk, k + j * ldk, K);
            transpose(start, K, s->W, ldk, s->T, s->ldw);
            for (int which = 0; which <= a->corrects; which++)
                multiply(here, up(start, TILE), K, s->reach + which * BLOCK * ldk, ldk, 1, s->T, s->ldw,
                         s->SC + (which * rows + start) * ldc, ldc, 0);
        }
        for (i64 i = start; i < stop; i++) {
            float *P = s->SC + i * ldc, *M = P + rows * ldc;
            const float *qi = q + i * ldk, *ki = k + i * ldk;
            float *between = s->W;  // e^{G_i - G_j}
            clear(P + start, ldc - start), clear(M + start, ldc - start);
            fill(between, 1, K);
            for (i64 j = i; j >= start; j--) {
                const float *kj = k + j * ldk, *next = s->decay + (j + 1) * ldk;
                vec p_sum = {0}, m_sum = {0};
                for (i64 x = 0; x < K; x += LANES) {
                    vec w = load(between + x);
                    if (j < i) store(between + x, w *= load(next + x));
                    w *= load(kj + x);
                    p_sum += w * load(qi + x), m_sum += w * load(ki + x);
                }
                P[j] = total(p_sum), M[j] = total(m_sum);
            }
        }
        carry_on(s->carry, s->span, s->decay, start, stop, K, ldk);
    }
}

// Computes all of the above for one value head, and A = -beta M.
static void prepare(Scratch *s, const Call *a, i64 row, i64 start, i64 head) {
    const i64 K = s->K, ldk = s->ldk, rows = s->rows;
    load_decay(s, a, row, start, head);
    if (a->decay == CHANNEL) channel_scores(s, a);
    else head_scores(s, a);
    for (i64 i = 0; i < s->c; i++) {
        times(s->XR + i * ldk, s->X + i * ldk, s->ER + i * ldk, K);
        times(s->XR + (rows + i) * ldk, s->X + (rows + i) * ldk, s->ER + i * ldk, K);
        times(s->KW + i * ldk, s->X + (rows + i) * ldk, s->EW + i * ldk, K);
        if (a->corrects) {
            get(s->beta + i, &a->beta, row, start + i, head, 1, 1);
            if (looks(a)) s->unstable |= is_unstable(s->beta[i], s->square[i]);
            for (i64 j = 0; j < i; j++) s->A[i * s->ldc + j] = -s->beta[i] * s->SC[(rows + i) * s->ldc + j];
        }
    }
}

// E = V - Kr S and R = (I + beta M)^{-1} (beta E) by forward substitution, 8 rows at a time; RD below holds Kr S.
static void solve(Scratch *s, const Call *a, i64 row, i64 start, i64 head) {
    const i64 c = s->c, V = s->V, ldv = s->ldv;
    for (i64 i = 0; i < c; i++) {
        float *E = s->E + i * ldv, *R = s->R + i * ldv;
        get(E, &a->v, row, start + i, head, a->value_dim, V);
        if (a->corrects) add_scaled(E, s->RD + (s->rows + i) * ldv, -1, V);
        scale_to(R, E, a->corrects ? s->beta[i] : 1, V);
    }
    if (!a->corrects) return;
    for (i64 first = 0; first < c; first += PAD_ROWS) {
        multiply(PAD_ROWS, V, first, s->A + first * s->ldc, s->ldc, 1, s->R, ldv, s->R + first * ldv, ldv, 1);
        for (i64 i = first + 1; i < least(first + PAD_ROWS, c); i++)
            for (i64 j = first; j < i; j++) add_scaled(s->R + i * ldv, s->R + j * ldv, s->A[i * s->ldc + j], V);
    }
}

// ---- forward -------------------------------------------------------------------------------------------------------

static void forward_chunk(Scratch *s, const Call *a, i64 row, i64 start, i64 head, float *S) {
    const i64 c = s->c, K = s->K, V = s->V, ldv = s->ldv;
    prepare(s, a, row, start, head);
    multiply(s->rows * (1 + a->corrects), V, K, s->XR, s->ldk, 1, S, ldv, s->RD, ldv, 0);
    solve(s, a, row, start, head);
    for (i64 i = 0; i < c; i += PAD_ROWS)  // O = Qr S + P R
        multiply(PAD_ROWS, V, least(i + PAD_ROWS, c), s->SC + i * s->ldc, s->ldc, 1, s->R, ldv, s->RD + i * ldv, ldv, 1);
    for (i64 i = 0; i < c; i++) put(&a->output, row, start + i, head, s->RD + i * ldv, a->value_dim);
    for (i64 p = 0; p < K; p++) scale_to(S + p * ldv, S + p * ldv, s->last[p], V);
    multiply(K, V, c, s->KW, 1, s->ldk, s->R, ldv, S, ldv, 1);  // S = e^{G_c} S + Kw^T R
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
        if (a->decay != CHANNEL) plain_products(s, a);
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
// With X = (I + beta M)^{-T} dR, dE = beta X = dV, and Y = dO above -dE (kept in RD):
//   dR = P^T dO + Kw dS_next      d[P; M] = tril(Y R^T)      d[Qr; Kr] = Y S^T      dKw = R dS_next^T
//   dbeta = rowsum(X (E - M R))   dS = e^{G_c} dS_next + [Qr; Kr]^T Y

static void solve_transposed(Scratch *s) {
    const i64 c = s->c, V = s->V, ldv = s->ldv, ldc = s->ldc;
    for (i64 first = (c - 1) / PAD_ROWS * PAD_ROWS; first >= 0; first -= PAD_ROWS) {
        i64 next = first + PAD_ROWS, stop = least(next, c);
        if (next < c)
            multiply(PAD_ROWS, V, c - next, s->A + next * ldc + first, 1, ldc, s->dR + next * ldv, ldv, s->dR + first * ldv,
                     ldv, 1);
        for (i64 i = stop - 2; i >= first; i--)
            for (i64 j = i + 1; j < stop; j++) add_scaled(s->dR + i * ldv, s->dR + j * ldv, s->A[j * ldc + i], V);
    }
}

static const float TINY = 1e-19f;  // the square root of the smallest normal number

// Scores per head: intra = dq, dk as reader, dk as writer; the gradient of G goes into the first channel of dG.
static void head_scores_backward(Scratch *s, const Call *a) {
    const i64 c = s->c, K = s->K, ldk = s->ldk, ldc = s->ldc, rows = s->rows;
    const float *k = s->X + rows * ldk;
    float *dkw = s->intra + 2 * rows * ldk;
    for (int which = 0; which <= a->corrects; which++)
        for (i64 i = 0; i < c; i++) {
            float *d = s->dSC + (which * rows + i) * ldc, sum = 0;
            const float *score = s->SC + (which * rows + i) * ldc, *D = s->D + i * ldc;
            for (i64 j = 0; j < i; j++) {
                float pair = d[j] * score[j];
                sum += pair;
                s->dG[j * ldk] -= pair;
            }
            s->dG[i * ldk] += sum;
            for (i64 j = 0; j <= i; j++) d[j] *= D[j];
        }
    for (int which = 0; which <= a->corrects; which++)
        for (i64 i = 0; i < c; i += PAD_ROWS) {
            const float *d = s->dSC + (which * rows + i) * ldc;
            multiply(PAD_ROWS, K, least(i + PAD_ROWS, c), d, ldc, 1, k, ldk, s->intra + (which * rows + i) * ldk, ldk, 0);
            multiply(PAD_ROWS, K, c - i, d + i, 1, ldc, s->X + (which * rows + i) * ldk, ldk, dkw + i * ldk, ldk, which);
        }
}

static void channel_scores_backward(Scratch *s, const Call *a) {
    const i64 c = s->c, K = s->K, ldk = s->ldk, ldc = s->ldc, rows = s->rows;
    const float *q = s->X, *k = s->X + rows * ldk;
    float *dq = s->intra, *dkr = dq + rows * ldk, *dkw = dkr + rows * ldk;
    clear(s->intra, 3 * rows * ldk);
    for (i64 start = 0; start < c; start += BLOCK) {
        const i64 stop = least(start + BLOCK, c), here = up(stop - start, PAD_ROWS);
        reach_back(s, a, start, stop);
        if (start) {
            for (i64 j = 0; j < start; j++) times(s->W + j * ldk, s->carry + j * ldk, k + j * ldk, K);
            for (int which = 0; which <= a->corrects; which++) {
                const float *d = s->dSC + (which * rows + start) * ldc;
                float *to = s->intra + (which * rows + start) * ldk;
                multiply(here, K, start, d, ldc, 1, s->W, ldk, to, ldk, 0);
                for (i64 i = 0; i < stop - start; i++) times(to + i * ldk, to + i * ldk, s->span + i * ldk, K);
                multiply(start, K, stop - start, d, 1, ldc, s->reach + which * BLOCK * ldk, ldk, s->dW, ldk, which);
            }
            for (i64 j = 0; j < start; j++) add_times(dkw + j * ldk, s->dW + j * ldk, s->carry + j * ldk, K);
        }
        for (i64 i = start; i < stop; i++) {
            const float *dP = s->dSC + i * ldc, *dM = dP + rows * ldc, *qi = q + i * ldk, *ki = k + i * ldk;
            float *between = s->W;
            fill(between, 1, K);
            for (i64 j = i - 1; j >= start; j--) {
                const float *kj = k + j * ldk, *next = s->decay + (j + 1) * ldk;
                const float p = dP[j], m = a->corrects ? dM[j] : 0;
                for (i64 x = 0; x < K; x += LANES) {
                    vec w = load(between + x) * load(next + x), kept = w * load(kj + x);
                    store(between + x, w);
                    store(dq + i * ldk + x, load(dq + i * ldk + x) + p * kept);
                    store(dkr + i * ldk + x, load(dkr + i * ldk + x) + m * kept);
                    store(dkw + j * ldk + x, load(dkw + j * ldk + x) + w * (p * load(qi + x) + m * load(ki + x)));
                }
            }
        }
        carry_on(s->carry, s->span, s->decay, start, stop, K, ldk);
    }
    for (i64 i = 0; i < c; i++)  // G_i stands beside q_i and k_i as readers, -G_j beside k_j as a writer
        for (i64 x = 0; x < K; x += LANES) {
            i64 at = i * ldk + x;
            store(s->dG + at, load(s->dG + at) + load(q + at) * load(dq + at) + load(k + at) * (load(dkr + at) - load(dkw + at)));
        }
    for (i64 i = 0; i < c; i++) {  // a token's own pair has no decay in it, so it comes after dG
        add_scaled(dq + i * ldk, k + i * ldk, s->dSC[i * ldc + i], K);
        add_scaled(dkw + i * ldk, q + i * ldk, s->dSC[i * ldc + i], K);
    }
}

static void backward_chunk(Scratch *s, const Call *a, i64 row, i64 start, i64 head, const float *S, float *dS) {
    const i64 c = s->c, K = s->K, V = s->V, ldk = s->ldk, ldv = s->ldv, ldc = s->ldc, rows = s->rows;
    float *Y = s->RD, *dXk = s->dX + rows * ldk;
    prepare(s, a, row, start, head);
    if (a->corrects) multiply(rows, V, K, s->XR + rows * ldk, ldk, 1, S, ldv, s->RD + rows * ldv, ldv, 0);
    solve(s, a, row, start, head);

    for (i64 i = 0; i < c; i++) get(Y + i * ldv, &a->doutput, row, start + i, head, a->value_dim, V);
    for (i64 j = 0; j < c; j += PAD_ROWS)
        multiply(PAD_ROWS, V, c - j, s->SC + j * ldc + j, 1, ldc, Y + j * ldv, ldv, s->dR + j * ldv, ldv, 0);
    multiply(rows, V, K, s->KW, ldk, 1, dS, ldv, s->dR, ldv, 1);
    if (a->corrects) {
        solve_transposed(s);  // dR is X from here on
        for (i64 i = 0; i < c; i++) {
            float *X = s->dR + i * ldv, *E = s->E + i * ldv, beta = s->beta[i], dbeta;
            if (fabsf(beta) > TINY) dbeta = dot(X, s->R + i * ldv, V) / beta;
            else {  // E - M R, which is R / beta elsewhere; R itself may be too small for float32
                for (i64 j = 0; j < i; j++) add_scaled(E, s->R + j * ldv, -s->SC[(rows + i) * ldc + j], V);
                dbeta = dot(X, E, V);
            }
            put(&a->dbeta, row, start + i, head, &dbeta, 1);
            scale_to(X, X, beta, V);
            scale_to(Y + (rows + i) * ldv, X, -1, V);
        }
    }
    for (i64 i = 0; i < c; i++) put(&a->dv, row, start + i, head, s->dR + i * ldv, a->value_dim);

    transpose(rows, V, s->R, ldv, s->T, s->ldw);
    for (int which = 0; which <= a->corrects; which++)
        for (i64 i = 0; i < c; i += PAD_ROWS) {
            float *d = s->dSC + (which * rows + i) * ldc;
            multiply(PAD_ROWS, up(i + PAD_ROWS, TILE), V, Y + (which * rows + i) * ldv, ldv, 1, s->T, s->ldw, d, ldc, 0);
            for (i64 r = 0; r < PAD_ROWS; r++) clear(d + r * ldc + i + r + 1 - which, ldc - (i + r + 1 - which));
        }
    transpose(K, V, S, ldv, s->T, s->ldw);
    multiply(rows * (1 + a->corrects), K, V, Y, ldv, 1, s->T, s->ldw, s->dX, ldk, 0);
    transpose(K, V, dS, ldv, s->T, s->ldw);
    multiply(rows, K, V, s->R, ldv, 1, s->T, s->ldw, s->dKW, ldk, 0);

    for (i64 i = 0; i < c; i++) {
        float *dG = s->dG + i * ldk;
        times(dG, s->XR + i * ldk, s->dX + i * ldk, K);
        if (a->corrects) add_times(dG, s->XR + (rows + i) * ldk, dXk + i * ldk, K);
    }
    float *end = s->dG + (c - 1) * ldk;  // G_c also stands in every writer but the last, and beside S
    for (i64 i = 0; i < c - 1; i++)
        for (i64 x = 0; x < K; x += LANES) {
            vec written = load(s->KW + i * ldk + x) * load(s->dKW + i * ldk + x);
            store(s->dG + i * ldk + x, load(s->dG + i * ldk + x) - written);
            store(end + x, load(end + x) + written);
        }
    for (i64 p = 0; p < K; p++) {
        end[p] += s->last[p] * dot(S + p * ldv, dS + p * ldv, V);
        scale_to(dS + p * ldv, dS + p * ldv, s->last[p], V);
    }
    for (int which = 0; which <= a->corrects; which++)
        multiply(K, V, c, s->XR + which * rows * ldk, 1, ldk, Y + which * rows * ldv, ldv, dS, ldv, 1);

    if (a->decay == CHANNEL) channel_scores_backward(s, a);
    else head_scores_backward(s, a);
    for (i64 i = 0; i < c; i++) {
        float *dq = s->sums + i * ldk, *dk = s->sums + (rows + i) * ldk;
        add_times(dq, s->dX + i * ldk, s->ER + i * ldk, K);
        add_times(dk, s->dKW + i * ldk, s->EW + i * ldk, K);
        add_scaled(dq, s->intra + i * ldk, 1, K);
        add_scaled(dk, s->intra + (2 * rows + i) * ldk, 1, K);
        if (a->corrects) {
            add_times(dk, dXk + i * ldk, s->ER + i * ldk, K);
            add_scaled(dk, s->intra + (rows + i) * ldk, 1, K);
        }
    }
    if (a->decay == NONE) return;
    for (i64 i = c - 1; i >= 0; i--) {  // log_decay_t is part of every G_i with i >= t
        float *dG = s->dG + i * ldk;
        if (i < c - 1) add_scaled(dG, dG + ldk, 1, K);
        if (a->decay == CHANNEL) {
            float *d = s->span;  // nothing flows through a decay of exactly 0
            for (i64 x = 0; x < K; x++) d[x] = s->decay[i * ldk + x] == 0 ? 0 : dG[x];
            put(&a->dlog_decay, row, start + i, head, d, a->key_dim);
        } else {
            float x, sum = 0;
            get(&x, &a->log_decay, row, start + i, head, 1, 1);
            for (i64 p = 0; p < K; p++) sum += dG[p];
            if (x == -INFINITY) sum = 0;
            put(&a->dlog_decay, row, start + i, head, &sum, 1);
        }
    }
}

// From the gradient of x^ = x norm to that of x: norm (dx^ - x^ (x^ . dx^)); X holds scale q^ and k^.
static void store_keys(Scratch *s, const Call *a, i64 row, i64 start, i64 head) {
    for (int which = 0; which < 2; which++)
        for (i64 i = 0; i < s->c; i++) {
            const float *x = s->X + (which * s->rows + i) * s->ldk, scale = which ? 1 : (float)a->scale;
            float *d = s->sums + (which * s->rows + i) * s->ldk, along = 0;
            if (a->normalize && scale != 0) along = dot(x, d, s->K) / scale;
            for (i64 p = 0; p < s->K; p++) d[p] = s->norm[which * s->rows + i] * (scale * d[p] - x[p] * along);
            put(which ? &a->dk : &a->dq, row, start + i, head, d, a->key_dim);
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
        i64 start = begin + n * a->chunk;
        load_keys(s, a, row, start, least(a->chunk, end - start), key_head);
        if (a->decay != CHANNEL) plain_products(s, a);
        clear(s->sums, 2 * s->rows * s->ldk);
        for (i64 j = 0; j < a->group; j++) {
            i64 head = key_head * a->group + j;
            get_state(s->S, s->ldv, a->states + (((first + n) * a->b + row) * hv + head) * size,
                      a->key_dim, a->value_dim, s->K);
            backward_chunk(s, a, row, start, head, s->S, s->dS + j * one);
        }
        store_keys(s, a, row, start, key_head);
    }
    for (i64 j = 0; j < a->group; j++)
        put_state(a->dstate + (sequence * hv + key_head * a->group + j) * size, s->dS + j * one, s->ldv,
                  a->key_dim, a->value_dim);
}

// ---- recurrent -----------------------------------------------------------------------------------------------------

// One token: S' = e^{log_decay} S, r = beta (v - S'^T k), o = S'^T q + (k . q) r, S = S' + k r^T; `to` may be `from`.
// S is read once from memory and once more from cache, and written once. Rows are taken four at a time, in the order
// they lie in memory; S'^T k = S^T (e^{log_decay} k), so S' is never stored. v becomes o.
static void recurrent_token(const Call *a, const float *from, float *to, const float *q, const float *k, const float *decay,
                            float *v, float *by_k, float *by_q, float beta) {
    const i64 n = a->key_dim, columns = a->value_dim, whole = columns / LANES * LANES;
    float along = 0;
    for (i64 p = 0; p < n; p++) along += q[p] * k[p];
    clear(by_k, columns), clear(by_q, columns);
    i64 p = 0;
    for (; p + 4 <= n; p += 4) {
        const float *S = from + p * columns;
        vec kp[4], qp[4];
        for (int i = 0; i < 4; i++) kp[i] = (vec){0} + decay[p + i] * k[p + i], qp[i] = (vec){0} + decay[p + i] * q[p + i];
        for (i64 x = 0; x < whole; x += LANES) {
            vec sum_k = load(by_k + x), sum_q = load(by_q + x);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                vec row = load(S + i * columns + x);
                sum_k += kp[i] * row, sum_q += qp[i] * row;
            }
            store(by_k + x, sum_k), store(by_q + x, sum_q);
        }
        for (i64 x = whole; x < columns; x++)
            for (int i = 0; i < 4; i++) by_k[x] += kp[i][0] * S[i * columns + x], by_q[x] += qp[i][0] * S[i * columns + x];
    }
    for (; p < n; p++)
        for (i64 x = 0; x < columns; x++) {
            float kept = decay[p] * from[p * columns + x];
            by_k[x] += k[p] * kept, by_q[x] += q[p] * kept;
        }
    for (i64 x = 0; x < columns; x++) {
        by_k[x] = a->corrects ? beta * (v[x] - by_k[x]) : v[x];  // r
        v[x] = by_q[x] + along * by_k[x];                        // o
    }
    for (p = 0; p < n; p++) {
        const float *S = from + p * columns;
        float *out = to + p * columns;
        const vec kp = (vec){0} + k[p], dp = (vec){0} + decay[p];
        for (i64 x = 0; x < whole; x += LANES) store(out + x, dp * load(S + x) + kp * load(by_k + x));
        for (i64 x = whole; x < columns; x++) out[x] = decay[p] * S[x] + k[p] * by_k[x];
    }
}

static void recurrent_sequence(Scratch *s, const Call *a, i64 sequence, i64 key_head) {
    const i64 hv = a->h * a->group, size = a->key_dim * a->value_dim;
    const i64 row = a->starts ? 0 : sequence, begin = a->starts ? a->starts[sequence] : 0;
    const i64 end = a->starts ? a->starts[sequence + 1] : a->t;
    float *q = s->X, *k = s->X + s->rows * s->ldk;
    for (i64 j = 0; j < a->group; j++) {
        const i64 head = key_head * a->group + j;
        const float *from = a->state + (sequence * hv + head) * size;
        float *S = a->final + (sequence * hv + head) * size;
        if (begin == end) memcpy(S, from, size * sizeof(float));
        for (i64 i = begin; i < end; i++, from = S) {
            float beta = 1;
            load_keys(s, a, row, i, 1, key_head);
            load_decay(s, a, row, i, head);
            get(s->RD, &a->v, row, i, head, a->value_dim, s->V);
            if (a->corrects) get(&beta, &a->beta, row, i, head, 1, 1);
            if (looks(a)) s->unstable |= is_unstable(beta, s->square[0]);
            recurrent_token(a, from, S, q, k, s->last, s->RD, s->E, s->R, beta);
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

int lineate_forward(const Call *call) { return start(call, forward_sequence, FORWARD); }
int lineate_backward(const Call *call) { return start(call, backward_sequence, BACKWARD); }
int lineate_recurrent(const Call *call) { return start(call, recurrent_sequence, RECURRENT); }
