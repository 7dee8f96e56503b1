"""What consumes work queues: one protocol (interface.py), several implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ..errors import ConfigError
from .interface import Hca

# Called with every software HCA that this process opens from now on: chaos plans break its path.
on_open: list[Callable[[Hca], None]] = []


def open_hca(name: str, *, local_address: str = "", **options: Any) -> Hca:
    """Opens an HCA by name: "soft" (this host), "ucx" (other hosts), "mlx5:<device>[:<port>]" (a
    real adapter), or "gpu" or "gpu:N" for kernels on a GPU. Never falls back from one to another.
    local_address: of this host, that data is to go over; only "ucx" chooses its device by it.
    options: of the HCA's class.

    Raises ConfigError for a name that does not exist, HcaError for what cannot be opened.
    """
    kind = name.split(":", 1)[0]
    if kind == "soft":
        from .soft import SoftHca

        hca = cast(Hca, SoftHca(**options))
        for see in on_open:
            see(hca)
        return hca
    if name == "ucx":
        from .ucx import UcxHca

        return cast(Hca, UcxHca(local_address=local_address, **options))
    if kind == "gpu":
        from ..cuda.hca import GpuHca

        return cast(Hca, GpuHca(gpu_index(name), **options))
    if kind == "mlx5":
        from .mlx5 import open_mlx5

        return cast(Hca, open_mlx5(name, **options))
    raise ConfigError(f"no hca named {name!r}; use 'soft', 'ucx', 'mlx5:<device>' or 'gpu'")


def gpu_index(name: str) -> int | None:
    """N of "gpu:N", None for "gpu". Raises ConfigError if torch does not see that GPU."""
    import torch

    text = name.partition(":")[2]
    count = torch.cuda.device_count()
    if not count or (":" in name and not (text.isdecimal() and int(text) < count)):
        raise ConfigError(f"hca {name!r}: it is gpu or gpu:N, and torch sees {count} GPUs here")
    return int(text) if text else None
