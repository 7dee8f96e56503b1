"""The timeline of a chaos run as a picture: steps per second, what everybody did, every pause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np

from ..observe.draw import LEFT, PALETTE, RIGHT, TOP, WIDTH, axis, fitted, legend, text, text_width
from .report import Steps

if TYPE_CHECKING:
    from .load import LoadThread
    from .run import ChaosRun

CURVE_HEIGHT, LANE_HEIGHT, LANE_GAP = 90, 26, 8
NUM_BINS = 240
COLOURS = {"serves": PALETTE[2], "starts": PALETTE[4], "is stopped": PALETTE[1],
           "returns": PALETTE[0], "drains": PALETTE[3], "cut off": PALETTE[6],
           "not there": "#d9dce3", "error completion": "#1f2430", "network faults": PALETTE[8],
           "pause of a client": PALETTE[5]}
BECOMES = {"ready": "serves", "kill": "not there", "kill_registry": "not there",
           "stop": "is stopped", "continue": "returns", "start": "starts", "join": "starts",
           "start_registry": "serves", "drain": "drains", "left": "not there", "cut": "cut off",
           "mended": "returns"}
MARK = 3.0  # pixels of what takes no time


@dataclass
class Bar:
    """Something that lasts, in seconds since the picture's start."""

    begin: float
    end: float
    state: str  # of COLOURS
    label: str
    what: str  # shown for a pointer that rests on it


def draw_chaos(path: str, run: ChaosRun, loads: list[LoadThread], result: dict[str, Any]) -> None:
    """Writes an SVG. Raises OSError if the place cannot be written."""
    Path(path).write_text(chaos_svg(run, loads, result))


def chaos_svg(run: ChaosRun, loads: list[LoadThread], result: dict[str, Any]) -> str:
    """The picture as SVG text."""
    begin, end = run.laps[0].begin_ns, run.laps[-1].end_ns
    seconds = max((end - begin) / 1e9, 1e-3)
    scale = (WIDTH - LEFT - RIGHT) / seconds
    steps = Steps(loads)
    lanes = {lane: list(_states(run, lane, begin, seconds))
             for lane in sorted({e.server for e in run.events} | set(run.plan.servers))}
    if faults := list(_network(run, begin)):
        lanes["network"] = faults
    lanes["pauses"] = _pauses(steps, begin, seconds)
    errors = [e for e in run.events if e.kind == "error"]
    shown = {bar.state for bars in lanes.values() for bar in bars}
    shown |= {"error completion"} if errors else set()
    title = (f"chaos {run.plan.name}: {result['steps']} steps, {result['wrong_tokens']} wrong "
             f"tokens, longest pause {result['longest_pause_ms']:.0f} ms")
    top = TOP + CURVE_HEIGHT + 14
    bottom = top + len(lanes) * (LANE_HEIGHT + LANE_GAP)
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{bottom + 34}' "
        f"viewBox='0 0 {WIDTH} {bottom + 34}' role='img'>",
        f"<title>{escape(title)}</title><rect width='100%' height='100%' fill='#ffffff'/>",
        text(24, 34, title, size=19, weight="600"),
        *legend([state for state in COLOURS if state in shown], COLOURS)[0],
        *axis(seconds, scale, TOP, bottom, "s"),
        *_curve(steps, begin, seconds),
    ]
    for i, (lane, bars) in enumerate(lanes.items()):
        y = top + i * (LANE_HEIGHT + LANE_GAP)
        out.append(text(LEFT - 12, y + LANE_HEIGHT / 2 + 5, fitted(lane, LEFT - 24), anchor="end"))
        out += [_box(bar, y, scale) for bar in bars]
        for event in errors:
            if event.server == lane:
                x = LEFT + (event.ns - begin) / 1e9 * scale
                out.append(f"<rect x='{x:.2f}' y='{y}' width='{MARK}' height='{LANE_HEIGHT}' "
                           f"fill='{COLOURS['error completion']}'>"
                           f"<title>{escape(lane)}: error completion</title></rect>")
    return "\n".join([*out, "</svg>", ""])


def _states(run: ChaosRun, lane: str, begin: int, seconds: float) -> Iterator[Bar]:
    """What one process did over the picture's time."""
    state = "serves" if lane == "registry" or lane in run.plan.servers else "not there"
    since = 0.0
    for event in sorted((e for e in run.events if e.server == lane), key=lambda e: e.ns):
        new, at = BECOMES.get(event.kind, state), max((event.ns - begin) / 1e9, 0.0)
        if new != state:
            if at > since:
                yield Bar(since, at, state, state, f"{lane} {state}")
            since, state = at, new
    if seconds > since:
        yield Bar(since, seconds, state, state, f"{lane} {state}")


def _network(run: ChaosRun, begin: int) -> Iterator[Bar]:
    for lap in run.laps:
        if lap.phase.network is not None:
            start = (lap.begin_ns - begin) / 1e9
            yield Bar(start, start + lap.phase.seconds, "network faults", lap.phase.network.words,
                      lap.phase.network.words)


def _pauses(steps: Steps, begin: int, seconds: float) -> list[Bar]:
    """Of all clients; the longest last, so that none hides it."""
    found = []
    for k in np.flatnonzero(steps.ms > steps.pause_ms).tolist():
        start, end = ((int(ns[k]) - begin) / 1e9 for ns in (steps.start_ns, steps.end_ns))
        if end > 0 and start < seconds:
            what = f"{steps.ms[k]:.0f} ms"
            found.append(Bar(max(start, 0.0), min(end, seconds), "pause of a client", what, what))
    return sorted(found, key=lambda bar: bar.end - bar.begin)


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


def _box(bar: Bar, y: float, scale: float) -> str:
    width = max((bar.end - bar.begin) * scale, 0.8)
    box = (f"<rect x='{LEFT + bar.begin * scale:.2f}' y='{y}' width='{width:.2f}' "
           f"height='{LANE_HEIGHT}' fill='{COLOURS[bar.state]}'>"
           f"<title>{escape(bar.what)}: {bar.end - bar.begin:.2f} s</title></rect>")
    if text_width(bar.label, 11) + 4 < width:
        box += text(LEFT + bar.begin * scale + width / 2, y + LANE_HEIGHT / 2 + 4, bar.label,
                    size=11, anchor="middle",
                    fill="#1f2430" if bar.state == "not there" else "#ffffff")
    return box
