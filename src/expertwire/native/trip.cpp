// The two loops around the kernels that must not cost interpreter time: a client that waits for
// its replies, and a server that waits for messages.
#include <cerrno>
#include <vector>

#include "fiber.hpp"
#include "launch.hpp"
#include "server_state.cuh"

#define EW_API extern "C" __attribute__((visibility("default")))

EW_API int ew_hca_wait(ew_hca* hca, const u64* const* words, const u64* seen, u32 num_words, u64 spin_ns,
                       u64 timeout_ns);
EW_API int ew_launch(ew_step* steps, unsigned num_steps, ew_hca* const* hcas, unsigned num_hcas);

namespace {

// Reused from call to call; one waiter per context, so one set per thread is enough.
thread_local std::vector<const u64*> words;
thread_local std::vector<u64> seen;

}  // namespace

// Waits until every loaded server's reply flag holds seq. arrival_ns[s] (0 while waiting) becomes
// the time, CLOCK_MONOTONIC, at which server s was seen; calling again goes on waiting for the rest.
// Returns 0, -ETIMEDOUT, -EINTR after ew_hca_interrupt, or another negative error.
EW_API int ew_client_wait(ew_hca* hca, const ClientServer* servers, const u32* batch_size, u32 num_servers, u64 seq,
                          u64* arrival_ns, u64 spin_ns, u64 timeout_ns) {
  const u64 deadline = ew::clock_ns() + timeout_ns;
  for (;;) {
    words.clear(), seen.clear();
    const u64 now = ew::clock_ns();
    for (u32 s = 0; s < num_servers; ++s) {
      if (batch_size[s] == 0 || arrival_ns[s] != 0) continue;
      const u64* flag = at<const u64>(slot_flag(servers[s].reply_addr, servers[s].reply_slot_bytes));
      const u64 value = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
      if (value == seq) {
        arrival_ns[s] = now;
        continue;
      }
      words.push_back(flag), seen.push_back(value);
    }
    if (words.empty()) return 0;
    if (now >= deadline) return -ETIMEDOUT;
    const int code =
        ew_hca_wait(hca, words.data(), seen.data(), static_cast<u32>(words.size()), spin_ns, deadline - now);
    if (code < 0 && code != -ETIMEDOUT) return code;
  }
}

// Waits for a flag of any open slot to change, polls, and gathers if there is room for the pairs.
// poll: the server_poll step; gather: the server_gather step, or null. found: what server_poll wrote
// {messages, rows, pairs, layer, data type}. Returns 0 nothing (timeout or interrupted), 1 polled,
// 2 polled and gathered, or a negative error.
EW_API int ew_server_take(ew_hca* hca, const ServerSlot* slots, u32 num_slots, ew_step* poll, ew_step* gather,
                          const u32* found, u32 pair_capacity, u64 spin_ns, u64 timeout_ns) {
  words.clear(), seen.clear();
  for (u32 i = 0; i < num_slots; ++i) {
    if (!slots[i].open) continue;
    words.push_back(at<const u64>(slot_flag(slots[i].recv_addr, slots[i].recv_slot_bytes)));
    seen.push_back(slots[i].last_seq);
  }
  const int code = ew_hca_wait(hca, words.data(), seen.data(), static_cast<u32>(words.size()), spin_ns, timeout_ns);
  if (code == -ETIMEDOUT || code == -EINTR) return 0;
  if (code < 0) return code;
  if (int error = ew_launch(poll, 1, nullptr, 0)) return error;
  if (found[0] == 0) return 0;
  if (!gather || found[1] == 0 || found[2] > pair_capacity) return 1;
  if (int error = ew_launch(gather, 1, nullptr, 0)) return error;
  return 2;
}
