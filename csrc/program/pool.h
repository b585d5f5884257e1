// The threads that share the work of a step. A phase is a number of chunks; whoever is free takes the next one, the caller too, so a
// thread that the system has put aside delays no more than the chunk it holds. Between phases workers spin for a moment, then offer their
// core to others while they watch, then sleep: waking one costs as much as a phase, and a neighbour must not wait for a thread that waits.
//
// After a fork the child has no workers; there the caller does every chunk itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace weft {

class Pool {
 public:
  using Work = void (*)(void* context, int64_t item, int worker);

  // Fewer threads than asked for where the system gives no more of them: threads() says how many.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_->threads.size()) + 1; }

  // Memory that one thread may take while the others work (pages.h): the first that finds the offer open, and closes it. Whoever calls
  // `run` makes it and takes it back, before and after.
  struct Offer {
    uint8_t *begin = nullptr, *end = nullptr;
    std::atomic<bool> is_open{false};
  };
  Offer offer;

  // Calls work(chunk, worker) for every chunk once; returns when all are done. `worker` is the caller's number among the threads, for
  // scratch of its own. One caller at a time, and `work` must not throw.
  template <typename Function>
  void run(int64_t items, Function&& work) {
    if (items <= 1 || workers_->threads.empty() || is_forked_child()) {
      for (int64_t item = 0; item < items; item++) work(item, 0);
      return;
    }
    run_shared(items, [](void* context, int64_t item, int worker) { (*static_cast<Function*>(context))(item, worker); }, &work);
  }

 private:
  void run_shared(int64_t items, Work work, void* context);
  void work_loop(int worker);
  void sleep();
  int64_t take_item();
  void do_items(int64_t item, int worker);
  bool is_forked_child() const;

  // What is to be done: written by the caller before there are chunks to take, read by whoever has taken one.
  Work work_ = nullptr;
  void* context_ = nullptr;

  // A phase is over, and the next can begin, when none of its chunks is undone: one that is taken is always of the phase in work_.
  alignas(64) std::atomic<int64_t> untaken_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};

  // Apart, so that a forked child can leave it as it is: to destroy a condition that threads of the parent wait for would wait for them.
  struct Workers {
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> threads;
  };
  std::unique_ptr<Workers> workers_;
  const int forks_at_start_;   // how many forks led to the process that the workers live in
};

}  // namespace weft
