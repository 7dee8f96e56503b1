"""What a chaos run may take for a step, and what its picture shows."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest
from tests.docs.test_run_commands import LATE
from tests.shell_lines import ROOT

from expertwire.chaos.load import StepLog
from expertwire.chaos.network import Network
from expertwire.chaos.picture import chaos_svg
from expertwire.chaos.plan import parse_plan
from expertwire.chaos.report import _long_steps, _problems
from expertwire.chaos.run import ChaosRun, Event, Lap
from expertwire.errors import ConfigError

SERVERS = {"a": "0-15", "b": "0-15"}


def phases(*rows):
    """(longest step, deadline, how late the machine was) of each phase, in ms."""
    return [{"name": f"p{i}", "longest_ms": longest, "deadline_ms": deadline,
             "machine_late_ms": late} for i, (longest, deadline, late) in enumerate(rows)]


@pytest.mark.parametrize(("rows", "fixed", "found"), [
    ([(549, 500, 0), (551, 500, 0)], None, ["p1"]),
    ([(551, 500, 2), (560, 500, 2)], None, ["p1"]),
    ([(400, 777, 0), (820, 500, 0), (820, 500, 0)], None, ["p2"]),  # it may have begun in p0
    ([(551, 9000, 99)], 550.0, ["p0"]),
    ([(549, 5, 0)], 550.0, []),
])
def test_a_step_may_take_one_deadline_and_a_resend(rows, fixed, found):
    assert [text.split(":")[0] for text in _long_steps(phases(*rows), fixed)] == found


@pytest.mark.parametrize(("within", "ratio", "ok"), [
    (None, 0.5, True), (None, None, True), ([0.98, 1.02], 1.02, True), ([0.98, 1.02], 0.979, False),
    ([0.98, 1.02], 1.021, False), ([0.98, 1.02], None, False),
])
def test_a_plan_may_ask_for_a_ratio(within, ratio, ok):
    plan = parse_plan({"servers": SERVERS, "phases": [{}], "ratio_within": within}, "mine")
    found = _problems({"steps": 1, "wrong_tokens": 0, "lost_requests": 0, "leaks": 0,
                       "throughput_ratio": ratio, "phases": phases((1, 500, 0))}, plan)
    assert found == ([] if ok else [f"throughput_ratio is {ratio}, not within 0.98 to 1.02"])


def test_a_late_step_is_told_apart_by_those_who_run_the_docs():
    late = _long_steps(phases((551, 500, 2), (560, 500, 2), (561, 500, 0)), None)
    assert len(late) == 2
    for problems, found in ((late[:1], True), (late, True), ([*late, "3 tokens are wrong"], False),
                            (["3 tokens are wrong", *late], False)):
        said = f"12 steps\nverdict: {'; '.join(problems)}\n"
        assert bool(LATE.search(said)) == found, said


def test_a_phase_says_what_is_broken():
    assert Network(way="replies", mtu=64, loss=9).words == "replies: mtu loss"
    assert Network(way="both", hang=("s1", "s2")).words == "both ways: hang s1 s2"
    assert Network(control="partition", reorder=True).words == \
        "requests: reorder, registry: partition"
    plan = parse_plan({"servers": SERVERS, "phases": [
        {"seconds": 1}, {"slow": 0, "seconds": 1}, {"slow": 0.03}]}, "mine")
    assert [p.name for p in plan.phases] == ["calm", "slow 0", "slow 0.03"]
    assert [p.is_calm for p in plan.phases] == [True, False, False]
    for slow in (-0.1, "3 %", True, 11):
        with pytest.raises(ConfigError, match="slow must be from 0 to 10"):
            parse_plan({"servers": SERVERS, "phases": [{"slow": slow}]}, "mine")


def test_a_phase_may_come_several_times():
    content = [{"times": 2}, {"kill": "a"}, {"start": "a", "times": 2}, {"name": "end"}]
    plan = parse_plan({"servers": SERVERS, "rounds": 2, "phases": content}, "mine")
    round_of = ["kill a", "start a", "start a"]
    assert [p.name for p in plan.phases] == ["calm", "calm", *round_of, *round_of, "end"]
    for times in (0, 2.0, True, 1001):
        with pytest.raises(ConfigError, match="times must be"):
            parse_plan({"servers": SERVERS, "phases": [{"times": times}]}, "mine")


def test_any_is_one_of_those_that_run(monkeypatch):
    asked, gone = [], []
    monkeypatch.setattr("expertwire.chaos.run.ask", lambda *what: asked.append(what[-1]))
    plan = parse_plan({"servers": SERVERS, "phases": [{"drain": "any"}, {"drain": "any"}]}, "mine")
    run = ChaosRun(plan, "")
    ended = SimpleNamespace(process=SimpleNamespace(
        wait=lambda _: 0, poll=lambda: None, pid=os.getpid()))
    run.fleet = SimpleNamespace(address="", token=b"", registry=None, forget=gone.append,
                                servers=dict.fromkeys(SERVERS, ended))
    run._running = set(SERVERS)
    load = SimpleNamespace(num_steps=0, broken=None, connected=set, deadline_ms=lambda: 0.0,
                           num_replies=lambda: (0, 0))
    run._phases([load])
    assert sorted(gone) == ["a", "b"] and gone == [order["server_id"] for order in asked]
    with pytest.raises(ConfigError, match="no server runs"):
        run._phases([load])


def test_names_that_mean_something_else_are_refused():
    for change in ({"servers": {"any": "all"}}, {"phases": [{"join": {"registry": "all"}}]},
                   {"phases": [{"network": {"cut": "any"}}]}):
        with pytest.raises(ConfigError, match="no server"):
            parse_plan({"servers": SERVERS, "phases": [{}], **change}, "mine")


def test_the_longest_pause_is_on_top_and_nothing_sticks_out():
    plan = parse_plan({"servers": SERVERS, "phases": [
        {"seconds": 1}, {"network": {"hang": "a"}, "seconds": 1}]}, "mine")
    loads = []
    for started, ended in ((1.1, 2.0), (1.2, 1.9), (2.9, 3.4)):  # the last: beyond the end
        log = StepLog()
        log.add(int(started * 1e9), int(ended * 1e9), 0)
        for k in range(50):  # others, short
            log.add(k * 10**6, (k + 1) * 10**6, 0)
        loads.append(SimpleNamespace(log=log))
    laps = [Lap(plan.phases[0], 0, 10**9), Lap(plan.phases[1], 10**9, 3 * 10**9)]
    events = [Event(10**9, "cut", "a"), Event(2 * 10**9, "mended", "a"),
              Event(22 * 10**8, "ready", "a")]
    run = SimpleNamespace(plan=plan, laps=laps, events=events)
    svg = chaos_svg(run, loads, {"steps": 153, "wrong_tokens": 0, "longest_pause_ms": 900.0})
    for text in ("a serves: 1.00 s", "a cut off: 1.00 s", "a returns: 0.20 s", "a serves: 0.80 s",
                 "requests: hang a: 1.00 s", "500 ms: 0.10 s"):
        assert text in svg, text
    assert svg.index("700 ms: 0.70 s") < svg.index("900 ms: 0.90 s")
    right = max(float(x) + float(width) for x, width in re.findall(
        r"<rect x='([\d.]+)' y='[\d.]+' width='([\d.]+)' height='26'", svg))
    assert right <= 1150.01
    assert "drains" not in svg, "the legend names what is shown"


def test_every_shipped_plan_is_listed_and_documented(capsys):
    from typer.testing import CliRunner

    from expertwire.chaos.plan import load_plan, plan_names
    from expertwire.cli.app import app

    listed = CliRunner().invoke(app, ["chaos", "--list"])
    assert listed.exit_code == 0
    lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
    assert lines == [[name, load_plan(name).about] for name in plan_names()]
    documented = (ROOT / "docs" / "failures.md").read_text()
    assert all(f"| `{name}` |" in documented for name in plan_names())
    assert "--list" in CliRunner().invoke(app, ["chaos"]).output
