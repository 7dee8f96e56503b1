// Reply: expert outputs -> weighted rows -> the client's reply slot, flag last (three puts).
#pragma once

#include "client_put.cuh"
#include "grid.cuh"
#include "server_state.cuh"

struct ServerReplyArgs {
  u64 slots;           // ServerSlot []
  u64 messages;        // ServerMessage [num_messages]
  u64 pair_position;   // i32 [num_pairs], from gathering
  u64 pair_reply_row;  // i32 [num_pairs]
  u64 expert_output;   // [rows] of output_type; 0: echo the payload rows, unweighted
  u64 status;          // KernelStatus [num_messages]
  u64 epoch;
  u64 found;           // const u32*: number of messages, from polling; 0: num_messages says it
  u64 arrived;         // u32*, see last_block; only for the kernel of many blocks
  u32 num_messages, hidden_size, output_type, server_id;
  u32 experts_us, reserved;
};

EW_DEVICE u32 messages_of(const ServerReplyArgs& args) {
  return args.found ? *at<const u32>(args.found) : args.num_messages;
}

EW_DEVICE u32 reply_pieces(const BufferHead& head) {
  return static_cast<u32>((head.hidden_size + row_piece() - 1) / row_piece());
}
EW_DEVICE bool replies_per_expert(const ServerReplyArgs& args, const BufferHead& head) {
  return args.expert_output && head.reply_mode == kReplyPerExpert;
}
// What one message has for the warps of a launch: pieces of rows.
EW_DEVICE u32 reply_items(const ServerReplyArgs& args, const BufferHead& head) {
  return head.num_rows * (replies_per_expert(args, head) ? head.experts_per_row : 1) * reply_pieces(head);
}

// Weighted rows of one message into its send slot, in pieces spread over the warps of the launch.
EW_DEVICE void write_reply_rows(const ServerReplyArgs& args, const ServerMessage& message, const ServerSlot& slot) {
  const BufferHead& head = message.head;
  const u32 top_k = head.experts_per_row;
  const u64 in_bytes = static_cast<u64>(head.hidden_size) * data_type_bytes(head.data_type);
  const u64 out_bytes = static_cast<u64>(head.hidden_size) * data_type_bytes(head.reply_type);
  const u64 expert_bytes = static_cast<u64>(head.hidden_size) * data_type_bytes(args.output_type);
  const u64 scales = head.scale_block ? ceil_div(head.hidden_size, head.scale_block) : 0;
  const RequestLayout layout = request_layout(head.num_rows, top_k, in_bytes, scales);
  const float* weights = at<const float>(slot.recv_addr + layout.weights_offset);
  const i32* position = at<const i32>(args.pair_position) + message.pair_begin;
  const i32* reply_row = at<const i32>(args.pair_reply_row) + message.pair_begin;
  const u32 pieces = reply_pieces(head), num_items = reply_items(args, head);
  const bool per_expert = replies_per_expert(args, head);
  if (!args.expert_output) {
    const u64 size = data_type_bytes(head.reply_type), hidden_size = head.hidden_size, reply_addr = slot.reply_addr;
    const u64 rows_addr = slot.recv_addr + layout.hidden_offset;
    for (u32 item = global_warp(); item < num_items; item += all_warps()) {
      const u64 row = item / pieces, begin = item % pieces * row_piece();
      warp_copy(at<u8>(reply_addr + row * out_bytes + begin * size), at<u8>(rows_addr + row * in_bytes + begin * size),
                min_u64(hidden_size - begin, row_piece()) * size);
    }
    return;
  }
  for (u32 item = global_warp(); item < num_items; item += all_warps()) {
    const u32 unit = item / pieces;  // row, or pair if every expert has its own row
    const u64 begin = item % pieces * row_piece(), end = min_u64(begin + row_piece(), head.hidden_size);
    if (!per_expert) {
      warp_row_sum(at<u8>(slot.reply_addr + unit * out_bytes), head.reply_type, args.output_type, top_k, begin, end,
                   [&](u32 k, float* weight) -> const void* {
                     const i32 p = position[unit * top_k + k];
                     if (p < 0) return nullptr;
                     *weight = weights[unit * top_k + k];
                     return at<const u8>(args.expert_output + static_cast<u64>(p) * expert_bytes);
                   });
    } else if (position[unit] >= 0) {
      const u64 out_row = static_cast<u64>(reply_row[unit]);
      warp_row_sum(at<u8>(slot.reply_addr + out_row * out_bytes), head.reply_type, args.output_type, 1, begin, end,
                   [&](u32, float* weight) -> const void* {
                     *weight = weights[unit];
                     return at<const u8>(args.expert_output + static_cast<u64>(position[unit]) * expert_bytes);
                   });
    }
  }
}

EW_DEVICE void write_reply_head(const ServerReplyArgs& args, const ServerMessage& message, const ServerSlot& slot) {
  ReplyHead head = {};
  head.magic = kReplyMagic, head.version = kWireVersion, head.head_bytes = sizeof(ReplyHead);
  head.seq = message.head.seq, head.reason = message.reason, head.server_id = args.server_id;
  head.num_rows = message.reason == kReasonOk ? message.num_reply_rows : 0;
  head.reply_mode = message.head.reply_mode, head.hidden_size = args.hidden_size;
  head.reply_type = message.head.reply_type, head.queue_us = static_cast<u32>(message.queue_ns / 1000);
  head.experts_us = args.experts_us, head.epoch = args.epoch;
  head.head_checksum = head_checksum(&head, sizeof(head) - 8);
  store_plain(at<ReplyHead>(reply_head(slot.reply_addr, slot.reply_slot_bytes)), head);
  if (slot.in_place) return;  // the flag goes last, by the put
  u64* flag = at<u64>(slot_flag(slot.reply_addr, slot.reply_slot_bytes));
  flag[0] = message.head.seq, flag[1] = 0;
}

template <bool do_ibgda>
EW_DEVICE void put_reply(const ServerReplyArgs& args, u32 m) {
  const ServerMessage& message = at<const ServerMessage>(args.messages)[m];
  const ServerSlot& slot = at<const ServerSlot>(args.slots)[message.slot];
  const IbgdaPeer* peer = at<const IbgdaPeer>(slot.peer);
  KernelStatus* status = at<KernelStatus>(args.status) + m;
  const u32 num_rows = message.reason == kReasonOk ? message.num_reply_rows : 0;
  const u64 rows_bytes = static_cast<u64>(num_rows) * args.hidden_size * data_type_bytes(message.head.reply_type);
  const u64 local_head = reply_head(slot.reply_addr, slot.reply_slot_bytes);
  const u64 remote_head = reply_head(slot.remote_reply_addr, slot.reply_slot_bytes);
  const u64 remote_flag = slot_flag(slot.remote_reply_addr, slot.reply_slot_bytes);
  if (do_ibgda) {
    if (!ibgda_put_nbi_warp<false>(peer, slot.remote_reply_addr, slot.reply_addr, rows_bytes, 0, 0, status, m)) return;
    if (!ibgda_put_nbi_warp<false>(peer, remote_head, local_head, sizeof(ReplyHead), 0, 1, status, m)) return;
    put_flag(peer, remote_flag, slot_flag(slot.reply_addr, slot.reply_slot_bytes), message.head.seq,
             slot.previous_reply_seq, slot.slot_idx, slot.signal_mode, 0, status, m);
  } else {
    if (!slot.in_place && (!copy_to_peer(peer, slot.remote_reply_addr, slot.reply_addr, rows_bytes, status, m) ||
                           !copy_to_peer(peer, remote_head, local_head, sizeof(ReplyHead), status, m)))
      return;
    release_flag(peer, remote_flag, message.head.seq, status, m);
  }
}

// One block: rows of message m are written by all warps, then warp (m mod warps) puts it.
template <bool do_ibgda>
EW_DEVICE void server_reply(const ServerReplyArgs& args) {
  const u32 num_messages = messages_of(args);
  for (u32 m = 0; m < num_messages; ++m) {
    const ServerMessage& message = at<const ServerMessage>(args.messages)[m];
    const ServerSlot& slot = at<const ServerSlot>(args.slots)[message.slot];
    if (message.reason == kReasonOk) write_reply_rows(args, message, slot);
    if (thread_idx() == 0) write_reply_head(args, message, slot);
    block_sync();
    if (m % num_warps() == warp_id()) put_reply<do_ibgda>(args, m);
  }
}

EW_KERNEL(server_reply_ibgda, ServerReplyArgs) { server_reply<true>(args); }
EW_KERNEL(server_reply_direct, ServerReplyArgs) { server_reply<false>(args); }

// Blocks that have anything to do: the launch is made for the largest batch, and each block that takes
// part costs a fence and an arrival.
EW_DEVICE u32 busy_blocks(const ServerReplyArgs& args, const ServerMessage* messages, u32 num_messages) {
  u32 busy = ceil_div(num_messages, block_dim());
  for (u32 m = 0; m < num_messages; ++m) {
    if (messages[m].reason != kReasonOk) continue;
    const u32 blocks = ceil_div(reply_items(args, messages[m].head), num_warps());
    busy = blocks > busy ? blocks : busy;
  }
  return busy < grid_dim() ? busy : grid_dim();
}

// Many blocks, for slots in place: rows go straight to the clients, the block that finishes last
// releases the flags.
EW_WIDE_KERNEL(server_reply_in_place, ServerReplyArgs) {
  const u32 num_messages = messages_of(args);
  const ServerMessage* messages = at<const ServerMessage>(args.messages);
  const ServerSlot* slots = at<const ServerSlot>(args.slots);
  const u32 num_blocks = busy_blocks(args, messages, num_messages);
  if (block_idx() >= num_blocks) return;
  for (u32 m = 0; m < num_messages; ++m)
    if (messages[m].reason == kReasonOk) write_reply_rows(args, messages[m], slots[messages[m].slot]);
  const u32 thread = block_idx() * block_dim() + thread_idx();
  for (u32 m = thread; m < num_messages; m += grid_dim() * block_dim())
    write_reply_head(args, messages[m], slots[messages[m].slot]);
  if (!last_block(args.arrived, num_blocks)) return;
  for (u32 m = 0; m < num_messages; ++m) {
    const ServerSlot& slot = slots[messages[m].slot];
    store_relaxed(at<u64>(slot_flag(slot.reply_addr, slot.reply_slot_bytes)), messages[m].head.seq, Scope::kSystem);
  }
}
