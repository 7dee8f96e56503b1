"""What failures cost a step away from the pauses, against a twin that nothing happens to.

The machine's own ups and downs are larger than what is looked for. So every step is done twice, one
right after the other and in an order that is drawn: by the client whose servers are hurt, and by a
client of an equal system that is left alone (load.py). Only the ratio of the two is looked at:

    x = log(step of the twin / step of the client)             of each pair without a pause
    throughput_ratio = exp(location of x in phases with a failure - location of x in calm ones)

The order is drawn so that x is as often above its centre as below, however long the tails: the
location is the mean of the middle 60 %, which a step that something else interrupted does not move.
Pairs of the same second are not independent, so the interval comes from drawing whole spans of a
second again and again (a bootstrap over blocks).

Two equal systems still differ for seconds at a time, by more than what is looked for, where the
kernel places the processes of one on the cores better than those of the other, and where a client
that spins while it waits holds the core that its server wants. So with a twin all processes share
one core, and clients do not spin (`spin_us=0`).

A phase with a failure is any that is not calm: a server is missing, or one starts and is connected
again. A process that starts takes processor time from both, and so costs neither anything here;
`starting_slowdown` says what it costs, by the twin alone. Calm phases take part whether before or
after failures; `recovered_ratio` compares those after the first failure with those before it. A
calm phase's first second does not count: a process that is new computes slowly.

A server that comes back has another seat, so tokens choose their replicas anew, and a batch may be
split into more or fewer messages than before, for good. `recovered_messages` says by how much.

`recovered_ratio` has an uncertainty that its interval does not know: two systems that were started
equal differ by 1 or 2 % for as long as their processes live, and those before the first failure are
one such draw. `twin_ratios` are steps per second against the twin itself, before and after.

`cpu_ratio` is the same ratio once more for the processor time of a step, of the client's thread and
of all servers together, phase by phase, without phases in which processes start (`cpu_recovered`:
calm phases after the first failure against those before). Intervals take spans, or phases, for
independent: what lasts longer, and befalls one of the two systems only, makes them too narrow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .load import LoadThread
    from .run import ChaosRun, Lap

SPAN_NS = 1_000_000_000
LEAST_PAIRS = 8  # of a span
LEAST_SPANS = 4  # of what is compared
TRIM = 0.2  # of the pairs at either end
NUM_DRAWS = 300  # of the bootstrap
Z95 = 1.96


def paired_figures(run: ChaosRun, loads: list[LoadThread], pause_ms: float) -> dict[str, Any]:
    """throughput_ratio and recovered_ratio with their 95 % intervals; None: cannot be told.

    pause_ms: a step that takes longer is a pause, and left out, on both sides.
    """
    calm: list[np.ndarray] = []  # x of the pairs of a span
    hurt: list[np.ndarray] = []
    num_before = 0  # of calm: before the first failure
    replies: tuple[list[float], list[float]] = [], []  # client's over twin's, before and after
    calm_ms: list[float] = []  # the twin's mean steps
    starting_ms: list[float] = []
    for lap in run.laps:
        for load in loads:
            for pairs, twin_ms in _spans(lap, load, pause_ms):
                (calm if lap.phase.is_calm else hurt).append(pairs)
                if lap.phase.is_calm:
                    calm_ms.append(twin_ms)
                elif lap.phase.starts_processes:
                    starting_ms.append(twin_ms)
        if lap.phase.is_calm and min(lap.replies) > 0:
            replies[bool(hurt)].append(math.log(lap.replies[0] / lap.replies[1]))
        if lap.phase.is_calm and not hurt:
            num_before = len(calm)
    ratio, interval = shift(hurt, calm)
    recovered, recovered_interval = shift(calm[num_before:], calm[:num_before])
    slowdown = float(np.mean(starting_ms) / np.mean(calm_ms)) if calm_ms and starting_ms else None
    return {
        "throughput_ratio": ratio, "throughput_interval": interval,
        **_cpu_figures(run, loads),
        "recovered_ratio": recovered, "recovered_interval": recovered_interval,
        "twin_ratios": [round(math.exp(_location(part)), 4) if part else None
                        for part in (calm[:num_before], calm[num_before:])],
        "recovered_messages": round(math.exp(np.mean(replies[1]) - np.mean(replies[0])), 4)
        if all(replies) else None,
        "starting_slowdown": None if slowdown is None else round(slowdown, 3),
        "pairs": {"calm": sum(map(len, calm)), "hurt": sum(map(len, hurt)),
                  "calm_before": sum(map(len, calm[:num_before]))},
    }


def shift(
    these: list[np.ndarray], those: list[np.ndarray], seed: int = 1
) -> tuple[float | None, list[float] | None]:
    """exp(location of these - location of those) and its 95 % interval.

    these, those: spans of logarithms; a span is drawn as a whole.
    """
    if min(len(these), len(those)) < LEAST_SPANS:
        return None, None
    generator = np.random.default_rng(seed)
    mean, variance = _location(these) - _location(those), 0.0
    for spans in (these, those):
        draws = generator.integers(len(spans), size=(NUM_DRAWS, len(spans)))
        drawn = [_location([spans[i] for i in draw]) for draw in draws]
        variance += float(np.var(drawn)) * len(spans) / (len(spans) - 1)
    error = Z95 * math.sqrt(variance)
    return round(math.exp(mean), 4), [round(math.exp(mean - error), 4),
                                      round(math.exp(mean + error), 4)]


def _location(spans: list[np.ndarray]) -> float:
    """The mean without the smallest and the largest ones."""
    pairs = np.concatenate(spans)
    cut = int(TRIM * pairs.size)
    return float(np.partition(pairs, (cut, pairs.size - cut - 1))[cut : pairs.size - cut].mean())


def _cpu_figures(run: ChaosRun, loads: list[LoadThread]) -> dict[str, Any]:
    calm: list[float] = []
    hurt: list[float] = []
    num_before = 0
    for lap in run.laps:
        spent = np.array(lap.cpu_ns, np.float64)
        if not spent.all() or lap.end_ns - lap.steady_ns < SPAN_NS:
            continue
        for load in loads:
            ended = np.asarray(load.log.ended_ns, np.int64)
            inside = (ended >= lap.steady_ns) & (ended < lap.end_ns)
            spent += [np.asarray(log.cpu_ns)[inside].sum() for log in (load.log, load.twin_log)]
        (calm if lap.phase.is_calm else hurt).append(float(np.log(spent[1] / spent[0])))
        if not hurt:
            num_before = len(calm)
    ratio, interval = difference(hurt, calm)
    recovered, recovered_interval = difference(calm[num_before:], calm[:num_before])
    return {"cpu_ratio": ratio, "cpu_interval": interval,
            "cpu_recovered": recovered, "cpu_recovered_interval": recovered_interval}


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


def _spans(lap: Lap, load: LoadThread, pause_ms: float) -> Iterator[tuple[np.ndarray, float]]:
    """(x of the pairs, the twin's mean step in ms) for the spans of a phase."""
    count = len(load.twin_log.ended_ns)
    ended = np.asarray(load.log.ended_ns[:count], np.int64)
    client_ms = np.subtract(ended, load.log.started_ns[:count]) / 1e6
    twin_ms = np.subtract(load.twin_log.ended_ns, load.twin_log.started_ns[:count]) / 1e6
    whole = (client_ms <= pause_ms) & (twin_ms <= pause_ms)
    num_spans = max(1, (lap.end_ns - lap.steady_ns) // SPAN_NS)
    for begin, end in itertools.pairwise(np.linspace(lap.steady_ns, lap.end_ns, num_spans + 1)):
        inside = whole & (ended >= begin) & (ended < end)
        if inside.sum() >= LEAST_PAIRS:
            yield np.log(twin_ms[inside] / client_ms[inside]), float(twin_ms[inside].mean())
