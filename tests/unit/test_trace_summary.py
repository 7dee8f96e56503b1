"""What a summary counts: each moment of a call once, for the innermost stage."""

from __future__ import annotations

import pytest

from expertwire.observe.draw import NOTHING
from expertwire.trace.summary import innermost, lines, step_stages, summarise


def stage(name, begin, end, tid=1):
    return {"ph": "X", "cat": "client", "name": name, "pid": 1, "tid": tid, "ts": float(begin),
            "dur": float(end - begin), "args": {}}


CALL = [stage("moe", 0, 100), stage("send", 10, 50), stage("route", 12, 20), stage("put", 20, 45),
        stage("wait", 55, 80), stage("combine", 80, 95)]
OWN = {NOTHING: 20, "send": 7, "route": 8, "put": 25, "wait": 25, "combine": 15}


def test_every_moment_is_the_innermost_stages():
    pieces = innermost(CALL)
    assert [p["name"] for p in pieces] == [
        NOTHING, "send", "route", "put", "send", NOTHING, "wait", "combine", NOTHING]
    at = 0.0
    for piece in pieces:
        assert piece["ts"] == at and piece["dur"] > 0
        at += piece["dur"]
    assert at == 100


def test_slices_that_begin_or_end_together():
    nested = [stage("moe", 0, 10), stage("send", 0, 10), stage("put", 5, 10), stage("wait", 12, 15)]
    assert [(p["name"], p["ts"], p["dur"]) for p in innermost(nested)] == [
        ("send", 0, 5), ("put", 5, 5), ("wait", 12, 3)]


def test_a_steps_stages_add_up_to_it():
    other = [stage("moe", 200, 210), stage("moe", 30, 60, tid=2), stage("send", 30, 60, tid=2)]
    outside = stage("send", 150, 160)  # of a dispatch: in no call
    steps = step_stages([*CALL, outside, *other])
    assert steps["count"] == 2 and steps["total"]["total_us"] == 130
    found = {name: numbers["total_us"] for name, numbers in steps["stages"].items()}
    assert found == {**OWN, "send": OWN["send"] + 30}
    shares = sum(numbers["share"] for numbers in steps["stages"].values())
    assert shares == pytest.approx(1, abs=1e-3)


def test_the_summary_says_so_in_lines():
    text = "\n".join(lines(summarise(CALL)))
    assert "a step, by the stage it is in" in text and NOTHING in text
