// Argument groups that the client's kernels share. Pointers travel as u64 so that one layout
// serves 64-bit CPUs and GPUs and is spelled once more in launch.py (a test compares the sizes).
#pragma once

#include "ibgda_device.cuh"
#include "message.cuh"

enum SignalMode : u32 {
  kSignalWrite = 0,     // flag by RDMA WRITE: needs a path that keeps writes in order
  kSignalAdd = 1,       // flag by masked fetch-add: ordered after the writes on any path
  kSignalWriteImm = 2,  // by a write with immediate: the peer's receive completion makes it the flag
};

struct ClientServer {  // one server as seen by one batch, 80 bytes
  u64 send_addr;         // our send slot, BufferHead first; in_place: the peer's slot as mapped here
  u64 request_slot_bytes;
  u64 remote_addr;       // "remote_buff": the request slot at the server
  u64 reply_addr;        // "recv_addrs": our reply slot, which the server writes
  u64 reply_slot_bytes;
  u64 peer;              // IbgdaPeer*, "p2p_state"
  u64 previous_seq;      // seq that the slot's flag holds now (for kSignalAdd)
  u32 max_rows, max_pairs;  // what the slots hold
  u32 slot_idx, server_id;
  u32 in_place, reserved;
};

// Where routing left its decisions; one row of each table per server or token.
struct RouteTables {
  u64 batch_size;   // u32 [num_servers]: rows for each server
  u64 num_pairs;    // u32 [num_servers]: (token, expert) pairs for each server
  u64 row_token;    // u32 [num_servers][row_stride]: token of each row
  u64 pair_server;  // i32 [num_tokens][experts_per_row]: server of the pair, -1 if skipped
  u64 pair_row;     // i32 [num_tokens][experts_per_row]: its row in the reply, -1 if covered by another pair
  u32 row_stride, num_servers;
};

struct MessageShape {  // what all messages of a batch share
  u32 hidden_size, data_type, scale_type, scale_block;
  u32 experts_per_row, num_experts, reply_mode, reply_type;
  u32 client_id, layer;
  u64 seq, epoch;
};

EW_DEVICE u64 scales_per_row(const MessageShape& shape) {
  return shape.scale_block ? ceil_div(shape.hidden_size, shape.scale_block) : 0;
}
EW_DEVICE u64 hidden_row_bytes(const MessageShape& shape) {
  return static_cast<u64>(shape.hidden_size) * data_type_bytes(shape.data_type);
}
EW_DEVICE RequestLayout message_layout(const MessageShape& shape, u32 num_rows) {
  return request_layout(num_rows, shape.experts_per_row, hidden_row_bytes(shape), scales_per_row(shape));
}
template <typename T>
EW_DEVICE T* at(u64 addr) {
  return reinterpret_cast<T*>(addr);
}
EW_DEVICE u64 slot_flag(u64 slot_addr, u64 slot_bytes) { return slot_addr + slot_bytes - kFlagBytes; }
EW_DEVICE u64 reply_head(u64 slot_addr, u64 slot_bytes) { return slot_flag(slot_addr, slot_bytes) - sizeof(ReplyHead); }
EW_DEVICE u32 global_warp() { return block_idx() * num_warps() + warp_id(); }
EW_DEVICE u32 all_warps() { return grid_dim() * num_warps(); }
