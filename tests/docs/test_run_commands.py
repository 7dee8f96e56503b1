"""Runs every shell line of the README and the docs, as a reader would, document by document.

Takes minutes: only with `--docs-commands`, a step of its own in `.ci/run`. Left out are what
installs and tests this package (other steps do), and what says that it needs something else. A line
that several documents have is run once, in a folder that all of them share.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expertwire.demo import demo_model_path
from tests.shell_lines import LINES, ROOT

STAYS = ("registry", "serve", "openai", "--watch")  # run until they are ended
STARTS = {"serve": 0, "openai": 8000, "registry": 7700, "--page-port": 7780}  # port, 0: a server
SERVES = " experts of "  # what a server prints when it is there
SECONDS = 240.0
LATE = re.compile(r"^verdict: a step took [^;]*$", re.M)  # chaos, busy machine
OTHERS = ("pip", "pytest", ".ci/run", "pre-commit", "mkdocs")  # steps of .ci/run
# What a page takes for granted.
BEFORE = {"docs/pacing.md": ("expertwire registry", "expertwire serve MODEL --experts all")}
# What a reader has under another name.
NAMES = {"MODEL": demo_model_path(), "registry.example": "127.0.0.1"}

pytestmark = pytest.mark.timeout(1200)


def free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """One who works through the documents, in a folder of their own."""
    folder = tmp_path_factory.mktemp("docs")
    programs = folder / "bin"
    programs.mkdir()
    for name, arguments in (("expertwire", "-m expertwire "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        (programs / name).chmod(0o755)
    for file in (ROOT / "tests/tls").glob("*.*"):  # of docs/security.md
        shutil.copy(file, folder)
        (folder / file.name).chmod(0o600)
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{programs}:{env['PATH']}"
    for name in ("EXPERTWIRE_TOKEN", "EXPERTWIRE_TOKEN_FILE"):
        env.pop(name, None)
    return Reader(folder, env)


class Reader:
    """What was run already, and what runs."""

    def __init__(self, folder: Path, env: dict[str, str]):
        self.folder, self.env = folder, env
        self.done: set[str] = set()
        self.scene: list[str] = []  # what is to run until it is ended, from a registry on
        self.running: list[subprocess.Popen] = []  # of it, so far

    def type(self, text: str) -> None:
        """Runs a line to its end, or starts it; not again, unless something new is to be seen."""
        name = next((name for name in STAYS if name in text.split()), "")
        if name == "registry":
            self.end()
        if name and name != "--watch":
            self.scene.append(text)
        if text in self.done:
            return
        while len(self.running) < len(self.scene):
            self.start(self.scene[len(self.running)])
        if name == "--watch":
            self.watch(text)
        elif not name:
            done = self.run(text)
            assert done.returncode == 0 or LATE.search(done.stdout), \
                f"{done.stdout[-1500:]}{done.stderr[-1500:]}"
        self.done.add(text)

    def in_words(self, text: str) -> str:
        for name, meant in NAMES.items():
            text = re.sub(rf"\b{re.escape(name)}\b", meant, text)
        if re.search(r"\bSERVER\b", text):
            text = re.sub(r"\bSERVER\b", self.server(), text)
        return text

    def run(self, text: str) -> subprocess.CompletedProcess:
        return subprocess.run(self.in_words(text), shell=True, env=self.env, cwd=self.folder,
                              text=True, capture_output=True, timeout=SECONDS)

    def server(self) -> str:
        """The id of one that is registered."""
        deadline = time.monotonic() + SECONDS
        while True:
            shown = self.run("expertwire status --json")
            assert shown.returncode == 0 and time.monotonic() < deadline, shown
            if servers := json.loads(shown.stdout)["servers"]:
                return servers[0]["server_id"]

    def start(self, text: str) -> None:
        log = self.folder / f"{len(self.done)}-{len(self.running)}.log"
        with log.open("w") as out:
            process = subprocess.Popen(f"exec {self.in_words(text)}", shell=True, env=self.env,
                                       cwd=self.folder, stdout=out, stderr=out)
        self.running.append(process)
        wanted = [port for word, port in STARTS.items() if word in text.split()]
        deadline = time.monotonic() + SECONDS
        while any(free(port) if port else SERVES not in log.read_text() for port in wanted):
            assert process.poll() is None, f"{text} ended: {log.read_text()[-1500:]}"
            assert time.monotonic() < deadline, f"{text}: not there: {log.read_text()[-1500:]}"
            time.sleep(0.2)

    def watch(self, text: str) -> None:
        """Until it has shown something, then Ctrl-C."""
        process = subprocess.Popen(f"exec {self.in_words(text)}", shell=True, env=self.env,
                                   cwd=self.folder, text=True, stdout=subprocess.PIPE)
        self.running.append(process)
        self.scene.append(text)
        assert process.stdout is not None and process.stdout.readline(), f"{text} shows nothing"
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        process.wait(60)

    def end(self) -> None:
        for process in reversed(self.running):
            process.terminate()
        for process in self.running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
        self.running, self.scene = [], []


@pytest.mark.parametrize("document", dict.fromkeys(line.document for line in LINES))
def test_every_line_runs(document, reader, request):
    if not request.config.getoption("--docs-commands"):
        pytest.skip("runs with --docs-commands only")
    for port in filter(None, STARTS.values()):
        assert free(port), f"port {port} is in use: end what listens there, then try again"
    try:
        for text in BEFORE.get(document, ()):
            reader.type(text)
        for line in LINES:
            if line.document != document or line.needs:
                continue
            for part in (part.strip() for part in line.text.split("&&")):
                if part.startswith(OTHERS):
                    continue
                try:
                    reader.type(part)
                except (AssertionError, subprocess.TimeoutExpired) as err:
                    pytest.fail(f"{line}: {err}")
    finally:
        reader.end()
