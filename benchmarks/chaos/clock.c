/* A wall clock that a test may step, for the agents of a run: preloaded.
 *
 * The seconds to add lie in $CHAOS_CLOCKS/<host name>, eight bytes, and are read at each look at
 * the clock. Ranks keep the machine's: what waits there until a time of the wall clock is woken by
 * the kernel, whose clock is not stepped.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

static int is_agent;
static const volatile long long *step;

__attribute__((constructor)) static void find_out(void) {
  char exe[4096] = "";
  if (readlink("/proc/self/exe", exe, sizeof exe - 1) < 0) return;
  is_agent = strstr(exe, "python") && !getenv("RANK") && getenv("CHAOS_CLOCKS");
}

static long long read_step(void) {
  struct utsname host;
  char path[4352];
  if (!is_agent) return 0;
  if (!step && !uname(&host)) {
    snprintf(path, sizeof path, "%s/%s", getenv("CHAOS_CLOCKS"), host.nodename);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    void *found = mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) return 0;
    step = found;
  }
  return step ? *step : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int code = syscall(SYS_clock_gettime, clock, now);
  if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += read_step();
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  int code = syscall(SYS_gettimeofday, now, zone);
  if (!code && now) now->tv_sec += read_step();
  return code;
}

time_t time(time_t *out) {
  struct timespec now = {0};
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
