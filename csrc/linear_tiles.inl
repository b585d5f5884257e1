// Tiles of a linear layer: a few rows of activations times the outputs of a strip, or of a part of it that one vector holds.
//
// The groups of an output (for floats: its inputs) are added up one after the other, by the same operations in tiles of any size. So a
// result depends neither on the other rows nor on how the work was cut.
#include "linear_bytes.inl"

namespace weft::WEFT_ISA {
namespace {
namespace tiles {

using vec::Vec;

constexpr int parts_of_strip = strip_outputs / vec::lanes;

template <int rows, int parts>
struct Totals {
  Vec at[rows][parts];
  Totals() {
    for (int row = 0; row < rows; row++)
      for (int part = 0; part < parts; part++) at[row][part] = vec::all(0.0f);
  }
};

inline const uint16_t* halves(const uint8_t* data) { return reinterpret_cast<const uint16_t*>(data); }

// As many rows as leave all sums in registers; and a whole strip at a time where there are few rows, else one vector of outputs.
template <Layout layout>
struct Shape {
#if defined(WEFT_VNNI)
  static constexpr int most_rows = 12;
#elif defined(WEFT_AVX512)
  static constexpr int most_rows = layout == Layout::w8 ? 8 : 12;
#elif defined(WEFT_AVX2)
  static constexpr int most_rows = layout == Layout::w8 ? 4 : 6;
#else
  static constexpr int most_rows = 4;
#endif
  static constexpr int parts(int rows) { return rows <= 2 || (layout != Layout::w4 && layout != Layout::w8) ? parts_of_strip : 1; }
};

// One vector of weights of a float layout, `at` weights into the strip.
template <Layout layout>
Vec load_weights(const uint8_t* strip, int64_t at) {
  if constexpr (layout == Layout::f32) return vec::load(reinterpret_cast<const float*>(strip) + at);
  else if constexpr (layout == Layout::f16) return vec::load(halves(strip) + at);
  else return bytes::load_bfloats(halves(strip) + at);
}

template <Layout layout, int rows, int parts>
struct Tile {
  static Totals<rows, parts> multiply(const LinearTask& task, int64_t first_row, const uint8_t* strip, int first_part) {
    Totals<rows, parts> totals;
    const float* from = task.rows + first_row * task.row_stride;
    for (int64_t input = 0; input < task.weight->inputs; input++) {
      Vec weights[parts];
      for (int part = 0; part < parts; part++)
        weights[part] = load_weights<layout>(strip, input * strip_outputs + vec::lanes * (first_part + part));
#pragma GCC unroll 12
      for (int row = 0; row < rows; row++) {
        const Vec value = vec::all(from[row * task.row_stride + input]);
        for (int part = 0; part < parts; part++) totals.at[row][part] = vec::fma(value, weights[part], totals.at[row][part]);
      }
    }
    return totals;
  }
};

template <int rows, int parts>
struct Tile<Layout::w4, rows, parts> {
  static Totals<rows, parts> multiply(const LinearTask& task, int64_t first_row, const uint8_t* strip, int first_part) {
    Totals<rows, parts> totals;
    const QuantisedRows& from = task.quantised;
    const int64_t first = first_row * from.groups;
    for (int64_t group = 0; group < from.groups; group++, strip += w4_group_bytes) {
      bytes::SumW4 sums[rows][parts];
#pragma GCC unroll 4
      for (int step = 0; step < 4; step++) {
        bytes::Bytes low[parts], high[parts];
        for (int part = 0; part < parts; part++) {
          const bytes::Bytes codes = bytes::load(strip + 64 * step + 4 * vec::lanes * (first_part + part));
          low[part] = bytes::low_nibbles(codes);
          high[part] = bytes::high_nibbles(codes);
        }
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
          const int8_t* inputs = from.codes + (first + row * from.groups + group) * group_inputs + 8 * step;
          const bytes::Bytes lower = bytes::all_fours(inputs), upper = bytes::all_fours(inputs + 4);
          for (int part = 0; part < parts; part++) {
            sums[row][part].add(low[part], lower);
            sums[row][part].add(high[part], upper);
          }
        }
      }
      for (int part = 0; part < parts; part++) {
        const uint16_t* scales = halves(strip + w4_codes_bytes) + vec::lanes * (first_part + part);
        const Vec scale = vec::load(scales), minimum = vec::load(scales + strip_outputs);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
          const int64_t at = first + row * from.groups + group;
          Vec& total = totals.at[row][part];
          total = vec::fma(minimum, vec::all(from.offsets[at]), total);
          total = vec::fma(sums[row][part].total() * vec::all(from.scales[at]), scale, total);
        }
      }
    }
    return totals;
  }
};

template <int rows, int parts>
struct Tile<Layout::w8, rows, parts> {
  static Totals<rows, parts> multiply(const LinearTask& task, int64_t first_row, const uint8_t* strip, int first_part) {
    Totals<rows, parts> totals;
    const QuantisedRows& from = task.quantised;
    const int64_t first = first_row * from.groups;
    for (int64_t group = 0; group < from.groups; group++, strip += w8_group_bytes) {
      bytes::SumW8 sums[rows][parts];
#pragma GCC unroll 8
      for (int step = 0; step < 8; step++) {
        bytes::CodesW8 codes[parts];
        for (int part = 0; part < parts; part++) codes[part].set(bytes::load(strip + 64 * step + 4 * vec::lanes * (first_part + part)));
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
          const bytes::Bytes inputs = bytes::all_fours(from.codes + (first + row * from.groups + group) * group_inputs + 4 * step);
          for (int part = 0; part < parts; part++) sums[row][part].add(codes[part], inputs);
        }
      }
      for (int part = 0; part < parts; part++) {
        const Vec scale = vec::load(halves(strip + w8_codes_bytes) + vec::lanes * (first_part + part));
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
          const int64_t at = first + row * from.groups + group;
          Vec& total = totals.at[row][part];
          total = vec::fma(sums[row][part].total(from.corrections[at]) * vec::all(from.scales[at]), scale, total);
        }
      }
    }
    return totals;
  }
};

// The bias, and where the result goes. The last strip may have fewer outputs than lanes.
template <int rows, int parts>
void finish(const LinearTask& task, const Totals<rows, parts>& totals, int64_t first_row, int64_t first_output) {
  for (int part = 0; part < parts; part++) {
    const int64_t output = first_output + part * vec::lanes, left = task.weight->outputs - output;
    const auto put = [&](auto count) {
      for (int row = 0; row < rows; row++) {
        float* out = task.out + (first_row + row) * task.out_stride + output;
        Vec value = totals.at[row][part];
        if (task.weight->bias) value = value + vec::load(task.weight->bias + output, count);
        if (task.add) value = vec::fma(vec::all(task.scale), value, vec::load(out, count));
        vec::store(out, value, count);
      }
    };
    if (left >= vec::lanes) put(vec::Full{});
    else if (left > 0) put(left);
  }
}

template <Layout layout, int rows>
void multiply_rows(const LinearTask& task, int64_t first_row, int64_t first_strip, int64_t end_strip) {
  constexpr int parts = Shape<layout>::parts(rows);
  const int64_t bytes = strip_bytes(layout, task.weight->inputs);
  for (int64_t strip = first_strip; strip < end_strip; strip++)
    for (int part = 0; part < parts_of_strip; part += parts)
      finish(task, Tile<layout, rows, parts>::multiply(task, first_row, task.weight->data + strip * bytes, part), first_row,
             strip * strip_outputs + part * vec::lanes);
}

// The tile of exactly `count` rows, which is at most `rows`.
template <Layout layout, int rows>
void multiply_count(const LinearTask& task, int64_t count, int64_t first_row, int64_t first_strip, int64_t end_strip) {
  if (count == rows) return multiply_rows<layout, rows>(task, first_row, first_strip, end_strip);
  if constexpr (rows > 1) multiply_count<layout, rows - 1>(task, count, first_row, first_strip, end_strip);
}

// A run of strips that stays in the second-level cache while the rows pass by, a tile of them at a time.
constexpr int64_t cached_bytes = 128 * 1024;

template <Layout layout>
void multiply(const LinearTask& task) {
  constexpr int most = Shape<layout>::most_rows;
  const int64_t rows = task.end_row - task.first_row, tiles = (rows + most - 1) / most;
  const int64_t fitting = cached_bytes / strip_bytes(layout, task.weight->inputs), run = fitting > 1 ? fitting : 1;
  for (int64_t strip = task.first_strip; strip < task.end_strip; strip += run) {
    const int64_t end = strip + run < task.end_strip ? strip + run : task.end_strip;
    for (int64_t tile = 0; tile < tiles; tile++) {   // of even sizes: a last one of a single row would cost almost as much as a full one
      const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
      multiply_count<layout, most>(task, count, task.first_row + first, strip, end);
    }
  }
}

}  // namespace tiles
}  // namespace
}  // namespace weft::WEFT_ISA
