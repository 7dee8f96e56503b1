// Pack: rows -> one message per server in its send slot (BufferHead | active_experts | payload).
//
// Runs with one block, as the notes' header kernel does, or with many: one block moves about
// 37 GB/s on an H200 where the link carries ten times that. Each warp copies whole rows; the warp
// that owns a server's last piece of work writes its head, padding and flag word.
#pragma once

#include "client_state.cuh"

struct ClientPackArgs {
  u64 servers;        // ClientServer [num_servers]
  RouteTables tables;
  MessageShape shape;
  u64 hidden;         // [num_tokens] rows, hidden_stride bytes apart
  u64 hidden_stride;
  u64 topk_ids;       // as for routing
  u64 ids_stride;
  u64 topk_weights;   // fp32 [num_tokens][weights_stride]
  u64 weights_stride;
  u64 scales;         // fp32 [num_tokens][scales_per_row], only when shape.scale_block > 0
  u64 scales_stride;
  u64 missing_expert;  // const i32*, from routing: nothing is packed or put unless it is -1
  u32 id_bytes, reserved;
  u64 seq;  // const u64*: seq of the message before, for launches in graphs; 0: shape.seq
};

struct RowPair {
  i64 id;
  float weight;
};
// One lane; may be under way while it does something else.
EW_DEVICE RowPair load_pair(const ClientPackArgs& args, u32 token, u32 k) {
  const u64 i = token * args.ids_stride + k;
  const i64 id = args.id_bytes == 8 ? at<const i64>(args.topk_ids)[i] : at<const i32>(args.topk_ids)[i];
  return {id, at<const float>(args.topk_weights)[token * args.weights_stride + k]};
}
EW_DEVICE RowPair load_first_pair(const ClientPackArgs& args, u32 token) {
  return lane_id() < args.shape.experts_per_row ? load_pair(args, token, lane_id()) : RowPair{-1, 0.0f};
}

// What a row has beside its hidden elements: expert ids, weights, scales. first: the lane's first pair.
// is_here(k, id): whether the token's pair k, with that expert, is served by s.
template <typename IsHere>
EW_DEVICE void pack_row_facts(const ClientPackArgs& args, u32 s, u32 row, u32 token, const RequestLayout& layout,
                              const RowPair& first, IsHere is_here) {
  const MessageShape& shape = args.shape;
  const ClientServer& server = at<const ClientServer>(args.servers)[s];
  const u32 top_k = shape.experts_per_row;
  i32* active = at<i32>(server.send_addr + layout.active_offset) + static_cast<u64>(row) * top_k;
  float* weights = at<float>(server.send_addr + layout.weights_offset) + static_cast<u64>(row) * top_k;
  for (u32 k = lane_id(); k < top_k; k += warp_size()) {
    const RowPair pair = k == lane_id() ? first : load_pair(args, token, k);
    const bool here = is_here(k, pair.id);
    store_plain(&active[k], here ? static_cast<i32>(pair.id) : -1);
    store_plain(&weights[k], here ? pair.weight : 0.0f);
  }
  const u64 scale_bytes = scales_per_row(shape) * 4;
  if (scale_bytes)
    warp_copy(at<u8>(server.send_addr + layout.scales_offset + row * scale_bytes),
              at<const u8>(args.scales + token * args.scales_stride * 4), scale_bytes);
}

EW_DEVICE void pack_row(const ClientPackArgs& args, u32 s, u32 row, const RequestLayout& layout) {
  const ClientServer& server = at<const ClientServer>(args.servers)[s];
  const u32 token = at<const u32>(args.tables.row_token)[static_cast<u64>(s) * args.tables.row_stride + row];
  const u64 row_bytes = hidden_row_bytes(args.shape);
  const RowPair first = load_first_pair(args, token);
  warp_copy(at<u8>(server.send_addr + layout.hidden_offset + row * row_bytes),
            at<const u8>(args.hidden + token * args.hidden_stride), row_bytes);
  pack_row_facts(args, s, row, token, layout, first, [&](u32 k, i64) {
    return at<const i32>(args.tables.pair_server)[token * args.shape.experts_per_row + k] == static_cast<i32>(s);
  });
}

EW_DEVICE void pack_head(const ClientPackArgs& args, u32 s, u32 num_rows, const RequestLayout& layout) {
  const MessageShape& shape = args.shape;
  const ClientServer& server = at<const ClientServer>(args.servers)[s];
  const u64 rows = num_rows, ids = rows * shape.experts_per_row * 4, scales = rows * scales_per_row(shape) * 4;
  const u64 hidden = rows * hidden_row_bytes(shape);
  warp_zero(at<u8>(server.send_addr + layout.active_offset + ids), align16(ids) - ids);
  warp_zero(at<u8>(server.send_addr + layout.hidden_offset + hidden), align16(hidden) - hidden);
  warp_zero(at<u8>(server.send_addr + layout.weights_offset + ids), align16(ids) - ids);
  warp_zero(at<u8>(server.send_addr + layout.scales_offset + scales), align16(scales) - scales);
  if (lane_id() != 0) return;
  BufferHead head = {};
  head.magic = kRequestMagic, head.version = kWireVersion, head.head_bytes = sizeof(BufferHead);
  head.seq = shape.seq, head.epoch = shape.epoch, head.client_id = shape.client_id, head.layer = shape.layer;
  head.hidden_size = shape.hidden_size, head.data_type = shape.data_type;
  head.scale_type = shape.scale_type, head.scale_block = shape.scale_block;
  head.num_rows = num_rows, head.experts_per_row = shape.experts_per_row;
  head.num_experts = shape.num_experts, head.reply_mode = shape.reply_mode, head.reply_type = shape.reply_type;
  head.active_bytes = layout.active_bytes, head.payload_bytes = layout.payload_bytes;
  head.padding_bytes = layout.padding_bytes;
  head.head_checksum = head_checksum(&head, sizeof(head) - 8);
  store_plain(at<BufferHead>(server.send_addr), head);
  if (server.in_place) return;  // the flag goes last, by the put
  u64* flag = at<u64>(slot_flag(server.send_addr, server.request_slot_bytes));
  flag[0] = shape.seq, flag[1] = 0;
}

EW_KERNEL(client_pack, ClientPackArgs) {
  if (*at<const i32>(args.missing_expert) >= 0) return;
  ClientPackArgs pack = args;
  if (args.seq) pack.shape.seq = load_relaxed(at<const u64>(args.seq), Scope::kGpu) + 1;
  // Work items of all servers in one numbering: rows of server 0, its head, rows of server 1, ...
  u64 item = global_warp();
  u64 first = 0;  // number of the current server's first item ("server_cumsum_batch_size")
  for (u32 s = 0; s < args.tables.num_servers; ++s) {
    const u32 num_rows = at<const u32>(args.tables.batch_size)[s];
    if (num_rows == 0) continue;
    const RequestLayout layout = message_layout(args.shape, num_rows);
    for (; item < first + num_rows; item += all_warps()) pack_row(args, s, static_cast<u32>(item - first), layout);
    if (item == first + num_rows) {
      pack_head(pack, s, num_rows, layout);
      item += all_warps();
    }
    first += num_rows + 1;
  }
}
