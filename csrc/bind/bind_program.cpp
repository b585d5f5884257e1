// Binds the class that builds and runs programs. All arguments are checked here.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "program/program.h"

namespace weft {
namespace {

using Floats = Array<const float, 1>;
using Indices = Array<const int64_t, 1>;
// The arguments of a step with a two-tier cache, in this order: the store, bits of a code, tail blocks, block tables of
// the store, KV blocks to move, store blocks to move them to.
using StoreArguments = std::tuple<Array<uint8_t, 4>, int64_t, int64_t, Array<const int64_t, 2>, Indices, Indices>;

void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

// A linear layer over bytes that it does not own: usually a mapped file.
struct LinearWeight {
  Array<const uint8_t, 1> data;
  std::optional<Floats> bias;
  Weight weight;

  LinearWeight(int layout, int64_t outputs, int64_t inputs, Array<const uint8_t, 1> bytes, std::optional<Floats> biases)
      : data(std::move(bytes)), bias(std::move(biases)) {
    require(layout >= 0 && layout <= static_cast<int>(Layout::bf16), "there is no such layout");
    require(outputs > 0 && inputs > 0, "a linear layer must have outputs and inputs");
    weight = Weight{static_cast<Layout>(layout), outputs, inputs, data.data(), bias ? bias->data() : nullptr};
    require(static_cast<int64_t>(data.size()) == weight.strips() * strip_bytes(weight.layout, inputs),
            "the packed bytes do not have the size of the layout");
    require(!bias || static_cast<int64_t>(bias->size()) == outputs, "the bias must have one value for each output");
  }
};

class BoundProgram {
 public:
  BoundProgram(Pool& pool, std::tuple<int64_t, int64_t, int64_t, float, float> shape,
               const std::vector<std::tuple<std::vector<double>, bool, double>>& ropes,
               const std::vector<std::tuple<int, int64_t>>& patterns)
      : shape_{std::get<0>(shape), std::get<1>(shape), std::get<2>(shape), std::get<3>(shape), std::get<4>(shape)},
        program_(pool, shape_, ropes_of(ropes, shape_), patterns_of(patterns, ropes.size())),
        patterns_(static_cast<int>(patterns.size())) {
    require(shape_.kv_heads > 0 && shape_.heads % shape_.kv_heads == 0, "the number of query heads is not a multiple of the number of kv heads");
  }

  int buffer(int64_t columns) {
    require(columns > 0, "a buffer must have columns");
    return program_.add_buffer(columns);
  }

  // `index`: 0 token ids, 1 positions, 2 types; `first_row` is added to them.
  void embed(nb::handle table, int output, float scale, int index, int64_t first_row) {
    Instruction instruction = make(Instruction::Kind::embed, -1, output);
    instruction.weight = weight_of(table);
    instruction.scale = scale;
    require(program_.columns(output) == instruction.weight.inputs, "embed: the buffer is not as wide as the table");
    require(index >= 0 && index < 3 && first_row >= 0 && first_row < instruction.weight.outputs, "embed: there is no such index or first row");
    instruction.index = static_cast<Instruction::Index>(index);
    instruction.first_row = first_row;
    index_limits_[index] = std::min(index_limits_[index], instruction.weight.outputs - first_row);
    program_.append(instruction);
  }

  // Adds an instruction that applies a prologue to rows, without a product: a norm, an activation or a gate.
  void norm(int input, int kind, std::optional<Floats> weight, std::optional<Floats> bias, float epsilon, int output) {
    Instruction instruction = make(Instruction::Kind::norm, input, output);
    set_prologue(instruction, kind, weight, bias, epsilon, program_.columns(output), "norm");
    program_.append(instruction);
  }

  void linear(int input, int before, std::optional<Floats> norm_weight, std::optional<Floats> norm_bias, float epsilon, nb::handle layer, int output,
              int64_t column, bool again, bool add, float scale) {
    Instruction instruction = make(Instruction::Kind::linear, input, output);
    instruction.weight = weight_of(layer);
    set_prologue(instruction, before, norm_weight, norm_bias, epsilon, instruction.weight.inputs, "linear");
    instruction.add = add;
    instruction.scale = scale;
    require(column >= 0 && column + instruction.weight.outputs <= program_.columns(output), "linear: the output is too narrow for the weight");
    instruction.column = column;
    instruction.reuses_rows = again;
    program_.append(instruction);
  }

  // `layer` -1: the rows are not written to a cache.
  void rope_and_write(int rows, int layer, int pattern, std::optional<Floats> query_norm, std::optional<Floats> key_norm, float epsilon) {
    Instruction instruction = make(layer < 0 ? Instruction::Kind::rope : Instruction::Kind::rope_and_write, rows, rows);
    require(program_.columns(rows) == (shape_.heads + 2 * shape_.kv_heads) * shape_.head_size, "rope_and_write: the rows are not Q, K and V");
    set_layer(instruction, std::max(layer, 0), pattern);
    require(query_norm.has_value() == key_norm.has_value(), "rope_and_write: both queries and keys need a norm, or neither");
    if (query_norm) {
      instruction.query_norm = vector_of(*query_norm);
      instruction.key_norm = vector_of(*key_norm);
      const int64_t queries = instruction.query_norm.size, keys = instruction.key_norm.size, size = shape_.head_size;
      require((queries == size || queries == shape_.heads * size) && (keys == size || keys == shape_.kv_heads * size),
              "rope_and_write: a norm must have the width of one head or of all heads");
    }
    instruction.epsilon = epsilon;
    program_.append(instruction);
  }

  void attention(int queries, int layer, int pattern, int output) {
    Instruction instruction = make(Instruction::Kind::attention, queries, output);
    const int64_t width = shape_.heads * shape_.head_size;
    require(program_.columns(queries) >= width && program_.columns(output) == width, "attention: the buffers are not as wide as the heads");
    set_layer(instruction, layer, pattern);
    program_.append(instruction);
  }

  // Attention over whole texts: the rows are Q, K and V.
  void text_attention(int rows, int pattern, bool causal, int output) {
    Instruction instruction = make(Instruction::Kind::text_attention, rows, output);
    require(program_.columns(rows) == (shape_.heads + 2 * shape_.kv_heads) * shape_.head_size, "text_attention: the rows are not Q, K and V");
    require(program_.columns(output) == shape_.heads * shape_.head_size, "text_attention: the output is not as wide as the heads");
    set_layer(instruction, 0, pattern);
    instruction.causal = causal;
    program_.append(instruction);
  }

  void mean_rows(int input, int output) {
    Instruction instruction = make(Instruction::Kind::mean_rows, input, output);
    require(program_.columns(input) == program_.columns(output), "mean_rows: the buffers are not equally wide");
    program_.append(instruction);
    selected_ = true;
  }

  void end_texts(int rows) {
    check(rows);
    require(selected_, "end_texts: select_rows or mean_rows must come first");
    program_.end_texts(rows);
  }

  void mixture(int input, nb::handle router, nb::list gate, nb::list up, nb::list down, int64_t per_token, bool normalise, int output) {
    Instruction instruction = make(Instruction::Kind::mixture, input, output);
    instruction.weight = weight_of(router);
    auto experts = std::make_shared<Experts>();
    experts->per_token = per_token;
    experts->normalise = normalise;
    for (nb::handle expert : gate) experts->gate.push_back(weight_of(expert));
    for (nb::handle expert : up) experts->up.push_back(weight_of(expert));
    for (nb::handle expert : down) experts->down.push_back(weight_of(expert));
    const int64_t count = instruction.weight.outputs, columns = instruction.weight.inputs;
    const auto same = [&](const std::vector<Weight>& weights, int64_t outputs, int64_t inputs) {
      if (static_cast<int64_t>(weights.size()) != count) return false;
      for (const Weight& weight : weights)
        if (weight.outputs != outputs || weight.inputs != inputs) return false;
      return true;
    };
    require(!experts->gate.empty(), "mixture: there are no experts");
    const int64_t inner = experts->gate[0].outputs;
    require(same(experts->gate, inner, columns) && same(experts->up, inner, columns) && same(experts->down, columns, inner),
            "mixture: the experts do not have the sizes of the router");
    require(per_token >= 1 && per_token <= count, "mixture: per_token must be at least 1 and at most the number of experts");
    require(program_.columns(input) == columns && program_.columns(output) == columns, "mixture: the buffers are not as wide as the router");
    instruction.experts = std::move(experts);
    program_.append(instruction);
  }

  void add(int left, int right, float scale) {
    Instruction instruction = make(Instruction::Kind::add, right, left);
    instruction.scale = scale;
    require(program_.columns(left) == program_.columns(right), "add: the buffers are not equally wide");
    program_.append(instruction);
  }

  void select_rows(int input, int output) {
    Instruction instruction = make(Instruction::Kind::select_rows, input, output);
    require(program_.columns(input) == program_.columns(output), "select_rows: the buffers are not equally wide");
    program_.append(instruction);
    selected_ = true;
  }

  void scale_and_cap(int values, float scale, float cap) {
    Instruction instruction = make(Instruction::Kind::scale_and_cap, values, values);
    instruction.scale = scale;
    instruction.cap = cap;
    program_.append(instruction);
  }

  void begin_logits(int rows) {
    check(rows);
    require(selected_, "begin_logits: select_rows must come first");
    program_.begin_logits(rows);
  }

  void end_logits(int logits) {
    check(logits);
    require(program_.rows_buffer() >= 0, "end_logits: begin_logits must come first");
    program_.end_logits(logits);
  }

  void measure(bool on) { program_.measure(on); }

  nb::dict seconds() const {
    using Kind = Instruction::Kind;
    static constexpr std::pair<const char*, Kind> names[] = {
        {"embed", Kind::embed},         {"norm", Kind::norm},       {"linear", Kind::linear}, {"rope_and_write", Kind::rope_and_write},
        {"attention", Kind::attention}, {"mixture", Kind::mixture}, {"add", Kind::add},       {"select_rows", Kind::select_rows},
        {"scale_and_cap", Kind::scale_and_cap}, {"rope", Kind::rope}, {"text_attention", Kind::text_attention}, {"mean_rows", Kind::mean_rows}};
    nb::dict result;
    for (const auto& [name, kind] : names) result[name] = program_.seconds(kind);
    return result;
  }

  // Returns the logits of the first `sampled` selected rows, and the hidden states of the other selected rows.
  std::tuple<nb::object, nb::object> run(Indices token_ids, Indices positions, Indices cells, Indices query_starts, Indices context_lengths,
                                         Array<const int64_t, 2> block_tables, Indices logit_indices,
                                         nb::ndarray<uint16_t, nb::ndim<5>, nb::c_contig, nb::device::cpu> cache, int64_t sampled,
                                         std::optional<StoreArguments> two_tier) {
    require(program_.logits_buffer() >= 0, "the program is incomplete: it computes no logits");
    const int64_t tokens = static_cast<int64_t>(token_ids.size());
    const int64_t requests = static_cast<int64_t>(context_lengths.size());
    const int64_t selected = static_cast<int64_t>(logit_indices.size());
    require(static_cast<int64_t>(positions.size()) == tokens && static_cast<int64_t>(cells.size()) == tokens, "positions and cells must have one value for each token");
    require(static_cast<int64_t>(query_starts.size()) == requests + 1 && static_cast<int64_t>(block_tables.shape(0)) == requests,
            "query_starts must have one value more than there are requests, block_tables one row for each request");
    require(sampled >= 0 && sampled <= selected, "sampled must be between 0 and the number of selected rows");
    const int64_t block_size = static_cast<int64_t>(cache.shape(3));
    require(static_cast<int64_t>(cache.shape(1)) > last_layer_ && static_cast<int64_t>(cache.shape(2)) == shape_.kv_heads && block_size > 0 &&
                static_cast<int64_t>(cache.shape(4)) == cache_room(block_size, shape_.head_size),
            "the cache does not have the shape of the model");
    Cache whole{cache.data(), static_cast<int64_t>(cache.shape(0)), static_cast<int64_t>(cache.shape(1)), block_size};
    Step step{tokens, requests, selected, token_ids.data(), positions.data(), cells.data(), query_starts.data(), context_lengths.data(),
                    block_tables.data(), logit_indices.data(), static_cast<int64_t>(block_tables.shape(1))};
    if (two_tier) take_store(*two_tier, step, whole);
    check_step(step, whole);
    const float *rows, *logits = nullptr;
    {
      nb::gil_scoped_release release;
      rows = program_.forward(step, whole, sampled);
      if (sampled > 0) logits = program_.logits(sampled);
    }
    const int64_t columns = program_.columns(program_.rows_buffer());
    return {view(logits, sampled, program_.columns(program_.logits_buffer())), view(rows + sampled * columns, selected - sampled, columns)};
  }

  // Returns one row for each text. `selected` has one token of each text, for `select_rows`.
  nb::object run_texts(Indices token_ids, Indices positions, Indices types, Indices starts, Indices selected) {
    require(program_.rows_buffer() >= 0, "the program is incomplete: end_texts must come first");
    const int64_t tokens = static_cast<int64_t>(token_ids.size()), texts = static_cast<int64_t>(selected.size());
    require(static_cast<int64_t>(positions.size()) == tokens && static_cast<int64_t>(types.size()) == tokens, "positions and types must have one value for each token");
    require(static_cast<int64_t>(starts.size()) == texts + 1, "starts must have one value more than there are texts");
    require(starts(0) == 0 && starts(static_cast<size_t>(texts)) == tokens, "starts must begin with 0 and end with the number of tokens");
    for (int64_t text = 0; text < texts; text++) {
      require(starts(static_cast<size_t>(text)) < starts(static_cast<size_t>(text) + 1), "a text has no tokens");
      require(selected(static_cast<size_t>(text)) >= 0 && selected(static_cast<size_t>(text)) < tokens, "a selected row is past the tokens");
    }
    const int64_t* indices[3] = {token_ids.data(), positions.data(), types.data()};
    for (int index = 0; index < 3; index++)
      for (int64_t token = 0; token < tokens; token++)
        require(indices[index][token] >= 0 && indices[index][token] < index_limits_[index], "a token, a position or a type is past its table");
    Step step{tokens, texts, texts, token_ids.data(), positions.data(), nullptr, starts.data(), nullptr, nullptr, selected.data(), 0};
    step.types = types.data();
    const float* rows;
    {
      nb::gil_scoped_release release;
      rows = program_.forward_texts(step);
    }
    return view(rows, texts, program_.columns(program_.rows_buffer()));
  }

  nb::object logits(Array<const float, 2> rows) {
    require(program_.logits_buffer() >= 0, "the program is incomplete: it computes no logits");
    const int64_t count = static_cast<int64_t>(rows.shape(0));
    require(static_cast<int64_t>(rows.shape(1)) == program_.columns(program_.rows_buffer()), "logits: the rows do not have the width of the model");
    const float* logits = nullptr;
    if (count > 0) {
      nb::gil_scoped_release release;
      logits = program_.logits_of(rows.data(), count);
    }
    return view(logits, count, program_.columns(program_.logits_buffer()));
  }

 private:
  static std::vector<Rope> ropes_of(const std::vector<std::tuple<std::vector<double>, bool, double>>& given, const AttentionShape& shape) {
    std::vector<Rope> ropes;
    for (const auto& [frequencies, interleaved, scale] : given) {
      require(2 * static_cast<int64_t>(frequencies.size()) <= shape.head_size, "a rope rotates more features than a head has");
      ropes.push_back(Rope{frequencies, interleaved, scale});
    }
    return ropes;
  }

  static std::vector<Pattern> patterns_of(const std::vector<std::tuple<int, int64_t>>& given, size_t ropes) {
    std::vector<Pattern> patterns;
    for (const auto& [rope, window] : given) {
      require(rope >= 0 && static_cast<size_t>(rope) < ropes && window >= 0, "a pattern names a rope that does not exist, or a negative window");
      patterns.push_back(Pattern{rope, window});
    }
    return patterns;
  }

  void check(int buffer) const { require(buffer >= 0 && buffer < program_.buffers(), "there is no such buffer"); }

  Instruction make(Instruction::Kind kind, int input, int output) {
    if (input >= 0 || kind != Instruction::Kind::embed) check(input);
    check(output);
    Instruction instruction;
    instruction.kind = kind;
    instruction.input = input;
    instruction.output = output;
    instruction.after_selection = selected_;
    return instruction;
  }

  // Sets the prologue of an instruction: the norm, activation or gate of its input. The input of a gate has twice
  // `columns` columns.
  void set_prologue(Instruction& instruction, int kind, const std::optional<Floats>& weight, const std::optional<Floats>& bias, float epsilon,
                    int64_t columns, const char* what) {
    const auto expect = [&](bool holds, const char* problem) { require(holds, (std::string(what) + ": " + problem).c_str()); };
    expect(kind >= 0 && kind <= static_cast<int>(last_prologue), "unknown operation");
    const Prologue prologue = instruction.prologue = static_cast<Prologue>(kind);
    instruction.epsilon = epsilon;
    expect(program_.columns(instruction.input) == columns * (is_gated(prologue) ? 2 : 1), "the input does not have the width of the weight");
    expect(is_norm(prologue) == weight.has_value(), "a weight is needed exactly for a norm");
    expect(!bias || prologue == Prologue::layer_norm, "only a layer norm has a bias");
    if (weight) instruction.norm = vector_of(*weight);
    if (bias) instruction.norm_bias = vector_of(*bias);
    expect(!weight || instruction.norm.size == columns, "the norm is not as wide as the rows");
    expect(!bias || instruction.norm_bias.size == columns, "the bias is not as wide as the rows");
  }

  void set_layer(Instruction& instruction, int layer, int pattern) {
    require(layer >= 0 && pattern >= 0 && pattern < patterns_, "there is no such layer or pattern");
    instruction.layer = layer;
    instruction.pattern = pattern;
    last_layer_ = std::max<int64_t>(last_layer_, layer);
  }

  // Returns the weight of a layer, and keeps its bytes alive as long as the program.
  const Weight& weight_of(nb::handle object) {
    kept_.append(object);
    return nb::cast<LinearWeight&>(object).weight;
  }

  Vector vector_of(const Floats& values) {
    kept_.append(nb::cast(values));
    return Vector{values.data(), static_cast<int64_t>(values.size())};
  }

  void take_store(const StoreArguments& given, Step& step, Cache& cache) const {
    const auto& [store, bits, tail_blocks, tables, moved_from, moved_to] = given;
    require(bits == 8 || (bits == 4 && shape_.head_size % 2 == 0), "codes of the store have 8 bits, or 4 for heads of an even size");
    require(static_cast<int64_t>(store.shape(1)) == cache.layers && static_cast<int64_t>(store.shape(2)) == shape_.kv_heads &&
                static_cast<int64_t>(store.shape(3)) == stored_head_bytes(cache.block_size, shape_.head_size, bits),
            "the store does not have the shape of the model");
    require(static_cast<int64_t>(tables.shape(0)) == step.requests && tail_blocks > 0, "the store needs one table for each request, and at least one tail block");
    require(moved_from.size() == moved_to.size(), "moved_from and moved_to must have the same length");
    cache.store = store.data();
    cache.store_blocks = static_cast<int64_t>(store.shape(0));
    cache.bits = bits;
    cache.tail_blocks = tail_blocks;
    step.store_tables = tables.data();
    step.store_table_stride = static_cast<int64_t>(tables.shape(1));
    step.moved_from = moved_from.data();
    step.moved_to = moved_to.data();
    step.moves = static_cast<int64_t>(moved_from.size());
  }

  // Checks all indices of a step: an index past its array would read or write foreign memory.
  void check_step(const Step& step, const Cache& cache) const {
    const int64_t cells = cache.blocks * cache.block_size;
    for (int64_t token = 0; token < step.tokens; token++) {
      require(step.token_ids[token] >= 0 && step.token_ids[token] < index_limits_[0], "a token is past the vocabulary");
      require(step.cells[token] >= 0 && step.cells[token] < cells, "a cell is past the cache");
      require(step.positions[token] >= 0, "a position is negative");
    }
    require(step.query_starts[0] == 0 && step.query_starts[step.requests] == step.tokens, "query_starts must begin with 0 and end with the number of tokens");
    for (int64_t request = 0; request < step.requests; request++) {
      const int64_t first = step.query_starts[request], end = step.query_starts[request + 1];
      require(first < end && end <= step.tokens, "a request has no tokens in the step");
      const int64_t length = step.positions[end - 1] + 1;
      require(step.positions[first] == length - (end - first), "a request's positions are not consecutive");
      const int64_t blocks = (length + cache.block_size - 1) / cache.block_size;
      require(blocks <= step.table_stride, "a request's table is too short");
      for (int64_t block = 0; block < blocks; block++) {
        const int64_t id = step.block_tables[request * step.table_stride + block];
        require(id >= 0 && id < cache.blocks, "a block is past the cache");
      }
      const int64_t stored = cache.store ? length / cache.block_size - cache.tail_blocks : 0;
      require(stored <= step.store_table_stride, "a request's table of the store is too short");
      for (int64_t block = 0; block < stored; block++) {
        const int64_t id = step.store_tables[request * step.store_table_stride + block];
        require(id >= 0 && id < cache.store_blocks, "a block is past the store");
      }
    }
    for (int64_t move = 0; move < step.moves; move++) {
      require(step.moved_from[move] >= 0 && step.moved_from[move] < cache.blocks, "a moved block is past the cache");
      require(step.moved_to[move] >= 0 && step.moved_to[move] < cache.store_blocks, "a moved block is past the store");
    }
    for (int64_t row = 0; row < step.selected; row++)
      require(step.logit_indices[row] >= 0 && step.logit_indices[row] < step.tokens, "a selected row is past the tokens");
  }

  // Makes a NumPy array over memory of the program; the next run overwrites it. An array without rows gets the address
  // of `nothing`, because `data` may be null.
  static nb::object view(const float* data, int64_t rows, int64_t columns) {
    static const float nothing = 0.0f;
    const size_t shape[2] = {static_cast<size_t>(rows), static_cast<size_t>(columns)};
    return nb::cast(nb::ndarray<nb::numpy, float>(const_cast<float*>(rows > 0 ? data : &nothing), 2, shape, nb::handle()),
                    nb::rv_policy::reference);
  }

  AttentionShape shape_;
  Program program_;
  nb::list kept_;
  int patterns_;
  int64_t last_layer_ = 0;
  int64_t index_limits_[3] = {INT64_MAX, INT64_MAX, INT64_MAX};   // limits of token ids, positions and types
  bool selected_ = false;
};

}  // namespace

void bind_program(nb::module_& module) {
  nb::class_<LinearWeight>(module, "LinearWeight", "A linear layer in one of the packed layouts.")
      .def(nb::init<int, int64_t, int64_t, Array<const uint8_t, 1>, std::optional<Floats>>(), nb::arg("layout"), nb::arg("outputs"),
           nb::arg("inputs"), nb::arg("data"), nb::arg("bias").none())
      .def_prop_ro("nbytes", [](const LinearWeight& self) { return self.data.nbytes() + (self.bias ? self.bias->nbytes() : 0); });

  nb::class_<BoundProgram>(module, "Program", "A decoder as a list of instructions, run by one call per step.")
      .def(nb::init<Pool&, std::tuple<int64_t, int64_t, int64_t, float, float>, const std::vector<std::tuple<std::vector<double>, bool, double>>&,
                    const std::vector<std::tuple<int, int64_t>>&>(),
           nb::arg("pool"), nb::arg("shape"), nb::arg("ropes"), nb::arg("patterns"), nb::keep_alive<1, 2>())
      .def("buffer", &BoundProgram::buffer, nb::arg("columns"))
      .def("embed", &BoundProgram::embed, nb::arg("table"), nb::arg("output"), nb::arg("scale"), nb::arg("index") = 0, nb::arg("first_row") = 0)
      .def("norm", &BoundProgram::norm, nb::arg("input"), nb::arg("kind"), nb::arg("weight").none(), nb::arg("bias").none(), nb::arg("epsilon"),
           nb::arg("output"))
      .def("linear", &BoundProgram::linear, nb::arg("input"), nb::arg("before"), nb::arg("norm").none(), nb::arg("norm_bias").none(),
           nb::arg("epsilon"), nb::arg("weight"), nb::arg("output"), nb::arg("column"), nb::arg("again"), nb::arg("add"), nb::arg("scale"))
      .def("rope_and_write", &BoundProgram::rope_and_write, nb::arg("rows"), nb::arg("layer"), nb::arg("pattern"), nb::arg("query_norm").none(),
           nb::arg("key_norm").none(), nb::arg("epsilon"))
      .def("attention", &BoundProgram::attention, nb::arg("queries"), nb::arg("layer"), nb::arg("pattern"), nb::arg("output"))
      .def("text_attention", &BoundProgram::text_attention, nb::arg("rows"), nb::arg("pattern"), nb::arg("causal"), nb::arg("output"))
      .def("mean_rows", &BoundProgram::mean_rows, nb::arg("input"), nb::arg("output"))
      .def("end_texts", &BoundProgram::end_texts, nb::arg("rows"))
      .def("run_texts", &BoundProgram::run_texts, nb::arg("token_ids"), nb::arg("positions"), nb::arg("types"), nb::arg("starts"),
           nb::arg("selected"))
      .def("mixture", &BoundProgram::mixture, nb::arg("input"), nb::arg("router"), nb::arg("gate"), nb::arg("up"), nb::arg("down"),
           nb::arg("per_token"), nb::arg("normalise"), nb::arg("output"))
      .def("add", &BoundProgram::add, nb::arg("left"), nb::arg("right"), nb::arg("scale"))
      .def("select_rows", &BoundProgram::select_rows, nb::arg("input"), nb::arg("output"))
      .def("scale_and_cap", &BoundProgram::scale_and_cap, nb::arg("values"), nb::arg("scale"), nb::arg("cap"))
      .def("begin_logits", &BoundProgram::begin_logits, nb::arg("rows"))
      .def("end_logits", &BoundProgram::end_logits, nb::arg("logits"))
      .def("measure", &BoundProgram::measure, nb::arg("on"))
      .def("seconds", &BoundProgram::seconds)
      .def("run", &BoundProgram::run, nb::arg("token_ids"), nb::arg("positions"), nb::arg("cells"), nb::arg("query_starts"),
           nb::arg("context_lengths"), nb::arg("block_tables"), nb::arg("logit_indices"), nb::arg("cache"), nb::arg("sampled"),
           nb::arg("two_tier").none() = nb::none())
      .def("logits", &BoundProgram::logits, nb::arg("rows"));
}

}  // namespace weft
