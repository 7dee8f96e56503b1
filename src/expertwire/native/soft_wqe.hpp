// A work-queue entry as the engine sees it: parsed, its data segments checked, its bytes moved.
// Layouts: device/mlx5_wqe.cuh. Used by soft_execute.cpp (peers on this host) and by wire_request.cpp
// and wire_respond.cpp (peers behind a network).
#pragma once

#include <algorithm>

#include "soft_hca.hpp"
#include "trace.hpp"

constexpr u32 kMaxSegments = 63;
constexpr u64 kMaxMessageBytes = 1ull << 30;
constexpr u64 kRnrTimeoutNs = 50'000'000;
constexpr u32 kCompletionOnError = 0, kCompletionAlways = 2;

enum Opcode : u32 {
  kNop = 0x00, kWrite = 0x08, kWriteImm = 0x09, kRead = 0x10, kCompareSwap = 0x11, kFetchAdd = 0x12,
  kMaskedCompareSwap = 0x14, kMaskedFetchAdd = 0x15, kDump = 0x23,
};

struct Wqe {
  u8 bytes[kMaxSegments * 16];
  u32 opcode, opmod, num_segments, completion;
  u64 idx;
  u64 num_blocks() const { return (num_segments + 3) / 4; }
  const u8* segment(u32 i) const { return bytes + 16 * i; }
  bool masked() const { return opcode == kMaskedCompareSwap || opcode == kMaskedFetchAdd; }
  bool atomic() const { return masked() || opcode == kCompareSwap || opcode == kFetchAdd; }
};

struct Data {  // what the data segments of a WQE describe
  Segment list[kMaxSegments];
  u32 count = 0;
  u64 num_bytes = 0;
};

// The WQE at block `idx`, which may wrap at the end of the ring at any block.
void read_wqe(const ew_qp* qp, u64 idx, Wqe* wqe);

// What is wrong with it before anything is executed; a syndrome.
u32 check_wqe(const ew_qp* qp, const Wqe& wqe);

// Tells the trace of an entry: that it was executed, or what the peer's host said of it.
void trace_entry(ew::TraceKind kind, const ew_qp* qp, const Wqe& wqe, u64 begin_ns, u64 end_ns, u64 num_bytes,
                 u32 syndrome);

// Data segments from `first` on: pointers, each checked against its key, or one inline segment.
// Returns a syndrome.
u32 read_data(ew_qp* qp, Wqe* wqe, u32 first, u32 access, Data* data);

// Calls use(address, number of bytes) for the parts of the list that hold its bytes [from, from + count).
template <class Use>
void for_parts(const Data& data, u64 from, u64 count, Use use) {
  for (u32 i = 0; i < data.count && count > 0; ++i) {
    const Segment& s = data.list[i];
    if (from >= s.num_bytes) {
      from -= s.num_bytes;
      continue;
    }
    const u64 n = std::min(count, s.num_bytes - from);
    use(s.addr + from, n);
    count -= n, from = 0;
  }
}

// Moves bytes [from, from + count) between the list and contiguous memory.
void move_bytes(const Data& data, u8* remote, u64 from, u64 count, bool to_remote);

// An aligned word of 4 or 8 bytes, never seen in parts, after everything before it.
bool store_word(const u8* from, u64 num_bytes, u8* to);

// An atomic: operands as in the WQE (big-endian, 16 or 32 bytes), the old value as it lands at the requester.
struct AtomicShape {
  u32 num_bytes, num_segments;  // of the word; of the operands, 16 bytes each
};
u32 atomic_shape(u32 opcode, u32 opmod, AtomicShape* shape);  // returns a syndrome
u64 apply_atomic(u32 opcode, u32 num_bytes, const u8* operands, u8* at);

bool has_receive(const WindowPage* page);
// Receive side of WRITE_WITH_IMM: a responder CQE in the window. immediate: 4 bytes as in the WQE.
void put_receive(WindowPage* page, const u8* immediate, u64 num_bytes, u32 qpn);
