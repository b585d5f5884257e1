// Divides a step among the threads: attention tasks into ranges, rows or whole requests into row blocks.
#include <algorithm>

#include "program/program.h"

namespace weft {
namespace {

// With at least this many rows per thread, row blocks pass through several instructions at a time. The output of an
// instruction is then still in the L2 cache for the next one, and threads do not wait for each other. Measured gain for
// steps of many rows: 5 to 8%. For 8 to 20 rows: 15 to 30% on two cores without a shared cache, little with a shared
// cache.
//
// The cost: every thread reads all weights, and the threads divide the memory bandwidth. Reading a weight takes as long
// as multiplying it with four rows or more, and longer with more threads.
inline int64_t rows_worth_a_block(int64_t threads) { return std::clamp<int64_t>(2 * threads, 4, 2 * panel_rows); }
constexpr int64_t most_rows_per_block = 4 * panel_rows;
// Row blocks of whole requests may be too large for the L2 cache: the waits that they save take longer than the cache
// misses that they cause. Measured gain on two threads: 4 to 6% of a decode of 76 to 96 rows, 1 to 8% up to 144 rows.
constexpr int64_t most_rows_of_requests = 10 * panel_rows;

// Row blocks per thread that the pipeline needs, so that no thread runs out of work (program_pipeline.cpp).
constexpr int64_t blocks_worth_a_pipeline = 2;
constexpr int64_t most_rows_of_pipeline = 6 * panel_rows;

// The cost model of a request. The unit is one product of a weight and a row. Reading a byte of K and V costs
// products_per_byte. Each row that attends to the byte costs products_per_byte_and_row more.
constexpr int64_t products_per_byte = 8, products_per_byte_and_row = 4;
// Row blocks of whole requests are not used if one of them costs this much more than the mean: the other threads would
// wait longer for its thread than they wait in separate phases.
constexpr int64_t most_percent_over_mean = 15;

// The largest number of queries in a query run: few enough that a single long prompt has work for all threads.
constexpr int64_t queries_per_run = 16;
// A task range gets 1 / (threads * ranges_per_thread) of the remaining cost.
constexpr int64_t ranges_per_thread = 2;

}  // namespace

// Fills `query_runs_`, in request order. If row blocks exist already, a query run does not cross their borders.
void Program::cut_into_query_runs() {
  query_runs_.clear();
  size_t block = 0;
  for (int64_t request = 0; request < step_.requests; request++) {
    const int64_t end = step_.query_starts[request + 1];
    for (int64_t first = step_.query_starts[request], next; first < end; first = next) {
      next = std::min(end, first + queries_per_run);
      while (block < row_blocks_.size() && row_blocks_[block].end <= first) block++;
      if (block < row_blocks_.size()) next = std::min(next, row_blocks_[block].end);
      // Queries that read different positions from the store are not computed together: the query run ends there.
      if (cache_.store) next = std::min(next, first + cache_.block_size - (step_.positions[first] + 1) % cache_.block_size);
      query_runs_.push_back(QueryRun{request, first, next - first});
    }
  }
}

// An attention task is one KV head of a query run. A worker gets several tasks at a time, so that it can prefetch the
// next one. The first ranges are long and the last are short, so that no thread waits long for another at the end.
void Program::partition_attention() {
  const auto cost = [&](const QueryRun& run) { return run.count * (step_.positions[run.first] + run.count); };
  std::stable_sort(query_runs_.begin(), query_runs_.end(), [&](const QueryRun& left, const QueryRun& right) { return cost(left) > cost(right); });
  int64_t left = 0;
  for (const QueryRun& run : query_runs_) left += cost(run) * shape_.kv_heads;
  task_ranges_.clear();
  const int64_t tasks = static_cast<int64_t>(query_runs_.size()) * shape_.kv_heads;
  for (int64_t first = 0, end = 0; first < tasks; first = end) {
    const int64_t share = left / (pool_.threads() * ranges_per_thread);
    int64_t taken = 0;
    while (end < tasks && (end == first || taken < share)) taken += cost(query_runs_[static_cast<size_t>(end++ / shape_.kv_heads)]);
    left -= taken;
    task_ranges_.push_back(TaskRange{first, end});
  }
  std::reverse(task_ranges_.begin(), task_ranges_.end());   // the pool begins with the last item
}

// Divides the rows into row blocks of nearly equal size; into none if there are too few rows.
void Program::partition_rows() {
  row_blocks_.clear();
  const int64_t rows = step_.tokens, threads = pool_.threads();
  if (rows < threads * rows_worth_a_block(threads)) return;
  const int64_t count = ceil_divide(ceil_divide(rows, most_rows_per_block), threads) * threads;
  for (int64_t block = 0; block < count; block++) row_blocks_.push_back(RowBlock{rows * block / count, rows * (block + 1) / count});
}

// Makes one row block of whole requests for each thread, with the attention tasks of those requests. Returns false
// unless the requests are independent and the row blocks have about equal cost. With such row blocks, everything up to
// the selection (or to the logits, if all rows are selected) is one phase. Otherwise a step of a model with 30 layers
// waits 60 times for the slower thread. Measured gain: 2 to 4% of a decode of 24 to 64 rows, 4 to 6% on a busy machine.
bool Program::partition_requests() {
  const int64_t rows = step_.tokens, threads = pool_.threads();
  if (rows < threads * rows_worth_a_block(threads) || rows > threads * most_rows_of_requests) return false;
  if (has_mixture_ || step_.moves > 0 || reads_what_another_writes()) return false;

  int64_t total = 0;
  costs_.assign(static_cast<size_t>(step_.requests), 0);
  for (const QueryRun& run : query_runs_) {
    const int64_t cost = cost_of(run);
    costs_[static_cast<size_t>(run.request)] += cost;
    total += cost;
  }
  row_blocks_.clear();
  task_ranges_.clear();
  const int64_t most = total / threads * (100 + most_percent_over_mean) / 100;
  int64_t request = 0, taken = 0;
  size_t run = 0;
  for (int64_t thread = 0; thread < threads; thread++) {
    const int64_t goal = total / threads * (thread + 1), before = taken, first = request;
    const size_t first_run = run;
    while (request < step_.requests && (thread == threads - 1 || taken + costs_[static_cast<size_t>(request)] / 2 <= goal))
      taken += costs_[static_cast<size_t>(request++)];
    if (request == first || taken - before > most) return false;   // every thread needs a request
    while (run < query_runs_.size() && query_runs_[run].request < request) run++;
    row_blocks_.push_back(RowBlock{step_.query_starts[first], step_.query_starts[request]});
    task_ranges_.push_back(TaskRange{static_cast<int64_t>(first_run) * shape_.kv_heads, static_cast<int64_t>(run) * shape_.kv_heads});
  }
  return true;
}

// Returns the allowed cut nearest to `row`. A cut is allowed where a request or a KV block begins, so that no thread
// reads a KV block while another thread writes to it.
int64_t Program::nearest_cut(int64_t row) const {
  const int64_t* starts = step_.query_starts;
  const int64_t* next = std::upper_bound(starts, starts + step_.requests, row);   // start of the next request, or the end
  const int64_t into_block = step_.positions[row] % cache_.block_size;
  const int64_t before = std::max(next[-1], row - into_block), after = std::min(*next, before == row ? row : row - into_block + cache_.block_size);
  return row - before <= after - row ? before : after;
}

// Cuts the rows into row blocks for the pipeline (program_pipeline.cpp), with their attention tasks. Returns false if
// the step does not suit it: too few rows, experts, moves to the store, KV blocks that are too large, or a request that
// reads what another one writes.
bool Program::partition_pipeline() {
  const int64_t rows = step_.tokens, count = ceil_divide(rows, most_rows_per_block);
  if (count < pool_.threads() * blocks_worth_a_pipeline || has_mixture_ || step_.moves > 0 || reads_what_another_writes()) return false;
  row_blocks_.clear();
  for (int64_t block = 1, first = 0; block <= count; block++) {
    const int64_t end = block == count ? rows : nearest_cut(rows * block / count);
    if (end - first > most_rows_of_pipeline) return false;   // KV blocks are too large for good cuts
    if (end > first) row_blocks_.push_back(RowBlock{first, end});
    first = end;
  }
  cut_into_query_runs();
  task_ranges_.clear();
  first_dependency_.clear();
  size_t run = 0, dependency = 0;
  for (const RowBlock& block : row_blocks_) {
    const size_t first_run = run;
    while (run < query_runs_.size() && query_runs_[run].first < block.end) run++;
    task_ranges_.push_back(TaskRange{static_cast<int64_t>(first_run) * shape_.kv_heads, static_cast<int64_t>(run) * shape_.kv_heads});
    const int64_t request_begins = step_.query_starts[query_runs_[first_run].request];
    while (row_blocks_[dependency].end <= request_begins) dependency++;
    first_dependency_.push_back(dependency);
  }
  return true;
}

// The cost of a query run in all instructions before the selection of the sampled rows. The unit is one product of a
// weight and a row, as for products_per_byte.
int64_t Program::cost_of(const QueryRun& run) const {
  const int64_t bytes = shape_.kv_heads * cache_room(cache_.block_size, shape_.head_size) * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t context = step_.positions[run.first] + run.count;
  int64_t products = 0, read = 0;
  for (const Instruction& instruction : instructions_) {
    if (instruction.kind == Instruction::Kind::select_rows) break;
    if (instruction.kind == Instruction::Kind::linear) products += instruction.weight.inputs * instruction.weight.outputs;
    if (instruction.kind != Instruction::Kind::attention) continue;
    const int64_t window = patterns_[static_cast<size_t>(instruction.pattern)].window;
    read += (window > 0 ? std::min(window + run.count - 1, context) : context) * bytes;
  }
  return run.count * products + read * (products_per_byte + run.count * products_per_byte_and_row);
}

// True if a request reads a KV block that another request writes in this step: a prefix hit may be such a block.
bool Program::reads_what_another_writes() {
  written_by_.resize(static_cast<size_t>(cache_.blocks), 0);
  const auto each_token = [&](auto&& use) {
    for (int64_t request = 0; request < step_.requests; request++)
      for (int64_t token = step_.query_starts[request]; token < step_.query_starts[request + 1]; token++)
        use(request, written_by_[static_cast<size_t>(step_.cells[token] / cache_.block_size)]);
  };
  each_token([](int64_t request, int64_t& writer) { writer = request + 1; });
  bool found = false;
  for (int64_t request = 0; request < step_.requests && !found; request++) {
    const int64_t* table = step_.block_tables + request * step_.table_stride;
    const int64_t blocks = ceil_divide(step_.positions[step_.query_starts[request + 1] - 1] + 1, cache_.block_size);
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t writer = written_by_[static_cast<size_t>(table[block])];
      found |= writer != 0 && writer != request + 1;
    }
  }
  each_token([](int64_t, int64_t& writer) { writer = 0; });
  return found;
}

}  // namespace weft
