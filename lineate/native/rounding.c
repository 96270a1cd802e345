// The scale of each group of 32 numbers that leaves the least squared error, if they are rounded to codes.
//
//   error_n = sum_c (scale_n clamp(round(x_c / scale_n)) - x_c)^2     n: the candidates of the group, side by side
#include "threads.h"
#include "vectors.h"

enum { GROUP = 32, UNIT = 64, MOST = 32 };  // numbers of a group; groups that a thread takes at a time; candidates

typedef struct {
    i64 groups, candidates, zero, threads;  // codes are -zero .. zero - 1; zero = 8 or 128
    const float *x;       // groups 32
    const float *scales;  // groups candidates
    int64_t *best;        // groups: the index of the best candidate, the first of equals
} Round;

INLINE vec choose(ivec which, vec x, vec y) { return (vec)((which & (ivec)x) | (~which & (ivec)y)); }

// The errors of LANES candidates. Those of 8 bits leave no number without a code.
INLINE vec errors_of(const float *x, vec scale, int zero) {
    const vec none = {0}, low = none - (float)zero, high = none + (float)(zero - 1);
    const vec shift = none + 12582912.f;  // a sum with it has no fraction
    const vec inverse = choose(scale == none, none, 1.f / scale);
    vec sum = {0};
    for (int c = 0; c < GROUP; c++) {
        vec q = x[c] * inverse;
        if (zero == 8) {
            q = choose(q > low, q, low);
            q = choose(q < high, q, high);
        }
        const vec e = (q + shift - shift) * scale - x[c];
        sum += e * e;
    }
    return sum;
}

static void work(const void *call, i64 unit) {
    const Round *a = call;
    for (i64 i = unit * UNIT; i < least((unit + 1) * UNIT, a->groups); i++) {
        const float *x = a->x + i * GROUP;
        float scales[MOST] = {0}, errors[MOST];
        memcpy(scales, a->scales + i * a->candidates, a->candidates * sizeof(float));
        for (i64 n = 0; n < a->candidates; n += LANES) {
            const vec scale = load(scales + n, LANES);
            store(errors + n, a->zero == 8 ? errors_of(x, scale, 8) : errors_of(x, scale, 128), LANES);
        }
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
