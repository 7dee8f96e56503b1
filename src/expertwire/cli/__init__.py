"""The `expertwire` command: one Typer app, to which each module here adds its commands."""

from . import app, cluster, moves, observe, plan, trace

__all__ = ["app", "cluster", "moves", "observe", "plan", "trace"]
