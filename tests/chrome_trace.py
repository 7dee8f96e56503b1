"""What a viewer of Chrome traces requires of a file, checked strictly."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

SLACK_US = 0.002  # times are ns, written as fractions of us


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, which must be a well-formed one."""
    facts = json.loads(path.read_text(), parse_constant=lambda name: 1 / 0)  # no NaN, no Infinity
    assert set(facts) == {"traceEvents", "displayTimeUnit"}
    check(facts["traceEvents"])
    return facts["traceEvents"]


def check(events: list[dict[str, Any]]) -> None:
    tracks: dict[tuple[int, int], list[dict]] = defaultdict(list)
    flows: dict[int, list[dict]] = defaultdict(list)
    named, processes = set(), set()
    for event in events:
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["name"], str) and event["name"]
        if event["ph"] == "M":
            assert event["args"]["name"]
            (processes if event["name"] == "process_name" else named).add(
                event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            )
            continue
        assert event["ts"] >= 0 and event["cat"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
        else:
            assert event["ph"] in "stf" and event["bp"] == "e"
            flows[event["id"]].append(event)
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times)
    for track, slices in tracks.items():
        assert track in named or any(e["cat"] == "span" for e in slices), f"{track} has no name"
        assert track[0] in processes
        check_nesting(slices)
    for steps in flows.values():
        check_flow(steps, tracks)


def check_nesting(slices: list[dict]) -> None:
    """Slices of one track lie in or after each other: a viewer drops what overlaps.

    It takes them as they come: of two that begin together the outer one is the first.
    """
    assert slices == sorted(slices, key=lambda e: (e["ts"], -e["dur"]))
    open_ends: list[float] = []
    for e in slices:
        while open_ends and open_ends[-1] <= e["ts"] + SLACK_US:
            open_ends.pop()
        end = e["ts"] + e["dur"]
        inside = not open_ends or end <= open_ends[-1] + SLACK_US
        assert inside, f"{e['name']} at {e['ts']} overlaps"
        open_ends.append(end)


def check_flow(steps: list[dict], tracks: dict[tuple[int, int], list[dict]]) -> None:
    """One beginning, one end, forward in time, each inside of a slice."""
    assert [s["ph"] for s in steps] == ["s", *["t"] * (len(steps) - 2), "f"]
    for before, after in itertools.pairwise(steps):
        assert before["ts"] <= after["ts"]
    for step in steps:
        assert any(e["ts"] - SLACK_US <= step["ts"] <= e["ts"] + e["dur"] + SLACK_US
                   for e in tracks[step["pid"], step["tid"]]), "an arrow that touches no slice"


def slices(events: list[dict], name: str) -> list[dict]:
    return [e for e in events if e["ph"] == "X" and e["name"] == name]
