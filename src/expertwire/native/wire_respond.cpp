// The responder: executes what frames say, in the order of each queue pair, against its own keys.
#include <algorithm>
#include <cstring>

#include "wire.hpp"

namespace {

constexpr u32 kNoReceiveYet = 0xfffffffe, kNoRoomYet = 0xfffffffd;  // not syndromes: tried again later
constexpr size_t kMaxStreams = 4096;  // queue pairs of a peer
constexpr u64 kStreamBytes = 256;     // what one costs, about

void set_due(Wire* wire, Stream* stream) {
  if (stream->ack_due) return;
  stream->ack_due = true;
  if (wire->num_due++ == 0) wire->due_since_ns = monotonic_ns();
}

void set_waiting(Wire* wire, Stream* stream, bool waits) {
  if (stream->waits == waits) return;
  stream->waits = waits;
  waits ? ++wire->num_waiting : --wire->num_waiting;
}

u64 answer_bytes(u64 num_bytes) { return num_bytes + (num_bytes + kFrameBytes - 1) / kFrameBytes * sizeof(Send); }

// Room for an answer. Returns kSyndromeNone, kNoRoomYet while the peer does not take what it was answered before,
// or a syndrome if no peer may ask for so much at once.
u32 reserve(ew_window* window, u64 num_bytes) {
  Wire* wire = window->hca->wire;
  if (answer_bytes(num_bytes) > wire->max_peer_bytes) return kRemoteInvalidRequest;
  return charge(wire, window, answer_bytes(num_bytes)) ? u32{kSyndromeNone} : kNoRoomYet;
}

// An answer that there is room for.
void respond(ew_window* window, const Stream& stream, u64 idx, const u8* data, u64 num_bytes) {
  ew_peer* peer = window->wire->pair;
  Wire* wire = window->hca->wire;
  if (!peer || peer->lost) return give_back(wire, window->wire->account.get(), answer_bytes(num_bytes));
  for (u64 offset = 0; offset < num_bytes; offset += kFrameBytes) {
    Send* send = new_send(wire);
    const u64 count = std::min(kFrameBytes, num_bytes - offset);
    send->account = window->wire->account, send->charged = count + sizeof(Send);
    send->bytes.assign(data + offset, data + offset + count);
    send->iov[send->num_iov++] = {send->bytes.data(), count};
    FrameHead head = {};
    head.kind = kResponseFrame;
    head.qpn = stream.qpn, head.incarnation = stream.incarnation;
    head.seq = idx, head.offset = offset, head.total = num_bytes;
    send_frame(peer, send, head, nullptr);
  }
}

// Returns a syndrome, kNoReceiveYet or kNoRoomYet.
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
      const u32 syndrome = reserve(window, op.total);
      if (!syndrome) respond(window, stream, stream.executed, at, op.total);
      return syndrome;
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
  if (const u32 syndrome = reserve(window, shape.num_bytes)) return syndrome;
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

// From a place on. Returns false if an entry has to wait: an immediate for a receive, a read or an atomic for
// room for its answer.
bool run(Wire* wire, ew_window* window, Stream* stream, u32 local_qpn, const Op* ops, u32 num_ops, const u8* data,
         u64 num_bytes, Place* place) {
  for (; place->op < num_ops; ++place->op) {
    const Op& op = ops[place->op];
    const bool fits = is_known(op) && op.num_bytes <= num_bytes - place->byte;
    u32 syndrome = fits ? execute(window, *stream, local_qpn, op, data + place->byte) : u32{kRemoteInvalidRequest};
    if (syndrome == kNoRoomYet) return false;
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

// Returns false if the peer makes this side hold too much.
bool hold(Wire* wire, ew_window* window, Stream* stream, const FrameHead& head, const Op* ops, const u8* data,
          u64 num_bytes, Place place) {
  const u64 cost = sizeof(Held) + head.num_ops * sizeof(Op) + num_bytes;
  if (stream->held.count(head.seq)) return true;  // came twice
  if (!charge(wire, window, cost)) return false;
  Held& held = stream->held[head.seq];
  held.head = head;
  held.ops.assign(ops, ops + head.num_ops);
  held.data.assign(data, data + num_bytes);
  held.next_op = place.op, held.next_byte = place.byte, held.charged = cost;
  return true;
}

void drop_held(Wire* wire, ew_window* window, Stream* stream) {
  for (auto& [seq, held] : stream->held) give_back(wire, window->wire->account.get(), held.charged);
  stream->held.clear();
}

// Held frames whose turn it is. Returns how many were executed.
u32 run_held(Wire* wire, ew_window* window, Stream* stream) {
  u32 done = 0;
  bool waits = false;
  while (!stream->syndrome && !stream->held.empty() && stream->held.begin()->first == stream->next_seq) {
    Held& held = stream->held.begin()->second;
    Place place = {held.next_op, held.next_byte};
    const u64 before = stream->executed;
    const bool finished = run(wire, window, stream, held.head.qpn, held.ops.data(), static_cast<u32>(held.ops.size()),
                              held.data.data(), held.data.size(), &place);
    if (finished || stream->executed != before) set_due(wire, stream);
    if (!finished) {
      held.next_op = place.op, held.next_byte = place.byte;
      waits = true;
      break;
    }
    give_back(wire, window->wire->account.get(), held.charged);
    stream->held.erase(stream->held.begin());
    ++stream->next_seq, ++done;
  }
  set_waiting(wire, stream, waits);
  if (stream->syndrome) drop_held(wire, window, stream);
  return done;
}

void forget(Wire* wire, ew_window* window, Stream* stream) {
  if (stream->ack_due) --wire->num_due;
  set_waiting(wire, stream, false);
  drop_held(wire, window, stream);
}

}  // namespace

void take_request(Wire* wire, ew_window* window, const FrameHead& head, const Op* ops, const u8* data, u64 num_bytes) {
  auto& streams = window->wire->streams;
  auto found = streams.find(head.sender_qpn);
  if (found == streams.end()) {
    if (streams.size() >= kMaxStreams || !charge(wire, window, kStreamBytes)) return cut_off(wire, window);
    found = streams.emplace(head.sender_qpn, Stream{}).first;
    found->second.qpn = head.sender_qpn, found->second.incarnation = head.incarnation;
  }
  Stream* stream = &found->second;
  if (static_cast<i32>(head.incarnation - stream->incarnation) > 0) {  // the requester's queue was reset
    forget(wire, window, stream);
    *stream = {};
    stream->qpn = head.sender_qpn, stream->incarnation = head.incarnation;
  }
  if (head.incarnation != stream->incarnation || stream->syndrome || head.seq < stream->next_seq) return;
  Place place;
  if (head.seq != stream->next_seq) {
    if (!hold(wire, window, stream, head, ops, data, num_bytes, place)) cut_off(wire, window);
    return;
  }
  if (stream->held.count(head.seq)) return;  // waits, and came twice
  const bool finished = run(wire, window, stream, head.qpn, ops, head.num_ops, data, num_bytes, &place);
  set_due(wire, stream);
  if (!finished) {
    if (!hold(wire, window, stream, head, ops, data, num_bytes, place)) return cut_off(wire, window);
    set_waiting(wire, stream, true);
    return;
  }
  ++stream->next_seq;
  run_held(wire, window, stream);
}

u32 retry_waiting(Wire* wire) {
  u32 done = 0;
  for (auto& [id, window] : wire->windows)
    for (auto& [qpn, stream] : window->wire->streams)
      if (stream.waits) done += run_held(wire, window, &stream);
  return done;
}

u32 take_due_acks(Wire* wire, ew_window* window, Ack* out) {
  u32 count = 0;
  if (!wire->num_due) return 0;
  for (auto& [qpn, stream] : window->wire->streams) {
    if (!stream.ack_due || count == kMaxAcks) continue;
    stream.ack_due = false;
    --wire->num_due;
    out[count++] = {stream.qpn, stream.incarnation, stream.executed, stream.syndrome, 0};
  }
  return count;
}

void forget_streams(Wire* wire, ew_window* window) {
  for (auto& [qpn, stream] : window->wire->streams) {
    forget(wire, window, &stream);
    give_back(wire, window->wire->account.get(), kStreamBytes);
  }
  window->wire->streams.clear();
}
