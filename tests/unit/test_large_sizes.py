"""Sizes and offsets around 2^31, 2^32 and 2^35, where 32-bit arithmetic would end.

Addresses are made up, or stand for memory that is reserved and hardly touched.
"""

from __future__ import annotations

import ctypes

import pytest
from tests.conformance.rig import ALL_ACCESS, REMOTE_ACCESS, Rig
from tests.queue_pair import PUT_ALWAYS_POST, BareQp

from expertwire.device_structs import (
    ClientPutArgs,
    ClientServer,
    KernelStatus,
    MessageShape,
    RouteTables,
)
from expertwire.launch import Launch
from expertwire.message import SlotShape

EDGES = [1 << 31, 1 << 32, 1 << 35]
LOCAL, REMOTE = 1 << 44, 1 << 45


def entries(qp: BareQp, count: int) -> list[tuple[int, int, int]]:
    """(remote address, local address, bytes) of the first entries."""
    return [
        (int.from_bytes(raw[16:24], "big"), int.from_bytes(raw[40:48], "big"),
         int.from_bytes(raw[32:36], "big")) for raw in map(qp.wqe, range(count))
    ]


def check_contiguous(found, remote: int, local: int, num_bytes: int) -> None:
    total = 0
    for at_remote, at_local, count in found:
        assert (at_remote, at_local) == (remote + total, local + total)
        assert 0 < count <= 1 << 30, "at most the largest message"
        total += count
    assert total == num_bytes


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("size", EDGES)
def test_a_put_of_any_size_is_cut_into_messages(size, beyond):
    num_bytes = size + beyond
    qp = BareQp(64, [(LOCAL, LOCAL + (1 << 36), 1)], [(REMOTE, REMOTE + (1 << 36), 2)])
    (status,) = qp.run([dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE + 5, local_addr=LOCAL + 3,
                             num_bytes=num_bytes)])
    count = -(-num_bytes // (1 << 30))
    assert status.code == 0 and qp.rung == count
    check_contiguous(entries(qp, count), REMOTE + 5, LOCAL + 3, num_bytes)


@pytest.mark.parametrize("offset", [e + d for e in EDGES for d in (-8, 0, 8)])
def test_offsets_into_a_region_keep_all_their_bits(offset):
    qp = BareQp(16, [(LOCAL, LOCAL + (1 << 37), 1)], [(REMOTE, REMOTE + (1 << 37), 2)])
    (status,) = qp.run([dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE + offset,
                             local_addr=LOCAL + offset, num_bytes=16)])
    assert status.code == 0
    assert entries(qp, 1) == [(REMOTE + offset, LOCAL + offset, 16)]


@pytest.mark.parametrize("rows", [(1 << 21) - 1, 1 << 21, (1 << 21) + 1])
def test_a_message_beyond_4_gib_and_its_flag(rows):
    """2^21 rows of 16 KiB: 2^35 bytes of payload behind head and ids, the flag behind that."""
    hidden, top_k = 8192, 8
    shape = SlotShape(num_slots=1, max_rows=rows, experts_per_row=top_k, hidden_size=hidden,
                      element_bytes=2, reply_element_bytes=2, reply_mode=0, fp8=False)
    slot = shape.request_slot_bytes
    assert slot > rows * hidden * 2 > 1 << 34
    qp = BareQp(128, [(LOCAL, LOCAL + slot, 1)], [(REMOTE, REMOTE + slot, 2)])
    server = ClientServer(send_addr=LOCAL, remote_addr=REMOTE, request_slot_bytes=slot,
                          peer=ctypes.addressof(qp.peer))
    batch, missing, status = ctypes.c_uint32(rows), ctypes.c_int32(-1), KernelStatus()
    put = ClientPutArgs(
        servers=ctypes.addressof(server),
        tables=RouteTables(batch_size=ctypes.addressof(batch), num_servers=1),
        shape=MessageShape(hidden_size=hidden, data_type=2, experts_per_row=top_k, seq=1),
        status=ctypes.addressof(status), missing_expert=ctypes.addressof(missing),
        max_loaded_servers=1,
    )
    Launch([("client_put_ibgda", put)]).run()
    assert status.code == 0
    ids_bytes = -(-4 * rows * top_k // 16) * 16
    payload = rows * hidden * 2 + ids_bytes
    found = entries(qp, qp.rung)
    num_payload = -(-payload // (1 << 30))
    head = 128 + ids_bytes
    check_contiguous(found[:num_payload], REMOTE + head, LOCAL + head, payload)
    check_contiguous(found[num_payload:-1], REMOTE, LOCAL, head)
    assert found[-1] == (REMOTE + slot - 16, LOCAL + slot - 16, 8)


@pytest.mark.parametrize("size", EDGES)
def test_bytes_land_beyond_the_edge(size):
    """A real engine: regions of more than `size` bytes, reserved; only their ends are touched."""
    with Rig() as rig:
        far = rig.there.alloc(size + 8192)
        region = rig.there.register(far.addr, far.num_bytes, ALL_ACCESS)
        window = rig.there.create_window()
        rkey = window.publish(region, 0)
        peer = rig.here.import_peer(window.fd, rig.there.wake_fd, [far.fd])
        qp = rig.here.create_qp(16)
        qp.connect(peer, 1)
        rig.fill(0, b"over the edge...")
        for idx, offset in enumerate((size - 8, size, size + 8000)):
            rig.place(rig.write(index=idx, qpn=qp.info.qpn, raddr=far.addr + offset, rkey=rkey,
                                data=(rig.segment(0, 16),)), idx, qp)
            rig.ring(idx + 1, qp)
            rig.run()
            assert rig.error(qp) == 0
            assert ctypes.string_at(far.addr + offset, 16) == b"over the edge..."
        rig.place(rig.write(index=3, qpn=qp.info.qpn, raddr=far.addr + size + 8192 - 8, rkey=rkey,
                            data=(rig.segment(0, 16),)), 3, qp)
        rig.ring(4, qp)
        rig.run()
        assert rig.error(qp) == REMOTE_ACCESS, "the end is the end"
        qp.destroy()
        peer.close()
        window.close()
        far.close()


def test_slots_count_in_64_bits():
    """Slots of more than 2^35 bytes, as Python counts them."""
    for rows in (1 << 20, (1 << 25) - 1):
        shape = SlotShape(num_slots=2, max_rows=rows, experts_per_row=64, hidden_size=16384,
                          element_bytes=4, reply_element_bytes=4, reply_mode=1, fp8=False)
        assert shape.request_slot_bytes > rows * 16384 * 4
        assert shape.reply_slot_bytes > rows * 64 * 16384 * 4
        assert shape.request_slot_bytes % 16 == shape.reply_slot_bytes % 16 == 0
