// Rows on their way into products: made of what is there, and turned to bytes.
#include "vec_curves.h"

namespace weft::WEFT_ISA {
namespace {
namespace quantising {

// So many blocks go through each step together: the largest of many lanes, sums of many codes and quotients take hardly longer for eight
// of them than for one.
constexpr int blocks_together = 8;
constexpr int groups_together = blocks_together * block_groups;
constexpr int block_vectors = block_inputs / vec::lanes;

// The largest magnitude of a block, not finite where one of the values is not: magnitudes are compared as whole numbers, where infinity
// comes after all numbers and NaN after infinity. Four lanes are kept of it, the last step is made for several blocks at once.
constexpr int kept_lanes = 4;

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
    const __m128i kept = _mm_max_epi32(_mm256_castsi256_si128(halves()), _mm256_extracti128_si256(halves(), 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), kept);
  }
};

// A number for each of the blocks.
using Eight = __m256;

// The larger ones of neighbours: of two of a and two of b, and so in both halves.
inline Eight larger_of_two(Eight a, Eight b) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                                              _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd))));
}

inline Eight joined(const float* kept) {
  // In fours, as they were written: to read what two others just wrote takes long.
  const auto two_blocks = [&](int i) {
    return _mm256_set_m128(_mm_loadu_ps(kept + (i + blocks_together / 2) * kept_lanes), _mm_loadu_ps(kept + i * kept_lanes));
  };
  return larger_of_two(larger_of_two(two_blocks(0), two_blocks(1)), larger_of_two(two_blocks(2), two_blocks(3)));
}

inline Eight with(Eight all, int block, const float* kept) {
  const Eight twice = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(kept)), pairs = larger_of_two(twice, twice);
  const __m256i is_it = _mm256_cmpeq_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(block));
  return _mm256_blendv_ps(all, larger_of_two(pairs, pairs), _mm256_castsi256_ps(is_it));
}

// A bit for each that is larger than the bound.
inline uint32_t above(Eight all, float bound) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(all, _mm256_set1_ps(bound), _CMP_GT_OQ)));
}

// A bit for each value of a block of a larger magnitude than the bound.
inline uint64_t larger(const float* values, float bound) {
  uint64_t bits = 0;
#pragma GCC unroll 8
  for (int i = 0; i < block_inputs; i += vec::lanes) {
    const vec::Vec magnitudes = vec::magnitude(vec::load(values + i));
#if defined(WEFT_AVX512)
    bits |= uint64_t{_mm512_cmp_ps_mask(magnitudes, vec::all(bound), _CMP_GT_OQ)} << i;
#else
    bits |= uint64_t{static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(magnitudes, vec::all(bound), _CMP_GT_OQ)))} << i;
#endif
  }
  return bits;
}

// What values are multiplied with, and codes. Returns a bit for each block without codes: there is nothing to speak of in it, or something
// that no code can stand for.
inline uint32_t find_scales(Eight largest, float* factors, float* scales) {
  const Eight top = _mm256_set1_ps(static_cast<float>(largest_code)), infinite = _mm256_set1_ps(INFINITY);
  const Eight finite = _mm256_cmp_ps(largest, infinite, _CMP_LT_OQ);
  const Eight coded = _mm256_and_ps(finite, _mm256_cmp_ps(largest, _mm256_set1_ps(0x1p-100f), _CMP_GE_OQ));
  _mm256_storeu_ps(factors, _mm256_and_ps(coded, top / largest));
  _mm256_storeu_ps(scales, _mm256_blendv_ps(_mm256_set1_ps(NAN), _mm256_and_ps(coded, largest / top), finite));   // the result must show it
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

struct Eight {
  float of[blocks_together];
};

inline Eight with(Eight all, int block, const float* kept) {
  uint32_t largest = 0;
  for (int i = 0; i < kept_lanes; i++) largest = bits_of_float(kept[i]) > largest ? bits_of_float(kept[i]) : largest;
  all.of[block] = float_of_bits(largest);
  return all;
}

inline Eight joined(const float* kept) {
  Eight all;
  for (int block = 0; block < blocks_together; block++) all = with(all, block, kept + block * kept_lanes);
  return all;
}

inline uint32_t above(Eight all, float bound) {
  uint32_t bits = 0;
  for (int block = 0; block < blocks_together; block++) bits |= static_cast<uint32_t>(all.of[block] > bound) << block;
  return bits;
}

inline uint64_t larger(const float* values, float bound) {
  uint64_t bits = 0;
  for (int i = 0; i < block_inputs; i++) bits |= uint64_t{std::fabs(values[i]) > bound} << i;
  return bits;
}

inline uint32_t find_scales(Eight largest, float* factors, float* scales) {
  uint32_t bare = 0;
  for (int block = 0; block < blocks_together; block++) {
    const float size = largest.of[block];
    const bool coded = size >= 0x1p-100f && size < INFINITY;
    factors[block] = coded ? static_cast<float>(largest_code) / size : 0.0f;
    scales[block] = coded ? size / static_cast<float>(largest_code) : size < INFINITY ? 0.0f : NAN;   // the result must show it
    bare |= static_cast<uint32_t>(!coded) << block;
  }
  return bare;
}

#endif

constexpr int32_t start_of(int32_t sum) { return sum * ((1 << 16) - w4_middle) + w4_lift; }
constexpr int32_t correction_of(int32_t sum) { return -128 * sum; }

// The codes of up to so many groups, which lie one panel's rows apart, and what goes with them. Products of values and factors are rounded
// to nearest, ties to even. Returns a bit for each group whose magnitudes are too much together.
#if defined(WEFT_AVX512)

// Sums of four codes each.
inline __m512i sums_of_fours(__m512i codes) {
  const __m512i ones = _mm512_set1_epi8(1);
#if defined(WEFT_VNNI)
  return _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, codes);
#else
  return _mm512_madd_epi16(_mm512_maddubs_epi16(ones, codes), _mm512_set1_epi16(1));
#endif
}

// Sums of the magnitudes of eight codes each, 64 bits wide.
inline __m512i magnitudes_of_eights(__m512i codes) {
  const __m512i zero = _mm512_set1_epi8(-128);
  return _mm512_sad_epu8(_mm512_xor_si512(codes, zero), zero);
}

// Lanes of neighbours added: of a and of b two sums in each part of four.
inline __m512i add_neighbours(__m512i a, __m512i b) {
  const __m512 left = _mm512_castsi512_ps(a), right = _mm512_castsi512_ps(b);
  return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(left, right, 0x88)),
                          _mm512_castps_si512(_mm512_shuffle_ps(left, right, 0xdd)));
}

// The four parts of each vector added, one result after the other.
inline __m512i add_parts(__m512i a, __m512i b, __m512i c, __m512i d) {
  const auto halves = [](__m512i one, __m512i two) {
    return _mm512_add_epi32(_mm512_mask_blend_epi32(0xff00, one, two), _mm512_shuffle_i32x4(one, two, 0x4e));
  };
  const __m512i even = halves(a, c), odd = halves(b, d);
  const __m512i crossed = _mm512_mask_blend_epi32(0x0f0f, even, odd);
  return _mm512_add_epi32(_mm512_mask_blend_epi32(0xf0f0, even, odd), _mm512_shuffle_i32x4(crossed, crossed, 0xb1));
}

// Of eight blocks, one after the other.
inline __m512i sums_of_groups(const __m512i (&of)[blocks_together]) {
  return add_parts(add_neighbours(of[0], of[1]), add_neighbours(of[2], of[3]), add_neighbours(of[4], of[5]), add_neighbours(of[6], of[7]));
}

#if defined(WEFT_PAIRS)
// What the products of a block in pairs, and the others, have too much (linear_pairs.inl): sums that add up to those of its two groups as
// the ones of `sums_of_fours` do. Packed codes of inputs 0 to 15 of a group are the first of two fours, in each part the next
// four; parts take turns at being a and b.
inline __m512i excess_of_fours(__m512i packed) {
  constexpr __mmask16 of_pairs = 0x5555, of_a = 0x0505;
  const __m512i eights = _mm512_maskz_set1_epi32(static_cast<__mmask16>(~of_pairs), w4_middle * 0x01010101);
  const __m512i factors = _mm512_mask_xor_epi32(eights, of_a, packed, _mm512_set1_epi8(-128));
  return _mm512_dpbusd_epi32(_mm512_setzero_si512(), factors, _mm512_mask_shuffle_i32x4(packed, of_pairs, packed, packed, 0xb1));
}
#endif

struct AllGroups {   // a number of groups that the compiler knows
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
    if (block * block_groups >= groups) continue;
    const float* from = values + block * block_inputs;
    const vec::Vec factor = vec::all(factors[block]);
    const auto rounded = [&](int i) { return _mm512_cvtps_epi32(vec::load(from + i * 16) * factor); };
    // Packing works in parts of 128 bits, which then hold four codes of each vector; the permutation puts them in order.
    const __m512i first = _mm512_packs_epi32(rounded(0), rounded(1)), second = _mm512_packs_epi32(rounded(2), rounded(3));
    const __m512i packed = _mm512_packs_epi16(first, second);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i codes = _mm512_permutexvar_epi32(order, packed);
    sums[block] = sums_of_fours(packed);
    magnitudes[block] = magnitudes_of_eights(packed);
#if defined(WEFT_PAIRS)
    excess[block] = excess_of_fours(packed);
#endif
    RowGroup* group = into + block * block_groups * panel_rows;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(group->codes), _mm512_castsi512_si256(codes));
    if (block * block_groups + 1 < groups)
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
  asm("" : "+m"(both));   // as with the scales in quantise_row
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
  // Packing works in halves of 128 bits; the permutation puts their fours back in order.
  const __m256i packed =
      _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3]));
  const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), ordered);
  // Both sums side by side: magnitudes are 64 bits wide, of which only the lowest are used.
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
    // In a float of this size the last bit is 1, so the addition rounds.
    codes[i] = static_cast<int8_t>(static_cast<int32_t>((values[i] * factor + 0x1.8p23f) - 0x1.8p23f));
    sums.sum += codes[i];
    sums.magnitudes += codes[i] < 0 ? -codes[i] : codes[i];
  }
  return sums;
}

#endif

inline uint32_t write_codes(const float* values, const float* factors, int groups, RowGroup* into) {
  uint32_t too_large = 0;
  for (int group = 0; group < groups; group++, into += panel_rows) {
    const SumsOfCodes sums = round_codes(values + group * group_inputs, factors[group / block_groups], into->codes);
    into->start = start_of(sums.sum);
    into->correction = correction_of(sums.sum);
    too_large |= static_cast<uint32_t>(sums.magnitudes > largest_magnitudes) << group;
  }
  return too_large;
}

#endif

// What is seen of a row while it is written: the sum of all magnitudes, as sum_row would make it, and the largest of a block.
struct Seen {
  static constexpr int num_sums = 4 * vec::sum_parts;
  vec::Vec sums[num_sums];
  Largest largest;

  __attribute__((always_inline)) void add(vec::Vec values, int64_t sum) {
    const vec::Vec magnitudes = vec::magnitude(values);
    sums[sum] = sums[sum] + magnitudes;
    largest.add(magnitudes);
  }
};

// The last block of a row, where it is not whole.
template <typename Make>
inline void write_last_values(int64_t first, int64_t columns, Make& make, float* out, Seen& seen) {
  const int64_t side_by_side = (columns - first) / (Seen::num_sums * vec::lanes) * Seen::num_sums;
  for (int64_t k = 0; k < block_vectors; k++) {
    const int64_t at = first + k * vec::lanes, left = columns - at;
    vec::Vec values[1] = {vec::all(0.0f)};
    if (left > 0) make(at, left < vec::lanes ? left : vec::lanes, values);
    seen.add(values[0], k < side_by_side ? k % Seen::num_sums : (k - side_by_side) % vec::sum_parts);
    vec::store(out + at, values[0]);
  }
}

// Writes a row, with zeros up to the end of its last block, and of every block the lanes of its largest magnitude; returns the sum of the
// magnitudes.
template <typename Make>
inline float write_values(int64_t columns, Make make, float* out, float* kept) {
  constexpr int some = vec::chains_at_once;
  Seen seen;
  for (vec::Vec& sum : seen.sums) sum = vec::all(0.0f);
  int64_t i = 0;
  for (; i + block_inputs <= columns; i += block_inputs, kept += kept_lanes) {
    seen.largest = Largest();
#pragma GCC unroll 8
    for (int first = 0; first < block_vectors; first += some) {
      vec::Vec values[some];
      make(i + first * vec::lanes, vec::Full{}, values);
#pragma GCC unroll 4
      for (int k = 0; k < some; k++) {
        seen.add(values[k], (first + k) % Seen::num_sums);
        vec::store(out + i + (first + k) * vec::lanes, values[k]);
      }
    }
    seen.largest.store(kept);
  }
  if (i == columns) return vec::sum_of_four(seen.sums);
  Seen last = seen;   // a copy, since what others may write to does not stay in registers
  last.largest = Largest();
  write_last_values(i, columns, make, out, last);
  last.largest.store(kept);
  return vec::sum_of_four(last.sums);
}

// Leaves zeros where the outliers of a block were, and the lanes of its new largest magnitude; returns how many outliers there are.
inline int32_t take_outliers(float* values, float bound, uint32_t first_input, Outlier* out, float* kept) {
  int32_t count = 0;
  for (uint64_t left = larger(values, bound); left != 0; left &= left - 1) {
    const auto i = static_cast<uint32_t>(__builtin_ctzll(left));
    out[count++] = Outlier{first_input + i, values[i]};
  }
  Largest largest;
  for (int i = 0; i < block_inputs; i += vec::lanes) {   // whole vectors: to read one of which a part was just written takes long
    const vec::Vec value = vec::load(values + i), magnitude = vec::magnitude(value);
    const vec::Vec is_left = vec::where_less(vec::all(bound), magnitude, vec::all(0.0f), value);
    largest.add(vec::magnitude(is_left));
    vec::store(values + i, is_left);
  }
  largest.store(kept);
  return count;
}

// How many of the blocks, or groups, from the first on go together.
inline int taken_together(int64_t all, int64_t first, int most) { return static_cast<int>(all - first < most ? all - first : most); }

}  // namespace quantising

void quantise_row(const RowInput& input, int64_t columns, float* scratch, const QuantisedRows& out, int64_t out_row) {
  using namespace quantising;
  float *values = scratch, *kept = scratch + out.blocks * block_inputs, sum = 0.0f;
  with_values(input, columns, [&](auto make) { sum = write_values(columns, make, values, kept); });
  // The magnitude that all outliers are above: infinite or NaN where a value of the row is, and then there are none.
  // Among the smallest numbers there are, the mean is rounded so coarsely that most values could be above it; there are none there either.
  float bound = out.outliers ? sum / static_cast<float>(columns) * static_cast<float>(outlier_ratio) : NAN;
  if (bound < 0x1p-100f) bound = 0x1p-100f;
  Outlier* outliers = out.outliers ? out.outliers + out_row * out.outlier_room : nullptr;
  int32_t taken = 0;
  // First the factors of all blocks, then all codes: each of the two waits for what comes before it once, and not for every eight blocks.
  for (int64_t first = 0; first < out.blocks; first += blocks_together) {
    const int blocks = taken_together(out.blocks, first, blocks_together);
    const uint32_t all = (1u << blocks) - 1;
    float *of_blocks = kept + first * kept_lanes, *factors = of_blocks, scales[blocks_together];   // the factors take the maxima's place
    Eight largest = joined(of_blocks);
    for (uint32_t left = above(largest, bound) & all; left != 0; left &= left - 1) {
      const int64_t block = first + __builtin_ctz(left);
      float of_rest[kept_lanes];
      taken += take_outliers(values + block * block_inputs, bound, static_cast<uint32_t>(block * block_inputs), outliers + taken, of_rest);
      largest = with(largest, __builtin_ctz(left), of_rest);
    }
    for (uint32_t left = find_scales(largest, factors, scales) & all; left != 0; left &= left - 1)
      std::memset(values + (first + __builtin_ctz(left)) * block_inputs, 0, block_inputs * sizeof(float));
    asm("" : "+m"(scales));   // read from memory: to take single lanes out of a register costs more
    for (int block = 0; block < blocks; block++) *out.scale_of(out_row, first + block) = scales[block];
  }
  for (int64_t first = 0; first < out.groups; first += groups_together) {
    const int64_t first_block = first / block_groups;
    const int groups = taken_together(out.groups, first, groups_together);
    float* factors = kept + first_block * kept_lanes;
    const auto write = [&] { return write_codes(values + first * group_inputs, factors, groups, out.group_of(out_row, first)); };
    if (const uint32_t too_large = write()) {
      for (int block = 0; block < blocks_together; block++) {
        if ((too_large >> block * block_groups & ((1u << block_groups) - 1)) == 0) continue;
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
