// Attention of one request and the move of a block to the store, for tests and measurements; a model runs them inside its program.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "kernels.h"

namespace weft {

namespace {

void check(bool right, const std::string& message) {
  if (!right) throw nb::value_error(message.c_str());
}

using Halves = Array<uint16_t, 6>;
using Store = Array<uint8_t, 4>;
// Store, bits, tail blocks, table of the store.
using StoreArguments = std::tuple<Store, int64_t, int64_t, Array<const int64_t, 1>>;

StoreLayer layer_of(const Store& store, const Halves& cache, size_t layer, int64_t bits) {
  const int64_t block_size = static_cast<int64_t>(cache.shape(4)), head_size = static_cast<int64_t>(cache.shape(5));
  check(bits == 8 || (bits == 4 && head_size % 2 == 0), "codes have 8 bits, or 4 for heads of an even size");
  check(store.shape(1) == cache.shape(1) && store.shape(2) == cache.shape(2) && layer < cache.shape(1) &&
            static_cast<int64_t>(store.shape(3)) == stored_head_bytes(block_size, head_size, bits),
        "the store must be [blocks, layers, kv heads, " + std::to_string(stored_head_bytes(block_size, head_size, bits)) + "]");
  return layer_of_store(store.data(), static_cast<int64_t>(store.shape(1)), static_cast<int64_t>(layer),
                        static_cast<int64_t>(store.shape(2)), block_size, head_size, bits);
}

void move_block(const Halves& cache, size_t layer, size_t from, const Store& store, size_t to, int64_t bits) {
  const int64_t kv_heads = static_cast<int64_t>(cache.shape(2)), head_size = static_cast<int64_t>(cache.shape(5));
  const StoreLayer target = layer_of(store, cache, layer, bits);
  check(cache.shape(3) == 2 && from < cache.shape(0) && to < store.shape(0), "a block is past the cache or past the store");
  const CacheLayer source = layer_of_cache(cache.data(), static_cast<int64_t>(cache.shape(1)), static_cast<int64_t>(layer), kv_heads,
                                           static_cast<int64_t>(cache.shape(4)), head_size);
  std::vector<float> scratch(static_cast<size_t>(kernels().move_scratch(head_size)));
  for (int64_t head = 0; head < kv_heads; head++)
    kernels().move_block(source, static_cast<int64_t>(from), target, static_cast<int64_t>(to), head, scratch.data());
}

void attend(const Array<const float, 3>& queries, const Array<uint16_t, 6>& cache, size_t layer, const Array<const int64_t, 1>& table,
            int64_t first_position, int64_t window, float scale, float cap, const Array<float, 3>& out, bool split,
            const std::optional<StoreArguments>& two_tier) {
  const size_t count = queries.shape(0), heads = queries.shape(1), head_size = queries.shape(2);
  const size_t blocks = cache.shape(0), layers = cache.shape(1), kv_heads = cache.shape(2), block_size = cache.shape(4);
  check(cache.shape(3) == 2, "the cache must be [blocks, layers, kv heads, 2, block size, head size]");
  check(layer < layers, "the cache has " + std::to_string(layers) + " layers, none with the number " + std::to_string(layer));
  check(cache.shape(5) == head_size, "the queries' heads are of " + std::to_string(head_size) + " features, the cache's of " +
                                         std::to_string(cache.shape(5)));
  check(kv_heads > 0 && heads % kv_heads == 0,
        std::to_string(heads) + " query heads cannot share " + std::to_string(kv_heads) + " kv heads evenly");
  check(out.shape(0) == count && out.shape(1) == heads && out.shape(2) == head_size, "out must have the shape of the queries");
  check(first_position >= 0 && window >= 0, "a position and a window cannot be negative");
  const size_t needed = (static_cast<size_t>(first_position) + count + block_size - 1) / block_size;
  check(table.shape(0) >= needed, std::to_string(needed) + " blocks are needed, the table names " + std::to_string(table.shape(0)));
  for (size_t i = 0; i < needed; i++)
    check(table.data()[i] >= 0 && static_cast<size_t>(table.data()[i]) < blocks,
          "the table names block " + std::to_string(table.data()[i]) + ", the cache has " + std::to_string(blocks));
  check(!split || count == 1, "only one query at a time can be split over its context");

  const int64_t size = static_cast<int64_t>(head_size), stride = static_cast<int64_t>(heads * head_size);
  AttendTask task = {};
  task.cache = layer_of_cache(cache.data(), static_cast<int64_t>(layers), static_cast<int64_t>(layer), static_cast<int64_t>(kv_heads),
                              static_cast<int64_t>(block_size), size);
  task.table = table.data();
  if (two_tier) {
    const auto& [store, bits, tail_blocks, store_table] = *two_tier;
    task.store = layer_of(store, cache, layer, bits);
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
  module.def("move_block", move_block, "cache"_a, "layer"_a, "moved_from"_a, "store"_a, "moved_to"_a, "bits"_a);
}

}  // namespace weft
