// libFuzzer target: any bytes in a send queue of the software HCA, posted by any doorbell.
//
// Input: u8 control | u8 producer index | the ring's bytes. So that mutations get past the checks
// of random numbers, a block that begins an entry has its queue number and, unless control says
// otherwise, its index put right; keys 0x11111111 and 0x22222222 become the local and the remote
// key; 64-bit addresses that begin with 0x4c4c or 0x5252 become offsets into the two regions.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <optional>

#include "engine.hpp"

namespace {

constexpr u32 kBlocks = 16, kLocalKey = 0x11111111, kRemoteKey = 0x22222222;

// One page between two that nobody may touch: a byte too far is a fault, not a silent success.
u8* guarded_page(int fd) {
  auto* space = static_cast<u8*>(mmap(nullptr, 3 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  return static_cast<u8*>(mmap(space + kPage, kPage, PROT_READ | PROT_WRITE, flags, fd, 0));
}

struct Pair {
  ew_hca *here, *there;
  ew_window* window;
  ew_peer* peer;
  u8 *local, *remote;
  u32 pd, lkey, rkey, receives = 0;

  Pair() {
    const int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    require(ftruncate(fd, kPage) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0, "memory");
    local = guarded_page(-1), remote = guarded_page(fd);
    u32 there_pd, there_key;
    require(ew_hca_create(0, &here) == 0 && ew_hca_create(0, &there) == 0, "engines");
    ew_hca_pd(here, &pd), ew_hca_pd(there, &there_pd);
    ew_hca_register(here, pd, reinterpret_cast<u64>(local), kPage, 15, &lkey);
    ew_hca_register(there, there_pd, reinterpret_cast<u64>(remote), kPage, 15, &there_key);
    ew_window_create(there, &window);
    ew_window_publish(window, there_key, 0, 0, &rkey);
    require(ew_peer_import(here, ew_window_fd(window), ew_hca_wake_fd(there), &fd, 1, &peer) == 0, "peer");
    close(fd);
  }
  ~Pair() {
    require(ew_peer_destroy(peer) == 0, "closing");
    ew_window_destroy(window);
    require(ew_hca_destroy(here) == 0 && ew_hca_destroy(there) == 0, "closing");
    munmap(local - kPage, 3 * kPage), munmap(remote - kPage, 3 * kPage);
  }
};

void replace_keys_and_addresses(const Pair& pair, u8* ring, u64 num_bytes) {
  for (u64 at = 0; at + 8 <= num_bytes; at += 4) {
    const u32 word = load_be32(ring + at);
    if (word == kLocalKey || word == kRemoteKey) store_be32(ring + at, word == kLocalKey ? pair.lkey : pair.rkey);
    if (word >> 16 != 0x4c4c && word >> 16 != 0x5252) continue;
    u64 addr = reinterpret_cast<u64>(word >> 16 == 0x4c4c ? pair.local : pair.remote);
    addr += static_cast<u64>(static_cast<short>(load_be32(ring + at + 4)));
    store_be32(ring + at, static_cast<u32>(addr >> 32)), store_be32(ring + at + 4, static_cast<u32>(addr));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, size_t size) {
  static std::optional<Pair> kept;
  if (size < 3) return 0;
  const u32 control = data[0], posted = data[1], receives = control & 4 ? 2 : 0;
  // No input finds receives that another one left.
  if (!kept || kept->receives > receives) kept.emplace();
  Pair& pair = *kept;
  data += 2, size -= 2;
  ew_qp* qp;
  ew_qp_info info;
  const u32 cq_flags = control & 3;  // collapsed, overrun ignored
  require(ew_qp_create(pair.here, pair.pd, kBlocks, kBlocks, cq_flags, nullptr, &qp, &info) == 0, "queue pair");
  require(ew_qp_connect(qp, pair.peer, 0x77) == 0, "connecting");
  if (receives) require(ew_window_post_recv(pair.window, receives - pair.receives) == 0, "receives");
  pair.receives = receives;
  auto* ring = reinterpret_cast<u8*>(info.sq_addr);
  memcpy(ring, data, size < kBlocks * 64 ? size : kBlocks * 64);
  replace_keys_and_addresses(pair, ring, kBlocks * 64);
  for (u32 block = 0; block < kBlocks;) {  // where an entry begins, if the ones before have their length
    u8* entry = ring + 64 * block;
    if (!(control & 8)) entry[1] = static_cast<u8>(block >> 8), entry[2] = static_cast<u8>(block);
    store_be32(entry + 4, info.qpn << 8 | entry[7]);
    const u32 segments = entry[7] & 0x3f;
    block += segments ? (segments + 3) / 4 : 1;
  }
  if (control & 16) {
    store_be32(reinterpret_cast<u8*>(info.uar_addr) + 0x804, info.qpn << 8);
    store_be32(reinterpret_cast<u8*>(info.uar_addr) + 0x800, posted << 8);
  } else {
    store_be32(reinterpret_cast<u8*>(info.dbrec_addr) + 4, posted);
  }
  u64 pi = 0, ci = 0;
  for (u32 turn = 0; turn < 64 && ew_hca_poll(pair.here, 8) > 0; ++turn) {
    ew_qp_indices(qp, &pi, &ci);
    require(ci <= pi && pi <= 0xffff, "the consumer is behind the producer");
  }
  u8 cqe[64];
  for (; ew_window_poll_recv(pair.window, cqe); --pair.receives)
    require(cqe[63] >> 4 == 1 && pair.receives > 0, "a receive completion");
  ew_qp_destroy(qp);
  return 0;
}
