// Threads that work on one product at a time, and what Python calls.
//
// A team waits for work spinning for a little while and then asleep: products follow each other closely while a token
// is made, and a wake-up costs more than the smallest of them. Whoever spins offers its core to others (torch has
// threads of its own). A thread takes a part of the rows that are left, so a slow core takes fewer: long parts first, as
// what a kernel asks for behind its part was read in vain, and short ones last, so that all end together. A product is
// over when its rows are: a thread that found no core meanwhile is not waited for, the door is closed behind the others.
// Weights of a stack that rows of activations chose are one product more each, but handed out together: those of a
// mixture's experts are small. Rows that chose the same weight are multiplied together, which reads it once.
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
#include <string.h>

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

static int32_t product_variants() {  // one bit for each that this processor has
  int32_t found = 1 << kPlain;
#if defined(__x86_64__)
  if (processor().avx2_fma) found |= 1 << kWithAvx2;
  if (processor().avx_vnni) found |= 1 << kWithAvxVnni;
  if (processor().avx512_vnni) found |= 1 << kWithAvx512Vnni;
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
    for (const Task& task : tasks_) free(task.products), free(task.stack);
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
    if (is_plain(product)) {
      product.x = x;
      run_one(product);
      return 0;
    }
    const int32_t rows = product.m;
    for (int32_t from = 0; from < rows; from += kMostRows) {
      product.m = rows - from < kMostRows ? rows - from : kMostRows;
      run_some(product, x + from * product.columns);
      product.out += product.m * product.rows;
    }
    return 0;
  }

  // Pairs of a stack, kMostPairs at most: x [pairs / share][columns] in fp32, out [pairs][rows]. 0, or an errno
  // where nothing was multiplied.
  int run_stack(const Stack& stack, int32_t pairs, const float* x, float* out) {
    Guard guard(running_);
    if (pairs > kMostPairs || !has_room_for_pairs(stack, pairs)) return ENOMEM;
    FloatMode ieee;
    const int64_t groups = groups_of(stack.first.columns), stride = groups * kGroup;
    const int32_t given = (pairs + stack.share - 1) / stack.share;
    for (int32_t m = 0; m < given; m++)
      round_row(stack.first, x, m, m);
    int32_t* order = order_.data();
    const int32_t every = stack.every ? *stack.every : 0;
    int32_t taken = 0, missed = 0, at_copy = given;
    for (int32_t pair = 0; pair < pairs; pair++) {  // by number, and in order where numbers are equal
      const int32_t number = stack.numbers[pair];
      if (number < 0 || number >= stack.count || (stack.elsewhere && stack.elsewhere[number] >= 0)) continue;
      if (every > 0 && ++missed % every == 0) continue;
      int32_t place = taken++;
      for (; place > 0 && stack.numbers[order[place - 1]] > number; place--) order[place] = order[place - 1];
      order[place] = pair;
    }
    const int code = fetch(stack, taken);
    if (code != 0) return code;
    num_products_ = 0;
    for (int32_t start = 0; start < taken;) {
      const int32_t number = stack.numbers[order[start]];
      int32_t stop = start + 1;
      while (stop < taken && stop - start < kMostRows && stack.numbers[order[stop]] == number) stop++;
      Product& product = products_[(size_t)num_products_++] = stack.first;
      const auto from_first = [&](int64_t stride) { return stack.places ? stack.places[number] : number * stride; };
      product.codes += from_first(stack.codes_stride);
      if (product.scale) product.scale = (const uint8_t*)product.scale + from_first(stack.scale_stride);
      if (product.zero) product.zero += from_first(stack.zero_stride);
      product.m = stop - start;
      product.out = out;
      product.places = order + start;
      int64_t first = order[start] / stack.share;
      if (stop - start > 1) {  // kernels take rows that lie one behind the other
        first = at_copy;
        for (int32_t at = start; at < stop; at++, at_copy++) {
          const int64_t from = order[at] / stack.share;
          memcpy(rounded_.data() + at_copy * stride, rounded_.data() + from * stride, (size_t)stride * sizeof(int16_t));
          memcpy(scales_.data() + at_copy * groups, scales_.data() + from * groups, (size_t)groups * sizeof(float));
          memcpy(sums_.data() + at_copy * groups * kRuns, sums_.data() + from * groups * kRuns,
                 (size_t)(groups * kRuns) * sizeof(float));
        }
      }
      product.x = rounded_.data() + first * stride;
      product.x_scale = scales_.data() + first * groups;
      product.x_sum = sums_.data() + first * groups * kRuns;
      start = stop;
    }
    if (num_products_) run_products();
    return 0;
  }

  // The number of products of the same rows, which the box may ask for from now on; or a negative errno.
  int64_t add_task(const Product* products, int count) {
    Guard guard(running_);
    for (int n = 0; n < count; n++)
      if (!has_room_for(products[n])) return -ENOMEM;
    Product* own = (Product*)malloc(count * sizeof(Product));
    if (own == nullptr) return -ENOMEM;
    memcpy(own, products, count * sizeof(Product));
    return add({own, count, nullptr});
  }

  // The same for pairs of a stack, up to so many of them.
  int64_t add_stack(const Stack& stack, int32_t most_pairs) {
    Guard guard(running_);
    if (most_pairs > kMostPairs || !has_room_for_pairs(stack, most_pairs)) return -ENOMEM;
    Stack* own = (Stack*)malloc(sizeof(Stack));
    if (own == nullptr) return -ENOMEM;
    *own = stack;
    return add({nullptr, 0, own});
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
  static constexpr int32_t kMostPairs = 1024;

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
      if (asked_for.stack) {
        const int code = run_stack(*asked_for.stack, Box::rows_of(asked), box_x_, out);
        if (code != 0) box_->failed = code;
      }
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
    Stack* stack;  // instead of products
  };

  int64_t add(const Task& task) {
    try {
      tasks_.push_back(task);
    } catch (const std::bad_alloc&) {
      free(task.products), free(task.stack);
      return -ENOMEM;
    }
    return (int64_t)tasks_.size() - 1;
  }

  Task task(uint64_t asked) {
    Guard guard(running_);
    return tasks_[Box::task_of(asked)];
  }

  // Has the weights of the first `taken` pairs of `order_` fetched, if one of them is absent. 0 or an errno.
  int fetch(const Stack& stack, int32_t taken) {
    if (stack.places == nullptr) return 0;
    int32_t needed = 0;
    bool is_absent = false;
    for (int32_t at = 0; at < taken; at++) {
      const int32_t number = stack.numbers[order_[(size_t)at]];
      if (needed > 0 && needed_[needed - 1] == number) continue;
      needed_[needed++] = number;
      is_absent = is_absent || stack.places[number] == kAbsent;
    }
    return is_absent ? stack.fetch(needed_, needed) : 0;
  }

  bool has_room_for(const Product& product) { return has_room(kMostRows, product.columns, 1); }

  bool has_room_for_pairs(const Stack& stack, int32_t pairs) {
    const int32_t given = (pairs + stack.share - 1) / stack.share;
    return has_room(given + pairs, stack.first.columns, pairs);  // each may be copied
  }

  bool has_room(int64_t rows, int64_t columns, int32_t products) {
    const size_t groups = (size_t)(rows * groups_of(columns));
    try {
      if (products_.size() < (size_t)products) products_.resize((size_t)products), order_.resize((size_t)products);
      if (rounded_.size() < groups * kGroup) rounded_.resize(groups * kGroup);
      if (scales_.size() < groups) scales_.resize(groups);
      if (sums_.size() < groups * kRuns) sums_.resize(groups * kRuns);
    } catch (const std::bad_alloc&) {
      return false;
    }
    return true;
  }

  // Row `from` of the activations to place `to`.
  void round_row(const Product& product, const float* x, int64_t from, int64_t to) {
    const int64_t groups = groups_of(product.columns);
    kernels_.round_row(x + from * product.columns, product.columns, product.format,
                       rounded_.data() + to * groups * kGroup, scales_.data() + to * groups,
                       sums_.data() + to * groups * kRuns);
  }

  void run_some(Product product, const float* x) {
    FloatMode ieee;
    for (int m = 0; m < product.m; m++) round_row(product, x, m, m);
    product.x = rounded_.data();
    product.x_scale = scales_.data();
    product.x_sum = sums_.data();
    run_one(product);
  }

  void run_one(const Product& product) {
    products_[0] = product;
    num_products_ = 1;
    run_products();
  }

  // All of `products_`, which have as many rows of weights.
  void run_products() {
    next_.store(0, std::memory_order_relaxed);
    inside_.fetch_and(~kClosed, std::memory_order_release);  // publishes the products
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
    const int64_t rows = products_[0].rows, all = rows * num_products_;
    const int64_t parts = kParts * ((int64_t)threads_.size() + 1);
    int64_t start = next_.load(std::memory_order_relaxed);
    while (start < all) {
      const int64_t count = (all - start) / parts / kTaskRows * kTaskRows;
      int64_t stop = start + (count < kTaskRows ? kTaskRows : count);
      if (stop > all) stop = all;
      if (!next_.compare_exchange_weak(start, stop, std::memory_order_relaxed)) continue;
      while (start < stop) {
        const int64_t first = start % rows, last = first + stop - start < rows ? first + stop - start : rows;
        kernels_.rows(products_[(size_t)(start / rows)], first, last);
        start += last - first;
      }
      start = next_.load(std::memory_order_relaxed);
    }
  }

  const ProductKernels& kernels_;
  std::vector<Product> products_;
  int64_t num_products_ = 0;
  std::vector<int32_t> order_;  // pairs of a stack, by weight
  int32_t needed_[kMostPairs];  // weights of these, each once
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

// Pairs of a stack at once: x [pairs / share][columns], out [pairs][rows of a weight], both fp32. 0 or an errno.
EXPORT int outcore_product_run_stack(Team* team, const Stack* stack, int32_t pairs, const float* x, float* out) {
  return team->run_stack(*stack, pairs, x, out);
}

// The number of a task of so many pairs at most, or a negative errno. What the stack names must outlive the team.
EXPORT int64_t outcore_product_stack(Team* team, const Stack* stack, int32_t most_pairs) {
  return team->add_stack(*stack, most_pairs);
}

// Nobody may be inside a call, nor wait for the box.
EXPORT void outcore_product_team_delete(Team* team) {
  team->stop();
  delete team;
}
