// The store: the second tier of the KV cache. It holds KV blocks that are older than the tail of every request that
// uses them. Their keys and values are quantised vector by vector.
//
// A vector is the key or the value of one token and one KV head. Its codes depend on its own values alone.
// src/weft/ops/store_format.py defines them; they are the same on every instruction set:
//   value = scale * (code - zero)
//   scale: one byte, a float with 5 exponent and 3 mantissa bits, rounded up (255: NaN)
//   zero:  an 8-bit code; with 4-bit codes, in sixteenths of a code
// With 4 bits, keys are rotated first, and queries as well: otherwise one large feature would make the scale so large
// that the other features get the same few codes.
#include "isa/vec.h"

namespace weft::WEFT_ISA {
namespace {

inline bool rotates_keys(const StoreLayer& store) { return store.bits == 4; }

// Multiplies every run of n features by the normalised Hadamard matrix, in place. n is the largest power of two that
// divides `size`.
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
  uint8_t scale, zero;   // `zero` is the zero point of the codes minus 128
};

// Quantises one vector to `codes`, one code per byte.
inline VectorBytes quantise_vector(const float* values, int64_t size, int64_t bits, float* scratch, uint8_t* codes) {
  vec::Vec low = vec::all(0.0f), high = low, finite[vec::sum_parts];
  for (vec::Vec& part : finite) part = low;
  vec::for_each(size, [&](int64_t i, auto n) {
    const vec::Vec x = vec::load(values + i, n);
    low = vec::min(low, x);
    high = vec::max(high, x);
    finite[0] = finite[0] + x * vec::all(0.0f);   // 0; NaN if a value is not finite
  });
  if (vec::sum(finite) != 0.0f) {
    std::memset(codes, 0, static_cast<size_t>(size));
    return {255, 128};
  }
  const float levels = static_cast<float>((1 << bits) - 1), lowest = -vec::largest(vec::all(0.0f) - low);
  const int32_t exact_scale = static_cast<int32_t>(bits_of_float((vec::largest(high) - lowest) / levels));
  const int32_t rounded = ((exact_scale + (1 << scale_shift) - 1) >> scale_shift) - lowest_scale;
  const int32_t byte = rounded < 0 ? 0 : rounded > 254 ? 254 : rounded;
  const float scale = float_of_bits(static_cast<uint32_t>(byte + lowest_scale) << scale_shift);
  const float at_zero = std::rint(bits == 8 ? -lowest / scale : -lowest / scale * 16.0f), zero = at_zero > 255.0f ? 255.0f : at_zero;
  const vec::Vec by = vec::all(scale), offset_before = vec::all(bits == 8 ? 0.0f : zero / 16.0f), offset_after = vec::all(bits == 8 ? zero : 0.0f);
  vec::for_each(size, [&](int64_t i, auto n) {
    const vec::Vec code = vec::round(vec::load(values + i, n) / by + offset_before) + offset_after;
    vec::store(scratch + i, vec::max(vec::all(0.0f), vec::min(vec::all(levels), code)), n);
  });
  for (int64_t i = 0; i < size; i++) codes[i] = static_cast<uint8_t>(static_cast<int32_t>(scratch[i]));
  return {static_cast<uint8_t>(byte), static_cast<uint8_t>(static_cast<int32_t>(zero) - 128)};
}

// Packs the codes of a vector to `out`, `distance` bytes apart. With 4 bits, features i and i + partner share a byte.
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

// Quantises the part of a KV block that belongs to one KV head into a store block, tile by tile.
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
