// Owns the memory of quantised activation rows.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "program/aligned.h"

namespace weft {

class Activations {
 public:
  // Makes room for `rows` rows; quantise_row may then fill any of them on any thread. Previous content may be lost.
  QuantisedRows at_least(int64_t rows, int64_t columns, bool with_outliers = true, int64_t ratio = outlier_ratio) {
    const int64_t groups = (columns + group_inputs - 1) / group_inputs, blocks = (groups + scale_block_groups - 1) / scale_block_groups;
    const int64_t panels = (rows + panel_rows - 1) / panel_rows, padded = panels * panel_rows;
    view_ = QuantisedRows{groups, blocks, data_.at_least(padded * groups), scales_.at_least(padded * blocks)};
    if (with_outliers) {
      view_.ratio = ratio;
      view_.outlier_room = most_outliers(columns, ratio);
      view_.outliers = outliers_.at_least(rows * view_.outlier_room);
      view_.outlier_counts = outlier_counts_.at_least(rows);
      view_.shared_outliers = shared_outliers_.at_least(rows * view_.outlier_room);
      view_.shared_begins = shared_begins_.at_least((rows + outlier_rows - 1) / outlier_rows + 1);
    }
    return view_;
  }

  // Merges the outliers of every four rows into one list. To be called after all rows are filled and before the first
  // product.
  void gather_outliers(int64_t rows) {
    if (!view_.outliers) return;
    int64_t count = 0, *begin = view_.shared_begins;
    for (int64_t first = 0; first < rows; first += outlier_rows) {
      *begin++ = count;
      count += merge_outliers(first, first + outlier_rows < rows ? outlier_rows : rows - first, view_.shared_outliers + count);
    }
    *begin = count;
  }

 private:
  // Returns the number of merged inputs.
  int64_t merge_outliers(int64_t first_row, int64_t rows, SharedOutlier* out) const {
    const Outlier *next[outlier_rows], *end[outlier_rows];
    for (int64_t row = 0; row < rows; row++) {
      next[row] = view_.outliers + (first_row + row) * view_.outlier_room;
      end[row] = next[row] + view_.outlier_counts[first_row + row];
    }
    for (int64_t count = 0;; count++, out++) {
      uint32_t lowest = UINT32_MAX;
      for (int64_t row = 0; row < rows; row++)
        if (next[row] < end[row] && next[row]->input < lowest) lowest = next[row]->input;
      if (lowest == UINT32_MAX) return count;
      *out = SharedOutlier{lowest, {}};
      for (int64_t row = 0; row < rows; row++)
        if (next[row] < end[row] && next[row]->input == lowest) out->values[row] = next[row]++->value;
    }
  }

  QuantisedRows view_{};
  Aligned<RowGroup> data_;
  Aligned<float> scales_;
  Aligned<int32_t> outlier_counts_;
  Aligned<Outlier> outliers_;
  Aligned<SharedOutlier> shared_outliers_;
  Aligned<int64_t> shared_begins_;
};

}  // namespace weft
