"""Runs every shell line of the README and the docs, as a reader would, document by document.

Takes minutes: only with `--docs-commands`, a step of its own in `.ci/run`. Left out are what
installs and tests this package (other steps do), and what says that it needs something else. A line
that several documents have is run once, in a folder that all of them share.

The first line of each command is given to a shell. Later ones of commands that need torch, which
takes seconds to import, are forked from a process that has it (zygote.py), which runs the
same `main` on the same arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expertwire.demo import demo_model_path
from expertwire.processes import ChildProcess
from expertwire.zygote import Zygote
from tests.conftest import HEAVY
from tests.shell_lines import LINES, ROOT, VARIABLE

STAYS = ("registry", "serve", "openai", "--watch")  # run until they are ended
STARTS = {"serve": 0, "openai": 8000, "registry": 7700, "--page-port": 7780}  # port, 0: a server
IMPORTS = ("demo", "serve", "generate", "openai")  # commands that take seconds to start
SERVES = " experts of "  # what a server prints when it is there
SECONDS = 240.0
# chaos, busy machine: nothing but steps that took too long
LATE = re.compile(r"^verdict: (?:[^;]*: a step took [^;]*(?:; |$))+$", re.M)
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
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        for name in ("EXPERTWIRE_TOKEN", "EXPERTWIRE_TOKEN_FILE"):
            patch.delenv(name, raising=False)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        env = dict(os.environ)
        zygote = Zygote(demo_model_path(), imports=HEAVY)
    with zygote:
        yield Reader(folder, env, zygote)


class Cold:
    """A line that a shell runs, with what it says."""

    def __init__(self, text: str, folder: Path, env: dict[str, str], log: Path):
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(f"exec {text}", shell=True, env=env, cwd=folder,
                                            stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def said(self) -> str:
        return self._log.read_text()


class Warm:
    """A command that is forked from a process which has imported what it needs."""

    def __init__(self, words: list[str], env: dict[str, str], zygote: Zygote):
        self._child = ChildProcess(words[0], words, env, zygote)
        self.process = self._child.process

    def said(self) -> str:
        if self.process.poll() is not None:
            self._child.stop()  # what it said last has been read then
        return "\n".join(self._child.lines)


class Reader:
    """What was run already, and what runs."""

    def __init__(self, folder: Path, env: dict[str, str], zygote: Zygote):
        self.folder, self.env, self.zygote = folder, env, zygote
        self.done: set[str] = set()
        self.begun: set[str] = set()  # the commands of IMPORTS that a shell has started
        self.scene: list[str] = []  # what is to run until it is ended, from a registry on
        self.running: list[Cold | Warm] = []  # of it, so far
        self.logs = 0

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
            code, said = self.run(text)
            assert code == 0 or LATE.search(said), f"{text} ended with {code}: {said[-1500:]}"
        self.done.add(text)

    def launch(self, text: str) -> Cold | Warm:
        for name, meant in NAMES.items():
            text = re.sub(rf"\b{re.escape(name)}\b", meant, text)
        if re.search(r"\bSERVER\b", text):
            text = re.sub(r"\bSERVER\b", self.server(), text)
        words, variables = shlex.split(text), {}
        while VARIABLE.fullmatch(words[0]):
            name, _, variables[name] = words.pop(0).partition("=")
        command = next((word for word in words if word in IMPORTS), "")
        if words[0] == "expertwire" and command in self.begun and not re.search(r"[*?|<>$~]", text):
            return Warm(words[1:], variables, self.zygote)
        self.begun.add(command)
        self.logs += 1
        # `exec` takes no variables.
        text = " ".join(["env", *(f"{name}={shlex.quote(value)}" for name, value in
                                  variables.items()), text.split(" ", len(variables))[-1]])
        return Cold(text, self.folder, self.env, self.folder / f"{self.logs}.log")

    def run(self, text: str) -> tuple[int, str]:
        """The exit code, and what was said."""
        launched = self.launch(text)
        try:
            code = launched.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            launched.process.kill()
            pytest.fail(f"{text} did not end within {SECONDS} s: {launched.said()[-1500:]}")
        return code, launched.said()

    def server(self) -> str:
        """The id of one that is registered."""
        deadline = time.monotonic() + SECONDS
        while True:
            code, said = self.run("expertwire status --json")
            assert code == 0 and time.monotonic() < deadline, said
            if servers := json.loads(said.splitlines()[-1])["servers"]:
                return servers[0]["server_id"]

    def start(self, text: str) -> None:
        launched = self.launch(text)
        self.running.append(launched)
        wanted = [port for word, port in STARTS.items() if word in text.split()]
        deadline = time.monotonic() + SECONDS
        while any(free(port) if port else SERVES not in launched.said() for port in wanted):
            said = launched.said()[-1500:]
            assert launched.process.poll() is None, f"{text} ended: {said}"
            assert time.monotonic() < deadline, f"{text}: not there: {said}"
            time.sleep(0.1)

    def watch(self, text: str) -> None:
        """Until it has shown something, then Ctrl-C."""
        launched = self.launch(text)
        self.running.append(launched)
        self.scene.append(text)
        deadline = time.monotonic() + SECONDS
        while not launched.said():
            assert time.monotonic() < deadline, f"{text} shows nothing"
            time.sleep(0.1)
        launched.process.send_signal(signal.SIGINT)
        assert launched.process.wait(60) == 130, launched.said()[-1500:]

    def end(self) -> None:
        for launched in reversed(self.running):
            launched.process.terminate()
        for launched in self.running:
            try:
                launched.process.wait(60)
            except subprocess.TimeoutExpired:
                launched.process.kill()
                launched.process.wait(5)
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
                except AssertionError as err:
                    pytest.fail(f"{line}: {err}")
    finally:
        reader.end()
