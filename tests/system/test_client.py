"""What goes in comes out right: shapes, sizes, placements, order, concurrency."""

from __future__ import annotations

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

from expertwire import Client
from expertwire.errors import ConfigError, InFlightError, NoServerError

MODEL = model_facts(num_experts=7, hidden_size=20, top_k=3)
SHARES = [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 31, 32, 33, 300])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_any_number_of_tokens(num_tokens, batch_invariant):
    """300 tokens are more than a slot holds: they go as several messages."""
    with cluster(SHARES, MODEL, batch_invariant=batch_invariant, max_rows=64) as (client, _, _):
        hidden, ids, weights = batch(num_tokens, MODEL)
        out = client.moe(1, hidden, ids, weights)
        assert out.shape == hidden.shape and out.dtype == hidden.dtype
        torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL, 1))


@pytest.mark.parametrize("warp_size", ["1", "4", "32"])
def test_any_warp_size(warp_size, monkeypatch):
    from expertwire import launch

    monkeypatch.setenv("EXPERTWIRE_CPU_WARP_SIZE", warp_size)
    launch.cpu_warp_size.cache_clear()
    try:
        with cluster(SHARES, MODEL) as (client, _, _):
            hidden, ids, weights = batch(70, MODEL)
            out = client.moe(0, hidden, ids, weights)
            torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL))
    finally:
        launch.cpu_warp_size.cache_clear()


@pytest.mark.parametrize(("num_experts", "num_servers"), [
    (256, 1), (256, 3), (256, 5), (256, 7), (5, 1),
])
def test_experts_need_not_divide(num_experts, num_servers):
    model = model_facts(num_experts=num_experts, hidden_size=8, top_k=4)
    shares = [list(range(i, num_experts, num_servers)) for i in range(num_servers)]
    with cluster(shares, model) as (client, _, _):
        hidden, ids, weights = batch(40, model)
        out = client.moe(0, hidden, ids, weights)
        torch.testing.assert_close(out, expected(hidden, ids, weights, model))


def test_overlapping_replicas_count_once_and_share_the_load():
    shares = [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2], [2, 3, 4, 5, 6]]
    with cluster(shares, MODEL) as (client, servers, _):
        hidden, ids, weights = batch(60, MODEL)
        out = client.moe(0, hidden, ids, weights)
        torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL))
        wait_until(lambda: all(server.batcher.counts["rows"] > 0 for server in servers))


@pytest.mark.parametrize("hidden_size", [16, 100, 128, 1536, 2880, 7170])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_hidden_size_and_dtype(hidden_size, dtype):
    model = model_facts(num_experts=4, hidden_size=hidden_size, dtype=dtype)
    with cluster([[0, 1], [2, 3]], model) as (client, _, _):
        hidden, ids, weights = batch(5, model, dtype=getattr(torch, dtype))
        hidden[:, 0] = torch.arange(5).to(hidden.dtype)
        out = client.moe(0, hidden, ids, weights)
        torch.testing.assert_close(out, expected(hidden, ids, weights, model))


def test_odd_strides_and_offsets():
    with cluster(SHARES, MODEL) as (client, _, _):
        hidden, ids, weights = batch(9, MODEL)
        want = expected(hidden, ids, weights, MODEL)
        wide = torch.zeros(9, 45)
        wide[:, 3:23] = hidden
        columns = hidden.t().contiguous().t()
        wide_ids = torch.zeros(9, 7, dtype=torch.int64)
        wide_ids[:, 2:5] = ids
        for h, i, w in (
            (wide[:, 3:23], ids, weights), (columns, ids, weights),
            (hidden, wide_ids[:, 2:5], weights), (hidden, ids.int(), weights.double()),
            (hidden, ids.t().contiguous().t(), weights.t().contiguous().t()),
        ):
            torch.testing.assert_close(client.moe(0, h, i, w), want)


def test_offset_by_two_bytes():
    model = model_facts(num_experts=4, hidden_size=33, dtype="bfloat16")
    with cluster([[0, 1], [2, 3]], model) as (client, _, _):
        hidden, ids, weights = batch(6, model, dtype=torch.bfloat16)
        flat = torch.zeros(6 * 33 + 1, dtype=torch.bfloat16)
        flat[1:] = hidden.flatten()
        out = client.moe(0, flat[1:].view(6, 33), ids, weights)
        torch.testing.assert_close(out, expected(hidden, ids, weights, model))


@pytest.mark.parametrize("bad", [-1, -2, -(2**31), 7, 8, 2**31 - 1, 2**40])
def test_ids_out_of_range_are_skipped_and_counted(bad):
    with cluster(SHARES, MODEL) as (client, _, _):
        hidden, ids, weights = batch(5, MODEL)
        ids[0, 1] = ids[3, 2] = ids[3, 0] = bad
        out = client.moe(0, hidden, ids, weights)
        torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL))
        assert client.num_skipped_ids == 3


def test_all_ids_skipped_gives_zeros_and_sends_nothing():
    with cluster(SHARES, MODEL) as (client, servers, _):
        hidden, ids, weights = batch(5, MODEL)
        out = client.moe(0, hidden, torch.full_like(ids, -1), weights)
        assert torch.equal(out, torch.zeros_like(hidden))
        assert all(server.batcher.counts["messages"] == 0 for server in servers)


def test_duplicate_ids_add_up():
    with cluster(SHARES, MODEL) as (client, _, _):
        hidden, ids, weights = batch(8, MODEL)
        ids[:, 1] = ids[:, 0]
        out = client.moe(0, hidden, ids, weights)
        torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL))


def test_fewer_experts_per_token_than_the_models_top_k():
    with cluster(SHARES, MODEL) as (client, _, _):
        for top_k in (1, 2, 3):
            hidden, ids, weights = batch(6, MODEL, top_k=top_k)
            out = client.moe(0, hidden, ids, weights)
            torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL))


def test_one_server_gets_everything_then_nothing_for_long_then_one_row():
    with cluster(SHARES, MODEL) as (client, servers, _):
        hidden, _, weights = batch(50, MODEL)
        for ids in (torch.zeros(50, 3, dtype=torch.int64), torch.full((50, 3), 6)):
            out = client.moe(0, hidden, ids, weights)
            torch.testing.assert_close(out, expected(hidden, ids, weights, MODEL))
        few = torch.zeros(1, 3, dtype=torch.int64)
        for _ in range(1000):
            client.moe(0, hidden[:1], few, weights[:1])
        assert servers[1].batcher.counts["messages"] == 0
        ids = torch.tensor([[3, 4, 3]])
        torch.testing.assert_close(
            client.moe(0, hidden[:1], ids, weights[:1]),
            expected(hidden[:1], ids, weights[:1], MODEL),
        )


def test_handles_combine_in_any_order_and_more_of_them_than_slots():
    with cluster(SHARES, MODEL, max_rows=16) as (client, _, _):
        inputs = [batch(40, MODEL, seed=s) for s in range(5)]
        handles = [client.dispatch(s % 2, *inputs[s]) for s in range(5)]
        for s in (3, 0, 4, 2, 1):
            torch.testing.assert_close(
                handles[s].combine(), expected(*inputs[s], MODEL, s % 2)
            )
        assert handles[3].combine() is handles[3].combine(), "combining twice gives the same"


def test_one_batch_too_many_waits_for_the_oldest():
    with cluster(SHARES, MODEL, max_rows=16, max_in_flight=3) as (client, _, _):
        inputs = [batch(20 + s, MODEL, seed=s) for s in range(9)]
        handles = []
        for s in range(9):
            handles.append(client.dispatch(0, *inputs[s]))
            assert sum(handle.num_open > 0 for handle in handles) <= 3
        assert [handle.num_open > 0 for handle in handles] == [False] * 6 + [True] * 3
        for s, handle in enumerate(handles):
            torch.testing.assert_close(handle.combine(), expected(*inputs[s], MODEL))


def test_one_batch_too_many_is_an_error_if_so_configured():
    with cluster(SHARES, MODEL, max_in_flight=2, on_full="raise") as (client, _, _):
        inputs = batch(5, MODEL)
        handles = [client.dispatch(0, *inputs) for _ in range(2)]
        with pytest.raises(InFlightError, match="2 batches are in flight, max_in_flight is 2"):
            client.dispatch(0, *inputs)
        for handle in handles:
            torch.testing.assert_close(handle.combine(), expected(*inputs, MODEL))
        torch.testing.assert_close(
            client.dispatch(0, *inputs).combine(), expected(*inputs, MODEL)
        )
        torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))


def test_many_clients_and_threads_at_once():
    with cluster(SHARES, MODEL) as (client, _, registry):
        errors = []

        def work(own: Client, layer: int):
            try:
                for seed in range(40):
                    inputs = batch(1 + seed, MODEL, seed=seed)
                    out = own.moe(layer, *inputs)
                    torch.testing.assert_close(out, expected(*inputs, MODEL, layer))
            except Exception as err:
                errors.append(err)

        with Client(registry, token=TOKEN) as second, Client(registry, token=TOKEN) as third:
            threads = [
                threading.Thread(target=work, args=(c, layer))
                for c in (client, second, third) for layer in (0, 1)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert not errors, errors[0]


def test_reply_times_contain_the_experts_time(monkeypatch):
    def slow_run(self, *args):
        time.sleep(0.02)
        return run(self, *args)

    run = ScaledExperts.run
    monkeypatch.setattr(ScaledExperts, "run", slow_run)
    for trace in (None, []):  # one native call for all, and step by step
        with cluster(SHARES, MODEL) as (client, _, _):
            client.trace = trace
            for seed in range(3):
                client.moe(0, *batch(20, MODEL, seed=seed))
            for server in client.stats()["servers"].values():
                assert 15_000 < server["p50_us"] <= server["p99_us"]


def test_same_bits_whatever_the_servers():
    """batch_invariant: the placement of experts changes no bit of the sum."""
    model = model_facts(num_experts=12, hidden_size=64, top_k=6)
    hidden, ids, weights = batch(33, model)
    hidden = torch.randn_like(hidden) * 1e3
    results = []
    for num_servers in (1, 2, 5):
        shares = [list(range(i, 12, num_servers)) for i in range(num_servers)]
        with cluster(shares, model) as (client, _, _):
            results.append(client.moe(0, hidden, ids, weights))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("do_ibgda", [True, False])
def test_fp8_hidden_states(do_ibgda):
    """Rows travel as e4m3 with one fp32 scale per 128; the error is that of the format."""
    from expertwire.model.reference import dequantise_fp8, quantise_fp8

    model = model_facts(num_experts=4, hidden_size=300)
    with cluster([[0, 1], [2, 3]], model, fp8=True, do_ibgda=do_ibgda) as (client, _, _):
        hidden, ids, weights = batch(20, model)
        out = client.moe(0, hidden, ids, weights)
        seen = dequantise_fp8(*quantise_fp8(hidden), torch.float32)
        torch.testing.assert_close(out, expected(seen, ids, weights, model))
        scale = hidden.abs().amax(1, keepdim=True)
        assert ((seen - hidden).abs() <= hidden.abs() / 16 + scale / 448 / 512).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(layer=2), "layer 2 does not exist"),
        (dict(layer=-1), "layer -1 does not exist"),
        (dict(hidden=torch.zeros(4, 19)), "hidden must be"),
        (dict(hidden=torch.zeros(4, 20, dtype=torch.bfloat16)), "bfloat16"),
        (dict(ids=torch.zeros(3, 2, dtype=torch.int64)), "topk_ids and topk_weights"),
        (dict(ids=torch.zeros(4, 3)), "must be int64 or int32"),
        (dict(weights=torch.zeros(4, 3, dtype=torch.int64)), "floating point"),
    ],
)
def test_inputs_that_do_not_fit_are_named(change, text):
    with cluster(SHARES, MODEL) as (client, _, _):
        hidden, ids, weights = batch(4, MODEL)
        args = {"layer": 0, "hidden": hidden, "ids": ids, "weights": weights, **change}
        with pytest.raises(ConfigError, match=text):
            client.moe(args["layer"], args["hidden"], args["ids"], args["weights"])
        torch.testing.assert_close(
            client.moe(0, hidden, ids, weights), expected(hidden, ids, weights, MODEL)
        )


def test_too_many_experts_per_token():
    with cluster(SHARES, MODEL) as (client, _, _):
        hidden, ids, weights = batch(4, MODEL, top_k=4)
        with pytest.raises(ConfigError, match="4 experts per token"):
            client.moe(0, hidden, ids, weights)


def test_expert_held_by_nobody():
    with cluster([[0, 1, 2], [3, 4]], MODEL, connect_timeout=0.4) as (client, _, _):
        hidden, ids, weights = batch(6, MODEL)
        ids[2, 1] = 6
        with pytest.raises(NoServerError, match=r"expert .*6") as caught:
            client.moe(1, hidden, ids, weights)
        assert 6 in caught.value.experts and caught.value.layer == 1
        ids %= 5
        torch.testing.assert_close(
            client.moe(0, hidden, ids, weights), expected(hidden, ids, weights, MODEL)
        )


def test_more_loaded_servers_than_configured():
    with cluster(SHARES, MODEL, max_servers=2) as (client, _, _):
        hidden, ids, weights = batch(30, MODEL)
        with pytest.raises(ConfigError, match="3 servers, max_servers is 2"):
            client.moe(0, hidden, ids, weights)
        ids %= 5
        torch.testing.assert_close(
            client.moe(0, hidden, ids, weights), expected(hidden, ids, weights, MODEL)
        )
