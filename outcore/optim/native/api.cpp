// The C interface that Python loads with ctypes. No exception crosses it: functions return a code or null.
#include <errno.h>

#include <algorithm>
#include <limits>
#include <new>
#include <vector>

#include "abi.h"
#include "pool.h"
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace outcore {
extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

static int32_t best_variant() {
#if defined(__x86_64__)
  if (processor().avx512) return kAvx512;
  if (processor().avx2) return kAvx2;
#endif
  return kBaseline;
}

static const Kernels* kernels_of(int32_t variant) {
  const int32_t best = best_variant();
  if (variant == kAuto) variant = best;
  if (variant < kBaseline || variant > best) return nullptr;
#if defined(__x86_64__)
  if (variant == kAvx512) return &kernels_avx512;
  if (variant == kAvx2) return &kernels_avx2;
#endif
  return &kernels_baseline;
}

struct Share {  // one thread's part of a sum of squares
  const Kernels* kernels;
  int32_t dtype;
  const void* grad;
  int64_t start, stop;
  double* partial;
  uint32_t largest;
};

static void* sum_share(void* argument) {
  FloatMode ieee;
  Share& share = *(Share*)argument;
  share.largest = share.kernels->sum_squares(share.dtype, share.grad, share.start, share.stop, share.partial);
  return nullptr;
}
}  // namespace outcore

using namespace outcore;

EXPORT int32_t outcore_optim_abi() { return OUTCORE_ABI; }

EXPORT int32_t outcore_optim_best_variant() { return best_variant(); }

EXPORT void outcore_optim_layout(int32_t format, int64_t numel, Layout* out) { *out = layout_of(format, numel); }

// On the calling thread. 0, or ENOTSUP when the processor lacks the variant.
EXPORT int outcore_optim_update(int32_t variant, const Types* types, const Job* job, const Hyper* hyper) {
  const Kernels* kernels = kernels_of(variant);
  if (kernels == nullptr) return ENOTSUP;
  FloatMode ieee;
  kernels->update(*types, *job, *hyper, 0, job->numel);
  end_update(*types, *job);
  return 0;
}

// Compressed moments of a chunk to floats; null: not this one. 0, or ENOTSUP.
EXPORT int outcore_optim_expand(int32_t variant, int32_t format, int64_t numel, const void* state, float* exp_avg,
                                float* exp_avg_sq) {
  const Kernels* kernels = kernels_of(variant);
  if (kernels == nullptr) return ENOTSUP;
  kernels->expand(format, numel, state, exp_avg, exp_avg_sq);
  return 0;
}

// And from floats: all of a chunk's moments anew. 0, or ENOTSUP.
EXPORT int outcore_optim_compress(int32_t variant, int32_t format, int64_t numel, void* state, const float* exp_avg,
                                  const float* exp_avg_sq) {
  const Kernels* kernels = kernels_of(variant);
  if (kernels == nullptr) return ENOTSUP;
  Types types{};
  types.format = format;
  Job job{};
  job.state = state;
  job.numel = numel;
  kernels->compress(format, numel, state, exp_avg, exp_avg_sq);
  end_update(types, job);
  return 0;
}

// Sum of squares and finiteness with up to num_threads threads; the result does not depend on their number.
EXPORT int outcore_optim_sum_squares(int32_t variant, int32_t dtype, const void* grad, int64_t numel, int32_t num_threads,
                                     double* sum, int32_t* all_finite) {
  const Kernels* kernels = kernels_of(variant);
  if (kernels == nullptr) return ENOTSUP;
  try {
    const int64_t blocks = (numel + kSumBlock - 1) / kSumBlock;
    const int64_t count = std::max<int64_t>(1, std::min<int64_t>(num_threads, blocks));
    std::vector<double> partial((size_t)blocks);
    std::vector<Share> shares;
    for (int64_t i = 0; i < count; i++) {
      const int64_t start = blocks * i / count, stop = blocks * (i + 1) / count;
      shares.push_back({kernels, dtype, grad, start * kSumBlock, std::min(stop * kSumBlock, numel),
                        partial.data() + start, 0});
    }
    std::vector<pthread_t> threads;
    threads.reserve(shares.size());
    size_t started = 1;
    for (; started < shares.size(); started++) {
      pthread_t thread;
      if (start_thread(&thread, sum_share, &shares[started]) != 0) break;  // this thread does the rest
      threads.push_back(thread);
    }
    sum_share(&shares[0]);
    for (; started < shares.size(); started++) sum_share(&shares[started]);
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
    uint32_t largest = 0;
    for (const Share& share : shares) largest = std::max(largest, share.largest);
    double total = 0;
    for (double value : partial) total += value;
    *all_finite = largest < 0x7f800000u;
    *sum = *all_finite ? total : std::numeric_limits<double>::quiet_NaN();
    return 0;
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
}

// Null with *code set to an errno when it cannot be made.
EXPORT Pool* outcore_optim_pool_new(int32_t variant, int32_t num_threads, const int32_t* cpus, int64_t task_numel,
                                    int* code) {
  const Kernels* kernels = kernels_of(variant);
  *code = kernels == nullptr ? ENOTSUP : 0;
  if (kernels == nullptr) return nullptr;
  try {
    Pool* pool = new Pool(*kernels, task_numel);
    *code = pool->start(num_threads, cpus);
    if (*code == 0) return pool;
    delete pool;
  } catch (const std::bad_alloc&) {
    *code = ENOMEM;
  }
  return nullptr;
}

// 0 with *code set: ECANCELED after the pool was stopped, ENOMEM.
EXPORT uint64_t outcore_optim_pool_submit(Pool* pool, int64_t priority, const Types* types, const Job* jobs,
                                          int64_t num_jobs, const Hyper* hyper, int32_t work, int32_t notify_chunks,
                                          int* code) {
  try {
    const uint64_t ticket = pool->submit(priority, *types, jobs, num_jobs, *hyper, work, notify_chunks != 0);
    *code = ticket == 0 ? ECANCELED : 0;
    return ticket;
  } catch (const std::bad_alloc&) {
    *code = ENOMEM;
    return 0;
  }
}

EXPORT uint64_t outcore_optim_pool_wait(Pool* pool, uint64_t seen, double timeout_s) {
  return pool->wait_finished(seen, timeout_s);
}

EXPORT int64_t outcore_optim_pool_reap(Pool* pool, Finished* out, int64_t capacity) { return pool->reap(out, capacity); }

EXPORT int32_t outcore_optim_pool_next_chunk(Pool* pool, double timeout_s, ChunkDone* out) {
  return pool->next_chunk(timeout_s, out);
}

EXPORT int32_t outcore_optim_pool_stop(Pool* pool, double timeout_s) { return pool->stop(timeout_s); }

// Nobody may be inside a call on the pool.
EXPORT void outcore_optim_pool_delete(Pool* pool) { delete pool; }
