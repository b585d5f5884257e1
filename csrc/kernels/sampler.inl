// The sampler's passes over a whole row of scores, written with compiler vector types. Every instruction set gives the
// same result: there is no fused multiply-add, and sums have eight lanes for any vector width.
#include "isa/vec_scores.h"
#include "kernels/noise.h"

namespace weft::WEFT_ISA {
namespace {

// Calls work(scores, first token) for every `step` scores. If fewer are left at the end, they are padded with minus
// infinity.
template <int step, typename Function>
inline void in_steps(const float* scores, int64_t count, Function&& work) {
  int64_t token = 0;
  for (; token + step <= count; token += step) work(scores + token, token);
  if (token == count) return;
  float last[step];
  for (int lane = 0; lane < step; lane++) last[lane] = token + lane < count ? scores[token + lane] : -infinity;
  work(static_cast<const float*>(last), token);
}

// exp for values <= 0, to a few ulp; 0 if the result would be subnormal.
inline Doubles exp_of(Doubles value) {
  constexpr double round = 0x1.8p52, lowest = -708.0;
  const Doubles bounded = value > lowest ? value : lowest - Doubles{};
  const Doubles shifted = bounded * 1.4426950408889634 + round;   // its low bits: `bounded` / ln 2, rounded to an integer
  const Doubles whole = shifted - round;
  const Doubles rest = bounded - whole * 0x1.62e42fefap-1 - whole * 0x1.cf79abc9e3b3ap-40;   // ln 2 in two parts
  // Taylor series up to the eleventh power, in pairs, to shorten the dependency chain.
  const Doubles square = rest * rest, fourth = square * square;
  const Doubles low = (1.0 + rest) + (0.5 + rest * (1.0 / 6)) * square;
  const Doubles middle = (1.0 / 24 + rest * (1.0 / 120)) + (1.0 / 720 + rest * (1.0 / 5040)) * square;
  const Doubles high = (1.0 / 40320 + rest * (1.0 / 362880)) + (1.0 / 3628800 + rest * (1.0 / 39916800)) * square;
  const Doubles sum = low + (middle + high * fourth) * fourth;
  const Doubles power = reinterpret_cast<Doubles>((reinterpret_cast<Words>(shifted) << 52) + (uint64_t{1023} << 52));
  return value > lowest ? sum * power : Doubles{};
}

// Finds the first token with the best score. Also writes the maxima of the sections, see kernels.h.
RowScan scan_scores(const float* scores, int64_t count, float* maxima) {
  constexpr int parts = maxima_lanes / narrow;
  Ints is_nan = {};
  for (int64_t first = 0, section = 0; first < count; first += maxima_section, section++) {
    Floats best[parts];
    for (Floats& part : best) part = -infinity - Floats{};
    const int64_t size = count - first < maxima_section ? count - first : maxima_section;
    in_steps<maxima_lanes>(scores + first, size, [&](const float* from, int64_t) {
      for (int part = 0; part < parts; part++) {
        const Floats values = load<Floats>(from + part * narrow);
        best[part] = values > best[part] ? values : best[part];
        is_nan |= values != values;
      }
    });
    std::memcpy(maxima + section * maxima_lanes, best, sizeof(best));
  }
  RowScan scan = {-infinity, 0, bits_of(is_nan) != 0};
  int64_t found = 0;
  for (int64_t i = 0, groups = maxima_count(count); i < groups; i++) {
    if (maxima[i] > scan.best) {
      scan.best = maxima[i];
      found = i;
    }
  }
  scan.token = found / maxima_lanes * maxima_section;
  while (scan.token < count && scores[scan.token] != scan.best) scan.token++;
  if (scan.token == count) scan.token = 0;   // all scores are NaN
  return scan;
}

// Copies the scores. Those of forbidden tokens become minus infinity.
void mask_scores(const float* scores, int64_t count, const uint8_t* allowed, float* out) {
  Ints lane_bits;
  for (int lane = 0; lane < narrow; lane++) lane_bits[lane] = 1 << lane;
  int64_t token = 0;
  for (; token + narrow <= count; token += narrow) {
    int32_t word = allowed[token / 8] >> token % 8;
    if (narrow > 8) word |= allowed[token / 8 + 1] << 8;
    const Ints truth = ((word + Ints{}) & lane_bits) != 0;
    const Floats kept = truth ? load<Floats>(scores + token) : -infinity - Floats{};
    std::memcpy(out + token, &kept, sizeof(kept));
  }
  for (; token < count; token++) out[token] = allowed[token / 8] >> token % 8 & 1 ? scores[token] : -infinity;
}

inline double sum_of_lanes(const Doubles* sums) {
  double lanes[8];
  std::memcpy(lanes, sums, sizeof(lanes));
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

double sum_exp(const float* scores, int64_t count, float best) {
  Doubles sums[8 / wide] = {};
  in_steps<8>(scores, count, [&](const float* from, int64_t) {
    for (int part = 0; part < 8 / wide; part++)
      sums[part] += exp_of(__builtin_convertvector(load<HalfFloats>(from + part * wide), Doubles) - static_cast<double>(best));
  });
  return sum_of_lanes(sums);
}

double sum_weights(const float* scores, int64_t count, float best, double factor) {
  Doubles sums[8 / wide] = {};
  in_steps<8>(scores, count, [&](const float* from, int64_t) {
    for (int part = 0; part < 8 / wide; part++)
      sums[part] += exp_of(__builtin_convertvector(load<HalfFloats>(from + part * wide) - best, Doubles) * factor);
  });
  return sum_of_lanes(sums);
}

// exp for values <= 0, to about seven digits.
inline Floats rough_exp_of(Floats value) {
  constexpr float round = 0x1.8p23f, lowest = -87.0f;
  const Floats bounded = value > lowest ? value : lowest - Floats{};
  const Floats shifted = bounded * 1.44269504f + round;
  const Floats whole = shifted - round;
  const Floats rest = bounded - whole * 0x1.63p-1f - whole * -2.12194440e-4f;
  const Floats square = rest * rest;
  const Floats low = (1.0f + rest) + (0.5f + rest * (1.0f / 6)) * square;
  const Floats high = (1.0f / 24 + rest * (1.0f / 120)) + square * (1.0f / 720);
  const Floats power = reinterpret_cast<Floats>((reinterpret_cast<Ints>(shifted) << 23) + (127 << 23));
  return value > lowest ? (low + high * (square * square)) * power : Floats{};
}

// kernels.h describes the result. near[i] sums the same weights as the total, but only those within near_distances[i].
double sum_weights_roughly(const float* scores, int64_t count, float best, float factor, double* near) {
  constexpr int steps = 16;   // after this many float additions, the sum goes to doubles
  Doubles totals[num_near + 1] = {};
  in_steps<steps * narrow>(scores, count, [&](const float* from, int64_t) {
    Floats sums[num_near + 1] = {};
    for (int step = 0; step < steps; step++) {
      const Floats value = (load<Floats>(from + step * narrow) - best) * factor;
      const Floats result = rough_exp_of(value);
      for (int i = 0; i < num_near; i++) sums[i] += value >= -near_distances[i] ? result : Floats{};
      sums[num_near] += result;
    }
    for (int i = 0; i <= num_near; i++) {
      HalfFloats halves[2];
      std::memcpy(halves, &sums[i], sizeof(halves));
      totals[i] += __builtin_convertvector(halves[0], Doubles) + __builtin_convertvector(halves[1], Doubles);
    }
  });
  const auto sum_of = [](Doubles lanes) {
    double sum = 0.0;
    for (int lane = 0; lane < wide; lane++) sum += lanes[lane];
    return sum;
  };
  for (int i = 0; i < num_near; i++) near[i] = sum_of(totals[i]);
  return sum_of(totals[num_near]);
}

// out[i] = exp(-below[i] * factor)
void weigh_each(const float* below, int64_t count, double factor, double* out) {
  int64_t i = 0;
  for (; i + wide <= count; i += wide) {
    const Doubles result = exp_of(__builtin_convertvector(load<HalfFloats>(below + i), Doubles) * -factor);
    std::memcpy(out + i, &result, sizeof(result));
  }
  if (i == count) return;
  float last[wide] = {};
  std::memcpy(last, below + i, static_cast<size_t>(count - i) * sizeof(float));
  const Doubles result = exp_of(__builtin_convertvector(load<HalfFloats>(last), Doubles) * -factor);
  std::memcpy(out + i, &result, static_cast<size_t>(count - i) * sizeof(double));
}

// Collects the tokens at most `limit` below the best score, in token order. Returns their number.
int64_t collect_scores(const float* scores, int64_t count, float best, float limit, int32_t* tokens, float* below) {
  int64_t found = 0;
  in_steps<narrow>(scores, count, [&](const float* from, int64_t token) {
    const Floats distances = best - load<Floats>(from);
    for (uint32_t bits = bits_of(distances <= limit); bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      if (token + lane >= count) break;
      tokens[found] = static_cast<int32_t>(token + lane);
      below[found++] = best - from[lane];
    }
  });
  return found;
}

// Returns the token with the highest score / temperature + Gumbel noise. The noise is a function of a uniform value u.
//
// A cheap test rejects most tokens before their noise is computed:
//   a token can win only if     gumbel(u) >= x, where x = highest sum so far - score / temperature;
//   gumbel(u) >= x only if      u <= exp(-x);
//   so the test is              log2(u) <= -x * log2(e).
// The test needs no logarithm. The bits of a float f > 0, read as an integer, are about (127 + log2(f)) * 2^23. The
// error in log2(f) is between -0.09 and 0, so the test never rejects a possible winner. For tokens that pass, the sum
// is computed exactly.
int64_t draw_scores(const float* scores, int64_t count, float best, double temperature, uint64_t key, int64_t likeliest) {
  constexpr float unit = 0x1p23f, log2e = 1.44269504f, margin = 0x1p-8f;
  // The test uses the upper 31 of 32 noise bits: a signed integer converts to float in one instruction on all CPUs.
  constexpr float noise_exponent = 127 + 31 + margin, never = (127 - 2) * unit;
  double highest = gumbel(noise_bits(key, likeliest));
  int64_t winner = likeliest;
  const double steepness = static_cast<double>(log2e * unit) / temperature;
  const float slope = steepness < 1e30 ? static_cast<float>(steepness) : 1e30f;
  float start = (noise_exponent - static_cast<float>(highest) * log2e) * unit;

  // Even and odd tokens are in separate vectors. The upper half of an even word and the upper half of an odd word are
  // then combined to one 64-bit word: two 32-bit lanes in token order.
  Words even, odd;
  for (int lane = 0; lane < wide; lane++) {
    even[lane] = key + (2 * static_cast<uint64_t>(lane) + 1) * noise_gamma;
    odd[lane] = even[lane] + noise_gamma;
  }
  const auto mixed = [](Words words) {
    words = (words ^ (words >> 30)) * noise_first;
    words = (words ^ (words >> 27)) * noise_second;
    return words ^ (words >> 31);
  };
  in_steps<narrow>(scores, count, [&](const float* from, int64_t token) {
    const Floats limits = start - (best - load<Floats>(from)) * slope;
    if (bits_of(limits > never) == 0) return;   // even with the largest noise no token here can win
    const uint64_t advance = static_cast<uint64_t>(token) * noise_gamma;
    const Words noise = mixed(even + advance) >> 32 | (mixed(odd + advance) & ~uint64_t{0xffffffff});
    const Floats halves = __builtin_convertvector(reinterpret_cast<Ints>(reinterpret_cast<Uints>(noise) >> 1), Floats);
    const Ints bounds = __builtin_convertvector(limits > 0.0f ? limits : Floats{}, Ints);
    for (uint32_t bits = bits_of(reinterpret_cast<Ints>(halves) <= bounds); bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      const double sum = -static_cast<double>(best - from[lane]) / temperature + gumbel(noise_bits(key, token + lane));
      if (sum > highest || (sum == highest && token + lane < winner)) {
        highest = sum;
        winner = token + lane;
        start = (noise_exponent - static_cast<float>(highest) * log2e) * unit;
      }
    }
  });
  return winner;
}

}  // namespace
}  // namespace weft::WEFT_ISA
