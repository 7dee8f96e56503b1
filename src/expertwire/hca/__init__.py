"""What consumes work queues: one protocol (interface.py), several implementations."""

from __future__ import annotations

from typing import Any, cast

from ..errors import ConfigError
from .interface import Hca

_PLANNED = {
    "gpu": "the HCA kernel for GPUs",
    "mlx5": "a real ConnectX through verbs",
}


def open_hca(name: str, **options: Any) -> Hca:
    """Opens an HCA by name: "soft" (this host) or "ucx" (other hosts). Never falls back from one to
    another.

    Raises ConfigError for a name that does not exist or that this release does not have yet.
    """
    kind = name.split(":", 1)[0]
    if kind == "soft":
        from .soft import SoftHca

        return cast(Hca, SoftHca(**options))
    if name == "ucx":
        from .ucx import UcxHca

        return cast(Hca, UcxHca(**options))
    if kind in _PLANNED:
        what = _PLANNED[kind]
        raise ConfigError(f"hca {name!r} ({what}) is not part of this release; use 'soft' or 'ucx'")
    raise ConfigError(f"no hca named {name!r}; use 'soft' or 'ucx'")
