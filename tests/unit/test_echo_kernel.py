"""The echo of many blocks: what it answers, what it refuses, what it leaves for the next launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from expertwire.device_structs import KernelStatus, ReplyHead
from expertwire.loopback import Loopback, StepShape
from expertwire.target import CpuTarget

GEOMETRIES = [(1, 1, 1), (1, 4, 1), (3, 2, 4), (5, 1, 8)]


def make(warp_size: int, num_tokens: int = 21, **changes) -> Loopback:
    shape = StepShape(num_tokens, 40, 2, 4, [[0, 1, 2, 3]], **changes)
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 40, generator=generator).to(torch.bfloat16)
    ids = torch.arange(2 * num_tokens).view(num_tokens, 2) % 4
    return Loopback(
        CpuTarget(warp_size), shape, hidden, ids, torch.ones(num_tokens, 2), in_place=True,
        timeout_ns=5_000_000,
    )


def run(step: Loopback, name: str, args, grid: int, warps: int) -> None:
    step.target.prepare([(name, args)], grid=grid, warps=warps).run()


def reply_head(step: Loopback) -> ReplyHead:
    return ReplyHead.from_buffer_copy(step.replies[0].read(step.replies[0].num_bytes - 80, 64))


def flag(step: Loopback) -> int:
    return int.from_bytes(step.replies[0].read(step.replies[0].num_bytes - 16, 8), "little")


@pytest.mark.parametrize(("grid", "warps", "warp_size"), GEOMETRIES)
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_rows_come_back_trip_after_trip(grid, warps, warp_size, num_tokens):
    step = make(warp_size, num_tokens)
    for trip in range(1, 4):
        rows = torch.randn(num_tokens, 40).to(torch.bfloat16)
        step.hidden.write(rows)
        run(step, "client_send_direct", step.send_args, grid, warps)
        run(step, "server_echo_in_place", step.servers[0].echo, grid, warps)
        run(step, "client_combine", step.combine, grid, warps)
        assert step.status.read_struct(KernelStatus).code == 0
        assert torch.equal(step.result(), rows)
        assert flag(step) == trip
        assert not any(step.arrived.read() + step.servers[0].arrived.read())
        assert not any(step.servers[0].seen.read()), "counters are ready for the next launch"


def test_nothing_there_is_a_launch_that_ends_in_time():
    step = make(1)
    run(step, "server_echo_in_place", step.servers[0].echo, 2, 2)
    assert flag(step) == 0 and not any(step.servers[0].seen.read())


@pytest.mark.parametrize(("at_byte", "reason"), [(0, 1), (4, 2), (33, 3), (120, 3)])
def test_a_damaged_head_is_refused_and_the_next_one_served(at_byte, reason):
    step = make(4)
    run(step, "client_send_direct", step.send_args, 3, 2)
    recv = step.servers[0].recv
    recv.write(bytes([recv.read(at_byte, 1)[0] ^ 0x55]), at_byte)
    run(step, "server_echo_in_place", step.servers[0].echo, 3, 2)
    head = reply_head(step)
    assert (head.reason, head.num_rows, head.seq, flag(step)) == (reason, 0, 1, 1)
    run(step, "client_send_direct", step.send_args, 3, 2)
    run(step, "server_echo_in_place", step.servers[0].echo, 3, 2)
    assert (reply_head(step).reason, flag(step)) == (0, 2)


def test_what_an_echo_cannot_answer_is_refused():
    step = make(1, reply_mode=1)  # a row per expert: an echo has one per token
    run(step, "client_send_direct", step.send_args, 2, 2)
    run(step, "server_echo_in_place", step.servers[0].echo, 2, 2)
    assert (reply_head(step).reason, reply_head(step).num_rows) == (12, 0)


def test_a_message_that_a_block_did_not_see_stays_for_the_next_launch():
    """`seen` short of the number of blocks: here one block is made to count less."""
    step = make(1)
    server = step.servers[0]
    run(step, "client_send_direct", step.send_args, 2, 2)
    server.seen.write(np.array([-1], np.int32))
    run(step, "server_echo_in_place", server.echo, 3, 2)
    assert flag(step) == 0 and not any(server.seen.read())
    run(step, "server_echo_in_place", server.echo, 3, 2)
    assert (flag(step), reply_head(step).num_rows) == (1, 21)


@pytest.mark.parametrize("num_servers", [5, 40])
def test_counts_that_do_not_fit_a_block_take_the_scratch_memory(num_servers):
    """The same messages as the kernels of one block make, with many servers and tokens."""
    num_tokens = 210
    shape = StepShape(num_tokens, 8, 3, num_servers, [[s] for s in range(num_servers)])
    hidden = torch.randn(num_tokens, 8).to(torch.bfloat16)
    ids = torch.rand(num_tokens, num_servers).topk(3, dim=1).indices
    parts = hidden, ids, torch.rand(num_tokens, 3)
    direct = Loopback(CpuTarget(1), shape, *parts, in_place=True)
    plain = Loopback(CpuTarget(1), shape, *parts)
    run(direct, "client_send_direct", direct.send_args, 3, 2)
    plain.target.prepare([("client_route", plain.route), ("client_pack", plain.pack)]).run()
    for server, send in zip(direct.servers, plain.send, strict=True):
        assert server.recv.read(0, send.num_bytes - 16) == send.read(0, send.num_bytes - 16)
    for name in ("batch_size", "num_pairs", "row_token", "pair_server", "pair_row"):
        assert getattr(direct, name).read() == getattr(plain, name).read(), name
