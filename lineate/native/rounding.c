// The scale of each group of 32 numbers that leaves the least squared error, if they are rounded to codes of -8 .. 7.
//
//   error_n = sum_c (scale_n clamp(round(x_c / scale_n)) - x_c)^2     n: the candidates of the group, side by side
#include "threads.h"
#include "vectors.h"

enum { GROUP = 32, UNIT = 64, MOST = 32 };  // numbers of a group; groups that a thread takes at a time; candidates

typedef struct {
    i64 groups, candidates, threads;
    const float *x;       // groups 32
    const float *scales;  // groups candidates
    int64_t *best;        // groups: the index of the best candidate, the first of equals
} Round;

INLINE vec choose(ivec which, vec x, vec y) { return (vec)((which & (ivec)x) | (~which & (ivec)y)); }

// The errors of LANES candidates.
INLINE vec errors_of(const float *x, vec scale) {
    const vec none = {0}, low = none - 8.f, high = none + 7.f, shift = none + 12582912.f;  // a sum with it has no fraction
    const vec inverse = choose(scale == none, none, 1.f / scale);
    vec sum = {0};
    for (int c = 0; c < GROUP; c++) {
        vec q = x[c] * inverse;
        q = choose(q > low, q, low);
        q = choose(q < high, q, high) + shift - shift;
        const vec e = q * scale - x[c];
        sum += e * e;
    }
    return sum;
}

static void work(const void *call, i64 unit) {
    const Round *a = call;
    for (i64 i = unit * UNIT; i < least((unit + 1) * UNIT, a->groups); i++) {
        float scales[MOST] = {0}, errors[MOST];
        memcpy(scales, a->scales + i * a->candidates, a->candidates * sizeof(float));
        for (i64 n = 0; n < a->candidates; n += LANES)
            store(errors + n, errors_of(a->x + i * GROUP, load(scales + n, LANES)), LANES);
        i64 best = 0;
        for (i64 n = 1; n < a->candidates; n++) best = errors[n] < errors[best] ? n : best;
        a->best[i] = best;
    }
}

int lineate_round(const Round *a) {
    if (a->candidates > MOST) return 1;
    lineate_spread(work, a, blocks(a->groups, UNIT), a->groups * GROUP * a->candidates, a->threads);
    return 0;
}
