// Fiber pool and the two ways to run a launch. See fiber.hpp.
#include "fiber.hpp"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "error.hpp"
#include "schedule.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#define EW_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define EW_TSAN 1
#endif

extern "C" void ew_fiber_switch(void** save_stack_pointer, void* load_stack_pointer);

namespace ew {

thread_local Lane* lane = nullptr;
thread_local bool seeded_launch = false;

constexpr size_t kStackBytes = 128 << 10;
constexpr u32 kMaxLanes = 2048;  // lanes of one launch

void device_fail(const char* what) {
  fprintf(stderr, "expertwire: device code broke its contract: %s\n", what);
  abort();
}

[[noreturn]] static void fiber_loop() {
  for (;;) {
    Lane* self = lane;
    self->entry(self->args);
    Schedule* schedule = self->schedule;
    if (schedule->is_seeded && --self->block->live == 0) schedule->release_block(self->block);
    if (self->warp->arrived != 0) device_fail("a lane returned while others of its warp wait at a collective");
    if (--schedule->alive == 0) {
      switch_lane(self, nullptr);
      continue;
    }
    self->prev->next = self->next;
    self->next->prev = self->prev;
    switch_lane(self, schedule->is_seeded ? seeded_pick(schedule) : self->next);
  }
}

}  // namespace ew

extern "C" __attribute__((visibility("hidden"))) void ew_fiber_start() {
#if EW_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  ew::fiber_loop();
}

namespace ew {

// `to` null: back to the thread that launched.
void switch_lane(Lane* from, Lane* to) {
  Schedule* schedule = from->schedule;
  void* load = to ? to->stack_pointer : schedule->main_stack_pointer;
#if EW_ASAN
  __sanitizer_start_switch_fiber(&from->fake_stack, to ? to->stack_bottom : schedule->main_stack_bottom,
                                 to ? kStackBytes : schedule->main_stack_bytes);
#endif
#if EW_TSAN
  __tsan_switch_to_fiber(to ? to->tsan_fiber : schedule->main_tsan_fiber, 0);
#endif
  lane = to;
  ew_fiber_switch(&from->stack_pointer, load);
#if EW_ASAN
  __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

void lane_yield() {
  Lane* self = lane;
  Lane* next = self->schedule->is_seeded ? seeded_pick(self->schedule) : self->next;
  if (next != self) switch_lane(self, next);
}

void lane_spin() {
  Schedule* schedule = lane->schedule;
  if (schedule->is_seeded) {
    schedule->virtual_ns += 1000;
  } else if (++schedule->idle_spins >= schedule->alive) {
    schedule->idle_spins = 0;
    if (schedule->idle) schedule->idle(schedule->idle_context);
  }
  lane_yield();
}

u64 clock_ns() {
  if (seeded_launch) return lane->schedule->virtual_ns;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1000000000ull + static_cast<u64>(now.tv_nsec);
}

void* block_shared(const void* tag, size_t num_bytes) {
  BlockState* block = lane->block;
  for (u32 i = 0; i < block->num_shared; ++i)
    if (block->shared[i].tag == tag) return block->shared[i].bytes;
  const u32 rounded = static_cast<u32>((num_bytes + 15) & ~size_t{15});
  if (block->num_shared == 8 || block->arena_used + rounded > sizeof(block->arena))
    device_fail("more __shared__ memory than a CPU block has");
  void* bytes = block->arena + block->arena_used;
  block->arena_used += rounded;
  block->shared[block->num_shared++] = {tag, bytes};
  return bytes;
}

// The fibers of one host thread. They are made on first use and kept until the thread ends.
struct FiberPool {
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<std::unique_ptr<WarpState>> warps;
  std::vector<std::unique_ptr<BlockState>> blocks;
  bool busy = false;

  ~FiberPool() {
    for (auto& l : lanes) {
#if EW_TSAN
      __tsan_destroy_fiber(l->tsan_fiber);
#endif
      munmap(l->stack_bottom - guard_bytes(), kStackBytes + guard_bytes());
    }
  }

  static size_t guard_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

  bool add_lane() {
    const size_t guard = guard_bytes();
    void* map = mmap(nullptr, kStackBytes + guard, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return false;
    mprotect(map, guard, PROT_NONE);  // an overflow faults instead of corrupting a neighbour
    auto fresh = std::make_unique<Lane>();
    memset(fresh.get(), 0, sizeof(Lane));
    fresh->stack_bottom = static_cast<u8*>(map) + guard;
    auto* top = reinterpret_cast<void**>(fresh->stack_bottom + kStackBytes);
#if defined(__x86_64__)
    top[-2] = reinterpret_cast<void*>(&ew_fiber_start);  // return address of the first switch
    fresh->stack_pointer = top - 8;                      // below it: six zeroed registers
#else
    fresh->stack_pointer = top - 20;
    static_cast<void**>(fresh->stack_pointer)[11] = reinterpret_cast<void*>(&ew_fiber_start);  // x30
#endif
#if EW_TSAN
    fresh->tsan_fiber = __tsan_create_fiber(0);
#endif
    lanes.push_back(std::move(fresh));
    return true;
  }
};

static thread_local FiberPool pool;

static int run(Schedule* schedule, const LaunchSpec* specs, u32 num_specs) {
  if (pool.busy) return ew_fail(-EBUSY, "a launch is already running on this thread");
  u32 num_lanes = 0, num_warps = 0, num_blocks = 0;
  for (u32 i = 0; i < num_specs; ++i) {
    const LaunchSpec& spec = specs[i];
    if (spec.grid_dim == 0 || spec.block_dim == 0 || spec.warp_size == 0 || spec.warp_size > 32 ||
        spec.block_dim % spec.warp_size != 0)
      return ew_fail(-EINVAL, "bad launch geometry: grid %u, block %u, warp %u", spec.grid_dim, spec.block_dim,
                     spec.warp_size);
    num_lanes += spec.grid_dim * spec.block_dim;
    num_warps += spec.grid_dim * (spec.block_dim / spec.warp_size);
    num_blocks += spec.grid_dim;
    if (num_lanes > kMaxLanes)
      return ew_fail(-EINVAL, "launch of more than %u lanes on the CPU target", kMaxLanes);
  }
  while (pool.lanes.size() < num_lanes)
    if (!pool.add_lane()) return ew_fail(-ENOMEM, "no memory for a fiber stack of %zu bytes", kStackBytes);
  while (pool.warps.size() < num_warps) pool.warps.push_back(std::make_unique<WarpState>());
  while (pool.blocks.size() < num_blocks) pool.blocks.push_back(std::make_unique<BlockState>());

  u32 lane_idx = 0, warp_idx = 0, block_idx = 0;
  for (u32 i = 0; i < num_specs; ++i) {
    const LaunchSpec& spec = specs[i];
    for (u32 b = 0; b < spec.grid_dim; ++b) {
      BlockState* block = pool.blocks[block_idx++].get();
      block->block_idx = b, block->block_dim = spec.block_dim, block->grid_dim = spec.grid_dim;
      block->num_warps = spec.block_dim / spec.warp_size;
      block->live = spec.block_dim, block->arrived = 0, block->generation = 0;
      block->num_shared = 0, block->arena_used = 0, block->view = 0;
      for (u32 t = 0; t < spec.block_dim; ++t) {
        if (t % spec.warp_size == 0) {
          WarpState* warp = pool.warps[warp_idx++].get();
          warp->size = warp->live = spec.warp_size, warp->warp_idx = t / spec.warp_size;
          warp->arrived = 0, warp->generation = 0;
        }
        Lane* l = pool.lanes[lane_idx].get();
        l->warp = pool.warps[warp_idx - 1].get();
        l->block = block, l->schedule = schedule, l->entry = spec.entry, l->args = spec.args;
        l->thread_idx = t, l->lane_idx = t % spec.warp_size;
        l->next = pool.lanes[(lane_idx + 1) % num_lanes].get();
        l->prev = pool.lanes[(lane_idx + num_lanes - 1) % num_lanes].get();
        ++lane_idx;
      }
    }
  }
  schedule->alive = num_lanes;

  pool.busy = true;
  seeded_launch = schedule->is_seeded;
  Lane* first = pool.lanes[0].get();
#if EW_ASAN
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  void* bottom = nullptr;
  pthread_attr_getstack(&attributes, &bottom, &schedule->main_stack_bytes);
  pthread_attr_destroy(&attributes);
  schedule->main_stack_bottom = bottom;
  __sanitizer_start_switch_fiber(&schedule->main_fake_stack, first->stack_bottom, kStackBytes);
#endif
#if EW_TSAN
  schedule->main_tsan_fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(first->tsan_fiber, 0);
#endif
  lane = first;
  ew_fiber_switch(&schedule->main_stack_pointer, first->stack_pointer);
#if EW_ASAN
  __sanitizer_finish_switch_fiber(schedule->main_fake_stack, nullptr, nullptr);
#endif
  lane = nullptr;
  seeded_launch = false;
  pool.busy = false;
  return 0;
}

int run_fast(const LaunchSpec* specs, u32 num_specs, void (*idle)(void*), void* idle_context) {
  Schedule schedule;
  schedule.idle = idle, schedule.idle_context = idle_context;
  return run(&schedule, specs, num_specs);
}

int run_seeded(const LaunchSpec* specs, u32 num_specs, void (*idle)(void*), void* idle_context, u64 seed,
               const Range* watched, u32 num_watched) {
  Schedule schedule(watched, num_watched);
  schedule.idle = idle, schedule.idle_context = idle_context;
  schedule.is_seeded = true, schedule.random_state = seed;
  const int result = run(&schedule, specs, num_specs);
  while (!schedule.held.empty()) schedule.release(0);  // of the HCA
  return result;
}

}  // namespace ew
