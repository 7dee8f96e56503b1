"""What servers and clients tell the registry of themselves, about once a second.

Counters only grow; the registry makes rates of two reports in a row, by the reporter's own clock.
Everything is read from what is counted anyway: the hot path does nothing for a report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from ..client.client import Client
    from ..server.server import Server

log = logging.getLogger("expertwire.registry.membership")

REPORT_SECONDS = 1.0
LEAST_PAUSE = 100  # a report may take 1 % of a core at most
LONGEST_PAUSE = 10.0
MAX_LAYER_ROWS = 4096  # numbers; a server with more reports sums over layers only
MAX_PAIRS = 256  # servers that a client reports on, those with the most bytes
COUNTERS = ("rows", "messages", "bytes_sent", "bytes_received")


def stats_of(reporter: Reporter) -> dict[str, Any]:
    """A report, {} if making it fails: who has no statistics is still there."""
    try:
        return reporter.report()
    except Exception:
        log.exception("stats failed")
        return {}


class Reporter:
    """Says when the next report is due. One thread.

    stats: makes a report; whatever it raises is the caller's.
    """

    def __init__(self, stats: Callable[[], dict[str, Any]], seconds: float = REPORT_SECONDS):
        self._stats = stats
        self._seconds = seconds
        self.due = time.monotonic() + seconds

    def report(self) -> dict[str, Any]:
        begin = time.thread_time()
        try:
            return self._stats()
        finally:
            pause = min(LEAST_PAUSE * (time.thread_time() - begin), LONGEST_PAUSE)
            self.due = time.monotonic() + max(self._seconds, pause)


def server_report(server: Server) -> dict[str, Any]:
    """Counters since the start: rows, messages, bytes, queue depth, stages, load by expert.

    expert_rows: of row_experts, held or dropped, since the start. layer_rows: [layers][held],
    of layer_experts since they are held, unless there are too many.
    """
    batcher = server.batcher
    report = {
        "at_s": round(time.monotonic(), 3), "clients": server.num_clients, **batcher.counts,
        "stages": batcher.times.summary(), "errors": dict(batcher.errors),
        "refusals": dict(batcher.refusals),
        **batcher.rows_by_expert(),
    }
    ids, rows = batcher.rows_by_layer()
    if rows.size <= MAX_LAYER_ROWS:
        report |= {"layer_experts": ids, "layer_rows": rows.tolist()}
    return report


def client_report(client: Client) -> dict[str, Any]:
    """`Client.stats()`, the busiest pairs of it, with sums over all pairs.

    Pairs that no message was sent over are left out: a client knows every server, and with many of
    both the reports would be nothing but zeros.
    """
    stats = client.stats()
    servers = {name: pair for name, pair in stats["servers"].items() if pair["bytes_sent"]}
    totals = {name: sum(s[name] for s in servers.values()) for name in COUNTERS}
    busiest = sorted(servers, key=lambda s: -servers[s]["bytes_sent"])[:MAX_PAIRS]
    return {"at_s": round(time.monotonic(), 3), **stats, **totals,
            "servers": {name: servers[name] for name in busiest}}


def with_rates(new: dict[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The report with rows_per_s, ... since the one before, also for each pair of a client.

    Reports come from other processes: what is no number, or went back, gets no rate.
    """
    seconds = _difference(new, old, "at_s")
    if not seconds:
        return new
    _add_rates(new, old, seconds)
    pairs, before = new.get("servers"), old.get("servers")
    if isinstance(pairs, dict) and isinstance(before, dict):
        for name, pair in pairs.items():
            if isinstance(pair, dict) and isinstance(before.get(name), dict):
                _add_rates(pair, before[name], seconds)
    return new


def _add_rates(new: dict[str, Any], old: Mapping[str, Any], seconds: float) -> None:
    for name in COUNTERS:
        growth = _difference(new, old, name)
        if growth is not None:
            new[f"{name}_per_s"] = round(growth / seconds, 1)


def _difference(new: Mapping[str, Any], old: Mapping[str, Any], name: str) -> float | None:
    now, then = new.get(name), old.get(name)
    if not is_number(now) or not is_number(then) or now < then:
        return None
    return now - then


def leave_out(status: dict[str, Any], name: str | None) -> None:
    """Makes a status fit a message: without one part of the servers' statistics, or without any."""
    status["stats_left_out"] = True
    for server in status["servers"]:
        server["stats"] = {k: v for k, v in server["stats"].items() if name and k != name}
    if name is None:
        status["client_stats"] = []


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
