// Combine: wait for every loaded server's reply, then add the partial results in a fixed order
// (the token's expert slots, ascending), so that timing never changes a sum.
#pragma once

#include "client_state.cuh"

struct ClientCombineArgs {
  u64 servers;  // ClientServer [num_servers]
  RouteTables tables;
  MessageShape shape;
  u64 output;         // [num_tokens] rows of output_type, output_stride bytes apart
  u64 output_stride;
  u64 status;         // KernelStatus*
  u64 timeout_ns;
  u64 seq;            // const u64*: seq of the message that is waited for; 0: shape.seq
  u64 failed;         // u32* in host memory, 0: none. Gets the status code of a problem, for callers that
                      // do not wait; what was not computed then reads as NaN
  u32 output_type, num_tokens;
};

// One lane: the reply of server s, checked. The rows are trusted only after the head is.
EW_DEVICE void wait_reply(const ClientCombineArgs& args, u32 s, u64 seq, u64 deadline) {
  const ClientServer& server = at<const ClientServer>(args.servers)[s];
  KernelStatus* status = at<KernelStatus>(args.status);
  const u64 flag_addr = slot_flag(server.reply_addr, server.reply_slot_bytes);
  u64 seen;
  while ((seen = load_acquire(at<const u64>(flag_addr), Scope::kSystem)) != seq) {
    if (clock_ns() > deadline) return report(status, kTimeout, kStageCombine, s, seq, seen);
    spin_pause();
  }
  const ReplyHead head = *at<const ReplyHead>(reply_head(server.reply_addr, server.reply_slot_bytes));
  const u32* expected =
      at<const u32>(args.shape.reply_mode == kReplyPerExpert ? args.tables.num_pairs : args.tables.batch_size);
  if (head.magic != kReplyMagic || head.version != kWireVersion || head.seq != seq ||
      head.head_checksum != head_checksum(&head, sizeof(head) - 8))
    return report(status, kBadArgument, kStageCombine, s, seq, head.seq);
  if (head.reason != kReasonOk)  // refused: the reason travels in `syndrome`
    return report(status, kBadArgument, kStageCombine, s, 0, 0, head.reason);
  if (head.num_rows != expected[s] || head.reply_type != args.shape.reply_type ||
      head.hidden_size != args.shape.hidden_size || head.reply_mode != args.shape.reply_mode)
    report(status, kBadArgument, kStageCombine, s, expected[s], head.num_rows);
}

EW_DEVICE void fail(const ClientCombineArgs& args, u32 code) {
  if (!args.failed) return;
  if (thread_idx() == 0) store_relaxed(at<u32>(args.failed), code, Scope::kSystem);
  const u64 row_bytes = static_cast<u64>(args.shape.hidden_size) * data_type_bytes(args.output_type);
  for (u32 token = global_warp(); token < args.num_tokens; token += all_warps())
    for (u64 i = lane_id(); i < row_bytes; i += warp_size())
      at<u8>(args.output + token * args.output_stride)[i] = 0xff;
}

// All threads of a block: every loaded server's reply is there, or `status` says what is wrong. Once
// something is, nobody waits any longer.
EW_DEVICE void wait_replies(const ClientCombineArgs& args) {
  const u32 before = load_relaxed(&at<KernelStatus>(args.status)->code, Scope::kGpu);
  const u64 deadline = clock_ns() + (before == kOk ? args.timeout_ns : 0);
  const u64 seq = args.seq ? load_relaxed(at<const u64>(args.seq), Scope::kGpu) : args.shape.seq;
  for (u32 s = thread_idx(); s < args.tables.num_servers; s += block_dim())
    if (at<const u32>(args.tables.batch_size)[s] > 0) wait_reply(args, s, seq, deadline);
}

// The wait alone, by one block: before a combine of many, which would keep the server's kernels off
// the multiprocessors if it waited for them itself on the same GPU.
EW_KERNEL(client_wait, ClientCombineArgs) { wait_replies(args); }

EW_KERNEL(client_combine, ClientCombineArgs) {
  wait_replies(args);
  block_sync();
  const u32 code = load_relaxed(&at<KernelStatus>(args.status)->code, Scope::kGpu);
  if (code != kOk) return fail(args, code);

  const u32 top_k = args.shape.experts_per_row;
  const u64 row_bytes = static_cast<u64>(args.shape.hidden_size) * data_type_bytes(args.shape.reply_type);
  const u32 pieces = static_cast<u32>((args.shape.hidden_size + row_piece() - 1) / row_piece());
  for (u32 item = global_warp(); item < args.num_tokens * pieces; item += all_warps()) {
    const u32 token = item / pieces;
    const u64 begin = (item % pieces) * row_piece();
    const i32* pair_server = at<const i32>(args.tables.pair_server) + static_cast<u64>(token) * top_k;
    const i32* pair_row = at<const i32>(args.tables.pair_row) + static_cast<u64>(token) * top_k;
    warp_row_sum(at<u8>(args.output + token * args.output_stride), args.output_type, args.shape.reply_type, top_k,
                 begin, min_u64(begin + row_piece(), args.shape.hidden_size), [&](u32 k, float*) -> const void* {
                   if (pair_server[k] < 0 || pair_row[k] < 0) return nullptr;
                   const ClientServer& server = at<const ClientServer>(args.servers)[pair_server[k]];
                   return at<const u8>(server.reply_addr + static_cast<u64>(pair_row[k]) * row_bytes);
                 });
  }
}
