"""`--on local`: plain processes of this host, under a supervisor that outlives the command."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError, ExpertwireError, WaitTimeout
from .arguments import REGISTRY, server_index, server_name
from .backend import ProcessFacts
from .config import ClusterConfig
from .records import cluster_folder, read_json, write_json
from .supervisor import LOCK, LOGS, STATE, WANTED, take_lock

ANSWER_SECONDS = 30.0  # of the supervisor, on a busy machine
STOP_SECONDS = 20.0  # it gives its children 4 s each way


class LocalBackend:
    """The command's side: writes what is wanted, reads what there is (supervisor.py)."""

    def __init__(self, config: ClusterConfig):
        self.config = config
        self.folder = cluster_folder(config.name)

    def start(self) -> None:
        if self._is_running():
            raise ConfigError(f"cluster {self.config.name} is up already; `expertwire down "
                              f"{self.config.name}` ends it")
        for name in (STATE, WANTED):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / LOGS, ignore_errors=True)
        self._want([server_name(i) for i in range(self.config.servers.count)])
        with (self.folder / "supervisor.log").open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.supervisor", str(self.folder)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )
        self._wait(lambda state: state.get("registry") and state["serial"] >= 0)

    def registry_address(self) -> str:
        address = self._state().get("registry")
        if not address or not self._is_running():
            raise ConfigError(f"cluster {self.config.name} is not running any more; `expertwire "
                              f"down {self.config.name}` clears what it left")
        return address

    def describe(self) -> list[ProcessFacts]:
        if not self._is_running():
            return []
        processes = self._state().get("processes", {})
        return [
            ProcessFacts(name, facts["state"], "localhost", facts["pid"], facts["restarts"],
                         facts["said"], str(self._log_file(name)))
            for name, facts in sorted(processes.items(), key=lambda p: server_index(p[0]))
        ]

    def add(self, names: Sequence[str], num_servers: int) -> None:
        self._want([*self._names(), *names])
        self._settle()

    def remove(self, name: str) -> None:
        self._want([other for other in self._names() if other != name])
        self._settle()

    def log(self, name: str, lines: int) -> list[str]:
        if not self._log_file(name).is_file():
            names = [file.stem for file in sorted((self.folder / LOGS).glob("*.log"))]
            raise ConfigError(f"no process {name!r}; there are {', '.join(names) or 'none'}")
        return self._tail(name, lines)

    def stop(self) -> None:
        if not self.folder.is_dir() or not self._is_running():
            return
        self._want([], stop=True)
        if self._wait_gone(STOP_SECONDS):
            return
        # It is stuck. The lock says that the pid is its own still; its children leave with it.
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(self._state()["pid"], signal.SIGKILL)
        if not self._wait_gone(STOP_SECONDS):
            raise WaitTimeout(f"the supervisor of {self.config.name} does not end; see "
                              f"{self.folder}", "down", self.config.name)

    # ---------------------------------------------------------------- the supervisor's files

    def _state(self) -> dict[str, Any]:
        return read_json(self.folder / STATE)

    def _names(self) -> list[str]:
        return [name for name in self._state().get("processes", {}) if name != REGISTRY]

    def _want(self, servers: list[str], stop: bool = False) -> None:
        serial = read_json(self.folder / WANTED).get("serial", -1) + 1
        write_json(self.folder / WANTED, {"serial": serial, "servers": servers, "stop": stop})

    def _settle(self) -> None:
        serial = read_json(self.folder / WANTED)["serial"]
        self._wait(lambda state: state.get("serial") == serial)

    def _wait(self, condition) -> None:
        """Raises ExpertwireError if the supervisor ended instead, WaitTimeout."""
        deadline, seen = time.monotonic() + ANSWER_SECONDS * 3, False
        while not condition(state := self._state()):
            seen = seen or bool(state)
            if state.get("error") or (seen and not self._is_running()):
                raise ExpertwireError(state.get("error") or "the supervisor ended: "
                                      + " | ".join(self._supervisor_words()))
            if time.monotonic() > deadline:
                raise WaitTimeout(f"the supervisor of {self.config.name} did not answer; see "
                                  f"{self.folder}", "up", self.config.name)
            time.sleep(0.02)

    def _supervisor_words(self) -> list[str]:
        with contextlib.suppress(OSError):
            return (self.folder / "supervisor.log").read_text(errors="replace").splitlines()[-3:]
        return []

    def _is_running(self) -> bool:
        if not (self.folder / LOCK).is_file():
            return False
        lock = take_lock(self.folder, 0)
        if lock is None:
            return True
        os.close(lock)
        return False

    def _wait_gone(self, seconds: float) -> bool:
        lock = take_lock(self.folder, seconds)
        if lock is not None:
            os.close(lock)
        return lock is not None

    def _log_file(self, name: str):
        return self.folder / LOGS / f"{name}.log"

    def _tail(self, name: str, lines: int) -> list[str]:
        with contextlib.suppress(OSError):
            return self._log_file(name).read_text(errors="replace").splitlines()[-lines:]
        return []


