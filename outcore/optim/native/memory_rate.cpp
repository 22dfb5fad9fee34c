// The rate of main memory as the optimizer sees it: three streams read, one of them written back, no line fetched in
// vain. Each thread works on pages that it touched first, all start together.
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <new>
#include <vector>

#include "threads.h"

namespace outcore {
namespace {

struct Start {
  Mutex mutex;
  Condition changed;
  int ready = 0;
  bool go = false;
};

struct Worker {
  Start* start;
  int64_t numel;
  int32_t rounds;
  bool failed;
};

void* stream(void* argument) {
  FloatMode ieee;
  Worker& worker = *(Worker*)argument;
  const int64_t n = worker.numel;
  const size_t bytes = (size_t)n * 12;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  worker.failed = memory == MAP_FAILED;
  float* __restrict a = worker.failed ? nullptr : (float*)memory;
  float *__restrict b = a + n, *__restrict c = a + 2 * n;
  if (!worker.failed) {
#if defined(MADV_HUGEPAGE)
    madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    for (int64_t i = 0; i < 3 * n; i++) a[i] = 1.f;
  }
  {
    Guard guard(worker.start->mutex);
    worker.start->ready++;
    worker.start->changed.wake_all();
    while (!worker.start->go) worker.start->changed.wait(worker.start->mutex);
  }
  if (worker.failed) return nullptr;
  for (int32_t round = 0; round < worker.rounds; round++) {
    for (int64_t i = 0; i < n; i++) a[i] = a[i] * 0.5f + b[i] * 0.25f + c[i];
    asm volatile("" : : "r"(a) : "memory");
  }
  munmap(memory, bytes);
  return nullptr;
}

}  // namespace
}  // namespace outcore

using namespace outcore;

// Bytes per second over `rounds` passes of `numel` elements (16 bytes each) per thread; below zero: minus an errno.
extern "C" __attribute__((visibility("default"))) double outcore_optim_memory_rate(int32_t num_threads, int64_t numel,
                                                                                   int32_t rounds) {
  try {
    Start start;
    std::vector<Worker> workers((size_t)num_threads, Worker{&start, numel, rounds, false});
    std::vector<pthread_t> threads;
    threads.reserve(workers.size());
    int code = 0;
    for (Worker& worker : workers) {
      pthread_t thread;
      code = start_thread(&thread, stream, &worker);
      if (code != 0) {
        worker.failed = true;
        break;
      }
      threads.push_back(thread);
    }
    start.mutex.lock();
    while (start.ready < (int)threads.size()) start.changed.wait(start.mutex);
    const double began_s = monotonic_s();
    start.go = true;
    start.changed.wake_all();
    start.mutex.unlock();
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
    const double took_s = monotonic_s() - began_s;
    for (const Worker& worker : workers)
      if (worker.failed) return -(double)(code != 0 ? code : ENOMEM);
    return 16.0 * (double)numel * (double)num_threads * (double)rounds / took_s;
  } catch (const std::bad_alloc&) {
    return -(double)ENOMEM;
  }
}
