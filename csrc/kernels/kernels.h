// What the kernels work on, and the table of them. Each instruction set compiles the same kernels into a table of its own; the best one
// that the processor has is chosen once, at run time.
//
// Every result is a function of its own row alone: no kernel lets the number of rows, of threads or of neighbours change the order in
// which a sum is made. That is what makes a request's output the same, bit by bit, in any company.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

// --- weights ------------------------------------------------------------------------------------------------------------------------

// A linear layer [outputs, inputs] is kept in strips of 16 outputs, so that a vector register holds one input (or four, in bytes) of all
// outputs of a strip. The last strip is filled up with zeros, and so is the last group of inputs.
constexpr int strip_outputs = 16;
constexpr int group_inputs = 32;

enum class Layout : int {
  w4 = 0,    // codes of 4 bits; in a group of 32 inputs an output's weight is ((code - 8) * scale + offset) * unit, all but unit whole
  w8 = 1,    // signed bytes; code * scale
  f32 = 2,   // floats: 16 of them for every input
  f16 = 3,
  bf16 = 4,
};

// W4, one group of one strip, 320 bytes:
//   4 x 64 bytes      step s holds inputs 8s .. 8s+7; byte 4o + i: low four bits input 8s + i of output o, high four bits input 8s + 4 + i
//   16 x (i16, i16)   scale and offset by output
// and behind the groups of a strip:
//   16 x f32          units by output
//
// Since scales and offsets are whole numbers, the products of a whole block of groups are added up as such, which takes one instruction
// for a group where floats take three. No such sum leaves 32 bits: see `w4_largest`.
constexpr int w4_codes_bytes = 256;
constexpr int w4_group_bytes = 320;
constexpr int w4_units_bytes = 64;
constexpr int w4_middle = 8;   // of the codes: less this, the sum of a group's products fits 15 bits with its sign
constexpr int w4_lift = 1 << 14;   // makes such a sum positive

// W8, one group of one strip, 544 bytes:
//   8 x 64 bytes  step s holds inputs 4s .. 4s+3; byte 4o + i: input 4s + i of output o
//   16 x f16      scales by output
constexpr int w8_codes_bytes = 512;
constexpr int w8_group_bytes = 544;

constexpr bool is_quantised(Layout layout) { return layout == Layout::w4 || layout == Layout::w8; }

struct Weight {
  Layout layout;
  int64_t outputs;
  int64_t inputs;
  const uint8_t* data;         // strips one after the other, each as long as strip_bytes says; 64-byte aligned
  const float* bias;           // [outputs], or null

  int64_t strips() const { return (outputs + strip_outputs - 1) / strip_outputs; }
  int64_t groups() const { return (inputs + group_inputs - 1) / group_inputs; }
  bool quantised() const { return is_quantised(layout); }
};

inline int64_t strip_bytes(Layout layout, int64_t inputs) {
  const int64_t groups = (inputs + group_inputs - 1) / group_inputs;
  switch (layout) {
    case Layout::w4: return groups * w4_group_bytes + w4_units_bytes;
    case Layout::w8: return groups * w8_group_bytes;
    case Layout::f32: return inputs * strip_outputs * 4;
    default: return inputs * strip_outputs * 2;
  }
}

// --- activations --------------------------------------------------------------------------------------------------------------------

// One value far larger than the others of its row would leave those of its block hardly any codes. Such an outlier is taken out of its
// block, where its code is 0, and is multiplied by itself, as a float.
struct Outlier {
  uint32_t input;
  float value;
};

// The magnitude of an outlier is more than this many times the mean magnitude of its row. With 12 some 7% of the groups of a chat prompt
// have one, and the logits' noise is half.
constexpr int64_t outlier_ratio = 12;

// Rows of activations in signed bytes: in every block of a row value = code * scale. The scale is such that the largest has the code 120 or
// -120, so that a code and one of W4, less 8, are a byte together (isa/vec_pairs.h). Where the magnitudes of a group's codes would add up
// to more than 2047, so where their mean is more than 53% of the block's largest, it is twice that: then the products of a group fit 15
// bits with their sign. Normal numbers never are so even. The last block of a row may have fewer groups.
constexpr int scale_block_groups = 2;
constexpr int scale_block_inputs = scale_block_groups * group_inputs;
constexpr int largest_code = 120;
constexpr int largest_magnitudes = 2047;

// The largest scale times the largest sum of products of a group, and the largest offset times the largest sum of codes.
constexpr int64_t w4_largest = INT16_MAX * int64_t{w4_middle} * largest_magnitudes + INT16_MAX * int64_t{largest_magnitudes};
static_assert(w4_largest <= INT32_MAX / scale_block_groups);

// What a product reads of one group of a row: the codes, zeros past the last input, and of their sum what a sum of products begins with.
struct RowGroup {
  int8_t codes[group_inputs];
  int32_t start;        // for W4: in the upper 16 bits the sum, in the lower ones -8 times the sum, and `w4_lift` on top
  int32_t correction;   // for W8: -128 times the sum, for weights of signed bytes read as unsigned ones
  int32_t pairs_start;  // for W4, where inputs are multiplied in pairs (isa/vec_pairs.h); written by the table that does so
};

// Rows lie in panels of eight, as many as are multiplied at a time. Of a panel all rows of the first group come first, then those of the
// second: what is needed next lies behind what is needed now.
constexpr int64_t panel_rows = 8;

// An input that is an outlier in some of four rows, and its value there; 0 in the others. So its weights are unpacked once for all four. In
// a prefill most outliers are of one row alone, but in some layers of nearly all; lists for two to four rows take the least time for both.
constexpr int64_t outlier_rows = 4;

struct SharedOutlier {
  uint32_t input;
  float values[outlier_rows];
};

struct QuantisedRows {
  int64_t groups, scale_blocks;
  RowGroup* data;   // [panels, groups, 8]
  float* scales;    // [panels, blocks, 8]

  RowGroup* group_of(int64_t row, int64_t group) const {
    return data + (row / panel_rows * groups + group) * panel_rows + row % panel_rows;
  }
  float* scale_of(int64_t row, int64_t block) const {
    return scales + (row / panel_rows * scale_blocks + block) * panel_rows + row % panel_rows;
  }

  // Outliers of row r, inputs ascending: from outliers + r * outlier_room on, as many as outlier_counts[r]; null: none are taken out.
  Outlier* outliers = nullptr;
  int32_t* outlier_counts = nullptr;    // [rows]
  int64_t outlier_room = 0;

  // The same for products: those of rows 4i .. 4i + 3, inputs ascending, from shared_begins[i] to shared_begins[i + 1].
  SharedOutlier* shared_outliers = nullptr;
  int64_t* shared_begins = nullptr;
};

// What is done to a row on its way into a product, and what with: the weights of a norm, or what goes through a gate.
enum class Prologue : int { nothing = 0, rms_norm = 1, silu_mul = 2, gelu_tanh_mul = 3 };

struct RowInput {
  const float* row;
  Prologue prologue = Prologue::nothing;
  const float* other = nullptr;
  float epsilon = 0.0f;
};

// Floats that quantise_row needs for itself: the row in whole blocks, and four for each of them, in eights.
constexpr int64_t quantise_scratch(int64_t columns) {
  const int64_t blocks = (columns + scale_block_inputs - 1) / scale_block_inputs;
  return blocks * scale_block_inputs + (blocks + 7) / 8 * 8 * 4;
}

// More values than this cannot be so many times their mean.
constexpr int64_t most_outliers(int64_t columns) { return columns / outlier_ratio + 1; }

// A piece of a product: rows [first_row, end_row) of the activations times strips [first_strip, end_strip) of the weight.
// out = product + bias, or with `add` out += scale * (product + bias). The blocks of a row are added up in their order, then its
// outliers.
struct LinearTask {
  const Weight* weight;
  QuantisedRows quantised;   // for quantised layouts
  const float* rows;         // for the others, [rows, inputs], rows `row_stride` floats apart
  int64_t row_stride;
  int64_t first_row, end_row;
  int64_t first_strip, end_strip;
  float* out;                // [rows, outputs], rows `out_stride` floats apart
  int64_t out_stride;
  bool add;
  float scale;
};

// --- attention ----------------------------------------------------------------------------------------------------------------------

// A vector of the cache, the key or the value that one token has of one kv head, is kept as whole numbers: value = code * scale. A scale is
// the upper half of a float, rounded up; a vector that is not finite has the scale NaN and codes of 0. Products of pairs of codes are added
// up two to a lane, without conversions and without rounding.
//
// Four codes of 16 bits take three elements of 16. Three of them are elements as they are; the fourth's upper 12 bits are the lowest four
// of those three, highest first, and its own lowest four are 0. Each code is the nearest to what it stands for whose lowest bits are so: as
// precise as 12 bits, sign and all, which is what f16 has for the largest feature.
//
// No sum of products leaves 32 bits. Those of weights and values are of a row and segment, whose weights together are at most two largest
// codes. Those of a query and a key, over all features or some, are at most the product of their lengths: so both are bounded, for heads of
// up to 7,000 features. To an ordinary key of 64 features or more that costs 7% of its fineness or nothing.
constexpr int64_t key_tile = 16;
constexpr int codes_of_unit = 4, elements_of_unit = 3;
constexpr int lowest_bits = 4, fourth_step = 1 << lowest_bits;
constexpr int largest_cache_code = 32767 / fourth_step * fourth_step;   // before the lowest bits are chosen
constexpr int largest_query_code = 32767;
constexpr float longest_key = 12000.0f;      // divided by the root of the head's size, before its codes are rounded
constexpr float longest_query = 175000.0f;   // times the root of the head's size; the product of both is 2% less than 2^31
constexpr int largest_weight_code = 32767, all_weights = 65000;
constexpr float lowest_cache_scale = 0x1p-60f;

constexpr int64_t even(int64_t n) { return n + n % 2; }
// Units of a vector. Of every eight features of a key the even ones are a unit and the odd ones another; of a value those are that lie a
// quarter of a head apart.
constexpr int64_t key_units(int64_t head_size) { return (head_size + 7) / 8 * 2; }
constexpr int64_t value_units(int64_t head_size) { return (head_size + codes_of_unit - 1) / codes_of_unit; }

// What one kv head has of a block of the cache: for every position the scale of its key, then those of the values; the keys' codes and the
// values'. Keys lie in tiles of 16 positions (the last may be narrower), each [pairs of units, 3, positions of the tile, 2], so that four
// vectors of pairs of features of several keys come out of three; values are [pairs of positions, 3, units, 2]. Behind the last feature a
// vector is filled up with zeros, and of an odd number of positions there is a place that nobody uses.
struct CachedHead {
  uint16_t* data;
  int64_t block_size, head_size;

  uint16_t* scales(bool of_values) const { return data + (of_values ? block_size : 0); }
  // Where the tile of a position begins, whose first is a whole number of tiles into the block, and how many positions it has.
  uint16_t* keys(int64_t tile) const { return codes() + tile * key_units(head_size) * elements_of_unit; }
  int64_t tile_width(int64_t tile) const { return block_size - tile < key_tile ? block_size - tile : key_tile; }
  // The first element of a position; the others follow at every second place.
  uint16_t* value(int64_t position) const {
    const int64_t elements = value_units(head_size) * elements_of_unit;
    return codes() + block_size * key_units(head_size) * elements_of_unit + position / 2 * 2 * elements + position % 2;
  }

 private:
  uint16_t* codes() const { return data + 2 * block_size; }
};

// As many 16-bit elements as a kv head's part of a block has for each position.
constexpr int64_t cache_room(int64_t block_size, int64_t head_size) {
  return 2 + elements_of_unit * key_units(head_size) +
         (even(block_size) * elements_of_unit * value_units(head_size) + block_size - 1) / block_size;
}

// One layer of the paged cache; distances count elements. Reading is fastest where all tiles are whole.
struct CacheLayer {
  uint16_t* data;
  int64_t block_stride;
  int64_t head_stride;
  int64_t block_size;
  int64_t head_size;

  CachedHead head(int64_t block, int64_t kv_head) const {
    return {data + block * block_stride + kv_head * head_stride, block_size, head_size};
  }
};

// One layer of a cache that is [blocks, layers, kv heads, block size, cache_room].
inline CacheLayer layer_of_cache(uint16_t* data, int64_t layers, int64_t layer, int64_t kv_heads, int64_t block_size, int64_t head_size) {
  const int64_t head = block_size * cache_room(block_size, head_size);
  return {data + layer * kv_heads * head, layers * kv_heads * head, head, block_size, head_size};
}

// What one kv head has of a block of the store, in bytes: for every position the scale of its key, the zeros of the keys, the scales and
// zeros of the values; then the keys' codes and the values'. Keys lie in tiles too, each [head size, positions of the tile]. A byte of 4-bit
// codes holds features 2j (low) and 2j + 1 of a key, and of a value those that are half a head apart. Zeros, and codes of 8 bits, are kept
// less 128.
struct StoredHead {
  uint8_t* data;
  int64_t block_size, vector_bytes;

  uint8_t* scales(bool of_values) const { return data + (of_values ? 2 : 0) * block_size; }
  uint8_t* zeros(bool of_values) const { return scales(of_values) + block_size; }
  uint8_t* keys() const { return data + 4 * block_size; }
  uint8_t* values() const { return keys() + block_size * vector_bytes; }
};

// One layer of the store; all distances count bytes.
struct StoreLayer {
  uint8_t* data;             // null: there is no store
  int64_t block_stride;
  int64_t head_stride;
  int64_t block_size;
  int64_t head_size;
  int64_t bits;              // of a code, 8 or 4

  int64_t vector_bytes() const { return head_size * bits / 8; }
  StoredHead head(int64_t block, int64_t kv_head) const {
    return {data + block * block_stride + kv_head * head_stride, block_size, vector_bytes()};
  }
};

constexpr int64_t stored_head_bytes(int64_t block_size, int64_t head_size, int64_t bits) { return block_size * (head_size * bits / 4 + 4); }

// One layer of a store that is [blocks, layers, kv heads, stored_head_bytes].
inline StoreLayer layer_of_store(uint8_t* data, int64_t layers, int64_t layer, int64_t kv_heads, int64_t block_size, int64_t head_size,
                                 int64_t bits) {
  const int64_t head = stored_head_bytes(block_size, head_size, bits);
  return {data + layer * kv_heads * head, layers * kv_heads * head, head, block_size, head_size, bits};
}

// A scale's byte is the upper bits of a float, less those of the smallest scale, 2^-18.
constexpr int scale_shift = 20;
constexpr int32_t lowest_scale = (127 - 18) << 3;

// A query's context is worked through in segments, cut at whole multiples of this many positions: softmax and weighted sum are made for
// each alone and merged in order. So the bits are the same whether one thread does all segments or each another.
constexpr int64_t segment_keys = 256;

// The queries of one request, `count` tokens at consecutive positions, for the query heads of one kv head.
// Query t stands at queries + t * query_stride, its `group` heads one after the other; likewise out.
struct AttendTask {
  CacheLayer cache;
  const int64_t* table;
  StoreLayer store;          // without data: everything is read from the cache
  const int64_t* store_table;
  int64_t tail_blocks;       // so many whole blocks before a query, and the one it is in, it reads from the cache
  int64_t kv_head;
  int64_t group;             // query heads of a kv head
  const float* queries;      // of this kv head's first query head
  int64_t query_stride;
  int64_t count;
  int64_t first_position;    // of the first query; it sees positions up to its own
  int64_t window;            // position p sees p - window + 1 .. p; 0: all up to p
  float scale;
  float cap;                 // 0: none; else score = cap * tanh(score / cap)
  float* out;
  int64_t out_stride;
  const AttendTask* next;    // what the same worker does after this one, or null

  // The segments that the first query sees: those that a task of one query is split into.
  int64_t first_segment() const { return window > 0 && first_position >= window ? (first_position + 1 - window) / segment_keys : 0; }
  int64_t end_segment() const { return first_position / segment_keys + 1; }
  // What a query at a position reads from the store: all positions before this one.
  int64_t stored_before(int64_t position) const {
    const int64_t blocks = store.data ? (position + 1) / cache.block_size - tail_blocks : 0;
    return blocks > 0 ? blocks * cache.block_size : 0;
  }
  // How many queries, from one at a position on, read the same from the store; for all there is where there is none.
  int64_t queries_alike(int64_t position) const { return store.data ? cache.block_size - (position + 1) % cache.block_size : count; }
  // What is kept of one segment: for every query head its largest score, the sum of its weights, and the weighted sum of values.
  int64_t partial_floats() const { return group * (2 + cache.head_size); }
};

// --- sampling -----------------------------------------------------------------------------------------------------------------------

// A row of scores is looked through in chunks; of each the maxima of every sixteenth score are kept. The k-th largest of all these is a
// bound for the k-th largest score that few scores other than the k pass.
constexpr int64_t maxima_section = 1024;
constexpr int64_t maxima_lanes = 16;

constexpr int64_t maxima_count(int64_t scores) { return (scores + maxima_section - 1) / maxima_section * maxima_lanes; }

// The likeliest tokens of a row that together have most of the probability lie nearly always nearer to the best than one of these.
constexpr int num_near = 3;
constexpr float near_distances[num_near] = {3.0f, 6.0f, 9.0f};
constexpr double rough_share = 5e-6;

struct RowScan {
  float best;
  int64_t token;       // the first that has the best score
  bool has_nan;
};

// --- the table ----------------------------------------------------------------------------------------------------------------------

struct Kernels {
  const char* name;

  // quantise.inl
  void (*quantise_row)(const RowInput& input, int64_t columns, float* scratch, const QuantisedRows& out, int64_t out_row);

  // linear.inl
  void (*linear)(const LinearTask& task);
  void (*unpack_row)(const Weight& weight, int64_t output, float* out);   // one output's weights as floats: an embedding

  // rows.inl; `out` may be the input
  void (*make_row)(const RowInput& input, int64_t columns, float* out);
  void (*add_scaled)(const float* left, const float* right, float scale, int64_t columns, float* out);
  void (*scale_and_cap)(float* row, int64_t columns, float scale, float cap);   // cap 0: none
  // One head of a token: pair i turned by (cosine[i], sine[i]); features past the pairs stay.
  void (*rotate)(const float* head, int64_t head_size, int64_t pairs, bool interleaved, const float* cosine, const float* sine, float* out);
  // The experts of one token, best first, and their shares of the softmax over all; normalised, the shares of the chosen add up to 1.
  void (*route)(const float* logits, int64_t experts, int64_t per_token, bool normalise, int32_t* chosen, float* shares);

  // cache.inl: key and value of one token and kv head, to a position of a block
  void (*write_cache)(const float* key, const float* value, const CachedHead& head, int64_t position);

  // store.inl: what one kv head has of a block of the cache, to a block of the store; `move_scratch` floats of scratch
  void (*move_block)(const CacheLayer& cache, int64_t from, const StoreLayer& store, int64_t to, int64_t kv_head, float* scratch);
  int64_t (*move_scratch)(int64_t head_size);

  // attention.inl
  void (*attend)(const AttendTask& task, float* scratch);   // and those behind it
  int64_t (*attend_scratch)(const AttendTask& task);   // how many floats of scratch one worker needs for it; some 200,000 for heads of 256
  // The same for a task of one query in two steps, for more threads than there are tasks: first each of its segments into a partial of
  // its own, then all partials, in the order of their segments, into task.out.
  void (*attend_segment)(const AttendTask& task, int64_t segment, float* partial, float* scratch);
  void (*attend_merge)(const AttendTask& task, const float* partials);

  // sampler.inl; tokens number the scores of a row, and `below` is how far a score lies under the best one, in float
  RowScan (*scan_scores)(const float* scores, int64_t count, float* maxima);   // maxima [maxima_count(count)]
  void (*mask_scores)(const float* scores, int64_t count, const uint8_t* allowed, float* out);   // a bit for each; else minus infinity
  double (*sum_exp)(const float* scores, int64_t count, float best);   // of exp(score - best), the difference in double too
  // A token's weight is exp(-below * factor). `roughly` is right within `rough_share`, and near[i] is the sum of those alone whose
  // below * factor is at most near_distances[i].
  double (*sum_weights)(const float* scores, int64_t count, float best, double factor);
  double (*sum_weights_roughly)(const float* scores, int64_t count, float best, float factor, double* near);
  void (*weigh_each)(const float* below, int64_t count, double factor, double* out);
  // All that lie at most `limit` below the best, in order; returns how many.
  int64_t (*collect_scores)(const float* scores, int64_t count, float best, float limit, int32_t* tokens, float* below);
  // The token with the highest -below / temperature + noise, the first at a tie; `likeliest` is one with the best score.
  int64_t (*draw_scores)(const float* scores, int64_t count, float best, double temperature, uint64_t key, int64_t likeliest);

  // linear.inl, for measurements: nothing but products of bytes; returns how many, or 0 where there are no instructions for them.
  int64_t (*multiply_in_registers)(int64_t repeats);
};

// The table in use. `select` takes one by name and says whether this machine has it.
const Kernels& kernels();
bool select(const char* name);
const char* const* available(int& count);

}  // namespace weft
