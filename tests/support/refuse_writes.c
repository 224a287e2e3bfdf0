/* LD_PRELOAD: a disk that refuses, without root and without filling one up.
 *
 * The file named by REFUSE_WRITES says `ERRNO PLACE [AFTER]`: while it is there, writes to open files
 * whose path contains PLACE fail with ERRNO, once this process has written to a path that contains
 * AFTER. Each refusal appends a byte to the file `<REFUSE_WRITES>.count`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int seen_after;

static int refused(int fd) {
    const char *control = getenv("REFUSE_WRITES");
    char text[512], path[4096], link[64], place[256] = "", after[256] = "", count[4200];
    int number = 0, saved = errno, result = 0;
    if (control == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    int file = open(control, O_RDONLY | O_CLOEXEC);
    if (length > 0 && file >= 0) {
        path[length] = 0;
        ssize_t got = read(file, text, sizeof text - 1);
        text[got > 0 ? got : 0] = 0;
        if (sscanf(text, "%d %255s %255s", &number, place, after) >= 2) {
            if (after[0] && strstr(path, after)) seen_after = 1;
            if ((!after[0] || seen_after) && strstr(path, place)) result = number;
        }
    }
    if (file >= 0) close(file);
    if (result) {
        snprintf(count, sizeof count, "%s.count", control);
        int log = open(count, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (log >= 0) {
            static ssize_t (*real)(int, const void *, size_t);
            if (!real) real = dlsym(RTLD_NEXT, "write");
            if (real(log, ".", 1) < 0) saved = errno;
            close(log);
        }
    }
    errno = result ? result : saved;
    return result;
}

#define REAL(type, name, ...)                                  \
    static type (*real)(__VA_ARGS__);                          \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name); \
    if (refused(fd)) return -1;

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t)
    return real(fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int)
    return real(fd, parts, count);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t)
    return real(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t)
    return real(fd, data, size, at);
}
