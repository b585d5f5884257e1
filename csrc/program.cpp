#include "program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace weft {
namespace {

// Queries of one request that one thread attends for at a time: few enough to share out a single long prompt.
constexpr int64_t queries_per_piece = 16;
// Chunks of work for each thread: enough that one that was put aside does not keep the others waiting for long.
constexpr int64_t chunks_per_thread = 8;
// Of a small product there are less, down to this many: handing one out takes as long as reading some kilobytes.
constexpr int64_t fewest_chunks_per_thread = 2;
constexpr int64_t chunk_bytes = 64 << 10;
// A product of more rows than these is cut by rows too, into even pieces, so that the rows of one stay in the cache.
constexpr int64_t most_rows_per_chunk = 22 * panel_rows;

// The next chunk of attention is this part of what is left.
constexpr int64_t shares_per_thread = 2;
// With fewer tasks than these for each thread, long contexts are shared out by segments.
constexpr int64_t tasks_per_thread = 4;
// Rows that are taken together where little is done to each: handing out work costs as much as a few of them.
constexpr int64_t rows_together = 4;

int64_t ceil_divide(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Calls work(row, worker) for every row.
template <typename Work>
void each_row(Pool& pool, int64_t rows, Work&& work) {
  const int64_t each = std::max(rows_together, ceil_divide(rows, pool.threads() * chunks_per_thread));
  pool.run(ceil_divide(rows, each), [&](int64_t chunk, int worker) {
    const int64_t end = std::min(rows, (chunk + 1) * each);
    for (int64_t row = chunk * each; row < end; row++) work(row, worker);
  });
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

const float* Program::forward(const Step& step, const Cache& cache) {
  prepare(step, cache);
  for (size_t i = 0; i < logits_begin_; i++) {
    const bool selected = instructions_[i].kind == Instruction::Kind::select_rows || instructions_[i].after_selection;
    run(instructions_[i], selected ? step.selected : step.tokens);
  }
  return buffers_[rows_buffer_].data();
}

const float* Program::logits(int64_t count) {
  for (size_t i = logits_begin_; i < instructions_.size(); i++) run(instructions_[i], count);
  return buffers_[logits_buffer_].data();
}

const float* Program::logits_of(const float* rows, int64_t count) {
  std::memcpy(rows_of(rows_buffer_, count), rows, static_cast<size_t>(count * columns_[rows_buffer_]) * sizeof(float));
  return logits(count);
}

void Program::prepare(const Step& step, const Cache& cache) {
  step_ = step;
  cache_ = cache;
  scratch_.resize(static_cast<size_t>(pool_.threads()));
  tasks_.resize(static_cast<size_t>(pool_.threads()));
  cosines_.resize(ropes_.size());
  sines_.resize(ropes_.size());
  for (size_t rope = 0; rope < ropes_.size(); rope++) {
    const Rope& turn = ropes_[rope];
    const int64_t pairs = static_cast<int64_t>(turn.frequencies.size());
    float* cosine = cosines_[rope].at_least(step.tokens * pairs);
    float* sine = sines_[rope].at_least(step.tokens * pairs);
    each_row(pool_, step.tokens, [&](int64_t token, int) {
      for (int64_t pair = 0; pair < pairs; pair++) {
        const double angle = static_cast<double>(step.positions[token]) * turn.frequencies[static_cast<size_t>(pair)];
        cosine[token * pairs + pair] = static_cast<float>(std::cos(angle) * turn.scale);
        sine[token * pairs + pair] = static_cast<float>(std::sin(angle) * turn.scale);
      }
    });
  }
  pieces_.clear();
  for (int64_t request = 0; request < step.requests; request++) {
    const int64_t end = step.query_starts[request + 1];
    for (int64_t first = step.query_starts[request], next; first < end; first = next) {
      next = std::min(end, first + queries_per_piece);
      // Queries that read different blocks from the store are not worked on together: there a piece ends.
      if (cache.store) next = std::min(next, first + cache.block_size - (step.positions[first] + 1) % cache.block_size);
      pieces_.push_back(Piece{request, first, next - first});
    }
  }
  share_out_attention();
}

// The kv heads of all pieces are the tasks of attention, and a chunk is some of them, so that a worker can fetch what it reads next while
// it works on this. The first chunks are long and the last are short: nobody is left waiting for one.
void Program::share_out_attention() {
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

void Program::run(const Instruction& instruction, int64_t rows) {
  if (rows == 0) return;
  if (!measured_) return carry_out(instruction, rows);
  const auto start = std::chrono::steady_clock::now();
  carry_out(instruction, rows);
  seconds_[static_cast<size_t>(instruction.kind)] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Program::carry_out(const Instruction& instruction, int64_t rows) {
  switch (instruction.kind) {
    case Instruction::Kind::embed: return embed(instruction);
    case Instruction::Kind::norm: return norm(instruction, rows);
    case Instruction::Kind::linear: return linear(instruction, rows);
    case Instruction::Kind::rope_and_write: return rope_and_write(instruction);
    case Instruction::Kind::attention: return attention(instruction);
    case Instruction::Kind::mixture: return mixture(instruction, rows);
    case Instruction::Kind::add: return add(instruction, rows);
    case Instruction::Kind::select_rows: return select_rows(instruction);
    case Instruction::Kind::scale_and_cap: return scale_and_cap(instruction, rows);
  }
}

void Program::embed(const Instruction& instruction) {
  const Weight& table = instruction.weight;
  float* out = rows_of(instruction.output, step_.tokens);
  each_row(pool_, step_.tokens, [&](int64_t token, int) {
    float* row = out + token * strides_[instruction.output];
    kernels().unpack_row(table, step_.token_ids[token], row);
    if (instruction.scale != 1.0f) kernels().scale_and_cap(row, table.inputs, instruction.scale, 0.0f);
  });
}

void Program::norm(const Instruction& instruction, int64_t rows) {
  const int64_t columns = columns_[instruction.input];
  const float* input = rows_of(instruction.input, rows);
  float* out = rows_of(instruction.output, rows);
  each_row(pool_, rows, [&](int64_t row, int) {
    kernels().rms_norm(input + row * strides_[instruction.input], instruction.norm.data, columns, instruction.epsilon,
                       out + row * strides_[instruction.output]);
  });
}

template <typename Get>
void Program::ready_rows(int64_t rows, int64_t columns, bool quantised, Get&& get) {
  ready_columns_ = columns;
  if (!quantised) {
    float* ready = ready_floats_.at_least(rows * columns);
    each_row(pool_, rows, [&](int64_t row, int) {
      const float* values = get(row, ready + row * columns);
      if (values != ready + row * columns) std::memcpy(ready + row * columns, values, static_cast<size_t>(columns) * sizeof(float));
    });
    return;
  }
  quantised_ = activations_.at_least(rows, columns);
  for (auto& scratch : scratch_) scratch.at_least(columns);
  each_row(pool_, rows, [&](int64_t row, int worker) {
    kernels().quantise_row(get(row, scratch_[static_cast<size_t>(worker)].data()), columns, quantised_, row);
  });
  gather_outliers(quantised_, rows);
}

// Of rows that are ready.
void Program::product(const Weight& weight, int64_t rows, float* out, int64_t out_stride, bool add, float scale) {
  if (rows == 0) return;
  const int64_t row_chunks = ceil_divide(rows, most_rows_per_chunk);
  const int64_t rows_each = ceil_divide(ceil_divide(rows, row_chunks), panel_rows) * panel_rows;
  const int64_t strips = weight.strips();
  const int64_t wanted = strips * strip_bytes(weight.layout, weight.inputs) * ceil_divide(rows, 4) / chunk_bytes;
  const int64_t most = pool_.threads() * chunks_per_thread, fewest = pool_.threads() * fewest_chunks_per_thread;
  const int64_t strips_each = ceil_divide(strips, std::min(strips, std::clamp(wanted, fewest, most)));
  const int64_t strip_chunks = ceil_divide(strips, strips_each);
  pool_.run(row_chunks * strip_chunks, [&](int64_t chunk, int) {
    LinearTask task{};
    task.weight = &weight;
    task.quantised = quantised_;
    task.rows = ready_floats_.data();
    task.row_stride = ready_columns_;
    task.first_row = chunk % row_chunks * rows_each;
    task.end_row = std::min(rows, task.first_row + rows_each);
    task.first_strip = chunk / row_chunks * strips_each;
    task.end_strip = std::min(strips, task.first_strip + strips_each);
    task.out = out;
    task.out_stride = out_stride;
    task.add = add;
    task.scale = scale;
    kernels().linear(task);
  });
}

void Program::linear(const Instruction& instruction, int64_t rows) {
  const Weight& weight = instruction.weight;
  const float* input = rows_of(instruction.input, rows);
  const int64_t stride = strides_[instruction.input], columns = weight.inputs;
  const auto ready = [&](int64_t row, float* scratch) -> const float* {
    const float* values = input + row * stride;
    switch (instruction.before) {
      case Before::nothing: return values;
      case Before::rms_norm: kernels().rms_norm(values, instruction.norm.data, columns, instruction.epsilon, scratch); break;
      case Before::silu_mul: kernels().silu_mul(values, values + columns, columns, scratch); break;
      case Before::gelu_tanh_mul: kernels().gelu_tanh_mul(values, values + columns, columns, scratch); break;
    }
    return scratch;
  };
  if (!instruction.again) ready_rows(rows, columns, weight.quantised(), ready);
  product(weight, rows, rows_of(instruction.output, rows) + instruction.column, strides_[instruction.output], instruction.add, instruction.scale);
}

void Program::rope_and_write(const Instruction& instruction) {
  const CacheLayer layer = layer_of(instruction.layer);
  const Rope& turn = ropes_[static_cast<size_t>(patterns_[static_cast<size_t>(instruction.pattern)].rope)];
  const size_t rope = static_cast<size_t>(patterns_[static_cast<size_t>(instruction.pattern)].rope);
  const int64_t pairs = static_cast<int64_t>(turn.frequencies.size());
  const int64_t size = shape_.head_size, width = strides_[instruction.input];
  float* rows = rows_of(instruction.input, step_.tokens);
  const Kernels& table = kernels();
  const auto normalise = [&](float* heads, int64_t count, const Vector& weight) {
    if (!weight.data) return;
    if (weight.size == size) {
      for (int64_t head = 0; head < count; head++)
        table.rms_norm(heads + head * size, weight.data, size, instruction.epsilon, heads + head * size);
    } else {
      table.rms_norm(heads, weight.data, count * size, instruction.epsilon, heads);
    }
  };
  for (auto& scratch : scratch_) scratch.at_least(size);
  each_row(pool_, step_.tokens, [&](int64_t token, int worker) {
    const int64_t cell = step_.cells[token], within = cell % layer.block_size, tile = within / key_tile * key_tile;
    const int64_t distance = std::min(key_tile, layer.block_size - tile);
    uint16_t* block = layer.keys + cell / layer.block_size * layer.block_stride;
    float* queries = rows + token * width;
    float* keys = queries + shape_.heads * size;
    const float* values = keys + shape_.kv_heads * size;
    const float* cosine = cosines_[rope].data() + token * pairs;
    const float* sine = sines_[rope].data() + token * pairs;
    normalise(queries, shape_.heads, instruction.query_norm);
    normalise(keys, shape_.kv_heads, instruction.key_norm);
    for (int64_t head = 0; head < shape_.heads + shape_.kv_heads; head++)
      table.rotate(queries + head * size, size, pairs, turn.interleaved, cosine, sine, queries + head * size);
    uint16_t* halves = reinterpret_cast<uint16_t*>(scratch_[static_cast<size_t>(worker)].data());
    for (int64_t head = 0; head < shape_.kv_heads; head++, block += layer.head_stride) {
      table.to_half(keys + head * size, size, halves);
      uint16_t* key = block + tile * size + within - tile;
      for (int64_t feature = 0; feature < size; feature++) key[feature * distance] = halves[feature];
      table.to_half(values + head * size, size, block + layer.value_offset + within * size);
    }
  });
  move_blocks(instruction.layer);
}

// After K and V of the step's tokens are written, which may belong to a block that moves.
void Program::move_blocks(int layer) {
  if (step_.moves == 0) return;
  for (auto& scratch : scratch_) scratch.at_least(kernels().move_scratch(shape_.head_size));
  const CacheLayer cache = layer_of(layer);
  const StoreLayer store = store_of(layer);
  pool_.run(step_.moves * shape_.kv_heads, [&](int64_t index, int worker) {
    const int64_t move = index / shape_.kv_heads;
    kernels().move_block(cache, step_.moved_from[move], store, step_.moved_to[move], index % shape_.kv_heads,
                         scratch_[static_cast<size_t>(worker)].data());
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
    kernels().attend_segment(task_of(part.task), part.segment, partials + index * floats, scratch_[static_cast<size_t>(worker)].data());
  });
  for (int64_t index = 0; index < count; index++) {
    const Segment& part = segments_[static_cast<size_t>(index)];
    if (index == 0 || part.task != segments_[static_cast<size_t>(index - 1)].task)
      kernels().attend_merge(task_of(part.task), partials + index * floats);
  }
  return true;
}

void Program::attention(const Instruction& instruction) {
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
  for (auto& scratch : scratch_) scratch.at_least(most_scratch);
  if (tasks < pool_.threads() * tasks_per_thread && attend_in_segments(tasks, task_of)) return;
  pool_.run(static_cast<int64_t>(chunks_.size()), [&](int64_t index, int worker) {
    const Chunk& chunk = chunks_[static_cast<size_t>(index)];
    std::vector<AttendTask>& list = tasks_[static_cast<size_t>(worker)];
    list.clear();
    for (int64_t task = chunk.first; task < chunk.end; task++) list.push_back(task_of(task));
    for (size_t task = 1; task < list.size(); task++) list[task - 1].next = &list[task];
    kernels().attend(list.front(), scratch_[static_cast<size_t>(worker)].data());
  });
}

void Program::mixture(const Instruction& instruction, int64_t rows) {
  const Experts& experts = *instruction.experts;
  const Weight& router = instruction.weight;
  const int64_t count = router.outputs, columns = router.inputs, per_token = experts.per_token;
  const float* input = rows_of(instruction.input, rows);
  float* out = rows_of(instruction.output, rows);
  const int64_t stride = strides_[instruction.input], out_stride = strides_[instruction.output];

  float* shares = expert_logits_.at_least(rows * count);
  ready_rows(rows, columns, router.quantised(), [&](int64_t row, float*) { return input + row * stride; });
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
    const int64_t mine = static_cast<int64_t>(expert_rows_.size());
    if (mine == 0) continue;
    const Weight& gate = experts.gate[static_cast<size_t>(expert)];
    const Weight& up = experts.up[static_cast<size_t>(expert)];
    const Weight& down = experts.down[static_cast<size_t>(expert)];
    const int64_t inner = gate.outputs;
    float* gate_up = expert_inner_.at_least(mine * 2 * inner);
    float* result = expert_out_.at_least(mine * columns);
    const auto gathered = [&](int64_t row, float*) { return input + expert_rows_[static_cast<size_t>(row)] * stride; };
    ready_rows(mine, columns, gate.quantised(), gathered);
    product(gate, mine, gate_up, 2 * inner, false, 1.0f);
    if (up.quantised() != gate.quantised()) ready_rows(mine, columns, up.quantised(), gathered);
    product(up, mine, gate_up + inner, 2 * inner, false, 1.0f);
    ready_rows(mine, inner, down.quantised(), [&](int64_t row, float* scratch) {
      const float* values = gate_up + row * 2 * inner;
      kernels().silu_mul(values, values + inner, inner, scratch);
      return static_cast<const float*>(scratch);
    });
    product(down, mine, result, columns, false, 1.0f);
    each_row(pool_, mine, [&](int64_t row, int) {
      float* target = out + expert_rows_[static_cast<size_t>(row)] * out_stride;
      kernels().add_scaled(target, result + row * columns, expert_row_shares_[static_cast<size_t>(row)], columns, target);
    });
  }
}

void Program::add(const Instruction& instruction, int64_t rows) {
  const int64_t columns = columns_[instruction.output];
  float* left = rows_of(instruction.output, rows);
  const float* right = rows_of(instruction.input, rows);
  each_row(pool_, rows, [&](int64_t row, int) {
    float* target = left + row * strides_[instruction.output];
    kernels().add_scaled(target, right + row * strides_[instruction.input], instruction.scale, columns, target);
  });
}

void Program::select_rows(const Instruction& instruction) {
  const int64_t columns = columns_[instruction.input];
  const float* input = rows_of(instruction.input, step_.tokens);
  float* out = rows_of(instruction.output, step_.selected);
  for (int64_t row = 0; row < step_.selected; row++)
    std::memcpy(out + row * strides_[instruction.output], input + step_.logit_indices[row] * strides_[instruction.input],
                static_cast<size_t>(columns) * sizeof(float));
}

void Program::scale_and_cap(const Instruction& instruction, int64_t rows) {
  const int64_t columns = columns_[instruction.output];
  float* values = rows_of(instruction.output, rows);
  each_row(pool_, rows, [&](int64_t row, int) {
    kernels().scale_and_cap(values + row * strides_[instruction.output], columns, instruction.scale, instruction.cap);
  });
}

}  // namespace weft
