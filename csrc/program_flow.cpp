// Blocks of rows that go through the layers each at its own pace, where a prompt is too long for one thread.
//
// A row needs of the others what those before it in its request have written to the cache: a block may attend when the blocks that hold
// them have got as far. So nobody waits for all others, as at the end of a phase, 60 times in a step of 30 layers, and a thread that
// loses its core to somebody else for a while keeps no one from going on.
#include "pages.h"
#include "patience.h"
#include "program.h"

namespace weft {

void Program::run_flow(size_t first, size_t end) {
  const auto is_attention = [&](size_t place) { return instructions_[place].kind == Instruction::Kind::attention; };
  make_room_for_blocks(first, end);
  flow_.stages.clear();
  for (size_t i = first, next; i < end; i = next) {
    next = i + 1;
    while (!is_attention(i) && next < end && !is_attention(next)) next++;
    flow_.stages.push_back(Flow::Stage{i, next});
  }
  flow_.blocks.assign(blocks_.size(), Flow::Progress{});
  flow_.unfinished = blocks_.size();
  pool_.run(pool_.threads(), [&](int64_t, int number) {
    take_offered_pages(pool_);
    go_with_flow(workers_[static_cast<size_t>(number)]);
  });
  add_seconds_of_workers();
}

// Until there is nothing left to do. Some block can always go on: the first of those that have got least far.
void Program::go_with_flow(Worker& worker) {
  std::unique_lock<std::mutex> lock(flow_.mutex);
  while (flow_.unfinished > 0) {
    const int64_t taken = take_from_flow();
    if (taken < 0) {
      const int64_t seen = flow_.changes.load();
      lock.unlock();
      for (Patience patience; flow_.changes.load() == seen;) patience.wait();
      lock.lock();
      continue;
    }
    Flow::Progress& block = flow_.blocks[static_cast<size_t>(taken)];
    const Flow::Stage stage = flow_.stages[block.done];
    block.is_taken = true;
    lock.unlock();
    carry_out_block(stage.first, stage.end, static_cast<size_t>(taken), worker);
    lock.lock();
    block.is_taken = false;
    if (++block.done == flow_.stages.size()) flow_.unfinished--;
    flow_.changes.fetch_add(1);
  }
}

// The block to go on with: of those that may, the first one in the lowest layer. -1: none may just now.
int64_t Program::take_from_flow() const {
  const std::vector<Flow::Progress>& blocks = flow_.blocks;
  const auto may_go_on = [&](size_t index) {
    const Flow::Progress& block = blocks[index];
    if (block.is_taken || block.done == flow_.stages.size()) return false;
    if (instructions_[flow_.stages[block.done].first].kind != Instruction::Kind::attention) return true;
    for (size_t before = waits_from_[index]; before < index; before++)
      if (blocks[before].done < block.done) return false;
    return true;
  };
  int64_t best = -1;
  for (size_t index = 0; index < blocks.size(); index++)
    if (may_go_on(index) && (best < 0 || blocks[index].done / 2 < blocks[static_cast<size_t>(best)].done / 2)) best = static_cast<int64_t>(index);
  return best;
}

}  // namespace weft
