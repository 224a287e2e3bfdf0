// Ends the process when a step of an engine does not: from a thread that needs no interpreter, as a
// native call may hold Python's lock for ever.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct watch {
    const volatile int64_t *step;  // the number of the step that runs; 0: none does
    double seconds, slice;
    char *message;
    int code;
};

static void *look(void *arg) {
    struct watch *watch = arg;
    struct timespec slice = {(time_t)watch->slice, (long)((watch->slice - (double)(time_t)watch->slice) * 1e9)};
    int64_t last = 0;
    double counted = 0;  // in slices: a process that was stopped for an hour has not worked for one
    for (;;) {
        nanosleep(&slice, NULL);
        int64_t now = *watch->step;
        counted = now && now == last ? counted + watch->slice : 0;
        last = now;
        if (counted < watch->seconds) continue;
        ssize_t written = write(STDERR_FILENO, watch->message, strlen(watch->message));
        (void)written;
        _exit(watch->code);
    }
    return NULL;
}

// 1 if the thread runs now. `step` must stay where it is for ever.
__attribute__((visibility("default"))) int specbatch_watch(
    const volatile int64_t *step, double seconds, const char *message, int code) {
    struct watch *watch = malloc(sizeof *watch);
    pthread_t thread;
    if (watch == NULL) return 0;
    double slice = seconds / 4 < 1 ? seconds / 4 : 1;
    *watch = (struct watch){step, seconds, slice, strdup(message), code};
    if (watch->message == NULL || pthread_create(&thread, NULL, look, watch) != 0) return 0;
    pthread_detach(thread);
    return 1;
}
