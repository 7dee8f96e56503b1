"""Servers give credits and clients keep to them, on every way that a batch can take."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.system.cluster import TOKEN, batch, cluster, expected, model_facts
from tests.system.test_elastic import wait_until

from expertwire import Client
from expertwire.pacing import Pace

MODEL = model_facts(num_experts=6, hidden_size=64, top_k=2)


def budget_for(rows: int, clients: int = 1, top_k: int = 2) -> int:
    """Bytes with which each of `clients` may have that many rows under way."""
    pace = Pace(256, 2, row_bytes=64 * 4 + 8 * top_k, fixed_bytes=0)
    from expertwire.message import FLAG_BYTES, RequestLayout

    fixed = RequestLayout.of(0, 1, 0).end + FLAG_BYTES + 60
    return clients * (fixed + rows * pace.row_bytes)


def sizes_of(server) -> list[int]:
    """Becomes the rows of every message that the server computes."""
    seen: list[int] = []
    batcher, run = server.batcher, server.shard.run

    def watched(*arguments):
        count = batcher._found[0]
        seen.extend(batcher.messages[m].head.num_rows for m in range(count))
        return run(*arguments)

    server.shard.run = watched
    return seen


@pytest.mark.parametrize("do_ibgda", [True, False])
def test_a_batch_is_cut_to_the_credit(do_ibgda):
    options = {"max_inflight_bytes": budget_for(20)}
    with cluster([range(6)], MODEL, server_options=options, do_ibgda=do_ibgda) as (
        client, servers, _,
    ):
        seen = sizes_of(servers[0])
        inputs = batch(100, MODEL)
        torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))
        assert seen == [20] * 5
        seen.clear()
        first, second = client.dispatch(0, *inputs), client.dispatch(1, *inputs)
        torch.testing.assert_close(second.combine(), expected(*inputs, MODEL, layer=1))
        torch.testing.assert_close(first.combine(), expected(*inputs, MODEL))
        assert seen == [20] * 10


def test_a_server_without_need_limits_nobody():
    with cluster([range(6)], MODEL) as (client, servers, _):
        link = client.links.table.links[0]
        assert link.credit == Pace.of(link.shape).window_bytes
        seen = sizes_of(servers[0])
        client.moe(0, *batch(600, MODEL))
        assert sorted(seen) == [88, 256, 256]


def test_shares_follow_the_clients_that_come_and_go():
    budget = budget_for(60, clients=2)
    with cluster([range(6)], MODEL, server_options={"max_inflight_bytes": budget}) as (
        client, _, registry,
    ):
        def credit(of):
            return of.links.table.links[0].credit

        alone = credit(client)
        with Client(registry, token=TOKEN) as second, Client(registry, token=TOKEN) as third:
            for other in (second, third):
                other.wait_ready(5)
            wait_until(lambda: [credit(c) for c in (client, second, third)] == [budget // 3] * 3)
            inputs = batch(90, MODEL)
            for user in (client, second, third):
                torch.testing.assert_close(user.moe(0, *inputs), expected(*inputs, MODEL))
        wait_until(lambda: credit(client) == alone)
        assert client.num_retries == 0 and client.links.num_lost == 0


def test_what_is_under_way_stays_within_the_budget():
    """Three clients with everything dispatched at once, and a server that does not answer yet."""
    budget = budget_for(16, clients=3)
    with cluster([range(6)], MODEL, server_options={"max_inflight_bytes": budget}) as (
        client, servers, registry,
    ), Client(registry, token=TOKEN) as second, Client(registry, token=TOKEN) as third:
        users = (client, second, third)
        for user in users:
            user.wait_ready(5)
        wait_until(lambda: all(u.links.credit == budget // 3 for u in users))
        proceed, run = threading.Event(), servers[0].shard.run

        def held(*arguments):
            assert proceed.wait(10)
            return run(*arguments)

        servers[0].shard.run = held
        inputs = batch(200, MODEL)
        handles = [user.dispatch(0, *inputs) for user in users for _ in range(2)]
        time.sleep(0.1)
        under_way = sum(
            Pace.of(u.links.shape).message_bytes(int(f.batch_size[0]))
            for u in users for f in u.in_flight
        )
        assert 0 < under_way <= budget
        proceed.set()
        for handle in handles:
            torch.testing.assert_close(handle.combine(), expected(*inputs, MODEL))


def test_a_credit_that_falls_below_what_is_queued_still_lets_it_through():
    options = {"max_inflight_bytes": budget_for(64)}
    with cluster([range(6)], MODEL, server_options=options) as (client, _, _):
        inputs = batch(300, MODEL)
        handle = client.dispatch(0, *inputs)
        client.links.table.links[0].credit = client.links.credit = 10  # less than one row
        torch.testing.assert_close(handle.combine(), expected(*inputs, MODEL))
        small = batch(5, MODEL)
        torch.testing.assert_close(client.moe(0, *small), expected(*small, MODEL))


def test_nonsense_from_a_server_changes_no_credit():
    with cluster([range(6)], MODEL) as (client, servers, _):
        link, before = client.links.table.links[0], client.links.credit
        wait_until(lambda: servers[0]._clients)  # the client may be done with the handshake first
        for credit in (None, "5", -1, 2.5, True, [1]):
            servers[0]._clients[0].channel.send({"type": "credit", "credit": credit})
        time.sleep(0.1)
        assert link.credit == before and not link.lost
        servers[0]._clients[0].channel.send({"type": "credit", "credit": 12345})
        wait_until(lambda: client.links.credit == 12345)
