// Products of a few rows with the weights of experts, of which each is read once: y_i = W_e x_i for the rows i of a group,
// which has an expert e. One call does what lineate_product or lineate_quantised would do for each group, with the same
// bits, but threads are woken once.
#include <stdlib.h>
#include "products.h"
#include "threads.h"
#include "vectors.h"

enum { NO_MEMORY = 1 };

typedef struct {  // filled in by experts.py
    i64 groups, out, size, threads, kind, bits, planes;  // bits 0: a weight of 16 or 32 bits, of this kind
    const i64 *expert, *first;                           // groups; groups + 1: rows of each group
    const float *x;                                      // rows size, dense
    const char *weight, *scales;                         // experts out size, dense; or codes in tiles
    i64 weight_bytes, scale_bytes;                       // of an expert
    float *y;                                            // rows out, dense
} Experts;

typedef struct {
    Product plain;
    Rounded rounded;
    i64 unit;  // the first one
} Group;

typedef struct {
    const Experts *call;
    Group *group;
} Work;

static const Group *find(const Work *work, i64 unit) {
    i64 low = 0, high = work->call->groups;  // the group is in low .. high - 1
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (work->group[middle].unit <= unit) low = middle;
        else high = middle;
    }
    return &work->group[low];
}

static void multiply(const void *given, i64 unit) {
    const Work *work = given;
    const Group *own = find(work, unit);
    if (work->call->bits) lineate_quantised_unit(&own->rounded, unit - own->unit);
    else lineate_product_unit(&own->plain, unit - own->unit);
}

static void prepare(const void *given, i64 index) {
    const Work *work = given;
    Group *own = &work->group[index];
    if (work->call->bits)
        for (i64 row = 0; row < own->rounded.call.rows; row++) lineate_quantised_round(&own->rounded, row);
    else if (!lineate_product_arrange(&own->plain))
        own->plain.arranged = NULL;
}

INLINE i64 room_of(const Experts *a, i64 rows) {  // bytes: rows rounded, or arranged
    const i64 bytes = a->bits ? lineate_quantised_scratch(rows, a->size) : rows * a->size * (i64)sizeof(float);
    return blocks(bytes, 64) * 64;
}

int lineate_experts(const Experts *a) {
    i64 room = 0, units = 0;
    for (i64 g = 0; g < a->groups; g++) room += room_of(a, a->first[g + 1] - a->first[g]);
    char *scratch = aligned_alloc(64, room);
    Group *group = malloc(a->groups * sizeof(Group));
    if (!scratch || !group) {
        free(scratch), free(group);
        return NO_MEMORY;
    }
    char *at = scratch;
    for (i64 g = 0; g < a->groups; g++) {
        const i64 rows = a->first[g + 1] - a->first[g];
        const float *x = a->x + a->first[g] * a->size;
        float *y = a->y + a->first[g] * a->out;
        const char *weight = a->weight + a->expert[g] * a->weight_bytes;
        group[g].unit = units;
        if (a->bits) {
            const Quantised call = {rows, a->out, a->size, a->bits, a->planes, 1, x, (const uint8_t *)weight,
                                    a->scales + a->expert[g] * a->scale_bytes, y};
            group[g].rounded = lineate_quantised_place(&call, at);
            units += lineate_quantised_units(&call);
        } else {
            group[g].plain = (Product){rows, a->out, a->size, 1, a->kind, x, weight, a->size, y, (float *)at};
            units += lineate_product_units(&group[g].plain);
        }
        at += room_of(a, rows);
    }
    const Work work = {a, group};
    lineate_spread(prepare, &work, a->groups, a->first[a->groups] * a->size, a->threads);
    lineate_spread(multiply, &work, units, a->groups * a->out * a->size, a->threads);
    free(scratch), free(group);
    return 0;
}
