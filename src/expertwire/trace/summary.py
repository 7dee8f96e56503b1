"""Where the time of a trace went: per process and stage, per step of a message's way, and a picture
of the median batch."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..observe.draw import NOTHING, Arrow, Span, draw_step
from .file import parts_folder

Event = dict[str, Any]
# What a message waits for, between two points of its way: (name, step that ends it, at its end?)
PHASES = (
    ("put, HCA writes the request", "hca request", True),
    ("until the server polls", "poll", False),
    ("poll, gather", "experts", False),
    ("experts", "experts", True),
    ("reply, HCA writes it", "hca reply", True),
    ("until all replies are in", "combine", False),
    ("combine", "combine", True),
)
SLICE_HAS = {"name", "cat", "ts", "dur", "pid", "tid", "args"}
STEP = "moe"  # a call of Client.moe
STEP_OF_SLICE = ("put", "poll", "experts", "reply", "combine")


def load_trace(path: str | Path) -> list[Event]:
    """The events of a trace file; its parts are merged first if there are some.

    Raises ConfigError for a file that is no trace.
    """
    path = Path(path).absolute()
    if parts_folder(path).is_dir() and any(parts_folder(path).glob("*.part")):
        from .chrome import merge

        merge(path)
    try:
        events = json.loads(path.read_text())["traceEvents"]
        for number, event in enumerate(events):
            if event["ph"] == "X":
                check_slice(event)
            elif event["ph"] == "M" and event["name"] == "process_name":
                assert isinstance(event["args"]["name"], str), f"event {number} names no process"
    except OSError as err:
        raise ConfigError(f"no trace at {path}: {err.strerror}; EXPERTWIRE_TRACE={path} in front "
                          "of a command makes one") from err
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as err:
        raise ConfigError(f"{path} is not a trace of ours: {err}") from err
    return events


def check_slice(event: Event) -> None:
    """What is read of a slice below. Raises AssertionError."""
    assert event.keys() >= SLICE_HAS, f"a slice has not all of {', '.join(sorted(SLICE_HAS))}"
    name, args = event["name"], event["args"]
    assert isinstance(name, str) and isinstance(event["cat"], str), f"slice {name!r}: its name"
    assert all(isinstance(event[key], int | float) and math.isfinite(event[key])
               for key in ("ts", "dur")), f"slice {name!r}: its times"
    assert all(isinstance(event[key], int | str) for key in ("pid", "tid")), \
        f"slice {name!r}: its thread"
    assert isinstance(args, dict) and isinstance(args.get("moved", 0), int), \
        f"slice {name!r}: its args"
    messages = args.get("messages", [])
    assert isinstance(messages, list), f"slice {name!r}: its messages"
    ids = [m.get("id") if isinstance(m, dict) else m for m in messages]
    if event["cat"] == "hca" and "message" in args:
        ids += [args["message"], args.get("of")]
    assert all(isinstance(i, str) for i in ids), f"slice {name!r}: its messages"
    assert name != "combine" or not messages or "layer" in args, f"slice {name!r}: its layer"


def summarise(events: Sequence[Event]) -> dict[str, Any]:
    """{"seconds", "processes": {name: {stage: ...}}, "steps", "messages", "hca"}.

    Times in us; a stage's share is of the whole trace's time, in `steps` (see `step_stages`) and
    `messages` ({"count", "total", "phases"}) of theirs.
    """
    slices = [e for e in events if e["ph"] == "X"]
    if not slices:
        raise ConfigError("the trace has no slice: nothing was traced")
    begin = min(e["ts"] for e in slices)
    length = max(e["ts"] + e["dur"] for e in slices) - begin
    names = process_names(events)
    stages: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    queues: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for e in slices:
        process = names.get(e["pid"], str(e["pid"]))
        stages[process]["HCA " + e["name"] if e["cat"] == "hca" else e["name"]].append(e["dur"])
        if e["cat"] == "hca":
            queues[process]["entries"] += 1
            queues[process]["bytes"] += e["args"].get("moved", 0)
            queues[process]["busy_us"] += e["dur"]
            queues[process]["errors"] += "error" in e["args"]
    return {
        "seconds": round(length / 1e6, 6),
        "processes": {process: {stage: numbers(durations, length)
                                for stage, durations in sorted(found.items(),
                                                               key=lambda item: -sum(item[1]))}
                      for process, found in stages.items()},
        "steps": step_stages(slices),
        "messages": message_phases(slices),
        "hca": {process: {k: round(v, 1) for k, v in found.items()}
                for process, found in queues.items()},
    }


def process_names(events: Sequence[Event]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events
            if e["ph"] == "M" and e["name"] == "process_name"}


def numbers(durations: Sequence[float], whole: float) -> dict[str, float]:
    p50, p99 = np.percentile(durations, (50, 99))
    total = sum(durations)
    return {"count": len(durations), "total_us": round(total, 1), "p50_us": round(float(p50), 1),
            "p99_us": round(float(p99), 1), "share": round(total / whole, 4) if whole else 0.0}


def ways(slices: Sequence[Event]) -> dict[str, dict[str, Event]]:
    """message -> step of its way -> slice."""
    found: dict[str, dict[str, Event]] = defaultdict(dict)
    for e in slices:
        for message in e["args"].get("messages", ()):
            name = message["id"] if isinstance(message, dict) else message
            if e["name"] in STEP_OF_SLICE:
                found[name].setdefault(e["name"], e)
        if e["cat"] == "hca" and "message" in e["args"]:
            found[e["args"]["message"]]["hca " + e["args"]["of"]] = e  # the last is the flag
    return found


def step_stages(slices: Sequence[Event]) -> dict[str, Any]:
    """{"count", "total", "stages"}: the calls of `Client.moe` in which something was sent.

    Of a stage counts what no stage inside of it accounts for, so that the stages of a call add up
    to it: `send` is around route, pack and put, and what is left of the call itself is between
    stages.
    """
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for e in slices:
        if e["cat"] == "client":
            threads[e["pid"], e["tid"]].append(e)
    stages: dict[str, list[float]] = defaultdict(list)
    totals: list[float] = []
    for found in threads.values():
        found.sort(key=lambda e: (e["ts"], -e["dur"]))
        for i, step in enumerate(found):
            if step["name"] != STEP:
                continue
            end = step["ts"] + step["dur"]
            inside = list(itertools.takewhile(lambda e, end=end: e["ts"] < end, found[i:]))
            own: dict[str, float] = defaultdict(float)
            for e in innermost(inside):
                own[e["name"]] += e["dur"]
            if own.keys() == {NOTHING}:
                continue  # no row, or the call failed at once
            totals.append(step["dur"])
            for name, us in own.items():
                stages[name].append(us)
    whole = sum(totals)
    return {"count": len(totals), **({"total": numbers(totals, whole)} if totals else {}),
            "stages": {name: numbers(found, whole) for name, found in
                       sorted(stages.items(), key=lambda item: -sum(item[1]))}}


def innermost(nested: Sequence[Event]) -> list[Event]:
    """Which slice of a thread is the innermost one, piece by piece; a call's own are NOTHING.

    nested: by beginning, each in or after the ones before it.
    """
    pieces: list[Event] = []
    around: list[Event] = []
    at = 0.0

    def until(end: float) -> None:
        nonlocal at
        if around and end > at:
            name = NOTHING if around[-1]["name"] == STEP else around[-1]["name"]
            pieces.append({"cat": "client", "name": name, "ts": at, "dur": end - at})
        at = max(at, end)

    for e in nested:
        while around and around[-1]["ts"] + around[-1]["dur"] <= e["ts"]:
            until(around[-1]["ts"] + around[-1]["dur"])
            around.pop()
        until(e["ts"])
        around.append(e)
    while around:
        until(around[-1]["ts"] + around[-1]["dur"])
        around.pop()
    return pieces


def message_phases(slices: Sequence[Event]) -> dict[str, Any]:
    """How long the messages spent between the points of their way, as far as they were traced."""
    phases: dict[str, list[float]] = defaultdict(list)
    totals: list[float] = []
    for way in ways(slices).values():
        if not {"put", "poll", "combine"} <= way.keys():
            continue  # of a process that was not traced, or that ended on the way
        begin = at = way["put"]["ts"]
        for name, step, at_end in PHASES:
            event = way.get(step) or way.get({"hca request": "put", "hca reply": "reply",
                                              "experts": "poll"}.get(step, ""))
            if event is None:
                continue
            reached = max(at, event["ts"] + (event["dur"] if at_end or (step == "experts"
                                             and event["name"] == "poll") else 0))
            phases[name].append(reached - at)
            at = reached
        totals.append(at - begin)
    whole = sum(totals)
    return {
        "count": len(totals),
        **({"total": numbers(totals, whole)} if totals else {}),
        "phases": {name: numbers(phases[name], whole) for name, _, _ in PHASES if phases[name]},
    }


def lines(summary: dict[str, Any]) -> list[str]:
    """The summary as text."""
    out = [f"{summary['seconds']:.3f} s"]
    for process, stages in summary["processes"].items():
        out += ["", f"{process:<34}{'count':>8}{'total ms':>11}{'p50 us':>10}{'p99 us':>10}"
                    f"{'of all':>8}"]
        out += [row(stage, found) for stage, found in stages.items()]
        queue = summary["hca"].get(process)
        if queue:
            out.append(f"  {int(queue['entries'])} work-queue entries, "
                       f"{queue['bytes'] / 1e6:.2f} MB, {int(queue['errors'])} errors")
    if steps := summary["steps"]["stages"]:
        out += ["", f"{'a step, by the stage it is in':<34}{'count':>8}{'total ms':>11}"
                    f"{'p50 us':>10}{'p99 us':>10}{'of it':>8}"]
        out += [row(name, found) for name, found in steps.items()]
        out.append(row("all of it", summary["steps"]["total"]))
    messages = summary["messages"]
    out += ["", f"{'a message, put to combine':<34}{'count':>8}{'total ms':>11}{'p50 us':>10}"
                f"{'p99 us':>10}{'of it':>8}"]
    out += [row(name, found) for name, found in messages["phases"].items()]
    if "total" in messages:
        out.append(row("all of it", messages["total"]))
    return out


def row(name: str, found: dict[str, float]) -> str:
    return (f"  {name:<32}{found['count']:>8}{found['total_us'] / 1000:>11.2f}"
            f"{found['p50_us']:>10.1f}{found['p99_us']:>10.1f}{100 * found['share']:>7.1f}%")


def draw_median(events: Sequence[Event], path: str | Path) -> dict[str, Any] | None:
    """Draws the batch whose time is the median; None if the trace has no whole batch.

    Returns {"path", "us", "layer"}.
    """
    slices = [e for e in events if e["ph"] == "X"]
    combines = [e for e in slices if e["name"] == "combine" and e["args"].get("messages")]
    by_message = ways(slices)
    batches = []
    for combine in combines:
        way = by_message[combine["args"]["messages"][0]]
        if "put" in way:
            batches.append((combine["ts"] + combine["dur"] - way["put"]["ts"], combine, way["put"]))
    if not batches:
        return None
    batches.sort(key=lambda batch: batch[0])
    _, combine, put = batches[len(batches) // 2]
    thread = [e for e in slices if (e["pid"], e["tid"]) == (put["pid"], put["tid"])]
    send = max((e for e in thread if e["name"] == "send" and e["ts"] <= put["ts"]),
               key=lambda e: e["ts"], default=put)
    begin, end = send["ts"], combine["ts"] + combine["dur"]
    spans, arrows = picture(slices, by_message, events, combine["args"]["messages"], begin, end,
                            (put["pid"], put["tid"]))
    layer = combine["args"]["layer"]
    draw_step(path, spans, f"The median batch of the trace: layer {layer}, {end - begin:.0f} us",
              arrows)
    return {"path": str(Path(path).absolute()), "us": round(end - begin, 1), "layer": layer}


def picture(
    slices: Sequence[Event], by_message: dict[str, dict[str, Event]], events: Sequence[Event],
    messages: Sequence[str], begin: float, end: float, client: tuple[int, int],
) -> tuple[list[Span], list[Arrow]]:
    """Lanes: the client and its HCA, then each server of the batch and its HCA."""
    names = process_names(events)
    own: list[Event] = [e for e in slices if (e["pid"], e["tid"]) == client
                        and e["cat"] == "client" and begin <= e["ts"] < end]
    own.append({"name": STEP, "ts": begin, "dur": end - begin})  # what is between stages is drawn
    own.sort(key=lambda e: (e["ts"], -e["dur"]))
    lanes: dict[str, list[Event]] = {"client": innermost(own), "client's HCA": []}
    arrows: list[tuple[str, float, str, float]] = []
    for message in messages:
        way = by_message[message]
        if "poll" not in way:
            continue
        poll = way["poll"]
        lane = names.get(poll["pid"], "server")
        if poll["pid"] == client[0]:
            lane = "server " + message.split(".")[1]
        lanes.setdefault(lane, []).extend(
            e for e in slices if (e["pid"], e["tid"]) == (poll["pid"], poll["tid"])
        )
        arrows.append((lane, poll["ts"], "put", way["put"]["ts"] + way["put"]["dur"]))
        for step, where in (("hca request", "client's HCA"), ("hca reply", f"{lane}'s HCA")):
            lanes.setdefault(where, []).extend(
                e for e in slices if step in way and e["cat"] == "hca"
                and e["args"].get("message") == message and e["pid"] == way[step]["pid"]
                and e["tid"] == way[step]["tid"]
            )
        if "reply" in way:
            arrows.append((lane, way["reply"]["ts"] + way["reply"]["dur"], "combine",
                           way["combine"]["ts"]))
    spans = [
        Span(lane, "HCA writes" if e["cat"] == "hca" else e["name"], max(e["ts"], begin) - begin,
             min(e["ts"] + e["dur"], end) - begin)
        for lane, found in lanes.items() for e in found
        if e["ts"] < end and e["ts"] + e["dur"] > begin
    ]
    lines_drawn = [
        Arrow("client", at - begin, lane, max(server_at, at) - begin) if what == "put"
        else Arrow(lane, server_at - begin, "client", max(at, server_at) - begin)
        for lane, server_at, what, at in arrows
    ]
    shown = {span.lane for span in spans}
    return spans, [a for a in lines_drawn if a.lane in shown and a.to_lane in shown]
