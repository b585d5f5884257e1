#include "wide.h"

#include <cstring>

namespace weft {

void WideGroups::make_room(QuantisedRows& rows, int64_t count) {
  rows.wide = wide_.at_least(count * rows.groups);
  rows.residuals = residuals_.at_least(count * rows.groups);
}

WideRows WideGroups::collect(const QuantisedRows& rows, int64_t count) {
  const int64_t groups = rows.groups;
  // Counted one place further on than the group, so that after the sums begins[g + 1] is where group g begins. Every entry that is put
  // down then moves it on, in the end to where the group ends, which is where the next one begins.
  int64_t* begins = begins_.at_least(groups + 2);
  std::memset(begins, 0, static_cast<size_t>(groups + 2) * sizeof(int64_t));
  for (int64_t row = 0; row < count; row++)
    for (int64_t group = 0; group < groups; group++) begins[group + 2] += rows.wide[row * groups + group];
  for (int64_t group = 2; group <= groups + 1; group++) begins[group] += begins[group - 1];
  const int64_t total = begins[groups + 1];
  if (total == 0) return {};

  int32_t* entry_rows = rows_.at_least(total);
  const QuantisedRows entries{1, codes_.at_least(total * group_inputs), scales_.at_least(total), offsets_.at_least(total),
                              corrections_.at_least(total)};
  for (int64_t row = 0; row < count; row++)
    for (int64_t group = 0; group < groups; group++) {
      if (!rows.wide[row * groups + group]) continue;
      const Residual& residual = rows.residuals[row * groups + group];
      const int64_t entry = begins[group + 1]++;
      entry_rows[entry] = static_cast<int32_t>(row);
      std::memcpy(entries.codes + entry * group_inputs, residual.codes, group_inputs);
      entries.scales[entry] = residual.scale;
      entries.offsets[entry] = residual.offset;
      entries.corrections[entry] = residual.correction;
    }
  return {begins, entry_rows, entries};
}

}  // namespace weft
