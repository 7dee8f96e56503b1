"""The `expertwire` command: one Typer app, to which each module here adds its commands."""

from ..cluster import cli as cluster
from . import app, observe, plan, trace

__all__ = ["app", "cluster", "observe", "plan", "trace"]
