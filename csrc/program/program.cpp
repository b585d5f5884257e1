#include "program/program.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "program/stopwatch.h"

namespace weft {
namespace {

// Work items per thread: enough that a descheduled thread does not delay the others for long.
constexpr int64_t items_per_thread = 8;
// Small products have fewer items: each reads about `item_bytes`, but there are at least this many items per thread.
// Handing out an item costs as much as reading some kilobytes.
constexpr int64_t fewest_items_per_thread = 2;
constexpr int64_t item_bytes = 64 << 10;
// A product with more rows than this is also divided by rows, evenly, so that the rows of an item stay in the L2 cache.
constexpr int64_t most_rows_per_item = 32 * panel_rows;

// Rows per item for cheap operations: handing out an item costs as much as a few rows.
constexpr int64_t rows_together = 4;
// Calls work(row, worker) for every row.
template <typename Work>
void each_row(Pool& pool, int64_t rows, Work&& work) {
  const int64_t each = std::max(rows_together, ceil_divide(rows, pool.threads() * items_per_thread));
  pool.run(ceil_divide(rows, each), [&](int64_t item, int worker) {
    const int64_t end = std::min(rows, (item + 1) * each);
    for (int64_t row = item * each; row < end; row++) work(row, worker);
  });
}

// The input of an instruction with its prologue. `columns`: columns of the row after the prologue; a gate halves them.
RowInput row_input(const Instruction& instruction, const float* row, int64_t columns) {
  return RowInput{row, instruction.prologue, is_gated(instruction.prologue) ? row + columns : instruction.norm.data, instruction.epsilon,
                  instruction.norm_bias.data};
}

void normalise(const float* row, const float* weight, int64_t columns, float epsilon, float* out) {
  kernels().make_row(RowInput{row, Prologue::rms_norm, weight, epsilon}, columns, out);
}

}  // namespace

float* Program::rows_of(int buffer, int64_t rows) { return buffers_[buffer].at_least(rows * strides_[buffer]); }

CacheLayer Program::layer_of(int layer) const {
  return layer_of_cache(cache_.data, cache_.layers, layer, shape_.kv_heads, cache_.block_size, shape_.head_size);
}

StoreLayer Program::store_of(int layer) const {
  if (!cache_.store) return {};
  return layer_of_store(cache_.store, cache_.layers, layer, shape_.kv_heads, cache_.block_size, shape_.head_size, cache_.bits);
}

// Chooses how the step is divided (see program.h), and runs it up to the logits.
const float* Program::forward(const Step& step, const Cache& cache, int64_t sampled) {
  has_head_products_ = false;
  prepare(step, cache);
  row_blocks_.clear();
  cut_into_query_runs();
  const bool by_request = partition_requests(), is_pipelined = !by_request && partition_pipeline();
  if (!by_request && !is_pipelined) {
    partition_attention();
    partition_rows();
  }
  run_all(by_request || is_pipelined, is_pipelined, sampled);
  return buffers_[rows_buffer_].data();
}

// Runs all instructions before the logits.
void Program::run_all(bool attends_in_blocks, bool is_pipelined, int64_t sampled) {
  const bool all_selected = selects_all();
  const auto runs_in_blocks = [&](const Instruction& instruction) {
    return !row_blocks_.empty() &&
           (instruction.is_by_row(all_selected) ||
            (attends_in_blocks && (instruction.kind == Instruction::Kind::attention || instruction.kind == Instruction::Kind::text_attention)));
  };
  for (size_t i = 0, end; i < logits_begin_; i = end) {
    for (end = i; end < logits_begin_ && runs_in_blocks(instructions_[end]); end++) {}
    if (end > i && is_pipelined) {
      run_pipeline(i, end);
    } else if (end > i) {
      run_in_blocks(i, end, end == logits_begin_ && sampled == step_.tokens && logits_begin_with_product());
    } else {
      const Instruction::Kind kind = instructions_[i].kind;
      const bool selected = kind == Instruction::Kind::select_rows || kind == Instruction::Kind::mean_rows || instructions_[i].after_selection;
      run(instructions_[i], selected ? step_.selected : step_.tokens);
      end = i + 1;
    }
  }
}

// Keeps the step, and computes the cosines and sines of its positions.
void Program::prepare(const Step& step, const Cache& cache) {
  step_ = step;
  cache_ = cache;
  cosines_.resize(ropes_.size());
  sines_.resize(ropes_.size());
  for (size_t rope = 0; rope < ropes_.size(); rope++) {
    const Rope& rope_settings = ropes_[rope];
    const int64_t pairs = static_cast<int64_t>(rope_settings.frequencies.size());
    float* cosine = cosines_[rope].at_least(step.tokens * pairs);
    float* sine = sines_[rope].at_least(step.tokens * pairs);
    each_row(pool_, step.tokens, [&](int64_t token, int) {
      for (int64_t pair = 0; pair < pairs; pair++) {
        const double angle = static_cast<double>(step.positions[token]) * rope_settings.frequencies[static_cast<size_t>(pair)];
        cosine[token * pairs + pair] = static_cast<float>(std::cos(angle) * rope_settings.scale);
        sine[token * pairs + pair] = static_cast<float>(std::sin(angle) * rope_settings.scale);
      }
    });
  }
}

void Program::run(const Instruction& instruction, int64_t rows) {
  if (rows == 0) return;
  const Stopwatch watch(measured_ ? &seconds_[static_cast<size_t>(instruction.kind)] : nullptr);
  execute(instruction, rows);
}

// Each row block passes through all these instructions on one thread, without synchronisation. With `with_head`, a
// thread that would wait at the end computes the LM head of its own rows instead. Such waits are common: on a busy
// machine each thread is descheduled for up to a tenth of a step, rarely at the same time as the others.
void Program::run_in_blocks(size_t first, size_t end, bool with_head) {
  make_room_for_blocks(first, end);
  if (with_head) make_room_for_head();
  const int64_t count = static_cast<int64_t>(row_blocks_.size());
  std::atomic<int64_t> untaken{count}, unfinished{count};
  pool_.run(count, [&](int64_t index, int number) {
    untaken.fetch_sub(1);
    Worker& worker = workers_[static_cast<size_t>(number)];
    execute_block(first, end, static_cast<size_t>(index), worker);
    if (!with_head) return;
    prepare_head(static_cast<size_t>(index), worker);
    unfinished.fetch_sub(1);
    const Stopwatch watch(measured_ ? &worker.seconds[static_cast<size_t>(Instruction::Kind::linear)] : nullptr);
    const int64_t strips = instructions_[logits_begin_].weight.strips(), at_once = strips_of_head_at_once();
    int64_t& done = head_products_[static_cast<size_t>(index)].strips_done;
    for (int64_t next; done < strips && untaken.load() == 0 && unfinished.load() > 0; done = next) {
      next = std::min(strips, done + at_once);
      multiply_head(static_cast<size_t>(index), done, next);
    }
  });
  add_seconds_of_workers();
}

// All memory is allocated here: a worker thread could not report that an allocation failed.
void Program::make_room_for_blocks(size_t first, size_t end) {
  const int64_t rows = step_.tokens;
  int64_t most_rows = 0;
  for (const RowBlock& block : row_blocks_) most_rows = std::max(most_rows, block.end - block.first);
  for (size_t i = first; i < end; i++) {
    const Instruction& instruction = instructions_[i];
    if (instruction.input >= 0) rows_of(instruction.input, rows);
    rows_of(instruction.output, rows);
    if (instruction.kind == Instruction::Kind::attention) make_room_for_attention(instruction);
    if (instruction.kind == Instruction::Kind::text_attention) make_room_for_texts(instruction);
    for (Worker& worker : workers_) {
      worker.scratch.at_least(quantise_scratch(instruction.weight.inputs));
      if (instruction.kind == Instruction::Kind::linear && !instruction.reuses_rows)
        worker.prepared.make_room(most_rows, instruction.weight.inputs, instruction.weight.quantised());
    }
  }
}

void Program::add_seconds_of_workers() {
  for (Worker& worker : workers_) {
    for (size_t kind = 0; kind < Instruction::kinds; kind++)
      seconds_[kind] += worker.seconds[kind] / static_cast<double>(pool_.threads());
    worker.seconds.fill(0.0);
  }
}

// Runs on one worker thread. `make_room_for_blocks` has allocated all memory.
void Program::execute_block(size_t first, size_t end, size_t index, Worker& worker) {
  const RowBlock& block = row_blocks_[index];
  for (size_t i = first; i < end; i++) {
    const Instruction& instruction = instructions_[i];
    const Stopwatch watch(measured_ ? &worker.seconds[static_cast<size_t>(instruction.kind)] : nullptr);
    if (instruction.kind == Instruction::Kind::linear) linear_of_block(instruction, block.first, block.end - block.first, worker);
    else if (instruction.kind == Instruction::Kind::attention) attend_tasks(instruction, task_ranges_[index], worker);
    else if (instruction.kind == Instruction::Kind::text_attention) attend_texts(instruction, block, worker);
    else for (int64_t row = block.first; row < block.end; row++) execute_row(instruction, row);
  }
}

// Runs one instruction on all rows, divided among the threads.
void Program::execute(const Instruction& instruction, int64_t rows) {
  switch (instruction.kind) {
    case Instruction::Kind::linear: return linear(instruction, rows);
    case Instruction::Kind::attention: return attention(instruction);
    case Instruction::Kind::mixture: return mixture(instruction, rows);
    case Instruction::Kind::select_rows: return select_rows(instruction);
    case Instruction::Kind::text_attention: return text_attention(instruction);
    case Instruction::Kind::mean_rows: return mean_rows(instruction);
    default: break;
  }
  if (instruction.input >= 0) rows_of(instruction.input, rows);
  rows_of(instruction.output, rows);
  each_row(pool_, rows, [&](int64_t row, int) { execute_row(instruction, row); });
}

// Runs an instruction on one row, whose memory is allocated already.
void Program::execute_row(const Instruction& instruction, int64_t row) {
  const float* input = instruction.input < 0 ? nullptr : row_of(instruction.input, row);
  float* output = row_of(instruction.output, row);
  const int64_t columns = columns_[static_cast<size_t>(instruction.output)];
  switch (instruction.kind) {
    case Instruction::Kind::embed: {
      const int64_t* indices = instruction.index == Instruction::Index::tokens      ? step_.token_ids
                               : instruction.index == Instruction::Index::positions ? step_.positions
                                                                                    : step_.types;
      kernels().unpack_row(instruction.weight, instruction.first_row + indices[row], output);
      if (instruction.scale != 1.0f) kernels().scale_and_cap(output, columns, instruction.scale, 0.0f);
      break;
    }
    case Instruction::Kind::norm: kernels().make_row(row_input(instruction, input, columns), columns, output); break;
    case Instruction::Kind::rope: rope(instruction, row, output); break;
    case Instruction::Kind::rope_and_write: rope_and_write(instruction, row); break;
    case Instruction::Kind::add: kernels().add_scaled(output, input, instruction.scale, columns, output); break;
    case Instruction::Kind::scale_and_cap: kernels().scale_and_cap(output, columns, instruction.scale, instruction.cap); break;
    // This case is reached only if all rows are selected (`is_by_row`), so output row and input row have the same
    // index.
    case Instruction::Kind::select_rows: std::memcpy(output, input, static_cast<size_t>(columns) * sizeof(float)); break;
    default: break;
  }
}

void Program::PreparedRows::make_room(int64_t rows, int64_t row_columns, bool in_bytes) {
  columns = row_columns;
  is_quantised = in_bytes;
  if (in_bytes) quantised = activations.at_least(rows, columns, true, ratio);
  else floats.at_least(rows * columns);
}

void Program::PreparedRows::put(int64_t row, const RowInput& input, float* scratch) {
  if (is_quantised) kernels().quantise_row(input, columns, scratch, quantised, row);
  else kernels().make_row(input, columns, floats.data() + row * columns);
}

LinearTask Program::PreparedRows::product_task(const Weight& weight, int64_t rows, float* out, int64_t out_stride, bool add, float scale) const {
  return LinearTask{&weight, quantised, floats.data(), columns, 0, rows, 0, weight.strips(), out, out_stride, add, scale};
}

// Prepares rows for a product, on all threads. `get(row)` returns the input and prologue of a row.
template <typename Get>
void Program::prepare_rows(int64_t rows, int64_t columns, bool quantised, Get&& get) {
  prepared_.make_room(rows, columns, quantised);
  for (Worker& worker : workers_) worker.scratch.at_least(quantise_scratch(columns));
  each_row(pool_, rows, [&](int64_t row, int worker) { prepared_.put(row, get(row), workers_[static_cast<size_t>(worker)].scratch.data()); });
  if (quantised) prepared_.activations.gather_outliers(rows);
}

// Multiplies the prepared rows by `weight`.
void Program::product(const Weight& weight, int64_t rows, float* out, int64_t out_stride, bool add, float scale) {
  if (rows > 0) product(prepared_.product_task(weight, rows, out, out_stride, add, scale));
}

// Divides a product into items by rows and strips, and runs them on the pool.
void Program::product(const LinearTask& whole) {
  const Weight& weight = *whole.weight;
  const int64_t rows = whole.end_row;
  const int64_t row_items = ceil_divide(rows, most_rows_per_item);
  const int64_t rows_each = ceil_divide(ceil_divide(rows, row_items), panel_rows) * panel_rows;
  const int64_t strips = weight.strips();
  const int64_t target_items = strips * strip_bytes(weight.layout, weight.inputs) * ceil_divide(rows, 4) / item_bytes;
  const int64_t most = pool_.threads() * items_per_thread, fewest = pool_.threads() * fewest_items_per_thread;
  const int64_t strips_each = ceil_divide(strips, std::min(strips, std::clamp(target_items, fewest, most)));
  const int64_t strip_items = ceil_divide(strips, strips_each);
  pool_.run(row_items * strip_items, [&](int64_t item, int) {
    LinearTask task = whole;
    task.first_row = item % row_items * rows_each;
    task.end_row = std::min(rows, task.first_row + rows_each);
    task.first_strip = item / row_items * strips_each;
    task.end_strip = std::min(strips, task.first_strip + strips_each);
    kernels().linear(task);
  });
}

RowInput Program::input_of_linear(const Instruction& instruction, int64_t row) const {
  return row_input(instruction, row_of(instruction.input, row), instruction.weight.inputs);
}

// Runs a linear layer. Prepares its rows, unless the instruction before it has prepared the same rows.
void Program::linear(const Instruction& instruction, int64_t rows) {
  const Weight& weight = instruction.weight;
  rows_of(instruction.input, rows);
  if (reads_rows_directly(instruction)) {
    rows_of(instruction.output, rows);
    return product(direct_task(instruction, 0, rows));
  }
  if (!instruction.reuses_rows)
    prepare_rows(rows, weight.inputs, weight.quantised(),
               [&](int64_t row) { return input_of_linear(instruction, row); });
  product(weight, rows, rows_of(instruction.output, rows) + instruction.column, strides_[static_cast<size_t>(instruction.output)],
          instruction.add, instruction.scale);
}

// Runs on one worker thread. `make_room_for_blocks` has allocated all memory.
void Program::linear_of_block(const Instruction& instruction, int64_t first, int64_t count, Worker& worker) {
  if (reads_rows_directly(instruction)) return kernels().linear(direct_task(instruction, first, count));
  if (!instruction.reuses_rows) prepare_block(instruction, first, count, worker.prepared, worker);
  kernels().linear(worker.prepared.product_task(instruction.weight, count, row_of(instruction.output, first) + instruction.column,
                                      strides_[static_cast<size_t>(instruction.output)], instruction.add, instruction.scale));
}

// Returns the task of a product with float weights. It reads the rows from their buffer, without preparation.
LinearTask Program::direct_task(const Instruction& instruction, int64_t first, int64_t count) const {
  return LinearTask{&instruction.weight, {}, row_of(instruction.input, first), strides_[static_cast<size_t>(instruction.input)], 0, count, 0,
                    instruction.weight.strips(), row_of(instruction.output, first) + instruction.column,
                    strides_[static_cast<size_t>(instruction.output)], instruction.add, instruction.scale};
}

void Program::prepare_block(const Instruction& instruction, int64_t first, int64_t count, PreparedRows& prepared, Worker& worker) {
  const Weight& weight = instruction.weight;
  prepared.make_room(count, weight.inputs, weight.quantised());
  for (int64_t row = 0; row < count; row++) prepared.put(row, input_of_linear(instruction, first + row), worker.scratch.data());
  if (weight.quantised()) prepared.activations.gather_outliers(count);
}

// Normalises and rotates Q and K of one token, and writes its K and V to the cache.
void Program::rope_and_write(const Instruction& instruction, int64_t token) {
  const CacheLayer layer = layer_of(instruction.layer);
  const int64_t cell = step_.cells[token], block = cell / layer.block_size, position = cell % layer.block_size;
  float* queries = row_of(instruction.input, token);
  rope(instruction, token, queries);
  const float* keys = queries + shape_.heads * shape_.head_size;
  const float* values = keys + shape_.kv_heads * shape_.head_size;
  for (int64_t head = 0; head < shape_.kv_heads; head++)
    kernels().write_cache(keys + head * shape_.head_size, values + head * shape_.head_size, layer.head(block, head), position);
}

// Normalises and rotates the queries and keys of a row, in place.
void Program::rope(const Instruction& instruction, int64_t token, float* queries) {
  const Rope& rope_settings = ropes_[static_cast<size_t>(patterns_[static_cast<size_t>(instruction.pattern)].rope)];
  const size_t rope = static_cast<size_t>(patterns_[static_cast<size_t>(instruction.pattern)].rope);
  const int64_t pairs = static_cast<int64_t>(rope_settings.frequencies.size());
  const int64_t size = shape_.head_size;
  const Kernels& table = kernels();
  const auto normalise_heads = [&](float* heads, int64_t count, const Vector& weight) {
    if (!weight.data) return;
    if (weight.size == size) {
      for (int64_t head = 0; head < count; head++)
        normalise(heads + head * size, weight.data, size, instruction.epsilon, heads + head * size);
    } else {
      normalise(heads, weight.data, count * size, instruction.epsilon, heads);
    }
  };
  float* keys = queries + shape_.heads * size;
  const float* cosine = cosines_[rope].data() + token * pairs;
  const float* sine = sines_[rope].data() + token * pairs;
  normalise_heads(queries, shape_.heads, instruction.query_norm);
  normalise_heads(keys, shape_.kv_heads, instruction.key_norm);
  for (int64_t head = 0; head < shape_.heads + shape_.kv_heads; head++)
    table.rotate(queries + head * size, size, pairs, rope_settings.interleaved, cosine, sine, queries + head * size);
}

// Routes every row, then runs one expert after another on the rows that chose it.
void Program::mixture(const Instruction& instruction, int64_t rows) {
  const Experts& experts = *instruction.experts;
  const Weight& router = instruction.weight;
  const int64_t count = router.outputs, columns = router.inputs, per_token = experts.per_token;
  const float* input = rows_of(instruction.input, rows);
  float* out = rows_of(instruction.output, rows);
  const int64_t stride = strides_[instruction.input], out_stride = strides_[instruction.output];

  float* shares = expert_logits_.at_least(rows * count);
  prepare_rows(rows, columns, router.quantised(), [&](int64_t row) { return RowInput{input + row * stride}; });
  product(router, rows, shares, count, false, 1.0f);
  expert_chosen_.resize(static_cast<size_t>(rows * per_token));
  float* chosen_shares = expert_shares_.at_least(rows * per_token);
  each_row(pool_, rows, [&](int64_t row, int) {
    kernels().route(shares + row * count, count, per_token, experts.normalise, expert_chosen_.data() + row * per_token,
                    chosen_shares + row * per_token);
  });

  std::memset(out, 0, static_cast<size_t>(rows * out_stride) * sizeof(float));
  for (int64_t expert = 0; expert < count; expert++) {
    expert_rows_.clear();
    expert_row_shares_.clear();
    for (int64_t place = 0; place < rows * per_token; place++) {
      if (expert_chosen_[static_cast<size_t>(place)] != expert) continue;
      expert_rows_.push_back(place / per_token);
      expert_row_shares_.push_back(chosen_shares[place]);
    }
    const int64_t row_count = static_cast<int64_t>(expert_rows_.size());
    if (row_count == 0) continue;
    const Weight& gate = experts.gate[static_cast<size_t>(expert)];
    const Weight& up = experts.up[static_cast<size_t>(expert)];
    const Weight& down = experts.down[static_cast<size_t>(expert)];
    const int64_t inner = gate.outputs;
    float* gate_up = expert_inner_.at_least(row_count * 2 * inner);
    float* result = expert_out_.at_least(row_count * columns);
    const auto gathered = [&](int64_t row) { return RowInput{input + expert_rows_[static_cast<size_t>(row)] * stride}; };
    prepare_rows(row_count, columns, gate.quantised(), gathered);
    product(gate, row_count, gate_up, 2 * inner, false, 1.0f);
    if (up.quantised() != gate.quantised()) prepare_rows(row_count, columns, up.quantised(), gathered);
    product(up, row_count, gate_up + inner, 2 * inner, false, 1.0f);
    prepare_rows(row_count, inner, down.quantised(), [&](int64_t row) {
      const float* values = gate_up + row * 2 * inner;
      return RowInput{values, Prologue::silu_mul, values + inner};
    });
    product(down, row_count, result, columns, false, 1.0f);
    each_row(pool_, row_count, [&](int64_t row, int) {
      float* target = out + expert_rows_[static_cast<size_t>(row)] * out_stride;
      kernels().add_scaled(target, result + row * columns, expert_row_shares_[static_cast<size_t>(row)], columns, target);
    });
  }
}

// True if all rows are selected, in order.
bool Program::selects_all() const {
  if (step_.selected != step_.tokens) return false;
  for (int64_t row = 0; row < step_.selected; row++)
    if (step_.logit_indices[row] != row) return false;
  return true;
}

void Program::select_rows(const Instruction& instruction) {
  const int64_t columns = columns_[instruction.input];
  const float* input = rows_of(instruction.input, step_.tokens);
  float* out = rows_of(instruction.output, step_.selected);
  for (int64_t row = 0; row < step_.selected; row++)
    std::memcpy(out + row * strides_[instruction.output], input + step_.logit_indices[row] * strides_[instruction.input],
                static_cast<size_t>(columns) * sizeof(float));
}

}  // namespace weft
