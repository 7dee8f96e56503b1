"""A client and servers whose data path is an mlx5 adapter each: the real thing down to pyverbs,
where tests/mlx5_fake.py takes over and software HCAs execute the queues."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
from tests.mlx5_fake import Fabric, FakeDevice, FakePort

import expertwire.hca.mlx5.hca as mlx5_hca
from expertwire import Client, Registry, Server
from expertwire.chaos.network import RETRY_EXCEEDED
from expertwire.demo import demo_model_path
from expertwire.errors import NoServerError
from expertwire.hca.mlx5.device import Device
from expertwire.hca.soft import SoftHca


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch):
    """Three RoCE adapters, mlx5_0 to mlx5_2, that pyverbs seems to find."""
    fabric = Fabric()
    softs = [SoftHca(spin=True) for _ in range(3)]  # an adapter does not sleep
    found = {
        f"mlx5_{i}": FakeDevice(
            fabric, f"mlx5_{i}", FakePort(link_layer=2, lid=0, active_mtu=3 + i % 2,
                                          gids=((3, 2, f"::ffff:10.0.0.{i + 1}"),)), soft=soft)
        for i, soft in enumerate(softs)
    }
    monkeypatch.setattr(mlx5_hca, "Device",
                        lambda name, config, verbs: Device(name, config, found[name].verbs))
    yield found
    for device in found.values():
        device.close()
    for soft in softs:
        soft.close()


@pytest.mark.parametrize("doorbell", ["register", "proxy"])
def test_layer_goes_over_adapters_and_a_lost_server_is_replaced(adapters, monkeypatch, doorbell):
    monkeypatch.setenv("EXPERTWIRE_DOORBELL", doorbell)
    path = demo_model_path()
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(Registry("127.0.0.1:0"))
        servers = [
            stack.enter_context(Server.from_checkpoint(
                path, range(16), registry, hca=f"mlx5:mlx5_{i}:1", listen="127.0.0.1"))
            for i in (1, 2)]
        there = stack.enter_context(Client(registry, hca="mlx5:mlx5_0", signal_mode="add"))
        there.wait_ready(timeout=30)
        torch.manual_seed(7)
        hidden = torch.randn(9, 128, dtype=torch.bfloat16)
        topk_ids, topk_weights = torch.randint(0, 16, (9, 2)), torch.rand(9, 2)
        out = there.moe(0, hidden, topk_ids, topk_weights)

        local = stack.enter_context(Registry("127.0.0.1:0"))
        stack.enter_context(Server.from_checkpoint(path, range(16), local))
        here = stack.enter_context(Client(local))
        here.wait_ready(timeout=30)
        expected = here.moe(0, hidden, topk_ids, topk_weights)
        assert torch.equal(out, expected)
        used = adapters["mlx5_0"].soft.stats()["wqes"]
        assert used["RDMA_WRITE"] >= 2 and used["MASKED_FA"] >= 1

        servers[0].close()
        assert torch.equal(there.moe(0, hidden, topk_ids, topk_weights), expected)
    assert all(not device.open for device in adapters.values())


def test_a_lost_reply_costs_no_deadline(adapters):
    """An adapter does not tell of an error completion; the server looks, and closes the connection:
    the client sends the rows elsewhere, long before the deadline."""
    lost = threading.Event()

    def lose_one(_context, _qpn, _idx, _wqe, _bytes) -> int:
        if lost.is_set():
            return 0
        lost.set()
        return RETRY_EXCEEDED

    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(Registry("127.0.0.1:0"))
        for i in (1, 2):
            stack.enter_context(Server.from_checkpoint(
                demo_model_path(), range(16), registry, hca=f"mlx5:mlx5_{i}", listen="127.0.0.1"))
        client = stack.enter_context(
            Client(registry, hca="mlx5:mlx5_0", signal_mode="add", reply_timeout=60.0))
        client.links.wait(lambda table: len(table.links) == 2, 30)
        hidden, ids = torch.randn(9, 128, dtype=torch.bfloat16), torch.randint(0, 16, (9, 2))
        expected = client.moe(0, hidden, ids, torch.ones(9, 2))
        for name in ("mlx5_1", "mlx5_2"):  # what servers post are replies only
            adapters[name].soft.set_hook(lose_one)
        start = time.monotonic()
        assert torch.equal(client.moe(0, hidden, ids, torch.ones(9, 2)), expected)
        assert lost.is_set() and client.stats()["retries"] == 1
        assert time.monotonic() - start < 30, "the deadline is 60 s"


def test_plain_writes_as_flags_are_refused_on_a_path_that_promises_nothing(adapters):
    with Registry("127.0.0.1:0") as registry, \
            Server.from_checkpoint(demo_model_path(), range(16), registry, hca="mlx5:mlx5_1",
                                   listen="127.0.0.1"), \
            Client(registry, hca="mlx5:mlx5_0") as client, \
            pytest.raises(NoServerError, match='use "add"'):
        client.wait_ready(timeout=1)


def test_a_client_of_one_host_is_told_how_to_reach_the_server(adapters):
    with Registry("127.0.0.1:0") as registry, \
            Server.from_checkpoint(demo_model_path(), range(16), registry, hca="mlx5:mlx5_1",
                                   listen="127.0.0.1"), \
            Client(registry) as client, \
            pytest.raises(NoServerError, match="mlx5:<device>"):
        client.wait_ready(timeout=1)
