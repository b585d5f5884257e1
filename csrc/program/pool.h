// The threads that share the work of a step. A phase is a number of items. Each free thread, and also the calling
// thread, takes the next item. So a descheduled thread delays the phase by at most the item that it holds.
//
// Between phases workers spin briefly, then yield while they poll, then sleep. Waking a sleeping thread costs as much
// as a phase. But a waiting thread must not keep a core from other processes.
//
// After a fork the child process has no workers; there the caller does every item itself.
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

  // May start fewer threads if the system refuses more: threads() returns the number.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_->threads.size()) + 1; }

  // Memory that one thread prefaults while the others work (pages.h). The first thread that sees the offer open closes
  // it and prefaults the memory. The caller of `run` opens the offer before, and withdraws it after.
  struct Offer {
    uint8_t *begin = nullptr, *end = nullptr;
    std::atomic<bool> is_open{false};
  };
  Offer offer;

  // Calls work(item, worker) once for each item; returns when all are done. `worker` is the number of the thread, for
  // its own scratch memory. Only one caller at a time, and `work` must not throw.
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

  // The current work. The caller writes it before it publishes items; threads read it after they have taken one.
  Work work_ = nullptr;
  void* context_ = nullptr;

  // A phase is over when all its items are finished. Only then is work_ replaced, so a taken item always belongs to the
  // phase in work_.
  alignas(64) std::atomic<int64_t> untaken_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};

  // In its own allocation, which a forked child leaks. Destroying the condition variable would block there, because it
  // counts waiting threads that exist only in the parent.
  struct Workers {
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> threads;
  };
  std::unique_ptr<Workers> workers_;
  const int forks_at_start_;   // number of forks before this pool started: a different number means that this process is a forked child
};

}  // namespace weft
