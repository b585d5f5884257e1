// The threads that share the work of a step. A phase is a number of chunks; whoever is free takes the next one, the caller too, so a
// thread that the system has put aside delays no more than the chunk it holds. Between phases workers spin for a moment and then sleep:
// beside a busy neighbour a spinning thread takes more than it gives.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace weft {

class Pool {
 public:
  using Work = void (*)(void* context, int64_t chunk, int worker);

  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls work(chunk, worker) for every chunk once; returns when all are done. `worker` is the caller's number among the threads, for
  // scratch of its own. One caller at a time. `work` must not throw.
  template <typename Function>
  void run(int64_t chunks, Function&& work) {
    if (chunks <= 1 || workers_.empty()) {
      for (int64_t chunk = 0; chunk < chunks; chunk++) work(chunk, 0);
      return;
    }
    run_shared(chunks, [](void* context, int64_t chunk, int worker) { (*static_cast<Function*>(context))(chunk, worker); }, &work);
  }

 private:
  void run_shared(int64_t chunks, Work work, void* context);
  void serve(int worker);
  int64_t take(uint64_t phase_bits);

  // What is to be done: written by the caller before the ticket counter names the phase, read by whoever holds one of its tickets.
  Work work_ = nullptr;
  void* context_ = nullptr;

  // Upper 32 bits: the phase. Lower 32: chunks left to take. A ticket drawn from it is a chunk of exactly that phase.
  alignas(64) std::atomic<uint64_t> tickets_{0};
  alignas(64) std::atomic<int64_t> undone_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace weft
