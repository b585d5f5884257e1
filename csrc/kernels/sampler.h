// Samples a token from a row of logits, in the order of operations that src/weft/sampling/reference.py defines.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/candidates.h"
#include "program/pool.h"

namespace weft {

// The sampling parameters of a request.
struct RowSettings {
  bool is_known = false;
  Parameters parameters;
  std::vector<int64_t> biased;   // token ids
  std::vector<double> biases;
  int64_t min_tokens = 0;
  std::vector<int64_t> ends;     // end tokens, forbidden before min_tokens
  bool has_grammar = false;
};

enum class Verdict : uint8_t {
  good = 0,
  not_a_number = 1,    // NaN or infinite logits
  forbidden = 2,       // every token is forbidden
  overflow = 3,        // logits are finite, but not after the penalties
};

struct SampleTask {
  const float* logits;
  int64_t vocabulary;
  double temperature;
  uint64_t seed;
  int64_t output_index;
  const RowSettings* settings;   // null: of the sampling parameters, only the temperature applies
  const uint8_t* allowed;        // bits of the tokens that the grammar allows, or null
  const int32_t* history;        // prompt and output tokens so far
  int64_t length;
  int64_t prompt_length;
};

// The logprob of a token and the most likely tokens with their logprobs, from the unmodified logits.
struct ScoreTask {
  const float* logits;
  int64_t vocabulary;
  int64_t token;
  int64_t top_count;   // at most the vocabulary size
  double* logprob;
  int64_t* top_tokens;
  double* top_logprobs;
};

// Scratch memory of one thread, allocated at first use.
class SamplerScratch {
 public:
  Verdict sample(const SampleTask& task, int64_t& token);
  void score(const ScoreTask& task);

 private:
  ScannedRow scan(const float* scores, int64_t count);
  const float* shaped_scores(const SampleTask& task);
  void penalise(const SampleTask& task);
  void forbid_ends(const SampleTask& task);

  std::vector<float> maxima_;
  std::vector<float> scores_;
  std::vector<int32_t> counts_;   // occurrences of each token; all zero between uses
  std::vector<float> saved_end_scores_;
  Candidates candidates_;
};

}  // namespace weft
