// The UCX worker of a context: peers, frames out and in, sleeping and waking.
#include "wire.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "error.hpp"

EW_API int ew_hca_create(u32 flags, ew_hca** out);
EW_API int ew_hca_destroy(ew_hca* hca);

namespace {

constexpr unsigned kAmId = 0;
constexpr u64 kAckDelayNs = 30'000;        // a frame that goes back anyway may take it along
constexpr u64 kLookNs = 10'000'000;        // between two looks at who is silent
constexpr u64 kLongestLookNs = 100'000'000;  // a process that was stopped does not blame its peers
constexpr u64 kCloseNs = 1'000'000'000;
constexpr int kSleepMs = 5;                // as kEngineSleepNs in soft_wait.cpp
constexpr u32 kEventsPerPoll = 16;

u64 random_id() {
  u64 id = 0;
  while (id == 0)
    if (getrandom(&id, sizeof(id), 0) != sizeof(id)) id = 0;
  return id;
}

int failed(const Wire* wire, const char* what, ucx::Status status) {
  return ew_fail(-EIO, "UCX: %s: %s", what, wire->api->ucs_status_string(status));
}

void on_sent(ucx::Request request, ucx::Status, void* user_data) {
  auto* send = static_cast<Send*>(user_data);
  send->wire->api->ucp_request_free(request);
  free_send(send);  // an error shows at the endpoint, too
}

void on_error(void* arg, ucx::Endpoint, ucx::Status) { lose_peer(static_cast<ew_peer*>(arg)); }

// A frame has come. Whatever does not fit together is dropped: its sender does not keep the protocol.
ucx::Status on_frame(void* arg, const void* header, size_t header_bytes, void* data, size_t num_bytes,
                     const ucx::AmRecvParam* param) {
  auto* wire = static_cast<Wire*>(arg);
  FrameHead head;
  if (header_bytes < sizeof(head) || (param->recv_attr & ucx::kAmRecvRndv)) return ucx::kOk;
  memcpy(&head, header, sizeof(head));
  const size_t expected = sizeof(head) + head.num_acks * sizeof(Ack) + head.num_ops * sizeof(Op);
  if (head.magic != kFrameMagic || head.version != kFrameVersion || header_bytes != expected ||
      head.num_ops > kMaxOps || head.num_acks > kMaxAcks)
    return ucx::kOk;
  const auto found = wire->windows.find(head.window);
  if (found == wire->windows.end()) return ucx::kOk;
  const u8* at = static_cast<const u8*>(header) + sizeof(head);
  for (u32 i = 0; i < head.num_acks; ++i, at += sizeof(Ack)) {
    Ack ack;
    memcpy(&ack, at, sizeof(ack));
    take_ack(wire, found->second, ack);
  }
  if (head.kind == kResponseFrame) {
    take_response(wire, found->second, head, static_cast<u8*>(data), num_bytes);
  } else if (head.kind == kRequestFrame && head.num_ops) {
    Op ops[kMaxOps];
    memcpy(ops, at, head.num_ops * sizeof(Op));
    take_request(wire, found->second, head, ops, static_cast<u8*>(data), num_bytes);
  }
  return ucx::kOk;
}

// Frames with what is due and nothing else.
void send_due_acks(Wire* wire) {
  for (ew_peer* peer : wire->peers) {
    if (!wire->num_due) return;
    while (!peer->lost && peer->pair && peer->pair->streams &&
           std::any_of(peer->pair->streams->begin(), peer->pair->streams->end(),
                       [](const auto& stream) { return stream.second.ack_due; })) {
      FrameHead head = {};
      head.kind = kRequestFrame;
      send_frame(peer, new_send(wire), head, nullptr);
    }
  }
  wire->due_since_ns = monotonic_ns();  // what is still due belongs to peers that are gone
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

int open_worker(Wire* wire) {
  const ucx::Api* api = wire->api;
  ucx::Config config = nullptr;
  if (ucx::Status s = api->ucp_config_read(nullptr, nullptr, &config)) return failed(wire, "reading the configuration", s);
  ucx::Params params = {};
  params.field_mask = ucx::kParamFeatures;
  params.features = ucx::kFeatureAm | ucx::kFeatureWakeup;
  const ucx::Status init = api->ucp_init_version(1, 11, &params, config, &wire->context);
  api->ucp_config_release(config);
  if (init) return failed(wire, "opening a context", init);
  ucx::WorkerParams worker = {};
  worker.field_mask = ucx::kWorkerThreadMode;
  worker.thread_mode = ucx::kThreadModeSerialized;
  if (ucx::Status s = api->ucp_worker_create(wire->context, &worker, &wire->worker)) return failed(wire, "making a worker", s);
  ucx::WorkerAttr attr = {};
  attr.field_mask = ucx::kAttrMaxAmHeader;
  if (ucx::Status s = api->ucp_worker_query(wire->worker, &attr)) return failed(wire, "asking the worker", s);
  if (attr.max_am_header < kMaxHeader)
    return ew_fail(-ENOTSUP, "UCX takes headers of %zu bytes here, %u are needed", attr.max_am_header, kMaxHeader);
  ucx::AmHandlerParam handler = {};
  handler.field_mask = ucx::kAmHandlerId | ucx::kAmHandlerFlags | ucx::kAmHandlerCb | ucx::kAmHandlerArg;
  handler.id = kAmId, handler.flags = ucx::kAmWholeMessage, handler.cb = on_frame, handler.arg = wire;
  if (ucx::Status s = api->ucp_worker_set_am_recv_handler(wire->worker, &handler)) return failed(wire, "the handler", s);
  if (ucx::Status s = api->ucp_worker_get_efd(wire->worker, &wire->event_fd))
    return failed(wire, "no transport here can wake a sleeping process (event descriptor)", s);
  void* address = nullptr;
  size_t length = 0;
  if (ucx::Status s = api->ucp_worker_get_address(wire->worker, &address, &length)) return failed(wire, "its address", s);
  wire->address.assign(static_cast<u8*>(address), static_cast<u8*>(address) + length);
  api->ucp_worker_release_address(wire->worker, address);
  return 0;
}

void close_worker(Wire* wire) {
  if (wire->worker) wire->api->ucp_worker_destroy(wire->worker);
  if (wire->context) wire->api->ucp_cleanup(wire->context);
  if (wire->kick_fd >= 0) close(wire->kick_fd);
  for (Send* send : wire->free) delete send;
  delete wire;
}

}  // namespace

// ---------------------------------------------------------------- frames out

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
  Send* last = wire->under_way.back();
  wire->under_way[send->idx] = last;
  last->idx = send->idx;
  wire->under_way.pop_back();
  wire->free.push_back(send);
}

void send_frame(ew_peer* peer, Send* send, FrameHead head, const Op* ops) {
  Wire* wire = send->wire;
  Ack acks[kMaxAcks];
  const u32 num_acks = peer->pair ? take_due_acks(wire, peer->pair, acks) : 0;
  head.magic = kFrameMagic, head.version = kFrameVersion, head.window = peer->wire_id;
  head.num_acks = static_cast<u8>(num_acks);
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

bool uses_memory(const Wire* wire, u64 addr, u64 num_bytes) {
  for (const Send* send : wire->under_way)
    for (u32 i = 0; i < send->num_iov; ++i) {
      const u64 begin = reinterpret_cast<u64>(send->iov[i].buffer);
      if (begin < addr + num_bytes && addr < begin + send->iov[i].length) return true;
    }
  return false;
}

bool wire_settle(ew_hca* hca, u64 addr, u64 num_bytes, u64 deadline_ns) {
  while (uses_memory(hca->wire, addr, num_bytes)) {
    if (monotonic_ns() > deadline_ns) return false;
    hca->wire->api->ucp_worker_progress(hca->wire->worker);
  }
  return true;
}

// ---------------------------------------------------------------- the engine's turn

u32 wire_progress(ew_hca* hca) {
  Wire* wire = hca->wire;
  u32 events = 0;
  while (events < kEventsPerPoll && wire->api->ucp_worker_progress(wire->worker)) ++events;
  if (wire->num_waiting) events += retry_waiting(wire);
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

// ---------------------------------------------------------------- contexts, windows, peers

// A context whose peers are on other hosts. flags: as for ew_hca_create. library: path of libucp.so.0.
EW_API int ew_wire_open(u32 flags, const char* library, u64 ack_timeout_ns, ew_hca** out) {
  const ucx::Api* api = ucx::load(library);
  if (!api) return -ENOENT;
  ew_hca* hca = nullptr;
  if (int error = ew_hca_create(flags & ~1u, &hca)) return error;  // its thread starts once the wire is there
  auto* wire = new Wire{};
  wire->hca = hca, wire->api = api, wire->ack_timeout_ns = ack_timeout_ns;
  wire->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  wire->looked_ns = monotonic_ns();
  int error = wire->kick_fd < 0 ? ew_fail(-errno, "eventfd: %s", strerror(errno)) : open_worker(wire);
  if (error) {
    close_worker(wire);
    ew_hca_destroy(hca);
    return error;
  }
  hca->wire = wire;
  if (flags & 1) start_thread(hca);
  *out = hca;
  return 0;
}

void wire_close(ew_hca* hca) {
  close_worker(hca->wire);
  hca->wire = nullptr;
}

// The worker's address, for peers. Returns its length; copies at most `room` bytes, `out` may be null for 0.
EW_API int ew_wire_address(ew_hca* hca, u8* out, u32 room) {
  const std::vector<u8>& address = hca->wire->address;
  std::copy_n(address.data(), std::min<size_t>(room, address.size()), out);
  return static_cast<int>(address.size());
}

// The number that frames to this window must name: random, for one peer.
EW_API u64 ew_window_wire_id(ew_window* window) {
  std::lock_guard guard(window->hca->lock);
  if (window->wire_id == 0) {
    window->wire_id = random_id();
    window->streams = new std::unordered_map<u32, Stream>;
    window->hca->wire->windows[window->wire_id] = window;
  }
  return window->wire_id;
}

void wire_close_window(ew_window* window) {  // with the lock
  if (window->wire_id == 0) return;
  window->hca->wire->windows.erase(window->wire_id);
  forget_streams(window->hca->wire, window);
  delete window->streams;
  if (window->pair) window->pair->pair = nullptr;
}

// A peer at the other end of an address. `window` is what it writes to here; wire_id names its own.
EW_API int ew_wire_connect(ew_hca* hca, ew_window* window, const u8* address, u32 num_bytes, u64 wire_id,
                           ew_peer** out) {
  Wire* wire = hca->wire;
  if (num_bytes == 0) return ew_fail(-EINVAL, "the peer's UCX address is empty");
  std::lock_guard guard(hca->lock);
  if (window->pair) return ew_fail(-EISCONN, "the window has a peer already");
  auto* peer = new ew_peer{hca, nullptr, {}, -1, false, false, 0};
  peer->wire_id = wire_id, peer->pair = window;
  ucx::EndpointParams params = {};
  params.field_mask = ucx::kEpAddress | ucx::kEpErrMode | ucx::kEpErrHandler;
  params.address = address;
  params.err_mode = ucx::kErrModePeer;
  params.err_handler.cb = on_error, params.err_handler.arg = peer;
  if (ucx::Status s = wire->api->ucp_ep_create(wire->worker, &params, &peer->endpoint)) {
    delete peer;
    return failed(wire, "connecting to the peer (do both sides have a network in common?)", s);
  }
  window->pair = peer;
  wire->peers.push_back(peer);
  ++hca->num_peers;
  *out = peer;
  return 0;
}

void wire_close_peer(ew_peer* peer) {  // with the lock
  Wire* wire = peer->hca->wire;
  auto& peers = wire->peers;
  peers.erase(std::remove(peers.begin(), peers.end(), peer), peers.end());
  if (peer->pair) peer->pair->pair = nullptr;
  ucx::RequestParam param = {};
  param.op_attr_mask = ucx::kOpFlags;
  param.flags = ucx::kCloseForce;  // nothing is waited for: the peer may not answer any more
  const ucx::Request request = wire->api->ucp_ep_close_nbx(peer->endpoint, &param);
  if (!request || ucx::is_error(request)) return;
  const u64 deadline = monotonic_ns() + kCloseNs;
  while (wire->api->ucp_request_check_status(request) == ucx::kInProgress && monotonic_ns() < deadline)
    wire->api->ucp_worker_progress(wire->worker);
  wire->api->ucp_request_free(request);
}
