// Reply: expert outputs -> weighted rows -> the client's reply slot, flag last (three puts).
#pragma once

#include "client_put.cuh"
#include "server_state.cuh"

struct ServerReplyArgs {
  u64 slots;           // ServerSlot []
  u64 messages;        // ServerMessage [num_messages]
  u64 pair_position;   // i32 [num_pairs], from gathering
  u64 pair_reply_row;  // i32 [num_pairs]
  u64 expert_output;   // [rows] of output_type; 0: echo the payload rows, unweighted
  u64 status;          // KernelStatus [num_messages]
  u64 epoch;
  u32 num_messages, hidden_size, output_type, server_id;
  u32 experts_us, reserved;
};

// Weighted rows of one message into its send slot, spread over the warps of the launch.
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
  for (u32 row = global_warp(); row < head.num_rows; row += all_warps()) {
    if (!args.expert_output) {
      warp_copy(at<u8>(slot.reply_addr + row * out_bytes),
                at<const u8>(slot.recv_addr + layout.hidden_offset + row * in_bytes), out_bytes);
    } else if (head.reply_mode == kReplySum) {
      warp_row_sum(at<u8>(slot.reply_addr + row * out_bytes), head.reply_type, args.output_type, top_k,
                   head.hidden_size, [&](u32 k, float* weight) -> const void* {
                     const i32 p = position[row * top_k + k];
                     if (p < 0) return nullptr;
                     *weight = weights[row * top_k + k];
                     return at<const u8>(args.expert_output + static_cast<u64>(p) * expert_bytes);
                   });
    } else {
      for (u32 k = 0; k < top_k; ++k) {
        const i32 p = position[row * top_k + k];
        if (p < 0) continue;
        const u64 out_row = static_cast<u64>(reply_row[row * top_k + k]);
        warp_row_sum(at<u8>(slot.reply_addr + out_row * out_bytes), head.reply_type, args.output_type, 1,
                     head.hidden_size, [&](u32, float* weight) -> const void* {
                       *weight = weights[row * top_k + k];
                       return at<const u8>(args.expert_output + static_cast<u64>(p) * expert_bytes);
                     });
      }
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
  *at<ReplyHead>(reply_head(slot.reply_addr, slot.reply_slot_bytes)) = head;
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
  for (u32 m = 0; m < args.num_messages; ++m) {
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
