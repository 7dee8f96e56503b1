"""Two processes, each with its own HCA: puts both ways, and one of them killed."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from expertwire.hca.soft import SoftHca
from expertwire.hca.wqe import Cqe, DataSegment, Wqe

SIZE = 1 << 20
FLAG, PAYLOAD = 0, 4096
PEER_LOST = 0x15
DEADLINE_NS = 20_000_000_000


class End:
    """One side: memory, window, queue pair, and the exchange of descriptors over a socket."""

    def __init__(self, channel: socket.socket):
        self.channel = channel
        self.hca = SoftHca(thread=True)
        self.recv, self.send = self.hca.alloc(SIZE), self.hca.alloc(SIZE)
        recv_mr = self.hca.register(self.recv.addr, SIZE, 15)
        self.lkey = self.hca.register(self.send.addr, SIZE, 1).lkey
        self.window = self.hca.create_window()
        rkey = self.window.publish(recv_mr, 0)
        self.qp = self.hca.create_qp(256)
        self.num_posted = 0
        mine = {"qpn": self.qp.info.qpn, "rkey": rkey, "addr": self.recv.addr}
        fds = [self.window.fd, self.hca.wake_fd, self.recv.fd]
        channel.settimeout(20)
        socket.send_fds(channel, [json.dumps(mine).encode()], fds)
        raw, fds, *_ = socket.recv_fds(channel, 4096, 3)
        self.theirs = json.loads(raw)
        self.peer = self.hca.import_peer(fds[0], fds[1], [fds[2]])
        for fd in fds:
            os.close(fd)
        self.qp.connect(self.peer, self.theirs["qpn"])

    def post(self, *wqes: Wqe) -> None:
        info = self.qp.info
        for wqe in wqes:
            raw = wqe.encode()
            ctypes.memmove(info.sq_addr + 64 * (self.num_posted % 256), raw, len(raw))
            self.num_posted += 1
        record = struct.pack(">I", self.num_posted & 0xFFFF)
        ctypes.memmove(info.dbrec_addr + 4, record, 4)
        self.hca.kick()

    def put(self, payload: bytes, flag: int) -> None:
        """Payload, then the flag, on one queue pair."""
        ctypes.memmove(self.send.addr, payload, len(payload))
        target, rkey, qpn = self.theirs["addr"], self.theirs["rkey"], self.qp.info.qpn
        first = self.num_posted
        self.post(
            Wqe(8, first, qpn, target + PAYLOAD, rkey,
                (DataSegment(len(payload), self.lkey, self.send.addr),)),
            Wqe(8, first + 1, qpn, target + FLAG, rkey, inline=struct.pack("<Q", flag)),
        )

    def take(self, seen: int, num_bytes: int) -> tuple[int, bytes]:
        """Waits for the flag to change; returns it and the payload."""
        found = self.hca.wait(
            [self.recv.addr + FLAG], [seen], spin_ns=100_000, timeout_ns=DEADLINE_NS
        )
        assert found == 0, "no message in time"
        flag = self.hca.read_word(self.recv.addr + FLAG)
        return flag, ctypes.string_at(self.recv.addr + PAYLOAD, num_bytes)

    def close(self) -> None:
        self.qp.destroy()
        self.peer.close()
        self.window.close()
        self.hca.close()
        self.recv.close()
        self.send.close()


def message(turn: int) -> bytes:
    return struct.pack("<Q", turn) * (1 + turn * 37 % 1000)


def echo(channel: socket.socket, rounds: int) -> None:
    """The other process: sends every message back, each byte inverted."""
    end = End(channel)
    for turn in range(1, rounds + 1):
        flag, payload = end.take(turn - 1, len(message(turn)))
        assert flag == turn
        end.put(bytes(255 - b for b in payload), turn)
    channel.recv(1)  # until the parent is done looking
    end.close()


def sleep_for_ever(channel: socket.socket, _rounds: int) -> None:
    """The other process: sets up, says so, then hangs until it is killed."""
    end = End(channel)
    channel.send(b"r")
    time.sleep(600)
    end.close()


def resources() -> tuple[int, int, set[str]]:
    maps = Path("/proc/self/maps").read_text().count("memfd:expertwire")
    ours = {name for name in os.listdir("/dev/shm") if "expertwire" in name}
    return len(os.listdir("/proc/self/fd")), maps, ours


class Child:
    """A spawned process that runs `target` with its end of a socket pair."""

    def __init__(self, target, rounds: int):
        self.channel, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=target, args=(theirs, rounds), daemon=True)
        self.process.start()
        theirs.close()

    def close(self) -> None:
        self.channel.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


@pytest.fixture(scope="module", autouse=True)
def _spawn_helpers():
    """multiprocessing's own helper keeps a descriptor: have it before anything is counted."""
    child = Child(print, 0)
    child.process.join(30)
    child.close()


def test_puts_both_ways():
    before = resources()
    rounds = 200
    child = Child(echo, rounds)
    end = End(child.channel)
    for turn in range(1, rounds + 1):
        end.put(message(turn), turn)
        flag, answer = end.take(turn - 1, len(message(turn)))
        assert flag == turn and answer == bytes(255 - b for b in message(turn))
    assert end.qp.first_error() == (0, 0)
    assert end.hca.stats()["wqes"] == {"RDMA_WRITE": 2 * rounds}
    child.channel.send(b"x")
    child.process.join(20)
    assert child.process.exitcode == 0
    end.close()
    child.close()
    assert resources() == before


def test_peer_killed():
    """kill -9: its memory outlives it for us, so nothing faults; lost() ends the waiting."""
    before = resources()
    child = Child(sleep_for_ever, 0)
    end = End(child.channel)
    assert child.channel.recv(1) == b"r"
    os.kill(child.process.pid, signal.SIGKILL)
    assert child.channel.recv(1) == b"", "the socket tells of the death"
    child.process.join(20)

    end.put(b"nobody reads this", 1)  # lands in memory that only we still map
    deadline = time.monotonic() + 10
    while end.qp.indices()[1] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert end.qp.first_error() == (0, 0)

    begin = time.monotonic()
    end.peer.lost()
    end.put(b"into the void", 2)
    while end.qp.indices()[1] < 4:
        assert time.monotonic() < begin + 10
        time.sleep(0.001)
    assert end.qp.first_error() == (PEER_LOST, 2)
    assert Cqe.decode(ctypes.string_at(end.qp.info.cq_addr, 64)).is_error
    end.peer.notify()  # harmless
    end.close()
    child.close()
    assert resources() == before


def test_killed_in_the_middle_of_a_long_write():
    """What the dead process was sending stops; its use of our key does not hold us for ever."""
    before = resources()
    child = Child(flood, 0)
    end = End(child.channel)
    assert end.hca.wait([end.recv.addr], [0], spin_ns=0, timeout_ns=DEADLINE_NS) == 0
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.join(20)
    begin = time.monotonic()
    end.close()  # revokes nothing by hand: closing the window must be enough
    assert time.monotonic() - begin < 5
    child.close()
    assert resources() == before


def flood(channel: socket.socket, _rounds: int) -> None:
    """The other process: writes all of our memory over and over."""
    end = End(channel)
    turn = 0
    while True:
        turn += 1
        end.put(b"\x55" * (SIZE - PAYLOAD), turn)
        while end.qp.indices()[1] < end.num_posted:
            time.sleep(0)
