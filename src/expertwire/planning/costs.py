"""What a step costs, piece by piece: measured and fitted, or from a device's and a link's data.

Formulas and their sources: docs/planning.md.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError

HEAD_BYTES = 128 + 16 + 64 + 16  # BufferHead and flag there, ReplyHead and flag back
BAND = 0.1  # messages this near to a quantile of all times are looked at


@dataclass(frozen=True)
class Costs:
    """Times in us, bytes, bytes per us (MB/s)."""

    trip_us: float  # of a message there and back, whatever its size
    server_us: float  # of that: the server's part, which the next message waits for
    trip_bytes_per_us: float
    batch_us: float  # of a batch in the experts, whatever its size
    expert_us: float  # of each busy expert, besides reading its weights
    weight_bytes_per_us: float
    flops_per_us: float
    overlaps: bool  # weights are read while others are used: the longer of both counts (a GPU)
    parallel: float = 1.0  # speed of each of two processes that work at once on shared CPUs
    cores: float = math.inf  # CPUs that all servers and clients share; inf: each has its own

    def shared(self, working: int) -> float:
        """How much longer each of so many processes takes that work at once.

        Two CPUs may be threads of one core, or share its memory: `parallel`. More than there are
        CPUs take turns.
        """
        if working <= 1 or math.isinf(self.cores):
            return 1.0
        return max(1.0, working / self.cores) / self.parallel

    def experts_us(
        self, busy: float, pairs: float, expert_bytes: float, pair_flops: float
    ) -> float:
        """Of one batch: `busy` experts have `pairs` rows in all."""
        reading = busy * expert_bytes / self.weight_bytes_per_us
        computing = pairs * pair_flops / self.flops_per_us
        both = max(reading, computing) if self.overlaps else reading + computing
        return self.batch_us + busy * self.expert_us + both


# One H200: fitted to the tables "One GPU: MoE layers" of docs/performance.md at 1 and 512 rows.
H200 = Costs(trip_us=54.0, server_us=25.0, trip_bytes_per_us=177_000.0, batch_us=20.6,
             expert_us=0.0, weight_bytes_per_us=4_418_000.0, flops_per_us=500e6, overlaps=True)
# Two H200s joined by NVLink: fitted to the bf16 rows of "Clients and servers on several GPUs".
H200_NVLINK = dataclasses.replace(H200, trip_us=40.0, trip_bytes_per_us=130_000.0)
# Two CPUs, threads of one core, of a shared virtual machine: rough, set by hand near what
# bench/plan_check.py saw.
CPU = Costs(trip_us=105.0, server_us=60.0, trip_bytes_per_us=4000.0, batch_us=60.0, expert_us=12.0,
            weight_bytes_per_us=9000.0, flops_per_us=40e3, overlaps=False, parallel=0.6)
DEVICES = {"h200": H200, "h200-nvlink": H200_NVLINK, "cpu": CPU}


def parse_link(text: str) -> tuple[float, float]:
    """"400Gbit:3us" or "450GB:2us" -> (bytes per us, us one way). Raises ConfigError."""
    match = re.fullmatch(r"([\d.]+)(G|M)(bit|B)(?:/s|ps)?:([\d.]+)(us|ms)", text.strip())
    try:
        assert match is not None
        rate, latency = float(match[1]), float(match[4]) * (1000 if match[5] == "ms" else 1)
        assert rate > 0
    except (AssertionError, ValueError):
        raise ConfigError(
            f"--links {text!r}: it is RATE:LATENCY, as 400Gbit:3us or 450GB:2us"
        ) from None
    scale = {"G": 1e9, "M": 1e6}[match[2]] / (8 if match[3] == "bit" else 1)
    return rate * scale / 1e6, latency


def with_link(costs: Costs, bytes_per_us: float, latency_us: float) -> Costs:
    """The same machines with a link between them: bytes take their turn on it too."""
    slower = 1 / (1 / costs.trip_bytes_per_us + 1 / bytes_per_us)
    return dataclasses.replace(costs, trip_us=costs.trip_us + 2 * latency_us,
                               trip_bytes_per_us=slower)


def busy_experts(held: float, chance: float, tokens: float) -> float:
    """How many of `held` experts have a row, on average, if each token takes each of them with
    probability `chance` (top-k over the number of experts)."""
    return held if chance >= 1 else held * -math.expm1(tokens * math.log1p(-chance))


def fit_nonnegative(columns: np.ndarray, times: Sequence[float]) -> np.ndarray:
    """Weights >= 0 [columns] with the least sum of squared relative errors.

    columns: [N, C], C small: all subsets are tried, the best feasible one is taken.
    """
    target = np.asarray(times, np.float64)
    scaled, ones = np.asarray(columns, np.float64) / target[:, None], np.ones_like(target)
    best, least = np.zeros(columns.shape[1]), math.inf
    for size in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), size):
            found, *_ = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)
            error = float(((scaled[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(columns.shape[1]), error
                best[list(chosen)] = found
    return best


def fit_costs(
    samples: Sequence[dict[str, float]], expert_bytes: float, pair_flops: float, chance: float,
) -> Costs:
    """Costs of measured messages, each alone on its way to one server.

    samples: {"experts_held", "pairs", "bytes", "trip_us" (the call, or put to combine, without the
    experts), "server_us" (poll, gather, reply), "experts_us"}, of at least three different sizes.
    chance: as for `busy_experts`. Raises ConfigError with fewer.
    """
    if len({sample["pairs"] for sample in samples}) < 3:
        raise ConfigError("fitting costs takes batches of at least three different sizes")
    trip = fit_nonnegative(
        np.array([[1.0, s["bytes"]] for s in samples]), [s["trip_us"] for s in samples]
    )
    columns = [
        [1.0, busy_experts(held, chance, pairs / (chance * held)), pairs]
        for held, pairs in ((s["experts_held"], s["pairs"]) for s in samples)
    ]
    experts = fit_nonnegative(np.array(columns), [s["experts_us"] for s in samples])
    endless = 1e12
    return Costs(
        trip_us=float(trip[0]),
        server_us=float(np.median([s["server_us"] for s in samples])),
        trip_bytes_per_us=1 / trip[1] if trip[1] > 0 else endless,
        batch_us=float(experts[0]), expert_us=0.0,
        weight_bytes_per_us=expert_bytes / experts[1] if experts[1] > 0 else endless,
        flops_per_us=pair_flops / experts[2] if experts[2] > 0 else endless, overlaps=False,
    )


def samples_of_trace(
    events: Sequence[dict[str, Any]], experts_held: int, quantile: float = 0.5
) -> list[dict[str, float]]:
    """What `fit_costs` takes, from a trace: by size, the typical message that was served alone.

    The trace must be of a batch-invariant client (the default). experts_held: by each server.
    quantile: of the whole times, where `typical` looks. Raises ConfigError if the trace has no such
    message.
    """
    from ..trace.summary import ways

    by_size: dict[int, list[dict[str, float]]] = {}
    slices = [e for e in events if e["ph"] == "X"]
    calls = sorted((e["ts"], e["pid"], e["tid"], e["ts"] + e["dur"]) for e in slices
                   if e["name"] == "moe")
    for message, way in ways(slices).items():
        if not {"put", "poll", "experts", "reply", "combine"} <= way.keys():
            continue
        if len(way["poll"]["args"]["messages"]) != 1:
            continue  # it shared the batch: its time is not its own
        facts = [m for step in ("put", "reply") for m in way[step]["args"]["messages"]
                 if m["id"] == message]
        size, pairs = facts[0]["rows"], facts[-1]["rows"]  # a reply has a row per pair
        begin, end = way["put"]["ts"], way["combine"]["ts"] + way["combine"]["dur"]
        place = bisect.bisect_right(calls, (begin, math.inf)) - 1
        if place >= 0:  # the whole call, where it is there: checking the input takes time, too
            start, pid, tid, stop = calls[place]
            if (pid, tid) == (way["put"]["pid"], way["put"]["tid"]) and stop >= end:
                begin, end = start, stop
        whole = end - begin
        reply_end = way["reply"]["ts"] + way["reply"]["dur"]
        sample = {
            "experts_held": float(experts_held), "pairs": float(pairs),
            "bytes": float(sum(m["bytes"] for m in facts)),
            "trip_us": whole - way["experts"]["dur"], "experts_us": way["experts"]["dur"],
            "server_us": reply_end - way["poll"]["ts"] - way["experts"]["dur"],
        }
        by_size.setdefault(size, []).append(sample)
    if not by_size:
        raise ConfigError("the trace has no message that was served alone from put to combine; "
                          "trace one client, and its servers too")
    return [typical(found, quantile) for _, found in sorted(by_size.items())]


def typical(samples: Sequence[dict[str, float]], quantile: float) -> dict[str, float]:
    """The means over those whose whole time lies within BAND of a quantile of the whole times.

    Quantiles of parts do not add up to that of the whole: each part is at its lower decile at
    another time, so that their sum is what hardly any message takes. Means of the same messages do.
    """
    order = sorted(samples, key=lambda s: s["trip_us"] + s["experts_us"])
    first = math.floor(max(0.0, quantile - BAND) * len(order))
    last = math.ceil(min(1.0, quantile + BAND) * len(order))
    chosen = order[min(first, len(order) - 1) : max(last, first + 1)]
    return {key: sum(s[key] for s in chosen) / len(chosen) for key in chosen[0]}
