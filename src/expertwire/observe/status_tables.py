"""A registry's facts as tables: servers, clients, stages, client-server pairs.

What processes report of themselves is not believed: a value of another kind shows as nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..control.credentials import printable
from .reports import is_number

MAX_PAIRS = 32  # lines of the pairs' table, those with the most bytes


@dataclass(frozen=True)
class Table:
    """`left`: how many columns are text; the others are numbers."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    left: int = 1


def title(registry: str, facts: Mapping[str, Any]) -> str:
    servers = facts["servers"]
    model = servers[0]["model"].get("name", "") if servers else "no model yet"
    return (f"registry {registry}: {printable(model, 64)}, epoch {facts['epoch']}, {len(servers)} "
            f"servers, {len(facts['clients'])} clients, up {facts['uptime_s']:.0f} s")


def tables(facts: Mapping[str, Any]) -> list[Table]:
    """The servers' table, and those of the others that have something to show."""
    clients = [c for c in facts.get("client_stats", ()) if isinstance(c, dict)]
    rest = [
        _load(facts["servers"]), _clients(clients), _pairs(clients),
        _stages("p50 / p99 at", [(text(c.get("client")), c) for c in clients]),
        _stages("p50 / p99 at", [(s["server_id"], s.get("stats") or {}) for s in facts["servers"]]),
    ]
    return [_servers(facts["servers"]), *[table for table in rest if table.rows]]


def _servers(servers: Iterable[Mapping[str, Any]]) -> Table:
    columns = ("server", "seat", "pid", "experts", "clients", "rows", "refused", "errors",
               "reports", "silent")
    rows = []
    for server in servers:
        stats = server.get("stats") or {}
        rows.append((
            server["server_id"] + (" (draining)" if server["draining"] else ""),
            str(server["seat"]), str(server["pid"]), expert_ranges(server["experts"]),
            *[count(stats.get(name)) for name in ("clients", "rows", "refused")],
            count(sum_of(stats.get("errors"))), str(server["reports"]),
            f"{server['silent_s']:.1f} s",
        ))
    return Table("servers", columns, rows)


def _load(servers: Iterable[Mapping[str, Any]]) -> Table:
    """queue: messages that lay ready when the server last came back to look."""
    columns = ("server", "messages", "rows/s", "in/s", "out/s", "in", "out", "queue")
    rows: list[tuple[str, ...]] = [(
        server["server_id"], count(stats.get("messages")), rate(stats.get("rows_per_s")),
        size(stats.get("bytes_received_per_s")), size(stats.get("bytes_sent_per_s")),
        size(stats.get("bytes_received")), size(stats.get("bytes_sent")),
        count(stats.get("queue_depth")),
    ) for server in servers if (stats := server.get("stats"))]
    return Table("load", columns, rows)


def _clients(clients: Iterable[Mapping[str, Any]]) -> Table:
    """retries: messages sent again. failovers: times a server was given up for others."""
    columns = ("client", "epoch", "rows/s", "out/s", "in/s", "queue", "retries", "failovers",
               "dropped", "errors")
    rows: list[tuple[str, ...]] = [(
        text(c.get("client")), count(c.get("epoch")), rate(c.get("rows_per_s")),
        size(c.get("bytes_sent_per_s")), size(c.get("bytes_received_per_s")),
        count(c.get("queue_depth")), count(c.get("retries")), count(c.get("lost")),
        count(fields(c.get("dropped")).get("pairs")), count(sum_of(c.get("errors"))),
    ) for c in clients]
    return Table("clients", columns, rows)


def _pairs(clients: Iterable[Mapping[str, Any]]) -> Table:
    """wait: from a message's put to its reply's flag."""
    columns = ("client", "server", "rows", "sent", "received", "sent/s", "received/s", "wait p50",
               "p99", "in all")
    found = [(c, name, pair) for c in clients for name, pair in fields(c.get("servers")).items()
             if isinstance(pair, dict)]
    found.sort(key=lambda f: -number(f[2].get("bytes_sent")))
    rows: list[tuple[str, ...]] = [(
        text(c.get("client")), text(name), count(p.get("rows")), size(p.get("bytes_sent")),
        size(p.get("bytes_received")), size(p.get("bytes_sent_per_s")),
        size(p.get("bytes_received_per_s")), micros(p.get("p50_us")), micros(p.get("p99_us")),
        micros(1000 * number(p.get("wait_ms"))),
    ) for c, name, p in found[:MAX_PAIRS]]
    return Table("pairs", columns, rows, left=2)


def _stages(name: str, reports: Iterable[tuple[str, Mapping[str, Any]]]) -> Table:
    """The 50th and 99th percentile of each stage's last 4096 durations."""
    found = [(who, fields(stats.get("stages"))) for who, stats in reports]
    stages = list(dict.fromkeys(text(stage) for _, times in found for stage in times))
    rows: list[tuple[str, ...]] = [(who, *[_percentiles(times.get(stage)) for stage in stages])
                                   for who, times in found if times]
    return Table(name, (name, *stages), rows)


def _percentiles(times: object) -> str:
    known = fields(times)
    return f"{micros(known.get('p50_us'))} / {micros(known.get('p99_us'))}" if known else "-"


# -------------------------------------------------------------------- values in few characters


def number(value: object) -> float:
    return value if is_number(value) else 0.0


def fields(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def sum_of(value: object) -> float:
    """Of counts by name."""
    return sum(number(v) for v in fields(value).values())


def text(value: object) -> str:
    return printable(value, 64) if isinstance(value, str) else "?"


def count(value: object) -> str:
    return f"{number(value):.0f}"


def rate(value: object) -> str:
    """1234567 -> "1.23 M"; "-" where there is none yet."""
    return _scaled(value, ("", " k", " M", " G")) if is_number(value) else "-"


def size(value: object) -> str:
    """Bytes, in powers of 1000: 1234567 -> "1.23 MB"."""
    return _scaled(value, (" B", " kB", " MB", " GB", " TB")) if is_number(value) else "-"


def micros(value: object) -> str:
    """Microseconds: 1234.5 -> "1.23 ms"."""
    return _scaled(value, (" us", " ms", " s")) if is_number(value) else "-"


def _scaled(value: object, units: tuple[str, ...]) -> str:
    left, unit = number(value), 0
    while abs(left) >= 999.5 and unit + 1 < len(units):
        left, unit = left / 1000, unit + 1
    digits = f"{left:.0f}" if left == int(left) or left >= 99.5 else f"{left:.3g}"
    return digits + units[unit]


def expert_ranges(experts: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[str] = []
    begin = previous = None
    for e in [*experts, None]:
        if previous is not None and e == previous + 1:
            previous = e
            continue
        if begin is not None:
            parts.append(f"{begin}" if begin == previous else f"{begin}-{previous}")
        begin = previous = e
    return ",".join(parts)
