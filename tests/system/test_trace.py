"""A trace shows each message's whole way, through every process, also past a kill -9."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from tests import chrome_trace
from tests.chrome_trace import slices
from tests.system.cluster import batch, cluster, expected, model_facts

from expertwire import Client, Registry
from expertwire.demo import demo_model_path
from expertwire.errors import ConfigError, ExpertwireError
from expertwire.hca.fault import Faults, FaultyHca
from expertwire.observe.draw import NOTHING
from expertwire.processes import ChildGroup
from expertwire.trace import recorder as trace
from expertwire.trace.chrome import WAY
from expertwire.trace.summary import draw_median, load_trace, summarise, ways

MODEL = model_facts(num_experts=6, hidden_size=20, top_k=3)
SHARES = [[0, 1, 2], [3, 4, 5]]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def traced_way(events, num_batches, num_servers=2):
    """The slices of each message; their number is what was sent."""
    found = ways([e for e in events if e["ph"] == "X"])
    assert len(found) == num_batches * num_servers
    return found


@pytest.mark.parametrize("options", [
    {}, {"signal_mode": "add"}, {"batch_invariant": False}, {"num_qps": 2}, {"fp8": True},
], ids=str)
def test_every_message_has_its_whole_way_and_every_entry_is_decoded(path, options):
    with cluster(SHARES, MODEL, **options) as (client, _, _), trace.tracing(path):
        hidden, ids, weights = batch(40, MODEL)
        for layer in (0, 1):
            out = client.moe(layer, hidden, ids, weights)
            if "fp8" not in options:
                torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL, layer))
        client.dispatch(0, hidden, ids, weights).combine()
    events = chrome_trace.read(path)
    for message, way in traced_way(events, 3).items():
        assert set(WAY) - {"wait"} <= set(way), message
        begins = [way[step]["ts"] for step in WAY if step in way and step != "poll"]
        assert begins == sorted(begins)
    executed = {(e["args"]["of"], e["args"]["message"], e["args"]["index"]): e["args"]
                for e in events if e.get("cat") == "hca" and e["ph"] == "X"}
    posted = [(of, m, wqe) for name, of in (("put", "request"), ("reply", "reply"))
              for e in slices(events, name)
              for m in e["args"]["messages"] for wqe in m["wqes"]]
    assert len(posted) == len(executed) == 3 * 2 * 2 * 3  # batches, servers, directions, puts
    for of, message, wqe in posted:
        done = executed[of, message["id"], wqe["index"]]
        assert {k: done[k] for k in wqe} == wqe and "error" not in done
        assert {"opcode", "raddr", "rkey", "laddr", "lkey", "bytes"} <= set(wqe)
    for e in slices(events, "put"):
        for message in e["args"]["messages"]:
            carried = sum(wqe["bytes"] for wqe in message["wqes"])
            assert carried == message["bytes"]
    assert len([e for e in events if e["ph"] == "s"]) == 6
    assert sum(e["ph"] == "t" for e in events) >= 6 * 5


def test_a_call_is_its_stages_and_a_send_is_around_what_it_sends(path):
    """Both ways of sending: the native trip's and the general one's."""
    with cluster(SHARES, MODEL) as (client, _, _), trace.tracing(path):
        hidden, ids, weights = batch(40, MODEL)
        client.moe(0, hidden, ids, weights)
        client.dispatch(1, hidden, ids, weights).combine()
        client.moe(1, hidden[:0], ids[:0], weights[:0])  # sends nothing
    events = chrome_trace.read(path)
    sends = slices(events, "send")
    assert [e["args"]["layer"] for e in sends] == [0, 1]
    for send, name in itertools.product(sends, ("route", "pack", "put")):
        (inside,) = [e for e in slices(events, name)
                     if send["ts"] <= e["ts"] < send["ts"] + send["dur"]]
        assert inside["ts"] + inside["dur"] <= send["ts"] + send["dur"] + chrome_trace.SLACK_US
        assert inside["args"].get("seq", send["args"]["seq"]) == send["args"]["seq"]
        waits = [e for e in slices(events, "wait") if e["args"]["seq"] == send["args"]["seq"]]
        assert waits and send["ts"] + send["dur"] <= waits[0]["ts"] + chrome_trace.SLACK_US
    steps = summarise(events)["steps"]
    assert steps["count"] == 1
    assert set(steps["stages"]) == {"send", "route", "pack", "put", "wait", "combine", NOTHING}
    assert sum(found["total_us"] for found in steps["stages"].values()) == pytest.approx(
        slices(events, "moe")[0]["dur"], abs=1)


def test_the_direct_path_has_no_entries_and_all_stages(path):
    with cluster(SHARES, MODEL, do_ibgda=False) as (client, _, _), trace.tracing(path):
        client.moe(0, *batch(40, MODEL))
    events = chrome_trace.read(path)
    assert not [e for e in events if e.get("cat") == "hca"]
    for way in traced_way(events, 1).values():
        assert {"put", "poll", "experts", "reply", "combine"} <= set(way)


def test_a_batch_in_chunks_and_two_clients(path):
    """Seats and seqs of two clients coincide; the messages do not."""
    with cluster(SHARES, MODEL, max_rows=8) as (client, _servers, registry), \
            Client(registry, token=b"cluster-token-0123456789", max_rows=8) as other:
        other.links.wait(lambda table: len(table.links) == 2, 5)
        with trace.tracing(path):
            for c in (client, other):
                c.moe(0, *batch(30, MODEL))
    events = chrome_trace.read(path)
    assert len(traced_way(events, 2 * 4)) == 16
    assert len(slices(events, "combine")) == 8 and len(slices(events, "moe")) == 2


def test_an_entry_that_fails_says_why(path):
    with cluster(SHARES, MODEL, connect_timeout=0.5, on_missing="raise") as (client, _, _):
        FaultyHca(client.hca, Faults(fail={1: 0x13}))  # the first message's head, at both servers
        with trace.tracing(path), pytest.raises(ExpertwireError):
            client.moe(0, *batch(40, MODEL))
    failed = [e for e in chrome_trace.read(path) if "error" in e.get("args", {})]
    assert failed and failed[0]["args"]["error"] == "remote access error"


def test_nothing_is_recorded_before_and_after(path):
    with cluster(SHARES, MODEL) as (client, _, _):
        hidden, ids, weights = batch(4, MODEL)
        client.moe(0, hidden, ids, weights)
        with trace.tracing(path):
            client.moe(0, hidden, ids, weights)
        client.moe(0, hidden, ids, weights)
        assert len(slices(chrome_trace.read(path), "put")) == 1
        assert not path.with_name("trace.json.parts").exists()
        with trace.tracing(path), trace.span("mine"):  # the next trace replaces it
            pass
    events = chrome_trace.read(path)
    assert slices(events, "mine") and not slices(events, "put")


def start_servers(children, address, path, num_servers):
    env = {"EXPERTWIRE_TRACE": str(path), "OMP_NUM_THREADS": "1"}
    return [
        children.start(f"server-{i}", [
            "serve", demo_model_path(), "--experts", "all", "--registry", address, "--name",
            f"server-{i}", "--dtype", "float32", "--threads", "1",
        ], env) for i in range(num_servers)
    ]


CLIENT = """
import sys, torch
from expertwire import Client
with Client(sys.argv[1], name="c") as client:
    client.wait_ready(60)
    for step in range(int(sys.argv[2])):
        hidden = torch.randn(8, 128)
        client.moe(step % 4, hidden, torch.randint(0, 16, (8, 2)), torch.rand(8, 2))
    print("done", flush=True)
    sys.stdin.readline()
"""


def test_processes_write_one_trace_and_a_killed_one_is_in_it(path, warm):
    with ChildGroup(warm) as children, Registry("127.0.0.1:0") as registry:
        (server,) = start_servers(children, registry.address, path, 1)
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, registry.address, "20"], text=True,
            env={**os.environ, "EXPERTWIRE_TRACE": str(path)}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert client.stdout is not None and client.stdout.readline() == "done\n"
            assert not path.exists()  # both still write
            live = load_trace(path)  # as `trace summary` while they run
            assert len(slices(live, "moe")) == 20 and len(slices(live, "experts")) == 20
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait(5)
            client.communicate("\n", timeout=20)
        finally:
            client.kill()
            client.wait(5)
        assert client.returncode == 0
    events = chrome_trace.read(path)  # the client was the last one
    assert not path.with_name("trace.json.parts").exists()
    assert len({e["pid"] for e in slices(events, "experts") + slices(events, "put")}) == 2
    found = traced_way(events, 20, 1)
    for way in found.values():
        assert way["put"]["pid"] == client.pid and way["experts"]["pid"] == server.process.pid
        assert way["put"]["ts"] < way["poll"]["ts"] + way["poll"]["dur"]
        assert way["put"]["ts"] < way["experts"]["ts"] < way["combine"]["ts"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"client c", "server-0", "client", "server"} <= names
    summary = summarise(events)
    assert summary["messages"]["count"] == 20
    phases = summary["messages"]["phases"]
    total = summary["messages"]["total"]["total_us"]
    assert sum(p["total_us"] for p in phases.values()) == pytest.approx(total, rel=1e-3)
    drawn = draw_median(events, path.with_suffix(".svg"))
    assert drawn and "<svg" in path.with_suffix(".svg").read_text()


def test_the_commands(path, capsys):
    from expertwire.cli.app import app

    with cluster(SHARES, MODEL) as (client, _, _), trace.tracing(path):
        client.moe(0, *batch(4, MODEL))
    picture = path.with_suffix(".svg")
    app(["trace", "summary", str(path), "--picture", str(picture)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "a message, put to combine" in shown and "RDMA_WRITE" in shown and picture.exists()
    app(["trace", "summary", str(path), "--picture", "", "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert facts["messages"]["count"] == 2 and "picture" not in facts
    with pytest.raises(ConfigError, match="no parts"):
        app(["trace", "merge", str(path)], standalone_mode=False)
    with pytest.raises(ConfigError, match="EXPERTWIRE_TRACE="):
        app(["trace", "summary", str(path.with_name("none"))], standalone_mode=False)
    picture.write_text("{}")
    with pytest.raises(ConfigError, match="not a trace"):
        app(["trace", "summary", str(picture)], standalone_mode=False)
