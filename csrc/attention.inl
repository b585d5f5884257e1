// Attention over the paged cache.
//
// The rows of a task are its queries' heads, query by query. A block of rows goes through the context segment by segment (kernels.h), and
// through a segment in tiles of a few rows: their scores, then weights, then sums of values, which stay in registers from the first
// position to the last. What the first tile has read of a segment is in the second-level cache for the others: that is near enough, since
// loads are far ahead of the multiplications that wait for each other. What a row does not see is never multiplied with a value, not even
// as 0, since that may be NaN.
//
// What lies in the store is read as codes. A score is the product of query and codes, less the key's zero times the sum of the query, times
// the key's scale; and a weight is multiplied by its value's scale before the codes are summed, less the sum of these products with the
// zeros. So much is done in the order of the positions too, whatever rows or tiles there are.
#include "attention_tiles.inl"

namespace weft::WEFT_ISA {
namespace {

struct Statistics {
  float largest, sum;
};

// Scores are made in base 2, so that a weight is 2^(score - largest): e^x takes longer.
constexpr float log_2 = 0.69314718f;

// Some queries of a task with all their heads, and the scratch they are worked on in.
struct Block {
  const AttendTask& task;
  Ahead* ahead;             // told of what is read, or null
  int64_t first_query, rows;
  int64_t width;            // the head's size in whole vectors; the features behind the last are zeros
  float* queries;           // [tile_rows, width]: of the tile in work, times the scale and, but for a cap, what makes scores of base 2
  float* scores;            // [tile_rows, score_stride]: of the tile and segment in work, then their weights
  float* sums;              // [tile_rows, width]: likewise, the weighted sum of values
  float *keys, *values;     // [segment_keys, width]: of the segment in work, where they are not read as they lie
  Statistics* totals;       // [rows]: of the segments before

  // Of the store.
  int64_t stored;           // what lies before this position is read from there by all rows
  float *key_scales, *key_zeros, *value_scales, *value_zeros;   // [segment_keys + 16]: of the segment in work
  float* store_queries;     // [rows, width]: of all rows, as keys of the store meet them
  float* query_sums;        // [rows]: of all features of those

  Block(const AttendTask& whole, Ahead* fetching, int64_t first, int64_t count, float* scratch)
      : task(whole), ahead(fetching), first_query(first), rows(count * whole.group), width(rounded_up(whole.cache.head_size, vec::lanes)),
        stored(whole.stored_before(whole.first_position + first)) {
    // Aligned: a vector that lies across two cache lines is loaded twice.
    scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
    scores = scratch;
    sums = scores + tile_rows * score_stride;
    queries = sums + tile_rows * width;
    store_queries = queries + tile_rows * width;
    key_scales = store_queries + rows * width;
    key_zeros = key_scales + score_stride;
    value_scales = key_zeros + score_stride;
    value_zeros = value_scales + score_stride;
    keys = value_zeros + score_stride;
    values = keys + segment_keys * width;
    totals = reinterpret_cast<Statistics*>(values + segment_keys * width);
    query_sums = reinterpret_cast<float*>(totals + rows);
  }

  static int64_t scratch_floats(int64_t rows, int64_t width) {
    return 16 + tile_rows * (score_stride + 2 * width) + rows * (width + 3) + 2 * segment_keys * width + 4 * score_stride;
  }

  int64_t first_segment(int64_t query) const { return task.window > 0 ? larger(position(query) + 1 - task.window, 0) / segment_keys : 0; }
  int64_t last_segment(int64_t query) const { return position(query) / segment_keys; }
  int64_t position(int64_t query) const { return task.first_position + first_query + query; }
  Span seen_by_query(int64_t query, int64_t segment) const { return seen_from(task, position(query), segment); }
  // A later row begins to see later and sees further.
  Span seen_by_any(int64_t segment) const {
    return {seen_by_query(0, segment).first, seen_by_query(rows / task.group - 1, segment).end};
  }
  int64_t stored_in(int64_t segment) const { return larger(0, smaller(stored - segment * segment_keys, segment_keys)); }

  // Calls use(row, query, feature) for some rows; there its head begins among those of the query. Divides once, since a division takes as
  // long as a dozen multiplications of vectors.
  template <typename Use>
  void for_rows(int64_t first, int64_t end, Use use) const {
    int64_t query = first / task.group, head = first % task.group;
    for (int64_t row = first; row < end; row++) {
      use(row, query, head * task.cache.head_size);
      if (++head == task.group) query++, head = 0;
    }
  }
  const float* query(int64_t query, int64_t feature) const { return task.queries + (first_query + query) * task.query_stride + feature; }
  float* out(int64_t query, int64_t feature) const { return task.out + (first_query + query) * task.out_stride + feature; }
};

// --- the tiles of a segment ------------------------------------------------------------------------------------------------------------

inline Span common(Span a, Span b) { return {larger(a.first, b.first), smaller(a.end, b.end)}; }
inline int64_t tiles_of(Span span) { return span.empty() ? 0 : (span.end + key_tile - 1) / key_tile - span.first / key_tile; }

// What is read of a segment from the store, or what is not: keys or values, as they lie in memory or as floats in the scratch.
struct Side {
  Span wanted;       // by any row
  bool is_stored, of_values;
  bool as_floats;
  int64_t stride;    // from one value to the next, in elements
  int64_t lines;     // of a tile
  const void* tiles[segment_tiles];
};

// Calls use(k, n, place, tile, tile_width) for runs of n positions of a span that lie together in one tile of a block: position k stands
// at that place, and its tile, of that width, begins `tile` positions into the block.
template <typename Use>
inline void for_runs(const AttendTask& task, int64_t start, Span wanted, Use use) {
  const int64_t block_size = task.cache.block_size;
  Place place(task, start + wanted.first);
  for (int64_t k = wanted.first; k < wanted.end;) {
    const int64_t tile = place.within / key_tile * key_tile, tile_width = smaller(key_tile, block_size - tile);
    const int64_t n = smaller(smaller(wanted.end - k, key_tile - k % key_tile), tile + tile_width - place.within);
    use(k, n, place, tile, tile_width);
    place.step(task, n);
    k += n;
  }
}

// Codes as floats: n keys of one feature, or the features of one value.
inline void convert_keys(const StoreLayer& store, const uint8_t* tile, int64_t tile_width, int64_t f, int64_t n, float* out) {
  const uint8_t* from = tile + (store.bits == 8 ? f : f / 2) * tile_width;
  for (int64_t i = 0; i < n; i++)
    out[i] = static_cast<float>(store.bits == 8 ? static_cast<int8_t>(from[i]) : from[i] >> (f % 2 * 4) & 15);
}
inline void convert_value(const StoreLayer& store, const uint8_t* from, float* out) {
  const int64_t size = store.head_size, half = size / 2;
  if (store.bits == 8) {
    for (int64_t f = 0; f < size; f++) out[f] = static_cast<float>(static_cast<int8_t>(from[f]));
  } else {
    for (int64_t j = 0; j < half; j++) out[j] = static_cast<float>(from[j] & 15);
    for (int64_t j = 0; j < half; j++) out[half + j] = static_cast<float>(from[j] >> 4);
  }
}

// As floats in the scratch: for heads that are no whole vectors, blocks that are no whole tiles, and where a half is slow to read. Codes
// stay codes, so that the sums are the same as of those that are read as they lie.
inline void convert(const Block& block, int64_t start, Side& side) {
  const AttendTask& task = block.task;
  const CacheLayer& cache = task.cache;
  const int64_t size = cache.head_size;
  float* const floats = side.of_values ? block.values : block.keys;
  side.stride = side.of_values ? block.width : size;
  for (int64_t tile = 0; tile < segment_tiles; tile++) side.tiles[tile] = floats + tile * key_tile * side.stride;
  for_runs(task, start, side.wanted, [&](int64_t k, int64_t n, const Place& place, int64_t first, int64_t tile_width) {
    const uint16_t* halves = nullptr;
    StoredHead head = {};
    if (side.is_stored) {
      head = task.store.head(task.store_table[place.block], task.kv_head);
    } else {
      halves = cache.keys + task.table[place.block] * cache.block_stride + task.kv_head * cache.head_stride;
    }
    if (side.of_values) {
      for (int64_t i = 0; i < n; i++) {
        float* row = floats + (k + i) * side.stride;
        if (block.ahead) block.ahead->ask(lines_of(bytes_of_vector(task, side.is_stored)));
        if (side.is_stored) {
          convert_value(task.store, head.values() + (place.within + i) * head.vector_bytes, row);
        } else {
          const uint16_t* from = halves + cache.value_offset + (place.within + i) * size;
          vec::for_each(size, [&](int64_t f, auto count) { vec::store(row + f, vec::load(from + f, count)); });
        }
      }
    } else {
      float* tile = floats + k / key_tile * key_tile * side.stride + k % key_tile;
      for (int64_t f = 0; f < size; f++) {
        if (block.ahead && f % 2 == 0) block.ahead->ask(1);
        if (side.is_stored) {
          convert_keys(task.store, head.keys() + first * head.vector_bytes + place.within - first, tile_width, f, n, tile + f * key_tile);
        } else {
          const uint16_t* from = halves + first * size + place.within - first + f * tile_width;
          vec::for_each(n, [&](int64_t i, auto count) { vec::store(tile + f * key_tile + i, vec::load(from + i, count), count); });
        }
      }
    }
  });
}

inline void find_tiles(const Block& block, int64_t segment, Side& side) {
  const AttendTask& task = block.task;
  const int64_t size = task.cache.head_size, in_an_element = side.is_stored && task.store.bits == 4 ? Keys<Nibbles>::features : 1;
  side.lines = lines_of_tile(task, side.of_values, side.is_stored);
  side.as_floats = (!vec::reads_halves && block.rows > tile_rows) || !has_whole_tiles(task.cache) ||
                   (side.of_values && size % (vec::lanes * in_an_element) != 0);
  const int64_t start = segment * segment_keys, first = side.wanted.first / key_tile;
  if (side.as_floats) {
    if (block.ahead) block.ahead->owe(tiles_of(side.wanted) * side.lines);
    convert(block, start, side);
    if (block.ahead) block.ahead->ask_rest();
    return;
  }
  side.stride = size / in_an_element;
  Place place(task, start + first * key_tile);
  for (int64_t tile = first; tile * key_tile < side.wanted.end; tile++, place.step(task, key_tile))
    side.tiles[tile] = tile_at(task, place, side.of_values, side.is_stored);
}

// The keys, or the values, that any row of a block sees of a segment.
struct Sides {
  const Block& block;
  int count = 0;
  Side sides[2];     // from the store, then the others

  Sides(const Block& whole, int64_t segment, bool of_values) : block(whole) {
    const int64_t stored = block.stored_in(segment);
    const Span seen = block.seen_by_any(segment);
    const auto add = [&](Span wanted, bool is_stored) {
      if (wanted.empty()) return;
      Side& side = sides[count++];
      side.wanted = wanted;
      side.is_stored = is_stored;
      side.of_values = of_values;
      find_tiles(block, segment, side);
    };
    add(common(seen, {0, stored}), true);
    add(common(seen, {stored, segment_keys}), false);
  }

  // Calls use(side, element, ahead) for each: an element of the kind that its tiles have, and who is to be asked while they are read, or
  // null. `seen` is what is read of them.
  template <typename Use>
  void for_each(Span seen, Ahead* ahead, Use use) const {
    for (int i = 0; i < count; i++) {
      const Side& side = sides[i];
      Ahead* const asked = side.as_floats ? nullptr : ahead;
      if (side.as_floats) {
        use(side, float{}, asked);
      } else if (!side.is_stored) {
        use(side, uint16_t{}, asked);
      } else if (block.task.store.bits == 8) {
        use(side, int8_t{}, asked);
      } else {
        use(side, Nibbles{}, asked);
      }
      if (!asked) continue;
      // For what other rows will read.
      asked->owe((tiles_of(side.wanted) - tiles_of(common(seen, side.wanted))) * side.lines);
      asked->ask_rest();
    }
  }
};

// --- queries -----------------------------------------------------------------------------------------------------------------------------

inline void scale_query(const Block& block, const float* from, float* to) {
  const vec::Vec scale = vec::all(block.task.cap == 0.0f ? block.task.scale * vec::one_by_log_2 : block.task.scale);
  vec::for_each(block.task.cache.head_size, [&](int64_t i, auto n) { vec::store(to + i, vec::load(from + i, n) * scale); });
}

// For the store: of all rows, once for all segments, since they may have to be turned.
inline void prepare_store_queries(const Block& block) {
  const AttendTask& task = block.task;
  block.for_rows(0, block.rows, [&](int64_t row, int64_t query, int64_t feature) {
    float* to = block.store_queries + row * block.width;
    scale_query(block, block.query(query, feature), to);
    if (rotates_keys(task.store)) rotate_vector(to, task.cache.head_size);
    const auto add = [&](vec::Vec sum, int64_t i, auto n) { return sum + vec::load(to + i, n); };
    block.query_sums[row] = vec::sum_row(task.cache.head_size, add);
  });
}

// Makes the queries of a tile ready, and asks for those of the next and for the place of this one's results: both lie far away.
inline void prepare_tile(const Block& block, int64_t first, int64_t end) {
  block.for_rows(first, end, [&](int64_t row, int64_t query, int64_t feature) {
    scale_query(block, block.query(query, feature), block.queries + (row - first) * block.width);
    ask_for(block.out(query, feature), block.task.cache.head_size, true);
  });
  block.for_rows(end, smaller(block.rows, end + tile_rows), [&](int64_t, int64_t query, int64_t feature) {
    ask_for(block.query(query, feature), block.task.cache.head_size, false);
  });
}

// --- scores and weights ------------------------------------------------------------------------------------------------------------------

template <int Rows>
inline void score_rows(const Block& block, const Sides& keys, int64_t row, Span seen, Ahead* whom) {
  keys.for_each(seen, whom, [&](const Side& side, auto element, Ahead* ahead) {
    const Span part = common(seen, side.wanted);
    if (part.empty()) return;
    const int64_t first = part.first / key_tile;
    float* scores = block.scores + first * key_tile;
    // Where the store ends inside a tile, scores of its keys stand there already.
    const int64_t kept = block.stored > 0 && !side.is_stored ? side.wanted.first - first * key_tile : 0;
    float others[Rows][key_tile];
    for (int64_t r = 0; r < Rows && kept > 0; r++) std::memcpy(others[r], scores + r * score_stride, static_cast<size_t>(kept) * 4);
    score_tiles<Rows, decltype(element)>(side.is_stored ? block.store_queries + row * block.width : block.queries, block.width,
                                         block.task.cache.head_size, side.tiles + first, tiles_of(part), ahead, side.lines, scores);
    for (int64_t r = 0; r < Rows && kept > 0; r++) std::memcpy(scores + r * score_stride, others[r], static_cast<size_t>(kept) * 4);
  });
}

// Scores become weights 2^(score - largest); those around a row's span, as far as any row sees and up to whole sums of lanes, become 0. Step
// by step for all rows, since a single one would wait for each of its steps.
template <int Rows>
inline void weigh_rows(float* scores, const Span* spans, float cap, Statistics* statistics) {
  constexpr int parts = vec::sum_parts;
  constexpr int64_t step = parts * vec::lanes;
  const int64_t first = spans[0].first / step * step, end = rounded_up(spans[Rows - 1].end, step);
  const int64_t all_begin = spans[Rows - 1].first, all_end = spans[0].end;   // between these all rows see everything
  const vec::Vec nothing = vec::all(-INFINITY);
  vec::Vec best[Rows], base[Rows], sums[Rows][parts];
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
    for (int part = 0; part < parts; part++) sums[r][part] = vec::all(0.0f);
  }
  for (int64_t k = first; k < end; k += step) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 2
      for (int part = 0; part < parts; part++) {
        float* at = scores + r * score_stride + k + part * vec::lanes;
        const vec::Vec weight = vec::exp2_up_to_0(vec::load(at) - base[r]);
        vec::store(at, weight);
        sums[r][part] = sums[r][part] + weight;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) statistics[r].sum = vec::sum(sums[r]);
}

// --- scales and zeros of the store -----------------------------------------------------------------------------------------------------

// Those of all that is read from the store of a segment, as floats.
inline void read_scales(const Block& block, int64_t segment) {
  const StoreLayer& store = block.task.store;
  const vec::Vec unit = vec::all(store.bits == 8 ? 1.0f : 1.0f / 16.0f), middle = vec::all(store.bits == 8 ? 0.0f : 8.0f);
  const int64_t start = segment * segment_keys;
  const Span wanted = common(block.seen_by_any(segment), {0, block.stored_in(segment)});
  float *const key_scales = block.key_scales, *const key_zeros = block.key_zeros;
  float *const value_scales = block.value_scales, *const value_zeros = block.value_zeros;
  for_runs(block.task, start, wanted, [&](int64_t k, int64_t n, const Place& place, int64_t, int64_t) {
    const StoredHead head = store.head(block.task.store_table[place.block], block.task.kv_head);
    const auto read = [&](const uint8_t* bytes, auto load, float* out) {
      uint8_t copy[key_tile] = {};
      if (n < key_tile) {   // beside them the memory may end
        std::memcpy(copy, bytes, static_cast<size_t>(n));
        bytes = copy;
      }
      for (int64_t i = 0; i < key_tile; i += vec::lanes) vec::store(out + k + i, load(bytes + i));
    };
    const auto scale = [](const uint8_t* bytes) { return vec::load_scales(bytes); };
    const auto zero = [&](const uint8_t* bytes) { return vec::fma(vec::load(reinterpret_cast<const int8_t*>(bytes)), unit, middle); };
    read(head.scales(false) + place.within, scale, key_scales);
    read(head.zeros(false) + place.within, zero, key_zeros);
    read(head.scales(true) + place.within, scale, value_scales);
    read(head.zeros(true) + place.within, zero, value_zeros);
  });
}

// Products with codes become scores.
inline void scale_scores(const Block& block, int64_t row, Span stored, float* scores) {
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

// Weights become those of codes; returns the sum of their products with the zeros.
inline float scale_weights(const Block& block, Span stored, float* weights) {
  constexpr int64_t step = vec::sum_parts * vec::lanes;
  const float *scales = block.value_scales, *zeros = block.value_zeros;
  const vec::Vec nothing = vec::all(0.0f), smallest = vec::all(0x1p-126f);
  vec::Vec sums[vec::sum_parts];
  for (vec::Vec& sum : sums) sum = nothing;
  for (int64_t start = stored.first / step * step; start < stored.end; start += step) {
#pragma GCC unroll 2
    for (int part = 0; part < vec::sum_parts; part++) {
      const int64_t k = start + part * vec::lanes;
      const vec::Vec weight = vec::load(weights + k), scaled = weight * vec::load(scales + k);
      // Never a subnormal one: see exp2_up_to_0.
      const vec::Vec normal = vec::where_less(scaled, smallest, nothing, scaled), product = normal * vec::load(zeros + k);
      if (k >= stored.first && k + vec::lanes <= stored.end) {
        vec::store(weights + k, normal);
        sums[part] = sums[part] + product;
      } else {
        const vec::Vec counted = vec::counted_from(k), first = vec::all(static_cast<float>(stored.first));
        const vec::Vec end = vec::all(static_cast<float>(stored.end));
        vec::store(weights + k, vec::where_less(counted, end, normal, weight));
        sums[part] = sums[part] + vec::where_less(counted, first, nothing, vec::where_less(counted, end, product, nothing));
      }
    }
  }
  return vec::sum(sums);
}

// --- a whole segment -------------------------------------------------------------------------------------------------------------------

template <int Rows>
inline void sum_rows(const Block& block, const Sides& values, const Span* spans, const float* starts, const Target* targets, Ahead* whom) {
  bool begun = false;
  const Span seen = {spans[0].first, spans[Rows - 1].end};
  values.for_each(seen, whom, [&](const Side& side, auto element, Ahead* ahead) {
    if (common(seen, side.wanted).empty()) return;
    Span parts[Rows];
    for (int r = 0; r < Rows; r++) parts[r] = common(spans[r], side.wanted);
    sum_tiles<Rows, decltype(element)>(block.scores, side.tiles, side.stride, parts, begun ? nullptr : starts, ahead, side.lines,
                                       targets, block.width);
    begun = true;
  });
}

// Calls use(row, query, feature, statistics, sums) for every row that sees something of the segment, but for those that are done with it:
// where `finishes` says so, a row that sees nothing else of the context goes right to its place.
template <typename Use>
inline void work_segment(const Block& block, int64_t segment, bool finishes, Use use) {
  const int64_t stored = block.stored_in(segment);
  const Sides keys(block, segment, false);
  if (stored > 0) read_scales(block, segment);
  const Sides values(block, segment, true);
  finishes &= stored == 0 && block.width == block.task.cache.head_size;
  for_tiles(block.rows, [&](int64_t first, auto count) {
    constexpr int rows = count.value;
    Ahead* const ahead = first == 0 ? block.ahead : nullptr;
    Span spans[rows];
    Statistics statistics[rows];
    float starts[rows];
    Target targets[rows];
    block.for_rows(first, first + rows, [&](int64_t row, int64_t query, int64_t) {
      spans[row - first] = block.seen_by_query(query, segment);
      starts[row - first] = 0.0f;
    });
    prepare_tile(block, first, first + rows);
    score_rows<rows>(block, keys, first, {spans[0].first, spans[rows - 1].end}, ahead);
    for (int r = 0; r < rows && stored > 0; r++) scale_scores(block, first + r, common(spans[r], {0, stored}), block.scores + r * score_stride);
    weigh_rows<rows>(block.scores, spans, block.task.cap, statistics);
    for (int r = 0; r < rows && stored > 0; r++)
      starts[r] = 0.0f - scale_weights(block, common(spans[r], {0, stored}), block.scores + r * score_stride);
    block.for_rows(first, first + rows, [&](int64_t row, int64_t query, int64_t feature) {
      const int64_t r = row - first;
      const bool is_done = finishes && segment == block.first_segment(query) && segment == block.last_segment(query);
      targets[r] = is_done ? Target{block.out(query, feature), 1.0f / statistics[r].sum} : Target{block.sums + r * block.width, 1.0f};
    });
    sum_rows<rows>(block, values, spans, starts, targets, ahead);
    block.for_rows(first, first + rows, [&](int64_t row, int64_t query, int64_t feature) {
      const int64_t r = row - first;
      const float* sums = block.sums + r * block.width;
      if (!spans[r].empty() && targets[r].at == sums) use(row, query, feature, statistics[r], sums);
    });
  });
}

// --- the whole context ---------------------------------------------------------------------------------------------------------------

// Adds a segment to those before it, in `out`; `first` says that there is none.
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
  return Block::scratch_floats(most_queries_in_block(task) * task.group, rounded_up(task.cache.head_size, vec::lanes));
}

void attend(const AttendTask& first, float* scratch) {
  Ahead ahead(first);
  for (const AttendTask* task = &first; task; task = task->next) {
    const int64_t size = task->cache.head_size;
    for (int64_t query = 0, next; query < task->count; query = next) {
      next = query + queries_in_block(*task, query);
      // The later rows of a task read what the first have brought into the cache.
      Block block(*task, query == 0 ? &ahead : nullptr, query, next - query, scratch);
      if (block.stored > 0) prepare_store_queries(block);
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

void attend_segment(const AttendTask& task, int64_t segment, float* partial, float* scratch) {
  const int64_t size = task.cache.head_size;
  Ahead ahead(task, segment);
  Block block(task, &ahead, 0, 1, scratch);
  if (block.stored > 0) prepare_store_queries(block);
  work_segment(block, segment, false, [&](int64_t row, int64_t, int64_t, const Statistics& part, const float* sums) {
    float* out = partial + row * (2 + size);
    out[0] = part.largest;
    out[1] = part.sum;
    std::memcpy(out + 2, sums, static_cast<size_t>(size) * 4);
  });
}

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
