"""`expertwire status`: what the registry knows, as a table."""

from __future__ import annotations

import sys
from typing import Any

from .control import load_token
from .membership import ask


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


def show_status(registry: str, *, quiet: bool = False) -> dict[str, Any]:
    """Asks the registry and prints what it knows unless quiet: a table on a terminal, plain lines
    elsewhere. Returns the facts. Raises WaitTimeout, AuthError, ConfigError."""
    # Asking must not make a token: one made here is never the registry's.
    facts = ask(registry, load_token(create=False), {"type": "status"})
    facts.pop("type", None)
    if quiet:
        return facts
    model = facts["servers"][0]["model"].get("name", "") if facts["servers"] else "no model yet"
    title = (
        f"registry {registry}: {model}, epoch {facts['epoch']}, {len(facts['servers'])} servers, "
        f"{len(facts['clients'])} clients, up {facts['uptime_s']:.0f} s"
    )
    rows = [_row(server) for server in facts["servers"]]
    if sys.stdout.isatty():
        _print_table(title, rows)
    else:
        print(title)
        widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
        for row in (COLUMNS, *rows):
            print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
    return facts


COLUMNS = ("server", "seat", "pid", "experts", "rows", "messages", "refused", "reports", "silent")


def _row(server: dict[str, Any]) -> tuple[str, ...]:
    stats = server.get("stats") or {}
    counts = (str(stats.get(name, 0)) for name in ("rows", "messages", "refused"))
    return (
        server["server_id"] + (" (draining)" if server["draining"] else ""), str(server["seat"]),
        str(server["pid"]), expert_ranges(server["experts"]), *counts, str(server["reports"]),
        f"{server['silent_s']:.1f} s",
    )


def _print_table(title: str, rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(title))  # Text: names are not markup
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("server", "experts") else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
