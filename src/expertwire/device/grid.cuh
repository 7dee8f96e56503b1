// What the blocks of one launch need of each other: who is the last.
#pragma once

#include "client_state.cuh"

// True on the first thread of the block that arrives last of num_blocks; what they wrote before is
// then visible to everybody, so that a plain (relaxed, system scope) store of a flag publishes it.
// Order is handed on: a block's stores come before its arrival for this GPU, and all arrivals come
// before the flag for the whole system.
// counter: u32 in device memory, 0 before and after the launch. All threads of the blocks call it.
EW_DEVICE bool last_block(u64 counter, u32 num_blocks) {
  block_sync();  // the block's stores come before its arrival
  if (thread_idx() != 0) return false;
  if (num_blocks > 1) {
    fence_acq_rel(Scope::kGpu);
    if (atomic_add(at<u32>(counter), 1u) != num_blocks - 1) return false;
    store_relaxed(at<u32>(counter), 0u, Scope::kGpu);
  }
  fence_acq_rel(Scope::kSystem);
  return true;
}
