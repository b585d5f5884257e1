// W4 products in pairs of inputs, for processors that add bytes in parallel with multiplications: Zen 4 and 5.
//
// Two inputs a and b with weights v and w need only one product: (a + w) (b + v) = a v + b w + a b + v w. The last two
// terms are subtracted again. The term a b is computed when activations are quantised, the term v w once for all rows
// of a tile. So inputs 0 to 15 of a group need half the multiplications. The additions run on otherwise idle units.
//
// Of every eight inputs, the first four take the role of a, the last four the role of b. v and w are codes minus 8. 128
// is added to a + w, because the instruction reads that operand as unsigned. So the subtracted terms are (a + 128) b
// and (w + 128) v. Both factors fit a byte, because no activation exceeds 120. All numbers are integers, so the sum of
// a group is exactly the sum of one product per input.
#pragma once

#include "isa/vec_bytes.h"

#if defined(WEFT_PAIRS)

namespace weft::WEFT_ISA {
namespace {
namespace pairs {

using bytes::Bytes;

// Constants are read from memory, because registers are scarce. The tables map a 4-bit code to (code - 8) and to
// (code + 120).
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
// The weights of 16 of a group's 32 inputs. `in_pairs`: eight of inputs 0 to 15, multiplied in pairs. `others`: eight
// of inputs 16 to 31.
struct Steps {
  Bytes v, w_and_128, first, last;

  Steps(Bytes in_pairs, Bytes others)
      : v(_mm512_permutexvar_epi8(in_pairs, bytes::load(less_8))),
        w_and_128(_mm512_permutexvar_epi8(_mm512_srli_epi16(in_pairs, 4), bytes::load(and_120))),
        first(only_nibbles(others)),
        last(only_nibbles(_mm512_srli_epi16(others, 4))) {}

  Bytes add_weights(Bytes sum) const { return _mm512_dpbusd_epi32(sum, w_and_128, v); }

  // The order of the instructions spreads multiplications and additions evenly over both halves of the processor.
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

// Group sums still contain `w4_lift` (isa/vec_bytes.h) when they are added to their scale block. This function returns
// the start value of a scale block that cancels these lifts. It is the same for all rows.
inline Bytes without_lifts(const uint8_t* group, int64_t groups) {
  const Bytes minus_lift = bytes::all_fours(-w4_lift & 0xffff);   // the pair (-lift, 0): the offset has no lift
  Bytes sum = zero();
  vec::each<scale_block_groups>([&](auto i) {
    if (i < groups) sum = _mm512_dpwssd_epi32(sum, minus_lift, bytes::load(group + i * w4_group_bytes + w4_codes_bytes));
  });
  return sum;
}

// Adds a group to the sums of a scale block. `from[row]` is this group of the row's activations.
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
