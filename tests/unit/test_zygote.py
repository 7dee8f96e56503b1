"""Commands that are forked from a warm process behave as if they had been started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from expertwire.demo import demo_model_path
from expertwire.errors import ExpertwireError, WaitTimeout
from expertwire.processes import PARENT_PIPE, ChildGroup
from expertwire.zygote import Zygote

TOKEN = "zygote-tests-0123456789"
LISTEN = ["registry", "--listen", "127.0.0.1:0"]


@pytest.fixture(scope="module")
def zygote():
    with Zygote(demo_model_path(), {"OMP_NUM_THREADS": "1"}) as warm:
        yield warm


def test_output_exit_code_and_environment(zygote):
    with ChildGroup(zygote) as group:
        child = group.start("registry", LISTEN, {"EXPERTWIRE_TOKEN": TOKEN})
        child.wait_line("listening on", 30)
        environment = Path(f"/proc/{child.process.pid}/environ").read_bytes()
        assert TOKEN.encode() not in environment, "set after the fork, so ps does not show it"
        assert child.process.poll() is None
        child.process.terminate()
        assert child.process.wait(10) == 143
        assert child.process.wait(0) == child.process.poll() == 143


def test_a_command_that_fails_says_why(zygote):
    with ChildGroup(zygote) as group:
        child = group.start("registry", ["registry", "--listen", "nowhere"],
                            {"EXPERTWIRE_TOKEN": TOKEN})
        with pytest.raises(ExpertwireError, match="is not HOST:PORT"):
            child.wait_line("listening on", 30)
        assert child.process.poll() == 1


def test_kill_9_is_its_own_and_is_told(zygote):
    with ChildGroup(zygote) as group:
        victim, other = [group.start(name, LISTEN, {"EXPERTWIRE_TOKEN": TOKEN})
                         for name in ("victim", "other")]
        for child in (victim, other):
            child.wait_line("listening on", 30)
        with pytest.raises(subprocess.TimeoutExpired):
            victim.process.wait(0.01)
        victim.kill()
        assert victim.process.wait(5) == -signal.SIGKILL and other.process.poll() is None
        victim.process.send_signal(signal.SIGTERM)  # nobody is hit: its pid is nobody's any more
        deadline = time.monotonic() + 5
        while Path(f"/proc/{victim.process.pid}").exists():
            assert time.monotonic() < deadline, "nobody reaped it"
            time.sleep(0.01)


def test_children_hold_no_descriptors_of_each_other(zygote):
    with ChildGroup(zygote) as group:
        children = [group.start(f"r{i}", LISTEN, {"EXPERTWIRE_TOKEN": TOKEN}) for i in range(4)]
        for child in children:
            child.wait_line("listening on", 30)
        counts = [len(os.listdir(f"/proc/{child.process.pid}/fd")) for child in children]
        assert len(set(counts)) == 1, "the later ones would have more"


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one():
    with Zygote(demo_model_path()) as warm:
        warm._socket.settimeout(0.01)  # it is importing
        with pytest.raises(WaitTimeout, match="did not fork"):
            warm.spawn(LISTEN, {PARENT_PIPE: "1"})
        with pytest.raises(ExpertwireError, match="has ended"):
            warm.spawn(LISTEN)


def test_a_zygote_that_is_gone_is_an_error():
    warm = Zygote(demo_model_path())
    warm.close()
    with pytest.raises(ExpertwireError, match="has ended"):
        warm.spawn(LISTEN)
