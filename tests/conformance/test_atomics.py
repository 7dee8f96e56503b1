"""Checks 30 to 32: atomics."""

from __future__ import annotations

import ctypes
import struct

import pytest

from expertwire.hca.wqe import DataSegment
from tests.conformance.rig import (
    ATOMIC_CS,
    ATOMIC_FA,
    LOCAL_LENGTH,
    MASKED_CS,
    MASKED_FA,
    REMOTE_INVALID_REQUEST,
    DeviceRig,
    Rig,
)
from tests.queue_pair import ADD4, ADD8, QUIET


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

    from expertwire.hca.soft import SoftHca
    from expertwire.hca.wqe import Wqe

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


def test_32_word_that_the_peer_placed_at_an_odd_address_is_refused_too():
    """Aligned by its virtual address, not where it is: a peer's mistake must not split a lock."""
    with Rig() as rig:
        rkey = rig.window.publish(rig.there.register(rig.remote.addr, 64, 15), 0, 4)
        rig.do(rig.atomic(MASKED_FA, add8(1), 0, 0, 8, opmod=9, rkey=rkey))
        assert rig.error() == REMOTE_INVALID_REQUEST and rig.at_remote(0, 72) == b"\0" * 72
