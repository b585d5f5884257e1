// Attention over the paged cache.
//
// The rows of a task are its queries' heads, query by query. A block of rows goes through the context segment by segment (kernels.h),
// and through a segment in pieces of 64 positions, which stay in the first-level cache: scores of all rows, then weights, then sums of
// values. A score is summed over features in lanes and then across them, a sum of values over positions one after the other: neither
// depends on which rows share a tile. What a row does not see is never multiplied, not even with 0, since it may be NaN.
#include "vec.h"

namespace weft::WEFT_ISA {
namespace {

constexpr int64_t piece_keys = 64;
constexpr int64_t step_keys = 8;     // scores are made for so many keys at once; what is not wanted of them is passed over
constexpr int64_t block_rows = 48;   // rows worked on together, but at least the heads of one query

// As many rows share what is loaded of the cache as leave their sums in registers.
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

// Positions of a segment, counted from its start.
struct Span {
  int64_t first, end;
};

// What a query at a position sees of a segment; nothing where the end is not behind the first.
inline Span seen_from(const AttendTask& task, int64_t position, int64_t segment) {
  const int64_t end = position + 1 - segment * segment_keys;
  return {task.window > 0 ? larger(end - task.window, 0) : 0, smaller(end, segment_keys)};
}

struct Statistics {
  float largest, sum;
};

// Some queries of a task with all their heads, and the scratch they are worked on in.
struct Block {
  const AttendTask& task;
  int64_t first_query, rows;
  int64_t width;            // the head's size in whole vectors; the features behind the last are zeros
  float* queries;           // [rows, width], times the scale
  float* scores;            // [rows, segment_keys]: of the segment in work, then their weights
  float* sums;              // [rows, width]: the segment's weighted sum of values
  float* floats;            // [piece_keys, width]: keys or values of the piece in work
  Statistics* statistics;   // [rows]: of the segment in work
  Statistics* totals;       // [rows]: of the segments before

  Block(const AttendTask& whole, int64_t first, int64_t count, float* scratch)
      : task(whole), first_query(first), rows(count * whole.group), width(rounded_up(whole.cache.head_size, vec::lanes)) {
    // Aligned: a vector that lies across two cache lines is loaded twice.
    scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
    scores = scratch;
    queries = scores + rows * segment_keys;
    sums = queries + rows * width;
    floats = sums + rows * width;
    statistics = reinterpret_cast<Statistics*>(floats + piece_keys * width);
    totals = statistics + rows;
  }

  static int64_t scratch_floats(int64_t rows, int64_t width) { return 16 + rows * (segment_keys + 2 * width + 4) + piece_keys * width; }

  int64_t position(int64_t row) const { return task.first_position + first_query + row / task.group; }
  int64_t first_segment(int64_t row) const { return task.window > 0 ? larger(position(row) + 1 - task.window, 0) / segment_keys : 0; }
  Span seen(int64_t row, int64_t segment) const { return seen_from(task, position(row), segment); }
  // A later row begins to see later and sees further.
  Span seen_by_any(int64_t segment, int64_t first, int64_t end) const { return {seen(first, segment).first, seen(end - 1, segment).end}; }
  float* out(int64_t row) const {
    return task.out + (first_query + row / task.group) * task.out_stride + row % task.group * task.cache.head_size;
  }
};

inline int64_t queries_in_block(const AttendTask& task) { return larger(1, smaller(task.count, block_rows / task.group)); }

// --- tiles ---------------------------------------------------------------------------------------------------------------------------

template <int Value>
struct Number {
  static constexpr int value = Value;
};

// Calls use(Number<n>) with n = rows, which is at most tile_rows.
template <int Most = tile_rows, typename Use>
inline void with_rows(int64_t rows, Use use) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, use);
  }
  use(Number<Most>{});
}

// Calls use(row, Number<rows>) for tiles of nearly the same size.
template <typename Use>
inline void for_tiles(int64_t rows, Use use) {
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t row = tile * rows / tiles, end = (tile + 1) * rows / tiles;
    with_rows(end - row, [&](auto count) { use(row, count); });
  }
}

// Where the keys or values wanted next lie in the cache, or null.
using Ahead = const uint16_t* const*;

// Asks for features of a key or value ahead of their use. Blocks lie all over the memory, where the processor does not guess what comes
// next; into the second level of the cache, since the first can wait for far fewer lines at a time.
inline void fetch(const uint16_t* at, int64_t features) {
  for (int64_t i = 0; i < features; i += 32) __builtin_prefetch(at + i, 0, 2);
}

// scores[r, k] = queries[r] . keys[k] for step_keys keys. Not inlined: its callers would leave it too few registers for addresses.
template <int Rows, typename Element>
__attribute__((noinline)) void score_tile(const float* queries, int64_t width, const Element* const* keys, Ahead ahead, float* scores) {
  constexpr int parts = vec::sum_parts, room = tile_sums / (Rows * parts), at_once = room >= 8 ? 8 : room >= 4 ? 4 : 2;
  constexpr int together = at_once > 4 ? at_once : 4, fours = together / 4;   // a row's sums are added up across the lanes in fours
  if (ahead) {
    for (int k = 0; k < step_keys; k++) fetch(ahead[k], width);
  }
  for (int64_t first = 0; first < step_keys; first += together) {
    vec::Vec joined[Rows][together];
#pragma GCC unroll 2
    for (int begin = 0; begin < together; begin += at_once) {
      vec::Vec sums[Rows][at_once][parts];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int k = 0; k < at_once; k++) {
#pragma GCC unroll 2
          for (int part = 0; part < parts; part++) sums[r][k][part] = vec::all(0.0f);
        }
      }
      // Of queries and keys those are kept in registers that are fewer.
      const auto add = [&](int64_t i, int part) {
        if constexpr (at_once < Rows) {
          vec::Vec key[at_once];
#pragma GCC unroll 8
          for (int k = 0; k < at_once; k++) key[k] = vec::load(keys[first + begin + k] + i);
#pragma GCC unroll 8
          for (int r = 0; r < Rows; r++) {
            const vec::Vec query = vec::in_register(vec::load(queries + r * width + i));
#pragma GCC unroll 8
            for (int k = 0; k < at_once; k++) sums[r][k][part] = vec::fma(query, key[k], sums[r][k][part]);
          }
        } else {
          vec::Vec query[Rows];
#pragma GCC unroll 8
          for (int r = 0; r < Rows; r++) query[r] = vec::in_register(vec::load(queries + r * width + i));
#pragma GCC unroll 8
          for (int k = 0; k < at_once; k++) {
            const vec::Vec key = vec::load(keys[first + begin + k] + i);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) sums[r][k][part] = vec::fma(query[r], key, sums[r][k][part]);
          }
        }
      };
      int64_t i = 0;
      for (; i + parts * vec::lanes <= width; i += parts * vec::lanes) {
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++) add(i + part * vec::lanes, part);
      }
      if (parts > 1 && i < width) add(i, 0);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int k = 0; k < at_once; k++) joined[r][begin + k] = vec::joined(sums[r][k]);
      }
    }
    const auto out = [&](int four) { return scores + four / fours * segment_keys + first + four % fours * 4; };
#pragma GCC unroll 8
    for (int four = 0; four + 1 < Rows * fours; four += 2) vec::sum8(&joined[0][0] + 4 * four, out(four), out(four + 1));
    if constexpr (Rows * fours % 2 == 1) vec::sum4(joined[Rows - 1], out(Rows - 1));
  }
}

// sums[r] += weights[r, k] * values[k] for the keys of a span, in their order, for features of Vectors vectors
template <int Rows, int Vectors, typename Element>
inline void sum_tile(const float* weights, const Element* const* values, Ahead ahead, Span keys, int64_t feature, float* sums,
                     int64_t width) {
  vec::Vec held[Rows][Vectors];
  for (int r = 0; r < Rows; r++)
    for (int j = 0; j < Vectors; j++) held[r][j] = vec::load(sums + r * width + feature + j * vec::lanes);
  for (int64_t k = keys.first; k < keys.end; k++) {
    if (ahead) fetch(ahead[k] + feature, Vectors * vec::lanes);
    vec::Vec weight[Rows];
    for (int r = 0; r < Rows; r++) weight[r] = vec::all(weights[r * segment_keys + k]);
    for (int j = 0; j < Vectors; j++) {
      const vec::Vec value = vec::load(values[k] + feature + j * vec::lanes);
      for (int r = 0; r < Rows; r++) held[r][j] = vec::fma(weight[r], value, held[r][j]);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int j = 0; j < Vectors; j++) vec::store(sums + r * width + feature + j * vec::lanes, held[r][j]);
}

template <int Rows, typename Element>
inline void sum_rows(const float* weights, const Element* const* values, Ahead ahead, Span keys, float* sums, int64_t width) {
  constexpr int most = Rows * 8 <= tile_sums ? 8 : 4;
  int64_t feature = 0;
  for (; feature + most * vec::lanes <= width; feature += most * vec::lanes)
    sum_tile<Rows, most>(weights, values, ahead, keys, feature, sums, width);
  for (; feature + 2 * vec::lanes <= width; feature += 2 * vec::lanes)
    sum_tile<Rows, 2>(weights, values, ahead, keys, feature, sums, width);
  if (feature < width) sum_tile<Rows, 1>(weights, values, ahead, keys, feature, sums, width);
}

// --- pieces --------------------------------------------------------------------------------------------------------------------------

inline Span part_of(Span span, int64_t start) { return {larger(span.first - start, 0), smaller(span.end - start, piece_keys)}; }
inline int64_t first_piece(Span span) { return span.first / piece_keys * piece_keys; }

template <typename Element>
struct Piece {
  int64_t start;                   // in the segment
  Span wanted;                     // what is seen of it, counted from its own start
  const Element* at[piece_keys];   // its keys or values; places that are not wanted name one that is
};

// Looks a piece's keys (offset 0) or values up in the table.
inline void find(const AttendTask& task, int64_t segment, int64_t start, Span seen, int64_t offset, Piece<uint16_t>& piece) {
  const CacheLayer& cache = task.cache;
  const Span wanted = part_of(seen, start);
  piece.start = start;
  piece.wanted = wanted;
  if (wanted.first >= wanted.end) return;
  for (int64_t k = wanted.first; k < wanted.end;) {
    const int64_t position = segment * segment_keys + start + k, within = position % cache.block_size;
    const uint16_t* at = cache.keys + task.table[position / cache.block_size] * cache.block_stride + within * cache.position_stride +
                         task.kv_head * cache.head_stride + offset;
    const int64_t end = smaller(wanted.end, k + cache.block_size - within);
    for (; k < end; k++, at += cache.position_stride) piece.at[k] = at;
  }
  for (int64_t k = 0; k < wanted.first; k++) piece.at[k] = piece.at[wanted.first];
  for (int64_t k = wanted.end; k < piece_keys; k++) piece.at[k] = piece.at[wanted.end - 1];
}

// Looks up what comes after the values of a segment: the next segment's keys, or those that the worker's next task begins with.
inline void find_after(const Block& block, int64_t segment, Piece<uint16_t>& piece) {
  const AttendTask& task = block.task;
  const Span seen = block.seen_by_any(segment + 1, 0, block.rows);
  if (seen.first < seen.end || !task.next) {
    find(task, segment + 1, first_piece(seen), seen, 0, piece);
  } else {
    const Span begin = seen_from(*task.next, task.next->first_position, task.next->first_segment());
    find(*task.next, task.next->first_segment(), first_piece(begin), begin, 0, piece);
  }
}

// A piece as floats in the scratch: for heads that are no whole vectors, and where a half is slow to read.
inline void convert(const Block& block, const Piece<uint16_t>& piece, Piece<float>& converted) {
  converted.start = piece.start;
  for (int64_t k = piece.wanted.first / step_keys * step_keys; k < rounded_up(piece.wanted.end, step_keys); k++) {
    float* row = block.floats + k * block.width;
    vec::for_each(block.task.cache.head_size, [&](int64_t i, auto n) { vec::store(row + i, vec::load(piece.at[k] + i, n)); });
    converted.at[k] = row;
  }
}

// Calls use(piece, ahead) for the pieces of a segment that any row sees, their keys or their values. `ahead` tells where that lies which
// is wanted after the piece, if anything.
template <typename Use>
inline void for_pieces(const Block& block, int64_t segment, bool values, Use use) {
  const AttendTask& task = block.task;
  const bool as_floats = (!vec::reads_halves && block.rows > tile_rows) || block.width != task.cache.head_size;
  const Span seen = block.seen_by_any(segment, 0, block.rows);
  const int64_t offset = values ? task.cache.value_offset : 0;
  Piece<uint16_t> pieces[2];
  Piece<float> floats;
  find(task, segment, first_piece(seen), seen, offset, pieces[0]);
  for (int turn = 0; pieces[turn].start < seen.end; turn ^= 1) {
    const Piece<uint16_t>& piece = pieces[turn];
    Piece<uint16_t>& next = pieces[turn ^ 1];
    const bool last = piece.start + piece_keys >= seen.end;
    if (!last) {
      find(task, segment, piece.start + piece_keys, seen, offset, next);
    } else if (!values) {
      find(task, segment, first_piece(seen), seen, task.cache.value_offset, next);
    } else {
      find_after(block, segment, next);
    }
    Ahead ahead = next.wanted.first < next.wanted.end ? next.at : nullptr;
    if (as_floats) {
      convert(block, piece, floats);
      use(floats, ahead);
    } else {
      use(piece, ahead);
    }
    if (last) return;
  }
}

// --- segments ------------------------------------------------------------------------------------------------------------------------

inline void score_segment(const Block& block, int64_t segment) {
  for_pieces(block, segment, false, [&](const auto& piece, Ahead ahead) {
    for_tiles(block.rows, [&](int64_t row, auto rows) {
      const Span seen = part_of(block.seen_by_any(segment, row, row + rows.value), piece.start);
      for (int64_t k = seen.first / step_keys * step_keys; k < seen.end; k += step_keys)
        score_tile<rows.value>(block.queries + row * block.width, block.width, piece.at + k, ahead && row == 0 ? ahead + k : nullptr,
                               block.scores + row * segment_keys + piece.start + k);
    });
  });
}

// Scores become weights e^(score - largest); those around the span, up to whole sums of lanes, become 0.
inline Statistics weigh(float* scores, Span span, float cap) {
  constexpr int64_t step = vec::sum_parts * vec::lanes;
  const int64_t first = span.first / step * step, end = rounded_up(span.end, step);
  if (cap != 0.0f) {
    for (int64_t k = first; k < end; k += vec::lanes)
      vec::store(scores + k, vec::all(cap) * vec::tanh(vec::load(scores + k) / vec::all(cap)));
  }
  for (int64_t k = first; k < span.first; k++) scores[k] = -INFINITY;
  for (int64_t k = span.end; k < end; k++) scores[k] = -INFINITY;
  vec::Vec best = vec::all(-INFINITY);
  for (int64_t k = first; k < end; k += vec::lanes) best = vec::max(best, vec::load(scores + k));
  const float largest = vec::largest(best);
  const vec::Vec base = vec::all(largest == -INFINITY ? 0.0f : largest);
  vec::Vec sums[vec::sum_parts];
  for (vec::Vec& sum : sums) sum = vec::all(0.0f);
  for (int64_t k = first; k < end; k += step) {
#pragma GCC unroll 2
    for (int part = 0; part < vec::sum_parts; part++) {
      float* at = scores + k + part * vec::lanes;
      const vec::Vec weight = vec::exp_up_to_0(vec::load(at) - base);
      vec::store(at, weight);
      sums[part] = sums[part] + weight;
    }
  }
  return {largest, vec::sum(sums)};
}

inline void sum_segment(const Block& block, int64_t segment) {
  vec::for_each(block.rows * block.width, [&](int64_t i, auto) { vec::store(block.sums + i, vec::all(0.0f)); });
  for_pieces(block, segment, true, [&](const auto& piece, Ahead ahead) {
    const auto sum = [&](int64_t row, auto rows, Span span) {
      if (span.first < span.end)
        sum_rows<rows.value>(block.scores + row * segment_keys + piece.start, piece.at, row == 0 ? ahead : nullptr, span,
                             block.sums + row * block.width, block.width);
    };
    for_tiles(block.rows, [&](int64_t row, auto rows) {
      // What all rows see goes through the tile. Before it and behind it each row goes on alone, at the same place of its own sum.
      const Span begin = part_of(block.seen(row, segment), piece.start);
      const Span end = part_of(block.seen(row + rows.value - 1, segment), piece.start);
      const Span common = {end.first, larger(end.first, begin.end)};
      const bool all_same = begin.first == end.first && begin.end == end.end;
      for (int64_t one = row; one < row + rows.value && !all_same; one++) {
        const Span span = part_of(block.seen(one, segment), piece.start);
        sum(one, Number<1>{}, {span.first, smaller(span.end, common.first)});
      }
      sum(row, rows, common);
      for (int64_t one = row; one < row + rows.value && !all_same; one++) {
        const Span span = part_of(block.seen(one, segment), piece.start);
        sum(one, Number<1>{}, {larger(span.first, common.end), span.end});
      }
    });
  });
}

// Leaves the segment's statistics and sums in the block.
inline void work_segment(Block& block, int64_t segment) {
  score_segment(block, segment);
  for (int64_t row = 0; row < block.rows; row++) {
    const Span span = block.seen(row, segment);
    if (span.first < span.end) block.statistics[row] = weigh(block.scores + row * segment_keys, span, block.task.cap);
  }
  sum_segment(block, segment);
}

// --- the whole context ---------------------------------------------------------------------------------------------------------------

inline void prepare(Block& block) {
  const AttendTask& task = block.task;
  for (int64_t row = 0; row < block.rows; row++) {
    const int64_t size = task.cache.head_size;
    const float* query = task.queries + (block.first_query + row / task.group) * task.query_stride + row % task.group * size;
    vec::for_each(size, [&](int64_t i, auto n) {
      vec::store(block.queries + row * block.width + i, vec::load(query + i, n) * vec::all(task.scale));
    });
  }
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
  const vec::Vec before = vec::exp(vec::all(total.largest - base)), now = vec::exp(vec::all(part.largest - base));
  vec::for_each(head_size, [&](int64_t i, auto n) {
    vec::store(out + i, vec::fma(vec::load(out + i, n), before, vec::load(sums + i, n) * now), n);
  });
  total = {largest, vec::first(vec::fma(vec::all(total.sum), before, vec::all(part.sum) * now))};
}

inline void finish(const Statistics& total, int64_t head_size, float* out) {
  vec::for_each(head_size, [&](int64_t i, auto n) { vec::store(out + i, vec::load(out + i, n) / vec::all(total.sum), n); });
}

int64_t attend_scratch(const AttendTask& task) {
  return Block::scratch_floats(queries_in_block(task) * task.group, rounded_up(task.cache.head_size, vec::lanes));
}

void attend(const AttendTask& task, float* scratch) {
  const int64_t size = task.cache.head_size, step = queries_in_block(task);
  for (int64_t query = 0; query < task.count; query += step) {
    Block block(task, query, smaller(step, task.count - query), scratch);
    prepare(block);
    for (int64_t segment = block.first_segment(0); segment <= block.position(block.rows - 1) / segment_keys; segment++) {
      work_segment(block, segment);
      for (int64_t row = 0; row < block.rows; row++) {
        const Span span = block.seen(row, segment);
        if (span.first < span.end)
          merge(block.statistics[row], block.sums + row * block.width, size, segment == block.first_segment(row), block.totals[row],
                block.out(row));
      }
    }
    for (int64_t row = 0; row < block.rows; row++) finish(block.totals[row], size, block.out(row));
  }
}

void attend_segment(const AttendTask& task, int64_t segment, float* partial, float* scratch) {
  const int64_t size = task.cache.head_size;
  Block block(task, 0, 1, scratch);
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
