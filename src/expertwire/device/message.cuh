// What travels between a client and a server, byte by byte. message.py spells the same layout and
// a test compares every size and offset; docs/wire.md explains it.
//
//   request slot (client -> server):  BufferHead | active_experts | payload | ... | flag
//   reply slot   (server -> client):  rows | ... | ReplyHead | flag
//
// The flag is the message's seq, in the slot's last 16 bytes, so that its place does not depend on
// the message. A slot is as large as its largest message.
#pragma once

#include "target.cuh"

constexpr u32 kRequestMagic = 0x51525745;  // "EWRQ" in memory
constexpr u32 kReplyMagic = 0x50525745;    // "EWRP"
constexpr u16 kWireVersion = 1;
constexpr u64 kFlagBytes = 16;  // seq in the first 8, the rest zero

enum ReplyMode : u32 {
  kReplySum = 0,        // one row per token: the weighted sum over this server's experts
  kReplyPerExpert = 1,  // one weighted row per (token, expert), so that the client fixes the order
};

struct BufferHead {  // 128 bytes, little-endian
  u32 magic;
  u16 version, head_bytes;
  u64 seq;    // the notes' client_seed: strictly increasing per slot
  u64 epoch;  // membership epoch that the routing came from
  u32 client_id, layer;
  u32 hidden_size, data_type;
  u32 scale_type, scale_block;  // DataType of the scales and elements per scale; 0: none
  u32 num_rows, experts_per_row;
  u32 num_experts, reply_mode;
  u32 reply_type, reserved0;
  u64 active_bytes;    // the active_experts section with its padding
  u64 payload_bytes;   // hidden rows, weights, scales, each padded to 16
  u64 padding_bytes;   // how much of the two is padding
  u64 payload_checksum;  // 0: not used
  u64 reserved1, reserved2;
  u64 head_checksum;  // over the 120 bytes before it
};
static_assert(sizeof(BufferHead) == 128);

enum Reason : u32 {
  kReasonOk = 0, kReasonMagic = 1, kReasonVersion = 2, kReasonChecksum = 3, kReasonSeq = 4, kReasonLayer = 5,
  kReasonHiddenSize = 6, kReasonDataType = 7, kReasonScale = 8, kReasonRows = 9, kReasonExpertsPerRow = 10,
  kReasonNumExperts = 11, kReasonReply = 12, kReasonBytes = 13, kReasonNotHeld = 14, kReasonClient = 15,
  kReasonExpertFault = 16,
};

struct ReplyHead {  // 64 bytes, little-endian
  u32 magic;
  u16 version, head_bytes;
  u64 seq;
  u32 reason, server_id;
  u32 num_rows, reply_mode;
  u32 hidden_size, reply_type;
  u32 queue_us, experts_us;  // flag seen -> batch taken; time in the experts
  u64 epoch;
  u64 head_checksum;  // over the 56 bytes before it
};
static_assert(sizeof(ReplyHead) == 64);

// Sections of a request, in order. One definition serves packing and parsing.
struct RequestLayout {
  u64 active_offset, hidden_offset, weights_offset, scales_offset, end;
  u64 active_bytes, payload_bytes, padding_bytes;
};
EW_DEVICE RequestLayout request_layout(u32 num_rows, u32 experts_per_row, u64 row_bytes, u64 scales_per_row) {
  const u64 rows = num_rows;
  const u64 active = rows * experts_per_row * 4, hidden = rows * row_bytes, scales = rows * scales_per_row * 4;
  RequestLayout at;
  at.active_offset = sizeof(BufferHead);
  at.active_bytes = align16(active);
  at.hidden_offset = at.active_offset + at.active_bytes;
  at.weights_offset = at.hidden_offset + align16(hidden);
  at.scales_offset = at.weights_offset + align16(active);  // fp32 weights are as many bytes as ids
  at.end = at.scales_offset + align16(scales);
  at.payload_bytes = at.end - at.hidden_offset;
  at.padding_bytes = at.end - at.active_offset - (active + hidden + active + scales);
  return at;
}

// A multiply-xorshift mix over 8-byte words; guards against damage, not against an adversary.
EW_DEVICE u64 head_checksum(const void* head, u32 num_bytes) {
  const auto* words = static_cast<const u64*>(head);
  u64 sum = 0x6a09e667f3bcc909ull;
  for (u32 i = 0; i < num_bytes / 8; ++i) {
    sum = (sum ^ words[i]) * 0x9fb21c651e98df25ull;
    sum ^= sum >> 29;
  }
  return sum | 1;  // never 0, so that a zeroed head does not check
}
