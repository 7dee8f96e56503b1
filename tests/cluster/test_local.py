"""`expertwire up --on local`: real processes under a supervisor, from the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from expertwire.cli.app import app
from expertwire.cluster import local
from expertwire.cluster.backend import FAILED, RESTARTING, SERVING
from expertwire.cluster.config import load_config
from expertwire.cluster.records import write_record
from expertwire.cluster.supervisor import LOGS, Kept, take_lock
from expertwire.demo import demo_model_path
from expertwire.processes import ChildGroup
from tests.cluster.marked import MARK, Marked

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def marked():
    mark = Marked()
    yield mark
    mark.check_gone()


@pytest.fixture
def command(tmp_path, monkeypatch, marked):
    """Runs `expertwire ...` with a state folder of its own; `down` is called at the end."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(MARK, f"mark-{marked.value}")  # for the supervisor, too

    def run(*arguments: str):
        return CliRunner().invoke(app, arguments)

    yield run
    if list((tmp_path / "state").rglob("cluster.json")):
        run("down")


def write(tmp_path, marked, servers: str, listen: str = "127.0.0.1:0") -> str:
    file = tmp_path / "moe.yaml"
    file.write_text(f'model: {demo_model_path()}\nregistry: {{listen: "{listen}"}}\n'
                    f"servers: {{{servers}}}\n{marked.env}\n")
    return str(file)


def test_up_a_crash_more_servers_and_down(command, tmp_path, marked):
    config = write(tmp_path, marked, "count: 1, dtype: float32, threads: 1")
    done = command("up", config, "--json")
    assert done.exit_code == 0, done.exception
    facts = json.loads(done.stdout)
    registry, server = facts["processes"]
    assert (registry["name"], server["name"]) == ("registry", "server-0")
    assert server["experts"] == list(range(16)) and server["address"], "addresses are collected"
    words = " ".join(w for pid in marked.pids() for w in psutil.Process(pid).cmdline())
    token = Path(os.environ["EXPERTWIRE_TOKEN_FILE"]).read_text()
    assert "server-0" in words and token not in words

    assert "is up already" in str(command("up", config).exception)

    psutil.Process(server["pid"]).kill()
    psutil.Process(registry["pid"]).kill()
    done = command("scale", "--servers", "2", "--json")
    assert done.exit_code == 0, done.exception
    after = json.loads(done.stdout)
    assert after["registry"] == facts["registry"], "it comes back where it was"
    shown = {p["name"]: p for p in after["processes"]}
    assert shown["server-0"]["pid"] != server["pid"] and shown["server-0"]["restarts"] == 1
    assert shown["registry"]["restarts"] == 1 and len(shown["server-1"]["experts"]) == 8

    done = command("status", "--cluster", "moe")
    assert "server-1" in done.stdout and "2 servers" in done.stdout, done.exception
    watched = command("status", "--cluster", "moe", "--watch").exception
    assert f"--registry {facts['registry']}" in str(watched)
    assert "experts of demo_model" in command("logs", "server-0").stdout
    assert "there are registry, server-0" in str(command("logs", "server-7").exception)

    assert command("down").stdout == "moe is down\n"
    marked.check_gone()
    assert not list((tmp_path / "state").rglob("moe*")), "no file either"


def test_up_that_fails_leaves_nothing(command, tmp_path, marked):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        config = write(tmp_path, marked, "threads: 1", listen=listen)
        assert "registry ended with exit code 1" in str(command("up", config).exception)
    marked.check_gone()
    assert not list((tmp_path / "state").rglob("moe*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_supervisor_leaves_nothing(command, tmp_path, marked, monkeypatch, number):
    """Killed, it takes its processes with it; one that hangs is ended by `down`."""
    config = load_config(write(tmp_path, marked, "threads: 1"))
    write_record(config, "local")
    local.LocalBackend(config).start()
    wait(lambda: len(marked.pids()) >= 3)
    [state] = (tmp_path / "state").rglob("state.json")
    os.kill(json.loads(state.read_text())["pid"], number)
    if number == signal.SIGKILL:
        marked.check_gone()
        failed = command("status", "--cluster", "moe").exception
        assert "is not running any more" in str(failed)
    monkeypatch.setattr(local, "STOP_SECONDS", 2.0)
    done = command("down")
    assert done.stdout == "moe is down\n", done.exception


@pytest.fixture
def kept(tmp_path):
    """A function that keeps a registry: a process that starts at once."""
    (tmp_path / LOGS).mkdir()
    with ChildGroup() as group:
        made = []

        def make(name: str, max_restarts: int, *arguments: str) -> Kept:
            made.append(Kept(name, group, tmp_path, max_restarts))
            made[0].start([*arguments], {})
            return made[0]

        yield make
        made[0].close()


def wait(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_process_that_ends_is_started_again_after_a_pause(kept):
    process = kept("registry", 1, "registry", "--listen", "127.0.0.1:0")
    wait(lambda: process.state == SERVING)
    process.child.kill()
    assert not process.look()
    assert process.facts() == {"state": RESTARTING, "restarts": 1, "said": process.said,
                               "pid": None}
    assert "listening on" in process.said
    assert not process.is_due()
    wait(process.is_due, 2)
    process.start(["registry", "--listen", "127.0.0.1:0"], {})
    process.child.kill()
    process.look()
    assert process.facts()["state"] == FAILED and not process.is_due(), "one restart was allowed"


def test_a_process_that_never_served_is_failed_and_tried_again(kept):
    process = kept("registry", -1, "registry", "--listen", "nonsense")
    wait(lambda: process.child is None or (not process.look() and process.child is None))
    assert process.facts()["state"] == FAILED and "not HOST:PORT" in process.facts()["said"]
    wait(process.is_due, 2)


def test_a_process_that_leaves_by_itself_stays_away(kept):
    process = kept("server-0", -1, "registry", "--help")
    wait(process.look)
    assert process.child is None and not process.is_due()


def test_one_supervisor_for_a_folder(tmp_path):
    first = take_lock(tmp_path, 0)
    assert first is not None and take_lock(tmp_path, 0.05) is None
    os.close(first)
    second = take_lock(tmp_path, 0)
    assert second is not None
    os.close(second)
