// Threads, locks, floating-point mode and the processor's instruction sets, on POSIX threads directly: std::condition_variable and std::thread would tie
// the library to the newest libstdc++ of the machine that built it, while Python may run with an older one.
#pragma once
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace outcore {

#if defined(__x86_64__)
// What this processor can do and the system saves, asked of the processor itself: the compilers' __builtin_cpu_supports
// knows AVX-VNNI only from g++ 13 on, and answers nothing where zig's runtime stands in for libgcc.
struct Processor {
  bool sse42 = false, avx2 = false, avx2_fma = false, avx_vnni = false, avx512 = false, avx512_vnni = false;
};

static inline Processor ask_processor() {
  Processor found;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const auto has = [](uint32_t word, int bit) { return (word >> bit & 1) != 0; };
  found.sse42 = has(c, 20);
  const bool fma = has(c, 12) && has(c, 29);  // with conversions from and to fp16
  if (!has(c, 27)) return found;              // the system saves no wide registers
  uint32_t saved = 0, high = 0;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  found.avx2 = has(b, 5);
  found.avx2_fma = found.avx2 && fma;
  if ((saved & 0xe6) == 0xe6) {
    found.avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);  // F, DQ, BW, VL
    found.avx512_vnni = found.avx512 && fma && has(c, 11);
  }
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx_vnni = found.avx2_fma && has(a, 4);
  return found;
}

static inline const Processor& processor() {  // asked once: a virtual machine takes long to answer
  static const Processor found = ask_processor();
  return found;
}

#endif

// IEEE rounding to nearest without flushing of denormals on this thread, and the caller's mode back afterwards: other
// libraries in the process switch flushing on for the thread that loads them, and new threads inherit it. `kFlushes`:
// denormals are zeros, where weights may be any and one denormal in a vector would cost some 150 cycles.
#if defined(__x86_64__)
class FloatMode {
 public:
  enum Denormals { kKeeps, kFlushes };
  explicit FloatMode(Denormals denormals = kKeeps) : before_(__builtin_ia32_stmxcsr()) {
    __builtin_ia32_ldmxcsr(denormals == kFlushes ? 0x9fc0 : 0x1f80);
  }
  ~FloatMode() { __builtin_ia32_ldmxcsr(before_); }
 private:
  uint32_t before_;
};
#elif defined(__aarch64__)
class FloatMode {
 public:
  enum Denormals { kKeeps, kFlushes };
  explicit FloatMode(Denormals denormals = kKeeps) {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{denormals == kFlushes} << 24));
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
 private:
  uint64_t before_;
};
#else
class FloatMode {
 public:
  enum Denormals { kKeeps, kFlushes };
  explicit FloatMode(Denormals = kKeeps) {}
  ~FloatMode() {}
};
#endif

inline double monotonic_s() {  // the clock of Python's time.perf_counter
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

class Mutex {
 public:
  Mutex() { pthread_mutex_init(&mutex_, nullptr); }
  ~Mutex() { pthread_mutex_destroy(&mutex_); }
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  friend class Condition;
  pthread_mutex_t mutex_;
};

class Guard {
 public:
  explicit Guard(Mutex& mutex) : mutex_(mutex) { mutex_.lock(); }
  ~Guard() { mutex_.unlock(); }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  Mutex& mutex_;
};

class Condition {
 public:
  Condition() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~Condition() { pthread_cond_destroy(&condition_); }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;
  void wait(Mutex& mutex) { pthread_cond_wait(&condition_, &mutex.mutex_); }
  // False when `deadline_s` (of monotonic_s) has passed.
  bool wait_until(Mutex& mutex, double deadline_s) {
#if defined(_WIN32)  // waits by the wall clock, whatever clock the attributes name
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    deadline_s += (double)now.tv_sec + 1e-9 * (double)now.tv_nsec - monotonic_s();
#endif
    const double whole = floor(deadline_s);
    timespec at;
    at.tv_sec = (time_t)whole;
    at.tv_nsec = (long)((deadline_s - whole) * 1e9);
    return pthread_cond_timedwait(&condition_, &mutex.mutex_, &at) != ETIMEDOUT;
  }
  void wake_all() { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_;
};

// Starts a thread that never handles signals: Python's handlers belong to its main thread. 0 or an errno.
inline int start_thread(pthread_t* thread, void* (*body)(void*), void* argument) {
#if defined(_WIN32)  // has no signals that a thread could be chosen for
  return pthread_create(thread, nullptr, body, argument);
#else
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int code = pthread_create(thread, nullptr, body, argument);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return code;
#endif
}

// Lets the process's other threads go first where there are more of them than cores: those that launch kernels and move
// bytes need little time, but at once. Measured on two cores beside two workers:
// launches of a layer take 1.26 times what they take alone, without this 1.51 times; updates are 6 % slower. Linux only,
// where nice values belong to threads; elsewhere they are the process's and stay as they are.
inline void go_behind_others() {
#if defined(__linux__)
  constexpr int kStep = 5;  // a third of the share of a thread that wants the same core
  if (nice(kStep) == -1) return;  // refused: as before
#endif
}

}  // namespace outcore
