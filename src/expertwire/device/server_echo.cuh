// Echo: poll, check and reply in one launch of many blocks, with the rows as they came: what a trip
// costs apart from the experts.
//
// Every block looks at the flags for itself and copies its share of what it sees, so that no block
// waits for another's decision. A message is answered when all blocks saw it; else the next launch
// takes it. Rows are copied while one warp checks the head's checksum and makes the reply's head: it
// is the flag, which comes last, that makes a reply out of them.
#pragma once

#include "grid.cuh"
#include "server_poll.cuh"
#include "server_reply.cuh"

constexpr u32 kEchoSlots = 16;

struct ServerEchoArgs {
  ServerPollArgs poll;    // at most kEchoSlots slots, all in place
  ServerReplyArgs reply;  // expert_output: 0
  u64 seen;               // u32 [num_slots]: blocks that saw the slot's message, 0 between launches
};

struct EchoBatch {
  u64 flag[kEchoSlots], last_seq[kEchoSlots], reply_flag[kEchoSlots];  // of the slots; flag 0: not open
  u64 seq[kEchoSlots];                                                 // 0: nothing has arrived
  ServerMessage message[kEchoSlots];
};

// One warp: waits for a first message, then notes all that are there.
EW_DEVICE void take_arrivals(const ServerPollArgs& args, EchoBatch& batch) {
  const ServerSlot* slots = at<const ServerSlot>(args.slots);
  const u64 deadline = clock_ns() + args.timeout_ns;
  for (u32 i = lane_id(); i < args.num_slots; i += warp_size()) {
    const ServerSlot& slot = slots[i];
    batch.flag[i] = slot.open ? slot_flag(slot.recv_addr, slot.recv_slot_bytes) : 0;
    batch.last_seq[i] = slot.last_seq;
    batch.reply_flag[i] = slot_flag(slot.reply_addr, slot.reply_slot_bytes);
  }
  for (;;) {
    bool any = false;
    for (u32 i = lane_id(); i < args.num_slots; i += warp_size()) {
      const u64 now = batch.flag[i] ? load_acquire(at<const u64>(batch.flag[i]), Scope::kSystem) : batch.last_seq[i];
      batch.seq[i] = now != batch.last_seq[i] ? now : 0;
      any |= batch.seq[i] != 0;
    }
    if (warp_ballot(any || clock_ns() >= deadline)) break;
    spin_pause();
  }
  for (u32 i = lane_id(); i < args.num_slots; i += warp_size()) {
    if (batch.seq[i] == 0) continue;
    const BufferHead head = load_once(at<const BufferHead>(slots[i].recv_addr));
    u32 reason = check_fields(head, slots[i], args.model, batch.seq[i]);
    if (reason == kReasonOk && (head.reply_type != head.data_type || head.reply_mode != kReplySum))
      reason = kReasonReply;  // not what an echo can answer
    ServerMessage& message = batch.message[i];
    message.head = head, message.reason = reason;
    message.slot = i, message.pair_begin = 0, message.queue_ns = 0;
    message.num_reply_rows = head.num_rows;
  }
}

EW_WIDE_KERNEL(server_echo_in_place, ServerEchoArgs) {
  EW_SHARED(EchoBatch, batch);
  ServerSlot* slots = at<ServerSlot>(args.poll.slots);
  u32* seen = at<u32>(args.seen);
  if (warp_id() == 0) take_arrivals(args.poll, batch);
  block_sync();
  const u32 num_slots = args.poll.num_slots;
  if (block_idx() == 0 && warp_id() == num_warps() - 1)
    for (u32 i = lane_id(); i < num_slots; i += warp_size()) {
      if (batch.seq[i] == 0) continue;
      ServerMessage answer = batch.message[i];
      answer.reason = check_head(answer.head, answer.reason);
      answer.head.seq = batch.seq[i];  // what the flag said; the head's own may be the damage
      write_reply_head(args.reply, answer, slots[i]);
    }
  for (u32 i = 0; i < num_slots; ++i)
    if (batch.seq[i] && batch.message[i].reason == kReasonOk)
      write_reply_rows(args.reply, batch.message[i], slots[i]);
  for (u32 i = thread_idx(); i < num_slots; i += block_dim())
    if (batch.seq[i]) atomic_add(&seen[i], 1u);
  if (!last_block(args.reply.arrived, grid_dim())) return;
  for (u32 i = 0; i < num_slots; ++i) {
    const u32 count = load_relaxed(&seen[i], Scope::kGpu);
    if (count) store_relaxed(&seen[i], 0u, Scope::kGpu);
    if (count != grid_dim()) continue;
    slots[i].last_seq = batch.seq[i];
    store_relaxed(at<u64>(batch.reply_flag[i]), batch.seq[i], Scope::kSystem);
  }
}
