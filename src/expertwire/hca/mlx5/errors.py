"""What goes wrong between here and an adapter, each with what to do about it."""

from __future__ import annotations

from ...errors import HcaError


class VerbsMissing(HcaError):
    """pyverbs is not there, or too old."""


class DeviceNotFound(HcaError):
    """No such adapter, or no adapter at all."""


class DeviceRefused(HcaError):
    """The adapter is there and may not be used: permissions, no DevX, locked memory."""


class PortDown(HcaError):
    """The port is not active."""


class LinkMismatch(HcaError):
    """The two ends' ports cannot talk: InfiniBand and Ethernet, RoCE v1 and v2, no such GID."""


class GpuMemoryRefused(HcaError):
    """The adapter cannot reach GPU memory, or the GPU not the adapter's doorbell."""


class CommandRefused(HcaError):
    """The adapter's firmware refused a command."""
