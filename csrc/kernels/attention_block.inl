// The rows that pass through the context together, and the location of the keys and values that they see.
#include "kernels/attention_codes.inl"

namespace weft::WEFT_ISA {
namespace {

struct Statistics {
  float largest, sum;
};

// A group of queries of a task, with all their heads, and the scratch memory to compute them.
struct QueryBlock {
  const AttendTask& task;
  Prefetcher* prefetcher;   // is called with the number of cache lines about to be read, and prefetches later lines meanwhile; may be null
  int64_t first_query, rows;
  int64_t width;            // head size rounded up to whole vectors and units
  float* scores;            // [tile_rows, score_stride]: scores of the current tile and segment, later weights * value scales
  float* sums;              // [tile_rows, width]: weighted sums of values of the current tile and segment
  float *key_scales, *value_scales;   // [segment_keys + 16]: of the current segment
  Statistics* totals;       // [rows]: largest score and sum of weights over the previous segments

  // Used only for positions in full blocks.
  int16_t* queries;         // [rows, width]: codes of all rows
  float* query_factors;     // [rows]: value of one query code, times the task's scale; without a cap also times 1 / log 2
  int16_t* weights;         // [tile_rows, code_stride]: weight codes of the current tile and segment
  uint16_t *keys, *values;  // elements of the current segment, if they are copied

  // Used only for positions in store blocks.
  int64_t stored;           // all rows read the positions before this one from the store
  float *key_zeros, *value_zeros;           // [segment_keys + 16]: of the current segment
  float *stored_keys, *stored_values;       // [segment_keys, width]: of the current segment, if they are copied
  float* store_queries;     // [rows, width]: scaled (and rotated) queries; zeros past the last feature
  float* query_sums;        // [rows]: sum of the features of each row of `store_queries`

  QueryBlock(const AttendTask& whole, Prefetcher* prefetching, int64_t first, int64_t count, float* scratch)
      : task(whole), prefetcher(prefetching), first_query(first), rows(count * whole.group), width(width_of(whole)),
        stored(whole.stored_before(whole.first_position + first)) {
    // Scratch memory is aligned, because a vector that crosses a cache line needs two loads.
    scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
    const auto take = [&](int64_t floats) {
      float* const taken = scratch;
      scratch += rounded_up(floats, 16);
      return taken;
    };
    const auto take_codes = [&](int64_t codes) { return reinterpret_cast<int16_t*>(take((codes + 1) / 2)); };
    const auto take_elements = [&](int64_t elements) { return reinterpret_cast<uint16_t*>(take_codes(elements)); };
    scores = take(tile_rows * score_stride);
    sums = take(tile_rows * width);
    key_scales = take(score_stride);
    value_scales = take(score_stride);
    totals = reinterpret_cast<Statistics*>(take(2 * rows));
    queries = take_codes(rows * width);
    query_factors = take(rows);
    weights = take_codes(tile_rows * code_stride);
    keys = take_elements(segment_tiles * tile_elements(false));
    values = take_elements(segment_tiles * tile_elements(true));
    key_zeros = take(score_stride);
    value_zeros = take(score_stride);
    stored_keys = take(segment_keys * width);
    stored_values = take(segment_keys * width);
    store_queries = take(rows * width);
    query_sums = take(rows);
  }

  // An upper bound of the floats that the constructor takes.
  static int64_t scratch_floats(int64_t rows, int64_t width) {
    return 16 * 18 + tile_rows * (score_stride + code_stride + width) + 4 * score_stride + rows * (2 * width + 4) + 3 * segment_keys * width;
  }
  static int64_t width_of(const AttendTask& task) { return rounded_up(task.cache.head_size, larger(vec::lanes, 2 * codes_of_unit)); }

  // 16-bit elements of a tile of the KV cache.
  int64_t tile_elements(bool of_values) const { return key_tile * bytes_of_vector(task, of_values, false) / 2; }

  int64_t first_segment(int64_t query) const { return task.window > 0 ? larger(position(query) + 1 - task.window, 0) / segment_keys : 0; }
  int64_t last_segment(int64_t query) const { return position(query) / segment_keys; }
  int64_t position(int64_t query) const { return task.first_position + first_query + query; }
  Span seen_by_query(int64_t query, int64_t segment) const { return seen_from(task, position(query), segment); }
  // The union of the spans of all queries. Both ends of a span grow with the query's position. So the union begins with
  // the first query's span and ends with the last one's.
  Span seen_by_any(int64_t segment) const {
    return {seen_by_query(0, segment).first, seen_by_query(rows / task.group - 1, segment).end};
  }
  // The number of positions of a segment that are read from the store.
  int64_t stored_in(int64_t segment) const { return larger(0, smaller(stored - segment * segment_keys, segment_keys)); }

  // Calls use(row, query, feature) for rows [first, end). The head of the row begins at `feature` of its query. There
  // is one division in all: a division takes as long as a dozen vector multiplications.
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

// The key tiles or value tiles of one tier (KV cache or store) in one segment, either in place or copied to scratch
// memory.
struct TierTiles {
  Span span;       // positions that any row sees
  bool is_stored, of_values;
  bool is_copied;    // true: the tiles are in scratch memory. Tiles of the store are converted to floats there.
  int64_t stride;    // store only: elements from one value to the next
  int64_t lines;     // cache lines of a tile
  const void* tiles[segment_tiles];
  // True for keys of the KV cache that are not copied and that only one row tile reads. Their scales are then read
  // together with their tile: reading them earlier would wait for memory. `scales` points to the key scales of each
  // tile; the value scales follow `block_size` elements later.
  bool reads_scales_late;
  const uint16_t* scales[segment_tiles];
};

// Divides `span` into runs of n positions that are contiguous in one tile of a KV block. Calls use(k, n, place, tile,
// tile_width) for each. Position k is at `place`. Its tile has `tile_width` positions and begins `tile` positions into
// the KV block.
template <typename Use>
inline void for_runs(const AttendTask& task, int64_t start, Span span, Use use) {
  const int64_t block_size = task.cache.block_size;
  CachePosition place(task, start + span.first);
  for (int64_t k = span.first; k < span.end;) {
    const int64_t tile = place.offset / key_tile * key_tile, tile_width = smaller(key_tile, block_size - tile);
    const int64_t n = smaller(smaller(span.end - k, key_tile - k % key_tile), tile + tile_width - place.offset);
    use(k, n, place, tile, tile_width);
    place.step(task, n);
    k += n;
  }
}

// convert_keys and convert_value convert codes to floats: one feature of n keys, or all features of one value.
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

// Copies tiles of the store, converted to floats. The conversion is exact, so sums keep the same bits.
inline void copy_from_store(const QueryBlock& block, int64_t start, TierTiles& tier) {
  const AttendTask& task = block.task;
  const int64_t size = task.cache.head_size;
  float* const floats = tier.of_values ? block.stored_values : block.stored_keys;
  tier.stride = tier.of_values ? block.width : size;
  for (int64_t tile = 0; tile < segment_tiles; tile++) tier.tiles[tile] = floats + tile * key_tile * tier.stride;
  for_runs(task, start, tier.span, [&](int64_t k, int64_t n, const CachePosition& place, int64_t first, int64_t tile_width) {
    const StoredHead head = task.store.head(task.store_table[place.block], task.kv_head);
    if (tier.of_values) {
      for (int64_t i = 0; i < n; i++) {
        if (block.prefetcher) block.prefetcher->prefetch(lines_of(head.vector_bytes));
        convert_value(task.store, head.values() + (place.offset + i) * head.vector_bytes, floats + (k + i) * tier.stride);
      }
    } else {
      float* tile = floats + k / key_tile * key_tile * tier.stride + k % key_tile;
      for (int64_t f = 0; f < size; f++) {
        if (block.prefetcher && f % 2 == 0) block.prefetcher->prefetch(1);
        convert_keys(task.store, head.keys() + first * head.vector_bytes + place.offset - first, tile_width, f, n, tile + f * key_tile);
      }
    }
  });
}

// Copies tiles of the KV cache. Positions that no row sees are left uninitialised.
inline void copy_from_cache(const QueryBlock& block, int64_t start, TierTiles& tier) {
  const AttendTask& task = block.task;
  const int64_t tile_elements = block.tile_elements(tier.of_values), of_position = tile_elements / key_tile;
  uint16_t* const elements = tier.of_values ? block.values : block.keys;
  for (int64_t tile = 0; tile < segment_tiles; tile++) tier.tiles[tile] = elements + tile * tile_elements;
  for_runs(task, start, tier.span, [&](int64_t k, int64_t n, const CachePosition& place, int64_t first, int64_t tile_width) {
    const CachedHead head = task.cache.head(task.table[place.block], task.kv_head);
    uint16_t* const tile = elements + k / key_tile * tile_elements;
    if (tier.of_values) {
      for (int64_t i = 0; i < n; i++) {
        if (block.prefetcher) block.prefetcher->prefetch(lines_of(of_position * 2));
        const uint16_t* from = head.value(place.offset + i);
        uint16_t* to = tile + (k + i) % key_tile / 2 * 2 * of_position + (k + i) % 2;
        for (int64_t e = 0; e < of_position; e++) to[2 * e] = from[2 * e];
      }
    } else {
      for (int64_t e = 0; e < of_position; e += 2) {
        if (block.prefetcher) block.prefetcher->prefetch(1);
        std::memcpy(tile + e * key_tile + k % key_tile * 2, head.keys(first) + e * tile_width + (place.offset - first) * 2,
                    static_cast<size_t>(n) * 4);
      }
    }
  });
}

// Finds the tiles of a tier in one segment, or copies them to scratch memory. They are copied if
// - the KV block size is not a multiple of the tile;
// - they are in the store, converting bytes to floats is slow, and several row tiles read them; or
// - they are values in the store, and the head size is not a multiple of the features in one vector.
inline void find_tiles(const QueryBlock& block, int64_t segment, TierTiles& tier) {
  const AttendTask& task = block.task;
  const int64_t size = task.cache.head_size, features_per_element = tier.is_stored && task.store.bits == 4 ? Keys<Nibbles>::features : 1;
  tier.lines = lines_of_tile(task, tier.of_values, tier.is_stored);
  const bool is_slow = !vec::reads_bytes && block.rows > tile_rows, is_ragged = tier.of_values && size % (vec::lanes * features_per_element) != 0;
  tier.is_copied = !has_whole_tiles(task.cache) || (tier.is_stored && (is_slow || is_ragged));
  tier.reads_scales_late = !tier.is_stored && !tier.of_values && !tier.is_copied && block.rows <= tile_rows;
  const int64_t start = segment * segment_keys, first = tier.span.first / key_tile;
  if (tier.is_copied) {
    if (block.prefetcher) block.prefetcher->expect(tiles_of(tier.span) * tier.lines);
    if (tier.is_stored) {
      copy_from_store(block, start, tier);
    } else {
      copy_from_cache(block, start, tier);
    }
    if (block.prefetcher) block.prefetcher->prefetch_rest();
    return;
  }
  tier.stride = size / features_per_element;
  CachePosition place(task, start + first * key_tile);
  for (int64_t tile = first; tile * key_tile < tier.span.end; tile++, place.step(task, key_tile)) {
    tier.tiles[tile] = tile_at(task, place, tier.of_values, tier.is_stored);
    if (tier.reads_scales_late) tier.scales[tile] = task.cache.head(task.table[place.block], task.kv_head).scales(false) + place.offset;
  }
}

// The keys or the values of a segment that any row of a block sees.
struct SegmentTiles {
  const QueryBlock& block;
  int count = 0;
  TierTiles tiers[2];     // the store, then the KV cache

  SegmentTiles(const QueryBlock& whole, int64_t segment, bool of_values) : block(whole) {
    const int64_t stored = block.stored_in(segment);
    const Span seen = block.seen_by_any(segment);
    const auto add = [&](Span span, bool is_stored) {
      if (span.empty()) return;
      TierTiles& tier = tiers[count++];
      tier.span = span;
      tier.is_stored = is_stored;
      tier.of_values = of_values;
      find_tiles(block, segment, tier);
    };
    add(common(seen, {0, stored}), true);
    add(common(seen, {stored, segment_keys}), false);
  }

  // The KV cache is the last tier in `tiers`.
  bool read_scales_late() const { return count > 0 && tiers[count - 1].reads_scales_late; }

  // Calls use(tier, element, prefetcher) for each tier. The type of `element` is the element type of its tiles. The
  // prefetcher is null for copied tiles, which are in the L2 cache already. `seen`: the span that the caller reads.
  template <typename Use>
  void for_each(Span seen, Prefetcher* prefetcher, Use use) const {
    for (int i = 0; i < count; i++) {
      const TierTiles& tier = tiers[i];
      Prefetcher* const used_prefetcher = tier.is_copied ? nullptr : prefetcher;
      if (!tier.is_stored) {
        use(tier, int16_t{}, used_prefetcher);
      } else if (tier.is_copied) {
        use(tier, float{}, used_prefetcher);
      } else if (block.task.store.bits == 8) {
        use(tier, int8_t{}, used_prefetcher);
      } else {
        use(tier, Nibbles{}, used_prefetcher);
      }
      if (!used_prefetcher) continue;
      // Tiles that only other rows read are counted here, so that the prefetcher moves past them.
      used_prefetcher->expect((tiles_of(tier.span) - tiles_of(common(seen, tier.span))) * tier.lines);
      used_prefetcher->prefetch_rest();
    }
  }
};

}  // namespace
}  // namespace weft::WEFT_ISA
