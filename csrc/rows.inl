// What is done to one row of activations: norms, gates, rotations.
#include "half.h"

namespace weft::WEFT_ISA {
namespace {

void rms_norm(const float* row, const float* weight, int64_t columns, float epsilon, float* out) {
  float sum = 0.0f;
  for (int64_t i = 0; i < columns; i++) sum += row[i] * row[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(columns) + epsilon);
  for (int64_t i = 0; i < columns; i++) out[i] = row[i] * factor * weight[i];
}

void silu_mul(const float* gate, const float* up, int64_t columns, float* out) {
  for (int64_t i = 0; i < columns; i++) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

void gelu_tanh_mul(const float* gate, const float* up, int64_t columns, float* out) {
  for (int64_t i = 0; i < columns; i++) {
    const float x = gate[i];
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    out[i] = 0.5f * x * (1.0f + std::tanh(inner)) * up[i];
  }
}

void add_scaled(const float* left, const float* right, float scale, int64_t columns, float* out) {
  for (int64_t i = 0; i < columns; i++) out[i] = left[i] + scale * right[i];
}

void scale_and_cap(float* row, int64_t columns, float scale, float cap) {
  for (int64_t i = 0; i < columns; i++) {
    row[i] *= scale;
    if (cap != 0.0f) row[i] = cap * std::tanh(row[i] / cap);
  }
}

void rotate(const float* head, int64_t head_size, int64_t pairs, bool interleaved, const float* cosine, const float* sine, float* out) {
  const int64_t step = interleaved ? 2 : 1, distance = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; i++) {
    const float left = head[i * step], right = head[i * step + distance];
    out[i * step] = left * cosine[i] - right * sine[i];
    out[i * step + distance] = right * cosine[i] + left * sine[i];
  }
  for (int64_t i = 2 * pairs; i < head_size; i++) out[i] = head[i];
}

void to_half(const float* row, int64_t columns, uint16_t* out) {
  for (int64_t i = 0; i < columns; i++) out[i] = float_to_half(row[i]);
}

}  // namespace
}  // namespace weft::WEFT_ISA
