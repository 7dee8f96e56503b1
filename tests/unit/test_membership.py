"""Following the registry: a client's view and a server's lease, also over restarts of it."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time

import pytest
from tests.followers import Follower, closing, free_address, ids
from tests.leftovers import nothing_left_behind
from tests.registry_peers import TOKEN, Peer, model_facts, server_facts

from expertwire.errors import AuthError, ConfigError, ProtocolError, WaitTimeout
from expertwire.observe.reports import Reporter
from expertwire.registry import lease as lease_module
from expertwire.registry import membership
from expertwire.registry import thread as registry_thread
from expertwire.registry.membership import Lease, Membership, ask, parse_members
from expertwire.registry.registry import Registry


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Short pauses between attempts, and nothing left at the end."""
    monkeypatch.setattr(registry_thread, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(registry_thread, "FIRST_PAUSE", 0.05)
    with nothing_left_behind():
        yield


@pytest.fixture
def reg():
    with Registry(token=TOKEN) as running:
        yield running


# ------------------------------------------------------------------------ the usual way


def test_a_lease_is_seen_and_ends_with_close(reg):
    with Follower(reg.address) as client:
        lease = Lease(reg.address, TOKEN, server_facts("a", [1, 2]))
        assert lease.wait_registered(3) == "a"
        (server,) = client.wait({"a"}).servers
        assert server.experts == (1, 2)
        assert server.seat == lease.seat
        assert server.model == model_facts()
        assert not server.draining
        begin = time.monotonic()
        lease.close()
        client.wait(set())
        assert time.monotonic() - begin < 1.0
        lease.close()


def test_heartbeats_carry_statistics_and_bring_the_epoch():
    with Registry(token=TOKEN, lease_seconds=1.0) as reg, closing() as things:
        things.append(lease := Lease(reg.address, TOKEN, server_facts("a"), lambda: {"rows": 7}))
        lease.wait_registered(3)
        things.append(other := Lease(reg.address, TOKEN, server_facts("b")))
        other.wait_registered(3)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            stats = {s["server_id"]: s["stats"] for s in ask_status(reg)["servers"]}
            if stats["a"] == {"rows": 7} and lease.epoch == reg.epoch:
                break
            time.sleep(0.02)
        assert stats["a"] == {"rows": 7}
        assert lease.epoch == reg.epoch
        time.sleep(1.2)  # longer than the lease
        assert set(reg.members) == {"a", "b"}


def ask_status(reg: Registry) -> dict:
    return ask(reg.address, TOKEN, {"type": "status"})


def test_broken_callbacks_end_nothing():
    def broken():
        raise RuntimeError("on purpose")

    with Registry(token=TOKEN, lease_seconds=1.0) as reg, closing() as things:
        things.append(client := Membership(reg.address, TOKEN, on_change=broken))
        things.append(
            lease := Lease(reg.address, TOKEN, server_facts("a"), broken, on_drain=broken)
        )
        lease.wait_registered(3)
        epoch = reg.epoch
        ask(reg.address, TOKEN, {"type": "drain", "server_id": "a"})
        client.wait(lambda m: any(s.draining for s in m.servers), 3)
        time.sleep(1.2)
        assert (list(reg.members), reg.epoch) == (["a"], epoch + 1)
        assert lease.draining


def test_drain_calls_back_once(reg):
    calls = []
    with closing() as things:
        things.append(
            lease := Lease(reg.address, TOKEN, server_facts("a"), on_drain=lambda: calls.append(1))
        )
        lease.wait_registered(3)
        for _ in range(3):
            ask(reg.address, TOKEN, {"type": "drain", "server_id": "a"})
        deadline = time.monotonic() + 2
        while not calls and time.monotonic() < deadline:
            time.sleep(0.01)
        assert calls == [1]
        assert lease.draining
        with pytest.raises(ConfigError, match="nobody"):
            ask(reg.address, TOKEN, {"type": "drain", "server_id": "nobody"})


def test_reports_reach_the_registry(reg):
    with closing() as things, Follower(reg.address) as client:
        things.append(Lease(reg.address, TOKEN, server_facts("a")))
        client.wait({"a"})
        client.membership.report("a", "x" * 5000)
        deadline = time.monotonic() + 2
        while ask_status(reg)["reports"] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ask_status(reg)["servers"][0]["reports"] == 1
        assert ids(client.membership.snapshot()) == {"a"}


@pytest.mark.parametrize("answers", [True, False])
def test_a_registry_that_cannot_keep_up_gets_no_more_reports(reg, monkeypatch, answers):
    """A client's next report waits until the last one was taken."""
    taken, handler = [], Registry._handlers["client_report"]

    def take(*args):
        taken.append(handler(*args))
        return taken[-1] if answers else None

    monkeypatch.setitem(Registry._handlers, "client_report", take)
    monkeypatch.setattr(membership, "Reporter", functools.partial(Reporter, seconds=0.01))
    with contextlib.closing(Membership(reg.address, TOKEN, stats=dict)) as client:
        client.wait(lambda m: m.epoch > 0, 5)
        deadline = time.monotonic() + (20 if answers else 0.5)
        while len(taken) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(taken) >= 3 if answers else len(taken) == 1


def test_a_server_does_not_hang_up_on_a_registry_that_is_late(monkeypatch):
    """Which counts what it hears: only the server's own hanging up would end the membership."""
    monkeypatch.setattr(lease_module, "ANSWER_SECONDS", 0.2)  # of single questions
    with Registry(token=TOKEN, lease_seconds=0.3) as reg, contextlib.closing(
        Lease(reg.address, TOKEN, server_facts("a"))
    ) as lease:
        lease.wait_registered(5)
        epoch = reg.epoch
        monkeypatch.setitem(Registry._handlers, "heartbeat", lambda *_: None)
        time.sleep(1.0)  # three leases without an answer
        assert reg.epoch == epoch and set(reg.members) == {"a"} and lease.connected


def test_plan_holds_its_share_while_the_list_lives(reg):
    model = model_facts(num_experts=256)
    plans = [Lease.plan(reg.address, TOKEN, model, num_servers=3) for _ in range(3)]
    assert sorted(e for p in plans for e in p) == list(range(256))
    extra = Lease.plan(reg.address, TOKEN, model, num_servers=3)
    assert extra  # all are promised: one more doubles some
    del plans[:]


# ------------------------------------------------------------------------ not there, refused


def test_both_wait_for_a_registry_that_starts_later():
    address = free_address()
    with closing() as things:
        things.append(lease := Lease(address, TOKEN, server_facts("a")))
        things.append(client := Membership(address, TOKEN))
        with pytest.raises(WaitTimeout, match=address):
            client.wait(lambda m: bool(m.servers), 0.15)
        with pytest.raises(WaitTimeout, match=address):
            lease.wait_registered(0.15)
        client.report("a", "nobody listens: best effort")
        things.append(Registry(address, token=TOKEN).start())
        assert lease.wait_registered(3) == "a"
        client.wait(lambda m: ids(m) == {"a"}, 3)
        things.reverse()  # the registry ends last


def test_plan_waits_for_a_registry_that_starts_later():
    address, started = free_address(), []
    timer = threading.Timer(0.2, lambda: started.append(Registry(address, token=TOKEN).start()))
    timer.start()
    share = Lease.plan(address, TOKEN, model_facts(), num_servers=1)
    assert share == list(range(8))
    timer.join()
    del share
    started[0].close()


def test_wrong_tokens_are_errors_of_whoever_waits(reg):
    with closing() as things:
        things.append(client := Membership(reg.address, b"wrong-token-0123456789"))
        things.append(lease := Lease(reg.address, b"wrong-token-0123456789", server_facts("a")))
        with pytest.raises(AuthError):
            client.wait(lambda m: bool(m.servers), 3)
        with pytest.raises(AuthError):
            lease.wait_registered(3)
        assert not reg.members


def test_another_model_is_refused_with_both_names_and_may_come_later(reg):
    with closing() as things:
        things.append(first := Lease(reg.address, TOKEN, server_facts("a")))
        first.wait_registered(3)
        other = server_facts("b", model=model_facts("mixtral"))
        things.append(second := Lease(reg.address, TOKEN, other))
        with pytest.raises(ConfigError, match=r"small.*mixtral"):
            second.wait_registered(3)
        with pytest.raises(ConfigError, match=r"small.*mixtral"):
            Lease.plan(reg.address, TOKEN, model_facts("mixtral"))
        assert list(reg.members) == ["a"]
        first.close()
        deadline = time.monotonic() + 3
        while list(reg.members) != ["b"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(reg.members) == ["b"]
        assert second.wait_registered(1) == "b"


def test_a_refused_server_does_not_hammer_the_registry(reg, monkeypatch):
    monkeypatch.setattr(registry_thread, "LONGEST_PAUSE", 2.0)
    attempts = []
    connect = registry_thread.connect_tcp
    monkeypatch.setattr(
        registry_thread, "connect_tcp", lambda *args: attempts.append(1) or connect(*args)
    )
    holder = Peer(reg.address)
    holder.register("a")
    lease = Lease(reg.address, TOKEN, server_facts("b", model=model_facts("mixtral")))
    time.sleep(0.8)
    assert 1 <= len(attempts) <= 8
    lease.close()
    holder.close()


@pytest.mark.parametrize("address", ["nonsense", "host:99999", ":7", "127.0.0.1:0"])
def test_malformed_addresses_are_errors_at_once(address):
    with pytest.raises(ConfigError):
        ask(address, TOKEN, {"type": "status"})
    if address == "127.0.0.1:0":
        return
    for make in (
        lambda: Membership(address, TOKEN),
        lambda: Lease(address, TOKEN, server_facts("a")),
    ):
        with pytest.raises(ConfigError):
            make()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"epoch": 1},
        {"epoch": "x", "servers": []},
        {"epoch": 1, "servers": None},
        {"epoch": 1, "servers": [7]},
        {"epoch": 1, "servers": [{"server_id": "a"}]},
    ],
)
def test_members_that_cannot_be_read_are_a_protocol_error(message):
    with pytest.raises(ProtocolError):
        parse_members(message)


# ------------------------------------------------------------------------ ends


@pytest.mark.parametrize("greeting", [b"", b"\0\0\0\x02{}", b"garbage, not a frame"])
def test_close_is_quick_with_a_registry_that_stalls_or_babbles(greeting):
    with socket.create_server(("127.0.0.1", 0)) as server:
        held, address = [], f"127.0.0.1:{server.getsockname()[1]}"

        def accept():
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                sock.sendall(greeting)
                held.append(sock)

        thread = threading.Thread(target=accept)
        thread.start()
        client = Membership(address, TOKEN)
        lease = Lease(address, TOKEN, server_facts("a"))
        time.sleep(0.2)
        begin = time.monotonic()
        client.close()
        lease.close()
        assert time.monotonic() - begin < 3.0
        assert held
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for sock in held:
            sock.close()


def test_close_is_quick_when_nobody_is_there():
    address = free_address()
    client, lease = Membership(address, TOKEN), Lease(address, TOKEN, server_facts("a"))
    time.sleep(0.1)
    begin = time.monotonic()
    lease.close()
    client.close()
    assert time.monotonic() - begin < 3.0


def test_close_from_its_own_callback_does_not_hang(reg):
    done = threading.Event()
    client: list[Membership] = []

    def leave():
        if client:
            client[0].close()
            done.set()

    client.append(Membership(reg.address, TOKEN, on_change=leave))
    holder = Peer(reg.address)
    holder.register("a")
    assert done.wait(3)
    client[0].close()
    holder.close()
