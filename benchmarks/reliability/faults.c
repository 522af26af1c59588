/* A library that is loaded before libc and counts what a process changes on disk below one folder.
 *
 * Each call that creates, writes, synchronizes, renames or removes there is an event with a number. At the event of a
 * given number the process is killed, stopped, or told that the disk is full, so that every moment of a save can be
 * tried, one by one, and the same moment again. Calls of Python and of C++ both come through here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, LOG, KILL_BEFORE, KILL_INSIDE, STOP_BEFORE, NO_SPACE, READ_ONLY, NO_SYNC };

static char root[4096];
static size_t root_length;
static int mode = OFF;
static int log_descriptor = -1;
static long wanted;
static long seen;

/* From now on: `what` happens at event number `at` (from 1) below `folder`; `log` gets a line for each event. */
void faults_arm(const char *folder, int what, long at, const char *log) {
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    if (log_descriptor >= 0) syscall(SYS_close, log_descriptor);
    log_descriptor = log ? (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC, 0600) : -1;
    wanted = at;
    seen = 0;
    mode = what;
}

void faults_disarm(void) { mode = OFF; }

long faults_seen(void) { return seen; }

static int below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int path_of(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, 4095);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static int path_at(int folder, const char *name, char *path) {
    if (name[0] == '/') {
        snprintf(path, 4096, "%s", name);
        return 1;
    }
    if (folder == AT_FDCWD) {
        if (!getcwd(path, 2048)) return 0;
    } else if (!path_of(folder, path)) {
        return 0;
    }
    size_t length = strlen(path);
    snprintf(path + length, 4096 - length, "/%s", name);
    return 1;
}

enum kind { CREATE, WRITE, SYNC, CHANGE };

/* Counts an event. Returns 0 to go on, -1 with errno set to fail, or 1 to write a part of the bytes and be killed. */
static int event(const char *what, enum kind kind, const char *path, size_t bytes) {
    if (!below(path)) return 0;
    long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (log_descriptor >= 0) {
        char line[4300];
        int length = snprintf(line, sizeof line, "%s\t%s\t%zu\n", what, path + root_length, bytes);
        syscall(SYS_write, log_descriptor, line, (size_t)length);
    }
    if (number < wanted) return 0;
    switch (mode) {
    case KILL_BEFORE: if (number == wanted) kill(getpid(), SIGKILL); break;
    case KILL_INSIDE: return number == wanted;
    case STOP_BEFORE: if (number == wanted) kill(getpid(), SIGSTOP); break;
    case NO_SPACE: if (kind == WRITE || kind == CREATE) { errno = ENOSPC; return -1; } break;
    case READ_ONLY: if (kind == CREATE || kind == CHANGE) { errno = EROFS; return -1; } break;
    case NO_SYNC: if (kind == SYNC) { errno = ENOSPC; return -1; } break;
    }
    return 0;
}

#define NEXT(type, name, ...)                                                                                          \
    static type (*next)(__VA_ARGS__);                                                                                  \
    if (!next) next = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define ON_DESCRIPTOR(descriptor, name, kind, bytes, failed)                                                           \
    int part = 0;                                                                                                      \
    char path[4096];                                                                                                   \
    if (mode != OFF && path_of(descriptor, path) && (part = event(name, kind, path, bytes)) < 0) return failed

static int creating(int flags) { return flags & (O_CREAT | O_TRUNC) || (flags & O_ACCMODE) != O_RDONLY; }

#define OPEN(name)                                                                                                     \
    int name(const char *file, int flags, ...) {                                                                       \
        NEXT(int, name, const char *, int, ...);                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t rights = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                      \
        va_end(rest);                                                                                                  \
        char path[4096];                                                                                               \
        if (mode != OFF && creating(flags) && path_at(AT_FDCWD, file, path) && event("open", CREATE, path, 0))         \
            return -1;                                                                                                 \
        return next(file, flags, rights);                                                                              \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
    int name(int folder, const char *file, int flags, ...) {                                                           \
        NEXT(int, name, int, const char *, int, ...);                                                                  \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t rights = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                      \
        va_end(rest);                                                                                                  \
        char path[4096];                                                                                               \
        if (mode != OFF && creating(flags) && path_at(folder, file, path) && event("open", CREATE, path, 0))           \
            return -1;                                                                                                 \
        return next(folder, file, flags, rights);                                                                      \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                                                    \
    FILE *name(const char *file, const char *how) {                                                                    \
        NEXT(FILE *, name, const char *, const char *);                                                                \
        char path[4096];                                                                                               \
        if (mode != OFF && strpbrk(how, "wa+") && path_at(AT_FDCWD, file, path) && event("open", CREATE, path, 0))     \
            return NULL;                                                                                               \
        return next(file, how);                                                                                        \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int descriptor, const void *from, size_t bytes) {
    NEXT(ssize_t, write, int, const void *, size_t);
    ON_DESCRIPTOR(descriptor, "write", WRITE, bytes, -1);
    if (part) {
        next(descriptor, from, bytes / 2);
        kill(getpid(), SIGKILL);
    }
    return next(descriptor, from, bytes);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    NEXT(ssize_t, writev, int, const struct iovec *, int);
    size_t bytes = 0;
    for (int i = 0; i < count; i++) bytes += parts[i].iov_len;
    ON_DESCRIPTOR(descriptor, "write", WRITE, bytes, -1);
    if (part) {
        if (count == 1) syscall(SYS_write, descriptor, parts[0].iov_base, bytes / 2);
        else next(descriptor, parts, count / 2);
        kill(getpid(), SIGKILL);
    }
    return next(descriptor, parts, count);
}

#define PWRITE(name)                                                                                                   \
    ssize_t name(int descriptor, const void *from, size_t bytes, off_t at) {                                           \
        NEXT(ssize_t, name, int, const void *, size_t, off_t);                                                         \
        ON_DESCRIPTOR(descriptor, "write", WRITE, bytes, -1);                                                          \
        if (part) {                                                                                                    \
            next(descriptor, from, bytes / 2, at);                                                                     \
            kill(getpid(), SIGKILL);                                                                                   \
        }                                                                                                              \
        return next(descriptor, from, bytes, at);                                                                      \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define SENDFILE(name)                                                                                                 \
    ssize_t name(int to, int from, off_t *at, size_t bytes) {                                                          \
        NEXT(ssize_t, name, int, int, off_t *, size_t);                                                                \
        ON_DESCRIPTOR(to, "write", WRITE, bytes, -1);                                                                  \
        if (part) {                                                                                                    \
            next(to, from, at, 100);                                                                                   \
            kill(getpid(), SIGKILL);                                                                                   \
        }                                                                                                              \
        return next(to, from, at, bytes);                                                                              \
    }
SENDFILE(sendfile)
SENDFILE(sendfile64)

#define TRUNCATE(name)                                                                                                 \
    int name(int descriptor, off_t length) {                                                                           \
        NEXT(int, name, int, off_t);                                                                                   \
        ON_DESCRIPTOR(descriptor, #name, CHANGE, 0, -1);                                                               \
        return part ? kill(getpid(), SIGKILL) : next(descriptor, length);                                              \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define SYNCING(name)                                                                                                  \
    int name(int descriptor) {                                                                                         \
        NEXT(int, name, int);                                                                                          \
        ON_DESCRIPTOR(descriptor, #name, SYNC, 0, -1);                                                                 \
        return part ? kill(getpid(), SIGKILL) : next(descriptor);                                                      \
    }
SYNCING(fsync)
SYNCING(fdatasync)

static int on_path(const char *what, enum kind kind, int folder, const char *file) {
    char path[4096];
    if (mode == OFF || !path_at(folder, file, path)) return 0;
    int part = event(what, kind, path, 0);
    return part > 0 ? kill(getpid(), SIGKILL) : part;
}

int rename(const char *from, const char *to) {
    NEXT(int, rename, const char *, const char *);
    return on_path("rename", CHANGE, AT_FDCWD, from) < 0 ? -1 : next(from, to);
}

int renameat(int a, const char *from, int b, const char *to) {
    NEXT(int, renameat, int, const char *, int, const char *);
    return on_path("rename", CHANGE, a, from) < 0 ? -1 : next(a, from, b, to);
}

int link(const char *from, const char *to) {
    NEXT(int, link, const char *, const char *);
    return on_path("link", CREATE, AT_FDCWD, to) < 0 ? -1 : next(from, to);
}

int mkdir(const char *file, mode_t rights) {
    NEXT(int, mkdir, const char *, mode_t);
    return on_path("mkdir", CREATE, AT_FDCWD, file) < 0 ? -1 : next(file, rights);
}

int mkdirat(int folder, const char *file, mode_t rights) {
    NEXT(int, mkdirat, int, const char *, mode_t);
    return on_path("mkdir", CREATE, folder, file) < 0 ? -1 : next(folder, file, rights);
}

int unlink(const char *file) {
    NEXT(int, unlink, const char *);
    return on_path("unlink", CHANGE, AT_FDCWD, file) < 0 ? -1 : next(file);
}

int unlinkat(int folder, const char *file, int flags) {
    NEXT(int, unlinkat, int, const char *, int);
    return on_path("unlink", CHANGE, folder, file) < 0 ? -1 : next(folder, file, flags);
}

int rmdir(const char *file) {
    NEXT(int, rmdir, const char *);
    return on_path("rmdir", CHANGE, AT_FDCWD, file) < 0 ? -1 : next(file);
}
