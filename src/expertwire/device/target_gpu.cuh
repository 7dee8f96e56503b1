// GPU half of target.cuh: CUDA intrinsics and the few PTX instructions that have none.
#pragma once

#define EW_DEVICE __device__ __forceinline__
// Blocks of up to 32 warps: more registers than 64 a thread would not fit.
#define EW_KERNEL(name, Args) \
  extern "C" __global__ void __launch_bounds__(1024) name(const __grid_constant__ Args args)
// Blocks of up to 8 warps: kernels that hold rows in registers.
#define EW_WIDE_KERNEL(name, Args) \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const __grid_constant__ Args args)
#define EW_SHARED(Type, name) __shared__ Type name

EW_DEVICE u32 thread_idx() { return threadIdx.x; }
EW_DEVICE u32 block_idx() { return blockIdx.x; }
EW_DEVICE u32 block_dim() { return blockDim.x; }
EW_DEVICE u32 grid_dim() { return gridDim.x; }
EW_DEVICE constexpr u32 warp_size() { return 32; }
EW_DEVICE u32 lane_id() { return threadIdx.x & 31; }
EW_DEVICE u32 warp_id() { return threadIdx.x >> 5; }
EW_DEVICE u32 num_warps() { return (blockDim.x + 31) >> 5; }

EW_DEVICE void warp_sync() { __syncwarp(); }
EW_DEVICE void block_sync() { __syncthreads(); }
template <typename T>
EW_DEVICE T warp_shuffle(T value, u32 lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
EW_DEVICE u32 warp_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
EW_DEVICE u32 warp_exclusive_sum(u32 value, u32* total) {
  u32 sum = value;
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane_id() >= step) sum += other;
  }
  *total = __shfl_sync(0xffffffffu, sum, 31);
  return sum - value;
}

EW_DEVICE u32 popcount(u32 v) { return __popc(v); }
EW_DEVICE u16 bswap16(u16 v) { return static_cast<u16>(__byte_perm(v, 0, 0x4401)); }
EW_DEVICE u32 bswap32(u32 v) { return __byte_perm(v, 0, 0x0123); }
EW_DEVICE u64 bswap64(u64 v) {
  return (static_cast<u64>(bswap32(static_cast<u32>(v))) << 32) | bswap32(static_cast<u32>(v >> 32));
}

// PTX memory operations: `.relaxed/.acquire/.release` with an explicit scope (PTX ISA, "Memory
// Consistency Model"). One macro per shape, since the scope is part of the opcode.
#define EW_PTX_LOAD(NAME, ORDER, BITS, REG)                                                  \
  EW_DEVICE u##BITS NAME(const u##BITS* p, Scope scope) {                                    \
    u##BITS v;                                                                               \
    if (scope == Scope::kSystem)                                                             \
      asm volatile("ld." ORDER ".sys.u" #BITS " %0, [%1];" : "=" REG(v) : "l"(p) : "memory"); \
    else                                                                                     \
      asm volatile("ld." ORDER ".gpu.u" #BITS " %0, [%1];" : "=" REG(v) : "l"(p) : "memory"); \
    return v;                                                                                \
  }
#define EW_PTX_STORE(NAME, ORDER, BITS, REG)                                                  \
  EW_DEVICE void NAME(u##BITS* p, u##BITS v, Scope scope) {                                  \
    if (scope == Scope::kSystem)                                                             \
      asm volatile("st." ORDER ".sys.u" #BITS " [%0], %1;" ::"l"(p), REG(v) : "memory");      \
    else                                                                                     \
      asm volatile("st." ORDER ".gpu.u" #BITS " [%0], %1;" ::"l"(p), REG(v) : "memory");      \
  }
EW_PTX_LOAD(load_relaxed, "relaxed", 16, "h")
EW_PTX_LOAD(load_relaxed, "relaxed", 32, "r")
EW_PTX_LOAD(load_relaxed, "relaxed", 64, "l")
EW_PTX_LOAD(load_acquire, "acquire", 32, "r")
EW_PTX_LOAD(load_acquire, "acquire", 64, "l")
EW_PTX_STORE(store_relaxed, "relaxed", 32, "r")
EW_PTX_STORE(store_relaxed, "relaxed", 64, "l")
EW_PTX_STORE(store_release, "release", 32, "r")
EW_PTX_STORE(store_release, "release", 64, "l")

EW_DEVICE void store_vec16(Vec16* p, const Vec16& v, Scope scope) {
  if (scope == Scope::kSystem)
    asm volatile("st.relaxed.sys.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
  else
    asm volatile("st.relaxed.gpu.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

EW_DEVICE void fence(Scope scope) {
  if (scope == Scope::kSystem)
    __threadfence_system();
  else
    __threadfence();
}

EW_DEVICE void fence_acq_rel(Scope scope) {
  if (scope == Scope::kSystem)
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  else
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// Queue state is touched by device code of one GPU only, so device scope is enough.
EW_DEVICE u32 atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }
EW_DEVICE u64 atomic_add(u64* p, u64 v) { return atomicAdd(p, v); }
EW_DEVICE u32 atomic_cas(u32* p, u32 expected, u32 v) { return atomicCAS(p, expected, v); }
EW_DEVICE u64 atomic_cas(u64* p, u64 expected, u64 v) { return atomicCAS(p, expected, v); }
// The HCA kernel's atomics reach memory that other GPUs and the CPU change too.
EW_DEVICE u32 atomic_cas_system(u32* p, u32 expected, u32 v) { return atomicCAS_system(p, expected, v); }
EW_DEVICE u64 atomic_cas_system(u64* p, u64 expected, u64 v) { return atomicCAS_system(p, expected, v); }
EW_DEVICE u64 atomic_max(u64* p, u64 v) { return atomicMax(p, v); }
EW_DEVICE u32 atomic_exchange(u32* p, u32 v) { return atomicExch(p, v); }

EW_DEVICE u64 clock_ns() {
  u64 ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
EW_DEVICE void spin_pause() { __nanosleep(20); }

// 16 bytes a lane and step where both sides allow it, otherwise 4, otherwise bytes.
EW_DEVICE void warp_copy(void* dst, const void* src, u64 num_bytes) {
  const u64 mix = reinterpret_cast<u64>(dst) | reinterpret_cast<u64>(src);
  const u32 unit_log2 = (mix & 15) == 0 ? 4 : (mix & 3) == 0 ? 2 : 0, unit = 1u << unit_log2;
  const u64 num_units = num_bytes >> unit_log2;
  if (unit == 16) {
    auto* d = static_cast<uint4*>(dst);
    auto* s = static_cast<const uint4*>(src);
    u64 i = lane_id();
    for (; i + 96 < num_units; i += 128) {  // four independent loads in flight
      const uint4 a = s[i], b = s[i + 32], c = s[i + 64], e = s[i + 96];
      d[i] = a, d[i + 32] = b, d[i + 64] = c, d[i + 96] = e;
    }
    for (; i < num_units; i += 32) d[i] = s[i];
  } else if (unit == 4) {
    for (u64 i = lane_id(); i < num_units; i += 32)
      static_cast<u32*>(dst)[i] = static_cast<const u32*>(src)[i];
  }
  const u64 done = unit == 1 ? 0 : num_units << unit_log2;
  for (u64 i = done + lane_id(); i < num_bytes; i += 32)
    static_cast<u8*>(dst)[i] = static_cast<const u8*>(src)[i];
}

// At most copy_piece() bytes on their way to one place or several: read once, while the warp does
// something else.
struct HeldBytes {
  const u8* src;
  u64 num_bytes;
  uint4 part[4];
};
EW_DEVICE HeldBytes hold_bytes(const u8* src, u64 num_bytes) {
  HeldBytes held = {src, num_bytes};
  if (reinterpret_cast<u64>(src) & 15) return held;
#pragma unroll
  for (u32 p = 0; p < 4; ++p)
    if (512 * p + 16 * lane_id() + 16 <= num_bytes)
      held.part[p] = reinterpret_cast<const uint4*>(src)[32 * p + lane_id()];
  return held;
}
EW_DEVICE void put_held(u8* dst, const HeldBytes& held) {
  if ((reinterpret_cast<u64>(dst) | reinterpret_cast<u64>(held.src) | held.num_bytes) & 15)
    return warp_copy(dst, held.src, held.num_bytes);
#pragma unroll
  for (u32 p = 0; p < 4; ++p)
    if (512 * p + 16 * lane_id() + 16 <= held.num_bytes)
      reinterpret_cast<uint4*>(dst)[32 * p + lane_id()] = held.part[p];
}
template <typename T>
EW_DEVICE void store_plain(T* p, const T& v) {
  *p = v;
}
template <typename T>
EW_DEVICE T load_once(const T* p) {
  union {
    u64 words[sizeof(T) / 8];
    T value;
  } read;
  static_assert(sizeof(read) == sizeof(T));
#pragma unroll
  for (u32 i = 0; i < sizeof(T) / 8; ++i)
    read.words[i] = load_relaxed(reinterpret_cast<const u64*>(p) + i, Scope::kSystem);
  return read.value;
}
EW_DEVICE void warp_zero(void* dst, u64 num_bytes) {
  for (u64 i = lane_id(); i < num_bytes; i += 32) static_cast<u8*>(dst)[i] = 0;
}

EW_DEVICE u32 float_bits(float v) { return __float_as_uint(v); }
EW_DEVICE float bits_float(u32 bits) { return __uint_as_float(bits); }
EW_DEVICE float half_to_float(u16 bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}
EW_DEVICE u16 float_to_half(float v) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
EW_DEVICE float load_element(const void* row, u32 type, u64 i) {
  if (type == kFloat32) return static_cast<const float*>(row)[i];
  const u16 bits = static_cast<const u16*>(row)[i];
  return type == kBFloat16 ? __uint_as_float(static_cast<u32>(bits) << 16) : half_to_float(bits);
}
EW_DEVICE u16 float_to_bfloat16(float v) {
  const u32 bits = __float_as_uint(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<u16>((bits >> 16) | 0x40);  // NaN stays NaN
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
EW_DEVICE void store_element(void* row, u32 type, u64 i, float v) {
  if (type == kFloat32)
    static_cast<float*>(row)[i] = v;
  else
    static_cast<u16*>(row)[i] = type == kBFloat16 ? float_to_bfloat16(v) : float_to_half(v);
}

// What one warp takes at a time, so that few rows keep many warps busy: a piece is a few
// independent 16-byte loads of each lane.
EW_DEVICE constexpr u64 row_piece() { return 1024; }
EW_DEVICE constexpr u64 copy_piece() { return 2048; }

// Eight elements from i on, at most 16 bytes a load; rows of odd sizes may lie off alignment.
EW_DEVICE void load_eight(const void* row, u32 type, u64 i, float* v) {
  const u64 addr = reinterpret_cast<u64>(row) + i * (type == kFloat32 ? 4 : 2);
  if (addr & 15) {
    for (u32 e = 0; e < 8; ++e) v[e] = load_element(row, type, i + e);
    return;
  }
  const uint4 a = *reinterpret_cast<const uint4*>(addr);
  const u32 words[4] = {a.x, a.y, a.z, a.w};
  if (type == kFloat32) {
    const uint4 b = reinterpret_cast<const uint4*>(addr)[1];
    const u32 more[4] = {b.x, b.y, b.z, b.w};
    for (u32 e = 0; e < 4; ++e) v[e] = __uint_as_float(words[e]), v[4 + e] = __uint_as_float(more[e]);
    return;
  }
  if (type == kBFloat16)
    for (u32 e = 0; e < 4; ++e)
      v[2 * e] = __uint_as_float(words[e] << 16), v[2 * e + 1] = __uint_as_float(words[e] & 0xffff0000u);
  else
    for (u32 e = 0; e < 8; ++e) v[e] = half_to_float(static_cast<u16>(words[e / 2] >> (16 * (e & 1))));
}
// Both rounded, `low` in the low half.
EW_DEVICE u32 float_to_bfloat16_pair(float low, float high) {
  if (low != low || high != high)  // the instruction below has one NaN only
    return float_to_bfloat16(low) | static_cast<u32>(float_to_bfloat16(high)) << 16;
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
EW_DEVICE void store_eight(void* row, u32 type, u64 i, const float* v) {
  const u64 addr = reinterpret_cast<u64>(row) + i * (type == kFloat32 ? 4 : 2);
  if (addr & 15) {
    for (u32 e = 0; e < 8; ++e) store_element(row, type, i + e, v[e]);
    return;
  }
  uint4* at = reinterpret_cast<uint4*>(addr);
  u32 words[8];
  if (type == kFloat32) {
    for (u32 e = 0; e < 8; ++e) words[e] = __float_as_uint(v[e]);
    at[1] = make_uint4(words[4], words[5], words[6], words[7]);
  } else if (type == kBFloat16) {
    for (u32 e = 0; e < 4; ++e) words[e] = float_to_bfloat16_pair(v[2 * e], v[2 * e + 1]);
  } else {
    for (u32 e = 0; e < 4; ++e)
      words[e] = float_to_half(v[2 * e]) | static_cast<u32>(float_to_half(v[2 * e + 1])) << 16;
  }
  at[0] = make_uint4(words[0], words[1], words[2], words[3]);
}

// dst[i] = round(sum over j, in order, of weight * row_at(j, &weight)[i]) for first <= i < end;
// row_at may return null to skip a term. The sum begins with its first term, so one row of weight 1
// is copied bit by bit. Products and sums are single fp32 operations rounded to nearest, never
// contracted, so CPU and GPU give the same bits. A lane sums 8 elements in each of 4 places.
template <typename RowAt>
EW_DEVICE void warp_row_sum(void* dst, u32 dst_type, u32 src_type, u32 num_rows, u64 first, u64 end, RowAt row_at) {
  // Each lane looks up a term; they pass them round. What is beyond a warp's lanes is looked up by all.
  float my_weight = 1.0f;
  const void* my_row = lane_id() < num_rows ? row_at(lane_id(), &my_weight) : nullptr;
  auto term = [&](u32 j, float* weight) {
    if (j >= 32) return row_at(j, weight);
    *weight = __shfl_sync(0xffffffffu, my_weight, j);
    return reinterpret_cast<const void*>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(my_row), j));
  };
  const u32 terms = warp_ballot(my_row != nullptr);
  if (num_rows <= 32 && __popc(terms) == 1 && dst_type == src_type) {
    float weight;
    const u8* row = static_cast<const u8*>(term(__ffs(terms) - 1, &weight));
    const u64 size = src_type == kFloat32 ? 4 : 2;
    if (weight == 1.0f)
      return warp_copy(static_cast<u8*>(dst) + first * size, row + first * size, (end - first) * size);
  }
  constexpr u32 kPlaces = 4;
  u64 begin = first;
  for (; begin + 256 <= end; begin += 256 * kPlaces) {
    float sum[kPlaces][8] = {};
    bool is_first = true;
    for (u32 j = 0; j < num_rows; ++j) {
      float weight = 1.0f;
      const void* row = term(j, &weight);
      if (!row) continue;
      float v[kPlaces][8];
#pragma unroll
      for (u32 p = 0; p < kPlaces; ++p)
        if (begin + 256 * (p + 1) <= end) load_eight(row, src_type, begin + 256 * p + 8 * lane_id(), v[p]);
#pragma unroll
      for (u32 p = 0; p < kPlaces; ++p)
        if (begin + 256 * (p + 1) <= end)
#pragma unroll
          for (u32 e = 0; e < 8; ++e) {
            const float value = __fmul_rn(weight, v[p][e]);
            sum[p][e] = is_first ? value : __fadd_rn(sum[p][e], value);
          }
      is_first = false;
    }
#pragma unroll
    for (u32 p = 0; p < kPlaces; ++p)
      if (begin + 256 * (p + 1) <= end) store_eight(dst, dst_type, begin + 256 * p + 8 * lane_id(), sum[p]);
  }
  // What is left is less than 256 elements.
  const u64 done = first + (end - first) / 256 * 256;
  for (u64 i = done + lane_id(); i - lane_id() < end; i += 32) {  // all lanes, to pass the terms round
    float sum = 0.0f;
    bool is_first = true;
    for (u32 j = 0; j < num_rows; ++j) {
      float weight = 1.0f;
      const void* row = term(j, &weight);
      if (!row || i >= end) continue;
      const float value = __fmul_rn(weight, load_element(row, src_type, i));
      sum = is_first ? value : __fadd_rn(sum, value);
      is_first = false;
    }
    if (i < end) store_element(dst, dst_type, i, sum);
  }
}
