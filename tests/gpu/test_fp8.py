"""fp8 messages on a GPU: the CPU's bytes, and a layer is the layer of the rounded rows."""

from __future__ import annotations

import pytest
import torch
from expertwire.reference import dequantise_fp8, quantise_fp8

from expertwire.cuda.local import LocalExperts
from expertwire.target import CpuTarget
from tests import fp8_rows
from tests.gpu.servers import Servers, batch
from tests.gpu.test_experts import make_experts
from tests.steps import make_step


def rounded(hidden: torch.Tensor) -> torch.Tensor:
    """Rows as a server sees them."""
    codes, scales = quantise_fp8(hidden.cpu())
    return dequantise_fp8(codes, scales, hidden.dtype).to(hidden.device)


@pytest.mark.parametrize("dtype", fp8_rows.TYPES, ids=str)
@pytest.mark.parametrize("hidden_size", fp8_rows.SIZES)
def test_every_byte_of_the_codes_and_scales(gpu, hidden_size, dtype):
    made = fp8_rows.rows(hidden_size, dtype)
    assert fp8_rows.quantise(gpu, made, grid=3, warps=8) == fp8_rows.quantise(CpuTarget(), made)


def test_every_code(gpu):
    row = fp8_rows.every_code()
    assert fp8_rows.quantise(gpu, row) == fp8_rows.quantise(CpuTarget(), row)


@pytest.mark.parametrize("dtype", fp8_rows.TYPES, ids=str)
def test_gathered_in_the_models_type(gpu, dtype):
    step, _ = make_step(gpu, "fp8", seed=3, in_place=True)
    gpu.prepare([("client_send_direct", step.send_args)], grid=3, warps=8).run()
    for server_idx in range(3):
        got, want = fp8_rows.gathered_in(dtype, step, server_idx)
        assert torch.equal(got, want)


@pytest.mark.parametrize("hidden_size", [100, 128, 2880])
@pytest.mark.parametrize("own_stream", [False, True], ids=["caller's stream", "own stream"])
def test_a_layer_is_that_of_the_rounded_rows(gpu, hidden_size, own_stream):
    experts = make_experts(hidden_size, 48, torch.bfloat16)
    with LocalExperts(experts, 3, max_rows=16, fp8=True, own_stream=own_stream) as local, \
            LocalExperts(experts, 3, max_rows=16) as plain:
        info = {**local.model_info, "top_k": 3}
        inputs = batch(info, 13, 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            output = local.moe(1, *inputs)
        for seed in range(3):
            fresh = batch(info, 13, seed)
            for old, new in zip(inputs, fresh, strict=True):
                old.copy_(new)
            graph.replay()
            hidden, ids, weights = fresh
            want = plain.moe(1, rounded(hidden), ids, weights)
            assert torch.equal(output, want) and torch.equal(local.moe(1, *fresh), want)
            assert not torch.equal(plain.moe(1, *fresh), want)
        local.check()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("do_ibgda", [False, True], ids=["direct", "work queues"])
def test_between_processes(gpu, tmp_path, do_ibgda):
    with Servers(tmp_path) as servers:
        servers.start("all")
        with servers.remote(max_rows=16, fp8=True, do_ibgda=do_ibgda) as remote, \
                servers.remote(max_rows=16) as plain:
            for seed, num_tokens in enumerate((1, 16, 40)):
                hidden, ids, weights = batch(plain.model_info, num_tokens, seed)
                want = plain.moe(1, rounded(hidden), ids, weights)
                assert torch.equal(remote.moe(1, hidden, ids, weights), want)
            remote.check()
