#include "pool.h"

#include <pthread.h>

#include <system_error>

#include "patience.h"

namespace weft {
namespace {

std::atomic<int> forks{0};

int watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  (void)registered;
  return forks.load();
}

}  // namespace

Pool::Pool(int threads) : workers_(std::make_unique<Workers>()), generation_(watch_forks()) {
  workers_->threads.reserve(threads > 1 ? threads - 1 : 0);
  try {
    for (int worker = 1; worker < threads; worker++) workers_->threads.emplace_back([this, worker] { serve(worker); });
  } catch (const std::system_error&) {
    // A limit on threads was reached. What has begun can work.
  }
}

Pool::~Pool() {
  if (is_orphan()) {
    workers_.release();  // handles of threads that do not exist here: to join them would wait for ever
    return;
  }
  {
    std::lock_guard<std::mutex> lock(workers_->mutex);
    stopping_.store(true);
  }
  workers_->wake.notify_all();
  for (auto& thread : workers_->threads) thread.join();
}

bool Pool::is_orphan() const { return forks.load(std::memory_order_relaxed) != generation_; }

// A chunk that is now the caller's to do, or -1 when there is none.
int64_t Pool::take() {
  int64_t left = left_.load(std::memory_order_acquire);
  while (left > 0) {
    if (left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel, std::memory_order_acquire)) return left - 1;
  }
  return -1;
}

// Does this chunk and all others that it can get, and counts them once, at the end: until then the phase is not over.
void Pool::do_chunks(int64_t chunk, int worker) {
  int64_t done = 0;
  for (; chunk >= 0; chunk = take(), done++) work_(context_, chunk, worker);
  undone_.fetch_sub(done, std::memory_order_acq_rel);
}

void Pool::run_shared(int64_t chunks, Work work, void* context) {
  work_ = work;
  context_ = context;
  undone_.store(chunks, std::memory_order_relaxed);
  // seq_cst here and in `sleep`: either we see that a worker sleeps, or it sees the chunks.
  left_.store(chunks);
  if (sleeping_.load() > 0) {
    { std::lock_guard<std::mutex> lock(workers_->mutex); }
    workers_->wake.notify_all();
  }
  if (const int64_t chunk = take(); chunk >= 0) do_chunks(chunk, 0);
  // A thread that holds the last chunk may have been put aside: after a while it is offered this core.
  for (Patience patience; undone_.load(std::memory_order_acquire) > 0;) patience.wait();
}

void Pool::serve(int worker) {
  Patience patience;
  while (!stopping_.load(std::memory_order_relaxed)) {
    if (const int64_t chunk = take(); chunk >= 0) {
      do_chunks(chunk, worker);
      patience.renew();
    } else if (!patience.is_over()) {
      patience.wait();
    } else {
      sleep();
      patience.renew();
    }
  }
}

void Pool::sleep() {
  std::unique_lock<std::mutex> lock(workers_->mutex);
  sleeping_.fetch_add(1);
  workers_->wake.wait(lock, [this] { return stopping_.load() || left_.load() > 0; });
  sleeping_.fetch_sub(1);
}

}  // namespace weft
