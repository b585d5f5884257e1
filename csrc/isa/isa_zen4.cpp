// Compiled with AVX-512 F, BW, DQ, VL, VNNI and VBMI: products as they suit Zen 4 and 5, and all else as with VNNI.
#define WEFT_ISA zen4
#define WEFT_AVX512 1
#define WEFT_VNNI 1
#define WEFT_PAIRS 1
// GCC 12 takes what its own intrinsics leave undefined on purpose for a mistake.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
// As in isa.inl: only headers without code of their own.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/kernels.h"

#include "kernels/linear.inl"
#include "kernels/rows.inl"
#include "kernels/quantise.inl"

namespace weft::zen4 {

Kernels with_pairs(Kernels table) {
  table.name = "zen4";
  table.quantise_row = quantise_row;
  table.linear = linear;
  table.unpack_row = unpack_row;
  table.make_row = make_row;
  table.add_scaled = add_scaled;
  table.scale_and_cap = scale_and_cap;
  table.rotate = rotate;
  table.route = route;
  table.multiply_in_registers = multiply_in_registers;
  return table;
}

}  // namespace weft::zen4
