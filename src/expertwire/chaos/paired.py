"""What failures cost a step away from the pauses, against a twin that nothing happens to.

The machine's own ups and downs are larger than what is looked for. So every step is done twice, one
right after the other: by the client whose servers are hurt, and by a client of an equal system that
is left alone (load.py). Only the ratio of the two is looked at, in spans of half a second:

    x = mean of log(step of the twin / step of the client) in one span, without pairs with a pause
    throughput_ratio = exp(mean of x in spans with a failure - mean of x in calm spans)

A span with a failure is one of any phase that is not calm: a server is missing, or one starts and
is connected again. A process that starts takes processor time from both, and so costs neither
anything here; `starting_slowdown` says what it costs, by the twin alone. Calm spans take part
whether before or after failures; `recovered_ratio` compares those after the first failure with
those before it. Intervals take spans for independent: what lasts longer than half a second and
befalls one of the two systems only (which cores its processes sit on) makes them too narrow.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .load import LoadThread
    from .run import ChaosRun, Lap

SPAN_NS = 500_000_000
LEAST_PAIRS = 8  # of a span
Z95 = 1.96


def paired_figures(run: ChaosRun, loads: list[LoadThread], pause_ms: float) -> dict[str, Any]:
    """throughput_ratio and recovered_ratio with their 95 % intervals; None: cannot be told.

    pause_ms: a step that takes longer is a pause, and left out, on both sides.
    """
    calm: list[float] = []
    hurt: list[float] = []
    num_before = 0  # of calm: before the first failure
    calm_ms: list[float] = []  # the twin's mean steps
    starting_ms: list[float] = []
    for lap in run.laps:
        for load in loads:
            for ratio, twin_ms in _spans(lap, load, pause_ms):
                (calm if lap.phase.is_calm else hurt).append(ratio)
                if lap.phase.is_calm:
                    calm_ms.append(twin_ms)
                elif lap.phase.starts_processes:
                    starting_ms.append(twin_ms)
        if lap.phase.is_calm and not hurt:
            num_before = len(calm)
    ratio, interval = difference(hurt, calm)
    recovered, recovered_interval = difference(calm[num_before:], calm[:num_before])
    slowdown = float(np.mean(starting_ms) / np.mean(calm_ms)) if calm_ms and starting_ms else None
    return {
        "throughput_ratio": ratio, "throughput_interval": interval,
        "recovered_ratio": recovered, "recovered_interval": recovered_interval,
        "starting_slowdown": None if slowdown is None else round(slowdown, 3),
        "spans": {"calm": len(calm), "hurt": len(hurt)},
    }


def difference(
    these: list[float], those: list[float]
) -> tuple[float | None, list[float] | None]:
    """exp(mean of these - mean of those) and its 95 % interval, from logarithms."""
    if len(these) < 2 or len(those) < 2:
        return None, None
    mean = float(np.mean(these) - np.mean(those))
    error = math.sqrt(np.var(these, ddof=1) / len(these) + np.var(those, ddof=1) / len(those))
    low, high = math.exp(mean - Z95 * error), math.exp(mean + Z95 * error)
    return round(math.exp(mean), 4), [round(low, 4), round(high, 4)]


def _spans(lap: Lap, load: LoadThread, pause_ms: float) -> list[tuple[float, float]]:
    """(mean log of twin's over client's step, twin's mean step in ms) for the spans of a phase."""
    count = len(load.twin_ended_ns)
    ended = np.asarray(load.ended_ns, np.int64)[:count]
    client_ms = (ended - np.asarray(load.started_ns, np.int64)[:count]) / 1e6
    twin_ms = np.subtract(load.twin_ended_ns, load.twin_started_ns[:count]) / 1e6
    whole = (client_ms <= pause_ms) & (twin_ms <= pause_ms)
    num_spans = max(1, (lap.end_ns - lap.begin_ns) // SPAN_NS)
    found = []
    for begin, end in itertools.pairwise(np.linspace(lap.begin_ns, lap.end_ns, num_spans + 1)):
        inside = whole & (ended >= begin) & (ended < end)
        if inside.sum() >= LEAST_PAIRS:
            ratio = float(np.log(twin_ms[inside] / client_ms[inside]).mean())
            found.append((ratio, float(twin_ms[inside].mean())))
    return found
