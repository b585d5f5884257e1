// Attention over the paged cache.
//
// The rows of a task are its queries' heads, query by query. A block of rows goes through the context segment by segment (kernels.h),
// and through a segment in pieces of 64 positions, which stay in the first-level cache: scores of all rows, then weights, then sums of
// values. What a row does not see is never multiplied with a value, not even as 0, since that may be NaN.
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

  Block(const AttendTask& whole, Ahead* fetching, int64_t first, int64_t count, float* scratch)
      : task(whole), ahead(fetching), first_query(first), rows(count * whole.group), width(rounded_up(whole.cache.head_size, vec::lanes)) {
    // Aligned: a vector that lies across two cache lines is loaded twice.
    scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63});
    scores = scratch;
    sums = scores + rows * score_stride;
    floats = sums + rows * width;
    queries = floats + piece_keys * width;
    statistics = reinterpret_cast<Statistics*>(queries + rows * width);
    totals = statistics + rows;
  }

  static int64_t scratch_floats(int64_t rows, int64_t width) { return 16 + rows * (score_stride + 2 * width + 4) + piece_keys * width; }

  int64_t first_segment(int64_t query) const { return task.window > 0 ? larger(position(query) + 1 - task.window, 0) / segment_keys : 0; }
  int64_t last_segment() const { return position(rows / task.group - 1) / segment_keys; }
  int64_t position(int64_t query) const { return task.first_position + first_query + query; }
  Span seen_by_query(int64_t query, int64_t segment) const { return seen_from(task, position(query), segment); }
  Span seen(int64_t row, int64_t segment) const { return seen_by_query(row / task.group, segment); }
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

// The tiles of a piece that are wanted, as they lie in the cache or as floats in the scratch.
template <typename Element>
struct Piece {
  int64_t start;     // in the segment
  int64_t stride;    // from one value to the next
  const Element* tiles[piece_tiles];
};

// Calls use(k, n, at, distance) for runs of n positions of a span that lie together: feature f of key k + i stands at
// at[f * distance + i], and that of a value at at[i * distance + f].
template <typename Use>
inline void for_runs(const AttendTask& task, int64_t start, Span wanted, bool values, Use use) {
  const CacheLayer& cache = task.cache;
  for (int64_t k = wanted.first; k < wanted.end;) {
    const int64_t within = (start + k) % cache.block_size, tile = within / key_tile * key_tile;
    const int64_t tile_width = smaller(key_tile, cache.block_size - tile);
    const int64_t n = smaller(smaller(wanted.end - k, key_tile - k % key_tile), tile + tile_width - within);
    const uint16_t* block = cache.keys + task.table[(start + k) / cache.block_size] * cache.block_stride + task.kv_head * cache.head_stride;
    if (values) {
      use(k, n, block + cache.value_offset + within * cache.head_size, cache.head_size);
    } else {
      use(k, n, block + tile * cache.head_size + within - tile, tile_width);
    }
    k += n;
  }
}

// A piece as floats in the scratch: for heads that are no whole vectors, blocks that are no whole tiles, and where a half is slow to read.
inline void convert(const Block& block, int64_t start, Span wanted, bool values, Piece<float>& piece) {
  const int64_t size = block.task.cache.head_size, stride = values ? block.width : size;
  piece.stride = stride;
  for (int64_t tile = 0; tile < piece_tiles; tile++) piece.tiles[tile] = block.floats + tile * key_tile * stride;
  for_runs(block.task, start, wanted, values, [&](int64_t k, int64_t n, const uint16_t* at, int64_t distance) {
    if (values) {
      for (int64_t i = 0; i < n; i++) {
        float* row = block.floats + (k + i) * stride;
        if (block.ahead) block.ahead->ask((size + 31) / 32);
        vec::for_each(size, [&](int64_t f, auto count) { vec::store(row + f, vec::load(at + i * distance + f, count)); });
      }
    } else {
      float* tile = block.floats + k / key_tile * key_tile * stride + k % key_tile;
      for (int64_t f = 0; f < size; f++) {
        if (block.ahead && f % 2 == 0) block.ahead->ask(1);
        const uint16_t* from = at + f * distance;
        vec::for_each(n, [&](int64_t i, auto count) { vec::store(tile + f * key_tile + i, vec::load(from + i, count), count); });
      }
    }
  });
}

// Calls use(piece, ahead) for the pieces of a segment that any row sees, their keys or their values; `ahead` is to be asked meanwhile,
// unless it is null.
template <typename Use>
inline void for_pieces(const Block& block, int64_t segment, bool values, Use use) {
  const AttendTask& task = block.task;
  const bool as_floats = (!vec::reads_halves && block.rows > tile_rows) || !has_whole_tiles(task.cache) ||
                         (values && block.width != task.cache.head_size);
  const Span seen = block.seen_by_any(segment, 0, block.rows);
  for (int64_t start = seen.first / piece_keys * piece_keys; start < seen.end; start += piece_keys) {
    const Span wanted = part_of(seen, start);
    const int64_t first = wanted.first / key_tile, end = rounded_up(wanted.end, key_tile) / key_tile;
    if (block.ahead) block.ahead->owe(end - first);
    if (as_floats) {
      Piece<float> piece;
      piece.start = start;
      convert(block, segment * segment_keys + start, wanted, values, piece);
      use(piece, nullptr);
    } else {
      Piece<uint16_t> piece;
      piece.start = start;
      piece.stride = task.cache.head_size;
      for (int64_t tile = first; tile < end; tile++)
        piece.tiles[tile] = tile_at(task, segment * segment_keys + start + tile * key_tile, values);
      use(piece, block.ahead);
    }
    if (block.ahead) block.ahead->ask_rest();
  }
}

// --- segments ------------------------------------------------------------------------------------------------------------------------

inline void score_segment(const Block& block, int64_t segment) {
  const int64_t size = block.task.cache.head_size;
  for_pieces(block, segment, false, [&](const auto& piece, Ahead* ahead) {
    for_tiles(block.rows, [&](int64_t row, auto rows) {
      const Span seen = part_of(block.seen_by_any(segment, row, row + rows.value), piece.start);
      if (seen.empty()) return;
      const int64_t first = seen.first / key_tile, end = rounded_up(seen.end, key_tile) / key_tile;
      score_tiles<rows.value>(block.queries + row * block.width, block.width, size, piece.tiles + first, end - first,
                              row == 0 ? ahead : nullptr, block.scores + row * score_stride + piece.start + first * key_tile);
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

inline void sum_segment(const Block& block, int64_t segment) {
  vec::for_each(block.rows * block.width, [&](int64_t i, auto) { vec::store(block.sums + i, vec::all(0.0f)); });
  for_pieces(block, segment, true, [&](const auto& piece, Ahead* ahead) {
    const auto sum = [&](int64_t row, auto rows, Span span) {
      if (!span.empty())
        sum_rows<rows.value>(block.scores + row * score_stride + piece.start, piece.tiles, piece.stride, span, row == 0 ? ahead : nullptr,
                             block.sums + row * block.width, block.width);
    };
    for_tiles(block.rows, [&](int64_t row, auto rows) {
      // What all rows see goes through the tile. Before it and behind it the rows of each query go on alone, each at the same place of
      // its own sum.
      const Span begin = part_of(block.seen(row, segment), piece.start);
      const Span end = part_of(block.seen(row + rows.value - 1, segment), piece.start);
      const Span common = {end.first, larger(end.first, begin.end)};
      const bool all_same = begin.first == end.first && begin.end == end.end;
      const auto sum_queries = [&](auto part) {
        for (int64_t first = row, next; first < row + rows.value && !all_same; first = next) {
          next = smaller(row + rows.value, (first / block.task.group + 1) * block.task.group);
          const Span span = part(part_of(block.seen(first, segment), piece.start));
          if (!span.empty()) with_rows(next - first, [&](auto count) { sum(first, count, span); });
        }
      };
      sum_queries([&](Span span) { return Span{span.first, smaller(span.end, common.first)}; });
      sum(row, rows, common);
      sum_queries([&](Span span) { return Span{larger(span.first, common.end), span.end}; });
    });
  });
}

// Leaves the segment's statistics and sums in the block.
inline void work_segment(Block& block, int64_t segment) {
  score_segment(block, segment);
  block.for_rows([&](int64_t row, int64_t query, int64_t) {
    const Span span = block.seen_by_query(query, segment);
    if (!span.empty()) block.statistics[row] = weigh(block.scores + row * score_stride, span, block.task.cap);
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
  return Block::scratch_floats(queries_in_block(task) * task.group, rounded_up(task.cache.head_size, vec::lanes));
}

void attend(const AttendTask& first, float* scratch) {
  Ahead ahead(first);
  for (const AttendTask* task = &first; task; task = task->next) {
    const int64_t size = task->cache.head_size, step = queries_in_block(*task);
    for (int64_t query = 0; query < task->count; query += step) {
      // The later rows of a task read what the first have brought into the cache.
      Block block(*task, query == 0 ? &ahead : nullptr, query, smaller(step, task->count - query), scratch);
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
