"""`expertwire drain` and `expertwire rebalance`: who holds what changes while all serve on."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .app import DEFAULT_REGISTRY, JsonOption, RegistryOption, app, print_json


@app.command()
def drain(
    server: Annotated[str, typer.Argument(help="id or seat, as `expertwire status` shows it")],
    registry: RegistryOption = DEFAULT_REGISTRY,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds to wait until it has left")]
    = 60.0,
    deadline: Annotated[float | None, typer.Option(min=0, help="seconds until it leaves also if a "
                        "client hangs and holds on to it: what that one sent goes to replicas")]
    = None,
    as_json: JsonOption = False,
) -> None:
    """Let a server leave with nothing lost: its clients move to replicas, then it ends."""
    from ..registry.drain import run_drain

    result = run_drain(registry, server, timeout=timeout, deadline=deadline, quiet=as_json)
    if as_json:
        print_json(result)


@app.command()
def rebalance(
    registry: RegistryOption = DEFAULT_REGISTRY,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, change nothing")]
    = False,
    seconds: Annotated[float, typer.Option(min=0, help="measure so long; 0: since the start")]
    = 0.0,
    places: Annotated[int | None, typer.Option(min=1, help="experts that each server has room for")]
    = None,
    timeout: Annotated[float, typer.Option(min=1, help="seconds that moving may take")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Give hot experts replicas and take them from cold ones, while everybody goes on."""
    from ..registry.rebalance import run_rebalance

    result = run_rebalance(registry, seconds=seconds, places=places, dry_run=dry_run,
                           timeout=timeout, quiet=as_json)
    if as_json:
        print_json(result)
    for server, reason in result.get("applied", {}).get("failed", {}).items():
        print(f"expertwire: {server}: {reason}", file=sys.stderr)
    if result.get("applied", {}).get("failed"):
        raise typer.Exit(1)
