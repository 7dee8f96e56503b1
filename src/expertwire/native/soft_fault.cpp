// A path that misbehaves, for tests: writes are cut at the MTU, and their pieces are delayed, land in
// any order, twice, or never. The sender's completion does not wait for them, as with relaxed ordering.
#include <algorithm>
#include <cstring>

#include "soft_hca.hpp"

namespace {

u64 next_random(ew_hca* hca) {  // splitmix64
  u64 z = (hca->fault_state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

bool one_in(ew_hca* hca, u32 n) { return n != 0 && next_random(hca) % n == 0; }

// The key is looked up again: bytes under way when it is revoked do not land.
void land(ew_qp* qp, size_t idx) {
  const Piece& piece = qp->pieces[idx];
  u8* at = nullptr;
  if (WindowKey* key = find_remote(qp->peer, piece.rkey, piece.addr, piece.bytes.size(), kRemoteWrite, &at)) {
    if (piece.bytes.size() == 8 && reinterpret_cast<uintptr_t>(at) % 8 == 0) {  // flags are never torn
      u64 word;
      memcpy(&word, piece.bytes.data(), 8);
      __atomic_store_n(reinterpret_cast<u64*>(at), word, __ATOMIC_RELEASE);
    } else {
      memcpy(at, piece.bytes.data(), piece.bytes.size());
      __atomic_thread_fence(__ATOMIC_RELEASE);
    }
    qp->peer->touched = true;
    release_remote(key);
  }
  qp->pieces.erase(qp->pieces.begin() + static_cast<long>(idx));
}

}  // namespace

void send_in_pieces(ew_qp* qp, const Segment* list, u32 count, u32 rkey, u64 addr) {
  ew_hca* hca = qp->hca;
  std::vector<u8> bytes;
  for (u32 i = 0; i < count; ++i) bytes.insert(bytes.end(), list[i].addr, list[i].addr + list[i].num_bytes);
  const u64 mtu = hca->faults.mtu ? hca->faults.mtu : bytes.size();
  for (u64 begin = 0; begin < bytes.size(); begin += mtu) {
    if (one_in(hca, hca->faults.drop_one_in)) continue;
    const auto first = bytes.begin() + static_cast<long>(begin);
    const auto last = bytes.begin() + static_cast<long>(std::min<u64>(begin + mtu, bytes.size()));
    const u32 copies = one_in(hca, hca->faults.duplicate_one_in) ? 2 : 1;
    for (u32 i = 0; i < copies; ++i) {
      const u64 delay = hca->faults.max_delay ? next_random(hca) % (hca->faults.max_delay + 1) : 0;
      qp->pieces.push_back({rkey, addr + begin, qp->num_turns + delay, {first, last}});
    }
  }
}

u32 land_some(ew_qp* qp) {
  ew_hca* hca = qp->hca;
  ++qp->num_turns;
  u32 landed = 0;
  do {
    const size_t idx = hca->faults.reorder ? next_random(hca) % qp->pieces.size() : 0;
    if (qp->pieces[idx].due_turn > qp->num_turns) break;
    land(qp, idx);
    ++landed;
  } while (!qp->pieces.empty() && !one_in(hca, 4));
  return landed ? landed : 1;  // a wait for a delayed one is work too: the engine must come again
}

void land_all(ew_qp* qp) {
  while (!qp->pieces.empty()) land(qp, qp->hca->faults.reorder ? next_random(qp->hca) % qp->pieces.size() : 0);
}

// Null: a path without faults again; what is under way lands first.
EW_API void ew_hca_set_faults(ew_hca* hca, const ew_fault_plan* plan) {
  std::lock_guard guard(hca->lock);
  for (ew_qp* qp : hca->qps) land_all(qp);
  hca->faulty = plan != nullptr;
  hca->faults = plan ? *plan : ew_fault_plan{};
  hca->fault_state = hca->faults.seed;
}
