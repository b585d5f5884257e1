// Activations to bytes.
#include "vec.h"

namespace weft::WEFT_ISA {
namespace {
namespace quantising {

// Three steps of a group of 32 values, the first for several groups. The largest magnitude is not finite where one of the values is not: magnitudes are compared as whole
// numbers, where infinity comes after all numbers and NaN after infinity. `above` has a bit for every value of a larger magnitude than
// the bound. `round_codes` takes magnitudes of up to 127 once multiplied
// with `factor`, rounds to nearest, ties to even, and returns the sum of the codes.
#if defined(WEFT_AVX512)

inline float largest_magnitude(const float* values, int groups) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  for (int i = 0; i < groups * group_inputs; i += 16)
    largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_loadu_si512(values + i), magnitude));
  return float_of_bits(static_cast<uint32_t>(_mm512_reduce_max_epi32(largest)));
}

inline uint32_t above(const float* values, float bound) {
  const auto bits = [&](const float* from) -> uint32_t {
    return _mm512_cmp_ps_mask(vec::magnitude(vec::load(from)), vec::all(bound), _CMP_GT_OQ);
  };
  return bits(values) | bits(values + 16) << 16;
}

inline int32_t round_codes(const float* values, float factor, int8_t* codes) {
  const __m512i first = _mm512_cvtps_epi32(vec::load(values) * vec::all(factor));
  const __m512i second = _mm512_cvtps_epi32(vec::load(values + 16) * vec::all(factor));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(first));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16), _mm512_cvtepi32_epi8(second));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
}

#elif defined(WEFT_AVX2)

template <typename Fold>
inline int32_t folded(__m256i a, Fold fold) {
  __m128i b = fold(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = fold(b, _mm_shuffle_epi32(b, 0x4e));
  b = fold(b, _mm_shuffle_epi32(b, 0xb1));
  return _mm_cvtsi128_si32(b);
}

inline float largest_magnitude(const float* values, int groups) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < groups * group_inputs; i += 8)
    largest = _mm256_max_epi32(
        largest, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i)), magnitude));
  return float_of_bits(static_cast<uint32_t>(folded(largest, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); })));
}

inline uint32_t above(const float* values, float bound) {
  uint32_t bits = 0;
  for (int i = 0; i < 4; i++) {
    const __m256 is_above = _mm256_cmp_ps(vec::magnitude(vec::load(values + 8 * i)), vec::all(bound), _CMP_GT_OQ);
    bits |= static_cast<uint32_t>(_mm256_movemask_ps(is_above)) << 8 * i;
  }
  return bits;
}

inline int32_t round_codes(const float* values, float factor, int8_t* codes) {
  __m256i rounded[4];
  for (int i = 0; i < 4; i++) rounded[i] = _mm256_cvtps_epi32(vec::load(values + 8 * i) * vec::all(factor));
  // Packing works in halves of 128 bits; the permutation puts their fours back in order.
  const __m256i packed =
      _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3]));
  const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), ordered);
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(rounded[0], rounded[1]), _mm256_add_epi32(rounded[2], rounded[3]));
  return folded(sum, [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); });
}

#else

inline float largest_magnitude(const float* values, int groups) {
  uint32_t largest = 0;
  for (int i = 0; i < groups * group_inputs; i++) {
    const uint32_t bits = bits_of_float(values[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return float_of_bits(largest);
}

inline uint32_t above(const float* values, float bound) {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < group_inputs; i++) bits |= static_cast<uint32_t>(std::fabs(values[i]) > bound) << i;
  return bits;
}

inline int32_t round_codes(const float* values, float factor, int8_t* codes) {
  int32_t sum = 0;
  for (int i = 0; i < group_inputs; i++) {
    // In a float of this size the last bit is 1, so the addition rounds.
    codes[i] = static_cast<int8_t>(static_cast<int32_t>((values[i] * factor + 0x1.8p23f) - 0x1.8p23f));
    sum += codes[i];
  }
  return sum;
}

#endif

// The values of some groups, in `padded` with zeros behind them where the row ends before.
inline const float* block_of(const float* row, int64_t columns, int64_t first_group, int groups, float* padded) {
  const float* values = row + first_group * group_inputs;
  const int64_t count = columns - first_group * group_inputs;
  if (count >= groups * group_inputs) return values;
  std::memset(padded, 0, block_inputs * sizeof(float));
  std::memcpy(padded, values, static_cast<size_t>(count) * sizeof(float));
  return padded;
}

// The magnitude that all outliers are above: infinite or NaN where a value of the row is, and then there are none.
inline float outlier_bound(const float* row, int64_t columns) {
  const float sum = vec::sum_row(columns, [&](vec::Vec magnitudes, int64_t i, auto n) {
    return magnitudes + vec::magnitude(vec::load(row + i, n));
  });
  return sum / static_cast<float>(columns) * static_cast<float>(outlier_ratio);
}

// Takes the outliers out of a group, which is then in `rest`; returns how many they are.
inline int32_t take_outliers(const float* values, float bound, uint32_t first_input, float* rest, Outlier* out) {
  for (int i = 0; i < group_inputs; i += vec::lanes) {   // whole vectors: to read one of which a part was just written takes long
    const vec::Vec value = vec::load(values + i);
    vec::store(rest + i, vec::where_less(vec::all(bound), vec::magnitude(value), vec::all(0.0f), value));
  }
  int32_t count = 0;
  for (uint32_t left = above(values, bound); left != 0; left &= left - 1) {
    const auto i = static_cast<uint32_t>(__builtin_ctz(left));
    out[count++] = Outlier{first_input + i, values[i]};
  }
  return count;
}

}  // namespace quantising

void quantise_row(const float* row, int64_t columns, const QuantisedRows& out, int64_t out_row) {
  float padded[block_inputs], rest[block_inputs];
  const float bound = out.outliers ? quantising::outlier_bound(row, columns) : NAN;
  Outlier* outliers = out.outliers ? out.outliers + out_row * out.outlier_room : nullptr;
  int32_t taken = 0;
  for (int64_t block = 0; block < out.blocks; block++) {
    const int64_t first_group = block * block_groups, left = out.groups - first_group;
    const int groups = static_cast<int>(left < block_groups ? left : block_groups);
    const float* values = quantising::block_of(row, columns, first_group, groups, padded);
    float largest = quantising::largest_magnitude(values, groups), scale = 0.0f;
    if (largest > bound) {
      for (int group = 0; group < groups; group++)
        taken += quantising::take_outliers(values + group * group_inputs, bound,
                                           static_cast<uint32_t>((first_group + group) * group_inputs), rest + group * group_inputs,
                                           outliers + taken);
      values = rest;
      largest = quantising::largest_magnitude(rest, groups);
    }
    const bool has_codes = largest >= 0x1p-100f && largest < INFINITY;
    const float factor = static_cast<float>(largest_code) / largest;
    for (int group = 0; group < groups; group++) {
      RowGroup& into = *out.group_of(out_row, first_group + group);
      int32_t sum = 0;
      if (has_codes) sum = quantising::round_codes(values + group * group_inputs, factor, into.codes);
      else std::memset(into.codes, 0, group_inputs);   // nothing to speak of, or something that no code can stand for
      into.start = sum * ((1 << 16) - w4_middle) + (1 << 15);
      into.correction = -128 * sum;
    }
    if (has_codes) scale = largest / static_cast<float>(largest_code);
    else if (!(largest < INFINITY)) scale = NAN;   // the result must show it
    *out.scale_of(out_row, block) = scale;
  }
  if (out.outliers) out.outlier_counts[out_row] = taken;
}

}  // namespace
}  // namespace weft::WEFT_ISA
