#include "kernels/sampler.h"

#include <cmath>
#include <cstring>

#include "kernels/noise.h"

namespace weft {

ScannedRow SamplerScratch::scan(const float* scores, int64_t count) {
  maxima_.resize(static_cast<size_t>(maxima_count(count)));
  return {scores, count, maxima_.data(), kernels().scan_scores(scores, count, maxima_.data())};
}

// Shapes the scores if the request changes them, then draws. Filters draw from the candidates, others from the whole row.
Verdict SamplerScratch::sample(const SampleTask& task, int64_t& token) {
  ScannedRow row = scan(task.logits, task.vocabulary);
  token = row.scan.token;
  if (row.scan.has_nan || !std::isfinite(row.scan.best)) return Verdict::not_a_number;
  if (task.settings != nullptr || task.allowed != nullptr) {
    const float* shaped = shaped_scores(task);
    if (shaped != task.logits) row = scan(shaped, task.vocabulary);
    token = row.scan.token;
    if (row.scan.has_nan || row.scan.best == HUGE_VALF) return Verdict::overflow;
    if (row.scan.best == -HUGE_VALF) return Verdict::forbidden;
  }
  if (task.temperature <= 0.0) return Verdict::good;
  const uint64_t key = noise_key(task.seed, task.output_index);
  if (task.settings == nullptr || !task.settings->parameters.has_filters()) {
    token = kernels().draw_scores(row.scores, row.count, row.scan.best, task.temperature, key, row.scan.token);
  } else {
    token = candidates_.draw(row, task.temperature, task.settings->parameters, key);
  }
  return Verdict::good;
}

// Returns the scores after mask, penalties, biases and min_tokens: a changed copy of the logits, or the logits
// themselves if nothing changes them.
const float* SamplerScratch::shaped_scores(const SampleTask& task) {
  const RowSettings* settings = task.settings;
  const bool forbids_ends = settings != nullptr && task.output_index < settings->min_tokens;
  const bool changes = settings != nullptr && (settings->parameters.has_penalties() || !settings->biased.empty() || forbids_ends);
  if (task.allowed == nullptr && !changes) return task.logits;
  scores_.resize(static_cast<size_t>(task.vocabulary));
  if (task.allowed != nullptr)
    kernels().mask_scores(task.logits, task.vocabulary, task.allowed, scores_.data());
  else
    std::memcpy(scores_.data(), task.logits, static_cast<size_t>(task.vocabulary) * sizeof(float));
  if (!changes) return scores_.data();
  if (settings->parameters.has_penalties()) penalise(task);
  for (size_t i = 0; i < settings->biased.size(); i++) {
    float& score = scores_[static_cast<size_t>(settings->biased[i])];
    score = static_cast<float>(static_cast<double>(score) + settings->biases[i]);
  }
  if (forbids_ends) forbid_ends(task);
  return scores_.data();
}

// The repetition penalty scales the scores of prompt and output tokens. Frequency and presence penalties are subtracted
// from the scores of output tokens.
void SamplerScratch::penalise(const SampleTask& task) {
  const Parameters& parameters = task.settings->parameters;
  counts_.resize(static_cast<size_t>(task.vocabulary));
  if (parameters.repetition_penalty != 1.0) {
    const float penalty = static_cast<float>(parameters.repetition_penalty);
    for (int64_t i = 0; i < task.length; i++) {
      const int32_t token = task.history[i];
      if (counts_[token]++ != 0) continue;
      scores_[token] = scores_[token] > 0.0f ? scores_[token] / penalty : scores_[token] * penalty;
    }
    for (int64_t i = 0; i < task.length; i++) counts_[task.history[i]] = 0;
  }
  if (parameters.frequency_penalty != 0.0 || parameters.presence_penalty != 0.0) {
    for (int64_t i = task.prompt_length; i < task.length; i++) counts_[task.history[i]]++;
    for (int64_t i = task.prompt_length; i < task.length; i++) {
      const int32_t token = task.history[i];
      if (counts_[token] == 0) continue;
      const double taken = parameters.frequency_penalty * counts_[token] + parameters.presence_penalty;
      scores_[token] = static_cast<float>(static_cast<double>(scores_[token]) - taken);
      counts_[token] = 0;
    }
  }
}

// Forbids the end tokens. If no other token is left, a grammar is complete and allows only end tokens: then their
// scores are restored.
void SamplerScratch::forbid_ends(const SampleTask& task) {
  const std::vector<int64_t>& ends = task.settings->ends;
  saved_end_scores_.clear();
  for (const int64_t end : ends) {
    if (end >= task.vocabulary) continue;
    saved_end_scores_.push_back(scores_[static_cast<size_t>(end)]);
    scores_[static_cast<size_t>(end)] = -HUGE_VALF;
  }
  if (!task.settings->has_grammar || scan(scores_.data(), task.vocabulary).scan.best > -HUGE_VALF) return;
  size_t next = 0;
  for (const int64_t end : ends)
    if (end < task.vocabulary) scores_[static_cast<size_t>(end)] = saved_end_scores_[next++];
}

// Log-softmax of the unmodified logits, for one token and the most likely tokens.
void SamplerScratch::score(const ScoreTask& task) {
  const ScannedRow row = scan(task.logits, task.vocabulary);
  if (row.scan.has_nan || !std::isfinite(row.scan.best)) {
    *task.logprob = NAN;
    for (int64_t i = 0; i < task.top_count; i++) {
      task.top_tokens[i] = i;
      task.top_logprobs[i] = NAN;
    }
    return;
  }
  const double sum = kernels().sum_exp(task.logits, task.vocabulary, row.scan.best);
  const double normaliser = static_cast<double>(row.scan.best) + std::log(sum);
  *task.logprob = static_cast<double>(task.logits[task.token]) - normaliser;
  if (task.top_count == 0) return;
  candidates_.rank(row, task.top_count);
  for (int64_t i = 0; i < task.top_count; i++) {
    task.top_tokens[i] = candidates_.token(i);
    task.top_logprobs[i] = static_cast<double>(task.logits[task.top_tokens[i]]) - normaliser;
  }
}

}  // namespace weft
