// Converts tensors from their file format to the strips that the kernels read (kernels.h). Runs once per model; the
// result is cached in a file.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace weft {

// A file format of tensors: a block of `bytes` bytes holds `values` values.
struct StoredFormat {
  const char* name;
  int64_t values;
  int64_t bytes;
  // the default layout: one that keeps the stored codes exactly, or else the smallest that is accurate enough
  Layout layout;
  void (*decode)(const uint8_t* raw, int64_t blocks, float* out);
};

// Returns null for an unknown format.
const StoredFormat* find_format(const char* name);

// The eight scales and (negated) minima of a Q4_K or Q5_K block.
void k_scales_and_minima(const uint8_t* block, float* scales, float* minima);

int64_t packed_bytes(Layout layout, int64_t outputs, int64_t inputs);

// Writes `rows` rows of a tensor into the strips of a layer, as outputs first_output .. first_output + rows - 1 of
// `total_outputs`. No two outputs share a byte, so several threads may write one layer. The call that writes the last
// output also clears the padding lanes after it.
//
// Q4_0, Q4_1, Q4_K to W4, Q8_0 to W8 and floats to their own layout keep the stored codes. All others are decoded and
// rounded.
void pack(const StoredFormat& format, const uint8_t* raw, int64_t rows, int64_t inputs, Layout layout, int64_t first_output,
          int64_t total_outputs, uint8_t* out);

// Detects damage, not manipulation: a change within one 8-byte word always changes the checksum, a larger change with
// probability 1 - 2^-64. Runs at memory speed.
uint64_t checksum(const uint8_t* bytes, int64_t count);

}  // namespace weft
