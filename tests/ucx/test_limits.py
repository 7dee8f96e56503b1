"""What a peer can make this side hold, and what strangers can do: with somebody who speaks the
frames of the wire but does not keep its protocol."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator

import pytest

from expertwire.errors import ConfigError, HcaError
from expertwire.hca.ucx import UcxHca
from tests.ucx.attacker import NOP, QPN, READ, WRITE, Attacker, frame, op
from tests.ucx.test_wire import PEER_LOST, REMOTE_ACCESS, SIZE, End

PEER_BYTES, ALL_BYTES = 4 << 20, 6 << 20
FRAME_BYTES = 256 << 10


def wait_for(what: Callable[[], bool], timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


class Victim(End):
    """With limits that are reached soon."""

    def __init__(self):
        super().__init__(max_peer_bytes=PEER_BYTES, max_held_bytes=ALL_BYTES)

    def stat(self, name: str) -> int:
        return self.hca.stats()[name]


@pytest.fixture
def victim() -> Iterator[Victim]:
    end = Victim()
    yield end
    end.close()


@contextlib.contextmanager
def attack(victim: Victim, window=None) -> Iterator[Attacker]:
    """With a first frame that has come: from now on UCX needs no more messages to connect."""
    wire = (window or victim.window).wire
    attacker = Attacker(wire)
    refused = victim.stat("refused_frames")
    assert attacker.send(frame(wire, 0, op(NOP), secret=bytes(16)))  # refused, but it came
    attacker.progress(lambda: victim.stat("refused_frames") > refused)
    try:
        yield attacker
    finally:
        attacker.close()


@contextlib.contextmanager
def neighbour(victim: Victim) -> Iterator[Callable[[], None]]:
    """Somebody else, connected to the victim, who can write to it all the time."""
    other = End()
    window = victim.hca.create_window()
    rkey = window.publish(victim.mr, 0)
    back = victim.hca.connect_peer(window, other.window.wire)
    other.connect(window.wire)

    def check() -> None:
        data = os.urandom(64)
        ctypes.memmove(other.memory.addr, data, 64)
        other.write(victim.memory.addr + SIZE // 2, rkey, 64)
        other.wait_done()
        assert other.qp.first_error() == (0, 0)
        assert ctypes.string_at(victim.memory.addr + SIZE // 2, 64) == data

    try:
        check()
        yield check
    finally:
        other.close()
        back.close()
        window.close()


def test_stranger_who_does_not_know_the_secret_is_not_heard(victim):
    wire, before = victim.window.wire, ctypes.string_at(victim.memory.addr, 64)
    write = op(WRITE, num_bytes=64, addr=victim.memory.addr, rkey=victim.rkey)
    almost = bytes([wire.secret[0] ^ 1]) + wire.secret[1:]
    with neighbour(victim) as check, attack(victim) as attacker:
        refused = victim.stat("refused_frames")
        for secret in (bytes(16), almost, wire.secret[:8] + bytes(8), bytes(8) + wire.secret[8:]):
            assert attacker.send(frame(wire, 0, write, secret=secret), b"\xff" * 64)
        assert attacker.send(b"garbage")
        assert attacker.send(frame(wire, 0, write, lead=65), b"\xff" * 64)  # more than there is
        attacker.progress(lambda: victim.stat("refused_frames") == refused + 6)
        assert ctypes.string_at(victim.memory.addr, 64) == before
        check()
        assert attacker.send(frame(wire, 0, write), b"\xff" * 64)  # and who knows it is
        attacker.progress(lambda: ctypes.string_at(victim.memory.addr, 64) == b"\xff" * 64)


def test_peer_whose_frames_never_get_their_turn_is_cut_off(victim):
    """The first is never sent, so all others would have to be kept."""
    wire = victim.window.wire
    with neighbour(victim) as check, attack(victim) as attacker:
        victim.connect(attacker.wire)
        write = op(WRITE, num_bytes=FRAME_BYTES, addr=victim.memory.addr, rkey=victim.rkey)
        for seq in range(1, 3 * PEER_BYTES // FRAME_BYTES):
            assert attacker.send(frame(wire, seq, write), bytes(FRAME_BYTES))
        attacker.progress(lambda: victim.stat("peers_cut_off") == 1)
        victim.write(0, 0, count=2)  # to the attacker
        victim.wait_done()
        assert victim.qp.first_error() == (PEER_LOST, 0)
        check()
        stats = victim.hca.stats()
        assert stats["held_bytes"] < 1024 and stats["most_held_bytes"] <= PEER_BYTES
        assert stats["peers_cut_off"] == 1


def test_peer_that_does_not_take_its_answers_waits(victim):
    wire, count = victim.window.wire, 60
    with neighbour(victim) as check, attack(victim) as attacker:
        victim.connect(attacker.wire)
        read = op(READ, total=SIZE, addr=victim.memory.addr, rkey=victim.rkey)
        for seq in range(count):
            assert attacker.send(frame(wire, seq, read))
        wait_for(lambda: victim.stat("held_bytes") > PEER_BYTES - 2 * SIZE)
        check()
        stats = victim.hca.stats()
        assert stats["most_held_bytes"] <= PEER_BYTES and stats["peers_cut_off"] == 0
        attacker.progress(lambda: victim.stat("held_bytes") < 1024)  # now it takes them: all go out
        check()


def test_acknowledgements_that_nobody_reads_do_not_pile_up(victim):
    wire = victim.window.wire
    with neighbour(victim) as check, attack(victim) as attacker:
        victim.connect(attacker.wire)
        victim.write(0, 0, num_bytes=SIZE, count=40)  # more than sockets keep
        wait_for(lambda: victim.stat("frames_under_way") > 100)
        for seq in range(100):
            assert attacker.send(frame(wire, seq, op(NOP)))
            time.sleep(0.002)  # longer than it waits for a frame that takes it along
        assert victim.stat("frames_under_way") <= 40 * SIZE // FRAME_BYTES + 4
        check()
        assert victim.stat("held_bytes") < 1024 and victim.stat("peers_cut_off") == 0


def test_who_holds_most_goes_when_all_peers_together_hold_too_much(victim):
    second = victim.hca.create_window()
    large, small = 14 * FRAME_BYTES, 12 * FRAME_BYTES
    with neighbour(victim) as check, attack(victim) as one, attack(victim, second) as two:
        for seq in range(1, 1 + large // FRAME_BYTES):
            assert one.send(frame(victim.window.wire, seq, op(NOP)), bytes(FRAME_BYTES))
        one.progress(lambda: victim.stat("held_bytes") >= large)
        for seq in range(1, 1 + small // FRAME_BYTES):
            assert two.send(frame(second.wire, seq, op(NOP)), bytes(FRAME_BYTES))
        two.progress(lambda: victim.stat("peers_cut_off") == 1)
        wait_for(lambda: small <= victim.stat("held_bytes") < large)
        assert victim.stat("most_held_bytes") <= ALL_BYTES
        check()
        with pytest.raises(HcaError, match="hold too much"):
            victim.connect(one.wire)
    second.close()


def test_a_read_larger_than_the_limit_is_refused(victim):
    """As one with a wrong key would be; nothing else happens."""
    big = victim.hca.alloc(PEER_BYTES)
    mr = victim.hca.register(big.addr, PEER_BYTES, 15)
    wire = victim.window.wire
    rkey = victim.window.publish(mr, 0)
    try:
        with attack(victim) as attacker:
            victim.connect(attacker.wire)
            read = op(READ, total=PEER_BYTES, addr=big.addr, rkey=rkey)
            assert attacker.send(frame(wire, 0, read))
            write = op(WRITE, num_bytes=8, addr=victim.memory.addr, rkey=victim.rkey)
            assert attacker.send(frame(wire, 1, write), b"\xff" * 8)  # behind it: not executed
            other = op(WRITE, num_bytes=8, addr=victim.memory.addr + 8, rkey=victim.rkey)
            assert attacker.send(frame(wire, 0, other, qpn=QPN + 1), b"\xff" * 8)  # another queue
            attacker.progress(lambda: victim.hca.read_word(victim.memory.addr + 8) != 0)
            assert victim.stat("most_held_bytes") < SIZE
            assert victim.stat("held_bytes") == 2 * 256, "the two queues alone: nothing waits"
            assert victim.hca.read_word(victim.memory.addr) == 0
    finally:
        victim.window.revoke(rkey)
        victim.hca.revoke(mr)
        big.close()


def test_memory_that_is_still_sent_from_is_closed_to_peers_before_anybody_waits(victim):
    """A peer does not take what is sent to it: revoking says so, and the key is gone."""
    other = End()
    window = victim.hca.create_window()
    rkey = window.publish(victim.mr, 0)
    back = victim.hca.connect_peer(window, other.window.wire)
    other.connect(window.wire)
    try:
        with attack(victim) as attacker:
            victim.connect(attacker.wire)
            victim.write(0, 0, num_bytes=SIZE, count=40)  # more than sockets keep
            wait_for(lambda: victim.stat("frames_under_way") > 100)
            with pytest.raises(HcaError, match="still under way"):
                victim.hca.revoke(victim.mr, timeout=0.05)
            other.write(victim.memory.addr, rkey)
            other.wait_done()
            assert other.qp.first_error() == (REMOTE_ACCESS, 0)
    finally:
        victim.mr = victim.hca.register(victim.memory.addr, SIZE, 15)  # for closing
        other.close()
        back.close()
        window.close()


def test_limits_are_settings(monkeypatch):
    monkeypatch.setenv("EXPERTWIRE_UCX_PEER_BYTES", "lots")
    with pytest.raises(ConfigError, match="EXPERTWIRE_UCX_PEER_BYTES"):
        UcxHca(thread=False)
    with pytest.raises(ConfigError, match="EXPERTWIRE_UCX_HELD_BYTES"):
        UcxHca(thread=False, max_peer_bytes=1 << 20, max_held_bytes=1)
    monkeypatch.setenv("EXPERTWIRE_UCX_PEER_BYTES", str(1 << 20))
    UcxHca(thread=False).close()
