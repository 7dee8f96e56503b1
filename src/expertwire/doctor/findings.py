"""A finding, and how checks are run: each bounded in time, and none can end the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# ok: works. warn: works, with a limit that will be felt. fail: this path does not work. unknown:
# could not be found out in time. absent: there is no such hardware here, so nothing to fix.
STATES = ("ok", "warn", "fail", "unknown", "absent")
MORE_TIME = "expertwire doctor --seconds 30"


@dataclass(frozen=True)
class Finding:
    """path: the path it is about. fix: the command or the step that helps, "" for none."""

    path: str
    name: str
    state: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Roots:
    """Where the system describes itself; tests give folders of their own."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")

    def read(self, path: Path) -> str:
        """A file's text, "" if it cannot be read."""
        try:
            return path.read_text(errors="replace").strip()
        except OSError:
            return ""

    @property
    def in_container(self) -> bool:
        """Docker and podman leave files, Kubernetes a path in the first process's cgroup."""
        root = self.proc.parent
        marks = (root / ".dockerenv", root / "run/.containerenv")
        first = self.read(self.proc / "1/cgroup")
        return any(mark.exists() for mark in marks) or "kubepods" in first or "docker" in first


class Probe:
    """One function of probe.py in a process of its own; `result` waits for what it found."""

    def __init__(self, name: str, *arguments: str, env: dict[str, str] | None = None):
        self.name = name
        # -P: files of the user's current directory are not modules of ours.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "expertwire.doctor.probe", name, *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {})},
        )

    def result(self, deadline: float) -> dict[str, Any]:
        """The last thing it printed; {"error": why} if it crashed.

        {"late": True, "reached": what it said last} if it was killed. deadline: of
        time.monotonic().
        """
        try:
            out, err = self._process.communicate(
                timeout=max(0.05, deadline - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver: left to it
                said = self._said(self._process.communicate(timeout=0.1)[0])
                if said and "reached" not in said:
                    return said  # it had found out, and was only about to end
                return {"late": True, **said}
            return {"late": True}
        said = self._said(out)
        if self._process.returncode == 0 and said:
            return said
        if self._process.returncode < 0:  # what it said until then is not why
            return {"error": f"the check crashed ({signal_name(-self._process.returncode)})"}
        words = (err.strip() or out.strip() or "it said nothing").splitlines()[-1][:300]
        return {"error": f"{words} (exit code {self._process.returncode})"}

    def kill(self) -> None:
        """Ends it if it still runs, and does not wait for that."""
        self._process.kill()

    @staticmethod
    def _said(out: str) -> dict[str, Any]:
        """The object in its last line."""
        with contextlib.suppress(ValueError, IndexError):
            return json.loads(out.splitlines()[-1])
        return {}


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run_checks(
    checks: Mapping[str, Callable[[], list[Finding]]], deadline: float
) -> list[Finding]:
    """All checks side by side, each in a thread; for one that is late or fails, a finding says so.

    checks: by "path name". deadline: of time.monotonic().
    """
    results: dict[str, list[Finding]] = {}

    def run(name: str) -> None:
        try:
            results[name] = checks[name]()
        except Exception as err:
            results[name] = [Finding(*name.split(" ", 1), "unknown",
                                     f"the check itself failed: {type(err).__name__}: {err}")]

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = "not found out in time"
    return [finding for name in checks for finding in
            results.get(name, [Finding(*name.split(" ", 1), "unknown", late, MORE_TIME)])]
