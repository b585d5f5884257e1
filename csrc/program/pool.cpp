#include "program/pool.h"

#include <pthread.h>

#include <system_error>

#include "program/spin_wait.h"

namespace weft {
namespace {

std::atomic<int> forks{0};

// Counts the forks that led to this process, from the first call on: the handler runs only in the child of a fork.
int count_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  (void)registered;
  return forks.load();
}

}  // namespace

Pool::Pool(int threads) : workers_(std::make_unique<Workers>()), forks_at_start_(count_forks()) {
  workers_->threads.reserve(threads > 1 ? threads - 1 : 0);
  try {
    for (int worker = 1; worker < threads; worker++) workers_->threads.emplace_back([this, worker] { work_loop(worker); });
  } catch (const std::system_error&) {
    // A limit on threads was reached. The pool works with the threads that started.
  }
}

Pool::~Pool() {
  if (is_forked_child()) {
    workers_.release();  // the threads do not exist in this process: joining them would block forever
    return;
  }
  {
    std::lock_guard<std::mutex> lock(workers_->mutex);
    stopping_.store(true);
  }
  workers_->wake.notify_all();
  for (auto& thread : workers_->threads) thread.join();
}

bool Pool::is_forked_child() const { return forks.load(std::memory_order_relaxed) != forks_at_start_; }

// Takes an item and returns its number, or -1 if none is left.
int64_t Pool::take_item() {
  int64_t left = untaken_.load(std::memory_order_acquire);
  while (left > 0) {
    if (untaken_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire)) return left - 1;
  }
  return -1;
}

// Runs this item, then all items that the thread can still take. All are counted as finished together, at the end:
// until then the phase is not over.
void Pool::do_items(int64_t item, int worker) {
  int64_t done = 0;
  for (; item >= 0; item = take_item(), done++) work_(context_, item, worker);
  unfinished_.fetch_sub(done, std::memory_order_acq_rel);
}

// Publishes the items, wakes sleeping workers, and takes items too. Returns when all items are finished.
void Pool::run_shared(int64_t items, Work work, void* context) {
  work_ = work;
  context_ = context;
  unfinished_.store(items, std::memory_order_relaxed);
  // seq_cst here and in `sleep` ensures one of two things: this thread sees the sleeping worker, or the worker sees the
  // items.
  untaken_.store(items);
  if (sleeping_.load() > 0) {
    // A worker holds the mutex from its check for items until it sleeps. Taking the mutex here ensures that the
    // notification does not come in between, where it would be lost.
    { std::lock_guard<std::mutex> lock(workers_->mutex); }
    workers_->wake.notify_all();
  }
  if (const int64_t item = take_item(); item >= 0) do_items(item, 0);
  // A thread with an unfinished item may be descheduled. So this thread spins only for a while, and then yields its
  // core.
  for (SpinWait spin; unfinished_.load(std::memory_order_acquire) > 0;) spin.wait();
}

// The main function of a worker: takes items while there are any, then spins and yields, then sleeps.
void Pool::work_loop(int worker) {
  SpinWait spin;
  while (!stopping_.load(std::memory_order_relaxed)) {
    if (const int64_t item = take_item(); item >= 0) {
      do_items(item, worker);
      spin.restart();
    } else if (!spin.is_over()) {
      spin.wait();
    } else {
      sleep();
      spin.restart();
    }
  }
}

void Pool::sleep() {
  std::unique_lock<std::mutex> lock(workers_->mutex);
  sleeping_.fetch_add(1);
  workers_->wake.wait(lock, [this] { return stopping_.load() || untaken_.load() > 0; });
  sleeping_.fetch_sub(1);
}

}  // namespace weft
