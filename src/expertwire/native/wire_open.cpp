// The UCX worker of a context, its windows and its peers.
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "error.hpp"
#include "wire.hpp"

EW_API int ew_hca_create(u32 flags, ew_hca** out);
EW_API int ew_hca_destroy(ew_hca* hca);

namespace {

constexpr u64 kCloseNs = 1'000'000'000;
constexpr u8 kVersionMask = 0x0f;  // of an address's first byte; UCX 1.x has versions 0 and 1

u64 random_number() {  // not 0
  u64 number = 0;
  while (number == 0)
    if (getrandom(&number, sizeof(number), 0) != sizeof(number)) number = 0;
  return number;
}

int failed(const Wire* wire, const char* what, ucx::Status status) {
  return ew_fail(-EIO, "UCX: %s: %s", what, wire->api->ucs_status_string(status));
}

void on_error(void* arg, ucx::Endpoint, ucx::Status) { lose_peer(static_cast<ew_peer*>(arg)); }

// address: of the network device to use; empty for UCX's own choice.
int open_worker(Wire* wire, const char* address) {
  const ucx::Api* api = wire->api;
  ucx::Config config = nullptr;
  if (ucx::Status s = api->ucp_config_read(nullptr, nullptr, &config)) return failed(wire, "reading the configuration", s);
  if (address[0]) {
    const std::string devices = net_devices(address);
    ucx::Status s = 1;
    if (!devices.empty()) s = api->ucp_config_modify(config, "NET_DEVICES", devices.c_str());
    // A device may have addresses of both kinds.
    if (s == ucx::kOk && strchr(address, ':')) s = api->ucp_config_modify(config, "TCP_AF_PRIO", "inet6,inet");
    if (s) {
      api->ucp_config_release(config);
      return devices.empty() ? ew_fail(-EADDRNOTAVAIL, "no network device here has the address %s", address)
                             : failed(wire, "choosing the network device", s);
    }
  }
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
  void* own = nullptr;
  size_t length = 0;
  if (ucx::Status s = api->ucp_worker_get_address(wire->worker, &own, &length)) return failed(wire, "its address", s);
  wire->address.assign(static_cast<u8*>(own), static_cast<u8*>(own) + length);
  api->ucp_worker_release_address(wire->worker, own);
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

// A context whose peers are on other hosts. flags: as for ew_hca_create. library: path of libucp.so.0. address: of
// this host, that data goes over; empty for UCX's own choice. max_*: what a peer, and all peers together, can make
// this side hold.
EW_API int ew_wire_open(u32 flags, const char* library, const char* address, u64 ack_timeout_ns, u64 max_peer_bytes,
                        u64 max_held_bytes, ew_hca** out) {
  const ucx::Api* api = ucx::load(library);
  if (!api) return -ENOENT;
  ew_hca* hca = nullptr;
  if (int error = ew_hca_create(flags & ~1u, &hca)) return error;  // its thread starts once the wire is there
  auto* wire = new Wire{};
  wire->hca = hca, wire->api = api, wire->ack_timeout_ns = ack_timeout_ns;
  wire->max_peer_bytes = max_peer_bytes, wire->max_held_bytes = max_held_bytes;
  wire->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  wire->looked_ns = monotonic_ns();
  int error = wire->kick_fd < 0 ? ew_fail(-errno, "eventfd: %s", strerror(errno)) : open_worker(wire, address);
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

// The number that frames to this window must name, returned, and the 128 bits they must know: random, for one peer.
EW_API u64 ew_window_wire_id(ew_window* window, u8* secret) {
  std::lock_guard guard(window->hca->lock);
  if (!window->wire) {
    window->wire = new WireWindow{};
    window->wire->id = random_number();
    window->wire->secret = {{random_number(), random_number()}};
    window->hca->wire->windows[window->wire->id] = window;
  }
  memcpy(secret, &window->wire->secret, sizeof(Secret));
  return window->wire->id;
}

void wire_close_window(ew_window* window) {  // with the lock
  if (!window->wire) return;
  window->hca->wire->windows.erase(window->wire->id);
  forget_streams(window->hca->wire, window);
  if (window->wire->pair) window->wire->pair->pair = nullptr;
  delete window->wire;
  window->wire = nullptr;
}

// out: frames refused; peers cut off; bytes held for peers, now and at most; frames of ours under way.
EW_API void ew_wire_counters(ew_hca* hca, u64 out[5]) {
  std::lock_guard guard(hca->lock);
  const Wire* wire = hca->wire;
  out[0] = wire->num_refused, out[1] = wire->num_cut, out[2] = wire->held_bytes, out[3] = wire->most_held_bytes;
  out[4] = wire->under_way.size();
}

// A peer at the other end of an address. `window` is what it writes to here; wire_id and secret are its own's.
EW_API int ew_wire_connect(ew_hca* hca, ew_window* window, const u8* address, u32 num_bytes, u64 wire_id,
                           const u8* secret, ew_peer** out) {
  Wire* wire = hca->wire;
  if (num_bytes == 0) return ew_fail(-EINVAL, "the peer's UCX address is empty");
  // UCX ends the process for a version that it does not know.
  const u32 version = address[0] & kVersionMask;
  if (version > 1 && version != (wire->address[0] & kVersionMask))
    return ew_fail(-EPROTO, "the peer's UCX address is not one, or of a newer UCX (version %u)", version);
  std::lock_guard guard(hca->lock);
  if (window->wire->pair) return ew_fail(-EISCONN, "the window has a peer already");
  if (window->wire->account->closed) return ew_fail(-ECONNABORTED, "the peer made this side hold too much before it connected");
  auto* peer = new ew_peer{hca, nullptr, {}, -1, false, false, 0};
  peer->wire_id = wire_id, peer->pair = window;
  memcpy(peer->secret, secret, sizeof(peer->secret));
  ucx::EndpointParams params = {};
  params.field_mask = ucx::kEpAddress | ucx::kEpErrMode | ucx::kEpErrHandler;
  params.address = address;
  params.err_mode = ucx::kErrModePeer;
  params.err_handler.cb = on_error, params.err_handler.arg = peer;
  if (ucx::Status s = wire->api->ucp_ep_create(wire->worker, &params, &peer->endpoint)) {
    delete peer;
    return failed(wire, "connecting to the peer (do both sides have a network in common? UCX_NET_DEVICES names devices)",
                  s);
  }
  window->wire->pair = peer;
  wire->peers.push_back(peer);
  ++hca->num_peers;
  *out = peer;
  return 0;
}

void wire_close_peer(ew_peer* peer) {  // with the lock
  Wire* wire = peer->hca->wire;
  auto& peers = wire->peers;
  peers.erase(std::remove(peers.begin(), peers.end(), peer), peers.end());
  auto& to_close = wire->to_close;
  to_close.erase(std::remove(to_close.begin(), to_close.end(), peer), to_close.end());
  if (peer->pair) peer->pair->wire->pair = nullptr;
  close_endpoint(peer, kCloseNs);
}

// Frames under way end with an error; the last of it within wait_ns, or later.
void close_endpoint(ew_peer* peer, u64 wait_ns) {
  if (peer->endpoint_closed) return;
  peer->endpoint_closed = true;
  Wire* wire = peer->hca->wire;
  ucx::RequestParam param = {};
  param.op_attr_mask = ucx::kOpFlags;
  param.flags = ucx::kCloseForce;  // nothing is waited for: the peer may not answer any more
  const ucx::Request request = wire->api->ucp_ep_close_nbx(peer->endpoint, &param);
  if (!request || ucx::is_error(request)) return;
  const u64 deadline = monotonic_ns() + wait_ns;
  while (wire->api->ucp_request_check_status(request) == ucx::kInProgress && monotonic_ns() < deadline)
    wire->api->ucp_worker_progress(wire->worker);
  wire->api->ucp_request_free(request);
}
