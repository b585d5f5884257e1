// Attention over the paged cache.
#include "half.h"

namespace weft::WEFT_ISA {
namespace {

int64_t attend_scratch(const AttendTask& task) { return task.first_position + task.count; }

void attend(const AttendTask& task, float* scores) {
  const CacheLayer& cache = task.cache;
  const int64_t size = cache.head_size;
  const auto key_of = [&](int64_t position) {
    return cache.keys + task.table[position / cache.block_size] * cache.block_stride +
           (position % cache.block_size * cache.kv_heads + task.kv_head) * size;
  };
  for (int64_t query = 0; query < task.count; query++) {
    const int64_t position = task.first_position + query;
    const int64_t first = task.window > 0 && position + 1 > task.window ? position + 1 - task.window : 0;
    for (int64_t head = 0; head < task.group; head++) {
      const float* q = task.queries + query * task.query_stride + head * size;
      float best = -INFINITY;
      for (int64_t p = first; p <= position; p++) {
        const uint16_t* key = key_of(p);
        float sum = 0.0f;
        for (int64_t i = 0; i < size; i++) sum += q[i] * half_to_float(key[i]);
        sum *= task.scale;
        if (task.cap != 0.0f) sum = task.cap * std::tanh(sum / task.cap);
        scores[p] = sum;
        best = std::fmax(best, sum);
      }
      float total = 0.0f;
      float* out = task.out + query * task.out_stride + head * size;
      for (int64_t i = 0; i < size; i++) out[i] = 0.0f;
      for (int64_t p = first; p <= position; p++) {
        const float weight = std::exp(scores[p] - best);
        total += weight;
        const uint16_t* value = key_of(p) + cache.value_offset;
        for (int64_t i = 0; i < size; i++) out[i] += weight * half_to_float(value[i]);
      }
      for (int64_t i = 0; i < size; i++) out[i] /= total;
    }
  }
}

}  // namespace
}  // namespace weft::WEFT_ISA
