// See rows.hpp. Built without contraction of multiply and add (CMakeLists.txt), so that every
// processor, and the GPU target, gives the same bits.
#include "rows.hpp"

#include <cstdint>
#include <cstring>

namespace ew {
namespace {

constexpr unsigned kFloat32 = 1, kBFloat16 = 2;  // target.cuh DataType; the third is fp16

#define EW_INLINE static inline __attribute__((always_inline))

EW_INLINE float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float v;
  memcpy(&v, &wide, 4);
  return v;
}
EW_INLINE uint16_t to_bfloat16(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

template <bool kFirst, typename Load>
EW_INLINE void accumulate(float* __restrict sum, float weight, unsigned long long count, Load load) {
  for (unsigned long long i = 0; i < count; ++i) sum[i] = kFirst ? weight * load(i) : sum[i] + weight * load(i);
}
template <bool kFirst>
EW_INLINE void add_scaled(float* __restrict sum, const void* row, unsigned type, float weight,
                          unsigned long long begin, unsigned long long count) {
  if (type == kFloat32) {
    const float* x = static_cast<const float*>(row) + begin;
    accumulate<kFirst>(sum, weight, count, [=](unsigned long long i) { return x[i]; });
  } else if (type == kBFloat16) {
    const uint16_t* x = static_cast<const uint16_t*>(row) + begin;
    accumulate<kFirst>(sum, weight, count, [=](unsigned long long i) { return from_bfloat16(x[i]); });
  } else {
    const _Float16* x = static_cast<const _Float16*>(row) + begin;
    accumulate<kFirst>(sum, weight, count, [=](unsigned long long i) { return static_cast<float>(x[i]); });
  }
}
EW_INLINE void add_scaled_any(float* sum, const void* row, unsigned type, float weight, unsigned long long begin,
                              unsigned long long count, bool first) {
  first ? add_scaled<true>(sum, row, type, weight, begin, count)
        : add_scaled<false>(sum, row, type, weight, begin, count);
}
EW_INLINE void store(void* row, unsigned type, const float* __restrict sum, unsigned long long begin,
                     unsigned long long count) {
  if (type == kFloat32) {
    memcpy(static_cast<float*>(row) + begin, sum, count * 4);
  } else if (type == kBFloat16) {
    uint16_t* y = static_cast<uint16_t*>(row) + begin;
    for (unsigned long long i = 0; i < count; ++i) y[i] = to_bfloat16(sum[i]);
  } else {
    _Float16* y = static_cast<_Float16*>(row) + begin;
    for (unsigned long long i = 0; i < count; ++i) y[i] = static_cast<_Float16>(sum[i]);
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) void add_scaled_avx2(float* sum, const void* row, unsigned type, float weight,
                                                          unsigned long long begin, unsigned long long count,
                                                          bool first) {
  add_scaled_any(sum, row, type, weight, begin, count, first);
}
__attribute__((target("avx2,f16c"))) void store_avx2(void* row, unsigned type, const float* sum,
                                                     unsigned long long begin, unsigned long long count) {
  store(row, type, sum, begin, count);
}
bool has_avx2() {
  static const bool yes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return yes;
}
#endif

}  // namespace

void row_add_scaled(float* sum, const void* row, unsigned type, float weight, unsigned long long begin,
                    unsigned long long count, bool first) {
#if defined(__x86_64__)
  if (has_avx2()) return add_scaled_avx2(sum, row, type, weight, begin, count, first);
#endif
  add_scaled_any(sum, row, type, weight, begin, count, first);
}

void row_store(void* row, unsigned type, const float* sum, unsigned long long begin, unsigned long long count) {
#if defined(__x86_64__)
  if (has_avx2()) return store_avx2(row, type, sum, begin, count);
#endif
  store(row, type, sum, begin, count);
}

}  // namespace ew
