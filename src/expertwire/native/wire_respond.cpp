// The responder: executes what frames say, in the order of each queue pair, against its own keys.
#include <algorithm>
#include <cstring>

#include "wire.hpp"

namespace {

constexpr u32 kNoReceiveYet = 0xfffffffe;  // not a syndrome: tried again later
// Nobody that keeps the protocol comes near these: they bound what a peer can make this side hold.
constexpr size_t kMaxStreams = 4096, kMaxHeld = 1024;

void set_due(Wire* wire, Stream* stream) {
  if (stream->ack_due) return;
  stream->ack_due = true;
  if (wire->num_due++ == 0) wire->due_since_ns = monotonic_ns();
}

void respond(ew_window* window, const Stream& stream, u64 idx, const u8* data, u64 num_bytes) {
  ew_peer* peer = window->pair;
  if (!peer || peer->lost) return;
  for (u64 offset = 0; offset < num_bytes; offset += kFrameBytes) {
    Send* send = new_send(window->hca->wire);
    const u64 count = std::min(kFrameBytes, num_bytes - offset);
    send->bytes.assign(data + offset, data + offset + count);
    send->iov[send->num_iov++] = {send->bytes.data(), count};
    FrameHead head = {};
    head.kind = kResponseFrame;
    head.qpn = stream.qpn, head.incarnation = stream.incarnation;
    head.seq = idx, head.offset = offset, head.total = num_bytes;
    send_frame(peer, send, head, nullptr);
  }
}

// Returns a syndrome or kNoReceiveYet.
u32 execute(ew_window* window, const Stream& stream, u32 local_qpn, const Op& op, const u8* data) {
  const bool is_write = op.opcode == kWrite || op.opcode == kWriteImm;
  AtomicShape shape = {};
  if (is_write || op.opcode == kRead) {
    u8* at = nullptr;
    if (op.total != 0) {  // a zero-byte write touches nothing, checks nothing
      at = find_own(window, op.rkey, op.addr, op.total, is_write ? kRemoteWrite : kRemoteRead);
      if (!at) return kRemoteAccess;
    }
    if (op.opcode == kRead) {
      respond(window, stream, stream.executed, at, op.total);
      return kSyndromeNone;
    }
    // A write with immediate moves nothing before there is a receive for it.
    if (op.opcode == kWriteImm && !has_receive(window->page)) return kNoReceiveYet;
    if (op.num_bytes != op.total || !store_word(data, op.num_bytes, at)) {
      if (op.num_bytes) memcpy(at + op.offset, data, op.num_bytes);
      __atomic_thread_fence(__ATOMIC_RELEASE);  // before anything that a later entry writes
    }
    if (op.opcode == kWriteImm && op.last) put_receive(window->page, op.immediate, op.total, local_qpn);
    return kSyndromeNone;
  }
  if (op.opcode == kNop || op.opcode == kDump) return kSyndromeNone;
  if (atomic_shape(op.opcode, op.opmod, &shape) || op.num_bytes != shape.num_segments * 16u) return kRemoteInvalidRequest;
  if (op.addr % shape.num_bytes != 0) return kRemoteInvalidRequest;
  u8* at = find_own(window, op.rkey, op.addr, shape.num_bytes, kRemoteAtomic);
  if (!at) return kRemoteAccess;
  const u64 old = apply_atomic(op.opcode, shape.num_bytes, data, at);
  respond(window, stream, stream.executed, reinterpret_cast<const u8*>(&old), shape.num_bytes);
  return kSyndromeNone;
}

bool is_known(const Op& op) {
  switch (op.opcode) {
    case kNop: case kDump: case kRead: return op.num_bytes == 0;
    case kWrite: case kWriteImm: return op.num_bytes <= op.total && op.offset <= op.total - op.num_bytes;
    default: return op.opcode == kCompareSwap || op.opcode == kFetchAdd || op.opcode == kMaskedCompareSwap ||
                    op.opcode == kMaskedFetchAdd;
  }
}

struct Place {  // how far a frame has been executed
  u32 op = 0;
  u64 byte = 0;
};

// From a place on. Returns false if an immediate has to wait for a receive.
bool run(Wire* wire, ew_window* window, Stream* stream, u32 local_qpn, const Op* ops, u32 num_ops, const u8* data,
         u64 num_bytes, Place* place) {
  for (; place->op < num_ops; ++place->op) {
    const Op& op = ops[place->op];
    const bool fits = is_known(op) && op.num_bytes <= num_bytes - place->byte;
    u32 syndrome = fits ? execute(window, *stream, local_qpn, op, data + place->byte) : u32{kRemoteInvalidRequest};
    if (syndrome == kNoReceiveYet) {
      const u64 now = monotonic_ns();
      if (stream->rnr_since_ns == 0) stream->rnr_since_ns = now;
      if (now - stream->rnr_since_ns < kRnrTimeoutNs) return false;
      syndrome = kRnrRetryExceeded;
    }
    stream->rnr_since_ns = 0;
    if (syndrome) {
      stream->syndrome = syndrome;  // what is under way behind it was sent before its sender knew
      return true;
    }
    place->byte += op.num_bytes;
    if (op.last) stream->executed += op.num_blocks;
  }
  wire->hca->completed = true;  // somebody may wait for a word that was just stored
  return true;
}

void hold(Stream* stream, const FrameHead& head, const Op* ops, const u8* data, u64 num_bytes, Place place) {
  if (stream->held.size() >= kMaxHeld) return;
  Held& held = stream->held[head.seq];
  held.head = head;
  held.ops.assign(ops, ops + head.num_ops);
  held.data.assign(data, data + num_bytes);
  held.next_op = place.op, held.next_byte = place.byte;
}

// Held frames whose turn it is. Returns how many were executed.
u32 run_held(Wire* wire, ew_window* window, Stream* stream) {
  u32 done = 0;
  while (!stream->syndrome && !stream->held.empty() && stream->held.begin()->first == stream->next_seq) {
    Held& held = stream->held.begin()->second;
    Place place = {held.next_op, held.next_byte};
    const u64 before = stream->executed;
    const bool finished = run(wire, window, stream, held.head.qpn, held.ops.data(), static_cast<u32>(held.ops.size()),
                              held.data.data(), held.data.size(), &place);
    if (finished || stream->executed != before) set_due(wire, stream);
    if (!finished) {
      held.next_op = place.op, held.next_byte = place.byte;
      break;
    }
    stream->held.erase(stream->held.begin());
    ++stream->next_seq, ++done;
  }
  if (stream->syndrome) stream->held.clear();
  return done;
}

}  // namespace

void take_request(Wire* wire, ew_window* window, const FrameHead& head, const Op* ops, const u8* data, u64 num_bytes) {
  auto& streams = *window->streams;
  auto found = streams.find(head.sender_qpn);
  if (found == streams.end()) {
    if (streams.size() >= kMaxStreams) return;
    found = streams.emplace(head.sender_qpn, Stream{}).first;
    found->second.qpn = head.sender_qpn, found->second.incarnation = head.incarnation;
  }
  Stream* stream = &found->second;
  if (static_cast<i32>(head.incarnation - stream->incarnation) > 0) {  // the requester's queue was reset
    if (stream->ack_due) --wire->num_due;
    if (stream->rnr_since_ns) --wire->num_waiting;
    *stream = {};
    stream->qpn = head.sender_qpn, stream->incarnation = head.incarnation;
  }
  if (head.incarnation != stream->incarnation || stream->syndrome || head.seq < stream->next_seq) return;
  Place place;
  if (head.seq != stream->next_seq) {
    hold(stream, head, ops, data, num_bytes, place);
    return;
  }
  if (stream->held.count(head.seq)) return;  // waits for a receive, and came twice
  const bool finished = run(wire, window, stream, head.qpn, ops, head.num_ops, data, num_bytes, &place);
  set_due(wire, stream);
  if (!finished) {
    hold(stream, head, ops, data, num_bytes, place);
    ++wire->num_waiting;
    return;
  }
  ++stream->next_seq;
  run_held(wire, window, stream);
  if (stream->rnr_since_ns) ++wire->num_waiting;
}

u32 retry_waiting(Wire* wire) {
  u32 done = 0;
  for (auto& [id, window] : wire->windows)
    for (auto& [qpn, stream] : *window->streams) {
      if (!stream.rnr_since_ns) continue;
      done += run_held(wire, window, &stream);
      if (!stream.rnr_since_ns) --wire->num_waiting;
    }
  return done;
}

u32 take_due_acks(Wire* wire, ew_window* window, Ack* out) {
  u32 count = 0;
  if (!wire->num_due || !window->streams) return 0;
  for (auto& [qpn, stream] : *window->streams) {
    if (!stream.ack_due || count == kMaxAcks) continue;
    stream.ack_due = false;
    --wire->num_due;
    out[count++] = {stream.qpn, stream.incarnation, stream.executed, stream.syndrome, 0};
  }
  return count;
}

void forget_streams(Wire* wire, ew_window* window) {
  for (auto& [qpn, stream] : *window->streams) {
    if (stream.ack_due) --wire->num_due;
    if (stream.rnr_since_ns) --wire->num_waiting;
  }
  window->streams->clear();
}
