"""Prometheus endpoints, scraped from processes, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.system.cluster import TOKEN, batch, cluster, model_facts

from expertwire import Client
from expertwire.demo import demo_model_path
from expertwire.errors import ConfigError, RejectedError
from expertwire.hca.fault import Faults, FaultyHca
from expertwire.observe.metrics import (
    client_metrics,
    registry_metrics,
    serve_metrics,
    server_metrics,
)
from expertwire.processes import ChildProcess

DASHBOARD = Path(__file__).resolve().parents[2] / "grafana/expertwire.json"
SECONDS = 60.0  # generous: a loaded machine is no failure


def scrape(address):
    """{metric name: family}, as Prometheus reads it."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return {f.name: f for f in text_string_to_metric_families(answer.read().decode())}


def values(families, name, **labels):
    """Values of the samples called `name` with these labels."""
    return [s.value for family in families.values() for s in family.samples
            if s.name == name and labels.items() <= s.labels.items()]


@pytest.fixture(scope="module")
def scraped(warm):
    """(the registry's metrics, the server's, what the client counted) of three processes."""
    env = {"EXPERTWIRE_TOKEN": TOKEN.decode(), "EXPERTWIRE_TOKEN_FILE": "", "OMP_NUM_THREADS": "1"}
    registry = ChildProcess("registry", ["registry", "--listen", "127.0.0.1:0",
                                         "--metrics-port", "0"], env=env)
    server = None
    try:
        at_registry = registry.wait_line("metrics at", SECONDS).split("/")[2]
        address = registry.wait_line("registry listening", SECONDS).split()[-1]
        server = ChildProcess("server", ["serve", str(demo_model_path()), "--experts", "all",
                                         "--name", "s0", "--registry", address,
                                         "--metrics-port", "0"], env, warm)
        at_server = server.wait_line("metrics at", SECONDS).split("/")[2]
        with Client(address, token=TOKEN, name="attention", connect_timeout=SECONDS) as client:
            client.wait_ready()
            for layer in (0, 1, 1):
                hidden = torch.randn(6, 128, dtype=torch.bfloat16)
                client.moe(layer, hidden, torch.tensor([[3, 5]] * 6), torch.rand(6, 2))
            counted = client.stats()["servers"]["s0"]
            for _ in range(600):
                found = scrape(at_registry)
                if values(found, "expertwire_client_rows_total") == [18]:
                    break
            yield found, scrape(at_server), counted
    finally:
        for child in (server, registry):
            if child is not None:
                child.stop()


def test_a_servers_metrics_are_what_it_did(scraped):
    _, found, counted = scraped
    one = {"server": "s0"}
    assert values(found, "expertwire_rows_total", **one) == [18]
    assert values(found, "expertwire_messages_total", **one) == [3]
    assert values(found, "expertwire_received_bytes_total", **one) == [counted["bytes_sent"]]
    assert values(found, "expertwire_sent_bytes_total", **one) == [counted["bytes_received"]]
    assert values(found, "expertwire_queue_depth_messages", **one) == [0]
    assert values(found, "expertwire_experts_held", **one) == [16]
    assert values(found, "expertwire_connected_clients", **one) == [1]
    load = {(s.labels["layer"], s.labels["expert"]): s.value
            for s in found["expertwire_expert_rows"].samples if s.value}
    assert load == {("0", "3"): 6, ("0", "5"): 6, ("1", "3"): 12, ("1", "5"): 12}
    count = values(found, "expertwire_stage_duration_seconds_count", stage="experts")
    total = values(found, "expertwire_stage_duration_seconds_sum", stage="experts")
    p99 = values(found, "expertwire_stage_duration_seconds", stage="experts", quantile="0.99")
    assert count == [3] and 0 < total[0] < 30 and 0 < p99[0] <= total[0]
    assert values(found, "expertwire_hca_entries_total", opcode="RDMA_WRITE") == [9]
    assert values(found, "expertwire_server_info")[0] == 1


def test_the_registrys_metrics_are_its_members_and_its_clients(scraped):
    found, server, counted = scraped
    assert values(found, "expertwire_members") == [1]
    assert values(found, "expertwire_watching_clients") == [1]
    assert values(found, "expertwire_epoch")[0] >= values(server, "expertwire_epoch")[0] > 1e12
    pair = {"client": "attention", "server": "s0"}
    sent, received = (values(found, "expertwire_pair_bytes_total", **pair, direction=d)
                      for d in ("sent", "received"))
    assert (sent, received) == ([counted["bytes_sent"]], [counted["bytes_received"]])
    assert values(found, "expertwire_reply_latency_seconds_count", **pair) == [3]
    assert 0 < values(found, "expertwire_reply_latency_seconds", **pair, quantile="0.5")[0] < 30
    assert values(found, "expertwire_put_latency_seconds_count", client="attention")[0] == 3
    assert values(found, "expertwire_client_failovers_total") == [0]
    assert values(found, "expertwire_server_silence_seconds", server="s0")[0] < 30


def test_names_and_units_are_those_that_prometheus_wants(scraped):
    """Base units, _total for counters only, and a help text each."""
    for families in scraped[:2]:
        assert families
        for name, family in families.items():
            assert name.startswith("expertwire_") and family.documentation, name
            for sample in family.samples:
                assert family.type != "counter" or sample.name.endswith("_total")
                assert family.type == "counter" or not sample.name.endswith("_total")
            if family.type == "summary":
                assert name.endswith("_seconds")
            assert not re.search(r"_(us|ms|ns|kb|mb)$", name)


def test_no_token_and_no_address_is_shown(scraped):
    for families in scraped[:2]:
        shown = "".join(str(family) for family in families.values())
        assert TOKEN.decode() not in shown and "expertwire-" not in shown


def queries():
    dashboard = json.loads(DASHBOARD.read_text())
    return [(panel["title"], target["expr"], target["legendFormat"])
            for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.parametrize(("panel", "expr", "legend"), queries())
def test_the_dashboard_asks_for_metrics_that_exist(scraped, panel, expr, legend):
    families = {**scraped[0], **scraped[1]}
    labels = set()
    for name in re.findall(r"expertwire_\w+", expr):
        base = re.sub(r"_(total|sum|count)$", "", name)
        family = families.get(name) or families.get(base)
        assert family is not None, f"{panel}: no metric {name}"
        assert name in {s.name for s in family.samples} or not family.samples, f"{panel}: {name}"
        if "rate(" in expr or "increase(" in expr:
            assert name.endswith(("_total", "_sum", "_count")), f"{panel}: {name} is no counter"
        labels |= {label for s in family.samples for label in s.labels}
        if not family.samples:  # nothing was refused or failed in this run
            labels |= {"server", "client", "syndrome", "error", "reason"}
    used = set(re.findall(r"\{\{(\w+)\}\}", legend))
    used |= {word.strip() for by in re.findall(r"by \(([^)]*)\)", expr) for word in by.split(",")}
    assert used <= labels, f"{panel}: no label {used - labels}"


def test_the_dashboards_panels_lie_side_by_side():
    dashboard = json.loads(DASHBOARD.read_text())
    taken = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        squares = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                   for y in range(at["y"], at["y"] + at["h"])}
        assert not squares & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= squares
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


# -------------------------------------------------------------------- in this process


def test_errors_are_counted_by_syndrome_and_have_their_names():
    (errors,) = [m for m in client_metrics([("c", {"errors": {"0x13": 2, "junk": 1, "0x15": "x"}})])
                 if m.name == "expertwire_client_errors"]
    assert [(s.labels["syndrome"], s.labels["error"], s.value) for s in errors.samples] == \
        [("0x13", "remote access error", 2)]


def test_rubbish_that_clients_report_is_left_out():
    for value in (None, 3, "x", [], {"a": {}}, {"put": 3}, {"\x1b[2J\"\n": {"p50_us": "x"}}):
        report = dict.fromkeys(("stages", "servers", "errors", "dropped", "rows"), value)
        for metric in client_metrics([("c", report)]):
            for sample in metric.samples:
                assert isinstance(sample.value, float)
                assert all(v.isprintable() for v in sample.labels.values())


def reported(registry, ready):
    """The registry's metrics, once its clients have reported what `ready` looks for."""
    with serve_metrics("127.0.0.1:0", lambda: registry_metrics(registry)) as web:
        for _ in range(1000):
            found = scrape(web.address)
            if ready(found):
                return found
            time.sleep(0.02)
    raise AssertionError(f"not reported: {found}")


def test_a_failed_completion_is_a_failover_with_its_syndrome():
    model = model_facts()
    with cluster([range(8), range(8)], model) as (client, _, registry):
        queue = client.links.table.links[0].endpoint.qp_states[0].qpn
        FaultyHca(client.hca, Faults(fail={1: 0x13}, qpn=queue))  # its first message's head
        for seed in range(4):
            client.moe(0, *batch(4, model, seed=seed))
        found = reported(registry, lambda f: values(f, "expertwire_client_retries_total") > [0])
    errors = [(s.labels["syndrome"], s.labels["error"]) for s in
              found["expertwire_client_errors"].samples if s.value]
    assert errors == [("0x13", "remote access error")]
    assert values(found, "expertwire_client_failovers_total")[0] >= 1
    assert values(found, "expertwire_loss_reports_total")[0] >= 1


def refusals(server):
    """[(reason, number)] of the messages that a server refused."""
    refused = {m.name: m for m in server_metrics(server)}["expertwire_refused_messages"]
    return [(s.labels["reason"], s.value) for s in refused.samples]


def test_a_refused_message_is_counted_with_its_reason():
    model = model_facts()
    with cluster([range(8)], model) as (client, (server,), _):
        server.shard.fail_on_layer = 1
        with pytest.raises(RejectedError):
            client.moe(1, *batch(4, model))
        deadline = time.monotonic() + SECONDS  # the refusal leaves before it is counted
        while not (refused := refusals(server)) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert refused == [("expert_fault", 1)]


def test_what_to_install_is_said(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'expertwire\[metrics\]'"):
        serve_metrics("127.0.0.1:0", list)
