// Compiled with AVX-512 F, BW, DQ and VL, but without VNNI.
#define WEFT_ISA avx512
#define WEFT_ISA_NAME "avx512"
#define WEFT_AVX512 1
#include "isa.inl"
