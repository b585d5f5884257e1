// Tiles of a linear layer: a few activation rows times the outputs of one strip.
//
// The scale blocks of an output (for float layouts: its inputs) are added in order, by the same operations for any
// tile size. So a result depends neither on the other rows nor on how the work is divided.
#include "isa/vec_bytes.h"
#include "isa/vec_pairs.h"

namespace weft::WEFT_ISA {
namespace {
namespace tiles {

using vec::each;
using vec::Vec;

constexpr int parts = strip_outputs / vec::lanes;   // vectors of a strip

template <int rows>
struct Totals {
  Vec at[rows][parts];
  Totals() {
    each<rows>([&](auto row) { each<parts>([&](auto part) { at[row][part] = vec::all(0.0f); }); });
  }
};

inline const uint16_t* halves(const uint8_t* data) { return reinterpret_cast<const uint16_t*>(data); }

// The largest number of rows in a tile. The rows of a tile share the weights of a strip, which are read from memory
// once.
template <Layout layout>
constexpr int most_rows() {
#if defined(WEFT_VNNI)
  return is_quantised(layout) ? 16 : 12;
#elif defined(WEFT_AVX512)
  return layout == Layout::w4 ? 16 : layout == Layout::w8 ? 4 : 12;
#elif defined(WEFT_AVX2)
  return is_quantised(layout) ? 4 : 6;
#else
  return 4;
#endif
}

// With at most this many rows, all sums stay in registers: the sums of groups, of scale blocks, and of whole rows. A
// row sum in memory would be written once for each scale block. On Zen 4 such a write costs more than a byte product.
// So a quantised tile with more rows is computed in two portions; the first portion is a whole panel.
#if defined(WEFT_AVX512)
constexpr int rows_in_registers = panel_rows;
#else
constexpr int rows_in_registers = 4;
#endif

// Whether multiplying in pairs (isa/vec_pairs.h) is faster for a tile of this many rows. It needs a correction term, a
// product of two weights, once per tile. With few rows this term costs more than the pairs save.
template <Layout layout>
constexpr bool goes_in_pairs(int rows) {
#if defined(WEFT_PAIRS)
  return layout == Layout::w4 && rows >= 6;
#else
  return rows < 0;   // always false
#endif
}

// How many bytes ahead weights are prefetched. Prefetching makes products with four or more rows up to 1.5 times as
// fast: the hardware prefetcher restarts at each page, and loads of activation rows displace its requests. Tiles of
// many rows read weights more slowly and need less distance. Prefetching past the end is harmless.
constexpr int64_t ahead_bytes(int rows) { return rows > rows_in_registers ? 3072 : 6144; }

template <int count>
inline void fetch(const uint8_t* from) {
  for (int i = 0; i < count; i += 64) __builtin_prefetch(from + i);
}

// One vector of weights of a float layout, at offset `at` of the strip.
template <Layout layout>
Vec load_weights(const uint8_t* strip, int64_t at) {
  if constexpr (layout == Layout::f32) return vec::load(reinterpret_cast<const float*>(strip) + at);
  else if constexpr (layout == Layout::f16) return vec::load(halves(strip) + at);
  else return bytes::load_bfloats(halves(strip) + at);
}

// Multiplies rows by one strip of a float layout.
template <Layout layout, int rows>
Totals<rows> multiply_floats(const LinearTask& task, int64_t first_row, const uint8_t* strip) {
  Totals<rows> totals;
  const float* from = task.rows + first_row * task.row_stride;
  constexpr int input_bytes = strip_outputs * (layout == Layout::f32 ? 4 : 2);
  for (int64_t input = 0; input < task.weight->inputs; input++) {
    fetch<input_bytes>(strip + input * input_bytes + ahead_bytes(rows));
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

// One vector of outputs in a group of a quantised layout. `load` returns the codes of inputs 8s .. 8s + 7 (first four,
// last four) for step s. `join` adds the sum of a group's products to the sum of its scale block. `weights_of` returns
// the weights of one input. `of_block` converts the sum of a scale block to floats. `of_total` multiplies the sum of a
// row by the output's unit.
template <Layout layout>
struct Group;

template <>
struct Group<Layout::w4> {
  static constexpr int bytes = w4_group_bytes;
  static constexpr int parts_together = parts;
  using Sum = bytes::SumW4;
  using BlockSum = bytes::Whole;
  struct EightInputs {
    bytes::CodesW4 first, last;
  };
  static EightInputs load(const uint8_t* group, int step, int part) {
    const bytes::Bytes codes = bytes::load(group + 64 * step + 4 * vec::lanes * part);
    return {bytes::low_nibbles(codes), bytes::high_nibbles(codes)};
  }
  static const uint8_t* factors_of(const uint8_t* group, int part) { return group + w4_codes_bytes + 4 * vec::lanes * part; }

  bytes::FactorsW4 factors;
  Group(const uint8_t* group, int part) : factors(factors_of(group, part)) {}
  static int32_t start(const RowGroup& row) { return row.start; }
  BlockSum join(const BlockSum& block, const Sum& sum, int32_t start) const { return sum.added_to(block, factors, start); }
  static BlockSum zero_sum() { return BlockSum{}; }
  static Vec of_block(const BlockSum& block) { return bytes::to_floats(block); }
  static Vec of_total(Vec total, const uint8_t* after_groups, int part) {
    return total * vec::load(reinterpret_cast<const float*>(after_groups) + vec::lanes * part);
  }
  static Vec weights_of(const uint8_t* group, uint32_t input, int part) {
    const bytes::Bytes codes = bytes::load(group + input / 8 * 64 + 4 * vec::lanes * part);
    return bytes::weights_at(codes, input % 4 * 8 + input % 8 / 4 * 4, factors_of(group, part));
  }
};

template <>
struct Group<Layout::w8> {
  static constexpr int bytes = w8_group_bytes;
  static constexpr int parts_together = 1;   // one vector of outputs at a time: without VNNI a sum takes two registers
  using Sum = bytes::SumW8;
  using BlockSum = Vec;
  struct EightInputs {
    bytes::CodesW8 first, last;
  };
  static EightInputs load(const uint8_t* group, int step, int part) {
    const uint8_t* codes = group + 128 * step + 4 * vec::lanes * part;
    return {bytes::codes_w8(bytes::load(codes)), bytes::codes_w8(bytes::load(codes + 64))};
  }

  Vec scale;
  Group(const uint8_t* group, int part) : scale(vec::load(halves(group + w8_codes_bytes) + vec::lanes * part)) {}
  static int32_t start(const RowGroup& row) { return row.correction; }
  BlockSum join(BlockSum block, const Sum& sum, int32_t start) const { return vec::fma(sum.total(start), scale, block); }
  static BlockSum zero_sum() { return vec::all(0.0f); }
  static Vec of_block(BlockSum block) { return block; }
  static Vec of_total(Vec total, const uint8_t*, int) { return total; }
  static Vec weights_of(const uint8_t* group, uint32_t input, int part) {
    return bytes::signed_bytes_at(bytes::load(group + input / 4 * 64 + 4 * vec::lanes * part), input % 4 * 8) * Group(group, part).scale;
  }
};

template <typename Sum, typename EightInputs>
inline void add_eight(Sum& sum, int step, const EightInputs& codes, const int8_t* inputs, int32_t start) {
  const bytes::Activations first = bytes::all_fours(inputs + 8 * step), last = bytes::all_fours(inputs + 8 * step + 4);
  if (step == 0) sum.start(codes.first, first, start);
  else sum.add(codes.first, first);
  sum.add(codes.last, last);
}

template <Layout layout, int rows>
struct BlockSums {
  typename Group<layout>::BlockSum at[rows][parts];
  explicit BlockSums(const typename Group<layout>::BlockSum& first = Group<layout>::zero_sum()) {
    each<rows>([&](auto row) { each<parts>([&](auto part) { at[row][part] = first; }); });
  }
};

// The start values of the sums of a scale block with up to `groups` groups.
template <Layout layout, int rows>
inline BlockSums<layout, rows> initial_block_sums(const uint8_t* group, int64_t groups) {
#if defined(WEFT_PAIRS)
  if constexpr (goes_in_pairs<layout>(rows)) return BlockSums<layout, rows>(pairs::without_lifts(group, groups));
#endif
  (void)group, (void)groups;
  return BlockSums<layout, rows>();
}

// `from`: the activations of this group in the first row of the tile.
template <Layout layout, int rows, int first_part>
inline void add_group(const RowGroup* from, const uint8_t* group, BlockSums<layout, rows>& blocks) {
  constexpr int together = Group<layout>::parts_together;
  typename Group<layout>::Sum sums[rows][together];
  each<4>([&](auto step) {
    typename Group<layout>::EightInputs codes[together];
    each<together>([&](auto part) { codes[part] = Group<layout>::load(group, step, first_part + part); });
    each<rows>([&](auto row) {
      each<together>([&](auto part) { add_eight(sums[row][part], step, codes[part], from[row].codes, Group<layout>::start(from[row])); });
    });
  });
  each<together>([&](auto part) {
    const Group<layout> weights(group, first_part + part);
    each<rows>([&](auto row) {
      auto& block = blocks.at[row][first_part + part];
      block = weights.join(block, sums[row][part], Group<layout>::start(from[row]));
    });
  });
}

// Adds the products of rows with one strip of a quantised layout, scale block by scale block.
template <Layout layout, int rows, int fetched>
inline void add_products(const QuantisedRows& rows_in_bytes, int64_t first_row, const uint8_t* group, const uint8_t* ahead,
                         Totals<rows>& totals) {
  const RowGroup* from = rows_in_bytes.group_of(first_row, 0);
  const float* scales = rows_in_bytes.scale_of(first_row, 0);
  for (int64_t left = rows_in_bytes.groups; left > 0; left -= scale_block_groups, scales += panel_rows) {
    BlockSums<layout, rows> blocks = initial_block_sums<layout, rows>(group, left);
#pragma GCC unroll 8
    for (int i = 0; i < scale_block_groups; i++, group += Group<layout>::bytes, ahead += fetched, from += panel_rows) {
      if (i == left) break;
      fetch<fetched>(ahead);
      if constexpr (goes_in_pairs<layout>(rows)) {
#if defined(WEFT_PAIRS)
        pairs::add_group(from, group, blocks.at);
#endif
      } else {
        constexpr int together = Group<layout>::parts_together;
        each<parts / together>([&](auto turn) { add_group<layout, rows, turn * together>(from, group, blocks); });
      }
    }
    each<rows>([&](auto row) {
      each<parts>([&](auto part) {
        Vec& total = totals.at[row][part];
        total = vec::fma(Group<layout>::of_block(blocks.at[row][part]), vec::all(scales[row]), total);
      });
    });
  }
}

// Adds the products of outliers. The weights of the strip were just read, so they are in the L1 cache. A row without an
// outlier at this input has the value 0: adding 0 is faster than a branch. A list of outliers covers four rows. A tile
// that begins inside four such rows does not extend past them, so `at` is 0 if the tile has several lists.
template <Layout layout, int rows>
inline void add_outliers(const QuantisedRows& from, int64_t first_row, const uint8_t* strip, Totals<rows>& totals) {
  constexpr int together = outlier_rows;
  const int64_t* begins = from.shared_begins + first_row / together;
  const int64_t at = first_row % together;
  each<(rows + together - 1) / together>([&](auto four) {
    constexpr int first = four * together, count = rows - first < together ? rows - first : together;
    const SharedOutlier *outlier = from.shared_outliers + begins[four], *end = from.shared_outliers + begins[four + 1];
    for (; outlier < end; outlier++) {
      const uint8_t* group = strip + int64_t{outlier->input / group_inputs} * Group<layout>::bytes;
      const float* values = outlier->values + at;
      each<parts>([&](auto part) {
        const Vec weights = Group<layout>::weights_of(group, outlier->input % group_inputs, part);
        each<count>([&](auto row) {
          Vec& total = totals.at[first + row][part];
          total = vec::fma(vec::all(values[row]), weights, total);
        });
      });
    }
  });
}

// Adds the bias and writes the result. The last strip may have fewer outputs than lanes.
template <int rows>
inline void finish(const LinearTask& task, const Totals<rows>& totals, int64_t first_row, int64_t first_output) {
  each<parts>([&](auto part) {
    const int64_t output = first_output + part * vec::lanes, left = task.weight->outputs - output;
    const auto put = [&](auto count) {
      each<rows>([&](auto row) {
        float* out = task.out + (first_row + row) * task.out_stride + output;
        Vec value = totals.at[row][part];
        if (task.weight->bias) value = value + vec::load(task.weight->bias + output, count);
        if (task.add) value = vec::fma(vec::all(task.scale), value, vec::load(out, count));
        vec::store(out, value, count);
      });
    };
    if (left >= vec::lanes) put(vec::Full{});
    else if (left > 0) put(left);
  });
}

// Inlines all calls into one function. Not with sanitizer checks: compiling one such function would take minutes.
#if defined(__SANITIZE_ADDRESS__)
#define WEFT_IN_ONE_FUNCTION
#else
#define WEFT_IN_ONE_FUNCTION __attribute__((flatten, noinline))
#endif

// Multiplies the rows of a portion by one strip. Prefetches `fetched` bytes per group, from `ahead` on. Everything is
// inlined into this function, because a sum stays in a register only if its address is never taken.
template <Layout layout, int rows, int fetched>
WEFT_IN_ONE_FUNCTION void multiply_portion(const LinearTask& task, int64_t first_row, int64_t first_output, const uint8_t* strip,
                                        const uint8_t* ahead) {
  Totals<rows> totals;
  add_products<layout, rows, fetched>(task.quantised, first_row, strip, ahead, totals);
  if (task.quantised.shared_outliers) add_outliers<layout>(task.quantised, first_row, strip, totals);
  const uint8_t* after_groups = strip + task.quantised.groups * Group<layout>::bytes;
  each<rows>([&](auto row) {
    each<parts>([&](auto part) { totals.at[row][part] = Group<layout>::of_total(totals.at[row][part], after_groups, part); });
  });
  finish(task, totals, first_row, first_output);
}

template <Layout layout, int rows>
WEFT_IN_ONE_FUNCTION void multiply_floats_of_strip(const LinearTask& task, int64_t first_row, int64_t first_output, const uint8_t* strip) {
  finish(task, multiply_floats<layout, rows>(task, first_row, strip), first_row, first_output);
}

// Multiplies `rows` rows by the strips. If the rows do not fit into registers, they are computed in two portions. Each
// strip is multiplied by both portions before the next strip, so it is read from memory once.
template <Layout layout, int rows>
void multiply_rows(const LinearTask& task, int64_t first_row, int64_t first_strip, int64_t end_strip) {
  const int64_t bytes = strip_bytes(layout, task.weight->inputs);
  const uint8_t* weights = task.weight->data + first_strip * bytes;
  for (int64_t strip = first_strip; strip < end_strip; strip++, weights += bytes) {
    const int64_t output = strip * strip_outputs;
    if constexpr (!is_quantised(layout)) {
      multiply_floats_of_strip<layout, rows>(task, first_row, output, weights);
    } else if constexpr (rows <= rows_in_registers) {
      multiply_portion<layout, rows, Group<layout>::bytes>(task, first_row, output, weights, weights + ahead_bytes(rows));
    } else {
      constexpr int first = panel_rows, second = rows - first;
      static_assert(second > 0 && second <= rows_in_registers);
      constexpr int second_fetched = Group<layout>::bytes * second / rows, first_fetched = Group<layout>::bytes - second_fetched;
      // Each strip is prefetched in two parts. The second portion prefetches the beginning of the next strip, the first
      // portion prefetches the rest of the current strip.
      const uint8_t* ahead = weights + ahead_bytes(rows) + task.quantised.groups * second_fetched;
      multiply_portion<layout, first, first_fetched>(task, first_row, output, weights, ahead);
      ahead += task.quantised.groups * first_fetched;
      multiply_portion<layout, second, second_fetched>(task, first_row + first, output, weights, ahead);
    }
  }
}

// Calls `multiply_rows` with `count` as its template argument. `count` is at most `rows`.
template <Layout layout, int rows>
void multiply_count(const LinearTask& task, int64_t count, int64_t first_row, int64_t first_strip, int64_t end_strip) {
  if (count == rows) return multiply_rows<layout, rows>(task, first_row, first_strip, end_strip);
  if constexpr (rows > 1) multiply_count<layout, rows - 1>(task, count, first_row, first_strip, end_strip);
}

// The largest number of rows of a tile that begins at `row`. A tile that begins inside a panel ends with the panel.
// Every `outlier_rows` rows share a list of outliers: a tile that begins inside such rows ends with them.
template <Layout layout>
constexpr int64_t rows_fitting(int64_t row) {
  if (!is_quantised(layout) || row % panel_rows == 0) return most_rows<layout>();
  const int64_t fitting = row % outlier_rows == 0 ? panel_rows - row % panel_rows : outlier_rows - row % outlier_rows;
  return fitting < most_rows<layout>() ? fitting : most_rows<layout>();
}

// Divides the rows of a task into tiles, and multiplies each tile by these strips.
template <Layout layout>
void multiply_strips(const LinearTask& task, int64_t first_strip, int64_t end_strip) {
  constexpr int most = most_rows<layout>();
  static_assert(!is_quantised(layout) || (most % outlier_rows == 0 && (panel_rows % most == 0 || most == 2 * panel_rows)));
  static_assert(panel_rows % outlier_rows == 0);
  for (int64_t row = task.first_row; row < task.end_row;) {
    const int64_t left = task.end_row - row, fitting = rows_fitting<layout>(row), count = left < fitting ? left : fitting;
    multiply_count<layout, most>(task, count, row, first_strip, end_strip);
    row += count;
  }
}

// Size of the weights that stay in the L2 cache while all row tiles are multiplied with them.
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
