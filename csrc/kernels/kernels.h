// Data types of the kernels, and the table of kernels. Each instruction set compiles the same kernels into its own
// table. The best table that the processor supports is chosen once, at run time.
//
// Each result row depends only on its own input row. The number of rows, threads or other requests never changes the
// order in which a sum is computed. So the output of a request is bit-identical in any batch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

// --- weights ------------------------------------------------------------------------------------------------------------------------

// A linear layer [outputs, inputs] is stored in strips of 16 outputs. One vector register holds one input (or four
// inputs, in bytes) of all outputs of a strip. The last strip and the last group of inputs are padded with zeros.
constexpr int strip_outputs = 16;
constexpr int group_inputs = 32;

enum class Layout : int {
  w4 = 0,    // 4-bit codes; weight = ((code - 8) * scale + offset) * unit. Scale and offset are integers, one pair per output and group.
  w8 = 1,    // signed bytes; weight = code * scale
  f32 = 2,   // 16 floats for each input
  f16 = 3,
  bf16 = 4,
};

// W4, one group of one strip, 320 bytes:
//   4 x 64 bytes      vector s holds inputs 8s .. 8s+7; byte 4o + i: low four bits input 8s + i of output o, high four bits input 8s + 4 + i
//   16 x (i16, i16)   scale and offset by output
// After the groups of a strip:
//   16 x f32          units by output
//
// Scales and offsets are integers, so the products of a scale block are added as integers: one instruction for each
// group instead of three for floats. No such sum overflows 32 bits: see `w4_largest`.
constexpr int w4_codes_bytes = 256;
constexpr int w4_group_bytes = 320;
constexpr int w4_units_bytes = 64;
constexpr int w4_middle = 8;   // subtracted from each code: then the sum of a group's products fits a sign and 15 bits
constexpr int w4_lift = 1 << 14;   // added to each such sum, so that the result is positive

// W8, one group of one strip, 544 bytes:
//   8 x 64 bytes  vector s holds inputs 4s .. 4s+3; byte 4o + i: input 4s + i of output o
//   16 x f16      scales by output
constexpr int w8_codes_bytes = 512;
constexpr int w8_group_bytes = 544;

constexpr bool is_quantised(Layout layout) { return layout == Layout::w4 || layout == Layout::w8; }

struct Weight {
  Layout layout;
  int64_t outputs;
  int64_t inputs;
  const uint8_t* data;         // consecutive strips of strip_bytes each; 64-byte aligned
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

// One value far larger than the rest of its row would make the scale of its block so large that all others get codes
// near 0. Such an outlier gets the code 0 in its scale block, and is multiplied separately, as a float.
struct Outlier {
  uint32_t input;
  float value;
};

// An outlier is larger than this many times the mean magnitude of its row. With 12, about 7% of the groups of a chat
// prompt have an outlier, and the noise of the logits is halved.
constexpr int64_t outlier_ratio = 12;
// The same ratio for models of whole texts: the vector of a short text shows the noise of every product, and costs
// little to compute.
constexpr int64_t text_outlier_ratio = 8;

// Activation rows in signed bytes. A scale block is 64 inputs of a row (two groups) that share one scale: value = code
// * scale. The last scale block of a row may have fewer groups.
//
// Two limits of the codes:
//   - The scale maps the largest magnitude of its block to the code 120. So the sum of a code and a 4-bit weight
//     (-8 to 7) fits a signed byte, which isa/vec_pairs.h needs.
//   - The magnitudes of the 32 codes of a group add up to at most 2047. So the sum of their products with 4-bit weights
//     fits 16 bits. If they add up to more, the scale is doubled. This needs a mean magnitude above 53% of the largest,
//     which normally distributed values do not have.
constexpr int scale_block_groups = 2;
constexpr int scale_block_inputs = scale_block_groups * group_inputs;
constexpr int largest_code = 120;
constexpr int largest_magnitudes = 2047;

// The largest magnitude that a group can add to the integer sum of a W4 product: the group adds scale * (sum of
// products of codes) + offset * (sum of the activation codes).
constexpr int64_t w4_largest = INT16_MAX * int64_t{w4_middle} * largest_magnitudes + INT16_MAX * int64_t{largest_magnitudes};
static_assert(w4_largest <= INT32_MAX / scale_block_groups);

// One group of an activation row, in the form that products read: the codes (zeros past the last input), and the values
// with which sums of products start. The latter are derived from the sum of the codes.
struct RowGroup {
  int8_t codes[group_inputs];
  int32_t start;        // for W4: upper 16 bits: the sum; lower 16 bits: -8 times the sum, plus `w4_lift`
  int32_t correction;   // for W8: -128 times the sum, because signed weights are read as unsigned bytes
  int32_t pairs_start;  // for W4 with inputs multiplied in pairs (isa/vec_pairs.h); only the zen4 table writes it
};

// Rows are stored in panels of eight, because eight rows are multiplied at a time. A panel holds group 0 of all its
// rows, then group 1 of all its rows, and so on: memory is read in order.
constexpr int64_t panel_rows = 8;

// An input that is an outlier in at least one of four rows, with its value in each row. The value is 0 in a row where
// the input is no outlier. The weights of the input are unpacked once for four rows. In prefill most outliers occur
// in one row only; in some layers they occur in nearly all rows. Lists for two to four rows are fastest in both cases.
constexpr int64_t outlier_rows = 4;

struct SharedOutlier {
  uint32_t input;
  float values[outlier_rows];
};

struct QuantisedRows {
  int64_t groups, scale_blocks;
  RowGroup* data;   // [panels, groups, 8]
  float* scales;    // [panels, scale blocks, 8]

  RowGroup* group_of(int64_t row, int64_t group) const {
    return data + (row / panel_rows * groups + group) * panel_rows + row % panel_rows;
  }
  float* scale_of(int64_t row, int64_t block) const {
    return scales + (row / panel_rows * scale_blocks + block) * panel_rows + row % panel_rows;
  }

  // Outliers of row r, by ascending input: outlier_counts[r] elements from outliers[r * outlier_room] on. If `outliers`
  // is null, outliers are not separated.
  int64_t ratio = outlier_ratio;
  Outlier* outliers = nullptr;
  int32_t* outlier_counts = nullptr;    // [rows]
  int64_t outlier_room = 0;

  // The same outliers, merged for four rows at a time, as products read them. The outliers of rows 4i .. 4i + 3 are the
  // elements from shared_begins[i] up to shared_begins[i + 1], by ascending input.
  SharedOutlier* shared_outliers = nullptr;
  int64_t* shared_begins = nullptr;
};

// The operation that is applied to a row just before a product.
// The names that end in `mul` take rows of [gate | up].
enum class Prologue : int {
  nothing = 0, rms_norm = 1, silu_mul = 2, gelu_tanh_mul = 3, layer_norm = 4, gelu = 5, gelu_tanh = 6, gelu_mul = 7, tanh = 8
};
constexpr Prologue last_prologue = Prologue::tanh;

constexpr bool is_gated(Prologue prologue) {
  return prologue == Prologue::silu_mul || prologue == Prologue::gelu_tanh_mul || prologue == Prologue::gelu_mul;
}
constexpr bool is_norm(Prologue prologue) { return prologue == Prologue::rms_norm || prologue == Prologue::layer_norm; }

struct RowInput {
  const float* row;
  Prologue prologue = Prologue::nothing;
  const float* other = nullptr;   // the norm's weights, or the values that the gate multiplies
  float epsilon = 0.0f;
  const float* bias = nullptr;    // of a layer norm, or null
};

// Scratch floats that quantise_row needs. One part is the row, padded to whole scale blocks. The other has four floats
// for each scale block, for a multiple of eight scale blocks.
constexpr int64_t quantise_scratch(int64_t columns) {
  const int64_t blocks = (columns + scale_block_inputs - 1) / scale_block_inputs;
  return blocks * scale_block_inputs + (blocks + 7) / 8 * 8 * 4;
}

// At most this many values of a row can exceed `ratio` times the mean magnitude of the row.
constexpr int64_t most_outliers(int64_t columns, int64_t ratio) { return columns / ratio + 1; }

// Part of a product: rows [first_row, end_row) of the activations times strips [first_strip, end_strip) of the
// weight. out = product + bias, or with `add` out += scale * (product + bias). The scale blocks of a row are added in
// order, then its outliers.
struct LinearTask {
  const Weight* weight;
  QuantisedRows quantised;   // for quantised layouts
  const float* rows;         // for float layouts: [rows, inputs], rows `row_stride` floats apart
  int64_t row_stride;
  int64_t first_row, end_row;
  int64_t first_strip, end_strip;
  float* out;                // [rows, outputs], rows `out_stride` floats apart
  int64_t out_stride;
  bool add;
  float scale;
};

// --- attention ----------------------------------------------------------------------------------------------------------------------

// A vector of the KV cache is the key or the value of one token and one KV head. It is stored as integers: value = code
// * scale. A scale is the upper half of a float, rounded up. A vector with a value that is not finite has the scale NaN
// and codes of 0. Integer products of two codes are added two at a time into a 32-bit lane, without conversion and
// without rounding.
//
// Four 16-bit codes are packed into one unit of three 16-bit elements:
//   element 0   code 0, with its low 4 bits replaced by bits 12..15 of code 3
//   element 1   code 1, with its low 4 bits replaced by bits  8..11 of code 3
//   element 2   code 2, with its low 4 bits replaced by bits  4..7  of code 3
//   code 3      has 0 in its own low 4 bits
// Elements 0 to 2 are used as codes 0 to 2 directly: each code is rounded to the nearest value with these low bits. So
// a code has 12 bits including the sign: the precision that f16 has for the largest feature.
//
// No sum of products overflows 32 bits:
// - Weights times values: the weight codes of a row and segment add up to at most twice the largest code, so to less
//   than 2^16. The magnitude of a value code is at most 2^15.
// - Query times key: a dot product is at most the product of the two Euclidean lengths, so both lengths are limited
//   (longest_key, longest_query). The limits leave 2% for the rounding of codes, enough for up to 7,000 features. For a
//   typical key of 64 features or more, the limit costs at most 7% of the resolution.
constexpr int64_t key_tile = 16;
constexpr int codes_of_unit = 4, elements_of_unit = 3;
constexpr int lowest_bits = 4, fourth_step = 1 << lowest_bits;
constexpr int largest_cache_code = 32767 / fourth_step * fourth_step;   // the largest code, before its low bits are replaced
constexpr int largest_query_code = 32767;
constexpr float longest_key = 12000.0f;      // limit of the length of a key's codes / sqrt(head_size), before rounding
// limit of the length of a query's codes * sqrt(head_size); the product of both limits is 2% less than 2^31
constexpr float longest_query = 175000.0f;
constexpr int largest_weight_code = 32767, all_weights = 65000;
constexpr float lowest_cache_scale = 0x1p-60f;

constexpr int64_t even(int64_t n) { return n + n % 2; }
// Number of units of a vector. A unit of a key holds four of eight consecutive features: the even or the odd ones. A
// unit of a value holds four features that are a quarter of a head apart.
constexpr int64_t key_units(int64_t head_size) { return (head_size + 7) / 8 * 2; }
constexpr int64_t value_units(int64_t head_size) { return (head_size + codes_of_unit - 1) / codes_of_unit; }

// The part of a KV block that belongs to one KV head. In order:
//   key scales      [positions]
//   value scales    [positions]
//   key codes       tiles of 16 positions (the last may be narrower), each [pairs of units, 3, positions of the tile, 2]
//   value codes     [pairs of positions, 3, units, 2]
// In this order, three loaded vectors unpack to four vectors, each with a pair of features of several keys. Features
// past the last one are zero. With an odd number of positions, half of the last pair is unused.
struct CachedHead {
  uint16_t* data;
  int64_t block_size, head_size;

  uint16_t* scales(bool of_values) const { return data + (of_values ? block_size : 0); }
  // Start of the tile that begins at position `tile` (a multiple of key_tile), and its number of positions.
  uint16_t* keys(int64_t tile) const { return codes() + tile * key_units(head_size) * elements_of_unit; }
  int64_t tile_width(int64_t tile) const { return block_size - tile < key_tile ? block_size - tile : key_tile; }
  // The first element of a value; the others follow at every second element.
  uint16_t* value(int64_t position) const {
    const int64_t elements = value_units(head_size) * elements_of_unit;
    return codes() + block_size * key_units(head_size) * elements_of_unit + position / 2 * 2 * elements + position % 2;
  }

 private:
  uint16_t* codes() const { return data + 2 * block_size; }
};

// 16-bit elements per position of one KV head's part of a KV block.
constexpr int64_t cache_room(int64_t block_size, int64_t head_size) {
  return 2 + elements_of_unit * key_units(head_size) +
         (even(block_size) * elements_of_unit * value_units(head_size) + block_size - 1) / block_size;
}

// One layer of the paged KV cache; strides in elements. Reading is fastest if block_size is a multiple of key_tile.
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

// One layer of a cache of shape [KV blocks, layers, KV heads, block size, cache_room].
inline CacheLayer layer_of_cache(uint16_t* data, int64_t layers, int64_t layer, int64_t kv_heads, int64_t block_size, int64_t head_size) {
  const int64_t head = block_size * cache_room(block_size, head_size);
  return {data + layer * kv_heads * head, layers * kv_heads * head, head, block_size, head_size};
}

// The part of a store block that belongs to one KV head, in bytes. In order:
//   key scales, key zeros, value scales, value zeros   [positions] each
//   key codes     tiles of 16 positions, each [head size, positions of the tile]
//   value codes   [positions, head size]
// With 4 bits, a byte of a key holds features 2j (low bits) and 2j + 1. A byte of a value holds two features that are
// half a head apart. Zeros and 8-bit codes are stored minus 128.
struct StoredHead {
  uint8_t* data;
  int64_t block_size, vector_bytes;

  uint8_t* scales(bool of_values) const { return data + (of_values ? 2 : 0) * block_size; }
  uint8_t* zeros(bool of_values) const { return scales(of_values) + block_size; }
  uint8_t* keys() const { return data + 4 * block_size; }
  uint8_t* values() const { return keys() + block_size * vector_bytes; }
};

// One layer of the store; strides in bytes.
struct StoreLayer {
  uint8_t* data;             // null: there is no store
  int64_t block_stride;
  int64_t head_stride;
  int64_t block_size;
  int64_t head_size;
  int64_t bits;              // bits of a code, 8 or 4

  int64_t vector_bytes() const { return head_size * bits / 8; }
  StoredHead head(int64_t block, int64_t kv_head) const {
    return {data + block * block_stride + kv_head * head_stride, block_size, vector_bytes()};
  }
};

constexpr int64_t stored_head_bytes(int64_t block_size, int64_t head_size, int64_t bits) { return block_size * (head_size * bits / 4 + 4); }

// One layer of a store of shape [blocks, layers, KV heads, stored_head_bytes].
inline StoreLayer layer_of_store(uint8_t* data, int64_t layers, int64_t layer, int64_t kv_heads, int64_t block_size, int64_t head_size,
                                 int64_t bits) {
  const int64_t head = stored_head_bytes(block_size, head_size, bits);
  return {data + layer * kv_heads * head, layers * kv_heads * head, head, block_size, head_size, bits};
}

// A scale byte is the upper bits of a float minus the upper bits of 2^-18, the smallest scale.
constexpr int scale_shift = 20;
constexpr int32_t lowest_scale = (127 - 18) << 3;

// Attention processes the context in segments of this many positions, aligned to multiples of it. Softmax and
// weighted sum are computed for each segment alone, then merged in order. So the bits do not depend on how segments
// are divided among threads.
constexpr int64_t segment_keys = 256;

// The queries of one request, `count` tokens at consecutive positions, for the query heads of one KV head. Query t
// begins at queries + t * query_stride; its `group` heads are contiguous. `out` has the same layout.
struct AttendTask {
  CacheLayer cache;
  const int64_t* table;
  StoreLayer store;          // data is null: there is no store, and everything is read from the KV cache
  const int64_t* store_table;
  // a query reads its own KV block and this many KV blocks before it from the KV cache, older ones from the store
  int64_t tail_blocks;
  int64_t kv_head;
  int64_t group;             // query heads per KV head
  const float* queries;      // first query head of this KV head
  int64_t query_stride;
  int64_t count;
  int64_t first_position;    // position of the first query; a query sees positions up to its own
  int64_t window;            // position p sees p - window + 1 .. p; 0: all up to p
  float scale;
  float cap;                 // 0: none; else score = cap * tanh(score / cap)
  float* out;
  int64_t out_stride;
  const AttendTask* next;    // next task of the same worker, or null

  // Segments that the first query sees. A task of one query can be split into them.
  int64_t first_segment() const { return window > 0 && first_position >= window ? (first_position + 1 - window) / segment_keys : 0; }
  int64_t end_segment() const { return first_position / segment_keys + 1; }
  // A query at `position` reads all positions before the returned one from the store.
  int64_t stored_before(int64_t position) const {
    const int64_t blocks = store.data ? (position + 1) / cache.block_size - tail_blocks : 0;
    return blocks > 0 ? blocks * cache.block_size : 0;
  }
  // Number of queries, starting at `position`, that read the same positions from the store. Without a store: all of
  // them.
  int64_t queries_alike(int64_t position) const { return store.data ? cache.block_size - (position + 1) % cache.block_size : count; }
  // Size of the result of one segment: for each query head the largest score, the sum of weights, the weighted sum of
  // values.
  int64_t partial_floats() const { return group * (2 + cache.head_size); }
};

// --- attention over whole texts -----------------------------------------------------------------------------------------------------

// Queries [first, end) of one text of `tokens` tokens, for the query heads of one KV head. All keys and values of the
// text are rows of the same step, in floats: there is no cache. `queries`, `keys`, `values` and `out` point to the first
// token of the text. The `group` query heads are contiguous.
struct TextTask {
  const float *queries, *keys, *values;
  int64_t stride;            // floats from one token to the next in `queries`, `keys` and `values`
  int64_t tokens, first, end;
  int64_t group, head_size;
  int64_t window;            // position p sees p - window + 1 .. p + window - 1; 0: all
  bool causal;               // position p sees nothing after p
  float scale, cap;          // cap 0: none
  float* out;
  int64_t out_stride;

  // How many queries have their scores in memory at a time: a multiple of the row tiles of every instruction set, with
  // about 128 KB of scores.
  int64_t queries_at_once() const {
    const int64_t fitting = 32768 / padded(tokens) / 12 * 12;
    return fitting < 12 ? 12 : fitting < 48 ? fitting : 48;
  }
  static constexpr int64_t padded(int64_t n) { return (n + strip_outputs - 1) / strip_outputs * strip_outputs; }
  int64_t scratch_floats() const { return padded(tokens) * (head_size + queries_at_once()) + padded(head_size) * tokens; }
};

// --- sampling -----------------------------------------------------------------------------------------------------------------------

// A row of scores is scanned in sections of 1024 scores. Each section has 16 maxima, one for each lane (every sixteenth
// score). The k-th largest of all these maxima is a lower bound of the k-th largest score. Few scores besides the k
// largest exceed this bound. So the k best tokens are found among few candidates.
constexpr int64_t maxima_section = 1024;
constexpr int64_t maxima_lanes = 16;

constexpr int64_t maxima_count(int64_t scores) { return (scores + maxima_section - 1) / maxima_section * maxima_lanes; }

// Limits for (best score - score) / temperature. Top-p collects only the tokens within the smallest limit whose tokens
// have enough weight. Nearly always, one of these limits suffices.
constexpr int num_near = 3;
constexpr float near_distances[num_near] = {3.0f, 6.0f, 9.0f};
constexpr double rough_share = 5e-6;   // the largest relative error of `sum_weights_roughly`

struct RowScan {
  float best;
  int64_t token;       // the first token with the best score
  bool has_nan;
};

// --- the table ----------------------------------------------------------------------------------------------------------------------

struct Kernels {
  const char* name;

  // quantise.inl
  void (*quantise_row)(const RowInput& input, int64_t columns, float* scratch, const QuantisedRows& out, int64_t out_row);

  // linear.inl
  void (*linear)(const LinearTask& task);
  void (*unpack_row)(const Weight& weight, int64_t output, float* out);   // weights of one output as floats, for embeddings

  // rows.inl; `out` may alias the input
  void (*make_row)(const RowInput& input, int64_t columns, float* out);
  void (*add_scaled)(const float* left, const float* right, float scale, int64_t columns, float* out);
  void (*scale_and_cap)(float* row, int64_t columns, float scale, float cap);   // cap 0: none
  // RoPE of one head of one token: pair i is rotated by (cosine[i], sine[i]); features past the pairs are copied.
  void (*rotate)(const float* head, int64_t head_size, int64_t pairs, bool interleaved, const float* cosine, const float* sine, float* out);
  // Chooses the experts of one token, best first. Their routing weights are the softmax over all experts. With
  // `normalise`, the weights of the chosen experts add up to 1.
  void (*route)(const float* logits, int64_t experts, int64_t per_token, bool normalise, int32_t* chosen, float* shares);

  // cache.inl: writes key and value of one token and KV head to a position of a KV block
  void (*write_cache)(const float* key, const float* value, const CachedHead& head, int64_t position);

  // store.inl: quantises one KV head's part of a KV block into a block of the store; needs `move_scratch` floats
  void (*move_block)(const CacheLayer& cache, int64_t from, const StoreLayer& store, int64_t to, int64_t kv_head, float* scratch);
  int64_t (*move_scratch)(int64_t head_size);

  // attention.inl
  void (*attend)(const AttendTask& task, float* scratch);   // also runs the tasks linked by `next`
  int64_t (*attend_scratch)(const AttendTask& task);   // scratch floats for one worker; about 200,000 for heads of 256
  // These two compute a task of one query, for when there are few tasks per thread. `attend_segment` writes the partial
  // result of one segment. `attend_merge` merges all partial results, in segment order, into task.out.
  void (*attend_segment)(const AttendTask& task, int64_t segment, float* partial, float* scratch);
  void (*attend_merge)(const AttendTask& task, const float* partials);

  // text_attention.inl; needs `scratch_floats` floats
  void (*attend_text)(const TextTask& task, float* scratch);

  // sampler.inl. A token is the index of a score in its row; `below` is the distance from the best score: best - score,
  // in float
  RowScan (*scan_scores)(const float* scores, int64_t count, float* maxima);   // maxima [maxima_count(count)]
  // `allowed` has one bit per token. The score of a token whose bit is 0 becomes minus infinity.
  void (*mask_scores)(const float* scores, int64_t count, const uint8_t* allowed, float* out);
  double (*sum_exp)(const float* scores, int64_t count, float best);   // sum of exp(score - best), with the difference in double
  // The weight of a token is exp(-below * factor). `sum_weights_roughly` has a relative error of at most
  // `rough_share`. It also sets near[i] to the weight of all tokens with below * factor <= near_distances[i].
  double (*sum_weights)(const float* scores, int64_t count, float best, double factor);
  double (*sum_weights_roughly)(const float* scores, int64_t count, float best, float factor, double* near);
  void (*weigh_each)(const float* below, int64_t count, double factor, double* out);
  // Collects tokens at most `limit` below the best score, in token order; returns their number.
  int64_t (*collect_scores)(const float* scores, int64_t count, float best, float limit, int32_t* tokens, float* below);
  // Returns the token with the highest -below / temperature + noise; at a tie, the lowest. `likeliest` is the token
  // with the best score.
  int64_t (*draw_scores)(const float* scores, int64_t count, float best, double temperature, uint64_t key, int64_t likeliest);

  // linear.inl, for measurements: computes only byte products, and returns their number. Returns 0 if the instruction
  // set has no instruction for byte products.
  int64_t (*multiply_in_registers)(int64_t repeats);
};

// The table in use. `select` chooses one by name; it returns false if this processor does not support it.
const Kernels& kernels();
bool select(const char* name);
const char* const* available(int& count);

}  // namespace weft
