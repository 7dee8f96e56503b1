"""`expertwire serve` and the registry, in processes: refusals, shares by agreement, early ends."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from tests.system.cluster import ScaledExperts, model_facts

from expertwire.config import ServerConfig
from expertwire.demo import demo_model_path
from expertwire.errors import ConfigError
from expertwire.model.checkpoint import inspect_model
from expertwire.processes import ChildGroup, ChildProcess
from expertwire.registry import roster
from expertwire.registry.membership import Lease
from expertwire.registry.registry import Registry
from expertwire.serve import make_server, run_server
from expertwire.server.server import Server

MODEL = demo_model_path()
ENV = {"OMP_NUM_THREADS": "1"}
START = 60.0

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture
def registry(token):
    with Registry(token=token) as made:
        yield made


def serve(children: ChildGroup, address: str, *arguments: str, **env: str) -> ChildProcess:
    return children.start(
        "server",
        ["serve", MODEL, "--registry", address, "--threads", "1", *arguments],
        {**ENV, **env},
    )


def wait_until(ready, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            return True
        time.sleep(0.02)
    return bool(ready())


def test_a_refused_server_ends_with_one_line(registry, token, warm):
    other = {"name": "a", "address": "a", "pid": 1, "model": model_facts(), "experts": [0]}
    with (contextlib.closing(Lease(registry.address, token, other)) as lease,
          ChildGroup(warm) as group):
        lease.wait_registered(5)
        child = serve(group, registry.address, "--experts", "0")
        assert child.process.wait(START) == 1, child.lines
        child.stop()
        (line,) = [line for line in child.lines if line.startswith("expertwire: ")]
        assert not any("Traceback" in shown for shown in child.lines)
        name = inspect_model(MODEL).name
        assert f"this registry serves {model_facts()['name']}" in line
        assert f"not {name}" in line
        assert list(registry.members) == ["a"]


def auto_server(registry: Registry, token: bytes, name: str) -> Server:
    return make_server(
        MODEL,
        "auto",
        registry.address,
        name=name,
        dtype=None,
        token=token,
        num_auto_servers=2,
        config=ServerConfig(num_threads=1),
    )


def test_auto_servers_share_all_experts_and_one_that_died_while_loading_is_replaced(
    registry, token, monkeypatch
):
    monkeypatch.setattr(roster, "PLAN_GRACE_SECONDS", 0.3)
    load = Server.from_checkpoint
    planned: list[list[int]] = []

    def die(path, experts, *args, **options):
        planned.append(list(experts))
        raise ConfigError("died while loading")

    def load_slowly(path, experts, *args, **options):
        planned.append(list(experts))
        time.sleep(0.8)  # longer than the grace: the plan must hold while it loads
        if len(planned) == 2:
            with pytest.raises(ConfigError):
                monkeypatch.setattr(Server, "from_checkpoint", die)
                auto_server(registry, token, "dead")
        return load(path, experts, *args, **options)

    monkeypatch.setattr(Server, "from_checkpoint", load_slowly)
    planned.append([])
    with auto_server(registry, token, "first") as first:
        first.wait_registered(5)
        _, kept, lost = planned
        assert sorted(kept + lost) == list(range(16)), "the dead one was not promised the same"
        monkeypatch.setattr(Server, "from_checkpoint", load)
        time.sleep(0.4)
        with auto_server(registry, token, "replacement") as replacement:
            replacement.wait_registered(5)
            assert replacement.shard.experts == lost
            held = [e for m in registry.members.values() for e in m.facts["experts"]]
            assert sorted(held) == list(range(16))


def echo_server(registry: Registry, token: bytes) -> Server:
    return Server(ScaledExperts([0, 1]), model_facts(), registry, token=token)


def test_a_server_whose_data_thread_ended_is_no_member_any_more(registry, token):
    def fail():
        raise RuntimeError("on purpose")

    with echo_server(registry, token) as server:
        server.wait_registered(5)
        server._serve_once = fail
        server.hca.interrupt()
        with pytest.raises(RuntimeError, match="on purpose"):
            server.serve_forever()
        assert wait_until(lambda: not registry.members)
    server.close()
    assert server.lease._thread.is_alive() is False


def test_run_server_ends_with_close_also_while_there_is_no_registry(token):
    server = Server(ScaledExperts([0]), model_facts(), "127.0.0.1:9", token=token).start()
    thread = threading.Thread(target=run_server, args=(server,))
    thread.start()
    time.sleep(0.1)
    begin = time.monotonic()
    server.close()
    thread.join(5)
    assert time.monotonic() - begin < 2
    assert not thread.is_alive()


def test_run_server_raises_what_the_registry_says(registry, token):
    with echo_server(registry, token) as first:
        first.wait_registered(5)
        second = Server(
            ScaledExperts([0]), model_facts(name="other"), registry, token=token, name="second"
        ).start()
        with pytest.raises(ConfigError, match=r"scaled.*other"):
            run_server(second)
        assert second.stopped
