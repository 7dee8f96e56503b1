// What one launch on the CPU target knows: its live lanes, how the next one is chosen, and, for
// the seeded scheduler, the stores that are not visible yet and the values that loads may still see.
#pragma once

#include <vector>

#include "fiber.hpp"
#include "history.hpp"

namespace ew {

// A store that is not in memory yet. Lanes of the same block see it at once (they synchronise by
// barriers, which order memory only inside the block). A fence or release of GPU scope shows it to all
// lanes of the launch, one of system scope also to the HCA and the peer, which read memory itself.
struct HeldStore {
  BlockState* block;  // null: the HCA
  bool on_gpu;  // visible to every lane
  u8* dst;
  std::vector<u8> bytes;
};

struct Schedule {
  void* main_stack_pointer = nullptr;
  void* main_fake_stack = nullptr;
  void* main_tsan_fiber = nullptr;
  const void* main_stack_bottom = nullptr;
  size_t main_stack_bytes = 0;
  u32 alive = 0;
  u32 idle_spins = 0;
  void (*idle)(void*) = nullptr;
  void* idle_context = nullptr;

  bool is_seeded = false;
  u64 random_state = 0;
  u64 virtual_ns = 0;
  std::vector<HeldStore> held;
  History history;

  explicit Schedule(const Range* watched = nullptr, u32 num_watched = 0) : history(watched, num_watched) {}

  u64 random();                     // splitmix64
  bool one_in(u32 n) { return random() % n == 0; }
  void release(size_t idx);         // makes one held store visible
  bool visible(const HeldStore& store) const { return store.on_gpu || store.block == lane->block; }
  void release_visible(const void* p, size_t num_bytes);  // what this lane sees of a range
  void release_block(BlockState* block);                  // and what any lane may have seen of others
};

Lane* seeded_pick(Schedule* schedule);
void switch_lane(Lane* from, Lane* to);

}  // namespace ew
