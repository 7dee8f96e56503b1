"""The direct path between a client and a server inside one GPU: two streams, graphs, deadlines."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from expertwire.device_structs import KernelStatus
from expertwire.loopback import Loopback
from expertwire.model.reference import moe_reference
from tests.steps import CASES, make_step


def client_steps(step: Loopback) -> list:
    return [("client_route", step.route), ("client_pack", step.pack),
            ("client_put_direct", step.put), ("client_combine", step.combine)]


def status_of(block) -> KernelStatus:
    return block.read_struct(KernelStatus)


@pytest.mark.parametrize("name", ["one row", "decode batch", "three servers, sums"])
def test_poll_waits_on_a_second_stream(gpu, name):
    """The servers' poll kernels run first and spin; the message comes from another stream."""
    step, (hidden, ids, weights) = make_step(gpu, name, seed=21)
    serving = [torch.cuda.Stream() for _ in step.servers]
    torch.cuda.synchronize()
    gathers = [
        gpu.prepare([("server_poll", s.poll), ("server_gather", s.gather)], warps=8)
        for s in step.servers
    ]
    for stream, gather in zip(serving, gathers, strict=True):
        with torch.cuda.stream(stream):
            gather.run()
    time.sleep(0.02)  # they are spinning by now
    gpu.prepare(client_steps(step)[:3], grid=[1, 32, 1], warps=8).run()
    torch.cuda.synchronize()
    loaded = np.flatnonzero(np.frombuffer(step.batch_size.read(), np.uint32)).tolist()
    assert loaded == list(range(len(step.servers)))
    for stream, server in zip(serving, step.servers, strict=True):
        with torch.cuda.stream(stream):
            server.run_experts(lambda rows: rows * 2)
            gpu.prepare([("server_reply_direct", server.reply_args)], warps=8).run()
    gpu.prepare([("client_combine", step.combine)], grid=32, warps=8).run()
    torch.cuda.synchronize()
    assert status_of(step.status).code == 0
    want = moe_reference(hidden, ids, weights, lambda _, r: r * 2, step.shape.num_experts)
    if CASES[name][0].reply_mode == 0:
        torch.testing.assert_close(step.result(), want)
    else:
        assert torch.equal(step.result(), want)


def test_an_echo_trip_in_two_graphs(gpu):
    """Client and server as a graph each, on two streams, replayed; rows come back as they are."""
    step, (hidden, _, _) = make_step(gpu, "one row", seed=22)
    server = step.servers[0]
    server.reply_args.expert_output = 0
    client, serve = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    graphs = []
    for stream, steps in (
        (client, client_steps(step)),
        (serve, [("server_poll", server.poll), ("server_reply_direct", server.reply_args)]),
    ):
        launch = gpu.prepare(steps, warps=8)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch.run()
        graphs.append(graph)
    for round_idx in range(5):
        fresh = torch.randn_like(hidden)
        step.hidden.write(fresh)
        step.output.tensor.fill_(0xEE)
        server.recv.write(b"\0" * 8, server.recv.num_bytes - 16)  # as before the first message
        step.replies[0].write(b"\0" * 8, step.replies[0].num_bytes - 16)
        server.slot.write(b"\0" * 8, 48)  # last_seq
        torch.cuda.synchronize()
        with torch.cuda.stream(client):
            graphs[0].replay()
        with torch.cuda.stream(serve):
            graphs[1].replay()
        torch.cuda.synchronize()
        assert status_of(step.status).code == 0, round_idx
        assert torch.equal(step.result(), fresh)


def test_a_server_that_does_not_answer_is_a_timeout(gpu):
    step, _ = make_step(gpu, "one row", seed=23, timeout_ns=20_000_000)
    gpu.prepare(client_steps(step), warps=4).run()
    status = status_of(step.status)
    assert (status.code, status.stage, status.expected, status.seen) == (3, 10, 1, 0)
    assert set(step.output.read()) == {0xEE}, "nothing is written without a reply"


def test_poll_gives_up_in_time(gpu):
    step, _ = make_step(gpu, "one row", seed=24, timeout_ns=20_000_000)
    server = step.servers[0]
    start = time.monotonic()
    gpu.prepare([("server_poll", server.poll), ("server_gather", server.gather)], warps=4).run()
    torch.cuda.synchronize()
    assert 0.02 <= time.monotonic() - start < 2
    assert server.found.read(0, 4) == b"\0" * 4
    assert not any(server.expert_rows.read()), "an empty batch counts nothing"


def test_a_damaged_head_is_refused_with_a_reason(gpu):
    step, _ = make_step(gpu, "one row", seed=25, timeout_ns=200_000_000)
    server = step.servers[0]
    gpu.prepare(client_steps(step)[:3], warps=4).run()
    server.recv.write(b"\x55", 33)  # inside the head
    gpu.prepare([("server_poll", server.poll), ("server_gather", server.gather),
                 ("server_reply_direct", server.reply_args), ("client_combine", step.combine)],
                warps=4).run()
    status = status_of(step.status)
    assert (status.code, status.stage, status.syndrome) == (6, 10, 3)
