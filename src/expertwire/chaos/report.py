"""What a chaos run showed: figures, a verdict, and a timeline picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np

from ..observe.draw import LEFT, PALETTE, RIGHT, TOP, WIDTH, axis, legend, text, text_width
from .paired import paired_figures

if TYPE_CHECKING:
    from .load import LoadThread
    from .run import ChaosRun

PAUSE_MS, PAUSE_FACTOR = 20.0, 10.0  # a step that takes longer than both is a pause
CURVE_HEIGHT, LANE_HEIGHT, LANE_GAP = 90, 26, 8
NUM_BINS = 240
COLOURS = {"serves": PALETTE[2], "starts": PALETTE[4], "is stopped": PALETTE[1],
           "drains": PALETTE[3], "cut off": PALETTE[6], "not there": "#d9dce3",
           "error completion": "#1f2430", "pause of a client": PALETTE[5]}
BECOMES = {"ready": "serves", "kill": "not there", "kill_registry": "not there",
           "stop": "is stopped", "continue": "starts", "start": "starts", "join": "starts",
           "start_registry": "serves", "drain": "drains", "left": "not there", "cut": "cut off"}
MARK = 3.0  # pixels of what takes no time


class Steps:
    """All steps of all clients: when each ended, and how long it took."""

    def __init__(self, loads: list[LoadThread]):
        ended = [np.asarray(load.ended_ns, np.int64) for load in loads]
        started = [np.asarray(load.started_ns, np.int64) for load in loads]
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
        "deadline_ms": run.deadline_ms,
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
    figures["problems"] = _problems(figures, run.plan.max_pause_ms)
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


def _problems(figures: dict[str, Any], max_pause_ms: float) -> list[str]:
    found = []
    if not figures["steps"]:
        found.append("no step was done")
    if figures["wrong_tokens"]:
        found.append(f"{figures['wrong_tokens']} tokens are wrong")
    if figures["lost_requests"]:
        found.append(f"{figures['lost_requests']} requests were lost: {figures['errors'][0]}")
    if figures["longest_pause_ms"] > max_pause_ms:
        found.append(
            f"a step took {figures['longest_pause_ms']} ms, more than {max_pause_ms:g} (a thread "
            f"that only sleeps was woken up to {figures['machine_late_ms']} ms late)"
        )
    if figures["leaks"]:
        found.append(f"left behind: {figures['leak_details']}")
    return found


def report_lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    lines = [f"{'phase':32} {'s':>6} {'steps':>7} {'steps/s':>9} {'longest ms':>11}"]
    lines += [f"{p['name'][:32]:32} {p['seconds']:6.1f} {p['steps']:7} {p['steps_per_s']:9.1f} "
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


# -------------------------------------------------------------------- picture


def draw_chaos(path: str, run: ChaosRun, loads: list[LoadThread], result: dict[str, Any]) -> None:
    """Writes an SVG: steps per second, what each process was doing, and every pause. Raises OSError
    if the place cannot be written."""
    Path(path).write_text(chaos_svg(run, loads, result))


def chaos_svg(run: ChaosRun, loads: list[LoadThread], result: dict[str, Any]) -> str:
    begin, end = run.laps[0].begin_ns, run.laps[-1].end_ns
    seconds = max((end - begin) / 1e9, 1e-3)
    scale = (WIDTH - LEFT - RIGHT) / seconds
    steps = Steps(loads)
    lanes = sorted({e.server for e in run.events} | set(run.plan.servers))
    top = TOP + CURVE_HEIGHT + 14
    bottom = top + (len(lanes) + 1) * (LANE_HEIGHT + LANE_GAP)
    title = (f"chaos {run.plan.name}: {result['steps']} steps, {result['wrong_tokens']} wrong "
             f"tokens, longest pause {result['longest_pause_ms']:.0f} ms")
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{bottom + 34}' "
        f"viewBox='0 0 {WIDTH} {bottom + 34}' role='img'>",
        f"<title>{escape(title)}</title><rect width='100%' height='100%' fill='#ffffff'/>",
        text(24, 34, title, size=19, weight="600"),
        *legend(list(COLOURS), COLOURS)[0], *axis(seconds, scale, TOP, bottom, "s"),
        *_curve(steps, begin, seconds),
    ]
    for i, lane in enumerate(lanes):
        y = top + i * (LANE_HEIGHT + LANE_GAP)
        out.append(text(LEFT - 12, y + LANE_HEIGHT / 2 + 5, lane, anchor="end"))
        for a, b, state in _states(run, lane, begin, end):
            span = ((a - begin) / 1e9, (b - begin) / 1e9)
            out.append(_box(*span, y, scale, state, f"{lane} {state}"))
        for event in run.events:
            if event.server == lane and event.kind == "error":
                x = LEFT + (event.ns - begin) / 1e9 * scale
                out.append(f"<rect x='{x:.2f}' y='{y}' width='{MARK}' height='{LANE_HEIGHT}' "
                           f"fill='{COLOURS['error completion']}'>"
                           f"<title>{escape(lane)}: error completion</title></rect>")
    y = top + len(lanes) * (LANE_HEIGHT + LANE_GAP)
    out.append(text(LEFT - 12, y + LANE_HEIGHT / 2 + 5, "pauses", anchor="end"))
    for k in np.flatnonzero(steps.ms > steps.pause_ms).tolist():
        a, b = ((int(ns[k]) - begin) / 1e9 for ns in (steps.start_ns, steps.end_ns))
        out.append(_box(a, b, y, scale, "pause of a client", f"{steps.ms[k]:.0f} ms"))
    return "\n".join([*out, "</svg>", ""])


def _states(run: ChaosRun, lane: str, begin: int, end: int) -> list[tuple[int, int, str]]:
    """(from, to, state) of one process over the picture's time."""
    state = "serves" if lane == "registry" or lane in run.plan.servers else "not there"
    spans, since = [], begin
    for event in sorted((e for e in run.events if e.server == lane), key=lambda e: e.ns):
        new = BECOMES.get(event.kind, state)
        if new != state:
            spans.append((since, max(event.ns, begin), state))
            since, state = max(event.ns, begin), new
    return [span for span in [*spans, (since, end, state)] if span[1] > span[0]]


def _curve(steps: Steps, begin: int, seconds: float) -> list[str]:
    counts, edges = np.histogram((steps.end_ns - begin) / 1e9, NUM_BINS, (0, seconds))
    rates = counts / (seconds / NUM_BINS)
    highest = max(float(rates.max(initial=0.0)), 1.0)
    points = " ".join(
        f"{LEFT + (edges[i] + edges[i + 1]) / 2 / seconds * (WIDTH - LEFT - RIGHT):.1f},"
        f"{TOP + CURVE_HEIGHT * (1 - rates[i] / highest):.1f}" for i in range(NUM_BINS)
    )
    return [
        f"<polyline points='{points}' fill='none' stroke='{PALETTE[0]}' stroke-width='1.6'/>",
        text(LEFT - 12, TOP + 12, f"{highest:.0f} steps/s", anchor="end"),
        text(LEFT - 12, TOP + CURVE_HEIGHT, "0", anchor="end"),
    ]


def _box(begin: float, end: float, y: float, scale: float, state: str, what: str) -> str:
    width = max((end - begin) * scale, 0.8)
    box = (f"<rect x='{LEFT + begin * scale:.2f}' y='{y}' width='{width:.2f}' "
           f"height='{LANE_HEIGHT}' fill='{COLOURS[state]}'>"
           f"<title>{escape(what)}: {end - begin:.2f} s</title></rect>")
    label = what if state == "pause of a client" else state
    if text_width(label, 11) + 6 < width:
        box += text(LEFT + begin * scale + width / 2, y + LANE_HEIGHT / 2 + 4, label, size=11,
                    anchor="middle", fill="#1f2430" if state == "not there" else "#ffffff")
    return box
