"""The registry: who is a member, since when, and what peers that misbehave can (not) do."""

from __future__ import annotations

import json
import math
import socket
import time

import pytest
from tests.registry_peers import TOKEN, Peer, ends, model_facts, peers, raw_tcp, server_facts

from expertwire.errors import ConfigError, ProtocolError, WaitTimeout
from expertwire.registry import roster
from expertwire.registry.registry import Registry


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
        reg.loop.call_soon_threadsafe(time.sleep, 0.9)
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
    monkeypatch.setattr("expertwire.control.channel.MAX_FRAME_BYTES", 20_000)
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
