"""Closing is bounded: nobody who waits keeps `close` waiting, and who waits learns why."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch
from tests.leftovers import nothing_left_behind
from tests.system.cluster import TOKEN, ScaledExperts, batch, cluster, model_facts

from expertwire import Client, Registry, Server
from expertwire.errors import ConfigError, WaitTimeout
from expertwire.server import server

MODEL = model_facts(num_experts=4, hidden_size=16)
LIMIT = 5.0


class StuckExperts(ScaledExperts):
    """Experts that are busy until they are let go."""

    def __init__(self, *args):
        super().__init__(*args)
        self.busy, self.let_go = threading.Event(), threading.Event()

    def run(self, layer, rows, offsets, batch_invariant):
        self.busy.set()
        assert self.let_go.wait(60)
        return super().run(layer, rows, offsets, batch_invariant)


class Caller(threading.Thread):
    """Calls something in a thread of its own and keeps what it raised."""

    def __init__(self, call: Callable[[], object]):
        super().__init__(daemon=True)
        self.call, self.error = call, None
        self.start()

    def run(self):
        try:
            self.call()
        except Exception as err:
            self.error = err

    def raised(self) -> Exception | None:
        self.join(LIMIT)
        assert not self.is_alive(), "it still waits"
        return self.error


def seconds_to(close: Callable[[], None]) -> float:
    begin = time.monotonic()
    close()
    return time.monotonic() - begin


@pytest.fixture
def stuck():
    """(client, server, its experts): a batch sent there is not answered before `let_go`."""
    experts = StuckExperts([0, 1, 2, 3])
    with Registry(token=TOKEN) as registry, Server(
        experts, MODEL, registry, token=TOKEN
    ) as running, Client(registry, token=TOKEN, max_rows=4, connect_timeout=30) as client:
        try:
            client.wait_ready()
            yield client, running, experts
        finally:
            experts.let_go.set()


@pytest.mark.parametrize("num_tokens", [3, 40])  # one message; more messages than slots
@pytest.mark.parametrize("split", [False, True])
def test_a_batch_that_waits_for_its_reply_is_interrupted(stuck, num_tokens, split):
    client, _, experts = stuck
    inputs = batch(num_tokens, MODEL)
    if split:
        waiting = Caller(lambda: client.dispatch(0, *inputs).combine())
    else:
        waiting = Caller(lambda: client.moe(0, *inputs))
    assert experts.busy.wait(30)
    assert seconds_to(client.close) < LIMIT
    error = waiting.raised()
    assert isinstance(error, ConfigError) and "closed" in str(error)
    with pytest.raises(ConfigError, match="the client is closed"):
        client.moe(0, *inputs)


def test_a_batch_that_waits_for_an_expert_is_interrupted():
    with nothing_left_behind(), cluster([[0, 1]], MODEL, connect_timeout=60) as (client, _, _):
        hidden, ids, weights = batch(3, MODEL)
        waiting = [
            Caller(lambda: client.moe(0, hidden, torch.full_like(ids, 3), weights)),
            Caller(client.wait_ready),
        ]
        time.sleep(0.2)
        assert all(caller.is_alive() for caller in waiting)
        assert seconds_to(client.close) < LIMIT
        for caller in waiting:
            error = caller.raised()
            assert isinstance(error, ConfigError) and "closed" in str(error)


def silent_socket() -> tuple[socket.socket, str]:
    """An abstract Unix socket that takes connections and says nothing."""
    quiet = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    quiet.bind("\0expertwire-test-silent")
    quiet.listen(8)
    return quiet, "expertwire-test-silent"


def test_a_client_in_the_middle_of_a_handshake_closes_at_once():
    """A member whose socket accepts and never answers."""
    from expertwire.registry.membership import Lease

    quiet, address = silent_socket()
    facts = {"name": "mute", "address": address, "pid": 1, "model": MODEL, "experts": [0]}
    with quiet, Registry(token=TOKEN) as registry:
        lease = Lease(registry.address, TOKEN, facts)
        try:
            lease.wait_registered(10)
            with nothing_left_behind():
                client = Client(registry, token=TOKEN, connect_timeout=60)
                quiet.settimeout(30)
                peer, _ = quiet.accept()  # it is in the handshake now
                assert seconds_to(client.close) < 2  # the handshake alone may take 2 s
                assert not client.links._thread.is_alive()
                peer.close()
        finally:
            lease.close()


def test_a_client_whose_lock_is_held_says_so(stuck):
    client, _, _ = stuck
    held, release = threading.Event(), threading.Event()

    def hold():
        with client.lock:
            held.set()
            release.wait(30)

    holder = Caller(hold)
    assert held.wait(5)
    begin = time.monotonic()
    with pytest.raises(WaitTimeout, match="did not end within"):
        client.close()
    assert time.monotonic() - begin < LIMIT
    release.set()
    holder.raised()
    client.links.close()
    client.hca.close()


def test_a_server_whose_experts_are_busy_closes_within_its_limit(stuck, monkeypatch):
    """The clients learn it at once, though the batch is not through."""
    monkeypatch.setattr(server, "CLOSE_SECONDS", 1.0)
    client, running, experts = stuck
    waiting = Caller(lambda: client.moe(0, *batch(3, MODEL)))
    assert experts.busy.wait(30)
    begin = time.monotonic()
    with pytest.raises(WaitTimeout, match="did not end within"):
        running.close()
    assert time.monotonic() - begin < LIMIT
    client.links.wait(lambda table: not table.links, 10)
    assert not client.links.table.links
    client.close()
    error = waiting.raised()
    assert isinstance(error, ConfigError) and "closed" in str(error)
    experts.let_go.set()
    for thread in running._threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_server_closes_while_clients_stand_in_its_door():
    """Connections that are authenticated and then say nothing, and some that say nothing at all."""
    from expertwire.control.frames import connect_unix

    with Registry(token=TOKEN) as registry, nothing_left_behind():
        running = Server(ScaledExperts([0]), MODEL, registry, token=TOKEN).start()
        running.wait_registered(10)
        address = running._listener.address
        talking = [connect_unix(address, TOKEN) for _ in range(3)]
        mute = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
        for sock in mute:
            sock.connect("\0" + address)
        while len(running._admitting) < 3:
            time.sleep(0.01)
        assert seconds_to(running.close) < 3
        assert not running._admitting
        for channel in talking:
            channel.close()
        for sock in mute:
            sock.close()
