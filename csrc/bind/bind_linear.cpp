#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "bind/bindings.h"
#include "kernels/activations.h"
#include "kernels/kernels.h"
#include "kernels/pack.h"
#include "program/pool.h"

namespace weft {
namespace {

template <typename Type>
using NewArray = nb::ndarray<nb::numpy, Type>;

template <typename Type>
NewArray<Type> new_array(std::initializer_list<size_t> shape) {
  size_t size = 1;
  for (const size_t extent : shape) size *= extent;
  auto* data = new Type[size]();
  nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<Type*>(pointer); });
  return NewArray<Type>(data, shape, owner);
}

// Quantised rows that own their memory.
struct OwnedRows {
  Activations memory;
  QuantisedRows view;

  OwnedRows(const float* rows, int64_t count, int64_t columns, bool with_outliers) : view(memory.at_least(count, columns, with_outliers)) {
    Aligned<float> scratch;
    scratch.at_least(quantise_scratch(columns));
    for (int64_t row = 0; row < count; row++) kernels().quantise_row({rows + row * columns}, columns, scratch.data(), view, row);
    memory.gather_outliers(count);
  }
};

Weight weight_from(int layout_number, int64_t outputs, int64_t inputs, const Array<const uint8_t, 1>& packed) {
  const Layout layout = layout_from(layout_number);
  if (outputs < 0 || inputs <= 0) throw nb::value_error("outputs must not be negative, and inputs must be positive");
  const int64_t needed = packed_bytes(layout, outputs, inputs);
  if (static_cast<int64_t>(packed.size()) != needed)
    throw nb::value_error(("a packed layer of this shape has " + std::to_string(needed) + " bytes, not " +
                           std::to_string(packed.size())).c_str());
  return {layout, outputs, inputs, packed.data(), nullptr};
}

// Returns four arrays for the rows: codes, scales, starts, corrections. Then two for the outliers: (row, input) pairs,
// values.
nb::tuple quantise(Array<const float, 2> rows, bool with_outliers) {
  const size_t count = rows.shape(0);
  const OwnedRows quantised(rows.data(), static_cast<int64_t>(count), static_cast<int64_t>(rows.shape(1)), with_outliers);
  const QuantisedRows& view = quantised.view;
  const size_t groups = static_cast<size_t>(view.groups), blocks = static_cast<size_t>(view.scale_blocks);
  size_t taken = 0;
  for (size_t row = 0; with_outliers && row < count; row++) taken += static_cast<size_t>(view.outlier_counts[row]);
  auto places = new_array<uint32_t>({taken, 2});
  auto values = new_array<float>({taken});
  for (size_t row = 0, at = 0; with_outliers && row < count; row++) {
    const Outlier* outlier = view.outliers + static_cast<int64_t>(row) * view.outlier_room;
    for (const Outlier* end = outlier + view.outlier_counts[row]; outlier < end; outlier++, at++) {
      places.data()[2 * at] = static_cast<uint32_t>(row);
      places.data()[2 * at + 1] = outlier->input;
      values.data()[at] = outlier->value;
    }
  }
  auto codes = new_array<int8_t>({count, groups * group_inputs});
  auto scales = new_array<float>({count, blocks});
  auto starts = new_array<int32_t>({count, groups}), corrections = new_array<int32_t>({count, groups});
  for (size_t row = 0; row < count; row++) {
    for (size_t group = 0; group < groups; group++) {
      const RowGroup& from = *view.group_of(static_cast<int64_t>(row), static_cast<int64_t>(group));
      std::memcpy(codes.data() + (row * groups + group) * group_inputs, from.codes, group_inputs);
      starts.data()[row * groups + group] = from.start;
      corrections.data()[row * groups + group] = from.correction;
    }
    for (size_t block = 0; block < blocks; block++)
      scales.data()[row * blocks + block] = *view.scale_of(static_cast<int64_t>(row), static_cast<int64_t>(block));
  }
  return nb::make_tuple(codes, scales, starts, corrections, places, values);
}

// Computes one linear layer. Each thread computes a share of the outputs, for at most `rows_each` rows in one kernel
// call (0: for all rows).
NewArray<float> linear(int layout, int64_t outputs, int64_t inputs, Array<const uint8_t, 1> packed,
                       std::optional<Array<const float, 1>> bias, Array<const float, 2> rows, int threads,
                       std::optional<Array<const float, 2>> residual, float scale, bool with_outliers, int64_t rows_each) {
  Weight weight = weight_from(layout, outputs, inputs, packed);
  const auto count = static_cast<int64_t>(rows.shape(0));
  if (static_cast<int64_t>(rows.shape(1)) != inputs)
    throw nb::value_error(("the layer has " + std::to_string(inputs) + " inputs, and the rows " + std::to_string(rows.shape(1))).c_str());
  if (bias) {
    if (static_cast<int64_t>(bias->size()) != outputs) throw nb::value_error("the bias must have one number for each output");
    weight.bias = bias->data();
  }
  auto out = new_array<float>({static_cast<size_t>(count), static_cast<size_t>(outputs)});
  if (residual) {
    if (static_cast<int64_t>(residual->shape(0)) != count || static_cast<int64_t>(residual->shape(1)) != outputs)
      throw nb::value_error("the residual must have the shape of the result");
    std::memcpy(out.data(), residual->data(), residual->nbytes());
  }
  std::optional<OwnedRows> quantised;
  LinearTask task{&weight, {}, rows.data(), inputs, 0, count, 0, 0, out.data(), outputs, residual.has_value(), scale};
  if (weight.quantised()) task.quantised = quantised.emplace(rows.data(), count, inputs, with_outliers).view;
  Pool pool(threads);
  const int64_t items = threads, strips = weight.strips();
  if (rows_each <= 0) rows_each = std::max<int64_t>(count, 1);
  nb::gil_scoped_release release;
  pool.run(items, [&](int64_t item, int) {
    LinearTask piece = task;
    piece.first_strip = strips * item / items;
    piece.end_strip = strips * (item + 1) / items;
    for (piece.first_row = 0; piece.first_row < count; piece.first_row += rows_each) {
      piece.end_row = std::min(count, piece.first_row + rows_each);
      kernels().linear(piece);
    }
  });
  return out;
}

NewArray<float> unpack_rows(int layout, int64_t outputs, int64_t inputs, Array<const uint8_t, 1> packed, Array<const int64_t, 1> indices) {
  const Weight weight = weight_from(layout, outputs, inputs, packed);
  for (size_t i = 0; i < indices.size(); i++)
    if (indices.data()[i] < 0 || indices.data()[i] >= outputs)
      throw nb::value_error(("there is no row " + std::to_string(indices.data()[i]) + " among " + std::to_string(outputs)).c_str());
  auto out = new_array<float>({indices.size(), static_cast<size_t>(inputs)});
  for (size_t i = 0; i < indices.size(); i++)
    kernels().unpack_row(weight, indices.data()[i], out.data() + static_cast<int64_t>(i) * inputs);
  return out;
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.def("quantise", quantise, nb::arg("rows"), nb::arg("with_outliers") = true);
  module.def("linear", linear, nb::arg("layout"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("packed"), nb::arg("bias").none(),
             nb::arg("rows"), nb::arg("threads") = 1, nb::arg("residual") = nb::none(), nb::arg("scale") = 1.0f,
             nb::arg("with_outliers") = true, nb::arg("rows_each") = 0);
  module.def("unpack_rows", unpack_rows, nb::arg("layout"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("packed"), nb::arg("indices"));
}

}  // namespace weft
