// Worker threads and a queue of units ordered by need; see pool.cpp.
#pragma once
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "abi.h"
#include "threads.h"

namespace outcore {

enum Work : int32_t { kUpdate = 0, kGuardedUpdate = 1, kSumSquares = 2, kAddUp = 3 };
enum Status : int32_t { kDone = 0, kSkipped = 1, kCancelled = 2 };

struct Finished {  // one unit
  uint64_t ticket;
  double sum_squares;
  double started_s, finished_s;  // first task's start, last task's end
  double busy_s;                 // summed over the workers
  int32_t status;
  int32_t all_finite;
};

struct ChunkDone {
  uint64_t ticket;
  int64_t chunk;
  double finished_s;
  int32_t status;
  int32_t padding;
};

class Pool {
 public:
  Pool(const Kernels& kernels, int64_t task_numel);
  ~Pool();
  // 0 or an errno; threads already started are stopped again.
  int start(int num_threads, const int32_t* cpus);
  // The ticket (from 1 on), or 0 after stop().
  uint64_t submit(int64_t priority, const Types& types, const Job* jobs, int64_t num_jobs, const Hyper& hyper,
                  int32_t work, bool notify_chunks);
  // Waits until more than `seen` units have finished, or the timeout; the number finished so far.
  uint64_t wait_finished(uint64_t seen, double timeout_s);
  // Takes up to `capacity` finished units out of the pool.
  int64_t reap(Finished* out, int64_t capacity);
  // The next chunk of a unit submitted with notify_chunks; false after the timeout or stop().
  bool next_chunk(double timeout_s, ChunkDone* out);
  // Ends the workers after the tasks they are at; what has not started is cancelled. False when one has not ended
  // within the timeout: its task's memory, and this pool, are still in use. May be called again.
  bool stop(double timeout_s);

 private:
  struct Unit;
  typedef std::pair<int64_t, uint64_t> Key;  // priority, ticket: units of one priority in order of submission
  typedef std::map<Key, Unit*> Queue;

  static void* worker(void* pool);
  void work();
  void finish_phase(Unit& unit);
  void finish(Unit& unit, int32_t status);
  void push_chunk(Unit& unit, int64_t chunk, int32_t status);

  const Kernels& kernels_;
  const int64_t task_numel_;
  Mutex mutex_;
  Condition has_work_, has_finished_;
  Queue queue_;  // units with tasks to hand out
  std::map<uint64_t, std::unique_ptr<Unit>> units_;
  std::vector<uint64_t> finished_;
  std::vector<ChunkDone> ring_;  // chunks done, of which num_chunks_done_ from ring_start_ on
  size_t ring_start_ = 0, num_chunks_done_ = 0, num_chunks_expected_ = 0;
  uint64_t last_ticket_ = 0, num_finished_ = 0;
  bool stopping_ = false;
  int num_working_ = 0;  // threads that have not left work()
  std::vector<pthread_t> threads_;
};

}  // namespace outcore
