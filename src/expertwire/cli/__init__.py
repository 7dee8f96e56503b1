"""The `expertwire` command: one Typer app, to which each module here adds its commands."""

from . import app, observe, plan, trace

__all__ = ["app", "observe", "plan", "trace"]
