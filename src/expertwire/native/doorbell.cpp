// The CPU half of a CPU-assisted doorbell: device code that cannot reach an adapter's register leaves
// its producer index in host memory, and a thread here stores it to the register.
#include <time.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <thread>

#include "error.hpp"
#include "soft_hca.hpp"
#include "target.cuh"
#include "mlx5_wqe.cuh"

namespace {

constexpr u32 kMaxDoorbells = 1024;
constexpr u64 kIdleNs = 2'000'000;        // so long it looks without a pause
constexpr u64 kSleepNs = 20'000;          // then this often
struct Doorbell {
  alignas(64) std::atomic<u64> index{0};  // written by device code
  std::atomic<u64>* reg = nullptr;        // null: nobody is served
  u64 rung = 0;
  u32 qpn = 0;
  bool taken = false;
};

}  // namespace

struct ew_doorbells {
  Doorbell bells[kMaxDoorbells];
  u32 num_used = 0;  // all below may be in use
  std::mutex lock;
  std::atomic<u32> stop{0};
  std::atomic<u64> num_rung{0};
  std::thread thread;
};

namespace {

bool ring_once(ew_doorbells* all) {
  std::lock_guard guard(all->lock);
  bool any = false;
  for (u32 i = 0; i < all->num_used; ++i) {
    Doorbell& bell = all->bells[i];
    if (!bell.reg) continue;
    // Device code has written entries and doorbell record before the index; so must the adapter see them.
    const u64 index = bell.index.load(std::memory_order_acquire);
    if (index == bell.rung) continue;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bell.reg->store(doorbell_register(index, bell.qpn), std::memory_order_release);
    bell.rung = index, any = true;
    all->num_rung.fetch_add(1, std::memory_order_relaxed);
  }
  return any;
}

void ring_until_stopped(ew_doorbells* all) {
  u64 idle_since = monotonic_ns();
  while (!all->stop.load(std::memory_order_acquire)) {
    if (ring_once(all)) {
      idle_since = monotonic_ns();
    } else if (monotonic_ns() - idle_since < kIdleNs) {
      std::this_thread::yield();
    } else {
      const timespec pause = {0, static_cast<long>(kSleepNs)};
      nanosleep(&pause, nullptr);
    }
  }
}

}  // namespace

EW_API ew_doorbells* ew_doorbells_create() {
  auto* all = new ew_doorbells;
  all->thread = std::thread(ring_until_stopped, all);
  return all;
}

// Address of the word that device code leaves the index in, 0 if there is no more room.
EW_API u64 ew_doorbells_add(ew_doorbells* all) {
  std::lock_guard guard(all->lock);
  for (u32 i = 0; i < kMaxDoorbells; ++i) {
    Doorbell& bell = all->bells[i];
    if (bell.taken) continue;
    bell.taken = true, bell.rung = 0;
    bell.index.store(0, std::memory_order_relaxed);
    if (i >= all->num_used) all->num_used = i + 1;
    return reinterpret_cast<u64>(&bell.index);
  }
  return 0;
}

EW_API int ew_doorbells_serve(ew_doorbells* all, u64 index_addr, u64 register_addr, u32 qpn) {
  std::lock_guard guard(all->lock);
  for (u32 i = 0; i < all->num_used; ++i) {
    Doorbell& bell = all->bells[i];
    if (!bell.taken || reinterpret_cast<u64>(&bell.index) != index_addr) continue;
    bell.qpn = qpn, bell.reg = reinterpret_cast<std::atomic<u64>*>(register_addr);
    return 0;
  }
  return ew_fail(-ENOENT, "no doorbell at %#llx", static_cast<unsigned long long>(index_addr));
}

// The register is not touched any more once this returns.
EW_API void ew_doorbells_remove(ew_doorbells* all, u64 index_addr) {
  std::lock_guard guard(all->lock);
  for (u32 i = 0; i < all->num_used; ++i) {
    Doorbell& bell = all->bells[i];
    if (reinterpret_cast<u64>(&bell.index) == index_addr) bell.reg = nullptr, bell.taken = false;
  }
}

EW_API u64 ew_doorbells_rung(ew_doorbells* all) { return all->num_rung.load(std::memory_order_relaxed); }

// First byte and size of the words, for whoever maps them to a GPU.
EW_API u64 ew_doorbells_words(ew_doorbells* all, u64* num_bytes) {
  *num_bytes = sizeof(all->bells);
  return reinterpret_cast<u64>(all->bells);
}

EW_API void ew_doorbells_destroy(ew_doorbells* all) {
  all->stop.store(1, std::memory_order_release);
  all->thread.join();
  delete all;
}
