// Attention over whole texts, in floats. Keys and values are packed as weights of the layout f32. So scores and
// weighted sums are products that use the tiles of linear layers. Sums over keys are computed in key order, so a result
// depends only on the text.
namespace weft::WEFT_ISA {
namespace {
namespace texts {

// Writes the keys as strips: [keys / 16, head size, 16], padded with zeros.
inline void pack_keys(const TextTask& task, float* out) {
  for (int64_t strip = 0; strip < task.tokens; strip += strip_outputs, out += task.head_size * strip_outputs) {
    const int64_t count = task.tokens - strip < strip_outputs ? task.tokens - strip : strip_outputs;
    for (int64_t key = 0; key < count; key++) {
      const float* from = task.keys + (strip + key) * task.stride;
      for (int64_t feature = 0; feature < task.head_size; feature++) out[feature * strip_outputs + key] = from[feature];
    }
    for (int64_t feature = 0; feature < task.head_size && count < strip_outputs; feature++)
      std::memset(out + feature * strip_outputs + count, 0, static_cast<size_t>(strip_outputs - count) * sizeof(float));
  }
}

// Writes the values as strips: [features / 16, keys, 16], padded with zeros.
inline void pack_values(const TextTask& task, float* out) {
  for (int64_t strip = 0; strip < task.head_size; strip += strip_outputs) {
    const int64_t count = task.head_size - strip < strip_outputs ? task.head_size - strip : strip_outputs;
    for (int64_t key = 0; key < task.tokens; key++, out += strip_outputs) {
      const float* from = task.values + key * task.stride + strip;
      vec::for_each(strip_outputs, [&](int64_t i, auto) {
        const int64_t left = count - i;
        vec::store(out + i, left >= vec::lanes ? vec::load(from + i) : left > 0 ? vec::load(from + i, left) : vec::all(0.0f));
      });
    }
  }
}

inline float largest_of(const float* row, int64_t count) {
  vec::Vec most = vec::all(row[0]);
  int64_t i = 0;
  for (; i + vec::lanes <= count; i += vec::lanes) most = vec::max(most, vec::load(row + i));
  float largest = vec::largest(most);
  for (; i < count; i++) largest = row[i] > largest ? row[i] : largest;
  return largest;
}

// Replaces `count` scores by weights that add up to 1.
inline void softmax(float* row, int64_t count, float scale, float cap) {
  if (cap != 0.0f) {
    scale_and_cap(row, count, scale, cap);
    scale = 1.0f;
  }
  const vec::Vec base = vec::all(largest_of(row, count)), factor = vec::all(scale * vec::one_by_log_2);
  const float sum = vec::sum_row(count, [&](vec::Vec sum, int64_t i, auto n) {
    vec::store(row + i, vec::exp2_up_to_0((vec::load(row + i, n) - base) * factor), n);
    return sum + vec::load(row + i, n);   // loaded again, so that the unused lanes of the last vector are 0
  });
  const vec::Vec share = vec::all(1.0f / sum);
  vec::for_each(count, [&](int64_t i, auto n) { vec::store(row + i, vec::load(row + i, n) * share, n); });
}

struct Seen {   // keys [first, end)
  int64_t first, end;
};

// The keys that at least one of these queries sees.
inline Seen seen_by(const TextTask& task, int64_t first_query, int64_t last_query) {
  const int64_t before = task.window > 0 ? first_query - task.window + 1 : 0;
  const int64_t after = task.causal ? last_query + 1 : task.window > 0 ? last_query + task.window : task.tokens;
  return {before > 0 ? before : 0, after < task.tokens ? after : task.tokens};
}

}  // namespace texts

// scores = queries x keys, then softmax over the keys that a query sees, then output = weights x values.
void attend_text(const TextTask& task, float* scratch) {
  using namespace texts;
  const int64_t width = TextTask::padded(task.tokens);
  float *keys = scratch, *values = keys + width * task.head_size, *scores = values + TextTask::padded(task.head_size) * task.tokens;
  pack_keys(task, keys);
  pack_values(task, values);
  const Weight of_keys{Layout::f32, task.tokens, task.head_size, reinterpret_cast<const uint8_t*>(keys), nullptr};
  const int64_t at_once = task.queries_at_once();
  for (int64_t first = task.first; first < task.end; first += at_once) {
    const int64_t count = task.end - first < at_once ? task.end - first : at_once;
    const Seen all = seen_by(task, first, first + count - 1);
    for (int64_t head = 0; head < task.group; head++) {
      const float* queries = task.queries + first * task.stride + head * task.head_size;
      float* out = task.out + first * task.out_stride + head * task.head_size;
      tiles::multiply<Layout::f32>(LinearTask{&of_keys, {}, queries, task.stride, 0, count, all.first / strip_outputs,
                                              (all.end + strip_outputs - 1) / strip_outputs, scores, width, false, 1.0f});
      for (int64_t query = 0; query < count; query++) {
        float* row = scores + query * width;
        // The sums below cover the keys that any of the queries sees. Keys that this query does not see get the weight 0.
        const Seen seen = seen_by(task, first + query, first + query);
        std::memset(row + all.first, 0, static_cast<size_t>(seen.first - all.first) * sizeof(float));
        softmax(row + seen.first, seen.end - seen.first, task.scale, task.cap);
        std::memset(row + seen.end, 0, static_cast<size_t>(all.end - seen.end) * sizeof(float));
      }
      for (int64_t strip = 0; strip < task.head_size; strip += strip_outputs) {
        const int64_t outputs = task.head_size - strip < strip_outputs ? task.head_size - strip : strip_outputs;
        const float* data = values + strip * task.tokens + all.first * strip_outputs;
        const Weight of_values{Layout::f32, outputs, all.end - all.first, reinterpret_cast<const uint8_t*>(data), nullptr};
        tiles::multiply<Layout::f32>(LinearTask{&of_values, {}, scores + all.first, width, 0, count, 0, 1, out + strip, task.out_stride, false, 1.0f});
      }
    }
  }
}

}  // namespace
}  // namespace weft::WEFT_ISA
