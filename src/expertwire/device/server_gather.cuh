// Gather: the rows of a batch, grouped by expert (counting sort over pairs), copied side by side
// for the grouped GEMM. Ids are read from the client's memory once and checked as they are read.
// One block does both (server_gather), or one groups, after it has polled (server_take), and many copy.
#pragma once

#include "fp8.cuh"
#include "server_poll.cuh"

struct ServerGatherArgs {
  u64 slots;           // ServerSlot []
  u64 messages;        // ServerMessage [num_messages]; reason may be set here
  u64 local_expert;    // i32 [num_experts]: index among the experts held here, -1 if not held
  u64 pair_expert;     // scratch i32 [num_pairs]
  u64 expert_offsets;  // out u32 [num_local + 1]: places of local expert e are offsets[e]..offsets[e + 1]
  u64 cursor;          // out u32 [num_local]: where expert e's rows end
  u64 pair_position;   // out i32 [num_pairs]: row of the pair among the gathered, -1 if none
  u64 pair_reply_row;  // out i32 [num_pairs]: row of the pair in a per-expert reply
  u64 gathered;        // out: rows of the message's data type, or of output_type
  u64 gathered_scales; // out: fp32 [rows][scales_per_row]
  u64 expert_rows;     // u64 [num_layers][num_local]: rows so far, added to (load statistics)
  u64 num_messages;    // const u32*, from polling
  u64 layer;           // const u32*, from polling
  u32 num_local, num_experts;
  u32 min_rows;     // an expert with rows gets at least min_rows places, the rest unused
  u32 output_type;  // fp8 rows are gathered as rows of this type; 0: as they came, with their scales
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

// Exclusive sum of the counts, each busy expert given its places; by one warp.
EW_DEVICE void place_experts(const ServerGatherArgs& args, u32* cursor) {
  u32* offsets = at<u32>(args.expert_offsets);
  // The layer means something only if a message was taken, and then some expert may have rows.
  u64* expert_rows = at<u64>(args.expert_rows) + static_cast<u64>(*at<const u32>(args.layer)) * args.num_local;
  u32 sum = 0;
  for (u32 begin = 0; begin < args.num_local; begin += warp_size()) {
    const u32 e = begin + lane_id();
    const u32 count = e < args.num_local ? cursor[e] : 0;
    u32 total = 0;
    const u32 before = sum + warp_exclusive_sum(count == 0 ? 0 : count < args.min_rows ? args.min_rows : count, &total);
    if (count > 0) atomic_add(&expert_rows[e], static_cast<u64>(count));
    if (e < args.num_local) offsets[e] = cursor[e] = before;
    sum += total;
  }
  if (lane_id() == 0) offsets[args.num_local] = sum;
}

struct WarpTotals {
  u32 pairs[32];  // of each warp of the block
};

// One block, a pair a thread: its place among the gathered rows, its row in a per-expert reply, which
// is the number of the message's pairs before it that are served here.
EW_DEVICE void place_pairs(const ServerGatherArgs& args, ServerMessage& message, u32* cursor) {
  EW_SHARED(WarpTotals, totals);
  const u32 num_pairs = message.head.num_rows * message.head.experts_per_row;
  u32 reply_rows = 0;  // of the pairs before this round's
  for (u32 begin = 0; begin < num_pairs; begin += block_dim()) {
    const u32 i = begin + thread_idx(), pair = message.pair_begin + i;
    const i32 local = i < num_pairs ? at<const i32>(args.pair_expert)[pair] : -1;
    u32 total = 0;
    u32 before = reply_rows + warp_exclusive_sum(local >= 0, &total);
    if (lane_id() == 0) totals.pairs[warp_id()] = total;
    block_sync();
    for (u32 w = 0; w < num_warps(); ++w) {
      if (w < warp_id()) before += totals.pairs[w];
      reply_rows += totals.pairs[w];
    }
    block_sync();  // everybody has read the totals before they are set again
    if (i >= num_pairs) continue;
    at<i32>(args.pair_position)[pair] =
        local >= 0 ? static_cast<i32>(atomic_add(&cursor[local], 1u)) : -1;
    at<i32>(args.pair_reply_row)[pair] = local >= 0 ? static_cast<i32>(before) : -1;
  }
  if (thread_idx() == 0)
    message.num_reply_rows = message.head.reply_mode == kReplyPerExpert ? reply_rows : message.head.num_rows;
}

constexpr u32 kSharedExperts = 1024;
struct SharedExperts {
  u32 cursor[kSharedExperts];  // in a block's own memory, which is quicker; of more experts in args.cursor
};

// One block: expert_offsets, pair_position, pair_reply_row, and each message's number of reply rows.
EW_DEVICE void group_pairs(const ServerGatherArgs& args) {
  const u32 num_messages = *at<const u32>(args.num_messages);
  ServerMessage* messages = at<ServerMessage>(args.messages);
  EW_SHARED(SharedExperts, shared);
  u32* cursor = args.num_local <= kSharedExperts ? shared.cursor : at<u32>(args.cursor);
  i32* pair_expert = at<i32>(args.pair_expert);
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
  if (warp_id() == 0) place_experts(args, cursor);
  block_sync();
  for (u32 m = 0; m < num_messages; ++m)
    if (messages[m].reason == kReasonOk) place_pairs(args, messages[m], cursor);
  block_sync();
  if (cursor == shared.cursor)
    for (u32 e = thread_idx(); e < args.num_local; e += block_dim()) at<u32>(args.cursor)[e] = cursor[e];
}

// Rows to their places, in pieces spread over the warps of the launch.
EW_DEVICE void copy_rows(const ServerGatherArgs& args) {
  const u32 num_messages = *at<const u32>(args.num_messages);
  const ServerMessage* messages = at<const ServerMessage>(args.messages);
  for (u32 m = 0; m < num_messages; ++m) {
    if (messages[m].reason != kReasonOk) continue;
    const BufferHead& head = messages[m].head;
    const ServerSlot& slot = at<const ServerSlot>(args.slots)[messages[m].slot];
    const u64 row_bytes = static_cast<u64>(head.hidden_size) * data_type_bytes(head.data_type);
    const u64 scales = head.scale_block ? ceil_div(head.hidden_size, head.scale_block) : 0;
    const RequestLayout layout = request_layout(head.num_rows, head.experts_per_row, row_bytes, scales);
    const u32 num_pairs = head.num_rows * head.experts_per_row;
    const bool dequantise = scales && args.output_type;
    const u64 piece_bytes = dequantise ? row_piece() : copy_piece();
    const u32 pieces = static_cast<u32>((row_bytes + piece_bytes - 1) / piece_bytes);
    for (u64 item = global_warp(); item < static_cast<u64>(num_pairs) * pieces; item += all_warps()) {
      const u32 i = static_cast<u32>(item / pieces), piece = static_cast<u32>(item % pieces);
      const i32 position = at<const i32>(args.pair_position)[messages[m].pair_begin + i];
      if (position < 0) continue;
      const u64 row = i / head.experts_per_row, begin = piece * piece_bytes;
      if (dequantise) {
        const u64 out_bytes = static_cast<u64>(head.hidden_size) * data_type_bytes(args.output_type);
        warp_dequantise(at<u8>(args.gathered + static_cast<u64>(position) * out_bytes), args.output_type,
                        at<const u8>(slot.recv_addr + layout.hidden_offset + row * row_bytes),
                        at<const float>(slot.recv_addr + layout.scales_offset) + row * scales, head.scale_block, begin,
                        min_u64(begin + piece_bytes, row_bytes));
        continue;
      }
      warp_copy(at<u8>(args.gathered + static_cast<u64>(position) * row_bytes + begin),
                at<const u8>(slot.recv_addr + layout.hidden_offset + row * row_bytes + begin),
                min_u64(row_bytes - begin, piece_bytes));
      if (scales && piece == 0)
        warp_copy(at<u8>(args.gathered_scales + static_cast<u64>(position) * scales * 4),
                  at<const u8>(slot.recv_addr + layout.scales_offset + row * scales * 4), scales * 4);
    }
  }
}

EW_KERNEL(server_gather, ServerGatherArgs) {
  group_pairs(args);
  block_sync();
  copy_rows(args);
}
EW_KERNEL(server_group, ServerGatherArgs) { group_pairs(args); }
EW_KERNEL(server_gather_rows, ServerGatherArgs) { copy_rows(args); }

struct ServerTakeArgs {
  ServerPollArgs poll;
  ServerGatherArgs gather;
};
EW_KERNEL(server_take, ServerTakeArgs) {
  poll_slots(args.poll);
  block_sync();
  group_pairs(args.gather);
}
