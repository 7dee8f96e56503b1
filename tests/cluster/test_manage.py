"""Scaling: which servers may go, with a registry and servers of this process as the backend."""

from __future__ import annotations

import time

import pytest

from expertwire import Client, Registry, Server
from expertwire.cluster import manage
from expertwire.cluster.backend import FAILED, SERVING, STARTING, ProcessFacts
from expertwire.cluster.config import parse_config
from expertwire.cluster.records import changing, cluster_folder, find_record, write_record
from expertwire.errors import ConfigError, ExpertwireError, WaitTimeout
from tests.system.cluster import ScaledExperts, batch, expected, model_facts

MODEL = model_facts(num_experts=6)


class ThisProcess:
    """A backend whose servers are objects."""

    def __init__(self, shares: dict[str, list[int]]):
        self.registry = Registry(lease_seconds=5).start()
        self.servers: dict[str, Server] = {}
        self.silent: dict[str, str] = {}  # name -> state, of processes that hold nothing
        self.next_share = list(range(6))
        for name, share in shares.items():
            self._start(name, share)

    def _start(self, name: str, share: list[int]) -> None:
        self.servers[name] = server = Server(
            ScaledExperts(share), MODEL, self.registry, name=name).start()
        server.wait_registered(5)

    def registry_address(self) -> str:
        return self.registry.address

    def describe(self) -> list[ProcessFacts]:
        states = {n: SERVING for n, s in self.servers.items() if not s.stopped} | self.silent
        return [ProcessFacts(n, s, "localhost", 1, 0, "its last words", "")
                for n, s in states.items()]

    def add(self, names, num_servers) -> None:
        for name in names:
            self._start(name, self.next_share)

    def remove(self, name: str) -> None:
        self.silent.pop(name, None)
        if name in self.servers:
            self.servers.pop(name).close()

    def stop(self) -> None:
        for server in self.servers.values():
            server.close()
        self.registry.close()


@pytest.fixture
def scaled(tmp_path, monkeypatch):
    """A function that makes such a backend, which `scale` then finds as the only cluster."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_record(parse_config({"name": "here", "model": "m"}), "local")
    made: list[ThisProcess] = []

    def make(shares):
        made.append(ThisProcess(shares))
        monkeypatch.setattr(manage, "open_backend", lambda config, where: made[0])
        return made[0]

    yield make
    for backend in made:
        backend.stop()


def names(facts) -> list[str]:
    return sorted(p["name"] for p in facts["processes"])


def test_servers_join_and_leave_under_a_client(scaled):
    backend = scaled({"server-0": [0, 1, 2], "server-1": [3, 4, 5]})
    with Client(backend.registry) as client:
        inputs = batch(12, MODEL)
        for count in (4, 2, 3):
            facts = manage.scale(None, count, quiet=True)
            assert len(names(facts)) == count
            assert (client.moe(0, *inputs) - expected(*inputs, MODEL)).abs().max() < 1e-3
        assert names(facts) == ["server-0", "server-1", "server-2"]
        assert client.num_retries == 0, "nobody had to notice"


def test_the_newest_that_others_can_replace_goes_first(scaled):
    """server-3 alone holds expert 5, so it stays."""
    scaled({"server-0": [0, 1, 2], "server-1": [0, 1, 2, 3], "server-2": [3, 4],
            "server-3": [4, 5]})
    assert names(manage.scale(None, 3, quiet=True)) == ["server-0", "server-1", "server-3"]
    assert names(manage.scale(None, 2, quiet=True)) == ["server-1", "server-3"]


def test_a_process_that_holds_nothing_goes_before_one_that_does(scaled):
    backend = scaled({"server-0": [0, 1, 2, 3, 4, 5], "server-2": [0, 1]})
    backend.silent["server-1"] = STARTING
    assert names(manage.scale(None, 2, quiet=True)) == ["server-0", "server-2"]


def test_nothing_changes_if_an_expert_would_be_lost(scaled):
    backend = scaled({"server-0": [0, 1, 2], "server-1": [3, 4, 5], "server-2": [0, 1]})
    with pytest.raises(ConfigError, match=r"only 1 of 2 servers can go: nobody else holds expert"):
        manage.scale(None, 1, quiet=True)
    assert len(backend.describe()) == 3
    assert not any(m["draining"] for m in manage._members(backend))


def test_a_process_that_fails_ends_the_wait_with_its_words(scaled):
    backend = scaled({"server-0": [0, 1, 2, 3, 4, 5]})
    backend.silent["server-1"] = FAILED
    with pytest.raises(ExpertwireError, match="server-1 failed: its last words"):
        manage.scale(None, 3, quiet=True)


def test_a_server_that_does_not_come_is_named(scaled):
    backend = scaled({"server-0": [0, 1, 2, 3, 4, 5]})
    backend.silent["server-1"] = STARTING
    start = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"2 of 3 servers after 0.3 s .*server-1 is starting"):
        manage.scale(None, 3, timeout=0.3, quiet=True)
    assert time.monotonic() - start < 3


def test_which_cluster(scaled, tmp_path):
    scaled({"server-0": [0]})
    assert manage.find_cluster(None, None)[0] == "here"
    file = tmp_path / "here.yaml"
    file.write_text("model: m")
    assert manage.find_cluster(str(file), None)[0] == "here"
    with pytest.raises(ConfigError, match="no cluster 'there' was started from here"):
        manage.find_cluster("there", None)
    write_record(parse_config({"name": "two", "model": "m"}), "ray")
    with pytest.raises(ConfigError, match="2 clusters are up; say which: here, two"):
        manage.find_cluster(None, None)
    assert manage.down("here") == "here"
    assert find_record("here") is None
    assert manage.find_cluster(None, None)[0] == "two"


def test_one_command_at_a_time_changes_a_cluster(scaled, tmp_path):
    backend = scaled({"server-0": [0, 1, 2, 3, 4, 5]})
    file = tmp_path / "here.yaml"
    file.write_text(f"model: {tmp_path}")
    with changing("here"):
        for change in (lambda: manage.up(str(file), "local", timeout=1, quiet=True),
                       lambda: manage.scale(None, 2, quiet=True)):
            with pytest.raises(ConfigError, match=r"another .* is changing cluster here now"):
                change()
    assert len(manage.scale(None, 2, quiet=True)["processes"]) == len(backend.servers) == 2


def test_up_that_starts_nothing_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "moe.yaml"
    file.write_text(f"model: {tmp_path}/nowhere")
    with pytest.raises(ConfigError, match=r"model: there is no folder .*nowhere"):
        manage.up(str(file), "local", timeout=1)
    assert not cluster_folder("moe").exists()


def test_without_a_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no cluster is up from here"):
        manage.down(None)
    with pytest.raises(ConfigError, match="--on 'mars': it is local or ray"):
        manage.open_backend(parse_config({"name": "a", "model": "m"}), "mars")


def test_a_cluster_whose_ray_is_gone_can_be_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_record(parse_config({"name": "far", "model": "m"}), "ray")
    file = tmp_path / "far.yaml"
    file.write_text(f"model: {tmp_path}")
    with pytest.raises(ConfigError, match="far is up already, on ray"):
        manage.up(str(file), "local", timeout=1)
    assert manage.down(None, forget=True) == "far"
    assert find_record("far") is None
    write_record(parse_config({"name": "near", "model": "m"}), "local")
    with pytest.raises(ConfigError, match="--forget is for a cluster on Ray"):
        manage.down(None, forget=True)
