"""What the registry says of itself: to clients that watch, and to `expertwire status`."""

from __future__ import annotations

import concurrent.futures
import time
from typing import TYPE_CHECKING, Any

from ..control import frames as control
from ..errors import ProtocolError, WaitTimeout
from ..observe.reports import leave_out

if TYPE_CHECKING:
    from .registry import Registry, _Peer


def members_message(registry: Registry) -> dict[str, Any]:
    """The list that clients follow."""
    return {"type": "members", "epoch": registry.epoch, "instance": registry.instance,
            "settling": registry.settling,
            "servers": [m.as_dict() for m in registry.members.values()]}


def status_message(registry: Registry, now: float) -> dict[str, Any]:
    """The facts in a message, without statistics that would not fit it."""
    status = {"type": "status", **status_facts(registry, now)}
    for name in ("layer_rows", None):
        try:
            control.encode_frame(status)
            break
        except ProtocolError:
            leave_out(status, name)
    return status


def snapshot(registry: Registry, timeout: float = 2.0) -> dict[str, Any]:
    """`status_facts`, from any thread. Raises WaitTimeout when the registry is closed or stuck."""
    answer: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
    try:
        assert registry.loop is not None
        registry.loop.call_soon_threadsafe(
            lambda: answer.set_result(status_facts(registry, time.monotonic()))
        )
        return answer.result(timeout)
    except (AssertionError, RuntimeError, TimeoutError):
        raise WaitTimeout(f"the registry did not answer within {timeout} s", "status") from None


def status_facts(registry: Registry, now: float) -> dict[str, Any]:
    """All servers and clients with what they reported. In the registry's own thread only."""
    clients = [p for p in registry.peers if p.watching is not None]
    servers = [
        {**m.as_dict(), "stats": m.stats, "reports": m.reports, "last_report": m.last_report,
         "silent_s": round(now - m.last_heard, 3), "move": m.move.as_dict() if m.move else None,
         "settled": m.settled_epoch >= m.listed_epoch} for m in registry.members.values()
    ]
    return {
        "epoch": registry.epoch, "uptime_s": round(now - registry.started_at, 3),
        "lease_seconds": registry.lease_seconds, "reports": registry.roster.reports,
        "clients": sorted(p.watching for p in clients if p.watching is not None),
        "client_stats": [{**p.stats, "client": p.watching} for p in clients if p.stats],
        "servers": servers,
    }


def client_name(registry: Registry, peer: _Peer, wanted: str) -> str:
    """The name under which a client is shown: `wanted`, with a number if another one has it.

    Many processes may be started with one name; tables, pictures and metrics tell them apart.
    """
    taken = {p.watching for p in registry.peers if p is not peer}
    numbered = (f"{wanted} ({i})" for i in range(2, len(taken) + 3))
    return wanted if wanted not in taken else next(n for n in numbered if n not in taken)
