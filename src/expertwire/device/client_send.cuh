// Send: route, pack and put in one launch of many blocks, for peers whose memory is mapped here.
//
// Every block routes for itself, which is quicker than to wait for one that does; all write the
// same tables. Rows go straight into the peer's slot (ClientServer::in_place), in pieces, so that
// one row keeps several warps busy. The block that finishes last releases the flags.
#pragma once

#include "client_pack.cuh"
#include "client_route.cuh"
#include "grid.cuh"

struct ClientSendArgs {
  ClientRouteArgs route;
  ClientPackArgs pack;  // servers: all in place
  u64 seq;              // u64*: seq of the last message in this slot, advanced here; 0: pack.shape.seq
  u64 arrived;          // u32*, see last_block
  u64 only_if;          // const u32*: nothing is sent, the second time, unless it is not 0; 0: always sent
};

// Piece of a row's hidden bytes; the first one brings what else the row has.
EW_DEVICE void send_piece(const ClientPackArgs& args, u32 s, u32 row, u32 piece, const RequestLayout& layout) {
  const ClientServer& server = at<const ClientServer>(args.servers)[s];
  const u32 token = at<const u32>(args.tables.row_token)[static_cast<u64>(s) * args.tables.row_stride + row];
  const u64 row_bytes = hidden_row_bytes(args.shape);
  const u64 begin = piece * copy_piece(), left = row_bytes - begin;
  warp_copy(at<u8>(server.send_addr + layout.hidden_offset + row * row_bytes + begin),
            at<const u8>(args.hidden + token * args.hidden_stride + begin), min_u64(left, copy_piece()));
  if (piece == 0) pack_row_facts(args, s, row, token, layout);
}

EW_KERNEL(client_send_direct, ClientSendArgs) {
  if (args.only_if && load_relaxed(at<const u32>(args.only_if), Scope::kGpu) == 0) return;
  route_tokens(args.route, block_idx() == 0);
  block_sync();
  if (*at<const i32>(args.route.missing_expert) >= 0) return;
  ClientPackArgs pack = args.pack;
  if (args.seq) pack.shape.seq = load_relaxed(at<const u64>(args.seq), Scope::kGpu) + 1;
  const u32 pieces = static_cast<u32>((hidden_row_bytes(pack.shape) + copy_piece() - 1) / copy_piece());
  const u32* batch_size = at<const u32>(pack.tables.batch_size);
  u64 item = global_warp(), first = 0;
  for (u32 s = 0; s < pack.tables.num_servers; ++s) {
    if (batch_size[s] == 0) continue;
    const u64 count = static_cast<u64>(batch_size[s]) * pieces;
    const RequestLayout layout = message_layout(pack.shape, batch_size[s]);
    for (; item < first + count; item += all_warps()) {
      const u32 i = static_cast<u32>(item - first);
      send_piece(pack, s, i / pieces, i % pieces, layout);
    }
    if (item == first + count) {
      pack_head(pack, s, batch_size[s], layout);
      item += all_warps();
    }
    first += count + 1;
  }
  if (!last_block(args.arrived)) return;
  for (u32 s = 0; s < pack.tables.num_servers; ++s) {
    if (batch_size[s] == 0) continue;
    const ClientServer& server = at<const ClientServer>(pack.servers)[s];
    store_relaxed(at<u64>(slot_flag(server.send_addr, server.request_slot_bytes)), pack.shape.seq, Scope::kSystem);
  }
  if (args.seq) store_relaxed(at<u64>(args.seq), pack.shape.seq, Scope::kGpu);
}
