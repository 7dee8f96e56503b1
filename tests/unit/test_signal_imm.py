"""Flags by write with immediate: set by the receive completion, not by the bytes of the write."""

from __future__ import annotations

import struct
import threading

import pytest
from tests.conformance.rig import WRITE_IMM, Rig

from expertwire.errors import HcaError
from expertwire.hca.fault import Faults, FaultyHca

SLOT, SLOTS = 4096, 4


def flag_offset(slot: int) -> int:
    return (slot + 1) * SLOT - 16


def flags(rig: Rig) -> list[tuple[int, int]]:
    """(flag, what the peer wrote beside it) of every slot."""
    return [struct.unpack("<QQ", rig.at_remote(flag_offset(slot), 16)) for slot in range(SLOTS)]


def signal(rig: Rig, slot: int, seq: int, imm: int | None = None):
    return rig.inline(flag_offset(slot) + 8, struct.pack("<Q", seq), opcode=WRITE_IMM,
                      imm=slot if imm is None else imm)


@pytest.fixture
def rig():
    with Rig() as made:
        made.window.watch(made.remote.addr, SLOT, SLOTS)
        yield made


def test_the_receive_completion_makes_the_flag(rig):
    rig.do(signal(rig, 2, 77))
    assert flags(rig)[2] == (0, 77), "the write alone is no flag"
    assert rig.there.poll() == 1
    assert flags(rig) == [(0, 0), (0, 0), (77, 77), (0, 0)]
    assert rig.there.poll() == 0


def test_a_plain_write_beside_the_flag_is_none(rig):
    rig.do(rig.inline(flag_offset(1) + 8, struct.pack("<Q", 5)))
    assert rig.there.poll() == 0 and flags(rig)[1] == (0, 5)


@pytest.mark.parametrize("imm", [SLOTS, SLOTS + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_immediate_that_is_no_slot_sets_nothing(rig, imm):
    before = rig.at_remote(0, 1 << 16)
    rig.do(rig.write(opcode=WRITE_IMM, imm=imm, data=()))
    assert rig.there.poll() == 1
    assert rig.at_remote(0, 1 << 16) == before
    rig.do(signal(rig, 0, 9))
    rig.there.poll()
    assert flags(rig)[0] == (9, 9), "the connection goes on"


def test_receives_are_posted_anew(rig):
    """Ten times as many as a window holds, in bursts of all of them."""
    for burst in range(10):
        rig.post(*[signal(rig, i % SLOTS, 64 * burst + i + 1) for i in range(64)])
        rig.run()
        assert rig.error() == 0
        assert rig.there.poll() == 64
        assert [flag for flag, _ in flags(rig)] == [64 * burst + i for i in (61, 62, 63, 64)]


def test_writes_that_pass_each_other_are_in_when_the_flag_is(rig):
    """Every piece of the payload, in any order and late, and the flag last."""
    for seed in range(60):
        here = FaultyHca(rig.here, Faults(seed=seed, mtu=64, reorder=True, max_delay=10))
        rig.fill_remote(0, bytes(2048))
        payload = bytes([seed + 1]) * 2000
        rig.fill(0, payload)
        rig.post(rig.write(0, 0, 2000), signal(rig, 0, seed + 1))
        seen = []
        while rig.here.poll(1):
            rig.there.poll()
            if flags(rig)[0][0] == seed + 1:
                seen.append(rig.at_remote(0, 2000))
        rig.there.poll()
        assert flags(rig)[0][0] == seed + 1
        assert set(seen) <= {payload} and rig.at_remote(0, 2000) == payload
        here.set_faults(None)


def test_a_sleeping_receiver_wakes_up():
    """No engine thread there: only the wake-up itself can end the wait before its time."""
    with Rig() as rig:
        rig.window.watch(rig.remote.addr, SLOT, SLOTS)
        words = [rig.remote.addr + flag_offset(slot) for slot in range(SLOTS)]
        found: list[int | None] = []
        for turn in range(20):
            seen = [rig.there.read_word(word) for word in words]
            waiter = threading.Thread(target=lambda seen=seen, turn=turn: found.append(
                rig.there.wait(words, seen, spin_ns=1000 * turn, timeout_ns=5 * 10**9)))
            waiter.start()
            rig.do(signal(rig, turn % SLOTS, turn + 1))
            waiter.join(6)
            assert not waiter.is_alive() and found[turn] == turn % SLOTS


@pytest.mark.parametrize(("slot_bytes", "num_slots"), [(SLOT, 0), (SLOT, 65), (24, 4), (0, 4)])
def test_watching_what_cannot_be_watched(slot_bytes, num_slots):
    with Rig() as rig, pytest.raises(HcaError, match="1 to 64 slots"):
        rig.window.watch(rig.remote.addr, slot_bytes, num_slots)


def test_receives_have_one_owner(rig):
    with pytest.raises(HcaError, match="in use already"):
        rig.window.watch(rig.remote.addr, SLOT, SLOTS)
    with pytest.raises(HcaError, match="at most 64 open receives"):
        rig.window.post_recv(1)
    with Rig() as other:
        other.window.post_recv(1)
        with pytest.raises(HcaError, match="in use already"):
            other.window.watch(other.remote.addr, SLOT, SLOTS)
