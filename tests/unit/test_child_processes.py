"""Child processes: what they say, how they end, and that they do not outlive their parent."""

from __future__ import annotations

import time

import psutil
import pytest
from tests.leftovers import nothing_left_behind

from expertwire.errors import ExpertwireError, WaitTimeout
from expertwire.processes import ChildGroup

START = 30.0


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left_behind():
        yield


def test_whoever_waits_for_a_line_of_a_child_that_ended_learns_why():
    with ChildGroup() as group:
        child = group.start("broken", ["registry", "--listen", "nonsense"])
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises(
                ExpertwireError, match=r"broken ended with exit code 1: .*HOST:PORT"
            ):
                child.wait_line("listening", START)
            assert time.monotonic() - begin < START / 2


def test_a_line_that_does_not_come_is_a_timeout_with_the_last_lines():
    with ChildGroup() as group:
        child = group.start("registry", ["registry", "--listen", "127.0.0.1:0"])
        assert child.wait_line("listening on 127.0.0.1:", START).startswith("registry listening")
        with pytest.raises(WaitTimeout, match="registry listening"):
            child.wait_line("something else", 0.1)
    assert child.process.returncode == 143
    assert not psutil.pid_exists(child.process.pid)


def test_a_child_ends_when_its_parents_pipe_does():
    """As after kill -9 of the parent: the pipe closes, no signal is sent."""
    with ChildGroup() as group:
        child = group.start("registry", ["registry", "--listen", "127.0.0.1:0"])
        child.wait_line("listening on", START)
        assert child.process.stdin is not None
        child.process.stdin.close()
        child.process.wait(5)


def test_files_of_the_current_directory_are_not_run(tmp_path, monkeypatch):
    (tmp_path / "grp.py").write_text("raise SystemExit('a file of the user ran')")
    monkeypatch.chdir(tmp_path)
    with ChildGroup() as group:
        child = group.start("registry", ["registry", "--listen", "127.0.0.1:0"])
        assert "registry listening" in child.wait_line("listening on 127.0.0.1:", START)
