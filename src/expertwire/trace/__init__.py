"""What happened when, on one clock, in the format of Perfetto and Chrome."""

from .recorder import span, start, stop, tracing

__all__ = ["span", "start", "stop", "tracing"]
