"""The echo trip of many blocks on two streams: the server spins before a message is there."""

from __future__ import annotations

import pytest
import torch

from expertwire.device_structs import KernelStatus
from expertwire.loopback import Loopback, StepShape


@pytest.mark.parametrize(("num_rows", "grid"), [(1, 1), (33, 8), (128, 64)])
def test_rows_come_back_trip_after_trip(gpu, num_rows, grid):
    hidden_size, trips = 7168, 20
    step = Loopback(
        gpu, StepShape(num_rows, hidden_size, 1, 1, [[0]]),
        torch.zeros(num_rows, hidden_size, dtype=torch.bfloat16),
        torch.zeros(num_rows, 1, dtype=torch.int64), torch.ones(num_rows, 1), in_place=True,
        timeout_ns=1_000_000_000,
    )
    send = gpu.prepare([("client_send_direct", step.send_args)], grid=grid + 1, warps=8)
    combine = gpu.prepare([("client_combine", step.combine)], grid=grid, warps=8)
    echo = gpu.prepare([("server_echo_in_place", step.servers[0].echo)], grid=grid, warps=8)
    client, server = torch.cuda.Stream(), torch.cuda.Stream()
    sent = torch.randn(trips, num_rows, hidden_size, device=gpu.device).to(torch.bfloat16)
    came = torch.zeros_like(sent)
    hidden = step.hidden.view(torch.bfloat16, num_rows, hidden_size)
    output = step.output.view(torch.bfloat16, num_rows, hidden_size)
    hidden.copy_(sent[0])  # what a copy needs is loaded before anything spins
    torch.cuda.synchronize()
    with torch.cuda.stream(server):
        for _ in range(trips):
            echo.run()
    with torch.cuda.stream(client):
        for i in range(trips):
            hidden.copy_(sent[i])
            send.run()
            combine.run()
            came[i].copy_(output)
    torch.cuda.synchronize()
    assert step.status.read_struct(KernelStatus).code == 0
    assert torch.equal(came, sent)
    assert not any(step.arrived.read() + step.servers[0].seen.read())
