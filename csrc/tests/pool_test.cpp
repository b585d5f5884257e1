// Tests the pool alone, without Python, so that ThreadSanitizer can check it. Every item must be done exactly once, and
// its result must be visible to the caller. This must hold however long the workers waited, slept or were descheduled
// before. With the argument "time" it measures the cost of a phase instead.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "program/pool.h"

namespace {

using Clock = std::chrono::steady_clock;

#ifdef __SANITIZE_THREAD__
constexpr bool is_watched = true;  // ThreadSanitizer does not support fork
#else
constexpr bool is_watched = false;
#endif

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "pool_test: %s\n", what);
  std::exit(1);
}

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

void spin_for(double seconds) {
  for (const auto began = Clock::now(); seconds_since(began) < seconds;) {
  }
}

// Workers write plain memory, the caller reads it: a missing happens-before edge shows as a race.
void run_phases(int threads, int phases, unsigned seed) {
  weft::Pool pool(threads);
  expect(pool.threads() == threads, "the pool does not have the requested number of threads");
  std::mt19937 random(seed);
  std::vector<int> done;
  std::vector<int> by_worker(threads);
  for (int phase = 0; phase < phases; phase++) {
    const int items = static_cast<int>(random() % (phase % 8 == 0 ? 200 : 6));
    const int slow = random() % 50 == 0 ? static_cast<int>(random() % (items + 1)) : -1;
    done.assign(items, 0);
    by_worker.assign(threads, 0);
    pool.run(items, [&](int64_t item, int worker) {
      if (item == slow) std::this_thread::sleep_for(std::chrono::microseconds(300));
      done[item]++;
      by_worker[worker]++;
    });
    int total = 0;
    for (const int count : by_worker) total += count;
    expect(total == items, "the workers' counts do not add up to the number of items");
    for (const int count : done) expect(count == 1, "an item was not done exactly once");
    switch (random() % 64) {  // pauses around the time when a worker goes to sleep, where a wake-up could be lost
      case 0: std::this_thread::sleep_for(std::chrono::microseconds(random() % 400)); break;
      case 1:
      case 2: spin_for(1e-6 * static_cast<double>(random() % 200)); break;
      default: break;
    }
  }
}

void make_and_end(int times) {
  for (int i = 0; i < times; i++) {
    weft::Pool pool(1 + i % 4);
    int counted = 0;
    if (i % 3) pool.run(1, [&](int64_t, int) { counted++; });
    expect(counted == (i % 3 ? 1 : 0), "a phase of one item was not done");
    if (i % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));  // destroy the pool while the workers sleep
  }
}

// A forked child has the pool but none of its threads: it computes alone, and ends without waiting for them.
void work_in_a_forked_child() {
  for (const bool asleep : {false, true}) {
    auto* pool = new weft::Pool(3);
    if (asleep) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const pid_t child = fork();
    expect(child >= 0, "fork failed");
    if (child == 0) {
      int total = 0, of_its_own[10] = {};
      pool->run(10, [&](int64_t, int) { total++; });
      delete pool;
      {
        weft::Pool another(2);
        another.run(10, [&](int64_t item, int) { of_its_own[item] = 1; });
      }
      for (const int count : of_its_own) total += count;
      _exit(total == 20 ? 0 : 1);
    }
    int status = -1;
    const auto began = Clock::now();
    while (waitpid(child, &status, WNOHANG) == 0) {
      if (seconds_since(began) > 20) {
        kill(child, SIGKILL);
        expect(false, "a forked child hangs in the pool");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child's phases were not done");
    delete pool;
  }
}

void time_phases(int threads) {
  weft::Pool pool(threads);
  for (const int items : {threads, 4 * threads, 64}) {
    for (const double work : {0.0, 2e-6, 20e-6}) {
      std::vector<double> each;
      for (int repeat = 0; repeat < 50; repeat++) {
        const auto began = Clock::now();
        for (int phase = 0; phase < 300; phase++)
          pool.run(items, [&](int64_t, int) {
            if (work > 0) spin_for(work);
          });
        each.push_back(seconds_since(began) / 300);
      }
      std::sort(each.begin(), each.end());
      const double median = each[each.size() / 2];
      const double ideal = work * items / threads;
      std::printf("%d threads, %3d items of %4.0f us: %7.2f us a phase, %6.2f more than its work\n", threads, items, work * 1e6, median * 1e6,
                  (median - ideal) * 1e6);
    }
  }
  // The first phase after a pause. During a long pause the workers go to sleep.
  for (const double pause : {20e-6, 100e-6, 300e-6, 1e-3}) {
    std::vector<double> first;
    for (int repeat = 0; repeat < 400; repeat++) {
      spin_for(pause);
      const auto began = Clock::now();
      pool.run(2 * threads, [&](int64_t, int) { spin_for(25e-6); });
      first.push_back(seconds_since(began));
    }
    std::sort(first.begin(), first.end());
    std::printf("after a pause of %4.0f us: a phase of 50 us takes %6.1f us (median), %6.1f (p90)\n", pause * 1e6,
                first[first.size() / 2] * 1e6, first[first.size() * 9 / 10] * 1e6);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "time") == 0) {
    time_phases(count > 2 ? std::atoi(arguments[2]) : 2);
    return 0;
  }
  for (const int threads : {1, 2, 3, 8}) run_phases(threads, 20'000, static_cast<unsigned>(threads));
  make_and_end(200);
  if (!is_watched) work_in_a_forked_child();
  std::puts("pool_test: every item was done exactly once");
}
