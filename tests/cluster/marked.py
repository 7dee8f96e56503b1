"""Finds the processes of a cluster of a test, by a variable in their environment."""

from __future__ import annotations

import contextlib
import time
import uuid

import psutil
import pytest

MARK = "EXPERTWIRE_TEST_MARK"


class Marked:
    """env: a line for the YAML file, so that every process of the cluster carries the mark."""

    def __init__(self) -> None:
        self.value = uuid.uuid4().hex
        self.env = f"env: {{{MARK}: mark-{self.value}}}"

    def pids(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (process.environ().get(MARK) == f"mark-{self.value}"
                        and process.status() != psutil.STATUS_ZOMBIE):
                    found.append(process.pid)
        return found

    def check_gone(self, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while left := self.pids():
            if time.monotonic() > deadline:
                pytest.fail(f"left behind: {[psutil.Process(p).cmdline() for p in left]}")
            time.sleep(0.05)
