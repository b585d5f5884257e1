// Vectors of 16-bit codes, and of the 32-bit sums of their products. A lane holds a pair of codes or one sum. The KV
// cache packs four codes into a unit of three elements: see kernels.h.
#pragma once

#include "isa/vec.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace weft::WEFT_ISA {
namespace {
namespace vec {

using Elements = uint16_t __attribute__((vector_size(16)));

#if defined(WEFT_AVX512)

using Whole = __m512i;
using CodePairs = __m512i;

inline Whole no_sum() { return _mm512_setzero_si512(); }
inline CodePairs load_elements(const uint16_t* p, int64_t n) { return _mm512_maskz_loadu_epi32(first_lanes(n), p); }
inline CodePairs load_elements(const uint16_t* p, Full) { return _mm512_loadu_si512(p); }
// Unpacks the fourth code of a unit.
inline CodePairs fourth_code(CodePairs a, CodePairs b, CodePairs c) {
  constexpr int first_where_set = 0xca;   // truth table: takes the second operand where the first has a 1 bit, else the third
  const CodePairs upper = _mm512_ternarylogic_epi32(_mm512_set1_epi16(static_cast<int16_t>(0xf000)), _mm512_slli_epi16(a, 12),
                                                    _mm512_slli_epi16(b, 8), first_where_set);
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(static_cast<int16_t>(0xff00)), upper, _mm512_slli_epi16(c, 4), first_where_set);
}
inline CodePairs in_register(CodePairs a) {
  asm("" : "+v"(a));
  return a;
}
inline Vec to_floats(Whole a) { return _mm512_cvtepi32_ps(a); }
// Rounds ties to even; the result of a value that is not finite is undefined.
inline void store_codes(int16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)));
}
// Stores the first n of 16 elements to every second element of p. The elements between are not written: another thread
// may write them.
inline void store_every_second(uint16_t* p, const uint16_t* from, int64_t n) {
  const __m512i apart = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  _mm512_mask_storeu_epi16(p, static_cast<__mmask32>(0x55555555ull & ((1ull << 2 * n) - 1)), apart);
}
inline Vec load_upper_halves(const uint16_t* p) {
  const __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
}
// Compares bits as unsigned integers. Of two magnitudes it returns the larger one; if one is NaN, it returns the NaN.
inline Vec larger_bits(Vec a, Vec b) { return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b))); }
inline uint32_t largest_bits(Vec a) { return _mm512_reduce_max_epu32(_mm512_castps_si512(a)); }

#if defined(WEFT_VNNI)
// One pair for all lanes. The multiply instruction reads it from memory: see `Repeated`.
struct RepeatedPair {
  const int16_t* at;
};
inline RepeatedPair repeated_pair(const int16_t* p) { return {p}; }
inline Whole add_products(RepeatedPair a, CodePairs b, Whole c) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(c) : "v"(b), "m"(*reinterpret_cast<const int16_t(*)[2]>(a.at)));
  return c;
}
#else
using RepeatedPair = CodePairs;
inline RepeatedPair repeated_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return in_register(_mm512_set1_epi32(pair));
}
inline Whole add_products(RepeatedPair a, CodePairs b, Whole c) { return _mm512_add_epi32(c, _mm512_madd_epi16(a, b)); }
#endif

#elif defined(WEFT_AVX2)

using Whole = __m256i;
using CodePairs = __m256i;
using RepeatedPair = CodePairs;

inline Whole no_sum() { return _mm256_setzero_si256(); }
inline CodePairs load_elements(const uint16_t* p, int64_t n) { return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), first_lanes(n)); }
inline CodePairs load_elements(const uint16_t* p, Full) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline CodePairs fourth_code(CodePairs a, CodePairs b, CodePairs c) {
  const CodePairs second = _mm256_and_si256(_mm256_slli_epi16(b, 8), _mm256_set1_epi16(0x0f00));
  const CodePairs third = _mm256_and_si256(_mm256_slli_epi16(c, 4), _mm256_set1_epi16(0x00f0));
  return _mm256_or_si256(_mm256_slli_epi16(a, 12), _mm256_or_si256(second, third));
}
inline CodePairs in_register(CodePairs a) {
  asm("" : "+x"(a));
  return a;
}
inline Vec to_floats(Whole a) { return _mm256_cvtepi32_ps(a); }
inline void store_codes(int16_t* p, Vec a) {
  const __m256i whole = _mm256_cvtps_epi32(a);
  const __m128i codes = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), codes);
}
inline Vec load_upper_halves(const uint16_t* p) {
  const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16));
}
inline Vec larger_bits(Vec a, Vec b) { return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b))); }
inline uint32_t largest_bits(Vec a) {
  const __m256i bits = _mm256_castps_si256(a);
  __m128i best = _mm_max_epu32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  best = _mm_max_epu32(best, _mm_shuffle_epi32(best, 0x4e));
  best = _mm_max_epu32(best, _mm_shuffle_epi32(best, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(best));
}
inline RepeatedPair repeated_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return in_register(_mm256_set1_epi32(pair));
}
inline Whole add_products(RepeatedPair a, CodePairs b, Whole c) { return _mm256_add_epi32(c, _mm256_madd_epi16(a, b)); }

#else

using Whole = Unsigned;   // unsigned, because unused lanes may overflow
using CodePairs = Bits;
using RepeatedPair = CodePairs;

inline Whole no_sum() { return Whole{}; }
inline CodePairs load_elements(const uint16_t* p, int64_t n) {
  CodePairs a = {};
  std::memcpy(&a, p, static_cast<size_t>(n) * 4);
  return a;
}
inline CodePairs fourth_code(CodePairs a, CodePairs b, CodePairs c) {
  return (CodePairs)((Elements)a << 12 | ((Elements)b << 8 & 0x0f00) | ((Elements)c << 4 & 0x00f0));
}
inline CodePairs in_register(CodePairs a) { return a; }
inline Vec to_floats(Whole a) {
  Vec floats = {};
  for (int i = 0; i < lanes; i++) floats[i] = static_cast<float>(static_cast<int32_t>(a[i]));
  return floats;
}
inline void store_codes(int16_t* p, Vec a) {
  const Vec rounded = round(a);
  for (int i = 0; i < lanes; i++) p[i] = rounded[i] >= -32768.0f && rounded[i] <= 32767.0f ? static_cast<int16_t>(rounded[i]) : 0;
}
inline Vec load_upper_halves(const uint16_t* p) {
  Vec floats = {};
  for (int i = 0; i < lanes; i++) floats[i] = bfloat_to_float(p[i]);
  return floats;
}
inline Vec larger_bits(Vec a, Vec b) {
  Unsigned left, right;
  std::memcpy(&left, &a, 16);
  std::memcpy(&right, &b, 16);
  left = left > right ? left : right;
  std::memcpy(&a, &left, 16);
  return a;
}
inline uint32_t largest_bits(Vec a) {
  uint32_t best = 0;
  for (int i = 0; i < lanes; i++) best = bits_of_float(a[i]) > best ? bits_of_float(a[i]) : best;
  return best;
}
inline RepeatedPair repeated_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return Bits{pair, pair, pair, pair};
}
inline Whole add_products(RepeatedPair a, CodePairs b, Whole c) {
#if defined(__SSE2__)
  return c + (Whole)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const auto first = [](CodePairs pairs) { return (Whole)((Bits)((Whole)pairs << 16) >> 16); };
  return c + first(a) * first(b) + (Whole)(a >> 16) * (Whole)(b >> 16);
#endif
}

#endif

#if !defined(WEFT_AVX512)
inline void store_every_second(uint16_t* p, const uint16_t* from, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[2 * i] = from[i];
}
#endif

}  // namespace vec
}  // namespace
}  // namespace weft::WEFT_ISA
