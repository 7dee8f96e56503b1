"""Clients and servers when the registry goes away and another one comes."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from tests.followers import Follower, closing, free_address, ids
from tests.leftovers import nothing_left_behind
from tests.registry_peers import TOKEN, Peer, model_facts, server_facts

from expertwire.control.frames import parse_address
from expertwire.errors import WaitTimeout
from expertwire.registry import question
from expertwire.registry import thread as registry_thread
from expertwire.registry.membership import Lease, Membership, ask
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


def test_a_lease_that_expired_is_taken_up_again_with_its_id_and_seat():
    stall = threading.Event()

    def stats():
        if stall.is_set():
            time.sleep(1.0)  # the whole process stalls, as far as the registry can tell
            stall.clear()
        return {}

    with Registry(token=TOKEN, lease_seconds=0.4) as reg, closing() as things:
        things.append(client := Follower(reg.address).membership)
        other = Peer(reg.address)
        things.append(other)
        things.append(lease := Lease(reg.address, TOKEN, server_facts("a"), stats))
        lease.wait_registered(3)
        seat, epoch = lease.seat, lease.epoch
        other.register("later")
        client.wait(lambda m: "a" in ids(m), 3)
        stall.set()
        client.wait(lambda m: "a" not in ids(m), 3)
        members = client.wait(lambda m: "a" in ids(m), 3)
        assert {s.server_id: s.seat for s in members.servers}["a"] == seat
        assert members.epoch > epoch


@pytest.mark.parametrize("with_state", [False, True], ids=["clock", "state file"])
def test_a_restart_of_the_registry_goes_unnoticed(tmp_path, with_state):
    address = free_address()
    state = tmp_path / "state" if with_state else None

    def start() -> Registry:
        return Registry(address, token=TOKEN, state_path=state, settle_seconds=5.0).start()

    registry = start()
    with closing() as things, Follower(address) as client:
        leases = [Lease(address, TOKEN, server_facts(f"s{i}")) for i in range(4)]
        things.extend(leases)
        before = client.wait({"s0", "s1", "s2", "s3"})
        seats = {s.server_id: s.seat for s in before.servers}
        client.snapshots.clear()
        registry.close()
        time.sleep(0.3)
        assert client.membership.snapshot() == before, "the last list stays while nobody is there"
        registry = start()
        try:
            deadline = time.monotonic() + 4
            while len(registry.members) < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert set(registry.members) == set(seats)
            after = client.membership.wait(
                lambda m: m.epoch >= registry.epoch and ids(m) == set(seats), 3
            )
            assert {s.server_id: s.seat for s in after.servers} == seats
            assert all(ids(m) == set(seats) for m in client.snapshots), "nobody ever went missing"
            epochs = [before.epoch, *(m.epoch for m in client.snapshots)]
            assert all(a <= b for a, b in itertools.pairwise(epochs)), epochs
            assert epochs[-1] > epochs[0]
        finally:
            for lease in leases:
                lease.close()
            client.membership.close()
            registry.close()


def test_a_server_that_does_not_come_back_is_gone_when_the_new_registry_has_settled():
    address = free_address()
    registry = Registry(address, token=TOKEN).start()
    gone = Peer(address)
    gone.register("gone")
    with closing() as things, Follower(address) as client:
        things.append(Lease(address, TOKEN, server_facts("stays")))
        client.wait({"gone", "stays"})
        registry.close()
        gone.close()
        registry = Registry(address, token=TOKEN, settle_seconds=1.5).start()
        try:
            begin = time.monotonic()
            client.membership.wait(lambda m: m.epoch >= registry.epoch, 3)
            assert ids(client.membership.snapshot()) == {"gone", "stays"}
            client.wait({"stays"})
            assert time.monotonic() - begin < 4.0
        finally:
            things[0].close()
            client.membership.close()
            registry.close()


def test_a_draining_server_still_drains_after_a_restart():
    address = free_address()
    registry = Registry(address, token=TOKEN).start()
    with closing() as things:
        things.append(lease := Lease(address, TOKEN, server_facts("a")))
        lease.wait_registered(3)
        ask(address, TOKEN, {"type": "drain", "server_id": "a"})
        deadline = time.monotonic() + 2
        while not lease.draining and time.monotonic() < deadline:
            time.sleep(0.01)
        registry.close()
        registry = Registry(address, token=TOKEN).start()
        things.insert(0, registry)
        while "a" not in registry.members and time.monotonic() < deadline + 3:
            time.sleep(0.01)
        assert registry.members["a"].draining


def test_a_client_of_an_earlier_registry_meets_another_model():
    address = free_address()
    registry = Registry(address, token=TOKEN).start()
    old = Peer(address)
    old.register("old")
    with Follower(address) as client:
        client.wait({"old"})
        registry.close()
        old.close()
        registry = Registry(address, token=TOKEN, settle_seconds=20).start()
        new = Peer(address)
        new.register("new", model=model_facts("mixtral"))
        client.wait({"new"})  # not both: one list is of one model
        client.membership.close()
        new.close()
        registry.close()


def test_attempts_back_off(monkeypatch):
    monkeypatch.setattr(registry_thread, "FIRST_PAUSE", question.FIRST_PAUSE)
    monkeypatch.setattr(registry_thread, "LONGEST_PAUSE", question.LONGEST_PAUSE)
    times = []

    def refuse(address, *_):
        times.append(time.monotonic())
        raise WaitTimeout("nobody", "connect", address)

    monkeypatch.setattr(registry_thread, "connect_tcp", refuse)
    address = free_address()
    assert parse_address(address)
    client = Membership(address, TOKEN)
    time.sleep(1.0)
    client.close()
    assert 2 <= len(times) <= 8, times
