// A kernel that runs a list of queue-pair operations, so that tests and benchmarks can drive
// ibgda_device.cuh directly, with any number of warps.
#pragma once

#include "client_state.cuh"

enum IbgdaOp : u32 {
  kRunPut = 0, kRunPutAlwaysPost = 1, kRunInline = 2, kRunAdd4 = 3, kRunAdd8 = 4, kRunGet = 5, kRunQuiet = 6,
  kRunSignalImm = 7,
  kRunFill = 8,   // lane 0 stores `value` to every word of num_bytes at local_addr, relaxed
  kRunAwait = 9,  // until the word at local_addr is `value`
  kRunCopy = 10,  // lane 0 copies num_bytes at remote_addr (an address of ours) to local_addr
};

struct IbgdaOperation {  // 48 bytes
  u64 remote_addr, local_addr, num_bytes, value;
  u32 op, qp_id, message_idx, reserved;
};

struct IbgdaRunArgs {
  u64 peer;        // IbgdaPeer*
  u64 operations;  // IbgdaOperation [num_warps of the launch][num_operations]
  u64 status;      // KernelStatus [num_warps of the launch]
  u32 num_operations, peer_idx;
};

EW_DEVICE bool run_operation(const IbgdaRunArgs& args, const IbgdaOperation& o, KernelStatus* status) {
  const IbgdaPeer* peer = at<const IbgdaPeer>(args.peer);
  const u32 bytes = static_cast<u32>(o.num_bytes);
  switch (o.op) {
    case kRunPut:
      return ibgda_put_nbi_warp<false>(peer, o.remote_addr, o.local_addr, o.num_bytes, o.qp_id, o.message_idx, status,
                                       args.peer_idx);
    case kRunPutAlwaysPost:
      return ibgda_put_nbi_warp<true>(peer, o.remote_addr, o.local_addr, o.num_bytes, o.qp_id, o.message_idx, status,
                                      args.peer_idx);
    case kRunInline:
      return ibgda_put_inline(peer, o.remote_addr, o.value, bytes, o.qp_id, status, args.peer_idx);
    case kRunAdd4:
      return ibgda_add_nonfetch(peer, o.remote_addr, o.value, 4, o.qp_id, status, args.peer_idx);
    case kRunAdd8:
      return ibgda_add_nonfetch(peer, o.remote_addr, o.value, 8, o.qp_id, status, args.peer_idx);
    case kRunGet:
      return ibgda_get_nbi_warp(peer, o.remote_addr, o.local_addr, bytes, o.qp_id, status, args.peer_idx);
    case kRunSignalImm:
      return ibgda_signal_imm(peer, o.remote_addr, static_cast<u32>(o.value), o.qp_id, status, args.peer_idx);
    case kRunFill:
      for (u64 i = 0; lane_id() == 0 && i < o.num_bytes / 8; ++i)
        store_relaxed(at<u64>(o.local_addr) + i, o.value, Scope::kSystem);
      warp_sync();
      return true;
    case kRunAwait: {
      u64 deadline = 0;
      u32 ok = 1;
      while (lane_id() == 0 && ok && load_acquire(at<const u64>(o.local_addr), Scope::kSystem) != o.value) {
        spin_pause();  // first of all: on a CPU it is what executes what was posted
        const u64 now = clock_ns();
        if (deadline == 0) deadline = now + peer->timeout_ns;
        ok = now < deadline;
      }
      if (!ok) report(status, kTimeout, kStagePoll, args.peer_idx, o.value, 0);
      return warp_shuffle(ok, 0);
    }
    case kRunCopy:
      for (u64 i = 0; lane_id() == 0 && i < o.num_bytes / 8; ++i)
        at<u64>(o.local_addr)[i] = load_relaxed(at<const u64>(o.remote_addr) + i, Scope::kSystem);
      warp_sync();
      return true;
    default: {
      u32 ok = 1;
      if (lane_id() == 0) ok = ibgda_quiet(peer, peer_qp(peer, o.qp_id), status, args.peer_idx);
      return warp_shuffle(ok, 0);
    }
  }
}

EW_KERNEL(ibgda_run, IbgdaRunArgs) {
  const u32 warp = global_warp();
  for (u32 i = 0; i < args.num_operations; ++i) {
    const IbgdaOperation& operation =
        at<const IbgdaOperation>(args.operations)[static_cast<u64>(warp) * args.num_operations + i];
    if (!run_operation(args, operation, at<KernelStatus>(args.status) + warp)) return;
  }
}
