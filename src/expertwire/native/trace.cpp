// The trace file, and what a launch tells it.
#include "trace.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "client_combine.cuh"
#include "client_pack.cuh"
#include "client_put.cuh"
#include "error.hpp"
#include "server_poll.cuh"
#include "server_reply.cuh"
#include "trip.hpp"

namespace ew {

std::atomic<TraceFile*> trace_file{nullptr};

namespace {

static_assert(sizeof(TraceRecord) == 160 && sizeof(TraceHeader) == 32);

std::atomic<u32> writers{0};  // inside trace(): the file must not go away under them
thread_local u32 seat = 0;

u32 thread_id() {
  static thread_local u32 id = static_cast<u32>(syscall(SYS_gettid));
  return id;
}

u32 stage_of(const char* kernel) {
  constexpr struct {
    const char* prefix;
    u32 stage;
  } kStages[] = {{"client_route", kTraceRoute}, {"client_pack", kTracePack},   {"client_put", kTracePut},
                 {"client_combine", kTraceCombine}, {"server_poll", kTracePoll}, {"server_gather", kTraceGather},
                 {"server_reply", kTraceReply}};
  for (const auto& entry : kStages)
    if (strncmp(kernel, entry.prefix, strlen(entry.prefix)) == 0) return entry.stage;
  return kTraceOther;
}

// A message and the queues towards its peer, as they were before the step.
struct Target {
  const IbgdaQp* qp;
  u64 head;             // entries from here on are new
  u64 begin, end;       // where the message goes at the peer: the queue may carry others
  TraceRecord message;
};
thread_local std::vector<Target> targets;

void add_targets(u64 peer_addr, u64 begin, u64 num_bytes, const TraceRecord& message) {
  const auto* peer = at<const IbgdaPeer>(peer_addr);
  for (u32 q = 0; peer && q < peer->num_qps; ++q) {
    const IbgdaQp* qp = at<const IbgdaQp>(peer->qps) + q;
    targets.push_back({qp, __atomic_load_n(&qp->ready_head, __ATOMIC_ACQUIRE), begin, begin + num_bytes, message});
  }
}

template <typename Args>
const Args& args_of(const ew_step& step) {
  return *static_cast<const Args*>(step.args);
}

u64 load_be64(const u8* bytes) {
  u64 value;
  memcpy(&value, bytes, 8);
  return __builtin_bswap64(value);
}

// The entries that were written since `head` for this message.
void trace_posted(const Target& target, ew_hca* hca, u64 now) {
  const IbgdaQp& qp = *target.qp;
  const u64 head = __atomic_load_n(&qp.ready_head, __ATOMIC_ACQUIRE);
  const u64 oldest = head > qp.num_wqe ? head - qp.num_wqe : 0;
  for (u64 idx = target.head > oldest ? target.head : oldest; idx < head; ++idx) {
    const u8* entry = at<const u8>(qp.sq_addr) + (idx & (qp.num_wqe - 1)) * 64;
    const u64 raddr = load_be64(entry + 16);
    if (raddr < target.begin || raddr >= target.end) continue;
    TraceRecord record = target.message;
    record.kind = kTracePosted, record.begin_ns = record.end_ns = now;
    record.hca = reinterpret_cast<u64>(hca), record.qpn = qp.qpn, record.idx = idx;
    memcpy(record.wqe, entry, kTraceWqeBytes);
    trace(record);
  }
}

TraceRecord taken_message(const ServerMessage& message, const ServerSlot& slot) {
  TraceRecord record = {};
  record.client = slot.client_id, record.seq = message.head.seq, record.server = seat;
  record.layer = message.head.layer, record.rows = message.head.num_rows, record.reason = message.reason;
  return record;
}

}  // namespace

void trace_seat(unsigned number) { seat = number; }

void trace(TraceRecord record) {
  writers.fetch_add(1, std::memory_order_seq_cst);
  if (TraceFile* file = trace_file.load(std::memory_order_seq_cst)) {
    const u64 number = __atomic_fetch_add(&file->header->num_records, 1, __ATOMIC_RELAXED);
    TraceRecord* place = file->records + number % file->header->capacity;
    __atomic_store_n(&place->number, 0, __ATOMIC_RELEASE);
    record.number = 0, record.thread = thread_id();
    *place = record;
    __atomic_store_n(&place->number, number + 1, __ATOMIC_RELEASE);  // a torn record is none
  }
  writers.fetch_sub(1, std::memory_order_seq_cst);
}

void trace_before(const ew_step& step) {
  targets.clear();
  const u32 stage = stage_of(step.kernel->name);
  if (stage == kTracePut) {
    const auto& put = args_of<ClientPutArgs>(step);
    if (*at<const i32>(put.missing_expert) >= 0) return;
    for (u32 s = 0; s < put.tables.num_servers; ++s) {
      const ClientServer& server = at<const ClientServer>(put.servers)[s];
      TraceRecord message = {};
      message.client = put.shape.client_id, message.server = server.server_id, message.seq = put.shape.seq;
      message.layer = put.shape.layer, message.rows = at<const u32>(put.tables.batch_size)[s];
      message.num_bytes = message_layout(put.shape, message.rows).end + 8;
      if (message.rows) add_targets(server.peer, server.remote_addr, server.request_slot_bytes, message);
    }
  } else if (stage == kTraceReply) {
    const auto& reply = args_of<ServerReplyArgs>(step);
    for (u32 m = 0; m < messages_of(reply); ++m) {
      const ServerMessage& message = at<const ServerMessage>(reply.messages)[m];
      const ServerSlot& slot = at<const ServerSlot>(reply.slots)[message.slot];
      TraceRecord record = taken_message(message, slot);
      record.server = reply.server_id;
      record.rows = message.reason == kReasonOk ? message.num_reply_rows : 0;
      record.num_bytes = static_cast<u64>(record.rows) * reply.hidden_size *
                             data_type_bytes(message.head.reply_type) + sizeof(ReplyHead) + 8;
      add_targets(slot.peer, slot.remote_reply_addr, slot.reply_slot_bytes, record);
    }
  }
}

void trace_after(const ew_step& step, ew_hca* hca, u64 begin_ns, u64 end_ns) {
  TraceRecord record = {};
  record.kind = kTraceStage, record.stage = stage_of(step.kernel->name);
  record.begin_ns = begin_ns, record.end_ns = end_ns;
  switch (record.stage) {
    case kTraceRoute: break;
    case kTracePack: {
      const MessageShape& shape = args_of<ClientPackArgs>(step).shape;
      record.client = shape.client_id, record.seq = shape.seq, record.layer = shape.layer;
      break;
    }
    case kTracePut: {
      const MessageShape& shape = args_of<ClientPutArgs>(step).shape;
      record.client = shape.client_id, record.seq = shape.seq, record.layer = shape.layer;
      break;
    }
    case kTraceCombine: {
      const auto& combine = args_of<ClientCombineArgs>(step);
      record.client = combine.shape.client_id, record.seq = combine.shape.seq, record.layer = combine.shape.layer;
      record.rows = combine.num_tokens;
      break;
    }
    case kTracePoll: {
      const auto& poll = args_of<ServerPollArgs>(step);
      const u32 num_messages = *at<const u32>(poll.num_messages);
      if (num_messages == 0) return;  // a look that found nothing
      record.server = seat, record.layer = *at<const u32>(poll.layer), record.rows = *at<const u32>(poll.num_rows);
      trace(record);
      for (u32 m = 0; m < num_messages; ++m) {
        const ServerMessage& message = at<const ServerMessage>(poll.messages)[m];
        TraceRecord taken = taken_message(message, at<const ServerSlot>(poll.slots)[message.slot]);
        taken.kind = kTraceTaken, taken.begin_ns = begin_ns, taken.end_ns = end_ns;
        trace(taken);
      }
      return;
    }
    case kTraceGather: record.server = seat; break;
    case kTraceReply: record.server = args_of<ServerReplyArgs>(step).server_id; break;
    default: return;
  }
  trace(record);
  const Target* last = nullptr;
  for (const Target& target : targets) {
    if (!last || target.message.seq != last->message.seq || target.message.client != last->message.client ||
        target.message.server != last->message.server) {
      TraceRecord message = target.message;
      message.kind = record.stage == kTracePut ? kTraceMessage : kTraceReplied;
      message.begin_ns = begin_ns, message.end_ns = end_ns, message.hca = reinterpret_cast<u64>(hca);
      trace(message);
    }
    trace_posted(target, hca, end_ns);
    last = &target;
  }
}

}  // namespace ew

// Maps the file, which trace/recorder.py made with its header filled in, and begins to write to it.
EW_API int ew_trace_open(int fd, u64 num_bytes) {
  if (ew::tracing()) return ew_fail(-EBUSY, "this process traces already");
  void* map = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) return ew_fail(-errno, "the trace file cannot be mapped: %s", strerror(errno));
#ifdef MADV_POPULATE_WRITE
  // The first records must not wait for the file system to find room; it may refuse, and they will.
  (void)madvise(map, num_bytes < ew::kPopulateBytes ? num_bytes : ew::kPopulateBytes, MADV_POPULATE_WRITE);
#endif
  auto* file = new ew::TraceFile{static_cast<ew::TraceHeader*>(map),
                                 reinterpret_cast<ew::TraceRecord*>(static_cast<u8*>(map) + ew::kTraceHeaderBytes)};
  ew::trace_file.store(file, std::memory_order_seq_cst);
  return 0;
}

// Ends it; records that are being written are finished first.
EW_API void ew_trace_close(u64 num_bytes) {
  ew::TraceFile* file = ew::trace_file.exchange(nullptr, std::memory_order_seq_cst);
  if (!file) return;
  while (ew::writers.load(std::memory_order_seq_cst) != 0) sched_yield();
  munmap(file->header, num_bytes);
  delete file;
}

EW_API void ew_trace_add(const ew::TraceRecord* record) {
  if (ew::tracing()) ew::trace(*record);
}
