"""Whole batches over a path that cuts, delays and reorders writes, both ways."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.system.cluster import TOKEN, ScaledExperts, batch, cluster, expected, model_facts

import expertwire
import expertwire.client.client
import expertwire.server.server
from expertwire.errors import NoServerError
from expertwire.hca import open_hca
from expertwire.hca.fault import Faults, FaultyHca

MODEL = model_facts(num_experts=6, hidden_size=96, top_k=3)
SHARES = [[0, 1], [2, 3], [4, 5]]


@pytest.fixture
def path(monkeypatch):
    """Every HCA that clients and servers open gets these faults, each with a seed of its own."""
    seeds = itertools.count()

    def install(**faults):
        def open_faulty(name, **options):
            return FaultyHca(open_hca(name, **options), Faults(seed=next(seeds), **faults))

        for module in (expertwire.client.client, expertwire.server.server):
            monkeypatch.setattr(module, "open_hca", open_faulty)

    return install


@pytest.mark.parametrize(("faults", "signal_mode"), [
    (dict(mtu=64), "write"), (dict(mtu=64, max_delay=20), "write"),
    (dict(mtu=64), "add"), (dict(mtu=64, max_delay=20, reorder=True), "add"),
    (dict(reorder=True), "add"),
    (dict(mtu=64), "write_imm"), (dict(mtu=64, max_delay=20, reorder=True), "write_imm"),
    (dict(reorder=True), "write_imm"),
])
def test_batches_are_right(path, faults, signal_mode):
    path(**faults)
    with cluster(SHARES, MODEL, signal_mode=signal_mode) as (client, servers, _):
        for seed in range(15):
            hidden, ids, weights = batch(1 + 3 * seed, MODEL, seed=seed)
            out = client.moe(seed % 2, hidden, ids, weights)
            torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL, seed % 2))
        assert all(server.hca.relaxed_ordering == faults.get("reorder", False)
                   for server in servers)


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_flag_by_write_is_refused(path, side):
    """By whichever side may reorder, before anything is sent."""
    if side == "server":
        path(reorder=True)
    with cluster([], MODEL) as (_, _, registry), expertwire.Server(
        ScaledExperts(range(6)), MODEL, registry, token=TOKEN
    ) as server:
        server.wait_registered(5)
        if side == "client":
            path(reorder=True)
        with expertwire.Client(
            registry, token=TOKEN, signal_mode="write", connect_timeout=1.0
        ) as client:
            with pytest.raises(NoServerError, match='use "add" or "write_imm"'):
                client.moe(0, *batch(4, MODEL))
            assert client.hca.stats()["wqes"] == {}
