"""What the wire adds to the software HCA: peers that die or fall silent, sleeping, errors told by
the responder, memory given back. Entry by entry: `pytest tests/conformance --ucx`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expertwire.chaos.fleet import wait_stopped
from expertwire.control.handles import WireHandle
from expertwire.errors import HcaError
from expertwire.hca import open_hca
from expertwire.hca.soft import STATE_ERR, STATE_RESET
from expertwire.hca.ucx import UcxHca, find_library
from expertwire.hca.wqe import DataSegment, Wqe, doorbell_record

WRITE, FLUSHED, REMOTE_ACCESS, PEER_LOST = 0x08, 0x05, 0x13, 0x15
SIZE = 1 << 20
ROOT = Path(__file__).parents[2]


class End:
    """One side: an HCA with its engine thread, a region, a window."""

    def __init__(self, **options):
        self.hca = UcxHca(**options)
        self.memory = self.hca.alloc(SIZE)
        self.mr = self.hca.register(self.memory.addr, SIZE, 15)
        self.window = self.hca.create_window()
        self.rkey = self.window.publish(self.mr, 0)
        self.peer = self.qp = None
        self.next_idx = 0

    def connect(self, wire: WireHandle) -> None:
        self.peer = self.hca.connect_peer(self.window, wire)
        self.qp = self.hca.create_qp(64)
        self.qp.connect(self.peer, 1)

    def write(
        self, addr: int, rkey: int, num_bytes: int = 8, count: int = 1, offset: int = 0
    ) -> None:
        """Posts writes from that offset in this region, rings once."""
        info = self.qp.info
        for _ in range(count):
            raw = Wqe(
                WRITE, index=self.next_idx, qpn=info.qpn, raddr=addr, rkey=rkey,
                data=(DataSegment(num_bytes, self.mr.lkey, self.memory.addr + offset),),
            ).encode()
            ctypes.memmove(info.sq_addr + 64 * (self.next_idx % 64), raw, len(raw))
            self.next_idx += 1
        ctypes.memmove(info.dbrec_addr + 4, doorbell_record(self.next_idx)[4:], 4)
        self.hca.kick()

    def wait_done(self, timeout: float = 10.0) -> float:
        """Until every entry has completed, one way or another; returns how long it took."""
        start = time.monotonic()
        while self.qp.indices()[1] != self.next_idx:
            assert time.monotonic() - start < timeout, (self.qp.indices(), self.next_idx)
            time.sleep(0.001)
        return time.monotonic() - start

    def close(self) -> None:
        if self.qp:
            self.qp.destroy()
        if self.peer:
            self.peer.close()
        self.window.close()
        self.hca.revoke(self.mr)
        self.hca.close()
        self.memory.close()


@pytest.fixture
def pair():
    here, there = End(), End()
    here.connect(there.window.wire)
    there.connect(here.window.wire)
    yield here, there
    here.close()
    there.close()


CHILD = """
import sys
from expertwire.control.handles import WireHandle
from tests.ucx.test_wire import End
end = End()
print(end.window.wire.pack().hex(), end.memory.addr, end.rkey, flush=True)
end.connect(WireHandle.unpack(bytes.fromhex(sys.stdin.readline())))
print("connected", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def far():
    """(this end, the other end's process, its address, its rkey)."""
    here = End(ack_timeout=1.0)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    wire, addr, rkey = child.stdout.readline().split()
    print(here.window.wire.pack().hex(), file=child.stdin, flush=True)
    assert child.stdout.readline() == "connected\n"
    here.connect(WireHandle.unpack(bytes.fromhex(wire)))
    here.write(int(addr), int(rkey))
    here.wait_done(20)
    yield here, child, int(addr), int(rkey)
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    here.close()


@pytest.mark.parametrize("num_bytes", [1, 8, 13, 4096, 300_001, SIZE])
def test_bytes_arrive_whole_and_completions_say_so(pair, num_bytes):
    here, there = pair
    data = os.urandom(num_bytes)
    ctypes.memmove(here.memory.addr, data, num_bytes)
    here.write(there.memory.addr, there.rkey, num_bytes)
    here.wait_done()
    assert ctypes.string_at(there.memory.addr, num_bytes) == data
    assert here.qp.first_error() == (0, 0)
    assert here.hca.stats()["bytes"] == num_bytes


def test_bytes_arrive_whole_wherever_in_a_page_they_begin(pair):
    """The wire puts bytes before those that begin with a page, and fills up lines."""
    here, there = pair
    data = os.urandom(SIZE)
    ctypes.memmove(here.memory.addr, data, SIZE)
    for offset in (0, 1, 13, 14, 31, 45, 64, 4077, 4095, 4096):
        for num_bytes in (4095, 4096, 4133, 270_000):
            ctypes.memset(there.memory.addr, 0, num_bytes + 1)
            here.write(there.memory.addr, there.rkey, num_bytes, offset=offset)
            here.wait_done()
            expected = data[offset : offset + num_bytes] + b"\0"
            assert ctypes.string_at(there.memory.addr, num_bytes + 1) == expected
    assert here.qp.first_error() == (0, 0)


def test_entries_rung_together_share_frames(pair):
    """Both directions at once, more than a ring in all: nothing lost, nothing twice."""
    here, there = pair
    for _ in range(10):
        for end, other in ((here, there), (there, here)):
            end.write(other.memory.addr + SIZE // 2, other.rkey, 8, count=40)
        here.wait_done()
        there.wait_done()
    assert here.hca.stats()["wqes"] == there.hca.stats()["wqes"] == {"RDMA_WRITE": 400}
    assert here.hca.stats()["error_cqes"] == 0


def test_responder_tells_a_revoked_key_and_stores_nothing(pair):
    here, there = pair
    there.window.revoke(there.rkey)
    before = ctypes.string_at(there.memory.addr, 64)
    ctypes.memmove(here.memory.addr, b"\xff" * 64, 64)
    here.write(there.memory.addr, there.rkey, 64, count=5)
    here.wait_done()
    assert here.qp.first_error() == (REMOTE_ACCESS, 0) and here.qp.state == STATE_ERR
    assert here.hca.stats()["error_cqes"] == 5
    assert ctypes.string_at(there.memory.addr, 64) == before


def test_queue_works_again_after_a_reset(pair):
    here, there = pair
    here.write(there.memory.addr, there.rkey ^ 1)
    here.wait_done()
    assert here.qp.first_error() == (REMOTE_ACCESS, 0)
    here.qp.modify(STATE_RESET)
    here.next_idx = 0
    for state in (1, 2, 3):
        here.qp.modify(state)
    here.write(there.memory.addr, there.rkey, count=3)
    here.wait_done()
    assert here.qp.first_error() == (0, 0)


def test_frames_to_a_window_that_closed_go_nowhere():
    here, there = End(ack_timeout=0.5), End()
    here.connect(there.window.wire)
    there.connect(here.window.wire)
    there.qp.destroy()
    there.qp = None
    there.peer.close()
    there.peer = None
    there.window.close()
    ctypes.memmove(here.memory.addr, b"\xff" * 8, 8)
    here.write(there.memory.addr, there.rkey, count=3)
    here.wait_done()
    assert here.qp.first_error() == (PEER_LOST, 0)
    assert there.hca.read_word(there.memory.addr) == 0
    here.close()
    there.close()


def test_killed_peer_fails_what_is_posted(far):
    here, child, addr, rkey = far
    child.send_signal(signal.SIGKILL)
    child.wait()
    here.write(addr, rkey, count=4)
    assert here.wait_done() < 5
    syndrome, _ = here.qp.first_error()
    assert syndrome == PEER_LOST and here.hca.stats()["error_cqes"] == 4


def test_silent_peer_is_lost_after_the_timeout(far):
    """SIGSTOP: its TCP still answers, its engine does not."""
    here, child, addr, rkey = far
    child.send_signal(signal.SIGSTOP)
    wait_stopped(child.pid)
    try:
        here.write(addr, rkey, count=2)
        assert 0.8 < here.wait_done() < 6
        assert here.qp.first_error()[0] == PEER_LOST
    finally:
        child.send_signal(signal.SIGCONT)


def test_idle_pair_sleeps(pair):
    here, there = pair
    here.write(there.memory.addr, there.rkey)
    here.wait_done()
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.1, "engine threads spin although nothing happens"


def test_waiter_sleeps_until_the_flag(pair):
    """The thread that waits is woken by the network, not by its deadline."""
    here, there = pair
    flag = there.memory.addr + 4096
    for i in range(1, 20):
        ctypes.memmove(here.memory.addr, i.to_bytes(8, "little"), 8)
        time.sleep(0.01)
        here.write(flag, there.rkey)
        start = time.monotonic()
        assert there.hca.wait([flag], [i - 1], spin_ns=0, timeout_ns=5_000_000_000) == 0
        assert time.monotonic() - start < 2
        here.wait_done()


def test_waiter_does_not_spin_again_where_spinning_did_not_pay(pair):
    _, there = pair

    def wait(milliseconds: int) -> float:
        before = time.thread_time()
        assert there.hca.wait([there.memory.addr], [0], spin_ns=250_000_000,
                              timeout_ns=milliseconds * 1_000_000) is None
        return time.thread_time() - before

    wait(300)  # longer than it may spin
    assert wait(240) < 0.02


def test_atomics_of_two_requesters_add_up(pair):
    here, there = pair
    third = End()
    window = there.hca.create_window()
    rkey = window.publish(there.mr, 0)
    back = there.hca.connect_peer(window, third.window.wire)
    third.connect(window.wire)
    try:
        for end, key in ((here, there.rkey), (third, rkey)):
            info = end.qp.info
            for i in range(32):
                raw = Wqe(
                    0x12, index=i, qpn=info.qpn, raddr=there.memory.addr, rkey=key,
                    atomic=(3).to_bytes(8, "big") + bytes(8),
                    data=(DataSegment(8, end.mr.lkey, end.memory.addr + 8 * i),),
                ).encode()
                ctypes.memmove(info.sq_addr + 64 * i, raw, len(raw))
            end.next_idx = 32
            ctypes.memmove(info.dbrec_addr + 4, doorbell_record(32)[4:], 4)
            end.hca.kick()
        here.wait_done()
        third.wait_done()
        assert here.qp.first_error() == third.qp.first_error() == (0, 0)
        assert there.hca.read_word(there.memory.addr) == 2 * 32 * 3
        old = {
            end.hca.read_word(end.memory.addr + 8 * i) for end in (here, third) for i in range(32)
        }
        assert old == set(range(0, 2 * 32 * 3, 3)), "each one saw another value"
    finally:
        third.close()
        back.close()
        window.close()


def test_missing_library_is_one_clear_error(monkeypatch):
    """In a process of its own: the library is loaded once."""
    code = "from expertwire.hca import open_hca; open_hca('ucx')"
    for path in ("/nonexistent/libucp.so.0", find_library().replace("libucp", "libucs")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
            env={**os.environ, "EXPERTWIRE_UCX_LIBRARY": path},
        )
        assert "HcaError: opening UCX" in done.stderr, done.stderr


def test_descriptors_and_path_faults_are_refused():
    with open_hca("ucx", thread=False) as hca:
        with pytest.raises(HcaError, match="connect_peer"):
            hca.import_peer(0, 0, [])
        with pytest.raises(HcaError, match="netem"):
            hca.set_faults(object())


@pytest.mark.parametrize("address", [b"", b"\xff", b"\x0f" * 100])
def test_what_is_no_address_is_refused(address):
    """UCX would end the process."""
    end = End(thread=False)
    try:
        with pytest.raises(HcaError, match="address is"):
            end.hca.connect_peer(end.window, WireHandle(1, address))
    finally:
        end.close()
