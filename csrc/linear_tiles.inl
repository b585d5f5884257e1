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
  return is_quantised(layout) ? 4 : 6;
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
Totals<rows> multiply_floats(const LinearTask& task, int64_t first_row, const uint8_t* strip) {
  Totals<rows> totals;
  const float* from = task.rows + first_row * task.row_stride;
  constexpr int input_bytes = strip_outputs * (layout == Layout::f32 ? 4 : 2);
  for (int64_t input = 0; input < task.weight->inputs; input++) {
    fetch_ahead<input_bytes>(strip + input * input_bytes);
    Vec weights[parts];
    for (int part = 0; part < parts; part++) weights[part] = load_weights<layout>(strip, input * strip_outputs + vec::lanes * part);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
      const Vec value = vec::all(from[row * task.row_stride + input]);
      for (int part = 0; part < parts; part++) totals.at[row][part] = vec::fma(value, weights[part], totals.at[row][part]);
    }
  }
  return totals;
}

// A quantised layout, for one vector of outputs in a group: the codes of inputs 8s .. 8s + 7 (the first four and the last four), the
// scales, how a sum of products joins the total, and the weights of one input as floats.
template <Layout layout>
struct Group;

template <>
struct Group<Layout::w4> {
  static constexpr int bytes = w4_group_bytes;
  static constexpr int parts_together = parts;
  using Sum = bytes::SumW4;
  struct Eight {
    bytes::CodesW4 first, last;
  };
  static Eight load(const uint8_t* group, int step, int part) {
    const bytes::Bytes codes = bytes::load(group + 64 * step + 4 * vec::lanes * part);
    return {bytes::low_nibbles(codes), bytes::high_nibbles(codes)};
  }

  Vec scale, minimum;
  Group(const uint8_t* group, int part)
      : scale(vec::load(halves(group + w4_codes_bytes) + vec::lanes * part)),
        minimum(vec::load(halves(group + w4_codes_bytes) + strip_outputs + vec::lanes * part)) {}
  Vec join(Vec total, const Sum& sum, float activation_scale, float offset, int32_t) const {
    total = vec::fma(minimum, vec::all(offset), total);
    return vec::fma(sum.total() * vec::all(activation_scale), scale, total);
  }
  static Vec weights_of(const uint8_t* group, uint32_t input, int part) {
    const Group factors(group, part);
    const bytes::Bytes codes = bytes::load(group + input / 8 * 64 + 4 * vec::lanes * part);
    return vec::fma(bytes::nibbles_at(codes, input % 4 * 8 + input % 8 / 4 * 4), factors.scale, factors.minimum);
  }
};

template <>
struct Group<Layout::w8> {
  static constexpr int bytes = w8_group_bytes;
  static constexpr int parts_together = 1;   // one after the other: without VNNI a sum takes two registers
  using Sum = bytes::SumW8;
  struct Eight {
    bytes::CodesW8 first, last;
  };
  static Eight load(const uint8_t* group, int step, int part) {
    const uint8_t* codes = group + 128 * step + 4 * vec::lanes * part;
    return {bytes::codes_w8(bytes::load(codes)), bytes::codes_w8(bytes::load(codes + 64))};
  }

  Vec scale;
  Group(const uint8_t* group, int part) : scale(vec::load(halves(group + w8_codes_bytes) + vec::lanes * part)) {}
  Vec join(Vec total, const Sum& sum, float activation_scale, float, int32_t correction) const {
    return vec::fma(sum.total(correction) * vec::all(activation_scale), scale, total);
  }
  static Vec weights_of(const uint8_t* group, uint32_t input, int part) {
    return bytes::signed_bytes_at(bytes::load(group + input / 4 * 64 + 4 * vec::lanes * part), input % 4 * 8) * Group(group, part).scale;
  }
};

// The rows of a tile at one group after the other: row r lies r * stride bytes, or r * groups numbers, after the first.
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

template <typename Sum, typename Eight>
inline void add_eight(Sum& sum, int step, const Eight& codes, const int8_t* inputs) {
  const bytes::Activations first = bytes::all_fours(inputs + 8 * step), last = bytes::all_fours(inputs + 8 * step + 4);
  if (step == 0) sum.start(codes.first, first);
  else sum.add(codes.first, first);
  sum.add(codes.last, last);
}

template <Layout layout, int rows>
inline void add_group(const Rows& from, const uint8_t* group, int first_part, Totals<rows>& totals) {
  constexpr int together = Group<layout>::parts_together;
  typename Group<layout>::Sum sums[rows][together];
#pragma GCC unroll 4
  for (int step = 0; step < 4; step++) {
    typename Group<layout>::Eight codes[together];
    for (int part = 0; part < together; part++) codes[part] = Group<layout>::load(group, step, first_part + part);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
      for (int part = 0; part < together; part++) add_eight(sums[row][part], step, codes[part], from.codes + row * from.stride);
  }
  for (int part = 0; part < together; part++) {
    const Group<layout> weights(group, first_part + part);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
      const int64_t at = row * from.groups;
      Vec& total = totals.at[row][first_part + part];
      total = weights.join(total, sums[row][part], from.scales[at], from.offsets[at], from.corrections[at]);
    }
  }
}

template <Layout layout, int rows>
inline Totals<rows> multiply_bytes(const LinearTask& task, int64_t first_row, const uint8_t* group) {
  Totals<rows> totals;
  Rows from(task.quantised, first_row);
  for (int64_t i = 0; i < from.groups; i++, group += Group<layout>::bytes, from.to_next_group()) {
    fetch_ahead<Group<layout>::bytes>(group);
    for (int part = 0; part < parts; part += Group<layout>::parts_together) add_group<layout, rows>(from, group, part, totals);
  }
  return totals;
}

// The totals of a tile and its outliers; the weights of the strip were just read. All in one loop: how often a loop for each row goes
// round would be guessed wrong too often.
template <Layout layout, int rows>
Totals<rows> with_outliers(Totals<rows> totals, const QuantisedRows& from, int64_t first_row, const uint8_t* strip) {
  const Outlier* end = from.outliers + from.outlier_begins[first_row + rows];
  for (const Outlier* outlier = from.outliers + from.outlier_begins[first_row]; outlier < end; outlier++) {
    const uint8_t* group = strip + int64_t{outlier->input / group_inputs} * Group<layout>::bytes;
    for (int part = 0; part < parts; part++) {
      Vec& total = totals.at[outlier->row - first_row][part];
      total = vec::fma(vec::all(outlier->value), Group<layout>::weights_of(group, outlier->input % group_inputs, part), total);
    }
  }
  return totals;
}

// The bias, and where the result goes. The last strip may have fewer outputs than lanes.
template <int rows>
void finish(const LinearTask& task, const Totals<rows>& totals, int64_t first_row, int64_t first_output) {
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
  const int64_t bytes = strip_bytes(layout, task.weight->inputs);
  const uint8_t* weights = task.weight->data + first_strip * bytes;
  for (int64_t strip = first_strip; strip < end_strip; strip++, weights += bytes) {
    if constexpr (is_quantised(layout)) {
      const int64_t* begins = task.quantised.outlier_begins;
      const Totals<rows> totals = multiply_bytes<layout, rows>(task, first_row, weights);
      const bool has_outliers = begins && begins[first_row] < begins[first_row + rows];
      finish(task, has_outliers ? with_outliers<layout>(totals, task.quantised, first_row, weights) : totals, first_row,
             strip * strip_outputs);
    } else {
      finish(task, multiply_floats<layout, rows>(task, first_row, weights), first_row, strip * strip_outputs);
    }
  }
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

// A run of strips that stays in the second-level cache while the rows pass by, a tile of them at a time.
constexpr int64_t cached_bytes = 128 * 1024;

template <Layout layout>
void multiply(const LinearTask& task) {
  const int64_t fitting = cached_bytes / strip_bytes(layout, task.weight->inputs), run = fitting > 1 ? fitting : 1;
  for (int64_t strip = task.first_strip; strip < task.end_strip; strip += run) {
    const int64_t end = strip + run < task.end_strip ? strip + run : task.end_strip;
    multiply_strips<layout>(task, strip, end);
  }
}

}  // namespace tiles
}  // namespace
}  // namespace weft::WEFT_ISA
