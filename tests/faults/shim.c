/* A layer under every call of the C library by which a process writes to files.
 *
 * Loaded with LD_PRELOAD. Once armed, by faults_arm() or by the environment, it counts the calls
 * that change something below one directory, writes each down in a log with all its data, and at
 * one of them does what it was told: ends the process, or lets the call fail. The log tells what a
 * power cut could have left: see disk.py.
 *
 * Calls go to the kernel directly, so that the layer needs nothing of the library below it. A
 * record of the log is
 *
 *     length: u32 (of all that follows)  operation: u32  error: i32  flags: u32
 *     inode: u64  offset: u64  lengths of two paths and of the data: 3 u32  the three
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum operation {
    OPEN = 1, WRITE, TRUNCATE, SYNC, RENAME, LINK, UNLINK, MKDIR, RMDIR, CHANGE, LOCK
};
enum flag { CREATED = 1, EMPTIED = 2, DURABLE = 4 };
enum fault {
    NONE,     /* count and log only */
    KILL,     /* end the process before the call */
    TEAR,     /* end the process in the middle of the call, if it is a write */
    FAIL,     /* let this call fail, and none after it */
    FULL,     /* let this call fail, and all after it that need space */
    SHORTEN,  /* write half; let all after it that need space fail */
    HALT      /* stop the process before the call, until it is told to go on or killed */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1;
static long point, count;
static int fault, fault_errno, is_full;

int faults_arm(const char *directory, const char *log, long at, int kind, int error)
{
    root_length = strlen(directory);
    if (root_length + 1 > sizeof root)
        return -1;
    memcpy(root, directory, root_length + 1);
    point = at, fault = kind, fault_errno = error, count = 0, is_full = 0;
    log_fd = (int)syscall(SYS_openat, AT_FDCWD, log,
                          O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    return log_fd;
}

__attribute__((constructor)) static void arm_from_environment(void)
{
    const char *directory = getenv("MERGEGIT_SHIM_ROOT");
    const char *log = getenv("MERGEGIT_SHIM_LOG");
    const char *what = getenv("MERGEGIT_SHIM_FAULT"); /* "point kind errno" */
    long at = -1;
    int kind = NONE, error = 0;
    if (directory == NULL || log == NULL)
        return;
    if (what != NULL)
        sscanf(what, "%ld %d %d", &at, &kind, &error);
    faults_arm(directory, log, at, kind, error);
}

/* -- which calls, and the log ------------------------------------------------------------------ */

static int is_below(const char *path)
{
    return log_fd >= 0 && strncmp(path, root, root_length) == 0
        && (path[root_length] == '/' || path[root_length] == '\0');
}

/* The absolute path of an open file; what is unlinked keeps its old one. */
static int path_of_fd(int fd, char *path)
{
    char link[64];
    ssize_t length;
    if (log_fd < 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    return is_below(path);
}

/* The absolute path of a name; the driver's root has no links in it. */
static int path_at(int directory, const char *name, char *path)
{
    size_t length;
    if (log_fd < 0 || name == NULL)
        return 0;
    if (name[0] == '/') {
        if (strlen(name) >= PATH_MAX)
            return 0;
        strcpy(path, name);
        return is_below(path);
    }
    if (directory == AT_FDCWD) {
        if (syscall(SYS_getcwd, path, PATH_MAX) < 0)
            return 0;
    } else {
        path_of_fd(directory, path);
    }
    length = strlen(path);
    if (length + strlen(name) + 2 > PATH_MAX)
        return 0;
    path[length] = '/';
    strcpy(path + length + 1, name);
    return is_below(path);
}

static uint64_t inode_of(int fd)
{
    struct stat status;
    return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

static void append(const void *data, size_t length)
{
    const char *at = data;
    while (length > 0) {
        ssize_t written = syscall(SYS_write, log_fd, at, length);
        if (written <= 0)
            syscall(SYS_kill, getpid(), SIGABRT);
        at += written, length -= (size_t)written;
    }
}

static void record(enum operation operation, int error, uint32_t flags, uint64_t inode,
                   uint64_t offset, const char *path, const char *other, const void *data,
                   size_t length)
{
    struct __attribute__((packed)) {
        uint32_t length, operation;
        int32_t error;
        uint32_t flags;
        uint64_t inode, offset;
        uint32_t path, other, data;
    } head = {0, operation, error, flags, inode, offset, 0, 0, (uint32_t)length};
    char *whole;
    head.path = path ? (uint32_t)strlen(path) : 0;
    head.other = other ? (uint32_t)strlen(other) : 0;
    head.length = (uint32_t)(sizeof head - 4) + head.path + head.other + head.data;
    whole = malloc(sizeof head + head.path + head.other + length);
    memcpy(whole, &head, sizeof head);
    if (path)
        memcpy(whole + sizeof head, path, head.path);
    if (other)
        memcpy(whole + sizeof head + head.path, other, head.other);
    if (length)
        memcpy(whole + sizeof head + head.path + head.other, data, length);
    append(whole, sizeof head + head.path + head.other + length);
    free(whole);
}

/* -- faults ------------------------------------------------------------------------------------ */

enum verdict { GO, DENIED, HALF, HALF_THEN_KILL };

static void die(void)
{
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;)
        pause();
}

/* A call is about to happen; the mutex is held. Sets errno where it is to fail. */
static enum verdict reached(int is_write, int needs_space)
{
    int here = count++ == point;
    if (here && fault == KILL)
        die();
    if (here && fault == HALT) {
        syscall(SYS_kill, getpid(), SIGSTOP);
        return GO;
    }
    if (here && fault == TEAR) {
        if (is_write)
            return HALF_THEN_KILL;
        die();
    }
    if (here && (fault == FULL || fault == SHORTEN))
        is_full = 1;
    if (here && fault == SHORTEN && is_write)
        return HALF;
    if ((here && fault != NONE) || (is_full && needs_space)) {
        errno = fault_errno;
        return DENIED;
    }
    return GO;
}

/* -- the calls --------------------------------------------------------------------------------- */

static int opened(int directory, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    struct stat status;
    int fd, is_new, error;
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) || !path_at(directory, name, path))
        return (int)syscall(SYS_openat, directory, name, flags, mode);
    pthread_mutex_lock(&mutex);
    is_new = (flags & O_CREAT) && fstatat(directory, name, &status, AT_SYMLINK_NOFOLLOW) != 0;
    fd = -1;
    if (reached(0, is_new) == GO)
        fd = (int)syscall(SYS_openat, directory, name, flags, mode);
    error = fd < 0 ? errno : 0;
    record(OPEN, error, (is_new ? CREATED : 0) | ((flags & O_TRUNC) ? EMPTIED : 0),
           fd < 0 ? 0 : inode_of(fd), 0, path, NULL, NULL, 0);
    pthread_mutex_unlock(&mutex);
    errno = error;
    return fd;
}

/* A write of one buffer; ``offset`` is negative for the file's own position. */
static ssize_t written(int fd, const void *data, size_t length, off_t offset)
{
    char path[PATH_MAX];
    ssize_t done = -1;
    int flags, error;
    off_t at = offset;
    enum verdict verdict;
    struct stat status;
    if (!path_of_fd(fd, path))
        return offset < 0 ? syscall(SYS_write, fd, data, length)
                          : syscall(SYS_pwrite64, fd, data, length, offset);
    pthread_mutex_lock(&mutex);
    flags = fcntl(fd, F_GETFL);
    if (offset < 0)
        at = (flags & O_APPEND) && fstat(fd, &status) == 0 ? status.st_size
                                                           : lseek(fd, 0, SEEK_CUR);
    verdict = reached(1, 1);
    if (verdict == HALF || verdict == HALF_THEN_KILL)
        length /= 2;
    if (verdict != DENIED)
        done = offset < 0 ? syscall(SYS_write, fd, data, length)
                          : syscall(SYS_pwrite64, fd, data, length, offset);
    error = done < 0 ? errno : 0;
    record(WRITE, error, (flags & O_DSYNC) && verdict != HALF_THEN_KILL ? DURABLE : 0,
           inode_of(fd), (uint64_t)at, path, NULL, data, done < 0 ? 0 : (size_t)done);
    if (verdict == HALF_THEN_KILL)
        die();
    pthread_mutex_unlock(&mutex);
    errno = error;
    return done;
}

static ssize_t written_vector(int fd, const struct iovec *parts, int number, off_t offset)
{
    char path[PATH_MAX];
    size_t total = 0;
    ssize_t done;
    char *whole, *at;
    int error;
    if (!path_of_fd(fd, path))
        return offset < 0 ? syscall(SYS_writev, fd, parts, number)
                          : syscall(SYS_pwritev, fd, parts, number, offset, 0);
    for (int i = 0; i < number; i++)
        total += parts[i].iov_len;
    at = whole = malloc(total ? total : 1);
    for (int i = 0; i < number; i++) {
        memcpy(at, parts[i].iov_base, parts[i].iov_len);
        at += parts[i].iov_len;
    }
    done = written(fd, whole, total, offset);
    error = errno;
    free(whole);
    errno = error;
    return done;
}

/* Calls that take an open file and change nothing of its contents, or its length alone. */
static int changed(int fd, enum operation operation, long number, long argument, long more,
                   int needs_space)
{
    char path[PATH_MAX];
    int result = -1, error;
    if (!path_of_fd(fd, path))
        return (int)syscall(number, fd, argument, more, 0);
    pthread_mutex_lock(&mutex);
    if (reached(0, needs_space) == GO)
        result = (int)syscall(number, fd, argument, more, 0);
    error = result < 0 ? errno : 0;
    record(operation, error, 0, inode_of(fd), (uint64_t)argument, path, NULL, NULL, 0);
    pthread_mutex_unlock(&mutex);
    errno = error;
    return result;
}

/* Calls that take one name. */
static int named(int directory, const char *name, enum operation operation, long number,
                 long argument, long more, int needs_space)
{
    char path[PATH_MAX];
    int result = -1, error;
    if (!path_at(directory, name, path))
        return (int)syscall(number, directory, name, argument, more);
    pthread_mutex_lock(&mutex);
    if (reached(0, needs_space) == GO)
        result = (int)syscall(number, directory, name, argument, more);
    error = result < 0 ? errno : 0;
    record(operation, error, 0, 0, 0, path, NULL, NULL, 0);
    pthread_mutex_unlock(&mutex);
    errno = error;
    return result;
}

/* Calls that take two names. */
static int paired(int from, const char *old, int to, const char *new, enum operation operation,
                  long number, long argument)
{
    char path[PATH_MAX], other[PATH_MAX];
    int result = -1, error;
    int watched = path_at(from, old, path) | path_at(to, new, other);
    if (!watched)
        return (int)syscall(number, from, old, to, new, argument);
    pthread_mutex_lock(&mutex);
    if (reached(0, operation == LINK) == GO)
        result = (int)syscall(number, from, old, to, new, argument);
    error = result < 0 ? errno : 0;
    record(operation, error, 0, 0, 0, path, other, NULL, 0);
    pthread_mutex_unlock(&mutex);
    errno = error;
    return result;
}

/* A disk that is full says so to those who ask. */
static int asked_for_space(const char *symbol, const char *name, struct statvfs *space)
{
    int (*ask)(const char *, struct statvfs *) = dlsym(RTLD_NEXT, symbol);
    char path[PATH_MAX];
    int result = ask(name, space);
    if (result == 0 && is_full && path_at(AT_FDCWD, name, path))
        space->f_bavail = space->f_bfree = 0;
    return result;
}

int statvfs(const char *path, struct statvfs *space)
{
    return asked_for_space("statvfs", path, space);
}

int statvfs64(const char *path, struct statvfs64 *space)
{
    return asked_for_space("statvfs64", path, (struct statvfs *)space);
}

static mode_t mode_of(int flags, va_list arguments)
{
    return (flags & (O_CREAT | O_TMPFILE)) ? va_arg(arguments, mode_t) : 0;
}

#define OPENING(NAME)                                    \
    int NAME(const char *path, int flags, ...)           \
    {                                                    \
        va_list arguments;                               \
        mode_t mode;                                     \
        va_start(arguments, flags);                      \
        mode = mode_of(flags, arguments);                \
        va_end(arguments);                               \
        return opened(AT_FDCWD, path, flags, mode);      \
    }
#define OPENING_AT(NAME)                                          \
    int NAME(int directory, const char *path, int flags, ...)     \
    {                                                             \
        va_list arguments;                                        \
        mode_t mode;                                              \
        va_start(arguments, flags);                               \
        mode = mode_of(flags, arguments);                         \
        va_end(arguments);                                        \
        return opened(directory, path, flags, mode);              \
    }

OPENING(open)
OPENING(open64)
OPENING_AT(openat)
OPENING_AT(openat64)

int __open_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __openat_2(int at, const char *path, int flags) { return opened(at, path, flags, 0); }
int __openat64_2(int at, const char *path, int flags) { return opened(at, path, flags, 0); }

int creat(const char *path, mode_t mode)
{
    return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

ssize_t write(int fd, const void *data, size_t length) { return written(fd, data, length, -1); }

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset)
{
    return written(fd, data, length, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset)
{
    return written(fd, data, length, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int number)
{
    return written_vector(fd, parts, number, -1);
}

ssize_t pwritev(int fd, const struct iovec *parts, int number, off_t offset)
{
    return written_vector(fd, parts, number, offset);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int number, off64_t offset)
{
    return written_vector(fd, parts, number, offset);
}

int ftruncate64(int fd, off64_t length)
{
    return changed(fd, TRUNCATE, SYS_ftruncate, length, 0, 1);
}

int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

static int truncated(const char *path, off_t length)
{
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC);
    int result, error;
    if (fd < 0)
        return -1;
    result = ftruncate(fd, length);
    error = errno;
    syscall(SYS_close, fd);
    errno = error;
    return result;
}

int truncate(const char *path, off_t length) { return truncated(path, length); }
int truncate64(const char *path, off64_t length) { return truncated(path, length); }

int fsync(int fd) { return changed(fd, SYNC, SYS_fsync, 0, 0, 0); }
int fdatasync(int fd) { return changed(fd, SYNC, SYS_fdatasync, 0, 0, 0); }
int fchmod(int fd, mode_t mode) { return changed(fd, CHANGE, SYS_fchmod, mode, 0, 0); }

int futimens(int fd, const struct timespec times[2])
{
    return changed(fd, CHANGE, SYS_utimensat, 0, (long)times, 0);
}

int flock(int fd, int how)
{
    return (how & LOCK_UN) ? (int)syscall(SYS_flock, fd, how)
                           : changed(fd, LOCK, SYS_flock, how, 0, 0);
}

int mkdir(const char *path, mode_t mode)
{
    return named(AT_FDCWD, path, MKDIR, SYS_mkdirat, mode, 0, 1);
}

int mkdirat(int at, const char *path, mode_t mode)
{
    return named(at, path, MKDIR, SYS_mkdirat, mode, 0, 1);
}

int unlinkat(int at, const char *path, int flags)
{
    return named(at, path, (flags & AT_REMOVEDIR) ? RMDIR : UNLINK, SYS_unlinkat, flags, 0, 0);
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int chmod(const char *path, mode_t mode)
{
    return named(AT_FDCWD, path, CHANGE, SYS_fchmodat, mode, 0, 0);
}

int utimensat(int at, const char *path, const struct timespec times[2], int flags)
{
    return named(at, path, CHANGE, SYS_utimensat, (long)times, flags, 0);
}

int rename(const char *old, const char *new)
{
    return paired(AT_FDCWD, old, AT_FDCWD, new, RENAME, SYS_renameat2, 0);
}

int renameat(int from, const char *old, int to, const char *new)
{
    return paired(from, old, to, new, RENAME, SYS_renameat2, 0);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
    return paired(from, old, to, new, RENAME, SYS_renameat2, (long)flags);
}

int link(const char *old, const char *new)
{
    return paired(AT_FDCWD, old, AT_FDCWD, new, LINK, SYS_linkat, 0);
}

int linkat(int from, const char *old, int to, const char *new, int flags)
{
    return paired(from, old, to, new, LINK, SYS_linkat, flags);
}
