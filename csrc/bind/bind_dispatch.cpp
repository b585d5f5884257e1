#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind/bindings.h"
#include "kernels/kernels.h"

namespace weft {

void bind_dispatch(nb::module_& module) {
  module.def("available", [] {
    int count;
    const char* const* names = available(count);
    return std::vector<std::string>(names, names + count);
  }, "Instruction sets with kernels that this processor supports, best first.");
  module.def("in_use", [] { return std::string(kernels().name); });
  module.def("use", [](const std::string& name) {
    if (!select(name.c_str())) throw nb::value_error(("this processor has no kernels called " + name).c_str());
  }, "Selects the kernels of another instruction set, for tests and measurements.");
}

}  // namespace weft
