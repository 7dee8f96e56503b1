// An HCA as a kernel: it consumes mlx5 work queues where no adapter can, in GPU memory, and moves
// the bytes with loads and stores into memory of peers that is mapped here. Same contract as the
// software HCA (native/soft_*.cpp), the same checks before a byte moves.
//
// A block serves every grid_dim()-th queue. Its first thread reads doorbells and entries, checks
// keys and writes completions; all its threads copy. The kernel runs until it is told to stop, or
// to the end of its lifetime, whatever happens.
#pragma once

#include "hca_execute.cuh"

struct GpuHcaArgs {
  u64 queues;       // HcaQueue [num_queues]
  u64 stop;         // const u32*: the kernel returns when it is not 0
  u64 lifetime_ns;  // and after this in any case
  u64 max_entries;  // of one block, then it returns; 0: no bound
  u32 num_queues, return_when_idle;
};

enum HcaAction : u32 { kHcaIdle = 0, kHcaDone = 1, kHcaCopy = 2 };
constexpr u32 kEntriesPerTurn = 16;  // of one queue before the next gets a turn

// First thread: what to do next on this queue. kHcaDone: it was done here, nothing is left to copy.
EW_DEVICE u32 hca_next(HcaQueue* queue, HcaWork* work) {
  if (queue->state != kQpRts && queue->state != kQpError) return kHcaIdle;
  hca_look_at_doorbells(queue);
  if (queue->ci >= queue->pi) return kHcaIdle;
  if (queue->state == kQpError) {
    hca_flush(queue);
    return kHcaDone;
  }
  hca_read_entry(queue, work);
  work->syndrome = hca_check_entry(queue, work);
  if (work->syndrome == kSyndromeNone && work->num_pieces > 0) return kHcaCopy;
  hca_complete(queue, work);
  return kHcaDone;
}

// All threads: the warps of the block share the bytes.
EW_DEVICE void hca_copy(const HcaWork& work) {
  u64 remote = work.remote;
  for (u32 i = 0; i < work.num_pieces; ++i) {
    const u64 local = work.pieces[i].addr, num_bytes = work.pieces[i].num_bytes;
    for (u64 at_byte = warp_id() * copy_piece(); at_byte < num_bytes; at_byte += num_warps() * copy_piece()) {
      const u64 count = min_u64(copy_piece(), num_bytes - at_byte);
      if (work.to_remote)
        warp_copy(at<u8>(remote + at_byte), at<const u8>(local + at_byte), count);
      else
        warp_copy(at<u8>(local + at_byte), at<const u8>(remote + at_byte), count);
    }
    remote += num_bytes;
  }
}

EW_KERNEL(gpu_hca, GpuHcaArgs) {
  EW_SHARED(HcaWork, work);
  EW_SHARED(u32, action);
  EW_SHARED(u32, go_on);
  const u64 deadline = clock_ns() + args.lifetime_ns;
  u64 num_done = 0;
  u32 idle_rounds = 0;
  for (;;) {
    u32 num_now = 0;
    for (u32 q = block_idx(); q < args.num_queues; q += grid_dim()) {
      HcaQueue* queue = at<HcaQueue>(args.queues) + q;
      for (u32 turn = 0; turn < kEntriesPerTurn; ++turn) {
        if (thread_idx() == 0) action = hca_next(queue, &work);
        block_sync();
        const u32 now = action;
        if (now == kHcaCopy) hca_copy(work);
        block_sync();
        if (now == kHcaIdle) break;
        if (now == kHcaCopy && thread_idx() == 0) hca_complete(queue, &work);
        ++num_now;
        if (args.max_entries && num_done + num_now >= args.max_entries) break;
      }
    }
    num_done += num_now;
    if (thread_idx() == 0) {
      const bool idle = num_now == 0;
      const bool full = args.max_entries && num_done >= args.max_entries;
      go_on = !full && !(idle && args.return_when_idle) && clock_ns() < deadline &&
              load_acquire(at<const u32>(args.stop), Scope::kSystem) == 0;
      // Doorbells are looked at often at first, then seldom, so that an idle HCA costs little.
      idle_rounds = idle ? idle_rounds + 1 : 0;
      for (u32 i = 0; go_on && i < (idle_rounds >> 6) && i < 16; ++i) spin_pause();
    }
    block_sync();
    const u32 more = go_on;
    block_sync();
    if (!more) return;
    if (num_now == 0) spin_pause();
  }
}
