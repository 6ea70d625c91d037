"""A file server that lets each call wait: a library to preload, which sleeps in the calls on files
below one folder that a network file system would send to its server."""

from __future__ import annotations

import subprocess
from pathlib import Path

WAIT_S = 500e-6
"""Seconds that each open, stat and read waits; a Lustre server answers one thread 2,000 stats a
second (see results/scale.md)."""

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MOST 65536
static char below[MOST];

static void wait_for_server(void) {
  struct timespec left = {0, atol(getenv("SLOW_NS"))};
  nanosleep(&left, NULL);
}

static int is_slow(int folder, const char *path) {
  const char *slow = getenv("SLOW_FOLDER");
  if (path[0] != '/') return folder >= 0 && folder < MOST && below[folder];
  return slow && strncmp(path, slow, strlen(slow)) == 0;
}

static int note(int fd, int slow) {
  if (fd >= 0 && fd < MOST) below[fd] = slow;
  return fd;
}

#define OPEN(name)                                                                \
  int name(const char *path, int flags, ...) {                                    \
    int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);                \
    va_list rest; va_start(rest, flags);                                          \
    mode_t mode = va_arg(rest, mode_t); va_end(rest);                             \
    int slow = is_slow(-1, path);                                                 \
    if (slow) wait_for_server();                                                  \
    return note(next(path, flags, mode), slow);                                   \
  }
#define OPENAT(name)                                                              \
  int name(int folder, const char *path, int flags, ...) {                        \
    int (*next)(int, const char *, int, ...) = dlsym(RTLD_NEXT, #name);           \
    va_list rest; va_start(rest, flags);                                          \
    mode_t mode = va_arg(rest, mode_t); va_end(rest);                             \
    int slow = is_slow(folder, path);                                             \
    if (slow) wait_for_server();                                                  \
    return note(next(folder, path, flags, mode), slow);                           \
  }
#define STAT(name, type)                                                          \
  int name(const char *path, struct type *found) {                                \
    int (*next)(const char *, struct type *) = dlsym(RTLD_NEXT, #name);           \
    if (is_slow(-1, path)) wait_for_server();                                     \
    return next(path, found);                                                     \
  }
#define STATAT(name, type)                                                        \
  int name(int folder, const char *path, struct type *found, int flags) {         \
    int (*next)(int, const char *, struct type *, int) = dlsym(RTLD_NEXT, #name); \
    if (is_slow(folder, path)) wait_for_server();                                 \
    return next(folder, path, found, flags);                                      \
  }
#define PREAD(name)                                                               \
  ssize_t name(int fd, void *to, size_t size, off_t place) {                      \
    ssize_t (*next)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, #name);        \
    if (fd >= 0 && fd < MOST && below[fd]) wait_for_server();                     \
    return next(fd, to, size, place);                                             \
  }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
STAT(stat, stat) STAT(stat64, stat64) STAT(lstat, stat) STAT(lstat64, stat64)
STATAT(fstatat, stat) STATAT(fstatat64, stat64)
PREAD(pread) PREAD(pread64)
ssize_t read(int fd, void *to, size_t size) {
  ssize_t (*next)(int, void *, size_t) = dlsym(RTLD_NEXT, "read");
  if (fd >= 0 && fd < MOST && below[fd]) wait_for_server();
  return next(fd, to, size);
}
int close(int fd) {
  int (*next)(int) = dlsym(RTLD_NEXT, "close");
  note(fd, 0);
  return next(fd);
}
"""


def build_slow_server(place: Path, slow: Path) -> dict[str, str]:
    """Compile the library at `place`; return the variables with which a program's calls on files
    below `slow` wait."""
    source = place.with_suffix(".c")
    source.write_text(SOURCE)
    command = ["cc", "-O1", "-shared", "-fPIC", "-w", "-o", str(place), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return {
        "LD_PRELOAD": str(place),
        "SLOW_FOLDER": str(slow),
        "SLOW_NS": str(round(WAIT_S * 1e9)),
    }
