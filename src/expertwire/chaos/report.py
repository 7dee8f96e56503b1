"""What a chaos run showed: figures and a verdict."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from .paired import paired_figures

if TYPE_CHECKING:
    from .load import LoadThread
    from .plan import Plan
    from .run import ChaosRun

PAUSE_MS, PAUSE_FACTOR = 20.0, 10.0  # a step that takes longer than both is a pause
RESEND_MS = 50.0  # a step in which a server is given up: its deadline, and so much


class Steps:
    """All steps of all clients: when each ended, and how long it took."""

    def __init__(self, loads: list[LoadThread]):
        ended = [np.asarray(load.log.ended_ns, np.int64) for load in loads]
        started = [np.asarray(load.log.started_ns, np.int64) for load in loads]
        self.num_clients = len(loads)
        self.end_ns = np.concatenate(ended)
        self.start_ns = np.concatenate(started)
        self.ms = (self.end_ns - self.start_ns) / 1e6
        median = float(np.median(self.ms)) if self.ms.size else 0.0
        self.pause_ms = max(PAUSE_MS, PAUSE_FACTOR * median)

    def within(self, begin_ns: int, end_ns: int) -> tuple[int, float, float]:
        """(steps that ended in this time, the longest in ms, steps per second without pauses)."""
        inside = (self.end_ns >= begin_ns) & (self.end_ns < end_ns)
        ms = self.ms[inside]
        paused_s = float(ms[ms > self.pause_ms].sum()) / 1e3
        seconds = (end_ns - begin_ns) / 1e9 * self.num_clients - paused_s
        rate = ms.size * self.num_clients / seconds if seconds > 0 else 0.0
        return int(ms.size), float(ms.max(initial=0.0)), rate


def verdict(run: ChaosRun, loads: list[LoadThread]) -> dict[str, Any]:
    """The figures, and whether they are what a healthy system gives ("ok", "problems").

    throughput_ratio: steps per second in phases with failures, pauses taken out, against those of
    the calm phases around them, with an interval of 95 % (throughput_interval). Phases in which
    processes start are left out: loading takes processor time. With a twin: see paired.py.
    """
    steps = Steps(loads)
    laps = []
    rates: list[tuple[str, float]] = []  # of phases that say something about throughput, in order
    for lap in run.laps:
        count, longest, rate = steps.within(lap.begin_ns, lap.end_ns)
        seconds = (lap.end_ns - lap.begin_ns) / 1e9
        laps.append({"name": lap.phase.name, "seconds": round(seconds, 2), "steps": count,
                     "steps_per_s": round(rate, 1), "longest_ms": round(longest, 2),
                     "deadline_ms": round(lap.deadline_ms, 2),
                     "machine_late_ms": round(lap.late_ms, 2)})
        if lap.phase.is_calm:
            rates.append(("calm", rate))
        elif not lap.phase.starts_processes:
            rates.append(("hurt", rate))
    ratio, noise = throughput(rates)
    compared: dict[str, Any] = {
        "throughput_ratio": ratio, "throughput_interval": None if ratio is None or noise is None
        else [round(ratio - 1.96 * noise, 4), round(ratio + 1.96 * noise, 4)],
    }
    if all(load.twin is not None for load in loads):
        compared = paired_figures(run, loads, steps.pause_ms)
    lost = [what for load in loads for what in load.lost]
    stats = [load.client.stats() for load in loads]
    figures: dict[str, Any] = {
        "steps": int(steps.ms.size),
        "wrong_tokens": sum(load.wrong_tokens for load in loads),
        "lost_requests": len(lost),
        "longest_pause_ms": round(float(steps.ms.max(initial=0.0)), 2),
        **compared,
        "leaks": sum(run.leaks.values()),
        "deadline_ms": max(p["deadline_ms"] for p in laps),
        "machine_late_ms": max(p["machine_late_ms"] for p in laps),
        "pauses": int((steps.ms > steps.pause_ms).sum()),
        "median_ms": round(float(np.median(steps.ms)), 3) if steps.ms.size else None,
        "retries": sum(s["retries"] for s in stats),
        "servers_lost": sum(s["lost"] for s in stats),
        "rss_growth_kb": run.rss_growth_kb,
        "leak_details": {name: count for name, count in run.leaks.items() if count},
        "errors": sorted(set(lost))[:5],
        "phases": laps,
    }
    figures["problems"] = _problems(figures, run.plan)
    figures["ok"] = not figures["problems"]
    return figures


def throughput(rates: list[tuple[str, float]]) -> tuple[float | None, float | None]:
    """(mean of the ratios, its standard error) of hurt phases against the calm ones around them.

    rates: ("calm" or "hurt", steps per second without pauses), in the order in which they went.
    A hurt phase is compared with the mean of the last calm one before and the first one after it:
    what the rest of the machine does changes over a run, and changes both. None: cannot be told.
    """
    ratios = []
    for i, (kind, rate) in enumerate(rates):
        before = [r for k, r in rates[:i] if k == "calm" and r > 0][-1:]
        after = [r for k, r in rates[i + 1 :] if k == "calm" and r > 0][:1]
        if kind == "hurt" and before + after:
            ratios.append(rate / float(np.mean(before + after)))
    if not ratios:
        return None, None
    noise = float(np.std(ratios, ddof=1) / len(ratios) ** 0.5) if len(ratios) > 1 else None
    return round(float(np.mean(ratios)), 4), None if noise is None else round(noise, 4)


def _problems(figures: dict[str, Any], plan: Plan) -> list[str]:
    found = []
    if not figures["steps"]:
        found.append("no step was done")
    if figures["wrong_tokens"]:
        found.append(f"{figures['wrong_tokens']} tokens are wrong")
    if figures["lost_requests"]:
        found.append(f"{figures['lost_requests']} requests were lost: {figures['errors'][0]}")
    found += _long_steps(figures["phases"], plan.max_pause_ms)
    if figures["leaks"]:
        found.append(f"left behind: {figures['leak_details']}")
    if plan.ratio_within is not None:
        ratio, (least, most) = figures["throughput_ratio"], plan.ratio_within
        if ratio is None or not least <= ratio <= most:
            found.append(f"throughput_ratio is {ratio}, not within {least:g} to {most:g}")
    return found


def _long_steps(phases: list[dict[str, Any]], max_pause_ms: float | None) -> list[str]:
    """A step may take the deadline that held in its phase or the one before, where it may have
    begun, and RESEND_MS; and as much more as a thread that only sleeps was woken too late."""
    found = []
    for before, phase in itertools.pairwise([*phases[:1], *phases]):
        late_ms = max(before["machine_late_ms"], phase["machine_late_ms"])
        deadline_ms = max(before["deadline_ms"], phase["deadline_ms"])
        limit = max_pause_ms or deadline_ms + RESEND_MS + late_ms
        if phase["longest_ms"] > limit:
            found.append(f"{phase['name']}: a step took {phase['longest_ms']} ms, more than "
                         f"{limit:.6g} (deadline {deadline_ms:g}, machine late by {late_ms:g})")
    return found


def report_lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    lines = [f"{'phase':40} {'s':>6} {'steps':>7} {'steps/s':>9} {'longest ms':>11}"]
    lines += [f"{p['name'][:40]:40} {p['seconds']:6.1f} {p['steps']:7} {p['steps_per_s']:9.1f} "
              f"{p['longest_ms']:11.1f}" for p in result["phases"]]
    ratio, interval = result["throughput_ratio"], result["throughput_interval"]
    known = "unknown" if ratio is None else f"{ratio:.3f}"
    if interval is not None:
        known += f" ({interval[0]:.3f} to {interval[1]:.3f})"
    lines.append(
        f"{result['steps']} steps, {result['wrong_tokens']} wrong tokens, "
        f"{result['lost_requests']} lost requests, longest pause {result['longest_pause_ms']} ms, "
        f"throughput with failures {known} of without, "
        f"{result['leaks']} leaks"
    )
    lines.append("verdict: " + ("ok" if result["ok"] else "; ".join(result["problems"])))
    return lines
