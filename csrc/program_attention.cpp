// Attention in a program: who works on which queries and heads, and blocks that move to the store before it.
#include <algorithm>

#include "program.h"

namespace weft {
namespace {

// Queries of one request that one thread attends for at a time: few enough to share out a single long prompt.
constexpr int64_t queries_per_piece = 16;
// The next chunk of attention is this part of what is left.
constexpr int64_t shares_per_thread = 2;
// With fewer tasks than these for each thread, long contexts are shared out by segments.
constexpr int64_t tasks_per_thread = 4;

}  // namespace

// The kv heads of all pieces are the tasks of attention, and a chunk is some of them, so that a worker can fetch what it reads next while
// it works on this. The first chunks are long and the last are short: nobody is left waiting for one.
void Program::share_out_attention() {
  pieces_.clear();
  for (int64_t request = 0; request < step_.requests; request++) {
    const int64_t end = step_.query_starts[request + 1];
    for (int64_t first = step_.query_starts[request], next; first < end; first = next) {
      next = std::min(end, first + queries_per_piece);
      // Queries that read different blocks from the store are not worked on together: there a piece ends.
      if (cache_.store) next = std::min(next, first + cache_.block_size - (step_.positions[first] + 1) % cache_.block_size);
      pieces_.push_back(Piece{request, first, next - first});
    }
  }
  const auto cost = [&](const Piece& piece) { return piece.count * (step_.positions[piece.first] + piece.count); };
  std::stable_sort(pieces_.begin(), pieces_.end(), [&](const Piece& left, const Piece& right) { return cost(left) > cost(right); });
  int64_t left = 0;
  for (const Piece& piece : pieces_) left += cost(piece) * shape_.kv_heads;
  chunks_.clear();
  const int64_t tasks = static_cast<int64_t>(pieces_.size()) * shape_.kv_heads;
  for (int64_t first = 0, end = 0; first < tasks; first = end) {
    const int64_t fair = left / (pool_.threads() * shares_per_thread);
    int64_t taken = 0;
    while (end < tasks && (end == first || taken < fair)) taken += cost(pieces_[static_cast<size_t>(end++ / shape_.kv_heads)]);
    left -= taken;
    chunks_.push_back(Chunk{first, end});
  }
  std::reverse(chunks_.begin(), chunks_.end());   // the pool begins with the last
}

// After K and V of the step's tokens are written, which may belong to a block that moves.
void Program::move_blocks(int layer) {
  if (step_.moves == 0) return;
  for (Worker& worker : workers_) worker.scratch.at_least(kernels().move_scratch(shape_.head_size));
  const CacheLayer cache = layer_of(layer);
  const StoreLayer store = store_of(layer);
  pool_.run(step_.moves * shape_.kv_heads, [&](int64_t index, int worker) {
    const int64_t move = index / shape_.kv_heads;
    kernels().move_block(cache, step_.moved_from[move], store, step_.moved_to[move], index % shape_.kv_heads,
                         workers_[static_cast<size_t>(worker)].scratch.data());
  });
}

// For a few long contexts: their segments are shared out, and put together in order, which gives the same bits. False where some request
// has several tokens in the step, or none has several segments.
template <typename TaskOf>
bool Program::attend_in_segments(int64_t tasks, TaskOf&& task_of) {
  segments_.clear();
  for (int64_t chunk = 0; chunk < tasks; chunk++) {
    const AttendTask task = task_of(chunk);
    if (task.count != 1) return false;
    for (int64_t segment = task.first_segment(); segment < task.end_segment(); segment++) segments_.push_back(Segment{chunk, segment});
  }
  const int64_t count = static_cast<int64_t>(segments_.size());
  if (count == tasks) return false;
  const int64_t floats = task_of(0).partial_floats();
  float* partials = partials_.at_least(count * floats);
  pool_.run(count, [&](int64_t index, int worker) {
    const Segment& part = segments_[static_cast<size_t>(index)];
    kernels().attend_segment(task_of(part.task), part.segment, partials + index * floats, workers_[static_cast<size_t>(worker)].scratch.data());
  });
  for (int64_t index = 0; index < count; index++) {
    const Segment& part = segments_[static_cast<size_t>(index)];
    if (index == 0 || part.task != segments_[static_cast<size_t>(index - 1)].task)
      kernels().attend_merge(task_of(part.task), partials + index * floats);
  }
  return true;
}

void Program::attention(const Instruction& instruction) {
  move_blocks(instruction.layer);
  const int64_t group = shape_.heads / shape_.kv_heads;
  const int64_t width = strides_[instruction.input], out_width = strides_[instruction.output];
  const float* queries = rows_of(instruction.input, step_.tokens);
  float* out = rows_of(instruction.output, step_.tokens);
  const auto task_of = [&](int64_t chunk) {
    const Piece& piece = pieces_[static_cast<size_t>(chunk / shape_.kv_heads)];
    const int64_t kv_head = chunk % shape_.kv_heads, first_head = kv_head * group;
    AttendTask task{};
    task.cache = layer_of(instruction.layer);
    task.table = step_.block_tables + piece.request * step_.table_stride;
    task.store = store_of(instruction.layer);
    task.store_table = step_.store_tables + piece.request * step_.store_table_stride;
    task.tail_blocks = cache_.tail_blocks;
    task.kv_head = kv_head;
    task.group = group;
    task.queries = queries + piece.first * width + first_head * shape_.head_size;
    task.query_stride = width;
    task.count = piece.count;
    task.first_position = step_.positions[piece.first];
    task.window = patterns_[static_cast<size_t>(instruction.pattern)].window;
    task.scale = shape_.scale;
    task.cap = shape_.cap;
    task.out = out + piece.first * out_width + first_head * shape_.head_size;
    task.out_stride = out_width;
    return task;
  };
  const int64_t tasks = static_cast<int64_t>(pieces_.size()) * shape_.kv_heads;
  int64_t most_scratch = 0;
  for (int64_t task = 0; task < tasks; task += shape_.kv_heads) most_scratch = std::max(most_scratch, kernels().attend_scratch(task_of(task)));
  for (Worker& worker : workers_) worker.scratch.at_least(most_scratch);
  if (tasks < pool_.threads() * tasks_per_thread && attend_in_segments(tasks, task_of)) return;
  pool_.run(static_cast<int64_t>(chunks_.size()), [&](int64_t index, int worker) {
    const Chunk& chunk = chunks_[static_cast<size_t>(index)];
    std::vector<AttendTask>& list = workers_[static_cast<size_t>(worker)].tasks;
    list.clear();
    for (int64_t task = chunk.first; task < chunk.end; task++) list.push_back(task_of(task));
    for (size_t task = 1; task < list.size(); task++) list[task - 1].next = &list[task];
    kernels().attend(list.front(), workers_[static_cast<size_t>(worker)].scratch.data());
  });
}

}  // namespace weft
