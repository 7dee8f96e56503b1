"""What failures cost a step away from the pauses, against a twin that nothing happens to.

The machine's own ups and downs are larger than what is looked for. So every step is done twice, one
right after the other: by the client whose servers are hurt, and by a client of an equal system that
is left alone (load.py). Only the ratio of the two is looked at, in spans of about a second:

    x = log(median step of the twin / median step of the client), without pauses, in one span
    throughput_ratio = exp(mean of x in spans with a failure - mean of x in calm spans)

A span with a failure is one of any phase that is not calm: a server is missing, or one starts and
is connected again. A process that starts takes processor time from both, and so costs neither
anything here; `starting_slowdown` says what it costs, by the twin alone. Calm spans take part
whether before or after failures; `recovered_ratio` compares those after the first failure with
those before it.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .load import LoadThread
    from .run import ChaosRun, Lap

SPAN_NS = 1_000_000_000
LEAST_STEPS = 20  # of a span, or its medians say little
Z95 = 1.96


def paired_figures(run: ChaosRun, loads: list[LoadThread], pause_ms: float) -> dict[str, Any]:
    """throughput_ratio and recovered_ratio with their 95 % intervals; None: cannot be told.

    pause_ms: a step that takes longer is a pause, and left out, on both sides.
    """
    calm: list[float] = []
    before: list[float] = []  # of calm: those before the first failure
    hurt: list[float] = []
    calm_ms: list[float] = []  # medians of the twin's steps
    starting_ms: list[float] = []
    failed = False
    for lap in run.laps:
        failed = failed or not lap.phase.is_calm
        for load in loads:
            for ratio, twin_ms in _spans(lap, load, pause_ms):
                (calm if lap.phase.is_calm else hurt).append(ratio)
                if not failed:
                    before.append(ratio)
                if lap.phase.is_calm:
                    calm_ms.append(twin_ms)
                elif lap.phase.starts_processes:
                    starting_ms.append(twin_ms)
    ratio, interval = difference(hurt, calm)
    recovered, recovered_interval = difference(calm[len(before):], before)
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
    """(log of twin's over client's median, twin's median in ms) for the spans of a phase."""
    count = max(1, (lap.end_ns - lap.begin_ns) // SPAN_NS)
    edges = np.linspace(lap.begin_ns, lap.end_ns, count + 1)
    sides = [_steps(load.started_ns, load.ended_ns, pause_ms),
             _steps(load.twin_started_ns, load.twin_ended_ns, pause_ms)]
    found = []
    for begin, end in itertools.pairwise(edges):
        within = [ms[(at >= begin) & (at < end)] for at, ms in sides]
        if min(ms.size for ms in within) >= LEAST_STEPS:
            client, twin = (float(np.median(ms)) for ms in within)
            found.append((math.log(twin / client), twin))
    return found


def _steps(started: Any, ended: Any, pause_ms: float) -> tuple[np.ndarray, np.ndarray]:
    """(when each step ended, its duration in ms), without pauses."""
    ended_ns = np.asarray(ended, np.int64)
    ms = (ended_ns - np.asarray(started, np.int64)[: ended_ns.size]) / 1e6
    return ended_ns[ms <= pause_ms], ms[ms <= pause_ms]
