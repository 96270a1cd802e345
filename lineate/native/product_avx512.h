// The sums of eight rows of x times three rows of a weight, for products of layers.c on a processor with AVX-512. Its
// registers hold 24 sums, three vectors of the weight and one of x, so the weight is read once for all eight rows.
#pragma once
#include "products.h"
#include "vectors.h"

enum { SUM_ROWS = 8, SUM_WEIGHTS = 3, SUM_COLUMNS = LANES };  // of x, of the weight; columns of a step
enum { NEAR_COLUMNS = 512 };                                  // of x, which fill half of the nearest cache

#define EACH_OWN _Pragma("GCC unroll 3") for (int j = 0; j < SUM_WEIGHTS; j++)
#define EACH_SUM _Pragma("GCC unroll 8") for (int i = 0; i < SUM_ROWS; i++) EACH_OWN

// sums_ij += the lanes of sum_c x_ic weight_jc over so many columns, one or more times SUM_COLUMNS. x: LANES columns of
// one row after the other. weight: bytes `apart` from row to row. The rows after these are fetched.
INLINE void sum_products(float sums[SUM_ROWS][SUM_WEIGHTS][LANES], const float *x, const char *weight, i64 apart,
                         i64 columns, int kind) {
    const i64 bytes = kind == FLOAT32 ? 4 : 2;
    vec sum[SUM_ROWS][SUM_WEIGHTS], w[SUM_WEIGHTS];
    EACH_SUM sum[i][j] = load(sums[i][j], LANES);
    for (i64 c = 0; c < columns; c += LANES, x += SUM_ROWS * LANES) {
        EACH_OWN {
            const char *own = weight + j * apart + c * bytes;
            __builtin_prefetch(own + SUM_WEIGHTS * apart, 0, 2);
            w[j] = widen(own, 0, LANES, kind);
        }
        EACH_SUM sum[i][j] += load(x + i * LANES, LANES) * w[j];
    }
    EACH_SUM store(sums[i][j], sum[i][j], LANES);
}
