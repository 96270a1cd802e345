// Products of rows with a weight, whole (lineate_product, lineate_quantised) or unit by unit, for callers with threads.
#pragma once
#include <stdint.h>

enum { BFLOAT16, FLOAT16, FLOAT32 };  // kinds of weights that are not coded

typedef struct {
    int64_t rows, out, size, threads, kind;  // kind: of the weight
    const float *x;                          // rows size, dense
    const void *weight;                      // out rows of size, dense, weight_row apart
    int64_t weight_row;
    float *y;  // rows out, dense: x weight^T
    float *arranged;  // room for x as lineate_product_arrange lays it out, or NULL
} Product;  // of lineate_combine, x is rows out, and y rows size: x weight

typedef struct {  // a weight of 8 or 4 bits (quantised.c); planes 0: of float8 (float8.c); bits 16: of float16 (halves.c)
    int64_t rows, out, size, bits, planes, threads;
    const float *x;        // rows size, dense
    const uint8_t *codes;  // tiles groups steps 16 4; of float16: out size
    const void *scales;    // tiles groups 16, float16; of float8: float
    float *y;              // rows out, dense
} Quantised;

typedef struct {
    Quantised call;
    int64_t groups;
    int8_t *q;      // rows planes size; of float16: rows size float16
    float *scale;   // rows groups
    int32_t *zero;  // rows groups: what the sums of a group begin with
} Rounded;

// Units, the columns of y that a unit makes, and one unit.
int64_t lineate_product_units(const Product *);
void lineate_product_columns(const Product *, int64_t unit, int64_t *first, int64_t *last);
void lineate_product_unit(const void *product, int64_t unit);
int lineate_product_arrange(const Product *);  // lays x out for faster products, if there are some: then 1
void lineate_product_row(const Product *, int64_t row, float *to);  // the numbers of a row of the weight

int64_t lineate_quantised_scratch(int64_t rows, int64_t size);  // bytes of the scratch of one x
Rounded lineate_quantised_place(const Quantised *, void *scratch);
void lineate_quantised_round(const void *rounded, int64_t row);
int64_t lineate_quantised_units(const Quantised *);
void lineate_quantised_columns(const Quantised *, int64_t unit, int64_t *first, int64_t *last);
void lineate_quantised_unit(const void *rounded, int64_t unit);
void lineate_quantised_row(const Quantised *, int64_t row, float *to);  // the same of a weight of 8 or 4 bits
void lineate_float8_tile(const Quantised *, int64_t tile);  // 16 columns of y

int lineate_halves_serve(int64_t rows, int64_t size);  // whether so many of this size are multiplied in float16 here
void lineate_halves_round(const Rounded *, int64_t row);
int64_t lineate_halves_units(int64_t out);
void lineate_halves_columns(int64_t out, int64_t unit, int64_t *first, int64_t *last);
void lineate_halves_unit(const Rounded *, int64_t unit);
