/* Calls of the file system that fail for paths that begin with one prefix, and a clock that steps.
 *
 * `arm(prefix, kinds, first, number, code)` makes the calls of these kinds fail with `code`, from
 * the first-th on, so many times. A process that is not armed sees no difference; a forked one
 * inherits what was armed. Where the file CONTROL is there, what it holds (struct fault) is true of
 * every process that loads this.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, STAT = 8, LIST = 16, NAME = 32, SYNC = 64, CREATE = 128 };
struct fault {
  long kinds, code, first, number, count;
  long at, by; /* from this second on clocks, and times of files, are so many seconds later */
  char prefix[4096];
};
static struct fault own, *now = &own;

__attribute__((constructor)) static void share(void) {
#ifdef CONTROL
  int fd = syscall(SYS_openat, AT_FDCWD, CONTROL, O_RDWR, 0);
  void *found = mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd >= 0) syscall(SYS_close, fd);
  if (found != MAP_FAILED) now = found;
#endif
}

void arm(const char *where, int which, long from, long times, int error) {
  strncpy(own.prefix, where, sizeof own.prefix - 1);
  own.first = from, own.number = times, own.code = error, own.count = 0, own.kinds = which;
}

static int is_below(const char *path) {
  return path && now->prefix[0] && !strncmp(path, now->prefix, strlen(now->prefix));
}
static int is_held(int fd) {
  char name[64], path[4096] = "";
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  return syscall(SYS_readlinkat, AT_FDCWD, name, path, sizeof path - 1) > 0 && is_below(path);
}
static int is_at(int folder, const char *path) {
  return is_below(path) || (path && path[0] != '/' && is_held(folder));
}
static int counts(void) {
  long call = __sync_add_and_fetch(&now->count, 1);
  if (call < now->first || call - now->first >= now->number) return 0;
  errno = now->code;
  return 1;
}
#define FAILS(kind, ours) ((now->kinds & (kind)) && (ours) && counts())

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define OPEN_KIND ((flags & (O_WRONLY | O_RDWR | O_CREAT)) ? CREATE | OPEN : OPEN)
#define OPENS(name, ours, types, words)             \
  int name types {                                  \
    mode_t mode = 0;                                \
    if (flags & (O_CREAT | O_TMPFILE)) {            \
      va_list rest;                                 \
      va_start(rest, flags);                        \
      mode = va_arg(rest, mode_t);                  \
      va_end(rest);                                 \
    }                                               \
    REAL(name);                                     \
    return FAILS(OPEN_KIND, ours) ? -1 : real words; \
  }
OPENS(open, is_below(path), (const char *path, int flags, ...), (path, flags, mode))
OPENS(open64, is_below(path), (const char *path, int flags, ...), (path, flags, mode))
OPENS(openat, is_at(at, path), (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPENS(openat64, is_at(at, path), (int at, const char *path, int flags, ...),
      (at, path, flags, mode))

#define CALL(result, name, kind, ours, types, words) \
  result name types {                                \
    REAL(name);                                      \
    return FAILS(kind, ours) ? -1 : real words;      \
  }
CALL(ssize_t, read, READ, is_held(fd), (int fd, void *to, size_t size), (fd, to, size))
CALL(ssize_t, pread, READ, is_held(fd), (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
CALL(ssize_t, pread64, READ, is_held(fd), (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
CALL(ssize_t, write, WRITE, is_held(fd), (int fd, const void *of, size_t size), (fd, of, size))
CALL(int, fsync, SYNC, is_held(fd), (int fd), (fd))
CALL(int, statvfs, STAT, is_below(path), (const char *path, struct statvfs *to), (path, to))
CALL(int, statvfs64, STAT, is_below(path), (const char *path, struct statvfs64 *to), (path, to))
CALL(int, access, STAT, is_below(path), (const char *path, int how), (path, how))
CALL(int, mkdir, NAME, is_below(path), (const char *path, mode_t mode), (path, mode))
CALL(int, rmdir, NAME, is_below(path), (const char *path), (path))
CALL(int, unlink, NAME, is_below(path), (const char *path), (path))
CALL(int, rename, NAME, is_below(to), (const char *from, const char *to), (from, to))
CALL(int, link, NAME, is_below(to), (const char *from, const char *to), (from, to))
CALL(int, chmod, NAME, is_below(path), (const char *path, mode_t mode), (path, mode))
CALL(int, fchmod, NAME, is_held(fd), (int fd, mode_t mode), (fd, mode))

#define SHIFT(time) ((time).tv_sec += now->by && (time).tv_sec >= now->at ? now->by : 0)
#define STATS(name, type, ours, types, words)                  \
  int name types {                                             \
    REAL(name);                                                \
    int failed = FAILS(STAT, ours) ? -1 : real words;          \
    if (!failed) SHIFT(to->st_mtim), SHIFT(to->st_ctim), SHIFT(to->st_atim); \
    return failed;                                             \
  }
#define STATS_OF(name, type, ours, first) STATS(name, type, ours, (first, struct type *to), (of, to))
STATS_OF(stat, stat, is_below(of), const char *of)
STATS_OF(stat64, stat64, is_below(of), const char *of)
STATS_OF(lstat, stat, is_below(of), const char *of)
STATS_OF(lstat64, stat64, is_below(of), const char *of)
STATS_OF(fstat, stat, is_held(of), int of)
STATS_OF(fstat64, stat64, is_held(of), int of)
STATS(fstatat, stat, is_at(at, path), (int at, const char *path, struct stat *to, int how),
      (at, path, to, how))
STATS(fstatat64, stat64, is_at(at, path), (int at, const char *path, struct stat64 *to, int how),
      (at, path, to, how))

int clock_gettime(clockid_t id, struct timespec *to) {
  int failed = syscall(SYS_clock_gettime, id, to);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) SHIFT(*to);
  return failed;
}
int gettimeofday(struct timeval *restrict to, void *restrict zone) {
  int failed = syscall(SYS_gettimeofday, to, zone);
  if (!failed) SHIFT(*to);
  return failed;
}
time_t time(time_t *to) {
  struct timeval found;
  gettimeofday(&found, NULL);
  return to ? *to = found.tv_sec : found.tv_sec;
}

DIR *opendir(const char *path) {
  REAL(opendir);
  return FAILS(LIST, is_below(path)) ? NULL : real(path);
}
struct dirent *readdir(DIR *of) {
  REAL(readdir);
  return FAILS(LIST, is_held(dirfd(of))) ? NULL : real(of);
}
struct dirent64 *readdir64(DIR *of) {
  REAL(readdir64);
  return FAILS(LIST, is_held(dirfd(of))) ? NULL : real(of);
}
