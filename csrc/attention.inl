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

  Span seen(int64_t row, int64_t segment) const {
    const int64_t end = position(row) + 1 - segment * segment_keys;
    return {task.window > 0 ? larger(end - task.window, 0) : 0, smaller(end, segment_keys)};
  }
  int64_t position(int64_t row) const { return task.first_position + first_query + row / task.group; }
  int64_t first_segment(int64_t row) const { return task.window > 0 ? larger(position(row) + 1 - task.window, 0) / segment_keys : 0; }
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

// scores[r, k] = queries[r] . keys[k] for step_keys keys
template <int Rows, typename Element>
inline void score_tile(const float* queries, int64_t width, const Element* const* keys, float* scores) {
  constexpr int at_once = Rows * step_keys <= tile_sums ? step_keys : 4;
  for (int first = 0; first < step_keys; first += at_once) {
    vec::Vec sums[Rows][at_once];
    for (auto& row : sums)
      for (auto& sum : row) sum = vec::all(0.0f);
    for (int64_t i = 0; i < width; i += vec::lanes) {
      for (int k = 0; k < at_once; k++) {
        const vec::Vec key = vec::load(keys[first + k] + i);
        for (int r = 0; r < Rows; r++) sums[r][k] = vec::fma(vec::load(queries + r * width + i), key, sums[r][k]);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int k = 0; k < at_once; k += 4)
        vec::sum4(sums[r][k], sums[r][k + 1], sums[r][k + 2], sums[r][k + 3], scores + r * segment_keys + first + k);
  }
}

// sums[r] += weights[r, k] * values[k] for keys [first, end), in their order, for features of Vectors vectors
template <int Rows, int Vectors, typename Element>
inline void sum_tile(const float* weights, const Element* const* values, int64_t first, int64_t end, int64_t feature, float* sums, int64_t width) {
  vec::Vec held[Rows][Vectors];
  for (int r = 0; r < Rows; r++)
    for (int j = 0; j < Vectors; j++) held[r][j] = vec::load(sums + r * width + feature + j * vec::lanes);
  for (int64_t k = first; k < end; k++) {
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
inline void sum_rows(const float* weights, const Element* const* values, int64_t first, int64_t end, float* sums, int64_t width) {
  constexpr int most = Rows * 8 <= tile_sums ? 8 : 4;
  int64_t feature = 0;
  for (; feature + most * vec::lanes <= width; feature += most * vec::lanes)
    sum_tile<Rows, most>(weights, values, first, end, feature, sums, width);
  for (; feature + 2 * vec::lanes <= width; feature += 2 * vec::lanes)
    sum_tile<Rows, 2>(weights, values, first, end, feature, sums, width);
  if (feature < width) sum_tile<Rows, 1>(weights, values, first, end, feature, sums, width);
}

// --- pieces --------------------------------------------------------------------------------------------------------------------------

template <typename Element>
struct Piece {
  int64_t start;                      // in the segment
  const Element* at[piece_keys];      // the keys or values of its positions

  Span part(Span span) const { return {larger(span.first - start, 0), smaller(span.end - start, piece_keys)}; }
};

// Finds the positions `wanted` of a piece through the table. Those up to whole steps around them name a wanted one.
inline void find(const AttendTask& task, int64_t segment, Span wanted, int64_t offset, Piece<uint16_t>& piece) {
  const CacheLayer& cache = task.cache;
  const int64_t stride = cache.kv_heads * cache.head_size;
  for (int64_t k = wanted.first; k < wanted.end;) {
    const int64_t position = segment * segment_keys + piece.start + k, within = position % cache.block_size;
    const uint16_t* at = cache.keys + task.table[position / cache.block_size] * cache.block_stride + within * stride +
                         task.kv_head * cache.head_size + offset;
    for (const int64_t end = smaller(wanted.end, k + cache.block_size - within); k < end; k++, at += stride) piece.at[k] = at;
  }
  for (int64_t k = wanted.first / step_keys * step_keys; k < wanted.first; k++) piece.at[k] = piece.at[wanted.first];
  for (int64_t k = wanted.end; k < rounded_up(wanted.end, step_keys); k++) piece.at[k] = piece.at[wanted.end - 1];
}

// A piece as floats in the scratch, worth it when several tiles read it, and for heads that are no whole vectors.
inline void convert(const Block& block, Span wanted, const Piece<uint16_t>& piece, Piece<float>& converted) {
  converted.start = piece.start;
  for (int64_t k = wanted.first / step_keys * step_keys; k < rounded_up(wanted.end, step_keys); k++) {
    float* row = block.floats + k * block.width;
    vec::for_each(block.task.cache.head_size, [&](int64_t i, auto n) { vec::store(row + i, vec::load(piece.at[k] + i, n)); });
    converted.at[k] = row;
  }
}

// Calls use(piece) for the pieces of a segment that any row sees, the keys (offset 0) or the values.
template <typename Use>
inline void for_pieces(const Block& block, int64_t segment, int64_t offset, Use use) {
  const Span all = {block.seen(0, segment).first, block.seen(block.rows - 1, segment).end};
  const bool as_floats = block.rows > tile_rows || block.width != block.task.cache.head_size;
  Piece<uint16_t> halves;
  Piece<float> floats;
  for (halves.start = all.first / piece_keys * piece_keys; halves.start < all.end; halves.start += piece_keys) {
    const Span wanted = halves.part(all);
    find(block.task, segment, wanted, offset, halves);
    if (as_floats) {
      convert(block, wanted, halves, floats);
      use(floats);
    } else {
      use(halves);
    }
  }
}

// --- segments ------------------------------------------------------------------------------------------------------------------------

inline void score_segment(const Block& block, int64_t segment) {
  for_pieces(block, segment, 0, [&](const auto& piece) {
    for_tiles(block.rows, [&](int64_t row, auto rows) {
      // A later row begins to see later and sees further.
      const Span any = piece.part({block.seen(row, segment).first, block.seen(row + rows.value - 1, segment).end});
      for (int64_t k = any.first / step_keys * step_keys; k < any.end; k += step_keys)
        score_tile<rows.value>(block.queries + row * block.width, block.width, piece.at + k,
                               block.scores + row * segment_keys + piece.start + k);
    });
  });
}

// Scores become weights e^(score - largest); those in the vectors around the span become 0.
inline Statistics weigh(float* scores, Span span, float cap) {
  const int64_t first = span.first / vec::lanes * vec::lanes, end = rounded_up(span.end, vec::lanes);
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
  vec::Vec sum = vec::all(0.0f);
  for (int64_t k = first; k < end; k += vec::lanes) {
    const vec::Vec weight = vec::exp(vec::load(scores + k) - base);
    vec::store(scores + k, weight);
    sum = sum + weight;
  }
  return {largest, vec::sum(sum)};
}

inline void sum_segment(const Block& block, int64_t segment) {
  vec::for_each(block.rows * block.width, [&](int64_t i, auto) { vec::store(block.sums + i, vec::all(0.0f)); });
  for_pieces(block, segment, block.task.cache.value_offset, [&](const auto& piece) {
    for_tiles(block.rows, [&](int64_t row, auto rows) {
      const auto sum = [&](int64_t from, auto count, int64_t first, int64_t end) {
        if (first < end)
          sum_rows<count.value>(block.scores + from * segment_keys + piece.start, piece.at, first, end, block.sums + from * block.width,
                                block.width);
      };
      // What all rows see goes through the tile. Before it and behind it each goes on alone, at the same place of its own sum.
      const Span earliest = piece.part(block.seen(row, segment)), latest = piece.part(block.seen(row + rows.value - 1, segment));
      const Span common = {latest.first, larger(latest.first, earliest.end)};
      const auto alone = [&](auto clip) {
        if (latest.first == earliest.first && latest.end == earliest.end) return;
        for (int64_t one = row; one < row + rows.value; one++) {
          const Span span = clip(piece.part(block.seen(one, segment)));
          sum(one, Number<1>{}, span.first, span.end);
        }
      };
      alone([&](Span span) { return Span{span.first, smaller(span.end, common.first)}; });
      sum(row, rows, common.first, common.end);
      alone([&](Span span) { return Span{larger(span.first, common.end), span.end}; });
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
    const float* query = task.queries + (block.first_query + row / task.group) * task.query_stride + row % task.group * task.cache.head_size;
    vec::for_each(task.cache.head_size, [&](int64_t i, auto n) {
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
