#include "bind/bindings.h"

namespace nb = nanobind;

NB_MODULE(_kernels, module) {
  // A process may end while threads still hold weights; the system frees them, so a leak warning would be noise.
  nb::set_leak_warnings(false);
  module.doc() = "weft's CPU kernels; used by weft.ops.cpu.";
  weft::bind_dispatch(module);
  weft::bind_pack(module);
  weft::bind_linear(module);
  weft::bind_rows(module);
  weft::bind_attention(module);
  weft::bind_measure(module);
  weft::bind_pool(module);
  weft::bind_program(module);
  weft::bind_sampler(module);
  weft::bind_strings(module);
}
