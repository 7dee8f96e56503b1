// The seam between the device code and the machine it runs on.
//
// Every other .cuh file is written against the names below and compiles unchanged for two
// targets: NVIDIA GPUs (nvcc or NVRTC) and CPUs (any C++20 host compiler), where every CUDA
// thread is a fiber. This is the only file of device code with a preprocessor branch.
//
//   who am I      thread_idx() block_idx() block_dim() grid_dim() lane_id() warp_id()
//                 num_warps() warp_size(): 32 on a GPU; on a CPU whatever the launch asked for
//   collectives   warp_sync() block_sync() warp_shuffle(v, lane) warp_ballot(p)
//                 warp_exclusive_sum(v, &total): all lanes of a warp (block) must take part
//   memory        load_relaxed load_acquire store_relaxed store_release store_vec16
//                 store_plain: an assignment, for what goes to another block or machine under a flag
//                 load_once: a structure that comes from another machine; each word of it is read once, so
//                 that what is used is what was checked, whatever is written there meanwhile
//                 fence(scope): of everything; fence_acq_rel(scope): cheaper, all that a flag needs
//                 atomic_add atomic_cas atomic_max atomic_exchange atomic_cas_system
//                 with Scope::kGpu (rings in GPU memory) or Scope::kSystem (host memory, peers)
//   copies        warp_copy warp_zero: wide accesses by all lanes on a GPU, memcpy on a CPU;
//                 hold_bytes put_held: the two halves of a copy to one place or several
//   rows          warp_row_sum: weighted sum of rows with a fixed order and rounding
//                 load_element store_element store_eight: as fp32, rounded to nearest; float_bits bits_float
//   pieces        row_piece() elements, copy_piece() bytes: what one warp takes at a time
//   misc          bswap16/32/64 popcount(v) clock_ns() spin_pause()
//
// On the CPU every shared load, store and spin_pause() is a scheduling point; of what other machines write,
// a load that no acquire or fence comes before may see an earlier value (native/history.hpp).
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

enum class Scope : u32 { kGpu = 0, kSystem = 1 };

// Element types on the wire and in memory; message.py spells the same numbers.
enum DataType : u32 { kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3, kFloat8E4M3 = 4 };

struct alignas(16) Vec16 {
  u32 word[4];
};

#ifdef __CUDACC__
#include "target_gpu.cuh"
#else
#include "target_cpu.hpp"
#endif

EW_DEVICE u64 align16(u64 num_bytes) { return (num_bytes + 15) & ~15ull; }
EW_DEVICE u64 min_u64(u64 a, u64 b) { return a < b ? a : b; }
EW_DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

EW_DEVICE u32 data_type_bytes(u32 type) {
  return type == kFloat32 ? 4 : (type == kBFloat16 || type == kFloat16) ? 2 : type == kFloat8E4M3 ? 1 : 0;
}
