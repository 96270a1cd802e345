// The sums of eight rows of x times two rows of a weight of 16 bits, for products of layers.c on an ARM processor.
//
// It is in assembly because compilers copy sums from register to register, which takes the place of products.
#pragma once
#include "products.h"
#include "vectors.h"

enum { SUM_ROWS = 8, SUM_WEIGHTS = 2, SUM_COLUMNS = 8 };  // of x, of the weight; columns of a step

// Registers: sums 0 .. 15, rows of the weight 18 19 (first four columns) and 20 21, x 24 .. 31.
#define ADD_ROW(first, second, x, low, high)                                                                     \
    "fmla v" first ".4s, v" x ".4s, v" low ".4s\n fmla v" second ".4s, v" x ".4s, v" high ".4s\n"
#define ADD_FOUR(a, b, c, d, e, f, g, h)                                                          \
    ADD_ROW(a, b, "24", "18", "19") ADD_ROW(c, d, "26", "18", "19") ADD_ROW(e, f, "28", "18", "19") \
    ADD_ROW(g, h, "30", "18", "19") ADD_ROW(a, b, "25", "20", "21") ADD_ROW(c, d, "27", "20", "21") \
    ADD_ROW(e, f, "29", "20", "21") ADD_ROW(g, h, "31", "20", "21")
#define LOAD_FOUR(a, b, c, d)                                                  \
    "ldp q24, q25, [%[" a "]], 32\n ldp q26, q27, [%[" b "]], 32\n"            \
    "ldp q28, q29, [%[" c "]], 32\n ldp q30, q31, [%[" d "]], 32\n"
#define LOAD_HALVES "ldr q16, [%[w0]], 16\n ldr q17, [%[w1]], 16\n"
#define WIDEN_BFLOAT16                                                                \
    LOAD_HALVES "zip1 v18.8h, v22.8h, v16.8h\n zip1 v19.8h, v22.8h, v17.8h\n"         \
    "zip2 v20.8h, v22.8h, v16.8h\n zip2 v21.8h, v22.8h, v17.8h\n"
#define WIDEN_FLOAT16                                                                 \
    LOAD_HALVES "fcvtl v18.4s, v16.4h\n fcvtl v19.4s, v17.4h\n"                       \
    "fcvtl2 v20.4s, v16.8h\n fcvtl2 v21.4s, v17.8h\n"
#define ZERO_FOUR(a, b, c, d) \
    "movi v" a ".4s, 0\n movi v" b ".4s, 0\n movi v" c ".4s, 0\n movi v" d ".4s, 0\n"
#define SUM_LOOP(load)                                                                                       \
    __asm__ volatile(                                                                                               \
        ZERO_FOUR("0", "1", "2", "3") ZERO_FOUR("4", "5", "6", "7") ZERO_FOUR("8", "9", "10", "11")                  \
        ZERO_FOUR("12", "13", "14", "15") "movi v22.4s, 0\n"                                                        \
        "1:\n" load LOAD_FOUR("x0", "x1", "x2", "x3") "prfm pldl2keep, [%[next]]\n add %[next], %[next], 32\n"  \
        ADD_FOUR("0", "1", "2", "3", "4", "5", "6", "7") LOAD_FOUR("x4", "x5", "x6", "x7")                          \
        ADD_FOUR("8", "9", "10", "11", "12", "13", "14", "15") "subs %[steps], %[steps], 1\n b.ne 1b\n"             \
        "stp q0, q1, [%[sums]]\n stp q2, q3, [%[sums], 32]\n stp q4, q5, [%[sums], 64]\n"                           \
        "stp q6, q7, [%[sums], 96]\n stp q8, q9, [%[sums], 128]\n stp q10, q11, [%[sums], 160]\n"                   \
        "stp q12, q13, [%[sums], 192]\n stp q14, q15, [%[sums], 224]\n"                                             \
        : [x0] "+r"(x[0]), [x1] "+r"(x[1]), [x2] "+r"(x[2]), [x3] "+r"(x[3]), [x4] "+r"(x[4]), [x5] "+r"(x[5]),     \
          [x6] "+r"(x[6]), [x7] "+r"(x[7]), [w0] "+r"(w0), [w1] "+r"(w1), [next] "+r"(next), [steps] "+r"(steps)    \
        : [sums] "r"(sums)                                                                                          \
        : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",   \
          "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v24", "v25", "v26", "v27", "v28", "v29",  \
          "v30", "v31")

// sums_ij = the lanes of sum_c x_ic weight_jc over `steps` steps of columns, one or more; the weight's rows from place
// `at` on. The rows after these are fetched meanwhile.
INLINE void sum_products(float sums[SUM_ROWS][SUM_WEIGHTS][LANES], const Product *a, const float *from, i64 at, i64 steps,
                         int kind) {
    const char *w0 = (const char *)a->weight + at * 2, *w1 = w0 + a->weight_row * 2, *next = w1 + a->weight_row * 2;
    const float *x[SUM_ROWS];
    for (int i = 0; i < SUM_ROWS; i++) x[i] = from + i * a->size;
    if (kind == FLOAT16) SUM_LOOP(WIDEN_FLOAT16);
    else SUM_LOOP(WIDEN_BFLOAT16);
}
