#include "bindings.h"
#include "kernels.h"

namespace weft {

void bind_attention(nb::module_&) {}

}  // namespace weft
