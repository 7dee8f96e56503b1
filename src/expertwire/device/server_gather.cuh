// Gather: the rows of a batch, grouped by expert (counting sort over pairs), copied side by side
// for the grouped GEMM. Ids are read from the client's memory once and checked as they are read.
#pragma once

#include "server_state.cuh"

struct ServerGatherArgs {
  u64 slots;           // ServerSlot []
  u64 messages;        // ServerMessage [num_messages]; reason may be set here
  u64 local_expert;    // i32 [num_experts]: index among the experts held here, -1 if not held
  u64 pair_expert;     // scratch i32 [num_pairs]
  u64 expert_offsets;  // out u32 [num_local + 1]: places of local expert e are offsets[e]..offsets[e + 1]
  u64 cursor;          // out u32 [num_local]: where expert e's rows end
  u64 pair_position;   // out i32 [num_pairs]: row of the pair among the gathered, -1 if none
  u64 pair_reply_row;  // out i32 [num_pairs]: row of the pair in a per-expert reply
  u64 gathered;        // out: rows of the message's data type
  u64 gathered_scales; // out: fp32 [rows][scales_per_row]
  u64 expert_rows;     // u64 [num_layers][num_local]: rows so far, added to (load statistics)
  u64 num_messages;    // const u32*, from polling
  u64 layer;           // const u32*, from polling
  u32 num_local, num_experts;
  u32 min_rows, reserved;  // an expert with rows gets at least min_rows places, the rest unused
};

// Copies the pair's expert to private memory, -1 for none; the whole message is refused if an id is
// not ours: the client's routing table is stale, and dropping a contribution silently is worse.
EW_DEVICE void read_experts(const ServerGatherArgs& args, ServerMessage& message) {
  const ServerSlot& slot = at<const ServerSlot>(args.slots)[message.slot];
  const i32* active = at<const i32>(slot.recv_addr + sizeof(BufferHead));
  const u32 num_pairs = message.head.num_rows * message.head.experts_per_row;
  i32* pair_expert = at<i32>(args.pair_expert) + message.pair_begin;
  for (u32 i = thread_idx(); i < num_pairs; i += block_dim()) {
    const i32 id = load_relaxed(reinterpret_cast<const u32*>(active) + i, Scope::kSystem);
    i32 local = -1;
    if (id != -1) {
      if (id >= 0 && id < static_cast<i32>(args.num_experts)) local = at<const i32>(args.local_expert)[id];
      if (local < 0) store_relaxed(&message.reason, static_cast<u32>(kReasonNotHeld), Scope::kGpu);
    }
    pair_expert[i] = local;
  }
}

EW_KERNEL(server_gather, ServerGatherArgs) {
  const u32 num_messages = *at<const u32>(args.num_messages);
  ServerMessage* messages = at<ServerMessage>(args.messages);
  u32* offsets = at<u32>(args.expert_offsets);
  u32* cursor = at<u32>(args.cursor);
  i32* pair_expert = at<i32>(args.pair_expert);
  i32* pair_position = at<i32>(args.pair_position);
  for (u32 e = thread_idx(); e < args.num_local; e += block_dim()) cursor[e] = 0;
  for (u32 m = 0; m < num_messages; ++m)
    if (messages[m].reason == kReasonOk) read_experts(args, messages[m]);
  block_sync();

  for (u32 m = 0; m < num_messages; ++m) {
    if (messages[m].reason != kReasonOk) continue;
    const u32 num_pairs = messages[m].head.num_rows * messages[m].head.experts_per_row;
    for (u32 i = thread_idx(); i < num_pairs; i += block_dim()) {
      const i32 local = pair_expert[messages[m].pair_begin + i];
      if (local >= 0) atomic_add(&cursor[local], 1u);
    }
  }
  block_sync();
  if (thread_idx() == 0) {
    // The layer means something only if a message was taken, and then some expert may have rows.
    u64* expert_rows = at<u64>(args.expert_rows) + static_cast<u64>(*at<const u32>(args.layer)) * args.num_local;
    u32 sum = 0;
    for (u32 e = 0; e < args.num_local; ++e) {
      offsets[e] = sum;
      if (cursor[e] > 0) {
        expert_rows[e] += cursor[e];
        sum += cursor[e] < args.min_rows ? args.min_rows : cursor[e];
      }
      cursor[e] = offsets[e];
    }
    offsets[args.num_local] = sum;
  }
  block_sync();
  for (u32 m = warp_id(); m < num_messages; m += num_warps()) {
    if (messages[m].reason != kReasonOk) continue;
    const u32 num_pairs = messages[m].head.num_rows * messages[m].head.experts_per_row;
    u32 reply_rows = 0;
    for (u32 begin = 0; begin < num_pairs; begin += warp_size()) {
      const u32 i = begin + lane_id(), pair = messages[m].pair_begin + i;
      const i32 local = i < num_pairs ? pair_expert[pair] : -1;
      u32 total = 0;
      const u32 before = warp_exclusive_sum(local >= 0, &total);
      if (i < num_pairs) {
        pair_position[pair] = local >= 0 ? static_cast<i32>(atomic_add(&cursor[local], 1u)) : -1;
        at<i32>(args.pair_reply_row)[pair] = local >= 0 ? static_cast<i32>(reply_rows + before) : -1;
      }
      reply_rows += total;
    }
    if (lane_id() == 0)
      messages[m].num_reply_rows =
          messages[m].head.reply_mode == kReplyPerExpert ? reply_rows : messages[m].head.num_rows;
  }
  block_sync();

  for (u32 m = 0; m < num_messages; ++m) {
    if (messages[m].reason != kReasonOk) continue;
    const BufferHead& head = messages[m].head;
    const ServerSlot& slot = at<const ServerSlot>(args.slots)[messages[m].slot];
    const u64 row_bytes = static_cast<u64>(head.hidden_size) * data_type_bytes(head.data_type);
    const u64 scales = head.scale_block ? ceil_div(head.hidden_size, head.scale_block) : 0;
    const RequestLayout layout = request_layout(head.num_rows, head.experts_per_row, row_bytes, scales);
    const u32 num_pairs = head.num_rows * head.experts_per_row;
    for (u32 i = warp_id(); i < num_pairs; i += num_warps()) {
      const i32 position = pair_position[messages[m].pair_begin + i];
      if (position < 0) continue;
      const u64 row = i / head.experts_per_row;
      warp_copy(at<u8>(args.gathered + static_cast<u64>(position) * row_bytes),
                at<const u8>(slot.recv_addr + layout.hidden_offset + row * row_bytes), row_bytes);
      if (scales)
        warp_copy(at<u8>(args.gathered_scales + static_cast<u64>(position) * scales * 4),
                  at<const u8>(slot.recv_addr + layout.scales_offset + row * scales * 4), scales * 4);
    }
  }
}
