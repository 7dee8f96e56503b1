// Fibers for the CPU target: one per CUDA thread of a launch, kept from launch to launch.
//
// A lane runs until a collective that is not complete yet, or until it spins, then the next lane
// of the launch runs. Switching is 13 instructions of assembly (fiber_switch.S): glibc's
// swapcontext makes a system call per switch (~1 us), and no context-switch library can be counted
// on where only Python and g++ are installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ew {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

struct Schedule;

struct WarpState {
  u32 size, warp_idx, live, arrived, generation;
  u64 exchange[2][32];
};

struct BlockState {
  u32 block_idx, block_dim, grid_dim, num_warps, live, arrived, generation;
  struct Shared {
    const void* tag;
    void* bytes;
  } shared[8];
  u32 num_shared;
  alignas(16) u8 arena[16384];  // __shared__ memory of the block
  u32 arena_used;
  u64 view;  // seeded: its loads see nothing older than this (native/history.hpp)
};

struct Lane {
  void* stack_pointer;
  Lane *next, *prev;  // ring of live lanes of the launch
  WarpState* warp;
  BlockState* block;
  Schedule* schedule;
  void (*entry)(const void* args);
  const void* args;
  u32 thread_idx, lane_idx;
  void* fake_stack;  // sanitizer bookkeeping
  void* tsan_fiber;
  u8* stack_bottom;
};

// initial-exec: one instruction to read, no call; the library uses a few bytes of static TLS.
extern thread_local Lane* lane __attribute__((tls_model("initial-exec")));
extern thread_local bool seeded_launch __attribute__((tls_model("initial-exec")));

inline bool seeded() { return __builtin_expect(seeded_launch, 0); }

void lane_yield();  // some other lane runs
void lane_spin();   // the same from a spin loop: counts, so that idle work gets done
u64 clock_ns();     // CLOCK_MONOTONIC, or the virtual clock of a seeded launch
[[noreturn]] void device_fail(const char* what);

inline void warp_arrive() {
  WarpState* warp = lane->warp;
  const u32 generation = warp->generation;
  if (++warp->arrived == warp->size) {
    warp->arrived = 0;
    ++warp->generation;
    return;
  }
  do lane_yield();
  while (*const_cast<volatile u32*>(&warp->generation) == generation);
}

// Every lane deposits a value and sees all of them. Two buffers suffice: a lane can be at most one
// collective ahead of the slowest.
inline const u64* warp_exchange(u64 value) {
  u64* slots = lane->warp->exchange[lane->warp->generation & 1];
  slots[lane->lane_idx] = value;
  warp_arrive();
  return slots;
}

inline void block_arrive() {
  BlockState* block = lane->block;
  const u32 generation = block->generation;
  if (++block->arrived == block->block_dim) {
    block->arrived = 0;
    ++block->generation;
    return;
  }
  do lane_yield();
  while (*const_cast<volatile u32*>(&block->generation) == generation);
}

void* block_shared(const void* tag, size_t num_bytes);

// Seeded scheduler (schedule.cpp): scheduling points, held-back stores, loads that see an earlier value.
void seeded_point();
void seeded_fence(bool system);
void seeded_acquire();  // loads from here on are not older than this moment
bool seeded_release(void* dst, const void* value, size_t num_bytes, bool system);  // true: store it now
void seeded_engine_store(void* dst, u32 word, bool release);  // of the HCA, which is one more actor
void seeded_atomic(const void* p, size_t num_bytes);
void seeded_store(void* dst, const void* value, size_t num_bytes);
void seeded_copy(void* dst, const void* src, u64 num_bytes);
void seeded_zero(void* dst, u64 num_bytes);
void seeded_read(const void* src, void* value, size_t num_bytes);  // may be an earlier value
template <typename T>
T seeded_load(const T* p, bool acquire = false) {
  seeded_point();
  if (acquire) seeded_acquire();
  T value;
  seeded_read(p, &value, sizeof(T));
  return value;
}

// A set of lanes that run together on the calling thread until all have returned.
struct LaunchSpec {
  void (*entry)(const void* args);
  const void* args;
  u32 grid_dim, block_dim, warp_size;
};
// `idle` is called when every live lane spins (fast), or as one more actor (seeded).
// Returns 0, or a negative error (message through ew_last_error).
int run_fast(const LaunchSpec* specs, u32 num_specs, void (*idle)(void*), void* idle_context);
// `watched`: memory whose earlier values loads may see.
struct Range {
  u64 addr, num_bytes;
};
int run_seeded(const LaunchSpec* specs, u32 num_specs, void (*idle)(void*), void* idle_context, u64 seed,
               const Range* watched, u32 num_watched);

}  // namespace ew
