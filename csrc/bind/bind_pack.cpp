#include <nanobind/stl/string.h>

#include <string>

#include "bind/bindings.h"
#include "kernels/pack.h"

namespace weft {

Layout layout_from(int number) {
  if (number < 0 || number > static_cast<int>(Layout::bf16))
    throw nb::value_error(("there is no layout " + std::to_string(number) + "; they are 0 (w4) to 4 (bf16)").c_str());
  return static_cast<Layout>(number);
}

namespace {

const StoredFormat& format_from(const std::string& name) {
  const StoredFormat* format = find_format(name.c_str());
  if (!format) throw nb::value_error(("weft packs no tensors in the format " + name).c_str());
  return *format;
}

void check(bool is_right, const std::string& message) {
  if (!is_right) throw nb::value_error(message.c_str());
}

void pack_array(const std::string& format_name, Array<const uint8_t, 1> raw, int64_t inputs, int layout_number, int64_t first_output,
                int64_t total_outputs, Array<uint8_t, 1> out) {
  const StoredFormat& format = format_from(format_name);
  const Layout layout = layout_from(layout_number);
  check(inputs > 0 && inputs % format.values == 0,
        "rows of " + std::to_string(inputs) + " values are not a whole number of blocks of " + format_name + ", which hold " +
            std::to_string(format.values));
  const int64_t row_bytes = inputs / format.values * format.bytes, bytes = static_cast<int64_t>(raw.size());
  check(bytes % row_bytes == 0, std::to_string(bytes) + " bytes are not a whole number of rows of " + std::to_string(row_bytes));
  const int64_t rows = bytes / row_bytes;
  check(first_output >= 0 && first_output + rows <= total_outputs,
        std::to_string(rows) + " rows from output " + std::to_string(first_output) + " on do not fit " + std::to_string(total_outputs) +
            " outputs");
  const int64_t needed = packed_bytes(layout, total_outputs, inputs);
  check(static_cast<int64_t>(out.size()) == needed,
        "the packed layer takes " + std::to_string(needed) + " bytes, and `out` has " + std::to_string(out.size()));
  nb::gil_scoped_release release;
  pack(format, raw.data(), rows, inputs, layout, first_output, total_outputs, out.data());
}

}  // namespace

void bind_pack(nb::module_& module) {
  module.def("layout_of", [](const std::string& format) { return static_cast<int>(format_from(format).layout); }, nb::arg("format"));
  module.def("packed_bytes", [](int layout, int64_t outputs, int64_t inputs) {
    check(outputs >= 0 && inputs > 0, "outputs must not be negative and inputs must be positive; they are " + std::to_string(outputs) + " and " + std::to_string(inputs));
    return packed_bytes(layout_from(layout), outputs, inputs);
  }, nb::arg("layout"), nb::arg("outputs"), nb::arg("inputs"));
  module.def("pack", pack_array, nb::arg("format"), nb::arg("raw"), nb::arg("inputs"), nb::arg("layout"), nb::arg("first_output"),
             nb::arg("total_outputs"), nb::arg("out").noconvert());
  module.def("checksum", [](Array<const uint8_t, 1> bytes) {
    nb::gil_scoped_release release;
    return checksum(bytes.data(), static_cast<int64_t>(bytes.size()));
  }, nb::arg("bytes"));
}

}  // namespace weft
