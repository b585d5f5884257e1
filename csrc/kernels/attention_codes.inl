// The inner loops over the KV cache: a few rows of queries or weights against keys or values, all in integer codes.
//
// Units (kernels.h) are unpacked in registers, once for every few rows, in parallel with the multiplications. Integer
// sums are exact, so their order does not matter. A position that a row does not see has the weight 0, so its codes add
// nothing.
#include "kernels/attention_tiles.inl"
#include "isa/vec_codes.h"

namespace weft::WEFT_ISA {
namespace {

// Distance between rows of weight codes. It is not a power of two, else all rows would share few cache sets.
constexpr int64_t code_stride = segment_keys + 32;

// Half of the registers hold sums of scores, because codes need registers too.
constexpr int score_sums = tile_sums / 2;

// scores[r, k] = queries[r] . keys[k] times their scales, for the keys of some tiles. Queries are `width` codes
// apart.
template <int Rows, int Tiles>
__attribute__((noinline)) void score_code_tile(const int16_t* queries, int64_t width, const float* factors, int64_t features,
                                               const void* const* tiles, const float* scales, Prefetcher* prefetcher, float* scores) {
  constexpr int parts = key_tile / vec::lanes, vectors = Tiles * parts;
  constexpr int64_t line = 2 * key_tile;   // one pair of elements, of all keys of a tile
  vec::Whole sums[Rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) sums[r][v] = vec::no_sum();
  }
  const uint16_t* at[Tiles];
#pragma GCC unroll 4
  for (int t = 0; t < Tiles; t++) at[t] = static_cast<const uint16_t*>(tiles[t]);
  int64_t element = 0;
  for (int64_t f = 0; f < features; f += 2 * codes_of_unit, element += elements_of_unit * line) {
    if (prefetcher) prefetcher->prefetch(Tiles * elements_of_unit);   // prefetches as many lines as this iteration reads
#pragma GCC unroll 4
    for (int t = 0; t < Tiles; t++) {
      Codes keys[parts];
#pragma GCC unroll 4
      for (int part = 0; part < parts; part++) keys[part] = unpacked(at[t] + element + part * 2 * vec::lanes, line, vec::Full{});
#pragma GCC unroll 4
      for (int c = 0; c < codes_of_unit; c++) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
          const vec::RepeatedPair query = vec::repeated_pair(queries + r * width + f + 2 * c);
#pragma GCC unroll 4
          for (int part = 0; part < parts; part++) {
            vec::Whole& sum = sums[r][t * parts + part];
            sum = vec::add_products(query, keys[part].of[c], sum);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    const vec::Vec factor = vec::all(factors[r]);
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++)
      vec::store(scores + r * score_stride + v * vec::lanes, vec::to_floats(sums[r][v]) * vec::load(scales + v * vec::lanes) * factor);
  }
}

// Does the same as score_code_tile, for any number of tiles. Calls before(tile, n) just before it reads n tiles from
// `tile` on.
template <int Rows, typename Prologue>
inline void score_codes(const int16_t* queries, int64_t width, const float* factors, int64_t features, const void* const* tiles,
                        int64_t count, const float* scales, Prefetcher* prefetcher, int64_t lines, float* scores, Prologue before) {
  for_some_tiles<Rows, score_sums>(count, prefetcher, lines, [&](int64_t tile, auto number) {
    before(tile, number.value);
    score_code_tile<Rows, number.value>(queries, width, factors, features, tiles + tile, scales + tile * key_tile, prefetcher,
                                        scores + tile * key_tile);
  });
}

// Totals of weight * value scale, over one row and segment.
struct WeightTotals {
  float sum, largest;   // undefined if a weight is not finite
};

// Converts the weights of some tiles to codes; codes before position `begin` are 0. Weights below 1/65,534 of the
// largest become 0, and so do weights below 1/130,000 of the row's total in the segment. Together they are less than
// 0.4% of the total. `factors[r]`: the value of one code of row r.
template <int Rows>
inline void code_weights(const float* weights, int64_t begin, int64_t end, const WeightTotals* totals, int16_t* codes, float* factors) {
  vec::Vec by[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    const float largest = totals[r].largest, by_sum = totals[r].sum * (1.0f / all_weights), by_largest = largest * (1.0f / largest_weight_code);
    // `unit` is at least by_largest, so that the largest code fits, and at least by_sum, so that no sum of products
    // overflows. It is raised until the code of the largest weight is a whole number. Otherwise many equal weights
    // would all be rounded in the same direction.
    const float unit = largest > 0.0f ? largest / std::floor(largest / (by_sum > by_largest ? by_sum : by_largest)) : 0.0f;
    factors[r] = totals[r].sum < INFINITY ? unit : NAN;
    by[r] = vec::all(factors[r] > 0.0f ? 1.0f / factors[r] : 0.0f);
  }
  const vec::Vec first = vec::all(static_cast<float>(begin)), nothing = vec::all(0.0f);
  for (int64_t k = begin / key_tile * key_tile; k < rounded_up(end, key_tile); k += vec::lanes) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      vec::Vec weight = vec::load(weights + r * score_stride + k) * by[r];
      if (k < begin) weight = vec::where_less(vec::counted_from(k), first, nothing, weight);
      vec::store_codes(codes + r * code_stride + k, weight);
    }
  }
}

// For row r: target = (start + values . codes[r] * factors[r]) * target factor, over tiles [first, end), for n units of
// features from `unit` on. start is starts[r]; if `starts` is null, it is the current value of the target.
template <int Rows, typename Lanes>
__attribute__((noinline)) void sum_code_tiles(const int16_t* codes, const float* factors, const void* const* tiles, int64_t first,
                                              int64_t end, int64_t unit, Lanes n, int64_t units, const float* starts, Prefetcher* prefetcher,
                                              int64_t lines_of_pair, const Target* targets) {
  vec::Whole sums[Rows][codes_of_unit];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
    for (int c = 0; c < codes_of_unit; c++) sums[r][c] = vec::no_sum();
  }
  for (int64_t tile = first; tile < end; tile++) {
    const uint16_t* value = static_cast<const uint16_t*>(tiles[tile]) + unit * 2;
    const int16_t* weight = codes + tile * key_tile;
    for (int64_t k = 0; k < key_tile; k += 2, value += 2 * elements_of_unit * units) {
      if (prefetcher && k % 8 == 0) prefetcher->prefetch(4 * lines_of_pair);
      const Codes values = unpacked(value, 2 * units, n);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
        const vec::RepeatedPair by = vec::repeated_pair(weight + r * code_stride + k);
#pragma GCC unroll 4
        for (int c = 0; c < codes_of_unit; c++) sums[r][c] = vec::add_products(by, values.of[c], sums[r][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    const vec::Vec factor = vec::all(factors[r]), last = vec::all(targets[r].factor);
#pragma GCC unroll 4
    for (int c = 0; c < codes_of_unit; c++) {
      float* const at = targets[r].at + c * units + unit;
      vec::store(at, vec::fma(vec::to_floats(sums[r][c]), factor, starts ? vec::all(starts[r]) : vec::load(at, n)) * last, n);
    }
  }
}

// Sums the values of all features: calls sum_code_tiles for each group of features.
template <int Rows>
inline void sum_codes(const int16_t* codes, const float* factors, const void* const* tiles, int64_t first, int64_t end, int64_t units,
                      const float* starts, Prefetcher* prefetcher, int64_t lines, const Target* targets) {
  const int64_t lines_of_pair = (lines + key_tile / 2 - 1) / (key_tile / 2);
  if (prefetcher) prefetcher->expect((end - first) * lines);
  vec::for_each(units, [&](int64_t unit, auto n) {
    // Prefetches only while the first features are summed.
    sum_code_tiles<Rows>(codes, factors, tiles, first, end, unit, n, units, starts, unit == 0 ? prefetcher : nullptr, lines_of_pair, targets);
  });
  if (prefetcher) prefetcher->prefetch_rest();
}

}  // namespace
}  // namespace weft::WEFT_ISA
