// The measurements of the kernel benchmark: a linear layer with weights that are in no cache, memory bandwidth, and
// byte products per second.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "bind/bindings.h"
#include "kernels/activations.h"
#include "program/aligned.h"
#include "program/pool.h"

namespace weft {
namespace {

// Returns the time of the shortest run. Runs repeat for `seconds` seconds, at least three times. Disturbances only make
// a run longer, so the shortest is the most accurate.
template <typename Work>
double least_seconds(double seconds, Work&& work) {
  double least = 1e30, spent = 0.0;
  for (int tries = 0; tries < 3 || spent < seconds; tries++) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    least = std::min(least, took);
    spent += took;
  }
  return least;
}

// Returns the seconds of one layer. `data` holds the weights of as many equal layers as fit. Every run computes all of
// them, so no weight is still in the L2 cache. With `outlier_every` above 0, one group in `outlier_every` has an outlier.
double measure_linear(int layout_number, int64_t outputs, int64_t inputs, Array<const uint8_t, 1> data, int64_t rows, Pool& pool,
                      double seconds, int64_t outlier_every) {
  const Layout layout = layout_from(layout_number);
  const int64_t strips = (outputs + strip_outputs - 1) / strip_outputs, bytes = strips * strip_bytes(layout, inputs);
  const int64_t layers = static_cast<int64_t>(data.size()) / bytes;
  if (layers < 1 || rows < 1) throw nb::value_error("data must hold at least one layer, and rows must be at least 1");
  const int64_t groups = (inputs + group_inputs - 1) / group_inputs;
  Activations activations;
  Aligned<float> values, out, scratch;
  const QuantisedRows quantised = activations.at_least(rows, inputs, outlier_every > 0);
  float* row_values = values.at_least(rows * inputs);
  for (int64_t i = 0; i < rows * inputs; i++) row_values[i] = static_cast<float>(i % 255 - 127);
  if (outlier_every > 0) {
    for (int64_t at = 0; at < rows * groups; at += outlier_every) row_values[at / groups * inputs + at % groups * group_inputs] = 1e5f;
  }
  scratch.at_least(quantise_scratch(inputs));
  for (int64_t row = 0; row < rows; row++) kernels().quantise_row({row_values + row * inputs}, inputs, scratch.data(), quantised, row);
  activations.gather_outliers(rows);
  LinearTask task{nullptr, quantised, row_values, inputs, 0, rows, 0, 0, out.at_least(rows * outputs), outputs, false, 1.0f};
  const int64_t items = std::min<int64_t>(strips, 8 * pool.threads());
  nb::gil_scoped_release release;
  return least_seconds(seconds, [&] {
    for (int64_t layer = 0; layer < layers; layer++) {
      const Weight weight{layout, outputs, inputs, data.data() + layer * bytes, nullptr};
      pool.run(items, [&](int64_t item, int) {
        LinearTask piece = task;
        piece.weight = &weight;
        piece.first_strip = strips * item / items;
        piece.end_strip = strips * (item + 1) / items;
        kernels().linear(piece);
      });
    }
  }) / static_cast<double>(layers);
}

// Returns the seconds that all threads together need to read all bytes of `data`.
double measure_read(Array<const uint8_t, 1> data, Pool& pool, double seconds) {
  const int64_t words = static_cast<int64_t>(data.size() / 8), items = 64;
  std::atomic<uint64_t> kept{0};
  nb::gil_scoped_release release;
  return least_seconds(seconds, [&] {
    pool.run(items, [&](int64_t item, int) {
      uint64_t sums[16] = {};
      int64_t word = words * item / items;
      for (const int64_t end = words * (item + 1) / items; word + 16 <= end; word += 16) {
        uint64_t read[16];
        std::memcpy(read, data.data() + word * 8, sizeof read);
        for (int i = 0; i < 16; i++) sums[i] ^= read[i];
      }
      for (const uint64_t sum : sums) kept.fetch_xor(sum, std::memory_order_relaxed);
    });
  });
}

// How many products of two bytes all threads together compute per second.
double measure_products(Pool& pool, double seconds) {
  const int64_t repeats = 1 << 18, products = kernels().multiply_in_registers(1) * repeats * pool.threads();
  nb::gil_scoped_release release;
  return static_cast<double>(products) /
         least_seconds(seconds, [&] { pool.run(pool.threads(), [&](int64_t, int) { kernels().multiply_in_registers(repeats); }); });
}

}  // namespace

void bind_measure(nb::module_& module) {
  module.def("measure_linear", measure_linear, nb::arg("layout"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("data"), nb::arg("rows"),
             nb::arg("pool"), nb::arg("seconds"), nb::arg("outlier_every") = 0);
  module.def("measure_read", measure_read, nb::arg("data"), nb::arg("pool"), nb::arg("seconds"));
  module.def("measure_products", measure_products, nb::arg("pool"), nb::arg("seconds"));
}

}  // namespace weft
