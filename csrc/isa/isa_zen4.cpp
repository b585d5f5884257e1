// Compiled with AVX-512 F, BW, DQ, VL, VNNI and VBMI: the kernels of linear.inl, rows.inl and quantise.inl, for Zen 4
// and 5. The zen4 table takes all other kernels from avx512vnni.
#define WEFT_ISA zen4
#define WEFT_AVX512 1
#define WEFT_VNNI 1
#define WEFT_PAIRS 1
// GCC 12 warns about values that its own intrinsics leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
// Only headers without functions may be included here: see isa.inl.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/kernels.h"

#include "kernels/linear.inl"
#include "kernels/rows.inl"
#include "kernels/quantise.inl"

namespace weft::zen4 {

// Replaces the kernels of `table` that are compiled here.
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
