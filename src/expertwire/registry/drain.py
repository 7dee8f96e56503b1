"""`expertwire drain`: ask a server to leave, and wait until it has left with nothing lost."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from ..control.frames import load_token
from ..errors import ExpertwireError, WaitTimeout
from ..observe.status_tables import expert_ranges
from .question import ask

LOOK_SECONDS = 0.1
LEAVE_SECONDS = 10.0  # for a server to end once it has been told to leave at once


def run_drain(
    registry: str, server: str, *, timeout: float, deadline: float | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Drains a server (its id, or its seat) and waits until it is no member any more.

    Its clients route around it at once where others hold its experts, and let go of it when
    nothing is in flight; then its process ends with exit code 0.

    deadline: seconds after which it does not wait for clients any more: one that hangs finds the
    connection closed when it goes on, and sends again what it had in flight, to a replica. A server
    that holds what nobody else does stays also then. None: it waits for all clients.

    "cut_off" of the result: whether the deadline was needed. Raises ConfigError if there is no
    such server, WaitTimeout if it is still there after `timeout` seconds: it goes on draining.
    """
    token = load_token(create=False)
    start = time.monotonic()
    server_id = ask(registry, token, {"type": "drain", "server_id": server})["server_id"]
    said, cut_off = "", False
    timeout = max(timeout, (deadline or 0.0) + LEAVE_SECONDS)
    while True:
        servers = {s["server_id"]: s for s in _status(registry, token, start + timeout)["servers"]}
        seconds = time.monotonic() - start
        if server_id not in servers:
            break
        why = _what_it_waits_for(server_id, servers)
        if not quiet and why != said:
            print(f"{server_id} {why}", file=sys.stderr, flush=True)
            said = why
        if deadline is not None and seconds > deadline and not cut_off:
            with contextlib.suppress(ExpertwireError):  # what it waits for was said above
                ask(registry, token, {"type": "drain", "server_id": server_id, "now": True})
                cut_off = True
        if seconds > timeout:
            raise WaitTimeout(
                f"server {server_id} is still there after {timeout:g} s: it {why}; it leaves as "
                "soon as it can", "drain", server_id,
            )
        time.sleep(LOOK_SECONDS)
    if not quiet:
        print(f"{server_id} left after {seconds:.1f} s"
              + (", without waiting any longer for clients that held on" if cut_off else ""))
    return {"server_id": server_id, "seconds": round(seconds, 3), "cut_off": cut_off}


def _status(registry: str, token: bytes, deadline: float) -> dict:
    """A registry that restarts meanwhile is asked again until the deadline."""
    while True:
        try:
            return ask(registry, token, {"type": "status"})
        except ExpertwireError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_SECONDS)


def _what_it_waits_for(server_id: str, servers: dict[str, dict]) -> str:
    elsewhere = {e for s in servers.values() if not s["draining"] for e in s["experts"]}
    alone = sorted(set(servers[server_id]["experts"]) - elsewhere)
    if alone:
        return f"serves on: nobody else holds expert {expert_ranges(alone)}; start a replica"
    return "waits for its clients to let go of it"
