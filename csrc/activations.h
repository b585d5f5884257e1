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
    const int64_t panels = (rows + panel_rows - 1) / panel_rows, padded = panels * panel_rows;
    view_ = QuantisedRows{groups, blocks, data_.at_least(padded * groups), scales_.at_least(padded * blocks)};
    if (with_outliers) {
      view_.outlier_room = most_outliers(columns);
      view_.outliers = outliers_.at_least(rows * view_.outlier_room);
      view_.outlier_counts = outlier_counts_.at_least(rows);
      view_.panel_outliers = panel_outliers_.at_least(rows * view_.outlier_room);
      view_.panel_begins = panel_begins_.at_least(panels + 1);
      marks_.at_least(groups);
    }
    return view_;
  }

  // Once all these rows are filled, for products: puts the outliers of each panel together.
  void gather_outliers(int64_t rows) {
    if (!view_.outliers) return;
    int64_t begin = 0;
    for (int64_t first = 0; first < rows; first += panel_rows) {
      view_.panel_begins[first / panel_rows] = begin;
      begin = gather_panel(first, first + panel_rows < rows ? first + panel_rows : rows, begin);
    }
    view_.panel_begins[(rows + panel_rows - 1) / panel_rows] = begin;
  }

 private:
  struct Mark {   // of a group
    uint32_t inputs;   // a bit for each that is an outlier
    int64_t begin;     // where the first of them lies among those of the panels
  };

  template <typename Visit>
  void each_outlier(int64_t first, int64_t end, Visit&& visit) const {
    for (int64_t row = first; row < end; row++) {
      const Outlier* outlier = view_.outliers + row * view_.outlier_room;
      for (int32_t left = view_.outlier_counts[row]; left > 0; left--, outlier++) visit(row, *outlier);
    }
  }

  int64_t gather_panel(int64_t first, int64_t end, int64_t begin) {
    Mark* marks = marks_.data();
    for (int64_t group = 0; group < view_.groups; group++) marks[group].inputs = 0;
    each_outlier(first, end, [&](int64_t, const Outlier& outlier) {
      marks[outlier.input / group_inputs].inputs |= 1u << outlier.input % group_inputs;
    });
    for (int64_t group = 0; group < view_.groups; group++) {
      marks[group].begin = begin;
      for (uint32_t left = marks[group].inputs; left != 0; left &= left - 1)
        view_.panel_outliers[begin++] = PanelOutlier{static_cast<uint32_t>(group * group_inputs + __builtin_ctz(left)), {}};
    }
    each_outlier(first, end, [&](int64_t row, const Outlier& outlier) {
      const Mark& mark = marks[outlier.input / group_inputs];
      const uint32_t before = mark.inputs & ((1u << outlier.input % group_inputs) - 1);
      view_.panel_outliers[mark.begin + __builtin_popcount(before)].values[row % panel_rows] = outlier.value;
    });
    return begin;
  }

  QuantisedRows view_{};
  Aligned<RowGroup> data_;
  Aligned<float> scales_;
  Aligned<int32_t> outlier_counts_;
  Aligned<Outlier> outliers_;
  Aligned<PanelOutlier> panel_outliers_;
  Aligned<int64_t> panel_begins_;
  Aligned<Mark> marks_;
};

}  // namespace weft
