"""The HCA kernel between two processes: bytes, flags, reads, atomics, keys, wraps, a killed peer.

The same checks on the CPU target and, where there is one, on a GPU (two GPUs if there are two),
with device code waiting for the flags on the other side. Numbers are those of tests/conformance.
"""

from __future__ import annotations

import contextlib
import os
import random

import pytest
import torch
from tests.queue_pair import ADD8, AWAIT, COPY, GET, INLINE, PUT, PUT_ALWAYS_POST, QUIET
from tests.two_ends import SIZE, Processes

from expertwire.errors import HandleError
from expertwire.hca.kernel import KernelHca
from expertwire.target import CpuTarget

COMPLETION_ERROR, NO_KEY = 2, 4
REMOTE_ACCESS, PEER_LOST = 0x13, 0x15
DONE = [(0, 0, 0)]
pytestmark = pytest.mark.timeout(300)


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:" in line for line in maps)


@pytest.mark.parametrize(("num_regions", "reason"), [
    (0, "gives 0 regions"), (1, "published no memory"), (2, "gives 2 regions"),
])
def test_a_peer_that_cannot_be_reached_leaves_nothing_mapped(num_regions, reason):
    """Over another descriptor than the window's own, as if it came from another process."""
    with contextlib.closing(KernelHca(CpuTarget(2), warps=2)) as hca:
        memory, window = hca.alloc(8192), hca.create_window()
        other = os.dup(window.fd)
        before = mappings()
        with pytest.raises(HandleError, match=reason):
            hca.import_peer(other, hca.wake_fd, [memory.fd] * num_regions)
        assert mappings() == before
        os.close(other)
        window.close()
        memory.close()


@pytest.fixture(scope="module", params=["cpu", *(["gpu"] if torch.cuda.is_available() else [])])
def processes(request):
    made = Processes(request.param)
    yield made
    made.end()


@pytest.fixture
def ends(processes):
    processes.connect()
    yield processes.here, processes.there
    processes.disconnect()


def test_44_who_sees_the_flag_sees_the_payload(ends):
    """Device code there waits for the flag and copies what lies there at that moment."""
    here, there = ends
    choose, size = random.Random(1), 120_000
    for turn in range(1, 13):
        data = choose.randbytes(size)
        here.write("send", 4096, data)
        there.begin("run", [dict(op=AWAIT, own=0, value=turn),
                            dict(op=COPY, source=4096, local=0, num_bytes=size)])
        assert here.run([dict(op=PUT, remote=4096, local=4096, num_bytes=size),
                         dict(op=INLINE, remote=0, value=turn, num_bytes=8),
                         dict(op=QUIET)]) == DONE
        assert there.finish() == DONE
        assert there.ask("read", "send", 0, size) == data, f"turn {turn}"
    assert here.first_error() == (0, 0)


def test_both_ways_in_one_launch_each(ends):
    here, there = ends
    rounds = 40
    turns = range(1, rounds + 1)
    there.begin("run", [o for i in turns for o in (
        dict(op=AWAIT, own=0, value=i), dict(op=INLINE, remote=0, value=i, num_bytes=8))]
        + [dict(op=QUIET)])
    assert here.run([o for i in turns for o in (
        dict(op=INLINE, remote=0, value=i, num_bytes=8), dict(op=AWAIT, own=0, value=i))]
        + [dict(op=QUIET)]) == DONE
    assert there.finish() == DONE
    assert here.stats()["executed"] == there.ask("stats")["executed"] == rounds


def test_45_many_warps_through_a_small_ring(ends):
    here, there = ends
    warps, each, size = 8, 24, 256
    data = os.urandom(warps * each * size)
    here.write("send", 0, data)
    found = here.run(*[
        [dict(op=PUT_ALWAYS_POST, remote=at, local=at, num_bytes=size)
         for at in range(w * each * size, (w + 1) * each * size, size)] + [dict(op=QUIET)]
        for w in range(warps)
    ])
    assert found == DONE * warps
    assert there.ask("read", "recv", 0, len(data)) == data
    assert there.ask("read", "recv", len(data), 64) == bytes(64)


def test_27_reads(ends):
    here, there = ends
    data = os.urandom(5000)
    there.ask("write", "recv", 40, data)
    assert here.run([dict(op=GET, remote=40, local=72, num_bytes=len(data)),
                     dict(op=QUIET)]) == DONE
    assert here.read("send", 72, len(data)) == data and here.read("send", 0, 72) == bytes(72)


def test_31_adds_of_both_are_exact(ends):
    """Each adds to a word of the other's memory, which it also adds to: 8 warps a side."""
    here, there = ends
    adds = [[dict(op=ADD8, remote=64, value=3)] * 50 + [dict(op=QUIET)]] * 8
    there.begin("run", *adds)
    assert here.run(*adds) == DONE * 8
    assert there.finish() == DONE * 8
    want = (3 * 8 * 50).to_bytes(8, "little")
    assert here.read("recv", 64, 8) == there.ask("read", "recv", 64, 8) == want


def test_24_more_than_65536_entries(processes):
    processes.connect(1024)
    try:
        adds = [[dict(op=ADD8, remote=0, value=1)] * 4200] * 4
        for _ in range(4):
            assert processes.here.run(*adds) == DONE * 4
        assert processes.here.run([dict(op=QUIET)]) == DONE
        assert int.from_bytes(processes.there.ask("read", "recv", 0, 8), "little") == 67_200
    finally:
        processes.disconnect()


def test_37_revoked_key_moves_nothing_and_the_other_way_goes_on(ends):
    here, there = ends
    put = [dict(op=PUT_ALWAYS_POST, remote=8, local=0, num_bytes=64), dict(op=QUIET)]
    here.write("send", 0, b"\x5a" * 64)
    assert here.run(put) == DONE
    there.ask("write", "recv", 8, bytes(64))
    there.ask("revoke")
    assert here.run(put) == [(COMPLETION_ERROR, REMOTE_ACCESS, 1)]
    assert there.ask("read", "recv", 0, 128) == bytes(128), "nothing is written on failure"
    assert here.first_error() == (REMOTE_ACCESS, 1)
    assert here.run(put)[0][0] == COMPLETION_ERROR, "a failed queue refuses further work"
    there.ask("write", "send", 0, b"\xa5" * 64)
    assert there.ask("run", put) == DONE
    assert here.read("recv", 8, 64) == b"\xa5" * 64
    there.ask("publish")


def test_28_beyond_the_region_is_refused_before_anything_is_posted(ends):
    here, there = ends
    found = here.run([dict(op=PUT_ALWAYS_POST, remote=SIZE - 4, local=0, num_bytes=8)])
    assert found[0][0] == NO_KEY and here.stats()["executed"] == 0
    assert there.ask("read", "recv", SIZE - 64, 64) == bytes(64)


def test_41_killed_peer(processes):
    """The last of a kind: its memory outlives it for us; once it is lost nothing is sent."""
    processes.connect()
    here = processes.here
    put = [dict(op=PUT_ALWAYS_POST, remote=0, local=0, num_bytes=4096), dict(op=QUIET)]
    assert here.run(put) == DONE
    processes.kill_other()
    assert here.run(put) == DONE, "into memory that nobody else maps"
    here.peer_lost()
    assert here.run(put) == [(COMPLETION_ERROR, PEER_LOST, 2)]
    processes.disconnect()
