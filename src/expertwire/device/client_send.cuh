// Send: route, pack and put in one launch of many blocks, for peers whose memory is mapped here.
//
// A warp takes a piece of a token and stores it into the slot of every server that the token goes
// to (ClientServer::in_place). Where it lies there depends on the tokens before it, so each block
// counts them all for itself, which is quicker than to wait for one that does; the loads of the
// first piece are under way meanwhile. The block that finishes last releases the flags.
//
// The tables are for combining, a later launch: of several blocks the last one writes them, and no
// message waits for it.
#pragma once

#include "client_pack.cuh"
#include "client_route.cuh"
#include "grid.cuh"

struct ClientSendArgs {
  ClientRouteArgs route;
  ClientPackArgs pack;  // servers: all in place
  u64 seq;              // u64*: seq of the last message in this slot, advanced here; 0: pack.shape.seq
  u64 arrived;          // u32*, see last_block
  u64 counts;           // scratch, TokenGroup [num_servers][groups of warp_size() tokens + 1]
  u64 only_if;          // const u32*: nothing is sent, the second time, unless it is not 0; 0: always sent
};

struct TokenGroup {  // as many tokens as a warp has lanes, seen from one server
  u32 here;          // bit i: token i of the group goes there
  u32 before;        // rows of earlier groups; of the group after the last one: all rows
};
constexpr u32 kSharedGroups = 1024;  // in a block's own memory, which is quicker; else in `counts`
struct SharedGroups {
  TokenGroup group[kSharedGroups];
};
constexpr u32 kSharedSlots = 32;  // servers whose slots a block knows by heart
struct SharedSlots {
  u64 addr[kSharedSlots], flag[kSharedSlots];
};
EW_DEVICE u64 send_flag(const ClientPackArgs& pack, u32 s) {
  const ClientServer& server = at<const ClientServer>(pack.servers)[s];
  return slot_flag(server.send_addr, server.request_slot_bytes);
}
constexpr u32 kServersAtOnce = 32, kIdsAtOnce = 8;  // ids: independent loads
constexpr u32 kSharedServers = 1024;  // experts of one server each whose server a block knows by heart
struct SharedServers {
  i32 server[kSharedServers];
};
EW_DEVICE i32 server_known(const ClientRouteArgs& args, const SharedServers& known, i64 expert, u32 token) {
  return args.max_replicas == 1 && args.num_experts <= kSharedServers ? known.server[expert]
                                                                      : server_of(args, expert, token);
}

struct SomeIds {
  i64 expert[kIdsAtOnce];
};
EW_DEVICE SomeIds load_ids(const ClientRouteArgs& args, u32 token, u32 begin) {
  SomeIds ids;
#pragma unroll
  for (u32 i = 0; i < kIdsAtOnce; ++i)
    ids.expert[i] =
        token < args.num_tokens && begin + i < args.experts_per_row ? load_id(args, token, begin + i) : -1;
  return ids;
}

// One block: groups [num_servers][num_groups + 1]. False: some expert has no server. Ids and the
// experts' servers are on their way at the same time.
EW_DEVICE bool count_rows(const ClientRouteArgs& args, SharedServers& known, TokenGroup* groups, u32 num_groups) {
  EW_SHARED(u32, missing);
  if (thread_idx() == 0) missing = 0;
  SomeIds ids = load_ids(args, thread_idx(), 0);  // of the warp's first group
  if (args.max_replicas == 1 && args.num_experts <= kSharedServers)
    for (u32 e = thread_idx(); e < args.num_experts; e += block_dim())
      known.server[e] = at<const i32>(args.expert_servers)[e];
  block_sync();
  const u32 num_servers = args.tables.num_servers, stride = num_groups + 1;
  for (u32 g = warp_id(); g < num_groups; g += num_warps()) {
    const u32 token = g * warp_size() + lane_id();
    for (u32 first = 0; first < num_servers; first += kServersAtOnce) {
      u32 mask = 0;  // of the lane's token, bit i: server first + i
      for (u32 begin = 0; token < args.num_tokens && begin < args.experts_per_row; begin += kIdsAtOnce) {
        if (g != warp_id() || first != 0 || begin != 0) ids = load_ids(args, token, begin);
#pragma unroll
        for (u32 i = 0; i < kIdsAtOnce; ++i) {
          const i64 expert = ids.expert[i];
          if (expert < 0 || expert >= args.num_experts) continue;
          const i32 server = server_known(args, known, expert, token);
          if (server < 0) missing = 1;
          const u32 bit = static_cast<u32>(server) - first;
          if (bit < kServersAtOnce) mask |= 1u << bit;
        }
      }
      for (u32 s = first; s < num_servers && s < first + kServersAtOnce; ++s) {
        const u32 here = warp_ballot(mask >> (s - first) & 1);
        if (lane_id() == 0) groups[s * stride + g].here = here;
      }
    }
  }
  block_sync();
  for (u32 s = thread_idx(); s < num_servers; s += block_dim()) {
    u32 rows = 0;
    for (u32 g = 0; g < num_groups; ++g) {
      groups[s * stride + g].before = rows;
      rows += popcount(groups[s * stride + g].here);
    }
    groups[s * stride + num_groups].before = rows;
  }
  block_sync();
  return missing == 0;
}

// A piece of a token's row on its way; with the first one the lane's first pair.
struct HeldPiece {
  HeldBytes bytes;
  RowPair pair;
};
EW_DEVICE HeldPiece hold_piece(const ClientPackArgs& pack, u32 token, u32 piece) {
  const u64 begin = piece * copy_piece();
  return {hold_bytes(at<const u8>(pack.hidden + token * pack.hidden_stride + begin),
                     min_u64(hidden_row_bytes(pack.shape) - begin, copy_piece())),
          piece == 0 ? load_first_pair(pack, token) : RowPair{-1, 0.0f}};
}

// A piece of a token's row to each of its servers; the first piece brings what else a row has.
EW_DEVICE void send_piece(const ClientSendArgs& args, const SharedSlots& slots, const SharedServers& known,
                          const TokenGroup* groups, u32 num_groups, u32 token, u32 piece, const HeldPiece& held) {
  const ClientPackArgs& pack = args.pack;
  const u32 num_servers = pack.tables.num_servers, lane = token % warp_size();
  for (u32 first = 0; first < num_servers; first += warp_size()) {
    const u32 mine = first + lane_id();
    const TokenGroup* mine_group = groups + mine * (num_groups + 1) + token / warp_size();
    for (u32 left = warp_ballot(mine < num_servers && (mine_group->here >> lane & 1)); left; left &= left - 1) {
      const u32 s = first + popcount((left & -left) - 1);
      const TokenGroup* group = groups + s * (num_groups + 1);
      const RequestLayout layout = message_layout(pack.shape, group[num_groups].before);
      group += token / warp_size();
      const u32 row = group->before + popcount(group->here & ((1u << lane) - 1));
      const u64 at_byte = row * hidden_row_bytes(pack.shape) + piece * copy_piece();
      const u64 slot = s < kSharedSlots ? slots.addr[s] : at<const ClientServer>(pack.servers)[s].send_addr;
      put_held(at<u8>(slot + layout.hidden_offset + at_byte), held.bytes);
      if (piece == 0)
        pack_row_facts(pack, s, row, token, layout, held.pair, [&](u32, i64 id) {
          return id >= 0 && id < args.route.num_experts &&
                 server_known(args.route, known, id, token) == static_cast<i32>(s);
        });
    }
  }
}

EW_WIDE_KERNEL(client_send_direct, ClientSendArgs) {
  if (args.only_if && load_relaxed(at<const u32>(args.only_if), Scope::kGpu) == 0) return;
  const u32 senders = grid_dim() > 1 ? grid_dim() - 1 : 1, step = senders * num_warps();
  if (grid_dim() == 1 || block_idx() == senders) route_tokens(args.route);
  if (block_idx() == senders) return;

  const u32 pieces = static_cast<u32>((hidden_row_bytes(args.pack.shape) + copy_piece() - 1) / copy_piece());
  const u32 num_items = args.route.num_tokens * pieces, num_servers = args.pack.tables.num_servers;
  u32 item = global_warp();
  HeldPiece held = {};
  if (item < num_items) held = hold_piece(args.pack, item / pieces, item % pieces);

  EW_SHARED(SharedGroups, shared);
  EW_SHARED(SharedSlots, slots);
  EW_SHARED(SharedServers, known);
  for (u32 s = thread_idx(); s < num_servers && s < kSharedSlots; s += block_dim())
    slots.addr[s] = at<const ClientServer>(args.pack.servers)[s].send_addr, slots.flag[s] = send_flag(args.pack, s);
  const u32 num_groups = ceil_div(args.route.num_tokens, warp_size());
  const bool fits = num_servers * (num_groups + 1) <= kSharedGroups;
  TokenGroup* groups = fits ? shared.group : at<TokenGroup>(args.counts);
  const bool was_missing = *at<const i32>(args.route.missing_expert) >= 0;
  ClientPackArgs pack = args.pack;
  if (args.seq) pack.shape.seq = load_relaxed(at<const u64>(args.seq), Scope::kGpu) + 1;
  if (!count_rows(args.route, known, groups, num_groups) || was_missing) return;

  for (; item < num_items; item += step) {
    HeldPiece next = {};
    if (const u32 i = item + step; i < num_items) next = hold_piece(args.pack, i / pieces, i % pieces);
    send_piece(args, slots, known, groups, num_groups, item / pieces, item % pieces, held);
    held = next;
  }
  for (; item < num_items + num_servers; item += step) {
    const u32 s = item - num_items, rows = groups[s * (num_groups + 1) + num_groups].before;
    if (rows) pack_head(pack, s, rows, message_layout(pack.shape, rows));
  }
  if (!last_block(args.arrived, senders)) return;
  for (u32 s = 0; s < num_servers; ++s) {
    if (groups[s * (num_groups + 1) + num_groups].before == 0) continue;
    store_relaxed(at<u64>(s < kSharedSlots ? slots.flag[s] : send_flag(pack, s)), pack.shape.seq, Scope::kSystem);
  }
  if (args.seq) store_relaxed(at<u64>(args.seq), pack.shape.seq, Scope::kGpu);
}
