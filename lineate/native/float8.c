// x weight^T for weights of float8, on a CPU: the layout of lineate/quantised.
//
//   y_r = sum_g scale_rg sum_c code_rc x_c     g = c / 128
//
// x stays as it is. 128 columns of a tile of 16 rows are decoded into the cache and multiplied with all rows of x. A row
// of y is summed in one order: its bits depend on nothing but its row of x.
#include <string.h>
#include "products.h"

typedef int64_t i64;
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
enum { TILE = 16, COLUMNS = 128, CHAINS = 4 };  // columns that share a scale; sums of a row that do not wait for another
#if defined(__AVX512F__)
enum { BYTES = 64, ROWS = 4 };  // of a register; rows of x whose sums are kept in registers
#elif defined(__AVX2__)
enum { BYTES = 32, ROWS = 2 };
#else
enum { BYTES = 16, ROWS = 4 };
#endif
enum { LANES = BYTES / 4, PARTS = TILE / LANES };  // registers of 16 rows
typedef float vec __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(BYTES), aligned(4), may_alias));
INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

// Four columns of 16 rows. The bits of a code (a sign, 4 of an exponent from 7 on, 3 digits) are put where float has
// them; its exponent counts from 127.
INLINE void decode(const uint8_t *codes, vec (*made)[PARTS]) {
    UNROLL for (int p = 0; p < PARTS; p++) {
        const words w = *(const words *)(codes + p * BYTES);
        UNROLL for (int j = 0; j < 4; j++) {
            const words bits = ((w << (24 - 8 * j)) & 0x80000000u) | (((w >> (8 * j)) & 0x7f) << 20);
            made[j][p] = (vec)bits * 0x1p120f;
        }
    }
}

// y += scale sum_c code_c x_c for some rows of x and `columns` columns, a multiple of 4.
INLINE void add(const Quantised *a, vec (*code)[PARTS], const float *scale, i64 tile, i64 row, i64 first, i64 columns,
                int rows) {
    const float *x = a->x + row * a->size + first;
    const i64 n = least(TILE, a->out - tile * TILE);
    vec made[ROWS][PARTS];
    UNROLL for (int p = 0; p < PARTS; p++) {
        vec part[ROWS][CHAINS] = {0};
        for (i64 c = 0; c < columns; c += CHAINS)
            UNROLL for (int j = 0; j < CHAINS; j++) UNROLL for (int r = 0; r < rows; r++)
                part[r][j] += code[c + j][p] * x[r * a->size + c + j];
        UNROLL for (int r = 0; r < rows; r++)
            made[r][p] = ((part[r][0] + part[r][1]) + (part[r][2] + part[r][3])) * *(const vec *)(scale + p * LANES);
    }
    UNROLL for (int r = 0; r < rows; r++) {
        float *y = a->y + (row + r) * a->out + tile * TILE;
        float whole[TILE] = {0};
        if (first) memcpy(whole, y, n * sizeof(float));
        UNROLL for (int p = 0; p < PARTS; p++) *(vec *)(whole + p * LANES) += made[r][p];
        memcpy(y, whole, n * sizeof(float));
    }
}

void lineate_float8_tile(const Quantised *a, i64 tile) {
    const i64 groups = (a->size + COLUMNS - 1) / COLUMNS;
    const float *scales = (const float *)a->scales + tile * groups * TILE;
    const uint8_t *codes = a->codes + tile * a->size * TILE;
    for (i64 g = 0; g < groups; g++, scales += TILE) {
        const i64 first = g * COLUMNS, columns = least(COLUMNS, a->size - first);
        vec code[COLUMNS][PARTS];
        for (i64 c = 0; c < columns; c += 4) decode(codes + (first + c) * TILE, code + c);
        i64 row = 0;
        for (; row + ROWS <= a->rows; row += ROWS) add(a, code, scales, tile, row, first, columns, ROWS);
        for (; row < a->rows; row++) add(a, code, scales, tile, row, first, columns, 1);
    }
}
