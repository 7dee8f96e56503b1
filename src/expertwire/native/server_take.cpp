// A server's loop around the experts: wait for messages, poll, gather; reply.
#include <cerrno>
#include <cstring>
#include <vector>

#include "fiber.hpp"
#include "server_poll.cuh"
#include "server_reply.cuh"
#include "trace.hpp"
#include "trip.hpp"

namespace {

thread_local std::vector<const u64*> words;  // reused from call to call
thread_local std::vector<u64> seen;

// What the three puts of each direction carry, as clients count it (client_trip.cpp).
void count_bytes(ew_server* server, const ServerMessage& message) {
  if (message.reason != kReasonOk) return;
  const BufferHead& head = message.head;
  server->bytes_received += sizeof(BufferHead) + head.active_bytes + head.payload_bytes + 8;
  server->bytes_sent += static_cast<u64>(message.num_reply_rows) * head.hidden_size * data_type_bytes(head.reply_type) +
                        sizeof(ReplyHead) + 8;
}

}  // namespace

// Sends the replies of the batch that was taken. Messages of a batch with a direct client all go
// the direct way. Returns 0, 1 when a message was refused or its reply failed (see the messages'
// reasons and statuses), or a negative error.
EW_API int ew_server_reply(ew_server* server) {
  const u32 num_messages = server->found[0];
  auto* args = static_cast<ServerReplyArgs*>(const_cast<void*>(server->reply[0].args));
  const auto* messages = at<const ServerMessage>(args->messages);
  args->num_messages = num_messages;
  memset(at<u8>(args->status), 0, num_messages * sizeof(KernelStatus));
  bool direct = false;
  for (u32 m = 0; m < num_messages; ++m) direct |= server->slots[messages[m].slot].in_place != 0;
  if (int error = ew_launch(server->reply + direct, 1, &server->hca, 1)) return error;
  if (direct)
    for (u32 m = 0; m < num_messages; ++m) ew_peer_notify(server->notify[messages[m].slot]);
  drive(server->hca);

  int look = 0;
  for (u32 m = 0; m < num_messages; ++m) {
    server->slots[messages[m].slot].previous_reply_seq = messages[m].head.seq;
    server->num_refused += messages[m].reason != kReasonOk;
    count_bytes(server, messages[m]);
    look |= messages[m].reason != kReasonOk || at<const KernelStatus>(args->status)[m].code != kOk;
  }
  server->num_messages += num_messages, server->num_rows += server->found[1];
  server->times[2]->add(server->reply[direct].elapsed_ns);
  return look;
}

// Waits for a flag of any open slot to change, polls, and gathers if there is room for the pairs.
// Where there is nothing to compute (an echo, or refusals only) it replies and goes on waiting.
// Returns 0 nothing (timeout or interrupted), 1 polled, 2 polled and gathered, 3 replied already
// with something to look at, 4 a queue failed since: a reply may be lost, or a negative error.
EW_API int ew_server_take(ew_server* server, u64 timeout_ns) {
  auto* poll = static_cast<ServerPollArgs*>(const_cast<void*>(server->poll->args));
  const u64 deadline = ew::clock_ns() + timeout_ns;
  const u32* found = server->found;
  ew::trace_seat(static_cast<const ServerReplyArgs*>(server->reply->args)->server_id);
  for (u64 now = ew::clock_ns(); now < deadline; now = ew::clock_ns()) {
    if (const u64 num_failed = ew_hca_num_failed(server->hca); num_failed != server->num_failed) {
      server->num_failed = num_failed;
      return 4;
    }
    words.clear(), seen.clear();
    u32 num_ready = 0;
    for (u32 i = 0; i < server->num_slots; ++i) {
      const ServerSlot& slot = server->slots[i];
      if (!slot.open) continue;
      words.push_back(at<const u64>(slot_flag(slot.recv_addr, slot.recv_slot_bytes)));
      seen.push_back(slot.last_seq);
      num_ready += __atomic_load_n(words.back(), __ATOMIC_RELAXED) != slot.last_seq;
    }
    server->queue_depth = num_ready;
    const int code = ew_hca_wait(server->hca, words.data(), seen.data(), static_cast<u32>(words.size()),
                                 server->spin_ns, deadline - now);
    if (code == -EINTR && ew_hca_num_failed(server->hca) != server->num_failed) continue;
    if (code == -ETIMEDOUT || code == -EINTR) return 0;
    if (code < 0) return code;
    if (int error = ew_launch(server->poll, 1, nullptr, 0)) return error;
    if (found[0] == 0) continue;
    server->times[0]->add(server->poll->elapsed_ns);
    poll->first_slot = (at<const ServerMessage>(poll->messages)[found[0] - 1].slot + 1) % server->num_slots;
    if (server->echo || found[1] == 0) {
      const int look = ew_server_reply(server);
      if (look) return look < 0 ? look : 3;
      continue;
    }
    if (found[2] > server->pair_capacity) return 1;
    if (int error = ew_launch(server->gather, 1, nullptr, 0)) return error;
    server->times[1]->add(server->gather->elapsed_ns);
    return 2;
  }
  return 0;
}
