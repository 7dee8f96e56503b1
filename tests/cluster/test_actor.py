"""What a Ray actor does, as a plain object: Ray itself is in test_ray.py."""

from __future__ import annotations

import pickle
import threading
import time

import pytest

from expertwire.cluster.actor import CommandActor, Secret
from expertwire.cluster.backend import FAILED, SERVING
from expertwire.cluster.config import parse_config
from expertwire.registry.question import ask
from tests.cluster.marked import MARK, Marked

SECRET = "secret-of-an-actor-0123"


@pytest.fixture
def marked():
    mark = Marked()
    yield mark
    mark.check_gone()


@pytest.fixture
def actor(marked, monkeypatch):
    """A function that makes an actor; nothing of it is left. `left` is set when it leaves."""
    config = parse_config({"name": "a", "model": "nowhere",
                           "env": {MARK: f"mark-{marked.value}"}}).as_dict()
    made = []

    def make(name: str, registry: str, left=None) -> CommandActor:
        made.append(CommandActor(config, name, registry, Secret(SECRET), 1,
                                 left.set if left else None))
        return made[0]

    yield make
    made[0].stop()


def wait_state(actor: CommandActor, state: str) -> dict:
    deadline = time.monotonic() + 60
    while (facts := actor.describe())["state"] != state:
        assert time.monotonic() < deadline, facts
        time.sleep(0.01)
    return facts


def test_it_runs_a_command_that_knows_the_secret(actor, marked, capfd):
    registry = actor("registry", "127.0.0.1:0")
    facts = wait_state(registry, SERVING)
    assert [facts["pid"]] == marked.pids()
    assert facts["said"].startswith("registry listening on ") and not facts["restarted"]
    assert registry.log(5) == [facts["said"]]
    address = facts["said"].split()[-1]
    assert ask(address, SECRET.encode(), {"type": "status"})["servers"] == []
    assert registry.stop() == 143
    said = capfd.readouterr()
    assert "listening on" in said.out and SECRET not in said.out + said.err


def test_a_command_that_fails_at_once_can_be_asked_why(actor):
    facts = wait_state(actor("registry", "nonsense"), FAILED)
    assert "not HOST:PORT" in facts["said"]


def test_a_command_that_decides_to_leave_is_not_restarted(actor, monkeypatch):
    monkeypatch.setattr("expertwire.cluster.actor.server_arguments", lambda *_: ["--help"])
    left = threading.Event()
    actor("server-0", "127.0.0.1:1", left)
    assert left.wait(60)


def test_a_secret_travels_and_does_not_show():
    secret = Secret(SECRET)
    assert SECRET not in f"{secret} {secret!r} {[secret]}"
    assert pickle.loads(pickle.dumps(secret)).text == SECRET
