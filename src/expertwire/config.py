"""Settings of clients and servers, with their defaults and what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .device_structs import SIGNAL_ADD, SIGNAL_WRITE, SIGNAL_WRITE_IMM
from .errors import ConfigError

SIGNAL_MODES = {"write": SIGNAL_WRITE, "add": SIGNAL_ADD, "write_imm": SIGNAL_WRITE_IMM}
MAX_IMM_SLOTS = 64  # receives of one connection: each slot must have one
ON_MISSING = ("raise", "drop", "wait")
ON_FULL = ("wait", "raise")
HCAS = ("soft", "ucx", "mlx5:<device>[:<port>]")


@dataclass(frozen=True)
class ClientConfig:
    """How a client sends. All times in seconds."""

    # "soft": this host; "ucx" (docs/ucx.md) or "mlx5:<device>" (docs/mlx5.md): other hosts
    hca: str = "soft"
    max_rows: int = 256  # rows per message; a larger batch goes as several messages
    num_slots: int = 2  # messages in flight per server: the credit, and double batching
    batch_invariant: bool = True  # one reply row per (token, expert), summed in slot order here
    fp8: bool = False  # send hidden rows as e4m3 with one fp32 scale per 128 elements
    do_ibgda: bool = True  # False: store straight into the mapped slot of the peer
    # How a flag is set: "write", or where writes may pass each other "add" (masked fetch-add) or
    # "write_imm" (write with immediate, at most 64 slots); replies too
    signal_mode: str = "write"
    num_qps: int = 1
    queue_depth: int = 1024  # work-queue blocks per queue pair, a power of two
    connect_timeout: float = 5.0  # until the experts of a batch are held by somebody reachable
    # Silence of one server before its rows go elsewhere; None: from its replies (patience.py)
    reply_timeout: float | None = None
    # What to do about experts that nobody reachable holds: "raise" NoServerError at once, "drop"
    # their contributions (counted in stats), or "wait" for a server and then raise
    on_missing: str = "wait"
    missing_timeout: float | None = None  # how long "wait" waits; None: connect_timeout
    max_in_flight: int | None = None  # batches dispatched and not combined; None: num_slots
    on_full: str = "wait"  # one more dispatch: "wait" for the oldest batch, or "raise"
    spin_us: float = 50.0  # spinning before sleeping while waiting for a reply
    max_servers: int = 1024  # more loaded servers in one batch is an error

    def __post_init__(self) -> None:
        _check_positive(self, "max_rows", "num_slots", "num_qps", "max_servers")
        _check_times(self, "connect_timeout")
        for name in ("reply_timeout", "missing_timeout"):
            if getattr(self, name) is not None:
                _check_times(self, name)
        if self.max_in_flight is not None:
            _check_positive(self, "max_in_flight")
        _check_spin(self.spin_us)
        _check_hca(self.hca)
        if self.hca != "soft" and not self.do_ibgda:
            raise ConfigError("stores into the peer's memory (do_ibgda=False, --direct) need one "
                              f'host: with hca="{self.hca}" leave do_ibgda on')
        _check_choice(self, "signal_mode", SIGNAL_MODES)
        if self.signal_mode == "write_imm" and self.num_slots > MAX_IMM_SLOTS:
            raise ConfigError(f'signal_mode "write_imm" has at most {MAX_IMM_SLOTS} num_slots, '
                              f"not {self.num_slots}")
        _check_choice(self, "on_missing", ON_MISSING)
        _check_choice(self, "on_full", ON_FULL)
        _check_depth(self.queue_depth)


@dataclass(frozen=True)
class ServerConfig:
    """How a server receives and computes. All times in seconds."""

    hca: str = "soft"  # as the clients'
    # For clients of other hosts: HOST[:PORT]; None: as the registry sees us
    listen: str | None = None
    max_batch_rows: int = 1024  # rows of one batch, over all clients
    batch_invariant: bool = True  # a row's result does not depend on what else is in the batch
    queue_depth: int = 1024
    spin_us: float = 50.0
    idle_timeout: float = 0.5  # longest sleep between looks at the flags
    reply_timeout: float = 1.0  # how long a reply may wait for a free work-queue slot
    max_connections: int = 1024
    max_slot_bytes: int = 1 << 32  # memory one client may ask for, per direction
    max_experts_per_row: int = 64
    max_inflight_bytes: int = 1 << 28  # on their way here from all clients together (pacing.py)
    num_threads: int | None = field(default=None)  # torch threads; None: leave as it is
    room: int | None = None  # experts there is memory for, for `rebalance`; None: as many as held

    def __post_init__(self) -> None:
        _check_positive(
            self, "max_batch_rows", "max_connections", "max_experts_per_row", "max_slot_bytes",
            "max_inflight_bytes",
        )
        _check_hca(self.hca)
        if self.listen is not None and self.hca == "soft":
            raise ConfigError('listen is for hca="ucx" and "mlx5:...": clients of one host need '
                              "no address")
        for name in ("num_threads", "room"):
            if getattr(self, name) is not None:
                _check_positive(self, name)
        _check_times(self, "idle_timeout", "reply_timeout")
        _check_spin(self.spin_us)
        _check_depth(self.queue_depth)


MAX_SECONDS = 86_400.0  # times are counted in nanoseconds further down; "never" is no deadline


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{name} must be a positive whole number, not {value!r}")


def _check_times(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:  # NaN fails too
            raise ConfigError(f"{name} must be more than 0 and at most {MAX_SECONDS:.0f} s, "
                              f"not {value!r}")


def _check_choice(config: object, name: str, choices: Iterable[str]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_hca(name: object) -> None:
    if name not in HCAS[:2] and not str(name).startswith("mlx5:"):
        raise ConfigError(f"hca must be one of {', '.join(HCAS)}, not {name!r}")


def _check_spin(spin_us: float) -> None:
    if not isinstance(spin_us, int | float) or not 0 <= spin_us <= 1e6:
        raise ConfigError(f"spin_us must be from 0 to 1000000, not {spin_us!r}")


def _check_depth(depth: int) -> None:
    if not isinstance(depth, int) or not 16 <= depth <= 32768 or depth & (depth - 1):
        raise ConfigError(f"queue_depth must be a power of two from 16 to 32768, not {depth}")
