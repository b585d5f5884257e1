// Float vectors, as wide as the registers of the instruction set. The kernels for rows and attention are written with
// them.
//
// The operators + - * / are the compiler's own. The last n elements of a row are loaded into n lanes, with zeros in the
// other lanes. They go through the same operations as a full vector. So the bits of an element do not depend on its
// position in a row.
//
// All instruction sets with fused multiply-add (AVX2, AVX-512) give the same bits, so a model generates the same text
// on each. In a sum over a row, element i goes to lane i % 16. Then lanes are added at distances of 8, 2, 1 and 4. With
// 8 lanes, such a sum takes two vectors. The portable code has fewer lanes and rounds every product before it is added,
// so its last bits differ.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/half.h"
#include "kernels/kernels.h"

#if defined(WEFT_AVX512) || defined(WEFT_AVX2)
#include <immintrin.h>
#endif

namespace weft::WEFT_ISA {
namespace {
namespace vec {

#if defined(WEFT_AVX512)

constexpr int lanes = 16;
constexpr int sum_parts = 1;          // vectors that hold the 16 lanes of a sum
constexpr bool reads_bytes = true;   // true: converting bytes to floats while loading costs little more than loading floats
using Vec = __m512;

inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
// Loads n floats (at most lanes / 2), each into two lanes: a a b b ...
inline Vec load_twice(const float* p, int64_t n) {
  const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_ps(twice, _mm512_maskz_loadu_ps(first_lanes(n), p));
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
inline void store(float* p, Vec a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }

// Keeps `a` in a register. Otherwise the compiler may load it again for each use, and the kernels are limited by loads.
inline Vec in_register(Vec a) {
  asm("" : "+v"(a));
  return a;
}
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
// One float for all lanes. The multiply instruction reads it from memory. Without the assembly below, the compiler
// loads it into a register first if several instructions use it. Such a load costs up to half a multiplication.
struct Repeated {
  const float* at;
};
constexpr bool repeats_from_memory = true;
inline Repeated repeated(const float* p) { return {p}; }
inline Vec fma(Repeated a, Vec b, Vec c) {
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(b), "m"(*a.at));
  return c;
}
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }                // b if either is NaN; the same for min
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power_of_two(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }   // a * 2^n for an integer n
// The bits of each lane, shifted left by 23: the lowest bits become the exponent bits of a float.
inline Vec shifted_bits(Vec a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23)); }
inline Vec magnitude(Vec a) { return _mm512_abs_ps(a); }
inline Vec with_sign_of(Vec a, Vec sign) { return _mm512_or_ps(magnitude(a), _mm512_and_ps(sign, all(-0.0f))); }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
inline Vec swap_neighbours(Vec a) { return _mm512_permute_ps(a, 0xb1); }
inline Vec negate_even(Vec a) { return _mm512_xor_ps(a, _mm512_castsi512_ps(_mm512_set1_epi64(0x80000000))); }

// Adds lanes at a distance of 8, 2 or 1, in a and in b. One vector holds the results of both. At distance 8, lane 0 is
// a0 + a8 and lane 8 is b8 + b0. One operand is a blend and not a second shuffle, because blend units are less busy.
inline Vec add_at_8(Vec a, Vec b) { return _mm512_mask_blend_ps(0xff00, a, b) + _mm512_shuffle_f32x4(a, b, 0x4e); }
inline Vec add_at_2(Vec a, Vec b) { return _mm512_mask_blend_ps(0xcccc, a, b) + _mm512_shuffle_ps(a, b, 0x4e); }
inline Vec add_at_1(Vec a, Vec b) {
  return _mm512_mask_blend_ps(0xaaaa, a, b) + swap_neighbours(_mm512_mask_blend_ps(0x5555, a, b));
}

// The sum of the lanes of each of eight vectors: four sums to `out`, four to `second_out`.
inline void sum8(const Vec* a, float* out, float* second_out) {
  const Vec even = add_at_2(add_at_8(a[0], a[4]), add_at_8(a[2], a[6])), odd = add_at_2(add_at_8(a[1], a[5]), add_at_8(a[3], a[7]));
  const Vec fours = add_at_1(even, odd);   // two partial sums of each vector: a[0] .. a[3] in the lower half, a[4] .. a[7] in the upper
  const Vec sums = fours + _mm512_shuffle_f32x4(fours, fours, 0xb1);
  _mm_storeu_ps(out, _mm512_castps512_ps128(sums));
  _mm_storeu_ps(second_out, _mm512_extractf32x4_ps(sums, 2));
}
inline void sum4(const Vec* a, float* out) {
  const Vec quarters = add_at_2(add_at_8(a[0], a[2]), add_at_8(a[1], a[3])), halves = quarters + swap_neighbours(quarters);
  // Every sum occurs twice: the sums of a[0] and a[1] in the lower half, the sums of a[2] and a[3] in the upper half.
  const Vec sums = halves + _mm512_shuffle_f32x4(halves, halves, 0xb1);
  _mm_storeu_ps(out, _mm_shuffle_ps(_mm512_castps512_ps128(sums), _mm512_extractf32x4_ps(sums, 2), 0x88));
}

// Loads codes of the store (kernels.h). Pairs holds two 4-bit codes in each lane. A scale byte of 255 is NaN.
using Pairs = __m512i;
inline Vec load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
inline Pairs load_pairs(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// A table lookup by the low four bits is faster than masking and converting.
inline Vec low_codes(Pairs a) {
  return _mm512_permutexvar_ps(a, _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
}
inline Vec high_codes(Pairs a) { return low_codes(_mm512_srli_epi32(a, 4)); }
inline Vec load_scales(const uint8_t* p) {
  const __m512i bytes = load_pairs(p), scales = _mm512_slli_epi32(_mm512_add_epi32(bytes, _mm512_set1_epi32(lowest_scale)), scale_shift);
  return _mm512_mask_blend_ps(_mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(255)), _mm512_castsi512_ps(scales), all(NAN));
}

#elif defined(WEFT_AVX2)

constexpr int lanes = 8;
constexpr int sum_parts = 2;
constexpr bool reads_bytes = true;
using Vec = __m256;

inline __m256i first_lanes(int64_t n) {
  static const int32_t slide[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(slide + 8 - n));
}

inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const float* p, int64_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
// Loads n floats (at most lanes / 2), each into two lanes: a a b b ...
inline Vec load_twice(const float* p, int64_t n) {
  return _mm256_permutevar8x32_ps(load(p, n), _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0));
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
inline void store(float* p, Vec a, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), a); }

// Keeps `a` in a register. Otherwise the compiler may load it again for each use, and the kernels are limited by loads.
inline Vec in_register(Vec a) {
  asm("" : "+x"(a));
  return a;
}
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }    // a * b + c
using Repeated = Vec;   // one float for all lanes
constexpr bool repeats_from_memory = false;
inline Repeated repeated(const float* p) { return in_register(all(*p)); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }                // b if either is NaN; the same for min
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Returns a * 2^n for an integer n in -250 .. 250. There are two multiplications, because 2^n alone may be outside the
// range of floats.
inline Vec times_power_of_two(Vec a, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), one = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, one), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), one), 23);
  return a * _mm256_castsi256_ps(first) * _mm256_castsi256_ps(second);
}
// The bits of each lane, shifted left by 23: the lowest bits become the exponent bits of a float.
inline Vec shifted_bits(Vec a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }
inline Vec magnitude(Vec a) { return _mm256_andnot_ps(all(-0.0f), a); }
inline Vec with_sign_of(Vec a, Vec sign) { return _mm256_or_ps(magnitude(a), _mm256_and_ps(sign, all(-0.0f))); }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline Vec swap_neighbours(Vec a) { return _mm256_permute_ps(a, 0xb1); }
inline Vec negate_even(Vec a) { return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi64x(0x80000000))); }

// Adds lanes at a distance of 2 or 1, in a and in b. One vector holds the results of both. At distance 2, lane 0 is
// a0 + a2 and lane 2 is b2 + b0. One operand is a blend and not a second shuffle, because blend units are less busy.
inline Vec add_at_2(Vec a, Vec b) { return _mm256_blend_ps(a, b, 0xcc) + _mm256_shuffle_ps(a, b, 0x4e); }
inline Vec add_at_1(Vec a, Vec b) { return _mm256_blend_ps(a, b, 0xaa) + swap_neighbours(_mm256_blend_ps(a, b, 0x55)); }

// The sum of the lanes of each of four vectors. A sum has 16 lanes, in two vectors. The caller has already added the
// two, so only lanes at distances of 4, 2 and 1 are added here.
inline void sum4(const Vec* a, float* out) {
  const Vec halves = add_at_1(add_at_2(a[0], a[2]), add_at_2(a[1], a[3]));
  _mm_storeu_ps(out, _mm256_castps256_ps128(halves) + _mm256_extractf128_ps(halves, 1));
}
inline void sum8(const Vec* a, float* out, float* second_out) {
  sum4(a, out);
  sum4(a + 4, second_out);
}

// Loads codes of the store (kernels.h). Pairs holds two 4-bit codes in each lane. A scale byte of 255 is NaN.
using Pairs = __m256i;
inline Vec load(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
inline Pairs load_pairs(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Vec low_codes(Pairs a) { return _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(15))); }
inline Vec high_codes(Pairs a) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(a, 4)); }
inline Vec load_scales(const uint8_t* p) {
  const __m256i bytes = load_pairs(p), scales = _mm256_slli_epi32(_mm256_add_epi32(bytes, _mm256_set1_epi32(lowest_scale)), scale_shift);
  const __m256i is_nan = _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(255));
  return _mm256_blendv_ps(_mm256_castsi256_ps(scales), all(NAN), _mm256_castsi256_ps(is_nan));
}

#else

// Four floats in a compiler vector: processors with 128-bit vectors (NEON, SSE2) use them, others run scalar code.
constexpr int lanes = 4;
constexpr int sum_parts = 1;
constexpr bool reads_bytes = false;
using Vec = float __attribute__((vector_size(16)));
using Bits = int32_t __attribute__((vector_size(16)));
using Unsigned = uint32_t __attribute__((vector_size(16)));

inline Vec all(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p, int64_t n) {
  Vec a = {};
  std::memcpy(&a, p, static_cast<size_t>(n) * 4);
  return a;
}
inline Vec load(const float* p) { return load(p, lanes); }
inline Vec load(const uint16_t* p) {
  Vec a = {};
  for (int i = 0; i < lanes; i++) a[i] = half_to_float(p[i]);
  return a;
}
// Loads n floats (at most lanes / 2), each into two lanes: a a b b ...
inline Vec load_twice(const float* p, int64_t n) {
  const float a = n > 0 ? p[0] : 0.0f, b = n > 1 ? p[1] : 0.0f;
  return Vec{a, a, b, b};
}
inline void store(float* p, Vec a, int64_t n) { std::memcpy(p, &a, static_cast<size_t>(n) * 4); }
inline void store(float* p, Vec a) { store(p, a, lanes); }

inline Vec in_register(Vec a) { return a; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }   // rounded twice: the processor may lack a fused instruction
using Repeated = Vec;   // one float for all lanes
constexpr bool repeats_from_memory = false;
inline Repeated repeated(const float* p) { return all(*p); }
inline Vec fnma(Vec a, Vec b, Vec c) { return c - a * b; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }   // b if either is NaN; the same for min
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
// Rounds to the nearest integer, for magnitudes below 2^22: the sum with 1.5 * 2^23 has no fraction bits.
inline Vec round(Vec a) { return a + all(0x1.8p23f) - all(0x1.8p23f); }
// Returns a * 2^n for an integer n in -250 .. 250. There are two multiplications, because 2^n alone may be outside the
// range of floats.
inline Vec times_power_of_two(Vec a, Vec n) {
  const Vec shifted = n + all(0x1.8p23f);
  Bits whole;
  std::memcpy(&whole, &shifted, 16);
  whole = (whole & 0x3fffff) - ((whole & 0x200000) << 1);
  const Bits half = whole >> 1;
  const Unsigned first = (Unsigned)(half + 127) << 23, second = (Unsigned)(whole - half + 127) << 23;
  Vec left, right;
  std::memcpy(&left, &first, 16);
  std::memcpy(&right, &second, 16);
  return a * left * right;
}
// The bits of each lane, shifted left by 23: the lowest bits become the exponent bits of a float.
inline Vec shifted_bits(Vec a) {
  Unsigned bits;
  std::memcpy(&bits, &a, 16);
  bits <<= 23;
  std::memcpy(&a, &bits, 16);
  return a;
}
inline Vec magnitude(Vec a) {
  for (int i = 0; i < lanes; i++) a[i] = std::fabs(a[i]);
  return a;
}
inline Vec with_sign_of(Vec a, Vec sign) {
  for (int i = 0; i < lanes; i++) a[i] = std::copysign(a[i], sign[i]);
  return a;
}
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return a < b ? yes : no; }
inline Vec swap_neighbours(Vec a) { return Vec{a[1], a[0], a[3], a[2]}; }
inline Vec negate_even(Vec a) { return Vec{-a[0], a[1], -a[2], a[3]}; }

// The sum of the lanes of each of four vectors.
inline void sum4(const Vec* a, float* out) {
  for (int k = 0; k < 4; k++) out[k] = (a[k][0] + a[k][2]) + (a[k][1] + a[k][3]);
}
inline void sum8(const Vec* a, float* out, float* second_out) {
  sum4(a, out);
  sum4(a + 4, second_out);
}

// Loads codes of the store (kernels.h). Pairs holds two 4-bit codes in each lane. A scale byte of 255 is NaN.
struct Pairs {
  uint8_t bytes[lanes];
};
inline Vec load(const int8_t* p) {
  Vec codes = {};
  for (int i = 0; i < lanes; i++) codes[i] = static_cast<float>(p[i]);
  return codes;
}
inline Pairs load_pairs(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline Vec low_codes(Pairs a) {
  Vec codes = {};
  for (int i = 0; i < lanes; i++) codes[i] = static_cast<float>(a.bytes[i] & 15);
  return codes;
}
inline Vec high_codes(Pairs a) {
  Vec codes = {};
  for (int i = 0; i < lanes; i++) codes[i] = static_cast<float>(a.bytes[i] >> 4);
  return codes;
}
inline Vec load_scales(const uint8_t* p) {
  Vec scales = {};
  for (int i = 0; i < lanes; i++) scales[i] = p[i] == 255 ? NAN : float_of_bits(static_cast<uint32_t>(p[i] + lowest_scale) << scale_shift);
  return scales;
}

#endif

// The count of all lanes, known at compile time. With this count, loads and stores need no mask.
struct Full {
  operator int64_t() const { return lanes; }
};
inline Vec load(const float* p, Full) { return load(p); }
inline void store(float* p, Vec a, Full) { store(p, a); }

// Calls each(i, n) for every vector of a row: n lanes from element i on. n is Full, except for an incomplete last
// vector.
template <typename Each>
inline void for_each(int64_t columns, Each each) {
  int64_t i = 0;
  for (; i + lanes <= columns; i += lanes) each(i, Full{});
  if (i < columns) each(i, columns - i);
}

// Adds the vectors that together hold the lanes of one sum.
inline Vec joined(const Vec (&parts)[sum_parts]) {
  Vec sum = parts[0];
#pragma GCC unroll 2
  for (int part = 1; part < sum_parts; part++) sum = sum + parts[part];
  return sum;
}

// Adds the lanes of one sum, in the order that the top of this file defines.
inline float sum(const Vec (&parts)[sum_parts]) {
  const Vec one = joined(parts);
#if defined(WEFT_AVX512) || defined(WEFT_AVX2)
#if defined(WEFT_AVX512)
  const __m256 eight = _mm512_castps512_ps256(one) + _mm512_extractf32x8_ps(one, 1);
#else
  const __m256 eight = one;
#endif
  const __m256 four = eight + _mm256_permute_ps(eight, 0x4e), two = four + _mm256_permute_ps(four, 0xb1);
  return _mm_cvtss_f32(_mm256_castps256_ps128(two)) + _mm_cvtss_f32(_mm256_extractf128_ps(two, 1));
#else
  const Vec copies[4] = {one, one, one, one};
  float sums[4];
  sum4(copies, sums);
  return sums[0];
#endif
}

// The total of four parallel sums.
inline float sum_of_four(const Vec (&sums)[4 * sum_parts]) {
  Vec joined[sum_parts];
  for (int part = 0; part < sum_parts; part++)
    joined[part] = (sums[part] + sums[sum_parts + part]) + (sums[2 * sum_parts + part] + sums[3 * sum_parts + part]);
  return sum(joined);
}

// Returns the sum of a row. each(sum, i, n) adds n elements from i on to the lanes of `sum`. There are four parallel sums,
// because with one sum every addition would wait for the previous one. Which elements go to which sum depends only on
// `columns`.
template <typename Each>
inline float sum_row(int64_t columns, Each each) {
  Vec sums[4 * sum_parts];
  for (Vec& sum : sums) sum = all(0.0f);
  int64_t i = 0;
  for (; i + 4 * sum_parts * lanes <= columns; i += 4 * sum_parts * lanes) {
#pragma GCC unroll 8
    for (int k = 0; k < 4 * sum_parts; k++) sums[k] = each(sums[k], i + k * lanes, Full{});
  }
  // The remaining elements go to the first sum.
  for_each(columns - i, [&](int64_t k, auto n) {
    Vec& sum = sums[k / lanes % sum_parts];
    sum = each(sum, i + k, n);
  });
  return sum_of_four(sums);
}

inline float first(Vec a) {
  float values[lanes];
  store(values, a);
  return values[0];
}

// Returns the largest lane. It may ignore NaN lanes: callers check for NaN elsewhere.
inline float largest(Vec a) {
#if defined(WEFT_AVX512)
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
#elif defined(WEFT_AVX2)
  const __m256 half = a;
#endif
#if defined(WEFT_AVX512) || defined(WEFT_AVX2)
  __m128 best = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  best = _mm_max_ps(best, _mm_movehl_ps(best, best));
  return _mm_cvtss_f32(_mm_max_ss(best, _mm_movehdup_ps(best)));
#else
  float best = a[0];
  for (int i = 1; i < lanes; i++) best = a[i] > best ? a[i] : best;
  return best;
#endif
}

// Returns a vector whose lane i holds first + i.
inline Vec counted_from(int64_t first) {
  static const float steps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return all(static_cast<float>(first)) + load(steps);
}

// Calls use(0), use(1) ... Unlike in a loop, the index is a compile-time constant, so arrays indexed by it stay in
// registers. The compiler may unroll a loop too late, after it has placed the arrays in memory.
template <typename Use, int... i>
__attribute__((always_inline)) inline void each_of(std::integer_sequence<int, i...>, Use&& use) {
  (use(std::integral_constant<int, i>{}), ...);
}
template <int count, typename Use>
__attribute__((always_inline)) inline void each(Use&& use) {
  each_of(std::make_integer_sequence<int, count>{}, use);
}

}  // namespace vec
}  // namespace
}  // namespace weft::WEFT_ISA
