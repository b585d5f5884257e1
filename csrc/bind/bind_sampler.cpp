#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bind/bindings.h"
#include "kernels/sampler.h"

namespace weft {
namespace {

void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

class Sampler {
 public:
  explicit Sampler(Pool& pool) : pool_(pool), scratch_(static_cast<size_t>(pool.threads())) {}

  void set_row(int64_t row, const std::vector<double>& parameters, std::vector<int64_t> biased, std::vector<double> biases,
               int64_t min_tokens, std::vector<int64_t> ends, bool has_grammar) {
    require(row >= 0 && row < (int64_t{1} << 31), "row must be between 0 and 2^31 - 1");
    require(parameters.size() * sizeof(double) == sizeof(Parameters), "parameters must have one number for each of struct Parameters");
    require(biased.size() == biases.size(), "biased and biases must have the same length");
    for (const auto* tokens : {&biased, &ends})
      require(tokens->empty() || *std::min_element(tokens->begin(), tokens->end()) >= 0, "token ids must not be negative");
    if (static_cast<size_t>(row) >= settings_.size()) settings_.resize(static_cast<size_t>(row) + 1);
    RowSettings& settings = settings_[static_cast<size_t>(row)];
    settings = {true, {}, std::move(biased), std::move(biases), min_tokens, std::move(ends), has_grammar};
    std::memcpy(&settings.parameters, parameters.data(), sizeof(Parameters));
  }

  void sample(Array<const float, 2> logits, Array<const int64_t, 1> rows, Array<const int64_t, 1> positions,
              Array<const int64_t, 1> output_indices, Array<const uint64_t, 1> seeds, Array<const double, 1> temperatures,
              Array<const bool, 1> is_plain, Array<const int32_t, 2> history, Array<const int64_t, 1> prompt_lengths,
              Array<const int64_t, 1> masked, Array<const uint8_t, 2> allowed, Array<const int64_t, 1> top_counts,
              Array<int64_t, 1> tokens, Array<uint8_t, 1> verdicts, Array<double, 1> logprobs, Array<int64_t, 2> top_tokens,
              Array<double, 2> top_logprobs) {
    const size_t entries = logits.shape(0);
    const int64_t vocabulary = static_cast<int64_t>(logits.shape(1));
    require(vocabulary > 0 && vocabulary < (int64_t{1} << 31), "logits must be [entries, vocabulary], with a vocabulary below 2^31");
    for (const size_t length : {rows.size(), positions.size(), output_indices.size(), seeds.size(), temperatures.size(), is_plain.size(),
                                top_counts.size(), tokens.size(), verdicts.size()})
      require(length == entries, "every array must have one value for each entry");
    require(masked.size() == allowed.shape(0) && (masked.size() == 0 || static_cast<int64_t>(allowed.shape(1)) * 8 >= vocabulary),
            "a mask must have one bit for each token");
    tasks_.clear();
    scores_.clear();
    for (size_t entry = 0; entry < entries; entry++) {
      const int64_t row = rows(entry), length = positions(entry);
      require(row >= 0 && static_cast<size_t>(row) < std::min(history.shape(0), prompt_lengths.size()), "a row is past the history");
      require(length >= 0 && static_cast<size_t>(length) <= history.shape(1), "a position is past the end of its row");
      const int32_t* row_history = history.data() + static_cast<size_t>(row) * history.shape(1);
      tasks_.push_back({logits.data() + entry * logits.shape(1), vocabulary, temperatures(entry), seeds(entry), output_indices(entry),
                        is_plain(entry) ? nullptr : settings_of(row, vocabulary), nullptr, row_history, length, prompt_lengths(static_cast<size_t>(row))});
      scores_.push_back(score_task(tasks_.back().logits, vocabulary, entry, top_counts(entry), logprobs, top_tokens, top_logprobs));
    }
    for (size_t i = 0; i < masked.size(); i++) {
      require(masked(i) >= 0 && static_cast<size_t>(masked(i)) < entries, "a mask belongs to no entry");
      tasks_[static_cast<size_t>(masked(i))].allowed = allowed.data() + i * allowed.shape(1);
    }
    int64_t* chosen = tokens.data();
    uint8_t* statuses = verdicts.data();
    nb::gil_scoped_release release;
    pool_.run(static_cast<int64_t>(entries), [&](int64_t entry, int worker) {
      SamplerScratch& scratch = scratch_[static_cast<size_t>(worker)];
      statuses[entry] = static_cast<uint8_t>(scratch.sample(tasks_[entry], chosen[entry]));
      ScoreTask& score = scores_[entry];
      if (score.logprob == nullptr) return;
      score.token = chosen[entry];
      scratch.score(score);
    });
  }

  void score(Array<const float, 2> logits, Array<const int64_t, 1> tokens, int64_t top_count, Array<double, 1> logprobs,
             Array<int64_t, 2> top_tokens, Array<double, 2> top_logprobs) {
    const size_t entries = logits.shape(0);
    const int64_t vocabulary = static_cast<int64_t>(logits.shape(1));
    require(tokens.size() == entries && top_count >= 0, "there must be one token for each row of logits, and top_count must not be negative");
    scores_.clear();
    for (size_t entry = 0; entry < entries; entry++) {
      const float* row = logits.data() + entry * logits.shape(1);
      scores_.push_back(score_task(row, vocabulary, entry, top_count, logprobs, top_tokens, top_logprobs));
      require(tokens(entry) >= 0 && tokens(entry) < vocabulary, "a token to score is past the vocabulary");
      scores_.back().token = tokens(entry);
    }
    nb::gil_scoped_release release;
    pool_.run(static_cast<int64_t>(entries), [&](int64_t entry, int worker) { scratch_[static_cast<size_t>(worker)].score(scores_[entry]); });
  }

 private:
  const RowSettings* settings_of(int64_t row, int64_t vocabulary) const {
    require(static_cast<size_t>(row) < settings_.size() && settings_[static_cast<size_t>(row)].is_known, "set_row must come before the row is sampled");
    const RowSettings& settings = settings_[static_cast<size_t>(row)];
    const bool fits = settings.biased.empty() || *std::max_element(settings.biased.begin(), settings.biased.end()) < vocabulary;
    require(fits, "a logit_bias lies past the vocabulary");
    return &settings;
  }

  static ScoreTask score_task(const float* row, int64_t vocabulary, size_t entry, int64_t top_count, Array<double, 1>& logprobs,
                              Array<int64_t, 2>& top_tokens, Array<double, 2>& top_logprobs) {
    if (top_count < 0) return {};
    const bool fits = entry < logprobs.size() && entry < top_tokens.shape(0) && entry < top_logprobs.shape(0) &&
                      static_cast<size_t>(top_count) <= std::min(top_tokens.shape(1), top_logprobs.shape(1)) && top_count <= vocabulary;
    require(fits, "the output arrays are too small for the requested logprobs");
    return {row, vocabulary, 0, top_count, logprobs.data() + entry, top_tokens.data() + entry * top_tokens.shape(1),
            top_logprobs.data() + entry * top_logprobs.shape(1)};
  }

  Pool& pool_;
  std::vector<SamplerScratch> scratch_;   // per worker
  std::vector<RowSettings> settings_;     // per row
  std::vector<SampleTask> tasks_;
  std::vector<ScoreTask> scores_;
};

}  // namespace

void bind_sampler(nb::module_& module) {
  nb::class_<Sampler>(module, "Sampler", "Samples tokens from logits on a pool of threads; used by weft.backends.cpu.native_sampler.")
      .def(nb::init<Pool&>(), nb::arg("pool"), nb::keep_alive<1, 2>())
      .def("set_row", &Sampler::set_row, nb::arg("row"), nb::arg("parameters"), nb::arg("biased"), nb::arg("biases"), nb::arg("min_tokens"),
           nb::arg("ends"), nb::arg("has_grammar"))
      .def("sample", &Sampler::sample, nb::arg("logits").noconvert(), nb::arg("rows").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("output_indices").noconvert(), nb::arg("seeds").noconvert(), nb::arg("temperatures").noconvert(),
           nb::arg("is_plain").noconvert(), nb::arg("history").noconvert(), nb::arg("prompt_lengths").noconvert(),
           nb::arg("masked").noconvert(), nb::arg("allowed").noconvert(), nb::arg("top_counts").noconvert(), nb::arg("tokens").noconvert(),
           nb::arg("verdicts").noconvert(), nb::arg("logprobs").noconvert(), nb::arg("top_tokens").noconvert(),
           nb::arg("top_logprobs").noconvert())
      .def("score", &Sampler::score, nb::arg("logits").noconvert(), nb::arg("tokens").noconvert(), nb::arg("top_count"),
           nb::arg("logprobs").noconvert(), nb::arg("top_tokens").noconvert(), nb::arg("top_logprobs").noconvert());
}

}  // namespace weft
