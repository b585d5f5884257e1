#include "bindings.h"
#include "kernels.h"

namespace weft {

void bind_rows(nb::module_&) {}

}  // namespace weft
