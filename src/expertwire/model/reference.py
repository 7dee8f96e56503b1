"""The MoE layer in plain torch: what everything else is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import ConfigError

FP8_MAX = 448.0  # largest finite e4m3 value


def moe_reference(
    hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
    expert: Callable[[int, torch.Tensor], torch.Tensor], num_experts: int,
) -> torch.Tensor:
    """sum over k of topk_weights[t, k] * expert(topk_ids[t, k], hidden[t]), in slot order, fp32.

    hidden: [T, H]. topk_ids, topk_weights: [T, K]. expert(e, rows [N, H]) -> [N, H]. Ids below 0
    or >= num_experts are skipped. Each product is rounded to hidden's dtype, as a server sends it;
    the sum is fp32, rounded once. Returns [T, H] in hidden's dtype.
    """
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for k in range(topk_ids.shape[1]):
        ids = topk_ids[:, k]
        for e in ids.unique().tolist():
            if not 0 <= e < num_experts:
                continue
            rows = (ids == e).nonzero().flatten()
            weight = topk_weights[rows, k].float().unsqueeze(1)
            product = expert(e, hidden[rows]).float() * weight
            total[rows] += product.to(hidden.dtype).float()
    return total.to(hidden.dtype)


def quantise_fp8(rows: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, H] -> (e4m3 [T, H], fp32 scales [T, ceil(H / block)]), value = e4m3 * scale.

    A scale is the block's largest magnitude / 448, so that the largest value is representable;
    a block of zeros gets scale 1. Relative error per element is at most 2^-4 of its magnitude, or
    2^-10 of the scale for values below the smallest normal one.
    """
    num_rows, hidden = rows.shape
    num_blocks = -(-hidden // block)
    padded = torch.zeros(num_rows, num_blocks * block, dtype=torch.float32)
    padded[:, :hidden] = rows.float()
    blocks = padded.view(num_rows, num_blocks, block)
    scales = blocks.abs().amax(dim=2) / FP8_MAX
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (blocks / scales.unsqueeze(2)).clamp(-FP8_MAX, FP8_MAX)
    quantised = values.view(padded.shape)[:, :hidden].to(torch.float8_e4m3fn).contiguous()
    return quantised, scales.contiguous()


def dequantise_fp8(
    rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, block: int = 128
) -> torch.Tensor:
    """Inverse of quantise_fp8: [T, H] in `dtype`. Raises ConfigError if the shapes do not fit."""
    num_rows, hidden = rows.shape
    if scales.shape != (num_rows, -(-hidden // block)):
        raise ConfigError(f"scales {list(scales.shape)} do not fit rows {list(rows.shape)}")
    wide = scales.repeat_interleave(block, dim=1)[:, :hidden]
    return (rows.float() * wide).to(dtype)
