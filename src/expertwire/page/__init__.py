"""The registry's page: the live picture in a browser. Three files and one JSON, all from here.

What it may show is chosen below, name by name: nothing that helps to connect (addresses, host ids,
fingerprints) and, of course, no token. Names come from other processes; the script puts them into
the page as text.
"""

from __future__ import annotations

import json
import math
import threading
import time
from importlib import resources
from typing import TYPE_CHECKING, Any

from ..observe.reports import is_number
from ..observe.status_tables import fields, number, sum_of, text
from ..observe.web import Route, WebServer
from ..registry.facts import snapshot

if TYPE_CHECKING:
    from ..registry.registry import Registry

FRESH_SECONDS = 0.25  # one look at the registry serves all readers for so long
FILES = {"/": ("index.html", "text/html"), "/page.js": ("page.js", "text/javascript"),
         "/page.css": ("page.css", "text/css"), "/icon.svg": ("icon.svg", "image/svg+xml")}
SHOWN_NUMBERS = ("rows_per_s", "bytes_sent_per_s", "bytes_received_per_s", "messages_per_s",
                 "rows", "messages", "bytes_sent", "bytes_received", "queue_depth", "refused")


def serve_page(registry: Registry, listen: str) -> WebServer:
    """Serves the page of a running registry on HOST:PORT. Raises ConfigError."""
    routes = {path: _file(name, kind) for path, (name, kind) in FILES.items()}
    return WebServer(listen, {**routes, "/picture.json": _Picture(registry)})


def _file(name: str, kind: str) -> Route:
    content = resources.files(__package__ or __name__).joinpath(name).read_bytes()
    return lambda accept: (kind, content)


class _Picture:
    """The JSON route, made anew at most every FRESH_SECONDS."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._lock = threading.Lock()
        self._body, self._until = b"", 0.0

    def __call__(self, accept: str) -> tuple[str, bytes]:
        with self._lock:
            if time.monotonic() >= self._until:
                shown = picture(snapshot(self._registry))
                self._body = json.dumps(shown, allow_nan=False, separators=(",", ":")).encode()
                self._until = time.monotonic() + FRESH_SECONDS
            return "application/json", self._body


def picture(facts: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a registry's facts."""
    servers = facts["servers"]
    model = servers[0]["model"] if servers else {}
    return {
        "epoch": facts["epoch"], "uptime_s": facts["uptime_s"], "reports": facts["reports"],
        "model": text(model.get("name")) if model else "",
        "num_experts": int(number(model.get("num_experts"))),
        "num_clients": len(facts["clients"]),
        "servers": [_server(server) for server in servers],
        "clients": [_client(client) for client in facts["client_stats"]],
    }


def _server(server: dict[str, Any]) -> dict[str, Any]:
    stats = fields(server["stats"])
    return {
        "id": text(server["server_id"]), "seat": server["seat"], "experts": server["experts"],
        "draining": server["draining"], "silent_s": server["silent_s"],
        "reports": server["reports"], "at_s": _finite(stats.get("at_s")), **_numbers(stats),
        "errors": sum_of(stats.get("errors")), "clients": _finite(stats.get("clients")),
        "stages": _stages(stats), "expert_rows": _counts(stats.get("expert_rows")),
        "row_experts": _counts(stats.get("row_experts")),
        "layer_experts": _counts(stats.get("layer_experts")),
        "layer_rows": [_counts(row) for row in _list(stats.get("layer_rows"))],
    }


def _client(client: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": text(client.get("client")), **_numbers(client), "stages": _stages(client),
        "retries": _finite(client.get("retries")), "failovers": _finite(client.get("lost")),
        "dropped": _finite(fields(client.get("dropped")).get("pairs")),
        "errors": sum_of(client.get("errors")),
        "pairs": [{"server": text(name), **_numbers(fields(pair)),
                   "p50_us": _finite(fields(pair).get("p50_us")),
                   "p99_us": _finite(fields(pair).get("p99_us"))}
                  for name, pair in fields(client.get("servers")).items()],
    }


def _numbers(stats: dict[str, Any]) -> dict[str, float | None]:
    return {name: _finite(stats.get(name)) for name in SHOWN_NUMBERS}


def _stages(stats: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"stage": text(name), "p50_us": _finite(fields(times).get("p50_us")),
             "p99_us": _finite(fields(times).get("p99_us")),
             "total_ms": _finite(fields(times).get("total_ms"))}
            for name, times in fields(stats.get("stages")).items()]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _counts(value: object) -> list[float]:
    return [_finite(count) or 0 for count in _list(value)]


def _finite(value: object) -> float | None:
    return value if is_number(value) and math.isfinite(value) else None
