// One work-queue entry: parse, check everything, then move bytes. Layouts: device/mlx5_wqe.cuh.
#include "soft_hca.hpp"

#include <algorithm>
#include <cstring>

#include "trace.hpp"

namespace {

constexpr u32 kMaxSegments = 63;
constexpr u64 kMaxMessageBytes = 1ull << 30;
constexpr u64 kRnrTimeoutNs = 50'000'000;
constexpr u32 kNoReceiveYet = 0xfffffffe;  // not a syndrome: the entry is tried again
constexpr u32 kCompletionOnError = 0, kCompletionAlways = 2;

enum Opcode : u32 {
  kNop = 0x00, kWrite = 0x08, kWriteImm = 0x09, kRead = 0x10, kCompareSwap = 0x11, kFetchAdd = 0x12,
  kMaskedCompareSwap = 0x14, kMaskedFetchAdd = 0x15, kDump = 0x23,
};

struct Wqe {
  u8 bytes[kMaxSegments * 16];
  u32 opcode, opmod, num_segments, completion;
  u64 idx;
  u64 num_blocks() const { return (num_segments + 3) / 4; }
  const u8* segment(u32 i) const { return bytes + 16 * i; }
};

struct Data {  // what the data segments of a WQE describe
  Segment list[kMaxSegments];
  u32 count = 0;
  u64 num_bytes = 0;
};

// A WQE may wrap at the end of the ring at any block.
void read_wqe(const ew_qp* qp, Wqe* wqe) {
  const u8* ring = reinterpret_cast<const u8*>(qp->info.sq_addr);
  const u32 mask = qp->info.num_wqe - 1;
  const u8* first = ring + (qp->ci & mask) * 64;
  wqe->num_segments = first[7] & 0x3f;
  const u64 posted = qp->pi - qp->ci;  // nothing beyond the producer index is read
  const u64 num_blocks = std::min(std::max<u64>(1, wqe->num_blocks()), posted);
  for (u64 b = 0; b < num_blocks; ++b)
    memcpy(wqe->bytes + 64 * b, ring + ((qp->ci + b) & mask) * 64, std::min<u64>(64, sizeof(wqe->bytes) - 64 * b));
  wqe->opcode = wqe->bytes[3];
  wqe->opmod = wqe->bytes[0];
  wqe->completion = (wqe->bytes[11] >> 2) & 3;
  wqe->idx = qp->ci;
}

// Data segments from `first` on: pointers, each checked against its key, or one inline segment.
// Returns a syndrome.
u32 read_data(ew_qp* qp, Wqe* wqe, u32 first, u32 access, Data* data) {
  for (u32 i = first; i < wqe->num_segments; ++i) {
    const u8* s = wqe->segment(i);
    const u32 count = load_be32(s);
    if (count & 0x80000000u) {
      const u64 length = count & 0x7fffffffu;
      if (i != first || 4 + length > (wqe->num_segments - i) * 16ull || access == kLocalWrite) return kLocalQpOperation;
      data->list[data->count++] = {wqe->bytes + 16 * i + 4, length};
      data->num_bytes = length;
      return kSyndromeNone;
    }
    const u32 lkey = load_be32(s + 4);
    if (lkey == 0x100) break;  // end of list
    const u64 length = count == 0 ? 1ull << 31 : count;  // 0 means 2^31
    u8* addr = nullptr;
    if (!find_local(qp->hca, qp->pd, lkey, load_be64(s + 8), length, access, &addr)) return kLocalProtection;
    data->list[data->count++] = {addr, length};
    data->num_bytes += length;
  }
  return data->num_bytes > kMaxMessageBytes ? kLocalLength : kSyndromeNone;
}

// Moves bytes [from, from + count) between the list and contiguous remote memory.
void move_bytes(const Data& data, u8* remote, u64 from, u64 count, bool to_remote) {
  for (u32 i = 0; i < data.count && count > 0; ++i) {
    const Segment& s = data.list[i];
    if (from >= s.num_bytes) {
      from -= s.num_bytes;
      continue;
    }
    const u64 n = std::min(count, s.num_bytes - from);
    if (to_remote)
      memmove(remote, s.addr + from, n);
    else
      memmove(s.addr + from, remote, n);
    remote += n, count -= n, from = 0;
  }
}

// A word write must never be seen in parts: flags are 8 (or 4) aligned bytes.
bool store_word(const Data& data, u8* remote) {
  const auto at = reinterpret_cast<uintptr_t>(remote);
  if (data.count != 1) return false;
  if (data.num_bytes == 8 && at % 8 == 0) {
    u64 v;
    memcpy(&v, data.list[0].addr, 8);
    __atomic_store_n(reinterpret_cast<u64*>(remote), v, __ATOMIC_RELEASE);
    return true;
  }
  if (data.num_bytes == 4 && at % 4 == 0) {
    u32 v;
    memcpy(&v, data.list[0].addr, 4);
    __atomic_store_n(reinterpret_cast<u32*>(remote), v, __ATOMIC_RELEASE);
    return true;
  }
  return false;
}

bool load_word(const Data& data, const u8* remote) {
  if (data.count != 1 || data.num_bytes != 8 || reinterpret_cast<uintptr_t>(remote) % 8) return false;
  const u64 v = __atomic_load_n(reinterpret_cast<const u64*>(remote), __ATOMIC_ACQUIRE);
  memcpy(data.list[0].addr, &v, 8);
  return true;
}

bool has_receive(const WindowPage* page) {
  const u32 head = __atomic_load_n(&page->recv_head, __ATOMIC_ACQUIRE);
  return static_cast<int>(__atomic_load_n(&page->recv_posted, __ATOMIC_ACQUIRE) - head) > 0;
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
  if (is_read ? !load_word(data, remote) : !store_word(data, remote)) {
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

// Carries out of a bit that is set in `boundary` are dropped: 0 is a plain add, all ones is XOR.
template <typename T>
T add_with_boundary(T a, T b, T boundary) {
  if (boundary == 0) return a + b;
  T sum = 0, carry = 0;
  for (unsigned bit = 0; bit < sizeof(T) * 8; ++bit) {
    const T m = T{1} << bit, x = (a >> bit) & 1, y = (b >> bit) & 1;
    if ((x ^ y ^ carry) & 1) sum |= m;
    carry = (boundary & m) ? 0 : (x & y) | (carry & (x ^ y));
  }
  return sum;
}

template <typename T, typename Change>
T atomic_update(u8* at, Change change) {
  T* word = reinterpret_cast<T*>(at);
  T old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, change(old), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
  }
  return old;
}

u32 execute_atomic(ew_qp* qp, Wqe* wqe, u64* moved) {
  const bool masked = wqe->opcode == kMaskedCompareSwap || wqe->opcode == kMaskedFetchAdd;
  const bool swap = wqe->opcode == kCompareSwap || wqe->opcode == kMaskedCompareSwap;
  if (masked ? (wqe->opmod != 8 && wqe->opmod != 9) : wqe->opmod != 0) return kLocalQpOperation;
  const u32 num_bytes = masked && wqe->opmod == 8 ? 4 : 8;
  const u32 num_atomic = masked && swap && num_bytes == 8 ? 2 : 1;
  if (wqe->num_segments < 3 + num_atomic) return kLocalQpOperation;
  Data sink;
  if (u32 syndrome = read_data(qp, wqe, 2 + num_atomic, kLocalWrite, &sink)) return syndrome;
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
  const u8* a = wqe->segment(2);
  u64 result = 0;
  if (num_bytes == 4) {
    const u32 first = load_be32(a), second = load_be32(a + 4), third = load_be32(a + 8), fourth = load_be32(a + 12);
    const u32 old = atomic_update<u32>(remote, [&](u32 v) {
      if (!swap) return add_with_boundary<u32>(v, first, second);
      return ((v ^ second) & fourth) ? v : (v & ~third) | (first & third);
    });
    result = __builtin_bswap32(old);  // 4-byte results land big-endian
  } else {
    const u64 first = load_be64(a), second = load_be64(a + 8);
    const u64 swap_mask = masked && swap ? load_be64(a + 16) : ~0ull;
    const u64 compare_mask = masked && swap ? load_be64(a + 24) : ~0ull;
    result = atomic_update<u64>(remote, [&](u64 v) {
      if (!swap) return add_with_boundary<u64>(v, first, masked ? second : 0);
      return ((v ^ second) & compare_mask) ? v : (v & ~swap_mask) | (first & swap_mask);
    });
  }
  qp->peer->touched = true;
  release_remote(key);
  move_bytes(sink, reinterpret_cast<u8*>(&result), 0, num_bytes, false);
  *moved = num_bytes;
  return kSyndromeNone;
}

void trace_executed(ew_qp* qp, const Wqe& wqe, u64 num_bytes, u32 syndrome) {
  ew::TraceRecord record = {};
  record.kind = ew::kTraceExecuted, record.begin_ns = qp->trace_begin_ns, record.end_ns = monotonic_ns();
  record.hca = reinterpret_cast<u64>(qp->hca), record.qpn = qp->info.qpn, record.idx = wqe.idx;
  record.num_bytes = num_bytes, record.syndrome = syndrome;
  memcpy(record.wqe, wqe.bytes, ew::kTraceWqeBytes);
  ew::trace(record);
}

// Receive side of WRITE_WITH_IMM: a responder CQE in the peer's window.
void deliver_immediate(ew_qp* qp, const Wqe& wqe, u64 num_bytes) {
  WindowPage* page = qp->peer->page;
  const u32 head = __atomic_load_n(&page->recv_head, __ATOMIC_ACQUIRE);
  u8* cqe = page->recv_cqe[head % kRecvEntries];
  memset(cqe, 0, 64);
  store_be32(cqe + 32, qp->remote_qpn);  // user index
  memcpy(cqe + 36, wqe.bytes + 12, 4);
  store_be32(cqe + 44, static_cast<u32>(num_bytes));
  store_be32(cqe + 56, qp->remote_qpn);
  cqe[63] = static_cast<u8>(1 << 4 | (head / kRecvEntries & 1));  // RESP_WR_IMM, and the owner bit of this round
  __atomic_store_n(&page->recv_head, head + 1, __ATOMIC_RELEASE);
  qp->peer->touched = true;
}

}  // namespace

Step execute_next(ew_qp* qp, u64 max_bytes, u64* moved) {
  *moved = 0;
  if (qp->ci >= qp->pi) return Step::kNothing;
  if (qp->state == kErr || qp->state == kSqe) {
    flush_posted(qp);
    return Step::kProgress;
  }
  if (qp->state != kRts) return Step::kNothing;
  Wqe wqe;
  read_wqe(qp, &wqe);
  if (ew::tracing() && qp->trace_begin_ns == 0) qp->trace_begin_ns = monotonic_ns();
  const u32 index = (load_be32(wqe.bytes) >> 8) & 0xffff;
  const bool fits = wqe.num_segments > 0 && qp->ci + wqe.num_blocks() <= qp->pi;
  u32 syndrome = kSyndromeNone;
  bool finished = true;
  if (!fits || index != (qp->ci & 0xffff) || (load_be32(wqe.bytes + 4) >> 8) != qp->info.qpn)
    syndrome = kLocalQpOperation;
  else if (qp->peer->lost)
    syndrome = kTransportRetryExceeded;
  else if (qp->hca->hook && qp->progress == 0 && qp->rnr_since_ns == 0)  // once, not for every piece or retry
    syndrome = qp->hca->hook(qp->hca->hook_context, qp->info.qpn, qp->ci, wqe.bytes, wqe.num_segments * 16);
  if (syndrome == kHookStall) return Step::kStalled;

  // Only masked atomics have an opmod: a spilled index must not pass for one.
  const bool masked = wqe.opcode == kMaskedCompareSwap || wqe.opcode == kMaskedFetchAdd;
  if (syndrome == kSyndromeNone && wqe.opmod != 0 && !masked) syndrome = kLocalQpOperation;

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
  if (syndrome == kSyndromeNone && wqe.opcode == kWriteImm) deliver_immediate(qp, wqe, num_bytes);
  qp->rnr_since_ns = 0;
  qp->progress = 0;
  if (ew::tracing()) trace_executed(qp, wqe, num_bytes, syndrome);
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
