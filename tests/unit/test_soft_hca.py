"""The software HCA driven by hand: every operation, every check, doorbells, errors, waiting."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time

import pytest

from expertwire.errors import ConfigError, HcaError
from expertwire.hca import open_hca
from expertwire.hca.soft import CQ_OVERRUN_IGNORE, STATE_ERR, STATE_RESET
from expertwire.hca.wqe import (
    Cqe,
    DataSegment,
    Wqe,
    doorbell_record,
    doorbell_register,
)

SIZE = 1 << 20
ALL_ACCESS = 15


class Rig:
    """One HCA with a queue pair to itself: `src` is local, `dst` is what the peer owns."""

    def __init__(self, depth=64, access=ALL_ACCESS, **qp_options):
        self.stack = contextlib.ExitStack()
        self.hca = open_hca("soft", thread=False)
        self.src, self.dst = self.hca.alloc(SIZE), self.hca.alloc(SIZE)
        self.src_mr = self.hca.register(self.src.addr, SIZE, ALL_ACCESS)
        self.dst_mr = self.hca.register(self.dst.addr, SIZE, access)
        self.window = self.hca.create_window()
        self.rkey = self.window.publish(self.dst_mr, 0)
        self.peer = self.hca.import_peer(self.window.fd, self.hca.wake_fd, [self.dst.fd])
        self.qp = self.hca.create_qp(depth, **qp_options)
        self.qp.connect(self.peer, self.qp.info.qpn)
        self.next = 0

    def close(self):
        self.qp.destroy()
        self.peer.close()
        self.window.close()
        self.hca.close()
        self.src.close()
        self.dst.close()

    def write_blocks(self, index, raw):
        info = self.qp.info
        for block in range(-(-len(raw) // 64)):
            slot = (index + block) % info.num_wqe
            ctypes.memmove(info.sq_addr + slot * 64, raw[block * 64 : block * 64 + 64],
                           len(raw[block * 64 : block * 64 + 64]))

    def ring(self, index, record=True, register=True, offset=0x800):
        info = self.qp.info
        if record:
            ctypes.memmove(info.dbrec_addr, doorbell_record(index), 8)
        if register:
            ctypes.memmove(info.uar_addr + offset, doorbell_register(index, info.qpn), 8)

    def post(self, opcode, *, data=None, inline=None, raddr=None, rkey=None, ring=True, **fields):
        wqe = Wqe(opcode, self.next, self.qp.info.qpn, raddr, rkey,
                  tuple(data or ()), inline, **fields)
        raw = wqe.encode()
        self.write_blocks(self.next, raw)
        self.next += -(-len(raw) // 64)
        if ring:
            self.ring(self.next)
            while self.hca.poll(1000):
                pass
        return wqe

    def write(self, num_bytes=8, src=0, dst=0, **fields):
        return self.post(
            0x08, data=[DataSegment(num_bytes, self.src_mr.lkey, self.src.addr + src)],
            raddr=self.dst.addr + dst, rkey=self.rkey, **fields,
        )

    def cqe(self, entry=0):
        return Cqe.decode(ctypes.string_at(self.qp.info.cq_addr + entry * 64, 64))

    def fill(self, buffer, at, data):
        ctypes.memmove(buffer.addr + at, data, len(data))

    def bytes(self, buffer, at, count):
        return ctypes.string_at(buffer.addr + at, count)


@pytest.fixture
def rig():
    made = []

    def make(*args, **options):
        made.append(Rig(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


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


@pytest.mark.parametrize("form", ["both", "record", "register", "alternate", "whole WQE"])
def test_every_doorbell_form(rig, form):
    r = rig(16)
    for i in range(200):
        r.fill(r.src, 0, struct.pack("<Q", i + 1))
        wqe = r.write(ring=False)
        if form == "whole WQE":
            r.ring(r.next, register=False)
            ctypes.memmove(r.qp.info.uar_addr + 0x800, wqe.encode().ljust(64, b"\0"), 64)
        else:
            offset = 0x900 if form == "alternate" and i % 2 else 0x800
            r.ring(r.next, record=form != "register", register=form != "record", offset=offset)
        r.hca.poll()
        assert struct.unpack("<Q", r.bytes(r.dst, 0, 8)) == (i + 1,)


def test_old_doorbells_are_ignored_and_a_stale_register_is_no_news(rig):
    r = rig(16)
    r.write()
    for _ in range(100):
        r.write(ring=False)
        r.ring(r.next, register=False)  # the register still says 1
        r.hca.poll()
    r.ring(r.next - 3)
    assert r.hca.poll() == 0
    assert r.qp.first_error() == (0, 0) and r.qp.indices() == (101, 101)


def test_a_jump_beyond_the_ring_is_an_error_once(rig):
    r = rig(16)
    r.ring(100)
    r.hca.poll()
    assert r.qp.first_error()[0] == 0x02
    count = r.hca.stats()["error_cqes"]
    for _ in range(50):
        r.hca.poll()
    assert r.hca.stats()["error_cqes"] == count


def test_nothing_beyond_the_producer_index_is_read(rig):
    r = rig(16)
    ctypes.memset(r.qp.info.sq_addr, 0xEE, 16 * 64)
    r.write()
    assert r.qp.first_error() == (0, 0) and r.qp.indices() == (1, 1)


def test_more_than_65536_entries(rig):
    r = rig(128)
    for _ in range(66_000 // 100):
        for _ in range(100):
            r.post(0x00, ring=False)
        r.ring(r.next)
        while r.hca.poll(1000):
            pass
    assert r.cqe().wqe_counter == (r.next - 1) & 0xFFFF and r.qp.first_error() == (0, 0)


def test_ring_cq_owner_bit_and_overrun(rig):
    r = rig(num_cqe=4, cq_flags=0)
    consumer = ctypes.c_uint32.from_address(r.qp.info.cq_dbrec_addr)
    for i in range(12):
        r.post(0x00)
        cqe = r.cqe(i % 4)
        assert (cqe.wqe_counter, cqe.owner) == (i, i // 4 & 1)
        consumer.value = int.from_bytes((i + 1).to_bytes(4, "big"), "little")
    for _ in range(5):
        r.post(0x00)
    assert r.qp.state == STATE_ERR


def test_revoked_keys_stop_the_peer(rig):
    r = rig()
    r.window.revoke(r.rkey)
    r.write()
    assert r.qp.first_error()[0] == 0x13 and r.bytes(r.dst, 0, 8) == bytes(8)
    r = rig()
    r.fill(r.src, 0, b"late....")
    r.hca.revoke(r.dst_mr)
    r.write()
    assert r.qp.first_error()[0] == 0x13 and r.bytes(r.dst, 0, 8) == bytes(8)


def test_lost_peer_ends_with_transport_retry_exceeded(rig):
    r = rig()
    r.peer.lost()
    r.write()
    assert r.qp.first_error() == (0x15, 0)


def test_a_large_write_does_not_starve_another_queue():
    r = Rig()
    try:
        big_src, big_dst = r.hca.alloc(64 << 20), r.hca.alloc(64 << 20)
        src_mr = r.hca.register(big_src.addr, 64 << 20, ALL_ACCESS)
        dst_mr = r.hca.register(big_dst.addr, 64 << 20, ALL_ACCESS)
        window = r.hca.create_window()
        rkey = window.publish(dst_mr, 0)
        peer = r.hca.import_peer(window.fd, r.hca.wake_fd, [big_dst.fd])
        big = r.hca.create_qp(16)
        big.connect(peer, 1)
        raw = Wqe(8, 0, big.info.qpn, big_dst.addr, rkey,
                  (DataSegment(64 << 20, src_mr.lkey, big_src.addr),)).encode()
        ctypes.memmove(big.info.sq_addr, raw, len(raw))
        ctypes.memmove(big.info.dbrec_addr, doorbell_record(1), 8)
        r.hca.poll(1)
        r.fill(r.src, 0, b"small...")
        r.write(ring=False)
        r.ring(r.next)
        for _ in range(4):
            r.hca.poll(2)
        assert r.bytes(r.dst, 0, 8) == b"small..."
        assert big.indices() == (1, 0), "the large one is still on its way"
        while r.hca.poll(100):
            pass
        assert big.indices() == (1, 1)
        big.destroy()
        peer.close()
        window.close()
        big_src.close()
        big_dst.close()
    finally:
        r.close()


def test_wait_sees_words_completions_interrupts_and_time():
    hca = open_hca("soft")
    try:
        word = ctypes.c_uint64()
        addr = ctypes.addressof(word)
        start = time.monotonic()
        assert hca.wait([addr], [0], spin_ns=0, timeout_ns=50_000_000) is None
        assert time.monotonic() - start >= 0.05
        threading.Timer(0.05, hca.interrupt).start()
        assert hca.wait([addr], [0], spin_ns=0, timeout_ns=5_000_000_000) is None
        assert time.monotonic() - start < 3
        assert hca.wait([addr, addr], [0, 1], spin_ns=0, timeout_ns=0) == 1
    finally:
        hca.close()


def test_a_sleeper_is_woken_by_its_own_completion():
    r = Rig()
    hca = open_hca("soft", thread=True)
    try:
        window = hca.create_window()
        dst_mr = hca.register(r.dst.addr, SIZE, ALL_ACCESS)
        src_mr = hca.register(r.src.addr, SIZE, ALL_ACCESS)
        rkey = window.publish(dst_mr, 0)
        peer = hca.import_peer(window.fd, hca.wake_fd, [r.dst.fd])
        qp = hca.create_qp(16)
        qp.connect(peer, 1)

        def post():
            raw = Wqe(8, 0, qp.info.qpn, r.dst.addr, rkey,
                      (DataSegment(8, src_mr.lkey, r.src.addr),)).encode()
            ctypes.memmove(qp.info.sq_addr, raw, len(raw))
            ctypes.memmove(qp.info.dbrec_addr, doorbell_record(1), 8)
            hca.kick()

        threading.Timer(0.1, post).start()
        start = time.monotonic()
        tail = qp.info.cq_addr + 56
        assert hca.wait([tail], [2**64 - 1], spin_ns=0, timeout_ns=5_000_000_000) == 0
        assert time.monotonic() - start < 3
        qp.destroy()
        peer.close()
        window.close()
    finally:
        hca.close()
        r.close()


def test_an_idle_engine_uses_next_to_no_cpu():
    hca = open_hca("soft")
    try:
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.05
    finally:
        hca.close()


def test_a_memfd_that_can_shrink_is_not_mapped():
    import os

    hca = open_hca("soft", thread=False)
    try:
        window = hca.create_window()
        fd = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096)
        with pytest.raises(HcaError, match="can shrink"):
            hca.import_peer(window.fd, hca.wake_fd, [fd])
        with pytest.raises(HcaError, match="window"):
            hca.import_peer(fd, hca.wake_fd, [])
        os.close(fd)
        window.close()
    finally:
        hca.close()


def test_names_and_limits():
    with pytest.raises(ConfigError, match="not part of this release"):
        open_hca("mlx5:mlx5_0")
    with pytest.raises(ConfigError, match="no hca named"):
        open_hca("nothing")
    hca = open_hca("soft", thread=False)
    try:
        for depth in (8, 100, 65536):
            with pytest.raises(HcaError, match="power of two"):
                hca.create_qp(depth)
        with pytest.raises(HcaError, match="cannot register"):
            hca.register(0x1000, 0, 1)
    finally:
        hca.close()
