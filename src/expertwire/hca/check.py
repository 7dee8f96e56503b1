"""What is wrong with a work-queue entry: what an adapter would refuse, and what it would ignore.

Judged by the bytes alone, without the memory that the keys stand for: a wrong key or address is
for the HCA to find. Layouts and limits: rdma-core mlx5dv.h; log_msg_max of the queue pair is 30.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from .wqe import OPCODE_NAMES

MAX_MESSAGE_BYTES = 1 << 30
NUM_INDICES = 1 << 16
END_OF_LIST = 0x100  # lkey that ends a list of data segments
READ, SENDS = 0x10, (0x0A, 0x0B)
RDMA = (0x08, 0x09, READ)
ATOMICS = (0x11, 0x12, 0x14, 0x15)
MASKED = (0x14, 0x15)
WITH_IMMEDIATE = (0x09, 0x0B)
SPECIAL = {0x23: "DUMP", 0x25: "UMR"}  # only on queue pairs that were made for it


@dataclass
class Verdict:
    """refused: why an adapter would fail the entry. ignored: set, but without effect."""

    refused: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def num_blocks(raw: bytes) -> int:
    """Blocks of 64 bytes that the entry at raw[0] takes; 1 for one without a length."""
    return max(1, -(-(raw[7] & 0x3F) // 4))


def check_entry(raw: bytes, index: int, qpn: int | None, blocks_left: int) -> Verdict:
    """Judges the entry whose blocks begin at raw[0].

    index: the running index that it should have (its low 16 bits are compared). qpn: of the queue,
    None: not known. blocks_left: from here to the producer index.
    """
    verdict = Verdict()
    first, second = struct.unpack_from(">II", raw)
    opcode, segments = first & 0xFF, second & 0x3F
    _check_control(raw, verdict, index, qpn)
    if segments == 0:
        verdict.refused.append("DS is 0: an entry has one segment at least")
    elif num_blocks(raw) > blocks_left:
        verdict.refused.append(
            f"DS {segments} is too large: {num_blocks(raw)} blocks, and {blocks_left} are left "
            "before the producer index"
        )
    elif opcode in OPCODE_NAMES:
        _check_segments(raw[: 16 * segments], verdict)
    return verdict


def _check_control(raw: bytes, verdict: Verdict, index: int, qpn: int | None) -> None:
    first, second, third, imm = struct.unpack_from(">IIII", raw)
    opcode = first & 0xFF
    if (found := first >> 8 & 0xFFFF) != index % NUM_INDICES:
        verdict.refused.append(f"wrong index {found}: this place is entry {index % NUM_INDICES}")
    if qpn is not None and second >> 8 != qpn:
        verdict.refused.append(f"wrong QPN {second >> 8:#08x}: the queue is {qpn:#08x}")
    if opcode not in OPCODE_NAMES:
        verdict.refused.append(f"bad opcode {opcode:#04x}")
    elif opcode in SPECIAL:
        verdict.ignored.append(f"{SPECIAL[opcode]} is refused unless the queue was made for it")
    if second & 0xC0:
        verdict.refused.append(f"reserved bits {second & 0xC0:#04x} beside DS are set")
    if third & 0x11:  # fm_ce_se: fence [7:5], completion [3:2], solicited [1]
        verdict.refused.append(f"reserved bits {third & 0x11:#04x} of fm_ce_se are set")
    if opcode not in ATOMICS and first >> 24:
        verdict.refused.append(f"opmod {first >> 24} where only 0 is known")
    if third >> 24:
        verdict.ignored.append("a signature, which these queues do not check")
    if third >> 8 & 0xFFFF:
        verdict.ignored.append("a stream channel, which only DCI queues have")
    if imm and opcode in OPCODE_NAMES and opcode not in (*WITH_IMMEDIATE, *SPECIAL):
        verdict.ignored.append(f"immediate {imm:#x} with an opcode that sends none")


def _check_segments(entry: bytes, verdict: Verdict) -> None:
    opcode, opmod = entry[3], entry[0]
    at, addr = 16, 0
    if opcode in (*RDMA, *ATOMICS):
        if len(entry) < 32:
            verdict.refused.append("DS 1 is too small: the remote address is missing")
            return
        addr, rkey, reserved = struct.unpack_from(">QII", entry, 16)
        at = 32
        if reserved:
            verdict.refused.append(f"reserved word {reserved:#x} after the rkey is not 0")
        if rkey == 0 and opcode in ATOMICS:
            verdict.refused.append("rkey 0 is no key")
    if opcode in ATOMICS:
        width, num_atomic = _atomic_shape(opcode, opmod)
        if opmod not in ((8, 9) if opcode in MASKED else (0,)):
            verdict.refused.append(f"opmod {opmod} does not go with this atomic")
        if addr % width:
            verdict.refused.append(f"misaligned atomic: {addr:#x} is no multiple of {width}")
        at += 16 * num_atomic
        if at + 16 > len(entry):
            verdict.refused.append(
                f"DS {len(entry) // 16} is too small: this atomic has {at // 16 + 1} segments"
            )
            return
        total = _check_data(entry, at, verdict, inline_allowed=False)
        if total is not None and total != width:
            verdict.refused.append(f"an atomic of {width} bytes returns them to {total} bytes")
    elif opcode in (*RDMA, *SENDS):
        total = _check_data(entry, at, verdict, inline_allowed=opcode != READ)
        if total is not None and opcode in RDMA and total:
            if addr + total > 1 << 64:
                verdict.refused.append("the remote range goes beyond 2^64")
            if entry[24:28] == b"\0\0\0\0":
                verdict.refused.append("rkey 0 is no key")


def _atomic_shape(opcode: int, opmod: int) -> tuple[int, int]:
    """(bytes of the word, atomic segments)."""
    width = 4 if opcode in MASKED and opmod == 8 else 8
    return width, 2 if opcode == 0x14 and width == 8 else 1


def _check_data(entry: bytes, at: int, verdict: Verdict, inline_allowed: bool) -> int | None:
    """Bytes that the data segments from `at` on describe, None if they cannot be read."""
    total, begin = 0, at
    while at < len(entry):
        (word,) = struct.unpack_from(">I", entry, at)
        if word & 0x80000000:
            return _check_inline(entry, at, begin, verdict, inline_allowed)
        count, lkey, addr = struct.unpack_from(">IIQ", entry, at)
        at += 16
        if lkey == END_OF_LIST:
            if at < len(entry):
                verdict.ignored.append(f"{(len(entry) - at) // 16} segments after the list's end")
            break
        if count == 0:
            verdict.refused.append("byte count 0 means 2^31 bytes, more than a message has")
            count = 1 << 31
        if lkey == 0:
            verdict.refused.append("lkey 0 is no key")
        if addr + count > 1 << 64:
            verdict.refused.append("the local range goes beyond 2^64")
        total += count
    if total > MAX_MESSAGE_BYTES:
        verdict.refused.append(f"{total} bytes; a message has 2^30 at most")
    return total


def _check_inline(
    entry: bytes, at: int, begin: int, verdict: Verdict, allowed: bool
) -> int | None:
    length = struct.unpack_from(">I", entry, at)[0] & 0x7FFFFFFF
    if not allowed:
        verdict.refused.append("inline data where a result is to be stored")
    elif at != begin:
        verdict.refused.append("inline data after a pointer segment")
    elif at + 4 + length > len(entry):
        verdict.refused.append(
            f"inline overrun: {length} bytes do not fit the {len(entry) - at - 4} of DS "
            f"{len(entry) // 16}"
        )
    else:
        return length
    return None
