"""Predictions against measured figures, formulas against enumeration, and their limits."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import transformers
from tests.families import COMMON, FAMILIES

from expertwire.cli.app import app
from expertwire.cli.plan import workload
from expertwire.demo import demo_model_path
from expertwire.errors import ConfigError
from expertwire.model.config_file import stated_config, stated_num_experts
from expertwire.planning.costs import (
    CPU,
    H200,
    H200_NVLINK,
    Costs,
    busy_experts,
    fit_costs,
    fit_nonnegative,
    parse_link,
    typical,
    with_link,
)
from expertwire.planning.predict import (
    Workload,
    message_bytes,
    predict,
    recommend,
    replicas,
    rows_per_server,
    waiting,
    zipf_loads,
)

ROOT = Path(__file__).resolve().parents[2]
SMALL = dict(num_layers=2, num_experts=8, top_k=2, hidden_size=64, middle_size=32)
GPU_LAYER = dict(num_layers=1, num_experts=128, top_k=8, hidden_size=2048, middle_size=768)


def table(heading: str) -> dict[int, list[float]]:
    """Rows of the first table after a heading of docs/performance.md: first column -> others."""
    text = (ROOT / "docs/performance.md").read_text().split(heading, 1)[1]
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if found and not line.startswith("|"):
            break
        if cells[0].isdigit():
            found[int(cells[0])] = [float(c) if re.fullmatch(r"[\d.]+", c) else math.nan
                                    for c in cells[1:]]
    return found


@pytest.mark.parametrize("rows", [1, 8, 32, 128, 512])
def test_layers_on_a_gpu_are_predicted_within_a_quarter(rows):
    measured = table("A layer, hidden rows in and summed rows out")[rows][0]
    assert predict(Workload(**GPU_LAYER, tokens=rows), 1, H200).layer_us == pytest.approx(
        measured, rel=0.25)


@pytest.mark.parametrize("rows", [1, 8, 32, 128, 512])
def test_experts_on_a_gpu_are_predicted_within_a_quarter(rows):
    measured = table("The experts alone, on rows that are grouped already")[rows][1]
    assert predict(Workload(**GPU_LAYER, tokens=rows), 1, H200).experts_us == pytest.approx(
        measured, rel=0.25)


def two_gpus() -> dict[tuple[str, int], float]:
    """(dtype, tokens) -> p50 of a trip between two GPUs; ids are drawn uniformly."""
    text = (ROOT / "docs/performance.md").read_text()
    return {(dtype, int(tokens)): float(p50) for dtype, tokens, p50 in re.findall(
        r"^\| 1:1 \| (\w+) \| uniform \| (\d+) \| ([\d.]+)", text, re.M)}


@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 512])
@pytest.mark.parametrize(("dtype", "sent"), [("bf16", 2), ("fp8", 1 + 4 / 128)])
def test_trips_between_two_gpus_are_predicted_within_a_quarter(dtype, sent, tokens):
    """Fitted to bf16; fp8 (with a scale per 128) was not looked at. Experts cost nothing there."""
    work = Workload(num_layers=1, num_experts=256, top_k=8, hidden_size=7168, middle_size=1,
                    tokens=tokens, batch_invariant=False)
    smaller = tokens * 7168 * (2 - sent) / H200_NVLINK.trip_bytes_per_us  # replies are bf16
    trip = predict(work, 1, H200_NVLINK).trip_us - smaller
    assert trip == pytest.approx(two_gpus()[dtype, tokens], rel=0.25)


def test_two_clients_at_one_server_share_its_link_as_measured():
    facts = dict(num_layers=1, num_experts=256, top_k=8, hidden_size=7168, middle_size=1,
                 tokens=512, batch_invariant=False)
    text = (ROOT / "docs/performance.md").read_text()
    found = re.search(r"512 rows each to one server:\s+p50 ([\d.]+)", text)
    both = predict(Workload(**facts, clients=2), 1, H200_NVLINK)
    assert found and both.layer_us - both.experts_us == pytest.approx(float(found[1]), rel=0.25)
    apart = predict(Workload(**facts, clients=2), 2, H200_NVLINK)
    assert apart.layer_us == pytest.approx(predict(Workload(**facts), 2, H200_NVLINK).layer_us)


def test_processes_that_work_at_once_share_the_cpus():
    costs = dataclasses.replace(CPU, parallel=0.6, cores=2)
    assert [costs.shared(n) for n in (1, 2, 4)] == pytest.approx([1, 1 / 0.6, 2 / 0.6])
    assert dataclasses.replace(costs, cores=math.inf, parallel=1.0).shared(64) == 1
    work = Workload(**{**SMALL, "num_experts": 16}, tokens=8)
    own = dataclasses.replace(costs, cores=math.inf, parallel=1.0)
    apart = dataclasses.replace(costs, cores=math.inf)
    assert predict(work, 4, apart) == predict(work, 4, own)
    for servers, share in ((2, 1 / 0.6), (4, 2 / 0.6)):
        crowded, roomy = predict(work, servers, costs), predict(work, servers, own)
        served = roomy.experts_us + own.server_us
        assert crowded.layer_us - roomy.layer_us == pytest.approx((share - 1) * served)


def test_the_parts_of_a_typical_message_add_up_to_its_time():
    """Parts that vary by themselves: their lower deciles add up to less than anything takes."""
    rng = np.random.default_rng(3)
    trips, experts = 100 + rng.exponential(100, 2000), 50 + rng.exponential(50, 2000)
    samples = [{"trip_us": t, "experts_us": e} for t, e in zip(trips, experts, strict=True)]
    for quantile in (0.1, 0.5):
        found = typical(samples, quantile)
        whole = np.quantile(trips + experts, quantile)
        assert found["trip_us"] + found["experts_us"] == pytest.approx(whole, rel=0.03)
        assert np.quantile(trips, quantile) + np.quantile(experts, quantile) < 0.97 * whole
    assert typical(samples[:1], 0.1) == samples[0] == typical(samples[:1], 1.0)


@pytest.mark.parametrize("servers", [1, 2, 4, 8])
def test_rows_and_busy_experts_are_those_of_random_routing(servers):
    work = Workload(**SMALL, tokens=6)
    rng, held = random.Random(1), 8 // servers
    rows, busy = [], []
    for _ in range(4000):
        tokens = [rng.sample(range(8), 2) for _ in range(6)]
        rows.append(sum(any(e < held for e in t) for t in tokens))
        busy.append(len({e for t in tokens for e in t if e < held}))
    assert rows_per_server(work, servers) == pytest.approx(np.mean(rows), rel=0.03)
    assert busy_experts(held, 2 / 8, 6) == pytest.approx(np.mean(busy), rel=0.03)


def test_bytes_are_those_of_the_wire():
    """What tests/system/test_path.py sees on the queues, up to padding."""
    from expertwire.message import RequestLayout

    work = Workload(**SMALL, tokens=8)
    layout = RequestLayout.of(8, 2, 128, 0)
    assert message_bytes(work, 8, 16) == pytest.approx(layout.end + 16 + 16 * 128 + 80, abs=32)


def test_waiting_is_that_of_a_simulated_queue():
    """Exponential service and thinking, as the analysis assumes."""
    rng = random.Random(5)
    demand, think, clients = 3.0, 10.0, 6
    free, total, count = 0.0, 0.0, 60_000
    arrivals = sorted(rng.expovariate(1 / think) for _ in range(clients))
    for _ in range(count):
        now = arrivals.pop(0)
        free = max(free, now) + rng.expovariate(1 / demand)
        total += free - now
        arrivals.append(free + rng.expovariate(1 / think))
        arrivals.sort()
    assert waiting(demand, think, clients) == pytest.approx(total / count, rel=0.04)


def test_the_limits_of_waiting():
    assert waiting(3, 10, 1) == 3
    many = waiting(3, 10, 100)
    assert many == pytest.approx(100 * 3 - 10, rel=1e-3)  # saturated: the server never rests


def test_costs_are_found_again():
    true = Costs(trip_us=50, server_us=9, trip_bytes_per_us=2000, batch_us=30, expert_us=0,
                 weight_bytes_per_us=5000, flops_per_us=1e5, overlaps=False)
    samples = []
    for tokens in (1, 3, 10, 40, 200):
        work = Workload(**SMALL, tokens=tokens)
        expected = predict(work, 1, true)
        samples.append({
            "experts_held": 8, "pairs": tokens * 2, "bytes": expected.message_bytes,
            "trip_us": expected.trip_us, "experts_us": expected.experts_us, "server_us": 9,
        })
    work = Workload(**SMALL, tokens=1)
    found = fit_costs(samples, work.expert_bytes, work.pair_flops, 2 / 8)
    for name in ("trip_us", "server_us", "trip_bytes_per_us", "batch_us", "weight_bytes_per_us",
                 "flops_per_us"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-4), name
    with pytest.raises(ConfigError, match="three different sizes"):
        fit_costs(samples[:2], 1, 1, 0.25)


def test_a_fit_has_no_negative_cost():
    columns = np.array([[1.0, x] for x in (1, 2, 3, 4)])
    assert (fit_nonnegative(columns, [9, 7, 5, 3]) >= 0).all()
    np.testing.assert_allclose(fit_nonnegative(columns, [5, 8, 11, 14]), [2, 3], rtol=1e-9)


@pytest.mark.parametrize(("text", "rate", "latency"), [
    ("400Gbit:3us", 50_000, 3), ("450GB:2us", 450_000, 2), ("100Mbit/s:1ms", 12.5, 1000),
    ("25.5GBps:0us", 25_500, 0),
])
def test_links(text, rate, latency):
    assert parse_link(text) == pytest.approx((rate, latency))


@pytest.mark.parametrize("text", ["", "fast", "400G:3us", "400Gbit", "0Gbit:1us", "1.2.3GB:1us"])
def test_links_that_are_none(text):
    with pytest.raises(ConfigError, match="RATE:LATENCY"):
        parse_link(text)


def test_a_slower_link_is_never_better():
    work = Workload(**GPU_LAYER, tokens=64)
    steps = [predict(work, 4, with_link(H200, rate, latency)).step_us
             for rate, latency in ((1e6, 0), (5e4, 3), (1e3, 3), (1e3, 50))]
    assert steps == sorted(steps) and len(set(steps)) == 4


@pytest.mark.parametrize("costs", [dataclasses.replace(CPU, cores=2), CPU],
                         ids=["one machine", "a machine each"])
def test_more_clients_saturate_a_server(costs):
    counts = (1, 2, 4, 64, 4096)
    predictions = [predict(Workload(**SMALL, tokens=64, clients=c), 1, costs) for c in counts]
    assert [p.layer_us for p in predictions] == sorted(p.layer_us for p in predictions)
    assert predictions[-1].bound_by == "other clients' rows"
    assert (predictions[-1].busy > 0.98) == math.isinf(costs.cores), "else the CPUs are the limit"
    limit = predictions[0].saturates_at
    assert limit == pytest.approx(predictions[-1].saturates_at) and limit > 1
    rates = [c / p.layer_us for c, p in zip(counts, predictions, strict=True)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(limit / predictions[0].layer_us, rel=0.02)  # the asymptote


def test_clients_that_are_served_together_wait_less_than_one_by_one():
    for clients in (1, 2, 5, 40):
        p = predict(Workload(**SMALL, tokens=8, clients=clients), 2, CPU)
        assert p.layer_us <= p.apart_us + 1e-9
        assert (p.layer_us == pytest.approx(p.apart_us)) == (clients == 1)


def test_the_recommendation():
    work = Workload(**GPU_LAYER, tokens=64, clients=4)
    chosen, looked_at = recommend(work, H200)
    assert chosen in looked_at and [p.servers for p in looked_at] == [2**i for i in range(8)]
    assert chosen.step_us <= looked_at[0].step_us
    one = work.expert_bytes
    tight, _ = recommend(work, H200, memory_bytes=10 * one)
    assert tight.servers >= 13 and tight.weight_bytes <= 10 * one
    with pytest.raises(ConfigError, match="an expert takes"):
        recommend(work, H200, memory_bytes=one / 2)
    with pytest.raises(ConfigError, match="at least 13 servers"):
        recommend(work, H200, memory_bytes=10 * one, most=4)


def test_one_client_gets_no_servers_that_save_next_to_nothing():
    """It cannot queue behind itself, however much of its step a server works."""
    facts = dict(num_layers=1, num_experts=16, top_k=2, hidden_size=256, middle_size=128, tokens=1)
    costs = dataclasses.replace(CPU, cores=2, parallel=0.82)
    chosen, looked_at = recommend(Workload(**facts), costs)
    more = next(p for p in looked_at if p.servers == 2 * chosen.servers)
    assert chosen.busy > 0.7 and 0 < 1 - more.step_us / chosen.step_us <= 0.05
    several, _ = recommend(Workload(**facts, clients=2), costs)
    assert several.servers > chosen.servers


def test_replicas_go_to_hot_experts_and_level_the_load():
    loads = zipf_loads(16, 1.0)
    assert sum(loads) == pytest.approx(1) and loads == sorted(loads, reverse=True)
    hot, level = replicas(loads, 4, 0.5)
    none, unequal = replicas(loads, 4, 0.0)
    assert none == {} and 0 in hot and level < unequal
    assert sum(count - 1 for count in hot.values()) == 8
    assert replicas(zipf_loads(16, 0), 4, 0.0) == ({}, pytest.approx(1.0))


@pytest.mark.parametrize("wrong", [
    {"tokens": 0}, {"top_k": 9}, {"clients": 0}, {"attention_us": math.nan}, {"hidden_size": 0},
])
def test_a_workload_that_is_none(wrong):
    with pytest.raises(ConfigError):
        Workload(**{**SMALL, "tokens": 1, **wrong})


def test_no_more_servers_than_experts():
    for servers in (0, 9):
        with pytest.raises(ConfigError, match="servers for 8 experts"):
            predict(Workload(**SMALL, tokens=1), servers, CPU)


def plan(capsys, *options) -> str:
    app(["plan", demo_model_path(), *options], standalone_mode=False)
    return capsys.readouterr().out


def test_the_command(capsys, tmp_path):
    shown = plan(capsys, "--tokens-per-step", "16", "--clients", "4", "--skew", "1")
    assert "saturates at" in shown and "replicas: 0 x" in shown
    facts = json.loads(plan(capsys, "--json", "--servers", "4", "--links", "400Gbit:3us"))
    assert facts["servers"] <= 4 and facts["predictions"][0]["servers"] == 1
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps({"rows": [100, *[1] * 15]}))
    assert "0" in json.loads(plan(capsys, "--json", "--loads", str(loads)))["replicas"]


@pytest.mark.parametrize(("content", "text"), [
    ("[1, 2]", "the model has 16"), ("nothing", "JSON list"), ('{"other": 1}', "JSON list"),
    (json.dumps([0] * 16), "not all 0"),
    (json.dumps([math.nan] * 16), "at least 0"),
    (json.dumps([-1] + [1] * 15), "at least 0"),
])
def test_loads_that_are_none(content, text, tmp_path, capsys):
    (tmp_path / "loads.json").write_text(content)
    with pytest.raises(ConfigError, match=text):
        plan(capsys, "--loads", str(tmp_path / "loads.json"))


@pytest.mark.parametrize("combination", list(itertools.product((1, 64), (1, 16), ("cpu", "h200"))))
def test_every_figure_is_finite(combination, capsys):
    tokens, clients, device = combination
    facts = json.loads(plan(capsys, "--json", "--tokens-per-step", str(tokens), "--clients",
                            str(clients), "--device", device))
    for prediction in facts["predictions"]:
        for value in prediction.values():
            assert isinstance(value, str) or 0 <= value < 1e12


@pytest.mark.parametrize("family", [*FAMILIES, "demo"])
def test_sizes_that_the_config_states_are_those_that_transformers_knows(family, tmp_path):
    path = demo_model_path()
    if family != "demo":
        name, settings = FAMILIES[family]
        getattr(transformers, name)(**{**COMMON, **settings, "dtype": "float16"}).save_pretrained(
            tmp_path)
        path = str(tmp_path)
    asked = dict(tokens=8, clients=2, attention_us=0.0)
    quick = stated_config(path)
    if family in ("demo", "qwen3_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"):
        assert quick is not None, "these state everything"
    with pytest.MonkeyPatch.context() as patch:
        got = workload(path, **asked)
        patch.setattr("expertwire.model.config_file.stated_config", lambda _: None)
        assert got == workload(path, **asked)


@pytest.mark.parametrize("change", [
    {"num_experts_per_tok": None}, {"moe_intermediate_size": None}, {"num_local_experts": None},
    {"num_experts": 3}, {"text_config": {}}, {"quantization_config": {}}, {"dtype": "int8"},
    {"dtype": ["float32"]}, {"num_local_experts": None, "n_routed_experts": 4},
], ids=str)
def test_transformers_is_asked_where_the_config_is_silent(change, tmp_path):
    facts = json.loads((Path(demo_model_path()) / "config.json").read_text())
    facts = {name: value for name, value in {**facts, **change}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    assert stated_config(tmp_path) is None and stated_num_experts(tmp_path) is None
