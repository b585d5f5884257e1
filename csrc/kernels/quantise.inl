// Prepares activation rows for products: applies the prologue and quantises to bytes. "Block" means scale block here.
#include "isa/vec_quantise.h"

namespace weft::WEFT_ISA {
namespace {
namespace quantising {

// Statistics that `write_values` collects: sums of the magnitudes of a row, and the largest magnitude of its current
// block. There are as many sums as in sum_row, so AVX2 and AVX-512 add the values in the same order.
struct RowStatistics {
  static constexpr int num_sums = 4 * vec::sum_parts;
  vec::Vec sums[num_sums];
  Largest largest;

  __attribute__((always_inline)) void add(vec::Vec values, int64_t sum) {
    const vec::Vec magnitudes = vec::magnitude(values);
    sums[sum] = sums[sum] + magnitudes;
    largest.add(magnitudes);
  }
};

// Writes the last block of a row if it is incomplete, padded with zeros. Its magnitudes go to the same sums as in
// sum_row.
template <typename Make>
inline void write_last_values(int64_t first, int64_t columns, Make& make, float* out, RowStatistics& statistics) {
  const int64_t side_by_side = (columns - first) / (RowStatistics::num_sums * vec::lanes) * RowStatistics::num_sums;
  for (int64_t k = 0; k < block_vectors; k++) {
    const int64_t at = first + k * vec::lanes, left = columns - at;
    vec::Vec values[1] = {vec::all(0.0f)};
    if (left > 0) make(at, left < vec::lanes ? left : vec::lanes, values);
    statistics.add(values[0], k < side_by_side ? k % RowStatistics::num_sums : (k - side_by_side) % vec::sum_parts);
    vec::store(out + at, values[0]);
  }
}

// Writes a row to `out`, padded with zeros to whole blocks. For each block, also writes `maxima_kept` values to
// `lane_maxima`. The largest of these is the largest magnitude of the block. Returns the sum of magnitudes of the row.
template <typename Make>
inline float write_values(int64_t columns, Make make, float* out, float* lane_maxima) {
  constexpr int some = vec::chains_at_once;
  RowStatistics statistics;
  for (vec::Vec& sum : statistics.sums) sum = vec::all(0.0f);
  int64_t i = 0;
  for (; i + scale_block_inputs <= columns; i += scale_block_inputs, lane_maxima += maxima_kept) {
    statistics.largest = Largest();
#pragma GCC unroll 8
    for (int first = 0; first < block_vectors; first += some) {
      vec::Vec values[some];
      make(i + first * vec::lanes, vec::Full{}, values);
#pragma GCC unroll 4
      for (int k = 0; k < some; k++) {
        statistics.add(values[k], (first + k) % RowStatistics::num_sums);
        vec::store(out + i + (first + k) * vec::lanes, values[k]);
      }
    }
    statistics.largest.store(lane_maxima);
  }
  if (i == columns) return vec::sum_of_four(statistics.sums);
  RowStatistics last = statistics;   // a copy: if the address of a variable escapes, it does not stay in registers
  last.largest = Largest();
  write_last_values(i, columns, make, out, last);
  last.largest.store(lane_maxima);
  return vec::sum_of_four(last.sums);
}

// Replaces the outliers of a block by zeros, and writes the lane maxima of the remaining values. Returns the number of
// outliers.
inline int32_t remove_outliers(float* values, float bound, uint32_t first_input, Outlier* out, float* lane_maxima) {
  int32_t count = 0;
  for (uint64_t left = inputs_above(values, bound); left != 0; left &= left - 1) {
    const auto i = static_cast<uint32_t>(__builtin_ctzll(left));
    out[count++] = Outlier{first_input + i, values[i]};
  }
  Largest largest;
  // The loop writes whole vectors: loading a vector after a part of it was written is slow.
  for (int i = 0; i < scale_block_inputs; i += vec::lanes) {
    const vec::Vec value = vec::load(values + i), magnitude = vec::magnitude(value);
    const vec::Vec is_left = vec::where_less(vec::all(bound), magnitude, vec::all(0.0f), value);
    largest.add(vec::magnitude(is_left));
    vec::store(values + i, is_left);
  }
  largest.store(lane_maxima);
  return count;
}

// The number of blocks or groups to process together from `first` on: all that remain, but at most `most`.
inline int taken_together(int64_t all, int64_t first, int most) { return static_cast<int>(all - first < most ? all - first : most); }

}  // namespace quantising

// Quantises a row in three passes: the values after the prologue, then outliers and scales, then the codes.
void quantise_row(const RowInput& input, int64_t columns, float* scratch, const QuantisedRows& out, int64_t out_row) {
  using namespace quantising;
  float *values = scratch, *lane_maxima = scratch + out.scale_blocks * scale_block_inputs, sum = 0.0f;
  with_values(input, columns, [&](auto make) { sum = write_values(columns, make, values, lane_maxima); });
  // A value with a magnitude above this is an outlier. If a value is not finite, the bound is infinite or NaN, and no
  // value is above it. The bound is at least 2^-100: near the smallest floats the mean is so inexact that most values
  // could exceed it.
  float bound = out.outliers ? sum / static_cast<float>(columns) * static_cast<float>(out.ratio) : NAN;
  if (bound < 0x1p-100f) bound = 0x1p-100f;
  Outlier* outliers = out.outliers ? out.outliers + out_row * out.outlier_room : nullptr;
  int32_t taken = 0;
  // The factors of all blocks are computed first, then all codes. So each loop waits for its inputs once, not for every
  // eight blocks.
  for (int64_t first = 0; first < out.scale_blocks; first += blocks_together) {
    const int blocks = taken_together(out.scale_blocks, first, blocks_together);
    const uint32_t all = (1u << blocks) - 1;
    float *of_blocks = lane_maxima + first * maxima_kept, *factors = of_blocks, scales[blocks_together];   // the factors overwrite the maxima
    PerBlock largest = largest_of_blocks(of_blocks);
    for (uint32_t left = blocks_above(largest, bound) & all; left != 0; left &= left - 1) {
      const int64_t block = first + __builtin_ctz(left);
      float of_rest[maxima_kept];
      taken += remove_outliers(values + block * scale_block_inputs, bound, static_cast<uint32_t>(block * scale_block_inputs), outliers + taken, of_rest);
      largest = with_block(largest, __builtin_ctz(left), of_rest);
    }
    for (uint32_t left = find_scales(largest, factors, scales) & all; left != 0; left &= left - 1)
      std::memset(values + (first + __builtin_ctz(left)) * scale_block_inputs, 0, scale_block_inputs * sizeof(float));
    asm("" : "+m"(scales));   // forces a read from memory: extracting single lanes from a register costs more
    for (int block = 0; block < blocks; block++) *out.scale_of(out_row, first + block) = scales[block];
  }
  for (int64_t first = 0; first < out.groups; first += groups_together) {
    const int64_t first_block = first / scale_block_groups;
    const int groups = taken_together(out.groups, first, groups_together);
    float* factors = lane_maxima + first_block * maxima_kept;
    const auto write = [&] { return write_codes(values + first * group_inputs, factors, groups, out.group_of(out_row, first)); };
    // If the codes of a group are too large in total (kernels.h), its block gets half the factor, and all codes are
    // computed again.
    if (const uint32_t too_large = write()) {
      for (int block = 0; block < blocks_together; block++) {
        if ((too_large >> block * scale_block_groups & ((1u << scale_block_groups) - 1)) == 0) continue;
        factors[block] *= 0.5f;
        *out.scale_of(out_row, first_block + block) *= 2.0f;
      }
      write();
    }
  }
  if (out.outliers) out.outlier_counts[out_row] = taken;
}

}  // namespace
}  // namespace weft::WEFT_ISA
