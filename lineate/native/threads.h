// Spreads units of work over threads that wait for a job (threads.c).
#pragma once
#include <stdatomic.h>
#include <stdint.h>

// Each thread begins with a range of units of its own, and helps with the others' when that is done: units side by side
// often read memory side by side, which one thread reads faster than two that take turns.
static inline int64_t range_first(int64_t units, int64_t ranges, int64_t range) { return units * range / ranges; }

// Takes a unit of the range, or of the first one behind it that has some; -1 if all are taken. next: how many units of
// each range are taken; tried: how many ranges this thread found empty, 0 at first.
static inline int64_t take_unit(atomic_llong *next, int64_t units, int64_t ranges, int64_t *range, int64_t *tried) {
    for (; *tried < ranges; ++*tried, *range = (*range + 1) % ranges) {
        const int64_t unit = range_first(units, ranges, *range) + atomic_fetch_add(&next[*range], 1);
        if (unit < range_first(units, ranges, *range + 1)) return unit;
    }
    return -1;
}

// Runs work(call, unit) for every unit below `units`, on at most `most_threads` threads; `elements` says how much there
// is to do: a thread that would get little is not woken.
void lineate_spread(void (*work)(const void *, int64_t), const void *call, int64_t units, int64_t elements,
                    int64_t most_threads);
