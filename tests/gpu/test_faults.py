"""Faults that systems of this kind have had, on one GPU: the whole kind, not the one input."""

from __future__ import annotations

import pytest
import torch

from expertwire.cuda.client import GpuClient, Peer
from expertwire.cuda.local import LocalExperts
from expertwire.cuda.server import GpuServer
from tests.gpu.test_experts import make_experts
from tests.gpu.test_local import HIDDEN, MIDDLE, NUM_EXPERTS, TOP_K, batch, held, reference

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def test_one_slot_100000_times_never_gives_an_old_batch(gpu):
    """Sixteen batches in turn through one slot, in graphs; every result is its own batch's."""
    turns, calls = 16, 32
    with LocalExperts(make_experts(64, 32, torch.bfloat16), TOP_K, max_rows=2, num_slots=1,
                      own_stream=True) as local:
        rows = torch.randn(turns, 1, 64, device="cuda").bfloat16()
        ids = torch.rand(turns, 1, NUM_EXPERTS, device="cuda").topk(TOP_K, 2).indices
        weights = torch.rand(turns, 1, TOP_K, device="cuda")
        want = torch.stack([local.moe(0, rows[i], ids[i], weights[i]) for i in range(turns)])
        local.check()
        assert len({tuple(w.flatten().tolist()) for w in want}) == turns
        got = torch.empty(calls, 1, 64, dtype=torch.bfloat16, device="cuda")
        expected = want.repeat(calls // turns, 1, 1)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            for i in range(calls):
                got[i] = local.moe(0, rows[i % turns], ids[i % turns], weights[i % turns])
            wrong += (got != expected).sum()
        for turn in range(100_000 // calls):
            graph.replay()
            if turn % 4 == 3:  # a full launch queue would stop the server's thread, too
                torch.cuda.current_stream().synchronize()
        local.check()
        assert wrong.item() == 0


class TwoServers:
    """Halves of the experts at two servers of the caller's stream."""

    def __init__(self):
        self.experts = make_experts(HIDDEN, MIDDLE, torch.bfloat16)
        self.local = LocalExperts(self.experts, TOP_K, max_rows=32)
        shape, shares = self.local.client.shape, [range(4), range(4, NUM_EXPERTS)]
        self.servers = [GpuServer(held(self.experts, list(s)), NUM_EXPERTS, shape) for s in shares]
        self.client = GpuClient(
            self.local.model_info,
            [Peer(i, list(s), [server.request_addr(k) for k in range(shape.num_slots)])
             for i, (s, server) in enumerate(zip(shares, self.servers, strict=True))],
            shape, self.experts.device, after_send=lambda: [s.enqueue() for s in self.servers],
        )
        for i, server in enumerate(self.servers):
            server.connect(1, self.client.reply_addrs(i))

    def same(self, inputs: tuple[torch.Tensor, ...]) -> bool:
        same = torch.equal(self.client.moe(1, *inputs), self.local.moe(1, *inputs))
        self.client.check()
        return same


def test_no_rows_nobody_asked_and_one_server_idle_for_1000_rounds(gpu):
    two = TwoServers()
    hidden, ids, weights = batch(20, seed=1)
    assert two.client.moe(1, hidden[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
    nobody = two.client.moe(1, hidden, torch.full_like(ids, -1), weights)
    assert (nobody == 0).all()
    only_first = hidden, ids % 4, weights
    for _ in range(1000):
        two.client.moe(1, *only_first)
    assert two.same(only_first)
    assert two.servers[1].expert_rows().sum() == 0
    one = ids % 4
    one[7, 1] = 6
    assert two.same((hidden, one, weights))
    assert two.servers[1].expert_rows().sum() == 1


@pytest.mark.parametrize("id_type", [torch.int64, torch.int32])
def test_garbage_ids_are_skipped_and_counted(gpu, id_type):
    two = TwoServers()
    hidden, ids, weights = batch(20, seed=2)
    bad = [-1, -2, -(2**31), NUM_EXPERTS, NUM_EXPERTS + 1, 2**31 - 1]
    bad += [2**32, 2**32 + 1, -(2**63), 2**63 - 1] if id_type is torch.int64 else []
    for row, value in enumerate(bad):
        ids[row, row % TOP_K] = value
    ids[19] = ids[19, 0]  # doubles add up
    ids = ids.to(id_type)
    got = two.client.moe(1, hidden, ids, weights)
    two.client.check()
    assert two.client.num_skipped == len(bad)
    assert distance(got, reference(two.local, 1, hidden, ids.long(), weights)) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden_size", [16, 100, 128, 1536, 2880, 3584, 7168, 7170])
def test_hidden_sizes(gpu, hidden_size, dtype):
    """Also rows that are not dense and begin two bytes off."""
    experts = make_experts(hidden_size, 48, dtype)
    with LocalExperts(experts, TOP_K, max_rows=16) as local:
        _, ids, weights = batch(13, seed=3)
        storage = torch.randn(13, hidden_size + 3, device="cuda").to(dtype)
        hidden = storage[:, 1 : hidden_size + 1]
        got = local.moe(2, hidden, ids, weights)
        local.check()
        assert distance(got, reference(local, 2, hidden, ids, weights)) < BOUND[dtype]
