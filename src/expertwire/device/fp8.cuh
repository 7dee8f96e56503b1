// e4m3 with one fp32 scale per block of a row: value = e4m3 * scale. The same bits as
// reference.quantise_fp8 and dequantise_fp8 on every target: single fp32 operations, rounded to
// nearest.
#pragma once

#include "target.cuh"

constexpr float kFp8Max = 448.0f;  // largest finite e4m3 value
constexpr u32 kFp8Nan = 0x7f;
constexpr u32 kFloatInfinity = 0x7f800000, kFloatSign = 0x80000000;

// v: at most kFp8Max in magnitude, or NaN. To nearest, ties to even.
EW_DEVICE u8 float_to_fp8(float v) {
  const u32 bits = float_bits(v), sign = bits >> 31 << 7, magnitude = bits & ~kFloatSign;
  if (magnitude > kFloatInfinity) return static_cast<u8>(sign | kFp8Nan);
  // Below 2^-6 a step is 2^-9, which is what the last bit of a sum with 2^14 stands for.
  if (magnitude < 121u << 23) return static_cast<u8>(sign | (float_bits(bits_float(magnitude) + 16384.0f) & 0xf));
  // Three bits of mantissa stay of 23; the exponent's bias is 7, not 127.
  return static_cast<u8>(sign | (((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120u << 3)));
}

EW_DEVICE float fp8_to_float(u8 code) {
  const u32 sign = static_cast<u32>(code >> 7) << 31, magnitude = code & 0x7fu;
  if (magnitude == kFp8Nan) return bits_float(sign | kFloatInfinity | 1u << 22);
  return bits_float(float_bits(bits_float(magnitude << 20) * bits_float(247u << 23)) | sign);  // * 2^120
}

// Of a block with that largest magnitude, given as bits: those of a NaN are the largest.
EW_DEVICE float fp8_scale(u32 largest) {
  const float scale = largest > kFloatInfinity ? 1.0f : bits_float(largest) / kFp8Max;
  return scale > 0.0f ? scale : 1.0f;
}

// One block of a row by one warp: elements first .. end of `row` -> the same of `codes`; its scale.
EW_DEVICE float warp_quantise(u8* codes, const void* row, u32 type, u64 first, u64 end) {
  u32 largest = 0;
  for (u64 i = first + lane_id(); i < end; i += warp_size()) {
    const u32 magnitude = float_bits(load_element(row, type, i)) & ~kFloatSign;
    if (magnitude > largest) largest = magnitude;
  }
  for (u32 distance = 1; distance < warp_size(); distance *= 2) {
    const u32 other = warp_shuffle(largest, (lane_id() + distance) % warp_size());
    if (other > largest) largest = other;
  }
  const float scale = fp8_scale(largest);
  for (u64 i = first + lane_id(); i < end; i += warp_size()) {
    const float v = load_element(row, type, i) / scale;
    codes[i] = float_to_fp8(v > kFp8Max ? kFp8Max : v < -kFp8Max ? -kFp8Max : v);
  }
  return scale;
}

// Elements first .. end of a row; first is a multiple of 8, and so is scale_block.
EW_DEVICE void warp_dequantise(void* row, u32 type, const u8* codes, const float* scales, u32 scale_block, u64 first,
                               u64 end) {
  const bool aligned = (reinterpret_cast<u64>(codes + first) & 7) == 0;
  for (u64 i = first + 8 * lane_id(); i < end; i += 8 * warp_size()) {
    const float scale = scales[i / scale_block];
    if (i + 8 > end) {
      for (; i < end; ++i) store_element(row, type, i, fp8_to_float(codes[i]) * scale);
      return;
    }
    u64 eight = 0;
    if (aligned)
      eight = *reinterpret_cast<const u64*>(codes + i);
    else
      for (u32 e = 0; e < 8; ++e) eight |= static_cast<u64>(codes[i + e]) << 8 * e;
    float v[8];
#pragma unroll
    for (u32 e = 0; e < 8; ++e) v[e] = fp8_to_float(static_cast<u8>(eight >> 8 * e)) * scale;
    store_eight(row, type, i, v);
  }
}
