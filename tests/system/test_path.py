"""Proof that messages go through the work queues, and only through them."""

from __future__ import annotations

import time

import pytest
import torch
from tests.system.cluster import batch, cluster, expected, model_facts

from expertwire.hca.soft import HOOK_STALL
from expertwire.hca.wqe import Wqe
from expertwire.message import RequestLayout

MODEL = model_facts(num_experts=6, hidden_size=24, top_k=3)
SHARES = [[0, 1], [2, 3], [4, 5]]


def recorder(log):
    import ctypes

    def hook(_context, qpn, index, address, num_bytes):
        log.append((qpn, index, Wqe.decode(ctypes.string_at(address, num_bytes))))
        return 0

    return hook


@pytest.mark.parametrize("num_qps", [1, 3])
def test_wqes_are_exactly_what_the_messages_require(num_qps):
    """Three writes per loaded server and three per reply, with the right byte counts."""
    with cluster(SHARES, MODEL, batch_invariant=False, num_qps=num_qps) as (client, servers, _):
        sent, replied = [], [[] for _ in servers]
        client.hca.set_hook(recorder(sent))
        for server, log in zip(servers, replied, strict=True):
            server.hca.set_hook(recorder(log))
        hidden, ids, weights = batch(11, MODEL)
        ids[:, :] = torch.where(ids >= 4, ids - 4, ids)  # server 2 gets nothing
        out = client.moe(1, hidden, ids, weights)
        torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL, 1))

        rows = [int(((ids // 2) == s).any(1).sum()) for s in range(3)]
        assert rows[2] == 0 and min(rows[:2]) > 0
        assert all(wqe.name == "RDMA_WRITE" for _, _, wqe in sent)
        sizes = sorted(sum(d.num_bytes for d in wqe.data) for _, _, wqe in sent)
        want = []
        for count in rows[:2]:
            layout = RequestLayout.of(count, 3, 24 * 4)
            want += [layout.end - layout.hidden_offset, layout.hidden_offset, 8]
        assert sizes == sorted(want)
        for s in range(2):
            sizes = [sum(d.num_bytes for d in wqe.data) for _, _, wqe in replied[s]]
            assert sizes == [rows[s] * 24 * 4, 64, 8], "rows, head, flag, in this order"
        assert replied[2] == []


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_counted_bytes_are_those_that_the_queues_carried(fp8, traced):
    """By the native trip, and by the general way that a traced client takes."""
    with cluster(SHARES, MODEL, fp8=fp8) as (client, servers, _):
        client.trace = [] if traced else None
        for count in (1, 11):
            client.moe(1, *batch(count, MODEL))
        counted = client.stats()["servers"].values()
        assert sum(c["messages"] for c in counted) >= 4
        assert sum(c["bytes_sent"] for c in counted) == client.hca.stats()["bytes"]
        carried_back = sum(server.hca.stats()["bytes"] for server in servers)
        assert sum(c["bytes_received"] for c in counted) == carried_back


def test_with_the_hca_stopped_nothing_arrives():
    with cluster(SHARES, MODEL) as (client, servers, _):
        client.hca.set_hook(lambda *_: HOOK_STALL)
        hidden, ids, weights = batch(5, MODEL)
        handle = client.dispatch(0, hidden, ids, weights)
        time.sleep(0.3)
        assert all(server.batcher.counts["messages"] == 0 for server in servers)
        assert all(
            server.hca.read_word(addr) == 0
            for server in servers for addr in server.batcher.flag_addrs
        )
        client.hca.set_hook(None)
        client.hca.kick()
        torch.testing.assert_close(handle.combine(), expected(hidden, ids, weights, MODEL))


def test_direct_path_posts_no_wqe():
    with cluster(SHARES, MODEL, do_ibgda=False) as (client, servers, _):
        hidden, ids, weights = batch(9, MODEL)
        out = client.moe(0, hidden, ids, weights)
        torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL))
        assert client.hca.stats()["wqes"] == {}
        assert all(server.hca.stats()["wqes"] == {} for server in servers)


@pytest.mark.parametrize(("mode", "operation"), [
    ("add", "MASKED_FA"), ("write_imm", "RDMA_WRITE_IMM"),
])
def test_signal_by_masked_add_or_immediate(mode, operation):
    """One signal per message and two writes, both ways."""
    with cluster(SHARES, MODEL, signal_mode=mode) as (client, servers, _):
        for seed in range(6):
            hidden, ids, weights = batch(7, MODEL, seed=seed)
            out = client.moe(0, hidden, ids, weights)
            torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL))
        for hca in (client.hca, *(server.hca for server in servers)):
            wqes = hca.stats()["wqes"]
            assert wqes.keys() == {"RDMA_WRITE", operation}
            assert wqes["RDMA_WRITE"] == 2 * wqes[operation]
