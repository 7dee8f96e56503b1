// CPU half of target.cuh: a CUDA thread is a fiber (native/fiber.hpp), memory operations are
// compiler atomics, copies are memcpy. A lane runs to its next collective or spin, never in
// lock-step. Under the seeded scheduler relaxed stores are held back (native/schedule.hpp).
#pragma once

#include <cstring>

#include "fiber.hpp"
#include "rows.hpp"

#define EW_DEVICE static inline
#define EW_KERNEL(name, Args) [[maybe_unused]] static void name(const Args& args)
#define EW_WIDE_KERNEL(name, Args) EW_KERNEL(name, Args)
#define EW_SHARED(Type, name)       \
  static const char name##_tag = 0; \
  Type& name = *static_cast<Type*>(ew::block_shared(&name##_tag, sizeof(Type)))

EW_DEVICE u32 thread_idx() { return ew::lane->thread_idx; }
EW_DEVICE u32 block_idx() { return ew::lane->block->block_idx; }
EW_DEVICE u32 block_dim() { return ew::lane->block->block_dim; }
EW_DEVICE u32 grid_dim() { return ew::lane->block->grid_dim; }
EW_DEVICE u32 warp_size() { return ew::lane->warp->size; }
EW_DEVICE u32 lane_id() { return ew::lane->lane_idx; }
EW_DEVICE u32 warp_id() { return ew::lane->warp->warp_idx; }
EW_DEVICE u32 num_warps() { return ew::lane->block->num_warps; }

EW_DEVICE void warp_sync() { ew::warp_arrive(); }
EW_DEVICE void block_sync() { ew::block_arrive(); }
template <typename T>
EW_DEVICE T warp_shuffle(T value, u32 lane) {
  static_assert(sizeof(T) <= 8);
  u64 bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = ew::warp_exchange(bits)[lane];
  memcpy(&value, &bits, sizeof(T));
  return value;
}
EW_DEVICE u32 warp_ballot(bool predicate) {
  const u64* votes = ew::warp_exchange(predicate);
  u32 mask = 0;
  for (u32 i = 0; i < warp_size(); ++i) mask |= static_cast<u32>(votes[i]) << i;
  return mask;
}
EW_DEVICE u32 warp_exclusive_sum(u32 value, u32* total) {
  const u64* values = ew::warp_exchange(value);
  u32 below = 0, all = 0;
  for (u32 i = 0; i < warp_size(); ++i) {
    if (i == lane_id()) below = all;
    all += static_cast<u32>(values[i]);
  }
  *total = all;
  return below;
}

// Fences order what is relaxed. ThreadSanitizer knows no fences: for it the order is in the atomics.
#ifdef __SANITIZE_THREAD__
constexpr int kRelaxedLoad = __ATOMIC_ACQUIRE, kRelaxedUpdate = __ATOMIC_ACQ_REL;
#else
constexpr int kRelaxedLoad = __ATOMIC_RELAXED, kRelaxedUpdate = __ATOMIC_RELAXED;
#endif

EW_DEVICE u32 popcount(u32 v) { return static_cast<u32>(__builtin_popcount(v)); }
EW_DEVICE u16 bswap16(u16 v) { return __builtin_bswap16(v); }
EW_DEVICE u32 bswap32(u32 v) { return __builtin_bswap32(v); }
EW_DEVICE u64 bswap64(u64 v) { return __builtin_bswap64(v); }

template <typename T>
EW_DEVICE T load_relaxed(const T* p, Scope) {
  return ew::seeded() ? ew::seeded_load(p) : __atomic_load_n(p, kRelaxedLoad);
}
template <typename T>
EW_DEVICE T load_acquire(const T* p, Scope) {
  return ew::seeded() ? ew::seeded_load(p, true) : __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <typename T>
EW_DEVICE void store_relaxed(T* p, T v, Scope) {
  if (ew::seeded()) return ew::seeded_store(p, &v, sizeof(T));
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
template <typename T>
EW_DEVICE void store_release(T* p, T v, Scope scope) {
  if (ew::seeded() && !ew::seeded_release(p, &v, sizeof(T), scope == Scope::kSystem)) return ew::seeded_point();
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
  if (ew::seeded()) ew::seeded_point();
}
EW_DEVICE void store_vec16(Vec16* p, const Vec16& v, Scope) {
  if (ew::seeded()) return ew::seeded_store(p, &v, sizeof(v));
  u64 half[2];
  memcpy(half, &v, sizeof(half));
  __atomic_store_n(reinterpret_cast<u64*>(p), half[0], __ATOMIC_RELAXED);
  __atomic_store_n(reinterpret_cast<u64*>(p) + 1, half[1], __ATOMIC_RELAXED);
}
EW_DEVICE void fence(Scope scope) {
  if (ew::seeded()) ew::seeded_fence(scope == Scope::kSystem);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
EW_DEVICE void fence_acq_rel(Scope scope) {
  if (ew::seeded()) ew::seeded_fence(scope == Scope::kSystem);
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
}

// Atomics are relaxed, as on a GPU: they order nothing but themselves.
template <typename T>
EW_DEVICE T atomic_add(T* p, T v) {
  if (ew::seeded()) ew::seeded_atomic(p, sizeof(*p));
  return __atomic_fetch_add(p, v, kRelaxedUpdate);
}
template <typename T>
EW_DEVICE T atomic_cas(T* p, T expected, T v) {
  if (ew::seeded()) ew::seeded_atomic(p, sizeof(*p));
  __atomic_compare_exchange_n(p, &expected, v, false, kRelaxedUpdate, kRelaxedLoad);
  return expected;
}
template <typename T>
EW_DEVICE T atomic_cas_system(T* p, T expected, T v) {
  if (ew::seeded()) ew::seeded_atomic(p, sizeof(*p));
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
  if (ew::seeded()) ew::seeded_acquire();
  return expected;
}
EW_DEVICE u64 atomic_max(u64* p, u64 v) {
  if (ew::seeded()) ew::seeded_atomic(p, sizeof(*p));
  u64 old = __atomic_load_n(p, kRelaxedLoad);
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, kRelaxedUpdate, kRelaxedLoad)) {
  }
  return old;
}
EW_DEVICE u32 atomic_exchange(u32* p, u32 v) {
  if (ew::seeded()) ew::seeded_atomic(p, sizeof(*p));
  return __atomic_exchange_n(p, v, kRelaxedUpdate);
}

EW_DEVICE u64 clock_ns() { return ew::clock_ns(); }
EW_DEVICE void spin_pause() { ew::lane_spin(); }

// A row is one warp's work: more warps would only be more fibers on the same core.
EW_DEVICE constexpr u64 row_piece() { return 1ull << 31; }
EW_DEVICE constexpr u64 copy_piece() { return 1ull << 31; }

// One lane copies for the warp; the others go on to the next collective.
EW_DEVICE void warp_copy(void* dst, const void* src, u64 num_bytes) {
  if (lane_id() != 0 || num_bytes == 0) return;
  if (ew::seeded()) return ew::seeded_copy(dst, src, num_bytes);
  memmove(dst, src, num_bytes);  // an entry that the HCA kernel executes may name ranges that overlap
}
struct HeldBytes {
  const u8* src;
  u64 num_bytes;
};
EW_DEVICE HeldBytes hold_bytes(const u8* src, u64 num_bytes) { return {src, num_bytes}; }
EW_DEVICE void put_held(u8* dst, const HeldBytes& held) { warp_copy(dst, held.src, held.num_bytes); }
EW_DEVICE void warp_zero(void* dst, u64 num_bytes) {
  if (lane_id() != 0 || num_bytes == 0) return;
  if (ew::seeded()) return ew::seeded_zero(dst, num_bytes);
  memset(dst, 0, num_bytes);
}
template <typename T>
EW_DEVICE void store_plain(T* p, const T& v) {
  if (ew::seeded()) return ew::seeded_copy(p, &v, sizeof(T));
  *p = v;
}
template <typename T>
EW_DEVICE T load_once(const T* p) {
  if (ew::seeded()) return ew::seeded_load(p);
  u64 words[sizeof(T) / 8];
  for (u32 i = 0; i < sizeof(T) / 8; ++i) words[i] = __atomic_load_n(reinterpret_cast<const u64*>(p) + i, kRelaxedLoad);
  return __builtin_bit_cast(T, words);
}

EW_DEVICE u32 float_bits(float v) { return __builtin_bit_cast(u32, v); }
EW_DEVICE float bits_float(u32 bits) { return __builtin_bit_cast(float, bits); }
EW_DEVICE float load_element(const void* row, u32 type, u64 i) {
  float v;
  ew::row_add_scaled(&v, row, type, 1.0f, i, 1, true);
  return v;
}
EW_DEVICE void store_element(void* row, u32 type, u64 i, float v) { ew::row_store(row, type, &v, i, 1); }
EW_DEVICE void store_eight(void* row, u32 type, u64 i, const float* v) { ew::row_store(row, type, v, i, 8); }

// See target_gpu.cuh for the rule; here one lane sums for the warp, in cache-sized pieces.
template <typename RowAt>
EW_DEVICE void warp_row_sum(void* dst, u32 dst_type, u32 src_type, u32 num_rows, u64 first, u64 end, RowAt row_at) {
  if (lane_id() != 0) return;
  u32 num_terms = 0;
  const void* only = nullptr;
  float only_weight = 1.0f;
  for (u32 j = 0; j < num_rows; ++j) {
    float weight = 1.0f;
    if (const void* row = row_at(j, &weight)) ++num_terms, only = row, only_weight = weight;
  }
  if (num_terms == 1 && only_weight == 1.0f && dst_type == src_type) {
    const u64 size = src_type == kFloat32 ? 4 : 2, num_bytes = (end - first) * size;
    const u8* from = static_cast<const u8*>(only) + first * size;
    if (ew::seeded()) return ew::seeded_copy(static_cast<u8*>(dst) + first * size, from, num_bytes);
    memcpy(static_cast<u8*>(dst) + first * size, from, num_bytes);
    return;
  }
  constexpr u64 kPiece = 1024;
  float sum[kPiece];
  for (u64 begin = first; begin < end; begin += kPiece) {
    const u64 count = end - begin < kPiece ? end - begin : kPiece;
    bool is_first = true;
    for (u32 j = 0; j < num_rows; ++j) {
      float weight = 1.0f;
      const void* row = row_at(j, &weight);
      if (!row) continue;
      if (ew::seeded()) {
        u8 bytes[kPiece * sizeof(float)];
        const u64 size = src_type == kFloat32 ? 4 : 2;
        ew::seeded_read(static_cast<const u8*>(row) + begin * size, bytes, count * size);
        ew::row_add_scaled(sum, bytes, src_type, weight, 0, count, is_first);
        is_first = false;
        continue;
      }
      ew::row_add_scaled(sum, row, src_type, weight, begin, count, is_first);
      is_first = false;
    }
    if (is_first) memset(sum, 0, count * sizeof(float));
    if (ew::seeded()) {
      u8 bytes[kPiece * sizeof(float)];
      const u64 size = dst_type == kFloat32 ? 4 : 2;
      ew::row_store(bytes, dst_type, sum, 0, count);
      ew::seeded_copy(static_cast<u8*>(dst) + begin * size, bytes, count * size);
      continue;
    }
    ew::row_store(dst, dst_type, sum, begin, count);
  }
}
