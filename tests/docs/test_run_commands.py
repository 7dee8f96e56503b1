"""Runs every shell line of the README and the docs, as a reader would, document by document.

Takes minutes: only with `--docs-commands`, a step of its own in `.ci/run`. Left out are what
installs and tests this package (other steps do), and what says that it needs something else.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expertwire.demo import demo_model_path
from tests.shell_lines import LINES

STAYS = ("registry", "serve", "openai")  # run until they are ended
SECONDS = 240.0
OTHERS = ("pip", "pytest", ".ci/run", "pre-commit", "mkdocs")  # steps of .ci/run

pytestmark = pytest.mark.timeout(1200)


def free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def programs(folder: Path) -> Path:
    """`expertwire` and `python` are those of this test, installed or not."""
    place = folder / "bin"
    place.mkdir()
    for name, arguments in (("expertwire", "-m expertwire "), ("python", "")):
        (place / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        (place / name).chmod(0o755)
    return place


def wait_port(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + SECONDS
    while free(port):
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline, f"nobody listens on {port}"
        time.sleep(0.1)


def wait_servers(count: int, env: dict[str, str]) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        shown = subprocess.run([sys.executable, "-m", "expertwire", "status", "--json"], env=env,
                               capture_output=True, text=True, timeout=60)
        if shown.stdout.count('"server_id"') >= count:
            return
        time.sleep(0.2)
    pytest.fail(f"not {count} servers: {shown.stdout[-500:]} {shown.stderr[-500:]}")


@pytest.mark.parametrize("document", sorted({line.document for line in LINES}))
def test_every_line_runs(document, tmp_path, request):
    if not request.config.getoption("--docs-commands"):
        pytest.skip("runs with --docs-commands only")
    for port in (7700, 8000):
        assert free(port), f"port {port} is in use: end what listens there, then try again"
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{programs(tmp_path)}:{env['PATH']}"
    for name in ("EXPERTWIRE_TOKEN", "EXPERTWIRE_TOKEN_FILE"):
        env.pop(name, None)
    running: list[subprocess.Popen] = []
    try:
        num_servers = 0
        for line in [line for line in LINES if line.document == document]:
            if line.needs:
                continue
            parts = [part.strip() for part in line.text.split("&&")]
            parts = [part for part in parts if not part.startswith(OTHERS)]
            for part in parts:
                text = re.sub(r"\bMODEL\b", demo_model_path(), part)
                command = re.search(r"\bexpertwire (\w+)", text)
                name = command[1] if command else ""
                if name == "registry" and not free(7700):
                    continue  # of an earlier section, and as good
                if name in STAYS:
                    log = (tmp_path / f"{len(running)}.log").open("w")
                    process = subprocess.Popen(f"exec {text}", shell=True, env=env, cwd=tmp_path,
                                               stdout=log, stderr=log)
                    running.append(process)
                    if name == "serve":
                        num_servers += 1
                        wait_servers(num_servers, env)
                    else:
                        wait_port(7700 if name == "registry" else 8000, process)
                    continue
                done = subprocess.run(text, shell=True, env=env, cwd=tmp_path, text=True,
                                      capture_output=True, timeout=SECONDS)
                assert done.returncode == 0, f"{line}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
                num_servers -= name == "drain"
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
