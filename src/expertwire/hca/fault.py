"""An HCA that misbehaves on purpose, in a way that a seed repeats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from .soft import HOOK_STALL, FaultPlan
from .wrap import HcaWrapper

PEER_LOST = 0x15


@dataclasses.dataclass(frozen=True)
class Faults:
    """What goes wrong.

    On the path, decided by `seed` (the engine's completions do not wait for it):
      mtu               writes are cut into pieces of so many bytes; 0: not cut
      reorder           pieces land in any order, of one write and of several; only an atomic, a
                        read or an immediate waits for what came before it (relaxed ordering)
      max_delay         a piece waits for up to so many turns of its queue
      duplicate_one_in  every so-manieth piece lands twice
      drop_one_in       every so-manieth piece never lands
    At an entry, by its index (of any queue, or of `qpn` only):
      fail              syndrome that the entry completes with
      stall             turns for which the entry is held back
      vanish_at         from this entry on the peer does not answer
      call              what is called when the engine takes the entry up, e.g. to revoke a key at
                        the peer; it must not call methods of this HCA
    """

    seed: int = 0
    mtu: int = 0
    reorder: bool = False
    max_delay: int = 0
    duplicate_one_in: int = 0
    drop_one_in: int = 0
    fail: Mapping[int, int] = dataclasses.field(default_factory=dict)
    stall: Mapping[int, int] = dataclasses.field(default_factory=dict)
    vanish_at: int | None = None
    call: Mapping[int, Callable[[], None]] = dataclasses.field(default_factory=dict)
    qpn: int | None = None

    def __post_init__(self) -> None:
        for name in ("mtu", "max_delay", "duplicate_one_in", "drop_one_in"):
            if not 0 <= getattr(self, name) < 1 << 32:
                raise ConfigError(f"{name} must be from 0 to 2^32 - 1, not {getattr(self, name)}")

    @property
    def on_path(self) -> bool:
        return bool(self.mtu or self.reorder or self.max_delay or self.duplicate_one_in
                    or self.drop_one_in)


class FaultyHca(HcaWrapper):
    """A software HCA whose entries and path fail as `faults` says; everything else is passed on."""

    def __init__(self, inner: Any, faults: Faults):
        self.faults = faults
        self._stalls = dict(faults.stall)
        self._called: set[tuple[int, int]] = set()
        super().__init__(inner)
        if faults.on_path:
            inner.set_faults(FaultPlan(
                faults.seed & (1 << 64) - 1, faults.mtu, faults.reorder, faults.max_delay,
                faults.duplicate_one_in, faults.drop_one_in,
            ))

    def on_entry(self, qpn: int, idx: int, addr: int, num_bytes: int) -> int:
        faults = self.faults
        if faults.qpn is not None and qpn != faults.qpn:
            return 0
        if self._stalls.get(idx, 0) > 0:
            self._stalls[idx] -= 1
            return HOOK_STALL
        if idx in faults.call and (qpn, idx) not in self._called:
            self._called.add((qpn, idx))
            faults.call[idx]()
        if faults.vanish_at is not None and idx >= faults.vanish_at:
            return PEER_LOST
        return faults.fail.get(idx, 0)
