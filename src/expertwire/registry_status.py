"""What the registry answers to `expertwire status`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import control
from .errors import ProtocolError

if TYPE_CHECKING:
    from .registry import Registry


def status_message(registry: Registry, now: float) -> dict[str, Any]:
    """All servers with their statistics, or without, if they would not fit one message."""
    servers = [
        {**m.as_dict(), "stats": m.stats, "reports": m.reports, "last_report": m.last_report,
         "silent_s": round(now - m.last_heard, 3), "move": m.move.as_dict() if m.move else None,
         "settled": m.settled_epoch >= m.listed_epoch} for m in registry.members.values()
    ]
    status = {
        "type": "status", "epoch": registry.epoch, "uptime_s": round(now - registry.started_at, 3),
        "lease_seconds": registry.lease_seconds, "reports": registry.roster.reports,
        "clients": sorted(p.watching for p in registry.peers if p.watching is not None),
        "servers": servers,
    }
    try:
        control.encode_frame(status)
    except ProtocolError:
        for server in servers:
            server["stats"] = {}
        status["stats_left_out"] = True
    return status
