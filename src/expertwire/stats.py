"""Counters and stage times: bounded memory, cheap to add to, summarised on demand."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

RING = 4096  # durations kept per stage; older ones only count


class _Ring:
    def __init__(self) -> None:
        self.values = np.zeros(RING, np.int64)
        self.count = 0
        self.total = 0

    def add(self, ns: int) -> None:
        self.values[self.count % RING] = ns
        self.count += 1
        self.total += ns

    def percentiles_us(self) -> tuple[float, float]:
        known = self.values[: min(self.count, RING)]
        if not known.size:
            return 0.0, 0.0
        p50, p99 = np.percentile(known, (50, 99))
        return float(p50) / 1000, float(p99) / 1000


class StageTimes:
    """Durations by stage. One writer; readers may call `summary` at any time."""

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}

    def add(self, stage: str, ns: int) -> None:
        """Notes one duration in nanoseconds."""
        ring = self._rings.get(stage)
        if ring is None:
            ring = self._rings[stage] = _Ring()
        ring.add(ns)

    def summary(self) -> dict[str, dict[str, float]]:
        """{stage: {count, total_ms, p50_us, p99_us}}; percentiles over the last 4096."""
        result = {}
        for stage, ring in list(self._rings.items()):
            p50, p99 = ring.percentiles_us()
            result[stage] = {"count": ring.count, "total_ms": round(ring.total / 1e6, 3),
                             "p50_us": round(p50, 1), "p99_us": round(p99, 1)}
        return result


class ServerCounters:
    """What a client exchanged with one server."""

    def __init__(self) -> None:
        self.rows = self.messages = self.bytes_sent = self.bytes_received = 0
        self._times = _Ring()
        self._lock = threading.Lock()

    def add(self, *, rows: int, bytes_sent: int, bytes_received: int, duration_ns: int) -> None:
        """One answered message: duration from its put to its reply's flag."""
        with self._lock:
            self.rows += rows
            self.messages += 1
            self.bytes_sent += bytes_sent
            self.bytes_received += bytes_received
            self._times.add(duration_ns)

    def summary(self) -> dict[str, Any]:
        """{rows, messages, bytes_sent, bytes_received, p50_us, p99_us}."""
        with self._lock:
            p50, p99 = self._times.percentiles_us()
            return {"rows": self.rows, "messages": self.messages, "bytes_sent": self.bytes_sent,
                    "bytes_received": self.bytes_received, "p50_us": round(p50, 1),
                    "p99_us": round(p99, 1)}
