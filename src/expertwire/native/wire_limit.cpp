// How much a peer on another host can make this side hold: frames that wait for one before them, and answers
// that it does not take. What keeps the protocol and reads its socket comes near none of it.
#include <algorithm>

#include "wire.hpp"

bool charge(Wire* wire, ew_window* window, u64 num_bytes) {
  Account* account = window->wire->account.get();
  if (account->bytes + num_bytes > wire->max_peer_bytes) return false;
  if (wire->held_bytes + num_bytes > wire->max_held_bytes) {
    ew_window* most = window;
    for (auto& [id, other] : wire->windows)
      if (!other->wire->account->closed && other->wire->account->bytes > most->wire->account->bytes) most = other;
    if (most == window) return false;
    cut_off(wire, most);
    if (wire->held_bytes + num_bytes > wire->max_held_bytes) return false;
  }
  account->bytes += num_bytes;
  wire->held_bytes += num_bytes;
  wire->most_held_bytes = std::max(wire->most_held_bytes, wire->held_bytes);
  return true;
}

void give_back(Wire* wire, Account* account, u64 num_bytes) {
  account->bytes -= num_bytes;
  if (!account->closed) wire->held_bytes -= num_bytes;
}

// Nothing of this peer is taken any more; what is posted to it completes with an error.
void cut_off(Wire* wire, ew_window* window) {
  Account* account = window->wire->account.get();
  if (account->closed) return;
  ++wire->num_cut;
  forget_streams(wire, window);
  account->closed = true;
  wire->held_bytes -= account->bytes;  // answers, which come back as soon as the endpoint is closed
  ew_peer* peer = window->wire->pair;
  if (!peer) return;
  lose_peer(peer);
  wire->to_close.push_back(peer);  // not now: UCX may be in the middle of a message of this very peer
}
