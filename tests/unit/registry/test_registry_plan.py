"""The plan for `--experts auto`: no expert forgotten, none planned for the dead."""

from __future__ import annotations

import time

import pytest
from tests.registry_peers import model_facts

from expertwire.registry import roster


@pytest.mark.parametrize("num_servers", [1, 3, 5, 7])
def test_servers_that_plan_at_the_same_moment_share_all_experts(peer, num_servers):
    model = model_facts(num_experts=256)
    planners = [peer() for _ in range(num_servers)]
    for planner in planners:  # all ask before any gets its answer
        planner.channel.send({"type": "plan", "model": model, "num_servers": num_servers})
    shares = [planner.channel.recv(3)[0]["experts"] for planner in planners]
    assert sorted(e for share in shares for e in share) == list(range(256))
    for i, (planner, share) in enumerate(zip(planners, shares, strict=True)):
        planner.register(f"s{i}", model=model, experts=share)


@pytest.mark.parametrize("num_servers", [1, 3, 5, 7])
def test_incremental_plans_leave_no_expert_without_a_holder(peer, reg, num_servers):
    model = model_facts(num_experts=256)
    for i in range(num_servers):
        server = peer()
        share = server.ask("plan", model=model)["experts"]
        server.register(f"s{i}", model=model, experts=share)
        held = {e for m in reg.members.values() for e in m.facts["experts"]}
        assert held == set(range(256))


def test_the_share_of_a_server_that_died_while_loading_is_planned_again(peer, monkeypatch):
    monkeypatch.setattr(roster, "PLAN_GRACE_SECONDS", 0.2)
    model, dying, living, late = model_facts(num_experts=8), peer(), peer(), peer()
    lost = dying.ask("plan", model=model, num_servers=2)["experts"]
    kept = living.ask("plan", model=model, num_servers=2)["experts"]
    time.sleep(0.4)
    again = late.ask("plan", model=model, num_servers=2)["experts"]
    assert set(lost) | set(kept) == set(range(8)), "loading may take longer than the grace"
    late.close()
    dying.close()
    time.sleep(0.4)
    living.register("living", model=model, experts=kept)
    replacement = peer()
    assert replacement.ask("plan", model=model, num_servers=2)["experts"] == lost
    assert again  # the one that was too many got something, too


def test_a_plan_whose_connection_just_ended_still_counts(peer):
    model = model_facts(num_experts=8)
    one, two = peer(), peer()
    first = one.ask("plan", model=model, num_servers=2)["experts"]
    one.close()  # the server will register over another connection
    time.sleep(0.05)
    assert set(first).isdisjoint(two.ask("plan", model=model, num_servers=2)["experts"])


def test_a_registered_plan_counts_once(peer):
    model = model_facts(num_experts=8)
    server = peer()
    share = server.ask("plan", model=model)["experts"]
    server.register("a", model=model, experts=share)
    assert peer().ask("plan", model=model)["experts"] == [0, 1, 2, 3]
