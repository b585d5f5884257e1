// Products of W4 in pairs, for processors that can add bytes while they multiply others: Zen 4 and 5.
//
// Of two inputs a and b with the weights v and w one product is enough, since (a + w) (b + v) = a v + b w + a b + v w. What is too much is
// a sum of activations, known when they become bytes, and one of weights, which the rows of a tile share. So inputs 0 to 15 of a group
// take half the multiplications, and additions instead, for which there are units that had nothing to do. Of every eight inputs the first
// four are a, the others b; v and w are codes less 8, and 128 is added to a + w, which the instruction takes for unsigned. Both factors are
// bytes since no activation is beyond 120. All numbers are whole: the sum of a group is the same as by one product for each input.
#pragma once

#include "isa/vec_bytes.h"

#if defined(WEFT_PAIRS)

namespace weft::WEFT_ISA {
namespace {
namespace pairs {

using bytes::Bytes;

// Constants in memory: there are hardly any registers for them. The tables are looked up by the lowest four bits.
constexpr int32_t nothing = 0, nibbles = 0x0f0f0f0f;
#define WEFT_FOUR_TIMES(...) {__VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__}
alignas(64) constexpr uint8_t less_8[64] =
    WEFT_FOUR_TIMES(248, 249, 250, 251, 252, 253, 254, 255, 0, 1, 2, 3, 4, 5, 6, 7);
alignas(64) constexpr uint8_t and_120[64] =
    WEFT_FOUR_TIMES(120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135);
#undef WEFT_FOUR_TIMES

inline Bytes zero() {
  Bytes a;
  asm("vpbroadcastd %1, %0" : "=v"(a) : "m"(nothing));
  return a;
}
inline Bytes only_nibbles(Bytes a) {
  asm("vpandd %1%{1to16%}, %0, %0" : "+v"(a) : "m"(nibbles));
  return a;
}
// Weights of two steps of a group: those of the first go in pairs.
struct Steps {
  Bytes v, w_and_128, first, last;

  Steps(Bytes in_pairs, Bytes others)
      : v(_mm512_permutexvar_epi8(in_pairs, bytes::load(less_8))),
        w_and_128(_mm512_permutexvar_epi8(_mm512_srli_epi16(in_pairs, 4), bytes::load(and_120))),
        first(only_nibbles(others)),
        last(only_nibbles(_mm512_srli_epi16(others, 4))) {}

  Bytes add_weights(Bytes sum) const { return _mm512_dpbusd_epi32(sum, w_and_128, v); }

  // In this order multiplications and additions come to both halves of the processor in equal numbers.
  Bytes add_products(Bytes sum, const int8_t* pairs, const int8_t* others) const {
    const auto four = [](const int8_t* from) -> const int8_t(&)[4] { return *reinterpret_cast<const int8_t(*)[4]>(from); };
    Bytes a, b;
    asm("vpdpbusd %[c]%{1to16%}, %[first], %[sum]\n\t"
        "vpbroadcastd %[from_a], %[a]\n\t"
        "vpbroadcastd %[from_b], %[b]\n\t"
        "vpaddb %[w], %[a], %[a]\n\t"
        "vpaddb %[v], %[b], %[b]\n\t"
        "vpdpbusd %[d]%{1to16%}, %[last], %[sum]\n\t"
        "vpdpbusd %[b], %[a], %[sum]"
        : [sum] "+&v"(sum), [a] "=&v"(a), [b] "=&v"(b)
        : [v] "v"(v), [w] "v"(w_and_128), [first] "v"(first), [last] "v"(last), [from_a] "m"(four(pairs)), [from_b] "m"(four(pairs + 4)),
          [c] "m"(four(others)), [d] "m"(four(others + 4)));
    return sum;
  }
};

// Sums of groups are joined as they are lifted (isa/vec_bytes.h): those of a block begin with what makes up for it, for all rows at once.
inline Bytes without_lifts(const uint8_t* group, int64_t groups) {
  const Bytes minus_lift = bytes::all_fours(-w4_lift & 0xffff);   // and nothing times the offset
  Bytes sum = zero();
  vec::each<scale_block_groups>([&](auto i) {
    if (i < groups) sum = _mm512_dpwssd_epi32(sum, minus_lift, bytes::load(group + i * w4_group_bytes + w4_codes_bytes));
  });
  return sum;
}

// `from` is the first of so many rows at this group; joins their sums with those of the block.
template <int rows>
inline void add_group(const RowGroup* from, const uint8_t* group, Bytes (&blocks)[rows][1]) {
  using vec::each;
  Bytes sums[rows], of_weights = zero();
  each<rows>([&](auto row) { sums[row] = bytes::all_fours(from[row].pairs_start); });
  each<2>([&](auto step) {
    const Steps weights(bytes::load(group + 64 * step), bytes::load(group + 64 * (step + 2)));
    of_weights = weights.add_weights(of_weights);
    each<rows>([&](auto row) {
      sums[row] = weights.add_products(sums[row], from[row].codes + 8 * step, from[row].codes + 8 * (step + 2));
    });
  });
  const Bytes factors = bytes::load(group + w4_codes_bytes);
  each<rows>([&](auto row) {
    blocks[row][0] = _mm512_dpwssd_epi32(blocks[row][0], _mm512_sub_epi32(sums[row], of_weights), factors);
  });
}

}  // namespace pairs
}  // namespace
}  // namespace weft::WEFT_ISA

#endif
