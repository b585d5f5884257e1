// Tiles of a linear layer: a few rows of activations times the outputs of a strip.
//
// The groups of an output (for floats: its inputs) are added up one after the other, by the same operations in tiles of any size. So a
// result depends neither on the other rows nor on how the work was cut.
#include "linear_bytes.inl"

namespace weft::WEFT_ISA {
namespace {
namespace tiles {

using vec::Vec;

constexpr int parts = strip_outputs / vec::lanes;   // vectors of a strip

template <int rows>
struct Totals {
  Vec at[rows][parts];
  Totals() {
    for (int row = 0; row < rows; row++)
      for (int part = 0; part < parts; part++) at[row][part] = vec::all(0.0f);
  }
};

inline const uint16_t* halves(const uint8_t* data) { return reinterpret_cast<const uint16_t*>(data); }

// Rows of a tile: as many as leave the sums of a group in registers.
template <Layout layout>
constexpr int most_rows() {
#if defined(WEFT_VNNI)
  return 12;
#elif defined(WEFT_AVX512)
  return layout == Layout::w8 ? 8 : 12;
#elif defined(WEFT_AVX2)
  return layout == Layout::w4 || layout == Layout::w8 ? 4 : 6;
#else
  return 4;
#endif
}

// Weights are asked for this long before they are used: the processor's own guess begins anew at every page and gives way to whatever
// the rows need. With four rows and more this was worth up to 1.5 times the speed. Asking beyond the end does no harm.
constexpr int64_t ahead_bytes = 6144;

template <int count>
inline void fetch_ahead(const uint8_t* from) {
  for (int i = 0; i < count; i += 64) __builtin_prefetch(from + ahead_bytes + i);
}

// One vector of weights of a float layout, `at` weights into the strip.
template <Layout layout>
Vec load_weights(const uint8_t* strip, int64_t at) {
  if constexpr (layout == Layout::f32) return vec::load(reinterpret_cast<const float*>(strip) + at);
  else if constexpr (layout == Layout::f16) return vec::load(halves(strip) + at);
  else return bytes::load_bfloats(halves(strip) + at);
}

template <Layout layout, int rows>
struct Tile {
  static Totals<rows> multiply(const LinearTask& task, int64_t first_row, const uint8_t* strip) {
    Totals<rows> totals;
    const float* from = task.rows + first_row * task.row_stride;
    constexpr int input_bytes = strip_outputs * (layout == Layout::f32 ? 4 : 2);
    for (int64_t input = 0; input < task.weight->inputs; input++) {
      fetch_ahead<input_bytes>(strip + input * input_bytes);
      Vec weights[parts];
      for (int part = 0; part < parts; part++)
        weights[part] = load_weights<layout>(strip, input * strip_outputs + vec::lanes * part);
#pragma GCC unroll 12
      for (int row = 0; row < rows; row++) {
        const Vec value = vec::all(from[row * task.row_stride + input]);
        for (int part = 0; part < parts; part++) totals.at[row][part] = vec::fma(value, weights[part], totals.at[row][part]);
      }
    }
    return totals;
  }
};

// One group of the rows of a tile: row r lies r * stride bytes, or r * groups numbers, after the first.
struct Rows {
  int64_t groups, stride;
  const int8_t* codes;
  const float *scales, *offsets;
  const int32_t* corrections;

  Rows(const QuantisedRows& from, int64_t first_row)
      : groups(from.groups), stride(from.groups * group_inputs), codes(from.codes + first_row * stride),
        scales(from.scales + first_row * groups), offsets(from.offsets + first_row * groups),
        corrections(from.corrections + first_row * groups) {}

  void to_next_group() {
    codes += group_inputs;
    scales++;
    offsets++;
    corrections++;
  }
};

template <int rows>
struct Tile<Layout::w4, rows> {
  static Totals<rows> multiply(const LinearTask& task, int64_t first_row, const uint8_t* strip) {
    Totals<rows> totals;
    Rows from(task.quantised, first_row);
    for (int64_t group = 0; group < from.groups; group++, strip += w4_group_bytes, from.to_next_group()) {
      fetch_ahead<w4_group_bytes>(strip);
      bytes::SumW4 sums[rows][parts];
#pragma GCC unroll 4
      for (int step = 0; step < 4; step++) {
        bytes::CodesW4 low[parts], high[parts];
        for (int part = 0; part < parts; part++) {
          const bytes::Bytes codes = bytes::load(strip + 64 * step + 4 * vec::lanes * part);
          low[part] = bytes::low_nibbles(codes);
          high[part] = bytes::high_nibbles(codes);
        }
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
          const int8_t* inputs = from.codes + row * from.stride + 8 * step;
          const bytes::Activations lower = bytes::all_fours(inputs), upper = bytes::all_fours(inputs + 4);
          for (int part = 0; part < parts; part++) {
            if (step == 0) sums[row][part].start(low[part], lower);
            else sums[row][part].add(low[part], lower);
            sums[row][part].add(high[part], upper);
          }
        }
      }
      for (int part = 0; part < parts; part++) {
        const uint16_t* scales = halves(strip + w4_codes_bytes) + vec::lanes * part;
        const Vec scale = vec::load(scales), minimum = vec::load(scales + strip_outputs);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
          Vec& total = totals.at[row][part];
          total = vec::fma(minimum, vec::all(from.offsets[row * from.groups]), total);
          total = vec::fma(sums[row][part].total() * vec::all(from.scales[row * from.groups]), scale, total);
        }
      }
    }
    return totals;
  }
};

template <int rows>
struct Tile<Layout::w8, rows> {
  static Totals<rows> multiply(const LinearTask& task, int64_t first_row, const uint8_t* strip) {
    Totals<rows> totals;
    Rows from(task.quantised, first_row);
    for (int64_t group = 0; group < from.groups; group++, strip += w8_group_bytes, from.to_next_group()) {
      fetch_ahead<w8_group_bytes>(strip);
      bytes::SumW8 sums[rows][parts];
#pragma GCC unroll 8
      for (int step = 0; step < 8; step++) {
        bytes::CodesW8 codes[parts];
        for (int part = 0; part < parts; part++)
          codes[part] = bytes::codes_w8(bytes::load(strip + 64 * step + 4 * vec::lanes * part));
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
          const bytes::Activations inputs = bytes::all_fours(from.codes + row * from.stride + 4 * step);
          for (int part = 0; part < parts; part++) {
            if (step == 0) sums[row][part].start(codes[part], inputs);
            else sums[row][part].add(codes[part], inputs);
          }
        }
      }
      for (int part = 0; part < parts; part++) {
        const Vec scale = vec::load(halves(strip + w8_codes_bytes) + vec::lanes * part);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
          const int64_t at = row * from.groups;
          Vec& total = totals.at[row][part];
          total = vec::fma(sums[row][part].total(from.corrections[at]) * vec::all(from.scales[at]), scale, total);
        }
      }
    }
    return totals;
  }
};

// The bias, and where the result goes. The last strip may have fewer outputs than lanes.
template <int rows>
void finish(const LinearTask& task, const Totals<rows>& totals, int64_t first_row, int64_t first_output) {
  for (int part = 0; part < parts; part++) {
    const int64_t output = first_output + part * vec::lanes, left = task.weight->outputs - output;
    const auto put = [&](auto count) {
      for (int row = 0; row < rows; row++) {
        const int64_t place = task.places ? task.places[first_row + row] : first_row + row;
        float* out = task.out + place * task.out_stride + output;
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
  const int64_t bytes = strip_bytes(layout, task.weight->inputs);
  for (int64_t strip = first_strip; strip < end_strip; strip++)
    finish(task, Tile<layout, rows>::multiply(task, first_row, task.weight->data + strip * bytes), first_row, strip * strip_outputs);
}

// The tile of exactly `count` rows, which is at most `rows`.
template <Layout layout, int rows>
void multiply_count(const LinearTask& task, int64_t count, int64_t first_row, int64_t first_strip, int64_t end_strip) {
  if (count == rows) return multiply_rows<layout, rows>(task, first_row, first_strip, end_strip);
  if constexpr (rows > 1) multiply_count<layout, rows - 1>(task, count, first_row, first_strip, end_strip);
}

template <Layout layout>
void multiply_strips(const LinearTask& task, int64_t first_strip, int64_t end_strip) {
  constexpr int most = most_rows<layout>();
  const int64_t rows = task.end_row - task.first_row, tiles = (rows + most - 1) / most;
  for (int64_t tile = 0; tile < tiles; tile++) {   // of even sizes: a last one of a single row would cost almost as much as a full one
    const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
    multiply_count<layout, most>(task, count, task.first_row + first, first_strip, end_strip);
  }
}

// The first of the entries [begin, end), rows ascending, that belongs to this row or a later one.
inline int64_t entry_from(const int32_t* rows, int64_t begin, int64_t end, int64_t row) {
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (rows[middle] < row) begin = middle + 1;
    else end = middle;
  }
  return begin;
}

// Adds the products of residuals. Those of one group are rows of one group, times this group of every strip: for a row the groups are
// added in their order, in any company.
template <Layout layout>
void add_residuals(const LinearTask& task, int64_t first_strip, int64_t end_strip) {
  if (!task.wide.begins) return;
  Weight weight = *task.weight;
  weight.bias = nullptr;
  LinearTask part = task;
  part.weight = &weight;
  part.quantised = task.wide.entries;
  part.places = task.wide.rows;
  part.add = true;
  part.scale = task.add ? task.scale : 1.0f;
  for (int64_t group = 0; group < task.quantised.groups; group++) {
    const int64_t begin = task.wide.begins[group], end = task.wide.begins[group + 1];
    if (begin == end) continue;
    part.first_row = entry_from(task.wide.rows, begin, end, task.first_row);
    part.end_row = entry_from(task.wide.rows, part.first_row, end, task.end_row);
    weight.data = task.weight->data + group * (layout == Layout::w4 ? w4_group_bytes : w8_group_bytes);
    multiply_strips<layout>(part, first_strip, end_strip);
  }
}

// A run of strips that stays in the second-level cache while the rows pass by, a tile of them at a time, and then their residuals.
constexpr int64_t cached_bytes = 128 * 1024;

template <Layout layout>
void multiply(const LinearTask& task) {
  const int64_t fitting = cached_bytes / strip_bytes(layout, task.weight->inputs), run = fitting > 1 ? fitting : 1;
  for (int64_t strip = task.first_strip; strip < task.end_strip; strip += run) {
    const int64_t end = strip + run < task.end_strip ? strip + run : task.end_strip;
    multiply_strips<layout>(task, strip, end);
    if constexpr (layout == Layout::w4 || layout == Layout::w8) add_residuals<layout>(task, strip, end);
  }
}

}  // namespace tiles
}  // namespace
}  // namespace weft::WEFT_ISA
