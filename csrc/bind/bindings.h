// The Python bindings, one function for each part. Arrays are checked here, once; all other code trusts them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "kernels/kernels.h"

namespace weft {

namespace nb = nanobind;

template <typename Type, int Dimensions>
using Array = nb::ndarray<Type, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

Layout layout_from(int number);   // raises ValueError for an unknown number

void bind_dispatch(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_pack(nb::module_& module);
void bind_rows(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_measure(nb::module_& module);
void bind_pool(nb::module_& module);
void bind_program(nb::module_& module);
void bind_sampler(nb::module_& module);
void bind_strings(nb::module_& module);

}  // namespace weft
