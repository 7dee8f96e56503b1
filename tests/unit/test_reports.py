"""What servers and clients report, and the rates that the registry makes of it."""

from __future__ import annotations

import time

import pytest
from tests.system.cluster import TOKEN, batch, cluster, model_facts

from expertwire.client.client import Client
from expertwire.observe.reports import LONGEST_PAUSE, Reporter, leave_out, with_rates
from expertwire.registry.question import ask


def test_rates_are_by_the_reporters_clock():
    old = {"at_s": 10.0, "rows": 100, "bytes_sent": 1000}
    new = with_rates({"at_s": 12.0, "rows": 400, "bytes_sent": 1000}, old)
    assert new["rows_per_s"] == 150.0 and new["bytes_sent_per_s"] == 0.0
    assert "messages_per_s" not in new, "it was not reported"


@pytest.mark.parametrize("old", [{}, {"at_s": 12.0, "rows": 1}, {"at_s": 13.0, "rows": 1}])
def test_a_first_report_a_repeated_one_and_another_clock_have_no_rates(old):
    assert with_rates({"at_s": 12.0, "rows": 5}, old) == {"at_s": 12.0, "rows": 5}


def test_counters_that_went_back_or_are_no_numbers_have_no_rate():
    """A server that was restarted under its old name counts from 0 again."""
    new = with_rates({"at_s": 2.0, "rows": 5, "messages": "many", "bytes_sent": True},
                     {"at_s": 1.0, "rows": 9, "messages": 1, "bytes_sent": False})
    assert not [name for name in new if name.endswith("_per_s")]


def test_pairs_have_rates_of_their_own():
    old = {"at_s": 1.0, "servers": {"a": {"bytes_sent": 10}, "gone": {"bytes_sent": 1}}}
    new = with_rates({"at_s": 2.0, "servers": {"a": {"bytes_sent": 30}, "b": {"bytes_sent": 7},
                                               "broken": 3}}, old)
    assert new["servers"]["a"]["bytes_sent_per_s"] == 20.0
    assert new["servers"]["b"] == {"bytes_sent": 7}


def test_a_costly_report_takes_one_percent_of_a_core_at_most():
    def costly():
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return {}

    reporter = Reporter(costly, seconds=0.0)
    reporter.report()
    assert 1.9 < reporter.due - time.monotonic() <= LONGEST_PAUSE


def test_a_report_that_waits_for_the_machine_is_not_put_off():
    reporter = Reporter(lambda: time.sleep(0.2) or {}, seconds=0.0)
    reporter.report()
    assert reporter.due - time.monotonic() < 2


def test_what_does_not_fit_a_message_is_left_out_in_two_steps():
    status = {"servers": [{"stats": {"rows": 1, "layer_rows": [[1]]}}], "client_stats": [{}]}
    leave_out(status, "layer_rows")
    assert status["servers"][0]["stats"] == {"rows": 1} and status["client_stats"]
    leave_out(status, None)
    assert status["servers"][0]["stats"] == {} and status["client_stats"] == []
    assert status["stats_left_out"] is True


def wait_for_status(registry, ready):
    deadline = time.monotonic() + 10
    while True:
        status = ask(registry.address, TOKEN, {"type": "status"})
        if ready(status):
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.05)


def test_both_ends_report_the_same_rows_and_bytes():
    model = model_facts()
    with cluster([range(4), range(4, 8)], model) as (client, _, registry):
        for seed in range(5):
            client.moe(seed % 2, *batch(7, model, seed=seed))
        rows = sum(link.counters.summary()["rows"] for link in client.links.table.links)
        status = wait_for_status(registry, lambda s: s["client_stats"] and all(
            server["stats"].get("messages") for server in s["servers"]
        ) and sum(s["rows"] for s in s["client_stats"]) == rows)
    (report,) = status["client_stats"]
    assert report["client"] == client.name and report["epoch"] == status["epoch"]
    assert {"route", "pack", "put", "wait", "combine"} <= set(report["stages"])
    assert (report["retries"], report["lost"], report["errors"]) == (0, 0, {})
    for server in status["servers"]:
        stats, pair = server["stats"], report["servers"][server["server_id"]]
        assert stats["rows"] == pair["rows"] > 0
        assert stats["messages"] == pair["messages"] == 5
        assert stats["bytes_received"] == pair["bytes_sent"] > 0
        assert stats["bytes_sent"] == pair["bytes_received"] > 0
        assert stats["queue_depth"] == 0 and stats["clients"] == 1
        assert pair["p50_us"] > 0 and pair["wait_ms"] > 0
        layers = stats["layer_rows"]
        assert len(layers) == 2 and [sum(c) for c in zip(*layers, strict=True)] == \
            stats["expert_rows"]
        assert stats["layer_experts"] == server["experts"]
    assert report["rows"] == sum(s["stats"]["rows"] for s in status["servers"])


def test_reports_go_on_and_have_rates():
    model = model_facts()
    with cluster([range(8)], model) as (client, _, registry):
        deadline = time.monotonic() + 10
        while True:
            client.moe(0, *batch(3, model))
            status = ask(registry.address, TOKEN, {"type": "status"})
            (server,) = status["servers"]
            rates = [server["stats"].get("rows_per_s", 0),
                     *[c.get("bytes_sent_per_s", 0) for c in status["client_stats"]],
                     *[c.get("servers", {}).get("s0", {}).get("bytes_sent_per_s", 0)
                       for c in status["client_stats"]]]
            if len(rates) == 3 and min(rates) > 0:
                return
            assert time.monotonic() < deadline, status
            time.sleep(0.02)


def test_a_client_without_a_server_reports_too(token):
    from expertwire import Registry

    with Registry(token=TOKEN) as registry, Client(registry, token=TOKEN, name="lonely"):
        status = wait_for_status(registry, lambda s: s["client_stats"])
    (report,) = status["client_stats"]
    assert report["client"] == "lonely" and report["servers"] == {} and report["rows"] == 0


def test_clients_of_one_name_are_told_apart(token):
    """Also when the first of them ends: a name stays with who has it."""
    from expertwire import Registry

    def shown(status):
        return [c["client"] for c in status["client_stats"]]

    with Registry(token=TOKEN) as registry:
        first = Client(registry, token=TOKEN, name="attention")
        with first:
            wait_for_status(registry, lambda s: s["client_stats"])
            with Client(registry, token=TOKEN, name="attention"):
                status = wait_for_status(registry, lambda s: len(s["client_stats"]) == 2)
                assert status["clients"] == shown(status) == ["attention", "attention (2)"]
                first.close()
                status = wait_for_status(registry, lambda s: len(s["clients"]) == 1)
                assert shown(status) == ["attention (2)"]
