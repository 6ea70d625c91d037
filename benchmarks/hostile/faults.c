/* Calls of the file system that fail, for paths that begin with one prefix.
 *
 * `arm(prefix, kinds, first, number, code)` makes the calls of these kinds fail with `code`, from
 * the first-th on, so many times. A process that is not armed sees no difference; a forked one
 * inherits what was armed.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, STAT = 8, LIST = 16, NAME = 32, SYNC = 64, CREATE = 128 };
#define MOST 4096
static char prefix[4096], known[MOST];
static int kinds, code;
static long first, number, count;

void arm(const char *where, int which, long from, long times, int error) {
  strncpy(prefix, where, sizeof prefix - 1);
  first = from, number = times, code = error, count = 0, kinds = which;
}

long counted(void) { return count; }

static int fails(int kind, int is_ours) {
  if (!is_ours || !(kinds & kind)) return 0;
  long now = __sync_add_and_fetch(&count, 1);
  if (now < first || now >= first + number) return 0;
  errno = code;
  return 1;
}

static int is_below(const char *path) {
  return kinds && path && prefix[0] && !strncmp(path, prefix, strlen(prefix));
}
static int is_held(int fd) { return fd >= 0 && fd < MOST && known[fd]; }
static int is_at(int folder, const char *path) {
  return is_below(path) || (kinds && path && path[0] != '/' && is_held(folder));
}
static int note(int fd, int is_ours) {
  if (fd >= 0 && fd < MOST) known[fd] = is_ours;
  return fd;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define OPEN_KIND ((flags & (O_WRONLY | O_RDWR | O_CREAT)) ? CREATE | OPEN : OPEN)
#define MODE                       \
  mode_t mode = 0;                 \
  if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list words;                 \
    va_start(words, flags);        \
    mode = va_arg(words, mode_t);  \
    va_end(words);                 \
  }
#define OPENS(name)                                         \
  int name(const char *path, int flags, ...) {              \
    MODE REAL(name);                                        \
    int ours = is_below(path);                              \
    return fails(OPEN_KIND, ours) ? -1 : note(real(path, flags, mode), ours); \
  }
#define OPENS_AT(name)                                      \
  int name(int folder, const char *path, int flags, ...) {  \
    MODE REAL(name);                                        \
    int ours = is_at(folder, path);                         \
    return fails(OPEN_KIND, ours) ? -1 : note(real(folder, path, flags, mode), ours); \
  }
OPENS(open) OPENS(open64) OPENS_AT(openat) OPENS_AT(openat64)

#define CALL(result, name, kind, ours, types, words) \
  result name types {                                \
    REAL(name);                                      \
    return fails(kind, ours) ? -1 : real words;      \
  }
CALL(ssize_t, read, READ, is_held(fd), (int fd, void *to, size_t size), (fd, to, size))
CALL(ssize_t, pread, READ, is_held(fd), (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
CALL(ssize_t, pread64, READ, is_held(fd), (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
CALL(ssize_t, write, WRITE, is_held(fd), (int fd, const void *of, size_t size), (fd, of, size))
CALL(int, fsync, SYNC, is_held(fd), (int fd), (fd))
CALL(int, stat, STAT, is_below(path), (const char *path, struct stat *to), (path, to))
CALL(int, stat64, STAT, is_below(path), (const char *path, struct stat64 *to), (path, to))
CALL(int, lstat, STAT, is_below(path), (const char *path, struct stat *to), (path, to))
CALL(int, lstat64, STAT, is_below(path), (const char *path, struct stat64 *to), (path, to))
CALL(int, fstatat, STAT, is_at(at, path), (int at, const char *path, struct stat *to, int how),
     (at, path, to, how))
CALL(int, fstatat64, STAT, is_at(at, path), (int at, const char *path, struct stat64 *to, int how),
     (at, path, to, how))
CALL(int, fstat, STAT, is_held(fd), (int fd, struct stat *to), (fd, to))
CALL(int, fstat64, STAT, is_held(fd), (int fd, struct stat64 *to), (fd, to))
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

int close(int fd) {
  REAL(close);
  note(fd, 0);
  return real(fd);
}
DIR *opendir(const char *path) {
  REAL(opendir);
  if (fails(LIST, is_below(path))) return NULL;
  DIR *found = real(path);
  if (found) note(dirfd(found), is_below(path));
  return found;
}
struct dirent *readdir(DIR *of) {
  REAL(readdir);
  return fails(LIST, is_held(dirfd(of))) ? NULL : real(of);
}
struct dirent64 *readdir64(DIR *of) {
  REAL(readdir64);
  return fails(LIST, is_held(dirfd(of))) ? NULL : real(of);
}
