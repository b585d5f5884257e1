// Attention of one request, and the move of a KV block to the store. For tests and measurements; models run them in a
// program.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "kernels/kernels.h"

namespace weft {

namespace {

void check(bool is_right, const std::string& message) {
  if (!is_right) throw nb::value_error(message.c_str());
}

using Codes = Array<uint16_t, 5>;
using Store = Array<uint8_t, 4>;
// The arguments of attention over a two-tier cache, in this order: the store, bits of a code, tail blocks, block table
// of the store.
using StoreArguments = std::tuple<Store, int64_t, int64_t, Array<const int64_t, 1>>;

CacheLayer layer_of(const Codes& cache, size_t layer, int64_t head_size) {
  const int64_t block_size = static_cast<int64_t>(cache.shape(3));
  check(head_size > 0, "head_size must be positive");
  check(block_size > 0 && static_cast<int64_t>(cache.shape(4)) == cache_room(block_size, head_size),
        "for heads of " + std::to_string(head_size) + " the cache must be [blocks, layers, kv heads, block size, " +
            (block_size > 0 ? std::to_string(cache_room(block_size, head_size)) : "room") + "]");
  check(layer < cache.shape(1),
        "the cache has " + std::to_string(cache.shape(1)) + " layers, none with the number " + std::to_string(layer));
  return layer_of_cache(cache.data(), static_cast<int64_t>(cache.shape(1)), static_cast<int64_t>(layer), static_cast<int64_t>(cache.shape(2)),
                        block_size, head_size);
}

StoreLayer layer_of(const Store& store, const Codes& cache, size_t layer, int64_t head_size, int64_t bits) {
  const int64_t block_size = static_cast<int64_t>(cache.shape(3));
  check(bits == 8 || (bits == 4 && head_size % 2 == 0), "codes have 8 bits, or 4 for heads of an even size");
  check(store.shape(1) == cache.shape(1) && store.shape(2) == cache.shape(2) &&
            static_cast<int64_t>(store.shape(3)) == stored_head_bytes(block_size, head_size, bits),
        "the store must be [blocks, layers, kv heads, " + std::to_string(stored_head_bytes(block_size, head_size, bits)) + "]");
  return layer_of_store(store.data(), static_cast<int64_t>(store.shape(1)), static_cast<int64_t>(layer),
                        static_cast<int64_t>(store.shape(2)), block_size, head_size, bits);
}

// Attention over one whole text: rows of Q, K and V, for a model of `heads` and `kv_heads`.
void attend_text(const Array<const float, 2>& rows, int64_t heads, int64_t kv_heads, int64_t window, bool causal, float scale, float cap,
                 size_t first, size_t end, const Array<float, 2>& out) {
  const int64_t tokens = static_cast<int64_t>(rows.shape(0)), width = static_cast<int64_t>(rows.shape(1));
  check(kv_heads > 0 && heads > 0 && heads % kv_heads == 0 && width % (heads + 2 * kv_heads) == 0 && tokens > 0, "the rows must be Q, K and V of whole heads");
  const int64_t size = width / (heads + 2 * kv_heads), group = heads / kv_heads;
  check(static_cast<int64_t>(out.shape(0)) == tokens && static_cast<int64_t>(out.shape(1)) == heads * size, "out must have a row for each token, as wide as the heads");
  check(first <= end && end <= static_cast<size_t>(tokens) && window >= 0, "the queries are not part of the text, or the window is negative");
  std::vector<float> scratch;
  for (int64_t head = 0; head < kv_heads; head++) {
    const float* keys = rows.data() + (heads + head) * size;
    TextTask task{rows.data() + head * group * size, keys, keys + kv_heads * size, width, tokens, static_cast<int64_t>(first),
                  static_cast<int64_t>(end), group, size, window, causal, scale, cap, out.data() + head * group * size, heads * size};
    scratch.resize(static_cast<size_t>(task.scratch_floats()));
    kernels().attend_text(task, scratch.data());
  }
}

void write_cache(const Array<const float, 1>& key, const Array<const float, 1>& value, const Codes& cache, size_t layer, size_t kv_head,
                 size_t cell) {
  check(key.shape(0) == value.shape(0), "key and value must have the same size");
  const CacheLayer target = layer_of(cache, layer, static_cast<int64_t>(key.shape(0)));
  const size_t block_size = cache.shape(3);
  check(kv_head < cache.shape(2) && cell / block_size < cache.shape(0), "kv_head or cell is past the cache");
  kernels().write_cache(key.data(), value.data(), target.head(static_cast<int64_t>(cell / block_size), static_cast<int64_t>(kv_head)),
                        static_cast<int64_t>(cell % block_size));
}

void move_block(const Codes& cache, size_t layer, size_t from, const Store& store, size_t to, int64_t head_size, int64_t bits) {
  const CacheLayer source = layer_of(cache, layer, head_size);
  const StoreLayer target = layer_of(store, cache, layer, head_size, bits);
  check(from < cache.shape(0) && to < store.shape(0), "moved_from is past the cache, or moved_to is past the store");
  std::vector<float> scratch(static_cast<size_t>(kernels().move_scratch(head_size)));
  for (int64_t head = 0; head < static_cast<int64_t>(cache.shape(2)); head++)
    kernels().move_block(source, static_cast<int64_t>(from), target, static_cast<int64_t>(to), head, scratch.data());
}

// Attention of consecutive queries of one request. With `split`, the segments of the context are computed one by one
// and then merged, as a program does to divide one long context among its threads.
void attend(const Array<const float, 3>& queries, const Codes& cache, size_t layer, const Array<const int64_t, 1>& table,
            int64_t first_position, int64_t window, float scale, float cap, const Array<float, 3>& out, bool split,
            const std::optional<StoreArguments>& two_tier) {
  const size_t count = queries.shape(0), heads = queries.shape(1), head_size = queries.shape(2);
  const size_t blocks = cache.shape(0), kv_heads = cache.shape(2), block_size = cache.shape(3);
  const CacheLayer source = layer_of(cache, layer, static_cast<int64_t>(head_size));
  check(kv_heads > 0 && heads % kv_heads == 0,
        std::to_string(heads) + " query heads cannot share " + std::to_string(kv_heads) + " kv heads evenly");
  check(out.shape(0) == count && out.shape(1) == heads && out.shape(2) == head_size, "out must have the shape of the queries");
  check(first_position >= 0 && window >= 0, "first_position and window must not be negative");
  const size_t needed = (static_cast<size_t>(first_position) + count + block_size - 1) / block_size;
  check(table.shape(0) >= needed, std::to_string(needed) + " blocks are needed, the table names " + std::to_string(table.shape(0)));
  for (size_t i = 0; i < needed; i++)
    check(table.data()[i] >= 0 && static_cast<size_t>(table.data()[i]) < blocks,
          "the table names block " + std::to_string(table.data()[i]) + ", the cache has " + std::to_string(blocks));
  check(!split || count == 1, "only one query at a time can be split over its context");

  const int64_t size = static_cast<int64_t>(head_size), stride = static_cast<int64_t>(heads * head_size);
  AttendTask task = {};
  task.cache = source;
  task.table = table.data();
  if (two_tier) {
    const auto& [store, bits, tail_blocks, store_table] = *two_tier;
    task.store = layer_of(store, cache, layer, size, bits);
    task.store_table = store_table.data();
    task.tail_blocks = tail_blocks;
    const int64_t stored = task.stored_before(first_position + static_cast<int64_t>(count) - 1) / static_cast<int64_t>(block_size);
    check(static_cast<int64_t>(store_table.shape(0)) >= stored, std::to_string(stored) + " blocks of the store are needed, the table names " +
                                                                     std::to_string(store_table.shape(0)));
    for (int64_t i = 0; i < stored; i++)
      check(store_table.data()[i] >= 0 && static_cast<size_t>(store_table.data()[i]) < store.shape(0),
            "the table names block " + std::to_string(store_table.data()[i]) + ", the store has " + std::to_string(store.shape(0)));
  }
  task.group = static_cast<int64_t>(heads / kv_heads);
  task.queries = queries.data();
  task.out = out.data();
  task.query_stride = task.out_stride = stride;
  task.count = static_cast<int64_t>(count);
  task.first_position = first_position;
  task.window = window;
  task.scale = scale;
  task.cap = cap;
  std::vector<float> scratch(static_cast<size_t>(kernels().attend_scratch(task)));
  std::vector<float> partials;
  std::vector<AttendTask> tasks(kv_heads, task);
  for (size_t head = 0; head < kv_heads; head++) {
    tasks[head].kv_head = static_cast<int64_t>(head);
    tasks[head].queries += tasks[head].kv_head * task.group * size;
    tasks[head].out += tasks[head].kv_head * task.group * size;
    if (head + 1 < kv_heads) tasks[head].next = &tasks[head + 1];
  }
  if (!split) return kernels().attend(tasks.front(), scratch.data());
  for (const AttendTask& one : tasks) {
    const int64_t first = one.first_segment(), segments = one.end_segment() - first;
    partials.resize(static_cast<size_t>(segments * one.partial_floats()));
    for (int64_t segment = 0; segment < segments; segment++)
      kernels().attend_segment(one, first + segment, partials.data() + segment * one.partial_floats(), scratch.data());
    kernels().attend_merge(one, partials.data());
  }
}

}  // namespace

void bind_attention(nb::module_& module) {
  using namespace nb::literals;
  module.def("attend", attend, "queries"_a, "cache"_a, "layer"_a, "table"_a, "first_position"_a, "window"_a, "scale"_a, "cap"_a, "out"_a,
             "split"_a = false, "two_tier"_a.none() = nb::none());
  module.def("move_block", move_block, "cache"_a, "layer"_a, "moved_from"_a, "store"_a, "moved_to"_a, "head_size"_a, "bits"_a);
  module.def("attend_text", attend_text, "rows"_a, "heads"_a, "kv_heads"_a, "window"_a, "causal"_a, "scale"_a, "cap"_a, "first"_a, "end"_a, "out"_a);
  module.def("write_cache", write_cache, "key"_a, "value"_a, "cache"_a, "layer"_a, "kv_head"_a, "cell"_a);
  module.def("cache_room", [](int64_t block_size, int64_t head_size) {
    check(block_size > 0 && head_size > 0, "block_size and head_size must be positive");
    return cache_room(block_size, head_size);
  }, "block_size"_a, "head_size"_a);
}

}  // namespace weft
