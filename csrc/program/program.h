// A decoder as a flat list of instructions over numbered buffers, recorded once (src/weft/ops/cpu) and run by one call per step.
//
// A buffer holds one row of floats for each token of the step, or for each token after which logits are wanted. Every instruction is one
// or two phases of the pool; inside a phase rows or strips are shared out, between phases everybody has finished. In steps of many rows all
// instructions between two attentions are one phase: there blocks of rows are shared out, and each goes through all of them. Where no
// request waits for another, a block is some whole requests, and attention is part of that phase too: then all up to the selection is one,
// and in a step that selects every row all up to the logits. So it is where a prompt is too long for one thread (program_pipeline.cpp): there
// blocks wait for those before them whose keys and values they read.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/activations.h"
#include "program/aligned.h"
#include "kernels/kernels.h"
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
  enum class Kind : int { embed, norm, linear, rope_and_write, attention, mixture, add, select_rows, scale_and_cap };
  static constexpr size_t kinds = 9;
  Kind kind;
  int input = -1, output = -1;   // buffers
  int layer = 0, pattern = 0;
  Prologue prologue = Prologue::nothing;
  bool add = false;               // a product is added to what the output holds
  bool reuses_rows = false;             // the rows are those that the instruction before made ready
  int64_t column = 0;             // of the output, where a product begins
  bool after_selection = false;   // works on the rows of the tokens after which logits are wanted
  float scale = 1.0f, epsilon = 0.0f, cap = 0.0f;
  Weight weight{};
  Vector norm{}, query_norm{}, key_norm{};
  std::shared_ptr<Experts> experts;

  // What it makes of a row depends on nothing but that row: it needs to wait for no other. Where all rows are selected, a selected row
  // is the row itself.
  bool is_by_row(bool all_selected) const {
    if (kind == Kind::attention || kind == Kind::mixture) return false;
    return all_selected || (kind != Kind::select_rows && !after_selection);
  }
};

// The cache of all layers: [blocks, layers, kv heads, block size, cache_room], as `CachedHead` says.
struct Cache {
  uint16_t* data;
  int64_t blocks, layers, block_size;

  // The store behind it, [store_blocks, layers, kv heads, bytes]: as `StoredHead` says; null: there is none.
  uint8_t* store = nullptr;
  int64_t store_blocks = 0, bits = 0, tail_blocks = 0;
};

// `ops.base.StepIndices`, as pointers.
struct Step {
  int64_t tokens, requests, selected;
  const int64_t *token_ids, *positions, *cells, *query_starts, *context_lengths, *block_tables, *logit_indices;
  int64_t table_stride;

  // Of a two-tier cache.
  const int64_t *store_tables = nullptr, *moved_from = nullptr, *moved_to = nullptr;
  int64_t store_table_stride = 0, moves = 0;
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
  // What was appended after this makes logits of the rows in `rows_buffer`.
  void begin_logits(int rows_buffer) {
    rows_buffer_ = rows_buffer;
    close_up(rows_buffer);
    logits_begin_ = instructions_.size();
  }
  void end_logits(int logits_buffer) {
    logits_buffer_ = logits_buffer;
    close_up(logits_buffer);
  }

  // Runs the step; returns the rows that logits are made of, [selected, columns]. They are there until the next call. Of the first `sampled`
  // of them logits will be asked for next.
  const float* forward(const Step& step, const Cache& cache, int64_t sampled);
  // Logits of the first `count` of those rows, or of rows given here.
  const float* logits(int64_t count);
  const float* logits_of(const float* rows, int64_t count);

  // Seconds spent in each kind of instruction since it was turned on; a step is a few microseconds longer for it.
  void measure(bool on) {
    measured_ = on;
    seconds_.fill(0.0);
  }
  double seconds(Instruction::Kind kind) const { return seconds_[static_cast<size_t>(kind)]; }

  int rows_buffer() const { return rows_buffer_; }
  int logits_buffer() const { return logits_buffer_; }
  Pool& pool() { return pool_; }

 private:
  struct Piece {   // of the queries of one request
    int64_t request, first, count;
  };

  struct TaskRange {   // of the tasks of attention
    int64_t first, end;
  };

  struct RowBlock {   // of rows that go through several instructions on one thread
    int64_t first, end;
  };

  // How far blocks have got that go through the layers each at its own pace.
  struct Pipeline {
    struct Stage {   // instructions that follow each other: one attention, or all up to the next
      size_t first, end;
    };
    struct Progress {
      size_t done = 0;   // stages
      bool is_running = false;
    };
    std::vector<Stage> stages;
    std::mutex mutex;   // of what follows
    std::vector<Progress> blocks;
    size_t unfinished = 0;
    std::atomic<int64_t> changes{0};
  };

  struct Segment {   // of the context of one attention task
    int64_t task, segment;
  };

  // Rows on their way into products.
  struct PreparedRows {
    Activations activations;
    QuantisedRows quantised{};   // the rows in bytes, or
    Aligned<float> floats;       // as they are: [rows, columns]
    int64_t columns = 0;
    bool is_quantised = false;

    void make_room(int64_t rows, int64_t row_columns, bool in_bytes);
    void put(int64_t row, const RowInput& input, float* scratch);
    LinearTask product_task(const Weight& weight, int64_t rows, float* out, int64_t out_stride, bool add, float scale) const;
  };

  // The first product of the logits, of one block of rows. Whoever is done with its block before the others begins with it.
  struct HeadProduct {
    PreparedRows prepared;
    int64_t strips_done = 0;
  };

  struct Worker {   // what a thread of the pool has for itself
    Aligned<float> scratch;
    std::vector<AttendTask> tasks;   // of the chunk in work
    PreparedRows prepared;                     // rows of the block in work
    std::array<double, Instruction::kinds> seconds{};
  };

  // Rows a multiple of 4 KB apart fall into the same few places of the first-level cache; those of most buffers are kept from that.
  static constexpr int64_t page_floats = 1024;
  // What callers see has no gaps between its rows.
  void close_up(int buffer) { strides_[static_cast<size_t>(buffer)] = columns_[static_cast<size_t>(buffer)]; }
  float* rows_of(int buffer, int64_t rows);
  float* row_of(int buffer, int64_t row) const {
    return buffers_[static_cast<size_t>(buffer)].data() + row * strides_[static_cast<size_t>(buffer)];
  }
  void prepare(const Step& step, const Cache& cache);
  void cut_into_pieces();
  void partition_attention();
  void partition_rows();
  bool partition_requests();
  bool partition_pipeline();
  int64_t nearest_cut(int64_t row) const;
  bool selects_all() const;
  int64_t cost_of(const Piece& piece) const;
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

  std::vector<int64_t> columns_, strides_;   // of each buffer: floats of a row, and from one row to the next
  std::vector<Aligned<float>> buffers_;

  // Of the step under way.
  Step step_{};
  Cache cache_{};
  std::vector<Aligned<float>> cosines_, sines_;   // by rope: [tokens, pairs]
  std::vector<Piece> pieces_;
  std::vector<TaskRange> task_ranges_;   // where attention is done in blocks: one for each of them
  std::vector<RowBlock> row_blocks_;
  std::vector<int64_t> costs_;        // by request, in products
  std::vector<size_t> first_dependency_;    // by block: the first of those before it whose K and V it reads
  Pipeline pipeline_;
  std::vector<int64_t> written_by_;   // by block of the cache: 1 + the request that writes it in this step, or 0
  std::vector<HeadProduct> head_products_;           // by block
  bool has_head_products_ = false;            // the logits of this step are begun in `heads_`
  std::vector<Segment> segments_;
  Aligned<float> partials_;

  PreparedRows prepared_;   // the rows of all threads together
  std::vector<Worker> workers_;
  Aligned<float> expert_logits_, expert_shares_, expert_inner_, expert_out_;
  std::vector<int32_t> expert_chosen_;
  std::vector<int64_t> expert_rows_;
  std::vector<float> expert_row_shares_;
};

}  // namespace weft
