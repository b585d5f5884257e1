// A Stopwatch adds the seconds of its lifetime to `*into`, which may be null.
#pragma once

#include <chrono>

namespace weft {

class Stopwatch {
 public:
  explicit Stopwatch(double* into) : into_(into) {
    if (into_) start_ = std::chrono::steady_clock::now();
  }
  ~Stopwatch() {
    if (into_) *into_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double* into_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace weft
