// For the seeded scheduler, on the CPU target only: the steps of a client and of a server one after the
// other in one kernel, so that one launch interleaves whole rounds of both sides and the HCAs between
// them. Otherwise every step is a launch of its own, and the end of a launch orders everything.
#pragma once

#include "client_combine.cuh"
#include "client_pack.cuh"
#include "client_put.cuh"
#include "server_gather.cuh"
#include "server_reply.cuh"

struct ClientRoundsArgs {
  u64 packs, puts, combines;  // ClientPackArgs, ClientPutArgs, ClientCombineArgs [num_rounds]
  u32 num_rounds, do_ibgda;
};

struct ServerRoundsArgs {
  ServerTakeArgs take;
  ServerReplyArgs reply;  // expert_output: what was gathered, by way of the experts below
  u64 experts_done;       // u32*: messages gathered, out
  u32 num_messages;       // to be served, then it ends
  u32 way;                // ReplyWay
};
enum ReplyWay : u32 { kReplyIbgda = 0, kReplyDirect = 1, kReplyLater = 2 };

// What the end of a launch does for a block: all that it stored is there for everybody.
static inline void end_of_step() {
  block_sync();
  if (thread_idx() == 0) fence(Scope::kSystem);
  block_sync();
}

static void check_client_rounds(const ClientRoundsArgs& args) {
  for (u32 r = 0; r < args.num_rounds; ++r) {
    client_pack(at<const ClientPackArgs>(args.packs)[r]);
    block_sync();
    const ClientPutArgs& put = at<const ClientPutArgs>(args.puts)[r];
    args.do_ibgda ? client_put<true>(put) : client_put<false>(put);
    client_combine(at<const ClientCombineArgs>(args.combines)[r]);
    end_of_step();
    if (at<KernelStatus>(put.status)->code != kOk) return;
  }
}

// Experts that multiply: local expert e by e + 1, in place, rows of fp32.
static inline void run_experts(const ServerGatherArgs& args, u32 hidden_size) {
  const u32* offsets = at<const u32>(args.expert_offsets);
  for (u32 e = 0; e < args.num_local; ++e)
    for (u64 i = static_cast<u64>(offsets[e]) * hidden_size; i < static_cast<u64>(offsets[e + 1]) * hidden_size; ++i)
      at<float>(args.gathered)[i] *= static_cast<float>(e + 1);
}

static void check_server_rounds(const ServerRoundsArgs& args) {
  const ServerGatherArgs& gather = args.take.gather;
  u32 served = 0;
  while (served < args.num_messages) {
    poll_slots(args.take.poll);
    block_sync();
    const u32 found = *at<const u32>(args.take.poll.num_messages);
    if (found == 0) return;  // nothing came in time
    group_pairs(gather);
    block_sync();
    copy_rows(gather);
    end_of_step();
    if (thread_idx() == 0) run_experts(gather, args.reply.hidden_size);
    block_sync();
    served += found;
    if (thread_idx() == 0) *at<u32>(args.experts_done) = served;
    if (args.way == kReplyLater) continue;
    args.way == kReplyIbgda ? server_reply<true>(args.reply) : server_reply<false>(args.reply);
    end_of_step();
    for (u32 m = thread_idx(); m < found; m += block_dim()) {
      const ServerMessage& message = at<const ServerMessage>(args.take.poll.messages)[m];
      at<ServerSlot>(args.take.poll.slots)[message.slot].previous_reply_seq = message.head.seq;
    }
    block_sync();
  }
}
