#include "bindings.h"
#include "pool.h"

namespace weft {

void bind_pool(nb::module_& module) {
  nb::class_<Pool>(module, "Pool", "Threads that share the work of a step, the caller among them.")
      .def("__init__", [](Pool* self, int threads) {
        if (threads < 1 || threads > 1024) throw nb::value_error("threads must be from 1 to 1024");
        new (self) Pool(threads);
      }, nb::arg("threads"))
      .def_prop_ro("threads", &Pool::threads);
}

}  // namespace weft
