// What the blocks of one launch need of each other: who is the last.
#pragma once

#include "client_state.cuh"

// True on the first thread of the block that arrives last; what every block wrote before is then
// visible to everybody, so that a plain (relaxed, system scope) store of a flag publishes it.
// counter: u32 in device memory, 0 before and after the launch. All threads of all blocks call it.
EW_DEVICE bool last_block(u64 counter) {
  block_sync();  // the block's stores come before its arrival
  if (thread_idx() != 0) return false;
  fence(Scope::kSystem);
  if (grid_dim() == 1) return true;
  if (atomic_add(at<u32>(counter), 1u) != grid_dim() - 1) return false;
  store_relaxed(at<u32>(counter), 0u, Scope::kGpu);
  fence(Scope::kSystem);  // the other blocks' stores come before what we do next
  return true;
}
