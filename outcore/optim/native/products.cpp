// Threads that work on one product at a time, and what Python calls.
//
// A team waits for work spinning for a little while and then asleep: products follow each other closely while a token
// is made, and a wake-up costs more than the smallest of them. Whoever spins offers its core to others (torch has
// threads of its own). A thread takes a part of the rows that are left, so a slow core takes fewer: long parts first, as
// what a kernel asks for behind its part was read in vain, and short ones last, so that all end together. A product is
// over when its rows are: a thread that found no core meanwhile is not waited for, the door is closed behind the others.
//
// A GPU can ask for products itself, through a box in page-locked RAM that one more thread looks into. So the host need
// not wait for the activations, nor launch what comes behind. As nobody could wake that thread, it looks again and again:
// at once while products come, every few milliseconds when none has come for long.
#include <atomic>
#include <new>
#include <vector>

#include <errno.h>
#include <sched.h>
#include <stdlib.h>

#include "abi.h"
#include "products.h"
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace outcore {
extern const ProductKernels product_baseline;
#if defined(__x86_64__)
extern const ProductKernels product_avx2, product_avxvnni, product_avx512vnni;
#endif
enum ProductVariant : int32_t { kPlain = 0, kWithAvx2 = 1, kWithAvxVnni = 2, kWithAvx512Vnni = 3 };

#if defined(__x86_64__)
#include <cpuid.h>
static bool has_avx_vnni() {  // leaf 7.1 eax bit 4; __builtin_cpu_supports knows it from g++ 13 on
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 4)) != 0;
}
#endif

static int32_t product_variants() {  // one bit for each that this processor has
  int32_t found = 1 << kPlain;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return found;
  found |= 1 << kWithAvx2;
  if (has_avx_vnni()) found |= 1 << kWithAvxVnni;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    found |= 1 << kWithAvx512Vnni;
#endif
  return found;
}

static const ProductKernels* product_kernels(int32_t variant) {
  if (variant < 0 || variant > kWithAvx512Vnni || !(product_variants() & (1 << variant))) return nullptr;
#if defined(__x86_64__)
  if (variant == kWithAvx512Vnni) return &product_avx512vnni;
  if (variant == kWithAvxVnni) return &product_avxvnni;
  if (variant == kWithAvx2) return &product_avx2;
#endif
  return &product_baseline;
}

class Team {
 public:
  explicit Team(const ProductKernels& kernels) : kernels_(kernels) {}
  ~Team() {
    for (const Task& task : tasks_) free(task.products);
  }

  int start(int num_threads) {  // the caller is one of them
    for (int i = 1; i < num_threads; i++) {
      pthread_t thread;
      const int code = start_thread(&thread, body, this);
      if (code != 0) {
        stop();
        return code;
      }
      threads_.push_back(thread);
    }
    return 0;
  }

  void stop() {
    {
      Guard guard(mutex_);
      stopping_.store(true);
    }
    has_work_.wake_all();
    for (pthread_t thread : threads_) pthread_join(thread, nullptr);
    threads_.clear();
    if (is_listening_) pthread_join(listener_, nullptr);
    is_listening_ = false;
  }

  // x [m][columns] in fp32. 0, or ENOMEM.
  int run(Product product, const float* x) {
    Guard guard(running_);
    if (!has_room_for(product)) return ENOMEM;
    const int32_t rows = product.m;
    for (int32_t from = 0; from < rows; from += kMostRows) {
      product.m = rows - from < kMostRows ? rows - from : kMostRows;
      run_some(product, x + from * product.columns);
      product.out += product.m * product.rows;
    }
    return 0;
  }

  // The number of products of the same rows, which the box may ask for from now on; or a negative errno.
  int64_t add_task(const Product* products, int count) {
    Guard guard(running_);
    for (int n = 0; n < count; n++)
      if (!has_room_for(products[n])) return -ENOMEM;
    Product* own = (Product*)malloc(count * sizeof(Product));
    if (own == nullptr) return -ENOMEM;
    __builtin_memcpy(own, products, count * sizeof(Product));
    try {
      tasks_.push_back({own, count});
    } catch (const std::bad_alloc&) {
      free(own);
      return -ENOMEM;
    }
    return (int64_t)tasks_.size() - 1;
  }

  int listen(Box* box, const float* x, float* out) {
    box_ = box, box_x_ = x, box_out_ = out;
    asked_before_ = box->asked.load();  // not by the thread: the first question may come before it has a core
    const int code = start_thread(&listener_, listener, this);
    is_listening_ = code == 0;
    return code;
  }

 private:
  static constexpr double kSpinS = 500e-6, kListenS = 0.2, kLongestNapS = 0.01;
  static constexpr int kPauses = 16, kClosed = 1 << 30, kParts = 4;  // of a thread's share of the rows left
  static constexpr int32_t kMostRows = 16;  // of activations that are multiplied together

  static void* listener(void* team) {
    ((Team*)team)->answer();
    return nullptr;
  }

  // Does what the box asks for, until the team stops.
  void answer() {
    uint64_t last = asked_before_;
    double since_s = monotonic_s();
    while (!stopping_.load(std::memory_order_relaxed)) {
      const uint64_t asked = box_->asked.load(std::memory_order_acquire);
      if (asked == last) {
        const double idle_s = monotonic_s() - since_s;
        if (idle_s < kListenS) {
          spin();
          continue;
        }
        const double nap_s = idle_s / 200 < kLongestNapS ? idle_s / 200 : kLongestNapS;
        const timespec nap = {0, (long)(nap_s * 1e9)};
        nanosleep(&nap, nullptr);
        continue;
      }
      const double began_s = monotonic_s();
      float* out = box_out_;
      const Task asked_for = task(asked);
      for (int n = 0; n < asked_for.count; n++) {
        Product product = asked_for.products[n];
        product.m = Box::rows_of(asked);
        product.out = out;
        run(product, box_x_);  // its room was made when the task was added
        out += product.m * product.rows;
      }
      last = asked;
      since_s = monotonic_s();
      box_->busy_s += since_s - began_s;
      box_->answered.store(asked, std::memory_order_release);
    }
  }

  struct Task {
    Product* products;  // of malloc: a vector in a vector would need a newer C++ runtime
    int count;
  };

  Task task(uint64_t asked) {
    Guard guard(running_);
    return tasks_[Box::task_of(asked)];
  }

  bool has_room_for(const Product& product) {
    const size_t groups = (size_t)(kMostRows * groups_of(product.columns));
    try {
      if (rounded_.size() < groups * kGroup) rounded_.resize(groups * kGroup);
      if (scales_.size() < groups) scales_.resize(groups);
      if (sums_.size() < groups * kRuns) sums_.resize(groups * kRuns);
    } catch (const std::bad_alloc&) {
      return false;
    }
    return true;
  }

  void run_some(Product product, const float* x) {
    FloatMode ieee;
    const int64_t groups = groups_of(product.columns), stride = groups * kGroup;
    for (int m = 0; m < product.m; m++)
      kernels_.round_row(x + m * product.columns, product.columns, product.format, rounded_.data() + m * stride,
                         scales_.data() + m * groups, sums_.data() + m * groups * kRuns);
    product.x = rounded_.data();
    product.x_scale = scales_.data();
    product.x_sum = sums_.data();
    product_ = product;
    next_.store(0, std::memory_order_relaxed);
    inside_.fetch_and(~kClosed, std::memory_order_release);  // publishes the product
    {
      Guard guard(mutex_);
      turn_.fetch_add(1);
    }
    if (asleep_.load() != 0) has_work_.wake_all();
    work();
    inside_.fetch_or(kClosed, std::memory_order_relaxed);
    while (inside_.load(std::memory_order_acquire) != kClosed) spin();
  }

  // A fraction of a microsecond, or as long as others want this very core.
  static void spin() {
#if defined(__x86_64__)
    for (int i = 0; i < kPauses; i++) __builtin_ia32_pause();
#endif
    sched_yield();
  }

  static void* body(void* team) {
    ((Team*)team)->loop();
    return nullptr;
  }

  void loop() {
    uint64_t seen = 0;
    while (true) {
      const double until_s = monotonic_s() + kSpinS;
      while (turn_.load(std::memory_order_acquire) == seen && !stopping_.load(std::memory_order_relaxed)) {
        if (monotonic_s() < until_s) {
          spin();
          continue;
        }
        Guard guard(mutex_);
        asleep_.fetch_add(1);
        while (turn_.load() == seen && !stopping_.load()) has_work_.wait(mutex_);
        asleep_.fetch_sub(1);
      }
      if (stopping_.load()) return;
      seen = turn_.load();
      if (!(inside_.fetch_add(1, std::memory_order_acquire) & kClosed)) work();
      inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  void work() {
    FloatMode ieee;
    const int64_t rows = product_.rows, parts = kParts * ((int64_t)threads_.size() + 1);
    int64_t start = next_.load(std::memory_order_relaxed);
    while (start < rows) {
      const int64_t count = (rows - start) / parts / kTaskRows * kTaskRows;
      int64_t stop = start + (count < kTaskRows ? kTaskRows : count);
      if (stop > rows) stop = rows;
      if (!next_.compare_exchange_weak(start, stop, std::memory_order_relaxed)) continue;
      kernels_.rows(product_, start, stop);
      start = next_.load(std::memory_order_relaxed);
    }
  }

  const ProductKernels& kernels_;
  Product product_{};
  std::vector<int16_t> rounded_;
  std::vector<float> scales_, sums_;
  std::atomic<int64_t> next_{0};
  std::atomic<uint64_t> turn_{0};
  std::atomic<int> inside_{kClosed}, asleep_{0};  // threads that may look at the product, and whether more may come
  std::atomic<bool> stopping_{false};
  Mutex mutex_, running_;
  Condition has_work_;
  std::vector<pthread_t> threads_;
  pthread_t listener_{};
  bool is_listening_ = false;
  Box* box_ = nullptr;
  uint64_t asked_before_ = 0;
  const float* box_x_ = nullptr;
  float* box_out_ = nullptr;
  std::vector<Task> tasks_;
};

}  // namespace outcore

using namespace outcore;

// One bit for each variant of the product kernels that this processor can run, the slowest in bit 0.
EXPORT int32_t outcore_product_variants() { return product_variants(); }

// Null with *code set to an errno when it cannot be made.
EXPORT Team* outcore_product_team_new(int32_t variant, int32_t num_threads, int* code) {
  const ProductKernels* kernels = product_kernels(variant);
  *code = kernels == nullptr ? ENOTSUP : 0;
  if (kernels == nullptr) return nullptr;
  Team* team = new (std::nothrow) Team(*kernels);
  *code = team == nullptr ? ENOMEM : team->start(num_threads);
  if (*code == 0) return team;
  delete team;
  return nullptr;
}

// x [m][columns] fp32; product->x and what follows from it are the team's own. 0 or an errno. Calls wait for each other.
EXPORT int outcore_product_run(Team* team, const Product* product, const float* x) { return team->run(*product, x); }

// The box's thread begins to answer, with x [rows][columns] and results [rows][rows of weights], one product behind the
// other, where these are; all must outlive the team. 0 or an errno. Once for a team.
EXPORT int outcore_product_listen(Team* team, Box* box, const float* x, float* out) { return team->listen(box, x, out); }

// The number of a task, or a negative errno. What the products name must outlive the team.
EXPORT int64_t outcore_product_task(Team* team, const Product* products, int32_t count) {
  return team->add_task(products, count);
}

// Nobody may be inside a call, nor wait for the box.
EXPORT void outcore_product_team_delete(Team* team) {
  team->stop();
  delete team;
}
