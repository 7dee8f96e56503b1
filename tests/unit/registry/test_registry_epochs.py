"""Epochs only grow, also over restarts; seats are stable."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from tests.registry_peers import TOKEN, peers, server_facts

from expertwire.errors import ConfigError
from expertwire.registry import roster
from expertwire.registry.registry import Registry


def test_epochs_only_grow_and_change_with_every_change(peer):
    watcher, servers = peer(), [peer() for _ in range(4)]
    watcher.watch()
    for i, server in enumerate(servers):
        server.register(f"s{i}")
        watcher.wait_names({f"s{k}" for k in range(i + 1)})
    servers[1].close()
    watcher.wait_names({"s0", "s2", "s3"})
    servers[2].ask("leave")
    watcher.wait_names({"s0", "s3"})
    epochs = [m["epoch"] for m in watcher.seen]
    assert all(a < b for a, b in itertools.pairwise(epochs)), epochs
    joined = {s["server_id"]: s["epoch_joined"] for s in watcher.seen[-1]["servers"]}
    assert epochs[0] < joined["s0"] < joined["s3"] <= epochs[-1]


def restarted(state, now_ms: int, monkeypatch) -> tuple[int, int]:
    """(first, last) epoch of a registry that starts at this wall-clock time."""
    clock = SimpleNamespace(time_ns=lambda: now_ms * 1_000_000)
    monkeypatch.setattr(roster, "time", clock)
    with (
        Registry(token=TOKEN, state_path=state) as reg,
        peers(reg.address) as peer,
    ):
        first = reg.epoch
        for i in range(3):
            peer().register(f"s{i}")
        return first, reg.epoch


def test_epochs_grow_over_a_restart_without_a_state_file(monkeypatch):
    _, last = restarted(None, 1000, monkeypatch)
    first, _ = restarted(None, 2000, monkeypatch)
    assert first > last


def test_epochs_grow_over_a_restart_with_a_state_file_even_if_the_clock_went_back(
    tmp_path, monkeypatch
):
    state = tmp_path / "state.json"
    _, last = restarted(state, 1_000_000, monkeypatch)
    first, last_again = restarted(state, 1000, monkeypatch)
    assert last < first < last_again
    first, _ = restarted(state, 2_000_000, monkeypatch)
    assert first == 2_000_000


def test_without_a_state_file_epochs_grow_beyond_what_peers_have_seen(peer, reg):
    seen = reg.epoch + 10_000  # of a registry before, whose clock was ahead
    watcher = peer()
    assert watcher.watch(epoch=seen)["epoch"] > seen
    server = peer()
    granted = server.ask("register", **server_facts("a"), epoch=seen + 10_000)
    assert granted["epoch"] > seen + 10_000
    watcher.wait_names({"a"})
    assert watcher.seen[-1]["epoch"] > seen + 10_000
    for nonsense in ("7", -1, True, 10**30, None, [1]):
        peer().watch(epoch=nonsense)
    assert reg.epoch < seen + 20_100


@pytest.mark.parametrize("content", ["nonsense", "[]", "{}", '{"epoch": "x"}', '{"epoch": null}'])
def test_a_file_that_is_no_state_is_not_overwritten(tmp_path, content):
    path = tmp_path / "precious"
    path.write_text(content)
    with pytest.raises(ConfigError, match="precious"):
        Registry(token=TOKEN, state_path=path)
    assert path.read_text() == content


def test_a_state_place_that_cannot_be_written_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError, match="--state"):
        Registry(token=TOKEN, state_path=tmp_path / "none" / "state")
    with pytest.raises(ConfigError):
        Registry(token=TOKEN, state_path=tmp_path)


def test_a_state_file_that_vanishes_meanwhile_ends_nothing(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    with (
        Registry(token=TOKEN, state_path=folder / "state") as reg,
        peers(reg.address) as peer,
    ):
        (folder / "state").unlink()
        folder.rmdir()
        peer().register("a")
        assert list(reg.members) == ["a"]


def test_seats_are_stable_and_not_given_away_soon(peer):
    watcher, servers = peer(), [peer() for _ in range(4)]
    watcher.watch()
    seats = {f"s{i}": s.register(f"s{i}")["seat"] for i, s in enumerate(servers)}
    assert len(set(seats.values())) == 4
    servers[1].close()
    watcher.wait_names({"s0", "s2", "s3"})
    newcomer = peer().register("s4")["seat"]
    watcher.wait_names({"s0", "s2", "s3", "s4"})
    assert newcomer not in seats.values()
    now = {s["server_id"]: s["seat"] for s in watcher.seen[-1]["servers"]}
    assert all(now[name] == seats[name] for name in ("s0", "s2", "s3"))


def test_seats_come_back_in_the_long_run():
    book = roster.Roster()
    seats = []
    for i in range(500):
        member = book.register(server_facts(f"s{i}"), now=0.0)
        seats.append(member.seat)
        book.remove(member, "test")
    assert max(seats) <= roster.MAX_FREED_SEATS + 1
    for i, seat in enumerate(seats):
        assert seat not in seats[max(0, i - 50) : i]
