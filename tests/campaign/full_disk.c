// Lets the Nth call that makes a file longer, and all after it, fail as on a full disk. KDGEN_FULL_AFTER is N, KDGEN_FULL_COUNT a file
// whose size is the count of such calls so far, over all processes. Only files below KDGEN_FULL_BELOW count, so that pipes, terminals and
// Python's own files do not.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int counts(int fd) {
    const char *below = getenv("KDGEN_FULL_BELOW");
    char link[64], path[PATH_MAX];
    if (!below) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    struct stat status;
    return strncmp(path, below, strlen(below)) == 0 && fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

static int full(int fd) {
    const char *after = getenv("KDGEN_FULL_AFTER"), *file = getenv("KDGEN_FULL_COUNT");
    if (!after || !file || !counts(fd)) return 0;
    ssize_t (*plain)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    int log = open(file, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (log < 0) return 0;
    struct stat status;
    fstat(log, &status);
    plain(log, "x", 1);
    close(log);
    if (status.st_size + 1 < atol(after)) return 0;
    errno = ENOSPC;
    return 1;
}

#define NEXT(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

ssize_t write(int fd, const void *data, size_t count) {
    return full(fd) ? -1 : NEXT(ssize_t, "write", int, const void *, size_t)(fd, data, count);
}
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
    return full(fd) ? -1 : NEXT(ssize_t, "pwrite64", int, const void *, size_t, off64_t)(fd, data, count, at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return full(fd) ? -1 : NEXT(ssize_t, "writev", int, const struct iovec *, int)(fd, parts, count);
}
int posix_fallocate64(int fd, off64_t at, off64_t count) {
    return full(fd) ? ENOSPC : NEXT(int, "posix_fallocate64", int, off64_t, off64_t)(fd, at, count);
}
int ftruncate64(int fd, off64_t length) {
    return length > 0 && full(fd) ? -1 : NEXT(int, "ftruncate64", int, off64_t)(fd, length);
}
