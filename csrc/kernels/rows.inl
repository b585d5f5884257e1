// Operations on one activation row: norms, gates, RoPE, routing.
#include "isa/vec_curves.h"

namespace weft::WEFT_ISA {
namespace {

// x / (1 + e^-t); with t = x this is silu.
class TimesSigmoid {
 public:
  template <int count>
  __attribute__((always_inline)) void operator()(vec::Vec (&x)[count], const vec::Vec (&t)[count]) const {
    vec::Vec powers[count];
    vec::each<count>([&](int k) { powers[k] = -t[k]; });
    exp_(powers);
    vec::each<count>([&](int k) { x[k] = x[k] / (one_ + powers[k]); });
  }

 private:
  const vec::Exponential exp_{};
  const vec::Vec one_ = vec::in_register(vec::all(1.0f));
};

// x * Phi(x), where Phi is the normal distribution, to about 2e-7. It equals max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2).
// In this form a negative x loses no digits by cancellation. A polynomial approximates erfc with an absolute error of
// 1.5e-7 (Abramowitz and Stegun, 7.1.26).
class Gelu {
 public:
  template <int count>
  __attribute__((always_inline)) void operator()(vec::Vec (&x)[count]) const {
    vec::Vec t[count], p[count], e[count];
    vec::each<count>([&](int k) { e[k] = x[k] * x[k] * vec::all(-0.5f); });
    exp_(e);
    vec::each<count>([&](int k) {
      t[k] = vec::all(1.0f) / vec::fma(vec::all(0.3275911f * 0.70710678f), vec::magnitude(x[k]), vec::all(1.0f));
    });
    vec::each<count>([&](int k) { p[k] = vec::fma(vec::all(1.061405429f), t[k], vec::all(-1.453152027f)); });
    vec::each<count>([&](int k) { p[k] = vec::fma(p[k], t[k], vec::all(1.421413741f)); });
    vec::each<count>([&](int k) { p[k] = vec::fma(p[k], t[k], vec::all(-0.284496736f)); });
    vec::each<count>([&](int k) { p[k] = vec::fma(p[k], t[k], vec::all(0.254829592f)); });
    vec::each<count>([&](int k) {
      const vec::Vec half = vec::magnitude(x[k]) * vec::all(0.5f), least = vec::where_less(x[k], vec::all(0.0f), vec::all(0.0f), x[k]);
      x[k] = vec::fnma(half * t[k], p[k] * e[k], least);
    });
  }

 private:
  const vec::Exponential exp_{};
};

template <int count, typename Lanes>
inline void load_each(const float* from, Lanes n, vec::Vec (&into)[count]) {
  vec::each<count>([&](int k) { into[k] = vec::load(from + k * vec::lanes, n); });
}

template <int count, typename Lanes>
inline void multiply_each(vec::Vec (&x)[count], const float* with, Lanes n) {
  vec::each<count>([&](int k) { x[k] = x[k] * vec::load(with + k * vec::lanes, n); });
}

// Applies the prologue to a row, a few vectors at a time. Calls use(make), and `use` calls make(i, n, into) as often as
// it needs. `make` computes the elements from i on, and fills the array `into` with vectors of n lanes each. An
// incomplete last vector needs its own call; its unused lanes are zero, unless the row has a NaN.
template <typename Use>
inline void with_values(const RowInput& input, int64_t columns, Use&& use) {
  const float *row = input.row, *other = input.other;
  switch (input.prologue) {
    case Prologue::nothing: return use([=](int64_t i, auto n, auto& into) { load_each(row + i, n, into); });
    case Prologue::rms_norm: {
      const float sum = vec::sum_row(columns, [&](vec::Vec squares, int64_t i, auto n) {
        const vec::Vec x = vec::load(row + i, n);
        return vec::fma(x, x, squares);
      });
      const vec::Vec factor = vec::all(1.0f / std::sqrt(sum / static_cast<float>(columns) + input.epsilon));
      return use([=](int64_t i, auto n, auto& into) {
        load_each(row + i, n, into);
        for (vec::Vec& x : into) x = x * factor;
        multiply_each(into, other + i, n);
      });
    }
    case Prologue::silu_mul: {
      const TimesSigmoid times_sigmoid;
      return use([&](int64_t i, auto n, auto& into) {
        load_each(row + i, n, into);
        times_sigmoid(into, into);
        multiply_each(into, other + i, n);
      });
    }
    case Prologue::gelu_tanh:
    case Prologue::gelu_tanh_mul: {
      // 0.5 x (1 + tanh(t / 2)) = x * sigmoid(t). The sigmoid is used because 1 + tanh loses digits where tanh is near
      // -1.
      const TimesSigmoid times_sigmoid;
      const bool multiplies = is_gated(input.prologue);
      return use([&](int64_t i, auto n, auto& into) {
        std::remove_reference_t<decltype(into)> t;
        load_each(row + i, n, into);
        for (int k = 0; k < static_cast<int>(sizeof into / sizeof into[0]); k++)
          t[k] = vec::all(2.0f * 0.7978845608028654f) * vec::fma(vec::all(0.044715f) * into[k] * into[k], into[k], into[k]);
        times_sigmoid(into, t);
        if (multiplies) multiply_each(into, other + i, n);
      });
    }
    case Prologue::gelu:
    case Prologue::gelu_mul: {
      const Gelu gelu;
      const bool multiplies = is_gated(input.prologue);
      return use([&](int64_t i, auto n, auto& into) {
        load_each(row + i, n, into);
        gelu(into);
        if (multiplies) multiply_each(into, other + i, n);
      });
    }
    case Prologue::tanh:
      return use([=](int64_t i, auto n, auto& into) {
        load_each(row + i, n, into);
        for (vec::Vec& x : into) x = vec::tanh(x);
      });
    case Prologue::layer_norm: {
      const float count = static_cast<float>(columns), *bias = input.bias;
      const vec::Vec mean = vec::all(vec::sum_row(columns, [&](vec::Vec sum, int64_t i, auto n) { return sum + vec::load(row + i, n); }) / count);
      const float squares = vec::sum_row(columns, [&](vec::Vec sum, int64_t i, auto n) {
        vec::Vec x = vec::load(row + i, n) - mean;
        if constexpr (!std::is_same_v<decltype(n), vec::Full>) {   // the unused lanes are not part of the row
          static const float ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
          x = x * vec::load(ones, n);
        }
        return vec::fma(x, x, sum);
      });
      const vec::Vec factor = vec::all(1.0f / std::sqrt(squares / count + input.epsilon));
      return use([=](int64_t i, auto n, auto& into) {
        load_each(row + i, n, into);
        for (vec::Vec& x : into) x = (x - mean) * factor;
        multiply_each(into, other + i, n);
        if (bias) vec::each<sizeof into / sizeof into[0]>([&](int k) { into[k] = into[k] + vec::load(bias + i + k * vec::lanes, n); });
      });
    }
  }
}

// Writes a row after its prologue, as floats.
void make_row(const RowInput& input, int64_t columns, float* out) {
  with_values(input, columns, [&](auto make) {
    constexpr int some = vec::chains_at_once;
    int64_t i = 0;
    for (; i + some * vec::lanes <= columns; i += some * vec::lanes) {
      vec::Vec values[some];
      make(i, vec::Full{}, values);
      vec::each<some>([&](int k) { vec::store(out + i + k * vec::lanes, values[k]); });
    }
    vec::for_each(columns - i, [&](int64_t k, auto n) {
      vec::Vec values[1];
      make(i + k, n, values);
      vec::store(out + i + k, values[0], n);
    });
  });
}

void add_scaled(const float* left, const float* right, float scale, int64_t columns, float* out) {
  const vec::Vec factor = vec::all(scale);
  vec::for_each(columns, [&](int64_t i, auto n) {
    vec::store(out + i, vec::fma(factor, vec::load(right + i, n), vec::load(left + i, n)), n);
  });
}

void scale_and_cap(float* row, int64_t columns, float scale, float cap) {
  vec::for_each(columns, [&](int64_t i, auto n) {
    vec::Vec x = vec::load(row + i, n) * vec::all(scale);
    if (cap != 0.0f) x = vec::all(cap) * vec::tanh(x / vec::all(cap));
    vec::store(row + i, x, n);
  });
}

// Applies RoPE to one head of one token.
void rotate(const float* head, int64_t head_size, int64_t pairs, bool interleaved, const float* cosine, const float* sine, float* out) {
  if (interleaved) {
    vec::for_each(2 * pairs, [&](int64_t i, auto n) {
      const vec::Vec x = vec::load(head + i, n);
      const vec::Vec c = vec::load_twice(cosine + i / 2, n / 2), s = vec::negate_even(vec::load_twice(sine + i / 2, n / 2));
      vec::store(out + i, vec::fma(vec::swap_neighbours(x), s, x * c), n);
    });
  } else {
    vec::for_each(pairs, [&](int64_t i, auto n) {
      const vec::Vec left = vec::load(head + i, n), right = vec::load(head + pairs + i, n);
      const vec::Vec c = vec::load(cosine + i, n), s = vec::load(sine + i, n);
      vec::store(out + i, vec::fnma(right, s, left * c), n);
      vec::store(out + pairs + i, vec::fma(left, s, right * c), n);
    });
  }
  for (int64_t i = 2 * pairs; i < head_size; i++) out[i] = head[i];
}

// Chooses the experts of one token, and computes their routing weights.
void route(const float* logits, int64_t experts, int64_t per_token, bool normalise, int32_t* chosen, float* shares) {
  float largest = logits[0];
  for (int64_t i = 1; i < experts; i++) largest = logits[i] > largest ? logits[i] : largest;
  const vec::Vec base = vec::all(largest);
  float all = 0.0f, taken = 0.0f;
  for (int64_t i = 0; i < experts; i++) all += vec::first(vec::exp(vec::all(logits[i]) - base));
  for (int64_t place = 0; place < per_token; place++) {
    // The best expert that is not chosen yet, the first at a tie. With NaN logits the order is arbitrary, but no expert
    // is chosen twice.
    int64_t best = -1;
    for (int64_t i = 0; i < experts; i++) {
      bool free = true;
      for (int64_t k = 0; k < place; k++) free = free && chosen[k] != i;
      if (free && (best < 0 || logits[i] > logits[best])) best = i;
    }
    chosen[place] = static_cast<int32_t>(best);
    shares[place] = vec::first(vec::exp(vec::all(logits[best]) - base)) / all;
    taken += shares[place];
  }
  for (int64_t place = 0; place < per_token && normalise; place++) shares[place] /= taken;
}

}  // namespace
}  // namespace weft::WEFT_ISA
