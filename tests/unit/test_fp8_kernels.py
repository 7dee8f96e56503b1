"""fp8 rows by the device code on the CPU target: the bytes of the torch reference."""

from __future__ import annotations

import pytest
import torch
from expertwire.reference import quantise_fp8
from tests import fp8_rows
from tests.steps import make_step

from expertwire.target import CpuTarget


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("geometry", [(1, 1, 1), (3, 2, 32), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("dtype", fp8_rows.TYPES, ids=str)
@pytest.mark.parametrize("hidden_size", fp8_rows.SIZES[:5])
def test_quantised_as_the_reference_does(hidden_size, dtype, geometry):
    grid, warps, warp_size = geometry
    made = fp8_rows.rows(hidden_size, dtype)
    codes, scales = fp8_rows.quantise(CpuTarget(warp_size), made, grid=grid, warps=warps)
    want_codes, want_scales = quantise_fp8(made)
    assert scales == as_bytes(want_scales)
    assert codes == as_bytes(want_codes)


def test_every_code_and_every_tie():
    row = fp8_rows.every_code()
    steps = torch.tensor([0.0, 0.25, 0.5, 0.75])
    between = torch.cat([row.roll(1) + (row - row.roll(1)) * s for s in steps], 1)
    between[:, ::128] = 448.0  # scale 1 in every block
    for made in (row, between):
        codes, scales = fp8_rows.quantise(CpuTarget(), made)
        want_codes, want_scales = quantise_fp8(made)
        assert scales == as_bytes(want_scales) and codes == as_bytes(want_codes)
    assert len(set(codes)) > 250


@pytest.mark.parametrize("warp_size", [1, 32])
@pytest.mark.parametrize("dtype", fp8_rows.TYPES, ids=str)
def test_gathered_in_the_models_type(dtype, warp_size):
    target = CpuTarget(warp_size)
    step, _ = make_step(target, "fp8", seed=3, in_place=True)
    target.prepare([("client_send_direct", step.send_args)], grid=3, warps=2).run()
    for server_idx in range(3):
        got, want = fp8_rows.gathered_in(dtype, step, server_idx)
        assert got.shape[0] > 10 and torch.equal(got, want)
