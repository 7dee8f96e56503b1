"""One clock out of several: hosts that exchange messages, and GPUs whose timers are sampled.

Processes of one boot share CLOCK_MONOTONIC and need nothing. Across hosts the time of day is the
first guess, and messages there and back correct it as in NTP (RFC 5905, section 8): with equally
long shortest trips both ways, the offset is half of the difference of what the clocks show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from .file import KIND_ARRIVED, KIND_MESSAGE, KIND_REPLIED, KIND_TAKEN, Part


def round_trip_offset(there_ns: Sequence[int], back_ns: Sequence[int]) -> int:
    """What to add to the peer's clock for ours, ns.

    there_ns: peer's clock at the arrival minus ours at the sending, of messages to it; back_ns: our
    clock at the arrival minus the peer's at the sending. Wrong by at most half of the shortest
    round trip. Raises ConfigError without both.
    """
    if not there_ns or not back_ns:
        raise ConfigError("aligning two clocks takes messages in both directions")
    return (min(back_ns) - min(there_ns)) // 2


def part_offsets(parts: Sequence[Part]) -> list[int]:
    """What to add to each part's times, ns, so that all are on the first part's clock."""
    if not parts:
        return []
    first = parts[0]
    offsets = {part.boot: part.realtime_offset_ns - first.realtime_offset_ns for part in parts}
    offsets[first.boot] = 0
    trips = clock_pairs(parts)
    known, waiting = [first.boot], [boot for boot in offsets if boot != first.boot]
    while waiting:  # a host that spoke with a known one is aligned by their messages
        pair = next(((a, b) for b in waiting for a in known
                     if trips[a, b] and trips[b, a]), None)
        if pair is None:
            break
        a, b = pair
        offsets[b] = offsets[a] + round_trip_offset(trips[a, b], trips[b, a])
        known.append(b)
        waiting.remove(b)
    return [offsets[part.boot] for part in parts]


def clock_pairs(parts: Sequence[Part]) -> dict[tuple[str, str], list[int]]:
    """(sender's boot, receiver's boot) -> arrival minus sending, each on its own clock, ns."""
    if len({part.boot for part in parts}) < 2:
        return defaultdict(list)
    sent: dict[tuple[int, ...], dict[int, tuple[str, int]]] = defaultdict(dict)
    for part in parts:
        clients = {(int(r["server"]), int(r["seq"])): int(r["client"])
                   for r in part.records[part.records["kind"] == KIND_MESSAGE]}
        for r in part.records:
            kind = int(r["kind"])
            if kind not in (KIND_MESSAGE, KIND_TAKEN, KIND_REPLIED, KIND_ARRIVED):
                continue
            place = int(r["server"]), int(r["seq"])
            client = clients.get(place, 0) if kind == KIND_ARRIVED else int(r["client"])
            # Sending begins a span, arriving ends one.
            at = int(r["begin_ns" if kind in (KIND_MESSAGE, KIND_REPLIED) else "end_ns"])
            sent[(client, *place)].setdefault(kind, (part.boot, at))
    pairs: dict[tuple[str, str], list[int]] = defaultdict(list)
    for kinds in sent.values():
        for begin, end in ((KIND_MESSAGE, KIND_TAKEN), (KIND_REPLIED, KIND_ARRIVED)):
            if begin in kinds and end in kinds and kinds[begin][0] != kinds[end][0]:
                (sender, left), (receiver, came) = kinds[begin], kinds[end]
                pairs[sender, receiver].append(came - left)
    return pairs


@dataclass(frozen=True)
class ClockFit:
    """host = host_ns + (device - device_ns) * rate, ns."""

    host_ns: int
    device_ns: int
    rate: float  # host nanoseconds per device nanosecond
    error_ns: int  # half of the narrowest bracket: the offset is known no better

    def to_host(self, device_ns: int) -> int:
        """A device's time on the host's clock."""
        return self.host_ns + round((device_ns - self.device_ns) * self.rate)


def fit_clock(samples: Sequence[tuple[int, int, int]]) -> ClockFit:
    """Aligns a device's timer (a GPU's globaltimer) with the host's clock.

    samples: (host before, device, host after) in ns, each device reading made between the two host
    readings; some at the beginning and some at the end of what is to be aligned, for the drift. A
    sample counts by how narrow its bracket is: those above twice the narrowest are delays, not
    clocks. Raises ConfigError without samples, or where time ran backwards.
    """
    if not samples:
        raise ConfigError("aligning a device's clock takes at least one sample")
    if any(after < before for before, _, after in samples):
        raise ConfigError("a sample of a device's clock ends before it begins")
    narrowest = min(after - before for before, _, after in samples)
    kept = sorted((device, before, after) for before, device, after in samples
                  if after - before <= 2 * narrowest + 1)
    first_device, first_before, _ = kept[0]
    device = np.array([d - first_device for d, _, _ in kept], np.float64)
    host = np.array([(b - first_before + a - first_before) / 2 for _, b, a in kept], np.float64)
    rate = 1.0
    # Below a hundred brackets of distance a slope would be noise.
    if device[-1] > 100 * max(narrowest, 1):
        rate = float(np.polyfit(device, host, 1)[0])
    middle = float((host - device * rate).mean())
    return ClockFit(first_before + round(middle), first_device, rate, -(-narrowest // 2))
