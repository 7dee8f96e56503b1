"""The software HCA: doorbells, long queues, revocation, turns, waiting."""

from __future__ import annotations

import ctypes
import struct
import threading
import time

import pytest
from tests.soft_hca_rig import ALL_ACCESS, SIZE, Rig

from expertwire.errors import ConfigError, HcaError
from expertwire.hca import open_hca
from expertwire.hca.soft import STATE_ERR
from expertwire.hca.wqe import (
    DataSegment,
    Wqe,
    doorbell_record,
)


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
