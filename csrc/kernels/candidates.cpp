#include "kernels/candidates.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/noise.h"

namespace weft {
namespace {

uint32_t ordered_bits(float value) {   // for values >= 0, the bits have the same order as the values
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

uint64_t ordered_bits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <typename Value>
struct Cutoff {
  Value value;
  double before;    // sum of the weights of all smaller values
  double through;   // `before` and the weights of all values equal to it
};

// Each value has a weight. Returns the largest value for which the weights of all smaller values sum up to less than
// `threshold`. Values are not sorted: each pass finds the next 11 bits of the result, from the highest bits down. The
// next pass examines only values that begin with the bits found so far.
template <typename Value, typename Weight>
Cutoff<Value> find_cutoff(const Value* values, int64_t count, double threshold, std::vector<int32_t>& matching, Weight&& weight) {
  constexpr int digit_bits = 11;
  constexpr uint32_t digits = 1u << digit_bits;
  using Bits = decltype(ordered_bits(Value{}));
  double weights[digits];
  uint32_t counts[digits];
  double before = 0.0, through = 0.0;
  Bits found = 0;
  for (int shift = static_cast<int>(sizeof(Bits)) * 8; shift > 0;) {
    const bool is_first = shift == static_cast<int>(sizeof(Bits)) * 8;
    const int taken = std::min(digit_bits, shift);
    shift -= taken;
    const Bits mask = (Bits{1} << taken) - 1;
    const auto digit_of = [&](int64_t i) { return static_cast<uint32_t>(ordered_bits(values[i]) >> shift & mask); };
    std::fill_n(weights, digits, 0.0);
    std::fill_n(counts, digits, 0u);
    const int64_t examined = is_first ? count : static_cast<int64_t>(matching.size());
    for (int64_t at = 0; at < examined; at++) {
      const int64_t i = is_first ? at : matching[at];
      const uint32_t digit = digit_of(i);
      weights[digit] += weight(i);
      counts[digit]++;
    }
    uint32_t last = 0;
    double sum = before;
    for (uint32_t digit = 0; digit <= mask && sum < threshold; digit++) {
      if (counts[digit] == 0) continue;
      last = digit;
      before = sum;
      through = sum += weights[digit];
    }
    found |= static_cast<Bits>(last) << shift;
    if (is_first) {
      matching.clear();
      for (int64_t i = 0; i < count; i++)
        if (digit_of(i) == last) matching.push_back(static_cast<int32_t>(i));
    } else {
      matching.erase(std::remove_if(matching.begin(), matching.end(), [&](int32_t i) { return digit_of(i) != last; }), matching.end());
    }
  }
  Value value;
  std::memcpy(&value, &found, sizeof(value));
  return {value, before, through};
}

// Returns `distance` as a float. It is rounded up, so that no token within the distance is left out, and is at most the
// largest finite float.
float as_limit(double distance) {
  return std::nextafter(static_cast<float>(std::min(distance * (1.0 + 1e-6), static_cast<double>(FLT_MAX))), FLT_MAX);
}

}  // namespace

// Returns a distance from the best score that includes the `top_count` best scores and few others.
float Candidates::distance_of_rank(const ScannedRow& row, int64_t top_count) {
  const int64_t groups = maxima_count(row.count);
  if (top_count > groups) return std::numeric_limits<float>::infinity();
  ranked_maxima_.assign(row.maxima, row.maxima + groups);
  const auto last = ranked_maxima_.begin() + (top_count - 1);
  std::nth_element(ranked_maxima_.begin(), last, ranked_maxima_.end(), std::greater<float>());
  return row.scan.best - *last;
}

template <typename Kept>
void Candidates::keep(Kept&& is_kept) {
  int64_t left = 0;
  for (int64_t i = 0; i < count_; i++) {
    if (!is_kept(i)) continue;
    tokens_[left] = tokens_[i];
    below_[left++] = below_[i];
  }
  count_ = left;
}

void Candidates::collect(const ScannedRow& row, float limit) {
  if (static_cast<int64_t>(tokens_.size()) < row.count) {
    tokens_.resize(static_cast<size_t>(row.count));
    below_.resize(static_cast<size_t>(row.count));
  }
  count_ = kernels().collect_scores(row.scores, row.count, row.scan.best, limit, tokens_.data(), below_.data());
}

void Candidates::weigh() {
  if (static_cast<int64_t>(weights_.size()) < count_) weights_.resize(static_cast<size_t>(count_));
  kernels().weigh_each(below_.data(), count_, factor_, weights_.data());
}

// The first filter in use collects the candidates: all tokens that it can keep. Later filters only remove some.
void Candidates::filter(const ScannedRow& row, const Parameters& parameters, uint64_t key) {
  bool is_collected = false;
  const auto collect_once = [&](float limit) {
    if (!is_collected) collect(row, limit);
    is_collected = true;
  };
  const int64_t top_k = static_cast<int64_t>(parameters.top_k);
  if (0 < top_k && top_k < row.count) {
    collect_once(std::min(distance_of_rank(row, top_k), FLT_MAX));
    const float floor = find_cutoff(below_.data(), count_, parameters.top_k, matching_, [](int64_t) { return 1.0; }).value;
    keep([&](int64_t i) { return below_[i] <= floor; });
  }
  if (parameters.top_p < 1.0) {
    const float floor = is_collected ? nucleus_floor(parameters.top_p) : nucleus_floor(row, parameters.top_p);
    is_collected = true;
    keep([&](int64_t i) { return below_[i] <= floor; });
  }
  if (parameters.has_min_p()) {
    collect_once(as_limit(-parameters.log_min_p * temperature_));
    keep([&](int64_t i) { return -static_cast<double>(below_[i]) / temperature_ >= parameters.log_min_p; });
  }
  collect_once(FLT_MAX);
  if (parameters.typical_p < 1.0) keep_typical(parameters.typical_p);
  // Whether xtc applies is random. The random number is the noise of token -1, which no token has.
  if ((noise_bits(key, -1) + 0.5) * 0x1p-32 < parameters.xtc_probability) exclude_top_choices(parameters.log_xtc_threshold);
}

// Returns how far below the best score the least likely token of the nucleus (top-p) of the candidates is.
float Candidates::nucleus_floor(double top_p) {
  weigh();
  double total = 0.0;
  for (int64_t i = 0; i < count_; i++) total += weights_[i];
  return find_cutoff(below_.data(), count_, top_p * total, matching_, [&](int64_t i) { return weights_[i]; }).value;
}

// Does the same for a whole row. Few tokens matter, so exact weights are computed only for tokens that can be in the
// nucleus, and the total is approximate. If its error could change the result, all weights are summed exactly.
float Candidates::nucleus_floor(const ScannedRow& row, double top_p) {
  double near[num_near];
  const float factor = static_cast<float>(std::min(factor_, static_cast<double>(FLT_MAX)));
  const double total = kernels().sum_weights_roughly(row.scores, row.count, row.scan.best, factor, near);
  const double least = top_p * total * (1.0 - rough_share), most = top_p * total * (1.0 + rough_share);
  // A limit for (best score - score) / temperature. The tokens past the limit have less weight in total than top-p
  // removes, so none of them is kept.
  double distance = -std::log((1.0 - top_p) * total * (1.0 - rough_share) / static_cast<double>(row.count));
  for (int i = num_near - 1; i >= 0; i--)
    if (near[i] * (1.0 - rough_share) > most) distance = std::min(distance, static_cast<double>(near_distances[i]));
  collect(row, as_limit(std::max(distance, 0.0) * temperature_));
  weigh();
  const auto weight_cutoff = [&](double threshold) {
    return find_cutoff(below_.data(), count_, threshold, matching_, [&](int64_t i) { return weights_[i]; });
  };
  const auto found = weight_cutoff(top_p * total);
  if (found.before < least && found.through > most) return found.value;
  return weight_cutoff(top_p * kernels().sum_weights(row.scores, row.count, row.scan.best, factor_)).value;
}

// Typical-p. Keeps the tokens whose surprise, -log(probability), is nearest to the average surprise. The surprise is
// below / temperature + log(total). The difference of two surprises does not contain log(total), so it is left out.
void Candidates::keep_typical(double typical_p) {
  weigh();
  double total = 0.0, weighted = 0.0;
  for (int64_t i = 0; i < count_; i++) {
    total += weights_[i];
    if (weights_[i] > 0.0) weighted += weights_[i] * (static_cast<double>(below_[i]) / temperature_);
  }
  const double average = weighted / total;
  if (static_cast<int64_t>(surprises_.size()) < count_) surprises_.resize(static_cast<size_t>(count_));
  for (int64_t i = 0; i < count_; i++)
    surprises_[i] = weights_[i] > 0.0 ? std::abs(static_cast<double>(below_[i]) / temperature_ - average) : HUGE_VAL;
  const double furthest = find_cutoff(surprises_.data(), count_, typical_p * total, matching_, [&](int64_t i) { return weights_[i]; }).value;
  keep([&](int64_t i) { return surprises_[i] <= furthest; });
}

// xtc. Removes the tokens whose probability is at least the threshold, except the least likely of them.
void Candidates::exclude_top_choices(double log_threshold) {
  weigh();
  double total = 0.0;
  for (int64_t i = 0; i < count_; i++) total += weights_[i];
  const double limit = log_threshold + std::log(total);
  float furthest = 0.0f;
  for (int64_t i = 0; i < count_; i++)
    if (-static_cast<double>(below_[i]) / temperature_ >= limit) furthest = std::max(furthest, below_[i]);
  keep([&](int64_t i) { return below_[i] >= furthest; });
}

// Computes exact noise only for candidates that may win: gumbel_bound is cheap.
int64_t Candidates::draw(const ScannedRow& row, double temperature, const Parameters& parameters, uint64_t key) {
  temperature_ = temperature;
  factor_ = std::min(1.0 / temperature, 1e308);
  filter(row, parameters, key);
  // Scores are relative to the best remaining score, because typical-p or xtc may have removed the best token.
  const double best = -static_cast<double>(*std::min_element(below_.begin(), below_.begin() + count_)) / temperature_;
  double highest = -HUGE_VAL;
  int64_t winner = tokens_[0];
  for (int64_t i = 0; i < count_; i++) {
    const double score = -static_cast<double>(below_[i]) / temperature_ - best;
    const uint32_t bits = noise_bits(key, tokens_[i]);
    if (score + gumbel_bound(bits) < highest) continue;
    const double sum = score + gumbel(bits);
    if (sum > highest) {
      highest = sum;
      winner = tokens_[i];
    }
  }
  return winner;
}

void Candidates::rank(const ScannedRow& row, int64_t top_count) {
  collect(row, distance_of_rank(row, top_count));
  const auto is_before = [&](int32_t left, int32_t right) {
    const float left_score = row.scores[left], right_score = row.scores[right];
    return left_score > right_score || (left_score == right_score && left < right);
  };
  std::partial_sort(tokens_.begin(), tokens_.begin() + top_count, tokens_.begin() + count_, is_before);
}

}  // namespace weft
