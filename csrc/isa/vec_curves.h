// Curves of vectors: e^x, 2^x and tanh, step by step the same on all lanes.
#pragma once

#include "isa/vec.h"

namespace weft::WEFT_ISA {
namespace {
namespace vec {

constexpr float one_by_log_2 = 1.44269504f;

// Vectors that take every step of a calculation together: a processor looks ahead only so far, and in one long chain of steps it finds
// too little to do. As many as there are registers for.
constexpr int chains_at_once = lanes == 16 ? 4 : 2;

// e^x to about 1 ulp; subnormal and infinite results and NaN as they should be. One of these is made before a loop: its numbers stay in
// registers then, where the compiler would load a dozen of them for every vector.
class Exponential {
 public:
  template <int count>
  __attribute__((always_inline)) void operator()(Vec (&x)[count]) const {
    Vec n[count], p[count];
    // Beyond these the result is 0 or infinite. The bound first: max and min pass on a NaN that comes second.
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
  const Vec first_log_2_ = kept(0.693359375f), second_log_2_ = kept(-2.12194440e-4f);   // two parts, the first exact in few bits
  const Vec first_ = kept(0.49999994f), second_ = kept(0.1666652f), third_ = kept(0.041668393f), fourth_ = kept(0.008368781f),
            fifth_ = kept(0.0013814467f);
};

inline Vec exp(Vec x) {
  Vec one[1] = {x};
  Exponential()(one);
  return one[0];
}

// 2^x for x up to 0 (or NaN), to about 2 ulp and in half the time: the weights of a softmax. What would be less than 2^-125 is 0, since a
// subnormal weight is worth nothing and slows some processors down a hundredfold.
inline Vec exp2_up_to_0(Vec x) {
#if defined(WEFT_AVX512)
  const Vec n = round(x), r = x - n;
#else
  // Added to so large a number, n + 127 stands in its lowest bits: the exponent of 2^n.
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

// To about 2 ulp.
inline Vec tanh(Vec x) {
  const Vec size = magnitude(x), square = x * x;
  Vec p = fma(all(-0.005704984f), square, all(0.020639084f));
  p = fma(p, square, all(-0.053739715f));
  p = fma(p, square, all(0.13331442f));
  p = fma(p, square, all(-0.3333328f));
  const Vec near = fma(p * square, x, x);   // where 1 - 2 / (...) would cancel
  const Vec far = with_sign_of(all(1.0f) - all(2.0f) / (exp(size + size) + all(1.0f)), x);
  return where_less(size, all(0.625f), near, far);
}

}  // namespace vec
}  // namespace
}  // namespace weft::WEFT_ISA
