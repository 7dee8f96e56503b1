"""One step on the CPU target: the same bytes for every warp width, and the result is right."""

from __future__ import annotations

import pytest
import torch
from tests.steps import CASES, differences, make_step, run_in_place, run_step

from expertwire.model.reference import dequantise_fp8, moe_reference, quantise_fp8
from expertwire.target import CpuTarget


@pytest.mark.parametrize("name", CASES)
def test_result_is_the_references(name):
    step, (hidden, ids, weights) = make_step(CpuTarget(), name)
    seen = run_step(step, expert=lambda rows: rows * 2)
    assert seen["status"] == (0,) * 7
    if step.shape.fp8:
        hidden = dequantise_fp8(*quantise_fp8(hidden), hidden.dtype)
    want = moe_reference(
        hidden, ids, weights, lambda _, rows: rows * 2, step.shape.num_experts
    )
    if step.shape.reply_mode == 0:  # a server's sum is rounded once more on its way
        torch.testing.assert_close(step.result(), want)
    else:
        assert torch.equal(step.result(), want)


@pytest.mark.parametrize(("warp_size", "warps", "grid"), [(4, 3, 2), (32, 2, 1)])
@pytest.mark.parametrize("name", [n for n in CASES if n != "decode batch"])
def test_bytes_do_not_depend_on_the_geometry(name, warp_size, warps, grid):
    want = run_step(make_step(CpuTarget(), name, seed=3)[0])
    seen = run_step(make_step(CpuTarget(warp_size), name, seed=3)[0], warps=warps, grid=grid)
    assert differences(want, seen) == []
    assert sum(want[f"put {s}"]["resv_head"] for s in range(8) if f"put {s}" in want) >= 6


@pytest.mark.parametrize(("warp_size", "warps", "grid"), [(1, 1, 1), (4, 2, 3), (2, 2, 40)])
@pytest.mark.parametrize("name", [n for n in CASES if n != "decode batch"])
def test_in_place_makes_the_same_messages(name, warp_size, warps, grid):
    """Many blocks that write straight into the peer's slot, against pack, put and reply; also more
    of them than there is work for."""
    want = run_step(make_step(CpuTarget(), name, seed=4)[0])
    step, _ = make_step(CpuTarget(warp_size), name, seed=4, in_place=True)
    seen = run_in_place(step, warps=warps, grid=grid)
    assert differences(want, seen) == []
    counters = [block.arrived for block in (step, *step.servers)]
    assert not any(map(any, (block.read() for block in counters))), "ready for the next launch"
    assert step.seq.read()[0] == 1


def test_what_was_not_computed_is_nan_for_callers_that_do_not_wait():
    """A combine without a reply: the code goes where the caller looks, the rows become NaN."""
    target = CpuTarget()
    step, _ = make_step(target, "one row", timeout_ns=1_000_000)
    failed = target.alloc(4)
    step.combine.failed = failed.addr
    target.prepare([("client_route", step.route), ("client_combine", step.combine)]).run()
    assert failed.read() == (3).to_bytes(4, "little")
    assert step.result().isnan().all()
