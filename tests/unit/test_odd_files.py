"""Files that users write or that were damaged: a plan's numbers, a registry's state."""

from __future__ import annotations

import json

import pytest

from expertwire.chaos.plan import parse_plan
from expertwire.errors import ConfigError
from expertwire.registry.roster import Roster

PLAN = {"servers": {"a": "0-15"}, "phases": [{"seconds": 1}]}


@pytest.mark.parametrize(("key", "value"), [
    ("reply_timeout", "x"), ("reply_timeout", 0), ("reply_timeout", True),
    ("reply_timeout", float("nan")), ("max_pause_ms", "x"), ("max_pause_ms", -1),
    ("ratio_within", 1), ("ratio_within", [1]), ("ratio_within", [1, 0.9]),
    ("ratio_within", ["a", "b"]), ("name", 3), ("about", []), ("signal_mode", []),
])
def test_a_plan_names_what_does_not_fit(key, value):
    with pytest.raises(ConfigError, match=f"plan mine: {key}"):
        parse_plan(PLAN | {key: value}, "mine")


def test_a_plan_may_leave_the_deadline_to_the_client():
    assert parse_plan(PLAN | {"reply_timeout": None}, "mine").reply_timeout is None
    assert parse_plan(PLAN | {"reply_timeout": 2}, "mine").reply_timeout == 2


def test_a_plan_may_leave_the_longest_pause_to_the_deadline():
    assert parse_plan(PLAN | {"max_pause_ms": None}, "mine").max_pause_ms is None


@pytest.mark.parametrize("text", [
    '{"epoch": 1e400}', '{"epoch": 1e3}', '{"epoch": -1}', '{"epoch": 1, "next_seat": -5}',
    f'{{"epoch": {1 << 70}}}', '{"epoch": true}', "[" * 100_000,
])
def test_a_damaged_state_is_refused_and_left_as_it_is(tmp_path, text):
    path = tmp_path / "state"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a registry state"):
        Roster(path)
    assert path.read_text() == text


def test_a_state_of_a_clock_ahead_goes_on(tmp_path):
    path = tmp_path / "state"
    path.write_text(json.dumps({"epoch": 1 << 50, "next_seat": 3}))
    assert Roster(path).epoch == (1 << 50) + 1
