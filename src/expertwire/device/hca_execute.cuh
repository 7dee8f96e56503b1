// One work-queue entry of the HCA kernel: doorbells, parsing, checks, atomics, completions. Every
// function here is called by one thread. Layouts: mlx5_wqe.cuh; behaviour: docs/hca.md.
#pragma once

#include "client_state.cuh"

// ibv_access_flags, and CQE syndromes of rdma-core mlx5dv.h (MLX5_CQE_SYNDROME_*).
enum HcaAccess : u32 { kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4, kRemoteAtomic = 8 };
enum HcaSyndrome : u32 {
  kSyndromeNone = 0, kLocalLength = 0x01, kLocalQpOperation = 0x02, kLocalProtection = 0x04, kFlushed = 0x05,
  kRemoteInvalidRequest = 0x12, kRemoteAccess = 0x13, kTransportRetryExceeded = 0x15,
};
enum HcaQpState : u32 { kQpReset = 0, kQpInit = 1, kQpRtr = 2, kQpRts = 3, kQpError = 6 };
enum HcaCqFlags : u32 { kCqCollapsed = 1, kCqOverrunIgnore = 2 };
constexpr u32 kOpMaskedCompareSwap = 0x14, kOpDump = 0x23;
constexpr u32 kCqeRequest = 0;
constexpr u32 kMaxEntrySegments = 63, kEndOfList = 0x100;

struct HcaKey {  // memory that entries may name, 48 bytes
  u32 key, access, valid, pd;  // pd: local keys only
  u64 base, length;            // as entries carry addresses
  u64 mapped;                  // where `base` is here
  u64 reserved;
};

struct HcaQueue {  // 224 bytes; keys, state and lost are the host's to write while the kernel runs
  u64 sq_addr, dbrec_addr, uar_addr, cq_addr, cq_dbrec_addr, proxy_addr;
  u64 local_keys, remote_keys;  // HcaKey []
  u32 num_local_keys, num_remote_keys;
  u32 qpn, num_wqe, num_cqe, cq_flags, pd, scope;
  u32 state, lost;
  u64 pi, ci, num_cqe_written;
  u64 last_register[2], last_proxy;
  u32 last_record, first_syndrome;
  u64 first_error_idx, num_executed, num_errors, num_bytes;
  u64 remote_shift;  // added to what the peer's keys say of `mapped`: where its memory is here
};

struct HcaPiece {
  u64 addr, num_bytes;
};
struct HcaWork {  // the entry being executed
  u8 bytes[kMaxEntrySegments * 16 + 16];
  u32 opcode, opmod, num_segments, completion, syndrome, to_remote, num_pieces, fits;
  u64 idx, num_blocks, num_bytes, remote;
  HcaPiece pieces[kMaxEntrySegments];
};

EW_DEVICE Scope hca_scope(const HcaQueue* queue) { return static_cast<Scope>(queue->scope); }
EW_DEVICE const u8* hca_segment(const HcaWork* work, u32 i) { return work->bytes + 16 * i; }
EW_DEVICE u32 load_be32(const u8* p) { return bswap32(*reinterpret_cast<const u32*>(p)); }
EW_DEVICE u64 load_be64(const u8* p) { return bswap64(*reinterpret_cast<const u64*>(p)); }

// ---------------------------------------------------------------- completions

// Everything but the last word first, then that one with release: who sees it sees the rest, and
// what the entry moved.
EW_DEVICE void hca_write_cqe(HcaQueue* queue, u64 wqe_idx, u32 opcode, u32 send_opcode, u32 num_bytes, u32 syndrome) {
  const bool collapsed = queue->cq_flags & kCqCollapsed;
  const u64 count = queue->num_cqe_written, n = queue->num_cqe;
  if (!collapsed && !(queue->cq_flags & kCqOverrunIgnore)) {
    const u32 consumer = bswap32(load_relaxed(at<const u32>(queue->cq_dbrec_addr), hca_scope(queue))) & 0xffffff;
    if (((count - consumer) & 0xffffff) >= n) {  // the full queue cannot tell anybody; first_error does
      if (queue->first_syndrome == 0) queue->first_syndrome = kLocalQpOperation, queue->first_error_idx = wqe_idx;
      queue->state = kQpError;
      return;
    }
  }
  u32* words = at<u32>(queue->cq_addr + (collapsed ? 0 : (count & (n - 1)) * 64));
  for (u32 i = 0; i < 15; ++i) {
    const u32 word = i == 8    ? bswap32(queue->qpn)
                     : i == 11 ? bswap32(num_bytes)
                     : i == 13 ? syndrome << 24
                     : i == 14 ? bswap32(send_opcode << 24 | queue->qpn)
                               : 0;
    store_relaxed(words + i, word, hca_scope(queue));
  }
  const u32 owner = static_cast<u32>(count / n) & 1;
  const u32 tail = static_cast<u32>(wqe_idx & 0xffff) << 16 | opcode << 4 | owner;
  fence(Scope::kSystem);  // what was moved may lie in another GPU
  store_release(words + 15, bswap32(tail), hca_scope(queue));
  ++queue->num_cqe_written;
}
EW_DEVICE void hca_fail(HcaQueue* queue, u64 wqe_idx, u32 send_opcode, u32 syndrome) {
  if (queue->first_syndrome == 0) queue->first_syndrome = syndrome, queue->first_error_idx = wqe_idx;
  ++queue->num_errors;
  hca_write_cqe(queue, wqe_idx, kCqeRequesterError, send_opcode, 0, syndrome);
  queue->state = kQpError;
}
EW_DEVICE void hca_flush(HcaQueue* queue) {
  while (queue->ci < queue->pi) {
    const u8* ctrl = at<const u8>(queue->sq_addr) + (queue->ci & (queue->num_wqe - 1)) * kWqeBytes;
    const u32 num_segments = ctrl[7] & 0x3f;
    hca_fail(queue, queue->ci, ctrl[3], kFlushed);
    queue->ci += num_segments ? (num_segments + 3) / 4 : 1;
  }
  if (queue->ci > queue->pi) queue->ci = queue->pi;
}

// ---------------------------------------------------------------- doorbells

// The producer index is the furthest of what record, registers and proxy word say since the last
// look; only a change is news, because 16 bits come round again.
EW_DEVICE void hca_look_at_doorbells(HcaQueue* queue) {
  u32 candidates[4];
  u32 count = 0;
  const u32 record = load_acquire(at<const u32>(queue->dbrec_addr) + 1, hca_scope(queue));
  if (record != queue->last_record) candidates[count++] = bswap32(record) & 0xffff;
  queue->last_record = record;
  for (u32 i = 0; i < 2; ++i) {
    const u64 v = load_acquire(at<const u64>(queue->uar_addr + 0x800 + 0x100 * i), hca_scope(queue));
    if (v == queue->last_register[i]) continue;
    queue->last_register[i] = v;
    if (bswap32(static_cast<u32>(v >> 32)) >> 8 == queue->qpn)
      candidates[count++] = (bswap32(static_cast<u32>(v)) >> 8) & 0xffff;
  }
  const u64 proxy = load_acquire(at<const u64>(queue->proxy_addr), hca_scope(queue));
  if (proxy != queue->last_proxy) candidates[count++] = static_cast<u32>(proxy & 0xffff);
  queue->last_proxy = proxy;
  u64 furthest = queue->pi;
  bool too_far = false;
  for (u32 i = 0; i < count; ++i) {
    const u32 ahead = (candidates[i] - static_cast<u32>(queue->pi)) & 0xffff;
    if (ahead == 0) continue;
    if (ahead <= queue->num_wqe)
      furthest = queue->pi + ahead > furthest ? queue->pi + ahead : furthest;
    else if (0x10000 - ahead > queue->num_wqe)
      too_far = true;  // neither ahead nor behind by a ring: no correct producer says that
  }
  if (too_far || furthest - queue->ci > queue->num_wqe) {
    if (queue->state != kQpError) hca_fail(queue, queue->ci, 0, kLocalQpOperation);
    queue->ci = furthest;
  }
  queue->pi = furthest;
}

// ---------------------------------------------------------------- one entry

EW_DEVICE void hca_read_entry(const HcaQueue* queue, HcaWork* work) {
  const u64 posted = queue->pi - queue->ci;  // nothing beyond the producer index is read
  u64 num_blocks = 1;
  for (u64 b = 0; b < num_blocks; ++b) {
    const auto* block = at<const Vec16>(queue->sq_addr + ((queue->ci + b) & (queue->num_wqe - 1)) * kWqeBytes);
    for (u32 i = 0; i < 4 && 64 * b + 16 * i < sizeof(work->bytes); ++i)
      reinterpret_cast<Vec16*>(work->bytes)[4 * b + i] = block[i];
    if (b == 0) {
      work->num_segments = work->bytes[7] & 0x3f;
      work->num_blocks = work->num_segments ? (work->num_segments + 3) / 4 : 1;
      num_blocks = min_u64(work->num_blocks, posted);
    }
  }
  work->opcode = work->bytes[3], work->opmod = work->bytes[0];
  work->completion = (work->bytes[11] >> 2) & 3;
  work->idx = queue->ci;
  work->fits = work->num_segments > 0 && work->num_blocks <= posted;
  work->num_pieces = 0, work->num_bytes = 0, work->remote = 0, work->to_remote = 1;
}

// Where [addr, addr + num_bytes) of a key's memory is here, 0 if the key does not allow it. shift: added
// to what the key says.
EW_DEVICE u64 hca_find(u64 keys, u32 num_keys, u32 key, u32 pd, u64 addr, u64 num_bytes, u32 access, u64 shift) {
  for (u32 i = 0; i < num_keys; ++i) {
    const HcaKey& entry = at<const HcaKey>(keys)[i];
    if (load_relaxed(&entry.key, Scope::kSystem) != key || load_acquire(&entry.valid, Scope::kSystem) != 1) continue;
    if (pd && entry.pd != pd) return 0;
    if ((entry.access & access) != access || addr < entry.base || num_bytes > entry.length ||
        addr - entry.base > entry.length - num_bytes)
      return 0;
    return entry.mapped + shift + (addr - entry.base);
  }
  return 0;
}
EW_DEVICE u64 hca_find_remote(const HcaQueue* queue, const HcaWork* work, u64 num_bytes, u32 access) {
  const u8* raddr = hca_segment(work, 1);
  return hca_find(queue->remote_keys, queue->num_remote_keys, load_be32(raddr + 8), 0, load_be64(raddr), num_bytes,
                  access, queue->remote_shift);
}

// Data segments from `first` on, each checked against its key, or one inline segment.
EW_DEVICE u32 hca_read_data(const HcaQueue* queue, HcaWork* work, u32 first, u32 access) {
  for (u32 i = first; i < work->num_segments; ++i) {
    const u8* s = hca_segment(work, i);
    const u32 count = load_be32(s);
    if (count & 0x80000000u) {
      const u64 length = count & 0x7fffffffu;
      if (i != first || 4 + length > (work->num_segments - i) * 16ull || access == kLocalWrite) return kLocalQpOperation;
      work->pieces[work->num_pieces++] = {reinterpret_cast<u64>(s) + 4, length};
      work->num_bytes = length;
      return kSyndromeNone;
    }
    const u32 lkey = load_be32(s + 4);
    if (lkey == kEndOfList) break;
    const u64 length = count == 0 ? 1ull << 31 : count;  // 0 means 2^31
    const u64 addr = hca_find(queue->local_keys, queue->num_local_keys, lkey, queue->pd, load_be64(s + 8), length, access,
                              0);
    if (!addr) return kLocalProtection;
    work->pieces[work->num_pieces++] = {addr, length};
    work->num_bytes += length;
  }
  return work->num_bytes > kMaxChunkBytes ? kLocalLength : kSyndromeNone;
}

// A word that is aligned on both sides is stored at once, so that nobody sees half a flag, and after
// all that came before it. True if that was all there was to do.
EW_DEVICE bool hca_store_word(const HcaWork* work) {
  const HcaPiece& piece = work->pieces[0];
  if (work->num_pieces != 1 || !work->to_remote || work->remote % piece.num_bytes) return false;
  if (piece.num_bytes != 8 && piece.num_bytes != 4) return false;
  u64 value = 0;
  for (u32 i = 0; i < piece.num_bytes; ++i) value |= static_cast<u64>(at<const u8>(piece.addr)[i]) << (8 * i);
  fence(Scope::kSystem);
  if (piece.num_bytes == 8)
    store_release(at<u64>(work->remote), value, Scope::kSystem);
  else
    store_release(at<u32>(work->remote), static_cast<u32>(value), Scope::kSystem);
  return true;
}

// The same for a read of 8 bytes.
EW_DEVICE bool hca_load_word(const HcaWork* work) {
  const HcaPiece& piece = work->pieces[0];
  if (work->num_pieces != 1 || work->to_remote || piece.num_bytes != 8 || work->remote % 8) return false;
  const u64 value = load_acquire(at<const u64>(work->remote), Scope::kSystem);
  for (u32 i = 0; i < 8; ++i) at<u8>(piece.addr)[i] = static_cast<u8>(value >> (8 * i));
  return true;
}

EW_DEVICE u32 hca_check_transfer(HcaQueue* queue, HcaWork* work) {
  if (work->num_segments < 2) return kLocalQpOperation;
  work->to_remote = work->opcode != kOpRdmaRead;
  if (u32 syndrome = hca_read_data(queue, work, 2, work->to_remote ? 0u : u32{kLocalWrite})) return syndrome;
  if (work->num_bytes == 0) {  // touches nothing, checks nothing
    work->num_pieces = 0;
    return kSyndromeNone;
  }
  work->remote = hca_find_remote(queue, work, work->num_bytes, work->to_remote ? kRemoteWrite : kRemoteRead);
  if (!work->remote) return kRemoteAccess;
  if (hca_store_word(work) || hca_load_word(work)) work->num_pieces = 0;
  return kSyndromeNone;
}

// Carries out of a bit that is set in `boundary` are dropped: 0 is a plain add.
EW_DEVICE u64 hca_add(u64 a, u64 b, u64 boundary, u32 bits) {
  if (boundary == 0) return a + b;
  u64 sum = 0, carry = 0;
  for (u32 bit = 0; bit < bits; ++bit) {
    const u64 x = (a >> bit) & 1, y = (b >> bit) & 1;
    sum |= (x ^ y ^ carry) << bit;
    carry = (boundary >> bit) & 1 ? 0 : (x & y) | (carry & (x ^ y));
  }
  return sum;
}
EW_DEVICE u64 hca_update(u64 addr, u32 num_bytes, u64 compare, u64 compare_mask, u64 operand, u64 mask, bool swap) {
  for (;;) {
    const u64 old = num_bytes == 8 ? load_relaxed(at<const u64>(addr), Scope::kSystem)
                                   : load_relaxed(at<const u32>(addr), Scope::kSystem);
    const u64 next = !swap                            ? hca_add(old, operand, mask, 8 * num_bytes)
                     : (old ^ compare) & compare_mask ? old
                                                      : (old & ~mask) | (operand & mask);
    if (num_bytes == 8 ? atomic_cas_system(at<u64>(addr), old, next) == old
                       : atomic_cas_system(at<u32>(addr), static_cast<u32>(old), static_cast<u32>(next)) == old)
      return old;
  }
}

EW_DEVICE u32 hca_execute_atomic(HcaQueue* queue, HcaWork* work) {
  const bool masked = work->opcode == kOpMaskedCompareSwap || work->opcode == kOpMaskedFetchAdd;
  const bool swap = work->opcode == kOpAtomicCompareSwap || work->opcode == kOpMaskedCompareSwap;
  if (masked ? (work->opmod != 8 && work->opmod != 9) : work->opmod != 0) return kLocalQpOperation;
  const u32 num_bytes = masked && work->opmod == 8 ? 4 : 8;
  const u32 num_atomic = masked && swap && num_bytes == 8 ? 2 : 1;
  if (work->num_segments < 3 + num_atomic) return kLocalQpOperation;
  const u32 syndrome = hca_read_data(queue, work, 2 + num_atomic, kLocalWrite);
  u32 num_pieces = work->num_pieces;
  work->num_pieces = 0;  // nothing is left to the other threads
  if (syndrome) return syndrome;
  if (work->num_bytes != num_bytes) return kLocalLength;
  if (load_be64(hca_segment(work, 1)) % num_bytes != 0) return kRemoteInvalidRequest;
  const u64 remote = hca_find_remote(queue, work, num_bytes, kRemoteAtomic);
  if (!remote) return kRemoteAccess;
  const u8* a = hca_segment(work, 2);
  fence(Scope::kSystem);  // after the writes before it
  u64 old;
  if (num_bytes == 4) {
    const u64 first = load_be32(a), second = load_be32(a + 4);
    old = swap ? hca_update(remote, 4, second, load_be32(a + 12), first, load_be32(a + 8), true)
               : hca_update(remote, 4, 0, 0, first, second, false);
    old = bswap32(static_cast<u32>(old));  // 4-byte results land big-endian
  } else {
    const u64 first = load_be64(a), second = load_be64(a + 8);
    if (swap)
      old = hca_update(remote, 8, second, masked ? load_be64(a + 24) : ~0ull, first, masked ? load_be64(a + 16) : ~0ull,
                       true);
    else
      old = hca_update(remote, 8, 0, 0, first, masked ? second : 0, false);
  }
  u32 byte = 0;
  for (u32 p = 0; p < num_pieces; ++p)
    for (u64 i = 0; i < work->pieces[p].num_bytes; ++i, ++byte)
      at<u8>(work->pieces[p].addr)[i] = static_cast<u8>(old >> (8 * byte));
  return kSyndromeNone;
}

// Checks everything, executes what one thread can, and leaves the copy in work->pieces.
EW_DEVICE u32 hca_check_entry(HcaQueue* queue, HcaWork* work) {
  const u32 index = (load_be32(work->bytes) >> 8) & 0xffff;
  if (!work->fits || index != (queue->ci & 0xffff) || load_be32(work->bytes + 4) >> 8 != queue->qpn)
    return kLocalQpOperation;
  if (load_relaxed(&queue->lost, Scope::kSystem)) return kTransportRetryExceeded;
  const bool masked = work->opcode == kOpMaskedCompareSwap || work->opcode == kOpMaskedFetchAdd;
  if (work->opmod != 0 && !masked) return kLocalQpOperation;
  switch (work->opcode) {
    case kOpNop:
      return kSyndromeNone;
    case kOpRdmaWrite:
    case kOpRdmaRead:
      return hca_check_transfer(queue, work);
    case kOpAtomicCompareSwap:
    case kOpAtomicFetchAdd:
    case kOpMaskedCompareSwap:
    case kOpMaskedFetchAdd:
      return hca_execute_atomic(queue, work);
    case kOpDump: {  // reads, sends nothing
      const u32 syndrome = hca_read_data(queue, work, 1, 0);
      work->num_pieces = 0, work->num_bytes = 0;
      return syndrome;
    }
    default:
      return kLocalQpOperation;
  }
}

EW_DEVICE void hca_complete(HcaQueue* queue, HcaWork* work) {
  ++queue->num_executed;
  if (work->syndrome != kSyndromeNone) {
    hca_fail(queue, work->idx, work->opcode, work->syndrome);
    queue->ci = work->fits ? queue->ci + work->num_blocks : queue->pi;
    hca_flush(queue);
    return;
  }
  queue->ci += work->num_blocks;
  queue->num_bytes += work->num_bytes;
  if (work->completion >= 2)
    hca_write_cqe(queue, work->idx, kCqeRequest, work->opcode, static_cast<u32>(work->num_bytes), 0);
  else
    fence(Scope::kSystem);  // before anything that a later entry writes
}
