// Completions: CQEs in the layout of rdma-core mlx5dv.h struct mlx5_cqe64, error CQEs, flushing.
#include "fiber.hpp"
#include "soft_hca.hpp"

#include <cstring>

EW_API void ew_hca_interrupt(ew_hca* hca);

namespace {

constexpr u32 kOpRequest = 0, kOpRequesterError = 13;

// What was posted after it fails, too; whoever waits for what it was to bring about looks now.
void note_first_error(ew_qp* qp, u64 wqe_idx, u32 syndrome) {
  if (qp->first_syndrome != 0) return;
  qp->first_syndrome = syndrome, qp->first_error_idx = wqe_idx;
  qp->hca->num_failed.fetch_add(1, std::memory_order_release);
  ew_hca_interrupt(qp->hca);
}

// Device code reads words of it one by one. Under the seeded scheduler it may see them in any order that
// the release allows.
void store_word(u8* at, u32 word, int order) {
  if (ew::seeded()) return ew::seeded_engine_store(at, word, order == __ATOMIC_RELEASE);
  order == __ATOMIC_RELEASE ? __atomic_store_n(reinterpret_cast<u32*>(at), word, __ATOMIC_RELEASE)
                            : __atomic_store_n(reinterpret_cast<u32*>(at), word, __ATOMIC_RELAXED);
}

// Fills bytes 0..59, then stores the last four with release order: whoever sees the counter sees
// the rest. Returns false when the CQ is full and overrun is not ignored.
bool put_cqe(ew_qp* qp, const u8* body, u64 wqe_idx, u32 opcode) {
  const bool collapsed = qp->info.cq_flags & kCqCollapsed;
  const u64 n = qp->info.num_cqe, count = qp->num_cqe_written;
  if (!collapsed && !(qp->info.cq_flags & kCqOverrunIgnore)) {
    const u32 consumer = load_be32(reinterpret_cast<const u8*>(qp->info.cq_dbrec_addr)) & 0xffffff;
    if (((count - consumer) & 0xffffff) >= n) {
      qp->cq_error = true;
      return false;
    }
  }
  u8* entry = reinterpret_cast<u8*>(qp->info.cq_addr) + (collapsed ? 0 : (count & (n - 1)) * 64);
  // Word stores: device code may be reading the syndrome of an earlier completion in this entry.
  for (int i = 0; i < 15; ++i) {
    u32 word;
    memcpy(&word, body + 4 * i, 4);
    store_word(entry + 4 * i, word, __ATOMIC_RELAXED);
  }
  const u32 owner = (count / n) & 1;  // flips as the ring wraps, even collapsed
  const u32 tail = static_cast<u32>(wqe_idx & 0xffff) << 16 | opcode << 4 | owner;
  store_word(entry + 60, __builtin_bswap32(tail), __ATOMIC_RELEASE);
  ++qp->num_cqe_written;
  ++qp->hca->stats.num_cqe;
  qp->hca->completed = true;
  return true;
}

}  // namespace

void write_cqe(ew_qp* qp, u64 wqe_idx, u32 send_opcode, u32 num_bytes) {
  u8 body[60] = {};
  store_be32(body + 32, qp->info.qpn);  // user index
  store_be32(body + 44, num_bytes);
  store_be32(body + 56, send_opcode << 24 | qp->info.qpn);
  if (put_cqe(qp, body, wqe_idx, kOpRequest)) return;
  // The full CQ cannot tell anybody; first_error does.
  note_first_error(qp, wqe_idx, kLocalQpOperation);
  qp->state = kErr;
}

void fail_qp(ew_qp* qp, u64 wqe_idx, u32 send_opcode, u32 syndrome) {
  u8 body[60] = {};
  store_be32(body + 32, qp->info.qpn);
  body[55] = static_cast<u8>(syndrome);
  store_be32(body + 56, send_opcode << 24 | qp->info.qpn);
  note_first_error(qp, wqe_idx, syndrome);
  ++qp->hca->stats.num_error_cqe;
  put_cqe(qp, body, wqe_idx, kOpRequesterError);
  qp->state = kErr;
}

// Every posted WQE, signalled or not, completes with "flushed", in order.
void flush_posted(ew_qp* qp) {
  while (qp->ci < qp->pi) {
    const u8* ring = reinterpret_cast<const u8*>(qp->info.sq_addr);
    const u8* ctrl = ring + (qp->ci & (qp->info.num_wqe - 1)) * 64;
    const u32 num_segments = ctrl[7] & 0x3f;
    fail_qp(qp, qp->ci, ctrl[3], kFlushed);
    qp->ci += num_segments ? (num_segments + 3) / 4 : 1;
  }
  if (qp->ci > qp->pi) qp->ci = qp->pi;
  qp->progress = 0;
  if (qp->wire) wire_flushed(qp);
}
