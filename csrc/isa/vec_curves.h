// Vector functions: e^x, 2^x and tanh, with the same operations on all lanes.
#pragma once

#include "isa/vec.h"

namespace weft::WEFT_ISA {
namespace {
namespace vec {

constexpr float one_by_log_2 = 1.44269504f;

// Number of vectors that go through each operation together, as many as fit into registers. With one vector, each
// operation would wait for the previous one, and the processor would idle.
constexpr int chains_at_once = lanes == 16 ? 4 : 2;

// e^x to about 1 ulp; correct for subnormal and infinite results and for NaN. Construct it before a loop: its
// constants then stay in registers. Otherwise the compiler loads a dozen of them for each vector.
class Exponential {
 public:
  template <int count>
  __attribute__((always_inline)) void operator()(Vec (&x)[count]) const {
    Vec n[count], p[count];
    // Outside these bounds the result is 0 or infinite. The bound is the first argument, so that a NaN in x stays: max
    // and min return the second argument if either is NaN.
    each<count>([&](int k) { x[k] = max(least_, min(most_, x[k])); });
    each<count>([&](int k) { n[k] = round(x[k] * one_by_log_2_); });
    each<count>([&](int k) { x[k] = fnma(n[k], first_log_2_, x[k]); });
    each<count>([&](int k) { x[k] = fnma(n[k], second_log_2_, x[k]); });   // e^x is now between 0.7 and 1.42
    each<count>([&](int k) { p[k] = fma(fifth_, x[k], fourth_); });
    each<count>([&](int k) { p[k] = fma(p[k], x[k], third_); });
    each<count>([&](int k) { p[k] = fma(p[k], x[k], second_); });
    each<count>([&](int k) { p[k] = fma(p[k], x[k], first_); });
    each<count>([&](int k) { p[k] = fma(p[k], x[k] * x[k], x[k]) + one_; });
    each<count>([&](int k) { x[k] = times_power_of_two(p[k], n[k]); });
  }

 private:
  static Vec kept(float x) { return in_register(all(x)); }

  const Vec least_ = kept(-104.0f), most_ = kept(89.0f), one_ = kept(1.0f), one_by_log_2_ = kept(one_by_log_2);
  // log 2 in two parts: the first has so few bits that n times it is exact
  const Vec first_log_2_ = kept(0.693359375f), second_log_2_ = kept(-2.12194440e-4f);
  const Vec first_ = kept(0.49999994f), second_ = kept(0.1666652f), third_ = kept(0.041668393f), fourth_ = kept(0.008368781f),
            fifth_ = kept(0.0013814467f);
};

inline Vec exp(Vec x) {
  Vec one[1] = {x};
  Exponential()(one);
  return one[0];
}

// 2^x for x <= 0 (or NaN), to about 2 ulp and in half the time, for softmax weights. Results below 2^-125 are 0: such
// weights do not matter, and subnormals slow some processors down a hundredfold.
inline Vec exp2_up_to_0(Vec x) {
#if defined(WEFT_AVX512)
  const Vec n = round(x), r = x - n;
#else
  // The low bits of this large sum are n + 127: the exponent of 2^n.
  const Vec large = all(0x1.8p23f + 127.0f), sum = x + large, r = x - (sum - large);
#endif
  Vec p = fma(all(0.0013264727f), r, all(0.009671513f));
  p = fma(p, r, all(0.055507336f));
  p = fma(p, r, all(0.24022242f));
  p = fma(p, r, all(0.693147f));
  p = fma(p, r, all(1.0f));
#if defined(WEFT_AVX512)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, all(-125.0f), _CMP_NLT_UQ), p, n);
#else
  return where_less(x, all(-125.0f), all(0.0f), p * shifted_bits(sum));
#endif
}

// tanh(x) to about 2 ulp.
inline Vec tanh(Vec x) {
  const Vec size = magnitude(x), square = x * x;
  Vec p = fma(all(-0.005704984f), square, all(0.020639084f));
  p = fma(p, square, all(-0.053739715f));
  p = fma(p, square, all(0.13331442f));
  p = fma(p, square, all(-0.3333328f));
  const Vec near = fma(p * square, x, x);   // used for small x, where 1 - 2 / (...) would lose digits by cancellation
  const Vec far = with_sign_of(all(1.0f) - all(2.0f) / (exp(size + size) + all(1.0f)), x);
  return where_less(size, all(0.625f), near, far);
}

}  // namespace vec
}  // namespace
}  // namespace weft::WEFT_ISA
