// The kernels in plain C++, for processors without AVX2. They are also the simplest version to read.
#define WEFT_ISA portable
#define WEFT_ISA_NAME "portable"
#include "isa/isa.inl"
