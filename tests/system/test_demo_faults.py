"""The demo when one of its processes does not come up: its last words, at once."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.leftovers import nothing_left_behind

from expertwire import demo
from expertwire.cli import app as cli
from expertwire.errors import ExpertwireError
from expertwire.launch import cpu_warp_size
from expertwire.processes import ChildGroup, ChildProcess

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch):
    """A demo that waited for the dead child would wait for longer than the test may take."""
    monkeypatch.setattr(demo, "START_SECONDS", 10_000.0)


@pytest.fixture
def _handlers():
    """The command's signal handlers, taken back."""
    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_server_that_cannot_load_ends_the_demo_with_its_last_words(
    tmp_path, monkeypatch, capsys, _handlers
):
    """One expert's tensor has another shape: only the server that holds it reads it."""
    model = tmp_path / "model"
    shutil.copytree(demo.demo_model_path(), model)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    tensors[name] = tensors[name][:64].contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(
        sys, "argv", ["expertwire", "demo", "--model", str(model), "--picture", ""]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("expertwire: server-1 ended with exit code 1: ")
    assert name in line and "[64, 128]" in line


def test_a_server_that_dies_at_once_is_not_waited_for(monkeypatch):
    """Servers read their environment when they start, this process has read it already."""
    cpu_warp_size()
    monkeypatch.setenv("EXPERTWIRE_CPU_WARP_SIZE", "99")
    said = r"server-\d ended with exit code 1: .*must be a number from 1 to"
    with nothing_left_behind(), pytest.raises(ExpertwireError, match=said):
        demo.run_demo(quiet=True, picture="")


def test_a_registry_that_dies_at_once_is_not_waited_for(monkeypatch):
    start = ChildGroup.start

    def without_a_port(self: ChildGroup, name: str, arguments: list[str], env: dict[str, str]):
        if name == "registry":
            arguments = ["registry", "--listen", "nonsense"]
        return start(self, name, arguments, env)

    monkeypatch.setattr(ChildGroup, "start", without_a_port)
    with pytest.raises(ExpertwireError, match=r"registry ended with exit code 1: .*HOST:PORT"):
        demo.run_demo(quiet=True, picture="")


def test_a_group_stops_within_its_limit_also_when_no_child_listens(monkeypatch):
    """Stopped processes (SIGSTOP) answer no signal: they are killed, all before one deadline."""
    monkeypatch.setattr("expertwire.processes.STOP_SECONDS", 0.5)
    children: list[ChildProcess] = []
    with ChildGroup() as group:
        for _ in range(3):
            child = group.start("registry", ["registry", "--listen", "127.0.0.1:0"])
            child.wait_line("listening on", 60)
            children.append(child)
        for child in children:
            os.kill(child.process.pid, signal.SIGSTOP)
        begin = time.monotonic()
    assert time.monotonic() - begin < 3
    assert [child.process.returncode for child in children] == [-9, -9, -9]
    assert not any(Path(f"/proc/{child.process.pid}").exists() for child in children)
