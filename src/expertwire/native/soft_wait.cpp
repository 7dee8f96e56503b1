// The engine thread, and how threads and processes wait for each other without burning a core.
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "error.hpp"
#include "soft_hca.hpp"

EW_API int ew_hca_poll(ew_hca* hca, u32 max_wqes);
EW_API void ew_hca_kick(ew_hca* hca);

namespace {

constexpr u64 kEngineSpinNs = 20'000;
// Safety net for doorbells that nobody announced: while there are none, looks become rarer. A look
// costs some cache misses per queue, and a host may have a hundred engines of a hundred queues.
constexpr u64 kEngineSleepNs = 5'000'000, kLongestSleepNs = 320'000'000;
constexpr u64 kPolledSleepNs = 20'000;    // of a waiting thread that nobody wakes
constexpr u64 kPlainSpinNs = 5'000;        // a spinning thread offers its core this often
constexpr u32 kPauses = 16;                // between two looks: a sibling hardware thread has work to do

void futex_wait(std::atomic<u32>* word, u32 expected, u64 timeout_ns) {
  const timespec timeout = {static_cast<time_t>(timeout_ns / 1000000000), static_cast<long>(timeout_ns % 1000000000)};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, &timeout, nullptr, 0);
}
void futex_wake(std::atomic<u32>* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

inline void pause_once() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Spinning that leaves the core to whoever does what we wait for: pauses for a sibling hardware
// thread, and now and then a yield for the case of more threads than cores.
struct Spin {
  u64 yielded_ns;
  explicit Spin(u64 now) : yielded_ns(now) {}
  void relax(u64 now) {
    if (now - yielded_ns > kPlainSpinNs) {
      sched_yield();
      yielded_ns = now;
      return;
    }
    for (u32 i = 0; i < kPauses; ++i) pause_once();
  }
};

void engine_loop(ew_hca* hca) {
  u64 idle_since = monotonic_ns(), sleep_ns = kEngineSleepNs;
  Spin spin(idle_since);
  while (!hca->stop.load(std::memory_order_acquire)) {
    const u32 kicks = hca->kicks.load(std::memory_order_acquire);
    const int executed = ew_hca_poll(hca, 256);
    if (executed == -EBUSY) sched_yield();  // says nothing about the queues: no reason to sleep
    if (executed != 0) {
      idle_since = monotonic_ns(), sleep_ns = kEngineSleepNs;
      continue;
    }
    const u64 now = monotonic_ns();
    if (hca->never_sleeps || now - idle_since < kEngineSpinNs) {
      spin.relax(now);
      continue;
    }
    hca->asleep.store(1, std::memory_order_seq_cst);
    if (hca->wire)
      wire_sleep(hca, kicks);
    else if (hca->kicks.load(std::memory_order_seq_cst) == kicks) futex_wait(&hca->kicks, kicks, sleep_ns);
    hca->asleep.store(0, std::memory_order_relaxed);
    // Woken by a kick: spin again for a while. Woken by the safety net: look once.
    const bool kicked = hca->kicks.load(std::memory_order_acquire) != kicks;
    if (kicked) idle_since = monotonic_ns();
    const bool soon = kicked || hca->held_up.load(std::memory_order_relaxed);
    sleep_ns = soon ? kEngineSleepNs : std::min(2 * sleep_ns, kLongestSleepNs);
  }
}

int first_changed(const u64* const* words, const u64* seen, u32 num_words) {
  for (u32 i = 0; i < num_words; ++i)
    if (__atomic_load_n(words[i], __ATOMIC_ACQUIRE) != seen[i]) return static_cast<int>(i);
  return -1;
}

// While it lives the engine thread leaves the network to this one.
struct Waiter {
  ew_hca* hca;
  explicit Waiter(ew_hca* h) : hca(h) {
    if (hca->wire) wire_add_waiter(hca, 1);
  }
  ~Waiter() {
    if (hca->wire) wire_add_waiter(hca, -1);
  }
};

void set_sleeping(ew_hca* hca, u32 value) {
  hca->sleeping.store(value, std::memory_order_seq_cst);
  std::lock_guard guard(hca->lock);
  for (ew_window* window : hca->windows) __atomic_store_n(&window->page->sleeping, value, __ATOMIC_SEQ_CST);
  // One that came before its sender could see us asleep wakes nobody.
  if (value && hca->num_watched) take_immediates(hca);
}

}  // namespace

u64 monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1000000000ull + static_cast<u64>(now.tv_nsec);
}

void start_thread(ew_hca* hca) { hca->thread = std::thread(engine_loop, hca); }

void stop_thread(ew_hca* hca) {
  if (!hca->thread.joinable()) return;
  hca->stop.store(1, std::memory_order_release);
  ew_hca_kick(hca);
  hca->thread.join();
}

// Never blocks, whatever the descriptor is and whoever holds it, too: flags of a descriptor are shared
// with the process that it came from, the flags of this call are not. Full: the other is awake anyway.
static void send_wake(int fd) {
  const char byte = 1;
  if (send(fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return;
}

// The peer stores `sleeping`, fences, and looks at its flags once more; we have stored the flag,
// fence, and look at `sleeping`: one of us sees the other.
void wake_peer(ew_peer* peer) {
  if (!peer->page) return;  // on another host: what arrives there wakes it
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (__atomic_load_n(&peer->page->sleeping, __ATOMIC_RELAXED) == 0) return;
  if (__atomic_exchange_n(&peer->page->sleeping, 0u, __ATOMIC_SEQ_CST) == 0) return;
  peer->hca->num_wakes.fetch_add(1, std::memory_order_relaxed);
  send_wake(peer->wake_fd);
}

// A thread of our own may sleep until a completion.
void wake_self(ew_hca* hca) {
  if (hca->sleeping.exchange(0, std::memory_order_seq_cst) == 0) return;
  send_wake(hca->wake_fd);
}

// New work for the engine thread.
EW_API void ew_hca_kick(ew_hca* hca) {
  hca->kicks.fetch_add(1, std::memory_order_seq_cst);
  if (!hca->asleep.load(std::memory_order_seq_cst)) return;
  if (hca->wire)
    wire_kick(hca);
  else
    futex_wake(&hca->kicks);
}

EW_API int ew_hca_wake_fd(ew_hca* hca) { return hca->wake_fd; }

// Waiting looks again every 20 us instead of sleeping until somebody wakes it.
EW_API void ew_hca_set_polled(ew_hca* hca, u32 on) { hca->polled.store(on != 0, std::memory_order_relaxed); }

EW_API void ew_hca_interrupt(ew_hca* hca) {
  hca->interrupted.store(1, std::memory_order_seq_cst);
  send_wake(hca->wake_fd);
}

// Waits until a word differs from what was seen of it. Returns its index, -ETIMEDOUT, or -EINTR
// after ew_hca_interrupt or a queue's first error. Drives the engine while spinning. One thread of a context
// waits at a time.
EW_API int ew_hca_wait(ew_hca* hca, const u64* const* words, const u64* seen, u32 num_words, u64 spin_ns,
                       u64 timeout_ns) {
  const u64 start = monotonic_ns();
  u64 now = start, spin_start = start;
  Spin spin(start);
  const Waiter waiter(hca);
  // Over a network spinning is system calls, and where there are more threads than cores one that span
  // is not scheduled as soon as its message comes. So it has to have paid the last time.
  const u64 longest_spin_ns = hca->wire && !hca->spin_paid ? 0 : spin_ns;
  for (bool waited = false;; waited = true) {
    const int changed = first_changed(words, seen, num_words);
    if (changed >= 0) {
      if (waited) hca->spin_paid = monotonic_ns() - start < spin_ns;
      return changed;
    }
    if (hca->interrupted.exchange(0, std::memory_order_seq_cst)) return -EINTR;
    if (now - start >= timeout_ns) {
      hca->spin_paid = now - start < spin_ns;
      return -ETIMEDOUT;
    }
    const int executed = ew_hca_poll(hca, 64);
    now = monotonic_ns();
    // Busy, and no thread but this one executes what is posted: do not sleep on it.
    const bool must_retry = executed == -EBUSY && !hca->thread.joinable();
    if (executed > 0 || must_retry || now - spin_start < longest_spin_ns) {
      if (executed <= 0) spin.relax(now);
      continue;
    }
    if (executed == -EBUSY) ew_hca_kick(hca);  // whoever was at it may have passed our queue already
    set_sleeping(hca, 1);
    if (first_changed(words, seen, num_words) < 0 && !hca->interrupted.load(std::memory_order_seq_cst)) {
      u64 left_ns = timeout_ns - (now - start < timeout_ns ? now - start : timeout_ns);
      if (hca->polled.load(std::memory_order_relaxed)) left_ns = std::min(left_ns, kPolledSleepNs);
      pollfd fds[2] = {{hca->woken_fd, POLLIN, 0}, {-1, POLLIN, 0}};
      bool may_sleep = true;
      if (hca->wire) {
        std::lock_guard guard(hca->lock);
        may_sleep = wire_arm(hca);
        fds[1].fd = wire_event_fd(hca);
      }
      const timespec timeout = {static_cast<time_t>(left_ns / 1000000000), static_cast<long>(left_ns % 1000000000)};
      if (may_sleep) ppoll(fds, 2, &timeout, nullptr);
      char bytes[256];
      if (recv(hca->woken_fd, bytes, sizeof(bytes), MSG_DONTWAIT) < 0 && errno != EAGAIN)
        return ew_fail(-errno, "reading the wake-up socket failed");
    }
    set_sleeping(hca, 0);
    now = monotonic_ns();
    if (!hca->polled.load(std::memory_order_relaxed)) spin_start = now;  // woken: it spins again
  }
}
