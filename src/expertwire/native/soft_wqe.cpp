// Parsing a work-queue entry, and the memory operations that it stands for.
#include "soft_wqe.hpp"

#include <algorithm>
#include <cstring>

namespace {

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

}  // namespace

void read_wqe(const ew_qp* qp, u64 idx, Wqe* wqe) {
  const u8* ring = reinterpret_cast<const u8*>(qp->info.sq_addr);
  const u32 mask = qp->info.num_wqe - 1;
  const u8* first = ring + (idx & mask) * 64;
  wqe->num_segments = first[7] & 0x3f;
  const u64 posted = qp->pi - idx;  // nothing beyond the producer index is read
  const u64 num_blocks = std::min(std::max<u64>(1, wqe->num_blocks()), posted);
  for (u64 b = 0; b < num_blocks; ++b)
    memcpy(wqe->bytes + 64 * b, ring + ((idx + b) & mask) * 64, std::min<u64>(64, sizeof(wqe->bytes) - 64 * b));
  wqe->opcode = wqe->bytes[3];
  wqe->opmod = wqe->bytes[0];
  wqe->completion = (wqe->bytes[11] >> 2) & 3;
  wqe->idx = idx;
}

u32 check_wqe(const ew_qp* qp, const Wqe& wqe) {
  const bool fits = wqe.num_segments > 0 && wqe.idx + wqe.num_blocks() <= qp->pi;
  const u32 index = (load_be32(wqe.bytes) >> 8) & 0xffff;
  if (!fits || index != (wqe.idx & 0xffff) || (load_be32(wqe.bytes + 4) >> 8) != qp->info.qpn) return kLocalQpOperation;
  return kSyndromeNone;
}

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

void move_bytes(const Data& data, u8* remote, u64 from, u64 count, bool to_remote) {
  for_parts(data, from, count, [&](u8* part, u64 n) {
    if (to_remote)
      memmove(remote, part, n);
    else
      memmove(part, remote, n);
    remote += n;
  });
}

bool store_word(const u8* from, u64 num_bytes, u8* to) {
  const auto at = reinterpret_cast<uintptr_t>(to);
  if (num_bytes == 8 && at % 8 == 0) {
    u64 v;
    memcpy(&v, from, 8);
    __atomic_store_n(reinterpret_cast<u64*>(to), v, __ATOMIC_RELEASE);
    return true;
  }
  if (num_bytes == 4 && at % 4 == 0) {
    u32 v;
    memcpy(&v, from, 4);
    __atomic_store_n(reinterpret_cast<u32*>(to), v, __ATOMIC_RELEASE);
    return true;
  }
  return false;
}

u32 atomic_shape(u32 opcode, u32 opmod, AtomicShape* shape) {
  const bool masked = opcode == kMaskedCompareSwap || opcode == kMaskedFetchAdd;
  if (masked ? (opmod != 8 && opmod != 9) : opmod != 0) return kLocalQpOperation;
  shape->num_bytes = masked && opmod == 8 ? 4 : 8;
  shape->num_segments = opcode == kMaskedCompareSwap && shape->num_bytes == 8 ? 2 : 1;
  return kSyndromeNone;
}

u64 apply_atomic(u32 opcode, u32 num_bytes, const u8* a, u8* at) {
  const bool masked = opcode == kMaskedCompareSwap || opcode == kMaskedFetchAdd;
  const bool swap = opcode == kCompareSwap || opcode == kMaskedCompareSwap;
  if (num_bytes == 4) {
    const u32 first = load_be32(a), second = load_be32(a + 4), third = load_be32(a + 8), fourth = load_be32(a + 12);
    const u32 old = atomic_update<u32>(at, [&](u32 v) {
      if (!swap) return add_with_boundary<u32>(v, first, second);
      return ((v ^ second) & fourth) ? v : (v & ~third) | (first & third);
    });
    return __builtin_bswap32(old);  // 4-byte results land big-endian
  }
  const u64 first = load_be64(a), second = load_be64(a + 8);
  const u64 swap_mask = masked && swap ? load_be64(a + 16) : ~0ull;
  const u64 compare_mask = masked && swap ? load_be64(a + 24) : ~0ull;
  return atomic_update<u64>(at, [&](u64 v) {
    if (!swap) return add_with_boundary<u64>(v, first, masked ? second : 0);
    return ((v ^ second) & compare_mask) ? v : (v & ~swap_mask) | (first & swap_mask);
  });
}

bool has_receive(const WindowPage* page) {
  const u32 head = __atomic_load_n(&page->recv_head, __ATOMIC_ACQUIRE);
  return static_cast<int>(__atomic_load_n(&page->recv_posted, __ATOMIC_ACQUIRE) - head) > 0;
}

void put_receive(WindowPage* page, const u8* immediate, u64 num_bytes, u32 qpn) {
  const u32 head = __atomic_load_n(&page->recv_head, __ATOMIC_ACQUIRE);
  u8* cqe = page->recv_cqe[head % kRecvEntries];
  memset(cqe, 0, 64);
  store_be32(cqe + 32, qpn);  // user index
  memcpy(cqe + 36, immediate, 4);
  store_be32(cqe + 44, static_cast<u32>(num_bytes));
  store_be32(cqe + 56, qpn);
  cqe[63] = static_cast<u8>(1 << 4 | (head / kRecvEntries & 1));  // RESP_WR_IMM, and the owner bit of this round
  __atomic_store_n(&page->recv_head, head + 1, __ATOMIC_RELEASE);
}
