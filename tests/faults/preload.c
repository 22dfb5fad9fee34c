// Faults between a program and its drives, for tests: loaded with LD_PRELOAD, told by OUTCORE_FAULT what goes wrong.
//
// OUTCORE_FAULT="call kind path nth times": the `nth` call (from 1) of `call` (open read write fsync rename unlink mkdir
// rmdir stat mmap space thread; `any` of them) on a path that contains `path` misbehaves, and so do the next ones until `times` did.
// kind: a number of errno; `short` (half of it moves), `lost` (a write that claims to have happened), `torn` (half of it,
// claimed whole), `flip` (one bit of what is read), `kill` (SIGKILL before it), `killed` (SIGKILL after it), `term`, `hup`.
// The variable is read at every call, so a program can be started once and forked. OUTCORE_FAULT_COUNT names a file: how
// often the call came by is written there at exit.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long seen;
static char last_plan[512];

struct Plan {
  char call[16], kind[16], path[400];
  long nth, times;
};

static int read_plan(struct Plan* plan) {
  const char* text = getenv("OUTCORE_FAULT");
  if (text == NULL || *text == 0) return 0;
  if (strncmp(text, last_plan, sizeof(last_plan) - 1) != 0) {
    strncpy(last_plan, text, sizeof(last_plan) - 1);
    atomic_store(&seen, 0);
  }
  return sscanf(text, "%15s %15s %399s %ld %ld", plan->call, plan->kind, plan->path, &plan->nth, &plan->times) == 5;
}

static void name_of(int fd, char* out, size_t size) {
  char link[64];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  ssize_t got = readlink(link, out, size - 1);
  out[got > 0 ? got : 0] = 0;
}

// Whether this call misbehaves; fills `plan`. Kinds that kill do so here (`killed`: by the caller, afterwards).
static int strikes(struct Plan* plan, const char* call, const char* path, int fd) {
  if (!read_plan(plan) || (strcmp(plan->call, call) != 0 && strcmp(plan->call, "any") != 0)) return 0;
  char name[4096];
  if (path == NULL) {
    name_of(fd, name, sizeof(name));
    path = name;
  }
  if (strcmp(plan->path, "-") != 0 && strstr(path, plan->path) == NULL) return 0;
  const long count = atomic_fetch_add(&seen, 1) + 1;
  const char* counter = getenv("OUTCORE_FAULT_COUNT");
  if (counter != NULL) {
    char text[32];
    int length = snprintf(text, sizeof(text), "%ld\n", count);
    static int (*real_open)(const char*, int, ...);
    static ssize_t (*real_write)(int, const void*, size_t);
    if (real_open == NULL) real_open = dlsym(RTLD_NEXT, "open");
    if (real_write == NULL) real_write = dlsym(RTLD_NEXT, "write");
    int to = real_open(counter, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (to >= 0) {
      if (real_write(to, text, (size_t)length) < 0) abort();
      close(to);
    }
  }
  if (count < plan->nth || count >= plan->nth + plan->times) return 0;
  if (strcmp(plan->kind, "kill") == 0) kill(getpid(), SIGKILL);
  if (strcmp(plan->kind, "term") == 0) return kill(getpid(), SIGTERM), 0;
  if (strcmp(plan->kind, "hup") == 0) return kill(getpid(), SIGHUP), 0;
  return 1;
}

static int is(const struct Plan* plan, const char* kind) { return strcmp(plan->kind, kind) == 0; }

#define REAL(name) \
  static __typeof__(&name) real; \
  if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define REFUSE(result) \
  if (!is(&plan, "killed")) { \
    errno = atoi(plan.kind); \
    return result; \
  }

#define SIMPLE(name, call, path, fd, declared, passed) \
  int name declared { \
    REAL(name); \
    struct Plan plan; \
    const int strike = strikes(&plan, call, path, fd); \
    if (strike) { REFUSE(-1) } \
    const int result = real passed; \
    if (strike) kill(getpid(), SIGKILL); \
    return result; \
  }

SIMPLE(fsync, "fsync", NULL, fd, (int fd), (fd))
SIMPLE(fdatasync, "fsync", NULL, fd, (int fd), (fd))
SIMPLE(rename, "rename", to, -1, (const char* from, const char* to), (from, to))
SIMPLE(unlink, "unlink", path, -1, (const char* path), (path))
SIMPLE(rmdir, "rmdir", path, -1, (const char* path), (path))
SIMPLE(mkdir, "mkdir", path, -1, (const char* path, mode_t mode), (path, mode))
SIMPLE(stat, "stat", path, -1, (const char* path, struct stat* out), (path, out))
SIMPLE(stat64, "stat", path, -1, (const char* path, struct stat64* out), (path, out))
SIMPLE(posix_fallocate64, "space", NULL, fd, (int fd, off64_t at, off64_t n), (fd, at, n))

// Removing a tree goes by descriptors: the name alone does, with the folder's path before it.
static const char* below(int folder, const char* path, char* out, size_t size) {
  if (path[0] == '/' || folder == AT_FDCWD) return path;
  name_of(folder, out, size - 300);
  strncat(out, "/", 2);
  strncat(out, path, 250);
  return out;
}

int unlinkat(int folder, const char* path, int flags) {
  REAL(unlinkat);
  struct Plan plan;
  char whole[4096];
  const int strike =
      strikes(&plan, flags & AT_REMOVEDIR ? "rmdir" : "unlink", below(folder, path, whole, sizeof(whole)), -1);
  if (strike) { REFUSE(-1) }
  const int result = real(folder, path, flags);
  if (strike) kill(getpid(), SIGKILL);
  return result;
}

#define OPENING(name) \
  int name(const char* path, int flags, ...) { \
    REAL(name); \
    va_list more; \
    va_start(more, flags); \
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more); \
    struct Plan plan; \
    const int strike = strikes(&plan, "open", path, -1); \
    if (strike) { REFUSE(-1) } \
    const int result = real(path, flags, mode); \
    if (strike) kill(getpid(), SIGKILL); \
    return result; \
  }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name) \
  int name(int folder, const char* path, int flags, ...) { \
    REAL(name); \
    va_list more; \
    va_start(more, flags); \
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more); \
    struct Plan plan; \
    const int strike = strikes(&plan, "open", path, -1); \
    if (strike) { REFUSE(-1) } \
    const int result = real(folder, path, flags, mode); \
    if (strike) kill(getpid(), SIGKILL); \
    return result; \
  }
OPENING_AT(openat)
OPENING_AT(openat64)

DIR* opendir(const char* path) {
  REAL(opendir);
  struct Plan plan;
  if (strikes(&plan, "open", path, -1)) { REFUSE(NULL) }
  return real(path);
}

static void flip(void* data, ssize_t n) {
  if (n > 0) ((unsigned char*)data)[n / 2] ^= 4;
}

#define READING(name, declared, passed, data, wanted) \
  ssize_t name declared { \
    REAL(name); \
    struct Plan plan; \
    const int strike = strikes(&plan, "read", NULL, fd); \
    if (strike && !is(&plan, "flip") && !is(&plan, "short")) { REFUSE(-1) } \
    ssize_t result = real passed; \
    if (strike && is(&plan, "flip")) flip(data, result); \
    if (strike && is(&plan, "short") && result > 1) result /= 2; \
    if (strike && is(&plan, "killed")) kill(getpid(), SIGKILL); \
    return result; \
  }
READING(read, (int fd, void* data, size_t n), (fd, data, n), data, n)
READING(pread, (int fd, void* data, size_t n, off_t at), (fd, data, n, at), data, n)
READING(pread64, (int fd, void* data, size_t n, off64_t at), (fd, data, n, at), data, n)
READING(preadv, (int fd, const struct iovec* parts, int count, off_t at), (fd, parts, count, at), parts[0].iov_base, 0)
READING(preadv64, (int fd, const struct iovec* parts, int count, off64_t at), (fd, parts, count, at), parts[0].iov_base, 0)
READING(preadv2, (int fd, const struct iovec* parts, int count, off_t at, int flags), (fd, parts, count, at, flags),
        parts[0].iov_base, 0)
READING(preadv64v2, (int fd, const struct iovec* parts, int count, off64_t at, int flags), (fd, parts, count, at, flags),
        parts[0].iov_base, 0)

#define WRITING(name, declared, passed, wanted, half) \
  ssize_t name declared { \
    REAL(name); \
    struct Plan plan; \
    const int strike = strikes(&plan, "write", NULL, fd); \
    if (strike && is(&plan, "lost")) return (ssize_t)(wanted); \
    if (strike && (is(&plan, "torn") || is(&plan, "short"))) { \
      const ssize_t moved = half; \
      return is(&plan, "torn") && moved >= 0 ? (ssize_t)(wanted) : moved; \
    } \
    if (strike) { REFUSE(-1) } \
    const ssize_t result = real passed; \
    if (strike) kill(getpid(), SIGKILL); \
    return result; \
  }
static struct iovec halved(const struct iovec* part) {
  struct iovec half = *part;
  half.iov_len = half.iov_len / 2 / 4096 * 4096 ? half.iov_len / 2 / 4096 * 4096 : half.iov_len / 2;
  return half;
}
WRITING(write, (int fd, const void* data, size_t n), (fd, data, n), n, real(fd, data, n / 2))
WRITING(pwrite, (int fd, const void* data, size_t n, off_t at), (fd, data, n, at), n, real(fd, data, n / 2, at))
WRITING(pwrite64, (int fd, const void* data, size_t n, off64_t at), (fd, data, n, at), n, real(fd, data, n / 2, at))
WRITING(pwritev, (int fd, const struct iovec* parts, int count, off_t at), (fd, parts, count, at), parts[0].iov_len,
        ({ struct iovec h = halved(parts); real(fd, &h, 1, at); }))
WRITING(pwritev64, (int fd, const struct iovec* parts, int count, off64_t at), (fd, parts, count, at), parts[0].iov_len,
        ({ struct iovec h = halved(parts); real(fd, &h, 1, at); }))
WRITING(pwritev2, (int fd, const struct iovec* parts, int count, off_t at, int flags), (fd, parts, count, at, flags),
        parts[0].iov_len, ({ struct iovec h = halved(parts); real(fd, &h, 1, at, flags); }))
WRITING(pwritev64v2, (int fd, const struct iovec* parts, int count, off64_t at, int flags), (fd, parts, count, at, flags),
        parts[0].iov_len, ({ struct iovec h = halved(parts); real(fd, &h, 1, at, flags); }))

ssize_t copy_file_range(int from, off64_t* at, int fd, off64_t* to, size_t n, unsigned flags) {
  REAL(copy_file_range);
  struct Plan plan;
  if (strikes(&plan, "write", NULL, fd)) { REFUSE(-1) }
  return real(from, at, fd, to, n, flags);
}

#define MAPPING(name, offset) \
  void* name(void* at, size_t n, int protection, int flags, int fd, offset start) { \
    REAL(name); \
    struct Plan plan; \
    if (fd >= 0 && strikes(&plan, "mmap", NULL, fd)) { REFUSE(MAP_FAILED) } \
    return real(at, n, protection, flags, fd, start); \
  }
MAPPING(mmap, off_t)
MAPPING(mmap64, off64_t)

int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*body)(void*), void* argument) {
  REAL(pthread_create);
  struct Plan plan;
  if (strikes(&plan, "thread", "-", -1)) return atoi(plan.kind);
  return real(thread, how, body, argument);
}
