"""Checks 44 to 50: order and concurrency, with the device code and the engine side by side."""

from __future__ import annotations

import ctypes
import random
import struct
import threading
import time

import pytest

from expertwire.hca.soft import HOOK_STALL
from expertwire.hca.wqe import Wqe
from tests.conformance.rig import NOP, PEER_LOST, DeviceRig, Rig
from tests.queue_pair import ADD8, INLINE, PUT, PUT_ALWAYS_POST, QUIET


def test_44_flag_is_never_seen_before_its_payload():
    """A reader in another thread polls the flag; the payload of that round must be there."""
    size, rounds = 1_500_000, 30
    with Rig(1024, num_bytes=1 << 21, thread=True) as rig:
        seen, stop = [], threading.Event()

        def read():
            while not stop.is_set() and len(seen) < rounds:
                flag = struct.unpack("<Q", rig.at_remote(0, 8))[0]
                if flag != len(seen):  # the next round is not posted before this one was read
                    seen.append(rig.at_remote(64, size) == bytes([flag]) * size)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for turn in range(1, rounds + 1):
                rig.fill(64, bytes([turn]) * size)
                rig.post(rig.write(64, 64, size), rig.inline(0, struct.pack("<Q", turn)))
                rig.here.kick()
                rig.run_until(lambda: len(seen) == turn, timeout_s=30)  # noqa: B023
        finally:
            stop.set()
            reader.join()
        assert seen == [True] * rounds and rig.error() == 0


def test_44_engine_stopped_between_payload_and_flag():
    with Rig(num_bytes=1 << 20) as rig:
        rig.fill(0, b"\x55" * (1 << 20))
        rig.post(rig.write(64, 0, 600_000), rig.inline(0, b"\1" + b"\0" * 7))
        while rig.qp.indices()[1] == 0:
            assert rig.at_remote(0, 8) == b"\0" * 8
            assert rig.here.poll(1) == 1
        assert rig.at_remote(64, 600_000) == b"\x55" * 600_000 and rig.at_remote(0, 1) == b"\0"
        rig.run()
        assert rig.at_remote(0, 1) == b"\1"


@pytest.mark.parametrize("attempt", range(4))
def test_45_a_waiting_call_has_its_turn_before_the_engine_has_another(attempt):
    """A call that waits for the lock is let in after the turn (16 entries) that it met."""
    with Rig(1024) as rig:
        calling, seen = threading.Event(), []

        def control():
            calling.set()
            seen.append(rig.qp.indices())

        caller = threading.Thread(target=control)

        def hold(_context, _qpn, idx, *_):
            if idx == 0:  # this thread is the engine and has the lock
                caller.start()
                calling.wait(5)
                time.sleep(0.3)  # for the call above to reach the lock
            return 0

        rig.here.set_hook(hold)
        rig.post(*[rig.wqe(NOP) for _ in range(1000)])
        rig.run_until(lambda: seen, timeout_s=10)
        caller.join()
        rig.here.set_hook(None)
        assert seen == [(1000, 16)]


def test_45_control_calls_do_not_starve_the_engine():
    """Threads that call all the time: the engine thread still gets through its work."""
    with Rig(1024, num_bytes=1 << 20, thread=True) as rig:
        stop = threading.Event()

        def hammer():
            while not stop.is_set():
                rig.here.revoke(rig.here.register(rig.local.addr, 64, 1))
                rig.here.stats()

        threads = [threading.Thread(target=hammer) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            rig.post(*[rig.write(num_bytes=1 << 20) for _ in range(200)])
            rig.here.kick()
            deadline = time.monotonic() + 30
            while rig.here.stats()["bytes"] < 200 << 20:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert rig.error() == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("warps", [2, 5, 16, 32])
def test_45_up_to_32_warps_with_puts_of_one_to_three_entries(warps, seed):
    """Free slots are poisoned: what the engine takes up is whole, in order, and nobody's else."""
    with DeviceRig(64, chunk_bytes=64) as rig:
        rig.fill(0, bytes(range(1, 193)))
        ring, mask = rig.qp.info.sq_addr, rig.qp.info.num_wqe - 1
        ctypes.memset(ring, 0xEE, 64 * (mask + 1))
        log = []

        def look(_context, _qpn, idx, addr, num_bytes):
            wqe = Wqe.decode(ctypes.string_at(addr, num_bytes))
            assert (wqe.index, wqe.num_segments) == (idx & 0xFFFF, 3 + (wqe.opcode == 0x15)), wqe
            log.append(idx)
            # The entry before is executed; unless its slot was given out again, it is free.
            if idx and rig.states[0].resv_head <= idx - 1 + mask + 1:
                ctypes.memset(ring + 64 * ((idx - 1) & mask), 0xEE, 64)
            return 0

        failures = []

        def hook(*arguments):
            try:
                return look(*arguments)
            except Exception as err:
                failures.append(err)
                return 0x02

        rig.here.set_hook(hook)
        choose = random.Random(seed)
        per_warp = [
            [rig.operation(choose.choice([PUT, PUT_ALWAYS_POST]), 256 * (2 * w + i), 0,
                           num_bytes=choose.choice([40, 100, 192]), message_idx=i)
             for i in range(2)]
            + [rig.operation(ADD8, 20480, value=1), dict(op=QUIET)] for w in range(warps)
        ]
        statuses = rig.launch(per_warp, warp_size=choose.choice([1, 4]), seed=seed)
        rig.here.set_hook(None)
        assert not failures, failures[0]
        assert [s.code for s in statuses] == [0] * warps
        assert struct.unpack("<Q", rig.at_remote(20480, 8))[0] == warps
        for w, operations in enumerate(per_warp):
            for i, operation in enumerate(operations[:2]):
                want = bytes(range(1, operation["num_bytes"] + 1)).ljust(256, b"\0")
                assert rig.at_remote(256 * (2 * w + i), 256) == want
        assert log == list(range(rig.states[0].resv_head)), "each entry executed once, in order"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("warp_size", [1, 4])
def test_45_many_warps_on_one_queue(seed, warp_size):
    """Every put of every warp lands once: none lost, none doubled, none early."""
    warps, puts = 6, 8
    with DeviceRig(16, chunk_bytes=48) as rig:
        for i in range(warps * puts):
            rig.fill(40 * i, bytes([i + 1]) * 40)
        log = []
        rig.here.set_hook(lambda _c, _q, idx, *_: log.append(idx) or 0)
        per_warp = [
            [rig.operation(PUT if i % 4 else PUT_ALWAYS_POST, 40 * (w * puts + i),
                           40 * (w * puts + i), num_bytes=40, message_idx=i) for i in range(puts)]
            + [rig.operation(ADD8, 8192, value=1), dict(op=QUIET)] for w in range(warps)
        ]
        statuses = rig.launch(per_warp, warp_size=warp_size, seed=seed)
        rig.here.set_hook(None)
        assert [s.code for s in statuses] == [0] * warps
        for i in range(warps * puts):
            assert rig.at_remote(40 * i, 40) == bytes([i + 1]) * 40
        assert struct.unpack("<Q", rig.at_remote(8192, 8))[0] == warps
        assert log == list(range(rig.states[0].resv_head)), "each entry executed once, in order"


def test_46_reserver_that_never_submits():
    """Others wait for their turn and give up in bounded time; nothing is corrupted."""
    with DeviceRig(timeout_ns=3_000_000) as rig:
        put = rig.operation(PUT_ALWAYS_POST, num_bytes=8)
        rig.launch([[put]])
        rig.states[0].resv_head += 1  # a warp reserved slot 1 and was lost
        (status,) = rig.launch([[put]])
        assert (status.code, status.stage, status.expected, status.seen) == (3, 4, 2, 1)
        assert rig.qp.indices() == (1, 1), "nothing beyond the gap was rung"
        (status,) = rig.launch([[put]])
        assert status.code == 2, "the queue is marked failed: no further wait"


@pytest.mark.parametrize("depth", [16, 64])
def test_47_full_ring_blocks_and_overwrites_nothing(depth):
    """Ten times the ring is posted while the engine stands still."""
    import ctypes

    with DeviceRig(depth, timeout_ns=3_000_000) as rig:
        rig.here.set_hook(lambda *_: HOOK_STALL)
        put = rig.operation(PUT_ALWAYS_POST, num_bytes=8)
        (status,) = rig.launch([[put] * (10 * depth)])
        assert (status.code, status.stage) == (1, 3)
        before = ctypes.string_at(rig.qp.info.sq_addr, 64 * depth)
        rig.launch([[put] * 5])
        assert ctypes.string_at(rig.qp.info.sq_addr, 64 * depth) == before
        rig.here.set_hook(None)
        (status,) = rig.launch([[put] * (10 * depth) + [dict(op=QUIET)]])
        assert status.code == 0 and rig.error() == 0
        assert rig.qp.indices() == (11 * depth, 11 * depth)


@pytest.mark.parametrize("num_messages", range(1, 10))
def test_48_last_message_always_leaves(num_messages):
    """Every fourth message rings; the tail goes with the last one, or with quiet."""
    with DeviceRig() as rig:
        rig.fill(0, bytes(range(1, 73)))
        puts = [
            rig.operation(PUT, 8 * i, 8 * i, num_bytes=8, message_idx=i)
            for i in range(num_messages)
        ]
        (status,) = rig.launch([[*puts, dict(op=QUIET)]])
        assert status.code == 0
        assert rig.at_remote(0, 8 * num_messages) == bytes(range(1, 8 * num_messages + 1))
    with DeviceRig() as rig:
        last = rig.operation(INLINE, 8, value=1, num_bytes=8)
        puts = [rig.operation(PUT, 64 + 8 * i, num_bytes=8, message_idx=i)
                for i in range(num_messages - 1)]
        rig.launch([[*puts, last]])
        rig.run()
        assert rig.at_remote(8, 1) == b"\1" and rig.qp.indices()[1] == num_messages


def test_49_quiet_returns_the_syndrome():
    with DeviceRig() as rig:
        rig.remote_keys[0].key_be ^= 0xFF
        put, quiet = rig.operation(PUT_ALWAYS_POST, num_bytes=8), dict(op=QUIET)
        (status,) = rig.launch([[put, quiet]])
        assert (status.code, status.syndrome, status.wqe_idx) == (2, 0x13, 0)
    with DeviceRig() as rig:
        rig.peer.lost()
        put = rig.operation(PUT_ALWAYS_POST, num_bytes=8)
        (status,) = rig.launch([[put, quiet]])
        assert (status.code, status.syndrome) == (2, PEER_LOST)


def test_50_schedules_give_the_same_memory():
    """One lane after another, lanes in lock-step of any width, seeded, an engine thread, and each
    warp on a thread of its own."""
    def program(rig):
        return [
            [rig.operation(PUT, 100 * w + 10 * i, 10 * i, num_bytes=10, message_idx=i)
             for i in range(5)]
            + [rig.operation(ADD8, 4096, value=w + 1), rig.operation(INLINE, 4104 + 8 * w,
               value=w, num_bytes=8), dict(op=QUIET)] for w in range(4)
        ]

    images = set()
    for warp_size in (1, 2, 4, 32):
        for seed in (None, 1, 2, 3):
            with DeviceRig(32, chunk_bytes=64) as rig:
                rig.fill(0, bytes(range(1, 51)))
                assert all(
                    s.code == 0 for s in rig.launch(program(rig), warp_size=warp_size, seed=seed)
                )
                images.add(rig.at_remote(0, 8192))
    with DeviceRig(32, chunk_bytes=64, thread=True) as rig:
        rig.fill(0, bytes(range(1, 51)))
        assert all(s.code == 0 for s in rig.launch(program(rig), engine=False))
        images.add(rig.at_remote(0, 8192))
    for warp_size in (1, 4):
        with DeviceRig(32, chunk_bytes=64, thread=True, timeout_ns=60 * 10**9) as rig:
            rig.fill(0, bytes(range(1, 51)))
            start, codes = threading.Barrier(4), []

            def run(operations, rig=rig, start=start, codes=codes, warp_size=warp_size):
                start.wait()
                codes.extend(s.code for s in rig.launch([operations], warp_size=warp_size,
                                                        engine=False))

            threads = [threading.Thread(target=run, args=(o,)) for o in program(rig)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert codes == [0] * 4
            images.add(rig.at_remote(0, 8192))
    assert len(images) == 1
