"""What runs in a Ray actor: one `expertwire ...` command as a child process.

The actor stays slim (it imports no torch) and holds no state: what it was made with is enough to
make it again elsewhere. When the command ends with an error the actor's process ends too, so that
restarts are Ray's alone, after whatever has gone: the command, the worker, or the node.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ..processes import ChildProcess
from .arguments import REGISTRY, environment, registry_arguments, server_arguments
from .backend import FAILED, SERVING, STARTING
from .config import parse_config

# A command that ended with an error this soon after its start will do so again: Ray restarts it
# without a pause, so that the actor waits, and whoever asks can read why.
YOUNG_SECONDS, PAUSE_SECONDS = 30.0, 5.0
READY = {REGISTRY: "registry listening on", "": "experts of"}


class Secret:
    """Text that no log shows by accident."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return "Secret(...)"


class CommandActor:
    """Runs the registry or a server of a cluster.

    name: "registry" or "server-N". registry: address of the registry, to listen on or to register
    at. secret: the token, if it is not in a file of each node. num_servers: of the whole cluster.
    leave: called when the command has ended by its own decision; must not let Ray restart it.
    """

    def __init__(
        self, config: dict[str, Any], name: str, registry: str, secret: Secret | None,
        num_servers: int, leave: Callable[[], None] | None = None,
    ):
        parsed = parse_config(config)
        self.name = name
        self._leave = leave or _leave_ray
        self._ready = READY.get(name, READY[""])
        self._state, self._since, self._stopping = STARTING, time.monotonic(), threading.Event()
        arguments = (
            registry_arguments(parsed, registry) if name == REGISTRY
            else server_arguments(parsed, name, registry, num_servers)
        )
        self._child = ChildProcess(
            name, arguments, environment(parsed, secret.text if secret else None),
            on_line=self._hear,
        )
        threading.Thread(target=self._watch, name="expertwire-watch", daemon=True).start()

    def _hear(self, line: str) -> None:
        print(line, flush=True)  # into Ray's log of this actor
        if self._ready in line:
            self._state = SERVING

    def _watch(self) -> None:
        code = self._child.process.wait()
        if self._stopping.is_set():
            return
        if code == 0 and self.name != REGISTRY:  # drained
            self._leave()
            return
        if code > 0 and time.monotonic() - self._since < YOUNG_SECONDS:
            self._state = FAILED if self._state == STARTING else self._state
            if self._stopping.wait(PAUSE_SECONDS):
                return
        print(f"{self.name} ended with exit code {code}", flush=True)
        os._exit(1)

    def describe(self) -> dict[str, Any]:
        """state, pid of the command, whether Ray restarted it, and its last line."""
        return {"state": self._state, "pid": self._child.process.pid, "node": _node_address(),
                "restarted": _was_restarted(), "said": self._last_words()}

    def log(self, lines: int) -> list[str]:
        return self._child.lines[-lines:]

    def _last_words(self) -> str:
        return next((line for line in reversed(self._child.lines) if line.strip()), "")

    def stop(self) -> int:
        """Ends the command; its exit code. The actor is good for nothing afterwards."""
        self._stopping.set()
        return self._child.stop()


def _ray() -> Any:
    """The module in a process that is connected to Ray, else None."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _was_restarted() -> bool:
    ray = _ray()
    return ray is not None and ray.get_runtime_context().was_current_actor_reconstructed


def _node_address() -> str:
    ray = _ray()
    return ray.util.get_node_ip_address() if ray is not None else "localhost"


def _leave_ray() -> None:
    # Not os._exit: that would look like a crash, and Ray would start it again.
    ray = _ray()
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
