"""Grouped products and experts on a GPU against float64, and that a row's bits are its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from expertwire.cuda.experts import ANY, FEW, INVARIANT, GpuExperts, Tiles, Weights
from expertwire.server.plain_experts import PlainExperts

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
COUNTS = [3, 0, 1, 40, 0, 17, 64, 5]
LAYERS = 3


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32, device="cuda").cumsum(0).int()


def make_experts(hidden: int, middle: int, dtype: torch.dtype, num: int = len(COUNTS), seed=0
                 ) -> GpuExperts:
    generator = torch.Generator("cuda").manual_seed(seed)
    parts = [{
        "gate_up_proj": torch.randn(num, 2 * middle, hidden, generator=generator, device="cuda",
                                    dtype=dtype) / hidden**0.5,
        "down_proj": torch.randn(num, hidden, middle, generator=generator, device="cuda",
                                 dtype=dtype) / middle**0.5,
    } for _ in range(LAYERS)]
    modules = [PlainExperts(num, hidden, middle) for _ in parts]
    return GpuExperts(modules, parts, range(num))


def run(experts: GpuExperts, layer: int, rows: torch.Tensor, offsets: torch.Tensor,
        tiles: Tiles | None = None) -> torch.Tensor:
    output = torch.full_like(rows, float("nan"))
    where = torch.tensor([layer], dtype=torch.int32, device="cuda")
    experts.run(where, rows, offsets, experts.workspace(rows.shape[0]), output, tiles)
    return output


def expected(experts: GpuExperts, layer: int, rows: torch.Tensor, offsets: torch.Tensor
             ) -> torch.Tensor:
    ends = offsets.tolist()
    output = torch.full(rows.shape, float("nan"), dtype=torch.float64, device="cuda")
    for e, (a, b) in enumerate(pairwise(ends)):
        first = rows[a:b].double() @ experts.first.tensors[layer][e].double().t()
        gate, up = first.chunk(2, dim=1)
        middle = torch.nn.functional.silu(gate) * up
        output[a:b] = middle @ experts.down.tensors[layer][e].double().t()
    return output


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize(("hidden", "middle"), [(256, 192), (200, 104), (2048, 768)])
def test_experts_against_float64(gpu, dtype, hidden, middle):
    experts, offsets = make_experts(hidden, middle, dtype), offsets_of(COUNTS)
    count = sum(COUNTS)
    rows = torch.randn(count + 9, hidden, device="cuda").to(dtype)
    for layer in (2, 0):
        got = run(experts, layer, rows, offsets)
        want = expected(experts, layer, rows, offsets)
        assert error(got[:count], want[:count]) < BOUND[dtype]
        assert got[count:].isnan().all(), "rows of no expert stay as they are"


@pytest.mark.parametrize("tiles", [FEW, INVARIANT, ANY], ids=str)
@pytest.mark.parametrize("counts", [COUNTS, [16, 17, 0, 65, 0, 1, 0, 15]], ids=str)
def test_tiles_against_float64(gpu, tiles, counts):
    """Experts with few rows beside ones with many, at the bound between the two."""
    experts, offsets = make_experts(256, 192, torch.bfloat16), offsets_of(counts)
    count = sum(counts)
    rows = torch.randn(count + 70, 256, device="cuda").bfloat16()
    got = run(experts, 1, rows, offsets, tiles)
    want = expected(experts, 1, rows, offsets)
    for a, b in pairwise(offsets.tolist()):
        assert a == b or error(got[a:b], want[a:b]) < BOUND[torch.bfloat16]
    assert got[count:].isnan().all()


def test_the_tiles_that_a_pass_takes(gpu):
    experts = make_experts(64, 32, torch.bfloat16)
    assert experts.choose_tiles(16, batch_invariant=False) == FEW
    assert experts.choose_tiles(17, batch_invariant=False) == ANY
    assert {experts.choose_tiles(n, batch_invariant=True) for n in (1, 17, 4096)} == {INVARIANT}


def test_no_rows_at_all(gpu):
    experts = make_experts(64, 32, torch.bfloat16)
    got = run(experts, 1, torch.randn(5, 64, device="cuda").bfloat16(), offsets_of([0] * 8))
    assert got.isnan().all()


@pytest.mark.parametrize("tiles", [
    Tiles(), Tiles(rows=32, inputs=64), Tiles(rows=64, outputs=128, inputs=64, stages=3),
    Tiles(row_programs=3), ANY, Tiles(rows=32, few_rows=16, row_programs=2),
], ids=str)
def test_transposed_weights_with_biases(gpu, tiles):
    """[experts, in, out] and a bias, as gpt_oss has them; tiles that do not divide the sizes."""
    weights = [torch.randn(4, 136, 72, device="cuda").bfloat16() for _ in range(LAYERS)]
    biases = [torch.randn(4, 72, device="cuda").bfloat16() for _ in range(LAYERS)]
    counts = [70, 0, 2, 130]
    rows = torch.randn(sum(counts), 136, device="cuda").bfloat16()
    offsets = offsets_of(counts)
    got = torch.full((sum(counts), 72), float("nan"), dtype=torch.bfloat16, device="cuda")
    layer = torch.tensor([1], dtype=torch.int32, device="cuda")
    Weights(weights, biases, True).product(rows, offsets, layer, tiles, out=got)
    want = torch.cat([
        rows[a:b].double() @ weights[1][e].double() + biases[1][e].double()
        for e, (a, b) in enumerate(pairwise(offsets.tolist()))
    ])
    assert error(got, want) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_the_bits_of_a_row_are_its_own(gpu, dtype):
    """Whatever else is in the batch, and wherever the row lies in its group."""
    experts = make_experts(512, 256, dtype)
    rows = torch.randn(sum(COUNTS), 512, device="cuda").to(dtype)
    offsets = offsets_of(COUNTS)
    together = run(experts, 1, rows, offsets)
    for expert, count in enumerate(COUNTS):
        begin = int(offsets[expert])
        for row in {begin, begin + count - 1} if count else ():
            alone = [0] * len(COUNTS)
            alone[expert] = 1
            got = run(experts, 1, rows[row : row + 1].contiguous(), offsets_of(alone))
            assert torch.equal(got[0], together[row])
    turn = torch.cat([torch.arange(a, b).flip(0) for a, b in pairwise(offsets.tolist())]).cuda()
    assert torch.equal(run(experts, 1, rows[turn], offsets)[turn], together)


def test_the_library_agrees(gpu):
    experts, offsets = make_experts(256, 128, torch.bfloat16), offsets_of(COUNTS)
    rows = torch.randn(sum(COUNTS), 256, device="cuda").bfloat16()
    want = expected(experts, 2, rows, offsets)
    assert error(experts.run_library(2, rows, offsets), want) < BOUND[torch.bfloat16]
    assert error(experts.run_library(0, rows, offsets), want) > 0.5, "another layer is another one"
