"""Checks 27 to 29 and 33: moving bytes, chunks, immediates."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from expertwire.hca.wqe import DataSegment
from tests.conformance.rig import (
    NO_RECEIVE,
    READ,
    WRITE_IMM,
    DeviceRig,
    Rig,
)
from tests.queue_pair import GET, PUT_ALWAYS_POST, QUIET, SIGNAL_IMM, BareQp

PATTERN = bytes(1 + i % 251 for i in range(1 << 16))


@pytest.mark.parametrize("num_bytes", [1, 3, 4, 7, 8, 9, 63, 64, 65, 4095, 4096, 65000])
@pytest.mark.parametrize(("source", "target"), [(0, 0), (1, 0), (0, 1), (3, 5)])
def test_27_any_alignment_and_size(source, target, num_bytes):
    with Rig(num_bytes=1 << 17) as rig:
        rig.fill(source, PATTERN[:num_bytes])
        rig.fill_remote(0, b"\xee" * (num_bytes + 64))
        assert not rig.do(rig.write(16 + target, source, num_bytes)).is_error
        got = rig.at_remote(0, num_bytes + 64)
        want = b"\xee" * (16 + target) + PATTERN[:num_bytes]
        assert got == want.ljust(num_bytes + 64, b"\xee")
        back = 1 << 16
        rig.do(rig.write(16 + target, back, num_bytes, opcode=READ))
        assert rig.at_local(back, num_bytes) == PATTERN[:num_bytes]


def test_27_message_larger_than_a_piece():
    """The engine moves 256 KiB at a time; the seams must not show."""
    num_bytes = (5 << 20) + 123
    payload = (PATTERN * 81)[:num_bytes]
    with Rig(num_bytes=6 << 20) as rig:
        rig.fill(7, payload)
        third = num_bytes // 3
        wqe = rig.write(13, data=(
            rig.segment(7, third), rig.segment(7 + third, third),
            rig.segment(7 + 2 * third, num_bytes - 2 * third),
        ))
        cqe = rig.do(wqe)
        assert cqe.byte_count == num_bytes and rig.at_remote(13, num_bytes) == payload
        rig.fill(0, b"\0" * (6 << 20))
        rig.do(rig.write(13, 99, num_bytes, opcode=READ))
        assert rig.at_local(99, num_bytes) == payload


def test_27_one_gib_is_allowed():
    """The largest message; memory stays untouched, as the source is zero pages."""
    size = 1 << 30
    with Rig(num_bytes=4096) as rig:
        local = rig.here.register(rig.local.addr, size, 1)  # larger than what is mapped
        rig.here.set_hook(lambda *_: 0x13)  # stop before the first byte moves
        cqe = rig.do(rig.write(data=(rig.segment(0, size, local.lkey),)))
        assert cqe.syndrome == 0x13, "refused by the hook, not for its length"


def test_27_source_and_target_are_the_same_bytes():
    with Rig() as rig:
        peer_window = rig.here.create_window()
        rkey = peer_window.publish(rig.local_mr, 0)
        peer = rig.here.import_peer(peer_window.fd, rig.here.wake_fd, [rig.local.fd])
        qp = rig.add_qp(connect=False)
        qp.connect(peer, 1)
        try:
            rig.fill(0, PATTERN[:4096])
            wqe = rig.write(raddr=rig.local.addr, rkey=rkey, data=(rig.segment(0, 4096),),
                            qpn=qp.info.qpn, index=0)
            rig.place(wqe, 0, qp)
            rig.ring(1, qp)
            rig.run()
            assert rig.error(qp) == 0 and rig.at_local(0, 4096) == PATTERN[:4096]
        finally:
            qp.destroy()
            peer.close()
            peer_window.close()


def test_27_read_by_the_device_code():
    with DeviceRig() as rig:
        rig.fill_remote(5, PATTERN[:1000])
        (status,) = rig.launch([[rig.operation(GET, 5, 9, num_bytes=1000), dict(op=QUIET)]])
        assert status.code == 0 and rig.at_local(9, 1000) == PATTERN[:1000]


def test_27_one_gib_arrives():
    """The largest message, moved. The source is untouched zero pages but for three places."""
    size, marks = 1 << 30, (0, (1 << 29) - 3, (1 << 30) - 8)
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as source, Rig(
        num_bytes=size
    ) as rig:
        anchor = ctypes.c_char.from_buffer(source)
        addr = ctypes.addressof(anchor)
        for at in marks:
            ctypes.memmove(addr + at, b"landmark", 8)
        lkey = rig.here.register(addr, size, 0).lkey
        cqe = rig.do(rig.write(data=(DataSegment(size, lkey, addr),)))
        assert (cqe.is_error, cqe.byte_count) == (False, size)
        assert all(rig.at_remote(at, 8) == b"landmark" for at in marks)
        assert rig.at_remote(8, 1 << 20) == b"\0" * (1 << 20)
        del anchor


@pytest.mark.parametrize("shift", [-300_000, -64, -1, 1, 64, 300_000])
def test_27_shifted_overlap_stays_inside_its_target(shift):
    """Through two mappings the bytes are undefined; those outside the target are not touched."""
    size, at, count = 2 << 20, 1 << 19, 1 << 20
    with Rig(num_bytes=size) as rig:
        rig.fill(0, bytes([0xA5]) * size)
        window = rig.here.create_window()
        rkey = window.publish(rig.local_mr, 0)
        peer = rig.here.import_peer(window.fd, rig.here.wake_fd, [rig.local.fd])
        qp = rig.add_qp(connect=False)
        qp.connect(peer, 1)
        rig.fill(at, bytes([0x5A]) * count)
        rig.place(rig.write(raddr=rig.local.addr + at + shift, rkey=rkey, qpn=qp.info.qpn,
                            index=0, data=(rig.segment(at, count),)), 0, qp)
        rig.ring(1, qp)
        rig.run()
        assert rig.error(qp) == 0
        low, high = min(at, at + shift), max(at, at + shift) + count
        assert rig.at_local(0, low) == bytes([0xA5]) * low
        assert rig.at_local(high, size - high) == bytes([0xA5]) * (size - high)
        assert rig.at_local(at + shift, count) == bytes([0x5A]) * count, "all of it was 0x5A"
        qp.destroy()
        peer.close()
        window.close()


@pytest.mark.parametrize("warp_size", [1, 4, 32])
def test_28_put_cut_at_region_ends_arrives_whole(warp_size):
    with DeviceRig(64, chunk_bytes=1000) as rig:
        rig.fill(3, PATTERN[:60000])
        put = rig.operation(PUT_ALWAYS_POST, 999, 3, num_bytes=60000)
        (status,) = rig.launch([[put, dict(op=QUIET)]], warp_size=warp_size)
        assert status.code == 0 and rig.at_remote(999, 60000) == PATTERN[:60000]
        assert rig.at_remote(998, 1) == b"\0"
        assert rig.here.stats()["wqes"] == {"RDMA_WRITE": 61}, "one entry per chunk touched"


@pytest.mark.parametrize("warp_size", [1, 4])
@pytest.mark.parametrize(("local", "remote"), [(700, None), (700, 1000), (1, 1000), (1000, 1)])
def test_28_put_cut_at_local_ends_and_at_every_byte(local, remote, warp_size):
    """Regions of the source, of both sides, and of one byte each."""
    num_bytes = 300 if 1 in (local, remote) else 5000
    with DeviceRig(64, chunk_bytes=remote) as rig:
        rig.local_keys = rig._keys(rig.local, rig.lkey, local)
        rig.device_peer.local_keys = ctypes.addressof(rig.local_keys)
        rig.device_peer.num_local_keys = len(rig.local_keys)
        rig.fill(699, PATTERN[:num_bytes])
        put = rig.operation(PUT_ALWAYS_POST, 998, 699, num_bytes=num_bytes)
        (status,) = rig.launch([[put, dict(op=QUIET)]], warp_size=warp_size)
        assert status.code == 0
        assert rig.at_remote(997, num_bytes + 2) == b"\0" + PATTERN[:num_bytes] + b"\0"
        ends = {699 + num_bytes}
        for step, start in ((local, 0), (remote, 998 - 699)):
            ends |= {at for at in range(700, 699 + num_bytes) if step and (at + start) % step == 0}
        assert rig.here.stats()["wqes"] == {"RDMA_WRITE": len(ends)}


def test_29_thirty_three_chunks_go_in_rounds_and_no_region_is_an_error():
    """Not limited to a warp's lanes, and never a trap: running out of a region is reported."""
    with DeviceRig(64, chunk_bytes=100) as rig:
        rig.fill(0, PATTERN[:3300])
        put = rig.operation(PUT_ALWAYS_POST, 0, 0, num_bytes=3300)
        (status,) = rig.launch([[put, dict(op=QUIET)]], warp_size=32)
        assert status.code == 0 and rig.at_remote(0, 3300) == PATTERN[:3300]
    qp = BareQp(64, [(0x1000, 0x2000, 1)], [(0x9000, 0x9800, 1)])
    (status,) = qp.run([dict(op=PUT_ALWAYS_POST, remote_addr=0x9000, local_addr=0x1000,
                             num_bytes=0x900)])
    assert status.code == 4 and qp.rung == 0


def test_33_immediate_is_delivered_once():
    with Rig() as rig:
        rig.window.post_recv(3)
        rig.do(rig.write(0, data=(), inline=b"data", opcode=WRITE_IMM, imm=0x01020304))
        cqe = rig.window.poll_recv()
        assert cqe is not None and rig.window.poll_recv() is None
        assert cqe[63] >> 4 == 1, "RESP_WR_IMM"
        assert cqe[36:40] == b"\1\2\3\4" and cqe[44:48] == b"\0\0\0\4"
        assert cqe[57:60] == (0x77).to_bytes(3, "big"), "the receiving queue pair"
        assert rig.at_remote(0, 4) == b"data"
        rig.do(rig.write(raddr=rig.remote.addr, data=(), opcode=WRITE_IMM, imm=5))
        assert rig.window.poll_recv()[36:40] == b"\0\0\0\5"
        assert rig.window.poll_recv() is None


def test_33_no_receive_waits_then_fails_and_writes_nothing():
    """The receive is needed before the bytes move: a retry must not write them twice."""
    with Rig() as rig:
        wqe = rig.write(0, data=(), inline=b"late data", opcode=WRITE_IMM)
        rig.post(wqe)
        assert rig.run() == 0 and rig.qp.indices() == (1, 0)
        assert rig.at_remote(0, 9) == b"\0" * 9
        rig.window.post_recv(1)
        rig.run()
        assert rig.error() == 0 and rig.at_remote(0, 9) == b"late data"
        assert rig.window.poll_recv() is not None
        rig.post(rig.write(16, data=(), inline=b"never", opcode=WRITE_IMM))
        rig.run_until(rig.error)
        assert rig.qp.first_error() == (NO_RECEIVE, 1)
        assert rig.at_remote(16, 5) == b"\0" * 5 and rig.window.poll_recv() is None


def test_33_receives_beyond_the_ring_are_refused():
    """Completions that nobody read yet are never overwritten."""
    from expertwire.errors import HcaError

    with Rig(256) as rig:
        rig.window.post_recv(64)
        with pytest.raises(HcaError, match="64"):
            rig.window.post_recv(1)
        wqe = rig.write(data=(), opcode=WRITE_IMM)
        rig.post(*[wqe] * 64)
        rig.run()
        with pytest.raises(HcaError, match="64"):
            rig.window.post_recv(1)
        assert rig.window.poll_recv() is not None
        rig.window.post_recv(1)


def test_33_immediate_from_the_device_code():
    with DeviceRig() as rig:
        rig.window.post_recv(1)
        (status,) = rig.launch([[rig.operation(SIGNAL_IMM, value=0xA1B2C3D4), dict(op=QUIET)]])
        assert status.code == 0 and rig.window.poll_recv()[36:40] == b"\xa1\xb2\xc3\xd4"


def test_33_bad_key_is_told_before_a_missing_receive():
    with Rig() as rig:
        rig.do(rig.write(opcode=WRITE_IMM, rkey=rig.rkey ^ 1))
        assert rig.error() == 0x13 and rig.window.poll_recv() is None


def test_33_waiting_for_a_receive_shows_the_entry_to_the_hook_once():
    with Rig(num_bytes=1 << 20) as rig:
        calls = []
        rig.here.set_hook(lambda *args: calls.append(args[2]) or 0)
        rig.post(rig.write(0, 0, 1 << 20, opcode=WRITE_IMM))
        for _ in range(20):
            rig.here.poll()
        rig.window.post_recv(1)
        rig.run()
        rig.here.set_hook(None)
        assert calls == [0] and rig.error() == 0
