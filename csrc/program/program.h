// A decoder as a flat list of instructions over numbered buffers. It is recorded once (src/weft/ops/cpu) and run by one
// call per step.
//
// A buffer holds one row of floats for each token of the step, or for each token that needs logits. Rows of tokens that
// need logits are called selected. How a step is divided among the threads of the pool (program_partition.cpp):
//   - Few rows: each instruction is one or two phases. A phase divides rows or strips; all threads finish before the next.
//   - Many rows: all instructions between two attentions are one phase. Each RowBlock passes through all of them.
//   - Row blocks of whole, independent requests: attention is part of the phase too. One phase covers everything up to the
//     selection of rows, or up to the logits if all rows are selected.
//   - A prompt too long for one thread: a pipeline (program_pipeline.cpp). A row block waits for the earlier row blocks
//     that write the keys and values it reads.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/activations.h"
#include "kernels/kernels.h"
#include "program/aligned.h"
#include "program/pool.h"

namespace weft {

inline int64_t ceil_divide(int64_t value, int64_t by) { return (value + by - 1) / by; }

struct Vector {
  const float* data = nullptr;
  int64_t size = 0;
};

struct Rope {
  std::vector<double> frequencies;
  bool interleaved;
  double scale;
};

struct Pattern {
  int rope;         // index of a Rope
  int64_t window;   // 0: none
};

struct AttentionShape {
  int64_t heads, kv_heads, head_size;
  float scale, cap;   // cap 0: none
};

struct Experts {
  std::vector<Weight> gate, up, down;
  int64_t per_token;
  bool normalise;
};

struct Instruction {
  enum class Kind : int {
    embed, norm, linear, rope_and_write, attention, mixture, add, select_rows, scale_and_cap, rope, text_attention, mean_rows
  };
  static constexpr size_t kinds = 12;
  enum class Index : int { tokens, positions, types };
  Kind kind;
  int input = -1, output = -1;   // buffer numbers
  int layer = 0, pattern = 0;
  Prologue prologue = Prologue::nothing;
  bool add = false;               // the product is added to the output
  bool reuses_rows = false;             // uses the rows that the previous instruction prepared
  int64_t column = 0;             // first column of the output that the product writes
  bool after_selection = false;   // works on the selected rows: tokens that need logits
  float scale = 1.0f, epsilon = 0.0f, cap = 0.0f;
  Weight weight{};
  Vector norm{}, norm_bias{}, query_norm{}, key_norm{};
  Index index = Index::tokens;    // what selects the rows of an embedding, counted from `first_row`
  int64_t first_row = 0;
  bool causal = true;             // for attention over whole texts
  std::shared_ptr<Experts> experts;

  // True if each output row depends only on the input row with the same index. If all rows are selected, this holds for
  // the selection and the instructions after it too.
  bool is_by_row(bool all_selected) const {
    if (kind == Kind::attention || kind == Kind::mixture || kind == Kind::text_attention || kind == Kind::mean_rows) return false;
    return all_selected || (kind != Kind::select_rows && !after_selection);
  }
};

// The KV cache of all layers: [KV blocks, layers, KV heads, block size, cache_room], see `CachedHead`.
struct Cache {
  uint16_t* data;
  int64_t blocks, layers, block_size;

  // The store: [store_blocks, layers, KV heads, bytes], see `StoredHead`. Null: there is none.
  uint8_t* store = nullptr;
  int64_t store_blocks = 0, bits = 0, tail_blocks = 0;
};

// The arrays of `ops.base.StepIndices`, as pointers.
struct Step {
  int64_t tokens, requests, selected;
  const int64_t *token_ids, *positions, *cells, *query_starts, *context_lengths, *block_tables, *logit_indices;
  int64_t table_stride;

  // Set only with a two-tier cache.
  const int64_t *store_tables = nullptr, *moved_from = nullptr, *moved_to = nullptr;
  int64_t store_table_stride = 0, moves = 0;

  // With whole texts instead of requests: the part of a pair that each token belongs to. Text r has the tokens
  // query_starts[r] .. query_starts[r + 1] - 1.
  const int64_t* types = nullptr;
};

class Program {
 public:
  Program(Pool& pool, AttentionShape shape, std::vector<Rope> ropes, std::vector<Pattern> patterns)
      : pool_(pool), shape_(shape), ropes_(std::move(ropes)), patterns_(std::move(patterns)), workers_(static_cast<size_t>(pool.threads())) {}

  int add_buffer(int64_t columns) {
    columns_.push_back(columns);
    strides_.push_back(columns % page_floats == 0 ? columns + strip_outputs : columns);
    buffers_.emplace_back();
    return static_cast<int>(columns_.size()) - 1;
  }
  int64_t columns(int buffer) const { return columns_[buffer]; }
  int buffers() const { return static_cast<int>(columns_.size()); }
  void append(Instruction instruction) {
    has_mixture_ |= instruction.kind == Instruction::Kind::mixture;
    instructions_.push_back(std::move(instruction));
  }
  // Instructions appended after this call compute logits from the rows in `rows_buffer`.
  void begin_logits(int rows_buffer) {
    rows_buffer_ = rows_buffer;
    close_up(rows_buffer);
    logits_begin_ = instructions_.size();
  }
  void end_logits(int logits_buffer) {
    logits_buffer_ = logits_buffer;
    close_up(logits_buffer);
  }

  // Runs the step. Returns the selected rows, [selected, columns], valid until the next call. `sampled`: the number of
  // rows, from the first on, whose logits the caller asks for next.
  const float* forward(const Step& step, const Cache& cache, int64_t sampled);
  // Runs a step of whole texts. Returns one row for each text, [texts, columns], valid until the next call.
  const float* forward_texts(const Step& step);
  // Ends a program for whole texts, whose last instruction writes `rows_buffer`. Replaces `begin_logits` and
  // `end_logits`.
  void end_texts(int rows_buffer) {
    begin_logits(rows_buffer);
    prepared_.ratio = text_outlier_ratio;
    for (Worker& worker : workers_) worker.prepared.ratio = text_outlier_ratio;
  }
  // Logits of the first `count` selected rows, or of the given rows.
  const float* logits(int64_t count);
  const float* logits_of(const float* rows, int64_t count);

  // Measures the seconds spent in each kind of instruction, from now on; makes a step a few microseconds slower.
  void measure(bool on) {
    measured_ = on;
    seconds_.fill(0.0);
  }
  double seconds(Instruction::Kind kind) const { return seconds_[static_cast<size_t>(kind)]; }

  int rows_buffer() const { return rows_buffer_; }
  int logits_buffer() const { return logits_buffer_; }
  Pool& pool() { return pool_; }

 private:
  struct QueryRun {   // consecutive queries of one request
    int64_t request, first, count;
  };

  struct TaskRange {   // attention tasks that one thread runs in sequence
    int64_t first, end;
  };

  struct RowBlock {   // rows that pass through several instructions on one thread
    int64_t first, end;
  };

  // The progress of row blocks that pass through the layers independently.
  struct Pipeline {
    struct Stage {   // consecutive instructions: one attention, or all up to the next attention
      size_t first, end;
    };
    struct Progress {
      size_t done = 0;   // stages
      bool is_running = false;
    };
    std::vector<Stage> stages;
    std::mutex mutex;   // guards the members below
    std::vector<Progress> blocks;
    size_t unfinished = 0;
    std::atomic<int64_t> changes{0};
  };

  struct Segment {   // one segment of the context of an attention task
    int64_t task, segment;
  };

  // Rows in the form that products read.
  struct PreparedRows {
    Activations activations;
    QuantisedRows quantised{};   // the rows, quantised to bytes, for quantised weights
    Aligned<float> floats;       // the rows as floats, for other weights: [rows, columns]
    int64_t columns = 0, ratio = outlier_ratio;
    bool is_quantised = false;

    void make_room(int64_t rows, int64_t row_columns, bool in_bytes);
    void put(int64_t row, const RowInput& input, float* scratch);
    LinearTask product_task(const Weight& weight, int64_t rows, float* out, int64_t out_stride, bool add, float scale) const;
  };

  // The LM head for one row block: the first product of the logits. A thread that finishes its row block before the
  // others computes part of it.
  struct HeadProduct {
    PreparedRows prepared;
    int64_t strips_done = 0;
  };

  struct Worker {   // memory of one thread of the pool
    Aligned<float> scratch;
    std::vector<AttendTask> tasks;   // of the current task range
    PreparedRows prepared;           // rows of the current row block
    std::array<double, Instruction::kinds> seconds{};
  };

  // Rows a multiple of 4 KB apart map to the same few sets of the L1 cache. Most buffers are padded to avoid that.
  static constexpr int64_t page_floats = 1024;
  // Removes the padding of a buffer: callers expect contiguous rows.
  void close_up(int buffer) { strides_[static_cast<size_t>(buffer)] = columns_[static_cast<size_t>(buffer)]; }
  float* rows_of(int buffer, int64_t rows);
  float* row_of(int buffer, int64_t row) const {
    return buffers_[static_cast<size_t>(buffer)].data() + row * strides_[static_cast<size_t>(buffer)];
  }
  void prepare(const Step& step, const Cache& cache);
  void run_all(bool attends_in_blocks, bool is_pipelined, int64_t sampled);
  bool partition_texts();
  TextTask text_task(const Instruction& instruction, int64_t text, int64_t kv_head) const;
  void make_room_for_texts(const Instruction& instruction);
  void attend_texts(const Instruction& instruction, const RowBlock& block, Worker& worker);
  void text_attention(const Instruction& instruction);
  void mean_rows(const Instruction& instruction);
  void rope(const Instruction& instruction, int64_t token, float* queries);
  void cut_into_query_runs();
  void partition_attention();
  void partition_rows();
  bool partition_requests();
  bool partition_pipeline();
  int64_t nearest_cut(int64_t row) const;
  bool selects_all() const;
  int64_t cost_of(const QueryRun& run) const;
  bool reads_what_another_writes();
  void run(const Instruction& instruction, int64_t rows);
  void run_in_blocks(size_t first, size_t end, bool with_head);
  void make_room_for_blocks(size_t first, size_t end);
  void add_seconds_of_workers();
  void run_pipeline(size_t first, size_t end);
  void work_on_pipeline(Worker& worker);
  int64_t next_in_pipeline() const;
  void execute_block(size_t first, size_t end, size_t index, Worker& worker);
  void execute(const Instruction& instruction, int64_t rows);
  void execute_row(const Instruction& instruction, int64_t row);
  RowInput input_of_linear(const Instruction& instruction, int64_t row) const;
  void linear(const Instruction& instruction, int64_t rows);
  void linear_of_block(const Instruction& instruction, int64_t first, int64_t count, Worker& worker);
  void prepare_block(const Instruction& instruction, int64_t first, int64_t count, PreparedRows& prepared, Worker& worker);
  bool logits_begin_with_product() const;
  void make_room_for_head();
  void prepare_head(size_t index, Worker& worker);
  void multiply_head(size_t index, int64_t first_strip, int64_t end_strip);
  int64_t strips_of_head_at_once() const;
  void finish_head();
  void rope_and_write(const Instruction& instruction, int64_t token);
  void move_blocks(int layer);
  void attention(const Instruction& instruction);
  void make_room_for_attention(const Instruction& instruction);
  AttendTask attend_task(const Instruction& instruction, int64_t task) const;
  void attend_tasks(const Instruction& instruction, const TaskRange& range, Worker& worker);
  bool attend_in_segments(const Instruction& instruction);
  void mixture(const Instruction& instruction, int64_t rows);
  void select_rows(const Instruction& instruction);

  template <typename Get>
  void prepare_rows(int64_t rows, int64_t columns, bool quantised, Get&& get);
  void product(const Weight& weight, int64_t rows, float* out, int64_t out_stride, bool add, float scale);
  void product(const LinearTask& whole);
  // True if a product reads its rows from their buffer: they need neither a prologue nor quantisation.
  static bool reads_rows_directly(const Instruction& instruction) {
    return instruction.prologue == Prologue::nothing && !instruction.weight.quantised();
  }
  LinearTask direct_task(const Instruction& instruction, int64_t first, int64_t count) const;
  CacheLayer layer_of(int layer) const;
  StoreLayer store_of(int layer) const;

  Pool& pool_;
  AttentionShape shape_;
  std::vector<Rope> ropes_;
  std::vector<Pattern> patterns_;
  std::vector<Instruction> instructions_;
  bool has_mixture_ = false;
  size_t logits_begin_ = 0;
  int rows_buffer_ = -1, logits_buffer_ = -1;

  bool measured_ = false;
  std::array<double, Instruction::kinds> seconds_{};

  std::vector<int64_t> columns_, strides_;   // per buffer: floats of a row, and floats from one row to the next
  std::vector<Aligned<float>> buffers_;

  // The members below belong to the current step.
  Step step_{};
  Cache cache_{};
  std::vector<Aligned<float>> cosines_, sines_;   // per rope: [tokens, pairs]
  std::vector<QueryRun> query_runs_;
  std::vector<TaskRange> task_ranges_;   // if attention runs in row blocks: one range per row block
  std::vector<RowBlock> row_blocks_;
  std::vector<int64_t> costs_;   // per request, in products
  std::vector<size_t> first_dependency_;   // per row block: the first row block whose new K and V it reads, or itself
  Pipeline pipeline_;
  std::vector<int64_t> written_by_;   // per KV block: 1 + index of the request that writes it in this step, or 0
  std::vector<HeadProduct> head_products_;   // per row block
  bool has_head_products_ = false;           // true: `head_products_` belongs to this step, and `logits` only finishes it
  std::vector<Segment> segments_;
  Aligned<float> partials_;
  std::vector<QueryRun> text_parts_;   // queries of one text that a thread takes at a time

  PreparedRows prepared_;   // shared by all threads
  std::vector<Worker> workers_;
  Aligned<float> expert_logits_, expert_shares_, expert_inner_, expert_out_;
  std::vector<int32_t> expert_chosen_;
  std::vector<int64_t> expert_rows_;
  std::vector<float> expert_row_shares_;
};

}  // namespace weft
