// Failover without the CPU: a server that does not answer is taken out of the routing, and the same
// batch is sent again to those that hold the same experts. Between a send and its combine:
//
//   client_failover   one block: waits; whoever is silent is lost, and `resend` says so
//   client_send_direct with only_if = resend: the batch once more, under the next seq; through work
//                     queues route, pack and put do that, with missing_expert = resend
//
// Both do next to nothing when every server has answered. All servers that stay have answered by
// then, so their slots are free.
#pragma once

#include "client_combine.cuh"

enum LostServer : u32 { kNotLost = 0, kSilent = 1, kDisconnected = 2 };

struct ClientFailoverArgs {
  ClientCombineArgs wait;  // of the message that is under way
  u64 expert_servers;      // i32 [num_experts][max_replicas], as routing reads it: changed here
  u64 lost;                // u32 [num_servers], LostServer, in host memory: the host notes what it learns, too
  u64 resend;              // i32*, out: -1 if the batch is to be sent again, else 0
  u32 num_experts, max_replicas;
};

constexpr u64 kLookAtHostNs = 20'000;  // host memory is far: it is looked at only so often

// One lane: whether server s answers in time. Sooner no if the host knows that it never will.
EW_DEVICE bool answers(const ClientFailoverArgs& args, u32 s, u64 seq, u64 deadline) {
  const ClientServer& server = at<const ClientServer>(args.wait.servers)[s];
  const u64* flag = at<const u64>(slot_flag(server.reply_addr, server.reply_slot_bytes));
  u64 look = clock_ns() + kLookAtHostNs;
  bool is_last_look = false;
  while (load_acquire(flag, Scope::kSystem) != seq) {
    if (is_last_look) return false;
    const u64 now = clock_ns();
    if (now > look) {  // what it sent before its end still counts
      is_last_look = load_acquire(at<const u32>(args.lost) + s, Scope::kSystem) != kNotLost;
      look = now + kLookAtHostNs;
    }
    is_last_look = is_last_look || now > deadline;
    spin_pause();
  }
  return true;
}

// One lane: lost servers out of an expert's list. A list that is empty then is an error.
EW_DEVICE void drop_lost(const ClientFailoverArgs& args, u32 expert, u64 seq) {
  i32* servers = at<i32>(args.expert_servers) + static_cast<u64>(expert) * args.max_replicas;
  const u32* lost = at<const u32>(args.lost);
  const i32 first = servers[0];
  u32 kept = 0;
  for (u32 i = 0; i < args.max_replicas && servers[i] >= 0; ++i)
    if (load_relaxed(lost + servers[i], Scope::kSystem) == kNotLost) servers[kept++] = servers[i];
  for (u32 i = kept; i < args.max_replicas; ++i) servers[i] = -1;
  if (kept > 0 || first < 0) return;
  const ClientServer& server = at<const ClientServer>(args.wait.servers)[first];
  const u64 seen = load_acquire(at<const u64>(slot_flag(server.reply_addr, server.reply_slot_bytes)), Scope::kSystem);
  const bool silent = load_relaxed(lost + first, Scope::kSystem) == kSilent;
  report(at<KernelStatus>(args.wait.status), silent ? kTimeout : kPeerLost, kStageCombine, static_cast<u32>(first), seq,
         seen);
}

EW_KERNEL(client_failover, ClientFailoverArgs) {
  EW_SHARED(u32, num_silent);
  u32* code = &at<KernelStatus>(args.wait.status)->code;
  const bool failed = load_relaxed(code, Scope::kGpu) != kOk;
  if (thread_idx() == 0) {
    num_silent = 0;
    store_relaxed(at<u32>(args.resend), 0u, Scope::kGpu);
  }
  block_sync();
  if (failed) return;
  const u64 deadline = clock_ns() + args.wait.timeout_ns;
  const u64 seq = load_relaxed(at<const u64>(args.wait.seq), Scope::kGpu);
  for (u32 s = thread_idx(); s < args.wait.tables.num_servers; s += block_dim()) {
    if (at<const u32>(args.wait.tables.batch_size)[s] == 0 || answers(args, s, seq, deadline)) continue;
    u32* lost = at<u32>(args.lost) + s;
    if (load_relaxed(lost, Scope::kSystem) == kNotLost) store_relaxed(lost, u32{kSilent}, Scope::kSystem);
    atomic_add(&num_silent, 1u);
  }
  fence(Scope::kSystem);
  block_sync();
  if (num_silent == 0) return;
  for (u32 expert = thread_idx(); expert < args.num_experts; expert += block_dim()) drop_lost(args, expert, seq);
  block_sync();
  if (thread_idx() == 0 && load_relaxed(code, Scope::kGpu) == kOk)
    store_relaxed(at<u32>(args.resend), ~0u, Scope::kGpu);
}
