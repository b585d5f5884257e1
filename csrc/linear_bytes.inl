// Sums of products of bytes, exact, for as many outputs as a vector of floats has lanes. Weights are four bytes for each output;
// activations the same four bytes for all of them.
//
// Codes of W8 are read as unsigned bytes, 128 too large. -128 times the sum of the activations, `correction`, makes up for it.
#include "vec.h"

namespace weft::WEFT_ISA {
namespace {
namespace bytes {

#if defined(WEFT_AVX512)

using Bytes = __m512i;

inline Bytes load(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Bytes all_fours(int32_t four) { return _mm512_set1_epi32(four); }
inline Bytes low_nibbles(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
inline Bytes unsigned_of(Bytes a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }
inline Bytes none() { return _mm512_setzero_si512(); }
inline Bytes add32(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
inline Bytes add16(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
inline Bytes multiply_pairs(Bytes codes, Bytes activations) { return _mm512_maddubs_epi16(codes, activations); }
inline Bytes sum_pairs(Bytes pairs, int16_t factor) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(factor)); }
inline vec::Vec to_floats(Bytes sums) { return _mm512_cvtepi32_ps(sums); }
inline vec::Vec load_bfloats(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

#elif defined(WEFT_AVX2)

using Bytes = __m256i;

inline Bytes load(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Bytes all_fours(int32_t four) { return _mm256_set1_epi32(four); }
inline Bytes low_nibbles(Bytes a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }
inline Bytes unsigned_of(Bytes a) { return _mm256_xor_si256(a, _mm256_set1_epi8(-128)); }
inline Bytes none() { return _mm256_setzero_si256(); }
inline Bytes add32(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
inline Bytes add16(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
inline Bytes multiply_pairs(Bytes codes, Bytes activations) { return _mm256_maddubs_epi16(codes, activations); }
inline Bytes sum_pairs(Bytes pairs, int16_t factor) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(factor)); }
inline vec::Vec to_floats(Bytes sums) { return _mm256_cvtepi32_ps(sums); }
inline vec::Vec load_bfloats(const uint16_t* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

#else

struct Bytes {
  uint8_t at[4 * vec::lanes];
};

inline Bytes load(const uint8_t* from) {
  Bytes a;
  std::memcpy(a.at, from, sizeof a.at);
  return a;
}
inline Bytes all_fours(int32_t four) {
  Bytes a;
  for (int lane = 0; lane < vec::lanes; lane++) std::memcpy(a.at + 4 * lane, &four, 4);
  return a;
}
template <typename Change>
inline Bytes changed(Bytes a, Change change) {
  for (uint8_t& byte : a.at) byte = static_cast<uint8_t>(change(byte));
  return a;
}
inline Bytes low_nibbles(Bytes a) { return changed(a, [](int byte) { return byte & 15; }); }
inline Bytes high_nibbles(Bytes a) { return changed(a, [](int byte) { return byte >> 4; }); }
inline Bytes unsigned_of(Bytes a) { return changed(a, [](int byte) { return byte ^ 128; }); }
inline vec::Vec load_bfloats(const uint16_t* from) {
  float floats[vec::lanes];
  for (int lane = 0; lane < vec::lanes; lane++) floats[lane] = bfloat_to_float(from[lane]);
  return vec::load(floats);
}

#endif

inline Bytes all_fours(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return all_fours(four);
}

// --- the sum of a group -------------------------------------------------------------------------------------------------------------

#if defined(WEFT_VNNI)

struct SumW4 {
  Bytes sums = none();
  void add(Bytes codes, Bytes activations) { sums = _mm512_dpbusd_epi32(sums, codes, activations); }
  vec::Vec total() const { return to_floats(sums); }
};

struct CodesW8 {
  Bytes codes;
  void set(Bytes stored) { codes = unsigned_of(stored); }
};
struct SumW8 {
  Bytes sums = none();
  void add(const CodesW8& weights, Bytes activations) { sums = _mm512_dpbusd_epi32(sums, weights.codes, activations); }
  vec::Vec total(int32_t correction) const { return to_floats(add32(sums, all_fours(correction))); }
};

#elif defined(WEFT_AVX512) || defined(WEFT_AVX2)

// 16 bits hold the sum of a group: 16 products of at most 15 * 127.
struct SumW4 {
  Bytes pairs = none();
  void add(Bytes codes, Bytes activations) {
    pairs = add16(pairs, multiply_pairs(codes, activations));
    asm("" : "+v"(pairs));   // or the compiler puts all products aside in memory, to add them up at the end
  }
  vec::Vec total() const { return to_floats(sum_pairs(pairs, 1)); }
};

// Products of whole bytes would not fit, so the lower and the upper four bits are added up apart.
struct CodesW8 {
  Bytes low, high;
  void set(Bytes stored) {
    low = low_nibbles(stored);
    high = high_nibbles(unsigned_of(stored));
  }
};
struct SumW8 {
  SumW4 low, high;
  void add(const CodesW8& weights, Bytes activations) {
    low.add(weights.low, activations);
    high.add(weights.high, activations);
  }
  vec::Vec total(int32_t correction) const {
    return to_floats(add32(add32(sum_pairs(low.pairs, 1), all_fours(correction)), sum_pairs(high.pairs, 16)));
  }
};

#else

struct SumW4 {
  int32_t sums[vec::lanes] = {};
  void add(const Bytes& codes, const Bytes& activations) {
    for (int lane = 0; lane < vec::lanes; lane++)
      for (int i = 0; i < 4; i++) sums[lane] += codes.at[4 * lane + i] * static_cast<int8_t>(activations.at[4 * lane + i]);
  }
  vec::Vec total() const {
    float floats[vec::lanes];
    for (int lane = 0; lane < vec::lanes; lane++) floats[lane] = static_cast<float>(sums[lane]);
    return vec::load(floats);
  }
};

struct CodesW8 {
  Bytes codes;
  void set(Bytes stored) { codes = unsigned_of(stored); }
};
struct SumW8 {
  SumW4 sum;
  void add(const CodesW8& weights, const Bytes& activations) { sum.add(weights.codes, activations); }
  vec::Vec total(int32_t correction) const { return sum.total() + vec::all(static_cast<float>(correction)); }   // exact, below 2^24
};

#endif

}  // namespace bytes
}  // namespace
}  // namespace weft::WEFT_ISA
