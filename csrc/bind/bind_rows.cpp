// The row kernels one by one, for tests and measurements; models run them in a program.
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>

#include "bind/bindings.h"
#include "kernels/kernels.h"

namespace weft {

namespace {

using Rows = Array<float, 2>;
using ConstRows = Array<const float, 2>;
using Vector = Array<const float, 1>;

template <typename Left, typename Right>
void same_shape(const Left& left, const Right& right, const char* what) {
  if (left.shape(0) == right.shape(0) && left.shape(1) == right.shape(1)) return;
  throw nb::value_error((std::string(what) + " must have the shape of the first array, [" + std::to_string(left.shape(0)) + ", " +
                         std::to_string(left.shape(1)) + "]; it has [" + std::to_string(right.shape(0)) + ", " +
                         std::to_string(right.shape(1)) + "]").c_str());
}

void same_length(size_t length, size_t expected, const char* what) {
  if (length == expected) return;
  const std::string message = std::string(what) + " must have " + std::to_string(expected) + " elements; it has " + std::to_string(length);
  throw nb::value_error(message.c_str());
}

template <typename Any>
auto* row_of(const Any& rows, size_t row) { return rows.data() + row * rows.shape(1); }

template <typename Any>
int64_t columns_of(const Any& rows) { return static_cast<int64_t>(rows.shape(1)); }

void rms_norm(const ConstRows& rows, const Vector& weight, float epsilon, const Rows& out) {
  same_length(weight.shape(0), rows.shape(1), "the weight");
  same_shape(rows, out, "out");
  for (size_t row = 0; row < rows.shape(0); row++)
    kernels().make_row({row_of(rows, row), Prologue::rms_norm, weight.data(), epsilon}, columns_of(rows), row_of(out, row));
}

void layer_norm(const ConstRows& rows, const Vector& weight, const std::optional<Vector>& bias, float epsilon, const Rows& out) {
  same_length(weight.shape(0), rows.shape(1), "the weight");
  if (bias) same_length(bias->shape(0), rows.shape(1), "the bias");
  same_shape(rows, out, "out");
  for (size_t row = 0; row < rows.shape(0); row++)
    kernels().make_row({row_of(rows, row), Prologue::layer_norm, weight.data(), epsilon, bias ? bias->data() : nullptr}, columns_of(rows), row_of(out, row));
}

template <Prologue before>
void activation(const ConstRows& rows, const Rows& out) {
  same_shape(rows, out, "out");
  for (size_t row = 0; row < rows.shape(0); row++) kernels().make_row({row_of(rows, row), before}, columns_of(rows), row_of(out, row));
}

template <Prologue before>
void gate_mul(const ConstRows& gate, const ConstRows& up, const Rows& out) {
  same_shape(gate, up, "up");
  same_shape(gate, out, "out");
  for (size_t row = 0; row < gate.shape(0); row++)
    kernels().make_row({row_of(gate, row), before, row_of(up, row)}, columns_of(gate), row_of(out, row));
}

void add_scaled(const ConstRows& left, const ConstRows& right, float scale, const Rows& out) {
  same_shape(left, right, "right");
  same_shape(left, out, "out");
  for (size_t row = 0; row < left.shape(0); row++)
    kernels().add_scaled(row_of(left, row), row_of(right, row), scale, columns_of(left), row_of(out, row));
}

void scale_and_cap(const Rows& rows, float scale, float cap) {
  for (size_t row = 0; row < rows.shape(0); row++) kernels().scale_and_cap(row_of(rows, row), columns_of(rows), scale, cap);
}

void rotate(const ConstRows& heads, const Vector& cosine, const Vector& sine, bool interleaved, const Rows& out) {
  same_length(sine.shape(0), cosine.shape(0), "the sine");
  same_shape(heads, out, "out");
  if (2 * cosine.shape(0) > heads.shape(1))
    throw nb::value_error((std::to_string(cosine.shape(0)) + " pairs do not fit into a head of " + std::to_string(heads.shape(1))).c_str());
  for (size_t row = 0; row < heads.shape(0); row++)
    kernels().rotate(row_of(heads, row), columns_of(heads), static_cast<int64_t>(cosine.shape(0)), interleaved, cosine.data(), sine.data(),
                     row_of(out, row));
}

void route(const ConstRows& logits, bool normalise, const Array<int32_t, 2>& chosen, const Rows& shares) {
  same_shape(chosen, shares, "shares");
  same_length(chosen.shape(0), logits.shape(0), "chosen");
  if (chosen.shape(1) > logits.shape(1))
    throw nb::value_error((std::to_string(chosen.shape(1)) + " experts cannot be chosen of " + std::to_string(logits.shape(1))).c_str());
  for (size_t row = 0; row < logits.shape(0); row++)
    kernels().route(row_of(logits, row), columns_of(logits), columns_of(chosen), normalise, row_of(chosen, row), row_of(shares, row));
}

}  // namespace

void bind_rows(nb::module_& module) {
  using namespace nb::literals;
  module.def("rms_norm", rms_norm, "rows"_a, "weight"_a, "epsilon"_a, "out"_a);
  module.def("layer_norm", layer_norm, "rows"_a, "weight"_a, "bias"_a.none(), "epsilon"_a, "out"_a);
  module.def("gelu", activation<Prologue::gelu>, "rows"_a, "out"_a);
  module.def("gelu_tanh", activation<Prologue::gelu_tanh>, "rows"_a, "out"_a);
  module.def("tanh", activation<Prologue::tanh>, "rows"_a, "out"_a);
  module.def("gelu_mul", gate_mul<Prologue::gelu_mul>, "gate"_a, "up"_a, "out"_a);
  module.def("silu_mul", gate_mul<Prologue::silu_mul>, "gate"_a, "up"_a, "out"_a);
  module.def("gelu_tanh_mul", gate_mul<Prologue::gelu_tanh_mul>, "gate"_a, "up"_a, "out"_a);
  module.def("add_scaled", add_scaled, "left"_a, "right"_a, "scale"_a, "out"_a);
  module.def("scale_and_cap", scale_and_cap, "rows"_a, "scale"_a, "cap"_a);
  module.def("rotate", rotate, "heads"_a, "cosine"_a, "sine"_a, "interleaved"_a, "out"_a);
  module.def("route", route, "logits"_a, "normalise"_a, "chosen"_a, "shares"_a);
}

}  // namespace weft
