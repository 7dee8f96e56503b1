// The native side of a client's and a server's loop: what must not cost interpreter time.
//   client_trip.cpp  a whole batch: send, wait, combine, chunk by chunk
//   server_take.cpp  wait, poll, gather; reply
#pragma once

#include "launch.hpp"
#include "server_state.cuh"

#define EW_API extern "C" __attribute__((visibility("default")))

struct ew_peer;  // soft_hca.hpp

// Durations of one stage; ew_times and ew_counters are read by observe/stats.py as they are.
constexpr u32 kRing = 4096;
struct ew_ring {
  u64 count, total_ns;
  i64 values[kRing];  // the last ones
  void add(u64 ns) {  // by one thread; others may read meanwhile
    __atomic_store_n(&values[count % kRing], static_cast<i64>(ns), __ATOMIC_RELAXED);
    __atomic_store_n(&total_ns, total_ns + ns, __ATOMIC_RELAXED);
    __atomic_store_n(&count, count + 1, __ATOMIC_RELEASE);
  }
};

struct ew_counters {  // what a client exchanged with one server
  u64 rows, messages, bytes_sent, bytes_received;
  ew_ring durations;
};

// The three below are spelled once more in client/trip.py and server/batch.py; a test compares the sizes.
struct ew_flight {  // one slot index at every server
  ew_step* send;     // route, pack, put
  ew_step* combine;
  u64* arrival_ns;   // [num_servers]
  u64 seq, issued_ns;
};

struct ew_batch {
  ew_hca* hca;
  ew_flight* flights;            // [num_flights]
  ew_counters* const* counters;  // [num_servers]
  ew_peer* const* notify;        // [num_servers]: whom to wake after direct stores; null: the HCA does
  ew_ring* times[6];             // route, pack, put, send, wait, combine
  MessageShape shape;            // seq: the last one given out, updated
  u64 hidden, hidden_stride;     // bytes between rows
  u64 topk_ids, ids_stride;      // elements between rows, as for the ones below
  u64 topk_weights, weights_stride;
  u64 scales, scales_stride;
  u64 output, output_stride;     // bytes between rows
  u64 spin_ns, slice_ns;         // slice_ns: longest wait for one chunk
  u64 num_skipped;               // out, added up
  u32 id_bytes, output_type, num_tokens, max_rows;
  u32 num_flights, num_issued, num_combined;  // out: chunks
};

struct ew_server {  // what a server's two calls need, kept by the caller
  ew_hca* hca;
  ServerSlot* slots;
  ew_peer* const* notify;  // [num_slots]: whom to wake after direct stores, null where the HCA does
  ew_step *poll, *gather;
  ew_step* reply;          // [2]: through the work queue, and direct
  const u32* found;        // what server_poll wrote: messages, rows, pairs, layer, data type
  ew_ring* times[3];       // poll, gather, reply
  u64 spin_ns;
  u64 num_messages, num_rows, num_refused;  // out, added up
  u64 bytes_received, bytes_sent;           // out, added up: of messages that were served
  u64 num_failed;                           // ew_hca_num_failed when it was last reported
  u32 num_slots, pair_capacity;
  u32 echo;                // echo: rows go back as they came, nothing is gathered
  u32 queue_depth;         // out: messages that lay ready when the last look began
};

EW_API int ew_hca_poll(ew_hca* hca, u32 max_wqes);
EW_API int ew_hca_wait(ew_hca* hca, const u64* const* words, const u64* seen, u32 num_words, u64 spin_ns,
                       u64 timeout_ns);
EW_API int ew_launch(ew_step* steps, unsigned num_steps, ew_hca* const* hcas, unsigned num_hcas);
EW_API void ew_peer_notify(ew_peer* peer);
EW_API u64 ew_hca_num_failed(ew_hca* hca);

// Executes what was posted, as far as it goes without waiting for anybody.
inline void drive(ew_hca* hca) {
  for (u32 turn = 0; turn < 64 && ew_hca_poll(hca, 64) > 0; ++turn) {
  }
}
