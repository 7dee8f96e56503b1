// libFuzzer target: any bytes in a client's request slot, in front of the server's poll and gather.
//
// Input: u8 control | the slot's bytes. Unless control says otherwise the head's checksum, and its
// seq, are put right, so that mutations of the other fields are looked at. The slot lies between
// pages that nobody may touch, and every table has exactly the size that the server gives it.
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "fiber.hpp"
#include "fuzz.hpp"
#include "server_gather.cuh"
#include "server_poll.cuh"

namespace {

constexpr u32 kLayers = 3, kHidden = 24, kExperts = 7, kMaxRows = 16, kTopK = 4, kClient = 5, kScaleBlock = 16;
constexpr u32 kMinRows = 3;

u8* guarded_page() {
  auto* space = static_cast<u8*>(mmap(nullptr, 3 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  require(mprotect(space + kPage, kPage, PROT_READ | PROT_WRITE) == 0, "memory");
  return space + kPage;
}

template <typename T>
u64 addr(std::vector<T>& table) {
  return reinterpret_cast<u64>(table.data());
}

template <auto kKernel, typename Args>
void run(const Args& args, const char* what) {
  const ew::LaunchSpec spec = {[](const void* a) { kKernel(*static_cast<const Args*>(a)); }, &args, 1, 1, 1};
  require(ew::run_fast(&spec, 1, [](void*) {}, nullptr) == 0, what);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, size_t size) {
  static u8* page = guarded_page();
  if (size < 2) return 0;
  const u32 control = data[0];
  ++data, --size;
  const RequestLayout largest = request_layout(kMaxRows, kTopK, kHidden * 4, 2);
  const u64 slot_bytes = largest.end + kFlagBytes;
  u8* recv = page + kPage - slot_bytes;  // ends where nobody may read
  memset(page, 0, kPage);
  memcpy(recv, data, size < slot_bytes ? size : slot_bytes);
  auto* head = reinterpret_cast<BufferHead*>(recv);
  auto* flag = reinterpret_cast<u64*>(recv + slot_bytes - kFlagBytes);
  if (!(control & 1)) *flag = head->seq;
  if (!(control & 2)) head->head_checksum = head_checksum(head, sizeof(BufferHead) - 8);

  ServerSlot slot = {};
  slot.recv_addr = reinterpret_cast<u64>(recv), slot.recv_slot_bytes = slot_bytes;
  slot.reply_slot_bytes = kMaxRows * kTopK * kHidden * 4 + sizeof(ReplyHead) + kFlagBytes;
  slot.client_id = kClient, slot.open = 1, slot.max_rows = kMaxRows, slot.max_pairs = kMaxRows * kTopK;
  ServerMessage message;
  u32 found[5] = {}, state = 0;
  ServerPollArgs poll = {};
  poll.slots = reinterpret_cast<u64>(&slot), poll.messages = reinterpret_cast<u64>(&message);
  poll.slot_state = reinterpret_cast<u64>(&state);
  poll.num_messages = reinterpret_cast<u64>(found), poll.num_rows = poll.num_messages + 4;
  poll.num_pairs = poll.num_messages + 8, poll.layer = poll.num_messages + 12;
  poll.model = {kLayers, kHidden, kExperts, kFloat32, kTopK, 1, kScaleBlock, 0};
  poll.num_slots = poll.max_messages = 1, poll.max_rows = 1024;
  run<server_poll>(poll, "polling");
  if (found[0] == 0) return 0;
  require(found[0] == 1 && message.reason <= kReasonExpertFault, "one message");
  require((message.reason == kReasonOk) == (found[1] > 0), "rows of what was taken only");
  require(found[1] <= kMaxRows && found[2] <= kMaxRows * kTopK, "no more than a slot holds");
  require(found[1] == 0 || found[3] < kLayers, "a layer of the model");

  const u32 num_pairs = found[2];
  const u32 num_local = 3, places = num_pairs + (kMinRows - 1) * (num_pairs < num_local ? num_pairs : num_local);
  std::vector<i32> local_expert = {-1, 0, -1, 1, 2, -1, -1}, pair_expert(num_pairs), position(num_pairs),
                   reply_row(num_pairs);
  std::vector<u32> offsets(num_local + 1), cursor(num_local);
  std::vector<u64> expert_rows(kLayers * num_local);
  std::vector<u8> rows(places * kHidden * 4);
  std::vector<float> scales(places * ceil_div(kHidden, kScaleBlock));
  ServerGatherArgs gather = {};
  gather.slots = poll.slots, gather.messages = poll.messages, gather.local_expert = addr(local_expert);
  gather.pair_expert = addr(pair_expert), gather.expert_offsets = addr(offsets), gather.cursor = addr(cursor);
  gather.pair_position = addr(position), gather.pair_reply_row = addr(reply_row), gather.gathered = addr(rows);
  gather.gathered_scales = addr(scales), gather.expert_rows = addr(expert_rows);
  gather.num_messages = poll.num_messages, gather.layer = poll.layer;
  gather.output_type = control & 4 ? u32{kFloat32} : 0;  // fp8 rows are gathered as fp32, or as they came
  gather.num_local = num_local, gather.num_experts = kExperts, gather.min_rows = kMinRows;
  run<server_gather>(gather, "gathering");
  require(offsets[num_local] <= places, "gathered rows fit");
  if (message.reason == kReasonOk)
    for (u32 i = 0; i < num_pairs; ++i)
      require(position[i] < static_cast<i32>(places) && position[i] >= -1, "a place among the gathered");
  return 0;
}
