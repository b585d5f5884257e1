// All kernels of one instruction set. Each isa_*.cpp includes this file once, names the set (WEFT_ISA), and is
// compiled with its flags.
//
// Only headers without functions may be included here. Otherwise the linker could keep a standard library function
// that was compiled for AVX-512, and use it for all instruction sets.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/kernels.h"

#include "kernels/linear.inl"
#include "kernels/rows.inl"
#include "kernels/quantise.inl"
#include "kernels/cache.inl"
#include "kernels/store.inl"
#include "kernels/attention.inl"
#include "kernels/text_attention.inl"
#include "kernels/sampler.inl"

namespace weft::WEFT_ISA {

extern const Kernels table;
const Kernels table = {
    WEFT_ISA_NAME, quantise_row,  linear, unpack_row, make_row,   add_scaled,
    scale_and_cap, rotate,        route,  write_cache, move_block, move_scratch, attend, attend_scratch, attend_segment, attend_merge,
    attend_text,   scan_scores,   mask_scores,   sum_exp, sum_weights, sum_weights_roughly, weigh_each, collect_scores, draw_scores,
    multiply_in_registers,
};

}  // namespace weft::WEFT_ISA
