// Memory for rows of activations in bytes.
#pragma once

#include <cstdint>

#include "aligned.h"
#include "kernels.h"

namespace weft {

class Activations {
 public:
  // Room for so many rows; quantise_row may then fill any of them on any thread. What was there before may be lost.
  QuantisedRows at_least(int64_t rows, int64_t columns, bool with_outliers = true) {
    const int64_t groups = (columns + group_inputs - 1) / group_inputs, blocks = (groups + block_groups - 1) / block_groups;
    const int64_t padded = (rows + panel_rows - 1) / panel_rows * panel_rows;
    QuantisedRows view{groups, blocks, data_.at_least(padded * groups), scales_.at_least(padded * blocks)};
    if (with_outliers) {
      view.outlier_room = most_outliers(columns);
      view.outliers = outliers_.at_least(rows * view.outlier_room);
      view.outlier_counts = outlier_counts_.at_least(rows);
      view.outlier_begins = outlier_begins_.at_least(rows + 1);
    }
    return view;
  }

 private:
  Aligned<RowGroup> data_;
  Aligned<float> scales_;
  Aligned<int32_t> outlier_counts_;
  Aligned<Outlier> outliers_;
  Aligned<int64_t> outlier_begins_;
};

// Once all rows are filled, for products: puts their outliers together.
inline void gather_outliers(const QuantisedRows& view, int64_t rows) {
  int64_t end = 0;
  for (int64_t row = 0; row < rows; row++) {
    view.outlier_begins[row] = end;
    const Outlier* from = view.outliers + row * view.outlier_room;
    for (int32_t i = 0; i < view.outlier_counts[row]; i++) view.outliers[end++] = from[i];
  }
  view.outlier_begins[rows] = end;
}

}  // namespace weft
