"""Work-queue entries, doorbells and completions in pure Python: encode, decode, name.

Written independently of device/mlx5_wqe.cuh from the same source (rdma-core mlx5dv.h), so that
tests can hold one against the other. All multi-byte fields are big-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

WQE_BYTES = 64

OPCODE_NAMES = {
    0x00: "NOP", 0x08: "RDMA_WRITE", 0x09: "RDMA_WRITE_IMM", 0x0A: "SEND", 0x0B: "SEND_IMM",
    0x10: "RDMA_READ", 0x11: "ATOMIC_CS", 0x12: "ATOMIC_FA", 0x14: "MASKED_CS",
    0x15: "MASKED_FA", 0x23: "DUMP", 0x25: "UMR",
}
# rdma-core mlx5dv.h MLX5_CQE_SYNDROME_*
SYNDROMES = {
    0x01: "local length error", 0x02: "local queue-pair operation error",
    0x04: "local protection error", 0x05: "flushed: an earlier entry failed",
    0x06: "memory window bind error", 0x10: "bad response", 0x11: "local access error",
    0x12: "remote invalid request", 0x13: "remote access error", 0x14: "remote operation error",
    0x15: "transport retry exceeded: the peer does not answer", 0x16: "receiver not ready",
    0x22: "remote aborted",
}


def syndrome_name(syndrome: int) -> str:
    return SYNDROMES.get(syndrome, "general error")


@dataclass(frozen=True)
class DataSegment:
    """A pointer segment: num_bytes at addr with lkey."""

    num_bytes: int
    lkey: int
    addr: int


@dataclass(frozen=True)
class Wqe:
    """One decoded work-queue entry of an RC queue pair."""

    opcode: int
    index: int
    qpn: int
    raddr: int | None = None
    rkey: int | None = None
    data: tuple[DataSegment, ...] = ()
    inline: bytes | None = None
    atomic: bytes = b""  # the atomic segment(s) as they are
    opmod: int = 0
    fm_ce_se: int = 0x08
    imm: int = 0
    num_segments: int = field(default=0)

    @property
    def name(self) -> str:
        return OPCODE_NAMES.get(self.opcode, f"opcode {self.opcode:#04x}")

    def encode(self) -> bytes:
        """The entry's bytes, a multiple of 16 (not padded to a block)."""
        body = b""
        if self.raddr is not None:
            body += struct.pack(">QII", self.raddr, self.rkey or 0, 0)
        body += self.atomic
        for segment in self.data:
            body += struct.pack(">IIQ", segment.num_bytes, segment.lkey, segment.addr)
        if self.inline is not None:
            raw = struct.pack(">I", 0x80000000 | len(self.inline)) + self.inline
            body += raw.ljust(-(-len(raw) // 16) * 16, b"\0")
        num_segments = self.num_segments or 1 + len(body) // 16
        ctrl = struct.pack(
            ">IIII", self.opmod << 24 | (self.index & 0xFFFF) << 8 | self.opcode,
            self.qpn << 8 | num_segments, self.fm_ce_se, self.imm,
        )
        return ctrl + body

    @classmethod
    def decode(cls, raw: bytes) -> Wqe:
        """Reads the entry that starts at raw[0]. Raises ValueError if it is cut off."""
        if len(raw) < 16:
            raise ValueError(f"a work-queue entry has at least 16 bytes, not {len(raw)}")
        first, second, flags, imm = struct.unpack_from(">IIII", raw)
        opcode, num_segments = first & 0xFF, second & 0x3F
        if len(raw) < num_segments * 16:
            raise ValueError(f"entry of {num_segments} segments cut off after {len(raw)} bytes")
        at = 16
        raddr = rkey = None
        atomic, inline = b"", None
        if opcode in (0x08, 0x09, 0x10, 0x11, 0x12, 0x14, 0x15) and num_segments > 1:
            raddr, rkey, _ = struct.unpack_from(">QII", raw, at)
            at += 16
        opmod = first >> 24
        if opcode in (0x11, 0x12, 0x14, 0x15):
            size = 32 if opcode == 0x14 and opmod == 9 else 16
            atomic, at = raw[at : at + size], at + size
            if at > num_segments * 16:
                raise ValueError(f"atomic entry of {num_segments} segments is cut off")
        data = []
        while at < num_segments * 16:
            (count,) = struct.unpack_from(">I", raw, at)
            if count & 0x80000000:
                length = count & 0x7FFFFFFF
                if at + 4 + length > num_segments * 16:
                    raise ValueError(f"{length} inline bytes do not fit {num_segments} segments")
                inline = bytes(raw[at + 4 : at + 4 + length])
                break
            count, lkey, addr = struct.unpack_from(">IIQ", raw, at)
            data.append(DataSegment(count, lkey, addr))
            at += 16
        return cls(
            opcode, first >> 8 & 0xFFFF, second >> 8, raddr, rkey, tuple(data), inline,
            bytes(atomic), opmod, flags & 0xFF, imm, num_segments,
        )


def doorbell_record(next_index: int) -> bytes:
    """The 8-byte record after posting everything below next_index: receive word 0, send word."""
    return struct.pack(">II", 0, next_index & 0xFFFF)


def doorbell_register(next_index: int, qpn: int) -> bytes:
    """The 8 bytes that go to the doorbell register."""
    return struct.pack(">II", (next_index & 0xFFFF) << 8, qpn << 8)


@dataclass(frozen=True)
class Cqe:
    """A decoded 64-byte completion."""

    opcode: int
    owner: int
    wqe_counter: int
    qpn: int
    send_opcode: int
    byte_count: int
    syndrome: int
    imm: int

    @property
    def is_error(self) -> bool:
        return self.opcode in (13, 14)

    @classmethod
    def decode(cls, raw: bytes) -> Cqe:
        if len(raw) != 64:
            raise ValueError(f"a completion has 64 bytes, not {len(raw)}")
        (sop_qpn,) = struct.unpack_from(">I", raw, 56)
        (counter,) = struct.unpack_from(">H", raw, 60)
        opcode = raw[63] >> 4
        return cls(
            opcode, raw[63] & 1, counter, sop_qpn & 0xFFFFFF, sop_qpn >> 24,
            struct.unpack_from(">I", raw, 44)[0], raw[55] if opcode in (13, 14) else 0,
            struct.unpack_from(">I", raw, 36)[0],
        )
