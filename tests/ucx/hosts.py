"""Several hosts on this machine: network namespaces that a bridge in one more of them connects."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_counter = itertools.count()


def ip(*args: str) -> None:
    """Runs ip(8). Raises OSError with what it said."""
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")


def why_not() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if shutil.which("ip") is None:
        return "network namespaces need ip (apt-get install iproute2)"
    try:
        with Network(["a"]):
            return ""
    except OSError as err:
        return f"no network namespaces here, root (CAP_NET_ADMIN, CAP_SYS_ADMIN) is needed: {err}"


class Network:
    """Hosts by name, each with 10.77.0.I (unless ipv4 is False), fd77::I and a link-local address
    on its eth0.

        with Network(["registry", "server"]) as net:
            net.popen("server", ["-m", "expertwire", ...])
            net.cut("server")
    """

    def __init__(self, names: Sequence[str], ipv4: bool = True):
        self.names = list(names)
        self._ipv4 = ipv4
        self._prefix = f"ew{os.getpid()}-{next(_counter)}"
        self._switch = f"{self._prefix}-switch"
        self._undo = contextlib.ExitStack()
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> Network:
        with contextlib.ExitStack() as undo:
            self._add(undo, self._switch)
            ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self._switch, "link", "set", "br0", "up")
            for i, name in enumerate(self.names, 1):
                space = self.space(name)
                self._add(undo, space)
                ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name",
                   f"port{i}", "netns", self._switch)
                ip("-n", self._switch, "link", "set", f"port{i}", "master", "br0", "up")
                for address in (*([f"10.77.0.{i}/24"] if self._ipv4 else []), f"fd77::{i}/64"):
                    ip("-n", space, "addr", "add", address, "dev", "eth0",
                       *(["nodad"] if ":" in address else []))
                # Link-local without the second that duplicate detection takes.
                ip("-n", space, "link", "set", "eth0", "addrgenmode", "none")
                ip("-n", space, "link", "set", "lo", "up")
                ip("-n", space, "link", "set", "eth0", "up")
                ip("-n", space, "addr", "add", f"fe80::77:{i}/64", "dev", "eth0", "nodad")
            undo.callback(self._stop_all)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @staticmethod
    def _add(undo: contextlib.ExitStack, space: str) -> None:
        ip("netns", "add", space)
        undo.callback(ip, "netns", "del", space)

    def space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def address(self, name: str, family: str) -> str:
        """family: "ipv4", "ipv6" or "link-local" (with the zone of the other hosts' eth0)."""
        i = self.names.index(name) + 1
        return {"ipv4": f"10.77.0.{i}", "ipv6": f"[fd77::{i}]",
                "link-local": f"[fe80::77:{i}%eth0]"}[family]

    def popen(self, name: str, args: Sequence[str], env: dict[str, str]) -> subprocess.Popen:
        """A Python process on that host; it ends with the network at the latest."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.space(name), sys.executable, *args], text=True, cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                 "OMP_NUM_THREADS": "1", **env},
        )
        self.processes.append(process)
        return process

    def _port(self, name: str, state: str) -> None:
        ip("-n", self._switch, "link", "set", f"port{self.names.index(name) + 1}", state)

    def cut(self, name: str) -> None:
        """Nothing comes from or to that host any more, and nobody is told."""
        self._port(name, "down")

    def mend(self, name: str) -> None:
        self._port(name, "up")

    @contextlib.contextmanager
    def netem(self, name: str, *what: str) -> Iterator[None]:
        """Loss, delay, ... of what leaves the host, as tc-netem(8) says. Raises OSError."""
        tc = ["tc", "-n", self.space(name), "qdisc"]
        done = subprocess.run([*tc, "add", "dev", "eth0", "root", "netem", *what],
                              capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"tc netem: {done.stderr.strip()}")
        try:
            yield
        finally:
            subprocess.run([*tc, "del", "dev", "eth0", "root"], check=True)

    def _stop_all(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def read_until(process: subprocess.Popen, words: str) -> str:
    """The first line with these words; the test's timeout is the deadline."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return line.strip()
    raise AssertionError(f"ended with {process.wait()} before it said {words!r}: {seen}")
