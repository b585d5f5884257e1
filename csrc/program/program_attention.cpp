// Attention of a program, and the move of KV blocks to the store before it.
#include <algorithm>

#include "program/program.h"

namespace weft {
namespace {

// With fewer tasks per thread, long contexts are divided by segments.
constexpr int64_t tasks_per_thread = 4;

}  // namespace

// Moves KV blocks to the store. Runs after K and V of the step's tokens are written, because they may belong to a block
// that moves.
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

// Task `number`: one KV head of one query run.
AttendTask Program::attend_task(const Instruction& instruction, int64_t number) const {
  const QueryRun& run = query_runs_[static_cast<size_t>(number / shape_.kv_heads)];
  const int64_t group = shape_.heads / shape_.kv_heads, kv_head = number % shape_.kv_heads, first_feature = kv_head * group * shape_.head_size;
  AttendTask task{};
  task.cache = layer_of(instruction.layer);
  task.table = step_.block_tables + run.request * step_.table_stride;
  task.store = store_of(instruction.layer);
  task.store_table = step_.store_tables + run.request * step_.store_table_stride;
  task.tail_blocks = cache_.tail_blocks;
  task.kv_head = kv_head;
  task.group = group;
  task.queries = row_of(instruction.input, run.first) + first_feature;
  task.query_stride = strides_[static_cast<size_t>(instruction.input)];
  task.count = run.count;
  task.first_position = step_.positions[run.first];
  task.window = patterns_[static_cast<size_t>(instruction.pattern)].window;
  task.scale = shape_.scale;
  task.cap = shape_.cap;
  task.out = row_of(instruction.output, run.first) + first_feature;
  task.out_stride = strides_[static_cast<size_t>(instruction.output)];
  return task;
}

// Allocates the scratch memory and the task lists of all workers.
void Program::make_room_for_attention(const Instruction& instruction) {
  rows_of(instruction.input, step_.tokens);
  rows_of(instruction.output, step_.tokens);
  int64_t most_scratch = 0, most_tasks = 0;
  const int64_t tasks = static_cast<int64_t>(query_runs_.size()) * shape_.kv_heads;
  for (int64_t task = 0; task < tasks; task += shape_.kv_heads)
    most_scratch = std::max(most_scratch, kernels().attend_scratch(attend_task(instruction, task)));
  for (const TaskRange& range : task_ranges_) most_tasks = std::max(most_tasks, range.end - range.first);
  for (Worker& worker : workers_) {
    worker.scratch.at_least(most_scratch);
    worker.tasks.reserve(static_cast<size_t>(most_tasks));
  }
}

// Runs on one thread; memory is allocated already.
void Program::attend_tasks(const Instruction& instruction, const TaskRange& range, Worker& worker) {
  std::vector<AttendTask>& list = worker.tasks;
  list.clear();
  for (int64_t task = range.first; task < range.end; task++) list.push_back(attend_task(instruction, task));
  for (size_t task = 1; task < list.size(); task++) list[task - 1].next = &list[task];
  kernels().attend(list.front(), worker.scratch.data());
}

// Divides the segments of a few long contexts among the threads, and merges the results in order. The bits are the same
// as without this division. Does nothing and returns false if a request has several tokens in the step, or if no
// request has several segments.
bool Program::attend_in_segments(const Instruction& instruction) {
  const int64_t tasks = static_cast<int64_t>(query_runs_.size()) * shape_.kv_heads;
  segments_.clear();
  for (int64_t number = 0; number < tasks; number++) {
    const AttendTask task = attend_task(instruction, number);
    if (task.count != 1) return false;
    for (int64_t segment = task.first_segment(); segment < task.end_segment(); segment++) segments_.push_back(Segment{number, segment});
  }
  const int64_t count = static_cast<int64_t>(segments_.size());
  if (count == tasks) return false;
  const int64_t floats = attend_task(instruction, 0).partial_floats();
  float* partials = partials_.at_least(count * floats);
  pool_.run(count, [&](int64_t index, int worker) {
    const Segment& part = segments_[static_cast<size_t>(index)];
    kernels().attend_segment(attend_task(instruction, part.task), part.segment, partials + index * floats,
                             workers_[static_cast<size_t>(worker)].scratch.data());
  });
  for (int64_t index = 0; index < count; index++) {
    const Segment& part = segments_[static_cast<size_t>(index)];
    if (index == 0 || part.task != segments_[static_cast<size_t>(index - 1)].task)
      kernels().attend_merge(attend_task(instruction, part.task), partials + index * floats);
  }
  return true;
}

void Program::attention(const Instruction& instruction) {
  move_blocks(instruction.layer);
  make_room_for_attention(instruction);
  const int64_t tasks = static_cast<int64_t>(query_runs_.size()) * shape_.kv_heads;
  if (tasks < pool_.threads() * tasks_per_thread && attend_in_segments(instruction)) return;
  pool_.run(static_cast<int64_t>(task_ranges_.size()), [&](int64_t index, int worker) {
    attend_tasks(instruction, task_ranges_[static_cast<size_t>(index)], workers_[static_cast<size_t>(worker)]);
  });
}

}  // namespace weft
