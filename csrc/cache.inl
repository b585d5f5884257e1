// What goes into the cache, and queries on their way to meet it: vectors in whole numbers, as kernels.h says.
#include "vec_codes.h"

namespace weft::WEFT_ISA {
namespace {

constexpr uint32_t bits_of_infinity = 0x7f800000;

// A vector's largest magnitude, by its bits: any that is not finite is the largest.
inline uint32_t largest_magnitude(const float* values, int64_t size) {
  vec::Vec most = vec::all(0.0f);
  vec::for_each(size, [&](int64_t f, auto n) { most = vec::larger_bits(most, vec::magnitude(vec::load(values + f, n))); });
  return vec::largest_bits(most);
}

// How many times as long as its largest feature a vector is.
inline float relative_length(const float* values, int64_t size, float largest) {
  const vec::Vec by = vec::all(1.0f / largest);
  return std::sqrt(vec::sum_row(size, [&](vec::Vec sum, int64_t f, auto n) {
    const vec::Vec part = vec::load(values + f, n) * by;
    return vec::fma(part, part, sum);
  }));
}

// Calls put(f, n, codes) for every vector of lanes, from feature f on, of which n are wanted; codes are floats yet to be rounded, and 0
// behind the last feature. Returns the scale, which is at least the largest magnitude times `part`.
template <typename Put>
inline float quantise_codes(const float* values, int64_t size, uint32_t bits, float part, Put put) {
  const bool is_finite = bits < bits_of_infinity;
  const float wanted = float_of_bits(bits) * part;
  const uint32_t upper = (bits_of_float(wanted < lowest_cache_scale ? lowest_cache_scale : wanted) + 0xffff) >> 16;
  const float scale = is_finite ? float_of_bits(upper << 16) : NAN;
  const vec::Vec by = vec::all(1.0f / scale), nothing = vec::all(0.0f);
  vec::for_each(size, [&](int64_t f, auto n) { put(f, n, is_finite ? vec::load(values + f, n) * by : nothing); });
  return scale;
}

// A key or a query.
template <typename Put>
inline float quantise_key(const float* values, int64_t size, Put put) {
  const uint32_t bits = largest_magnitude(values, size);
  const float largest = float_of_bits(bits);
  float part = 1.0f / largest_code_of_keys;
  if (bits < bits_of_infinity && largest > lowest_cache_scale) {
    const float by_length = relative_length(values, size, largest) * (1.0f / longest_key);
    part = by_length > part ? by_length : part;
  }
  return quantise_codes(values, size, bits, part, put);
}

inline uint16_t upper_half(float scale) { return static_cast<uint16_t>(bits_of_float(scale) >> 16); }

// Other threads may write the neighbours at the same time: nothing but its own elements is written.
void write_cache(const float* key, const float* value, const CachedHead& head, int64_t position) {
  const int64_t size = head.head_size, tile = position / key_tile * key_tile, width = head.tile_width(tile);
  int16_t* const key_at = head.keys(tile) + (position - tile) * 2;
  int16_t* const value_at = head.value(position);
  const float key_scale = quantise_key(key, size, [&](int64_t f, int64_t n, vec::Vec wanted) {
    int16_t codes[vec::lanes];
    vec::store_codes(codes, wanted);
    for (int64_t i = 0; i < n; i += 2) std::memcpy(key_at + (f + i) * width, codes + i, 4);
  });
  const auto put_value = [&](int64_t f, int64_t n, vec::Vec wanted) { vec::store_every_second_code(value_at + f * 2, wanted, n); };
  const float value_scale = quantise_codes(value, size, largest_magnitude(value, size), 1.0f / largest_value_code, put_value);
  head.scales(false)[position] = upper_half(key_scale);
  head.scales(true)[position] = upper_half(value_scale);
}

}  // namespace
}  // namespace weft::WEFT_ISA
