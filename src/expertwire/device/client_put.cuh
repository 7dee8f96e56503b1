// Put: one message per loaded server, three puts each: payload, BufferHead with active_experts,
// flag. Servers are spread over warps (ceil-divided); each loaded server is handled by one warp.
//
// do_ibgda true: through the work queue. false: the peer's memory is mapped here, so a warp
// stores straight into the slot and releases the flag with system scope. A slot that was packed in
// place has everything but its flag already.
#pragma once

#include "client_state.cuh"

struct ClientPutArgs {
  u64 servers;  // ClientServer [num_servers]
  RouteTables tables;
  MessageShape shape;
  u64 status;   // KernelStatus*
  u64 missing_expert;  // as for packing
  u32 max_loaded_servers;  // more loaded servers than this is an error, not an overrun
  u32 signal_mode;
  u64 seq;  // u64*, as for packing: advanced here, by a launch of one block; 0: none
};

// One store or WQE that tells the peer that everything before it is in.
EW_DEVICE bool put_flag(const IbgdaPeer* peer, u64 remote_flag, u64 local_flag, u64 seq, u64 previous_seq,
                        u32 slot_idx, u32 signal_mode, u32 qp_id, KernelStatus* status, u32 peer_idx) {
  if (signal_mode == kSignalAdd)
    return ibgda_add_nonfetch(peer, remote_flag, seq - previous_seq, 8, qp_id, status, peer_idx);
  if (signal_mode == kSignalWriteImm)  // into the flag's second half: the receive completion makes it the flag
    return ibgda_put_inline(peer, remote_flag + 8, seq, 8, qp_id, status, peer_idx, kOpRdmaWriteImm, slot_idx);
  return ibgda_put_nbi_warp<true>(peer, remote_flag, local_flag, 8, qp_id, 0, status, peer_idx);
}

// Direct path: copy into the peer's mapped memory, region by region.
EW_DEVICE bool copy_to_peer(const IbgdaPeer* peer, u64 remote_addr, u64 local_addr, u64 num_bytes,
                            KernelStatus* status, u32 peer_idx) {
  while (num_bytes > 0) {
    const KeyLookup chunk = ibgda_get_lkey_and_rkey(peer, local_addr, remote_addr);
    if (chunk.bytes == 0 || chunk.mapped == 0) {
      if (lane_id() == 0) report(status, kNoKey, kStagePut, peer_idx, local_addr, remote_addr);
      return false;
    }
    const u64 chunk_bytes = min_u64(chunk.bytes, num_bytes);
    warp_copy(at<u8>(chunk.mapped), at<const u8>(local_addr), chunk_bytes);
    local_addr += chunk_bytes, remote_addr += chunk_bytes, num_bytes -= chunk_bytes;
  }
  return true;
}
EW_DEVICE bool release_flag(const IbgdaPeer* peer, u64 remote_flag, u64 seq, KernelStatus* status, u32 peer_idx) {
  const IbgdaKey* key = remote_key(peer, remote_flag, status, peer_idx);
  warp_sync();  // every lane's copies come before the flag
  if (!key || key->mapped == 0) return false;
  if (lane_id() == 0) {
    fence(Scope::kSystem);
    store_release(at<u64>(key->mapped + (remote_flag - key->begin)), seq, Scope::kSystem);
  }
  return true;
}

template <bool do_ibgda>
EW_DEVICE void put_to_server(const ClientPutArgs& args, u32 s, u32 qp_id) {
  const ClientServer& server = at<const ClientServer>(args.servers)[s];
  const IbgdaPeer* peer = at<const IbgdaPeer>(server.peer);
  KernelStatus* status = at<KernelStatus>(args.status);
  const RequestLayout layout = message_layout(args.shape, at<const u32>(args.tables.batch_size)[s]);
  const u64 head_bytes = layout.hidden_offset;
  const u64 remote_flag = slot_flag(server.remote_addr, server.request_slot_bytes);
  const u64 payload = server.send_addr + layout.hidden_offset, remote_payload = server.remote_addr + layout.hidden_offset;
  if (do_ibgda) {
    if (!ibgda_put_nbi_warp<false>(peer, remote_payload, payload, layout.payload_bytes, qp_id, 0, status, s)) return;
    if (!ibgda_put_nbi_warp<false>(peer, server.remote_addr, server.send_addr, head_bytes, qp_id, 1, status, s)) return;
    put_flag(peer, remote_flag, slot_flag(server.send_addr, server.request_slot_bytes), args.shape.seq,
             server.previous_seq, server.slot_idx, args.signal_mode, qp_id, status, s);
  } else {
    if (!server.in_place && (!copy_to_peer(peer, remote_payload, payload, layout.payload_bytes, status, s) ||
                             !copy_to_peer(peer, server.remote_addr, server.send_addr, head_bytes, status, s)))
      return;
    release_flag(peer, remote_flag, args.shape.seq, status, s);
  }
}

template <bool do_ibgda>
EW_DEVICE void client_put(const ClientPutArgs& args) {
  if (*at<const i32>(args.missing_expert) >= 0) return;
  const u32 num_servers = args.tables.num_servers;
  const u32* batch_size = at<const u32>(args.tables.batch_size);
  u32 num_loaded = 0;
  for (u32 s = 0; s < num_servers; ++s) num_loaded += batch_size[s] > 0;
  if (num_loaded > args.max_loaded_servers) {
    if (thread_idx() == 0)
      report(at<KernelStatus>(args.status), kTooManyServers, kStagePut, 0, args.max_loaded_servers, num_loaded);
    return;
  }
  // assigned_warp of the i-th loaded server is i / servers_per_warp.
  const u32 servers_per_warp = ceil_div(num_loaded, all_warps());
  u32 loaded_idx = 0;
  for (u32 s = 0; s < num_servers; ++s) {
    if (batch_size[s] == 0) continue;
    if (loaded_idx++ / servers_per_warp == global_warp()) put_to_server<do_ibgda>(args, s, warp_id());
  }
  if (args.seq && global_warp() == 0 && lane_id() == 0) {
    u64* seq = at<u64>(args.seq);
    store_relaxed(seq, load_relaxed(seq, Scope::kGpu) + 1, Scope::kGpu);
  }
}

EW_KERNEL(client_put_ibgda, ClientPutArgs) { client_put<true>(args); }
EW_KERNEL(client_put_direct, ClientPutArgs) { client_put<false>(args); }

// The older form: the first warp serves one server after another.
EW_KERNEL(client_put_sequential, ClientPutArgs) {
  if (global_warp() != 0 || *at<const i32>(args.missing_expert) >= 0) return;
  for (u32 s = 0; s < args.tables.num_servers; ++s)
    if (at<const u32>(args.tables.batch_size)[s] > 0) put_to_server<true>(args, s, 0);
}
