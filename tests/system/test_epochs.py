"""Observation is not membership, and what comes late never counts."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import pytest
import torch
from tests.system.cluster import (
    TOKEN,
    ScaledExperts,
    batch,
    cluster,
    expected,
    model_facts,
    wait_until,
)

from expertwire import Client, Server
from expertwire.errors import HcaError
from expertwire.message import FLAG_BYTES
from expertwire.registry import roster

MODEL = model_facts(num_experts=6, hidden_size=16, top_k=2)
BOTH = [range(6), range(6)]


def link_to(client: Client, name: str):
    return next(link for link in client.links.table.links if link.server_id == name)


@contextlib.contextmanager
def held(server: Server):
    """The server's experts wait until `go`, or the block's end, as if its machine were stuck."""
    go, entered, run = threading.Event(), threading.Event(), server.shard.run

    def wait(*arguments):
        entered.set()
        assert go.wait(20)
        return run(*arguments)

    server.shard.run = wait
    try:
        yield entered, go
    finally:
        server.shard.run = run
        go.set()


def test_two_clients_that_disagree_never_split_or_double_a_contribution():
    """One keeps giving up on s0, the other keeps using it; the registry keeps both servers."""
    with cluster(BOTH, MODEL) as (client, _, registry), Client(
        registry, token=TOKEN
    ) as other:
        other.links.wait(lambda t: len(t.links) == 2, 5)
        epoch, inputs = registry.epoch, batch(30, MODEL)
        want, errors, stop = expected(*inputs, MODEL), [], threading.Event()
        used: dict[str, set[int]] = {"client": set(), "other": set()}

        def work(name: str, user: Client) -> None:
            try:
                while not stop.is_set():
                    torch.testing.assert_close(user.moe(0, *inputs), want)
                    used[name].add(len(user.links.usable().links))
            except Exception as err:
                errors.append(err)

        threads = [threading.Thread(target=work, args=item)
                   for item in (("client", client), ("other", other))]
        for thread in threads:
            thread.start()
        end, given_up = time.monotonic() + 2, 0
        while time.monotonic() < end:
            for link in client.links.table.links:
                if link.server_id == "s0" and not link.lost:
                    client.links.mark_lost(link, "I do not like it")
                    given_up += 1
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not errors, errors[0]
        assert given_up >= 3 and used["client"] >= {1} and used["other"] == {2}
        assert other.links.num_lost == 0 and other.num_retries == 0
        wait_until(lambda: registry.members["s0"].reports == given_up)
        assert set(registry.members) == {"s0", "s1"} and registry.epoch == epoch


def test_a_late_reply_goes_nowhere_and_the_next_results_are_right():
    with cluster(BOTH, MODEL, reply_timeout=0.2) as (client, servers, _):
        inputs = batch(30, MODEL)
        want = expected(*inputs, MODEL)
        torch.testing.assert_close(client.moe(0, *inputs), want)
        with held(servers[0]) as (entered, _):
            old = link_to(client, "s0")
            torch.testing.assert_close(client.moe(0, *inputs), want)
            assert entered.is_set() and client.num_retries == 1
            wait_until(lambda: old not in client.links.retired and old.endpoint._closed)
        others = batch(30, MODEL, seed=9)
        for _ in range(50):  # now the late reply is on its way
            torch.testing.assert_close(client.moe(1, *others), expected(*others, MODEL, 1))
        wait_until(lambda: len(client.links.table.links) == 2)
        torch.testing.assert_close(client.moe(0, *inputs), want)


def test_keys_are_revoked_before_a_server_that_was_given_up_can_write_again():
    with cluster(BOTH, MODEL, reply_timeout=0.2) as (client, servers, _):
        inputs = batch(30, MODEL)
        client.moe(0, *inputs)
        end = servers[0]._clients[0].endpoint
        assert end.peer.map(end.remote.rkey, end.remote.addr, end.remote.num_bytes)

        def revoked() -> bool:
            client.moe(0, *inputs)
            try:
                end.peer.map(end.remote.rkey, end.remote.addr, end.remote.num_bytes)
            except HcaError:
                return True
            return False

        with held(servers[0]):
            client.moe(0, *inputs)
            # Once a batch begins with a table without it; the stuck server holds its end open.
            wait_until(revoked)


@pytest.mark.parametrize("age", [1, 2, 1000])
def test_a_flag_of_an_earlier_batch_is_not_taken_for_this_ones(age):
    """Somebody raises the flag of the slot with an old number and old rows while we wait."""
    with cluster([range(6)], MODEL, num_slots=1) as (client, servers, _):
        client.seq = 5000
        inputs, others = batch(30, MODEL), batch(30, MODEL, seed=5)
        client.moe(0, *others)
        link = link_to(client, "s0")
        flag = ctypes.c_uint64.from_address(
            link.endpoint.recv.addr + link.shape.reply_slot_bytes - FLAG_BYTES
        )
        with held(servers[0]) as (entered, _):
            handle = client.dispatch(0, *inputs)
            results: list[torch.Tensor] = []
            thread = threading.Thread(target=lambda: results.append(handle.combine()))
            thread.start()
            assert entered.wait(5)
            flag.value = client.seq - age
            link.endpoint.notify()
            time.sleep(0.15)
            assert not results, "it waits for its own number"
        thread.join(10)
        torch.testing.assert_close(results[0], expected(*inputs, MODEL))


def test_a_seat_is_used_again_only_after_its_old_keys_are_gone(monkeypatch):
    monkeypatch.setattr(roster, "MAX_FREED_SEATS", 0)  # the registry gives it away at once
    with cluster(BOTH, MODEL) as (client, servers, registry):
        inputs = batch(30, MODEL)
        client.moe(0, *inputs)
        old = link_to(client, "s0")
        with held(servers[0]) as (entered, go):
            handle = client.dispatch(0, *inputs)
            assert entered.wait(5)
            servers[0].lease.close()  # no member any more, but it still owes an answer
            wait_until(lambda: old in client.links.retired)
            with Server(ScaledExperts(range(6)), MODEL, registry, token=TOKEN, name="new") as new:
                new.wait_registered(5)
                assert registry.members["new"].seat == old.seat
                time.sleep(0.3)
                assert {link.server_id for link in client.links.table.links} == {"s1"}
                assert not old.endpoint._closed
                go.set()
                torch.testing.assert_close(handle.combine(), expected(*inputs, MODEL))
                wait_until(lambda: len(client.links.table.links) == 2)
                assert old.endpoint._closed
                torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))
