// The residuals of wide groups: where quantise_row puts them, and the lists by group that products take them from.
#pragma once

#include <cstdint>

#include "aligned.h"
#include "kernels.h"

namespace weft {

class WideGroups {
 public:
  // Gives the rows room for residuals; for quantise_row, which then may fill any of the rows on any thread.
  void make_room(QuantisedRows& rows, int64_t count);
  // Of rows that are all filled. The lists stay until the next call.
  WideRows collect(const QuantisedRows& rows, int64_t count);

 private:
  Aligned<uint8_t> wide_;
  Aligned<Residual> residuals_;
  Aligned<int64_t> begins_;
  Aligned<int32_t> rows_, corrections_;
  Aligned<int8_t> codes_;
  Aligned<float> scales_, offsets_;
};

}  // namespace weft
