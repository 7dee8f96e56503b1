"""`--on local`: the process that keeps a cluster's registry and servers running.

It does what the file `wanted` in the cluster's folder says and writes what there is into `state`.
Its children never outlive it (processes.py), so that ending it ends the cluster. It holds a lock
as long as it is there, which also tells others that its pid is still its own.
"""

from __future__ import annotations

import fcntl
import logging.handlers
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ..errors import ExpertwireError, WaitTimeout
from ..processes import ChildGroup, ChildProcess
from .arguments import REGISTRY, environment, registry_arguments, server_arguments, server_index
from .backend import FAILED, RESTARTING, SERVING, STARTING
from .config import ClusterConfig, parse_config
from .records import RECORD, read_json, write_json

LOCK, WANTED, STATE, LOGS = "lock", "wanted.json", "state.json", "logs"
LOOK_SECONDS = 0.1
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # before a process that ended is started again
HEALTHY_SECONDS = 60.0  # after which the pauses begin anew
REGISTRY_SECONDS = 60.0
MAX_LOG_BYTES = 16 << 20
READY = {REGISTRY: "registry listening on", "": "experts of"}  # what they say when they serve


class Kept:
    """One process, started again when it ends other than by its own decision (exit code 0)."""

    def __init__(self, name: str, group: ChildGroup, folder: Path, max_restarts: int):
        self.name = name
        self.restarts = 0
        self.state = STARTING
        self.said = ""  # its last line
        self._group, self._max_restarts = group, max_restarts
        self._ready = READY.get(name, READY[""])
        self._pause, self._due, self._ever_served = FIRST_PAUSE, 0.0, False
        self.child: ChildProcess | None = None
        self._log = logging.getLogger(f"{__name__}.{name}")
        self._log.propagate = False
        self._log.setLevel(logging.INFO)
        self._handler = logging.handlers.RotatingFileHandler(
            folder / LOGS / f"{name}.log", maxBytes=MAX_LOG_BYTES, backupCount=1)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._log.addHandler(self._handler)

    def start(self, arguments: list[str], env: dict[str, str]) -> None:
        self._since = time.monotonic()
        self.child = self._group.start(self.name, arguments, env, self._hear)

    def _hear(self, line: str) -> None:
        self._log.info("%s", line)
        self.said = line if line.strip() else self.said
        if self._ready in line:
            self.state, self._ever_served = SERVING, True

    def is_due(self) -> bool:
        """Whether it should be started again now."""
        return self.state == RESTARTING and self.child is None and time.monotonic() >= self._due

    def look(self) -> bool:
        """Notes an end of the process. True if it left by its own decision."""
        if self.child is None or self.child.process.poll() is None:
            return False
        code = self.child.stop()  # its pipes, and its last words
        self._group.children.remove(self.child)
        self.child = None
        if code == 0 and self.name != REGISTRY:
            self._log.info("left (drained)")
            return True
        if time.monotonic() - self._since > HEALTHY_SECONDS:
            self._pause = FIRST_PAUSE
        spent = 0 <= self._max_restarts <= self.restarts
        # What never served is not waited for by `up`; it is tried again all the same.
        self.state = FAILED if spent else RESTARTING
        self._log.info("ended with exit code %d%s", code,
                       "" if spent else f", starts again in {self._pause:.1f} s")
        if not spent:
            self.restarts += 1
            self._due = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return False

    def facts(self) -> dict[str, Any]:
        hopeless = self.state == RESTARTING and not self._ever_served
        return {"state": FAILED if hopeless else self.state, "restarts": self.restarts,
                "said": self.said, "pid": self.child.process.pid if self.child else None}

    def close(self) -> None:
        if self.child is not None:
            self.child.stop()
            self._group.children.remove(self.child)
        self._log.removeHandler(self._handler)
        self._handler.close()


class Supervisor:
    """Runs until `wanted` says stop, or SIGTERM."""

    def __init__(self, folder: Path, group: ChildGroup):
        self.folder = folder
        record = folder / RECORD
        self.config: ClusterConfig = parse_config(read_json(record)["config"], str(record))
        self.group = group
        self.address = self.config.registry.address or ""
        self.kept: dict[str, Kept] = {}
        self.names: list[str] = []  # of the servers that should be there
        self._serial = -1
        self._written: dict[str, Any] = {}

    def run(self) -> None:
        (self.folder / LOGS).mkdir(exist_ok=True)
        try:
            if not self.address:
                self._start_registry()
        except (ExpertwireError, WaitTimeout) as err:
            self._write(error=str(err))
            return
        while not self._read_wanted():
            for name in [name for name, kept in self.kept.items() if kept.look()]:
                self._drop(name)
                self.names.remove(name)
            for name, kept in self.kept.items():
                if kept.is_due():
                    kept.start(self._arguments(name), environment(self.config, None))
            self._write()
            time.sleep(LOOK_SECONDS)

    def _keep(self, name: str) -> Kept:
        limit = -1 if name == REGISTRY else self.config.servers.max_restarts
        kept = self.kept[name] = Kept(name, self.group, self.folder, limit)
        kept.start(self._arguments(name), environment(self.config, None))
        return kept

    def _drop(self, name: str) -> None:
        self.kept.pop(name).close()

    def _start_registry(self) -> None:
        kept = self._keep(REGISTRY)
        assert kept.child is not None
        self.address = kept.child.wait_line(READY[REGISTRY], REGISTRY_SECONDS).split()[-1]

    def _arguments(self, name: str) -> list[str]:
        if name == REGISTRY:  # again where it was: servers and clients look for it there
            listen = self.address or self.config.registry.listen or "127.0.0.1:7700"
            return registry_arguments(self.config, listen, str(self.folder / "registry.state"))
        return server_arguments(self.config, name, self.address, len(self.names))

    def _read_wanted(self) -> bool:
        """Follows the file if it has changed. True if everything should end."""
        wanted = read_json(self.folder / WANTED)
        if not wanted or wanted["serial"] == self._serial:
            return False
        self._serial = wanted["serial"]
        if wanted["stop"]:
            return True
        self.names = sorted(wanted["servers"], key=server_index)
        for name in [n for n in self.kept if n != REGISTRY and n not in self.names]:
            self._drop(name)
        for name in self.names:
            if name not in self.kept:
                self._keep(name)
        return False

    def _write(self, error: str = "") -> None:
        state = {
            "pid": os.getpid(), "serial": self._serial, "registry": self.address, "error": error,
            "processes": {name: kept.facts() for name, kept in self.kept.items()},
        }
        if state != self._written:
            write_json(self.folder / STATE, state)
            self._written = state


def take_lock(folder: Path, seconds: float) -> int | None:
    """The descriptor that holds the lock; None if another process has it after so long."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.01)


def main(folder: str) -> None:
    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    if take_lock(Path(folder), 2.0) is None:
        raise SystemExit(f"{folder} has a supervisor already")
    with ChildGroup() as group:
        Supervisor(Path(folder), group).run()


if __name__ == "__main__":
    main(sys.argv[1])
