"""What the start of a process with a GPU takes: most of it is not this package's work."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age() -> float:
    """Seconds since this process was made."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22: since the machine's start
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


class Startup:
    """Stages of a start, one after another, from the making of the process on."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float]] = []
        self._last = 0.0

    def mark(self, stage: str) -> None:
        """What came since the stage before is this one."""
        now = process_age()
        self.stages.append((stage, now - self._last))
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.stages)
        return f"{self._last:.1f} s: {parts}"
