// Sampling noise as defined by src/weft/sampling/noise.py: the same bits for the same seed, output index and token.
#pragma once

#include <cmath>
#include <cstdint>

namespace weft {
namespace {

constexpr uint64_t noise_gamma = 0x9E3779B97F4A7C15u;
constexpr uint64_t noise_first = 0xBF58476D1CE4E5B9u;
constexpr uint64_t noise_second = 0x94D049BB133111EBu;

inline uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * noise_first;
  value = (value ^ (value >> 27)) * noise_second;
  return value ^ (value >> 31);
}

inline uint64_t noise_key(uint64_t seed, int64_t output_index) {
  return mix(mix(seed + noise_gamma) + static_cast<uint64_t>(output_index) * noise_gamma);
}

inline uint32_t noise_bits(uint64_t key, int64_t token) {
  return static_cast<uint32_t>(mix(key + (static_cast<uint64_t>(token) + 1) * noise_gamma) >> 32);
}

inline double gumbel(uint32_t bits) { return -std::log(-std::log1p(-(bits + 0.5) * 0x1p-32)); }

// A cheap upper bound of gumbel(bits), from the number of leading zeros. With v = (bits + 0.5) / 2^32, gumbel(bits) is
// at most -log(v), and v is at least the value of its highest set bit.
inline double gumbel_bound(uint32_t bits) {
  const int leading_zeros = bits == 0 ? 32 : __builtin_clz(bits);
  return (leading_zeros + 1) * 0.69314718055994541;
}

}  // namespace
}  // namespace weft
