// Linear layers: products with weights in any layout, and single rows of weights as floats.
#include "kernels/half.h"
#include "kernels/linear_tiles.inl"

namespace weft::WEFT_ISA {
namespace {

void linear(const LinearTask& task) {
  switch (task.weight->layout) {
    case Layout::w4: return tiles::multiply<Layout::w4>(task);
    case Layout::w8: return tiles::multiply<Layout::w8>(task);
    case Layout::f32: return tiles::multiply<Layout::f32>(task);
    case Layout::f16: return tiles::multiply<Layout::f16>(task);
    case Layout::bf16: return tiles::multiply<Layout::bf16>(task);
  }
}

inline uint16_t half_at(const uint8_t* data, int64_t index) {
  uint16_t half;
  std::memcpy(&half, data + 2 * index, 2);
  return half;
}

// The 32 weights of one output in a W4 or W8 group.
void unpack_w4(const uint8_t* group, float unit, int lane, float* out) {
  int16_t factors[2];
  std::memcpy(factors, group + w4_codes_bytes + 4 * lane, 4);
  for (int input = 0; input < group_inputs; input++) {
    const uint8_t pair = group[input / 8 * 64 + lane * 4 + input % 4];
    const int code = (input % 8 < 4 ? pair & 15 : pair >> 4) - w4_middle;
    out[input] = static_cast<float>(code * factors[0] + factors[1]) * unit;
  }
}

void unpack_w8(const uint8_t* group, int lane, float* out) {
  const float scale = half_to_float(half_at(group + w8_codes_bytes, lane));
  for (int input = 0; input < group_inputs; input++)
    out[input] = static_cast<float>(static_cast<int8_t>(group[input / 4 * 64 + lane * 4 + input % 4])) * scale;
}

// Writes the weights of one output as floats.
void unpack_row(const Weight& weight, int64_t output, float* out) {
  const uint8_t* strip = weight.data + output / strip_outputs * strip_bytes(weight.layout, weight.inputs);
  const int lane = static_cast<int>(output % strip_outputs);
  if (!weight.quantised()) {
    for (int64_t input = 0; input < weight.inputs; input++) {
      const int64_t at = input * strip_outputs + lane;
      if (weight.layout == Layout::f32) std::memcpy(out + input, strip + 4 * at, 4);
      else if (weight.layout == Layout::f16) out[input] = half_to_float(half_at(strip, at));
      else out[input] = bfloat_to_float(half_at(strip, at));
    }
    return;
  }
  float unit = 0.0f;
  if (weight.layout == Layout::w4) std::memcpy(&unit, strip + weight.groups() * w4_group_bytes + 4 * lane, 4);
  for (int64_t first = 0; first < weight.inputs; first += group_inputs) {
    float values[group_inputs];
    if (weight.layout == Layout::w4) unpack_w4(strip + first / group_inputs * w4_group_bytes, unit, lane, values);
    else unpack_w8(strip + first / group_inputs * w8_group_bytes, lane, values);
    const int64_t count = weight.inputs - first < group_inputs ? weight.inputs - first : group_inputs;
    std::memcpy(out + first, values, static_cast<size_t>(count) * sizeof(float));
  }
}

// Runs only the multiplications of W4, on registers. No product that multiplies each input once can be faster than
// this.
int64_t multiply_in_registers(int64_t repeats) {
#if defined(WEFT_AVX512) || defined(WEFT_AVX2)
  constexpr int sums_at_once = 8;
  bytes::SumW4 sums[sums_at_once];
  bytes::Bytes codes = bytes::all_fours(0x01020304), activations = codes;
#pragma GCC unroll 8
  for (bytes::SumW4& sum : sums) sum.sums = codes;
  for (int64_t repeat = 0; repeat < repeats; repeat++) {
#pragma GCC unroll 8
    for (int i = 0; i < sums_at_once; i++) {
      asm("" : "+v"(activations));   // makes the compiler assume a new value in each iteration
      sums[i].add(codes, activations);
    }
  }
#pragma GCC unroll 8
  for (const bytes::SumW4& sum : sums) {
    volatile float kept = vec::first(bytes::to_floats(sum.sums));
    (void)kept;
  }
  return repeats * sums_at_once * 4 * vec::lanes;
#else
  (void)repeats;
  return 0;
#endif
}

}  // namespace
}  // namespace weft::WEFT_ISA
