"""A registry and expert servers as processes of this host, to be hurt: chaos plans and tests."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType

from ..errors import ConfigError
from ..processes import ChildGroup, ChildProcess
from ..zygote import Zygote

START_SECONDS = 120.0  # importing torch takes long where many processes share two cores


class Fleet(ChildGroup):
    """Starts and stops processes by name; all of them end with the `with` block.

    They are forked from one that has imported everything (zygote.py).

    model: the checkpoint folder that the servers read. dtype: what they compute in.
    lease: seconds of silence after which the registry removes a server. zygote: another fleet's.
    """

    def __init__(self, model: str, *, dtype: str = "float32", lease: float = 10.0,
                 hca: str = "soft", zygote: Zygote | None = None):
        # OpenMP threads that spin on cores which other processes need slow everything down.
        super().__init__(zygote or Zygote(model, {"OMP_NUM_THREADS": "1"}))
        self._owns_zygote = zygote is None
        self.model = model
        self.dtype = dtype
        self.lease = lease
        self.hca = hca
        self.token = secrets.token_hex(16).encode()
        self.address = "127.0.0.1:0"  # of the registry
        self.way_in = ""  # another address that leads to it; "": servers take the registry's own
        self.servers: dict[str, ChildProcess] = {}
        self.registry: ChildProcess | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="expertwire-fleet-")
        self._env = {"EXPERTWIRE_TOKEN": self.token.decode()}

    def start_registry(self) -> str:
        """Starts it, or starts it again where and with the state that it had; the address."""
        if self.registry is not None:
            self._forget(self.registry)
        self.registry = self.start(
            "registry", ["registry", "--listen", self.address, "--lease", str(self.lease),
                         "--state", str(Path(self._folder.name) / "state")], self._env,
        )
        self.address = self.registry.wait_line("listening on", START_SECONDS).split()[-1]
        return self.address

    def start_server(self, name: str, experts: str, *, wait: bool = True) -> ChildProcess:
        """experts: as for `expertwire serve --experts`. wait: until it says that it serves."""
        running = self.servers.get(name)
        if running is not None:
            if running.process.poll() is None:
                raise ConfigError(f"server {name} is running already")
            self._forget(running)
        self.servers[name] = server = self.start(
            name, ["serve", self.model, "--experts", experts, "--registry",
                   self.way_in or self.address, "--name", name, "--dtype", self.dtype,
                   "--threads", "1", "--hca", self.hca], self._env,
        )
        if wait:
            server.wait_line("registry", START_SECONDS)
        return server

    def start_servers(self, shares: dict[str, str]) -> None:
        """Several at once; returns when all of them serve."""
        for name, experts in shares.items():
            self.start_server(name, experts, wait=False)
        for name in shares:
            self.servers[name].wait_line("registry", START_SECONDS)

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a server, or to the "registry"; returns when SIGSTOP has stopped it.

        Raises ConfigError if it has ended.
        """
        child = self.registry if name == "registry" else self.servers.get(name)
        if child is None or child.process.poll() is not None:
            raise ConfigError(f"there is no process {name}")
        child.process.send_signal(number)
        if number == signal.SIGSTOP:
            wait_stopped(child.process.pid)

    def kill(self, name: str) -> None:
        """kill -9, and waits until the process is gone."""
        self.signal(name, signal.SIGKILL)
        child = self.registry if name == "registry" else self.servers[name]
        assert child is not None
        child.process.wait(10)

    def forget(self, name: str) -> None:
        """A server that has ended by itself: gives its pipes back."""
        self._forget(self.servers.pop(name))

    def _forget(self, ended: ChildProcess) -> None:
        ended.stop()  # its pipes
        self.children.remove(ended)

    def pids(self) -> list[int]:
        """Of all children that were started and are still there."""
        return [c.process.pid for c in self.children if c.process.poll() is None]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self.children:  # a stopped process cannot answer SIGTERM
            if child.process.poll() is None:
                os.kill(child.process.pid, signal.SIGCONT)
        super().__exit__(kind, value, trace)
        if self._owns_zygote:
            assert self.zygote is not None
            self.zygote.close()
        self._folder.cleanup()


def wait_stopped(pid: int) -> None:
    """A process that was sent SIGSTOP runs on until its threads have seen it (proc(5), State)."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        states = [Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0]
                  for task in os.listdir(f"/proc/{pid}/task")]
        if all(state in "tTZX" for state in states):
            return
        time.sleep(0.001)
    raise ConfigError(f"process {pid} was sent SIGSTOP and is not stopped")
