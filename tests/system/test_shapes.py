"""Sizes, ratios and settings that others had to grow into: odd widths, counts that do not match."""

from __future__ import annotations

import concurrent.futures
import contextlib

import pytest
import torch
from tests.leftovers import nothing_left_behind
from tests.system.cluster import TOKEN, batch, cluster, expected, model_facts, wait_until

from expertwire import Client
from expertwire.control.connection import configured_doorbell
from expertwire.errors import ConfigError
from expertwire.message import FP8_BLOCK
from expertwire.model.reference import dequantise_fp8, quantise_fp8

SMALL = model_facts(num_experts=6, hidden_size=20, top_k=3)


def odd(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values, somewhere else in memory."""
    count, size = rows.shape
    if kind == "columns":
        return rows.t().contiguous().t()
    if kind == "wide":
        wide = torch.zeros(count, size + 9, dtype=rows.dtype)
        wide[:, 3 : 3 + size] = rows
        return wide[:, 3 : 3 + size]
    flat = torch.zeros(count * size + 1, dtype=rows.dtype)  # off by one element
    flat[1:] = rows.flatten()
    return flat[1:].view(count, size)


@pytest.mark.parametrize("hidden_size", [16, 100, 128, 1536, 2880, 3584, 7168, 7170])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_hidden_size_from_any_place_in_any_format(hidden_size, dtype):
    """Rows as they are and as fp8; inputs with strides, and off by two bytes."""
    name = str(dtype).removeprefix("torch.")
    model = model_facts(num_experts=4, hidden_size=hidden_size, dtype=name)
    hidden, ids, weights = batch(5, model, dtype=dtype)
    with cluster([[0, 1], [2, 3]], model) as (client, _, registry), Client(
        registry, token=TOKEN, fp8=True
    ) as narrow:
        for kind in ("columns", "wide", "off by one"):
            torch.testing.assert_close(
                client.moe(0, odd(hidden, kind), ids, weights),
                expected(hidden, ids, weights, model),
            )
        rounded = dequantise_fp8(*quantise_fp8(hidden), dtype, FP8_BLOCK)
        for kind in ("columns", "off by one"):
            torch.testing.assert_close(
                narrow.moe(0, odd(hidden, kind), ids, weights),
                expected(rounded, ids, weights, model),
            )


@pytest.mark.parametrize(("clients", "servers"), [(4, 2), (3, 2), (1, 4), (4, 1)])
def test_any_number_of_clients_and_servers_with_uneven_tokens(clients, servers):
    """Each client with batches of its own size, at the same time; some have none at all."""
    shares = [list(range(6))[s::servers] for s in range(servers)]
    with cluster(shares, SMALL) as (first, _, registry), contextlib.ExitStack() as stack:
        all_clients = [first] + [
            stack.enter_context(Client(registry, token=TOKEN)) for _ in range(clients - 1)
        ]

        def run(idx: int) -> None:
            client = all_clients[idx]
            client.wait_ready(5)
            for turn in range(12):
                inputs = batch((7 * idx + 13 * turn) % 31 * (turn % 3), SMALL, seed=turn)
                torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, SMALL))

        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(run, idx) for idx in range(clients)]:
                done.result(20)


@pytest.mark.parametrize("mode", ["register", "record", "proxy"])
@pytest.mark.parametrize("signal_mode", ["write", "add", "write_imm"])
def test_every_way_to_ring(mode, signal_mode, monkeypatch):
    """Batches both ways from the first dispatch to the teardown, which leaves nothing behind."""
    monkeypatch.setenv("EXPERTWIRE_DOORBELL", mode)
    with nothing_left_behind(), cluster(
        [[0, 1, 2], [3, 4, 5]], SMALL, signal_mode=signal_mode, queue_depth=16,
        server_options={"queue_depth": 16},
    ) as (client, servers, _):
        for seed in range(20):
            inputs = batch(9, SMALL, seed=seed)
            torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, SMALL))
        registers = [
            state.doorbell_addr and client.hca.read_word(state.doorbell_addr)
            for link in client.links.table.links for state in link.endpoint.qp_states
        ]
        assert all(registers) == (mode == "register") == any(registers)
        wait_until(lambda: sum(s.batcher.counts["messages"] for s in servers) == 40)


def test_a_way_to_ring_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("EXPERTWIRE_DOORBELL", "bell")
    with pytest.raises(ConfigError, match="one of register, record, proxy, not 'bell'"):
        configured_doorbell()
