// A pass over the items of one phase after another, shared among threads.
//
// Nobody waits for a thread, only for work. The caller does the whole pass if it must; helpers join when
// the system lets them run, and one that was put aside is missed only while it holds an item. On a busy
// machine that is the difference between a little slower and a hundred times slower, which is what
// barriers cost there.
#pragma once
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stddef.h>

typedef struct {
    _Alignas(64) atomic_int next;
    atomic_int done;
} Phase;

typedef struct {
    Phase *phases;  // one for every phase of the pass, in order
    int at;         // how far this thread is
    int thread;     // 0 is the caller
    int threads;
} Team;

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static inline void await(Phase *phase, int items) {
    for (int spins = 0; atomic_load_explicit(&phase->done, memory_order_acquire) < items; spins++) {
        if (spins < 4000) pause_briefly();
        else sched_yield();
    }
}

// SHARE(team, items, i) runs the statement behind it for i in 0 .. items - 1, each on some thread, and
// continues when all are done.
#define SHARE(team, items, i)                                                                         \
    for (struct { Phase *phase; int count, open; } s_ = {&(team)->phases[(team)->at++], (items), 1};  \
         s_.open; s_.open = 0, await(s_.phase, s_.count))                                             \
        for (int i; (i = atomic_fetch_add(&s_.phase->next, 1)) < s_.count;                            \
             atomic_fetch_add(&s_.phase->done, 1))

// Run a pass of `phases` phases over a copy of the arguments. Returns 0, or 1 when memory ran out.
int specbatch_share_pass(void (*run)(Team *, const void *), const void *arguments, size_t size, size_t phases,
                         int threads);
