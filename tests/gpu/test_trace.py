"""Stages of a GPU in a trace: where the host saw them, in graphs, and from two processes."""

from __future__ import annotations

import os

import pytest
import torch

from expertwire import trace
from expertwire.cuda.local import LocalExperts
from tests import chrome_trace
from tests.chrome_trace import slices
from tests.gpu.servers import Servers, batch
from tests.gpu.test_experts import make_experts

CLIENT, SERVER = ("client_send_direct", "client_combine"), ("poll, gather", "experts", "reply")


@pytest.mark.parametrize("own_stream", [False, True], ids=["caller's stream", "own stream"])
def test_every_launch_and_replay_is_there(gpu, tmp_path, own_stream):
    path, calls, replays = tmp_path / "t.json", 5, 7
    with trace.tracing(path), \
            LocalExperts(make_experts(256, 48, torch.bfloat16), 3, max_rows=16,
                         own_stream=own_stream) as local:
        inputs = batch({**local.model_info, "top_k": 3}, 13, 1)
        torch.cuda.synchronize()
        with trace.span("outside"):
            for _ in range(calls):
                local.moe(1, *inputs)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            local.moe(1, *inputs)
        for _ in range(replays):
            graph.replay()
        local.check()
    events = chrome_trace.read(path)
    (outside,) = slices(events, "outside")
    begin, end = outside["ts"], outside["ts"] + outside["dur"]
    for stage in CLIENT:
        found = slices(events, stage)
        assert len(found) == 1 + calls + replays, "the first is the warm-up"
        assert all(0 < e["dur"] < 1e5 and e["cat"] == "device" for e in found)
        inside = [e for e in found if begin - 20 <= e["ts"] <= end + 20]
        assert len(inside) == calls, "on the host's clock, to 20 us"
    for stage in SERVER:
        assert len(slices(events, stage)) >= calls + replays


@pytest.mark.timeout(150)
def test_client_and_server_processes(gpu, tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    monkeypatch.setenv("EXPERTWIRE_TRACE", str(path))
    with Servers(tmp_path) as servers:
        servers.start("all")
        try:
            with servers.remote(max_rows=16) as remote:
                inputs = batch(remote.model_info, 9, 1)
                for _ in range(20):
                    remote.moe(1, *inputs)
                remote.check()
        finally:
            trace.stop()
        codes = servers.close()
    assert codes == [0] or codes == [143], servers.logs()
    events = chrome_trace.read(path)
    sent = slices(events, "client_send_direct")
    served = [e for e in slices(events, "experts") if e["pid"] != os.getpid()]
    assert len(sent) == 21 and len(served) >= 21, servers.logs()
    assert {e["pid"] for e in sent} == {os.getpid()}
