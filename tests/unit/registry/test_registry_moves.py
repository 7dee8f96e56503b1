"""Servers are asked for other experts, and drop some only when every client has moved on."""

from __future__ import annotations

import time

import pytest
from tests.registry_peers import TOKEN, peers, server_facts

from expertwire.registry import moves
from expertwire.registry.registry import Registry


@pytest.fixture
def reg():
    with Registry(token=TOKEN, lease_seconds=5.0, settle_seconds=0.0) as running:
        yield running


def listed(watcher, server_id: str) -> list[int]:
    servers = {s["server_id"]: s["experts"] for s in watcher.seen[-1]["servers"]}
    return servers[server_id]


def next_of(peer, kind: str, timeout: float = 2.0) -> dict:
    while True:
        message, _ = peer.channel.recv(timeout)
        if message["type"] == kind:
            return message


def test_a_move_from_the_question_to_the_drop(peer, reg):
    server, other, watcher, asker = peer(), peer(), peer(), peer()
    server.register("a", experts=[0, 1])
    other.register("b", experts=[1, 2])
    watcher.watch()
    watcher.channel.send({"type": "seen", "epoch": reg.epoch})
    assert next_of(server, "settled") and next_of(other, "settled")
    answer = asker.ask("place", server_id="a", experts=[2, 0])
    assert next_of(server, "place") == {"type": "place", "serial": 1, "experts": [0, 2]}
    assert answer == {"type": "placing", "server_id": "a", "serial": 1}
    assert asker.ask("status")["servers"][0]["move"]["state"] == "loading"
    assert listed(watcher, "a") == [0, 1], "nothing is announced before it is loaded"

    holding = server.ask("holds", experts=[0, 2], serial=1)
    assert holding == {"type": "holding", "experts": [0, 2], "epoch": reg.epoch}
    watcher.wait(lambda m: m["epoch"] == reg.epoch)
    assert listed(watcher, "a") == [0, 2]
    assert server.is_quiet(0.1), "a client may still have rows on their way"
    state = {s["server_id"]: s for s in asker.ask("status")["servers"]}["a"]
    assert state["move"]["state"] == "done" and not state["settled"]
    watcher.channel.send({"type": "seen", "epoch": reg.epoch})
    assert next_of(server, "settled")["epoch"] == holding["epoch"]


def test_a_client_that_goes_is_not_waited_for(peer):
    server, other, watcher = peer(), peer(), peer()
    watcher.watch()
    server.register("a", experts=[0, 1])
    other.register("b", experts=[1])
    server.ask("holds", experts=[0], serial=0)
    assert server.is_quiet(0.1)
    watcher.close()
    next_of(server, "settled")


def test_a_client_that_comes_later_begins_with_the_new_list(peer):
    server, other, early, late = peer(), peer(), peer(), peer()
    early.watch()
    server.register("a", experts=[0, 1])
    other.register("b", experts=[1])
    epoch = server.ask("holds", experts=[0], serial=0)["epoch"]
    late.watch(epoch=epoch, seen=epoch)  # connected again, after a break
    assert server.is_quiet(0.1)
    early.channel.send({"type": "seen", "epoch": epoch})
    next_of(server, "settled")


def test_a_client_that_hangs_is_waited_for_so_long_and_no_longer(peer, monkeypatch):
    monkeypatch.setattr(moves, "GRACE_SECONDS", 0.3)
    server, other, hung = peer(), peer(), peer()
    server.register("a", experts=[0, 1])
    other.register("b", experts=[1])
    hung.watch()
    begin = time.monotonic()
    server.ask("holds", experts=[0], serial=0)
    while next_of(server, "settled")["epoch"] != server.ask("heartbeat", stats={})["epoch"]:
        pass
    assert 0.2 < time.monotonic() - begin < 2.5


def test_nothing_settles_while_clients_of_an_earlier_registry_may_come_back():
    with Registry(token=TOKEN, lease_seconds=0.8, settle_seconds=0.5) as reg, peers(
        reg.address
    ) as peer:
        server = peer()
        begin = time.monotonic()
        server.register("a")
        next_of(server, "settled")
        assert time.monotonic() - begin > 0.3


def test_the_last_holder_of_an_expert_keeps_it(peer, reg):
    server, other, asker = peer(), peer(), peer()
    server.register("a", experts=[0, 1])
    other.register("b", experts=[1])
    answer = asker.ask("place", server_id="a", experts=[1, 2])
    assert answer["type"] == "error" and "nobody but a holds expert 0" in answer["reason"]
    asker.ask("place", server_id="a", experts=[0])
    other.close()  # between the question and the answer
    deadline = time.monotonic() + 2
    while len(reg.members) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.channel.send({"type": "holds", "experts": [0], "serial": 1})
    assert next_of(server, "holding")["experts"] == [0, 1]
    move = asker.ask("status")["servers"][0]["move"]
    assert move["state"] == "failed" and "nobody else holds expert 1" in move["reason"]


@pytest.mark.parametrize("fields, reason", [
    ({"server_id": "x", "experts": [0]}, "no server 'x'"),
    ({"server_id": "a", "experts": []}, "one expert at least"),
    ({"server_id": "a", "experts": [8]}, "experts from 0 to 7"),
    ({"server_id": "a", "experts": [True]}, "experts from 0 to 7"),
    ({"server_id": "a", "experts": "0-3"}, "experts from 0 to 7"),
    ({"server_id": "leaving", "experts": [0, 1]}, "is leaving"),
    ({"server_id": ["a"], "experts": [0]}, "no server"),
])
def test_what_cannot_be_asked_for(peer, fields, reason):
    server, leaving, asker = peer(), peer(), peer()
    server.register("a")
    leaving.register("leaving")
    asker.ask("drain", server_id="leaving")
    answer = asker.ask("place", **fields)
    assert answer["type"] == "error" and reason in answer["reason"]
    assert asker.ask("status")["servers"][0]["move"] is None


def test_only_a_member_says_what_it_holds_and_only_a_watcher_what_it_has_seen(peer, reg):
    server, stranger, watcher = peer(), peer(), peer()
    server.register("a")
    watcher.watch()
    assert "not a member" in stranger.ask("holds", experts=[0], serial=0)["reason"]
    server.ask("holds", experts=[0, 1], serial=0)
    stranger.channel.send({"type": "seen", "epoch": 1 << 61})
    for nonsense in (None, "9", -1, 1.5, True):
        watcher.channel.send({"type": "seen", "epoch": nonsense})
    assert stranger.ask("status")["servers"][0]["settled"] is False


def test_a_failed_load_is_told(peer):
    server, asker = peer(), peer()
    server.register("a", experts=[0, 1])
    asker.ask("place", server_id="a", experts=[0, 1, 2])
    next_of(server, "place")
    server.ask("holds", experts=[0, 1], serial=1, failed="no memory\n\x1b[31m")
    move = asker.ask("status")["servers"][0]["move"]
    assert move == {"serial": 1, "experts": [0, 1, 2], "state": "failed",
                    "reason": "no memory??[31m"}


def test_facts_keep_the_room(peer, reg):
    server, other = peer(), peer()
    server.channel.send({"type": "register", **server_facts("a"), "room": 5})
    other.channel.send({"type": "register", **server_facts("b"), "room": "much"})
    server.channel.recv(2), other.channel.recv(2)
    assert [m.facts["room"] for m in sorted(reg.members.values(), key=lambda m: m.server_id)] == [
        5, None
    ]
