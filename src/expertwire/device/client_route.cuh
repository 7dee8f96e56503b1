// Route: top-k expert ids -> which rows go to which server, and where each pair's result will be.
//
// One block. A token goes to a server once, however many of its experts live there. Row order is
// token order, so that the same ids always make the same messages. An expert with replicas is
// served by replica (token index + rotation) mod replicas: cheap, even over the tokens of a batch, and
// even over batches of one token, because the caller's rotation differs from message to message.
#pragma once

#include "client_state.cuh"

struct ClientRouteArgs {
  u64 topk_ids;        // [num_tokens][ids_stride] i64 or i32
  u64 ids_stride;      // elements between rows
  u64 expert_servers;  // i32 [num_experts][max_replicas]: server index, -1 ends the list
  RouteTables tables;  // out
  u64 num_skipped;     // u64*, out: ids below 0 or beyond num_experts, added up
  u64 missing_expert;  // i32*, out: an expert that no server holds, -1 if none
  u32 id_bytes, num_tokens, experts_per_row, num_experts, max_replicas, reply_mode;
  u32 rotation, reserved;  // see replica_rotation
};

// A pure function of the message: who sends it again gets the same routing. Where each server adds up
// what a token's experts gave, another replica means another order of additions and so other low bits:
// there only the layer counts, and a batch gives the same bits each time.
EW_DEVICE u32 replica_rotation(u32 reply_mode, u64 seq, u32 layer) {
  return reply_mode == kReplyPerExpert ? static_cast<u32>(seq * 0x9e3779b97f4a7c15ull >> 33) : layer;
}

EW_DEVICE i64 load_id(const ClientRouteArgs& args, u32 token, u32 k) {
  const u64 i = token * args.ids_stride + k;
  return args.id_bytes == 8 ? at<const i64>(args.topk_ids)[i] : at<const i32>(args.topk_ids)[i];
}

EW_DEVICE i32 server_of(const ClientRouteArgs& args, i64 expert, u32 token) {
  const i32* replicas = at<const i32>(args.expert_servers) + expert * args.max_replicas;
  if (args.max_replicas == 1) return replicas[0];
  u32 num_replicas = 0;
  while (num_replicas < args.max_replicas && replicas[num_replicas] >= 0) ++num_replicas;
  return num_replicas ? replicas[(token + args.rotation) % num_replicas] : -1;
}

struct RouteCount {
  u32 rows, pairs;
};
struct RouteParts {
  RouteCount part[32];
};

// One warp: the tokens [first, first + num) of server s, numbered on from `before`; what there is then.
// write: whether their rows and pairs are noted in the tables.
EW_DEVICE RouteCount scan_tokens(const ClientRouteArgs& args, u32 s, u32 first, u32 num, RouteCount before,
                                 bool write) {
  const i32* pair_server = at<const i32>(args.tables.pair_server);
  i32* pair_row = at<i32>(args.tables.pair_row);
  u32* row_token = at<u32>(args.tables.row_token) + static_cast<u64>(s) * args.tables.row_stride;
  const u32 top_k = args.experts_per_row, end = static_cast<u32>(min_u64(first + num, args.num_tokens));
  RouteCount sum = before;
  for (u32 begin = first; begin < end; begin += warp_size()) {
    const u32 token = begin + lane_id();
    u32 count = 0;
    if (token < end)
      for (u32 k = 0; k < top_k; ++k) count += pair_server[token * top_k + k] == static_cast<i32>(s);
    // Both running sums in one collective: rows in the low half, pairs in the high half.
    u32 total = 0;
    const u32 here = warp_exclusive_sum((count ? 1u : 0u) | (count << 16), &total);
    if (count && write) {
      const u32 row = sum.rows + (here & 0xffff);
      u32 next_pair = sum.pairs + (here >> 16);
      row_token[row] = token;
      bool covered = false;
      for (u32 k = 0; k < top_k; ++k) {
        if (pair_server[token * top_k + k] != static_cast<i32>(s)) continue;
        if (args.reply_mode == kReplyPerExpert)
          pair_row[token * top_k + k] = static_cast<i32>(next_pair++);
        else if (!covered)
          pair_row[token * top_k + k] = static_cast<i32>(row);
        covered = true;
      }
    }
    sum.rows += total & 0xffff, sum.pairs += total >> 16;
  }
  return sum;
}

// One block.
EW_DEVICE void route_tokens(const ClientRouteArgs& args) {
  i32* pair_server = at<i32>(args.tables.pair_server);
  i32* pair_row = at<i32>(args.tables.pair_row);
  const u32 top_k = args.experts_per_row;

  for (u32 i = thread_idx(); i < args.num_tokens * top_k; i += block_dim()) {
    const i64 expert = load_id(args, i / top_k, i % top_k);
    i32 server = -1;
    if (expert < 0 || expert >= args.num_experts) {
      atomic_add(at<u64>(args.num_skipped), 1ull);
    } else {
      server = server_of(args, expert, i / top_k);
      if (server < 0) *at<i32>(args.missing_expert) = static_cast<i32>(expert);
    }
    pair_server[i] = server;
    pair_row[i] = -1;
  }
  block_sync();

  // With fewer servers than warps, several warps share a server's tokens: each counts its part first.
  EW_SHARED(RouteParts, found);
  const u32 num_servers = args.tables.num_servers, warps = num_warps() < 32 ? num_warps() : 32;
  const u32 parts = num_servers && warps > num_servers ? warps / num_servers : 1;
  const u32 part_tokens = ceil_div(ceil_div(args.num_tokens, warp_size()), parts) * warp_size();
  if (parts > 1) {
    const u32 unit = warp_id();
    if (unit < num_servers * parts) {
      const u32 first = (unit % parts) * part_tokens;
      const RouteCount count = scan_tokens(args, unit / parts, first, part_tokens, {0, 0}, false);
      if (lane_id() == 0) found.part[unit] = count;
    }
    block_sync();
  }
  for (u32 unit = warp_id(); unit < num_servers * parts; unit += num_warps()) {
    const u32 s = unit / parts, p = unit % parts;
    RouteCount before = {0, 0};
    for (u32 i = 0; i < p; ++i) {
      before.rows += found.part[s * parts + i].rows;
      before.pairs += found.part[s * parts + i].pairs;
    }
    const RouteCount count = scan_tokens(args, s, p * part_tokens, part_tokens, before, true);
    if (p == parts - 1 && lane_id() == 0) {
      at<u32>(args.tables.batch_size)[s] = count.rows;
      at<u32>(args.tables.num_pairs)[s] = count.pairs;
    }
  }
}

EW_KERNEL(client_route, ClientRouteArgs) { route_tokens(args); }
