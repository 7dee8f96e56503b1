"""CPU and GPU make the same bytes: entries, doorbells, messages, batches, replies, results."""

from __future__ import annotations

import functools

import pytest

from expertwire.target import CpuTarget
from tests.steps import CASES, differences, make_step, run_in_place, run_step


@functools.cache
def on_cpu(name: str) -> dict:
    return run_step(make_step(CpuTarget(), name, seed=11)[0])


@pytest.mark.parametrize(("grid", "warps"), [(1, 1), (1, 8), (64, 32)])
@pytest.mark.parametrize("name", CASES)
def test_every_byte_of_a_step(gpu, name, grid, warps):
    seen = run_step(make_step(gpu, name, seed=11)[0], grid=grid, warps=warps)
    assert seen["status"] == (0,) * 7
    assert differences(on_cpu(name), seen) == []


@pytest.mark.parametrize(("grid", "warps"), [(1, 4), (64, 8)])
@pytest.mark.parametrize("name", CASES)
def test_in_place_with_many_blocks(gpu, name, grid, warps):
    step, _ = make_step(gpu, name, seed=11, in_place=True)
    assert differences(on_cpu(name), run_in_place(step, grid=grid, warps=warps)) == []
    assert step.arrived.read() == b"\0" * 4, "counters are ready for the next launch"


def test_a_difference_would_be_seen(gpu):
    seen = run_step(make_step(gpu, "three servers, sums", seed=12)[0])
    names = differences(on_cpu("three servers, sums"), seen)
    assert {"request 0", "recv 0", "reply 0", "output"} <= set(names)
