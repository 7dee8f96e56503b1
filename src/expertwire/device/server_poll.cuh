// Poll: look at every client's flag, check the heads of what has arrived, and take a batch of one
// layer. Nothing in a message is believed before it is checked against the server's own
// configuration; a bad head is answered with a reason and touches no other client's slot.
#pragma once

#include "server_state.cuh"

struct ServerPollArgs {
  u64 slots;        // ServerSlot [num_slots]
  u64 messages;     // out: ServerMessage [max_messages]
  u64 slot_state;   // scratch u32 [num_slots]: 0 nothing, 1 + reason
  u64 num_messages; // out u32*
  u64 num_rows;     // out u32*: rows of the accepted messages
  u64 num_pairs;    // out u32*: rows x experts_per_row of the accepted messages
  u64 layer;        // out u32* [2]: layer and data type of the batch
  u64 timeout_ns;   // how long to wait for a first message; 0: look once
  ServerModel model;
  u32 num_slots, first_slot;  // first_slot moves on from call to call: fairness
  u32 max_messages, max_rows; // bounds of one batch
};

// Everything but the checksum, which takes longest: enough to know where the rows lie and that they
// are inside the slots.
EW_DEVICE u32 check_fields(const BufferHead& head, const ServerSlot& slot, const ServerModel& model, u64 seq) {
  if (head.magic != kRequestMagic || head.head_bytes != sizeof(BufferHead)) return kReasonMagic;
  if (head.version != kWireVersion) return kReasonVersion;
  if (head.seq != seq) return kReasonSeq;
  if (head.client_id != slot.client_id) return kReasonClient;
  if (head.layer >= model.num_layers) return kReasonLayer;
  if (head.hidden_size != model.hidden_size) return kReasonHiddenSize;
  const bool fp8 = head.data_type == kFloat8E4M3 && model.allow_fp8;
  if (head.data_type != model.data_type && !fp8) return kReasonDataType;
  if (head.scale_block != (fp8 ? model.scale_block : 0) || head.scale_type != (fp8 ? kFloat32 : 0u))
    return kReasonScale;
  if (head.num_rows == 0 || head.num_rows > slot.max_rows) return kReasonRows;
  if (head.experts_per_row == 0 || head.experts_per_row > model.max_experts_per_row) return kReasonExpertsPerRow;
  if (head.num_experts != model.num_experts) return kReasonNumExperts;
  if (head.reply_mode > kReplyPerExpert || (head.reply_type != kFloat32 && head.reply_type != model.data_type))
    return kReasonReply;
  const u64 row_bytes = static_cast<u64>(head.hidden_size) * data_type_bytes(head.data_type);
  const u64 scales = head.scale_block ? ceil_div(head.hidden_size, head.scale_block) : 0;
  const RequestLayout layout = request_layout(head.num_rows, head.experts_per_row, row_bytes, scales);
  if (head.active_bytes != layout.active_bytes || head.payload_bytes != layout.payload_bytes ||
      head.padding_bytes != layout.padding_bytes || layout.end + kFlagBytes > slot.recv_slot_bytes)
    return kReasonBytes;
  const u64 reply_rows = head.reply_mode == kReplyPerExpert ? static_cast<u64>(head.num_rows) * head.experts_per_row
                                                            : head.num_rows;
  const u64 reply_bytes = reply_rows * head.hidden_size * data_type_bytes(head.reply_type);
  if (reply_bytes + sizeof(ReplyHead) + kFlagBytes > slot.reply_slot_bytes) return kReasonReply;
  return seq > slot.last_seq ? kReasonOk : kReasonSeq;
}

// A damaged head is damaged, whatever else its fields say.
EW_DEVICE u32 check_head(const BufferHead& head, u32 field_reason) {
  if (field_reason == kReasonMagic || field_reason == kReasonVersion) return field_reason;
  return head.head_checksum == head_checksum(&head, sizeof(head) - 8) ? field_reason : kReasonChecksum;
}

EW_DEVICE u64 request_flag(const ServerSlot& slot) {
  return load_acquire(at<const u64>(slot_flag(slot.recv_addr, slot.recv_slot_bytes)), Scope::kSystem);
}

// One block.
EW_DEVICE void poll_slots(const ServerPollArgs& args) {
  ServerSlot* slots = at<ServerSlot>(args.slots);
  u32* state = at<u32>(args.slot_state);
  EW_SHARED(u32, look_again);
  const u64 deadline = args.timeout_ns ? clock_ns() + args.timeout_ns : 0;
  for (;;) {
    if (thread_idx() == 0) look_again = deadline != 0 && clock_ns() < deadline;
    block_sync();
    for (u32 i = thread_idx(); i < args.num_slots; i += block_dim()) {
      const u64 flag = slots[i].open ? request_flag(slots[i]) : slots[i].last_seq;
      state[i] = flag != slots[i].last_seq;
      if (state[i]) atomic_exchange(&look_again, 0u);
    }
    block_sync();
    const u32 again = look_again;
    block_sync();  // everybody has read it before it is set again
    if (!again) break;
    spin_pause();
  }
  if (thread_idx() != 0) return;

  ServerMessage* messages = at<ServerMessage>(args.messages);
  u32 num_messages = 0, num_rows = 0, num_pairs = 0, layer = ~0u, data_type = 0;
  for (u32 n = 0; n < args.num_slots && num_messages < args.max_messages; ++n) {
    const u32 i = (args.first_slot + n) % args.num_slots;
    if (!state[i]) continue;
    ServerSlot& slot = slots[i];
    const u64 seq = request_flag(slot);
    ServerMessage& message = messages[num_messages];
    const BufferHead head = load_once(at<const BufferHead>(slot.recv_addr));  // read once, then judged
    message.head = head;
    message.reason = check_head(head, check_fields(head, slot, args.model, seq));
    message.slot = i, message.pair_begin = num_pairs;
    message.queue_ns = 0;
    message.num_reply_rows = head.num_rows;
    if (message.reason == kReasonOk) {
      // Another layer or data type, or more than a batch holds: stays for the next poll.
      if (num_rows && (head.layer != layer || head.data_type != data_type)) continue;
      if (num_rows && num_rows + head.num_rows > args.max_rows) continue;
      layer = head.layer, data_type = head.data_type;
      num_rows += head.num_rows;
      num_pairs += head.num_rows * head.experts_per_row;
    } else {
      message.head.seq = seq;  // answer what the flag said; the head's own seq may be the damage
      message.head.num_rows = 0;
    }
    slot.last_seq = seq;
    ++num_messages;
  }
  *at<u32>(args.num_messages) = num_messages;
  *at<u32>(args.num_rows) = num_rows, *at<u32>(args.num_pairs) = num_pairs, at<u32>(args.layer)[0] = layer, at<u32>(args.layer)[1] = data_type;
}

EW_KERNEL(server_poll, ServerPollArgs) { poll_slots(args); }
