"""Counters and stage times: bounded memory, cheap to add to, summarised on demand.

Both are laid out as in native/trip.hpp (ew_ring, ew_counters), so that native code adds to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

RING = 4096  # durations kept per stage; older ones only count
COUNTERS = ("rows", "messages", "bytes_sent", "bytes_received")


class Ring:
    """The last durations of something. One writer; a reader may see a value come in late.

    words: int64 [2 + 4096]: how many there were, their sum in ns, the last ones.
    """

    def __init__(self, words: np.ndarray | None = None) -> None:
        self._words = np.zeros(2 + RING, np.int64) if words is None else words
        self.address = self._words.ctypes.data

    @property
    def count(self) -> int:
        return int(self._words[0])

    @property
    def total_ns(self) -> int:
        return int(self._words[1])

    def add(self, ns: int) -> None:
        words = self._words
        words[2 + int(words[0]) % RING] = ns
        words[0] += 1
        words[1] += ns

    def percentiles_us(self) -> tuple[float, float]:
        """The 50th and 99th percentile of the durations that are kept, in us."""
        known = np.sort(self._words[2 : 2 + min(self.count, RING)])
        if not known.size:
            return 0.0, 0.0
        return _percentile(known, 50) / 1000, _percentile(known, 99) / 1000


def _percentile(ascending: np.ndarray, percent: float) -> float:
    """Between two values in proportion, as numpy.percentile, which imports a large module on its
    first call: in a server that would be in the middle of serving."""
    place = (ascending.size - 1) * percent / 100
    below = int(place)
    above = min(below + 1, ascending.size - 1)
    low, high = float(ascending[below]), float(ascending[above])
    return low + (high - low) * (place - below)


class StageTimes:
    """Durations by stage. One writer; readers may call `summary` at any time."""

    def __init__(self) -> None:
        self._rings: dict[str, Ring] = {}

    def ring(self, stage: str) -> Ring:
        """The stage's durations, made on first use."""
        ring = self._rings.get(stage)
        if ring is None:
            ring = self._rings[stage] = Ring()
        return ring

    def add(self, stage: str, ns: int) -> None:
        """Notes one duration in nanoseconds."""
        self.ring(stage).add(ns)

    def summary(self) -> dict[str, dict[str, float]]:
        """{stage: {count, total_ms, p50_us, p99_us}}; percentiles over the last 4096."""
        result = {}
        for stage, ring in list(self._rings.items()):
            if ring.count == 0:
                continue
            p50, p99 = ring.percentiles_us()
            result[stage] = {"count": ring.count, "total_ms": round(ring.total_ns / 1e6, 3),
                             "p50_us": round(p50, 1), "p99_us": round(p99, 1)}
        return result


class ServerCounters:
    """What a client exchanged with one server. Written under the client's lock."""

    def __init__(self) -> None:
        self._words = np.zeros(len(COUNTERS) + 2 + RING, np.int64)
        self.durations = Ring(self._words[len(COUNTERS) :])  # from a put to its reply's flag
        self.address = self._words.ctypes.data

    def add(self, *, rows: int, bytes_sent: int, bytes_received: int, duration_ns: int) -> None:
        """One answered message: duration from its put to its reply's flag."""
        self._words[: len(COUNTERS)] += (rows, 1, bytes_sent, bytes_received)
        self.durations.add(duration_ns)

    def summary(self) -> dict[str, Any]:
        """{rows, messages, bytes_sent, bytes_received, p50_us, p99_us, wait_ms: in all}."""
        p50, p99 = self.durations.percentiles_us()
        counts = dict(zip(COUNTERS, self._words[: len(COUNTERS)].tolist(), strict=True))
        return {**counts, "p50_us": round(p50, 1), "p99_us": round(p99, 1),
                "wait_ms": round(self.durations.total_ns / 1e6, 3)}
