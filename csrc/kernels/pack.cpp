// Packing: copies stored codes into strips, or rounds floats to codes.
#include "kernels/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/half.h"

namespace weft {
namespace {

// One output of a strip. `w4` and `w8` return the address of its bytes in a group of that layout.
struct Lane {
  uint8_t* strip;
  int lane;

  uint8_t* w4(int64_t group) const { return strip + group * w4_group_bytes + 4 * lane; }
  uint8_t* w8(int64_t group) const { return strip + group * w8_group_bytes + 4 * lane; }

  void set_w8_scale(int64_t group, uint16_t scale) const {
    std::memcpy(strip + group * w8_group_bytes + w8_codes_bytes + 2 * lane, &scale, 2);
  }
};

constexpr uint32_t low_nibbles = 0x0f0f0f0f;

uint32_t four_bytes(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, 4);
  return word;
}

// Packs 32 codes into a group of one output. The codes are given one per byte.
void put_w4(const Lane& lane, int64_t group, const uint8_t* codes) {
  for (int step = 0; step < 4; step++) {
    const uint32_t word = four_bytes(codes + 8 * step) | four_bytes(codes + 8 * step + 4) << 4;
    std::memcpy(lane.w4(group) + 64 * step, &word, 4);
  }
}

void put_w8(const Lane& lane, int64_t group, const uint8_t* codes) {
  for (int step = 0; step < 8; step++) std::memcpy(lane.w8(group) + 64 * step, codes + 4 * step, 4);
}

// Scale and minimum of each group of an output: weight = code * scale + minimum.
struct FactorsW4 {
  std::vector<float> scales, minima;
  explicit FactorsW4(int64_t groups) : scales(static_cast<size_t>(groups)), minima(static_cast<size_t>(groups)) {}
  void set(int64_t group, float scale, float minimum) {
    scales[static_cast<size_t>(group)] = scale;
    minima[static_cast<size_t>(group)] = minimum;
  }

  // Writes the factors as integers with one common unit per output. An integer has at least 14 significant bits, more
  // than the 11 of f16, unless the group is much smaller than the largest group of its output.
  void put(const Lane& lane) const {
    double unit = 0.0;
    bool is_finite = true;
    for (size_t group = 0; group < scales.size(); group++) {
      const double scale = std::abs(scales[group]), offset = std::abs(offset_of(group));
      is_finite = is_finite && std::isfinite(scale) && std::isfinite(offset);
      unit = std::max({unit, scale / INT16_MAX, offset / INT16_MAX});
    }
    const float stored = is_finite ? static_cast<float>(unit) : NAN;
    for (size_t group = 0; group < scales.size(); group++) {
      int16_t pair[2] = {0, 0};
      if (stored > 0.0f) {
        pair[0] = to_whole(scales[group], stored);
        pair[1] = to_whole(offset_of(group), stored);
      }
      std::memcpy(lane.w4(static_cast<int64_t>(group)) + w4_codes_bytes, pair, sizeof pair);
    }
    std::memcpy(lane.w4(static_cast<int64_t>(scales.size())), &stored, sizeof stored);
  }

 private:
  double offset_of(size_t group) const { return static_cast<double>(minima[group]) + w4_middle * static_cast<double>(scales[group]); }
  static int16_t to_whole(double value, float unit) {
    return static_cast<int16_t>(std::clamp(std::nearbyint(value / static_cast<double>(unit)), -32767.0, 32767.0));
  }
};

// --- stored codes, copied -----------------------------------------------------------------------------------------------------------

// Q4_0 and Q4_1: byte i holds values i (low bits) and 16 + i. W4: byte i of word s holds values 8s + i (low bits) and
// 8s + 4 + i.
void copy_q4(const uint8_t* packed, const Lane& lane, int64_t group) {
  uint32_t words[4];
  std::memcpy(words, packed, 16);
  const uint32_t steps[4] = {
      (words[0] & low_nibbles) | (words[1] & low_nibbles) << 4,
      (words[2] & low_nibbles) | (words[3] & low_nibbles) << 4,
      (words[0] >> 4 & low_nibbles) | (words[1] & ~low_nibbles),
      (words[2] >> 4 & low_nibbles) | (words[3] & ~low_nibbles),
  };
  for (int step = 0; step < 4; step++) std::memcpy(lane.w4(group) + 64 * step, &steps[step], 4);
}

// These three copy a row of their format to one lane of W4, without a change of its codes.
void copy_q4_0(const uint8_t* raw, int64_t inputs, const Lane& lane) {
  FactorsW4 factors(inputs / 32);
  for (int64_t group = 0; group < inputs / 32; group++, raw += 18) {
    uint16_t scale;
    std::memcpy(&scale, raw, 2);
    copy_q4(raw + 2, lane, group);
    factors.set(group, half_to_float(scale), -8.0f * half_to_float(scale));
  }
  factors.put(lane);
}

void copy_q4_1(const uint8_t* raw, int64_t inputs, const Lane& lane) {
  FactorsW4 factors(inputs / 32);
  for (int64_t group = 0; group < inputs / 32; group++, raw += 20) {
    uint16_t scales[2];
    std::memcpy(scales, raw, 4);
    copy_q4(raw + 4, lane, group);
    factors.set(group, half_to_float(scales[0]), half_to_float(scales[1]));
  }
  factors.put(lane);
}

void copy_q4_k(const uint8_t* raw, int64_t inputs, const Lane& lane) {
  FactorsW4 factors(inputs / 32);
  for (int64_t block = 0; block < inputs / 256; block++, raw += 144) {
    float scales[8], minima[8];
    k_scales_and_minima(raw, scales, minima);
    for (int group = 0; group < 8; group++) {
      const uint8_t* packed = raw + 16 + group / 2 * 32;   // low four bits: one group, high four bits: the next group
      uint8_t codes[32];
      for (int i = 0; i < 32; i++) codes[i] = group % 2 ? packed[i] >> 4 : packed[i] & 15;
      put_w4(lane, 8 * block + group, codes);
      factors.set(8 * block + group, scales[group], minima[group]);
    }
  }
  factors.put(lane);
}

void copy_q8_0(const uint8_t* raw, int64_t inputs, const Lane& lane) {
  for (int64_t group = 0; group < inputs / 32; group++, raw += 34) {
    uint16_t scale;
    std::memcpy(&scale, raw, 2);
    put_w8(lane, group, raw + 2);
    lane.set_w8_scale(group, scale);
  }
}

template <int size>
void copy_floats(const uint8_t* raw, int64_t inputs, const Lane& lane) {
  for (int64_t input = 0; input < inputs; input++)
    std::memcpy(lane.strip + (input * strip_outputs + lane.lane) * size, raw + input * size, size);
}

using CopyCodes = void (*)(const uint8_t* raw, int64_t inputs, const Lane& lane);

// Returns the function that copies rows of this format into this layout without changing codes, or null if the rows
// must be decoded and rounded.
CopyCodes find_copy(const StoredFormat& format, Layout layout) {
  struct Entry {
    const char* name;
    Layout layout;
    CopyCodes copy;
  };
  constexpr Entry copies[] = {
      {"Q4_0", Layout::w4, copy_q4_0},       {"Q4_1", Layout::w4, copy_q4_1},       {"Q4_K", Layout::w4, copy_q4_k},
      {"Q8_0", Layout::w8, copy_q8_0},       {"F32", Layout::f32, copy_floats<4>},  {"F16", Layout::f16, copy_floats<2>},
      {"BF16", Layout::bf16, copy_floats<2>},
  };
  for (const Entry& entry : copies)
    if (entry.layout == layout && std::strcmp(entry.name, format.name) == 0) return entry.copy;
  return nullptr;
}

// --- floats, rounded ----------------------------------------------------------------------------------------------------------------

constexpr uint16_t half_nan = 0x7e00;

// The largest magnitude of a group; not finite if a value is not finite.
float largest_magnitude(const float* values) {
  int32_t largest = 0;   // compared as bits: infinity is above all numbers, NaN above infinity
  for (int i = 0; i < group_inputs; i++) {
    const int32_t bits = static_cast<int32_t>(bits_of_float(values[i]) & 0x7fffffff);
    largest = bits > largest ? bits : largest;
  }
  return float_of_bits(static_cast<uint32_t>(largest));
}

// Rounds to the nearest integer, ties to even, for magnitudes below 2^22: the sum with 1.5 * 2^23 has no fraction bits.
float round_small(float value) { return (value + 0x1.8p23f) - 0x1.8p23f; }

float clamp(float value, float low, float high) { return value < low ? low : value > high ? high : value; }

// Rounds a group to signed bytes with an f16 scale. The scale is rounded first, so that the codes fit the rounded
// scale.
void round_w8(const float* values, const Lane& lane, int64_t group) {
  uint8_t codes[group_inputs] = {};
  const float largest = largest_magnitude(values);
  uint16_t half = std::isfinite(largest) ? float_to_half(largest / 127.0f) : half_nan;
  // The rounded scale may be too small for the largest value. This happens only with the smallest f16 scales.
  if (half_to_float(half) * 127.5f < largest) half++;
  const float scale = half_to_float(half);
  if (scale > 0.0f && std::isfinite(scale)) {
    const float inverse = 1.0f / scale;
    for (int i = 0; i < group_inputs; i++)
      codes[i] = static_cast<uint8_t>(static_cast<int>(round_small(clamp(values[i] * inverse, -127.0f, 127.0f))));
  }
  put_w8(lane, group, codes);
  lane.set_w8_scale(group, half);
}

// Four floats in a compiler vector.
using Four = float __attribute__((vector_size(16)));
constexpr int fours = group_inputs / 4;

float sum_of(Four a) { return (a[0] + a[1]) + (a[2] + a[3]); }

// The values of a group.
struct Group {
  Four at[fours];
  explicit Group(const float* values) { std::memcpy(at, values, sizeof at); }
};

// A candidate scale and minimum of a group, with its codes and squared error.
struct Choice {
  float scale, minimum;
  Four codes[fours];
  float error;
};

// Rounds values to the nearest codes of this scale and minimum.
Choice choose_codes(const Group& values, float scale, float minimum) {
  Choice choice;
  choice.scale = scale;
  choice.minimum = minimum;
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  Four error = {};
  for (int i = 0; i < fours; i++) {
    Four code = (values.at[i] - minimum) * inverse;
    code = code < 0.0f ? Four{} : code;
    code = code > 15.0f ? Four{} + 15.0f : code;
    code = (code + 0x1.8p23f) - 0x1.8p23f;   // see round_small
    const Four miss = code * scale + minimum - values.at[i];
    choice.codes[i] = code;
    error += miss * miss;
  }
  choice.error = sum_of(error);
  return choice;
}

// Fits scale and minimum to the given codes by least squares. Returns false if all codes are equal, or if the scale is
// not positive.
bool fit_line(const Group& values, const Four* codes, float& scale, float& minimum) {
  Four sum_codes = {}, sum_squares = {}, sum_values = {}, sum_products = {};
  for (int i = 0; i < fours; i++) {
    sum_codes += codes[i];
    sum_squares += codes[i] * codes[i];
    sum_values += values.at[i];
    sum_products += codes[i] * values.at[i];
  }
  const float count = group_inputs, c = sum_of(sum_codes), v = sum_of(sum_values);
  const float determinant = count * sum_of(sum_squares) - c * c;
  if (!(determinant > 0.0f)) return false;
  scale = (count * sum_of(sum_products) - c * v) / determinant;
  minimum = (v - scale * c) / count;
  return scale > 0.0f;
}

// Rounds a group to 4-bit codes. Tries some scales, from the whole range of the group to smaller ranges, and fits scale
// and minimum to the codes of each. A smaller range clips the largest values but has finer steps for all others; the
// lowest squared error wins.
void round_w4(const float* values, const Lane& lane, int64_t group, FactorsW4& factors) {
  uint8_t codes[group_inputs] = {};
  const float largest = largest_magnitude(values);
  if (!(largest <= 65504.0f)) {   // a value that does not fit f16 is not a valid weight
    put_w4(lane, group, codes);
    factors.set(group, NAN, NAN);
    return;
  }
  float low = values[0], high = values[0];
  for (int i = 1; i < group_inputs; i++) {
    low = values[i] < low ? values[i] : low;
    high = values[i] > high ? values[i] : high;
  }
  const Group group_values(values);
  Choice best = choose_codes(group_values, (high - low) / 15.0f, low);
  constexpr float shares[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};
  for (const float share : shares) {
    const float middle = 0.5f * (low + high), reach = 0.5f * (high - low) * share;
    float scale = 2.0f * reach / 15.0f, minimum = middle - reach;
    const Choice clipped = choose_codes(group_values, scale, minimum);
    if (!fit_line(group_values, clipped.codes, scale, minimum)) continue;
    const Choice fitted = choose_codes(group_values, scale, minimum);
    if (fitted.error < best.error) best = fitted;
  }
  for (int i = 0; i < group_inputs; i++) codes[i] = static_cast<uint8_t>(static_cast<int>(best.codes[i / 4][i % 4]));
  put_w4(lane, group, codes);
  factors.set(group, best.scale, best.minimum);
}

uint16_t float_to_bfloat(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);   // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Packs one row of weights into `lane`. `values` has `inputs` floats, followed by zeros up to a whole group.
void round_row(const float* values, int64_t inputs, Layout layout, const Lane& lane) {
  const int64_t groups = (inputs + group_inputs - 1) / group_inputs;
  if (layout == Layout::w4) {
    FactorsW4 factors(groups);
    for (int64_t group = 0; group < groups; group++) round_w4(values + group * group_inputs, lane, group, factors);
    factors.put(lane);
  } else if (layout == Layout::w8) {
    for (int64_t group = 0; group < groups; group++) round_w8(values + group * group_inputs, lane, group);
  } else if (layout == Layout::f32) {
    copy_floats<4>(reinterpret_cast<const uint8_t*>(values), inputs, lane);
  } else {
    for (int64_t input = 0; input < inputs; input++) {
      const uint16_t half = layout == Layout::f16 ? float_to_half(values[input]) : float_to_bfloat(values[input]);
      std::memcpy(lane.strip + (input * strip_outputs + lane.lane) * 2, &half, 2);
    }
  }
}

}  // namespace

int64_t packed_bytes(Layout layout, int64_t outputs, int64_t inputs) {
  return (outputs + strip_outputs - 1) / strip_outputs * strip_bytes(layout, inputs);
}

// Copies the codes of each row if the layout can keep them. Otherwise decodes and rounds the row.
void pack(const StoredFormat& format, const uint8_t* raw, int64_t rows, int64_t inputs, Layout layout, int64_t first_output,
          int64_t total_outputs, uint8_t* out) {
  const int64_t bytes = strip_bytes(layout, inputs), row_bytes = inputs / format.values * format.bytes;
  const auto lane_of = [&](int64_t output) {
    return Lane{out + output / strip_outputs * bytes, static_cast<int>(output % strip_outputs)};
  };
  std::vector<float> values((inputs + group_inputs - 1) / group_inputs * group_inputs, 0.0f);
  const CopyCodes copy = find_copy(format, layout);
  for (int64_t row = 0; row < rows; row++) {
    if (copy) {
      copy(raw + row * row_bytes, inputs, lane_of(first_output + row));
    } else {
      format.decode(raw + row * row_bytes, inputs / format.values, values.data());
      round_row(values.data(), inputs, layout, lane_of(first_output + row));
    }
  }
  if (first_output + rows < total_outputs) return;
  std::memset(values.data(), 0, values.size() * sizeof(float));
  for (int64_t output = total_outputs; output % strip_outputs != 0; output++) round_row(values.data(), inputs, layout, lane_of(output));
}

uint64_t checksum(const uint8_t* bytes, int64_t count) {
  // Like XXH64: four chains, so that four multiplications run in parallel. `step` is a bijection of the chain for a
  // given word, and of the word for a given chain. So a change of one word always changes the result.
  const auto step = [](uint64_t chain, uint64_t word) {
    chain += word * 0xc2b2ae3d27d4eb4f;
    return (chain << 31 | chain >> 33) * 0x9e3779b185ebca87;
  };
  uint64_t chains[4] = {1, 2, 3, 4}, words[4];
  for (; count >= 32; bytes += 32, count -= 32) {
    std::memcpy(words, bytes, 32);
    for (int i = 0; i < 4; i++) chains[i] = step(chains[i], words[i]);
  }
  uint64_t sum = static_cast<uint64_t>(count);
  for (uint64_t chain : chains) sum = step(sum, chain);
  for (; count > 0; count--) sum = step(sum, *bytes++);
  return step(step(sum, 0), 0);
}

}  // namespace weft
