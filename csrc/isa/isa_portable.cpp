// The kernels in plain C++, for processors without any of the instruction sets below, and the simplest reading of each.
#define WEFT_ISA portable
#define WEFT_ISA_NAME "portable"
#include "isa/isa.inl"
