#include "pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace weft {
namespace {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr uint64_t left_mask = 0xffffffffu;
// About 20 microseconds: longer than the gap between two phases of a step, much shorter than the time a neighbour wants.
constexpr int spins_before_sleep = 600;

}  // namespace

Pool::Pool(int threads) {
  for (int worker = 1; worker < threads; worker++) workers_.emplace_back([this, worker] { serve(worker); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

// A chunk of the phase in these upper bits, or -1 when there is none left or another phase has begun.
int64_t Pool::take(uint64_t phase_bits) {
  uint64_t seen = tickets_.load(std::memory_order_acquire);
  while ((seen & ~left_mask) == phase_bits && (seen & left_mask) != 0) {
    if (tickets_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire))
      return static_cast<int64_t>(seen & left_mask) - 1;
  }
  return -1;
}

void Pool::run_shared(int64_t chunks, Work work, void* context) {
  const uint64_t phase = (tickets_.load(std::memory_order_relaxed) & ~left_mask) + (uint64_t{1} << 32);
  work_ = work;
  context_ = context;
  undone_.store(chunks, std::memory_order_relaxed);
  // seq_cst here and in `serve`: either we see that a worker sleeps, or it sees the tickets.
  tickets_.store(phase | static_cast<uint64_t>(chunks));
  if (sleeping_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  for (int64_t chunk; (chunk = take(phase)) >= 0;) {
    work(context, chunk, 0);
    undone_.fetch_sub(1, std::memory_order_acq_rel);
  }
  for (int spins = 0; undone_.load(std::memory_order_acquire) > 0; spins++) {
    if (spins < spins_before_sleep)
      pause_briefly();
    else
      std::this_thread::yield();  // its holder was put aside: let it have this core if it waits for one
  }
}

void Pool::serve(int worker) {
  int spins = 0;
  while (!stopping_.load(std::memory_order_relaxed)) {
    const uint64_t seen = tickets_.load(std::memory_order_acquire);
    if ((seen & left_mask) != 0) {
      const int64_t chunk = take(seen & ~left_mask);
      if (chunk >= 0) {
        // The phase cannot end before this chunk is counted, so what it is about stays as it is.
        work_(context_, chunk, worker);
        undone_.fetch_sub(1, std::memory_order_acq_rel);
        spins = 0;
      }
      continue;
    }
    if (++spins < spins_before_sleep) {
      pause_briefly();
      continue;
    }
    spins = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, [this] { return stopping_.load() || (tickets_.load() & left_mask) != 0; });
    sleeping_.fetch_sub(1);
  }
}

}  // namespace weft
