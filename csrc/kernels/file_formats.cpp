// File formats of tensors, and the decoding of a block of each to floats. src/weft/loading/decoding.py does the same
// in numpy. A block is the unit of the GGUF formats.
#include <cstring>

#include "kernels/half.h"
#include "kernels/pack.h"

namespace weft {
namespace {

float half_from(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  return half_to_float(half);
}

// Unpacks codes of `bits` bits from runs of `width` bytes. The lowest bits of the bytes hold the first `width` codes of
// a run, the next bits the next `width` codes. Each code is shifted left by `shift` and ORed into `codes`.
template <int bits, int width, int count>
void add_planes(const uint8_t* packed, int shift, uint8_t* codes) {
  constexpr int planes = 8 / bits, runs = count / (planes * width);
  for (int run = 0; run < runs; run++)
    for (int plane = 0; plane < planes; plane++)
      for (int i = 0; i < width; i++) {
        const int code = packed[run * width + i] >> (plane * bits) & ((1 << bits) - 1);
        codes[(run * planes + plane) * width + i] |= static_cast<uint8_t>(code << shift);
      }
}

// values = codes * scale + offset
template <int count>
void scale_codes(const uint8_t* codes, float scale, float offset, float* values) {
  for (int i = 0; i < count; i++) values[i] = static_cast<float>(codes[i]) * scale + offset;
}

// values = (codes - zero) * scale
template <int count>
void scale_centred(const uint8_t* codes, int zero, float scale, float* values) {
  for (int i = 0; i < count; i++) values[i] = static_cast<float>(codes[i] - zero) * scale;
}

template <int count>
void scale_signed(const uint8_t* codes, float scale, float* values) {
  for (int i = 0; i < count; i++) values[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
}

void decode_f64(const uint8_t* block, float* values) {
  double value;
  std::memcpy(&value, block, 8);
  *values = static_cast<float>(value);
}

void decode_f32(const uint8_t* block, float* values) { std::memcpy(values, block, 4); }

void decode_f16(const uint8_t* block, float* values) { *values = half_from(block); }

void decode_bf16(const uint8_t* block, float* values) {
  uint16_t half;
  std::memcpy(&half, block, 2);
  *values = bfloat_to_float(half);
}

void decode_q4_0(const uint8_t* block, float* values) {
  uint8_t codes[32] = {};
  add_planes<4, 16, 32>(block + 2, 0, codes);
  scale_centred<32>(codes, 8, half_from(block), values);
}

void decode_q4_1(const uint8_t* block, float* values) {
  uint8_t codes[32] = {};
  add_planes<4, 16, 32>(block + 4, 0, codes);
  scale_codes<32>(codes, half_from(block), half_from(block + 2), values);
}

// Adds the fifth bits of Q5_0 and Q5_1. They are packed one per value, in value order.
void add_fifth_bits(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < 32; i++) codes[i] |= static_cast<uint8_t>((packed[i / 8] >> i % 8 & 1) << 4);
}

void decode_q5_0(const uint8_t* block, float* values) {
  uint8_t codes[32] = {};
  add_planes<4, 16, 32>(block + 6, 0, codes);
  add_fifth_bits(block + 2, codes);
  scale_centred<32>(codes, 16, half_from(block), values);
}

void decode_q5_1(const uint8_t* block, float* values) {
  uint8_t codes[32] = {};
  add_planes<4, 16, 32>(block + 8, 0, codes);
  add_fifth_bits(block + 4, codes);
  scale_codes<32>(codes, half_from(block), half_from(block + 2), values);
}

void decode_q8_0(const uint8_t* block, float* values) { scale_signed<32>(block + 2, half_from(block), values); }

void decode_q2_k(const uint8_t* block, float* values) {
  uint8_t codes[256] = {};
  add_planes<2, 32, 256>(block + 16, 0, codes);
  const float scale = half_from(block + 80), minimum = half_from(block + 82);
  for (int group = 0; group < 16; group++)
    scale_codes<16>(codes + 16 * group, scale * static_cast<float>(block[group] & 15),
                    -(minimum * static_cast<float>(block[group] >> 4)), values + 16 * group);
}

void decode_q3_k(const uint8_t* block, float* values) {
  uint8_t codes[256] = {}, scales[16] = {};
  add_planes<2, 32, 256>(block + 32, 0, codes);
  add_planes<1, 32, 256>(block, 2, codes);
  // 16 scales of 6 bits: the low four bits of each in 8 bytes, the high two in 4 bytes.
  add_planes<4, 8, 16>(block + 96, 0, scales);
  add_planes<2, 4, 16>(block + 104, 4, scales);
  const float scale = half_from(block + 108);
  for (int group = 0; group < 16; group++)
    scale_centred<16>(codes + 16 * group, 4, scale * static_cast<float>(scales[group] - 32), values + 16 * group);
}

void decode_q4_k(const uint8_t* block, float* values) {
  uint8_t codes[256] = {};
  float scales[8], minima[8];
  add_planes<4, 32, 256>(block + 16, 0, codes);
  k_scales_and_minima(block, scales, minima);
  for (int group = 0; group < 8; group++) scale_codes<32>(codes + 32 * group, scales[group], minima[group], values + 32 * group);
}

void decode_q5_k(const uint8_t* block, float* values) {
  uint8_t codes[256] = {};
  float scales[8], minima[8];
  add_planes<4, 32, 256>(block + 48, 0, codes);
  add_planes<1, 32, 256>(block + 16, 4, codes);
  k_scales_and_minima(block, scales, minima);
  for (int group = 0; group < 8; group++) scale_codes<32>(codes + 32 * group, scales[group], minima[group], values + 32 * group);
}

void decode_q6_k(const uint8_t* block, float* values) {
  uint8_t codes[256] = {};
  add_planes<4, 64, 256>(block, 0, codes);
  add_planes<2, 32, 256>(block + 128, 4, codes);
  const float scale = half_from(block + 208);
  for (int group = 0; group < 16; group++)
    scale_centred<16>(codes + 16 * group, 32, scale * static_cast<float>(static_cast<int8_t>(block[192 + group])), values + 16 * group);
}

void decode_q8_k(const uint8_t* block, float* values) {
  float scale;
  std::memcpy(&scale, block, 4);
  scale_signed<256>(block + 4, scale, values);
}

template <int values, int bytes, void (*decode)(const uint8_t*, float*)>
constexpr StoredFormat stored(const char* name, Layout layout) {
  return {name, values, bytes, layout, [](const uint8_t* raw, int64_t blocks, float* out) {
    for (int64_t block = 0; block < blocks; block++) decode(raw + block * bytes, out + block * values);
  }};
}

constexpr StoredFormat formats[] = {
    stored<1, 4, decode_f32>("F32", Layout::f32),
    stored<1, 2, decode_f16>("F16", Layout::f16),
    stored<1, 2, decode_bf16>("BF16", Layout::bf16),
    stored<1, 8, decode_f64>("F64", Layout::f32),
    stored<32, 18, decode_q4_0>("Q4_0", Layout::w4),
    stored<32, 20, decode_q4_1>("Q4_1", Layout::w4),
    stored<32, 22, decode_q5_0>("Q5_0", Layout::w8),
    stored<32, 24, decode_q5_1>("Q5_1", Layout::w8),
    stored<32, 34, decode_q8_0>("Q8_0", Layout::w8),
    stored<256, 84, decode_q2_k>("Q2_K", Layout::w8),
    stored<256, 110, decode_q3_k>("Q3_K", Layout::w8),
    stored<256, 144, decode_q4_k>("Q4_K", Layout::w4),
    stored<256, 176, decode_q5_k>("Q5_K", Layout::w8),
    stored<256, 210, decode_q6_k>("Q6_K", Layout::w8),
    stored<256, 292, decode_q8_k>("Q8_K", Layout::w8),
};

}  // namespace

// Bytes 4..7: scales 0..3; bytes 8..11: minima 0..3; bytes 12..15: the low four bits of scales and minima 4..7. Their
// high two bits are the spare bits of bytes 4..11.
void k_scales_and_minima(const uint8_t* block, float* scales, float* minima) {
  const float scale = half_from(block), minimum = half_from(block + 2);
  for (int i = 0; i < 4; i++) {
    const uint8_t low_scale = block[4 + i], low_minimum = block[8 + i], rest = block[12 + i];
    scales[i] = scale * static_cast<float>(low_scale & 63);
    minima[i] = -(minimum * static_cast<float>(low_minimum & 63));
    scales[4 + i] = scale * static_cast<float>((rest & 15) | low_scale >> 6 << 4);
    minima[4 + i] = -(minimum * static_cast<float>(rest >> 4 | low_minimum >> 6 << 4));
  }
}

const StoredFormat* find_format(const char* name) {
  for (const StoredFormat& format : formats)
    if (std::strcmp(format.name, name) == 0) return &format;
  return nullptr;
}

}  // namespace weft
