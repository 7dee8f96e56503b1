"""Clients and servers over UCX on this host: results, uneven counts, failover, refusals."""

from __future__ import annotations

import time

import pytest
import torch

from expertwire import Client
from expertwire.chaos.fleet import Fleet
from expertwire.demo import demo_model_path
from expertwire.errors import NoServerError
from expertwire.hca.fault import Faults, FaultyHca
from tests.system.cluster import TOKEN, batch, cluster, expected, model_facts
from tests.system.test_failover import Load

SERVER = {"hca": "ucx"}


def check(client: Client, model: dict, num_tokens: int, seed: int = 0, layer: int = 0) -> None:
    hidden, ids, weights = batch(num_tokens, model, seed=seed)
    out = client.moe(layer, hidden, ids, weights)
    torch.testing.assert_close(out, expected(hidden, ids, weights, model, layer))


@pytest.mark.parametrize("signal_mode", ["write", "add", "write_imm"])
def test_rows_come_back_right(signal_mode):
    model = model_facts()
    with cluster([range(4), range(4, 8)], model, server_options=SERVER, hca="ucx",
                 signal_mode=signal_mode, max_rows=16, num_slots=3) as (client, servers, _):
        for num_tokens in (0, 1, 7, 16, 100):
            check(client, model, num_tokens, seed=num_tokens, layer=num_tokens % 2)
        handles = []
        for seed in range(3):
            hidden, ids, weights = batch(10, model, seed=seed)
            handles.append((client.dispatch(0, hidden, ids, weights), hidden, ids, weights))
        for handle, *given in handles:
            torch.testing.assert_close(handle.combine(), expected(*given, model))
        assert all(s.stats()["rows"] > 0 for s in servers)


@pytest.mark.parametrize(("num_clients", "num_servers"), [(4, 2), (3, 2), (1, 4)])
def test_any_number_of_clients_and_servers(num_clients, num_servers):
    """Uneven tokens too: client i sends i * 5 + 1 rows, most of them to the first server."""
    model = model_facts()
    shares = [[e for e in range(8) if e % num_servers == i] for i in range(num_servers)]
    with cluster(shares, model, server_options=SERVER, hca="ucx") as (client, _, registry):
        others = [Client(registry, token=TOKEN, hca="ucx") for _ in range(num_clients - 1)]
        try:
            for i, each in enumerate([client, *others]):
                each.wait_ready(10)
                hidden, ids, weights = batch(i * 5 + 1, model, seed=i)
                ids[:, 0] = 0
                out = each.moe(0, hidden, ids, weights)
                torch.testing.assert_close(out, expected(hidden, ids, weights, model))
        finally:
            for each in others:
                each.close()


def test_message_larger_than_a_frame():
    """Rows of 28 KB, 16 to a message: two frames, the flag in the last."""
    model = model_facts(hidden_size=7168)
    with cluster([range(8)], model, server_options=SERVER, hca="ucx", max_rows=16) as (c, _, _):
        check(c, model, 40)


def test_error_completions_send_the_batch_elsewhere():
    model = model_facts()
    with cluster([range(8), range(8)], model, server_options=SERVER, hca="ucx") as (client, _, _):
        check(client, model, 4)
        links = client.links.table.links
        faulty = FaultyHca(client.hca, Faults())
        qpn = links[0].endpoint.qp_states[0].qpn
        faulty.faults = Faults(vanish_at=0, qpn=qpn)  # this server does not answer any more
        for seed in range(4):
            check(client, model, 8, seed=seed)
        client.hca.set_hook(None)
        assert client.stats()["retries"] >= 1


@pytest.mark.timeout(300)
def test_killed_server_process_costs_no_token():
    load = Load()
    with Fleet(demo_model_path(), hca="ucx") as fleet:
        fleet.start_registry()
        fleet.start_servers({"low": "0-7", "all": "0-15"})
        with Client(fleet.address, token=fleet.token, hca="ucx") as client:
            table = client.links.wait(lambda t: len(t.links) == 2, 20)
            assert len(table.links) == 2, client.links.refusals
            for layer in range(4):
                load.step(client, layer)
            fleet.kill("low")
            start = time.monotonic()
            while len(client.links.usable().links) > 1 or time.monotonic() - start < 0.5:
                load.step(client, 0)
                assert time.monotonic() - start < 20
            assert [link.server_id for link in client.links.usable().links] == ["all"]


def test_wrong_hca_is_refused_with_the_reason():
    model = model_facts()
    with (
        cluster([range(8)], model, server_options=SERVER, hca="ucx") as (_, _, registry),
        Client(registry, token=TOKEN, connect_timeout=1.0) as client,
        pytest.raises(NoServerError, match="hca=\"ucx\""),
    ):
        client.wait_ready()


def test_server_of_one_host_tells_a_network_client():
    model = model_facts()
    with (
        cluster([range(8)], model) as (_, _, registry),
        Client(registry, token=TOKEN, hca="ucx", connect_timeout=1.0) as client,
        pytest.raises(NoServerError, match="--hca ucx"),
    ):
        client.wait_ready()
