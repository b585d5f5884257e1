// Whole texts instead of requests: attention over the rows of the step, without a cache, and the mean of a text's rows.
#include <algorithm>
#include <cstring>

#include "program/program.h"

namespace weft {
namespace {

// A row block of whole texts has at least this many rows, if the texts are short: then every weight is read once for many
// rows, and the rows stay in the L2 cache.
constexpr int64_t rows_of_block = 64;
// Row blocks of whole texts are not used if one text has more than this percentage of a thread's share of the rows.
constexpr int64_t most_percent_of_share = 60;
// Queries of a text that one thread takes at a time, if the texts are divided: few enough that one long text has work for
// all threads.
constexpr int64_t queries_of_part = 96;

}  // namespace

const float* Program::forward_texts(const Step& step) {
  has_head_products_ = false;
  prepare(step, Cache{});
  row_blocks_.clear();
  const bool by_text = partition_texts();
  if (!by_text) partition_rows();
  run_all(by_text, false, 0);
  return buffers_[static_cast<size_t>(rows_buffer_)].data();
}

// Makes row blocks of whole texts. A thread takes such a block through all layers up to the pooling, without waiting
// for other threads. Returns false if a text is too long: it would keep one thread busy while the others wait.
bool Program::partition_texts() {
  const int64_t threads = pool_.threads();
  const int64_t most = std::max<int64_t>(1, step_.tokens * most_percent_of_share / (100 * threads));
  const int64_t wanted = std::min(rows_of_block, most);
  for (int64_t text = 0, first = 0; text < step_.requests; text++) {
    const int64_t end = step_.query_starts[text + 1];
    if (end - step_.query_starts[text] > most && threads > 1) {
      row_blocks_.clear();
      return false;
    }
    if (end - first >= wanted || text + 1 == step_.requests) {
      row_blocks_.push_back(RowBlock{first, end});
      first = end;
    }
  }
  return true;
}

// The attention of one text and KV head, over all queries of the text.
TextTask Program::text_task(const Instruction& instruction, int64_t text, int64_t kv_head) const {
  const int64_t start = step_.query_starts[text], size = shape_.head_size, group = shape_.heads / shape_.kv_heads;
  const float* row = row_of(instruction.input, start);
  TextTask task{};
  task.queries = row + kv_head * group * size;
  task.keys = row + (shape_.heads + kv_head) * size;
  task.values = task.keys + shape_.kv_heads * size;
  task.stride = strides_[static_cast<size_t>(instruction.input)];
  task.tokens = task.end = step_.query_starts[text + 1] - start;
  task.group = group;
  task.head_size = size;
  task.window = patterns_[static_cast<size_t>(instruction.pattern)].window;
  task.causal = instruction.causal;
  task.scale = shape_.scale;
  task.cap = shape_.cap;
  task.out = row_of(instruction.output, start) + kv_head * group * size;
  task.out_stride = strides_[static_cast<size_t>(instruction.output)];
  return task;
}

void Program::make_room_for_texts(const Instruction& instruction) {
  rows_of(instruction.input, step_.tokens);
  rows_of(instruction.output, step_.tokens);
  int64_t most = 0;
  for (int64_t text = 0; text < step_.requests; text++) most = std::max(most, text_task(instruction, text, 0).scratch_floats());
  for (Worker& worker : workers_) worker.scratch.at_least(most);
}

// Runs on one thread; memory is allocated already. The block consists of whole texts.
void Program::attend_texts(const Instruction& instruction, const RowBlock& block, Worker& worker) {
  const int64_t* starts = step_.query_starts;
  int64_t text = std::lower_bound(starts, starts + step_.requests, block.first) - starts;
  for (; text < step_.requests && starts[text] < block.end; text++)
    for (int64_t head = 0; head < shape_.kv_heads; head++) kernels().attend_text(text_task(instruction, text, head), worker.scratch.data());
}

// Divides the queries of all texts into parts, and runs each part and KV head as one item.
void Program::text_attention(const Instruction& instruction) {
  make_room_for_texts(instruction);
  text_parts_.clear();
  for (int64_t text = 0; text < step_.requests; text++) {
    const int64_t tokens = step_.query_starts[text + 1] - step_.query_starts[text];
    for (int64_t first = 0; first < tokens; first += queries_of_part) text_parts_.push_back(QueryRun{text, first, std::min(queries_of_part, tokens - first)});
  }
  const int64_t parts = static_cast<int64_t>(text_parts_.size());
  pool_.run(parts * shape_.kv_heads, [&](int64_t item, int worker) {
    const QueryRun& part = text_parts_[static_cast<size_t>(item / shape_.kv_heads)];
    TextTask task = text_task(instruction, part.request, item % shape_.kv_heads);
    task.first = part.first;
    task.end = part.first + part.count;
    kernels().attend_text(task, workers_[static_cast<size_t>(worker)].scratch.data());
  });
}

// Writes the mean of the rows of each text. Rows are added in order.
void Program::mean_rows(const Instruction& instruction) {
  const int64_t columns = columns_[static_cast<size_t>(instruction.input)];
  rows_of(instruction.input, step_.tokens);
  rows_of(instruction.output, step_.selected);
  pool_.run(step_.requests, [&](int64_t text, int) {
    const int64_t first = step_.query_starts[text], end = step_.query_starts[text + 1];
    float* out = row_of(instruction.output, text);
    std::memcpy(out, row_of(instruction.input, first), static_cast<size_t>(columns) * sizeof(float));
    for (int64_t row = first + 1; row < end; row++) kernels().add_scaled(out, row_of(instruction.input, row), 1.0f, columns, out);
    kernels().scale_and_cap(out, columns, 1.0f / static_cast<float>(end - first), 0.0f);
  });
}

}  // namespace weft
