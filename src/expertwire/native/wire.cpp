// Frames out and in, the engine's turn, sleeping and waking.
#include "wire.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace {

constexpr u64 kAckDelayNs = 30'000;        // a frame that goes back anyway may take it along
constexpr u64 kLookNs = 10'000'000;        // between two looks at who is silent
constexpr u64 kLongestLookNs = 100'000'000;  // a process that was stopped does not blame its peers
constexpr int kSleepMs = 5;                // as kEngineSleepNs in soft_wait.cpp
constexpr u32 kEventsPerPoll = 16;
constexpr u32 kMaxAckFrames = 4;           // under way to a peer
constexpr size_t kMaxFree = 256;           // sends that are kept for later
constexpr u64 kPage = 4096, kLine = 64;
constexpr u64 kUcxBytes = 13, kUcxEnd = 24;  // that UCX 1.22 puts before the data of a message over TCP; behind a long one

void on_sent(ucx::Request request, ucx::Status, void* user_data) {
  auto* send = static_cast<Send*>(user_data);
  send->wire->api->ucp_request_free(request);
  free_send(send);  // an error shows at the endpoint, too
}

// Frames with what is due and nothing else. One that a peer does not read is not followed by many more: what they
// would say, a later one says.
void send_due_acks(Wire* wire) {
  for (ew_peer* peer : wire->peers) {
    if (!wire->num_due) return;
    if (peer->lost || !peer->pair) continue;
    WireWindow* window = peer->pair->wire;
    while (window->account->acks_under_way < kMaxAckFrames &&
           std::any_of(window->streams.begin(), window->streams.end(),
                       [](const auto& stream) { return stream.second.ack_due; })) {
      Send* send = new_send(wire);
      send->account = window->account, send->is_ack = true;
      ++window->account->acks_under_way;
      FrameHead head = {};
      head.kind = kRequestFrame;
      send_frame(peer, send, head, nullptr);
    }
  }
  wire->due_since_ns = monotonic_ns();  // what is still due belongs to peers that are gone or do not read
}

void look_for_silence(Wire* wire, u64 now) {
  const u64 passed = std::min(now - wire->looked_ns, kLongestLookNs);
  wire->looked_ns = now;
  for (auto& [qpn, qp] : wire->qps) {
    if (qp->wire->count == 0 || qp->peer->lost) continue;
    qp->wire->silent_ns += passed;
    if (qp->wire->silent_ns > wire->ack_timeout_ns) lose_peer(qp->peer);
  }
}

// Linux copies to and from sockets with `rep movsb`, which takes five times as long on some processors (AMD Zen) where
// the destination is 1 to 31 bytes ahead of the source within their pages. A message begins with a page at the sender,
// where UCX puts 13 bytes before the data; the next one begins where it ends, and where both ends are of one host it is
// copied from there into UCX's buffer, which is aligned. So: messages of whole lines, and data that begins with a page
// 64 bytes later. All this is about time only; with another UCX or network it does no harm.
u32 add_lead(Send* send, u64 header_bytes) {
  static u8 nothing[2 * kLine];
  u64 num_bytes = 0;
  for (u32 i = 0; i < send->num_iov; ++i) num_bytes += send->iov[i].length;
  num_bytes += kUcxBytes + header_bytes + (num_bytes < kPage ? 0 : kUcxEnd);
  u32 lead = static_cast<u32>(-num_bytes % kLine);
  const u64 ahead = kUcxBytes + lead - reinterpret_cast<u64>(send->num_iov ? send->iov[0].buffer : nullptr);
  if (send->num_iov && ahead % kPage - 1 < 31) lead += kLine;
  if (lead == 0) return 0;
  memmove(send->iov + 1, send->iov, send->num_iov * sizeof(send->iov[0]));
  send->iov[0] = {nothing, lead};
  ++send->num_iov;
  return lead;
}

}  // namespace

// ---------------------------------------------------------------- frames in and out

// A frame has come. Whatever does not fit together is dropped: its sender does not keep the protocol.
ucx::Status on_frame(void* arg, const void* header, size_t header_bytes, void* data, size_t num_bytes,
                     const ucx::AmRecvParam* param) {
  auto* wire = static_cast<Wire*>(arg);
  FrameHead head;
  ++wire->num_refused;  // until it turns out to be good
  if (header_bytes < sizeof(head) || (param->recv_attr & ucx::kAmRecvRndv)) return ucx::kOk;
  memcpy(&head, header, sizeof(head));
  const size_t expected = sizeof(head) + head.num_acks * sizeof(Ack) + head.num_ops * sizeof(Op);
  if (head.magic != kFrameMagic || head.version != kFrameVersion || header_bytes != expected ||
      head.num_ops > kMaxOps || head.num_acks > kMaxAcks)
    return ucx::kOk;
  const auto found = wire->windows.find(head.window);
  // UCX knows the sender of a frame by what the frame says, so nothing is done to an endpoint for a bad one:
  // that would be a way to close those of others.
  if (found == wire->windows.end() || !same(head.secret, found->second->wire->secret)) return ucx::kOk;
  if (head.lead > num_bytes) return ucx::kOk;
  --wire->num_refused;
  if (found->second->wire->account->closed) return ucx::kOk;
  auto* bytes = static_cast<u8*>(data) + head.lead;
  num_bytes -= head.lead;
  const u8* at = static_cast<const u8*>(header) + sizeof(head);
  for (u32 i = 0; i < head.num_acks; ++i, at += sizeof(Ack)) {
    Ack ack;
    memcpy(&ack, at, sizeof(ack));
    take_ack(wire, found->second, ack);
  }
  if (head.kind == kResponseFrame) {
    take_response(wire, found->second, head, bytes, num_bytes);
  } else if (head.kind == kRequestFrame && head.num_ops) {
    Op ops[kMaxOps];
    memcpy(ops, at, head.num_ops * sizeof(Op));
    take_request(wire, found->second, head, ops, bytes, num_bytes);
  }
  return ucx::kOk;
}

Send* new_send(Wire* wire) {
  Send* send;
  if (wire->free.empty()) {
    send = new Send;
    send->wire = wire;
  } else {
    send = wire->free.back();
    wire->free.pop_back();
  }
  send->num_iov = send->scratch_used = 0;
  send->idx = wire->under_way.size();
  wire->under_way.push_back(send);
  return send;
}

void free_send(Send* send) {
  Wire* wire = send->wire;
  if (send->account) {
    give_back(wire, send->account.get(), send->charged);
    if (send->is_ack) --send->account->acks_under_way;
    send->account.reset(), send->charged = 0, send->is_ack = false;
    std::vector<u8>().swap(send->bytes);
  }
  Send* last = wire->under_way.back();
  wire->under_way[send->idx] = last;
  last->idx = send->idx;
  wire->under_way.pop_back();
  if (wire->free.size() < kMaxFree)
    wire->free.push_back(send);
  else
    delete send;
}

void send_frame(ew_peer* peer, Send* send, FrameHead head, const Op* ops) {
  Wire* wire = send->wire;
  Ack acks[kMaxAcks];
  const u32 num_acks = peer->pair ? take_due_acks(wire, peer->pair, acks) : 0;
  head.magic = kFrameMagic, head.version = kFrameVersion, head.window = peer->wire_id;
  memcpy(&head.secret, peer->secret, sizeof(head.secret));
  head.num_acks = static_cast<u8>(num_acks);
  head.lead = add_lead(send, sizeof(head) + num_acks * sizeof(Ack) + head.num_ops * sizeof(Op));
  u8* at = send->header;
  memcpy(at, &head, sizeof(head));
  memcpy(at += sizeof(head), acks, num_acks * sizeof(Ack));
  at += num_acks * sizeof(Ack);
  if (ops) memcpy(at, ops, head.num_ops * sizeof(Op));
  at += head.num_ops * sizeof(Op);

  ucx::RequestParam param = {};
  param.op_attr_mask = ucx::kOpCallback | ucx::kOpUserData | ucx::kOpFlags;
  param.flags = ucx::kAmSendEager;
  param.cb = on_sent, param.user_data = send;
  const void* buffer = send->num_iov ? send->iov[0].buffer : nullptr;
  size_t count = send->num_iov ? send->iov[0].length : 0;
  if (send->num_iov > 1) {
    param.op_attr_mask |= ucx::kOpDatatype;
    param.datatype = ucx::kDatatypeIov;
    buffer = send->iov, count = send->num_iov;
  }
  const ucx::Request request = wire->api->ucp_am_send_nbx(
      peer->endpoint, kAmId, send->header, static_cast<size_t>(at - send->header), buffer, count, &param);
  if (request && !ucx::is_error(request)) return;
  if (request) lose_peer(peer);
  free_send(send);
}

void lose_peer(ew_peer* peer) {
  peer->lost = true;
  peer->hca->completed = true;  // a thread of ours may sleep until a completion
}

bool wire_reads(ew_hca* hca, u64 addr, u64 num_bytes) {
  for (const Send* send : hca->wire->under_way)
    for (u32 i = 0; i < send->num_iov; ++i) {
      const u64 begin = reinterpret_cast<u64>(send->iov[i].buffer);
      if (begin >= addr + num_bytes || addr >= begin + send->iov[i].length) continue;
      hca->wire->api->ucp_worker_progress(hca->wire->worker);  // who asks again may hear something else
      return true;
    }
  return false;
}

// ---------------------------------------------------------------- the engine's turn

u32 wire_progress(ew_hca* hca) {
  Wire* wire = hca->wire;
  u32 events = 0;
  while (events < kEventsPerPoll && wire->api->ucp_worker_progress(wire->worker)) ++events;
  if (wire->num_waiting) events += retry_waiting(wire);
  for (ew_peer* peer : wire->to_close) close_endpoint(peer, 0);
  wire->to_close.clear();
  return events;
}

void wire_idle(ew_hca* hca) {
  Wire* wire = hca->wire;
  const u64 now = monotonic_ns();
  if (wire->num_due && now - wire->due_since_ns > kAckDelayNs) send_due_acks(wire);
  if (now - wire->looked_ns > kLookNs) look_for_silence(wire, now);
}

bool wire_arm(ew_hca* hca) {
  Wire* wire = hca->wire;
  if (wire->num_due) send_due_acks(wire);
  return wire->api->ucp_worker_arm(wire->worker) == ucx::kOk;
}

int wire_event_fd(const ew_hca* hca) { return hca->wire->event_fd; }

// The engine thread sleeps until a kick, or, while no other thread waits and progresses, an event.
void wire_sleep(ew_hca* hca, u32 kicks) {
  Wire* wire = hca->wire;
  pollfd fds[2] = {{wire->kick_fd, POLLIN, 0}, {wire->event_fd, POLLIN, 0}};
  nfds_t count = 1;
  if (wire->waiters.load(std::memory_order_seq_cst) == 0) {
    std::lock_guard guard(hca->lock);
    if (!wire_arm(hca)) return;
    count = 2;
  }
  if (hca->kicks.load(std::memory_order_seq_cst) == kicks) poll(fds, count, kSleepMs);
  u64 value;
  if (read(wire->kick_fd, &value, sizeof(value)) < 0) return;  // not a kick, then
}

void wire_kick(ew_hca* hca) {
  const u64 one = 1;
  if (write(hca->wire->kick_fd, &one, sizeof(one)) < 0) return;  // counter full: it wakes up anyway
}

void wire_add_waiter(ew_hca* hca, int change) {
  hca->wire->waiters.fetch_add(static_cast<u32>(change), std::memory_order_seq_cst);
}
