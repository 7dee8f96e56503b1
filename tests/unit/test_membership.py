"""Clients' and servers' view of the registry: snapshots, leases, restarts, back-off."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from expertwire import membership
from expertwire.errors import AuthError, ConfigError, ProtocolError, WaitTimeout
from expertwire.membership import Lease, Members, Membership, ask, parse_members
from expertwire.registry import Registry

MODEL = {"fingerprint": "f-1", "name": "tiny", "num_experts": 16}
OTHER_MODEL = {**MODEL, "fingerprint": "f-2", "name": "large"}


def open_sockets() -> int:
    gc.collect()
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


@pytest.fixture(autouse=True)
def nothing_left():
    threads, sockets = set(threading.enumerate()), open_sockets()
    yield
    assert not set(threading.enumerate()) - threads
    assert open_sockets() == sockets


@pytest.fixture
def stack():
    with contextlib.ExitStack() as made:
        yield made


@pytest.fixture
def start(stack, token):
    """Starts a registry; given an address, at the place of an earlier one."""

    def make(listen: str = "127.0.0.1:0", **options) -> Registry:
        return stack.enter_context(Registry(listen, token=token, **options))

    return make


@pytest.fixture
def watch(stack, token):
    def make(address: str, **options) -> Membership:
        made = Membership(address, token, **options)
        stack.callback(made.close)
        return made

    return make


@pytest.fixture
def join(stack, token):
    def make(address: str, name: str, experts=(0, 1), model=MODEL, **options) -> Lease:
        facts = {
            "name": name,
            "address": f"addr-{name}",
            "pid": 1,
            "model": model,
            "experts": list(experts),
        }
        made = Lease(address, token, facts, **options)
        stack.callback(made.close)
        return made

    return make


def names(members: Members) -> set[str]:
    return {server.server_id for server in members.servers}


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def eventually(ready, timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


# ------------------------------------------------------------------------ following


def test_members_come_and_go(start, watch, join):
    registry = start()
    calls: list[int] = []
    members = watch(registry.address, on_change=lambda: calls.append(1))
    lease = join(registry.address, "a", experts=[3, 1])
    assert lease.wait_registered(3) == "a"
    (server,) = members.wait(lambda m: len(m.servers) == 1, 3).servers
    assert (server.server_id, server.experts, server.address) == ("a", (1, 3), "addr-a")
    assert server.model == MODEL and server.seat == lease.seat and not server.draining
    lease.close()
    members.wait(lambda m: not m.servers, 3)
    assert len(calls) >= 2


def test_kill_9_is_noticed_in_less_than_a_second(start, watch, token):
    """Fault 16: dead is not slow."""
    registry = start()
    members = watch(registry.address)
    code = (
        "import sys, time; from expertwire.membership import Lease; "
        "lease = Lease(sys.argv[1], sys.argv[2].encode(), {'name': 'k', 'address': 'x', 'pid': 1, "
        "'model': {'fingerprint': 'f', 'name': 'm', 'num_experts': 2}, 'experts': [0]}); "
        "time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, registry.address, token.decode()])
    try:
        members.wait(lambda m: len(m.servers) == 1, 20)
        begin = time.monotonic()
        child.send_signal(signal.SIGKILL)
        members.wait(lambda m: not m.servers, 5)
        assert time.monotonic() - begin < 1
    finally:
        child.kill()
        child.wait(5)


def test_a_server_stopped_beyond_its_lease_comes_back(start, watch, token):
    """SIGSTOP for longer than a lease removes it; after SIGCONT it registers again by itself."""
    registry = start(lease_seconds=0.6)
    members = watch(registry.address)
    code = (
        "import sys, time; from expertwire.membership import Lease; "
        "lease = Lease(sys.argv[1], sys.argv[2].encode(), {'name': 'k', 'address': 'x', 'pid': 1, "
        "'model': {'fingerprint': 'f', 'name': 'm', 'num_experts': 2}, 'experts': [0]}); "
        "time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, registry.address, token.decode()])
    try:
        (first,) = members.wait(lambda m: len(m.servers) == 1, 20).servers
        child.send_signal(signal.SIGSTOP)
        members.wait(lambda m: not m.servers, 10)
        child.send_signal(signal.SIGCONT)
        (again,) = members.wait(lambda m: len(m.servers) == 1, 10).servers
        assert (again.server_id, again.seat) == (first.server_id, first.seat)
        assert again.epoch_joined > first.epoch_joined  # late writes of the old one can be told
    finally:
        child.kill()
        child.wait(5)


def test_wait_names_what_it_waited_for_and_why_it_failed(start, watch, token):
    address = free_address()
    members = watch(address)
    begin = time.monotonic()
    with pytest.raises(WaitTimeout, match="nothing answers") as caught:
        members.wait(lambda m: bool(m.servers), 0.4)
    assert 0.3 < time.monotonic() - begin < 2
    assert caught.value.stage == "membership" and caught.value.peer == address


def test_wrong_token_is_an_error_at_once_for_both(start, stack):
    registry = start()
    wrong = b"another-token-0123456789"
    members = Membership(registry.address, wrong)
    stack.callback(members.close)
    lease = Lease(registry.address, wrong, {"name": "a"})
    stack.callback(lease.close)
    with pytest.raises(AuthError):
        members.wait(lambda m: bool(m.servers), 5)
    with pytest.raises(AuthError):
        lease.wait_registered(5)


@pytest.mark.parametrize("address", ["nonsense", "host:", "::1:5", "h:99999"])
def test_malformed_addresses_are_refused_before_any_thread_starts(token, address):
    with pytest.raises(ConfigError):
        Membership(address, token)
    with pytest.raises(ConfigError):
        Lease(address, token, {})
    with pytest.raises(ConfigError):
        ask(address, token, {"type": "status"})


def test_reports_reach_the_registry_and_change_no_membership(start, watch, join):
    """Fault 17: two clients that disagree about a server see the same members."""
    registry = start()
    one, two = watch(registry.address), watch(registry.address)
    join(registry.address, "a").wait_registered(3)
    before = one.wait(lambda m: bool(m.servers), 3)
    one.report("a", "no reply in 3 s")
    eventually(lambda: registry.roster.reports == 1)
    assert registry.members["a"].last_report == "no reply in 3 s"
    assert one.snapshot() == two.wait(lambda m: bool(m.servers), 3) == before


def test_report_without_a_registry_does_nothing(watch):
    watch(free_address()).report("a", "lost")


def test_drain_reaches_clients_and_the_server(start, watch, join, token):
    registry = start()
    members = watch(registry.address)
    asked = threading.Event()
    lease = join(registry.address, "a", on_drain=asked.set)
    lease.wait_registered(3)
    ask(registry.address, token, {"type": "drain", "server_id": "a"})
    assert members.wait(lambda m: any(s.draining for s in m.servers), 3)
    assert asked.wait(3) and lease.draining


# ------------------------------------------------------------------------ leases


def test_a_lease_waits_for_a_registry_that_starts_later(start, join):
    address = free_address()
    lease = join(address, "early")
    with pytest.raises(WaitTimeout, match="not registered"):
        lease.wait_registered(0.2)
    start(address)
    assert lease.wait_registered(5) == "early"


def test_another_model_is_refused_at_the_server(start, join):
    registry = start()
    join(registry.address, "a").wait_registered(3)
    other = join(registry.address, "b", model=OTHER_MODEL)
    with pytest.raises(ConfigError, match=r"tiny.*large"):
        other.wait_registered(3)
    assert list(registry.members) == ["a"]


def test_a_refused_server_does_not_hammer_the_registry(start, join, monkeypatch):
    """It connects fine each time: that alone must not reset the pause."""
    attempts = []
    connect = membership.connect_tcp

    def counting(*arguments):
        attempts.append(1)
        return connect(*arguments)

    registry = start()
    join(registry.address, "a").wait_registered(3)
    monkeypatch.setattr(membership, "connect_tcp", counting)
    other = join(registry.address, "b", model=OTHER_MODEL)
    with pytest.raises(ConfigError):
        other.wait_registered(3)
    time.sleep(1.2)
    # Pauses of at least 0.1, 0.2, 0.4, 0.8 s: five attempts at most, where a fixed 0.1 s gives 12.
    assert 2 <= len(attempts) <= 5


def test_pauses_between_attempts_are_bounded(monkeypatch, token):
    pauses: list[float] = []

    class Ended(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout or 0.0)
            if len(pauses) >= 40:
                self.set()
            return self.is_set()

    members = Membership.__new__(Membership)
    membership._RegistryThread.__init__(members, free_address(), token, "test")
    members._stop = Ended()
    members._run()
    assert max(pauses) <= membership.LONGEST_PAUSE
    assert min(pauses[8:]) >= membership.LONGEST_PAUSE / 2
    assert pauses[0] < 0.3


def test_heartbeats_carry_statistics_and_survive_a_broken_source(start, join):
    registry = start(lease_seconds=0.4)
    counts = iter(range(1000))

    def stats():
        count = next(counts)
        if count == 1:
            raise RuntimeError("not now")
        return {"rows": count}

    join(registry.address, "a", stats=stats).wait_registered(3)
    eventually(lambda: registry.members["a"].stats.get("rows", 0) >= 3)


def test_an_on_change_that_fails_ends_nothing(start, watch, join):
    registry = start()

    def broken():
        raise RuntimeError("a bug of the caller")

    members = watch(registry.address, on_change=broken)
    join(registry.address, "a").wait_registered(3)
    members.wait(lambda m: names(m) == {"a"}, 3)
    join(registry.address, "b").wait_registered(3)
    members.wait(lambda m: names(m) == {"a", "b"}, 3)


def test_failures_are_logged_once_and_hold_no_secret(watch, caplog, token):
    with caplog.at_level(logging.DEBUG, logger="expertwire"):
        members = watch(free_address())
        with pytest.raises(WaitTimeout):
            members.wait(lambda m: bool(m.servers), 0.8)
    warnings = [r for r in caplog.records if "nothing answers" in r.getMessage()]
    assert len(warnings) == 1
    assert token.decode() not in caplog.text


# ------------------------------------------------------------------------ restarts


def test_a_registry_restart_changes_nothing_for_clients(start, watch, join):
    """The last list stays; servers come back with id, seat and state; epochs grow; nobody blinks.

    From the moment the registry dies every snapshot shows both servers.
    """
    registry = start()
    leases = [join(registry.address, name) for name in ("a", "b")]
    for lease in leases:
        lease.wait_registered(3)
    seen: list[Members] = []
    members = watch(registry.address)
    members.on_change = lambda: seen.append(members.snapshot())
    before = members.wait(lambda m: len(m.servers) == 2, 3)
    ask(registry.address, members._token, {"type": "drain", "server_id": "b"})
    before = members.wait(lambda m: any(s.draining for s in m.servers), 3)
    seats = {s.server_id: s.seat for s in before.servers}

    registry.close()
    eventually(lambda: not members.connected)
    assert members.snapshot() == before
    del seen[:]
    again = start(registry.address)
    eventually(lambda: len(again.members) == 2, 8)
    after = members.wait(
        lambda m: all(s.epoch_joined > before.epoch for s in m.servers) and len(m.servers) == 2, 5
    )
    assert {s.server_id: s.seat for s in after.servers} == seats
    assert {s.server_id: s.draining for s in after.servers} == {"a": False, "b": True}
    epochs = [m.epoch for m in seen]
    assert epochs == sorted(epochs) and epochs[0] > before.epoch
    assert all(names(m) == {"a", "b"} for m in seen)


def test_epochs_grow_over_a_restart_with_the_clock_set_back(start, watch, join, monkeypatch):
    registry = start()
    join(registry.address, "a").wait_registered(3)
    members = watch(registry.address)
    before = members.wait(lambda m: bool(m.servers), 3)
    registry.close()
    monkeypatch.setattr("time.time_ns", lambda: 1_000_000_000)
    start(registry.address)
    after = members.wait(lambda m: m.epoch > before.epoch, 8)
    assert names(after) == {"a"}


def test_a_server_that_died_with_the_registry_is_dropped_after_the_settling(start, watch, join):
    registry = start()
    alive, dead = join(registry.address, "alive"), join(registry.address, "dead")
    for lease in (alive, dead):
        lease.wait_registered(3)
    members = watch(registry.address)
    members.wait(lambda m: len(m.servers) == 2, 3)
    registry.close()
    dead.close()
    start(registry.address, settle_seconds=0.5)
    members.wait(lambda m: names(m) == {"alive"}, 10)


def test_leaving_shows_at_once_also_while_a_registry_settles(start, watch, join):
    registry = start(settle_seconds=60)
    lease = join(registry.address, "a")
    lease.wait_registered(3)
    members = watch(registry.address)
    members.wait(lambda m: names(m) == {"a"}, 3)
    begin = time.monotonic()
    lease.close()
    members.wait(lambda m: not m.servers, 3)
    assert time.monotonic() - begin < 1


def test_a_list_of_an_older_epoch_is_not_taken():
    members = Membership.__new__(Membership)
    members._members, members._instance, members._inherited = Members(9), "x", ()
    members._changed = threading.Condition()
    members._take({"epoch": 8, "servers": [], "instance": "y"})
    assert members.snapshot().epoch == 9
    members._take({"epoch": 10, "servers": [], "instance": "y"})
    assert members.snapshot().epoch == 10


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"epoch": "x", "servers": []},
        {"epoch": 1, "servers": [1]},
        {"epoch": 1, "servers": [{"server_id": "a"}]},
        {"epoch": 1, "servers": None},
    ],
)
def test_members_messages_that_cannot_be_read_are_protocol_errors(message):
    with pytest.raises(ProtocolError):
        parse_members(message)


# ------------------------------------------------------------------------ questions, closing


@pytest.mark.parametrize("num_servers", [1, 3, 5, 7])
def test_planned_servers_hold_every_expert(start, join, token, num_servers):
    registry = start()
    model = {**MODEL, "num_experts": 256}
    shares = [
        Lease.plan(registry.address, token, model, num_servers=num_servers)
        for _ in range(num_servers)
    ]
    for i, share in enumerate(shares):
        join(registry.address, f"s{i}", experts=share, model=model).wait_registered(3)
    held = [m.facts["experts"] for m in registry.members.values()]
    assert sorted(e for share in held for e in share) == list(range(256))


def test_a_plan_is_given_up_with_the_list(start, token, monkeypatch):
    monkeypatch.setattr("expertwire.roster.PLAN_GRACE_SECONDS", 0.0)
    registry = start()
    kept = Lease.plan(registry.address, token, MODEL, num_servers=2)
    dropped = Lease.plan(registry.address, token, MODEL, num_servers=2)
    share = list(dropped)
    assert sorted(kept + share) == list(range(16))
    del dropped
    gc.collect()
    eventually(lambda: sum(p.until is None for p in registry.roster._planned) == 1)
    assert Lease.plan(registry.address, token, MODEL, num_servers=2) == share


def test_plan_waits_for_a_registry_that_is_starting_but_not_for_ever(start, token):
    address = free_address()
    begin = time.monotonic()
    with pytest.raises(WaitTimeout):
        Lease.plan(address, token, MODEL, timeout=0.3)
    assert time.monotonic() - begin < 2
    opener = threading.Timer(0.3, start, [address])
    opener.start()
    assert Lease.plan(address, token, MODEL, timeout=5) == list(range(16))
    opener.join()


def test_ask_ends_by_its_deadline_when_the_registry_hangs(token):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(WaitTimeout, match=address):
            ask(address, token, {"type": "status"}, timeout=0.3)
        assert time.monotonic() - begin < 2


@pytest.mark.parametrize("kind", ["silent", "closed", "running"])
def test_close_is_quick_whatever_the_registry_does(kind, start, token, stack):
    if kind == "silent":  # accepts, never speaks: both are in the middle of a handshake
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    else:
        address = start().address if kind == "running" else free_address()
    facts = {"name": "a", "address": "x", "pid": 1, "model": MODEL, "experts": [0]}
    both = Membership(address, token), Lease(address, token, facts)
    time.sleep(0.2)
    begin = time.monotonic()
    for one in both:
        one.close()
        one.close()
    assert time.monotonic() - begin < 1.5
