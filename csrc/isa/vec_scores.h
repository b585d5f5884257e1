// Vectors of scores for the sampler, as wide as the registers of the instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if WEFT_AVX512 || WEFT_AVX2
#include <immintrin.h>
#endif

namespace weft::WEFT_ISA {
namespace {

#if WEFT_AVX512
constexpr int vector_bytes = 64;
#elif WEFT_AVX2
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif
constexpr int narrow = vector_bytes / 4;   // float lanes
constexpr int wide = vector_bytes / 8;     // double lanes

typedef float Floats __attribute__((vector_size(vector_bytes)));
typedef int32_t Ints __attribute__((vector_size(vector_bytes)));
typedef uint32_t Uints __attribute__((vector_size(vector_bytes)));
typedef float HalfFloats __attribute__((vector_size(vector_bytes / 2)));
typedef double Doubles __attribute__((vector_size(vector_bytes)));
typedef uint64_t Words __attribute__((vector_size(vector_bytes)));

constexpr float infinity = __builtin_inff();

template <typename Vector, typename Element>
inline Vector load(const Element* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

// Returns one bit for each lane of a comparison: 1 if the lane is true.
inline uint32_t bits_of(Ints truth) {
#if WEFT_AVX512
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(truth));
#elif WEFT_AVX2
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(truth)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < narrow; lane++) bits |= static_cast<uint32_t>(truth[lane] & 1) << lane;
  return bits;
#endif
}

}  // namespace
}  // namespace weft::WEFT_ISA
