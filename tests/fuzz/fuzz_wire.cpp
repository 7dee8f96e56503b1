// libFuzzer target: any frames from a peer on another host, in front of the UCX wire.
//
// Input: u8 control | frames, each u8 header bytes / 4 | u8 data bytes / 4 | header | data. The wire
// runs on a UCX of ours that brings these frames and sends nowhere. So that mutations get past the
// checks of random numbers, magic, version and window of a frame are put right unless control says
// otherwise, and so is its length; 0x11111111 becomes our queue pair, 0x22222222 the remote key, and
// a word whose upper half is 0x52520000 an offset into the region. Headers and data lie in memory of
// exactly their size. Entries of every kind are under way, for acknowledgements and responses.
#include <sys/eventfd.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "engine.hpp"
#include "wire.hpp"

namespace {

constexpr u32 kQpn = 0x11111111, kKey = 0x22222222, kBlocks = 16;
constexpr u8 kAddress[8] = {};  // of a peer that is not there
constexpr u64 kPeerBytes = 8192, kHeldBytes = 12000;  // so low that frames reach them

struct Input {
  const u8* at = nullptr;
  const u8* end = nullptr;
  u32 control = 0, qpn = 0, rkey = 0;
  u64 window = 0, region = 0;
  Secret secret = {};
} input;
ucx::AmHandlerParam handler;

void put_right(u8* header, u32* header_bytes) {
  for (u32 at = 0; at + 4 <= *header_bytes; at += 4) {
    u32 word[2] = {};
    memcpy(word, header + at, at + 8 <= *header_bytes ? 8 : 4);
    if (word[0] == kQpn || word[0] == kKey) word[0] = word[0] == kQpn ? input.qpn : input.rkey;
    const u64 addr = input.region + static_cast<u64>(static_cast<short>(word[0]));
    memcpy(header + at, word, 4);
    if (word[1] == 0x52520000 && at + 8 <= *header_bytes) memcpy(header + at, &addr, 8), at += 4;
  }
  FrameHead head;
  if (*header_bytes < sizeof(head) || input.control & 1) return;
  memcpy(&head, header, sizeof(head));
  head.magic = kFrameMagic, head.version = kFrameVersion, head.window = input.window;
  head.secret = input.secret;
  head.num_acks %= kMaxAcks + 1, head.num_ops %= kMaxOps + 1;
  if (head.num_acks * sizeof(Ack) > *header_bytes - sizeof(head)) head.num_acks = 0;
  const u64 room = *header_bytes - sizeof(head) - head.num_acks * sizeof(Ack);
  if (head.num_ops * sizeof(Op) > room) head.num_ops = static_cast<u8>(room / sizeof(Op));
  *header_bytes = static_cast<u32>(sizeof(head) + head.num_acks * sizeof(Ack) + head.num_ops * sizeof(Op));
  memcpy(header, &head, sizeof(head));
}

unsigned bring_a_frame(ucx::Worker) {
  if (input.end - input.at < 2) return 0;
  u32 header_bytes = input.at[0] * 4u, data_bytes = input.at[1] * 4u;
  input.at += 2;
  const u64 left = static_cast<u64>(input.end - input.at);
  header_bytes = static_cast<u32>(std::min<u64>(header_bytes, left));
  data_bytes = static_cast<u32>(std::min<u64>(data_bytes, left - header_bytes));
  const u8 *from = input.at, *data_from = from + header_bytes;
  input.at = data_from + data_bytes;
  std::unique_ptr<u8[]> whole(new u8[header_bytes]);
  memcpy(whole.get(), from, header_bytes);
  put_right(whole.get(), &header_bytes);
  std::unique_ptr<u8[]> header(new u8[header_bytes]), data(new u8[data_bytes]);
  memcpy(header.get(), whole.get(), header_bytes), memcpy(data.get(), data_from, data_bytes);
  const ucx::AmRecvParam param = {};
  handler.cb(handler.arg, header.get(), header_bytes, data.get(), data_bytes, &param);
  return 1;
}

ucx::Api make_api() {
  ucx::Api api = {};
  api.ucp_config_read = [](const char*, const char*, ucx::Config*) -> ucx::Status { return ucx::kOk; };
  api.ucp_config_release = [](ucx::Config) {};
  api.ucs_status_string = [](ucx::Status) { return "an error"; };
  api.ucp_init_version = [](unsigned, unsigned, const ucx::Params*, ucx::Config, ucx::Context*) -> ucx::Status {
    return ucx::kOk;
  };
  api.ucp_worker_create = [](ucx::Context, const ucx::WorkerParams*, ucx::Worker*) -> ucx::Status { return ucx::kOk; };
  api.ucp_worker_query = [](ucx::Worker, ucx::WorkerAttr* attr) -> ucx::Status {
    attr->max_am_header = kPage;
    return ucx::kOk;
  };
  api.ucp_worker_get_address = [](ucx::Worker, void** address, size_t* length) -> ucx::Status {
    static u8 ours[8];
    *address = ours, *length = sizeof(ours);
    return ucx::kOk;
  };
  api.ucp_worker_release_address = [](ucx::Worker, void*) {};
  api.ucp_worker_progress = bring_a_frame;
  api.ucp_worker_get_efd = [](ucx::Worker, int* fd) -> ucx::Status {
    *fd = eventfd(0, EFD_CLOEXEC);
    return ucx::kOk;
  };
  api.ucp_worker_set_am_recv_handler = [](ucx::Worker, const ucx::AmHandlerParam* param) -> ucx::Status {
    handler = *param;
    return ucx::kOk;
  };
  api.ucp_ep_create = [](ucx::Worker, const ucx::EndpointParams*, ucx::Endpoint* ep) -> ucx::Status {
    static u8 there;
    *ep = &there;
    return ucx::kOk;
  };
  api.ucp_ep_close_nbx = [](ucx::Endpoint, const ucx::RequestParam*) -> ucx::Request { return nullptr; };
  api.ucp_am_send_nbx = [](ucx::Endpoint, unsigned, const void*, size_t, const void*, size_t,
                           const ucx::RequestParam*) -> ucx::Request { return nullptr; };
  return api;
}

// A write of 64 bytes, a read of 64, an atomic of 8: signalled, from the region's second half.
void post(const ew_qp_info& info, u32 lkey) {
  auto* ring = reinterpret_cast<u8*>(info.sq_addr);
  const u8 opcodes[3] = {kWrite, kRead, kFetchAdd};
  for (u32 i = 0; i < 3; ++i) {
    u8* entry = ring + 64 * i;
    const bool is_atomic = opcodes[i] == kFetchAdd;
    memset(entry, 0, 64);
    store_be32(entry, i << 8 | opcodes[i]), store_be32(entry + 4, info.qpn << 8 | (is_atomic ? 4 : 3));
    entry[11] = 8;  // a completion
    u8* data = entry + (is_atomic ? 48 : 32);
    const u64 addr = input.region + kPage / 2 + 64 * i;
    store_be32(data, is_atomic ? 8 : 64), store_be32(data + 4, lkey);
    store_be32(data + 8, static_cast<u32>(addr >> 32)), store_be32(data + 12, static_cast<u32>(addr));
  }
  store_be32(reinterpret_cast<u8*>(info.dbrec_addr) + 4, 3);
}

}  // namespace

// In place of ucx_load.cpp.
const ucx::Api* ucx::load(const char*) {
  static const ucx::Api api = make_api();
  return &api;
}

extern "C" int LLVMFuzzerTestOneInput(const u8* data, size_t size) {
  static ew_hca* hca = nullptr;
  static u32 pd, lkey;
  static u8* page;
  if (!hca) {
    auto* space = static_cast<u8*>(mmap(nullptr, 3 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    page = space + kPage;
    require(mprotect(page, kPage, PROT_READ | PROT_WRITE) == 0, "memory");
    require(ew_wire_open(0, "", "", ~u64{0} >> 1, kPeerBytes, kHeldBytes, &hca) == 0, "the wire");
    ew_hca_pd(hca, &pd), ew_hca_register(hca, pd, reinterpret_cast<u64>(page), kPage, 15, &lkey);
  }
  if (size < 3) return 0;
  input = {data + 1, data + 1, data[0], 0, 0, 0, reinterpret_cast<u64>(page), {}};
  ew_window* window;
  ew_peer* peer;
  ew_qp* qp;
  ew_qp_info info;
  require(ew_window_create(hca, &window) == 0, "a window");
  require(ew_window_publish(window, lkey, 0, 0, &input.rkey) == 0, "a key");
  input.window = ew_window_wire_id(window, reinterpret_cast<u8*>(&input.secret));
  const auto* secret = reinterpret_cast<const u8*>(&input.secret);
  require(ew_wire_connect(hca, window, kAddress, sizeof(kAddress), 1, secret, &peer) == 0, "a peer");
  require(ew_qp_create(hca, pd, kBlocks, kBlocks, 1, nullptr, &qp, &info) == 0, "a queue pair");
  require(ew_qp_connect(qp, peer, 0x77) == 0, "connecting");
  input.qpn = info.qpn;
  if (input.control & 2) ew_window_post_recv(window, 2);
  post(info, lkey);
  ew_hca_poll(hca, 8);  // entries go out before frames come in
  input.end = data + size;
  u64 pi = 0, ci = 0;
  for (u32 turn = 0; turn < 16 && ew_hca_poll(hca, 8) > 0; ++turn) {
    ew_qp_indices(qp, &pi, &ci);
    require(ci <= pi && pi <= 3, "the consumer is behind the producer");
  }
  input.at = input.end;
  u64 counters[5];
  ew_wire_counters(hca, counters);
  require(counters[3] <= kHeldBytes, "the limit holds");
  ew_qp_destroy(qp), ew_peer_destroy(peer), ew_window_destroy(window);
  ew_wire_counters(hca, counters);
  require(counters[2] == 0, "what a peer made this side hold is given back");
  return 0;
}
