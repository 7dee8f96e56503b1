// The requester: entries become frames, acknowledgements become completions.
#include <algorithm>
#include <cstring>

#include "wire.hpp"

namespace {

void add_bytes(Send* send, const u8* at, u64 num_bytes) {
  if (num_bytes) send->iov[send->num_iov++] = {const_cast<u8*>(at), num_bytes};
}

void add_scratch(Send* send, const u8* from, u64 num_bytes) {
  u8* at = send->scratch + send->scratch_used;
  memcpy(at, from, num_bytes);
  send->scratch_used += static_cast<u32>(num_bytes);
  add_bytes(send, at, num_bytes);
}

// Bytes [from, from + count) of the list; what lies in the WQE's copy goes along in scratch.
void add_data(Send* send, const Wqe& wqe, const Data& data, u64 from, u64 count) {
  for_parts(data, from, count, [&](u8* part, u64 n) {
    if (part >= wqe.bytes && part < wqe.bytes + sizeof(wqe.bytes))  // inline
      add_scratch(send, part, n);
    else
      add_bytes(send, part, n);
  });
}

enum class Added { kYes, kFull, kStalled, kWrong };

// The entry at `sent`, or the next piece of it, into the frame.
Added add_entry(ew_qp* qp, Send* send, Op* op, u64 room, u32* syndrome, u64* moved) {
  WireQueue* queue = qp->wire;
  Wqe wqe;
  read_wqe(qp, queue->sent, &wqe);
  const bool is_atomic = wqe.atomic(), is_write = wqe.opcode == kWrite || wqe.opcode == kWriteImm;
  const bool is_transfer = is_write || wqe.opcode == kRead;
  const bool full = send->scratch_used + sizeof(wqe.bytes) > kScratchBytes || kMaxIov - send->num_iov < kMaxSegments;
  if (full || room == 0) return Added::kFull;
  if ((*syndrome = check_wqe(qp, wqe))) return Added::kWrong;
  if (queue->sent_bytes == 0 && qp->hca->hook) {
    *syndrome = qp->hca->hook(qp->hca->hook_context, qp->info.qpn, wqe.idx, wqe.bytes, wqe.num_segments * 16);
    if (*syndrome == kHookStall) return Added::kStalled;
    if (*syndrome) return Added::kWrong;
  }
  *syndrome = kLocalQpOperation;
  if (wqe.opmod != 0 && !wqe.masked()) return Added::kWrong;
  if (!is_transfer && !is_atomic && wqe.opcode != kNop && wqe.opcode != kDump) return Added::kWrong;
  AtomicShape shape = {};
  if (is_atomic && (*syndrome = atomic_shape(wqe.opcode, wqe.opmod, &shape))) return Added::kWrong;
  const u32 first = wqe.opcode == kDump ? 1 : 2 + shape.num_segments;
  *syndrome = kLocalQpOperation;
  if ((is_transfer && wqe.num_segments < 2) || (is_atomic && wqe.num_segments < 1 + first)) return Added::kWrong;
  Data data;
  if (wqe.opcode != kNop) {
    const bool is_sink = is_atomic || wqe.opcode == kRead;
    if ((*syndrome = read_data(qp, &wqe, first, is_sink ? u32{kLocalWrite} : 0u, &data))) return Added::kWrong;
  }
  *syndrome = kLocalLength;
  if (is_atomic && data.num_bytes != shape.num_bytes) return Added::kWrong;
  *syndrome = kSyndromeNone;

  *op = {};
  op->opcode = static_cast<u8>(wqe.opcode), op->opmod = static_cast<u8>(wqe.opmod);
  op->num_blocks = static_cast<u8>(wqe.num_blocks()), op->last = 1;
  memcpy(op->immediate, wqe.bytes + 12, 4);
  if (is_transfer || is_atomic) {
    op->addr = load_be64(wqe.segment(1)), op->rkey = load_be32(wqe.segment(1) + 8);
    op->total = data.num_bytes;
  }
  const u32 operand_bytes = shape.num_segments * 16;
  if (is_atomic) {
    op->num_bytes = operand_bytes;
    add_scratch(send, wqe.segment(2), operand_bytes);
  } else if (is_write) {
    const u64 count = std::min(data.num_bytes - queue->sent_bytes, room);
    op->offset = queue->sent_bytes, op->num_bytes = static_cast<u32>(count);
    add_data(send, wqe, data, queue->sent_bytes, count);
    queue->sent_bytes += count;
    *moved += count;
    op->last = queue->sent_bytes == data.num_bytes;
  }
  if (op->last) {
    Sent& entry = queue->ring[(queue->first + queue->count++) % queue->ring.size()];
    entry = {wqe.idx, data.num_bytes, 0, static_cast<u32>(wqe.num_blocks()), op->opcode,
             wqe.completion >= kCompletionAlways, is_atomic || (wqe.opcode == kRead && data.num_bytes != 0)};
    if (wqe.opcode == kDump) entry.num_bytes = 0;
    queue->sent += wqe.num_blocks(), queue->sent_bytes = 0;
  }
  return Added::kYes;
}

// The entries of a frame that is on its way, one after the other; a long one is told with its last piece.
void trace_sent(const ew_qp* qp, const FrameHead& head, const Op* ops, const u64* begins) {
  const u64 now = monotonic_ns();
  u64 idx = head.first_idx;
  for (u32 i = 0; i < head.num_ops && ops[i].last; idx += ops[i++].num_blocks) {
    Wqe wqe;
    read_wqe(qp, idx, &wqe);
    trace_entry(ew::kTraceExecuted, qp, wqe, begins[i], i + 1 < head.num_ops ? begins[i + 1] : now, ops[i].total,
                kSyndromeNone);
  }
}

void trace_told(const ew_qp* qp, u64 idx, u32 syndrome) {
  Wqe wqe;  // still in the ring
  read_wqe(qp, idx, &wqe);
  const u64 now = monotonic_ns();
  trace_entry(ew::kTraceAcknowledged, qp, wqe, now, now, 0, syndrome);
}

// What is known to have failed, once every entry before it has completed.
bool fail_if_due(ew_qp* qp, u32 syndrome, u64 idx) {
  if (syndrome == kSyndromeNone || qp->ci != idx) return false;
  Wqe wqe;
  read_wqe(qp, idx, &wqe);
  const bool fits = wqe.num_segments > 0 && idx + wqe.num_blocks() <= qp->pi;
  ++qp->hca->stats.num_wqe[wqe.opcode & 63];
  if (ew::tracing()) trace_told(qp, idx, syndrome);
  fail_qp(qp, idx, wqe.opcode, syndrome);
  qp->ci += fits ? wqe.num_blocks() : qp->pi - idx;
  flush_posted(qp);
  return true;
}

void complete(ew_qp* qp) {
  WireQueue* queue = qp->wire;
  while (queue->count) {
    const Sent entry = queue->front();
    if (queue->acked < entry.idx + entry.num_blocks || (entry.wants_data && entry.received < entry.num_bytes)) break;
    ++queue->first, --queue->count;
    if (ew::tracing()) trace_told(qp, entry.idx, kSyndromeNone);
    qp->ci += entry.num_blocks;
    ++qp->hca->stats.num_wqe[entry.opcode & 63];
    qp->hca->stats.bytes += entry.num_bytes;
    if (entry.signalled) write_cqe(qp, entry.idx, entry.opcode, static_cast<u32>(entry.num_bytes));
  }
  fail_if_due(qp, queue->nak, queue->acked);
}

ew_qp* find_qp(Wire* wire, ew_window* window, u32 qpn, u32 incarnation) {
  const auto found = wire->qps.find(qpn);
  if (found == wire->qps.end()) return nullptr;
  ew_qp* qp = found->second;
  const ew_peer* pair = window->wire->pair;
  const bool fits = pair && qp->peer == pair && qp->wire->incarnation == incarnation;
  return fits && qp->state == kRts ? qp : nullptr;
}

}  // namespace

Step wire_step(ew_qp* qp, u64 max_bytes, u64* moved) {
  WireQueue* queue = qp->wire;
  *moved = 0;
  if (qp->ci >= qp->pi) return Step::kNothing;
  if (qp->state == kErr || qp->state == kSqe) {
    flush_posted(qp);
    return Step::kProgress;
  }
  if (qp->state != kRts) return Step::kNothing;
  if (qp->peer->lost && fail_if_due(qp, kTransportRetryExceeded, qp->ci)) return Step::kProgress;
  if (queue->blocked) return fail_if_due(qp, queue->blocked, queue->sent) ? Step::kProgress : Step::kNothing;
  if (queue->nak || queue->sent >= qp->pi) return Step::kNothing;

  FrameHead head = {};
  head.kind = kRequestFrame;
  head.qpn = qp->remote_qpn, head.sender_qpn = qp->info.qpn, head.incarnation = queue->incarnation;
  head.first_idx = queue->sent;
  if (queue->count == 0) queue->silent_ns = 0;  // nothing was under way
  Op ops[kMaxOps];
  u64 begins[kMaxOps];  // when each was taken up; only while tracing
  const bool tracing = ew::tracing();
  Send* send = new_send(qp->hca->wire);
  Added added = Added::kYes;
  const u64 room = std::min(max_bytes, kFrameBytes);
  while (head.num_ops < kMaxOps && queue->sent < qp->pi) {
    u32 syndrome = kSyndromeNone;
    if (tracing && (queue->sent_bytes == 0 || qp->trace_begin_ns == 0)) qp->trace_begin_ns = monotonic_ns();
    begins[head.num_ops] = qp->trace_begin_ns;
    added = add_entry(qp, send, &ops[head.num_ops], room - *moved, &syndrome, moved);
    if (added == Added::kWrong) queue->blocked = syndrome;
    if (added != Added::kYes) break;
    ++head.num_ops;
    if (!ops[head.num_ops - 1].last) break;
  }
  if (head.num_ops == 0) {
    free_send(send);
    if (added == Added::kStalled) return Step::kStalled;
    return fail_if_due(qp, queue->blocked, queue->sent) ? Step::kProgress : Step::kNothing;
  }
  head.seq = queue->seq++;
  send_frame(qp->peer, send, head, ops);
  if (tracing) trace_sent(qp, head, ops, begins);
  return Step::kProgress;
}

void take_ack(Wire* wire, ew_window* window, const Ack& ack) {
  ew_qp* qp = find_qp(wire, window, ack.qpn, ack.incarnation);
  if (!qp || ack.next_idx < qp->wire->acked || ack.next_idx > qp->wire->sent) return;
  qp->wire->acked = ack.next_idx;
  qp->wire->silent_ns = 0;
  if (ack.syndrome) qp->wire->nak = ack.syndrome;
  complete(qp);
}

void take_response(Wire* wire, ew_window* window, const FrameHead& head, const u8* data, u64 num_bytes) {
  ew_qp* qp = find_qp(wire, window, head.qpn, head.incarnation);
  if (!qp) return;
  WireQueue* queue = qp->wire;
  for (u64 i = 0; i < queue->count; ++i) {
    Sent& entry = queue->ring[(queue->first + i) % queue->ring.size()];
    if (entry.idx != head.seq || !entry.wants_data) continue;
    if (head.total != entry.num_bytes || head.offset != entry.received || num_bytes > entry.num_bytes - entry.received) return;
    Wqe wqe;  // still in the ring: the entry is not complete
    read_wqe(qp, entry.idx, &wqe);
    AtomicShape shape = {};
    if (wqe.atomic()) atomic_shape(wqe.opcode, wqe.opmod, &shape);
    Data sink;  // its key is looked up again: it may have been revoked meanwhile
    if (read_data(qp, &wqe, 2 + shape.num_segments, kLocalWrite, &sink) == kSyndromeNone)
      move_bytes(sink, const_cast<u8*>(data), head.offset, num_bytes, false);
    entry.received += num_bytes;
    queue->silent_ns = 0;
    complete(qp);
    return;
  }
}

void wire_connect(ew_qp* qp) {  // with the lock
  qp->wire = new WireQueue{};
  qp->wire->ring.resize(qp->info.num_wqe);
  qp->hca->wire->qps[qp->info.qpn] = qp;
}

void wire_disconnect(ew_qp* qp) {
  qp->hca->wire->qps.erase(qp->info.qpn);
  delete qp->wire;
  qp->wire = nullptr;
}

void wire_reset(ew_qp* qp) {
  WireQueue* queue = qp->wire;
  const u32 incarnation = queue->incarnation + 1;
  std::vector<Sent> ring = std::move(queue->ring);
  *queue = {};
  queue->incarnation = incarnation, queue->ring = std::move(ring);
}

void wire_flushed(ew_qp* qp) {
  WireQueue* queue = qp->wire;
  queue->sent = queue->acked = qp->ci;
  queue->sent_bytes = queue->count = 0;
  queue->blocked = queue->nak = 0;
}
