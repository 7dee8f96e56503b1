"""What an operator decides about an adapter; everything else is asked of its port."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError

PREFIX = "EXPERTWIRE_MLX5_"
MTUS = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}  # bytes -> ibv_mtu


@dataclass(frozen=True)
class Mlx5Config:
    """Options of an mlx5 HCA. Each may come from EXPERTWIRE_MLX5_<NAME>; None: the port decides.

    port: of the adapter. gid_index: in the port's table; None picks one (device.choose_gid).
    pkey: a partition's 16-bit key; None: the default partition. mtu: bytes, an upper bound.
    sl: service level (InfiniBand) or priority (RoCE). traffic_class: 0-255, DSCP in its upper six
    bits. path_bits: added to the port's LID, below 2^LMC. ack_timeout: 4.096 us * 2^n, 0: for ever.
    rnr_retry: 7 is for ever. min_rnr_timer: encoded as in ibv_modify_qp(3).
    max_rd_atomic: reads and atomics under way per queue pair.
    ordered_path: the operator's promise that the fabric keeps the order of packets (no adaptive
    routing): only then may a message be announced by a plain write (signal_mode="write").
    """

    port: int = 1
    gid_index: int | None = None
    pkey: int | None = None
    mtu: int | None = None
    sl: int = 0
    traffic_class: int = 0
    flow_label: int = 0
    hop_limit: int = 255
    path_bits: int = 0
    ack_timeout: int = 20
    retry_count: int = 7
    rnr_retry: int = 7
    min_rnr_timer: int = 12
    max_rd_atomic: int = 16
    ordered_path: bool = False

    def __post_init__(self) -> None:
        limits = {
            "port": (1, 255), "gid_index": (0, 255), "pkey": (1, 0xFFFF), "sl": (0, 15),
            "traffic_class": (0, 255), "flow_label": (0, 0xFFFFF), "hop_limit": (1, 255),
            "path_bits": (0, 127), "ack_timeout": (0, 31), "retry_count": (0, 7),
            "rnr_retry": (0, 7), "min_rnr_timer": (0, 31), "max_rd_atomic": (1, 128),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"mlx5 {name} must be from {low} to {high}, not {value}")
        if self.mtu is not None and self.mtu not in MTUS:
            raise ConfigError(f"mlx5 mtu must be one of {', '.join(map(str, MTUS))}, "
                              f"not {self.mtu}")

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, **options: Any) -> Mlx5Config:
        """options, then the environment, then the defaults. Raises ConfigError."""
        environment = os.environ if environment is None else environment
        for field in dataclasses.fields(cls):
            text = environment.get(PREFIX + field.name.upper())
            if text is None or field.name in options:
                continue
            try:
                options[field.name] = int(text, 0)
            except ValueError:
                raise ConfigError(
                    f"{PREFIX}{field.name.upper()} is a number, not {text!r}") from None
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := set(options) - known:
            raise ConfigError(f"mlx5 has no option {', '.join(sorted(unknown))}; it has "
                              f"{', '.join(sorted(known))}")
        if "ordered_path" in options:
            options["ordered_path"] = bool(options["ordered_path"])
        return cls(**options)
