"""Shards that grow and shrink: same bits, and the memory of dropped experts is given back."""

from __future__ import annotations

import gc
import weakref

import psutil
import pytest
import torch
from tests.families import save_model

from expertwire.model.checkpoint import load_experts
from expertwire.server.experts import ExpertLayer, ExpertShard
from expertwire.server.mover import give_back_memory
from expertwire.server.plain_experts import PlainExperts

FAMILIES = ["qwen3_moe", "gpt_oss", "granitemoe"]  # plain, with biases and transposed, fused


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return save_model(request.param, tmp_path_factory.mktemp("moving") / request.param)


def outputs(shard: ExpertShard, invariant: bool = True) -> dict[int, torch.Tensor]:
    """What each expert makes of the same rows, in both layers."""
    rows = torch.randn(shard.min_rows + 1, shard.hidden_size,
                       generator=torch.Generator().manual_seed(3)).to(shard.dtype)
    result = {}
    for i, expert in enumerate(shard.experts):
        offsets = [0] * (i + 1) + [len(rows)] * (len(shard.experts) - i)
        result[expert] = torch.stack([
            shard.run(layer, rows, offsets, invariant) for layer in range(shard.num_layers)
        ])
    return result


def test_experts_that_come_and_go_leave_the_bits_of_the_others(folder):
    whole = outputs(load_experts(folder))
    shard = load_experts(folder, [1, 3])
    limits = shard.min_rows
    grown = shard.extended(load_experts(folder, [0, 2]))
    assert grown.experts == [0, 1, 2, 3] and grown.min_rows == limits
    grown.unstack()
    shrunk = grown.without([1, 2])
    assert shrunk.experts == [0, 3] and shard.experts == [1, 3]
    for some in (shard, grown, shrunk):
        for expert, out in outputs(some).items():
            assert torch.equal(out, whole[expert]), expert


def big_shard(num_experts: int, hidden: int, inner: int) -> ExpertShard:
    module = PlainExperts(num_experts, hidden, inner)
    parts = {
        "gate_up_proj": torch.ones(num_experts, 2 * inner, hidden),
        "down_proj": torch.ones(num_experts, hidden, inner),
    }
    return ExpertShard([ExpertLayer(module, parts)], range(num_experts), hidden, torch.float32)


def test_memory_of_dropped_experts_goes_back_to_the_system():
    shard = big_shard(8, 512, 1024)  # 6 MB an expert, in two stacks
    size, process = shard.layers[0].num_bytes(), psutil.Process()
    shard.unstack()
    gc.collect(), give_back_memory()
    before = process.memory_info().rss
    dropped = weakref.ref(shard.layers[0]._first[7])
    kept = shard.layers[0]._first[2].data_ptr()
    shard = shard.without([0, 1, 4, 5, 6, 7])
    gc.collect(), give_back_memory()
    assert dropped() is None
    assert shard.layers[0]._first[0].data_ptr() == kept, "nothing is copied once more"
    assert before - process.memory_info().rss > 0.6 * size
    assert shard.layers[0].num_bytes() == size / 4


def test_a_slice_of_a_stack_keeps_the_stack_and_unstack_ends_that():
    shard = big_shard(4, 64, 64)
    view = shard.layers[0]._down[0]
    assert view.untyped_storage().nbytes() == 4 * view.nbytes
    shard.unstack()
    for weight in [*shard.layers[0]._first, *shard.layers[0]._down]:
        assert weight.untyped_storage().nbytes() == weight.nbytes
    assert shard.layers[0]._down[0].stride() == view.stride()
    again = shard.layers[0]._down[0].data_ptr()
    shard.unstack()
    assert shard.layers[0]._down[0].data_ptr() == again
