// GPU-initiated RDMA: a warp turns one put into WQEs, orders them, and rings the doorbell.
//
//   ibgda_put_nbi_warp -> ibgda_get_lkey_and_rkey   where does this chunk end, with which keys
//                      -> ibgda_reserve_wqe_slots   consecutive slots, only when they are free
//                      -> ibgda_write_rdma_write_wqe
//                      -> ibgda_submit_requests     wait for our turn, then maybe ring
//                         -> ibgda_post_send -> ibgda_update_dbr, ibgda_ring_db
//   ibgda_poll_cq / ibgda_quiet                     completions, errors included
//
// Completion indices are 64-bit here; the hardware's are 16-bit and are widened in one place
// (ibgda_poll_cq).
#pragma once

#include "mlx5_wqe.cuh"

constexpr u32 kNumRequestInBatch = 4;  // without always-post, every 4th message rings

enum Status : u32 {
  kOk = 0,
  kNoResource = 1,       // send queue stayed full until the deadline
  kCompletionError = 2,  // error CQE: syndrome and index say which
  kTimeout = 3,
  kNoKey = 4,            // address not inside any registered region
  kTooManyServers = 5,
  kBadArgument = 6,
  kPeerLost = 7,
};
enum Stage : u32 {
  kStageRoute = 1, kStagePack = 2, kStageReserve = 3, kStageSubmit = 4, kStageQuiet = 5, kStagePut = 6,
  kStagePoll = 7, kStageGather = 8, kStageReply = 9, kStageCombine = 10,
};

// The first problem of a launch; later ones are dropped. 40 bytes, zeroed by the host.
struct KernelStatus {
  u32 code, stage, peer, syndrome;
  u64 expected, seen, wqe_idx;
};

struct IbgdaKey {  // one registered region, 32 bytes; tables are per (peer, region)
  u64 begin, end;  // addresses as WQEs carry them
  u32 key_be, reserved;
  u64 mapped;  // remote regions: where `begin` is mapped here for direct stores, 0 if it is not
};

enum DoorbellMode : u32 {
  kDoorbellRegister = 0,  // DBREC, then the 8-byte register (BlueFlame address, fixed)
  kDoorbellRecordOnly = 1,
  kDoorbellProxy = 2,     // producer index in host memory; a CPU thread rings (CPU-assisted)
};

struct IbgdaQp {  // device state of one queue pair, 128 bytes
  u64 sq_addr, dbrec_addr, doorbell_addr, cq_addr;
  u32 qpn, num_wqe;  // num_wqe: power of two
  u32 scope;         // Scope of ring, DBREC and CQ
  u32 doorbell_mode;
  u64 proxy_addr;        // DoorbellMode::kDoorbellProxy: u64 producer index
  u64 scratch_addr;      // 16 registered bytes that atomics and gets of one word write their result to
  u32 scratch_lkey_be;
  u32 post_lock;
  u64 resv_head;   // next slot to hand out
  u64 ready_head;  // slots below it are written, in order
  u64 prod_idx;    // rung up to here
  u64 cons_idx;    // known completed up to here
  u64 error;       // 0, or syndrome | (wqe index << 8) | 1 << 63 of the first error CQE
  u64 reserved;
};

struct IbgdaPeer {  // "p2p_state": what device code needs to reach one peer, 48 bytes
  u64 qps, local_keys, remote_keys;  // IbgdaQp*, IbgdaKey*, IbgdaKey*
  u32 num_qps, num_local_keys, num_remote_keys, reserved;
  u64 timeout_ns;  // bound of every wait below
};

struct KeyLookup {
  u32 lkey_be, rkey_be;
  u64 bytes;   // left in both regions, at most kMaxChunkBytes; 0: not registered
  u64 mapped;  // remote address as mapped here, or 0
};

EW_DEVICE Scope qp_scope(const IbgdaQp* qp) { return static_cast<Scope>(qp->scope); }

EW_DEVICE void report(KernelStatus* status, u32 code, u32 stage, u32 peer, u64 expected, u64 seen, u32 syndrome = 0,
                      u64 wqe_idx = 0) {
  if (atomic_cas(&status->code, 0u, code) != 0) return;
  status->stage = stage, status->peer = peer, status->syndrome = syndrome;
  status->expected = expected, status->seen = seen, status->wqe_idx = wqe_idx;
}

EW_DEVICE const IbgdaKey* find_key(u64 table, u32 num_keys, u64 addr) {
  const auto* keys = reinterpret_cast<const IbgdaKey*>(table);
  for (u32 i = 0; i < num_keys; ++i)
    if (addr >= keys[i].begin && addr < keys[i].end) return &keys[i];
  return nullptr;
}

// Keys for a transfer from local_addr to remote_addr, and how many bytes both regions still hold.
// Addresses are virtual: the HCA translates remote ones with the rkey's table.
EW_DEVICE KeyLookup ibgda_get_lkey_and_rkey(const IbgdaPeer* peer, u64 local_addr, u64 remote_addr) {
  const IbgdaKey* local = find_key(peer->local_keys, peer->num_local_keys, local_addr);
  const IbgdaKey* remote = find_key(peer->remote_keys, peer->num_remote_keys, remote_addr);
  if (!local || !remote) return {0, 0, 0, 0};
  const u64 left = min_u64(local->end - local_addr, remote->end - remote_addr);
  const u64 mapped = remote->mapped ? remote->mapped + (remote_addr - remote->begin) : 0;
  return {local->key_be, remote->key_be, min_u64(left, kMaxChunkBytes), mapped};
}

EW_DEVICE u8* ibgda_get_wqe_ptr(const IbgdaQp* qp, u64 wqe_idx) {
  return reinterpret_cast<u8*>(qp->sq_addr) + (wqe_idx & (qp->num_wqe - 1)) * kWqeBytes;
}

EW_DEVICE void ibgda_note_error(IbgdaQp* qp, u32 syndrome, u64 wqe_idx) {
  atomic_cas(&qp->error, 0ull, static_cast<u64>(syndrome) | (wqe_idx << 8) | (1ull << 63));
}

// Widens the collapsed CQ's 16-bit counter to the 64-bit index below which everything completed,
// and returns that index; an error completion goes to qp->error.
//
// Slots are granted by credit, so what completed last lies within num_wqe (at most 32768) of what
// is reserved, and the widening is unique. The reservation is read before the CQE: if more
// completes in between, the result is too low for this call and never too high.
// What another warp noted in cons_idx is read, with acquire, before the CQE too: what the HCA wrote before
// that completion, and an error, is then seen by this warp and not only by the one that noted it.
// By the letter of PTX the noting atomic_max, which is relaxed, would have to release; no device is known to
// let it overtake the acquiring load of the completion before it, and a fence there costs every advance.
EW_DEVICE u64 ibgda_poll_cq(IbgdaQp* qp) {
  const u32* words = reinterpret_cast<const u32*>(qp->cq_addr);
  const u64 known = load_acquire(&qp->cons_idx, qp_scope(qp));
  const u64 newest_reserved = load_acquire(&qp->resv_head, qp_scope(qp)) - 1;
  const CqeTail tail = cqe_tail(load_acquire(words + 15, qp_scope(qp)));
  if (tail.opcode == kCqeInvalid) return known;  // 0xff fill: nothing completed yet
  const u64 completed = newest_reserved - ((newest_reserved - tail.wqe_counter) & 0xffff);
  if (tail.opcode == kCqeRequesterError || tail.opcode == kCqeResponderError) {
    ibgda_note_error(qp, cqe_syndrome(load_relaxed(words + 13, qp_scope(qp))), completed);
    fence_acq_rel(qp_scope(qp));  // the error before the index that says it is complete
  }
  if (static_cast<i64>(completed + 1 - known) <= 0) return known;
  atomic_max(&qp->cons_idx, completed + 1);
  return completed + 1;
}

EW_DEVICE bool ibgda_failed(const IbgdaQp* qp, KernelStatus* status, u32 stage, u32 peer_idx) {
  const u64 error = load_relaxed(&qp->error, qp_scope(qp));
  if (error == 0) return false;
  report(status, kCompletionError, stage, peer_idx, 0, 0, error & 0xff, (error & ~(1ull << 63)) >> 8);
  return true;
}

EW_DEVICE void ibgda_update_dbr(IbgdaQp* qp, u64 next_wqe_idx) {
  store_release(reinterpret_cast<u32*>(qp->dbrec_addr) + 1, doorbell_record(next_wqe_idx), qp_scope(qp));
}
EW_DEVICE void ibgda_ring_db(IbgdaQp* qp, u64 next_wqe_idx) {
  if (qp->doorbell_mode == kDoorbellRegister)
    store_release(reinterpret_cast<u64*>(qp->doorbell_addr), doorbell_register(next_wqe_idx, qp->qpn), qp_scope(qp));
  else if (qp->doorbell_mode == kDoorbellProxy)
    store_release(reinterpret_cast<u64*>(qp->proxy_addr), next_wqe_idx, qp_scope(qp));
}

// Publishes everything below next_wqe_idx. Two producers may call it in either order. False if
// the lock was not released within the deadline (a producer was lost while it held it).
EW_DEVICE bool ibgda_post_send(const IbgdaPeer* peer, IbgdaQp* qp, u64 next_wqe_idx) {
  u64 deadline = 0;
  while (atomic_cas(&qp->post_lock, 0u, 1u) != 0) {
    if (deadline == 0) deadline = clock_ns() + peer->timeout_ns;
    if (clock_ns() > deadline) return false;
    spin_pause();
  }
  fence(qp_scope(qp));
  if (atomic_max(&qp->prod_idx, next_wqe_idx) < next_wqe_idx) {
    ibgda_update_dbr(qp, next_wqe_idx);
    ibgda_ring_db(qp, next_wqe_idx);
  }
  // The register store must be performed before another producer can ring a later index.
  store_release(&qp->post_lock, 0u, qp_scope(qp));
  return true;
}

// Takes num_wqes consecutive slots for the warp (called by one lane). Slots are granted only when
// the HCA has consumed what they held; a full ring is waited for until the peer's deadline.
// Returns false with kNoResource or the completion error in status; nothing is reserved then.
EW_DEVICE bool ibgda_reserve_wqe_slots(const IbgdaPeer* peer, IbgdaQp* qp, u32 num_wqes, u64* base_idx,
                                       KernelStatus* status, u32 peer_idx) {
  u64 deadline = 0;  // the clock is read only by who has to wait
  for (;;) {
    if (ibgda_failed(qp, status, kStageReserve, peer_idx)) return false;
    const u64 head = load_relaxed(&qp->resv_head, qp_scope(qp));
    const u64 done = load_relaxed(&qp->cons_idx, qp_scope(qp));
    if (head + num_wqes - done <= qp->num_wqe) {
      if (atomic_cas(&qp->resv_head, head, head + num_wqes) == head) {
        *base_idx = head;
        return true;
      }
      continue;  // another warp took slots: look again
    }
    if (head + num_wqes - ibgda_poll_cq(qp) <= qp->num_wqe) continue;
    // Puts that did not ring yet (batching rule) hold slots: let them go.
    ibgda_post_send(peer, qp, load_relaxed(&qp->ready_head, qp_scope(qp)));
    const u64 now = clock_ns();
    if (deadline == 0) deadline = now + peer->timeout_ns;
    if (now > deadline) {
      report(status, kNoResource, kStageReserve, peer_idx, head + num_wqes, done);
      return false;
    }
    spin_pause();
  }
}

EW_DEVICE void ibgda_write_segments(IbgdaQp* qp, u64 wqe_idx, const WqeSegments& segments) {
  auto* slot = reinterpret_cast<Vec16*>(ibgda_get_wqe_ptr(qp, wqe_idx));
  store_vec16(slot, segments.ctrl, qp_scope(qp));
  store_vec16(slot + 1, segments.raddr, qp_scope(qp));
  store_vec16(slot + 2, segments.data, qp_scope(qp));
}

EW_DEVICE void ibgda_write_rdma_write_wqe(IbgdaQp* qp, u64 wqe_idx, u64 local_addr, u32 lkey_be, u64 remote_addr,
                                          u32 rkey_be, u32 num_bytes) {
  ibgda_write_segments(qp, wqe_idx,
                       {wqe_ctrl_segment(kOpRdmaWrite, wqe_idx, qp->qpn, 3, kCompletionAlways),
                        wqe_raddr_segment(remote_addr, rkey_be), wqe_data_segment(local_addr, num_bytes, lkey_be)});
}

// One lane, after the warp wrote its WQEs: makes them visible, waits for its turn, rings by rule.
// The turn comes soon: whoever holds an earlier one has its slots and only writes WQEs. If it
// never comes, that producer is gone and the queue with it: the queue is marked failed.
EW_DEVICE bool ibgda_submit_requests(const IbgdaPeer* peer, IbgdaQp* qp, u64 base_idx, u32 num_wqes,
                                     u32 message_idx, bool always_post, KernelStatus* status, u32 peer_idx) {
  fence(qp_scope(qp));
  u64 deadline = 0, seen;
  while ((seen = atomic_cas(&qp->ready_head, base_idx, base_idx + num_wqes)) != base_idx) {
    if (deadline == 0) deadline = clock_ns() + peer->timeout_ns;
    if (clock_ns() > deadline) {
      report(status, kTimeout, kStageSubmit, peer_idx, base_idx, seen);
      ibgda_note_error(qp, 0, base_idx);
      return false;
    }
    spin_pause();
  }
  if (!always_post && (message_idx + 1) % kNumRequestInBatch != 0) return true;
  if (ibgda_post_send(peer, qp, base_idx + num_wqes)) return true;
  report(status, kTimeout, kStageSubmit, peer_idx, 0, 1);
  return false;
}

// Non-blocking put of num_bytes by one warp. All lanes call it with the same arguments.
//   remote_addr  where it lands: an address inside a region that the peer gave us a key for
//   local_addr   source, inside registered local memory; must stay unchanged until completion
//   message_idx  only for the doorbell rule; the last put of a message must use kAlwaysDoPostSend
// Lane i builds the WQE of chunk i; more than warp_size() chunks go in rounds.
// Returns false on error (all lanes agree), with the reason in status.
template <bool kAlwaysDoPostSend>
EW_DEVICE bool ibgda_put_nbi_warp(const IbgdaPeer* peer, u64 remote_addr, u64 local_addr, u64 num_bytes, u32 qp_id,
                                  u32 message_idx, KernelStatus* status, u32 peer_idx) {
  IbgdaQp* qp = reinterpret_cast<IbgdaQp*>(peer->qps) + qp_id % peer->num_qps;
  while (num_bytes > 0) {
    KeyLookup mine = {0, 0, 0, 0};
    u64 my_local = 0, my_remote = 0;
    u32 num_wqes = 0, registered = 1;
    const u32 max_wqes = static_cast<u32>(min_u64(warp_size(), qp->num_wqe));
    while (num_bytes > 0 && num_wqes < max_wqes) {
      // Every lane walks the chunk boundaries; lane num_wqes keeps this one.
      const KeyLookup chunk = ibgda_get_lkey_and_rkey(peer, local_addr, remote_addr);
      if (chunk.bytes == 0) {
        registered = 0;
        break;
      }
      const u64 chunk_bytes = min_u64(chunk.bytes, num_bytes);
      if (lane_id() == num_wqes) {
        mine = chunk, mine.bytes = chunk_bytes;
        my_local = local_addr, my_remote = remote_addr;
      }
      local_addr += chunk_bytes, remote_addr += chunk_bytes, num_bytes -= chunk_bytes;
      ++num_wqes;
    }
    u64 base_idx = 0;
    if (lane_id() == 0) {
      if (!registered)
        report(status, kNoKey, kStagePut, peer_idx, local_addr, remote_addr);
      else if (!ibgda_reserve_wqe_slots(peer, qp, num_wqes, &base_idx, status, peer_idx))
        registered = 0;
    }
    registered = warp_shuffle(registered, 0);
    if (!registered) return false;
    base_idx = warp_shuffle(base_idx, 0);
    if (lane_id() < num_wqes)
      ibgda_write_rdma_write_wqe(qp, base_idx + lane_id(), my_local, mine.lkey_be, my_remote, mine.rkey_be,
                                 static_cast<u32>(mine.bytes));
    warp_sync();
    u32 ok = 1;
    if (lane_id() == 0)
      ok = ibgda_submit_requests(peer, qp, base_idx, num_wqes, message_idx, kAlwaysDoPostSend && num_bytes == 0,
                                 status, peer_idx);
    if (!warp_shuffle(ok, 0)) return false;
  }
  return true;
}

// One WQE of three segments built by lane 0, always rung. The other lanes wait.
EW_DEVICE bool ibgda_post_one(const IbgdaPeer* peer, IbgdaQp* qp, u32 opcode, u32 num_segments, const Vec16& raddr,
                              const Vec16& third, const Vec16& fourth, u32 imm_be, KernelStatus* status,
                              u32 peer_idx) {
  u32 ok = 1;
  if (lane_id() == 0) {
    u64 idx = 0;
    ok = ibgda_reserve_wqe_slots(peer, qp, 1, &idx, status, peer_idx);
    if (ok) {
      ibgda_write_segments(
          qp, idx, {wqe_ctrl_segment(opcode, idx, qp->qpn, num_segments, kCompletionAlways, imm_be), raddr, third});
      if (num_segments > 3)
        store_vec16(reinterpret_cast<Vec16*>(ibgda_get_wqe_ptr(qp, idx)) + 3, fourth, qp_scope(qp));
      ok = ibgda_submit_requests(peer, qp, idx, 1, 0, true, status, peer_idx);
    }
  }
  return warp_shuffle(ok, 0);
}

EW_DEVICE IbgdaQp* peer_qp(const IbgdaPeer* peer, u32 qp_id) {
  return reinterpret_cast<IbgdaQp*>(peer->qps) + qp_id % peer->num_qps;
}
EW_DEVICE const IbgdaKey* remote_key(const IbgdaPeer* peer, u64 remote_addr, KernelStatus* status, u32 peer_idx) {
  const IbgdaKey* key = find_key(peer->remote_keys, peer->num_remote_keys, remote_addr);
  if (!key && lane_id() == 0) report(status, kNoKey, kStagePut, peer_idx, 0, remote_addr);
  return key;
}

// Put of one word (1..12 bytes, here up to 8) carried inside the WQE: no source buffer. As a write
// with immediate it takes a receive of the peer, which completes when this word and all writes
// before it are in, also where writes may pass each other.
EW_DEVICE bool ibgda_put_inline(const IbgdaPeer* peer, u64 remote_addr, u64 value, u32 num_bytes, u32 qp_id,
                                KernelStatus* status, u32 peer_idx, u32 opcode = kOpRdmaWrite, u32 imm = 0) {
  const IbgdaKey* key = remote_key(peer, remote_addr, status, peer_idx);
  if (!key) return false;
  return ibgda_post_one(peer, peer_qp(peer, qp_id), opcode, 3, wqe_raddr_segment(remote_addr, key->key_be),
                        wqe_inline_segment(value, num_bytes), {}, bswap32(imm), status, peer_idx);
}

// Non-fetching add: masked fetch-add whose old value lands in the queue's scratch word. The IB
// architecture orders it after the writes before it, also where writes may pass each other.
EW_DEVICE bool ibgda_add_nonfetch(const IbgdaPeer* peer, u64 remote_addr, u64 add, u32 num_bytes, u32 qp_id,
                                  KernelStatus* status, u32 peer_idx) {
  const IbgdaKey* key = remote_key(peer, remote_addr, status, peer_idx);
  if (!key) return false;
  IbgdaQp* qp = peer_qp(peer, qp_id);
  const bool wide = num_bytes == 8;
  return ibgda_post_one(peer, qp, kOpMaskedFetchAdd | (wide ? kOpmodMasked8 : kOpmodMasked4), 4,
                        wqe_raddr_segment(remote_addr, key->key_be),
                        wide ? wqe_atomic_segment(add, 0) : wqe_masked_add4_segment(static_cast<u32>(add), 0),
                        wqe_data_segment(qp->scratch_addr, num_bytes, qp->scratch_lkey_be), 0, status, peer_idx);
}

// Zero-byte write with immediate: tells the peer's receive queue that the writes before it are in.
EW_DEVICE bool ibgda_signal_imm(const IbgdaPeer* peer, u64 remote_addr, u32 imm, u32 qp_id, KernelStatus* status,
                                u32 peer_idx) {
  const IbgdaKey* key = remote_key(peer, remote_addr, status, peer_idx);
  if (!key) return false;
  return ibgda_post_one(peer, peer_qp(peer, qp_id), kOpRdmaWriteImm, 2, wqe_raddr_segment(remote_addr, key->key_be),
                        {}, {}, bswap32(imm), status, peer_idx);
}

// Reads num_bytes (one region on both sides) from the peer; complete after ibgda_quiet.
EW_DEVICE bool ibgda_get_nbi_warp(const IbgdaPeer* peer, u64 remote_addr, u64 local_addr, u32 num_bytes, u32 qp_id,
                                  KernelStatus* status, u32 peer_idx) {
  const KeyLookup keys = ibgda_get_lkey_and_rkey(peer, local_addr, remote_addr);
  if (keys.bytes < num_bytes) {
    if (lane_id() == 0) report(status, kNoKey, kStagePut, peer_idx, local_addr, remote_addr);
    return false;
  }
  return ibgda_post_one(peer, peer_qp(peer, qp_id), kOpRdmaRead, 3, wqe_raddr_segment(remote_addr, keys.rkey_be),
                        wqe_data_segment(local_addr, num_bytes, keys.lkey_be), {}, 0, status, peer_idx);
}

// Waits until everything submitted on the queue so far has completed locally (one lane).
// Returns false with the completion error or the timeout in status.
EW_DEVICE bool ibgda_quiet(const IbgdaPeer* peer, IbgdaQp* qp, KernelStatus* status, u32 peer_idx) {
  const u64 target = load_relaxed(&qp->ready_head, qp_scope(qp));
  ibgda_post_send(peer, qp, target);  // a put that did not ring yet must leave, or the wait is for ever
  const u64 deadline = clock_ns() + peer->timeout_ns;
  for (;;) {
    const u64 done = ibgda_poll_cq(qp);
    if (ibgda_failed(qp, status, kStageQuiet, peer_idx)) return false;
    if (done >= target) return true;
    if (clock_ns() > deadline) {
      report(status, kTimeout, kStageQuiet, peer_idx, target, done);
      return false;
    }
    spin_pause();
  }
}
