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

// One lane: the reply of server s, checked; kOk or what is wrong with it. The rows are trusted only
// after the head is. What the answer is compared with is read before the wait, not after it.
EW_DEVICE u32 wait_reply(const ClientCombineArgs& args, u32 s, u64 seq, u64 deadline) {
  const ClientServer& server = at<const ClientServer>(args.servers)[s];
  KernelStatus* status = at<KernelStatus>(args.status);
  const u64* flag = at<const u64>(slot_flag(server.reply_addr, server.reply_slot_bytes));
  const u64 head_addr = reply_head(server.reply_addr, server.reply_slot_bytes);
  const u32 expected =
      at<const u32>(args.shape.reply_mode == kReplyPerExpert ? args.tables.num_pairs : args.tables.batch_size)[s];
  auto wrong = [&](u32 code, u64 want, u64 seen, u32 syndrome = 0) {
    report(status, code, kStageCombine, s, want, seen, syndrome);
    return code;
  };
  u64 seen;
  while ((seen = load_acquire(flag, Scope::kSystem)) != seq) {
    if (clock_ns() > deadline) return wrong(kTimeout, seq, seen);
    spin_pause();
  }
  const ReplyHead head = load_plain(at<const ReplyHead>(head_addr));
  if (head.magic != kReplyMagic || head.version != kWireVersion || head.seq != seq ||
      head.head_checksum != head_checksum(&head, sizeof(head) - 8))
    return wrong(kBadArgument, seq, head.seq);
  if (head.reason != kReasonOk) return wrong(kBadArgument, 0, 0, head.reason);  // refused
  if (head.num_rows != expected || head.reply_type != args.shape.reply_type ||
      head.hidden_size != args.shape.hidden_size || head.reply_mode != args.shape.reply_mode)
    return wrong(kBadArgument, expected, head.num_rows);
  return kOk;
}

EW_DEVICE void fail(const ClientCombineArgs& args, u32 code) {
  if (!args.failed) return;
  if (thread_idx() == 0) store_relaxed(at<u32>(args.failed), code, Scope::kSystem);
  const u64 row_bytes = static_cast<u64>(args.shape.hidden_size) * data_type_bytes(args.output_type);
  for (u32 token = global_warp(); token < args.num_tokens; token += all_warps())
    for (u64 i = lane_id(); i < row_bytes; i += warp_size())
      at<u8>(args.output + token * args.output_stride)[i] = 0xff;
}

// All threads of a block, between two block_sync: every loaded server's reply is there, or `code` and
// `status` say what is wrong. Once something is, nobody waits any longer.
EW_DEVICE void wait_replies(const ClientCombineArgs& args, u32* code) {
  const u32 before = load_relaxed(&at<KernelStatus>(args.status)->code, Scope::kGpu);
  const u64 deadline = clock_ns() + (before == kOk ? args.timeout_ns : 0);
  const u64 seq = args.seq ? load_relaxed(at<const u64>(args.seq), Scope::kGpu) : args.shape.seq;
  if (before != kOk) *code = before;
  for (u32 s = thread_idx(); s < args.tables.num_servers; s += block_dim()) {
    if (at<const u32>(args.tables.batch_size)[s] == 0) continue;
    if (const u32 problem = wait_reply(args, s, seq, deadline)) *code = problem;
  }
}

// The wait alone, by one block: before a combine of many, which would keep the server's kernels off
// the multiprocessors if it waited for them itself on the same GPU.
EW_KERNEL(client_wait, ClientCombineArgs) {
  u32 code = kOk;  // for the combine it is in `status`
  wait_replies(args, &code);
}

// Where the result of a token's pair k is; null if there is none.
EW_DEVICE const void* pair_result(const ClientCombineArgs& args, u32 token, u32 k) {
  const u64 pair = static_cast<u64>(token) * args.shape.experts_per_row + k;
  const i32 server = at<const i32>(args.tables.pair_server)[pair], row = at<const i32>(args.tables.pair_row)[pair];
  if (server < 0 || row < 0) return nullptr;
  const u64 row_bytes = static_cast<u64>(args.shape.hidden_size) * data_type_bytes(args.shape.reply_type);
  return at<const u8>(at<const ClientServer>(args.servers)[server].reply_addr + static_cast<u64>(row) * row_bytes);
}

// Each warp's list of where its token's results are; the first one is made while it waits for them.
constexpr u32 kListedRows = 16;
struct RowLists {
  const void* row[32][kListedRows];
};
EW_DEVICE void list_rows(const ClientCombineArgs& args, u32 token, const void** list) {
  const u32 top_k = args.shape.experts_per_row, listed = top_k < kListedRows ? top_k : kListedRows;
  for (u32 k = lane_id(); k < listed; k += warp_size()) list[k] = pair_result(args, token, k);
}

EW_WIDE_KERNEL(client_combine, ClientCombineArgs) {
  EW_SHARED(u32, code);
  EW_SHARED(RowLists, lists);
  const void** list = lists.row[warp_id()];
  const u32 pieces = static_cast<u32>((args.shape.hidden_size + row_piece() - 1) / row_piece());
  const u32 num_items = args.num_tokens * pieces, first = global_warp();
  if (thread_idx() == 0) code = kOk;
  if (first < num_items) list_rows(args, first / pieces, list);
  block_sync();
  wait_replies(args, &code);
  block_sync();
  if (code != kOk) return fail(args, code);

  for (u32 item = first; item < num_items; item += all_warps()) {
    const u32 token = item / pieces;
    const u64 begin = item % pieces * row_piece();
    if (item != first) {
      warp_sync();  // every lane is done with the list
      list_rows(args, token, list);
      warp_sync();
    }
    warp_row_sum(at<u8>(args.output + token * args.output_stride), args.output_type, args.shape.reply_type,
                 args.shape.experts_per_row, begin, min_u64(begin + row_piece(), args.shape.hidden_size),
                 [&](u32 k, float*) { return k < kListedRows ? list[k] : pair_result(args, token, k); });
  }
}
