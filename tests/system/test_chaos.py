"""Chaos plans: they are checked, they run, and they find what they are there to find."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch

from expertwire.chaos.load import NUM_BATCHES, Oracle, StepLog
from expertwire.chaos.picture import chaos_svg
from expertwire.chaos.plan import load_plan, parse_plan, plan_names
from expertwire.demo import demo_model_path
from expertwire.errors import ConfigError
from expertwire.model.checkpoint import load_experts
from expertwire.model.config_file import parse_experts

SERVERS = {"a": "0-15", "b": "0-15"}


def test_the_shipped_plans_keep_every_expert_on_a_server():
    """At any moment somebody holds each expert: what then fails is our fault, not the plan's."""
    assert set(plan_names()) >= {
        "kill-each", "stop-each", "join-leave", "drain-each", "registry-restart", "network",
        "short",
    }
    for name in plan_names():
        plan = load_plan(name)
        shares, there = dict(plan.servers), set(plan.servers)
        assert plan.about and plan.phases[0].is_calm and plan.phases[-1].is_calm
        for phase in plan.phases:
            for kind, value in phase.actions:
                if kind == "join":
                    shares[value[0]] = value[1]
                    there.add(value[0])
                elif kind in ("start", "continue"):
                    there.add(value)
                elif kind in ("kill", "stop", "drain"):
                    there.remove(value)
                held = {e for s in there for e in parse_experts(shares[s], 16)}
                assert held == set(range(16)), f"{name}, {phase.name}"


def test_the_short_plan(tmp_path):
    """One of everything, with processes, as a user runs it."""
    picture = tmp_path / "chaos.svg"
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "expertwire", "chaos", "short", "--json", "--picture", str(picture)],
        capture_output=True, text=True, timeout=110, check=False,
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    print(time.monotonic() - start, facts)
    assert facts["wrong_tokens"] == 0 and facts["lost_requests"] == 0 and facts["leaks"] == 0
    assert facts["steps"] > 200 and facts["retries"] >= 4, "both clients met an error and a stop"
    assert facts["servers_lost"] >= 8, "both clients lost s0, s1 twice, and s2"
    assert 400 < facts["longest_pause_ms"] < 2000, "the stopped server costs its deadline"
    assert facts["throughput_ratio"] > 0
    assert [p["name"] for p in facts["phases"]][:3] == ["calm", "error s1", "stop s2"]
    if facts["longest_pause_ms"] <= 550:
        assert done.returncode == 0 and facts["ok"] and not facts["problems"]
    svg = picture.read_text()
    assert all(name in svg for name in ("registry", "s0", "s3", "is stopped", "pauses"))


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(demo_model_path(), rows=4, seed=1)


def right(oracle: Oracle, layer: int, idx: int) -> torch.Tensor:
    return oracle.want[layer][idx].clone()


def test_the_oracle_is_the_layer_itself(oracle):
    """Token by token and expert by expert, without the reference's code."""
    shard = load_experts(demo_model_path(), None, dtype="float32")
    assert len(oracle.batches) == NUM_BATCHES and oracle.num_layers == 4
    hidden, ids, weights = oracle.batches[3]
    for token in range(4):
        row = hidden[token : token + 1]
        parts = [w * shard.layers[2].forward(e, row)
                 for e, w in zip(ids[token].tolist(), weights[token], strict=True)]
        torch.testing.assert_close(oracle.want[2][3][token : token + 1], sum(parts))


@pytest.mark.parametrize("damage", ["row", "bit", "swapped", "zero", "nan", "doubled"])
def test_wrong_tokens_are_found(oracle, damage):
    out = right(oracle, 1, 2)
    assert oracle.wrong_rows(1, 2, out) == 0 and oracle.wrong_rows(1, 2, out.clone()) == 0
    bad, wrong = out.clone(), 1
    if damage == "row":
        bad[2] += 1e-3
    elif damage == "bit":
        bad[0, 0] = torch.nextafter(bad[0, 0], torch.tensor(9.0))
    elif damage == "swapped":
        bad[[0, 1]], wrong = bad[[1, 0]], 2
    elif damage == "zero":
        bad[3] = 0
    elif damage == "nan":
        bad[1, 5] = float("nan")
    else:
        bad, wrong = bad * 2, 4
    assert oracle.wrong_rows(1, 2, bad) == wrong


def test_the_first_result_is_compared_too(oracle):
    bad = right(oracle, 2, 0)
    bad[1] += 1
    assert oracle.wrong_rows(2, 0, bad) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(servers={}), "servers must be names"),
        (dict(servers={"a": 3}), "servers must be names"),
        (dict(phases=[]), "no phases"),
        (dict(phases=[{"seconds": -1}]), "seconds must be"),
        (dict(phases=[{"explode": "a"}]), "unknown explode"),
        (dict(phases=[{"kill": "z"}]), "no server 'z'"),
        (dict(phases=[{"kill": 5}]), "kill takes a server's name"),
        (dict(phases=[{"join": ["c"]}]), "join takes names"),
        (dict(phases=[{"drain": "c"}, {"join": {"c": "0"}}]), "no server 'c'"),
        (dict(clients=0), "clients must be"),
        (dict(colour="red"), "unknown colour"),
    ],
)
def test_plans_that_do_not_fit_are_named(change, text):
    with pytest.raises(ConfigError, match=text):
        parse_plan({"servers": SERVERS, "phases": [{"seconds": 1}], **change}, "mine")


def test_a_plan_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"servers": SERVERS, "phases": [
        {"kill": ["a", "any"], "seconds": 1}, {"name": "back", "start": "a"},
    ]}))
    plan = load_plan(str(path))
    assert plan.name == "mine" and [p.name for p in plan.phases] == ["kill a, kill any", "back"]
    assert plan.phases[0].actions == [("kill", "a"), ("kill", "any")]
    assert plan.phases[1].starts_processes and plan.phases[1].returns
    with pytest.raises(ConfigError, match="kill-each"):
        load_plan("no-such-plan")
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        load_plan(str(path))


def test_a_picture_of_nothing_much_is_still_a_picture():
    from types import SimpleNamespace

    from expertwire.chaos.run import Event, Lap

    plan = parse_plan({"servers": SERVERS, "phases": [{"seconds": 1}]}, "mine")
    load = SimpleNamespace(log=StepLog())
    load.log.add(5, 10, 0)
    load.log.add(10**9, 2 * 10**9, 0)
    run = SimpleNamespace(
        plan=plan, laps=[Lap(plan.phases[0], 0, 3 * 10**9)],
        events=[Event(5 * 10**8, "error", "a"), Event(10**9, "kill", "a")],
    )
    svg = chaos_svg(run, [load], {"steps": 2, "wrong_tokens": 0, "longest_pause_ms": 1000.0})
    assert svg.count("<rect") >= 8 and "1000 ms" in svg and "a not there: 2.00 s" in svg
    assert svg.count("a: error completion") == 1
