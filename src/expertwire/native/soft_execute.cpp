// One work-queue entry for a peer on this host: check everything, then move bytes.
#include "soft_wqe.hpp"

#include <algorithm>
#include <cstring>

namespace {

constexpr u32 kNoReceiveYet = 0xfffffffe;  // not a syndrome: the entry is tried again

bool load_word(const Data& data, const u8* remote) {
  if (data.count != 1 || data.num_bytes != 8 || reinterpret_cast<uintptr_t>(remote) % 8) return false;
  const u64 v = __atomic_load_n(reinterpret_cast<const u64*>(remote), __ATOMIC_ACQUIRE);
  memcpy(data.list[0].addr, &v, 8);
  return true;
}

// Returns a syndrome or kNoReceiveYet; *finished says whether all bytes are moved.
u32 execute_transfer(ew_qp* qp, Wqe* wqe, u64 max_bytes, u64* moved, bool* finished) {
  const bool is_read = wqe->opcode == kRead;
  Data data;
  if (u32 syndrome = read_data(qp, wqe, 2, is_read ? u32{kLocalWrite} : 0u, &data)) return syndrome;
  const u8* raddr = wqe->segment(1);
  const u64 addr = load_be64(raddr);
  u8* remote = nullptr;
  *finished = true;
  // A write with immediate moves nothing before the peer has a receive for it.
  const bool receive_missing = wqe->opcode == kWriteImm && !has_receive(qp->peer->page);
  if (data.num_bytes == 0)  // a zero-byte write touches nothing, checks nothing
    return receive_missing ? kNoReceiveYet : u32{kSyndromeNone};
  WindowKey* key = find_remote(qp->peer, load_be32(raddr + 8), addr, data.num_bytes,
                               is_read ? kRemoteRead : kRemoteWrite, &remote);
  if (!key) return kRemoteAccess;
  if (receive_missing) {
    release_remote(key);
    return kNoReceiveYet;
  }
  if (!is_read && qp->hca->faulty) {
    release_remote(key);
    send_in_pieces(qp, data.list, data.count, load_be32(raddr + 8), addr);
    *moved = data.num_bytes;
    return kSyndromeNone;
  }
  const bool one_word = is_read ? load_word(data, remote)
                                : data.count == 1 && store_word(data.list[0].addr, data.num_bytes, remote);
  if (!one_word) {
    const u64 count = std::min(data.num_bytes - qp->progress, max_bytes);
    move_bytes(data, remote + qp->progress, qp->progress, count, !is_read);
    __atomic_thread_fence(__ATOMIC_RELEASE);  // before anything that a later WQE writes
    qp->progress += count;
    *moved = count;
    *finished = qp->progress == data.num_bytes;
  } else {
    *moved = data.num_bytes;
  }
  if (*finished && !is_read) qp->peer->touched = true;
  release_remote(key);
  return kSyndromeNone;
}

u32 execute_atomic(ew_qp* qp, Wqe* wqe, u64* moved) {
  AtomicShape shape;
  if (u32 syndrome = atomic_shape(wqe->opcode, wqe->opmod, &shape)) return syndrome;
  const u32 num_bytes = shape.num_bytes;
  if (wqe->num_segments < 3 + shape.num_segments) return kLocalQpOperation;
  Data sink;
  if (u32 syndrome = read_data(qp, wqe, 2 + shape.num_segments, kLocalWrite, &sink)) return syndrome;
  if (sink.num_bytes != num_bytes) return kLocalLength;
  const u64 addr = load_be64(wqe->segment(1));
  if (addr % num_bytes != 0) return kRemoteInvalidRequest;
  u8* remote = nullptr;
  WindowKey* key =
      find_remote(qp->peer, load_be32(wqe->segment(1) + 8), addr, num_bytes, kRemoteAtomic, &remote);
  if (!key) return kRemoteAccess;
  if (reinterpret_cast<uintptr_t>(remote) % num_bytes != 0) {  // the peer placed the range at an odd offset
    release_remote(key);
    return kRemoteInvalidRequest;
  }
  u64 result = apply_atomic(wqe->opcode, num_bytes, wqe->segment(2), remote);
  qp->peer->touched = true;
  release_remote(key);
  move_bytes(sink, reinterpret_cast<u8*>(&result), 0, num_bytes, false);
  *moved = num_bytes;
  return kSyndromeNone;
}

}  // namespace

void trace_entry(ew::TraceKind kind, const ew_qp* qp, const Wqe& wqe, u64 begin_ns, u64 end_ns, u64 num_bytes,
                 u32 syndrome) {
  ew::TraceRecord record = {};
  record.kind = kind, record.begin_ns = begin_ns, record.end_ns = end_ns;
  record.hca = reinterpret_cast<u64>(qp->hca), record.qpn = qp->info.qpn, record.idx = wqe.idx;
  record.num_bytes = num_bytes, record.syndrome = syndrome;
  memcpy(record.wqe, wqe.bytes, ew::kTraceWqeBytes);
  ew::trace(record);
}

Step execute_next(ew_qp* qp, u64 max_bytes, u64* moved) {
  *moved = 0;
  if (qp->ci >= qp->pi) return Step::kNothing;
  if (qp->state == kErr || qp->state == kSqe) {
    flush_posted(qp);
    return Step::kProgress;
  }
  if (qp->state != kRts) return Step::kNothing;
  Wqe wqe;
  read_wqe(qp, qp->ci, &wqe);
  if (ew::tracing() && qp->trace_begin_ns == 0) qp->trace_begin_ns = monotonic_ns();
  const bool fits = wqe.num_segments > 0 && qp->ci + wqe.num_blocks() <= qp->pi;
  bool finished = true;
  u32 syndrome = check_wqe(qp, wqe);
  if (syndrome == kSyndromeNone && qp->peer->lost) syndrome = kTransportRetryExceeded;
  if (syndrome == kSyndromeNone && qp->hca->hook && qp->progress == 0 && qp->rnr_since_ns == 0)  // once, not for every piece or retry
    syndrome = qp->hca->hook(qp->hca->hook_context, qp->info.qpn, qp->ci, wqe.bytes, wqe.num_segments * 16);
  if (syndrome == kHookStall) return Step::kStalled;

  // Only masked atomics have an opmod: a spilled index must not pass for one.
  if (syndrome == kSyndromeNone && wqe.opmod != 0 && !wqe.masked()) syndrome = kLocalQpOperation;

  // Atomics, reads and immediates come after the writes before them, whatever the path does.
  if (!qp->pieces.empty() && wqe.opcode != kWrite) land_all(qp);
  if (syndrome == kSyndromeNone) {
    switch (wqe.opcode) {
      case kNop:
        break;
      case kWrite:
      case kWriteImm:
      case kRead:
        if (wqe.num_segments < 2) syndrome = kLocalQpOperation;
        else syndrome = execute_transfer(qp, &wqe, max_bytes, moved, &finished);
        break;
      case kCompareSwap:
      case kFetchAdd:
      case kMaskedCompareSwap:
      case kMaskedFetchAdd:
        syndrome = execute_atomic(qp, &wqe, moved);
        break;
      case kDump: {
        Data data;
        syndrome = read_data(qp, &wqe, 1, 0, &data);
        break;
      }
      default:
        syndrome = kLocalQpOperation;
    }
  }
  if (syndrome == kNoReceiveYet) {
    const u64 now = monotonic_ns();
    if (qp->rnr_since_ns == 0) qp->rnr_since_ns = now;
    if (now - qp->rnr_since_ns < kRnrTimeoutNs) return Step::kStalled;
    syndrome = kRnrRetryExceeded;
  }
  qp->hca->stats.bytes += *moved;
  if (syndrome == kSyndromeNone && !finished) return Step::kProgress;
  const u64 num_bytes = std::max(qp->progress, *moved);
  if (!qp->pieces.empty() && wqe.opcode == kWriteImm) land_all(qp);
  if (syndrome == kSyndromeNone && wqe.opcode == kWriteImm) {
    put_receive(qp->peer->page, wqe.bytes + 12, num_bytes, qp->remote_qpn);
    qp->peer->touched = true;
  }
  qp->rnr_since_ns = 0;
  qp->progress = 0;
  if (ew::tracing())
    trace_entry(ew::kTraceExecuted, qp, wqe, qp->trace_begin_ns, monotonic_ns(), num_bytes, syndrome);
  qp->trace_begin_ns = 0;
  ++qp->hca->stats.num_wqe[wqe.opcode & 63];
  if (syndrome != kSyndromeNone) {
    fail_qp(qp, qp->ci, wqe.opcode, syndrome);
    qp->ci += fits ? wqe.num_blocks() : qp->pi - qp->ci;
    flush_posted(qp);
    return Step::kProgress;
  }
  const u64 idx = qp->ci;
  qp->ci += wqe.num_blocks();
  if (wqe.completion >= kCompletionAlways) write_cqe(qp, idx, wqe.opcode, static_cast<u32>(num_bytes));
  return Step::kProgress;
}
