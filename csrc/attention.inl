// Attention over the paged cache.
//
// The rows of a task are its queries' heads, query by query. A block of rows goes through the context segment by segment (kernels.h),
// and through a segment in pieces of 64 positions, which stay in the first-level cache: scores of all rows, then weights, then sums of
// values. What a row does not see is never multiplied with a value, not even as 0, since that may be NaN.
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
  float* queries;           // [rows, width], times the scale and, but for a cap, what makes scores of base 2
  float* scores;            // [rows, score_stride]: of the segment in work, then their weights
  float* sums;              // [rows, width]: the segment's weighted sum of values
  float* floats;            // [piece_keys, width]: keys or values of the piece in work
  Statistics* statistics;   // [rows]: of the segment in work
  Statistics* totals;       // [rows]: of the segments before

  // Of the store.
  int64_t stored;           // what lies before this position is read from there by all rows
  float *key_scales, *key_zeros, *value_scales, *value_zeros;   // [segment_keys + 16]: of the segment in work
  float* store_queries;     // [rows, width]: as keys of the store meet them
  float* query_sums;        // [rows]: of all features of those
  float* zero_sums;         // [rows]: of weight * scale * zero, of the segment in work

  Block(const AttendTask& whole, Ahead* fetching, int64_t first, int64_t count, float* scratch)
      : task(whole), ahead(fetching), first_query(first), rows(count * whole.group), width(rounded_up(whole.cache.head_size, vec::lanes)),
        stored(whole.stored_before(whole.first_position + first)) {
    // Aligned: a vector that lies across two cache lines is loaded twice.
    scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
    scores = scratch;
    sums = scores + rows * score_stride;
    floats = sums + rows * width;
    queries = floats + piece_keys * width;
    store_queries = queries + rows * width;
    key_scales = store_queries + rows * width;
    key_zeros = key_scales + score_stride;
    value_scales = key_zeros + score_stride;
    value_zeros = value_scales + score_stride;
    statistics = reinterpret_cast<Statistics*>(value_zeros + score_stride);
    totals = statistics + rows;
    query_sums = reinterpret_cast<float*>(totals + rows);
    zero_sums = query_sums + rows;
  }

  static int64_t scratch_floats(int64_t rows, int64_t width) {
    return 16 + rows * (score_stride + 3 * width + 6) + piece_keys * width + 4 * score_stride;
  }

  int64_t first_segment(int64_t query) const { return task.window > 0 ? larger(position(query) + 1 - task.window, 0) / segment_keys : 0; }
  int64_t last_segment() const { return position(rows / task.group - 1) / segment_keys; }
  int64_t position(int64_t query) const { return task.first_position + first_query + query; }
  Span seen_by_query(int64_t query, int64_t segment) const { return seen_from(task, position(query), segment); }
  Span seen(int64_t row, int64_t segment) const { return seen_by_query(row / task.group, segment); }
  int64_t stored_in(int64_t segment) const { return larger(0, smaller(stored - segment * segment_keys, segment_keys)); }
  // A later row begins to see later and sees further.
  Span seen_by_any(int64_t segment, int64_t first, int64_t end) const { return {seen(first, segment).first, seen(end - 1, segment).end}; }

  // Calls use(row, query, feature) for every row; there its head begins among those of the query. Without divisions, which take as long
  // as a dozen multiplications of vectors.
  template <typename Use>
  void for_rows(Use use) const {
    for (int64_t query = 0, row = 0; row < rows; query++) {
      for (int64_t head = 0; head < task.group; head++, row++) use(row, query, head * task.cache.head_size);
    }
  }
  float* out(int64_t query, int64_t feature) const { return task.out + (first_query + query) * task.out_stride + feature; }
};

// --- pieces --------------------------------------------------------------------------------------------------------------------------

inline Span part_of(Span span, int64_t start) { return {larger(span.first - start, 0), smaller(span.end - start, piece_keys)}; }
inline Span common(Span a, Span b) { return {larger(a.first, b.first), smaller(a.end, b.end)}; }

// The tiles of a piece that are wanted, as they lie in memory or as floats in the scratch.
template <typename Element>
struct Piece {
  int64_t start;     // in the segment
  Span side;         // of the segment: nothing else of it is wanted
  bool is_stored;
  int64_t stride;    // from one value to the next
  const Element* tiles[piece_tiles];

  Span part(Span seen) const { return part_of(common(seen, side), start); }
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

// A piece as floats in the scratch: for heads that are no whole vectors, blocks that are no whole tiles, and where a half is slow to read.
// Codes stay codes, so that the sums are the same as of those that are read as they lie.
inline void convert(const Block& block, int64_t start, Span wanted, bool values, Piece<float>& piece) {
  const AttendTask& task = block.task;
  const CacheLayer& cache = task.cache;
  const int64_t size = cache.head_size, stride = values ? block.width : size;
  piece.stride = stride;
  for (int64_t tile = 0; tile < piece_tiles; tile++) piece.tiles[tile] = block.floats + tile * key_tile * stride;
  for_runs(task, start, wanted, [&](int64_t k, int64_t n, const Place& place, int64_t first, int64_t tile_width) {
    const uint16_t* halves = nullptr;
    StoredHead head = {};
    if (piece.is_stored) {
      head = task.store.head(task.store_table[place.block], task.kv_head);
    } else {
      halves = cache.keys + task.table[place.block] * cache.block_stride + task.kv_head * cache.head_stride;
    }
    if (values) {
      for (int64_t i = 0; i < n; i++) {
        float* row = block.floats + (k + i) * stride;
        if (block.ahead) block.ahead->ask(lines_of(bytes_of_vector(task, piece.is_stored)));
        if (piece.is_stored) {
          convert_value(task.store, head.values() + (place.within + i) * head.vector_bytes, row);
        } else {
          const uint16_t* from = halves + cache.value_offset + (place.within + i) * size;
          vec::for_each(size, [&](int64_t f, auto count) { vec::store(row + f, vec::load(from + f, count)); });
        }
      }
    } else {
      float* tile = block.floats + k / key_tile * key_tile * stride + k % key_tile;
      for (int64_t f = 0; f < size; f++) {
        if (block.ahead && f % 2 == 0) block.ahead->ask(1);
        if (piece.is_stored) {
          convert_keys(task.store, head.keys() + first * head.vector_bytes + place.within - first, tile_width, f, n, tile + f * key_tile);
        } else {
          const uint16_t* from = halves + first * size + place.within - first + f * tile_width;
          vec::for_each(n, [&](int64_t i, auto count) { vec::store(tile + f * key_tile + i, vec::load(from + i, count), count); });
        }
      }
    }
  });
}

// Calls use(piece, ahead) for the pieces of one side of a segment, their keys or their values; `ahead` is to be asked meanwhile, unless it
// is null. Elements of `Element` are read as they lie where that can be.
template <typename Element, typename Use>
inline void for_pieces_of(const Block& block, int64_t segment, bool values, Span side, Use use) {
  const AttendTask& task = block.task;
  constexpr bool is_stored = sizeof(Element) == 1;
  const int64_t size = task.cache.head_size, in_an_element = Keys<Element>::features;
  const bool as_floats = (!vec::reads_halves && block.rows > tile_rows) || !has_whole_tiles(task.cache) ||
                         (values && size % (vec::lanes * in_an_element) != 0);
  const int64_t lines = lines_of_tile(task, values, is_stored);
  Place place(task, segment * segment_keys + side.first / key_tile * key_tile);
  for (int64_t start = side.first / piece_keys * piece_keys; start < side.end; start += piece_keys) {
    const Span wanted = part_of(side, start);
    const int64_t first = wanted.first / key_tile, end = rounded_up(wanted.end, key_tile) / key_tile;
    if (block.ahead) block.ahead->owe((end - first) * lines);
    if (as_floats) {
      Piece<float> piece;
      piece.start = start;
      piece.side = side;
      piece.is_stored = is_stored;
      convert(block, segment * segment_keys + start, wanted, values, piece);
      use(piece, nullptr);
    } else {
      Piece<Element> piece;
      piece.start = start;
      piece.side = side;
      piece.is_stored = is_stored;
      piece.stride = size / in_an_element;
      for (int64_t tile = first; tile < end; tile++, place.step(task, key_tile))
        piece.tiles[tile] = reinterpret_cast<const Element*>(tile_at(task, place, values, is_stored));
      use(piece, block.ahead);
    }
    if (block.ahead) block.ahead->ask_rest();
  }
}

// The same for what any row sees of a segment: what is read from the store, then what is not.
template <typename Use>
inline void for_pieces(const Block& block, int64_t segment, bool values, Use use) {
  const Span seen = block.seen_by_any(segment, 0, block.rows);
  const int64_t stored = block.stored_in(segment);
  const Span from_store = common(seen, {0, stored});
  if (!from_store.empty()) {
    if (block.task.store.bits == 8) {
      for_pieces_of<int8_t>(block, segment, values, from_store, use);
    } else {
      for_pieces_of<Nibbles>(block, segment, values, from_store, use);
    }
  }
  for_pieces_of<uint16_t>(block, segment, values, common(seen, {stored, segment_keys}), use);
}

// --- segments ------------------------------------------------------------------------------------------------------------------------

inline void score_segment(const Block& block, int64_t segment) {
  const int64_t size = block.task.cache.head_size;
  for_pieces(block, segment, false, [&](const auto& piece, Ahead* ahead) {
    const float* queries = piece.is_stored ? block.store_queries : block.queries;
    for_tiles(block.rows, [&](int64_t row, auto rows) {
      const Span seen = piece.part(block.seen_by_any(segment, row, row + rows.value));
      if (seen.empty()) return;
      const int64_t first = seen.first / key_tile, end = rounded_up(seen.end, key_tile) / key_tile;
      float* scores = block.scores + row * score_stride + piece.start + first * key_tile;
      // Where the store ends inside a tile, scores of its keys stand there already.
      const int64_t kept = block.stored > 0 && !piece.is_stored ? piece.side.first - piece.start - first * key_tile : 0;
      float others[tile_rows][key_tile];
      for (int64_t r = 0; r < rows.value && kept > 0; r++) std::memcpy(others[r], scores + r * score_stride, static_cast<size_t>(kept) * 4);
      score_tiles<rows.value>(queries + row * block.width, block.width, size, piece.tiles + first, end - first,
                              row == 0 ? ahead : nullptr, scores);
      for (int64_t r = 0; r < rows.value && kept > 0; r++) std::memcpy(scores + r * score_stride, others[r], static_cast<size_t>(kept) * 4);
    });
  });
}

// Scores become weights 2^(score - largest); those around the span, up to whole sums of lanes, become 0.
inline Statistics weigh(float* scores, Span span, float cap) {
  constexpr int64_t step = vec::sum_parts * vec::lanes;
  const int64_t first = span.first / step * step, end = rounded_up(span.end, step);
  if (cap != 0.0f) {
    for (int64_t k = first; k < end; k += vec::lanes)
      vec::store(scores + k, vec::all(cap * vec::one_by_log_2) * vec::tanh(vec::load(scores + k) / vec::all(cap)));
  }
  const vec::Vec nothing = vec::all(-INFINITY);
  for (int64_t k = first; k < span.first; k += vec::lanes)
    vec::store(scores + k, vec::where_less(vec::counted_from(k), vec::all(span.first), nothing, vec::load(scores + k)));
  for (int64_t k = end - step; k < end; k += vec::lanes)
    vec::store(scores + k, vec::where_less(vec::counted_from(k), vec::all(span.end), vec::load(scores + k), nothing));
  vec::Vec best = nothing;
  for (int64_t k = first; k < end; k += vec::lanes) best = vec::max(best, vec::load(scores + k));
  const float largest = vec::largest(best);
  const vec::Vec base = vec::all(largest == -INFINITY ? 0.0f : largest);
  vec::Vec sums[vec::sum_parts];
  for (vec::Vec& sum : sums) sum = vec::all(0.0f);
  for (int64_t k = first; k < end; k += step) {
#pragma GCC unroll 2
    for (int part = 0; part < vec::sum_parts; part++) {
      float* at = scores + k + part * vec::lanes;
      const vec::Vec weight = vec::exp2_up_to_0(vec::load(at) - base);
      vec::store(at, weight);
      sums[part] = sums[part] + weight;
    }
  }
  return {largest, vec::sum(sums)};
}

// --- scales and zeros of the store -----------------------------------------------------------------------------------------------------

// Those of all that is read from the store of a segment, as floats.
inline void read_scales(const Block& block, int64_t segment) {
  const StoreLayer& store = block.task.store;
  const vec::Vec unit = vec::all(store.bits == 8 ? 1.0f : 1.0f / 16.0f), middle = vec::all(store.bits == 8 ? 0.0f : 8.0f);
  const int64_t start = segment * segment_keys;
  const Span wanted = common(block.seen_by_any(segment, 0, block.rows), {0, block.stored_in(segment)});
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
inline void scale_scores(const Block& block, int64_t row, Span stored) {
  float* scores = block.scores + row * score_stride;
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
inline float scale_weights(const Block& block, int64_t row, Span stored) {
  constexpr int64_t step = vec::sum_parts * vec::lanes;
  float* weights = block.scores + row * score_stride;
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

inline void sum_segment(const Block& block, int64_t segment) {
  for (int64_t row = 0; row < block.rows; row++) {
    const vec::Vec zeros = vec::all(0.0f - block.zero_sums[row]);
    vec::for_each(block.width, [&](int64_t i, auto) { vec::store(block.sums + row * block.width + i, zeros); });
  }
  for_pieces(block, segment, true, [&](const auto& piece, Ahead* ahead) {
    const auto sum = [&](int64_t row, auto rows, Span span) {
      if (!span.empty())
        sum_rows<rows.value>(block.scores + row * score_stride + piece.start, piece.tiles, piece.stride, span, row == 0 ? ahead : nullptr,
                             block.sums + row * block.width, block.width);
    };
    for_tiles(block.rows, [&](int64_t row, auto rows) {
      // What all rows see goes through the tile. Before it and behind it the rows of each query go on alone, each at the same place of
      // its own sum.
      const Span begin = piece.part(block.seen(row, segment));
      const Span end = piece.part(block.seen(row + rows.value - 1, segment));
      const Span shared = {end.first, larger(end.first, begin.end)};
      const bool all_same = begin.first == end.first && begin.end == end.end;
      const auto sum_queries = [&](auto part) {
        for (int64_t first = row, next; first < row + rows.value && !all_same; first = next) {
          next = smaller(row + rows.value, (first / block.task.group + 1) * block.task.group);
          const Span span = part(piece.part(block.seen(first, segment)));
          if (!span.empty()) with_rows(next - first, [&](auto count) { sum(first, count, span); });
        }
      };
      sum_queries([&](Span span) { return Span{span.first, smaller(span.end, shared.first)}; });
      sum(row, rows, shared);
      sum_queries([&](Span span) { return Span{larger(span.first, shared.end), span.end}; });
    });
  });
}

// Leaves the segment's statistics and sums in the block.
inline void work_segment(Block& block, int64_t segment) {
  const int64_t stored = block.stored_in(segment);
  score_segment(block, segment);
  if (stored > 0) read_scales(block, segment);
  block.for_rows([&](int64_t row, int64_t query, int64_t) {
    const Span span = block.seen_by_query(query, segment), from_store = common(span, {0, stored});
    block.zero_sums[row] = 0.0f;
    if (span.empty()) return;
    if (!from_store.empty()) scale_scores(block, row, from_store);
    block.statistics[row] = weigh(block.scores + row * score_stride, span, block.task.cap);
    if (!from_store.empty()) block.zero_sums[row] = scale_weights(block, row, from_store);
  });
  sum_segment(block, segment);
}

// --- the whole context ---------------------------------------------------------------------------------------------------------------

inline void prepare(Block& block) {
  const AttendTask& task = block.task;
  const vec::Vec scale = vec::all(task.cap == 0.0f ? task.scale * vec::one_by_log_2 : task.scale);
  block.for_rows([&](int64_t row, int64_t query, int64_t feature) {
    const float* from = task.queries + (block.first_query + query) * task.query_stride + feature;
    vec::for_each(task.cache.head_size, [&](int64_t i, auto n) {
      vec::store(block.queries + row * block.width + i, vec::load(from + i, n) * scale);
    });
    if (block.stored > 0) {
      float* query = block.store_queries + row * block.width;
      std::memcpy(query, block.queries + row * block.width, static_cast<size_t>(task.cache.head_size) * 4);
      if (rotates_keys(task.store)) rotate_vector(query, task.cache.head_size);
      const auto add = [&](vec::Vec sum, int64_t i, auto n) { return sum + vec::load(query + i, n); };
      block.query_sums[row] = vec::sum_row(task.cache.head_size, add);
    }
  });
}

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
  const vec::Vec part = vec::all(1.0f) / vec::all(total.sum);
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
      prepare(block);
      for (int64_t segment = block.first_segment(0); segment <= block.last_segment(); segment++) {
        work_segment(block, segment);
        block.for_rows([&](int64_t row, int64_t own, int64_t feature) {
          if (!block.seen_by_query(own, segment).empty())
            merge(block.statistics[row], block.sums + row * block.width, size, segment == block.first_segment(own), block.totals[row],
                  block.out(own, feature));
        });
      }
      block.for_rows([&](int64_t row, int64_t own, int64_t feature) { finish(block.totals[row], size, block.out(own, feature)); });
    }
  }
}

void attend_segment(const AttendTask& task, int64_t segment, float* partial, float* scratch) {
  const int64_t size = task.cache.head_size;
  Ahead ahead(task, segment);
  Block block(task, &ahead, 0, 1, scratch);
  prepare(block);
  work_segment(block, segment);
  for (int64_t row = 0; row < block.rows; row++, partial += 2 + size) {
    partial[0] = block.statistics[row].largest;
    partial[1] = block.statistics[row].sum;
    std::memcpy(partial + 2, block.sums + row * block.width, static_cast<size_t>(size) * 4);
  }
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
