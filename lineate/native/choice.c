// The next token of each row, as lineate/generation/choice.py draws it:
//
//   token = argmax_i (s_i + noise(seed, position, i)) over the tokens that are kept,    s_i = (logit_i - highest) / temperature
//
// Kept are the k likeliest, of these the likeliest whose probabilities together reach p, and of these the ones with
// s_i >= least; equal ones in the order of their ids. The noise of a block of 64 tokens is at most that of its lowest
// uniform number, which one hash gives: most blocks cannot win, and are not looked at. Nor are all tokens sorted: they are
// counted in buckets by s_i, and only the bucket in which a limit is reached is sorted.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;
typedef uint64_t u64;
#define INLINE static inline __attribute__((always_inline))

typedef struct {  // words of 64 bits, filled in by choice.py
    i64 rows, vocab, logits_row;
    const float *logits;                // rows vocab, logits_row apart
    const float *temperatures, *least;  // rows each; least: the lowest s_i, of min_p
    const double *ps;
    const i64 *ks, *seeds, *positions;
    i64 *tokens;
} Choice;

enum { BLOCK = 64, BITS = 40, BUCKETS = 2048, NO_MEMORY = 1, NOT_FINITE = 2 };
static const u64 GOLDEN = 0x9E3779B97F4A7C15u;
static const float SLACK = 1e-3f, WIDEST = 40;  // below e^-40 of the likeliest, tokens share the last bucket

// ---- the noise -----------------------------------------------------------------------------------------------------

INLINE u64 mixed(u64 x) {  // the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

INLINE float below_one(float x) { return fminf(x, 1 - 0x1p-24f); }
INLINE float uniform(u64 hashed) { return below_one(((float)(i64)(hashed >> (64 - BITS)) + 0.5f) * 0x1p-40f); }
INLINE float gumbel(float u) { return -logf(-log1pf(-below_one(u))); }

typedef struct {
    u64 first, second;  // hashes of the seed and position, for the lowest number of a block and for the others
} Key;

INLINE Key key_of(i64 seed, i64 position) {
    u64 key = mixed(mixed((u64)seed + GOLDEN) + (u64)position * GOLDEN);
    return (Key){key, mixed(key + 1)};
}

INLINE float lowest(Key key, i64 block, i64 *lane) {  // the lowest number of a block, and the token that has it
    u64 hashed = mixed((u64)block * GOLDEN + key.first);
    *lane = block * BLOCK + (i64)(hashed & (BLOCK - 1));
    return -expm1f(log1pf(-uniform(hashed)) / BLOCK);
}

INLINE float noise(Key key, i64 token, i64 lane, float low) {
    if (token == lane) return gumbel(low);
    float u = uniform(mixed((u64)token * GOLDEN + key.second));
    return gumbel(u * (1 - low) + low);
}

// ---- what is kept --------------------------------------------------------------------------------------------------

typedef struct {
    const float *s;
    i64 vocab;
    float scale;  // buckets per unit of s
} Row;

typedef struct {
    float s;
    i64 token;
} Entry;

static int by_likelihood(const void *a, const void *b) {
    const Entry *x = a, *y = b;
    if (x->s != y->s) return x->s > y->s ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

INLINE i64 bucket_of(const Row *r, float s) {
    float at = -s * r->scale;  // NaN where s is -inf and the scale 0
    return at < BUCKETS - 1 ? (i64)at : BUCKETS - 1;
}

// e^x for x in -87 .. 0, to 2e-7; without branches, so that a compiler computes many at a time.
INLINE float exponential(float x) {
    x = x > -87.f ? x : -87.f;
    float n = floorf(x * 1.44269504f + 0.5f), y = x - n * 0.693359375f + n * 2.12194440e-4f;
    float e = 1.9875691500e-4f * y + 1.3981999507e-3f;
    e = e * y + 8.3334519073e-3f;
    e = e * y + 4.1665795894e-2f;
    e = e * y + 1.6666665459e-1f;
    e = e * y + 5.0000001201e-1f;
    e = e * y * y + y + 1.f;
    union {
        int32_t i;
        float f;
    } power = {((int32_t)n + 127) << 23};
    return e * power.f;
}

// Gathers the tokens of the buckets from..to, the likeliest first; the caller has made room for them.
static i64 gather(const Row *r, i64 from, i64 to, Entry *found) {
    i64 n = 0;
    for (i64 i = 0; i < r->vocab; i++) {
        i64 b = bucket_of(r, r->s[i]);
        if (b >= from && b <= to) found[n++] = (Entry){r->s[i], i};
    }
    qsort(found, n, sizeof *found, by_likelihood);
    return n;
}

// The last token that is kept: of the likeliest k, those before which less than p of their mass lies.
static Entry last_kept(const Row *r, i64 k, double p, float *weights, Entry *room) {
    static const Entry all = {-INFINITY, INT64_MAX};
    double mass[BUCKETS] = {0}, whole = 0, before = 0;
    i64 count[BUCKETS] = {0}, seen = 0, b = 0;
    for (i64 i = 0; i < r->vocab; i++) weights[i] = exponential(r->s[i]);
    for (i64 i = 0; i < r->vocab; i++) {
        i64 own = bucket_of(r, r->s[i]);
        mass[own] += r->s[i] > -87.f ? weights[i] : 0;
        count[own]++;
    }
    if (k < r->vocab) {
        while (seen + count[b] < k) seen += count[b++];
        i64 n = gather(r, 0, b, room);
        n = n < k ? n : k;
        for (i64 i = 0; i < n; i++) whole += exp((double)room[i].s);
        for (i64 i = 0; i < n; i++) {
            double own = exp((double)room[i].s);
            if (i && !(before < p * whole)) return room[i - 1];
            before += own;
        }
        return room[n - 1];
    }
    for (i64 i = 0; i < BUCKETS; i++) whole += mass[i];
    while (b < BUCKETS && before + mass[b] < p * whole) before += mass[b++];
    if (b == BUCKETS) return all;
    i64 n = gather(r, b, b, room);
    Entry last = all;
    for (i64 i = 0; i < n && before < p * whole; i++) {
        last = room[i];
        before += exp((double)room[i].s);
    }
    return last;
}

// ---- the winner ----------------------------------------------------------------------------------------------------

typedef struct {
    float value;
    i64 token;
} Best;

INLINE void try_block(const Row *r, Key key, i64 block, Entry last, float least, Best *best) {
    i64 lane, end = (block + 1) * BLOCK < r->vocab ? (block + 1) * BLOCK : r->vocab;
    float low = lowest(key, block, &lane);
    for (i64 i = block * BLOCK; i < end; i++) {
        float s = r->s[i];
        if (!(s > last.s || (s == last.s && i <= last.token)) || (s < least && s < 0)) continue;
        float value = noise(key, i, lane, low) + s;
        if (value > best->value || (value == best->value && i < best->token)) *best = (Best){value, i};
    }
}

static i64 winner(const Row *r, Key key, Entry last, float least, float *bounds) {
    i64 blocks = (r->vocab + BLOCK - 1) / BLOCK, first = 0;
    for (i64 b = 0; b < blocks; b++) {
        i64 lane, end = (b + 1) * BLOCK < r->vocab ? (b + 1) * BLOCK : r->vocab;
        float high = -INFINITY;
        for (i64 i = b * BLOCK; i < end; i++) high = r->s[i] > high ? r->s[i] : high;
        bounds[b] = high < last.s ? -INFINITY : high + gumbel(lowest(key, b, &lane));
        if (bounds[b] > bounds[first]) first = b;
    }
    Best best = {-INFINITY, INT64_MAX};
    try_block(r, key, first, last, least, &best);
    for (i64 b = 0; b < blocks; b++)
        if (b != first && bounds[b] > -INFINITY && bounds[b] >= best.value - SLACK)
            try_block(r, key, b, last, least, &best);
    return best.token;
}

static int choose_row(const Choice *a, i64 row, float *s, float *weights, Entry *room) {
    const float *x = a->logits + row * a->logits_row, temperature = a->temperatures[row];
    float highest = -INFINITY, least_s = 0;
    int odd = 0;
    for (i64 i = 0; i < a->vocab; i++) {
        highest = x[i] > highest ? x[i] : highest;
        odd |= x[i] != x[i];
    }
    if (odd || !(highest > -INFINITY && highest < INFINITY)) return NOT_FINITE;
    for (i64 i = 0; i < a->vocab; i++) {  // the difference first, so that a very low temperature does not overflow
        s[i] = (x[i] - highest) / temperature;
        least_s = s[i] < least_s ? s[i] : least_s;
    }
    float range = fminf(-least_s, WIDEST);
    Row r = {s, a->vocab, range > 0 ? (BUCKETS - 1) / range : 0};
    Entry last = {-INFINITY, INT64_MAX};
    if (a->ks[row] < a->vocab || a->ps[row] < 1) last = last_kept(&r, a->ks[row], a->ps[row], weights, room);
    // A token of probability 0 is never drawn.
    if (last.s == -INFINITY) last = (Entry){-0x1.fffffep127f, INT64_MAX};
    a->tokens[row] = winner(&r, key_of(a->seeds[row], a->positions[row]), last, a->least[row], weights);
    return 0;
}

int lineate_choose(const Choice *a) {
    float *s = malloc(a->vocab * sizeof *s), *weights = malloc(a->vocab * sizeof *weights);
    Entry *room = malloc(a->vocab * sizeof *room);
    int failed = s && weights && room ? 0 : NO_MEMORY;
    for (i64 row = 0; row < a->rows && !failed; row++) failed = choose_row(a, row, s, weights, room);
    free(s);
    free(weights);
    free(room);
    return failed;
}
