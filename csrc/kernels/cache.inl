// Writes keys and values to the KV cache, reads them back, and converts queries to codes. kernels.h defines the
// format.
#include "isa/vec_codes.h"

namespace weft::WEFT_ISA {
namespace {

constexpr uint32_t bits_of_infinity = 0x7f800000;

// The bits of the largest magnitude of a vector. A value that is not finite counts as larger than all others.
inline uint32_t largest_magnitude(const float* values, int64_t size) {
  vec::Vec most = vec::all(0.0f);
  vec::for_each(size, [&](int64_t f, auto n) { most = vec::larger_bits(most, vec::magnitude(vec::load(values + f, n))); });
  return vec::largest_bits(most);
}

// The Euclidean length of a vector divided by its largest magnitude; 0 if that magnitude is tiny or not finite. `bits`
// is the result of largest_magnitude.
inline float relative_length(const float* values, int64_t size, uint32_t bits) {
  const float largest = float_of_bits(bits);
  if (bits >= bits_of_infinity || largest <= lowest_cache_scale) return 0.0f;
  const vec::Vec by = vec::all(1.0f / largest);
  return std::sqrt(vec::sum_row(size, [&](vec::Vec sum, int64_t f, auto n) {
    const vec::Vec part = vec::load(values + f, n) * by;
    return vec::fma(part, part, sum);
  }));
}

// The scale of a vector, and the conversion of its values to codes.
struct Coding {
  float scale;
  vec::Vec by;
  bool is_finite;

  // `bits`: the vector's largest magnitude, as the bits of a float. `one_part` and `other_part` are two lower bounds of the
  // scale, as fractions of that magnitude. The scale is the larger bound, rounded up to the upper 16 bits of a float.
  Coding(uint32_t bits, float one_part, float other_part = 0.0f) : is_finite(bits < bits_of_infinity) {
    const float part = one_part > other_part ? one_part : other_part;
    const float exact = float_of_bits(bits) * part;
    const uint32_t upper = (bits_of_float(exact < lowest_cache_scale ? lowest_cache_scale : exact) + 0xffff) >> 16;
    scale = is_finite ? float_of_bits(upper << 16) : NAN;
    by = vec::all(1.0f / scale);
  }

  // The unrounded codes of n features; 0 in the other lanes.
  template <typename Lanes>
  vec::Vec codes(const float* values, Lanes n) const { return is_finite ? vec::load(values, n) * by : vec::all(0.0f); }
  uint16_t bits() const { return static_cast<uint16_t>(bits_of_float(scale) >> 16); }
};

// Writes `width` codes of a query to `out`, zeros past the last feature; returns their scale.
inline float code_query(const float* values, int64_t size, int64_t width, int16_t* out) {
  const uint32_t bits = largest_magnitude(values, size);
  const float by_length = relative_length(values, size, bits) * (std::sqrt(static_cast<float>(size)) / longest_query);
  const Coding coding(bits, 1.0f / largest_query_code, by_length);
  vec::for_each(size, [&](int64_t f, auto n) { vec::store_codes(out + f, coding.codes(values + f, n)); });
  for (int64_t f = (size + vec::lanes - 1) / vec::lanes * vec::lanes; f < width; f++) out[f] = 0;
  return coding.scale;
}

using vec::Elements;

// rounded_fourth rounds code 3 of a unit to a multiple of fourth_step. with_lowest returns the nearest codes with the
// given low bits.
inline Elements rounded_fourth(Elements codes) { return (codes + fourth_step / 2) & static_cast<uint16_t>(-fourth_step); }
inline Elements with_lowest(Elements codes, Elements lowest) { return rounded_fourth(codes - lowest) | lowest; }

// Writes the codes of one key. Of eight features, 0, 2, 4 and 6 are one unit, and 1, 3, 5 and 7 another. Each unit's
// last code (feature 6 or 7) is rounded to 12 bits. These bits become the lowest 4 bits of the unit's other three
// codes.
//
// Only elements of this position are written: other threads may write neighbouring positions at the same time.
inline void write_key(const float* key, const Coding& coding, int64_t size, uint16_t* out, int64_t distance) {
  constexpr int64_t step = 16, of_two = 2 * codes_of_unit;
  const Elements first = {15, 15}, second = {0, 0, 15, 15}, third = {0, 0, 0, 0, 15, 15};
  for (int64_t start = 0; start < size; start += step) {
    int16_t codes[step] = {};
    const int64_t count = size - start < step ? size - start : step;
    vec::for_each(count, [&](int64_t f, auto n) { vec::store_codes(codes + f, coding.codes(key + start + f, n)); });
    for (int64_t f = 0; f < count; f += of_two) {
      Elements exact;
      uint32_t last, pairs[codes_of_unit];
      std::memcpy(&exact, codes + f, sizeof exact);
      std::memcpy(&last, codes + f + 2 * elements_of_unit, sizeof last);
      for (uint32_t& pair : pairs) pair = last;
      Elements fourth;
      std::memcpy(&fourth, pairs, sizeof fourth);
      fourth = rounded_fourth(fourth);
      const Elements elements = with_lowest(exact, (fourth >> 12 & first) | (fourth >> 8 & second) | (fourth >> 4 & third));
      std::memcpy(pairs, &elements, sizeof pairs);
      for (int e = 0; e < elements_of_unit; e++, out += distance) std::memcpy(out, pairs + e, 4);
    }
  }
}

// Writes the codes of one value. One unit has four features that are a quarter of a head apart.
inline void write_value(const float* value, const Coding& coding, int64_t size, uint16_t* out) {
  constexpr int64_t step = 16;   // units
  const int64_t units = value_units(size);
  for (int64_t start = 0; start < units; start += step) {
    constexpr int halves = step * 2 / sizeof(Elements);
    Elements codes[codes_of_unit][halves], elements[halves];
    const int64_t count = units - start < step ? units - start : step;
    for (int c = 0; c < codes_of_unit; c++) {
      const int64_t first = c * units + start, there = size - first;   // may be negative
      int16_t some[step];
      for (int64_t i = 0; i < step; i += vec::lanes) {
        const int64_t left = there - i < 0 ? 0 : there - i;
        vec::store_codes(some + i, left >= vec::lanes ? coding.codes(value + first + i, vec::Full{}) : coding.codes(value + first + i, left));
      }
      std::memcpy(codes[c], some, sizeof some);
    }
    for (Elements& fourth : codes[elements_of_unit]) fourth = rounded_fourth(fourth);
    for (int e = 0; e < elements_of_unit; e++) {
      for (int half = 0; half < halves; half++)
        elements[half] = with_lowest(codes[e][half], codes[elements_of_unit][half] >> (12 - lowest_bits * e) & 15);
      uint16_t some[step];
      std::memcpy(some, elements, sizeof some);
      vec::store_every_second(out + (e * units + start) * 2, some, count);
    }
  }
}

// Writes the key and the value of one token and KV head. The length of a key is limited, see kernels.h.
void write_cache(const float* key, const float* value, const CachedHead& head, int64_t position) {
  constexpr float part = 1.0f / largest_cache_code;
  const int64_t size = head.head_size, tile = position / key_tile * key_tile;
  const uint32_t bits = largest_magnitude(key, size);
  const float by_length = relative_length(key, size, bits) / (std::sqrt(static_cast<float>(size)) * longest_key);
  const Coding of_key(bits, part, by_length), of_value(largest_magnitude(value, size), part);
  write_key(key, of_key, size, head.keys(tile) + (position - tile) * 2, head.tile_width(tile) * 2);
  write_value(value, of_value, size, head.value(position));
  head.scales(false)[position] = of_key.bits();
  head.scales(true)[position] = of_value.bits();
}

// --- out of the cache --------------------------------------------------------------------------------------------------------------------

struct Codes {
  vec::CodePairs of[codes_of_unit];
};

// Unpacks three vectors of elements into four vectors of codes. The three are `distance` elements apart.
template <typename Lanes>
inline Codes unpacked(const uint16_t* elements, int64_t distance, Lanes n) {
  const vec::CodePairs a = vec::in_register(vec::load_elements(elements, n)), b = vec::in_register(vec::load_elements(elements + distance, n));
  const vec::CodePairs c = vec::in_register(vec::load_elements(elements + 2 * distance, n));
  return {{a, b, c, vec::fourth_code(a, b, c)}};
}

// Unpacks one code of a unit whose elements are `distance` apart. Code 3 is in the low bits of the elements: kernels.h.
inline int16_t code_of(const uint16_t* elements, int64_t distance, int64_t code) {
  if (code < elements_of_unit) return static_cast<int16_t>(elements[code * distance]);
  return static_cast<int16_t>((elements[0] & 15) << 12 | (elements[distance] & 15) << 8 | (elements[2 * distance] & 15) << 4);
}
inline int16_t key_code(const CachedHead& head, int64_t position, int64_t feature) {
  const int64_t tile = position / key_tile * key_tile, width = head.tile_width(tile);
  const uint16_t* const at = head.keys(tile) + (feature / 8 * elements_of_unit * width + position - tile) * 2 + feature % 2;
  return code_of(at, 2 * width, feature % 8 / 2);
}
inline int16_t value_code(const CachedHead& head, int64_t position, int64_t feature) {
  const int64_t units = value_units(head.head_size);
  const uint16_t* const at = head.value(position) + feature % units * 2;
  return code_of(at, 2 * units, feature / units);
}

}  // namespace
}  // namespace weft::WEFT_ISA
