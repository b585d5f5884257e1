// The tokens of one row that can still be drawn, and the filters that remove unlikely ones.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace weft {

// A row of scores and the result of `scan_scores`.
struct ScannedRow {
  const float* scores;
  int64_t count;
  const float* maxima;
  RowScan scan;
};

// The sampling parameters of a request that are numbers. `set_row` copies them: all are doubles, in the order of
// PARAMETERS in src/weft/request.py.
struct Parameters {
  double temperature;
  double top_p;
  double top_k;
  double log_min_p;
  double typical_p;
  double xtc_probability;
  double log_xtc_threshold;
  double repetition_penalty;
  double frequency_penalty;
  double presence_penalty;

  bool has_min_p() const { return log_min_p > -HUGE_VAL; }
  bool has_filters() const { return top_k > 0.0 || top_p < 1.0 || has_min_p() || typical_p < 1.0 || xtc_probability > 0.0; }
  bool has_penalties() const { return repetition_penalty != 1.0 || frequency_penalty != 0.0 || presence_penalty != 0.0; }
};

// The candidates of one row at a time. One object is used for all rows, so that its memory is allocated once.
class Candidates {
 public:
  // Returns the token with the highest sum of score and noise among those that the filters keep; at a tie, the lowest.
  int64_t draw(const ScannedRow& row, double temperature, const Parameters& parameters, uint64_t key);

  // Finds the `top_count` tokens with the highest scores, best first; at a tie, the lowest token first.
  void rank(const ScannedRow& row, int64_t top_count);

  int32_t token(int64_t index) const { return tokens_[static_cast<size_t>(index)]; }

 private:
  // Applies the filters in order: top-k, top-p, min-p, typical-p, xtc. Each filter sees the tokens that the previous
  // one kept, and keeps all tokens that tie with the last one it keeps.
  void filter(const ScannedRow& row, const Parameters& parameters, uint64_t key);
  // Makes the tokens whose scores are at most `limit` below the best score the candidates.
  void collect(const ScannedRow& row, float limit);
  float distance_of_rank(const ScannedRow& row, int64_t top_count);
  float nucleus_floor(double top_p);
  float nucleus_floor(const ScannedRow& row, double top_p);
  void keep_typical(double typical_p);
  void exclude_top_choices(double log_threshold);
  void weigh();
  template <typename Kept>
  void keep(Kept&& is_kept);

  int64_t count_ = 0;
  double temperature_ = 1.0;
  double factor_ = 1.0;   // 1 / temperature, limited to a finite double
  // Each vector has room for a whole row. The first `count_` elements are the candidates.
  std::vector<int32_t> tokens_;
  std::vector<float> below_;      // distance to the best score
  std::vector<double> weights_;   // exp(-below / temperature)
  std::vector<double> surprises_;
  std::vector<float> ranked_maxima_;
  std::vector<int32_t> matching_;   // scratch of find_cutoff
};

}  // namespace weft
