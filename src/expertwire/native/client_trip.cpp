// A client's batch in one call: chunk after chunk is routed, packed and put as slots are free, and
// combined as replies come, oldest first. It stops where anything is out of the ordinary (an expert
// that nobody holds, a lost server, an error, a long wait); the caller goes on from there.
#include <cerrno>
#include <vector>

#include "client_combine.cuh"
#include "client_pack.cuh"
#include "client_put.cuh"
#include "client_route.cuh"
#include "fiber.hpp"
#include "trace.hpp"
#include "trip.hpp"

namespace {

thread_local std::vector<const u64*> words;  // reused from call to call
thread_local std::vector<u64> seen;

template <typename T>
T* args_of(const ew_step& step) {
  return static_cast<T*>(const_cast<void*>(step.args));
}

u32 chunk_tokens(const ew_batch& batch, u32 chunk) {
  return min_u64(batch.max_rows, batch.num_tokens - static_cast<u64>(chunk) * batch.max_rows);
}

void fill(ew_batch* batch, const ew_flight& flight, u32 chunk) {
  auto* route = args_of<ClientRouteArgs>(flight.send[0]);
  auto* pack = args_of<ClientPackArgs>(flight.send[1]);
  auto* put = args_of<ClientPutArgs>(flight.send[2]);
  auto* combine = args_of<ClientCombineArgs>(*flight.combine);
  const u64 begin = static_cast<u64>(chunk) * batch->max_rows;
  pack->shape = put->shape = combine->shape = batch->shape;
  route->topk_ids = pack->topk_ids = batch->topk_ids + begin * batch->ids_stride * batch->id_bytes;
  route->ids_stride = pack->ids_stride = batch->ids_stride;
  route->id_bytes = pack->id_bytes = batch->id_bytes;
  route->rotation = replica_rotation(route->reply_mode, batch->shape.seq, batch->shape.layer);
  route->num_tokens = combine->num_tokens = chunk_tokens(*batch, chunk);
  pack->hidden = batch->hidden + begin * batch->hidden_stride, pack->hidden_stride = batch->hidden_stride;
  pack->topk_weights = batch->topk_weights + begin * batch->weights_stride * 4;
  pack->weights_stride = batch->weights_stride;
  pack->scales = batch->scales + begin * batch->scales_stride * 4, pack->scales_stride = batch->scales_stride;
  combine->output = batch->output + begin * batch->output_stride, combine->output_stride = batch->output_stride;
  combine->output_type = batch->output_type, combine->timeout_ns = batch->slice_ns;
  *at<u64>(route->num_skipped) = 0;
  *at<i32>(route->missing_expert) = -1;
  at<KernelStatus>(put->status)->code = kOk;
}

// Around route, pack and put: also filling in their arguments, the HCA's turn and waking peers.
void trace_send(const MessageShape& shape, u64 begin_ns, u64 end_ns) {
  ew::TraceRecord record = {};
  record.kind = ew::kTraceStage, record.stage = ew::kTraceSend, record.begin_ns = begin_ns, record.end_ns = end_ns;
  record.client = shape.client_id, record.seq = shape.seq, record.layer = shape.layer;
  ew::trace(record);
}

// Returns whether the chunk is on its way. A problem of the put itself is left in the status.
bool issue(ew_batch* batch, u32 chunk, bool* failed) {
  ew_flight& flight = batch->flights[chunk % batch->num_flights];
  const u64 start = ew::clock_ns();
  flight.issued_ns = start;  // before the put: a server may have replied when it returns
  flight.seq = ++batch->shape.seq;
  fill(batch, flight, chunk);
  *failed = ew_launch(flight.send, 3, &batch->hca, 1) != 0;
  const auto* put = args_of<ClientPutArgs>(flight.send[2]);
  if (*failed || *at<const i32>(put->missing_expert) >= 0) return false;
  batch->num_skipped += *at<const u64>(args_of<ClientRouteArgs>(flight.send[0])->num_skipped);
  const u32* batch_size = at<const u32>(put->tables.batch_size);
  for (u32 s = 0; s < put->tables.num_servers; ++s) {
    flight.arrival_ns[s] = 0;
    if (batch->notify && batch_size[s]) ew_peer_notify(batch->notify[s]);
  }
  for (u32 i = 0; i < 3; ++i) batch->times[i]->add(flight.send[i].elapsed_ns);
  drive(batch->hca);
  const u64 sent = ew::clock_ns();
  batch->times[3]->add(sent - start);
  if (ew::tracing()) trace_send(batch->shape, start, sent);
  return true;
}

}  // namespace

namespace {

void trace_arrival(ew_hca* hca, const ClientServer& server, u64 seq, u64 begin_ns, u64 end_ns) {
  ew::TraceRecord record = {};
  record.kind = ew::kTraceArrived, record.begin_ns = begin_ns, record.end_ns = end_ns;
  record.server = server.server_id, record.seq = seq, record.hca = reinterpret_cast<u64>(hca);
  ew::trace(record);
}

void trace_wait(u64 seq, u64 begin_ns) {
  ew::TraceRecord record = {};
  record.kind = ew::kTraceStage, record.stage = ew::kTraceWait, record.seq = seq;
  record.begin_ns = begin_ns, record.end_ns = ew::clock_ns();
  ew::trace(record);
}

}  // namespace

// Waits until every loaded server's reply flag holds seq. arrival_ns[s] (0 while waiting) becomes
// the time, CLOCK_MONOTONIC, at which server s was seen; calling again goes on waiting for the rest.
// Returns 0, -ETIMEDOUT, -EINTR after ew_hca_interrupt, or another negative error.
EW_API int ew_client_wait(ew_hca* hca, const ClientServer* servers, const u32* batch_size, u32 num_servers, u64 seq,
                          u64* arrival_ns, u64 spin_ns, u64 timeout_ns) {
  const u64 start = ew::clock_ns(), deadline = start + timeout_ns;
  for (;;) {
    words.clear(), seen.clear();
    const u64 now = ew::clock_ns();
    for (u32 s = 0; s < num_servers; ++s) {
      if (batch_size[s] == 0 || arrival_ns[s] != 0) continue;
      const u64* flag = at<const u64>(slot_flag(servers[s].reply_addr, servers[s].reply_slot_bytes));
      const u64 value = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
      if (value == seq) {
        arrival_ns[s] = now;
        if (ew::tracing()) trace_arrival(hca, servers[s], seq, start, now);
        continue;
      }
      words.push_back(flag), seen.push_back(value);
    }
    if (words.empty() || now >= deadline) {
      if (ew::tracing()) trace_wait(seq, start);
      return words.empty() ? 0 : -ETIMEDOUT;
    }
    const int code =
        ew_hca_wait(hca, words.data(), seen.data(), static_cast<u32>(words.size()), spin_ns, deadline - now);
    if (code < 0 && code != -ETIMEDOUT) return code;
  }
}

namespace {

void count_replies(ew_batch* batch, const ew_flight& flight) {
  const auto* combine = args_of<ClientCombineArgs>(*flight.combine);
  const MessageShape& shape = combine->shape;
  const u32* rows = at<const u32>(combine->tables.batch_size);
  const u32* reply_rows = at<const u32>(shape.reply_mode == kReplyPerExpert ? combine->tables.num_pairs
                                                                            : combine->tables.batch_size);
  const u64 reply_bytes = static_cast<u64>(shape.hidden_size) * data_type_bytes(shape.reply_type);
  for (u32 s = 0; s < combine->tables.num_servers; ++s) {
    if (rows[s] == 0) continue;
    const RequestLayout layout = message_layout(shape, rows[s]);
    ew_counters* counters = batch->counters[s];
    ++counters->messages, counters->rows += rows[s];
    counters->bytes_sent += layout.hidden_offset + layout.payload_bytes + 8;
    counters->bytes_received += reply_rows[s] * reply_bytes + sizeof(ReplyHead) + 8;
    counters->durations.add(flight.arrival_ns[s] - flight.issued_ns);
  }
}

bool finish(ew_batch* batch, u32 chunk) {
  ew_flight& flight = batch->flights[chunk % batch->num_flights];
  const auto* args = args_of<ClientCombineArgs>(*flight.combine);
  const auto* status = at<const KernelStatus>(args->status);
  if (status->code != kOk) return false;
  const u64 start = ew::clock_ns();
  if (ew_client_wait(batch->hca, at<const ClientServer>(args->servers), at<const u32>(args->tables.batch_size),
                     args->tables.num_servers, flight.seq, flight.arrival_ns, batch->spin_ns, batch->slice_ns) != 0)
    return false;
  const u64 arrived = ew::clock_ns();
  if (ew_launch(flight.combine, 1, &batch->hca, 1) != 0 || status->code != kOk) return false;
  count_replies(batch, flight);
  batch->times[4]->add(arrived - start);
  batch->times[5]->add(ew::clock_ns() - arrived);
  return true;
}

}  // namespace

// Returns 0 when all chunks are combined, 1 when it stopped: chunks [num_combined, num_issued) are
// in flight, in flight (chunk % num_flights) each; later ones were not sent. Negative: launch error.
EW_API int ew_client_trip(ew_batch* batch) {
  const u32 num_chunks = static_cast<u32>(ceil_div(batch->num_tokens, batch->max_rows));
  batch->num_issued = batch->num_combined = 0, batch->num_skipped = 0;
  while (batch->num_combined < num_chunks) {
    while (batch->num_issued < num_chunks && batch->num_issued - batch->num_combined < batch->num_flights) {
      bool failed = false;
      if (!issue(batch, batch->num_issued, &failed)) return failed ? -EINVAL : 1;
      ++batch->num_issued;
    }
    if (!finish(batch, batch->num_combined)) return 1;
    ++batch->num_combined;
  }
  return 0;
}
