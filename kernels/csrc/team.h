// A pass over the items of one phase after another, shared among threads.
//
// Nobody waits for a thread, only for work. The caller does the whole pass if it must; helpers join when
// the system lets them run, and one that was put aside is missed only while it holds an item. On a busy
// machine that is the difference between a little slower and a hundred times slower, which is what
// barriers cost there.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    _Alignas(64) atomic_int next;
    atomic_int done;
} Phase;

typedef struct {
    Phase *phases;  // one for every phase of the pass, in order
    int at;         // how far this thread is
    int thread;     // 0 is the caller
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
// goes on when all are done.
#define SHARE(team, items, i)                                                                         \
    for (struct { Phase *phase; int count, open; } s_ = {&(team)->phases[(team)->at++], (items), 1};  \
         s_.open; s_.open = 0, await(s_.phase, s_.count))                                             \
        for (int i; (i = atomic_fetch_add(&s_.phase->next, 1)) < s_.count;                            \
             atomic_fetch_add(&s_.phase->done, 1))

// What is to be done, with its own copy of the arguments: a helper that comes late finds every phase
// done and touches nothing else.
typedef struct {
    void (*run)(Team *team, const void *arguments);
    void *arguments;
    Phase *phases;
    int threads;
    atomic_int users;
} Pass;

#define MAX_THREADS 256

static struct {
    pthread_mutex_t lock;
    pthread_cond_t bell;
    Pass *pass;
    atomic_uint rung;
    int helpers;
} pool_ = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0};

static void leave(Pass *pass) {
    if (atomic_fetch_sub(&pass->users, 1) == 1) {
        free(pass->phases), free(pass->arguments), free(pass);
    }
}

static void *help(void *number) {
    int thread = (int)(intptr_t)number;
    unsigned seen = 0;
    for (;;) {
        for (int spins = 0; spins < 2000 && atomic_load(&pool_.rung) == seen; spins++) pause_briefly();
        pthread_mutex_lock(&pool_.lock);
        while (atomic_load(&pool_.rung) == seen) pthread_cond_wait(&pool_.bell, &pool_.lock);
        seen = atomic_load(&pool_.rung);
        Pass *pass = pool_.pass && thread < pool_.pass->threads ? pool_.pass : NULL;
        if (pass) atomic_fetch_add(&pass->users, 1);
        pthread_mutex_unlock(&pool_.lock);
        if (pass) {
            pass->run(&(Team){pass->phases, 0, thread}, pass->arguments);
            leave(pass);
        }
    }
    return NULL;
}

static void forget_helpers(void) {  // in the child of a fork, where they do not exist
    pthread_mutex_init(&pool_.lock, NULL);
    pthread_cond_init(&pool_.bell, NULL);
    pool_.pass = NULL, pool_.helpers = 0;
}

static void start_helpers(int wanted) {  // under the lock
    static int registered = 0;
    if (!registered) registered = 1, pthread_atfork(NULL, NULL, forget_helpers);
    while (pool_.helpers < wanted) {
        pthread_t id;
        if (pthread_create(&id, NULL, help, (void *)(intptr_t)(pool_.helpers + 1))) return;
        pthread_detach(id);
        pool_.helpers++;
    }
}

// Run a pass of `phases` phases. Returns 0, or 1 when memory ran out.
static int share_pass(void (*run)(Team *, const void *), const void *arguments, size_t size, size_t phases,
                      int threads) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    Pass *pass = malloc(sizeof(Pass));
    void *copy = malloc(size);
    Phase *shared = aligned_alloc(64, phases * sizeof(Phase));
    if (!pass || !copy || !shared) {
        free(pass), free(copy), free(shared);
        return 1;
    }
    memcpy(copy, arguments, size);
    memset(shared, 0, phases * sizeof(Phase));
    *pass = (Pass){run, copy, shared, threads, 1};
    if (threads > 1) {
        pthread_mutex_lock(&pool_.lock);
        start_helpers(threads - 1);
        pool_.pass = pass;
        atomic_fetch_add(&pool_.rung, 1);
        pthread_cond_broadcast(&pool_.bell);
        pthread_mutex_unlock(&pool_.lock);
    }
    run(&(Team){shared, 0, 0}, copy);
    if (threads > 1) {
        pthread_mutex_lock(&pool_.lock);
        if (pool_.pass == pass) pool_.pass = NULL;
        pthread_mutex_unlock(&pool_.lock);
    }
    leave(pass);
    return 0;
}
