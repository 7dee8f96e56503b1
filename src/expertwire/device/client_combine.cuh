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

EW_DEVICE u32 wrong_reply(const ClientCombineArgs& args, u32 s, u32 code, u64 want, u64 seen, u32 syndrome = 0) {
  report(at<KernelStatus>(args.status), code, kStageCombine, s, want, seen, syndrome);
  return code;
}

// One lane: until the flag of server s is there; kOk or a timeout.
EW_DEVICE u32 wait_reply(const ClientCombineArgs& args, u32 s, u64 seq, u64 deadline) {
  const ClientServer& server = at<const ClientServer>(args.servers)[s];
  const u64* flag = at<const u64>(slot_flag(server.reply_addr, server.reply_slot_bytes));
  u64 seen;
  while ((seen = load_acquire(flag, Scope::kSystem)) != seq) {
    if (clock_ns() > deadline) return wrong_reply(args, s, kTimeout, seq, seen);
    spin_pause();
  }
  return kOk;
}

EW_DEVICE u64 awaited_seq(const ClientCombineArgs& args) {
  return args.seq ? load_relaxed(at<const u64>(args.seq), Scope::kGpu) : args.shape.seq;
}

// All threads of a block, between two block_sync: every loaded server's flag is there, or `code` and
// `status` say what is wrong. Once something is, nobody waits any longer.
EW_DEVICE void wait_replies(const ClientCombineArgs& args, u64 seq, u32* code) {
  const u32 before = load_relaxed(&at<KernelStatus>(args.status)->code, Scope::kGpu);
  const u64 deadline = clock_ns() + (before == kOk ? args.timeout_ns : 0);
  if (before != kOk) *code = before;
  for (u32 s = thread_idx(); s < args.tables.num_servers; s += block_dim()) {
    if (at<const u32>(args.tables.batch_size)[s] == 0) continue;
    if (const u32 problem = wait_reply(args, s, seq, deadline)) *code = problem;
  }
}

// The head of server s's reply on its way, and what it has to say. Read after the flag, like the rows.
struct HeldHead {
  ReplyHead head;
  u32 num_rows, is_loaded;
};
EW_DEVICE HeldHead hold_head(const ClientCombineArgs& args, u32 s) {
  HeldHead held = {};
  if (s >= args.tables.num_servers || at<const u32>(args.tables.batch_size)[s] == 0) return held;
  const ClientServer& server = at<const ClientServer>(args.servers)[s];
  held.head = load_once(at<const ReplyHead>(reply_head(server.reply_addr, server.reply_slot_bytes)));
  held.num_rows =
      at<const u32>(args.shape.reply_mode == kReplyPerExpert ? args.tables.num_pairs : args.tables.batch_size)[s];
  held.is_loaded = 1;
  return held;
}
// One lane: kOk, or what is wrong with it; then the rows are no result.
EW_DEVICE u32 check_reply(const ClientCombineArgs& args, u32 s, u64 seq, const HeldHead& held) {
  const ReplyHead& head = held.head;
  if (!held.is_loaded) return kOk;
  if (head.magic != kReplyMagic || head.version != kWireVersion || head.seq != seq ||
      head.head_checksum != head_checksum(&head, sizeof(head) - 8))
    return wrong_reply(args, s, kBadArgument, seq, head.seq);
  if (head.reason != kReasonOk) return wrong_reply(args, s, kBadArgument, 0, 0, head.reason);  // refused
  if (head.num_rows != held.num_rows || head.reply_type != args.shape.reply_type ||
      head.hidden_size != args.shape.hidden_size || head.reply_mode != args.shape.reply_mode)
    return wrong_reply(args, s, kBadArgument, held.num_rows, head.num_rows);
  return kOk;
}

// Rows in pieces, spread over the warps of the launch.
struct CombineItems {
  u32 pieces, num_items;
};
EW_DEVICE CombineItems combine_items(const ClientCombineArgs& args) {
  const u32 pieces = static_cast<u32>((args.shape.hidden_size + row_piece() - 1) / row_piece());
  return {pieces, args.num_tokens * pieces};
}

// What each warp would have added, or has: NaN, where somebody is told by `failed`.
EW_DEVICE void fail(const ClientCombineArgs& args, u32 code) {
  if (!args.failed) return;
  if (thread_idx() == 0) store_relaxed(at<u32>(args.failed), code, Scope::kSystem);
  const CombineItems items = combine_items(args);
  const u64 size = data_type_bytes(args.output_type);
  for (u32 item = global_warp(); item < items.num_items; item += all_warps()) {
    const u64 begin = item % items.pieces * row_piece(), end = min_u64(begin + row_piece(), args.shape.hidden_size);
    u8* row = at<u8>(args.output + item / items.pieces * args.output_stride);
    for (u64 i = begin * size + lane_id(); i < end * size; i += warp_size()) row[i] = 0xff;
  }
}

// The wait alone, by one block: before a combine of many, which would keep the server's kernels off
// the multiprocessors if it waited for them itself on the same GPU.
EW_KERNEL(client_wait, ClientCombineArgs) {
  u32 code = kOk;  // for the combine it is in `status`
  wait_replies(args, awaited_seq(args), &code);
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

// All threads of a block, then block_sync: every reply's head, of which each thread holds one; `refused`
// or kOk. From the last thread on: where there are few rows, its warp has none.
EW_DEVICE u32 first_head() { return block_dim() - 1 - thread_idx(); }
EW_DEVICE void check_replies(const ClientCombineArgs& args, u64 seq, const HeldHead& held, u32* refused) {
  if (const u32 problem = check_reply(args, first_head(), seq, held)) *refused = problem;
  for (u32 s = first_head() + block_dim(); s < args.tables.num_servers; s += block_dim())
    if (const u32 problem = check_reply(args, s, seq, hold_head(args, s))) *refused = problem;
}

// Where what was added can be taken back (`failed`), the heads are on their way while the rows are added,
// and judged after that; else before.
EW_WIDE_KERNEL(client_combine, ClientCombineArgs) {
  EW_SHARED(u32, code);
  EW_SHARED(u32, refused);
  EW_SHARED(RowLists, lists);
  const void** list = lists.row[warp_id()];
  const CombineItems items = combine_items(args);
  const u32 first = global_warp();
  if (thread_idx() == 0) code = refused = kOk;
  if (first < items.num_items) list_rows(args, first / items.pieces, list);
  const u64 seq = awaited_seq(args);
  block_sync();
  wait_replies(args, seq, &code);
  block_sync();
  if (code != kOk) return fail(args, code);
  const HeldHead held = hold_head(args, first_head());
  if (!args.failed) {
    check_replies(args, seq, held, &refused);
    block_sync();
    if (refused != kOk) return;
  }

  for (u32 item = first; item < items.num_items; item += all_warps()) {
    const u32 token = item / items.pieces;
    const u64 begin = item % items.pieces * row_piece();
    if (item != first) {
      warp_sync();  // every lane is done with the list
      list_rows(args, token, list);
      warp_sync();
    }
    warp_row_sum(at<u8>(args.output + token * args.output_stride), args.output_type, args.shape.reply_type,
                 args.shape.experts_per_row, begin, min_u64(begin + row_piece(), args.shape.hidden_size),
                 [&](u32 k, float*) { return k < kListedRows ? list[k] : pair_result(args, token, k); });
  }
  if (!args.failed) return;
  check_replies(args, seq, held, &refused);
  block_sync();
  if (refused != kOk) fail(args, refused);
}
