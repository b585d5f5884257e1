// How a thread waits for another thread of the same step.
#pragma once

#include <chrono>
#include <thread>

#include "isa/pause.h"

namespace weft {

// Each wait() call pauses briefly; after `spin_time` it yields the core instead. Limits are in time, because a pause
// instruction takes 10 cycles on one processor and 140 on another.
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
  // The gap between two phases of a step is shorter than spin_time; the gap between two steps is mostly shorter than
  // watch_time. After spin_time, other threads get the core at the next yield: spinning for a millisecond made steps on
  // a busy machine twice as long. Workers do not sleep before watch_time: a sleeping worker starts 30 microseconds late
  // in a virtual machine, and waking it costs the caller time.
  static constexpr auto spin_time = std::chrono::microseconds(20);
  static constexpr auto watch_time = std::chrono::microseconds(500);

  Clock::time_point began_{};
  Clock::duration waited_{};
};

}  // namespace weft
