"""What failures cost, against a twin: told apart from what the machine does to both."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from expertwire.chaos.paired import paired_figures
from expertwire.chaos.plan import parse_plan
from expertwire.errors import ConfigError

SERVERS = {"a": "0-15", "b": "0-15"}
PHASES = [{"seconds": 8}, {"kill": "a", "seconds": 4}, {"start": "a", "seconds": 4},
          {"seconds": 4}, {"seconds": 8}]
PLAN = {"servers": SERVERS, "twin": True, "rounds": 3, "phases": PHASES}


def made_up(hurt=1.0, after=1.0, noise=0.3, seed=1):
    """(run, load) of a machine that becomes three times slower and back; a step of the hurt system
    takes `hurt` times as long in failures, `after` times as long once there was one."""
    generator = np.random.default_rng(seed)
    plan, now, failed = parse_plan(PLAN, "mine"), 0.0, False
    load = SimpleNamespace(twin=object(), started_ns=array("q"), ended_ns=array("q"),
                           twin_started_ns=array("q"), twin_ended_ns=array("q"))
    laps = []
    for phase in plan.phases:
        failed |= not phase.is_calm
        begin, factor = now, (after if failed else 1.0) * (1.0 if phase.is_calm else hurt)
        while now < begin + phase.seconds:
            step = 0.004 * (2 + np.sin(now / 7)) * (1.5 if phase.starts_processes else 1)
            ms = step * factor * np.exp(generator.normal(0, noise)), \
                step * np.exp(generator.normal(0, noise))
            if not load.ended_ns or (generator.random() < 0.002 and failed):
                ms = (0.3, ms[1])  # a pause
            for kind, seconds in zip(("", "twin_"), ms, strict=True):
                getattr(load, f"{kind}started_ns").append(int(now * 1e9))
                now += seconds
                getattr(load, f"{kind}ended_ns").append(int(now * 1e9))
        laps.append(SimpleNamespace(phase=phase, begin_ns=int(begin * 1e9), end_ns=int(now * 1e9)))
    return SimpleNamespace(laps=laps), load


def figures(**what):
    run, load = made_up(**what)
    return paired_figures(run, [load], pause_ms=100.0)


@pytest.mark.parametrize(("hurt", "after"), [(1.0, 1.0), (1.1, 1.0), (0.9, 1.0), (1.0, 1.1)])
def test_a_loss_is_found_under_a_machine_that_changes_more(hurt, after):
    found = figures(hurt=hurt, after=after)
    if after == 1.0:
        assert found["throughput_ratio"] == pytest.approx(1 / hurt, abs=0.03)
        low, high = found["throughput_interval"]
        assert low < found["throughput_ratio"] < high < low + 0.08
        assert (low < 1 < high) == (hurt == 1.0)
    assert found["recovered_ratio"] == pytest.approx(1 / after, abs=0.04)
    assert found["starting_slowdown"] > 1.1, "the twin pays for the processor, too"


def test_too_little_says_nothing():
    run, load = made_up()
    run.laps = run.laps[:1]
    found = paired_figures(run, [load], 100.0)
    assert found["throughput_ratio"] is None and found["throughput_interval"] is None
    assert found["recovered_ratio"] is None and found["spans"]["hurt"] == 0


def test_rounds_repeat_all_but_the_ends():
    plan = parse_plan(PLAN, "mine")
    names = [phase.name for phase in plan.phases]
    assert names == ["calm", *["kill a", "start a", "calm"] * 3, "calm"] and plan.twin
    for change, text in (({"rounds": 0}, "rounds must be"), ({"twin": 3}, "twin is true")):
        with pytest.raises(ConfigError, match=text):
            parse_plan(PLAN | change, "mine")
