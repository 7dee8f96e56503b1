// Contexts and queue pairs of the software HCA, and the loop that finds the next WQE.
#include "soft_hca.hpp"

#include <sys/socket.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "error.hpp"

namespace {

constexpr u32 kMinWqe = 16, kMaxWqe = 32768, kMaxCqe = 1 << 20;
constexpr u32 kUarBytes = 4096, kBlueFlame = 0x800, kBlueFlameAlternate = 0x900;
constexpr u32 kWqesPerTurn = 16;  // of one queue before the others get a turn

enum class Ahead { kNo, kYes, kTooFar };

// A 16-bit index against the 64-bit producer index: ahead by at most a ring, behind by at most a
// ring (an old or equal doorbell), or a jump that no correct producer makes.
Ahead widen(const ew_qp* qp, u32 index16, u64* next) {
  const u32 ahead = (index16 - static_cast<u32>(qp->pi)) & 0xffff;
  if (ahead == 0) return Ahead::kNo;
  if (ahead <= qp->info.num_wqe) {
    *next = qp->pi + ahead;
    return Ahead::kYes;
  }
  return 0x10000 - ahead <= qp->info.num_wqe ? Ahead::kNo : Ahead::kTooFar;
}

// Notes a source's value; true if it changed since the last look. A value that did not change says
// nothing: an old doorbell stays in its register for ever, and its 16 bits come round again.
template <typename T>
bool changed(T* last, T value) {
  if (*last == value) return false;
  *last = value;
  return true;
}

// What the doorbells say now is no news later.
void forget_doorbells(ew_qp* qp) {
  qp->last_record = __atomic_load_n(reinterpret_cast<const u32*>(qp->info.dbrec_addr) + 1, __ATOMIC_ACQUIRE);
  for (u32 i = 0; i < 2; ++i) {
    const u64 offset = i == 0 ? kBlueFlame : kBlueFlameAlternate;
    qp->last_register[i] =
        __atomic_load_n(reinterpret_cast<const u64*>(qp->info.uar_addr + offset), __ATOMIC_ACQUIRE);
  }
  if (qp->info.proxy_addr)
    qp->last_proxy = __atomic_load_n(reinterpret_cast<const u64*>(qp->info.proxy_addr), __ATOMIC_ACQUIRE);
}

// New producer index: the furthest ahead of what doorbell record, registers and proxy word say.
// Opcode, opmod and length bytes of the register are ignored (mlx5 clients differ in them).
void look_at_doorbells(ew_qp* qp) {
  u32 candidates[4];
  u32 count = 0;
  const u32 record = __atomic_load_n(reinterpret_cast<const u32*>(qp->info.dbrec_addr) + 1, __ATOMIC_ACQUIRE);
  if (changed(&qp->last_record, record)) candidates[count++] = __builtin_bswap32(record) & 0xffff;
  for (u32 i = 0; i < 2; ++i) {
    const u64 offset = i == 0 ? kBlueFlame : kBlueFlameAlternate;
    const u64 v = __atomic_load_n(reinterpret_cast<const u64*>(qp->info.uar_addr + offset), __ATOMIC_ACQUIRE);
    if (!changed(&qp->last_register[i], v)) continue;
    if (__builtin_bswap32(static_cast<u32>(v >> 32)) >> 8 != qp->info.qpn) continue;
    candidates[count++] = (__builtin_bswap32(static_cast<u32>(v)) >> 8) & 0xffff;
  }
  if (qp->info.proxy_addr) {
    const u64 proxy = __atomic_load_n(reinterpret_cast<const u64*>(qp->info.proxy_addr), __ATOMIC_ACQUIRE);
    if (changed(&qp->last_proxy, proxy)) candidates[count++] = proxy & 0xffff;
  }
  u64 furthest = qp->pi;
  bool too_far = false;
  for (u32 i = 0; i < count; ++i) {
    u64 next = 0;
    const Ahead ahead = widen(qp, candidates[i], &next);
    if (ahead == Ahead::kTooFar) too_far = true;
    if (ahead == Ahead::kYes) furthest = std::max(furthest, next);
  }
  if (furthest != qp->pi) ++qp->hca->stats.num_doorbells;
  // More than a ring of unexecuted WQEs: some of them were overwritten, nothing can be trusted.
  if (too_far || furthest - qp->ci > qp->info.num_wqe) {
    if (qp->state != kErr) fail_qp(qp, qp->ci, 0, kLocalQpOperation);
    qp->ci = furthest;
  }
  qp->pi = furthest;
}

// One turn of one queue. Returns WQEs executed (a piece of a large one counts as one).
u32 run_queue(ew_qp* qp, u32 max_wqes, bool* stalled) {
  u32 done = 0;
  u64 bytes = 0;
  if (qp->state != kRts && qp->state != kErr && qp->state != kSqe) return 0;
  look_at_doorbells(qp);
  while (done < max_wqes && bytes < kPieceBytes) {
    u64 moved = 0;
    const Step step =
        qp->wire ? wire_step(qp, kPieceBytes - bytes, &moved) : execute_next(qp, kPieceBytes - bytes, &moved);
    if (step == Step::kStalled) *stalled = true;
    if (step != Step::kProgress) break;
    ++done, bytes += moved;
  }
  if (!qp->pieces.empty()) done += land_some(qp);
  return done;
}

}  // namespace

// flags: 1 with an engine thread, 2 that never sleeps.
EW_API int ew_hca_create(u32 flags, ew_hca** out) {
  auto* hca = new ew_hca;
  // Every peer gets the second end. With an eventfd one of them could take the others' wake-ups, or
  // make it blocking, for all who hold it; with a socket it can do no more than wake us.
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    delete hca;
    return ew_fail(-errno, "socketpair: %s", strerror(errno));
  }
  hca->woken_fd = ends[0], hca->wake_fd = ends[1];
  hca->next_qpn = 0x000100;
  hca->never_sleeps = flags & 2;
  if (flags & 1) start_thread(hca);
  *out = hca;
  return 0;
}

EW_API int ew_hca_destroy(ew_hca* hca) {
  {
    std::lock_guard guard(hca->lock);
    if (!hca->qps.empty() || !hca->windows.empty() || hca->num_peers)
      return ew_fail(-EBUSY, "%zu queue pairs, %zu windows and %u peers are still open", hca->qps.size(),
                     hca->windows.size(), hca->num_peers);
  }
  stop_thread(hca);
  if (hca->wire) wire_close(hca);
  close(hca->wake_fd);
  close(hca->woken_fd);
  delete hca;
  return 0;
}

// Returns WQEs executed, or -EBUSY: another thread drives the engine, or a call waits for its turn.
EW_API int ew_hca_poll(ew_hca* hca, u32 max_wqes) {
  std::unique_lock guard(hca->lock, std::try_to_lock);
  if (!guard.owns_lock()) return -EBUSY;
  u32 done = hca->wire ? wire_progress(hca) : 0;
  bool stalled = false;
  const size_t num_qps = hca->qps.size();
  const size_t first = hca->next_qp < num_qps ? hca->next_qp : 0;  // no division: a spinning thread looks often
  size_t next = first;
  // Always one queue; the others only while no other call waits for the lock.
  for (size_t i = 0; i < num_qps && done < max_wqes && !(i > 0 && hca->lock.contended()); ++i) {
    ew_qp* qp = hca->qps[next];
    if (++next == num_qps) next = 0;
    done += run_queue(qp, std::min(kWqesPerTurn, max_wqes - done), &stalled);
    if (qp->peer && qp->peer->touched) {
      qp->peer->touched = false;
      wake_peer(qp->peer);
    }
  }
  hca->held_up.store(stalled, std::memory_order_relaxed);
  hca->next_qp = first + 1;
  if (hca->num_watched) done += take_immediates(hca);
  if (hca->wire && done == 0) wire_idle(hca);
  if (hca->completed) {
    hca->completed = false;
    wake_self(hca);
  }
  return static_cast<int>(done == 0 && stalled ? 0 : done);
}

EW_API void ew_hca_set_hook(ew_hca* hca, ew_hca_hook hook, void* context) {
  std::lock_guard guard(hca->lock);
  hca->hook = hook, hca->hook_context = context;
}

EW_API void ew_hca_get_stats(ew_hca* hca, ew_hca_stats* out) {
  std::lock_guard guard(hca->lock);
  *out = hca->stats;
  out->num_wakes = hca->num_wakes.load(std::memory_order_relaxed);
}

EW_API int ew_qp_create(ew_hca* hca, u32 pd, u32 num_wqe, u32 num_cqe, u32 cq_flags, const ew_qp_memory* memory,
                        ew_qp** out, ew_qp_info* info) {
  if (num_wqe < kMinWqe || num_wqe > kMaxWqe || (num_wqe & (num_wqe - 1)))
    return ew_fail(-EINVAL, "a send queue has 16 to 32768 blocks, a power of two, not %u", num_wqe);
  if (num_cqe == 0 || num_cqe > kMaxCqe || (num_cqe & (num_cqe - 1)))
    return ew_fail(-EINVAL, "a completion queue has a power of two of entries, at most %u, not %u", kMaxCqe, num_cqe);
  if (memory && memory->sq_addr && !(memory->dbrec_addr && memory->uar_addr && memory->cq_addr))
    return ew_fail(-EINVAL, "memory for a send queue without doorbell record, register page or completion queue");
  if (!(cq_flags & (kCqCollapsed | kCqOverrunIgnore)) && memory && memory->sq_addr && !memory->cq_dbrec_addr)
    return ew_fail(-EINVAL, "a completion queue that must not overrun needs its doorbell record");
  auto* qp = new ew_qp{};
  qp->hca = hca, qp->pd = pd;
  qp->info.num_wqe = num_wqe, qp->info.num_cqe = num_cqe, qp->info.cq_flags = cq_flags;
  if (memory && memory->sq_addr) {
    qp->info.sq_addr = memory->sq_addr, qp->info.dbrec_addr = memory->dbrec_addr;
    qp->info.uar_addr = memory->uar_addr, qp->info.cq_addr = memory->cq_addr;
    qp->info.cq_dbrec_addr = memory->cq_dbrec_addr, qp->info.proxy_addr = memory->proxy_addr;
  } else {
    const u64 sq_bytes = num_wqe * 64ull, cq_bytes = std::max<u64>(num_cqe * 64ull, 4096);
    qp->owned_bytes = kUarBytes * 2 + sq_bytes + cq_bytes;
    void* map = mmap(nullptr, qp->owned_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
      delete qp;
      return ew_fail(-ENOMEM, "no memory for a queue pair of %u blocks", num_wqe);
    }
    qp->owned = map;
    const u64 base = reinterpret_cast<u64>(map);
    qp->info.uar_addr = base;
    qp->info.dbrec_addr = base + kUarBytes;  // a cache line each
    qp->info.cq_dbrec_addr = base + kUarBytes + 64;
    qp->info.proxy_addr = base + kUarBytes + 128;
    qp->info.sq_addr = base + 2 * kUarBytes;
    qp->info.cq_addr = base + 2 * kUarBytes + sq_bytes;
  }
  memset(reinterpret_cast<void*>(qp->info.cq_addr), 0xff, num_cqe * 64ull);
  std::lock_guard guard(hca->lock);
  qp->info.qpn = hca->next_qpn++ & 0xffffff;
  hca->qps.push_back(qp);
  *info = qp->info;
  *out = qp;
  return 0;
}

EW_API int ew_qp_state(ew_qp* qp) {
  std::lock_guard guard(qp->hca->lock);
  return static_cast<int>(qp->state);
}

// RESET clears the queue (indices 0, CQ filled with 0xff); other states go forward one by one.
EW_API int ew_qp_modify(ew_qp* qp, u32 state) {
  std::lock_guard guard(qp->hca->lock);
  const bool forward = state <= kRts && state == qp->state + 1;
  if (state != kReset && state != kErr && !forward)
    return ew_fail(-EINVAL, "queue pair %#x cannot go from state %u to %u", qp->info.qpn, qp->state, state);
  if (state >= kRtr && state <= kRts && !qp->peer)
    return ew_fail(-ENOTCONN, "queue pair %#x has no peer yet", qp->info.qpn);
  if (state == kReset) {
    land_all(qp);
    if (qp->wire) wire_reset(qp);
    qp->pi = qp->ci = qp->num_cqe_written = qp->progress = qp->rnr_since_ns = 0;
    qp->first_syndrome = 0, qp->first_error_idx = 0, qp->cq_error = false;
    qp->last_record = 0, qp->last_register[0] = qp->last_register[1] = 0, qp->last_proxy = 0;
    memset(reinterpret_cast<void*>(qp->info.cq_addr), 0xff, qp->info.num_cqe * 64ull);
    memset(reinterpret_cast<void*>(qp->info.dbrec_addr), 0, 8);
    for (u32 offset : {kBlueFlame, kBlueFlameAlternate}) memset(reinterpret_cast<void*>(qp->info.uar_addr + offset), 0, 8);
    // The consumer index counts from 0 again too, or a ring CQ would look overrun at once.
    for (u64 addr : {qp->info.proxy_addr, qp->info.cq_dbrec_addr})
      if (addr) memset(reinterpret_cast<void*>(addr), 0, 8);
  }
  if (state == kRtr) forget_doorbells(qp);  // rung in RESET or INIT: ignored
  qp->state = state;
  return 0;
}

// For tests of wraps: a queue that nobody has rung yet goes on as if `index` entries of one block had been
// executed, completed and consumed. Its producer must go on from there too.
EW_API int ew_qp_start_at(ew_qp* qp, u64 index) {
  std::lock_guard guard(qp->hca->lock);
  if (qp->pi != 0 || qp->num_cqe_written != 0 || qp->last_record != 0 || qp->wire)
    return ew_fail(-EINVAL, "queue pair %#x cannot start at %llu: it was used, or its peer is on another host",
                   qp->info.qpn, index);
  qp->pi = qp->ci = qp->num_cqe_written = index;
  qp->last_record = __builtin_bswap32(static_cast<u32>(index & 0xffff));
  __atomic_store_n(reinterpret_cast<u32*>(qp->info.dbrec_addr) + 1, qp->last_record, __ATOMIC_RELEASE);
  if (qp->info.cq_dbrec_addr)
    store_be32(reinterpret_cast<u8*>(qp->info.cq_dbrec_addr), static_cast<u32>(index & 0xffffff));
  return 0;
}

// Sets the peer and takes the queue (in RESET or INIT) through INIT and RTR to RTS.
EW_API int ew_qp_connect(ew_qp* qp, ew_peer* peer, u32 remote_qpn) {
  {
    std::lock_guard guard(qp->hca->lock);
    if (qp->peer) return ew_fail(-EISCONN, "queue pair %#x is connected already", qp->info.qpn);
    if (qp->state > kInit)
      return ew_fail(-EINVAL, "queue pair %#x cannot be connected in state %u", qp->info.qpn, qp->state);
    qp->peer = peer, qp->remote_qpn = remote_qpn;
    ++peer->num_qps;
    if (peer->endpoint) wire_connect(qp);
  }
  for (u32 state = static_cast<u32>(ew_qp_state(qp)) + 1; state <= kRts; ++state)
    if (int error = ew_qp_modify(qp, state)) return error;
  return 0;
}

// The first error of the queue: syndrome, 0 if none; *wqe_idx its index. A collapsed CQ shows only
// the last completion, which after an error is a flush.
EW_API u32 ew_qp_first_error(ew_qp* qp, u64* wqe_idx) {
  std::lock_guard guard(qp->hca->lock);
  *wqe_idx = qp->first_error_idx;
  return qp->first_syndrome;
}

// Queues that had an error, ever: whoever sees another number than before looks at his own.
EW_API u64 ew_hca_num_failed(ew_hca* hca) { return hca->num_failed.load(std::memory_order_acquire); }

EW_API void ew_qp_indices(ew_qp* qp, u64* pi, u64* ci) {
  std::lock_guard guard(qp->hca->lock);
  *pi = qp->pi, *ci = qp->ci;
}

EW_API void ew_qp_destroy(ew_qp* qp) {
  std::unique_lock guard(qp->hca->lock);
  land_all(qp);
  if (qp->wire) wire_disconnect(qp);
  auto& all = qp->hca->qps;
  all.erase(std::remove(all.begin(), all.end(), qp), all.end());
  if (qp->peer) --qp->peer->num_qps;
  guard.unlock();
  if (qp->owned) munmap(qp->owned, qp->owned_bytes);
  delete qp;
}
