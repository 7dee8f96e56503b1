"""A registry with many peers, and with hostile ones."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest
from tests.registry_peers import TOKEN, Peer, ends, model_facts, peers, raw_tcp, server_facts

from expertwire.control import frames as control
from expertwire.errors import AuthError, ProtocolError
from expertwire.registry import registry
from expertwire.registry.registry import Registry


def test_lists_go_out_no_faster_than_watchers_can_read_them(reg, monkeypatch):
    """Servers that join one after the other make few lists, not one each; the last is whole."""
    monkeypatch.setattr(registry, "BROADCAST_BYTES_PER_SECOND", 2000.0)
    everyone = {f"s{i}" for i in range(20)}
    with peers(reg.address) as peer:
        watcher = peer()
        watcher.watch()
        for name in sorted(everyone):
            peer().register(name)
        watcher.wait_names(everyone, 60)
        assert len(watcher.seen) < 10, "one at once, and one or a few when there was time again"


def test_64_servers_and_64_watchers_at_once(reg):
    failures: list[BaseException] = []
    ready, done = threading.Barrier(128), threading.Barrier(128)
    everyone = {f"s{i}" for i in range(64)}

    def live(i: int, is_server: bool) -> None:
        try:
            ready.wait(10)
            peer = Peer(reg.address)
            try:
                if is_server:
                    assert peer.register(f"s{i}")["server_id"] == f"s{i}"
                else:
                    peer.watch(f"c{i}")
                    peer.wait_names(everyone, 10)
                done.wait(10)  # nobody leaves before all have seen all
            finally:
                peer.close()
        except BaseException as err:
            done.abort()
            failures.append(err)

    threads = [threading.Thread(target=live, args=(i, k)) for i in range(64) for k in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failures, failures[:3]
    deadline = time.monotonic() + 2
    while reg.members and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not reg.members


def test_a_watcher_that_does_not_read_is_dropped_and_holds_up_nobody(peer, reg):
    deaf, watcher, server, changing = peer(), peer(), peer(), peer()
    deaf.channel.send({"type": "watch", "client": "deaf"})
    watcher.watch("good")
    big = {**model_facts(), "remark": "x" * 900_000}  # the kernel takes some MB of these
    server.register("big", model=big)
    facts = server_facts("small")
    for i in range(40):
        if watcher.ask("status")["clients"] == ["good"]:
            break
        if i % 2:
            changing.ask("leave")
        else:
            changing.ask("register", **facts)
        expected = {"big"} if i % 2 else {"big", "small"}
        assert watcher.wait_names(expected) < 2.0
    assert watcher.ask("status")["clients"] == ["good"]
    with pytest.raises(ProtocolError):  # it can see that, once it reads again
        while True:
            deaf.channel.recv(2)


GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "oversize": struct.pack(">I", control.HANDSHAKE_FRAME_BYTES + 1) + b"{" * 100,
    "huge": b"\xff" * 64,
    "a long number": struct.pack(">I", 4096) + b'{"a":' + b"7" * 4090 + b"}",
    "a proof that is not ASCII": control.encode_frame(
        {"expertwire": 1, "nonce": "00" * 32, "proof": "\ud800"}
    ),
    "version 2": control.encode_frame({"expertwire": 2, "nonce": "00" * 32, "proof": ""}),
    "a question before the proof": control.encode_frame({"type": "status"}),
}


@pytest.mark.parametrize("bytes_", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_its_own_connection_only(peer, reg, bytes_, caplog):
    server = peer()
    server.register("a")
    sock = raw_tcp(reg)
    sock.sendall(bytes_)
    assert ends(sock)
    assert server.ask("heartbeat", stats={})["type"] == "alive"
    assert not [r for r in caplog.records if r.exc_info], "no traceback for what a stranger sends"


def test_wrong_token_and_another_version_are_told_so(reg):
    with pytest.raises(AuthError, match="token"):
        control.connect_tcp(reg.address, b"wrong-token-0123456789", 2)


def half_open(reg: Registry, count: int) -> list[socket.socket]:
    stalled = [raw_tcp(reg) for _ in range(count)]
    for sock in stalled[::2]:
        sock.sendall(b"\0\0\0")
    return stalled


def test_half_open_handshakes_end_by_the_deadline(reg):
    begin = time.monotonic()
    assert all(ends(sock) for sock in half_open(reg, 30))
    assert time.monotonic() - begin < 3.0  # the deadline here is 0.5 s


def test_half_open_handshakes_block_nobody(peer, reg):
    reg.handshake_seconds = 60.0
    stalled = half_open(reg, 30)
    peer().register("a")
    for sock in stalled:
        sock.close()


def test_a_registry_full_of_stalled_handshakes_makes_room(reg, monkeypatch):
    monkeypatch.setattr(registry, "MAX_HANDSHAKES", 4)
    monkeypatch.setattr(control, "SLOW_HANDSHAKE_SECONDS", 0.05)
    reg.handshake_seconds = 30.0
    stalled = [raw_tcp(reg) for _ in range(4)]
    time.sleep(0.1)
    newcomer = Peer(reg.address)
    newcomer.register("a")
    newcomer.close()
    for sock in stalled:
        sock.close()


def test_connections_beyond_the_limit_are_told_why():
    with (
        Registry(token=TOKEN, max_connections=3) as reg,
        peers(reg.address) as peer,
    ):
        members = [peer() for _ in range(3)]
        for i, member in enumerate(members):
            member.register(f"s{i}")
        with pytest.raises(ProtocolError, match="3 connections"):
            peer()
        members[0].close()
        deadline = time.monotonic() + 2
        while len(reg.members) > 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        peer().register("again")
