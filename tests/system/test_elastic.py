"""Servers join and leave a running system: traffic follows, nothing is lost, nobody restarts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from tests.system.cluster import (
    TOKEN,
    ScaledExperts,
    batch,
    cluster,
    expected,
    model_facts,
    wait_until,
)

from expertwire import Client, Server
from expertwire.chaos.fleet import Fleet
from expertwire.demo import demo_model_path
from expertwire.errors import ConfigError, WaitTimeout
from expertwire.registry import drain as drain_command
from expertwire.registry.question import ask

MODEL = model_facts(num_experts=6, hidden_size=16, top_k=2)

pytestmark = pytest.mark.timeout(240)


class Traffic:
    """A thread that sends batches without a pause and checks each result."""

    def __init__(self, client: Client, model: dict = MODEL):
        self.client, self.model = client, model
        self.steps, self.longest = 0, 0.0
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        inputs = batch(12, self.model)
        want = expected(*inputs, self.model)
        try:
            while not self._stop.is_set():
                start = time.monotonic()
                out = self.client.moe(0, *inputs)
                self.longest = max(self.longest, time.monotonic() - start)
                torch.testing.assert_close(out, want)
                self.steps += 1
        except Exception as err:
            self.error = err

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)
        assert self.error is None, self.error
        assert self.steps > 0


def drain(registry, name: str) -> None:
    assert ask(registry.address, TOKEN, {"type": "drain", "server_id": name})["type"] == "drained"


def test_a_drained_server_leaves_without_a_retry():
    with cluster([range(6), range(6)], MODEL) as (client, servers, registry), Client(
        registry, token=TOKEN
    ) as idle:
        idle.moe(0, *batch(5, MODEL))
        with Traffic(client) as traffic:
            wait_until(lambda: traffic.steps > 50)
            start = time.monotonic()
            drain(registry, "s0")
            wait_until(lambda: servers[0].stopped and "s0" not in registry.members)
            assert time.monotonic() - start < 3
            before, seen = servers[0].batcher.counts["messages"], traffic.steps
            wait_until(lambda: traffic.steps > seen + 50)
        assert servers[0].batcher.counts["messages"] == before
        assert client.num_retries == 0 and client.links.num_lost == 0, "nobody had to notice"
        assert idle.links.num_lost == 0, "an idle client lets go, too"
        assert [link.server_id for link in idle.links.table.links] == ["s1"]


def test_a_batch_in_flight_is_answered_before_a_drained_server_leaves():
    with cluster([range(6), range(6)], MODEL) as (client, servers, registry):
        inputs = batch(12, MODEL)
        client.moe(0, *inputs)
        proceed, run = threading.Event(), servers[0].shard.run

        def held(*arguments):
            assert proceed.wait(10)
            return run(*arguments)

        servers[0].shard.run = held
        handle = client.dispatch(0, *inputs)
        drain(registry, "s0")
        wait_until(lambda: len(client.links.table.links) == 1)
        time.sleep(0.1)
        assert not servers[0].stopped, "it owes an answer"
        proceed.set()
        torch.testing.assert_close(handle.combine(), expected(*inputs, MODEL))
        wait_until(lambda: servers[0].stopped)
        assert client.num_retries == 0


def test_a_draining_server_serves_on_while_nobody_else_can():
    with cluster([[0, 1, 2, 3], [3, 4, 5]], MODEL) as (client, servers, registry):
        inputs = batch(12, MODEL)
        drain(registry, "s0")
        wait_until(lambda: client.links.table.links[0].draining)
        rows = servers[0].batcher.expert_rows.copy()
        with Client(registry, token=TOKEN) as late:  # it needs the leaving server, too
            for user in (client, late):
                torch.testing.assert_close(user.moe(0, *inputs), expected(*inputs, MODEL))
            assert not servers[0].stopped
            assert (servers[0].batcher.expert_rows - rows)[0, 3] == 0, "expert 3 is elsewhere"
            with Server(ScaledExperts([0, 1, 2]), MODEL, registry, token=TOKEN, name="fresh"):
                wait_until(lambda: servers[0].stopped)
                for user in (client, late):
                    torch.testing.assert_close(user.moe(0, *inputs), expected(*inputs, MODEL))
                    assert user.num_retries == 0


def test_clients_that_hang_do_not_lose_what_they_sent():
    """A draining server waits for a client that does not let go, and ends when that one ends."""
    with cluster([range(6), range(6)], MODEL) as (client, servers, registry):
        handle = client.dispatch(0, *batch(12, MODEL))
        drain(registry, "s0")
        time.sleep(0.3)
        assert not servers[0].stopped
        torch.testing.assert_close(handle.combine(), expected(*batch(12, MODEL), MODEL))
        wait_until(lambda: servers[0].stopped)


def test_a_deadline_ends_the_wait_for_a_client_that_hangs_and_loses_nothing(monkeypatch):
    """As one that is stopped: it has a batch in flight, and does not look."""
    monkeypatch.setenv("EXPERTWIRE_TOKEN", TOKEN.decode())
    monkeypatch.setattr(drain_command, "LEAVE_SECONDS", 0.2)
    with cluster([range(6), range(6), [0]], MODEL) as (client, servers, registry):
        handle = client.dispatch(0, *batch(12, MODEL))
        facts = drain_command.run_drain(registry.address, "s0", timeout=20, deadline=0.3)
        assert facts["cut_off"] and facts["seconds"] >= 0.3
        wait_until(lambda: servers[0].stopped)
        torch.testing.assert_close(handle.combine(), expected(*batch(12, MODEL), MODEL))
        facts = drain_command.run_drain(registry.address, "s2", timeout=20, deadline=20)
        assert not facts["cut_off"]
        with pytest.raises(WaitTimeout, match="nobody else holds expert 0-5"):
            drain_command.run_drain(registry.address, "s1", timeout=0.2, deadline=0.1)
        torch.testing.assert_close(client.moe(0, *batch(12, MODEL)),
                                   expected(*batch(12, MODEL), MODEL))


def test_sixteen_servers_become_seventeen_and_sixteen_again():
    """256 experts in any overlap; a new server takes its share at once, and no step is slow."""
    model = model_facts(num_experts=256, hidden_size=16, top_k=4)
    shares = [list(range(i * 16, (i + 1) * 16)) for i in range(16)]
    with cluster(shares, model) as (client, _, registry), Traffic(client, model) as traffic:
        wait_until(lambda: traffic.steps > 20)
        extra = Server(
            ScaledExperts(range(8, 248, 3)), model, registry, token=TOKEN, name="extra"
        )
        with extra:
            wait_until(lambda: extra.batcher.counts["rows"] > 0, 2)
            wait_until(lambda: len(client.links.table.links) == 17)
            drain(registry, "extra")
            wait_until(lambda: extra.stopped)
        seen = traffic.steps
        wait_until(lambda: traffic.steps > seen + 20)
        assert client.num_retries == 0 and client.links.num_lost == 0
        assert traffic.longest < 1.5


def command(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "EXPERTWIRE_TOKEN": fleet.token.decode()}
    return subprocess.run(
        [sys.executable, "-m", "expertwire", *arguments, "--registry", fleet.address], env=env,
        capture_output=True, text=True, timeout=100, check=False,
    )


def test_drain_as_a_command(warm):
    path = demo_model_path()
    with Fleet(path, zygote=warm) as fleet:
        fleet.start_registry()
        fleet.start_servers({"a": "0-15", "b": "0-15", "c": "0-7"})
        with Client(fleet.address, token=fleet.token, reply_timeout=60) as client:  # slow is fine
            client.links.wait(lambda t: len(t.links) == 3, 20)
            hidden = torch.randn(6, 128)
            ids, weights = torch.randint(0, 16, (6, 2)), torch.rand(6, 2)
            want = client.moe(0, hidden, ids, weights)
            assert not torch.equal(want, torch.zeros_like(want))
            stop = threading.Event()
            wrong: list[int] = []

            def work() -> None:
                while not stop.is_set():
                    wrong.append(not torch.equal(client.moe(0, hidden, ids, weights), want))

            thread = threading.Thread(target=work)
            thread.start()
            try:
                done = command(fleet, "drain", "a", "--json")
                assert done.returncode == 0, done.stderr
                assert json.loads(done.stdout)["server_id"] == "a"
                assert fleet.servers["a"].process.wait(30) == 0, fleet.servers["a"].lines

                # Nobody else holds experts 8 to 15 now.
                done = command(fleet, "drain", "b", "--timeout", "1")
                assert done.returncode == 1
                assert "nobody else holds expert 8-15" in done.stderr
                assert fleet.servers["b"].process.poll() is None
                fleet.start_server("d", "8-15")
                assert fleet.servers["b"].process.wait(30) == 0
            finally:
                stop.set()
                thread.join(20)
            assert len(wrong) > 100 and not any(wrong)
            assert client.num_retries == 0
        done = command(fleet, "drain", "nobody")
        assert done.returncode == 1 and "no server 'nobody'" in done.stderr


def test_drain_says_what_it_waits_for(monkeypatch, capsys):
    from expertwire.registry.drain import run_drain

    monkeypatch.setenv("EXPERTWIRE_TOKEN", TOKEN.decode())
    with cluster([range(6), [0, 1], [0, 1]], MODEL) as (_, servers, registry):
        with pytest.raises(WaitTimeout, match="nobody else holds expert 2-5"):
            run_drain(registry.address, "s0", timeout=0.3)
        with pytest.raises(ConfigError, match="no server 'x'"):
            run_drain(registry.address, "x", timeout=0.3)
        assert run_drain(registry.address, "1", timeout=30)["server_id"] == "s1"
        wait_until(lambda: servers[1].stopped)
        assert not servers[0].stopped
        assert "start a replica" in capsys.readouterr().err
