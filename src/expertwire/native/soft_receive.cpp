// Receives of writes with immediate: taken by the caller one by one, or turned into flags here.
#include <cerrno>
#include <cstring>

#include "error.hpp"
#include "soft_hca.hpp"

namespace {

// Completions that nobody took yet count as open too, so that none is overwritten.
void post(ew_window* window, u32 count) {
  window->recv_posted += count;
  __atomic_store_n(&window->page->recv_posted, window->recv_posted, __ATOMIC_SEQ_CST);
}

bool take(ew_window* window, u8* cqe) {
  if (__atomic_load_n(&window->page->recv_head, __ATOMIC_ACQUIRE) == window->recv_tail) return false;
  if (window->recv_tail == window->recv_posted) return false;  // no more than we allowed, whatever the page says
  memcpy(cqe, window->page->recv_cqe[window->recv_tail % kRecvEntries], 64);
  ++window->recv_tail;
  return true;
}

}  // namespace

// Posts receives. At most kRecvEntries may be open.
EW_API int ew_window_post_recv(ew_window* window, u32 count) {
  std::lock_guard guard(window->hca->lock);
  if (count > kRecvEntries - (window->recv_posted - window->recv_tail))
    return ew_fail(-ENOSPC, "a window holds at most %u open receives", kRecvEntries);
  post(window, count);
  return 0;
}

// Takes the oldest receive completion (64 bytes, RDMA WRITE with immediate). 1: taken, 0: none.
EW_API int ew_window_poll_recv(ew_window* window, u8* cqe) {
  std::lock_guard guard(window->hca->lock);
  return take(window, cqe);
}

// From now on the peer's immediates are slot numbers: each one turns the word that the peer left in
// the second half of the 16-byte flag at the slot's end into the flag, its first half. The peer's
// writes before the immediate are in then, whatever order they took.
EW_API int ew_window_watch(ew_window* window, u64 slots_addr, u64 slot_bytes, u32 num_slots) {
  if (num_slots == 0 || num_slots > kRecvEntries || slot_bytes < 16 || slot_bytes % 16 || slots_addr % 16)
    return ew_fail(-EINVAL, "1 to %u slots of a multiple of 16 bytes can be watched, not %u of %llu", kRecvEntries,
                   num_slots, slot_bytes);
  std::lock_guard guard(window->hca->lock);
  if (window->num_slots || window->recv_posted) return ew_fail(-EBUSY, "the window's receives are in use already");
  window->slots_addr = slots_addr, window->slot_bytes = slot_bytes, window->num_slots = num_slots;
  ++window->hca->num_watched;
  post(window, kRecvEntries);
  return 0;
}

// Under the context's lock. Returns how many immediates were taken.
u32 take_immediates(ew_hca* hca) {
  u32 taken = 0;
  u8 cqe[64];
  for (ew_window* window : hca->windows) {
    while (window->num_slots && take(window, cqe)) {
      ++taken;
      const u32 slot = load_be32(cqe + 36);
      if (slot < window->num_slots) {  // the number is the peer's
        u64* flag = reinterpret_cast<u64*>(window->slots_addr + (slot + 1) * window->slot_bytes - 16);
        __atomic_store_n(flag, __atomic_load_n(flag + 1, __ATOMIC_RELAXED), __ATOMIC_RELEASE);
      }
      post(window, 1);
    }
  }
  if (taken) hca->completed = true;  // a thread of ours may sleep until a flag changes
  return taken;
}
