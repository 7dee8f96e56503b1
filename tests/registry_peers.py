"""Peers of a registry that say exactly what a test wants, when it wants."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator

from expertwire.control import frames as control
from expertwire.control.frames import Channel, connect_tcp
from expertwire.errors import WaitTimeout
from expertwire.registry.registry import Registry

TOKEN = b"registry-token-0123456789"


def model_facts(name: str = "small", num_experts: int = 8) -> dict:
    return {
        "fingerprint": f"{name}-fingerprint",
        "name": name,
        "num_layers": 2,
        "num_experts": num_experts,
        "hidden_size": 16,
        "top_k": 2,
        "dtype": "float32",
    }


def server_facts(name: str, experts: list[int] | None = None, model: dict | None = None) -> dict:
    return {
        "name": name,
        "address": f"expertwire-{name}",
        "pid": 1,
        "model": model or model_facts(),
        "experts": [0, 1] if experts is None else experts,
    }


class Peer:
    """One authenticated connection."""

    def __init__(self, address: str):
        self.channel: Channel = connect_tcp(address, TOKEN, 5.0)
        self.seen: list[dict] = []  # members messages, oldest first

    def ask(self, type_: str, **fields) -> dict:
        self.channel.send({"type": type_, **fields})
        while True:
            reply, _ = self.channel.recv(5.0)
            if reply["type"] != "members" or type_ == "watch":
                return reply
            self.seen.append(reply)

    def register(self, name: str, **options) -> dict:
        reply = self.ask("register", **server_facts(name, **options))
        assert reply["type"] == "registered", reply
        return reply

    def watch(self, name: str = "watcher", **fields) -> dict:
        reply = self.ask("watch", client=name, **fields)
        self.seen.append(reply)
        return reply

    def wait_names(self, expected: set[str], timeout: float = 3.0) -> float:
        """Reads snapshots until exactly these servers are there; the seconds it took."""
        return self.wait(lambda m: {s["server_id"] for s in m["servers"]} == expected, timeout)

    def wait(self, ready: Callable[[dict], bool], timeout: float = 3.0) -> float:
        begin = time.monotonic()
        while not (self.seen and ready(self.seen[-1])):
            left = begin + timeout - time.monotonic()
            try:
                message, _ = self.channel.recv(max(0.001, left))
            except WaitTimeout:
                raise AssertionError(f"after {timeout} s: {self.seen[-1:]}") from None
            if message["type"] == "members":
                self.seen.append(message)
        return time.monotonic() - begin

    def is_quiet(self, seconds: float) -> bool:
        with contextlib.suppress(WaitTimeout):
            message, _ = self.channel.recv(seconds)
            self.seen.append(message)
            return False
        return True

    def close(self) -> None:
        self.channel.close()


@contextlib.contextmanager
def peers(address: str) -> Iterator[Callable[[], Peer]]:
    """Makes peers, and closes them at the end."""
    made: list[Peer] = []

    def make() -> Peer:
        made.append(Peer(address))
        return made[-1]

    try:
        yield make
    finally:
        for peer in made:
            peer.close()


def raw_tcp(reg: Registry) -> socket.socket:
    host, port = control.parse_address(reg.address)
    sock = socket.create_connection((host, port), timeout=3)
    (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
    assert json.loads(sock.recv(length, socket.MSG_WAITALL))["expertwire"] == 1
    return sock


def ends(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    finally:
        sock.close()
    return True
