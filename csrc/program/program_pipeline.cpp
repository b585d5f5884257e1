// The pipeline: row blocks pass through the layers independently. Used if a prompt is too long for one thread.
//
// A row needs the keys and values of earlier rows of its request. So a row block may attend once the row blocks that
// hold those rows have reached the same layer. Without the pipeline, all threads wait for the slowest at the end of
// each phase, 60 times in a step of 30 layers. In the pipeline, a thread that loses its core for a while does not
// stop the others.
#include "program/pages.h"
#include "program/program.h"
#include "program/spin_wait.h"

namespace weft {

// Runs the instructions from `first` to `end` as a pipeline.
void Program::run_pipeline(size_t first, size_t end) {
  const auto is_attention = [&](size_t place) { return instructions_[place].kind == Instruction::Kind::attention; };
  make_room_for_blocks(first, end);
  pipeline_.stages.clear();
  for (size_t i = first, next; i < end; i = next) {
    next = i + 1;
    while (!is_attention(i) && next < end && !is_attention(next)) next++;
    pipeline_.stages.push_back(Pipeline::Stage{i, next});
  }
  pipeline_.blocks.assign(row_blocks_.size(), Pipeline::Progress{});
  pipeline_.unfinished = row_blocks_.size();
  pool_.run(pool_.threads(), [&](int64_t, int number) {
    prefault_offered_pages(pool_);
    work_on_pipeline(workers_[static_cast<size_t>(number)]);
  });
  add_seconds_of_workers();
}

// Runs until all row blocks are finished. There is no deadlock: the first of the least advanced row blocks can always
// continue.
void Program::work_on_pipeline(Worker& worker) {
  std::unique_lock<std::mutex> lock(pipeline_.mutex);
  while (pipeline_.unfinished > 0) {
    const int64_t taken = next_in_pipeline();
    if (taken < 0) {
      const int64_t seen = pipeline_.changes.load();
      lock.unlock();
      for (SpinWait spin; pipeline_.changes.load() == seen;) spin.wait();
      lock.lock();
      continue;
    }
    Pipeline::Progress& block = pipeline_.blocks[static_cast<size_t>(taken)];
    const Pipeline::Stage stage = pipeline_.stages[block.done];
    block.is_running = true;
    lock.unlock();
    execute_block(stage.first, stage.end, static_cast<size_t>(taken), worker);
    lock.lock();
    block.is_running = false;
    if (++block.done == pipeline_.stages.size()) pipeline_.unfinished--;
    pipeline_.changes.fetch_add(1);
  }
}

// Returns the row block to continue with: among those that can continue now, the first one in the lowest layer. Returns
// -1 if none can.
int64_t Program::next_in_pipeline() const {
  const std::vector<Pipeline::Progress>& blocks = pipeline_.blocks;
  const auto can_continue = [&](size_t index) {
    const Pipeline::Progress& block = blocks[index];
    if (block.is_running || block.done == pipeline_.stages.size()) return false;
    if (instructions_[pipeline_.stages[block.done].first].kind != Instruction::Kind::attention) return true;
    for (size_t before = first_dependency_[index]; before < index; before++)
      if (blocks[before].done < block.done) return false;
    return true;
  };
  // A layer has two stages: its attention, and the instructions up to the next attention.
  int64_t best = -1;
  for (size_t index = 0; index < blocks.size(); index++)
    if (can_continue(index) && (best < 0 || blocks[index].done / 2 < blocks[static_cast<size_t>(best)].done / 2)) best = static_cast<int64_t>(index);
  return best;
}

}  // namespace weft
