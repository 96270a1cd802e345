// The sums of eight rows of x times three rows of a weight, for products of layers.c on an ARM processor.
//
// It is in assembly because compilers copy sums from register to register, which takes the place of products.
#pragma once
#include "products.h"
#include "vectors.h"

enum { SUM_ROWS = 8, SUM_WEIGHTS = 3, SUM_COLUMNS = 8 };  // of x, of the weight; columns of a step
enum { NEAR_COLUMNS = 1024 };                             // of x, which stay in the nearest cache

// Registers: sums 0 .. 23, the weight's rows 24 25 26 and, as they are stored in 16 bits, 27 28 29, x 30 31.
#define ADD(first, second, w)                                                                     \
    "fmla v" first ".4s, v30.4s, v" w ".4s\n fmla v" second ".4s, v31.4s, v" w ".4s\n"
#define LOAD_X(at) "ldp q30, q31, [%[x], " at "]\n"
#define TWO_ROWS(at, a, b, c, d, e, f) LOAD_X(at) ADD(a, d, "24") ADD(b, e, "25") ADD(c, f, "26")
#define SIX_ROWS(first, second, third)                                                            \
    TWO_ROWS(first, "0", "1", "2", "3", "4", "5") TWO_ROWS(second, "6", "7", "8", "9", "10", "11") \
    TWO_ROWS(third, "12", "13", "14", "15", "16", "17")
// The numbers that follow are widened as soon as those before them were used for the last time, since a processor that
// takes the oldest operation first would otherwise wait for them.
#define LAST_ROWS(at, widen)                                                                          \
    LOAD_X(at) ADD("18", "21", "24") widen("24", "27") ADD("19", "22", "25") widen("25", "28")        \
    ADD("20", "23", "26") widen("26", "29")
#define LOAD_WEIGHTS(a, b, c) \
    "ldr q" a ", [%[w0]], 16\n ldr q" b ", [%[w1]], 16\n ldr q" c ", [%[w2]], 16\n"
#define NOTHING(to, from) ""
#define FOUR_COLUMNS                                                                                                  \
    LOAD_WEIGHTS("24", "25", "26") SIX_ROWS("0", "32", "64") LAST_ROWS("96", NOTHING) "add %[x], %[x], 128\n"
#define OF_FLOAT32 FOUR_COLUMNS FOUR_COLUMNS
// Of 16 bits, the first four columns were widened before. What is loaded for the next step is, after the last one, the
// same again.
#define OF_HALVES(low, high)                                                                                          \
    SIX_ROWS("0", "32", "64") LAST_ROWS("96", high)                                                                   \
    "subs %[steps], %[steps], 1\n csel %[ahead], %[bytes], xzr, ne\n"                                                 \
    "add %[w0], %[w0], %[ahead]\n add %[w1], %[w1], %[ahead]\n add %[w2], %[w2], %[ahead]\n"                          \
    "ldr q27, [%[w0]]\n ldr q28, [%[w1]]\n ldr q29, [%[w2]]\n"                                                        \
    SIX_ROWS("128", "160", "192") LAST_ROWS("224", low) "add %[x], %[x], 256\n"
#define BEGIN_HALVES(low) \
    "ldr q27, [%[w0]]\n ldr q28, [%[w1]]\n ldr q29, [%[w2]]\n" low("24", "27") low("25", "28") low("26", "29")
#define BFLOAT16_LOW(to, from) "shll v" to ".4s, v" from ".4h, 16\n"
#define BFLOAT16_HIGH(to, from) "shll2 v" to ".4s, v" from ".8h, 16\n"
#define FLOAT16_LOW(to, from) "fcvtl v" to ".4s, v" from ".4h\n"
#define FLOAT16_HIGH(to, from) "fcvtl2 v" to ".4s, v" from ".8h\n"
#define OF_BFLOAT16 OF_HALVES(BFLOAT16_LOW, BFLOAT16_HIGH)
#define OF_FLOAT16 OF_HALVES(FLOAT16_LOW, FLOAT16_HIGH)
#define MOVE_SUMS(move)                                                                                               \
    move " q0, q1, [%[sums]]\n" move " q2, q3, [%[sums], 32]\n" move " q4, q5, [%[sums], 64]\n"                       \
    move " q6, q7, [%[sums], 96]\n" move " q8, q9, [%[sums], 128]\n" move " q10, q11, [%[sums], 160]\n"               \
    move " q12, q13, [%[sums], 192]\n" move " q14, q15, [%[sums], 224]\n" move " q16, q17, [%[sums], 256]\n"          \
    move " q18, q19, [%[sums], 288]\n" move " q20, q21, [%[sums], 320]\n" move " q22, q23, [%[sums], 352]\n"
// The rows after these are fetched, a line at a time of each: 64 bytes have `part` steps.
#define FETCH "prfm pldl2keep, [%[w0], %[next]]\n prfm pldl2keep, [%[w1], %[next]]\n prfm pldl2keep, [%[w2], %[next]]\n"
#define SUM_LOOP(begin, line, step, part)                                                                             \
    i64 lines = steps / part, more = steps % part, ahead;                                                             \
    __asm__ volatile(                                                                                                 \
        MOVE_SUMS("ldp") begin "cbz %[lines], 2f\n 1:\n" FETCH line "sub %[lines], %[lines], 1\n cbnz %[lines], 1b\n" \
        "2:\n cbz %[more], 4f\n 3:\n" step "sub %[more], %[more], 1\n cbnz %[more], 3b\n 4:\n" MOVE_SUMS("stp")       \
        : [x] "+r"(x), [w0] "+r"(w0), [w1] "+r"(w1), [w2] "+r"(w2), [lines] "+r"(lines), [more] "+r"(more),           \
          [steps] "+r"(steps), [ahead] "=&r"(ahead)                                                                   \
        : [sums] "r"(sums), [next] "r"(SUM_WEIGHTS * apart), [bytes] "r"(16l)                                         \
        : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",     \
          "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28",    \
          "v29", "v30", "v31")

// sums_ij += the lanes of sum_c x_ic weight_jc over so many columns, one or more times SUM_COLUMNS. x: LANES columns of
// one row after the other. weight: bytes `apart` from row to row.
INLINE void sum_products(float sums[SUM_ROWS][SUM_WEIGHTS][LANES], const float *x, const char *weight, i64 apart,
                         i64 columns, int kind) {
    const char *w0 = weight, *w1 = w0 + apart, *w2 = w1 + apart;
    i64 steps = columns / SUM_COLUMNS;
    if (kind == FLOAT32) {
        SUM_LOOP("", OF_FLOAT32 OF_FLOAT32, OF_FLOAT32, 2);
    } else if (kind == FLOAT16) {
        SUM_LOOP(BEGIN_HALVES(FLOAT16_LOW), OF_FLOAT16 OF_FLOAT16 OF_FLOAT16 OF_FLOAT16, OF_FLOAT16, 4);
    } else {
        SUM_LOOP(BEGIN_HALVES(BFLOAT16_LOW), OF_BFLOAT16 OF_BFLOAT16 OF_BFLOAT16 OF_BFLOAT16, OF_BFLOAT16, 4);
    }
}
