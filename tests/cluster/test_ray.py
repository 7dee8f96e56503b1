"""`expertwire up --on ray` on a real Ray cluster of several nodes: with `--ray` only (minutes)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from expertwire.demo import demo_model_path
from expertwire.registry.drain import run_drain
from tests.cluster import ray_cluster
from tests.cluster.marked import Marked

pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _wanted(request):
    if not request.config.getoption("--ray"):
        pytest.skip("runs with --ray only")


@pytest.fixture(scope="module")
def nodes(_wanted):
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        with ray_cluster.ray_nodes(2, num_cpus=6) as cluster:
            yield cluster
    finally:
        patch.undo()


@pytest.fixture
def manage(nodes, tmp_path, monkeypatch):
    """expertwire.cluster.manage with a state folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    from expertwire.cluster import manage

    return manage


@pytest.fixture
def marked():
    """The mark of a cluster's processes: none of them is there afterwards."""
    mark = Marked()
    yield mark
    mark.check_gone()


def write_config(tmp_path, nodes, marked, *, ray: str = "", count: int = 3) -> str:
    file = tmp_path / "moe.yaml"
    file.write_text(f"""
model: {demo_model_path()}
registry: {{listen: "127.0.0.1:{ray_cluster.free_port()}"}}
servers: {{count: {count}, dtype: float32, threads: 1}}
ray: {{address: "{nodes.address}"{ray}}}
{marked.env}
""")
    return str(file)


def processes(facts: dict) -> dict[str, dict]:
    return {p["name"]: p for p in facts["processes"]}


def wait_serving(manage, count: int, gone=(), seconds: float = 180.0) -> dict[str, dict]:
    """Until so many servers are listed and say that they serve, none with a pid of `gone`."""
    deadline = time.monotonic() + seconds
    while True:
        name, backend = manage.find_cluster(None, None)
        found = processes(manage.report(name, backend))
        serving = [p for p in found.values() if p["experts"] and p["state"] == "serving"
                   and p["pid"] not in gone]
        if len(serving) >= count:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def test_a_lost_node_a_crash_and_another_number_of_servers(nodes, manage, marked, tmp_path,
                                                           token):
    facts = manage.up(write_config(tmp_path, nodes, marked), "ray", timeout=240)
    try:
        before = processes(facts)
        assert sorted(before) == ["registry", "server-0", "server-1", "server-2"]
        places = {n: ray_cluster.node_of(nodes, before[n]["pid"])
                  for n in before if n != "registry"}
        assert len(set(places.values())) == 2, "spread over both nodes"
        with ray_cluster.Decoding(facts["registry"], token) as decoding:
            decoding.wait_rounds(2)

            lost = places["server-0"]
            gone = [n for n, node in places.items() if node is lost]
            nodes.remove_node(lost, allow_graceful=False)
            after = wait_serving(manage, 3, [before[n]["pid"] for n in gone])
            decoding.wait_rounds(2)
            stays = next(node for node in places.values() if node is not lost)
            for name in gone:
                assert after[name]["restarts"] is None, "restarted by Ray"
                assert ray_cluster.node_of(nodes, after[name]["pid"]) is stays
            assert set(decoding.client.stats()["servers"]) >= set(after) - {"registry"}

            victim = after["server-1"]["pid"]
            os.kill(victim, signal.SIGKILL)
            wait_serving(manage, 3, [victim])
            decoding.wait_rounds(2)

            assert len(manage.scale(None, 5, timeout=240)["processes"]) == 6
            decoding.wait_rounds(2)
            # By hand: its command leaves with code 0, and Ray must not start it again.
            run_drain(facts["registry"], "server-4", timeout=60)
            wait_no(manage, "server-4")
            shrunk = processes(manage.scale(None, 3, timeout=240))
            assert len(shrunk) == 4 and all(p["experts"] for n, p in shrunk.items()
                                            if n != "registry")
            decoding.wait_rounds(2)
        _, backend = manage.find_cluster(None, None)
        assert any("experts of" in line for line in backend.log("server-1", 50))
    finally:
        manage.down(None)


def test_places_on_distinct_nodes_and_what_goes_wrong(nodes, manage, marked, tmp_path, token):
    """strict_spread: a server whose node is lost waits for another one, then comes back there."""
    from expertwire.errors import ConfigError, ExpertwireError

    while len(nodes.worker_nodes) < 2:
        nodes.add_node(num_cpus=6)
    nodes.wait_for_nodes(60)
    bad = tmp_path / "bad.yaml"
    bad.write_text(f"""
model: {tmp_path / "nowhere"}
registry: {{listen: "127.0.0.1:{ray_cluster.free_port()}"}}
ray: {{address: "{nodes.address}"}}
{marked.env}
""")
    with pytest.raises(ExpertwireError, match=r"server-0 failed: .*nowhere"):
        manage.up(str(bad), "ray", timeout=120)
    marked.check_gone()

    config = write_config(tmp_path, nodes, marked, ray=", placement: strict_spread, places: 3")
    with pytest.raises(ConfigError, match="Ray has no room for 3 places"):
        manage.up(config, "ray", timeout=120)
    marked.check_gone()

    config = write_config(tmp_path, nodes, marked, ray=", placement: strict_spread", count=2)
    facts = manage.up(config, "ray", timeout=240)
    try:
        before = processes(facts)
        with pytest.raises(ConfigError, match="is up already, on ray"):
            manage.up(config, "ray", timeout=60)
        with pytest.raises(ConfigError, match="keeps places for 2"):
            manage.scale(None, 3, timeout=60)
        places = {n: ray_cluster.node_of(nodes, before[n]["pid"])
                  for n in ("server-0", "server-1")}
        assert places["server-0"] is not places["server-1"]
        with ray_cluster.Decoding(facts["registry"], token) as decoding:
            decoding.wait_rounds(1)
            nodes.remove_node(places["server-1"], allow_graceful=False)
            wait_waiting(manage, "server-1")
            fresh = nodes.add_node(num_cpus=6)
            after = wait_serving(manage, 2, [before["server-1"]["pid"]])
            assert ray_cluster.node_of(nodes, after["server-1"]["pid"]) is fresh
            decoding.wait_rounds(2)
    finally:
        manage.down(None)
    check_secret(token)


def wait_no(manage, server: str, seconds: float = 60.0) -> None:
    """Until Ray knows nothing of a server any more."""
    deadline = time.monotonic() + seconds
    while server in {p.name for p in manage.find_cluster(None, None)[1].describe()}:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_waiting(manage, server: str, seconds: float = 60.0) -> None:
    """Until a server is on no node."""
    deadline = time.monotonic() + seconds
    while True:
        _, backend = manage.find_cluster(None, None)
        found = {p.name: p for p in backend.describe()}
        if found[server].state != "serving" and not found[server].pid:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def check_secret(token: bytes) -> None:
    """No file that Ray wrote for this session holds the token, and no command line."""
    import psutil
    import ray

    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    files = [f for f in folder.rglob("*") if f.is_file()]
    assert any(b"experts of" in f.read_bytes() for f in files), "these are the logs"
    assert not [f for f in files if token in f.read_bytes()]
    for process in psutil.process_iter(["cmdline"]):
        assert token.decode() not in " ".join(process.info["cmdline"] or [])
