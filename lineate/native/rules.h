// What the C files of the rules share: vectors, the matrix product, strided tensors, decay factors, scratch memory, threads.
//
// Rows are tokens. Every matrix in scratch memory has its rows and columns filled up with zeros to whole tiles.
#pragma once
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

// ---- vectors, and the matrix product -------------------------------------------------------------------------------

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 8, VECS = 2 };
#elif defined(__AVX2__)
enum { LANES = 8, ROWS = 4, VECS = 2 };
#else
enum { LANES = 4, ROWS = 4, VECS = 4 };
#endif
enum { TILE = LANES * VECS, PAD_ROWS = 8, PAD_COLS = 32, SKEW = 16, BLOCK = 16 };  // SKEW keeps rows off each other's cache sets
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))
INLINE i64 up(i64 n, i64 to) { return (n + to - 1) / to * to; }
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
INLINE vec load(const float *x) { return *(const vec *)x; }
INLINE void store(float *x, vec y) { *(vec *)x = y; }

// c [m, n] = (c if add) + a [m, k] b [k, n]; a is read at a[i * ar + p * ak], so a transposed a is only other strides.
// m is a multiple of PAD_ROWS, n of TILE.
static void multiply(i64 m, i64 n, i64 k, const float *a, i64 ar, i64 ak, const float *b, i64 ldb, float *c, i64 ldc,
                     int add) {
    for (i64 j = 0; j < n; j += TILE)
        for (i64 i = 0; i < m; i += ROWS) {
            vec sum[ROWS][VECS];
            float *out = c + i * ldc + j;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                for (int s = 0; s < VECS; s++) sum[r][s] = add ? load(out + r * ldc + s * LANES) : (vec){0};
            const float *left = a + i * ar, *right = b + j;
            for (i64 p = 0; p < k; p++, left += ak, right += ldb) {
                vec row[VECS];
#pragma GCC unroll 4
                for (int s = 0; s < VECS; s++) row[s] = load(right + s * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    const float x = left[r * ar];
#pragma GCC unroll 4
                    for (int s = 0; s < VECS; s++) sum[r][s] += x * row[s];
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                for (int s = 0; s < VECS; s++) store(out + r * ldc + s * LANES, sum[r][s]);
        }
}

static void transpose(i64 m, i64 n, const float *x, i64 ldx, float *y, i64 ldy) {
    for (i64 i = 0; i < m; i += 8)
        for (i64 j = 0; j < n; j++)
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) y[j * ldy + i + r] = x[(i + r) * ldx + j];
}

// e^x for x <= 0; what would be denormal is 0, and so is e^-inf.
INLINE vec exponential(vec x) {
    const vec magic = (vec){0} + 12582912.f;
    vec n = (x * 1.44269504088896341f + magic) - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = (vec){0} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    ivec none = x < -87.f;  // not so for NaN, which stays NaN
    return (vec)((ivec)(p * (vec)power) & ~none);
}

INLINE float total(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

static float dot(const float *x, const float *y, i64 n) {
    vec sum = {0};
    for (i64 i = 0; i < n; i += LANES) sum += load(x + i) * load(y + i);
    return total(sum);
}

static void scale_to(float *x, const float *y, float a, i64 n) {
    for (i64 i = 0; i < n; i += LANES) store(x + i, a * load(y + i));
}

static void add_scaled(float *x, const float *y, float a, i64 n) {
    for (i64 i = 0; i < n; i += LANES) store(x + i, load(x + i) + a * load(y + i));
}

static void times(float *x, const float *y, const float *z, i64 n) {
    for (i64 i = 0; i < n; i += LANES) store(x + i, load(y + i) * load(z + i));
}

static void add_times(float *x, const float *y, const float *z, i64 n) {
    for (i64 i = 0; i < n; i += LANES) store(x + i, load(x + i) + load(y + i) * load(z + i));
}

static void clear(float *x, i64 n) { memset(x, 0, n * sizeof(float)); }

static void fill(float *x, float value, i64 n) {
    for (i64 i = 0; i < n; i += LANES) store(x + i, (vec){0} + value);
}

// ---- strided tensors ------------------------------------------------------------------------------------------------

enum { NONE = 0, HEAD = 1, CHANNEL = 2 };

typedef struct {  // b t heads d, the last dimension dense; strides in elements
    void *data;
    i64 row, token, head;
    i64 half;  // 1: bfloat16, 0: float32
} Tensor;

INLINE void *at(const Tensor *x, i64 row, i64 token, i64 head) {
    i64 i = row * x->row + token * x->token + head * x->head;
    return x->half ? (void *)((uint16_t *)x->data + i) : (void *)((float *)x->data + i);
}

// Copies n numbers into `to` and fills it up with zeros.
static void get(float *to, const Tensor *x, i64 row, i64 token, i64 head, i64 n, i64 filled) {
    const void *from = at(x, row, token, head);
    if (x->half) {
        const uint16_t *bits = from;
        for (i64 i = 0; i < n; i++) ((uint32_t *)to)[i] = (uint32_t)bits[i] << 16;
    } else
        memcpy(to, from, n * sizeof(float));
    clear(to + n, filled - n);
}

static void put(const Tensor *x, i64 row, i64 token, i64 head, const float *from, i64 n) {
    void *to = at(x, row, token, head);
    if (!x->half) {
        memcpy(to, from, n * sizeof(float));
        return;
    }
    uint16_t *bits = to;
    for (i64 i = 0; i < n; i++) {  // to nearest, ties to even; NaN stays NaN
        uint32_t wide = ((const uint32_t *)from)[i];
        bits[i] = from[i] != from[i] ? 0x7fc0 : (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    }
}

// Copies a state, key_dim value_dim, into S [K, ldv] and fills it up with zeros.
static void get_state(float *S, i64 ldv, const float *from, i64 key_dim, i64 value_dim, i64 K) {
    for (i64 p = 0; p < K; p++) {
        i64 n = p < key_dim ? value_dim : 0;
        memcpy(S + p * ldv, from + p * value_dim, n * sizeof(float));
        clear(S + p * ldv + n, ldv - n);
    }
}

static void put_state(float *to, const float *S, i64 ldv, i64 key_dim, i64 value_dim) {
    for (i64 p = 0; p < key_dim; p++) memcpy(to + p * value_dim, S + p * ldv, value_dim * sizeof(float));
}

// ---- decay per channel ---------------------------------------------------------------------------------------------
//
// Products over just the tokens they span: a reset leaves no trace behind it. decay = e^{log_decay}, rows of ldk.

// Loads the decay of c tokens; `positive` gets whether any log_decay was above 0.
static void load_channel_decay(float *decay, const Tensor *log_decay, i64 row, i64 start, i64 head, i64 c, i64 key_dim, i64 K,
                               i64 ldk, ivec *positive) {
    for (i64 i = 0; i < c; i++) {
        float *x = decay + i * ldk;
        get(x, log_decay, row, start + i, head, key_dim, K);
        for (i64 p = 0; p < K; p += LANES) {
            *positive |= load(x + p) > 0;
            store(x + p, exponential(load(x + p)));
        }
    }
}

// ER = e^{G_i}, EW = e^{G_c - G_j}, last = e^{G_c}.
static void channel_factors(float *ER, float *EW, float *last, const float *decay, i64 c, i64 K, i64 ldk) {
    scale_to(ER, decay, 1, K);
    for (i64 i = 1; i < c; i++) times(ER + i * ldk, ER + (i - 1) * ldk, decay + i * ldk, K);
    scale_to(last, ER + (c - 1) * ldk, 1, K);
    fill(EW + (c - 1) * ldk, 1, K);
    for (i64 i = c - 2; i >= 0; i--) times(EW + i * ldk, EW + (i + 1) * ldk, decay + (i + 1) * ldk, K);
}

// span = e^{G_i - G_border} of the rows [start, stop) about the border before them.
static void span_block(float *span, const float *decay, i64 start, i64 stop, i64 K, i64 ldk) {
    scale_to(span, decay + start * ldk, 1, K);
    for (i64 i = start + 1; i < stop; i++) times(span + (i - start) * ldk, span + (i - 1 - start) * ldk, decay + i * ldk, K);
}

// Brings the writers' factors, carry, from the border before [start, stop) to the border after it.
static void carry_on(float *carry, const float *span, const float *decay, i64 start, i64 stop, i64 K, i64 ldk) {
    for (i64 j = 0; j < start; j++) times(carry + j * ldk, carry + j * ldk, span + (stop - 1 - start) * ldk, K);
    fill(carry + (stop - 1) * ldk, 1, K);
    for (i64 j = stop - 2; j >= start; j--) times(carry + j * ldk, carry + (j + 1) * ldk, decay + (j + 1) * ldk, K);
}

// ---- scratch memory ------------------------------------------------------------------------------------------------

typedef struct {
    float **at;
    i64 size;
} Part;

// Gives each part its own memory of one zeroed block, which the caller frees; returns 1 if there is none.
static int allot(const Part *plan, i64 parts, void **memory) {
    i64 floats = 0;
    for (i64 i = 0; i < parts; i++) floats += up(plan[i].size, 32);
    if (posix_memalign(memory, 128, floats * sizeof(float))) return 1;
    clear(*memory, floats);
    float *next = *memory;
    for (i64 i = 0; i < parts; i++) *plan[i].at = next, next += up(plan[i].size, 32);
    return 0;
}

// ---- threads -------------------------------------------------------------------------------------------------------

enum { RECURRENT, FORWARD, BACKWARD };
enum { NO_MEMORY = 1, POSITIVE_DECAY = 2, UNSTABLE = 4 };  // bits of what is returned
enum { WORTH_A_THREAD = 1 << 17 };  // elements of state updated: what a thread should get to be worth starting

typedef struct Job Job;
struct Job {
    int (*run)(Job *);  // does units until there is none; returns the bits above
    i64 units;
    atomic_llong next;
    atomic_int failed;
};

// The next unit of work, or -1.
static i64 next_unit(Job *job) {
    i64 i = atomic_fetch_add(&job->next, 1);
    return i < job->units ? i : -1;
}

static i64 useful_threads(i64 threads, i64 work) { return least(threads, 1 + work / WORTH_A_THREAD); }

INLINE int any(ivec x) {
    for (int i = 0; i < LANES; i++)
        if (x[i]) return 1;
    return 0;
}

static void *run_in_thread(void *argument) {
    Job *job = argument;
#if defined(__SSE2__)
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);  // denormals are 0: beside anything else they are, and they are slow
#endif
    atomic_fetch_or(&job->failed, job->run(job));
#if defined(__SSE2__)
    _mm_setcsr(mode);
#endif
    return NULL;
}

static int run_job(Job *job, i64 most_threads) {
    i64 helpers = least(most_threads, job->units) - 1, started = 0;
    pthread_t *threads = helpers > 0 ? malloc(helpers * sizeof *threads) : NULL;
    for (; threads && started < helpers; started++)
        if (pthread_create(threads + started, NULL, run_in_thread, job)) break;
    run_in_thread(job);
    for (i64 i = 0; i < started; i++) pthread_join(threads[i], NULL);
    free(threads);
    return atomic_load(&job->failed);
}
