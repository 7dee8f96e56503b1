"""Checks 11 to 17: indices, wraps, and which entries a doorbell announces."""

from __future__ import annotations

import ctypes

import pytest

from tests.conformance.rig import LOCAL_QP_OPERATION, NOP, DeviceRig, Rig
from tests.queue_pair import PUT_ALWAYS_POST

POISON = b"\xee" * 64


@pytest.mark.parametrize("wrong", [1, 2, 0x7FFF, 0xFFFF])
def test_11_index_must_be_the_running_one(wrong):
    """Our choice: an entry that carries another index was written for another slot."""
    with Rig() as rig:
        rig.post(rig.inline(0, b"a"))
        rig.run()
        rig.place(rig.inline(8, b"b", index=1 + wrong))
        rig.ring(2)
        rig.run()
        assert rig.qp.first_error() == (LOCAL_QP_OPERATION, 1)
        assert rig.at_remote(8, 1) == b"\0"


@pytest.mark.parametrize("depth", [1 << n for n in range(4, 16)])
def test_12_index_wraps_from_ffff_to_0(depth):
    """Entries of 16 blocks bring the queue near the wrap; then single blocks cross it."""
    with Rig(depth) as rig:
        long_nop = rig.wqe(NOP, num_segments=63, fm_ce_se=0)
        raw = long_nop.encode().ljust(16 * 64, b"\0")
        while rig.next_idx < 65536 - 16:
            batch = 0
            while batch + 16 <= depth and rig.next_idx < 65536 - 16:
                head = rig.wqe(NOP, num_segments=63, fm_ce_se=0).encode()
                rig.next_idx += rig.place(head + raw[16:])
                batch += 16
            rig.ring()
            rig.run()
        for idx in range(rig.next_idx, 65536 + 20):
            rig.do(rig.inline(0, idx.to_bytes(4, "little")))
            assert rig.cqe().wqe_counter == idx & 0xFFFF
            assert rig.at_remote(0, 4) == idx.to_bytes(4, "little")
        assert rig.qp.indices() == (65556, 65556) and rig.error() == 0


@pytest.mark.parametrize(
    ("num_blocks", "before_end"),
    [(blocks, before) for blocks in (2, 3, 4, 5) for before in range(1, blocks)],
)
def test_13_wqe_wraps_ring_end(num_blocks, before_end):
    """Inline bytes and pointer segments, cut by the end of the ring at every block border."""
    with Rig(16) as rig:
        payload = bytes(1 + i % 250 for i in range(64 * num_blocks - 36))
        rig.do(*[rig.wqe(NOP) for _ in range(16 - before_end)])
        first = rig.post(rig.inline(0, payload))
        rig.run()
        assert rig.error() == 0 and rig.at_remote(0, len(payload) + 1) == payload + b"\0"
        assert rig.cqe().wqe_counter == first
    with Rig(16) as rig:
        rig.fill(0, bytes(range(1, 100)))
        rig.do(*[rig.wqe(NOP) for _ in range(16 - before_end)])
        count = 4 * num_blocks - 2
        rig.do(rig.write(data=tuple(rig.segment(5 * i, 5) for i in range(count))))
        assert rig.error() == 0 and rig.at_remote(0, 5 * count) == bytes(range(1, 5 * count + 1))


@pytest.mark.parametrize("order", ["register first", "record first", "register lost"])
def test_14_doorbell_and_record_in_any_order(order):
    with Rig() as rig:
        rig.post(rig.inline(0, b"one"), ring=False)
        first, second = (
            (rig.set_register, rig.set_record) if order == "register first"
            else (rig.set_record, rig.set_register)
        )
        first(1)
        rig.run()
        assert rig.at_remote(0, 3) == b"one"
        if order != "register lost":
            second(1)
        assert rig.run() == 0
        rig.do(rig.inline(8, b"two"))
        assert rig.at_remote(8, 3) == b"two" and rig.qp.indices() == (2, 2)


def test_14_stale_and_equal_doorbells_are_ignored():
    with Rig() as rig:
        rig.do(*[rig.wqe(NOP) for _ in range(5)])
        for old in (5, 4, 1, 0):
            rig.set_register(old)
            rig.set_record(old)
            assert rig.run() == 0
        assert rig.qp.indices() == (5, 5) and rig.error() == 0


@pytest.mark.parametrize("at", [0x800, 0x900])
def test_14_register_left_behind_by_many_rings_is_no_doorbell(at):
    """A doorbell is an event: the value that a register still holds says nothing later on."""
    with Rig(16) as rig:
        rig.post(rig.wqe(NOP), ring=False)
        rig.set_record(1)
        rig.set_register(1, at=at)
        rig.run()
        for _ in range(40):  # from now on the record alone announces
            rig.post(rig.wqe(NOP), ring=False)
            rig.set_record(rig.next_idx)
            rig.run()
        assert rig.error() == 0 and rig.qp.indices() == (41, 41)


def test_14_register_left_behind_by_65536_blocks_announces_nothing():
    """The 16-bit index has come round: taken for new it would run entries that nobody posted."""
    with Rig(1024) as rig:
        rig.do(*[rig.wqe(NOP) for _ in range(8)])
        raw_tail = b"\0" * (16 * 64 - 16)
        while rig.next_idx < 65536 - 16:
            for _ in range(8):
                if rig.next_idx < 65536 - 16:
                    head = rig.wqe(NOP, num_segments=63).encode()
                    rig.next_idx += rig.place(head[:16] + raw_tail)
            rig.set_record(rig.next_idx)
            rig.run()
        assert rig.qp.indices()[0] == rig.next_idx and rig.error() == 0


def test_15_doorbells_of_two_writers_swapped():
    """The later index arrives first; the earlier one must not take anything back."""
    with Rig() as rig:
        rig.post(*[rig.inline(8 * i, bytes([1 + i])) for i in range(4)], ring=False)
        rig.set_record(4)
        rig.set_register(4)
        rig.run()
        rig.set_record(2)
        rig.set_register(2)
        assert rig.run() == 0
        assert rig.qp.indices() == (4, 4) and rig.error() == 0
        rig.do(rig.inline(32, b"5"))
        assert rig.at_remote(32, 1) == b"5"


def test_16_nothing_beyond_the_producer_index_is_executed():
    with Rig(16) as rig:
        ctypes.memset(rig.qp.info.sq_addr, 0xEE, 16 * 64)
        rig.post(rig.inline(0, b"first"), rig.inline(8, b"never"), ring=False)
        rig.ring(1)
        rig.run()
        assert rig.at_remote(0, 5) == b"first" and rig.at_remote(8, 5) == b"\0" * 5
        assert rig.qp.indices() == (1, 1) and rig.error() == 0


def test_16_entry_that_reaches_beyond_the_producer_index_is_refused():
    with Rig(16) as rig:
        rig.post(rig.inline(0, b"x" * 100), ring=False)
        rig.ring(1)
        rig.run()
        assert rig.error() == LOCAL_QP_OPERATION and rig.at_remote(0, 1) == b"\0"


@pytest.mark.parametrize("how", ["record", "register", "both"])
@pytest.mark.parametrize("jump", [17, 100, 30000])
def test_17_jump_beyond_the_ring_fails_the_queue(how, jump):
    """Our choice: that is what overflowing the ring looks like from the consumer's side."""
    with Rig(16) as rig:
        rig.do(rig.wqe(NOP))
        if how != "register":
            rig.set_record(1 + jump)
        if how != "record":
            rig.set_register(1 + jump)
        rig.run()
        assert rig.qp.first_error() == (LOCAL_QP_OPERATION, 1)
        assert rig.here.stats()["error_cqes"] == 1, "one error, not one per look"
        assert rig.run() == 0 and rig.here.stats()["error_cqes"] == 1


def test_17_more_than_a_ring_in_small_steps_is_caught_too():
    with Rig(16) as rig:
        rig.here.set_hook(lambda *_: 0xFFFFFFFF)
        rig.post(*[rig.wqe(NOP) for _ in range(10)])
        rig.run()
        rig.post(*[rig.wqe(NOP) for _ in range(10)])
        rig.run()
        rig.here.set_hook(None)
        rig.run()
        assert rig.error() == LOCAL_QP_OPERATION


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_14_every_doorbell_mode_of_the_device_code(mode):
    """Register, record only, and the CPU-assisted producer index, across the ring's end."""
    with DeviceRig(64, doorbell_mode=mode) as rig:
        put = [rig.operation(PUT_ALWAYS_POST, 0, 0, num_bytes=8)]
        for _ in range(5):
            (status,) = rig.launch([put * 40])
            assert status.code == 0
        rig.run()
        assert rig.qp.indices() == (200, 200) and rig.error() == 0
