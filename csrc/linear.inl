// Linear layers: activations to bytes, and products with weights in any layout.
#include "half.h"

namespace weft::WEFT_ISA {
namespace {

void quantise_row(const float* row, int64_t columns, const QuantisedRows& out, int64_t out_row) {
  for (int64_t group = 0; group < out.groups; group++) {
    const int64_t first = group * group_inputs;
    const int64_t count = columns - first < group_inputs ? columns - first : group_inputs;
    float largest = 0.0f;
    for (int64_t i = 0; i < count; i++) largest = std::fmax(largest, std::fabs(row[first + i]));
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    int8_t* codes = out.codes + (out_row * out.groups + group) * group_inputs;
    int32_t sum = 0;
    for (int64_t i = 0; i < group_inputs; i++) {
      codes[i] = i < count ? static_cast<int8_t>(std::nearbyint(row[first + i] * inverse)) : 0;
      sum += codes[i];
    }
    const float scale = largest / 127.0f;
    out.scales[out_row * out.groups + group] = scale;
    out.offsets[out_row * out.groups + group] = scale * static_cast<float>(sum);
    out.sums[out_row * out.groups + group] = sum;
  }
}

inline float half_at(const uint8_t* data, int64_t index) {
  uint16_t half;
  std::memcpy(&half, data + 2 * index, 2);
  return half_to_float(half);
}

inline int code_w4(const uint8_t* group, int output, int input) {
  const uint8_t packed = group[input / 8 * 64 + output * 4 + input % 4];
  return input % 8 < 4 ? packed & 15 : packed >> 4;
}

inline int code_w8(const uint8_t* group, int output, int input) {
  return static_cast<int8_t>(group[input / 4 * 64 + output * 4 + input % 4]);
}

inline float float_at(const Weight& weight, const uint8_t* strip, int64_t input, int output) {
  const int64_t index = input * strip_outputs + output;
  if (weight.layout == Layout::f32) {
    float value;
    std::memcpy(&value, strip + 4 * index, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, strip + 2 * index, 2);
  return weight.layout == Layout::f16 ? half_to_float(half) : bfloat_to_float(half);
}

void unpack_row(const Weight& weight, int64_t output, float* out) {
  const uint8_t* strip = weight.data + output / strip_outputs * strip_bytes(weight.layout, weight.inputs);
  const int lane = static_cast<int>(output % strip_outputs);
  for (int64_t input = 0; input < weight.inputs; input++) {
    const int64_t group = input / group_inputs;
    const int inside = static_cast<int>(input % group_inputs);
    if (weight.layout == Layout::w4) {
      const uint8_t* data = strip + group * w4_group_bytes;
      out[input] = static_cast<float>(code_w4(data, lane, inside)) * half_at(data + w4_codes_bytes, lane) +
                   half_at(data + w4_codes_bytes, strip_outputs + lane);
    } else if (weight.layout == Layout::w8) {
      const uint8_t* data = strip + group * w8_group_bytes;
      out[input] = static_cast<float>(code_w8(data, lane, inside)) * half_at(data + w8_codes_bytes, lane);
    } else {
      out[input] = float_at(weight, strip, input, lane);
    }
  }
}

float product(const LinearTask& task, const uint8_t* strip, int lane, int64_t row) {
  const Weight& weight = *task.weight;
  float total = 0.0f;
  if (!weight.quantised()) {
    for (int64_t input = 0; input < weight.inputs; input++)
      total = std::fma(task.rows[row * task.row_stride + input], float_at(weight, strip, input, lane), total);
    return total;
  }
  const QuantisedRows& rows = task.quantised;
  for (int64_t group = 0; group < rows.groups; group++) {
    const int64_t at = row * rows.groups + group;
    const int8_t* codes = rows.codes + at * group_inputs;
    int32_t sum = 0;
    if (weight.layout == Layout::w4) {
      const uint8_t* data = strip + group * w4_group_bytes;
      for (int i = 0; i < group_inputs; i++) sum += codes[i] * code_w4(data, lane, i);
      total = std::fma(half_at(data + w4_codes_bytes, strip_outputs + lane), rows.offsets[at], total);
      total = std::fma(static_cast<float>(sum) * rows.scales[at], half_at(data + w4_codes_bytes, lane), total);
    } else {
      const uint8_t* data = strip + group * w8_group_bytes;
      for (int i = 0; i < group_inputs; i++) sum += codes[i] * code_w8(data, lane, i);
      total = std::fma(static_cast<float>(sum) * rows.scales[at], half_at(data + w8_codes_bytes, lane), total);
    }
  }
  return total;
}

void linear(const LinearTask& task) {
  const Weight& weight = *task.weight;
  const int64_t bytes = strip_bytes(weight.layout, weight.inputs);
  for (int64_t strip = task.first_strip; strip < task.end_strip; strip++) {
    for (int64_t row = task.first_row; row < task.end_row; row++) {
      for (int lane = 0; lane < strip_outputs && strip * strip_outputs + lane < weight.outputs; lane++) {
        const int64_t output = strip * strip_outputs + lane;
        float value = product(task, weight.data + strip * bytes, lane, row);
        if (weight.bias) value += weight.bias[output];
        float& out = task.out[row * task.out_stride + output];
        out = task.add ? out + task.scale * value : value;
      }
    }
  }
}

}  // namespace
}  // namespace weft::WEFT_ISA
