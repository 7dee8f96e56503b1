"""An HCA that remembers what it executed."""

from __future__ import annotations

import collections
import ctypes
import time
from dataclasses import dataclass
from typing import Any

from .wqe import Wqe
from .wrap import HcaWrapper


@dataclass(frozen=True)
class TraceRecord:
    """One entry as the engine took it up; `wqe` is None if the bytes are no entry."""

    seconds: float  # since the tracer was made
    qpn: int
    idx: int
    raw: bytes
    wqe: Wqe | None

    def __str__(self) -> str:
        place = f"{self.seconds:10.6f} qp {self.qpn:#08x} [{self.idx}]"
        if self.wqe is None:
            return f"{place} {self.raw[:16].hex(' ', 4)}"
        inline = b"" if self.wqe.inline is None else self.wqe.inline
        count = sum(s.num_bytes for s in self.wqe.data) + len(inline)
        target = "" if self.wqe.raddr is None else f" -> {self.wqe.raddr:#x} key {self.wqe.rkey:#x}"
        return f"{place} {self.wqe.name} {count} bytes{target}"


class TracingHca(HcaWrapper):
    """Keeps the last `limit` entries in `records`; everything else is passed on."""

    def __init__(self, inner: Any, limit: int = 4096):
        self.records: collections.deque[TraceRecord] = collections.deque(maxlen=limit)
        self._begin = time.monotonic()
        super().__init__(inner)

    def on_entry(self, qpn: int, idx: int, addr: int, num_bytes: int) -> int:
        raw = ctypes.string_at(addr, num_bytes)
        try:
            wqe = Wqe.decode(raw)
        except ValueError:
            wqe = None
        self.records.append(TraceRecord(time.monotonic() - self._begin, qpn, idx, raw, wqe))
        return 0
