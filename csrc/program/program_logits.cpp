// Computes logits from the selected rows of a step.
#include <algorithm>
#include <cstring>

#include "program/program.h"
#include "program/stopwatch.h"

namespace weft {
namespace {

// Bytes of LM head weights that a thread takes at a time: few enough that they stay in the L2 cache while all row blocks
// are multiplied by them.
constexpr int64_t head_bytes = 128 << 10;

}  // namespace

const float* Program::logits(int64_t count) {
  size_t first = logits_begin_;
  if (has_head_products_) {
    finish_head();
    first++;
  }
  for (size_t i = first; i < instructions_.size(); i++) run(instructions_[i], count);
  return buffers_[logits_buffer_].data();
}

const float* Program::logits_of(const float* rows, int64_t count) {
  has_head_products_ = false;
  std::memcpy(rows_of(rows_buffer_, count), rows, static_cast<size_t>(count * columns_[rows_buffer_]) * sizeof(float));
  return logits(count);
}

// True if the logits begin with a product, and no other instruction uses its prepared rows.
bool Program::logits_begin_with_product() const {
  const auto is = [&](size_t place, bool reuses_rows) {
    return place < instructions_.size() && instructions_[place].kind == Instruction::Kind::linear && instructions_[place].reuses_rows == reuses_rows;
  };
  return is(logits_begin_, false) && !is(logits_begin_ + 1, true);
}

// Allocates the memory in which row blocks compute the LM head of their own rows.
void Program::make_room_for_head() {
  const Instruction& head = instructions_[logits_begin_];
  rows_of(head.output, step_.tokens);
  for (Worker& worker : workers_) worker.scratch.at_least(quantise_scratch(head.weight.inputs));
  if (head_products_.size() < row_blocks_.size()) head_products_.resize(row_blocks_.size());
  for (size_t index = 0; index < row_blocks_.size(); index++) {
    head_products_[index].prepared.make_room(row_blocks_[index].end - row_blocks_[index].first, head.weight.inputs, head.weight.quantised());
    head_products_[index].strips_done = 0;
  }
  has_head_products_ = true;
}

// This function and multiply_head run on one thread; memory is allocated already.
void Program::prepare_head(size_t index, Worker& worker) {
  const RowBlock& block = row_blocks_[index];
  prepare_block(instructions_[logits_begin_], block.first, block.end - block.first, head_products_[index].prepared, worker);
}

void Program::multiply_head(size_t index, int64_t first_strip, int64_t end_strip) {
  const Instruction& head = instructions_[logits_begin_];
  const RowBlock& block = row_blocks_[index];
  LinearTask task = head_products_[index].prepared.product_task(head.weight, block.end - block.first, row_of(head.output, block.first) + head.column,
                                              strides_[static_cast<size_t>(head.output)], head.add, head.scale);
  task.first_strip = first_strip;
  task.end_strip = end_strip;
  kernels().linear(task);
}

int64_t Program::strips_of_head_at_once() const {
  const Weight& weight = instructions_[logits_begin_].weight;
  return std::max<int64_t>(1, head_bytes / strip_bytes(weight.layout, weight.inputs));
}

// Computes the part of the LM head that the threads did not compute while they waited for other row blocks.
void Program::finish_head() {
  const Stopwatch watch(measured_ ? &seconds_[static_cast<size_t>(Instruction::Kind::linear)] : nullptr);
  const int64_t strips = instructions_[logits_begin_].weight.strips(), at_once = strips_of_head_at_once();
  pool_.run(ceil_divide(strips, at_once), [&](int64_t item, int) {
    const int64_t end = std::min(strips, (item + 1) * at_once);
    for (size_t index = 0; index < row_blocks_.size(); index++)
      if (head_products_[index].strips_done < end) multiply_head(index, std::max(item * at_once, head_products_[index].strips_done), end);
  });
  has_head_products_ = false;
}

}  // namespace weft
