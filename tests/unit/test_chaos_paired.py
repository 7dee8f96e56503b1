"""What failures cost, against a twin: told apart from what the machine does to both."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from expertwire.chaos.load import StepLog
from expertwire.chaos.paired import paired_figures, shift
from expertwire.chaos.plan import parse_plan
from expertwire.errors import ConfigError

SERVERS = {"a": "0-15", "b": "0-15"}
PHASES = [{"seconds": 5}, {"seconds": 3}, {"kill": "a", "seconds": 3},
          {"start": "a", "seconds": 3}, {"seconds": 5}]
PLAN = {"servers": SERVERS, "twin": True, "rounds": 5, "phases": PHASES}


def made_up(hurt=1.0, after=1.0, noise=0.3, seed=1):
    """(run, load) of a machine that becomes three times slower and back; a step of the hurt system
    takes `hurt` times as long in failures, `after` times as long once there was one."""
    generator = np.random.default_rng(seed)
    plan, now, failed = parse_plan(PLAN, "mine"), 0.0, False
    load = SimpleNamespace(twin=object(), log=StepLog(), twin_log=StepLog())
    laps = []
    for phase in plan.phases:
        failed |= not phase.is_calm
        begin, factor = now, (after if failed else 1.0) * (1.0 if phase.is_calm else hurt)
        while now < begin + phase.seconds:
            step = 0.004 * (2 + np.sin(now / 7)) * (1.5 if phase.starts_processes else 1)
            ms = step * factor * np.exp(generator.normal(0, noise)), \
                step * np.exp(generator.normal(0, noise))
            if not load.log.ended_ns or (generator.random() < 0.002 and failed):
                ms = (0.3, ms[1])  # a pause
            for log, seconds in zip((load.log, load.twin_log), ms, strict=True):
                cpu = generator.normal(1e6, 3e4) * (factor if log is load.log else 1)
                log.add(int(now * 1e9), int((now + seconds) * 1e9), int(cpu))
                now += seconds
        lap = SimpleNamespace(phase=phase, begin_ns=int(begin * 1e9), end_ns=int(now * 1e9),
                              steady_ns=int(begin * 1e9), cpu_ns=(0, 0),
                              replies=(404 if failed else 400, 400))
        if not phase.starts_processes:
            num_steps = sum(at >= lap.begin_ns for at in load.log.ended_ns)
            lap.cpu_ns = int(4e6 * num_steps * factor), int(4e6 * num_steps)
        laps.append(lap)
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
        assert low < found["throughput_ratio"] < high < low + 0.09
        assert (low < 1 < high) == (hurt == 1.0)
    low, high = found["recovered_interval"]
    assert low < 1 / after < high < low + 0.14
    if after == 1.0:
        assert found["cpu_ratio"] == pytest.approx(1 / hurt, abs=0.01)
        assert found["cpu_interval"][1] - found["cpu_interval"][0] < 0.03
    assert found["cpu_recovered"] == pytest.approx(1 / after, abs=0.02)
    assert found["recovered_messages"] == 1.01
    assert found["twin_ratios"] == pytest.approx([1.0, 1 / after], abs=0.06)
    assert found["starting_slowdown"] > 1.1, "the twin pays for the processor, too"


def test_too_little_says_nothing():
    run, load = made_up()
    run.laps = run.laps[:1]
    found = paired_figures(run, [load], 100.0)
    assert found["throughput_ratio"] is None and found["throughput_interval"] is None
    assert found["recovered_ratio"] is None and found["pairs"]["hurt"] == 0


@pytest.mark.parametrize("truth", [0.0, -0.03])
def test_the_interval_holds_what_is_true(truth):
    """Nineteen times in twenty, with tails and with spans that have something in common."""
    generator, inside = np.random.default_rng(5), 0
    for _ in range(40):
        spans = [[generator.standard_t(2, 80) * 0.2 + generator.normal(0, 0.03) + extra
                  for _ in range(30)] for extra in (truth, 0.0)]
        ratio, (low, high) = shift(*spans)
        assert low < ratio < high < low + 0.06
        inside += low < np.exp(truth) < high
    assert inside >= 33, "of 40 intervals of 95 %; fewer: once in some thousand seeds"


def test_rounds_repeat_all_but_the_ends():
    plan = parse_plan(PLAN, "mine")
    names = [phase.name for phase in plan.phases]
    assert names == ["calm", *["calm", "kill a", "start a"] * 5, "calm"] and plan.twin
    for change, text in (({"rounds": 0}, "rounds must be"), ({"twin": 3}, "twin is true"),
                         ({"rounds": 10**12}, "at most 1000")):
        with pytest.raises(ConfigError, match=text):
            parse_plan(PLAN | change, "mine")
