"""What processes of a chaos run hold and use."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Resources:
    """What must not grow: descriptors, threads and shared-memory mappings of a process."""

    fds: int
    threads: int
    mappings: int
    rss_kb: int

    @classmethod
    def of(cls, pid: int | str = "self") -> Resources:
        folder = Path(f"/proc/{pid}")
        status = dict(
            line.split(":", 1) for line in (folder / "status").read_text().splitlines()
        )
        return cls(
            len(os.listdir(folder / "fd")), int(status["Threads"]),
            (folder / "maps").read_text().count("memfd:expertwire"),
            int(status.get("VmRSS", "0 kB").split()[0]),
        )

    def growth(self, before: Resources) -> dict[str, int]:
        return {name: max(0, getattr(self, name) - getattr(before, name))
                for name in ("fds", "threads", "mappings")}


def cpu_ns(pid: int) -> int:
    """Processor time of all threads that a process has now (the kernel's sched-stats)."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total
