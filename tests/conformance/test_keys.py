"""Checks 34 to 38: keys, bounds and access; nothing is written when one of them fails."""

from __future__ import annotations

import threading
import time

import pytest

from expertwire.errors import HcaError
from expertwire.hca.wqe import DataSegment
from tests.conformance.rig import (
    ATOMIC_FA,
    LOCAL_LENGTH,
    LOCAL_PROTECTION,
    READ,
    REMOTE_ACCESS,
    WRITE,
    Rig,
)

SIZE = 1 << 16
TOP = (1 << 64) - 1


def untouched(rig) -> bool:
    return rig.at_remote(0, SIZE) == b"\0" * SIZE


@pytest.mark.parametrize("case", [
    "unknown key", "before the start", "across the start", "across the end", "after the end",
    "address overflow", "other protection domain", "second segment", "key of the peer",
])
def test_34_local_keys(case):
    with Rig(num_bytes=SIZE) as rig:
        rig.fill(0, b"\x55" * SIZE)
        addr, lkey, num_bytes = rig.local.addr, rig.lkey, 64
        if case == "unknown key":
            lkey ^= 1
        elif case == "before the start":
            addr -= 64
        elif case == "across the start":
            addr -= 1
        elif case == "across the end":
            addr += SIZE - 63
        elif case == "after the end":
            addr += SIZE
        elif case == "address overflow":
            addr = TOP - 31
        elif case == "other protection domain":
            lkey = rig.here.register(rig.local.addr, SIZE, 15, pd=rig.here.alloc_pd()).lkey
        elif case == "key of the peer":
            lkey = rig.rkey
        data = (DataSegment(num_bytes, lkey, addr),)
        if case == "second segment":
            data = (rig.segment(0, 64), rig.segment(SIZE - 1, 2))
        cqe = rig.do(rig.write(data=data))
        assert (cqe.opcode, rig.error()) == (13, LOCAL_PROTECTION)
        assert untouched(rig), "check 38"


@pytest.mark.parametrize("opcode", [READ, ATOMIC_FA])
def test_34_results_need_local_write(opcode):
    with Rig(local_access=0) as rig:
        rig.fill_remote(0, b"\x11" * 16)
        wqe = rig.write(opcode=opcode, atomic=b"\0" * 16 if opcode == ATOMIC_FA else b"")
        rig.do(wqe)
        assert rig.error() == LOCAL_PROTECTION and rig.at_local(0, 16) == b"\0" * 16


def test_34_last_byte_of_a_region_is_usable():
    with Rig(num_bytes=SIZE) as rig:
        rig.fill(SIZE - 1, b"z")
        rig.do(rig.write(SIZE - 1, SIZE - 1, 1))
        assert rig.error() == 0 and rig.at_remote(SIZE - 1, 1) == b"z"


@pytest.mark.parametrize("case", [
    "unknown key", "local key of the peer", "before the start", "across the start",
    "across the end", "after the end", "address overflow", "key of another pair",
])
def test_35_remote_keys(case):
    with Rig(num_bytes=SIZE) as rig:
        rig.fill(0, b"\x55" * SIZE)
        addr, rkey = rig.remote.addr, rig.rkey
        other = rig.there.create_window()
        if case == "unknown key":
            rkey ^= 1
        elif case == "local key of the peer":
            rkey = rig.remote_mr.lkey
        elif case == "key of another pair":
            rkey = other.publish(rig.remote_mr, 0)
        else:
            addr += {
                "before the start": -64, "across the start": -1, "across the end": SIZE - 63,
                "after the end": SIZE, "address overflow": TOP - 31 - rig.remote.addr,
            }[case]
        cqe = rig.do(rig.write(raddr=addr, rkey=rkey, data=(rig.segment(0, 64),)))
        assert (cqe.opcode, rig.error()) == (13, REMOTE_ACCESS)
        assert untouched(rig), "check 38"
        other.close()


@pytest.mark.parametrize(("opcode", "needed"), [(WRITE, 2), (READ, 4), (ATOMIC_FA, 8)])
def test_35_remote_access_bits(opcode, needed):
    for access in (15 & ~needed, needed):
        with Rig(remote_access=access) as rig:
            rig.fill(0, b"\x55" * 8)
            wqe = rig.write(opcode=opcode, atomic=b"\1" * 16 if opcode == ATOMIC_FA else b"")
            rig.do(wqe)
            assert rig.error() == (0 if access == needed else REMOTE_ACCESS)
            if access != needed:
                assert rig.at_remote(0, 8) == b"\0" * 8 and rig.at_local(0, 8) == b"\x55" * 8


def test_35_published_range_outside_the_descriptor_is_refused():
    """A peer's mistake about its own memory must not become an access outside the mapping."""
    with Rig(num_bytes=4096) as rig:
        big = rig.there.register(rig.remote.addr, 1 << 20, 15)
        for fd_idx, fd_offset in [(0, 0), (0, 4096), (0, TOP), (1, 0), (0xFFFFFFFF, 0)]:
            rkey = rig.window.publish(big, fd_idx, fd_offset)
            qp = rig.add_qp()
            wqe = rig.write(raddr=rig.remote.addr + 4090, rkey=rkey, qpn=qp.info.qpn, index=0)
            rig.place(wqe, 0, qp)
            rig.ring(1, qp)
            rig.run()
            assert rig.error(qp) == REMOTE_ACCESS, (fd_idx, fd_offset)


def test_36_message_longer_than_a_gib():
    """INFERRED syndrome (log_msg_max = 30). The region is larger than its memory."""
    size = (1 << 30) + 1
    with Rig(num_bytes=4096) as rig:
        lkey = rig.here.register(rig.local.addr, size, 1).lkey
        rig.do(rig.write(data=(rig.segment(0, size, lkey),)))
        assert rig.error() == LOCAL_LENGTH and rig.at_remote(0, 4096) == b"\0" * 4096
    with Rig(num_bytes=4096) as rig:
        lkey = rig.here.register(rig.local.addr, size, 1).lkey
        rig.do(rig.write(data=tuple(rig.segment(0, 1 << 29, lkey) for _ in range(3))))
        assert rig.error() == LOCAL_LENGTH


@pytest.mark.parametrize("side", ["local", "window", "region of the peer"])
def test_37_key_revoked_in_flight(side):
    """The engine moves 256 KiB per step; the key goes away after the first."""
    size = 1 << 20
    with Rig(num_bytes=size) as rig:
        rig.fill(0, b"\x55" * size)
        rig.post(rig.write(0, 0, size), rig.write(0, 0, 8))
        assert rig.here.poll(1) == 1
        moved = rig.at_remote(0, size).count(0x55)
        assert 0 < moved < size
        if side == "local":
            rig.here.revoke(rig.local_mr)
        elif side == "window":
            rig.window.revoke(rig.rkey)
        else:
            rig.there.revoke(rig.remote_mr)
        rig.run()
        assert rig.error() == (LOCAL_PROTECTION if side == "local" else REMOTE_ACCESS)
        assert rig.at_remote(0, size).count(0x55) == moved, "not a byte after the revocation"
        assert rig.here.stats()["error_cqes"] == 2 and rig.qp.indices() == (2, 2)


def test_37_after_revoke_returns_the_memory_is_quiet():
    """With a running engine: whatever it was doing, no write lands after revoke returned.

    Writes are posted until one fails, so the revocation meets work that is in flight.
    """
    size = 2 << 20
    with Rig(num_bytes=size, thread=True) as rig:
        rig.fill(0, b"\x55" * size)

        def keep_posting():
            deadline = time.monotonic() + 30
            while rig.error() == 0 and time.monotonic() < deadline:
                if rig.next_idx - rig.qp.indices()[1] < 32:
                    rig.post(rig.write(0, 0, size))
                    rig.here.kick()

        poster = threading.Thread(target=keep_posting)
        poster.start()
        try:
            rig.run_until(lambda: rig.here.stats()["bytes"] > 0)
            rig.there.revoke(rig.remote_mr)
            rig.fill_remote(0, b"\0" * size)
        finally:
            poster.join()
        rig.run_until(lambda: rig.qp.indices()[1] == rig.next_idx)
        assert rig.at_remote(0, size) == b"\0" * size and rig.error() == REMOTE_ACCESS


def test_37_revoked_entry_is_given_to_another_region_and_the_old_key_stays_dead():
    with Rig() as rig:
        rig.window.revoke(rig.rkey)
        fresh = rig.window.publish(rig.remote_mr, 0)
        assert fresh != rig.rkey
        assert not rig.do(rig.write(rkey=fresh)).is_error
        rig.do(rig.write())
        assert rig.error() == REMOTE_ACCESS


def test_37_entries_are_reused_and_bounded():
    with Rig() as rig:
        for _ in range(100):
            rig.window.revoke(rig.window.publish(rig.remote_mr, 0))
        keys = [rig.window.publish(rig.remote_mr, 0) for _ in range(31)]
        assert len(set(keys)) == 31
        with pytest.raises(HcaError, match="32"):
            rig.window.publish(rig.remote_mr, 0)
        with pytest.raises(HcaError, match="not in this window"):
            rig.window.revoke(0x1234)


def test_37_revoking_a_key_that_the_peer_holds_times_out():
    """A peer that was stopped in the middle of a write: bounded, and the key stays revoked."""
    import mmap
    import struct

    with Rig() as rig, mmap.mmap(rig.window.fd, 0) as page:
        at = page.find(struct.pack("<I", rig.rkey))
        page[at + 12 : at + 16] = struct.pack("<I", 1)  # in_use
        with pytest.raises(HcaError, match="still in use"):
            rig.window.revoke(rig.rkey, timeout=0.02)
        page[at + 12 : at + 16] = struct.pack("<I", 0)
        rig.do(rig.write())
        assert rig.error() == REMOTE_ACCESS


def test_37_registering_and_revoking_while_the_engine_runs():
    with Rig(1024, thread=True) as rig:
        stop = threading.Event()

        def churn():
            while not stop.is_set():
                mr = rig.here.register(rig.local.addr, 4096, 1)
                rig.here.revoke(mr)

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for _ in range(10):
                rig.post(*[rig.write() for _ in range(100)])
                rig.here.kick()
                want = rig.next_idx
                rig.run_until(lambda: rig.qp.indices()[1] == want)  # noqa: B023
        finally:
            stop.set()
            thread.join()
        assert rig.error() == 0


def test_35_page_that_the_peer_scribbled_on_harms_nobody():
    """The window's page is writable by the peer: its owner must not trust the counts in it."""
    import mmap
    import random

    with Rig() as rig, mmap.mmap(rig.window.fd, 0) as page:
        page[12:] = random.Random(7).randbytes(len(page) - 12)
        for _ in range(40):
            try:
                rig.window.publish(rig.remote_mr, 0)
            except HcaError:
                break
        rig.do(rig.write())
        rig.there.wait([], [], spin_ns=0, timeout_ns=1000)
