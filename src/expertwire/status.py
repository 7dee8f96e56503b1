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
    """Asks the registry and prints a table unless quiet. Returns the facts."""
    facts = ask(registry, load_token(), {"type": "status"})
    facts.pop("type", None)
    if quiet:
        return facts
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    model = facts["servers"][0]["model"]["name"] if facts["servers"] else "no model yet"
    console.print(
        f"registry {registry}: {model}, epoch {facts['epoch']}, {len(facts['servers'])} servers, "
        f"{len(facts['clients'])} clients, up {facts['uptime_s']:.0f} s", highlight=False,
    )
    table = Table()
    for name in ("server", "seat", "pid", "experts", "rows", "messages", "refused", "silent"):
        table.add_column(name, justify="left" if name in ("server", "experts") else "right")
    for s in facts["servers"]:
        stats = s.get("stats") or {}
        table.add_row(
            s["server_id"] + (" (draining)" if s["draining"] else ""), str(s["seat"]),
            str(s["pid"]), expert_ranges(s["experts"]), str(stats.get("rows", 0)),
            str(stats.get("messages", 0)), str(stats.get("refused", 0)), f"{s['silent_s']:.1f} s",
        )
    console.print(table)
    return facts
