// The inner loops over the cache: a few rows of queries, or of weights, against keys and values in whole numbers.
//
// Sums of products are exact, so it does not matter how they are made; of weights and values they become floats tile by tile, in the order
// of the positions. What a row does not see has the weight 0, and its codes, whatever they are, add nothing.
#include "attention_tiles.inl"
#include "vec_codes.h"

namespace weft::WEFT_ISA {
namespace {

// From one row of weights' codes to the next: some lines more than there are, else all rows would share few sets of the cache.
constexpr int64_t code_stride = segment_keys + 32;

// scores[r, k] = queries[r] . keys[k] times their scales, for the keys of some tiles. `width` is from one query to the next.
template <int Rows, int Tiles>
__attribute__((noinline)) void score_code_tile(const int16_t* queries, int64_t width, const float* factors, int64_t features,
                                               const void* const* tiles, const float* scales, Ahead* ahead, float* scores) {
  constexpr int parts = key_tile / vec::lanes, vectors = Tiles * parts;
  vec::Whole sums[Rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) sums[r][v] = vec::no_sum();
  }
  const int16_t* at[Tiles];
#pragma GCC unroll 4
  for (int t = 0; t < Tiles; t++) at[t] = static_cast<const int16_t*>(tiles[t]);
  const auto keys = [&](int64_t f, int v) {
    return vec::in_register(vec::load_codes(at[v / parts] + f * key_tile + v % parts * 2 * vec::lanes));
  };
  for (int64_t f = 0; f < features; f += 2) {
    if (ahead) ahead->ask(Tiles);   // as much as a pair of features of so many tiles is
    // Of queries and keys those are kept in registers that are fewer; keys, where queries need none.
    if constexpr (vec::repeats_pairs_from_memory || vectors <= Rows) {
      vec::CodePairs key[vectors];
#pragma GCC unroll 16
      for (int v = 0; v < vectors; v++) key[v] = keys(f, v);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
        const vec::RepeatedPair query = vec::repeated_pair(queries + r * width + f);
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) sums[r][v] = vec::add_products(query, key[v], sums[r][v]);
      }
    } else {
      vec::RepeatedPair query[Rows];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) query[r] = vec::repeated_pair(queries + r * width + f);
#pragma GCC unroll 16
      for (int v = 0; v < vectors; v++) {
        const vec::CodePairs key = keys(f, v);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) sums[r][v] = vec::add_products(query[r], key, sums[r][v]);
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

// The same for any number of tiles. Calls before(tile, tiles) ahead of some: they are about to be read.
template <int Rows, typename Before>
inline void score_codes(const int16_t* queries, int64_t width, const float* factors, int64_t features, const void* const* tiles,
                        int64_t count, const float* scales, Ahead* ahead, int64_t lines, float* scores, Before before) {
  for_some_tiles<Rows>(count, ahead, lines, [&](int64_t tile, auto number) {
    before(tile, number.value);
    score_code_tile<Rows, number.value>(queries, width, factors, features, tiles + tile, scales + tile * key_tile, ahead,
                                        scores + tile * key_tile);
  });
}

// Weights of some tiles as codes, 0 before the position `begin`. What is less than a 32,768th of a row's largest in the segment becomes 0:
// all of those together are less than 0.8% of the row. What a code of a row is worth goes to `factors`; `most` is the bits of the
// largest weight of each row.
template <int Rows>
inline void code_weights(const float* weights, int64_t begin, int64_t end, const uint32_t* most, int16_t* codes, float* factors) {
  vec::Vec by[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    const float largest = float_of_bits(most[r]);
    factors[r] = most[r] < bits_of_infinity ? largest * (1.0f / largest_weight_code) : NAN;
    by[r] = vec::all(most[r] < bits_of_infinity && largest > 0.0f ? static_cast<float>(largest_weight_code) / largest : 0.0f);
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

// sums[r] = (begins + values . codes[r] * factors[r]) * the target's factor, over tiles [first, end), for features of Vectors vectors.
// Pairs of values lie `stride` elements apart. Sums begin with starts[r], or where there are none with what stands there.
template <int Rows, int Vectors>
__attribute__((noinline)) void sum_code_tiles(const int16_t* codes, const float* factors, const void* const* tiles, int64_t first,
                                              int64_t end, int64_t feature, int64_t stride, const float* starts, Ahead* ahead,
                                              int64_t lines, const Target* targets) {
  vec::Vec held[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; j++) held[r][j] = vec::all(0.0f);
  }
  const int64_t lines_of_pair = (lines + key_tile / 2 - 1) / (key_tile / 2);
  for (int64_t tile = first; tile < end; tile++) {
    const int16_t* value = static_cast<const int16_t*>(tiles[tile]) + feature * 2;
    const int16_t* weight = codes + tile * key_tile;
    if (ahead) ahead->owe(lines);
    vec::Whole sums[Rows][Vectors];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; j++) sums[r][j] = vec::no_sum();
    }
    for (int64_t k = 0; k < key_tile; k += 2, value += stride) {
      if (ahead) ahead->ask(lines_of_pair);
      vec::CodePairs pair[Vectors];
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; j++) pair[j] = vec::in_register(vec::load_codes(value + j * 2 * vec::lanes));
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
        const vec::RepeatedPair by = vec::repeated_pair(weight + r * code_stride + k);
#pragma GCC unroll 8
        for (int j = 0; j < Vectors; j++) sums[r][j] = vec::add_products(by, pair[j], sums[r][j]);
      }
    }
    if (ahead) ahead->ask_rest();
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
      for (int j = 0; j < Vectors; j++) held[r][j] = held[r][j] + vec::to_floats(sums[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    const vec::Vec factor = vec::all(factors[r]), last = vec::all(targets[r].factor);
#pragma GCC unroll 8
    for (int j = 0; j < Vectors; j++) {
      float* const at = targets[r].at + feature + j * vec::lanes;
      vec::store(at, vec::fma(held[r][j], factor, starts ? vec::all(starts[r]) : vec::load(at)) * last);
    }
  }
}

// The same for all features, `width` of them.
template <int Rows>
inline void sum_codes(const int16_t* codes, const float* factors, const void* const* tiles, int64_t first, int64_t end, int64_t width,
                      const float* starts, Ahead* ahead, int64_t lines, const Target* targets) {
  constexpr int room = tile_sums / 2 / Rows, most = room >= 4 ? 4 : room >= 2 ? 2 : 1;   // a sum in whole numbers and one in floats
  int64_t feature = 0;
  const auto sum = [&](auto vectors) {
    // Asked for while the first features are summed.
    sum_code_tiles<Rows, vectors.value>(codes, factors, tiles, first, end, feature, 2 * width, starts, feature == 0 ? ahead : nullptr,
                                        lines, targets);
    feature += vectors.value * vec::lanes;
  };
  if constexpr (most == 4) {
    while (feature + 4 * vec::lanes <= width) sum(Number<4>{});
  }
  if constexpr (most >= 2) {
    while (feature + 2 * vec::lanes <= width) sum(Number<2>{});
  }
  while (feature < width) sum(Number<1>{});
}

}  // namespace
}  // namespace weft::WEFT_ISA
