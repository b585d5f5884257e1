// Compiled with AVX2, FMA and F16C.
#define WEFT_ISA avx2
#define WEFT_ISA_NAME "avx2"
#define WEFT_AVX2 1
#include "isa/isa.inl"
