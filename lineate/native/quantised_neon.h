// The products of quantised.c on an ARM processor that multiplies four pairs of bytes at a time (SDOT).
//
// Conversions of integers to floats are slow there: sums begin at the bits of 1.5 * 2^23, and are read as floats, which
// are exact below 2^22. With two planes, 128 h + l is rounded once, as the conversion of the integer would be.
//
// A few rows of x are multiplied with codes as they come from memory. For more rows, the codes of some tiles are made
// signed bytes first, which all rows read from the cache.
#pragma once
#include <arm_neon.h>

enum { BEGIN = 0x4B400000 };     // the bits of 12582912.f
enum { FEW = 3, AHEAD = 12288 };  // rows that read codes from memory; bytes of codes that are fetched ahead
enum { AHEAD_FAST = 1024 };      // the same where one row is multiplied as fast as memory is read
enum { SPAN = 32, PANEL = 2 };   // groups and tiles that stay in the cache while all rows pass
enum { TOGETHER = 4 };           // rows whose sums are kept in registers
enum { MOST_FETCHED = 32 };      // rows that wait for 8-bit codes of the next panel, unless they are fetched meanwhile

INLINE int32x4_t dot_four(int32x4_t sum, int8x16_t codes, int8x16_t x, int four) {
    switch (four) {
        case 0: return vdotq_laneq_s32(sum, codes, x, 0);
        case 1: return vdotq_laneq_s32(sum, codes, x, 1);
        case 2: return vdotq_laneq_s32(sum, codes, x, 2);
        default: return vdotq_laneq_s32(sum, codes, x, 3);
    }
}

INLINE float32x4_t widened(const uint16_t *x) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }

// The sum of a group as a float, from the sums of its planes.
INLINE float32x4_t sum_as_float(int32x4_t high, int32x4_t low, int planes) {
    const float32x4_t begin = vdupq_n_f32(12582912.f), last = vreinterpretq_f32_s32(low) - begin;
    return planes == 1 ? last : vfmaq_n_f32(last, vreinterpretq_f32_s32(high) - begin, 128.f);
}

// ---- x as integers -------------------------------------------------------------------------------------------------

// Rounds a group of x to q = x / scale, of at most 127 in size, or 127 * 128 + 63 with two planes.
INLINE void round_group(const Rounded *w, i64 row, i64 group, int planes) {
    const float *x = w->call.x + row * w->call.size + group * GROUP;
    const float top = planes == 2 ? 127 * 128 + 63 : 127;
    int8_t *q = w->q + row * planes * w->call.size + group * GROUP;
    float32x4_t part[8];
    uint32x4_t size = vdupq_n_u32(0);  // bits of |x|, which are ordered as the floats are
    UNROLL for (int i = 0; i < 8; i++) {
        part[i] = vld1q_f32(x + i * 4);
        size = vmaxq_u32(size, vreinterpretq_u32_f32(vabsq_f32(part[i])));
    }
    const uint32_t bits = vmaxvq_u32(size);
    float most;
    memcpy(&most, &bits, 4);
    const float inverse = most > 0 ? top / most : 0;
    int16x8_t near[4];  // the last bits of x / scale + BEGIN; those of infinity and of NaN are 0
    UNROLL for (int i = 0; i < 8; i++) part[i] = vfmaq_n_f32(vdupq_n_f32(12582912.f), part[i], inverse);
    UNROLL for (int i = 0; i < 4; i++)
        near[i] = vuzp1q_s16(vreinterpretq_s16_f32(part[2 * i]), vreinterpretq_s16_f32(part[2 * i + 1]));
    int32x4_t sum = vdupq_n_s32(0);
    UNROLL for (int i = 0; i < 2; i++) {
        int16x8_t a = near[2 * i], b = near[2 * i + 1];
        if (planes == 2) {
            const int16x8_t high_a = vrshrq_n_s16(a, 7), high_b = vrshrq_n_s16(b, 7);
            vst1q_s8(q + i * 16, vuzp1q_s8(vreinterpretq_s8_s16(high_a), vreinterpretq_s8_s16(high_b)));
            a -= high_a << 7, b -= high_b << 7;
        }
        const int8x16_t last = vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b));
        vst1q_s8(q + (planes - 1) * w->call.size + i * 16, last);
        sum = vdotq_s32(sum, last, vdupq_n_s8(1));
    }
    const i64 at = row * w->groups + group;
    w->scale[at] = most / top;  // NaN and infinity stay here
    w->zero[at] = w->call.bits == 4 ? BEGIN - 8 * vaddvq_s32(sum) : BEGIN;
}

// What sums without a zero begin with.
static const int32_t begins[8] = {BEGIN, BEGIN, BEGIN, BEGIN, BEGIN, BEGIN, BEGIN, BEGIN};

// ---- a few rows ----------------------------------------------------------------------------------------------------

// part_pk = BEGIN + code_p x_k for a group of a tile, codes of 8 bits, and both planes of a row of x. It is in assembly
// because compilers copy sums from register to register, and begin them with copies: each takes the place of a product.
// Loads do not.
#define DOT_STEP(at, more, x, y, four)                                                                                \
    "ldp q16, q17, [%[codes], " at "]\n ldp q18, q19, [%[codes], " more "]\n prfm pldl1keep, [%[next], " at "]\n"     \
    "eor v16.16b, v16.16b, %[sign].16b\n eor v17.16b, v17.16b, %[sign].16b\n"                                         \
    "sdot %[a].4s, v16.16b, " x ".4b[" four "]\n sdot %[b].4s, v16.16b, " y ".4b[" four "]\n"                         \
    "eor v18.16b, v18.16b, %[sign].16b\n eor v19.16b, v19.16b, %[sign].16b\n"                                         \
    "sdot %[c].4s, v17.16b, " x ".4b[" four "]\n sdot %[d].4s, v17.16b, " y ".4b[" four "]\n"                         \
    "sdot %[e].4s, v18.16b, " x ".4b[" four "]\n sdot %[f].4s, v18.16b, " y ".4b[" four "]\n"                         \
    "sdot %[g].4s, v19.16b, " x ".4b[" four "]\n sdot %[h].4s, v19.16b, " y ".4b[" four "]\n"
INLINE void dot_tile(int32x4_t part[4][2], const uint8_t *codes, const uint8_t *next, const int8_t *high,
                     const int8_t *low) {
    __asm__ volatile(
        "ldp q20, q21, [%[high]]\n ldp q22, q23, [%[low]]\n ldp %q[a], %q[b], [%[begin]]\n"
        "ldp %q[c], %q[d], [%[begin]]\n ldp %q[e], %q[f], [%[begin]]\n ldp %q[g], %q[h], [%[begin]]\n"
        DOT_STEP("0", "32", "v20", "v22", "0") DOT_STEP("64", "96", "v20", "v22", "1")
        DOT_STEP("128", "160", "v20", "v22", "2") DOT_STEP("192", "224", "v20", "v22", "3")
        DOT_STEP("256", "288", "v21", "v23", "0") DOT_STEP("320", "352", "v21", "v23", "1")
        DOT_STEP("384", "416", "v21", "v23", "2") DOT_STEP("448", "480", "v21", "v23", "3")
        : [a] "=&w"(part[0][0]), [b] "=&w"(part[0][1]), [c] "=&w"(part[1][0]), [d] "=&w"(part[1][1]),
          [e] "=&w"(part[2][0]), [f] "=&w"(part[2][1]), [g] "=&w"(part[3][0]), [h] "=&w"(part[3][1])
        : [codes] "r"(codes), [next] "r"(next), [high] "r"(high), [low] "r"(low), [begin] "r"(begins),
          [sign] "w"(vdupq_n_u8(128))
        : "memory", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23");
}

// Multiplies a tile with all rows of x.
INLINE void multiply_few(const Rounded *w, i64 tile, int rows, int bits, int planes) {
    const i64 groups = w->groups, size = w->call.size, out = w->call.out;
    const uint8_t *codes = w->call.codes + tile * groups * GROUP * TILE * bits / 8;
    const uint16_t *scales = (const uint16_t *)w->call.scales + tile * groups * TILE;
    const i64 ahead = bits == 8 && rows * planes == 1 ? AHEAD_FAST : AHEAD;
    float32x4_t sum[FEW][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < 4; p++) sum[r][p] = vdupq_n_f32(0);
    for (i64 g = 0; g < groups; g++, codes += GROUP * TILE * bits / 8, scales += TILE) {
        int32x4_t part[FEW][4][2];
        int8x16_t x[FEW][2][2];  // rows planes halves
        const int whole = bits == 8 && rows == 1 && planes == 2;
        if (whole) dot_tile(part[0], codes, codes + ahead, w->q + g * GROUP, w->q + size + g * GROUP);
        UNROLL for (int r = 0; r < rows && !whole; r++) {
            const int32x4_t begin = vdupq_n_s32(w->zero[r * groups + g]);
            UNROLL for (int p = 0; p < 4; p++) UNROLL for (int k = 0; k < planes; k++) part[r][p][k] = begin;
            UNROLL for (int k = 0; k < planes; k++) UNROLL for (int h = 0; h < 2; h++)
                x[r][k][h] = vld1q_s8(w->q + (r * planes + k) * size + g * GROUP + h * 16);
        }
        UNROLL for (int s = 0; s < bits && !whole; s++) {
            __builtin_prefetch(codes + ahead + s * STEP);
            UNROLL for (int p = 0; p < 4; p++) {
                const uint8x16_t c = vld1q_u8(codes + s * STEP + p * 16);
                if (bits == 4) {
                    const int8x16_t low = (int8x16_t)vandq_u8(c, vdupq_n_u8(15)), high = (int8x16_t)vshrq_n_u8(c, 4);
                    UNROLL for (int r = 0; r < rows; r++) {
                        part[r][p][0] = dot_four(part[r][p][0], low, x[r][0][0], s & 3);
                        part[r][p][0] = dot_four(part[r][p][0], high, x[r][0][1], s & 3);
                    }
                } else {
                    const int8x16_t code = (int8x16_t)veorq_u8(c, vdupq_n_u8(128));
                    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int k = 0; k < planes; k++)
                        part[r][p][k] = dot_four(part[r][p][k], code, x[r][k][s / 4], s & 3);
                }
            }
        }
        UNROLL for (int p = 0; p < 4; p++) {
            const float32x4_t scale = widened(scales + p * 4);
            UNROLL for (int r = 0; r < rows; r++)
                sum[r][p] = vfmaq_f32(sum[r][p], sum_as_float(part[r][p][0], part[r][p][planes - 1], planes),
                                      vmulq_n_f32(scale, w->scale[r * groups + g]));
        }
    }
    const i64 n = least(TILE, out - tile * TILE);
    UNROLL for (int r = 0; r < rows; r++) {
        float whole[TILE];
        UNROLL for (int p = 0; p < 4; p++) vst1q_f32(whole + p * 4, sum[r][p]);
        memcpy(w->call.y + r * out + tile * TILE, whole, n * sizeof(float));
    }
}

// ---- many rows -----------------------------------------------------------------------------------------------------

typedef struct {
    int8_t code[PANEL][2][SPAN][8][32];  // tiles, their halves, groups, steps of 8 rows by 4 columns
    float scale[PANEL][2][SPAN][8];
} Panel;

// Gets the groups first .. last of a tile into the panel, as signed bytes, whose sums need no zero.
INLINE void unpack(const Rounded *w, i64 tile, i64 first, i64 last, int bits, int at, Panel *panel) {
    const uint8_t *codes = w->call.codes + (tile * w->groups + first) * GROUP * TILE * bits / 8;
    const uint16_t *scales = (const uint16_t *)w->call.scales + (tile * w->groups + first) * TILE;
    for (i64 g = 0; g < last - first; g++, codes += GROUP * TILE * bits / 8, scales += TILE) {
        UNROLL for (int s = 0; s < bits; s++) {
            if (bits == 4) __builtin_prefetch(codes + AHEAD + s * STEP);
            UNROLL for (int p = 0; p < 4; p++) {
                const uint8x16_t c = vld1q_u8(codes + s * STEP + p * 16);
                int8_t *to = panel->code[at][p / 2][g][s] + p % 2 * 16;
                if (bits == 8) {
                    vst1q_s8(to, (int8x16_t)veorq_u8(c, vdupq_n_u8(128)));
                } else {
                    vst1q_s8(to, (int8x16_t)vandq_u8(c, vdupq_n_u8(15)) - 8);
                    vst1q_s8(to + 4 * 32, (int8x16_t)vshrq_n_u8(c, 4) - 8);
                }
            }
        }
        UNROLL for (int p = 0; p < 4; p++)
            vst1q_f32(panel->scale[at][p / 2][g] + p % 2 * 4, widened(scales + p * 4));
    }
}

// part_vp = BEGIN + code_p x_v for four vectors v of x, `stride` apart, and a group of half a tile, in assembly as
// dot_tile is.
#define DOTS(low, high, x, four)                                                                             \
    "sdot %0.4s, " low ".16b, " x "0.4b[" four "]\n sdot %1.4s, " high ".16b, " x "0.4b[" four "]\n"         \
    "sdot %2.4s, " low ".16b, " x "1.4b[" four "]\n sdot %3.4s, " high ".16b, " x "1.4b[" four "]\n"         \
    "sdot %4.4s, " low ".16b, " x "2.4b[" four "]\n sdot %5.4s, " high ".16b, " x "2.4b[" four "]\n"         \
    "sdot %6.4s, " low ".16b, " x "3.4b[" four "]\n sdot %7.4s, " high ".16b, " x "3.4b[" four "]\n"
INLINE void dot_group(int32x4_t part[TOGETHER][2], const int8_t *code, const int8_t *x, i64 stride) {
    const int8_t *second = x + stride, *third = x + 2 * stride, *fourth = x + 3 * stride;
    __asm__ volatile(
        "ldp q24, q25, [%8]\n ldp q10, q20, [%9]\n ldp %q0, %q1, [%13]\n ldp q11, q21, [%10]\n"
        "ldp %q2, %q3, [%13]\n ldp q12, q22, [%11]\n ldp %q4, %q5, [%13]\n ldp q13, q23, [%12]\n"
        "ldp %q6, %q7, [%13]\n ldp q26, q27, [%8, 32]\n"
        DOTS("v24", "v25", "v1", "0") "ldp q24, q25, [%8, 64]\n" DOTS("v26", "v27", "v1", "1")
        "ldp q26, q27, [%8, 96]\n" DOTS("v24", "v25", "v1", "2") "ldp q24, q25, [%8, 128]\n"
        DOTS("v26", "v27", "v1", "3") "ldp q26, q27, [%8, 160]\n" DOTS("v24", "v25", "v2", "0")
        "ldp q24, q25, [%8, 192]\n" DOTS("v26", "v27", "v2", "1") "ldp q26, q27, [%8, 224]\n"
        DOTS("v24", "v25", "v2", "2") DOTS("v26", "v27", "v2", "3")
        : "=&w"(part[0][0]), "=&w"(part[0][1]), "=&w"(part[1][0]), "=&w"(part[1][1]), "=&w"(part[2][0]),
          "=&w"(part[2][1]), "=&w"(part[3][0]), "=&w"(part[3][1])
        : "r"(code), "r"(x), "r"(second), "r"(third), "r"(fourth), "r"(begins)
        : "memory", "v10", "v11", "v12", "v13", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27");
}

// part_rp = code_p x_r for both planes of four rows of x: the sums of the first plane are shifted before those of the
// second are added to them. `stride` is from plane to plane.
#define DOTS_BOTH "ldp q24, q25, [%8]\n ldp q26, q27, [%8, 32]\n"                                                   \
    DOTS("v24", "v25", "v1", "0") "ldp q24, q25, [%8, 64]\n" DOTS("v26", "v27", "v1", "1")                          \
    "ldp q26, q27, [%8, 96]\n" DOTS("v24", "v25", "v1", "2") "ldp q24, q25, [%8, 128]\n"                           \
    DOTS("v26", "v27", "v1", "3") "ldp q26, q27, [%8, 160]\n" DOTS("v24", "v25", "v2", "0")                         \
    "ldp q24, q25, [%8, 192]\n" DOTS("v26", "v27", "v2", "1") "ldp q26, q27, [%8, 224]\n"                          \
    DOTS("v24", "v25", "v2", "2") DOTS("v26", "v27", "v2", "3")
INLINE void dot_planes(int32x4_t part[TOGETHER][2], const int8_t *code, const int8_t *x, i64 stride) {
    const int8_t *second = x + 2 * stride, *third = x + 4 * stride, *fourth = x + 6 * stride;
    static const int32_t zeros[8] = {0};
    __asm__ volatile(
        "ldp q10, q20, [%9]\n ldp %q0, %q1, [%13]\n ldp q11, q21, [%10]\n ldp %q2, %q3, [%13]\n"
        "ldp q12, q22, [%11]\n ldp %q4, %q5, [%13]\n ldp q13, q23, [%12]\n ldp %q6, %q7, [%13]\n"
        DOTS_BOTH
        "ldp q10, q20, [%14]\n shl %0.4s, %0.4s, 7\n shl %1.4s, %1.4s, 7\n ldp q11, q21, [%15]\n"
        "shl %2.4s, %2.4s, 7\n shl %3.4s, %3.4s, 7\n ldp q12, q22, [%16]\n shl %4.4s, %4.4s, 7\n"
        "shl %5.4s, %5.4s, 7\n ldp q13, q23, [%17]\n shl %6.4s, %6.4s, 7\n shl %7.4s, %7.4s, 7\n"
        DOTS_BOTH
        : "=&w"(part[0][0]), "=&w"(part[0][1]), "=&w"(part[1][0]), "=&w"(part[1][1]), "=&w"(part[2][0]),
          "=&w"(part[2][1]), "=&w"(part[3][0]), "=&w"(part[3][1])
        : "r"(code), "r"(x), "r"(second), "r"(third), "r"(fourth), "r"(zeros), "r"(x + stride), "r"(second + stride),
          "r"(third + stride), "r"(fourth + stride)
        : "memory", "v10", "v11", "v12", "v13", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27");
}

// Adds the groups from `first` on of half a tile times `rows` rows of x to y. Meanwhile codes come from memory: `lines`
// of them from `next` on with every group.
INLINE void multiply_block(const Rounded *w, i64 column, i64 row, i64 first, i64 last, const int8_t *code,
                           const float *scale, const uint8_t *next, int lines, int rows, int planes) {
    const i64 groups = w->groups, size = w->call.size, out = w->call.out, n = least(8, out - column);
    const int8_t *q = w->q + row * planes * size + first * GROUP;
    const float *own = w->scale + row * groups + first;
    float *y = w->call.y + row * out + column;
    float32x4_t sum[TOGETHER][2];
    UNROLL for (int r = 0; r < rows; r++) {
        sum[r][0] = sum[r][1] = vdupq_n_f32(0);
        if (first && n == 8) {
            sum[r][0] = vld1q_f32(y + r * out), sum[r][1] = vld1q_f32(y + r * out + 4);
        } else if (first) {
            float whole[8] = {0};
            memcpy(whole, y + r * out, n * sizeof(float));
            sum[r][0] = vld1q_f32(whole), sum[r][1] = vld1q_f32(whole + 4);
        }
    }
    for (i64 g = first; g < last; g++, code += 8 * 32, scale += 8, q += GROUP, own++) {
        int32x4_t part[TOGETHER][2];
        UNROLL for (int line = 0; line < lines; line++, next += STEP) __builtin_prefetch(next, 0, 2);
        if (rows == TOGETHER && planes == 2) {
            dot_planes(part, code, q, size);
        } else if (rows * planes == TOGETHER) {
            dot_group(part, code, q, size);
        } else {
            UNROLL for (int v = 0; v < rows * planes; v++) part[v][0] = part[v][1] = vdupq_n_s32(BEGIN);
            UNROLL for (int s = 0; s < 8; s++) UNROLL for (int p = 0; p < 2; p++) {
                const int8x16_t c = vld1q_s8(code + s * 32 + p * 16);
                UNROLL for (int v = 0; v < rows * planes; v++)
                    part[v][p] = dot_four(part[v][p], c, vld1q_s8(q + v * size + s / 4 * 16), s & 3);
            }
        }
        UNROLL for (int p = 0; p < 2; p++) {
            const float32x4_t factor = vld1q_f32(scale + p * 4);
            UNROLL for (int r = 0; r < rows; r++) {
                const int whole = rows == TOGETHER && planes == 2;  // both planes are in one sum
                const float32x4_t made =
                    whole ? vcvtq_f32_s32(part[r][p])
                          : sum_as_float(part[r * planes % TOGETHER][p], part[((r + 1) * planes - 1) % TOGETHER][p], planes);
                sum[r][p] = vfmaq_f32(sum[r][p], made, vmulq_n_f32(factor, own[r * groups]));
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        if (n == 8) {
            vst1q_f32(y + r * out, sum[r][0]), vst1q_f32(y + r * out + 4, sum[r][1]);
        } else {
            float whole[8];
            vst1q_f32(whole, sum[r][0]), vst1q_f32(whole + 4, sum[r][1]);
            memcpy(y + r * out, whole, n * sizeof(float));
        }
    }
}

// Tiles of a unit. A few rows take longer runs of codes, up to a 32nd of all: what is fetched ahead of a run's first
// codes is not.
INLINE i64 unit_tiles(const Quantised *a) {
    const i64 share = blocks(a->out, TILE) / 32;
    if (a->rows > FEW) return a->rows > MOST_FETCHED || a->bits == 4 ? PANEL : 1;
    return share > 8 ? 8 : share > 1 ? share : 1;
}

INLINE void multiply_many(const Rounded *w, i64 tile, i64 tiles, int bits, int planes) {
    const i64 rows = w->call.rows, tile_bytes = w->groups * GROUP * TILE * bits / 8;
    enum { LINES = 2 };  // with eight rows, all codes of the next panel
    const int fetched = rows <= MOST_FETCHED && bits == 8;
    Panel panel;
    for (i64 first = 0; first < w->groups; first += SPAN) {
        const i64 last = least(first + SPAN, w->groups);
        const i64 ahead = (last < w->groups ? last : unit_tiles(&w->call) * w->groups) * (tile_bytes / w->groups);
        for (int t = 0; t < tiles; t++) unpack(w, tile + t, first, last, bits, t, &panel);
        for (i64 row = 0; row < rows; row += TOGETHER)
            for (int half = 0; half < 2 * tiles; half++) {
                const i64 column = tile * TILE + half * 8, part = row / TOGETHER * 2 + half % 2;
                const int8_t *code = panel.code[half / 2][half % 2][0][0];
                const float *scale = panel.scale[half / 2][half % 2][0];
                const uint8_t *next = w->call.codes + (tile + half / 2) * tile_bytes + ahead;
                next += least(part, 8) * SPAN * STEP * LINES;
                if (column >= w->call.out) break;
                i64 r = row;
                if (rows - row >= TOGETHER && fetched)
                    multiply_block(w, column, row, first, last, code, scale, next, LINES, TOGETHER, planes);
                else if (rows - row >= TOGETHER)
                    multiply_block(w, column, row, first, last, code, scale, next, 0, TOGETHER, planes);
                else {
                    for (; planes == 2 && r + 2 <= rows; r += 2)
                        multiply_block(w, column, r, first, last, code, scale, next, 0, 2, planes);
                    for (; r < rows; r++) multiply_block(w, column, r, first, last, code, scale, next, 0, 1, planes);
                }
            }
    }
}

INLINE void multiply_unit(const Rounded *w, i64 unit, int bits, int planes) {
    const i64 rows = w->call.rows, tile = unit * unit_tiles(&w->call);
    const i64 tiles = least(unit_tiles(&w->call), blocks(w->call.out, TILE) - tile);
    if (rows > FEW) multiply_many(w, tile, tiles, bits, planes);
    for (i64 t = tile; t < tile + tiles && rows <= FEW; t++) {
        if (rows == 1) multiply_few(w, t, 1, bits, planes);
        if (rows == 2) multiply_few(w, t, 2, bits, planes);
        if (rows == 3) multiply_few(w, t, 3, bits, planes);
    }
}
