// The pool: one lock, a map of units by (priority, ticket), workers that take the next task of the first unit.
//
// A unit (one layer) comes as one submission with all its chunks. A task is at most task_numel elements of one chunk, so
// that a unit needed sooner gets the cores within a task's time, and one large chunk uses all of them. Workers allocate
// nothing: whatever a unit needs until it is reaped is allocated at submission, in the caller, where a failure can be
// reported.
#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <limits>

namespace outcore {

// A gradient whose square would overflow the second moment is as fatal as infinity: above 2^60 the update is refused.
static constexpr double kLargestGrad = 1152921504606846976.0;
static constexpr uint32_t kInfinity = 0x7f800000u;
static constexpr double kForever = 1e9;  // seconds

struct Pool::Unit {
  uint64_t ticket = 0;
  Types types{};
  Hyper hyper{};
  int32_t work = kUpdate;
  bool notify = false, scanning = false;
  std::vector<Job> jobs;
  std::vector<int64_t> tasks_left;      // per chunk, in this phase
  std::vector<int64_t> first_partial;   // per chunk, into partial
  std::vector<double> partial;          // sums of squares, kSumBlock elements each
  int64_t chunks_left = 0;
  size_t next_chunk = 0;
  int64_t next_start = 0;
  uint32_t largest_bits = 0;
  int running = 0;
  Queue::node_type node;  // kept while the unit is not queued, so that queueing again allocates nothing
  Finished result{};

  void rewind(int64_t task_numel) {
    for (size_t i = 0; i < jobs.size(); i++) tasks_left[i] = (jobs[i].numel + task_numel - 1) / task_numel;
    chunks_left = (int64_t)jobs.size();
    next_chunk = 0;
    next_start = 0;
  }
};

Pool::Pool(const Kernels& kernels, int64_t task_numel) : kernels_(kernels), task_numel_(task_numel) {}

Pool::~Pool() { stop(kForever); }

int Pool::start(int num_threads, const int32_t* cpus) {
  threads_.reserve((size_t)num_threads);
  for (int i = 0; i < num_threads; i++) {
    pthread_t thread;
    mutex_.lock();
    int code = start_thread(&thread, &Pool::worker, this);
    if (code == 0) num_working_++;
    mutex_.unlock();
    if (code == 0) threads_.push_back(thread);
#if defined(__linux__)
    if (code == 0 && cpus != nullptr) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET((unsigned)cpus[i], &set);
      code = pthread_setaffinity_np(thread, sizeof set, &set);
    }
#endif
    if (code != 0) {
      stop(kForever);
      return code;
    }
  }
  return 0;
}

void* Pool::worker(void* pool) {
  go_behind_others();
  FloatMode ieee;
  ((Pool*)pool)->work();
  return nullptr;
}

void Pool::work() {
  Guard guard(mutex_);
  for (;;) {
    while (!stopping_ && queue_.empty()) has_work_.wait(mutex_);
    if (stopping_) {
      num_working_--;
      has_finished_.wake_all();
      return;
    }
    const auto first = queue_.begin();
    Unit& unit = *first->second;
    const size_t chunk = unit.next_chunk;
    const Job& job = unit.jobs[chunk];
    const int64_t start = unit.next_start, stop = std::min(start + task_numel_, job.numel);
    unit.next_start = stop;
    if (stop == job.numel) {
      unit.next_start = 0;
      if (++unit.next_chunk == unit.jobs.size()) unit.node = queue_.extract(first);
    }
    unit.running++;
    mutex_.unlock();
    const double began_s = monotonic_s();
    uint32_t largest = 0;
    if (unit.scanning) {
      double* partial = unit.partial.data() + unit.first_partial[chunk] + start / kSumBlock;
      const int32_t dtype = unit.types.grad_dtype;
      largest = unit.work == kAddUp ? kernels_.add_up(dtype, job, start, stop, partial)
                                    : kernels_.sum_squares(dtype, job.grad, start, stop, partial);
    } else {
      kernels_.update(unit.types, job, unit.hyper, start, stop);
    }
    const double ended_s = monotonic_s();
    mutex_.lock();
    unit.running--;
    unit.largest_bits = std::max(unit.largest_bits, largest);
    if (unit.result.started_s == 0) unit.result.started_s = began_s;
    unit.result.started_s = std::min(unit.result.started_s, began_s);
    unit.result.busy_s += ended_s - began_s;
    if (--unit.tasks_left[chunk] == 0) {
      if (!unit.scanning) end_update(unit.types, job);
      if (!unit.scanning && unit.notify) push_chunk(unit, (int64_t)chunk, kDone);
      if (--unit.chunks_left == 0) finish_phase(unit);
    }
  }
}

void Pool::finish_phase(Unit& unit) {
  if (!unit.scanning) return finish(unit, kDone);
  double sum = 0;
  const std::vector<double>& partial = unit.partial;
  for (size_t chunk = 0, i = 0; chunk < unit.jobs.size(); chunk++) {  // chunks in order, blocks in order within each
    const size_t end = chunk + 1 < unit.jobs.size() ? (size_t)unit.first_partial[chunk + 1] : partial.size();
    double chunk_sum = 0;
    for (; i < end; i++) chunk_sum += partial[i];
    sum += chunk_sum;
  }
  unit.result.all_finite = unit.largest_bits < kInfinity;
  unit.result.sum_squares = unit.result.all_finite ? sum : std::numeric_limits<double>::quiet_NaN();
  if (unit.work != kGuardedUpdate) return finish(unit, kDone);
  float largest;
  __builtin_memcpy(&largest, &unit.largest_bits, sizeof largest);
  if (!unit.result.all_finite || (double)largest * (double)unit.hyper.grad_scale > kLargestGrad) {
    for (size_t i = 0; unit.notify && i < unit.jobs.size(); i++) push_chunk(unit, (int64_t)i, kSkipped);
    return finish(unit, kSkipped);
  }
  unit.scanning = false;
  unit.rewind(task_numel_);
  queue_.insert(std::move(unit.node));
  has_work_.wake_all();
}

void Pool::finish(Unit& unit, int32_t status) {
  unit.result.status = status;
  unit.result.finished_s = monotonic_s();
  finished_.push_back(unit.ticket);  // reserved at submission
  num_finished_++;
  has_finished_.wake_all();
}

void Pool::push_chunk(Unit& unit, int64_t chunk, int32_t status) {
  ChunkDone& done = ring_[(ring_start_ + num_chunks_done_) % ring_.size()];
  done = ChunkDone{unit.ticket, chunk, monotonic_s(), status, 0};
  num_chunks_done_++;
  has_finished_.wake_all();
}

uint64_t Pool::submit(int64_t priority, const Types& types, const Job* jobs, int64_t num_jobs, const Hyper& hyper,
                      int32_t work, bool notify_chunks) {
  auto unit = std::make_unique<Unit>();
  unit->types = types;
  unit->hyper = hyper;
  unit->work = work;
  unit->notify = notify_chunks && work <= kGuardedUpdate;
  unit->scanning = work != kUpdate;
  unit->result.all_finite = 1;
  unit->result.sum_squares = std::numeric_limits<double>::quiet_NaN();
  unit->jobs.assign(jobs, jobs + num_jobs);
  unit->tasks_left.resize((size_t)num_jobs);
  if (unit->scanning) {
    int64_t num_partials = 0;
    for (const Job& job : unit->jobs) {
      unit->first_partial.push_back(num_partials);
      num_partials += (job.numel + kSumBlock - 1) / kSumBlock;
    }
    unit->partial.resize((size_t)num_partials);
  }
  unit->rewind(task_numel_);

  Guard guard(mutex_);
  if (stopping_) return 0;
  finished_.reserve(units_.size() + 1);
  if (unit->notify) {
    const size_t needed = num_chunks_expected_ + (size_t)num_jobs;
    if (needed > ring_.size()) {
      std::vector<ChunkDone> larger(std::max(needed, 2 * ring_.size()));
      for (size_t i = 0; i < num_chunks_done_; i++) larger[i] = ring_[(ring_start_ + i) % ring_.size()];
      ring_.swap(larger);
      ring_start_ = 0;
    }
  }
  const uint64_t ticket = last_ticket_ + 1;
  Unit* raw = unit.get();
  raw->ticket = raw->result.ticket = ticket;
  units_.emplace(ticket, std::move(unit));
  try {
    queue_.emplace(Key(priority, ticket), raw);
  } catch (...) {
    units_.erase(ticket);
    throw;
  }
  if (raw->notify) num_chunks_expected_ += (size_t)num_jobs;
  last_ticket_ = ticket;
  has_work_.wake_all();
  return ticket;
}

uint64_t Pool::wait_finished(uint64_t seen, double timeout_s) {
  const double deadline_s = monotonic_s() + timeout_s;
  Guard guard(mutex_);
  while (num_finished_ <= seen && !stopping_ && has_finished_.wait_until(mutex_, deadline_s)) {
  }
  return num_finished_;
}

int64_t Pool::reap(Finished* out, int64_t capacity) {
  Guard guard(mutex_);
  const size_t count = std::min(finished_.size(), (size_t)capacity);
  for (size_t i = 0; i < count; i++) {
    const auto found = units_.find(finished_[i]);
    out[i] = found->second->result;
    units_.erase(found);
  }
  finished_.erase(finished_.begin(), finished_.begin() + (std::ptrdiff_t)count);
  return (int64_t)count;
}

bool Pool::next_chunk(double timeout_s, ChunkDone* out) {
  const double deadline_s = monotonic_s() + timeout_s;
  Guard guard(mutex_);
  while (num_chunks_done_ == 0) {
    if (stopping_) return false;
    if (!has_finished_.wait_until(mutex_, deadline_s) && num_chunks_done_ == 0) return false;
  }
  *out = ring_[ring_start_];
  ring_start_ = (ring_start_ + 1) % ring_.size();
  num_chunks_done_--;
  num_chunks_expected_--;
  return true;
}

bool Pool::stop(double timeout_s) {
  const double deadline_s = monotonic_s() + timeout_s;
  {
    Guard guard(mutex_);
    if (stopping_ && threads_.empty()) return true;
    stopping_ = true;
    has_work_.wake_all();
    has_finished_.wake_all();
    while (num_working_ > 0) {
      if (!has_finished_.wait_until(mutex_, deadline_s) && num_working_ > 0) return false;
    }
  }
  for (pthread_t thread : threads_) pthread_join(thread, nullptr);
  threads_.clear();
  Guard guard(mutex_);
  for (auto& entry : units_) {
    if (entry.second->result.finished_s == 0) finish(*entry.second, kCancelled);
  }
  queue_.clear();
  return true;
}

}  // namespace outcore
