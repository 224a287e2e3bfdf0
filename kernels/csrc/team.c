// The threads of a process that do passes together; all levels share them.
#include "team.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

// What is to be done, with its own copy of the arguments. A helper that comes late finds every phase
// done; all that it touches beside this is what the arguments' pointers to layers lead to.
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
    pthread_cond_t work;
    Pass *pass;
    atomic_uint posted;  // passes so far, never 0 after the first
    int helpers;
} pool_ = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0};

// Which pass each helper is in, by its number; 0 between passes.
static atomic_uint inside_[MAX_THREADS];

static void leave(Pass *pass) {
    if (atomic_fetch_sub(&pass->users, 1) == 1) {
        free(pass->phases), free(pass->arguments), free(pass);
    }
}

static void *help(void *number) {
    int thread = (int)(intptr_t)number;
    unsigned seen = 0;
    for (;;) {
        for (int spins = 0; spins < 2000 && atomic_load(&pool_.posted) == seen; spins++) pause_briefly();
        pthread_mutex_lock(&pool_.lock);
        while (atomic_load(&pool_.posted) == seen) pthread_cond_wait(&pool_.work, &pool_.lock);
        seen = atomic_load(&pool_.posted);
        Pass *pass = pool_.pass && thread < pool_.pass->threads ? pool_.pass : NULL;
        if (pass) atomic_fetch_add(&pass->users, 1), atomic_store(&inside_[thread], seen);
        pthread_mutex_unlock(&pool_.lock);
        if (pass) {
            pass->run(&(Team){pass->phases, 0, thread, pass->threads}, pass->arguments);
            leave(pass);
            atomic_store(&inside_[thread], 0);
        }
    }
    return NULL;
}

// Wait for helpers that came late to a pass that has ended: they may still read the model's layers.
__attribute__((visibility("default"))) void specbatch_settle(void) {
    for (int thread = 1; thread < MAX_THREADS; thread++) {
        unsigned pass = atomic_load(&inside_[thread]);
        while (pass && atomic_load(&inside_[thread]) == pass) sched_yield();
    }
}

static void forget_helpers(void) {  // in the child of a fork, where they do not exist
    pthread_mutex_init(&pool_.lock, NULL);
    pthread_cond_init(&pool_.work, NULL);
    pool_.pass = NULL, pool_.helpers = 0;
    for (int thread = 0; thread < MAX_THREADS; thread++) atomic_store(&inside_[thread], 0);
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

int specbatch_share_pass(void (*run)(Team *, const void *), const void *arguments, size_t size, size_t phases,
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
        atomic_fetch_add(&pool_.posted, 1);
        pthread_cond_broadcast(&pool_.work);
        pthread_mutex_unlock(&pool_.lock);
    }
    run(&(Team){shared, 0, 0, threads}, copy);
    if (threads > 1) {
        pthread_mutex_lock(&pool_.lock);
        if (pool_.pass == pass) pool_.pass = NULL;
        pthread_mutex_unlock(&pool_.lock);
    }
    leave(pass);
    return 0;
}
