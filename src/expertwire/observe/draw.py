"""Pictures without dependencies: where one step's time goes, as an SVG timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

# Okabe-Ito, readable with colour-blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A900", "#8C8C8C",
           "#6A3D9A", "#5D4037", "#333F48")
NOTHING = "between stages"  # has a colour of its own, and does not look like work
NOTHING_COLOUR = "#A3AAB8"
WIDTH, LEFT, RIGHT, TOP = 1200, 170, 50, 92
LEGEND_HEIGHT = 22  # of a row of it, below the first
LANE_HEIGHT, LANE_GAP = 34, 12
MIN_PIXELS = 0.6  # narrower spans of one stage that touch are drawn as one
FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class Span:
    """One stage of one actor, in microseconds from the picture's start."""

    lane: str
    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Arrow:
    """Something that goes from one lane to another, in microseconds as the spans."""

    lane: str
    at_us: float
    to_lane: str
    to_us: float


def draw_step(
    path: str | Path, spans: Sequence[Span], title: str, arrows: Sequence[Arrow] = ()
) -> None:
    """Writes an SVG: a lane per actor, a colour per stage, and a bar of the first lane's shares."""
    Path(path).write_text(step_svg(spans, title, arrows))


def step_svg(spans: Sequence[Span], title: str, arrows: Sequence[Arrow] = ()) -> str:
    """The picture as SVG text."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    names = list(dict.fromkeys(span.name for span in spans))
    stages = [name for name in names if name != NOTHING]
    colour = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(stages)}
    colour[NOTHING] = NOTHING_COLOUR
    end = max((span.end_us for span in spans), default=1.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / end
    shown_legend, num_rows = legend(names, colour)
    top = TOP + (num_rows - 1) * LEGEND_HEIGHT
    lanes_bottom = top + len(lanes) * (LANE_HEIGHT + LANE_GAP)
    height = lanes_bottom + 150
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
        f"viewBox='0 0 {WIDTH} {height}' role='img'>",
        f"<title>{escape(title)}</title><rect width='100%' height='100%' fill='#ffffff'/>",
        text(24, 34, fitted(title, WIDTH - 48, 19), size=19, weight="600"),
        *shown_legend,
        *axis(end, scale, top, lanes_bottom),
    ]
    for i in range(len(lanes)):
        y = top + i * (LANE_HEIGHT + LANE_GAP)
        out.append(f"<rect x='{LEFT}' y='{y}' width='{WIDTH - LEFT - RIGHT}' "
                   f"height='{LANE_HEIGHT}' fill='#f4f5f7'/>")
    out += [line(arrow, lanes, top, scale) for arrow in arrows]
    for i, lane in enumerate(lanes):
        y = top + i * (LANE_HEIGHT + LANE_GAP)
        out.append(text(LEFT - 12, y + LANE_HEIGHT / 2 + 5, fitted(lane, LEFT - 24),
                        anchor="end"))
        for span in merged([s for s in spans if s.lane == lane], scale):
            out.append(box(span, y, scale, colour[span.name]))
    if lanes:
        shown = [s for s in spans if s.lane == lanes[0]]
        out += shares(shown, lanes[0], lanes_bottom + 62, colour)
    return "\n".join([*out, "</svg>", ""])


def text(
    x: float, y: float, content: str, *, size: int = 13, anchor: str = "start",
    weight: str = "400", fill: str = "#1f2430",
) -> str:
    return (f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='{size}' font-weight='{weight}' "
            f"text-anchor='{anchor}' fill='{fill}'>{escape(content)}</text>")


def text_width(content: str, size: int = 13) -> float:
    return len(content) * size * 0.58


def fitted(content: str, width: float, size: int = 13) -> str:
    """The text, or its two ends if it is wider than `width` pixels: names differ at either."""
    most = int(width / text_width("x", size))
    if len(content) <= most:
        return content
    head = most // 2
    return content[:head] + "…" + content[len(content) - (most - head - 1) :]


def legend(names: Sequence[str], colour: dict[str, str]) -> tuple[list[str], int]:
    """The colours' names, in as many rows as they need; the number of rows."""
    out, x, row = [], 24.0, 0
    for name in names:
        shown = fitted(name, WIDTH / 2)
        width = 19 + text_width(shown) + 22
        if x + width > WIDTH and x > 24:
            x, row = 24.0, row + 1
        y = 52 + row * LEGEND_HEIGHT
        out.append(f"<rect x='{x:.1f}' y='{y}' width='13' height='13' rx='2' "
                   f"fill='{colour[name]}'/>")
        out.append(text(x + 19, y + 11, shown))
        x += width
    return out, row + 1


def tick_step(end: float) -> float:
    """A round step that gives five to ten ticks."""
    power = 10.0 ** math.floor(math.log10(end / 5))
    return next(power * step for step in (1, 2, 5, 10) if end / (power * step) <= 10)


def axis(end: float, scale: float, top: float, bottom: float, unit: str = "us") -> list[str]:
    out, at, step = [], 0.0, tick_step(end)
    while at <= end * (1 + 1e-9):
        x = LEFT + at * scale
        out.append(f"<line x1='{x:.1f}' y1='{top - 8}' x2='{x:.1f}' y2='{bottom}' "
                   "stroke='#d9dce3' stroke-width='1'/>")
        label = f"{at:g} {unit}" if at == 0 or at + step > end else f"{at:g}"
        out.append(text(x, bottom + 18, label, size=12, anchor="middle", fill="#5b6270"))
        at += step
    return out


def merged(spans: Sequence[Span], scale: float) -> list[Span]:
    """Spans of one lane in order, tiny neighbours of the same stage joined."""
    out: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start_us, s.end_us)):
        last = out[-1] if out else None
        if (last is not None and last.name == span.name
                and (span.start_us - last.end_us) * scale < MIN_PIXELS
                and (span.end_us - span.start_us) * scale < 3):
            out[-1] = Span(last.lane, last.name, last.start_us, max(last.end_us, span.end_us))
        else:
            out.append(span)
    return out


def box(span: Span, y: float, scale: float, colour: str) -> str:
    x, width = LEFT + span.start_us * scale, max((span.end_us - span.start_us) * scale, MIN_PIXELS)
    what = f"{span.name}: {span.end_us - span.start_us:.1f} us"
    drawn = (f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{LANE_HEIGHT}' "
             f"fill='{colour}'><title>{escape(what)}</title></rect>")
    label = f"{span.end_us - span.start_us:.0f}"
    if text_width(label, 11) + 6 < width:
        drawn += text(x + width / 2, y + LANE_HEIGHT / 2 + 4, label, size=11, anchor="middle",
                      fill="#ffffff")
    return drawn


def line(arrow: Arrow, lanes: Sequence[str], top: float, scale: float) -> str:
    """From one lane's edge to the other's, ending in a dot."""
    a, b = lanes.index(arrow.lane), lanes.index(arrow.to_lane)
    down = b > a
    y1 = top + a * (LANE_HEIGHT + LANE_GAP) + (LANE_HEIGHT if down else 0)
    y2 = top + b * (LANE_HEIGHT + LANE_GAP) + (0 if down else LANE_HEIGHT)
    x1, x2 = LEFT + arrow.at_us * scale, LEFT + arrow.to_us * scale
    return (f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='#1f2430' "
            f"stroke-width='1.2'/><circle cx='{x2:.1f}' cy='{y2:.1f}' r='2.5' fill='#1f2430'/>")


def shares(spans: Sequence[Span], lane: str, y: float, colour: dict[str, str]) -> list[str]:
    """A bar that adds up a lane's time per stage, in percent."""
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.name] = totals.get(span.name, 0.0) + span.end_us - span.start_us
    whole = sum(totals.values())
    if whole <= 0:
        return []
    out = [text(LEFT - 12, y + 22, "share of the step", anchor="end"),
           text(LEFT, y - 8, f"{fitted(lane, WIDTH / 2)}: {whole:.0f} us in all", size=12,
                fill="#5b6270")]
    x, width = float(LEFT), WIDTH - LEFT - RIGHT
    for name, total in sorted(totals.items(), key=lambda item: -item[1]):
        part = total / whole * width
        out.append(f"<rect x='{x:.2f}' y='{y}' width='{part:.2f}' height='{LANE_HEIGHT}' "
                   f"fill='{colour[name]}'><title>{escape(name)}: {total:.1f} us</title></rect>")
        label = f"{total / whole * 100:.0f} %"
        if text_width(label, 12) + 6 < part:
            out.append(text(x + part / 2, y + 22, label, size=12, anchor="middle", fill="#ffffff"))
        x += part
    return out
