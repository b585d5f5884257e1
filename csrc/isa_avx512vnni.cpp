// Compiled with AVX-512 F, BW, DQ, VL and VNNI.
#define WEFT_ISA avx512vnni
#define WEFT_ISA_NAME "avx512vnni"
#define WEFT_AVX512 1
#define WEFT_VNNI 1
#include "isa.inl"
