// Compiled with AVX-512 F, BW, DQ, VL and VNNI.
#define WEFT_ISA avx512vnni
#define WEFT_ISA_NAME "avx512vnni"
#define WEFT_AVX512 1
#define WEFT_VNNI 1
// GCC 12 warns about values that its own intrinsics leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "isa/isa.inl"
