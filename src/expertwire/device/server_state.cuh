// Argument groups that the server's kernels share (spelled once more in launch.py).
#pragma once

#include "client_state.cuh"

struct ServerSlot {  // one request slot of one client, 96 bytes
  u64 recv_addr, recv_slot_bytes;   // where the client writes
  u64 reply_addr, reply_slot_bytes; // our reply send slot; in_place: the client's slot as mapped here
  u64 remote_reply_addr;            // the reply slot at the client
  u64 peer;                         // IbgdaPeer*
  u64 last_seq;                     // last message taken or refused
  u64 previous_reply_seq;           // seq that the client's reply flag holds now (for kSignalAdd)
  u32 client_id, open;              // open = 0: ignored by polling
  u32 max_rows, max_pairs;          // what the slots hold
  u32 slot_idx, signal_mode;
  u32 in_place, reserved;
};

struct ServerMessage {  // one message of the batch being served, 168 bytes
  BufferHead head;      // the server's own copy: checked once, and the client cannot change it
  u32 slot, reason;
  u32 pair_begin;       // index of its first pair in pair_position
  u32 num_reply_rows;
  u64 queue_ns;
  u64 reserved[2];
};

struct ServerModel {  // what a message is checked against
  u32 num_layers, hidden_size, num_experts, data_type;
  u32 max_experts_per_row, allow_fp8, scale_block, reserved;
};
