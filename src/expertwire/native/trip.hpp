// The native side of a client's and a server's loop: what must not cost interpreter time.
//   client_trip.cpp  a whole batch: send, wait, combine, chunk by chunk
//   server_take.cpp  wait, poll, gather; reply
#pragma once

#include "launch.hpp"
#include "server_state.cuh"
#include "soft_hca.hpp"

// Durations of one stage; ew_times and ew_counters are read by stats.py as they are.
constexpr u32 kRing = 4096;
struct ew_ring {
  u64 count, total_ns;
  i64 values[kRing];  // the last ones
  void add(u64 ns) {
    values[count % kRing] = static_cast<i64>(ns);
    ++count, total_ns += ns;
  }
};

struct ew_counters {  // what a client exchanged with one server
  u64 rows, messages, bytes_sent, bytes_received;
  ew_ring durations;
};

EW_API int ew_hca_poll(ew_hca* hca, u32 max_wqes);
EW_API int ew_hca_wait(ew_hca* hca, const u64* const* words, const u64* seen, u32 num_words, u64 spin_ns,
                       u64 timeout_ns);
EW_API int ew_launch(ew_step* steps, unsigned num_steps, ew_hca* const* hcas, unsigned num_hcas);
EW_API void ew_peer_notify(ew_peer* peer);

// Executes what was posted, as far as it goes without waiting for anybody.
inline void drive(ew_hca* hca) {
  for (u32 turn = 0; turn < 64 && ew_hca_poll(hca, 64) > 0; ++turn) {
  }
}
