"""Checks 27 to 33: moving bytes, chunks, atomics, immediates."""

from __future__ import annotations

import struct

import pytest

from tests.conformance.rig import (
    ATOMIC_CS,
    ATOMIC_FA,
    LOCAL_LENGTH,
    MASKED_CS,
    MASKED_FA,
    NO_RECEIVE,
    READ,
    REMOTE_INVALID_REQUEST,
    WRITE_IMM,
    DeviceRig,
    Rig,
)
from tests.queue_pair import ADD4, ADD8, GET, PUT_ALWAYS_POST, QUIET, SIGNAL_IMM, BareQp

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


@pytest.mark.parametrize("warp_size", [1, 4, 32])
def test_28_put_cut_at_region_ends_arrives_whole(warp_size):
    with DeviceRig(64, chunk_bytes=1000) as rig:
        rig.fill(3, PATTERN[:60000])
        put = rig.operation(PUT_ALWAYS_POST, 999, 3, num_bytes=60000)
        (status,) = rig.launch([[put, dict(op=QUIET)]], warp_size=warp_size)
        assert status.code == 0 and rig.at_remote(999, 60000) == PATTERN[:60000]
        assert rig.at_remote(998, 1) == b"\0"
        assert rig.here.stats()["wqes"] == {"RDMA_WRITE": 61}, "one entry per chunk touched"


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


# --- atomics ------------------------------------------------------------------------------
def add4(add, boundary=0):
    return struct.pack(">II", add & 0xFFFFFFFF, boundary) + b"\xee" * 8


def add8(add, boundary=0):
    return struct.pack(">QQ", add & (2**64 - 1), boundary)


def model_add(value, add, boundary, width):
    """Adds field by field: a set boundary bit is the top of a field, its carry is dropped."""
    result, low = 0, 0
    for bit in range(width):
        if boundary >> bit & 1 or bit == width - 1:
            mask = ((1 << (bit - low + 1)) - 1) << low
            result |= ((value & mask) + (add & mask)) & mask
            low = bit + 1
    return result


CASES = [
    (0, 5, 0), (0xFFFFFFFF, 1, 0), (7, -1, 0), (0x00FF00FF, 0x00010001, 0x80008000),
    (0xFFFFFFFF, 0x01010101, 0x80808080), (0x12345678, 0xFFFFFFFF, 0xFFFFFFFF),
    (0x0F, 1, 0x8), (0xFFFFFFFF, 0xFFFFFFFF, 0x00000001), (0x7FFFFFFF, 1, 0x40000000),
]


@pytest.mark.parametrize(("value", "add", "boundary"), CASES)
@pytest.mark.parametrize("width", [32, 64])
def test_30_masked_fetch_add(width, value, add, boundary):
    num_bytes = width // 8
    if width == 64:
        value, boundary = value << 32 | value, boundary << 32 | boundary
        add = add if add < 0 else add << 32 | add
    operands = add4(add, boundary) if width == 32 else add8(add, boundary)
    with Rig() as rig:
        rig.fill_remote(64, value.to_bytes(num_bytes, "little"))
        cqe = rig.do(rig.atomic(
            MASKED_FA, operands, 64, 128, num_bytes, opmod=8 if width == 32 else 9
        ))
        assert not cqe.is_error and cqe.byte_count == num_bytes
        want = model_add(value, add & (2**width - 1), boundary, width)
        assert int.from_bytes(rig.at_remote(64, num_bytes), "little") == want
        # The old value: 4 bytes land big-endian, 8 bytes in host order.
        order = "big" if width == 32 else "little"
        assert int.from_bytes(rig.at_local(128, num_bytes), order) == value
        if boundary == 2**width - 1:
            assert want == value ^ (add & (2**width - 1))


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("matches", [True, False])
def test_30_masked_compare_and_swap(width, matches):
    num_bytes = width // 8
    ones = 2**width - 1
    value = 0x1122334455667788 & ones
    compare_mask, swap_mask = 0xFF00, 0x00FF00FF00FF00FF & ones
    compare, swap = (value if matches else value ^ 0x100) ^ 1, 0xAABBCCDDEEFF0011 & ones
    form = ">IIII" if width == 32 else ">QQQQ"
    operands = struct.pack(form, swap, compare, swap_mask, compare_mask)
    with Rig() as rig:
        rig.fill_remote(0, value.to_bytes(num_bytes, "little"))
        wqe = rig.atomic(
            MASKED_CS, operands, 0, 128, num_bytes, opmod=8 if width == 32 else 9
        )
        assert len(wqe.encode()) == (64 if width == 32 else 80)
        assert not rig.do(wqe, rig.wqe(0)).is_error
        want = (value & ~swap_mask) | (swap & swap_mask) if matches else value
        assert int.from_bytes(rig.at_remote(0, num_bytes), "little") == want
        order = "big" if width == 32 else "little"
        assert int.from_bytes(rig.at_local(128, num_bytes), order) == value


def test_30_plain_fetch_add_and_compare_swap():
    with Rig() as rig:
        rig.fill_remote(0, (40).to_bytes(8, "little"))
        rig.do(rig.atomic(ATOMIC_FA, struct.pack(">QQ", 2, 0xEEEE)))
        assert rig.at_remote(0, 8) == (42).to_bytes(8, "little")
        assert rig.at_local(0, 8) == (40).to_bytes(8, "little")
        rig.do(rig.atomic(ATOMIC_CS, struct.pack(">QQ", 9, 41)))
        assert rig.at_remote(0, 8) == (42).to_bytes(8, "little")
        rig.do(rig.atomic(ATOMIC_CS, struct.pack(">QQ", 9, 42)))
        assert rig.at_remote(0, 8) == (9).to_bytes(8, "little")
        assert rig.at_local(0, 8) == (42).to_bytes(8, "little")


def test_30_atomics_of_the_device_code():
    with DeviceRig() as rig:
        rig.fill_remote(0, struct.pack("<Q", (1 << 33) - 1) + struct.pack("<I", 7))
        (status,) = rig.launch([[
            rig.operation(ADD8, 0, value=1), rig.operation(ADD4, 8, value=0xFFFFFFFF),
            dict(op=QUIET),
        ]])
        assert status.code == 0
        assert struct.unpack("<QI", rig.at_remote(0, 12)) == (1 << 33, 6)


def test_30_result_of_the_wrong_size_is_refused():
    with Rig() as rig:
        rig.do(rig.atomic(MASKED_FA, add8(1), sink_bytes=4, opmod=9))
        assert rig.error() == LOCAL_LENGTH and rig.at_remote(0, 8) == b"\0" * 8


@pytest.mark.parametrize("num_qps", [2, 8])
def test_31_atomics_are_exact_under_many_queues(num_qps):
    with DeviceRig(64, num_device_qps=num_qps) as rig:
        per_warp = [
            [rig.operation(op, 8 * (op == ADD4), value=1, qp_id=w) for op in (ADD8, ADD4)] * 25
            + [dict(op=QUIET, qp_id=w)] for w in range(num_qps)
        ]
        assert all(s.code == 0 for s in rig.launch(per_warp, seed=num_qps))
        assert struct.unpack("<QI", rig.at_remote(0, 12)) == (25 * num_qps, 25 * num_qps)


def test_31_atomics_are_exact_between_two_engines():
    """Two initiators, each with its own engine thread, on one word of a third."""
    import ctypes

    from expertwire.hca.soft import SoftHca
    from expertwire.hca.wqe import DataSegment, Wqe

    with SoftHca(thread=False) as target:
        memory = target.alloc(4096)
        mr = target.register(memory.addr, 4096, 15)
        ends = []
        for _ in range(2):
            hca = SoftHca(thread=True)
            window = target.create_window()
            rkey = window.publish(mr, 0)
            peer = hca.import_peer(window.fd, target.wake_fd, [memory.fd])
            sink = hca.alloc(4096)
            lkey = hca.register(sink.addr, 4096, 1).lkey
            qp = hca.create_qp(4096)
            qp.connect(peer, 1)
            for i in range(4000):
                raw = Wqe(
                    ATOMIC_FA, i, qp.info.qpn, memory.addr, rkey,
                    (DataSegment(8, lkey, sink.addr),), atomic=struct.pack(">QQ", 1, 0),
                ).encode()
                ctypes.memmove(qp.info.sq_addr + 64 * i, raw, 64)
            ends.append((hca, window, peer, sink, qp))
        for hca, *_, qp in ends:
            ctypes.memmove(qp.info.dbrec_addr + 4, (4000).to_bytes(4, "big"), 4)
            hca.kick()
        for hca, window, peer, sink, qp in ends:
            while qp.indices()[1] < 4000:
                hca.poll()
            assert qp.first_error() == (0, 0)
            qp.destroy()
            peer.close()
            window.close()
            hca.close()
            sink.close()
        assert target.read_word(memory.addr) == 8000
        memory.close()


@pytest.mark.parametrize(("offset", "opmod"), [(4, 9), (1, 9), (7, 9), (2, 8), (1, 8)])
def test_32_misaligned_atomic(offset, opmod):
    """INFERRED syndrome."""
    with Rig() as rig:
        operands = add4(1) if opmod == 8 else add8(1)
        rig.do(rig.atomic(MASKED_FA, operands, offset, 0, 4 * (opmod - 7), opmod=opmod))
        assert rig.error() == REMOTE_INVALID_REQUEST and rig.at_remote(0, 16) == b"\0" * 16


# --- immediates ---------------------------------------------------------------------------
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


def test_27_read_by_the_device_code():
    with DeviceRig() as rig:
        rig.fill_remote(5, PATTERN[:1000])
        (status,) = rig.launch([[rig.operation(GET, 5, 9, num_bytes=1000), dict(op=QUIET)]])
        assert status.code == 0 and rig.at_local(9, 1000) == PATTERN[:1000]


def test_32_word_that_the_peer_placed_at_an_odd_address_is_refused_too():
    """Aligned by its virtual address, not where it is: a peer's mistake must not split a lock."""
    with Rig() as rig:
        rkey = rig.window.publish(rig.there.register(rig.remote.addr, 64, 15), 0, 4)
        rig.do(rig.atomic(MASKED_FA, add8(1), 0, 0, 8, opmod=9, rkey=rkey))
        assert rig.error() == REMOTE_INVALID_REQUEST and rig.at_remote(0, 72) == b"\0" * 72


def test_33_bad_key_is_told_before_a_missing_receive():
    with Rig() as rig:
        rig.do(rig.write(opcode=WRITE_IMM, rkey=rig.rkey ^ 1))
        assert rig.error() == 0x13


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
