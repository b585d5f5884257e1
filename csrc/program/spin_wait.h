// How a thread waits for another of the same step.
#pragma once

#include <chrono>
#include <thread>

#include "isa/pause.h"

namespace weft {

// Waits a little, longer the longer this has gone on. Counted in time: a pause is 10 cycles on one processor and 140 on another.
class SpinWait {
 public:
  void wait() {
    if (waited_ < spin_time) {
      for (int i = 0; i < 8; i++) pause_briefly();
    } else {
      std::this_thread::yield();
    }
    const auto now = Clock::now();
    if (began_ == Clock::time_point{}) began_ = now;
    waited_ = now - began_;
  }
  bool is_over() const { return waited_ >= watch_time; }
  void restart() { *this = SpinWait(); }

 private:
  using Clock = std::chrono::steady_clock;
  // The gap between two phases of a step is shorter than the first, that between two steps mostly shorter than the second. After the first
  // whoever else wants the core gets it at the next yield: to spin on for a millisecond made a step on a busy machine twice as long.
  // A worker that sleeps comes 30 microseconds late, in a virtual machine, and waking it takes some of the caller's time too.
  static constexpr auto spin_time = std::chrono::microseconds(20);
  static constexpr auto watch_time = std::chrono::microseconds(500);

  Clock::time_point began_{};
  Clock::duration waited_{};
};

}  // namespace weft
