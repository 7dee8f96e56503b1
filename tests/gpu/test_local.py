"""Client and server in one process on one GPU: results, CUDA graphs, errors that have names."""

from __future__ import annotations

import random
import time

import pytest
import torch

from expertwire.cuda.client import GpuClient, Peer
from expertwire.cuda.experts import GpuExperts
from expertwire.cuda.local import LocalExperts
from expertwire.cuda.server import GpuServer
from expertwire.errors import ConfigError, ExpertwireError, RejectedError, WaitTimeout
from expertwire.message import Reason
from expertwire.model.reference import moe_reference
from expertwire.server.plain_experts import PlainExperts
from tests.gpu.test_experts import make_experts

HIDDEN, MIDDLE, NUM_EXPERTS, TOP_K = 256, 128, 8, 3


@pytest.fixture(scope="module", params=[False, True], ids=["caller's stream", "own stream"])
def local(gpu, request):
    experts = make_experts(HIDDEN, MIDDLE, torch.bfloat16)
    with LocalExperts(experts, TOP_K, max_rows=64, own_stream=request.param) as made:
        yield made


def batch(num_tokens: int, seed: int = 0, dtype=torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)
    options = dict(generator=generator, device="cuda")
    hidden = torch.randn(num_tokens, HIDDEN, **options).to(dtype)
    ids = torch.rand(num_tokens, NUM_EXPERTS, **options).topk(TOP_K, dim=1).indices
    return hidden, ids, torch.rand(num_tokens, TOP_K, **options)


def reference(local, layer, hidden, ids, weights) -> torch.Tensor:
    experts = local.experts

    def expert(e, rows):
        rows = rows.cuda()
        first = rows @ experts.first.tensors[layer][e].t()
        gate, up = first.chunk(2, dim=1)
        return ((torch.nn.functional.silu(gate) * up) @ experts.down.tensors[layer][e].t()).cpu()

    return moe_reference(hidden.cpu(), ids.cpu(), weights.cpu(), expert, NUM_EXPERTS).cuda()


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return ((got.double() - want.double()).norm() / want.double().norm()).item() < 1e-2


@pytest.mark.parametrize("num_tokens", [1, 2, 33, 64, 65, 200])
def test_a_layer(local, num_tokens):
    """More rows than a message holds go as several."""
    for layer in (2, 0):
        inputs = batch(num_tokens, seed=layer)
        got = local.moe(layer, *inputs)
        local.check()
        assert got.shape == inputs[0].shape and got.dtype == inputs[0].dtype
        assert close(got, reference(local, layer, *inputs))


def test_no_rows(local):
    assert local.moe(0, *batch(0)).shape == (0, HIDDEN)


def test_strides_types_and_ids_that_are_no_expert(local):
    hidden, ids, weights = batch(20, seed=5)
    want = reference(local, 1, hidden, ids, weights)
    wide = torch.zeros(20, 2 * HIDDEN, dtype=torch.bfloat16, device="cuda")
    wide[:, :HIDDEN] = hidden
    assert torch.equal(local.moe(1, wide[:, :HIDDEN], ids.int(), weights),
                       local.moe(1, hidden, ids, weights))
    assert close(local.moe(1, hidden, ids.t().contiguous().t(), weights.double()), want)
    before = local.client.num_skipped
    ids[3, 1], ids[4, 0] = -1, NUM_EXPERTS
    got = local.moe(1, hidden, ids, weights)
    assert close(got, reference(local, 1, hidden, ids, weights))
    assert local.client.num_skipped == before + 2
    local.check()


def test_no_call_synchronises(local):
    inputs = batch(17, seed=6)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = local.moe(1, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert close(got, reference(local, 1, *inputs))


def test_sums_do_not_depend_on_the_batch(local):
    hidden, ids, weights = batch(60, seed=7)
    together = local.moe(0, hidden, ids, weights)
    for row in (0, 31, 59):
        part = slice(row, row + 1)
        assert torch.equal(local.moe(0, hidden[part], ids[part], weights[part])[0], together[row])


def test_graphs_of_many_batch_sizes_in_any_order(local):
    """Two layers a graph, fresh inputs for every replay."""
    stream, graphs = torch.cuda.Stream(), {}
    for num_tokens in (1, 3, 16, 64, 100):
        inputs = batch(num_tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            middle = local.moe(0, *inputs)
            output = local.moe(2, middle, *inputs[1:])
        graphs[num_tokens] = graph, inputs, output
    order = list(graphs) * 6
    random.Random(8).shuffle(order)
    for seed, num_tokens in enumerate(order):
        graph, inputs, output = graphs[num_tokens]
        fresh = batch(num_tokens, seed=100 + seed)
        for old, new in zip(inputs, fresh, strict=True):
            old.copy_(new)
        output.fill_(float("nan"))
        graph.replay()
        if seed % 3 == 0:  # calls outside of graphs in between
            local.moe(1, *batch(5, seed=seed))
        middle = local.moe(0, *fresh)
        assert torch.equal(output, local.moe(2, middle, *fresh[1:])), (seed, num_tokens)
    local.check()


def test_two_batches_in_flight(local):
    batches = [batch(30, seed=9), batch(44, seed=10)]
    want = [local.moe(i, *inputs) for i, inputs in enumerate(batches)]
    handles = [local.dispatch(i, *inputs) for i, inputs in enumerate(batches)]
    with pytest.raises(ExpertwireError, match="all 2 slots are in flight"):
        local.dispatch(0, *batches[0])
    for i in (1, 0):
        assert torch.equal(handles[i].combine(), want[i])
    with pytest.raises(ExpertwireError, match="combined already"):
        handles[0].combine()
    local.check()


def test_inputs_that_do_not_fit(local):
    hidden, ids, weights = batch(4)
    for layer, inputs, text in (
        (3, (hidden, ids, weights), "layer 3 does not exist"),
        (0, (hidden.float(), ids, weights), r"hidden is torch\.float32"),
        (0, (hidden.cpu(), ids, weights), "hidden is on cpu; this client sends from cuda:0"),
        (0, (hidden, ids[:3], weights), "must both be"),
        (0, (hidden, ids, weights.cpu()), "topk_weights is on cpu"),
    ):
        with pytest.raises(ConfigError, match=text):
            local.moe(layer, *inputs)
    with pytest.raises(ConfigError, match="one dispatch takes 64"):
        local.dispatch(0, *batch(65))


def test_first_use_inside_a_capture_says_what_to_do(gpu):
    experts = make_experts(64, 32, torch.bfloat16)
    with pytest.raises(ConfigError, match="make it before the capture"), torch.cuda.graph(
            torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        LocalExperts(experts, 2)
    torch.cuda.synchronize()
    with LocalExperts(experts, 2, max_rows=4) as made:
        made.check()


def test_sums_at_the_server(gpu):
    experts = make_experts(HIDDEN, MIDDLE, torch.bfloat16)
    with LocalExperts(experts, TOP_K, max_rows=64, batch_invariant=False) as local:
        inputs = batch(50, seed=11)
        assert close(local.moe(1, *inputs), reference(local, 1, *inputs))
        local.check()


def test_a_wide_wait_leaves_room_for_the_server(gpu):
    """A combine of as many blocks as there are multiprocessors, for experts on a stream of their
    own: no slower than a few times the caller's stream."""
    experts = make_experts(2048, 512, torch.bfloat16)
    times = {}
    for own_stream in (False, True):
        with LocalExperts(experts, TOP_K, max_rows=512, own_stream=own_stream) as local:
            hidden = torch.randn(512, 2048, device="cuda").bfloat16()
            _, ids, weights = batch(512)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            local.moe(0, hidden, ids, weights)
            start.record()
            for layer in (0, 1, 2) * 4:
                local.moe(layer, hidden, ids, weights)
            end.record()
            local.check()
            times[own_stream] = start.elapsed_time(end)
    assert times[True] < 4 * times[False], times


def test_a_server_that_is_gone_is_a_timeout(gpu):
    experts = make_experts(HIDDEN, MIDDLE, torch.bfloat16)
    with LocalExperts(experts, TOP_K, max_rows=64, own_stream=True, timeout=0.05) as local:
        local.server.close()
        start = time.monotonic()
        got = local.moe(0, *batch(3))
        with pytest.raises(WaitTimeout, match=r"server 0 did not answer within 0\.05 s"):
            local.check()
        assert time.monotonic() - start < 2
        assert got.isnan().all(), "what was not computed does not look like a result"
        with pytest.raises(WaitTimeout):
            local.moe(0, *batch(3))


def test_a_refusal_has_a_reason(gpu):
    experts = make_experts(HIDDEN, MIDDLE, torch.bfloat16)
    with LocalExperts(experts, TOP_K, max_rows=8) as local:
        server = GpuServer(experts, NUM_EXPERTS, local.client.shape)
        addrs = [server.request_addr(i) for i in range(2)]
        client = GpuClient(local.model_info, [Peer(4, experts.experts, addrs)], local.client.shape,
                           experts.device, client_id=9, after_send=server.enqueue)
        server.connect(8, client.reply_addrs(0))
        got = client.moe(0, *batch(2))
        with pytest.raises(RejectedError, match=r"server 4 refused.*client id") as refused:
            client.check()
        assert refused.value.reason == Reason.CLIENT
        assert got.isnan().all(), "what was added before the head was judged is taken back"


def test_two_servers_with_replicas(gpu):
    """Each on the caller's stream; the sum is that of one server."""
    experts = make_experts(HIDDEN, MIDDLE, torch.bfloat16)
    with LocalExperts(experts, TOP_K, max_rows=32) as local:
        shape = local.client.shape
        shares = [[0, 1, 2, 5, 6, 7], [2, 3, 4, 5]]
        servers = [GpuServer(held(experts, share), NUM_EXPERTS, shape) for share in shares]

        def serve_all() -> None:
            for server in servers:
                server.enqueue()

        client = GpuClient(
            local.model_info,
            [Peer(i, share, [server.request_addr(k) for k in range(shape.num_slots)])
             for i, (share, server) in enumerate(zip(shares, servers, strict=True))],
            shape, experts.device, after_send=serve_all,
        )
        for i, server in enumerate(servers):
            server.connect(1, client.reply_addrs(i))
        for num_tokens in (1, 32):
            inputs = batch(num_tokens, seed=num_tokens)
            assert torch.equal(client.moe(1, *inputs), local.moe(1, *inputs))
        client.check()
        assert all(server.expert_rows()[1].sum() > 0 for server in servers)


def held(experts: GpuExperts, share: list[int]) -> GpuExperts:
    """Some of the experts, of every layer."""
    modules = [PlainExperts(len(share), HIDDEN, MIDDLE) for _ in range(experts.num_layers)]
    parts = [{"gate_up_proj": experts.first.tensors[layer][share].contiguous(),
              "down_proj": experts.down.tensors[layer][share].contiguous()}
             for layer in range(experts.num_layers)]
    return GpuExperts(modules, parts, share)


def test_far_ahead_with_a_stream_of_its_own(gpu):
    """A thousand batches without waiting: the server is relaunched all the time."""
    with LocalExperts(make_experts(HIDDEN, MIDDLE, torch.bfloat16), TOP_K, max_rows=32,
                      own_stream=True) as local:
        inputs = batch(20, seed=5)
        want = local.moe(1, *inputs).clone()
        for _ in range(1000):
            got = local.moe(1, *inputs)
        local.check()
        assert torch.equal(got, want)
