"""Plans for measured loads: everything is held, hot experts are on more servers, little moves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.errors import ConfigError
from expertwire.registry.rebalance import (
    imbalance,
    measured_rows,
    num_replicas,
    plan_lines,
    plan_rebalance,
)


def test_places_go_to_the_hottest_expert_per_replica():
    assert num_replicas([8, 4, 1, 1], 4, 4) == [1, 1, 1, 1]
    assert num_replicas([8, 4, 1, 1], 5, 4) == [2, 1, 1, 1]
    assert num_replicas([8, 4, 1, 1], 7, 4) == [3, 2, 1, 1]
    assert num_replicas([100, 1, 1], 6, 2) == [2, 2, 2], "no server holds an expert twice"
    assert num_replicas([1.0, 1.0], 100, 3) == [3, 3]
    with pytest.raises(ConfigError, match="3 experts do not fit 2 places"):
        num_replicas([1, 1, 1], 2, 1)


def test_a_hot_expert_gets_replicas_and_a_cold_one_loses_them():
    held = {"a": [0, 1, 2], "b": [1, 2, 3], "c": [3, 4, 5]}
    plan = plan_rebalance(held, [900, 10, 10, 10, 10, 10])
    holders = [sum(e in x for x in plan.experts.values()) for e in range(6)]
    assert holders[0] == 3 and min(holders) == 1
    assert imbalance(plan.loads) < 1.1 < imbalance(plan.loads_before)
    assert plan.loads_before["a"] == 900 + 5 + 5
    text = "\n".join(plan_lines(plan))
    assert "add 0" in text and "busiest server over mean: 2.87 -> 1.0" in text


def test_an_even_load_moves_nothing():
    held = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
    plan = plan_rebalance(held, [5.0] * 6)
    assert plan.experts == held
    assert not any(plan.added.values()) and not any(plan.removed.values())
    idle = plan_rebalance(held, [0.0] * 6)
    assert idle.experts == held and imbalance(idle.loads) == 1.0


def test_more_room_is_used():
    plan = plan_rebalance({"a": [0], "b": [1]}, [10, 2], {"a": 1, "b": 2})
    assert plan.experts == {"a": [0], "b": [0, 1]}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_plan_holds_everything_and_fits(data):
    num_experts = data.draw(st.integers(1, 40))
    num_servers = data.draw(st.integers(1, 9))
    rows = data.draw(st.lists(st.floats(0, 1e6), min_size=num_experts, max_size=num_experts))
    names = [f"s{i}" for i in range(num_servers)]
    held = {n: sorted(data.draw(st.sets(st.integers(0, num_experts - 1)))) for n in names}
    least = -(-num_experts // num_servers)
    places = {n: data.draw(st.integers(least, num_experts + 3)) for n in names}
    plan = plan_rebalance(held, rows, places)
    assert set(itertools.chain(*plan.experts.values())) == set(range(num_experts))
    for name in names:
        experts = plan.experts[name]
        assert len(experts) == len(set(experts)) <= places[name]
        assert set(held[name]) - set(plan.removed[name]) | set(plan.added[name]) == set(experts)
        assert not set(plan.added[name]) & set(held[name])
    assert sum(plan.loads.values()) == pytest.approx(sum(rows))
    assert plan == plan_rebalance(held, rows, places), "the same plan every time"


def test_skewed_loads_become_nearly_even():
    """64 experts, Zipf: 8 servers with 12 places each, against one placement without replicas."""
    rows = [1e5 / (i + 1) for i in range(64)]
    held = {f"s{i}": list(range(i * 8, i * 8 + 8)) for i in range(8)}
    plan = plan_rebalance(held, rows, dict.fromkeys(held, 12))
    assert imbalance(plan.loads_before) > 4 and imbalance(plan.loads) < 1.15


def test_rows_are_added_up_over_servers():
    servers = [
        {"experts": [0, 2], "stats": {"expert_rows": [5, 7]}},
        {"experts": [1, 2], "stats": {"expert_rows": [1, 2]}}, {"experts": [3], "stats": {}},
        {"experts": [0], "stats": {"row_experts": [0, 3], "expert_rows": [10, 20]}},  # dropped 3
    ]
    assert measured_rows(servers, 4) == [15, 1, 9, 20]


def test_the_command_measures_and_plans(capsys, monkeypatch):
    from tests.system.cluster import TOKEN, batch, cluster, model_facts

    from expertwire.registry.rebalance import run_rebalance

    monkeypatch.setenv("EXPERTWIRE_TOKEN", TOKEN.decode())
    model = model_facts(num_experts=6)
    with cluster([[0, 1, 2, 3], [3, 4, 5]], model) as (client, servers, registry):
        registry.lease_seconds = 0.2
        for server in servers:  # statistics come soon
            registry.members[server.server_id].stats = {}
        hidden, ids, weights = batch(30, model)
        ids[:] = 0

        def work(seconds: float) -> None:
            for _ in range(20):
                client.moe(0, hidden, ids, weights)
            for server in servers:
                registry.members[server.server_id].stats = server.stats()

        result = run_rebalance(
            registry.address, seconds=0.1, places=5, dry_run=True, sleep=work
        )
        assert result["rows"] == [20 * 60, 0, 0, 0, 0, 0]
        assert 0 in result["servers"]["s1"]["add"]
        assert result["imbalance_before"] == 2.0 and result["imbalance"] == 1.0
        assert "s1: add 0" in capsys.readouterr().out
