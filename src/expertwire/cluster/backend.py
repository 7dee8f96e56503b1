"""What a cluster runs on: the part that differs between plain processes and Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

SERVING, STARTING, RESTARTING, FAILED = "serving", "starting", "restarting", "failed"


@dataclass(frozen=True)
class ProcessFacts:
    """One process of a cluster. state: serving, starting, restarting (or waiting for a place), or
    failed: it ended with an error before it ever served, or too often."""

    name: str
    state: str
    node: str  # address of the machine, "" if it is nowhere
    pid: int | None
    restarts: int | None  # None: more than none, and nobody counts
    said: str  # its last line
    log: str  # where everything that it says is kept


class Backend(Protocol):
    """Starts, watches and ends the processes of one cluster."""

    def start(self) -> None:
        """Starts the registry, unless the configuration names one, and the servers. Returns
        without waiting for the servers. Raises ConfigError if the cluster is up already."""

    def registry_address(self) -> str:
        """HOST:PORT. Raises ConfigError if there is no registry (any more)."""
        ...

    def describe(self) -> list[ProcessFacts]:
        """The registry and the servers that should be there, in the order of their numbers."""
        ...

    def add(self, names: Sequence[str], num_servers: int) -> None:
        """Starts more servers. num_servers: how many there are then."""

    def remove(self, name: str) -> None:
        """Ends a server that should not come back, if it is there still."""

    def log(self, name: str, lines: int) -> list[str]:
        """The last lines of a process. Raises ConfigError if there is none of that name."""
        ...

    def stop(self) -> None:
        """Ends everything; returns when nothing is left. Does nothing if nothing is there."""
