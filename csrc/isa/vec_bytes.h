// Exact sums of byte products, for as many outputs as a float vector has lanes. Each output has its own four bytes of
// weights. All outputs use the same four bytes of activations.
//
// W4: a group needs two sums for each output: the sum of activation * (code - 8), and the sum of its activations. Both
// fit 15 bits and a sign, so one 32-bit lane holds them as a pair of 16-bit numbers. A group starts with the pair
// `start` (kernels.h), to which its products are added. One instruction then multiplies the pair by (scale, offset) and
// adds both results to the sum of the scale block. Before that instruction, the first number of the pair is `w4_lift`
// too large, so that it is always positive: a negative number would borrow from the second.
//
// W8: codes are read as unsigned bytes, 128 too large. `correction`, -128 times the sum of the activations,
// compensates.
//
// weights_at and signed_bytes_at return the weights of one input, one for each output, as floats. `bit` is the position
// of the input's code in the four bytes.
#pragma once

#include "isa/vec.h"

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
inline Bytes shifted_down(Bytes a, uint32_t bits) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(static_cast<int>(bits))); }
inline Bytes shifted_up(Bytes a, uint32_t bits) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(static_cast<int>(bits))); }
inline Bytes both(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
inline Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
inline Bytes subtract16(Bytes a, Bytes b) { return _mm512_sub_epi16(a, b); }
inline Bytes multiply_and_add_pairs(Bytes a, Bytes b) { return _mm512_madd_epi16(a, b); }
inline vec::Vec signed_bytes_at(Bytes a, uint32_t bit) { return to_floats(_mm512_srai_epi32(shifted_up(a, 24 - bit), 24)); }
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
inline Bytes shifted_down(Bytes a, uint32_t bits) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(static_cast<int>(bits))); }
inline Bytes shifted_up(Bytes a, uint32_t bits) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(static_cast<int>(bits))); }
inline Bytes both(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
inline Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
inline Bytes subtract16(Bytes a, Bytes b) { return _mm256_sub_epi16(a, b); }
inline Bytes multiply_and_add_pairs(Bytes a, Bytes b) { return _mm256_madd_epi16(a, b); }
inline vec::Vec signed_bytes_at(Bytes a, uint32_t bit) { return to_floats(_mm256_srai_epi32(shifted_up(a, 24 - bit), 24)); }
inline vec::Vec load_bfloats(const uint16_t* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

#endif

// --- the sum of a group: `start` sets it to the first products, `add` adds the next ones ------------------------------

#if defined(WEFT_AVX512) || defined(WEFT_AVX2)

using CodesW4 = Bytes;
using Whole = Bytes;   // the sums of a scale block of W4 groups

#if defined(WEFT_AVX512)
// Looks the low four bits of each lane up in a table. Returns the pairs (code - 8, 1).
inline Bytes factors_of_codes(Bytes codes) {
  return _mm512_permutexvar_epi32(codes, _mm512_set_epi32(0x10007, 0x10006, 0x10005, 0x10004, 0x10003, 0x10002, 0x10001, 0x10000, 0x1ffff,
                                                          0x1fffe, 0x1fffd, 0x1fffc, 0x1fffb, 0x1fffa, 0x1fff9, 0x1fff8));
}
#else
inline Bytes factors_of_codes(Bytes codes) {
  const Bytes code = add32(both(codes, all_fours(15)), all_fours(-w4_middle));
  return either(both(code, all_fours(0xffff)), all_fours(1 << 16));
}
#endif

inline vec::Vec weights_at(Bytes codes, uint32_t bit, const uint8_t* scales_and_offsets) {
  return to_floats(multiply_and_add_pairs(factors_of_codes(shifted_down(codes, bit)), load(scales_and_offsets)));
}

#endif

#if defined(WEFT_VNNI)

// The address of four activations: the multiply instruction reads and broadcasts them from memory.
struct Activations {
  const int8_t (&four)[4];
};
inline Activations all_fours(const int8_t* from) { return {*reinterpret_cast<const int8_t(*)[4]>(from)}; }

struct FactorsW4 {
  Bytes pairs;
  explicit FactorsW4(const uint8_t* scales_and_offsets) : pairs(load(scales_and_offsets)) {}
};

struct SumW4 {
  Bytes sums;
  void start(CodesW4 codes, Activations activations, int32_t start) {
    sums = all_fours(start);
    add(codes, activations);
  }
  void add(CodesW4 codes, Bytes activations) { sums = _mm512_dpbusd_epi32(sums, codes, activations); }
  // Inline assembly: GCC 12 would compile the intrinsic to two instructions, which is 4% slower.
  void add(CodesW4 codes, Activations activations) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(activations.four));
  }
  Whole added_to(Whole block, const FactorsW4& factors, int32_t) const {
    return _mm512_dpwssd_epi32(block, subtract16(sums, all_fours(w4_lift)), factors.pairs);
  }
};

using CodesW8 = Bytes;
inline CodesW8 codes_w8(Bytes stored) { return unsigned_of(stored); }

struct SumW8 {
  SumW4 sum;
  void start(CodesW8 codes, Activations activations, int32_t correction) { sum.start(codes, activations, correction); }
  void add(CodesW8 codes, Activations activations) { sum.add(codes, activations); }
  vec::Vec total(int32_t) const { return to_floats(sum.sums); }
};

#elif defined(WEFT_AVX512) || defined(WEFT_AVX2)

using Activations = Bytes;
inline Activations all_fours(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return all_fours(four);
}

struct FactorsW4 {
  Bytes pairs, scales;   // each scale twice
  explicit FactorsW4(const uint8_t* scales_and_offsets)
      : pairs(load(scales_and_offsets)), scales(either(both(pairs, all_fours(0xffff)), shifted_up(pairs, 16))) {}
};

// A 16-bit lane holds the sum of half a group. The sum fits: it has at most 16 products of at most 15 * 120 each.
struct SumW4 {
  Bytes sums;
  void start(CodesW4 codes, Activations activations, int32_t = 0) { sums = multiply_pairs(codes, activations); }
  void add(CodesW4 codes, Activations activations) {
    sums = add16(sums, multiply_pairs(codes, activations));
    asm("" : "+v"(sums));   // otherwise the compiler spills all products and adds them at the end
  }
  Whole added_to(Whole block, const FactorsW4& factors, int32_t start) const {
    // start - lift is the pair (-8 * s, s), where s is the sum of the group's activation codes (see RowGroup::start).
    // This pair is multiplied by the pair (scale, offset).
    const Bytes pair = subtract16(all_fours(start), all_fours(w4_lift));
    return add32(add32(block, multiply_and_add_pairs(sums, factors.scales)), multiply_and_add_pairs(pair, factors.pairs));
  }
};

// Products of whole bytes would overflow, so low and high four bits are summed separately.
struct CodesW8 {
  Bytes low, high;
};
inline CodesW8 codes_w8(Bytes stored) { return {low_nibbles(stored), high_nibbles(unsigned_of(stored))}; }

struct SumW8 {
  SumW4 low, high;
  void start(const CodesW8& codes, Activations activations, int32_t) {
    low.start(codes.low, activations);
    high.start(codes.high, activations);
  }
  void add(const CodesW8& codes, Activations activations) {
    low.add(codes.low, activations);
    high.add(codes.high, activations);
  }
  vec::Vec total(int32_t correction) const {
    return to_floats(add32(add32(sum_pairs(low.sums, 1), all_fours(correction)), sum_pairs(high.sums, 16)));
  }
};

#else

// These sums are computed in floats, which hold such integers exactly: every processor multiplies vectors of floats.
using Bytes = vec::Unsigned;

struct Codes {
  vec::Vec at[4];   // one vector for each of four inputs, with a lane for each output
};
struct Activations {
  float at[4];
};

inline Bytes load(const uint8_t* from) {
  Bytes a;
  std::memcpy(&a, from, sizeof a);
  return a;
}
inline Activations all_fours(const int8_t* from) {
  return {{static_cast<float>(from[0]), static_cast<float>(from[1]), static_cast<float>(from[2]), static_cast<float>(from[3])}};
}
inline vec::Vec load_bfloats(const uint16_t* from) {
  float floats[vec::lanes];
  for (int lane = 0; lane < vec::lanes; lane++) floats[lane] = bfloat_to_float(from[lane]);
  return vec::load(floats);
}

using Whole = vec::Bits;   // the sums of a scale block of W4 groups
inline vec::Vec to_floats(Whole sums) { return __builtin_convertvector(sums, vec::Vec); }

struct FactorsW4 {
  Whole scale, offset;
  explicit FactorsW4(const uint8_t* scales_and_offsets) {
    const Bytes pairs = load(scales_and_offsets);
    scale = reinterpret_cast<Whole>(pairs << 16) >> 16;
    offset = reinterpret_cast<Whole>(pairs) >> 16;
  }
};

inline vec::Vec weights_at(Bytes codes, uint32_t bit, const uint8_t* scales_and_offsets) {
  const FactorsW4 factors(scales_and_offsets);
  return to_floats((reinterpret_cast<Whole>(codes >> bit & 15u) - w4_middle) * factors.scale + factors.offset);
}
inline vec::Vec signed_bytes_at(Bytes a, uint32_t bit) {
  return __builtin_convertvector(reinterpret_cast<vec::Bits>(a << (24 - bit)) >> 24, vec::Vec);
}

// Returns (byte i of each output >> shift & mask) - zero, as floats.
inline Codes codes_of(Bytes a, uint32_t shift, uint32_t mask, int32_t zero) {
  Codes codes;
  for (uint32_t i = 0; i < 4; i++)
    codes.at[i] = __builtin_convertvector(reinterpret_cast<vec::Bits>(a >> (8 * i + shift) & mask) - zero, vec::Vec);
  return codes;
}
using CodesW4 = Codes;
using CodesW8 = Codes;
inline CodesW4 low_nibbles(Bytes a) { return codes_of(a, 0, 15, 0); }
inline CodesW4 high_nibbles(Bytes a) { return codes_of(a, 4, 15, 0); }
inline CodesW8 codes_w8(Bytes stored) { return codes_of(stored ^ 0x80808080u, 0, 255, 128); }

struct SumW4 {
  vec::Vec sum;
  void start(const Codes& codes, const Activations& activations, int32_t) {
    sum = vec::all(0.0f);
    add(codes, activations);
  }
  void add(const Codes& codes, const Activations& activations) {
    for (int i = 0; i < 4; i++) sum = sum + codes.at[i] * vec::all(activations.at[i]);
  }
  Whole added_to(Whole block, const FactorsW4& factors, int32_t start) const {
    const int32_t of_activations = start >> 16;   // the sum of the activation codes: see RowGroup::start
    return block + (__builtin_convertvector(sum, Whole) - w4_middle * of_activations) * factors.scale + of_activations * factors.offset;
  }
};

struct SumW8 : SumW4 {
  vec::Vec total(int32_t) const { return sum; }   // the codes are signed here: no correction
};

#endif

}  // namespace bytes
}  // namespace
}  // namespace weft::WEFT_ISA
