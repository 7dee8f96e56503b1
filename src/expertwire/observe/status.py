"""`expertwire status`: what the registry knows, once or live: tables on a terminal, plain lines
elsewhere, JSON on demand."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from ..control.frames import load_token
from ..errors import ProtocolError, WaitTimeout
from ..registry.membership import ask
from .status_tables import tables, title


def show_status(registry: str, *, quiet: bool = False) -> dict[str, Any]:
    """Asks the registry and prints what it knows unless quiet: tables on a terminal, plain lines
    elsewhere. Returns the facts. Raises WaitTimeout, AuthError, ConfigError."""
    # Asking must not make a token: one made here is never the registry's.
    facts = _ask(registry, load_token(create=False))
    if quiet:
        return facts
    if sys.stdout.isatty():
        from rich.console import Console

        from .terminal import render

        console = Console()
        console.print(render(registry, facts, console.width))
    else:
        print("\n".join(plain_lines(registry, facts)))
    return facts


def watch_status(
    registry: str, *, seconds: float = 1.0, looks: int | None = None, as_json: bool = False
) -> None:
    """Shows the registry's facts again every `seconds` until interrupted, or `looks` times.

    On a terminal the picture stays in place (any that can move its cursor, over ssh too);
    elsewhere each look is printed below the last one, with as_json as one JSON object a line. A
    registry that goes away is waited for. Raises what the first look raises, and AuthError.
    """
    token = load_token(create=False)
    facts = _ask(registry, token)
    if sys.stdout.isatty() and not as_json:
        from rich.console import Console
        from rich.live import Live

        from .terminal import render

        console, away = Console(), ""
        with Live("", console=console, screen=True, auto_refresh=False) as live:
            for look in _looks(registry, token, facts, seconds, looks):
                away = look if isinstance(look, str) else ""
                facts = facts if isinstance(look, str) else look
                live.update(render(registry, facts, console.width, console.height, away),
                            refresh=True)
        return
    for look in _looks(registry, token, facts, seconds, looks):
        if as_json:
            print(json.dumps({"away": look} if isinstance(look, str) else look), flush=True)
        else:
            lines = [look] if isinstance(look, str) else plain_lines(registry, look)
            print("\n".join([time.strftime("%H:%M:%S"), *lines]), end="\n\n", flush=True)


def _looks(registry: str, token: bytes, first: dict[str, Any], seconds: float, looks: int | None):
    """The facts, look by look, or why there are none."""
    yield first
    done = 1
    while looks is None or done < looks:
        time.sleep(seconds)
        done += 1
        try:
            yield _ask(registry, token)
        except (WaitTimeout, ProtocolError) as err:
            yield f"{err}; trying again"


def _ask(registry: str, token: bytes) -> dict[str, Any]:
    facts = ask(registry, token, {"type": "status"})
    facts.pop("type", None)
    return facts


def plain_lines(registry: str, facts: Mapping[str, Any]) -> list[str]:
    """Everything in lines of plain ASCII, for pipes and logs."""
    lines = [title(registry, facts)]
    for idx, table in enumerate(tables(facts)):
        if idx:
            lines.append("")
        widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
                  for row in (table.columns, *table.rows)]
    return lines
