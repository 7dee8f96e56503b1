"""Waiting, waking and turns of the software HCA."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time

import pytest
from tests.conformance.rig import ALL_ACCESS, Rig

from expertwire.hca.soft import HOOK_STALL, SoftHca
from expertwire.hca.wqe import Wqe


class Waiter(threading.Thread):
    """Waits on `there` for the first word of the remote region; `result` is wait's answer."""

    def __init__(self, rig, *, timeout_s: float = 10.0, spin_ns: int = 0, seen: int = 0):
        super().__init__(daemon=True)
        self.rig, self.spin_ns, self.seen = rig, spin_ns, seen
        self.timeout_ns = int(timeout_s * 1e9)
        self.result, self.took = "not back", 0.0
        self.start()

    def run(self):
        begin = time.monotonic()
        self.result = self.rig.there.wait(
            [self.rig.remote.addr + 64, self.rig.remote.addr], [0, self.seen],
            spin_ns=self.spin_ns, timeout_ns=self.timeout_ns,
        )
        self.took = time.monotonic() - begin

    def until_asleep(self):
        """The sleeping word of the window is what the peer's engine looks at."""
        deadline = time.monotonic() + 5
        while os.pread(self.rig.window.fd, 4, 8) != b"\1\0\0\0":
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_word_written_by_the_peer_wakes_a_sleeper():
    with Rig() as rig:
        waiter = Waiter(rig)
        waiter.until_asleep()
        rig.do(rig.inline(0, struct.pack("<Q", 7)))
        waiter.join(5)
        assert waiter.result == 1, "index of the word that changed"
        assert waiter.took < 9 and rig.here.stats()["wakes"] == 1


@pytest.mark.parametrize("how", ["atomic", "interrupt", "notify"])
def test_other_ways_to_wake(how):
    with Rig() as rig:
        waiter = Waiter(rig)
        waiter.until_asleep()
        if how == "atomic":
            rig.do(rig.atomic(0x12, struct.pack(">QQ", 1, 0)))
        elif how == "interrupt":
            rig.there.interrupt()
        else:  # the direct path: a plain store, then a call
            rig.fill_remote(0, b"\1")
            rig.peer.notify()
        waiter.join(5)
        assert waiter.result == (None if how == "interrupt" else 1)


def test_change_before_the_wait_returns_at_once():
    with Rig() as rig:
        rig.fill_remote(0, b"\5")
        waiter = Waiter(rig)
        waiter.join(5)
        assert waiter.result == 1 and waiter.took < 9
        assert rig.there.wait([rig.remote.addr], [5], spin_ns=0, timeout_ns=1_000_000) is None
        assert rig.there.wait([rig.remote.addr], [4], spin_ns=0, timeout_ns=0) == 0


def test_wait_times_out_and_never_before():
    with SoftHca(thread=False) as hca:
        word = hca.alloc(4096)
        for spin_ns in (0, 1_000_000, 1 << 62):
            begin = time.monotonic()
            assert hca.wait([word.addr], [0], spin_ns=spin_ns, timeout_ns=20_000_000) is None
            assert time.monotonic() - begin >= 0.02
        word.close()


def test_interrupt_before_the_wait_is_not_lost_and_counts_once():
    with SoftHca(thread=False) as hca:
        word = hca.alloc(4096)
        hca.interrupt()
        begin = time.monotonic()
        assert hca.wait([word.addr], [0], spin_ns=0, timeout_ns=10_000_000_000) is None
        assert time.monotonic() - begin < 9
        assert hca.wait([word.addr], [0], spin_ns=0, timeout_ns=2_000_000) is None
        word.close()


def test_no_wake_up_is_lost_in_a_ping_pong():
    """Sleeps at once on both sides: every round needs a wake-up, a lost one costs 10 s."""
    with Rig(1024) as rig:
        rounds = 300
        done = []

        def echo():
            for turn in range(rounds):
                done.append(rig.there.wait(
                    [rig.remote.addr], [turn], spin_ns=0, timeout_ns=10_000_000_000
                ))

        thread = threading.Thread(target=echo, daemon=True)
        thread.start()
        for turn in range(1, rounds + 1):
            rig.do(rig.inline(0, struct.pack("<Q", turn)))
            deadline = time.monotonic() + 5
            while len(done) < turn and time.monotonic() < deadline:
                time.sleep(0)
        thread.join(5)
        assert done == [0] * rounds


def test_waiting_thread_runs_the_engine():
    """No engine thread: whoever waits carries out what is posted."""
    with SoftHca(thread=False) as hca:
        memory = hca.alloc(4096)
        mr = hca.register(memory.addr, 4096, ALL_ACCESS)
        window = hca.create_window()
        rkey = window.publish(mr, 0)
        peer = hca.import_peer(window.fd, hca.wake_fd, [memory.fd])  # loopback
        qp = hca.create_qp(16)
        qp.connect(peer, qp.info.qpn)
        raw = Wqe(8, 0, qp.info.qpn, memory.addr, rkey, inline=b"\1" * 8).encode()
        ctypes.memmove(qp.info.sq_addr, raw, len(raw))
        ctypes.memmove(qp.info.dbrec_addr + 4, b"\0\0\0\1", 4)
        assert hca.wait([memory.addr], [0], spin_ns=10**9, timeout_ns=5 * 10**9) == 0
        qp.destroy()
        peer.close()
        window.close()
        memory.close()


# --- the engine thread --------------------------------------------------------------------
def thread_cpu_ns(column: int = 0) -> dict[str, int]:
    """CPU time of every thread of this process, from the scheduler; column 2: times it was run."""
    times = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/schedstat") as file:
                times[task] = int(file.read().split()[column])
        except FileNotFoundError:
            continue
    return times


def test_idle_engine_thread_uses_next_to_no_cpu():
    before = set(thread_cpu_ns())
    with SoftHca(thread=True):
        time.sleep(0.1)  # it spins a little before it sleeps
        (task,) = set(thread_cpu_ns()) - before
        begin = thread_cpu_ns()[task]
        time.sleep(0.5)
        used = thread_cpu_ns()[task] - begin
        assert used < 0.05 * 0.5e9, f"{used / 5e6:.1f} % of a core"


def test_idle_engine_thread_looks_at_its_queues_less_and_less_often():
    """A hundred idle engines of a hundred queues each must not fill two cores with looking."""
    before = set(thread_cpu_ns())
    with SoftHca(thread=True):
        time.sleep(0.7)  # 5 + 10 + 20 + ... ms
        (task,) = set(thread_cpu_ns()) - before
        begin = thread_cpu_ns(2)[task]
        time.sleep(1.0)
        looks = thread_cpu_ns(2)[task] - begin
        assert 1 <= looks <= 12, "every 320 ms in the end; every 5 ms would be 200"


def test_an_entry_that_is_held_up_is_tried_again_soon():
    with Rig(thread=True) as rig:
        time.sleep(0.7)  # looks have become rare
        refused: list[float] = []

        def hook(*_) -> int:
            refused.append(time.monotonic())
            return HOOK_STALL if len(refused) < 20 else 0

        rig.here.set_hook(hook)
        rig.post(rig.inline(0, b"late"))
        rig.here.kick()
        deadline = time.monotonic() + 5
        while rig.qp.indices()[1] < rig.next_idx:
            assert time.monotonic() < deadline, "20 looks at 320 ms would be 6.4 s"
            time.sleep(0.001)
        rig.here.set_hook(None)
        assert len(refused) == 20


def test_kick_wakes_the_engine_thread_and_a_forgotten_kick_costs_little():
    with Rig(thread=True) as rig:
        for kick in (True, False):
            time.sleep(0.05)
            rig.post(rig.write())
            if kick:
                rig.here.kick()
            deadline = time.monotonic() + 5
            while rig.qp.indices()[1] < rig.next_idx:
                assert time.monotonic() < deadline
                time.sleep(0.0005)


def test_stalled_entry_is_retried_and_does_not_block_other_queues():
    with Rig() as rig:
        other = rig.add_qp()
        rig.here.set_hook(lambda _c, qpn, *_: HOOK_STALL if qpn == rig.qp.info.qpn else 0)
        rig.post(rig.inline(0, b"held"))
        rig.place(rig.inline(8, b"free", qpn=other.info.qpn, index=0), 0, other)
        rig.ring(1, other)
        rig.run()
        assert rig.at_remote(0, 12) == b"\0" * 8 + b"free"
        rig.here.set_hook(None)
        rig.run()
        assert rig.at_remote(0, 4) == b"held"


def test_large_write_does_not_starve_the_other_queue():
    """64 MiB on one queue; words on the other go through between its pieces."""
    size = 64 << 20
    with Rig(num_bytes=size) as rig:
        other = rig.add_qp()
        rig.post(rig.write(0, 0, size))
        assert rig.here.poll(1) == 1
        for i in range(20):
            rig.place(rig.inline(size - 8, b"%8d" % i, qpn=other.info.qpn, index=i), i, other)
            rig.ring(i + 1, other)
            rig.here.poll(4)
            assert other.indices() == (i + 1, i + 1), "carried out within one turn"
        assert rig.qp.indices() == (1, 0), "the large one is still under way"
        rig.run()
        assert rig.qp.indices() == (1, 1) and rig.cqe().byte_count == size


def test_many_small_entries_do_not_starve_the_other_queue():
    with Rig(1024) as rig:
        other = rig.add_qp()
        rig.post(*[rig.wqe(0) for _ in range(1000)])
        rig.place(rig.inline(0, b"me too", qpn=other.info.qpn, index=0), 0, other)
        rig.ring(1, other)
        rig.here.poll(64)
        assert other.indices() == (1, 1) and rig.qp.indices()[1] < 100
