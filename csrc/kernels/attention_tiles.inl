// The inner loops of attention over the store: a few rows against some keys or values; and the prefetcher.
//
// A score is the sum over features of query * key, in feature order. A sum of values is computed in position order.
// Each score and each sum has its own lane. So none depends on the other rows or keys of a tile, nor on the number of lanes.
#include "isa/vec_curves.h"

namespace weft::WEFT_ISA {
namespace {

constexpr int64_t segment_tiles = segment_keys / key_tile;
constexpr int64_t block_rows = 48;   // rows of a QueryBlock, but at least the heads of one query
// Distance between rows of scores. It is not a power of two, else all rows would share few cache sets.
constexpr int64_t score_stride = segment_keys + 16;

// Number of rows that share a loaded key or value: as many as there are registers for their sums.
#if defined(WEFT_AVX512)
constexpr int tile_rows = 6;
constexpr int tile_sums = 24;
#elif defined(WEFT_AVX2)
constexpr int tile_rows = 3;
constexpr int tile_sums = 12;
#else
constexpr int tile_rows = 2;
constexpr int tile_sums = 8;
#endif

inline int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Positions of a segment, relative to its start.
struct Span {
  int64_t first, end;
  bool empty() const { return first >= end; }
};

// The part of a segment that a query at `position` sees.
inline Span seen_from(const AttendTask& task, int64_t position, int64_t segment) {
  const int64_t end = position + 1 - segment * segment_keys;
  return {task.window > 0 ? larger(end - task.window, 0) : 0, smaller(end, segment_keys)};
}

inline int64_t most_queries_in_block(const AttendTask& task) { return larger(1, smaller(task.count, block_rows / task.group)); }
// Number of queries in the block that begins with `query`. All of them read the same positions from the store, so the
// rows of a tile need the same tiers.
inline int64_t queries_in_block(const AttendTask& task, int64_t query) {
  return smaller(smaller(most_queries_in_block(task), task.count - query), task.queries_alike(task.first_position + query));
}

// True if each tile of keys, and of values, is contiguous in memory.
inline bool has_whole_tiles(const CacheLayer& cache) { return cache.block_size % key_tile == 0; }

// A byte with two 4-bit codes.
struct Nibbles {
  uint8_t pair;
};

// Bytes of one key or value in the cache or the store, without its scale.
inline int64_t bytes_of_vector(const AttendTask& task, bool values, bool is_stored) {
  const int64_t size = task.cache.head_size;
  return is_stored ? task.store.vector_bytes() : 2 * elements_of_unit * (values ? value_units(size) : key_units(size));
}

// The location of a position: its index in the block table, and its offset in that KV block. `step` advances the
// position without a division, which would take as long as ten multiplications.
struct CachePosition {
  int64_t block, offset;

  CachePosition(const AttendTask& task, int64_t position) : block(position / task.cache.block_size), offset(position % task.cache.block_size) {}
  // The step must not go past the end of the KV block.
  void step(const AttendTask& task, int64_t positions) {
    offset += positions;
    if (offset == task.cache.block_size) block++, offset = 0;
  }
};

// The tile that begins at `place`; requires has_whole_tiles.
inline const uint8_t* tile_at(const AttendTask& task, const CachePosition& place, bool values, bool is_stored) {
  if (is_stored) {
    const StoredHead head = task.store.head(task.store_table[place.block], task.kv_head);
    return (values ? head.values() : head.keys()) + place.offset * head.vector_bytes;
  }
  const CachedHead head = task.cache.head(task.table[place.block], task.kv_head);
  return reinterpret_cast<const uint8_t*>(values ? head.value(place.offset) : head.keys(place.offset));
}

// Bytes that are read just before a tile. The first key tile of a KV block follows the scales (and zeros), four bytes
// per position.
inline int64_t bytes_before(const AttendTask& task, const CachePosition& place, bool values) {
  return !values && place.offset == 0 ? 4 * task.cache.block_size : 0;
}

inline int64_t lines_of(int64_t bytes) { return (bytes + 63) / 64; }
// The average number of cache lines of a tile.
inline int64_t lines_of_tile(const AttendTask& task, bool values, bool is_stored) {
  return lines_of(key_tile * (bytes_of_vector(task, values, is_stored) + (values ? 0 : 4)));
}

// --- prefetching --------------------------------------------------------------------------------------------------------

// Prefetches the tiles that a worker reads for the first rows of its tasks, in reading order, some kilobytes ahead. KV
// blocks are scattered in memory, so the hardware prefetcher does not find them. If a KV block is one tile, its keys
// and values are prefetched together: locating a block costs as much as prefetching a few lines.
//
// Prefetches are spread evenly between computations: the processor tracks only a few dozen outstanding lines and then
// stalls. They go to the L2 cache, because L1 allows fewer outstanding lines.
class Prefetcher {
 public:
  // The first constructor covers all segments of a task and of the tasks linked by `next`, the second one segment.
  explicit Prefetcher(const AttendTask& task) : place_(task, 0), first_place_(place_) { begin_task(&task), start(); }
  Prefetcher(const AttendTask& task, int64_t segment)
      : task_(&task), segment_(segment), end_segment_(segment + 1), is_single_segment_(true), place_(task, 0), first_place_(place_) {
    enter_segment();
    start();
  }

  // Announces that the caller is about to read `lines` cache lines. The next calls of `prefetch` together prefetch as
  // many lines, or up to twice as many until the prefetcher is `distance` lines ahead.
  void expect(int64_t lines) {
    const int64_t more = smaller(lines, distance - lines_ahead_);
    rate_ = more > 0 ? 2 : 1;
    expected_ += lines + more;
    lines_ahead_ += more;
  }
  void prefetch(int64_t lines) {
    lines = smaller(lines * rate_, expected_);
    expected_ -= lines;
    if (lines < tile_lines_left_) {
      for (int64_t i = 0; i < lines; i++) __builtin_prefetch(at_ + i * line, 0, 2);
      at_ += lines * line;
      tile_lines_left_ -= lines;
    } else {
      prefetch_across(lines);
    }
  }
  void prefetch_rest() { prefetch(expected_); }

 private:
  static constexpr int64_t line = 64;                              // bytes
  static constexpr int64_t first_distance = 128, distance = 1536;   // cache lines

  void start() {
    if (!task_) return;
    expected_ = lines_ahead_ = first_distance;
    prefetch_rest();
  }

  __attribute__((noinline)) void prefetch_across(int64_t lines) {
    while (lines > 0 && task_) {
      for (; lines > 0 && tile_lines_left_ > 0; lines--, tile_lines_left_--, at_ += line) __builtin_prefetch(at_, 0, 2);
      if (tile_lines_left_ == 0) next_tile();
    }
  }

  void begin_task(const AttendTask* task) {
    task_ = task;
    if (!task) return;
    segment_ = task->first_segment();
    end_segment_ = (task->first_position + queries_in_block(*task, 0) - 1) / segment_keys + 1;
    enter_segment();
  }

  void enter_segment() {
    if (!has_whole_tiles(task_->cache)) return begin_task(nullptr);
    first_ = seen_from(*task_, task_->first_position, segment_).first / key_tile * key_tile;
    end_ = seen_from(*task_, task_->first_position + queries_in_block(*task_, 0) - 1, segment_).end;
    stored_ = task_->stored_before(task_->first_position) - segment_ * segment_keys;
    values_ = false;
    first_place_ = CachePosition(*task_, segment_ * segment_keys + first_);
    set_tile(first_, first_place_);
  }

  bool has_one_tile_per_block() const { return task_->cache.block_size == key_tile; }

  // Continues with the tile that begins at `position`.
  void set_tile(int64_t position, const CachePosition& place) {
    position_ = position;
    place_ = place;
    const bool is_stored = position < stored_;
    if (has_one_tile_per_block()) {
      const StoreLayer& store = task_->store;
      at_ = is_stored ? store.head(task_->store_table[place.block], task_->kv_head).data
                      : reinterpret_cast<const uint8_t*>(task_->cache.head(task_->table[place.block], task_->kv_head).data);
      tile_lines_left_ = lines_of(is_stored ? store.head_stride : task_->cache.head_stride * 2);
      return;
    }
    const int64_t before = bytes_before(*task_, place, values_);
    at_ = tile_at(*task_, place, values_, is_stored) - before;
    tile_lines_left_ = lines_of(before + key_tile * bytes_of_vector(*task_, values_, is_stored));
  }

  // All tiles of keys of a segment come first, then its tiles of values, then the next segment. If a tile is a whole KV
  // block, it has keys and values together.
  void next_tile() {
    if (position_ + key_tile < end_) {
      place_.step(*task_, key_tile);
      return set_tile(position_ + key_tile, place_);
    }
    if (!values_ && !has_one_tile_per_block()) {
      values_ = true;
      return set_tile(first_, first_place_);
    }
    if (++segment_ < end_segment_) return enter_segment();
    begin_task(is_single_segment_ ? nullptr : task_->next);
  }

  const AttendTask* task_ = nullptr;   // null: nothing is left to prefetch
  int64_t segment_ = 0, end_segment_ = 0;
  bool is_single_segment_ = false, values_ = false;
  int64_t position_ = 0, first_ = 0, end_ = 0, stored_ = 0;   // relative to the segment
  CachePosition place_, first_place_;
  const uint8_t* at_ = nullptr;
  int64_t tile_lines_left_ = 0, expected_ = 0, lines_ahead_ = 0, rate_ = 1;
};

// --- tiles ---------------------------------------------------------------------------------------------------------------------------

template <int Value>
struct Number {
  static constexpr int value = Value;
};

// Calls use(Number<n>), so that n is a compile-time constant; n is at most Most.
template <int Most, typename Use>
inline void with_number(int64_t n, Use use) {
  if constexpr (Most > 1) {
    if (n < Most) return with_number<Most - 1>(n, use);
  }
  use(Number<Most>{});
}

// Calls use(row, Number<rows>) for row tiles of nearly equal size.
template <typename Use>
inline void for_tiles(int64_t rows, Use use) {
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t row = tile * rows / tiles, end = (tile + 1) * rows / tiles;
    with_number<tile_rows>(end - row, [&](auto count) { use(row, count); });
  }
}

// Loads one vector of keys of a tile, for one element of each key: two features for Nibbles, else one.
template <typename Element>
struct Keys {
  static constexpr int features = 1;
  vec::Vec first;
  explicit Keys(const Element* at) : first(vec::in_register(vec::load(at))) {}
  vec::Vec feature(int) const { return first; }
};
template <>
struct Keys<Nibbles> {
  static constexpr int features = 2;
  vec::Pairs pairs;
  explicit Keys(const Nibbles* at) : pairs(vec::load_pairs(&at->pair)) {}
  vec::Vec feature(int f) const { return f == 0 ? vec::low_codes(pairs) : vec::high_codes(pairs); }
};

// scores[r, k] = queries[r] . keys[k] for the keys of some tiles. Not inlined: inside its callers it would have too
// few registers for addresses.
template <int Rows, int Tiles, typename Element>
__attribute__((noinline)) void score_tile(const float* queries, int64_t width, int64_t features, const void* const* tiles, Prefetcher* prefetcher,
                                          float* scores) {
  constexpr int parts = key_tile / vec::lanes, vectors = Tiles * parts, unit = Keys<Element>::features;
  vec::Vec sums[Rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) sums[r][v] = vec::all(0.0f);
  }
  const Element* at[Tiles];
#pragma GCC unroll 4
  for (int t = 0; t < Tiles; t++) at[t] = static_cast<const Element*>(tiles[t]);
  const auto keys = [&](int64_t f, int v) { return Keys<Element>(at[v / parts] + f / unit * key_tile + v % parts * vec::lanes); };
  // Keeps either the keys or the queries in registers, whichever need fewer. If the multiplication can read queries from
  // memory (repeats_from_memory), it always keeps the keys.
  const auto add = [&](int64_t f) {
    if constexpr (vec::repeats_from_memory || vectors <= Rows) {
      vec::Vec key[unit][vectors];
#pragma GCC unroll 16
      for (int v = 0; v < vectors; v++) {
        const Keys<Element> loaded = keys(f, v);
#pragma GCC unroll 2
        for (int i = 0; i < unit; i++) key[i][v] = loaded.feature(i);
      }
#pragma GCC unroll 2
      for (int i = 0; i < unit; i++) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
          const vec::Repeated query = vec::repeated(queries + r * width + f + i);
#pragma GCC unroll 16
          for (int v = 0; v < vectors; v++) sums[r][v] = vec::fma(query, key[i][v], sums[r][v]);
        }
      }
    } else {
      vec::Repeated query[unit][Rows];
#pragma GCC unroll 2
      for (int i = 0; i < unit; i++) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) query[i][r] = vec::repeated(queries + r * width + f + i);
      }
#pragma GCC unroll 16
      for (int v = 0; v < vectors; v++) {
        const Keys<Element> loaded = keys(f, v);
#pragma GCC unroll 2
        for (int i = 0; i < unit; i++) {
          const vec::Vec key = vec::in_register(loaded.feature(i));
#pragma GCC unroll 8
          for (int r = 0; r < Rows; r++) sums[r][v] = vec::fma(query[i][r], key, sums[r][v]);
        }
      }
    }
  };
  constexpr int in_a_line = 64 * unit / (key_tile * static_cast<int>(sizeof(Element)));   // features of a tile in one cache line
  constexpr int step = in_a_line > 2 ? in_a_line : 2;
  int64_t f = 0;
  for (; f + step <= features; f += step) {
    if (prefetcher) prefetcher->prefetch(Tiles);   // prefetches as many lines as this iteration reads: one per tile
#pragma GCC unroll 8
    for (int i = 0; i < step; i += unit) add(f + i);
  }
  for (; f < features; f += unit) add(f);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) vec::store(scores + r * score_stride + v * vec::lanes, sums[r][v]);
  }
}

// Calls use(tile, Number<tiles>) for as many tiles at once as fit into registers. `lines`: cache lines of a tile.
template <int Rows, int Sums, typename Use>
inline void for_some_tiles(int64_t count, Prefetcher* prefetcher, int64_t lines, Use use) {
  constexpr int room = Sums * vec::lanes / (Rows * key_tile), most = room >= 4 ? 4 : room >= 2 ? 2 : 1;
  for (int64_t tile = 0, next; tile < count; tile = next) {
    next = smaller(count, tile + most);
    if (prefetcher) prefetcher->expect((next - tile) * lines);
    with_number<most>(next - tile, [&](auto number) { use(tile, number); });
    if (prefetcher) prefetcher->prefetch_rest();
  }
}

template <int Rows, typename Element>
inline void score_tiles(const float* queries, int64_t width, int64_t features, const void* const* tiles, int64_t count, Prefetcher* prefetcher,
                        int64_t lines, float* scores) {
  for_some_tiles<Rows, tile_sums>(count, prefetcher, lines, [&](int64_t tile, auto number) {
    score_tile<Rows, number.value, Element>(queries, width, features, tiles + tile, prefetcher, scores + tile * key_tile);
  });
}

// The address that the sum of a row is written to, and the final factor of the sum.
struct Target {
  float* at;
  float factor;
};

// Spreads prefetches over the positions while values are summed, as evenly as whole lines allow.
struct PrefetchPace {
  int64_t every, lines;   // prefetches `lines` cache lines after every `every` positions; `every` is a power of two
  int64_t of_tile;        // cache lines of a tile
};

// sums[r] += weights[r, k] * values[k] for the positions of spans[r], in order, for `Vectors` vectors of features.
// Spans of later rows neither begin nor end earlier. Sums start with starts[r]; if `starts` is null, with the current
// value of the target. Values of a tile are `stride` elements apart. With Nibbles, a byte holds two features, which are
// `apart` floats apart in the target.
//
// The factors of the targets are not applied. They are 1: `work_segment` writes no row directly to its output if a part
// of the segment is stored.
template <int Rows, int Vectors, typename Element>
__attribute__((noinline)) void sum_tile(const float* weights, const void* const* tiles, int64_t element, int64_t stride, const Span* spans,
                                        const float* starts, Prefetcher* prefetcher, const PrefetchPace& pace, const Target* targets, int64_t apart) {
  constexpr int loads = Vectors / Keys<Element>::features;
  const auto place = [&](int r, int j) { return targets[r].at + element + j % loads * vec::lanes + (j < loads ? 0 : apart); };
  vec::Vec held[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; j++) held[r][j] = starts ? vec::all(starts[r]) : vec::load(place(r, j));
  }
  const auto add = [&](const Element* value, const float* weight, auto to) {
#pragma GCC unroll 8
    for (int j = 0; j < loads; j++) {
      const Keys<Element> loaded(value + j * vec::lanes);
#pragma GCC unroll 2
      for (int i = 0; i < Keys<Element>::features; i++) {
        const vec::Vec part = vec::in_register(loaded.feature(i));
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
          vec::Vec& sum = held[r][i * loads + j];
          if (to(r)) sum = vec::fma(vec::repeated(weight + r * score_stride), part, sum);
        }
      }
    }
  };
  // All rows see the positions between these.
  const int64_t end = spans[Rows - 1].end, all_begin = spans[Rows - 1].first, all_end = spans[0].end;
  for (int64_t k = spans[0].first; k < end;) {
    const Element* value = static_cast<const Element*>(tiles[k / key_tile]) + element + k % key_tile * stride;
    const int64_t tile_end = smaller(end, k / key_tile * key_tile + key_tile);
    if (prefetcher) prefetcher->expect(pace.of_tile);
    while (k < tile_end) {
      const int64_t stop = smaller(tile_end, all_end);
      if (k < all_begin || k >= stop) {
        add(value, weights + k, [&](int r) { return k >= spans[r].first && k < spans[r].end; });
        k++, value += stride;
        continue;
      }
      for (; k < stop; k++, value += stride) {
        if (prefetcher && (k & (pace.every - 1)) == 0) prefetcher->prefetch(pace.lines);
        add(value, weights + k, [](int) { return true; });
      }
    }
    if (prefetcher) prefetcher->prefetch_rest();
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; j++) vec::store(place(r, j), held[r][j]);
  }
}

// Sums all features with sum_tile. `lines`: cache lines of a tile.
template <int Rows, typename Element>
inline void sum_tiles(const float* weights, const void* const* tiles, int64_t stride, const Span* spans, const float* starts, Prefetcher* prefetcher,
                      int64_t lines, const Target* targets, int64_t width) {
  constexpr int features_per_element = Keys<Element>::features;
  const int64_t elements = width / features_per_element, bytes = elements * static_cast<int64_t>(sizeof(Element));
  const PrefetchPace pace = {bytes > 32 ? 1 : bytes > 16 ? 2 : 4, (bytes + 63) / 64, lines};
  int64_t element = 0;
  const auto sum = [&](auto vectors) {
    // A call sums some features over all tiles. The first call prefetches whole tiles, also for the later calls.
    sum_tile<Rows, vectors.value, Element>(weights, tiles, element, stride, spans, starts, element == 0 ? prefetcher : nullptr, pace,
                                           targets, elements);
    element += vectors.value / features_per_element * vec::lanes;
  };
  constexpr int most = tile_sums / Rows >= 8 ? 8 : 4;
  const auto fits = [&](int vectors) { return element + vectors / features_per_element * vec::lanes <= elements; };
  if constexpr (most == 8) {
    while (fits(8)) sum(Number<8>{});
  }
  while (fits(4)) sum(Number<4>{});
  while (fits(2)) sum(Number<2>{});
  if constexpr (features_per_element == 1) {
    if (element < elements) sum(Number<1>{});
  }
}

}  // namespace
}  // namespace weft::WEFT_ISA
