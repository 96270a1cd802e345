// Threads that wait for units of work.
#include "threads.h"

#include <pthread.h>
#include <stddef.h>

typedef int64_t i64;
static i64 least(i64 a, i64 b) { return a < b ? a : b; }

enum { WORTH_A_THREAD = 1 << 16 };  // elements: what a thread should get to be worth starting

enum { MOST_HELPERS = 255 };
typedef struct {
    void (*work)(const void *call, i64 unit);
    const void *call;
    i64 units, ranges;
    atomic_llong joined, next[MOST_HELPERS + 1];  // threads; units of each range that were taken
} Job;

static void run(Job *job) {
    i64 range = atomic_fetch_add(&job->joined, 1) % job->ranges, tried = 0;
    for (i64 unit; (unit = take_unit(job->next, job->units, job->ranges, &range, &tried)) >= 0;)
        job->work(job->call, unit);
}

// Threads that wait for a job: to wake one takes a third of the time that starting one does. They belong to one caller
// at a time; a caller that comes meanwhile works alone. A helper that wakes late finds no job, and nobody waits for it.
static struct {
    pthread_mutex_t owned, lock;
    pthread_cond_t wake, done;
    Job *job;
    i64 helpers, wanted, running;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER,
          NULL, 0, 0, 0};

static void *help(void *unused) {
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.wanted) pthread_cond_wait(&pool.wake, &pool.lock);
        pool.wanted--;
        pool.running++;
        Job *job = pool.job;
        pthread_mutex_unlock(&pool.lock);
        run(job);
        pthread_mutex_lock(&pool.lock);
        if (!--pool.running) pthread_cond_signal(&pool.done);
    }
    return unused;
}

// A forked process has no helpers, and locks in whatever state they were.
static void forget_helpers(void) {
    pthread_mutex_init(&pool.owned, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.job = NULL;
    pool.helpers = pool.wanted = pool.running = 0;
}

static void at_fork(void) { pthread_atfork(NULL, NULL, forget_helpers); }

static void start_helpers(i64 count) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, at_fork);
    pthread_attr_t attributes;
    if (pool.helpers >= count || pthread_attr_init(&attributes)) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; pool.helpers < count; pool.helpers++)
        if (pthread_create(&thread, &attributes, help, NULL)) break;
    pthread_attr_destroy(&attributes);
}

void lineate_spread(void (*work)(const void *, i64), const void *call, i64 units, i64 elements, i64 most_threads) {
    const i64 helpers = least(least(least(most_threads, 1 + elements / WORTH_A_THREAD), units) - 1, MOST_HELPERS);
    if (helpers < 1 || pthread_mutex_trylock(&pool.owned)) {
        for (i64 unit = 0; unit < units; unit++) work(call, unit);
        return;
    }
    Job job;
    job.work = work, job.call = call, job.units = units, job.ranges = helpers + 1;
    atomic_init(&job.joined, 0);
    for (i64 range = 0; range < job.ranges; range++) atomic_init(&job.next[range], 0);
    start_helpers(helpers);
    pthread_mutex_lock(&pool.lock);
    pool.job = &job;
    pool.wanted = helpers;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    run(&job);
    pthread_mutex_lock(&pool.lock);
    pool.wanted = 0;
    while (pool.running) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.owned);
}
