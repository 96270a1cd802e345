// Spreads units of work over threads that wait for a job (threads.c).
#pragma once
#include <stdint.h>

// Runs work(call, unit) for every unit below `units`, on at most `most_threads` threads; `elements` says how much there
// is to do: a thread that would get little is not woken.
void lineate_spread(void (*work)(const void *, int64_t), const void *call, int64_t units, int64_t elements,
                    int64_t most_threads);
