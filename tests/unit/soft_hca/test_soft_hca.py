"""The software HCA: every operation, every check, errors and states."""

from __future__ import annotations

import ctypes
import struct
import time

import pytest
from tests.soft_hca_rig import ALL_ACCESS, SIZE

from expertwire.errors import HcaError
from expertwire.hca.soft import CQ_OVERRUN_IGNORE, STATE_ERR, STATE_RESET
from expertwire.hca.wqe import (
    Cqe,
    DataSegment,
    Wqe,
)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 7, 8, 9, 64, 4096, 300_001])
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_write_moves_exactly_its_bytes(rig, num_bytes, shift):
    r = rig()
    data = bytes((i * 7 + 1) % 256 for i in range(num_bytes))
    r.fill(r.src, shift, data)
    r.write(num_bytes, src=shift, dst=100 + shift)
    assert r.bytes(r.dst, 99 + shift, 1) == b"\0"
    assert r.bytes(r.dst, 100 + shift, num_bytes + 1) == data + b"\0"
    cqe = r.cqe()
    assert (cqe.opcode, cqe.wqe_counter, cqe.byte_count) == (0, 0, num_bytes)


def test_read_and_scatter_lists(rig):
    r = rig()
    r.fill(r.dst, 0, b"abcdefghij")
    lkey, base = r.src_mr.lkey, r.src.addr
    r.post(0x10, data=[DataSegment(4, lkey, base), DataSegment(6, lkey, base + 100)],
           raddr=r.dst.addr, rkey=r.rkey)
    assert r.bytes(r.src, 0, 5) == b"abcd\0" and r.bytes(r.src, 100, 7) == b"efghij\0"
    r.post(0x08, data=[DataSegment(6, lkey, base + 100), DataSegment(4, lkey, base)],
           raddr=r.dst.addr + 50, rkey=r.rkey)
    assert r.bytes(r.dst, 50, 10) == b"efghijabcd"


@pytest.mark.parametrize("count", [0, 1, 2, 4, 8, 12, 13, 28, 29, 64, 256])
@pytest.mark.parametrize("start", [0, 14, 15])
def test_inline_data_also_around_the_end_of_the_ring(rig, count, start):
    r = rig(16)
    for _ in range(start):
        r.post(0x00)
    data = bytes(range(count % 256)) if count < 256 else bytes(range(256))
    r.post(0x08, inline=data, raddr=r.dst.addr, rkey=r.rkey)
    assert r.bytes(r.dst, 0, count + 1) == data + b"\0"
    assert r.cqe().wqe_counter == start and not r.cqe().is_error


def test_zero_byte_write_and_nop_complete(rig):
    r = rig()
    r.post(0x08, raddr=r.dst.addr, rkey=r.rkey)
    assert r.cqe().wqe_counter == 0
    r.post(0x00)
    assert (r.cqe().wqe_counter, r.cqe().send_opcode) == (1, 0)


def atomic(r, opcode, segment, opmod=0, size=8, dst=0):
    r.post(opcode, atomic=segment, opmod=opmod, raddr=r.dst.addr + dst, rkey=r.rkey,
           data=[DataSegment(size, r.src_mr.lkey, r.src.addr)])


def test_atomics(rig):
    r = rig()
    r.fill(r.dst, 0, struct.pack("<Q", 40))
    atomic(r, 0x12, struct.pack(">QQ", 2, 0))
    assert struct.unpack("<QQ", r.bytes(r.dst, 0, 16)) == (42, 0)
    assert struct.unpack("<Q", r.bytes(r.src, 0, 8)) == (40,)
    atomic(r, 0x11, struct.pack(">QQ", 7, 41))
    assert struct.unpack("<Q", r.bytes(r.dst, 0, 8)) == (42,), "compare failed: unchanged"
    atomic(r, 0x11, struct.pack(">QQ", 7, 42))
    assert struct.unpack("<Q", r.bytes(r.dst, 0, 8)) == (7,)


def test_masked_atomics(rig):
    r = rig()
    r.fill(r.dst, 0, struct.pack("<I", 0xFFFFFFFF))
    atomic(r, 0x15, struct.pack(">IIII", 2, 0, 9, 9), opmod=8, size=4)
    assert struct.unpack("<I", r.bytes(r.dst, 0, 4)) == (1,)
    assert struct.unpack(">I", r.bytes(r.src, 0, 4)) == (0xFFFFFFFF,), "4-byte result: big-endian"
    r.fill(r.dst, 8, struct.pack("<Q", 0b1100))
    atomic(r, 0x15, struct.pack(">QQ", 0b1010, 2**64 - 1), opmod=9, dst=8)
    assert struct.unpack("<Q", r.bytes(r.dst, 8, 8)) == (0b0110,), "all borders: XOR"
    r.fill(r.dst, 16, struct.pack("<Q", 0x00FF_00FF))
    atomic(r, 0x15, struct.pack(">QQ", 1, 1 << 15), opmod=9, dst=16)
    assert struct.unpack("<Q", r.bytes(r.dst, 16, 8)) == (0x00FF_0100,)
    r.fill(r.dst, 24, struct.pack("<I", 0xAABBCCDD))
    atomic(r, 0x14, struct.pack(">IIII", 0x11, 0xDD, 0xFF, 0xFF), opmod=8, size=4, dst=24)
    assert struct.unpack("<I", r.bytes(r.dst, 24, 4)) == (0xAABBCC11,)
    r.fill(r.dst, 32, struct.pack("<Q", 5))
    segment = struct.pack(">QQQQ", 6, 5, 2**64 - 1, 2**64 - 1)
    atomic(r, 0x14, segment, opmod=9, dst=32)
    assert struct.unpack("<Q", r.bytes(r.dst, 32, 8)) == (6,)


def test_write_with_immediate_needs_a_receive(rig):
    r = rig()
    r.window.post_recv(1)
    r.fill(r.src, 0, b"payload!")
    wqe = dict(data=[DataSegment(8, r.src_mr.lkey, r.src.addr)], raddr=r.dst.addr, rkey=r.rkey)
    r.post(0x09, imm=0x01020304, **wqe)
    cqe = Cqe.decode(r.window.poll_recv())
    assert (cqe.opcode, cqe.imm, cqe.byte_count) == (1, 0x01020304, 8)
    assert r.window.poll_recv() is None
    r.fill(r.dst, 0, b"\0" * 8)
    r.post(0x09, **wqe)
    deadline = time.monotonic() + 3
    while not r.qp.first_error()[0] and time.monotonic() < deadline:
        r.hca.poll()
    assert r.qp.first_error() == (0x16, 1)
    assert r.bytes(r.dst, 0, 8) == b"\0" * 8, "nothing was written"
    with pytest.raises(HcaError, match="at most 64"):
        r.window.post_recv(65)


@pytest.mark.parametrize(
    ("name", "syndrome"),
    [
        ("unknown lkey", 0x04), ("before the local region", 0x04), ("after the local region", 0x04),
        ("local address overflow", 0x04), ("unknown rkey", 0x13),
        ("before the remote region", 0x13),
        ("after the remote region", 0x13), ("remote address overflow", 0x13), ("too long", 0x01),
        ("unknown opcode", 0x02), ("wrong index", 0x02), ("wrong queue pair", 0x02),
        ("opmod on a write", 0x02), ("no segments", 0x02),
    ],
)
def test_checks_fail_before_any_byte_moves(rig, name, syndrome):
    r = rig()
    r.fill(r.src, 0, b"x" * 64)
    lkey, src, dst, rkey, count = r.src_mr.lkey, r.src.addr, r.dst.addr, r.rkey, 16
    fields: dict = {}
    opcode, index = 0x08, 0
    match name:
        case "unknown lkey":
            lkey ^= 1
        case "before the local region":
            src -= 1
        case "after the local region":
            src += SIZE - 15
        case "local address overflow":
            src = 2**64 - 8
        case "unknown rkey":
            rkey ^= 1
        case "before the remote region":
            dst -= 1
        case "after the remote region":
            dst += SIZE - 15
        case "remote address overflow":
            dst = 2**64 - 8
        case "too long":
            huge = r.hca.register(src, (1 << 31) - 1, ALL_ACCESS)
            lkey, count = huge.lkey, (1 << 30) + 1
        case "unknown opcode":
            opcode = 0x1F
        case "wrong index":
            index = 1
        case "opmod on a write":
            fields["opmod"] = 1
    qpn = r.qp.info.qpn + (name == "wrong queue pair")
    raw = Wqe(opcode, index, qpn, dst, rkey, (DataSegment(count, lkey, src),), **fields).encode()
    if name == "no segments":
        raw = raw[:7] + b"\0" + raw[8:]
    r.write_blocks(0, raw)
    r.ring(1)
    r.hca.poll()
    assert r.qp.first_error() == (syndrome, 0)
    assert r.bytes(r.dst, 0, SIZE) == bytes(SIZE)
    assert r.qp.state == STATE_ERR and r.cqe().is_error


@pytest.mark.parametrize(("access", "opcode"), [(1 | 4 | 8, 0x08), (1 | 2 | 8, 0x10)])
def test_missing_remote_access(rig, access, opcode):
    r = rig(access=access)
    r.post(opcode, data=[DataSegment(8, r.src_mr.lkey, r.src.addr)], raddr=r.dst.addr, rkey=r.rkey)
    assert r.qp.first_error()[0] == 0x13


def test_missing_atomic_access_and_misalignment(rig):
    r = rig(access=1 | 2 | 4)
    atomic(r, 0x12, struct.pack(">QQ", 1, 0))
    assert r.qp.first_error()[0] == 0x13
    r = rig()
    atomic(r, 0x12, struct.pack(">QQ", 1, 0), dst=4)
    assert r.qp.first_error()[0] == 0x12


def test_another_protection_domain_is_refused(rig):
    r = rig()
    foreign = r.hca.register(r.src.addr, SIZE, ALL_ACCESS, pd=r.hca.alloc_pd())
    r.post(0x08, data=[DataSegment(8, foreign.lkey, r.src.addr)], raddr=r.dst.addr, rkey=r.rkey)
    assert r.qp.first_error()[0] == 0x04


def test_after_an_error_everything_posted_is_flushed_in_order(rig):
    r = rig(cq_flags=CQ_OVERRUN_IGNORE)
    r.write(ring=False)
    r.post(0x1F, ring=False)
    r.write(ring=False, fm_ce_se=0)
    r.write()
    seen = [(c.wqe_counter, c.syndrome) for c in map(r.cqe, range(4))]
    assert seen == [(0, 0), (1, 0x02), (2, 0x05), (3, 0x05)]
    r.write()
    assert (r.cqe(4).wqe_counter, r.cqe(4).syndrome) == (4, 0x05), "later posts flush too"
    assert r.qp.first_error() == (0x02, 1)


def test_reset_starts_over(rig):
    r = rig()
    r.post(0x1F)
    r.qp.modify(STATE_RESET)
    assert ctypes.string_at(r.qp.info.cq_addr, 64) == b"\xff" * 64
    assert r.qp.indices() == (0, 0)
    for state in (1, 2, 3):
        r.qp.modify(state)
    r.next = 0
    r.fill(r.src, 0, b"again...")
    r.write()
    assert r.bytes(r.dst, 0, 8) == b"again..." and r.qp.first_error() == (0, 0)


def test_posting_before_rts_does_nothing(rig):
    r = rig()
    r.qp.modify(STATE_RESET)
    r.write()
    assert r.bytes(r.dst, 0, 8) == bytes(8) and r.cqe().opcode == 15
    with pytest.raises(HcaError, match="cannot go"):
        r.qp.modify(3)
