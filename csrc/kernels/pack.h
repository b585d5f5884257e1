// From tensors as files store them to the strips that the kernels read (kernels.h). Done once for a model; the result is kept.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace weft {

// A way of storing numbers: `bytes` bytes hold `values` values.
struct StoredFormat {
  const char* name;
  int64_t values;
  int64_t bytes;
  Layout layout;                                       // the one that holds it exactly, or the smallest that holds it well
  void (*decode)(const uint8_t* raw, int64_t blocks, float* out);
};

// null: no such format.
const StoredFormat* find_format(const char* name);

// The eight scales of a Q4_K or Q5_K block, and what is added to its weights.
void k_scales_and_minima(const uint8_t* block, float* scales, float* minima);

int64_t packed_bytes(Layout layout, int64_t outputs, int64_t inputs);

// Writes `rows` rows of a tensor, outputs first_output .. first_output + rows - 1 of a layer of `total_outputs`, into its strips. No two
// outputs share a byte, so several threads may write one layer. Whoever writes the last output also clears the lanes after it.
//
// Q4_0, Q4_1, Q4_K to W4, Q8_0 to W8 and floats to their own layout keep the stored codes; anything else is decoded and rounded anew.
void pack(const StoredFormat& format, const uint8_t* raw, int64_t rows, int64_t inputs, Layout layout, int64_t first_output,
          int64_t total_outputs, uint8_t* out);

// Finds damage, not malice: a change inside one word of 8 bytes always gives another checksum, a larger one all but once in 2^64. As fast
// as memory is read.
uint64_t checksum(const uint8_t* bytes, int64_t count);

}  // namespace weft
