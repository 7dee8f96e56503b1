"""The registry: who is a member, since when, and what peers that misbehave can (not) do."""

from __future__ import annotations

import itertools
import json
import math
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest
from tests.leftovers import nothing_left_behind
from tests.registry_peers import TOKEN, Peer, model_facts, peers, server_facts

from expertwire import control, registry, roster
from expertwire.errors import AuthError, ConfigError, ProtocolError, WaitTimeout
from expertwire.registry import Registry


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left_behind():
        yield


@pytest.fixture
def reg():
    with Registry(token=TOKEN, lease_seconds=5.0, handshake_seconds=0.5) as running:
        yield running


@pytest.fixture
def peer(reg):
    with peers(reg.address) as make:
        yield make


def names(message: dict) -> list[str]:
    return [s["server_id"] for s in message["servers"]]


# ------------------------------------------------------------------------ joining and leaving


def test_a_server_joins_is_seen_and_leaves(peer):
    watcher, server = peer(), peer()
    assert watcher.watch()["servers"] == []
    granted = server.register("a", experts=[3, 1, 1])
    watcher.wait_names({"a"})
    (seen,) = watcher.seen[-1]["servers"]
    assert seen["experts"] == [1, 3]
    assert seen["seat"] == granted["seat"]
    assert seen["address"] == "expertwire-a"
    assert seen["model"] == model_facts()
    assert seen["draining"] is False
    assert server.ask("leave") == {"type": "left"}
    watcher.wait_names(set())


def test_end_of_file_removes_a_server_within_a_second(peer):
    watcher, server = peer(), peer()
    watcher.watch()
    server.register("a")
    watcher.wait_names({"a"})
    server.close()
    assert watcher.wait_names(set()) < 1.0


def test_equal_names_get_distinct_ids(peer):
    first, second = peer(), peer()
    one = first.ask("register", **server_facts("a"))["server_id"]
    two = second.ask("register", **{**server_facts("a"), "address": "elsewhere"})["server_id"]
    assert one == "a"
    assert two.startswith("a-")


def test_a_server_that_comes_back_before_its_old_connection_ended_replaces_it(peer, reg):
    old, new = peer(), peer()
    first = old.register("a")
    second = new.ask("register", **server_facts("a"), server_id="a", seat=first["seat"])
    assert (second["server_id"], second["seat"]) == ("a", first["seat"])
    old.close()
    time.sleep(0.1)
    assert list(reg.members) == ["a"], "the end of the old connection is not the new one's"


def test_one_connection_registers_once(peer, reg):
    server = peer()
    server.register("a")
    assert server.ask("register", **server_facts("b"))["type"] == "error"
    assert list(reg.members) == ["a"]
    assert server.ask("heartbeat", stats={})["type"] == "alive"


BAD_FACTS = {
    "no model": {"model": None},
    "a model without fingerprint": {"model": {"num_experts": 8, "name": "x"}},
    "a model without experts": {"model": {"fingerprint": "f", "name": "x"}},
    "a million experts": {"model": {**model_facts(), "num_experts": 10**6}},
    "no experts": {"experts": None},
    "experts as text": {"experts": "0-3"},
    "an expert beyond the last": {"experts": [8]},
    "a negative expert": {"experts": [-1]},
    "true as an expert": {"experts": [True]},
    "no address": {"address": None},
    "a number as address": {"address": 7},
    "an endless address": {"address": "x" * 500},
}


@pytest.mark.parametrize("change", BAD_FACTS.values(), ids=BAD_FACTS.keys())
def test_malformed_registrations_are_refused_and_change_nothing(peer, reg, change):
    server, epoch = peer(), reg.epoch
    reply = server.ask("register", **{**server_facts("a"), **change})
    assert reply["type"] == "error"
    assert reply["reason"]
    assert (reg.epoch, list(reg.members)) == (epoch, [])
    server.register("a")  # the connection is still good


@pytest.mark.parametrize("kind", ["", "nonsense", None, 7, ["watch"], "_register", "__init__"])
def test_unknown_messages_are_answered_with_an_error(peer, kind):
    asker = peer()
    asker.channel.send({"type": kind})
    assert asker.channel.recv(2)[0]["type"] == "error"
    assert asker.ask("status")["type"] == "status"


def test_questions_out_of_place_are_errors(peer):
    asker = peer()
    assert asker.ask("heartbeat", stats={})["type"] == "error"
    assert asker.ask("leave") == {"type": "left"}
    for model in (None, {}, {"fingerprint": "f", "num_experts": 0}):
        assert asker.ask("plan", model=model)["type"] == "error"
    for count in (0, -1, "3", 1.5, True, 10**9):
        assert asker.ask("plan", model=model_facts(), num_servers=count)["type"] == "error"


# ------------------------------------------------------------------------ leases


def test_stalled_heartbeats_within_the_lease_keep_a_server():
    with Registry(token=TOKEN, lease_seconds=2.0) as reg, peers(reg.address) as peer:
        watcher, server = peer(), peer()
        watcher.watch()
        server.register("slow")
        watcher.wait_names({"slow"})
        time.sleep(1.6)  # more than 3 heartbeats of a quarter lease
        assert server.ask("heartbeat", stats={})["type"] == "alive"
        assert names(watcher.seen[-1]) == ["slow"]
        assert watcher.is_quiet(0.05)


def test_silence_beyond_the_lease_ends_it():
    with Registry(token=TOKEN, lease_seconds=0.8) as reg, peers(reg.address) as peer:
        watcher, server, busy = peer(), peer(), peer()
        watcher.watch()
        server.register("silent")
        busy.register("busy")
        begin = time.monotonic()
        while "silent" in reg.members and time.monotonic() < begin + 4:
            busy.ask("heartbeat", stats={})
            time.sleep(0.05)
        assert 0.7 < time.monotonic() - begin < 3.0
        watcher.wait_names({"busy"})
        with pytest.raises(ProtocolError):  # it must not go on as if it were a member
            server.ask("heartbeat", stats={})


def test_a_registry_that_was_stopped_for_longer_than_the_lease_blames_nobody():
    with Registry(token=TOKEN, lease_seconds=0.4) as reg, peers(reg.address) as peer:
        server = peer()
        server.register("a")
        epoch = reg.epoch
        reg._loop.call_soon_threadsafe(time.sleep, 0.9)
        time.sleep(0.95)
        assert server.ask("heartbeat", stats={})["type"] == "alive"
        assert reg.epoch == epoch
        time.sleep(0.2)
        assert list(reg.members) == ["a"]


@pytest.mark.parametrize("lease", [0.0, -1.0, math.nan, math.inf])
def test_impossible_leases_are_refused(lease):
    with pytest.raises(ConfigError, match="lease"):
        Registry(token=TOKEN, lease_seconds=lease)


def test_statistics_are_kept_if_they_are_any(peer):
    server, asker = peer(), peer()
    server.register("a")
    for stats, kept in (
        ({"rows": 3}, {"rows": 3}),
        ([1], {}),
        (None, {}),
        ({"x": "y" * 100_000}, {}),
        ({"rows": 4}, {"rows": 4}),
    ):
        assert server.ask("heartbeat", stats=stats)["type"] == "alive"
        assert asker.ask("status")["servers"][0]["stats"] == kept


# ------------------------------------------------------------------------ epochs and seats


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


# ------------------------------------------------------------------------ one model


def test_another_model_is_refused_with_both_names(peer):
    first, second = peer(), peer()
    first.register("a", model=model_facts("granite"))
    for question in (
        {"type_": "register", **server_facts("b", model=model_facts("mixtral"))},
        {"type_": "plan", "model": model_facts("mixtral")},
    ):
        reply = second.ask(**question)
        assert reply["type"] == "error"
        assert "granite" in reply["reason"]
        assert "mixtral" in reply["reason"]
    first.ask("leave")
    second.register("b", model=model_facts("mixtral"))


def test_another_dtype_is_refused_with_both_names(peer):
    first, second = peer(), peer()
    first.register("a")
    other = {**model_facts(), "dtype": "bfloat16"}
    reply = second.ask("register", **server_facts("b", model=other))
    assert reply["type"] == "error"
    assert "float32" in reply["reason"]
    assert "bfloat16" in reply["reason"]
    assert "--dtype float32" in reply["reason"]
    nameless = {k: v for k, v in model_facts().items() if k != "dtype"}
    assert "dtype" in second.ask("register", **server_facts("b", model=nameless))["reason"]
    assert second.ask("plan", model=nameless)["type"] != "error"
    second.register("b")


# ------------------------------------------------------------------------ plan


@pytest.mark.parametrize("num_servers", [1, 3, 5, 7])
def test_servers_that_plan_at_the_same_moment_share_all_experts(peer, num_servers):
    model = model_facts(num_experts=256)
    planners = [peer() for _ in range(num_servers)]
    for planner in planners:  # all ask before any gets its answer
        planner.channel.send({"type": "plan", "model": model, "num_servers": num_servers})
    shares = [planner.channel.recv(3)[0]["experts"] for planner in planners]
    assert sorted(e for share in shares for e in share) == list(range(256))
    for i, (planner, share) in enumerate(zip(planners, shares, strict=True)):
        planner.register(f"s{i}", model=model, experts=share)


@pytest.mark.parametrize("num_servers", [1, 3, 5, 7])
def test_incremental_plans_leave_no_expert_without_a_holder(peer, reg, num_servers):
    model = model_facts(num_experts=256)
    for i in range(num_servers):
        server = peer()
        share = server.ask("plan", model=model)["experts"]
        server.register(f"s{i}", model=model, experts=share)
        held = {e for m in reg.members.values() for e in m.facts["experts"]}
        assert held == set(range(256))


def test_the_share_of_a_server_that_died_while_loading_is_planned_again(peer, monkeypatch):
    monkeypatch.setattr(roster, "PLAN_GRACE_SECONDS", 0.2)
    model, dying, living, late = model_facts(num_experts=8), peer(), peer(), peer()
    lost = dying.ask("plan", model=model, num_servers=2)["experts"]
    kept = living.ask("plan", model=model, num_servers=2)["experts"]
    time.sleep(0.4)
    again = late.ask("plan", model=model, num_servers=2)["experts"]
    assert set(lost) | set(kept) == set(range(8)), "loading may take longer than the grace"
    late.close()
    dying.close()
    time.sleep(0.4)
    living.register("living", model=model, experts=kept)
    replacement = peer()
    assert replacement.ask("plan", model=model, num_servers=2)["experts"] == lost
    assert again  # the one that was too many got something, too


def test_a_plan_whose_connection_just_ended_still_counts(peer):
    model = model_facts(num_experts=8)
    one, two = peer(), peer()
    first = one.ask("plan", model=model, num_servers=2)["experts"]
    one.close()  # the server will register over another connection
    time.sleep(0.05)
    assert set(first).isdisjoint(two.ask("plan", model=model, num_servers=2)["experts"])


def test_a_registered_plan_counts_once(peer):
    model = model_facts(num_experts=8)
    server = peer()
    share = server.ask("plan", model=model)["experts"]
    server.register("a", model=model, experts=share)
    assert peer().ask("plan", model=model)["experts"] == [0, 1, 2, 3]


# ------------------------------------------------------------------------ drain, report, status


def test_drain_marks_a_server_and_tells_it(peer):
    watcher, server, operator = peer(), peer(), peer()
    watcher.watch()
    seat = server.register("a")["seat"]
    epoch = operator.ask("drain", server_id="a")["epoch"]
    watcher.wait(lambda m: [s["draining"] for s in m["servers"]] == [True])
    assert watcher.seen[-1]["epoch"] >= epoch
    assert server.channel.recv(1)[0] == {"type": "draining"}
    assert server.ask("heartbeat", stats={})["draining"] is True
    assert operator.ask("drain", server_id=str(seat))["server_id"] == "a"
    reply = operator.ask("drain", server_id="nobody")
    assert reply["type"] == "error"
    assert "nobody" in reply["reason"]


def test_reports_are_counted_and_never_change_membership(peer, reg):
    server, client = peer(), peer()
    server.register("a")
    epoch = reg.epoch
    for _ in range(3):
        client.channel.send({"type": "report", "server_id": "a", "what": "did not answer\n"})
    client.channel.send({"type": "report", "server_id": "nobody", "what": 7})
    status = client.ask("status")
    assert status["reports"] == 4
    assert status["servers"][0]["reports"] == 3
    assert "\n" not in status["servers"][0]["last_report"]
    assert (reg.epoch, list(reg.members)) == (epoch, ["a"])


def test_status_names_clients_and_fits_a_message(peer, monkeypatch):
    for name in ("zoe", "adam"):
        peer().watch(name)
    server, asker = peer(), peer()
    server.register("a")
    server.ask("heartbeat", stats={"x": "y" * 50_000})
    status = asker.ask("status")
    assert status["clients"] == ["adam", "zoe"]
    assert status["servers"][0]["stats"]
    assert status["uptime_s"] >= 0
    json.dumps(status)
    monkeypatch.setattr("expertwire.channel.MAX_FRAME_BYTES", 20_000)
    status = asker.ask("status")
    assert status["servers"][0]["stats"] == {}
    assert status["stats_left_out"] is True


def test_a_list_of_members_that_would_not_fit_is_refused_at_the_door(peer, monkeypatch):
    monkeypatch.setattr(roster, "MAX_FRAME_BYTES", 4000)
    for i in range(30):
        reply = peer().ask("register", **server_facts(f"s{i}"))
        if reply["type"] == "error":
            break
    assert "full" in reply["reason"]
    assert 2 < i < 20
    assert len(peer().watch()["servers"]) == i


# ------------------------------------------------------------------------ many, and hostile ones


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


# ------------------------------------------------------------------------ addresses, start, end


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
def test_ipv6():
    with Registry("[::1]:0", token=TOKEN) as reg, peers(reg.address) as peer:
        assert reg.address.startswith("[::1]:")
        peer().register("a")


def test_a_port_that_is_taken_is_one_clear_error(reg):
    with pytest.raises(ConfigError, match=rf"cannot listen on {reg.address}.*in use"):
        Registry(reg.address, token=TOKEN).start()


def test_an_address_that_is_not_ours_is_one_clear_error():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:7"):
        Registry("192.0.2.1:7", token=TOKEN).start()
    with pytest.raises(ConfigError):
        Registry("nonsense", token=TOKEN)


def test_close_is_quick_and_ends_every_connection():
    reg = Registry(token=TOKEN, handshake_seconds=30).start()
    with peers(reg.address) as peer:
        watcher, servers = peer(), [peer() for _ in range(8)]
        watcher.watch()
        for i, server in enumerate(servers):
            server.register(f"s{i}")
        watcher.wait_names({f"s{i}" for i in range(8)})
        stalled = raw_tcp(reg)
        begin = time.monotonic()
        reg.close()
        reg.close()
        assert time.monotonic() - begin < 3.0
        assert ends(stalled)
        # Nobody left: a registry that ends must not tell the clients otherwise.
        with pytest.raises(ProtocolError):
            while True:
                watcher.seen.append(watcher.channel.recv(2)[0])
        assert len(watcher.seen[-1]["servers"]) == 8
    with pytest.raises(WaitTimeout):
        Peer(reg.address)
    again = Registry(reg.address, token=TOKEN).start()  # the port is free at once
    again.close()
