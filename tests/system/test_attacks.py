"""What strangers get, and what a client that knows the token but means harm can do to others."""

from __future__ import annotations

import array
import contextlib
import ctypes
import itertools
import os
import random
import socket
import threading
import time

import psutil
import pytest
import torch
from tests.system.cluster import TOKEN, batch, cluster, expected, model_facts
from tests.system.test_elastic import wait_until
from tests.system.test_faults import RawRequest

from expertwire import Client
from expertwire.client import link
from expertwire.config import ServerConfig
from expertwire.control.channel import Channel
from expertwire.control.connection import Endpoint
from expertwire.control.frames import connect_unix
from expertwire.errors import ExpertwireError, HcaError
from expertwire.message import SlotShape
from expertwire.server.client_link import ClientLink, share_credit

MODEL = model_facts(num_experts=6, hidden_size=16, top_k=2)
ONE = [range(6)]


def mapped_regions() -> int:
    with open("/proc/self/maps") as maps:
        return maps.read().count("memfd:expertwire")


@contextlib.contextmanager
def goes_on(client: Client, longest: float = 1.0, pause: float = 0.0):
    """While open, a client's steps in another thread are right, and none takes long."""
    stop, took, errors = threading.Event(), [0.0], []
    inputs = batch(5, MODEL)
    want = expected(*inputs, MODEL)

    def work() -> None:
        try:
            while not stop.is_set() or len(took) <= 6:
                begin = time.monotonic()
                out = client.moe(0, *inputs)
                took.append(time.monotonic() - begin)
                assert torch.allclose(out, want)
                time.sleep(pause)
        except BaseException as err:
            errors.append(err)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        thread.join(20)
    assert not errors, errors
    assert len(took) > 5 and max(took) < longest, (len(took), max(took))
    assert client.num_retries == 0 and client.links.num_lost == 0


# ---------------------------------------------------------------- strangers


@pytest.mark.parametrize("bytes_", [
    b"", b"\0\0\0\x05{}", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 9000
])
def test_a_stranger_gets_no_descriptor_no_memory_and_no_key(bytes_):
    with cluster(ONE, MODEL) as (client, servers, _):
        process, address = psutil.Process(), servers[0]._listener.address
        num_fds, num_regions, num_clients = process.num_fds(), mapped_regions(), 1
        strangers = []
        for _ in range(20):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(3)
            sock.connect("\0" + address)
            sock.sendall(bytes_)
            strangers.append(sock)
        for sock in strangers:
            data, ancillary, _, _ = sock.recvmsg(65536, socket.CMSG_SPACE(64))
            assert ancillary == [], "a descriptor before the proof"
            assert b"nonce" in data and b"rkey" not in data and b"memory" not in data
        assert mapped_regions() == num_regions and len(servers[0]._clients) == num_clients
        assert process.num_fds() <= num_fds + 2 * len(strangers), "a socket each, of both ends"
        for sock in strangers:
            sock.close()
        wait_until(lambda: process.num_fds() <= num_fds)
        client.moe(0, *batch(4, MODEL))


def test_keys_are_random_and_of_one_connection_each():
    with cluster([range(6), range(6)], MODEL) as (_, _, registry):
        rkeys = []
        for _ in range(12):
            with Client(registry, token=TOKEN) as other:
                other.links.wait(lambda t: len(t.links) == 2, 5)
                for ours in other.links.table.links:
                    rkeys += [ours.endpoint.remote.rkey, ours.endpoint.memory_handle().rkey]
        assert len(set(rkeys)) == len(rkeys)
        steps = {(b - a) % 2**32 for a, b in itertools.pairwise(rkeys)}
        assert len(steps) == len(rkeys) - 1, "the next key does not follow from the last"
        assert sum(bin(key).count("1") for key in rkeys) / len(rkeys) > 6, "more than a counter"


# ---------------------------------------------------------------- with the token


def test_one_client_cannot_reach_the_memory_of_another():
    with cluster(ONE, MODEL) as (client, servers, registry), Client(
        registry, token=TOKEN
    ) as attacker:
        attacker.wait_ready(5)
        victim, mine = client.links.table.links[0].endpoint, attacker.links.table.links[0].endpoint
        assert os.fstat(victim.recv.fd).st_ino != os.fstat(mine.recv.fd).st_ino
        links = {one.client_id: one.endpoint for one in servers[0]._clients}
        inodes = {os.fstat(end.recv.fd).st_ino for end in links.values()}
        assert len(inodes) == 2, "each has request slots of its own"
        theirs = victim.remote
        for rkey, addr, size in (
            (theirs.rkey, theirs.addr, theirs.num_bytes),  # even if it were known
            (mine.remote.rkey, theirs.addr, 16),
            (mine.remote.rkey, mine.remote.addr, mine.remote.num_bytes + 1),
            (mine.remote.rkey, mine.remote.addr - 1, 16),
        ):
            with pytest.raises(HcaError):
                mine.peer.map(rkey, addr, size)


def test_a_flood_of_garbage_harms_only_its_sender(caplog):
    with cluster(ONE, MODEL) as (client, servers, registry), Client(
        registry, token=TOKEN
    ) as attacker:
        attacker.wait_ready(5)
        raw, dice = RawRequest(attacker), random.Random(1)
        size = raw.link.shape.request_slot_bytes - 16
        with goes_on(client):
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                noise = dice.randbytes(size)
                ctypes.memmove(raw.slot, noise, size)  # also while the server reads it
                head = raw.head(num_rows=dice.randrange(300), experts_per_row=dice.randrange(70))
                if dice.random() < 0.5:
                    ctypes.memmove(raw.slot, ctypes.addressof(head), 128)
                ctypes.c_uint64.from_address(raw.flag).value = dice.choice(
                    [raw.seq, dice.getrandbits(64), 0, 2**64 - 1]
                )
                raw.link.endpoint.notify()
        assert servers[0].batcher.counts["refused"] > 10
        told = [r for r in caplog.records if "refused message" in r.getMessage()]
        assert 0 < len(told) < 10, "a log is no place to flood, either"
        assert not servers[0].stopped


class HostileEndpoint(Endpoint):
    """Hands over a descriptor of the test's choice to be woken by, and keeps the server's."""

    given: int | None = None
    taken: list[int] = []  # noqa: RUF012 (the test empties it)

    def fds(self):
        window, wake, recv = super().fds()
        return [window, wake if self.given is None else self.given, recv]

    def connect(self, connection, memory, fds, wire=None):
        self.taken.append(os.dup(fds[1]))
        super().connect(connection, memory, fds, wire)


@pytest.fixture
def hostile(monkeypatch):
    monkeypatch.setattr(HostileEndpoint, "taken", [])
    yield HostileEndpoint
    for fd in HostileEndpoint.taken:
        os.close(fd)


@contextlib.contextmanager
def hostile_client(registry, kind, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(link, "Endpoint", kind)
        with Client(registry, token=TOKEN, spin_us=0) as attacker:
            attacker.wait_ready(5)
            yield attacker


@pytest.mark.parametrize("what", ["a full eventfd", "a full pipe", "a file"])
def test_a_descriptor_that_blocks_does_not_stop_the_server(what, hostile, monkeypatch, tmp_path):
    if what == "a full eventfd":
        ends = [os.eventfd(0, os.EFD_CLOEXEC)]
        os.write(ends[0], (2**64 - 2).to_bytes(8, "little"))
        given = ends[0]
    elif what == "a full pipe":
        ends = list(os.pipe())
        given = ends[1]
        os.set_blocking(given, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(given, bytes(65536)):
                pass
        os.set_blocking(given, True)
    else:
        ends = [os.open(tmp_path / "f", os.O_CREAT | os.O_RDWR)]
        given = ends[0]
    monkeypatch.setattr(hostile, "given", given)
    try:
        with cluster(ONE, MODEL) as (client, _, registry), hostile_client(
            registry, hostile, monkeypatch
        ) as attacker, goes_on(client):
            for _ in range(3):  # it sleeps until its reply, and the server wakes it
                attacker.moe(0, *batch(3, MODEL))
    finally:
        for fd in ends:
            os.close(fd)


def test_nobody_can_take_the_wake_ups_of_others(hostile, monkeypatch):
    with cluster(ONE, MODEL, spin_us=0) as (client, servers, registry):
        servers[0].batcher._native.spin_ns = 0  # asleep between any two messages
        with hostile_client(registry, hostile, monkeypatch):
            (fd,) = hostile.taken
            os.set_blocking(fd, False)
            stop = threading.Event()

            def steal() -> None:
                while not stop.is_set():
                    with contextlib.suppress(OSError):
                        os.read(fd, 8)

            thief = threading.Thread(target=steal)
            thief.start()
            try:
                with goes_on(client, longest=0.45, pause=0.01):  # below the idle time-out
                    time.sleep(0.6)
            finally:
                stop.set()
                thief.join(5)
            os.set_blocking(fd, True)  # would make the server's own reads block, too
            with goes_on(client, pause=0.01):
                time.sleep(0.4)
            wake = socket.socket(fileno=os.dup(fd))
            wake.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    wake.send(bytes(4096))
            wake.shutdown(socket.SHUT_RDWR)
            with goes_on(client, pause=0.01):
                time.sleep(0.4)
            wake.close()


def test_a_client_that_does_not_read_is_given_up_and_holds_up_nobody():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    shape = SlotShape(1, 8, 2, 16, 4, False, 0, 4)
    deaf = ClientLink({"client_id": 1, "signal_mode": 0}, shape, Channel(ours))
    begin = time.monotonic()
    budget = 0
    while not share_credit([deaf], ServerConfig(max_inflight_bytes=budget % 500 + 1)):
        budget += 1
        assert budget < 100_000
    assert time.monotonic() - begin < 5 and budget > 100
    deaf.channel.close()
    theirs.close()


def test_messages_and_descriptors_after_the_handshake_pile_up_nowhere():
    with cluster(ONE, MODEL) as (client, servers, registry), Client(
        registry, token=TOKEN
    ) as attacker:
        attacker.wait_ready(5)
        num_fds = psutil.Process().num_fds()
        channel = attacker.links.table.links[0].channel
        with goes_on(client):
            for i in range(300):
                channel.send({"type": "credit", "credit": 1 << 60, "x": "y" * (i % 4000)},
                             [0] * 16)
            wait_until(lambda: psutil.Process().num_fds() <= num_fds + 4)
        frame = array.array("B", b"\x7f\xff\xff\xff garbage")
        channel._socket.sendall(frame)
        wait_until(lambda: len(servers[0]._clients) == 1, 5)
        client.moe(0, *batch(4, MODEL))


def test_clients_that_connect_and_say_nothing_count_and_end():
    with cluster(ONE, MODEL, server_options={"max_connections": 4}) as (client, servers, _):
        silent = [connect_unix(servers[0]._listener.address, TOKEN) for _ in range(3)]
        wait_until(lambda: len(servers[0]._admitting) == 3)
        late = connect_unix(servers[0]._listener.address, TOKEN)
        reply, _ = late.recv(3)
        assert "its limit" in reply["reason"]
        client.moe(0, *batch(4, MODEL))
        for channel in [*silent, late]:
            channel.close()
        wait_until(lambda: not servers[0]._admitting, 7)
        again = connect_unix(servers[0]._listener.address, TOKEN)
        again.send({"type": "connect"})
        with contextlib.suppress(ExpertwireError):
            assert again.recv(3)[0]["type"] == "error"
        again.close()
