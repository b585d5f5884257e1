// Half precision in plain C++: for code that is not performance-critical, and for processors without the instructions.
#pragma once

#include <cstdint>
#include <cstring>

namespace weft {
namespace {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rest = half & 0x7fff;
  if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);   // infinity or NaN
  if (rest >= 0x400) return float_of_bits(sign | ((rest << 13) + 0x38000000));   // the exponent grows by 112
  return float_of_bits(sign | bits_of_float(static_cast<float>(rest) * 0x1p-24f));   // 0 or subnormal
}

// Rounds to nearest, ties to even, like the F16C instruction.
inline uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;    // NaN
  if (magnitude >= 0x477ff000) return sign | 0x7c00;   // 65520 or more: infinity
  // Below 2^-14 the result is subnormal: a multiple of 2^-24. Floats from 0.5 to 1 have this spacing, so adding 0.5
  // rounds to such a multiple. Subtracting the bits of 0.5 leaves the multiple.
  if (magnitude < 0x38800000)
    return sign | static_cast<uint16_t>(bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000);
  return sign | static_cast<uint16_t>((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13);
}

inline float bfloat_to_float(uint16_t value) { return float_of_bits(static_cast<uint32_t>(value) << 16); }

}  // namespace
}  // namespace weft
