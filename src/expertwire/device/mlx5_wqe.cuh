// mlx5 work-queue entries, doorbells and completions: bytes only, no policy.
//
// Layouts: rdma-core providers/mlx5/mlx5dv.h (struct mlx5_wqe_ctrl_seg, mlx5_wqe_raddr_seg,
// mlx5_wqe_data_seg, mlx5_wqe_inl_data_seg, mlx5_wqe_atomic_seg, struct mlx5_cqe64). Every
// multi-byte field is big-endian. hca/wqe.py spells the same bytes; tests compare the two.
#pragma once

#include "target.cuh"

constexpr u32 kWqeBytes = 64;             // one basic block of a send queue
constexpr u32 kMaxChunkBytes = 1u << 30;  // log_msg_max = 30 of the QP context

enum Mlx5Opcode : u32 {
  kOpNop = 0x00,
  kOpRdmaWrite = 0x08,
  kOpRdmaWriteImm = 0x09,
  kOpRdmaRead = 0x10,
  kOpAtomicCompareSwap = 0x11,
  kOpAtomicFetchAdd = 0x12,
  kOpMaskedFetchAdd = 0x15,
};
constexpr u32 kCompletionAlways = 2u << 2;  // fm_ce_se: [3:2] completion mode, 2 = always a CQE
constexpr u32 kOpmodMasked4 = 8u << 24, kOpmodMasked8 = 9u << 24;

enum CqeOpcode : u32 { kCqeRequesterError = 13, kCqeResponderError = 14, kCqeInvalid = 15 };

struct WqeSegments {  // the first 48 bytes of a WQE as three 16-byte stores
  Vec16 ctrl, raddr, data;
};

// num_segments: length of the whole WQE in 16-byte units, ctrl included.
EW_DEVICE Vec16 wqe_ctrl_segment(u32 opcode_with_opmod, u64 wqe_idx, u32 qpn, u32 num_segments, u32 fm_ce_se,
                                 u32 imm_be = 0) {
  // The index field is 16 bits wide: mask it, or a long-lived queue spills into opmod.
  const u32 index = static_cast<u32>(wqe_idx & 0xffff) << 8;
  return {{bswap32(opcode_with_opmod | index), bswap32((qpn << 8) | num_segments), bswap32(fm_ce_se), imm_be}};
}
// rkey_be, lkey_be: keys as the tables hold them, already big-endian.
EW_DEVICE Vec16 wqe_raddr_segment(u64 remote_addr, u32 rkey_be) {
  const u64 addr_be = bswap64(remote_addr);
  return {{static_cast<u32>(addr_be), static_cast<u32>(addr_be >> 32), rkey_be, 0}};
}
EW_DEVICE Vec16 wqe_data_segment(u64 local_addr, u32 num_bytes, u32 lkey_be) {
  const u64 addr_be = bswap64(local_addr);
  return {{bswap32(num_bytes), lkey_be, static_cast<u32>(addr_be), static_cast<u32>(addr_be >> 32)}};
}
// Inline data of at most 12 bytes: length with bit 31 set, then the bytes as they are.
EW_DEVICE Vec16 wqe_inline_segment(u64 value, u32 num_bytes) {
  return {{bswap32(num_bytes | 0x80000000u), static_cast<u32>(value), static_cast<u32>(value >> 32), 0}};
}
EW_DEVICE Vec16 wqe_atomic_segment(u64 swap_or_add, u64 compare) {
  const u64 a = bswap64(swap_or_add), c = bswap64(compare);
  return {{static_cast<u32>(a), static_cast<u32>(a >> 32), static_cast<u32>(c), static_cast<u32>(c >> 32)}};
}
// 4-byte masked fetch-add: addend, then the bits whose carry out is dropped (0: plain add).
EW_DEVICE Vec16 wqe_masked_add4_segment(u32 add, u32 field_boundary) {
  return {{bswap32(add), bswap32(field_boundary), 0, 0}};
}

// Doorbell record: word 1 (send counter) of the 8-byte record, low 16 bits, big-endian.
EW_DEVICE u32 doorbell_record(u64 next_wqe_idx) { return bswap32(static_cast<u32>(next_wqe_idx & 0xffff)); }
// Doorbell register: the 8 bytes that a ctrl segment starts with, opcode and length zero.
EW_DEVICE u64 doorbell_register(u64 next_wqe_idx, u32 qpn) {
  const u32 low = bswap32(static_cast<u32>(next_wqe_idx & 0xffff) << 8);
  return (static_cast<u64>(bswap32(qpn << 8)) << 32) | low;
}

// The last 4 bytes of a CQE hold wqe_counter, signature and op_own: one load sees all of them.
struct CqeTail {
  u32 wqe_counter;  // index of the first block of the completed WQE, 16 bits
  u32 opcode;
};
EW_DEVICE CqeTail cqe_tail(u32 word15) {
  const u32 w = bswap32(word15);
  return {w >> 16, (w >> 4) & 0xf};
}
// Byte 55 of an error CQE.
EW_DEVICE u32 cqe_syndrome(u32 word13) { return word13 >> 24; }
