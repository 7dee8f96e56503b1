"""The order in which experts are added and removed: nobody is ever without a server."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from expertwire.registry.rebalance import plan_rebalance
from expertwire.registry.rebalance_apply import removals, wave


@st.composite
def systems(draw):
    """(held, target, room): a placement that covers all experts, and a plan for measured loads."""
    num_experts, num_servers = draw(st.integers(1, 16)), draw(st.integers(1, 6))
    names = [f"s{i}" for i in range(num_servers)]
    held = {n: draw(st.sets(st.integers(0, num_experts - 1))) for n in names}
    for expert in set(range(num_experts)) - set(itertools.chain(*held.values())):
        held[draw(st.sampled_from(names))].add(expert)
    held = {n: experts or {0} for n, experts in held.items()}
    rows = draw(st.lists(st.floats(0, 1e6), min_size=num_experts, max_size=num_experts))
    least = max(-(-num_experts // num_servers), 1)
    room = {n: max(least, len(held[n])) + draw(st.integers(0, 3)) for n in names}
    plan = plan_rebalance(held, rows, room)
    return held, {n: set(e) or {0} for n, e in plan.experts.items()}, room


def run(held, target, room, fails=None):
    """Carries out all waves and checks each state. fails: a server that cannot load anything."""
    everything = set(itertools.chain(*held.values()))
    for _ in range(1000):
        changes = wave(held, target, room)
        if not changes:
            return held
        for name, experts in changes.items():
            if name == fails and experts - held[name]:
                del target[name]
                continue
            for other in held[name] - experts:  # as the registry refuses it
                assert any(other in held[n] for n in held if n != name)
            held = {**held, name: set(experts)}
            assert set(itertools.chain(*held.values())) == everything, "an expert without a server"
            assert len(held[name]) <= room[name] + 1
    raise AssertionError("it does not come to an end")


@given(systems())
def test_waves_end_at_the_plan_and_no_expert_is_ever_without_a_server(system):
    held, target, room = system
    assert run(held, dict(target), room) == target


@given(systems(), st.data())
def test_a_server_that_cannot_load_stops_nobody(system, data):
    held, target, room = system
    fails = data.draw(st.sampled_from(sorted(held)))
    run(held, dict(target), room, fails)


def test_the_last_two_replicas_are_not_removed_at_once():
    held = {"a": {0, 1}, "b": {0, 2}}
    assert removals(held, {"a": {1}, "b": {2}}) == {"a": {1}}


def test_full_servers_swap_one_expert_at_a_time():
    held, target = {"a": {0, 1, 2}, "b": {3, 4, 5}}, {"a": {3, 4, 5}, "b": {0, 1, 2}}
    first = wave(held, target, {"a": 3, "b": 3})
    assert first == {"a": {0, 1, 2, 3}, "b": {0, 3, 4, 5}}
    assert wave(first, target, {"a": 3, "b": 3}) == {"a": {1, 2, 3}, "b": {0, 4, 5}}
