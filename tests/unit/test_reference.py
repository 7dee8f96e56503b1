"""The oracle itself: the plain sum, and how far fp8 messages may round."""

from __future__ import annotations

import pytest
import torch

from expertwire.errors import ConfigError
from expertwire.model.reference import FP8_MAX, dequantise_fp8, moe_reference, quantise_fp8

# e4m3 has 3 mantissa bits: a rounded value is off by at most 2^-4 of itself; below the smallest
# normal number (2^-6 of a scale step) the steps are 2^-9, so off by at most 2^-10 of the scale.
RELATIVE, ABSOLUTE_STEPS = 2.0**-4, 2.0**-10


@pytest.mark.parametrize("hidden", [1, 127, 128, 129, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fp8_bounds(hidden, dtype):
    generator = torch.Generator().manual_seed(hidden)
    rows = torch.randn(20, hidden, generator=generator)
    rows *= torch.logspace(-3, 3, 20).unsqueeze(1)  # rows of very different size
    rows = rows.to(dtype)
    quantised, scales = quantise_fp8(rows)
    blocks = -(-hidden // 128)
    assert quantised.shape == rows.shape and quantised.dtype == torch.float8_e4m3fn
    assert scales.shape == (20, blocks) and scales.dtype == torch.float32
    assert quantised.is_contiguous() and scales.is_contiguous()
    back = dequantise_fp8(quantised, scales, torch.float32)
    wide = scales.repeat_interleave(128, dim=1)[:, :hidden]
    bound = torch.maximum(rows.float().abs() * RELATIVE, wide * ABSOLUTE_STEPS) * (1 + 1e-5)
    assert ((back - rows.float()).abs() <= bound).all()
    assert (back - rows.float()).abs().max() > 0 or hidden == 1


def test_fp8_keeps_the_largest_value_of_a_block():
    """The block's largest magnitude is 448 steps, so it comes back but for fp32 rounding."""
    rows = torch.linspace(-3, 2.9, 256).reshape(1, 256)
    quantised, scales = quantise_fp8(rows)
    back = dequantise_fp8(quantised, scales, torch.float32)
    assert quantised.float().abs().max() == FP8_MAX
    torch.testing.assert_close(back[0, 0], rows[0, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(back[0, 255], rows[0, 255], rtol=1e-6, atol=0)


def test_fp8_blocks_do_not_touch_each_other():
    """One huge value costs precision in its own block only."""
    rows = torch.full((1, 384), 0.01)
    clean = dequantise_fp8(*quantise_fp8(rows), torch.float32)
    rows[0, 130] = 1e6
    spiked = dequantise_fp8(*quantise_fp8(rows), torch.float32)
    assert torch.equal(clean[:, :128], spiked[:, :128])
    assert torch.equal(clean[:, 256:], spiked[:, 256:])
    assert spiked[0, 131] == 0


def test_fp8_zeros_and_shape_errors():
    quantised, scales = quantise_fp8(torch.zeros(3, 130))
    assert torch.isfinite(scales).all() and (scales > 0).all()
    assert torch.equal(dequantise_fp8(quantised, scales, torch.float32), torch.zeros(3, 130))
    assert quantise_fp8(torch.zeros(0, 130))[1].shape == (0, 2)
    with pytest.raises(ConfigError, match="do not fit"):
        dequantise_fp8(quantised, scales[:, :1], torch.float32)


def test_reference_sums_in_slot_order_and_skips_foreign_ids():
    hidden = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    ids = torch.tensor([[0, 2, 2], [-1, 1, 7]])
    weights = torch.tensor([[0.5, 0.25, 0.25], [9.0, 2.0, 9.0]])
    out = moe_reference(hidden, ids, weights, lambda e, rows: rows * (e + 1), 3)
    assert torch.equal(out, torch.tensor([[2.0, 4.0], [12.0, 16.0]]))


def test_reference_rounds_each_product_and_the_sum_once():
    """Two products of 1 + 2^-8 in bf16: rounding the sum of two late would keep the half step."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    weights = torch.tensor([[1 + 2.0**-8, 1 + 2.0**-8]])  # each rounds to even: 1.0 in bf16
    out = moe_reference(hidden, torch.tensor([[0, 1]]), weights, lambda _, rows: rows, 2)
    assert out.dtype == torch.bfloat16 and out.item() == 2.0
