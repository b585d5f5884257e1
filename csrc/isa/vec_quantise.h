// Quantises activation rows to bytes: the parts that need intrinsics, for eight scale blocks at a time. "Block" means
// scale block here.
#pragma once

#include "isa/vec_curves.h"

namespace weft::WEFT_ISA {
namespace {
namespace quantising {

// Each function works on eight blocks together. Maxima over lanes, sums of codes and divisions take hardly longer for
// eight blocks than for one.
constexpr int blocks_together = 8;
constexpr int groups_together = blocks_together * scale_block_groups;
constexpr int block_vectors = scale_block_inputs / vec::lanes;

// The largest magnitude of a block is first kept as this many lane maxima. They are combined later, for several blocks
// at once. Magnitudes are compared as integers, where infinity is above all numbers and NaN above infinity. So the
// largest magnitude is not finite if a value is not finite.
constexpr int maxima_kept = 4;

#if defined(WEFT_AVX512) || defined(WEFT_AVX2)

struct Largest {
#if defined(WEFT_AVX512)
  __m512i lanes = _mm512_setzero_si512();

  void add(vec::Vec magnitudes) { lanes = _mm512_max_epi32(lanes, _mm512_castps_si512(magnitudes)); }
  __m256i halves() const { return _mm256_max_epi32(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1)); }
#else
  __m256i lanes = _mm256_setzero_si256();

  void add(vec::Vec magnitudes) { lanes = _mm256_max_epi32(lanes, _mm256_castps_si256(magnitudes)); }
  __m256i halves() const { return lanes; }
#endif
  void store(float* out) const {
    const __m128i lane_maxima = _mm_max_epi32(_mm256_castsi256_si128(halves()), _mm256_extracti128_si256(halves(), 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), lane_maxima);
  }
};

// One number for each of the eight blocks.
using PerBlock = __m256;

// Maxima of neighbouring lanes: two of a, then two of b, in each 128-bit half.
inline PerBlock larger_of_two(PerBlock a, PerBlock b) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                                              _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd))));
}

inline PerBlock largest_of_blocks(const float* lane_maxima) {
  // Loads four floats at a time, as they were stored: a load that spans two recent stores is slow.
  const auto two_blocks = [&](int i) {
    return _mm256_set_m128(_mm_loadu_ps(lane_maxima + (i + blocks_together / 2) * maxima_kept), _mm_loadu_ps(lane_maxima + i * maxima_kept));
  };
  return larger_of_two(larger_of_two(two_blocks(0), two_blocks(1)), larger_of_two(two_blocks(2), two_blocks(3)));
}

// Replaces the value of one block by the largest of its lane maxima.
inline PerBlock with_block(PerBlock all, int block, const float* lane_maxima) {
  const PerBlock twice = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(lane_maxima)), pairs = larger_of_two(twice, twice);
  const __m256i is_block = _mm256_cmpeq_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(block));
  return _mm256_blendv_ps(all, larger_of_two(pairs, pairs), _mm256_castsi256_ps(is_block));
}

// Returns one bit per block: 1 if its largest magnitude is above the bound.
inline uint32_t blocks_above(PerBlock all, float bound) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(all, _mm256_set1_ps(bound), _CMP_GT_OQ)));
}

// Returns one bit per value of a block: 1 if its magnitude is above the bound.
inline uint64_t inputs_above(const float* values, float bound) {
  uint64_t bits = 0;
#pragma GCC unroll 8
  for (int i = 0; i < scale_block_inputs; i += vec::lanes) {
    const vec::Vec magnitudes = vec::magnitude(vec::load(values + i));
#if defined(WEFT_AVX512)
    bits |= uint64_t{_mm512_cmp_ps_mask(magnitudes, vec::all(bound), _CMP_GT_OQ)} << i;
#else
    bits |= uint64_t{static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(magnitudes, vec::all(bound), _CMP_GT_OQ)))} << i;
#endif
  }
  return bits;
}

// Writes the factor and the scale of each block: code = value * factor, and value = code * scale. Returns one bit per
// block: 1 if the block has no codes, because all its values are negligible or one is not finite.
inline uint32_t find_scales(PerBlock largest, float* factors, float* scales) {
  const PerBlock top = _mm256_set1_ps(static_cast<float>(largest_code)), infinite = _mm256_set1_ps(INFINITY);
  const PerBlock finite = _mm256_cmp_ps(largest, infinite, _CMP_LT_OQ);
  const PerBlock coded = _mm256_and_ps(finite, _mm256_cmp_ps(largest, _mm256_set1_ps(0x1p-100f), _CMP_GE_OQ));
  _mm256_storeu_ps(factors, _mm256_and_ps(coded, top / largest));
  // A block with a value that is not finite gets the scale NaN, so that all results of the block are NaN.
  _mm256_storeu_ps(scales, _mm256_blendv_ps(_mm256_set1_ps(NAN), _mm256_and_ps(coded, largest / top), finite));
  return ~static_cast<uint32_t>(_mm256_movemask_ps(coded));
}

#else

struct Largest {
  vec::Bits lanes = {};

  void add(vec::Vec magnitudes) {
    vec::Bits bits;
    std::memcpy(&bits, &magnitudes, sizeof bits);
    lanes = bits > lanes ? bits : lanes;
  }
  void store(float* out) const { std::memcpy(out, &lanes, sizeof lanes); }
};

struct PerBlock {
  float of[blocks_together];
};

inline PerBlock with_block(PerBlock all, int block, const float* lane_maxima) {
  uint32_t largest = 0;
  for (int i = 0; i < maxima_kept; i++) largest = bits_of_float(lane_maxima[i]) > largest ? bits_of_float(lane_maxima[i]) : largest;
  all.of[block] = float_of_bits(largest);
  return all;
}

inline PerBlock largest_of_blocks(const float* lane_maxima) {
  PerBlock all;
  for (int block = 0; block < blocks_together; block++) all = with_block(all, block, lane_maxima + block * maxima_kept);
  return all;
}

inline uint32_t blocks_above(PerBlock all, float bound) {
  uint32_t bits = 0;
  for (int block = 0; block < blocks_together; block++) bits |= static_cast<uint32_t>(all.of[block] > bound) << block;
  return bits;
}

inline uint64_t inputs_above(const float* values, float bound) {
  uint64_t bits = 0;
  for (int i = 0; i < scale_block_inputs; i++) bits |= uint64_t{std::fabs(values[i]) > bound} << i;
  return bits;
}

inline uint32_t find_scales(PerBlock largest, float* factors, float* scales) {
  uint32_t uncoded = 0;
  for (int block = 0; block < blocks_together; block++) {
    const float size = largest.of[block];
    const bool coded = size >= 0x1p-100f && size < INFINITY;
    factors[block] = coded ? static_cast<float>(largest_code) / size : 0.0f;
    // A block with a value that is not finite gets the scale NaN, so that all results of the block are NaN.
    scales[block] = coded ? size / static_cast<float>(largest_code) : size < INFINITY ? 0.0f : NAN;
    uncoded |= static_cast<uint32_t>(!coded) << block;
  }
  return uncoded;
}

#endif

constexpr int32_t start_of(int32_t sum) { return sum * ((1 << 16) - w4_middle) + w4_lift; }
constexpr int32_t correction_of(int32_t sum) { return -128 * sum; }

// `write_codes` below quantises up to groups_together groups. It writes their codes, and the start values of their
// `RowGroup`, to `into`; neighbouring groups are `panel_rows` apart. A code is value * factor, rounded to nearest, ties
// to even. Returns one bit for each group: 1 if the magnitudes of its codes add up to more than largest_magnitudes.
#if defined(WEFT_AVX512)

// The sum of every four codes.
inline __m512i sums_of_fours(__m512i codes) {
  const __m512i ones = _mm512_set1_epi8(1);
#if defined(WEFT_VNNI)
  return _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, codes);
#else
  return _mm512_madd_epi16(_mm512_maddubs_epi16(ones, codes), _mm512_set1_epi16(1));
#endif
}

// The sum of the magnitudes of every eight codes, in 64-bit lanes.
inline __m512i magnitudes_of_eights(__m512i codes) {
  const __m512i zero = _mm512_set1_epi8(-128);
  return _mm512_sad_epu8(_mm512_xor_si512(codes, zero), zero);
}

// Adds neighbouring lanes: in each 128-bit part two sums of a, then two of b.
inline __m512i add_neighbours(__m512i a, __m512i b) {
  const __m512 left = _mm512_castsi512_ps(a), right = _mm512_castsi512_ps(b);
  return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(left, right, 0x88)),
                          _mm512_castps_si512(_mm512_shuffle_ps(left, right, 0xdd)));
}

// Adds the four 128-bit parts of each vector; the results are in the order a, b, c, d.
inline __m512i add_parts(__m512i a, __m512i b, __m512i c, __m512i d) {
  const auto halves = [](__m512i one, __m512i two) {
    return _mm512_add_epi32(_mm512_mask_blend_epi32(0xff00, one, two), _mm512_shuffle_i32x4(one, two, 0x4e));
  };
  const __m512i even = halves(a, c), odd = halves(b, d);
  const __m512i crossed = _mm512_mask_blend_epi32(0x0f0f, even, odd);
  return _mm512_add_epi32(_mm512_mask_blend_epi32(0xf0f0, even, odd), _mm512_shuffle_i32x4(crossed, crossed, 0xb1));
}

// Returns one sum for each of the 16 groups, two per block: lane i is the sum of group i. `of[b]` holds the sums of
// every four codes of block b, or of every eight.
inline __m512i sums_of_groups(const __m512i (&of)[blocks_together]) {
  return add_parts(add_neighbours(of[0], of[1]), add_neighbours(of[2], of[3]), add_neighbours(of[4], of[5]), add_neighbours(of[6], of[7]));
}

#if defined(WEFT_PAIRS)
// Returns what `pairs_start` subtracts, in the lanes of `sums_of_fours`: (a + 128) b for each pair of codes
// (isa/vec_pairs.h), and 8 times each code that is in no pair. In each 128-bit part of the packed codes, codes 0 to 3
// and 8 to 11 are in pairs: even parts hold a, odd parts hold b.
inline __m512i excess_of_fours(__m512i packed) {
  constexpr __mmask16 of_pairs = 0x5555, of_a = 0x0505;
  const __m512i eights = _mm512_maskz_set1_epi32(static_cast<__mmask16>(~of_pairs), w4_middle * 0x01010101);
  const __m512i factors = _mm512_mask_xor_epi32(eights, of_a, packed, _mm512_set1_epi8(-128));
  return _mm512_dpbusd_epi32(_mm512_setzero_si512(), factors, _mm512_mask_shuffle_i32x4(packed, of_pairs, packed, packed, 0xb1));
}
#endif

struct AllGroups {   // a compile-time number of groups
  constexpr operator int() const { return groups_together; }
};

template <typename Count>
inline uint32_t write_codes_of(const float* values, const float* factors, Count groups, RowGroup* into) {
  __m512i sums[blocks_together], magnitudes[blocks_together];
#if defined(WEFT_PAIRS)
  __m512i excess[blocks_together];
#endif
#pragma GCC unroll 8
  for (int block = 0; block < blocks_together; block++) {
    sums[block] = magnitudes[block] = _mm512_setzero_si512();
#if defined(WEFT_PAIRS)
    excess[block] = sums[block];
#endif
    if (block * scale_block_groups >= groups) continue;
    const float* from = values + block * scale_block_inputs;
    const vec::Vec factor = vec::all(factors[block]);
    const auto rounded = [&](int i) { return _mm512_cvtps_epi32(vec::load(from + i * 16) * factor); };
    // Packing works in 128-bit parts, each with four codes of each vector; the permutation puts them in order.
    const __m512i first = _mm512_packs_epi32(rounded(0), rounded(1)), second = _mm512_packs_epi32(rounded(2), rounded(3));
    const __m512i packed = _mm512_packs_epi16(first, second);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i codes = _mm512_permutexvar_epi32(order, packed);
    sums[block] = sums_of_fours(packed);
    magnitudes[block] = magnitudes_of_eights(packed);
#if defined(WEFT_PAIRS)
    excess[block] = excess_of_fours(packed);
#endif
    RowGroup* group = into + block * scale_block_groups * panel_rows;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(group->codes), _mm512_castsi512_si256(codes));
    if (block * scale_block_groups + 1 < groups)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(group[panel_rows].codes), _mm512_extracti64x4_epi64(codes, 1));
  }
  const __m512i sum = sums_of_groups(sums);
  const __m512i for_each_one = _mm512_mullo_epi32(sum, _mm512_set1_epi32(start_of(1) - start_of(0)));
  const __m512i starts = _mm512_add_epi32(for_each_one, _mm512_set1_epi32(start_of(0)));
  const __m512i corrections = _mm512_mullo_epi32(sum, _mm512_set1_epi32(correction_of(1)));
  const __m512i pairs = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  int32_t both[groups_together][2];
  _mm512_storeu_si512(both, _mm512_permutex2var_epi32(starts, pairs, corrections));
  _mm512_storeu_si512(both + 8, _mm512_permutex2var_epi32(starts, _mm512_add_epi32(pairs, _mm512_set1_epi32(8)), corrections));
  asm("" : "+m"(both));   // makes the loop below read `both` from memory, as in quantise_row
#pragma GCC unroll 16
  for (int group = 0; group < groups_together; group++)
    if (group < groups) std::memcpy(&into[group * panel_rows].start, both[group], sizeof both[group]);
#if defined(WEFT_PAIRS)
  int32_t pairs_starts[groups_together];
  const __m512i tops = _mm512_add_epi32(_mm512_slli_epi32(sum, 16), _mm512_set1_epi32(start_of(0)));
  _mm512_storeu_si512(pairs_starts, _mm512_sub_epi32(tops, sums_of_groups(excess)));
  asm("" : "+m"(pairs_starts));
#pragma GCC unroll 16
  for (int group = 0; group < groups_together; group++)
    if (group < groups) into[group * panel_rows].pairs_start = pairs_starts[group];
#endif
  return _mm512_cmpgt_epi32_mask(sums_of_groups(magnitudes), _mm512_set1_epi32(largest_magnitudes));
}

inline uint32_t write_codes(const float* values, const float* factors, int groups, RowGroup* into) {
  if (groups == groups_together) return write_codes_of(values, factors, AllGroups{}, into);
  return write_codes_of(values, factors, groups, into);
}

#else

struct SumsOfCodes {
  int32_t sum, magnitudes;
};

#if defined(WEFT_AVX2)

inline SumsOfCodes round_codes(const float* values, float factor, int8_t* codes) {
  __m256i rounded[4];
  for (int i = 0; i < 4; i++) rounded[i] = _mm256_cvtps_epi32(vec::load(values + 8 * i) * vec::all(factor));
  // Packing works in 128-bit halves; the permutation restores the order.
  const __m256i packed =
      _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3]));
  const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), ordered);
  // Both sums are computed in parallel. The magnitudes are in 64-bit lanes whose upper halves are 0.
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(rounded[0], rounded[1]), _mm256_add_epi32(rounded[2], rounded[3]));
  const __m256i zero = _mm256_set1_epi8(-128), magnitudes = _mm256_sad_epu8(_mm256_xor_si256(packed, zero), zero);
  const __m128i two_sums = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  const __m128i two_magnitudes = _mm_add_epi32(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1));
  const __m128i lanes = _mm_hadd_epi32(two_sums, two_magnitudes), both = _mm_hadd_epi32(lanes, lanes);
  return {_mm_cvtsi128_si32(both), _mm_extract_epi32(both, 1)};
}

#else

inline SumsOfCodes round_codes(const float* values, float factor, int8_t* codes) {
  SumsOfCodes sums = {};
  for (int i = 0; i < group_inputs; i++) {
    // The sum with 1.5 * 2^23 has no fraction bits, so the addition rounds.
    codes[i] = static_cast<int8_t>(static_cast<int32_t>((values[i] * factor + 0x1.8p23f) - 0x1.8p23f));
    sums.sum += codes[i];
    sums.magnitudes += codes[i] < 0 ? -codes[i] : codes[i];
  }
  return sums;
}

#endif

// Does what the comment of `write_codes` above says, one group after another.
inline uint32_t write_codes(const float* values, const float* factors, int groups, RowGroup* into) {
  uint32_t too_large = 0;
  for (int group = 0; group < groups; group++, into += panel_rows) {
    const SumsOfCodes sums = round_codes(values + group * group_inputs, factors[group / scale_block_groups], into->codes);
    into->start = start_of(sums.sum);
    into->correction = correction_of(sums.sum);
    too_large |= static_cast<uint32_t>(sums.magnitudes > largest_magnitudes) << group;
  }
  return too_large;
}

#endif

}  // namespace quantising
}  // namespace
}  // namespace weft::WEFT_ISA
