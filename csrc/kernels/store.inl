// The store: keys and values of blocks that lie behind everybody's tail, quantised vector by vector.
//
// A vector is what one token has of one kv head, its key or its value; how it is stored is a function of its values alone, the one that
// src/weft/ops/store_format.py defines, code by code the same on every instruction set:
//   value = scale * (code - zero), the scale rounded up to a float of 5 exponent and 3 mantissa bits, which is one byte (255: NaN);
//   zero is a code in 8 bits, and sixteenths of a code in 4 bits.
// In 4 bits keys are rotated first, and queries likewise before they meet them: a feature that is far larger than the others would leave
// these hardly any codes.
#include "isa/vec.h"

namespace weft::WEFT_ISA {
namespace {

inline bool rotates_keys(const StoreLayer& store) { return store.bits == 4; }

// Every run of n features times the Hadamard matrix of n, normalised, in place; n is the largest power of two that divides the size.
inline void rotate_vector(float* values, int64_t size) {
  const int64_t n = size & -size;
  for (int64_t half = 1; half < n; half *= 2) {
    for (int64_t start = 0; start < size; start += 2 * half) {
      for (int64_t i = start; i < start + half; i++) {
        const float first = values[i], second = values[i + half];
        values[i] = first + second;
        values[i + half] = first - second;
      }
    }
  }
  const float by = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
  for (int64_t i = 0; i < size; i++) values[i] *= by;
}

struct VectorBytes {
  uint8_t scale, zero;   // the latter less 128
};

// Quantises one vector; a code goes to each of `codes`.
inline VectorBytes quantise_vector(const float* values, int64_t size, int64_t bits, float* scratch, uint8_t* codes) {
  vec::Vec low = vec::all(0.0f), high = low, finite[vec::sum_parts];
  for (vec::Vec& part : finite) part = low;
  vec::for_each(size, [&](int64_t i, auto n) {
    const vec::Vec x = vec::load(values + i, n);
    low = vec::min(low, x);
    high = vec::max(high, x);
    finite[0] = finite[0] + x * vec::all(0.0f);   // 0, or NaN for ever
  });
  if (vec::sum(finite) != 0.0f) {
    std::memset(codes, 0, static_cast<size_t>(size));
    return {255, 128};
  }
  const float levels = static_cast<float>((1 << bits) - 1), lowest = -vec::largest(vec::all(0.0f) - low);
  const int32_t wanted = static_cast<int32_t>(bits_of_float((vec::largest(high) - lowest) / levels));
  const int32_t rounded = ((wanted + (1 << scale_shift) - 1) >> scale_shift) - lowest_scale;
  const int32_t byte = rounded < 0 ? 0 : rounded > 254 ? 254 : rounded;
  const float scale = float_of_bits(static_cast<uint32_t>(byte + lowest_scale) << scale_shift);
  const float at_zero = std::rint(bits == 8 ? -lowest / scale : -lowest / scale * 16.0f), zero = at_zero > 255.0f ? 255.0f : at_zero;
  const vec::Vec by = vec::all(scale), before = vec::all(bits == 8 ? 0.0f : zero / 16.0f), behind = vec::all(bits == 8 ? zero : 0.0f);
  vec::for_each(size, [&](int64_t i, auto n) {
    const vec::Vec code = vec::round(vec::load(values + i, n) / by + before) + behind;
    vec::store(scratch + i, vec::max(vec::all(0.0f), vec::min(vec::all(levels), code)), n);
  });
  for (int64_t i = 0; i < size; i++) codes[i] = static_cast<uint8_t>(static_cast<int32_t>(scratch[i]));
  return {static_cast<uint8_t>(byte), static_cast<uint8_t>(static_cast<int32_t>(zero) - 128)};
}

// Codes of a vector to where they lie: `distance` bytes apart, in 4 bits with `partner` features between the two of a byte.
inline void place_codes(const uint8_t* codes, int64_t size, int64_t bits, int64_t partner, uint8_t* out, int64_t distance) {
  if (bits == 8) {
    for (int64_t f = 0; f < size; f++) out[f * distance] = codes[f] ^ 0x80;
  } else {
    const int64_t step = partner == 1 ? 2 : 1;
    for (int64_t j = 0; j < size / 2; j++)
      out[j * distance] = static_cast<uint8_t>(codes[j * step] | codes[j * step + partner] << 4);
  }
}

int64_t move_scratch(int64_t head_size) { return (key_tile + 2) * head_size + 2 * vec::lanes; }

void move_block(const CacheLayer& cache, int64_t from, const StoreLayer& store, int64_t to, int64_t kv_head, float* scratch) {
  const int64_t size = cache.head_size, block_size = cache.block_size;
  const CachedHead in = cache.head(from, kv_head);
  const StoredHead out = store.head(to, kv_head);
  float* vectors = scratch;                        // [key_tile, size]
  float* spare = vectors + key_tile * size;        // [size]
  uint8_t* codes = reinterpret_cast<uint8_t*>(spare + size);
  for (int64_t tile = 0; tile < block_size; tile += key_tile) {
    const int64_t count = in.tile_width(tile);
    for (int64_t i = 0; i < count; i++) {
      const float scale = bfloat_to_float(in.scales(false)[tile + i]);
      for (int64_t f = 0; f < size; f++) vectors[i * size + f] = static_cast<float>(key_code(in, tile + i, f)) * scale;
    }
    for (int64_t i = 0; i < count; i++) {
      if (rotates_keys(store)) rotate_vector(vectors + i * size, size);
      const VectorBytes key = quantise_vector(vectors + i * size, size, store.bits, spare, codes);
      out.scales(false)[tile + i] = key.scale;
      out.zeros(false)[tile + i] = key.zero;
      place_codes(codes, size, store.bits, 1, out.keys() + tile * store.vector_bytes() + i, count);
    }
    for (int64_t i = tile; i < tile + count; i++) {
      const float scale = bfloat_to_float(in.scales(true)[i]);
      for (int64_t f = 0; f < size; f++) vectors[f] = static_cast<float>(value_code(in, i, f)) * scale;
      const VectorBytes value = quantise_vector(vectors, size, store.bits, spare, codes);
      out.scales(true)[i] = value.scale;
      out.zeros(true)[i] = value.zero;
      place_codes(codes, size, store.bits, size / 2, out.values() + i * store.vector_bytes(), 1);
    }
  }
}

}  // namespace
}  // namespace weft::WEFT_ISA
