// Attention over the paged KV cache. The "store" is the second, quantised tier of the KV cache (kernels.h).
//
// The rows of a task are (query, head) pairs, query by query. A QueryBlock passes through the context segment by
// segment (kernels.h). Within a segment it is computed in row tiles: scores, then weights, then sums of values. Sums of
// values stay in registers from the first position to the last. The first row tile brings a segment into the L2 cache
// for the other row tiles. L2 is near enough: loads do not depend on products, so they run far ahead of the
// multiplications.
//
// Keys and values in the KV cache are integer codes; queries and weights are converted to codes as well. A weight is
// first multiplied by the scale of its value. The weights of a row and segment share one scale. Sums of products are
// exact. A position that a row does not see has the weight 0; its scale, which may be NaN, is not used.
//
// Codes of the store also have a zero point ("zero"). score = (query . codes - zero * sum of query) * key scale. From
// the sum of values, the sum of weight * zero is subtracted. These sums too are computed in position order, whatever
// the tiles are. Values of the store that a row does not see are not multiplied at all.
#include "kernels/attention_block.inl"

namespace weft::WEFT_ISA {
namespace {

// Scores are in base 2, so that a weight is 2^(score - largest): e^x takes longer.
constexpr float log_2 = 0.69314718f;

// --- queries -----------------------------------------------------------------------------------------------------------------------------

inline float score_scale(const AttendTask& task) { return task.cap == 0.0f ? task.scale * vec::one_by_log_2 : task.scale; }

// Prepares the queries for the store, once for all segments. 4-bit keys are rotated, so their queries are rotated too.
inline void prepare_store_queries(const QueryBlock& block) {
  const AttendTask& task = block.task;
  const vec::Vec scale = vec::all(score_scale(task));
  block.for_rows(0, block.rows, [&](int64_t row, int64_t query, int64_t feature) {
    float* to = block.store_queries + row * block.width;
    const float* from = block.query(query, feature);
    vec::for_each(task.cache.head_size, [&](int64_t i, auto n) { vec::store(to + i, vec::load(from + i, n) * scale); });
    if (rotates_keys(task.store)) rotate_vector(to, task.cache.head_size);
    const auto add = [&](vec::Vec sum, int64_t i, auto n) { return sum + vec::load(to + i, n); };
    block.query_sums[row] = vec::sum_row(task.cache.head_size, add);
  });
}

// Prepares the queries for the KV cache. Every row needs them: its own position is always in the KV cache.
inline void prepare_queries(const QueryBlock& block) {
  const int64_t size = block.task.cache.head_size;
  block.for_rows(0, block.rows, [&](int64_t row, int64_t query, int64_t feature) {
    int16_t* const to = block.queries + row * block.width;
    block.query_factors[row] = code_query(block.query(query, feature), size, block.width, to) * score_scale(block.task);
  });
  if (block.stored > 0) prepare_store_queries(block);
}

// --- scales ------------------------------------------------------------------------------------------------------------------------------

// Reads the key and value scales of a whole tile of the KV cache. The tile begins at position k of the segment.
inline void read_tile_scales(const QueryBlock& block, const uint16_t* scales, int64_t k) {
  for (int64_t i = 0; i < key_tile; i += vec::lanes) {
    vec::store(block.key_scales + k + i, vec::load_upper_halves(scales + i));
    vec::store(block.value_scales + k + i, vec::load_upper_halves(scales + block.task.cache.block_size + i));
  }
}

// Reads all scales of a segment as floats. Scales of the KV cache are left out if `score_rows` reads them together with
// their tile.
inline void read_scales(const QueryBlock& block, int64_t segment, const SegmentTiles& keys) {
  const AttendTask& task = block.task;
  const StoreLayer& store = task.store;
  const vec::Vec unit = vec::all(store.bits == 8 ? 1.0f : 1.0f / 16.0f), middle = vec::all(store.bits == 8 ? 0.0f : 8.0f);
  const int64_t start = segment * segment_keys, stored = block.stored_in(segment);
  const Span seen = block.seen_by_any(segment);
  const auto read = [&](const auto* elements, int64_t k, int64_t n, auto load, float* out) {
    std::decay_t<decltype(*elements)> copy[key_tile] = {};
    if (n < key_tile) {   // reading a whole tile could go past the end of the memory
      std::memcpy(copy, elements, static_cast<size_t>(n) * sizeof(*elements));
      elements = copy;
    }
    for (int64_t i = 0; i < key_tile; i += vec::lanes) vec::store(out + k + i, load(elements + i));
  };
  const auto stored_scale = [](const uint8_t* bytes) { return vec::load_scales(bytes); };
  const auto zero = [&](const uint8_t* bytes) { return vec::fma(vec::load(reinterpret_cast<const int8_t*>(bytes)), unit, middle); };
  const auto scale = [](const uint16_t* halves) { return vec::load_upper_halves(halves); };
  // Runs are read in position order, because `read` always writes a whole tile: the next run overwrites the elements
  // past the end of this run.
  for_runs(task, start, common(seen, {0, stored}), [&](int64_t k, int64_t n, const CachePosition& place, int64_t, int64_t) {
    const StoredHead head = store.head(task.store_table[place.block], task.kv_head);
    read(head.scales(false) + place.offset, k, n, stored_scale, block.key_scales);
    read(head.zeros(false) + place.offset, k, n, zero, block.key_zeros);
    read(head.scales(true) + place.offset, k, n, stored_scale, block.value_scales);
    read(head.zeros(true) + place.offset, k, n, zero, block.value_zeros);
  });
  if (keys.read_scales_late()) return;
  for_runs(task, start, common(seen, {stored, segment_keys}), [&](int64_t k, int64_t n, const CachePosition& place, int64_t, int64_t) {
    const CachedHead head = task.cache.head(task.table[place.block], task.kv_head);
    read(head.scales(false) + place.offset, k, n, scale, block.key_scales);
    read(head.scales(true) + place.offset, k, n, scale, block.value_scales);
  });
}

// --- scores and weights ------------------------------------------------------------------------------------------------------------------

// Computes the scores of a row tile that begins with `row`, over the positions `seen` of both tiers.
template <int Rows>
inline void score_rows(const QueryBlock& block, const SegmentTiles& keys, int64_t row, Span seen, Prefetcher* prefetcher) {
  keys.for_each(seen, prefetcher, [&](const TierTiles& tier, auto element, Prefetcher* prefetcher) {
    const Span part = common(seen, tier.span);
    if (part.empty()) return;
    const int64_t first = part.first / key_tile;
    float* scores = block.scores + first * key_tile;
    // If the store ends inside a tile, the tile already has scores of stored positions. They must be kept.
    const int64_t kept = block.stored > 0 && !tier.is_stored ? tier.span.first - first * key_tile : 0;
    float others[Rows][key_tile];
    for (int64_t r = 0; r < Rows && kept > 0; r++) std::memcpy(others[r], scores + r * score_stride, static_cast<size_t>(kept) * 4);
    const int64_t size = block.task.cache.head_size;
    if constexpr (std::is_same_v<decltype(element), int16_t>) {
      score_codes<Rows>(block.queries + row * block.width, block.width, block.query_factors + row, size, tier.tiles + first, tiles_of(part),
                        block.key_scales + first * key_tile, prefetcher, tier.lines, scores, [&](int64_t tile, int64_t count) {
                          for (int64_t t = first + tile; t < first + tile + count && tier.reads_scales_late; t++)
                            read_tile_scales(block, tier.scales[t], t * key_tile);
                        });
    } else {
      score_tiles<Rows, decltype(element)>(block.store_queries + row * block.width, block.width, size, tier.tiles + first, tiles_of(part),
                                           prefetcher, tier.lines, scores);
    }
    for (int64_t r = 0; r < Rows && kept > 0; r++) std::memcpy(scores + r * score_stride, others[r], static_cast<size_t>(kept) * 4);
  });
}

// Weights below this fraction of the largest weight become 0. They do not matter. Without them, a product with a scale
// is never subnormal; subnormals slow some processors down a hundredfold.
constexpr float least_weight = 0x1p-40f;

// Turns scores into weights 2^(score - largest) times the value scales. The weight of a position that a row does not
// see becomes 0, up to the end of the last tile. `totals` covers only positions from `stored` on. Each operation is
// done for all rows at once: with a single row it would wait for the previous operation.
template <int Rows>
inline void weigh_rows(float* scores, const Span* spans, float cap, const float* scales, int64_t stored, Statistics* statistics,
                       WeightTotals* totals) {
  constexpr int parts = vec::sum_parts;
  constexpr int64_t step = parts * vec::lanes;
  const int64_t first = spans[0].first / step * step, end = rounded_up(spans[Rows - 1].end, key_tile);
  const int64_t all_begin = spans[Rows - 1].first, all_end = spans[0].end;   // all rows see the positions between these
  const vec::Vec nothing = vec::all(-INFINITY);
  vec::Vec best[Rows], base[Rows], sums[Rows][parts], scaled_sums[Rows][parts], highest[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) best[r] = nothing;
  for (int64_t k = first; k < end; k += vec::lanes) {
    const bool is_seen = k >= all_begin && k + vec::lanes <= all_end;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      float* at = scores + r * score_stride + k;
      vec::Vec score = vec::load(at);
      if (cap != 0.0f) score = vec::all(cap * vec::one_by_log_2) * vec::tanh(score / vec::all(cap));
      if (!is_seen) {
        const vec::Vec counted = vec::counted_from(k);
        score = vec::where_less(counted, vec::all(static_cast<float>(spans[r].end)), score, nothing);
        score = vec::where_less(counted, vec::all(static_cast<float>(spans[r].first)), nothing, score);
      }
      if (!is_seen || cap != 0.0f) vec::store(at, score);
      best[r] = vec::max(best[r], score);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    const float largest = vec::largest(best[r]);
    statistics[r].largest = largest;
    base[r] = vec::all(largest == -INFINITY ? 0.0f : largest);
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) sums[r][part] = scaled_sums[r][part] = vec::all(0.0f);
    highest[r] = vec::all(0.0f);
  }
  const vec::Vec least = vec::all(least_weight), zero = vec::all(0.0f);
  for (int64_t k = first; k < end; k += step) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 2
      for (int part = 0; part < parts; part++) {
        float* at = scores + r * score_stride + k + part * vec::lanes;
        const int64_t position = k + part * vec::lanes;
        const vec::Vec weight = vec::exp2_up_to_0(vec::load(at) - base[r]);
        sums[r][part] = sums[r][part] + weight;
        vec::Vec scaled = vec::where_less(least, weight, weight * vec::load(scales + position), zero);
        vec::store(at, scaled);
        if (position < stored)
          scaled = vec::where_less(vec::counted_from(position), vec::all(static_cast<float>(stored)), zero, scaled);
        scaled_sums[r][part] = scaled_sums[r][part] + scaled;
        highest[r] = vec::max(highest[r], scaled);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    statistics[r].sum = vec::sum(sums[r]);
    totals[r] = {vec::sum(scaled_sums[r]), vec::largest(highest[r])};
  }
}

// --- scales and zeros of the store -----------------------------------------------------------------------------------------------------

// Turns products of query and codes into scores, with the scales and zeros of the keys.
inline void scale_scores(const QueryBlock& block, int64_t row, Span stored, float* scores) {
  const float *scales = block.key_scales, *zeros = block.key_zeros;
  const vec::Vec query_sum = vec::all(block.query_sums[row]);
  for (int64_t k = stored.first / vec::lanes * vec::lanes; k < stored.end; k += vec::lanes) {
    const vec::Vec product = vec::load(scores + k), score = vec::fnma(vec::load(zeros + k), query_sum, product) * vec::load(scales + k);
    if (k + vec::lanes <= stored.end) {
      vec::store(scores + k, score);
    } else {
      vec::store(scores + k, vec::where_less(vec::counted_from(k), vec::all(static_cast<float>(stored.end)), score, product));
    }
  }
}

// The sum of weight * zero over the stored span.
inline float sum_zeros(const QueryBlock& block, Span stored, const float* weights) {
  constexpr int64_t step = vec::sum_parts * vec::lanes;
  const vec::Vec nothing = vec::all(0.0f);
  vec::Vec sums[vec::sum_parts];
  for (vec::Vec& sum : sums) sum = nothing;
  for (int64_t start = stored.first / step * step; start < stored.end; start += step) {
#pragma GCC unroll 2
    for (int part = 0; part < vec::sum_parts; part++) {
      const int64_t k = start + part * vec::lanes;
      vec::Vec product = vec::load(weights + k) * vec::load(block.value_zeros + k);
      if (k < stored.first || k + vec::lanes > stored.end) {
        const vec::Vec counted = vec::counted_from(k);
        product = vec::where_less(counted, vec::all(static_cast<float>(stored.end)), product, nothing);
        product = vec::where_less(counted, vec::all(static_cast<float>(stored.first)), nothing, product);
      }
      sums[part] = sums[part] + product;
    }
  }
  return vec::sum(sums);
}

// --- a whole segment -------------------------------------------------------------------------------------------------------------------

// Sums the weighted values of a row tile, over both tiers. The weights are in `block.scores`.
template <int Rows>
inline void sum_rows(const QueryBlock& block, const SegmentTiles& values, const Span* spans, const float* starts, const WeightTotals* totals,
                     const Target* targets, Prefetcher* prefetcher) {
  const Span seen = {spans[0].first, spans[Rows - 1].end};
  values.for_each(seen, prefetcher, [&](const TierTiles& tier, auto element, Prefetcher* prefetcher) {
    const Span all = common(seen, tier.span);
    if (all.empty()) return;
    const float* const begins = starts;
    starts = nullptr;   // the second tier adds to the sums of the first
    if constexpr (std::is_same_v<decltype(element), int16_t>) {
      float factors[Rows];
      code_weights<Rows>(block.scores, all.first, all.end, totals, block.weights, factors);
      sum_codes<Rows>(block.weights, factors, tier.tiles, all.first / key_tile, (all.end + key_tile - 1) / key_tile,
                      value_units(block.task.cache.head_size), begins, prefetcher, tier.lines, targets);
    } else {
      Span parts[Rows];
      for (int r = 0; r < Rows; r++) parts[r] = common(spans[r], tier.span);
      sum_tiles<Rows, decltype(element)>(block.scores, tier.tiles, tier.stride, parts, begins, prefetcher, tier.lines, targets,
                                         rounded_up(block.task.cache.head_size, vec::lanes));
    }
  });
}

// Computes one segment for all rows of a block. Calls use(row, query, feature, statistics, sums) for each row that sees
// part of the segment. With `finishes`, a row that sees only this segment is written to its output directly, without
// this call.
template <typename Use>
inline void work_segment(const QueryBlock& block, int64_t segment, bool finishes, Use use) {
  const int64_t stored = block.stored_in(segment);
  const SegmentTiles keys(block, segment, false);
  read_scales(block, segment, keys);
  const SegmentTiles values(block, segment, true);
  finishes &= stored == 0 && block.width == block.task.cache.head_size;
  for_tiles(block.rows, [&](int64_t first, auto count) {
    constexpr int rows = count.value;
    Prefetcher* const prefetcher = first == 0 ? block.prefetcher : nullptr;
    Span spans[rows];
    Statistics statistics[rows];
    float starts[rows];
    WeightTotals totals[rows];
    Target targets[rows];
    block.for_rows(first, first + rows, [&](int64_t row, int64_t query, int64_t) {
      spans[row - first] = block.seen_by_query(query, segment);
      starts[row - first] = 0.0f;
    });
    score_rows<rows>(block, keys, first, {spans[0].first, spans[rows - 1].end}, prefetcher);
    for (int r = 0; r < rows && stored > 0; r++) {
      const Span from_store = common(spans[r], {0, stored});
      if (!from_store.empty()) scale_scores(block, first + r, from_store, block.scores + r * score_stride);
    }
    weigh_rows<rows>(block.scores, spans, block.task.cap, block.value_scales, stored, statistics, totals);
    for (int r = 0; r < rows && stored > 0; r++) {
      const Span from_store = common(spans[r], {0, stored});
      if (!from_store.empty()) starts[r] = 0.0f - sum_zeros(block, from_store, block.scores + r * score_stride);
    }
    block.for_rows(first, first + rows, [&](int64_t row, int64_t query, int64_t feature) {
      const int64_t r = row - first;
      const bool is_done = finishes && segment == block.first_segment(query) && segment == block.last_segment(query);
      targets[r] = is_done ? Target{block.out(query, feature), 1.0f / statistics[r].sum} : Target{block.sums + r * block.width, 1.0f};
    });
    sum_rows<rows>(block, values, spans, starts, totals, targets, prefetcher);
    block.for_rows(first, first + rows, [&](int64_t row, int64_t query, int64_t feature) {
      const int64_t r = row - first;
      const float* sums = block.sums + r * block.width;
      if (!spans[r].empty() && targets[r].at == sums) use(row, query, feature, statistics[r], sums);
    });
  });
}

// --- the whole context ---------------------------------------------------------------------------------------------------------------

// Merges the result of a segment into `out`; `first`: there is no earlier segment.
inline void merge(Statistics part, const float* sums, int64_t head_size, bool first, Statistics& total, float* out) {
  if (first) {
    total = part;
    vec::for_each(head_size, [&](int64_t i, auto n) { vec::store(out + i, vec::load(sums + i, n), n); });
    return;
  }
  const float largest = part.largest > total.largest ? part.largest : total.largest;
  const float base = largest == -INFINITY ? 0.0f : largest;
  const vec::Vec before = vec::exp(vec::all((total.largest - base) * log_2));
  const vec::Vec now = vec::exp(vec::all((part.largest - base) * log_2));
  vec::for_each(head_size, [&](int64_t i, auto n) {
    vec::store(out + i, vec::fma(vec::load(out + i, n), before, vec::load(sums + i, n) * now), n);
  });
  total = {largest, vec::first(vec::fma(vec::all(total.sum), before, vec::all(part.sum) * now))};
}

inline void finish(const Statistics& total, int64_t head_size, float* out) {
  const vec::Vec part = vec::all(1.0f / total.sum);
  vec::for_each(head_size, [&](int64_t i, auto n) { vec::store(out + i, vec::load(out + i, n) * part, n); });
}

int64_t attend_scratch(const AttendTask& task) {
  return QueryBlock::scratch_floats(most_queries_in_block(task) * task.group, QueryBlock::width_of(task));
}

// Runs the linked tasks. The results of a row's segments are merged in order.
void attend(const AttendTask& first, float* scratch) {
  Prefetcher prefetcher(first);
  for (const AttendTask* task = &first; task; task = task->next) {
    const int64_t size = task->cache.head_size;
    for (int64_t query = 0, next; query < task->count; query = next) {
      next = query + queries_in_block(*task, query);
      // Only the first rows of a task need prefetching: later rows find the same data in the L2 cache.
      QueryBlock block(*task, query == 0 ? &prefetcher : nullptr, query, next - query, scratch);
      prepare_queries(block);
      for (int64_t segment = block.first_segment(0); segment <= block.last_segment(next - query - 1); segment++) {
        work_segment(block, segment, true, [&](int64_t row, int64_t own, int64_t feature, const Statistics& part, const float* sums) {
          float* out = block.out(own, feature);
          const bool is_first = segment == block.first_segment(own), is_last = segment == block.last_segment(own);
          merge(part, sums, size, is_first, block.totals[row], out);
          if (is_last) finish(block.totals[row], size, out);
        });
      }
    }
  }
}

// Writes the partial result of one segment: for each head the largest score, the sum of weights, the sums of values.
void attend_segment(const AttendTask& task, int64_t segment, float* partial, float* scratch) {
  const int64_t size = task.cache.head_size;
  Prefetcher prefetcher(task, segment);
  QueryBlock block(task, &prefetcher, 0, 1, scratch);
  prepare_queries(block);
  work_segment(block, segment, false, [&](int64_t row, int64_t, int64_t, const Statistics& part, const float* sums) {
    float* out = partial + row * (2 + size);
    out[0] = part.largest;
    out[1] = part.sum;
    std::memcpy(out + 2, sums, static_cast<size_t>(size) * 4);
  });
}

// Merges the partial results that attend_segment wrote, in segment order.
void attend_merge(const AttendTask& task, const float* partials) {
  const int64_t size = task.cache.head_size, segments = task.end_segment() - task.first_segment();
  for (int64_t head = 0; head < task.group; head++) {
    Statistics total = {};
    for (int64_t segment = 0; segment < segments; segment++) {
      const float* partial = partials + segment * task.partial_floats() + head * (2 + size);
      merge({partial[0], partial[1]}, partial + 2, size, segment == 0, total, task.out + head * size);
    }
    finish(total, size, task.out + head * size);
  }
}

}  // namespace
}  // namespace weft::WEFT_ISA
