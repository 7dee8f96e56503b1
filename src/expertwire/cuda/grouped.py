"""Grouped matrix products in Triton: rows sorted by expert, counts and layer known on the GPU only.

One program takes a tile of output columns of one expert and walks that expert's rows, so a weight
is read once per launch however the rows are spread. With one kind of tile a row's sum is taken in
the same order with the same instructions whatever else is in the batch: results are batch-invariant
by construction. FEW_ROWS gives that up for tiles that fit each expert's count.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile(
    rows, output, first_row, end, column, columns, second, bias, num_inputs, num_outputs,
    input_stride, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):
    """Rows first_row .. first_row + BLOCK_ROWS - 1 of an expert that end before `end`.

    column: [1, BLOCK_OUTPUTS] addresses of the first weight of each output; second: from there to
    the second half of the outputs, in elements.
    """
    dtype: tl.constexpr = rows.dtype.element_ty
    inputs = tl.arange(0, BLOCK_INPUTS)
    column_mask = columns < num_outputs
    lines = first_row + tl.arange(0, BLOCK_ROWS)
    line_mask = lines < end
    line = rows + lines.to(tl.int64)[:, None] * num_inputs
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    if GATED:
        total2 = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    for i in range(0, num_inputs, BLOCK_INPUTS):
        input_mask = i + inputs < num_inputs
        a = tl.load(line + (i + inputs)[None, :],
                    mask=line_mask[:, None] & input_mask[None, :], other=0.0)
        at = column + (i + inputs)[:, None] * input_stride
        mask = input_mask[:, None] & column_mask[None, :]
        b = tl.load(at, mask=mask, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        if GATED:
            b2 = tl.load(at + second, mask=mask, other=0.0)
            total2 = tl.dot(a, b2, total2, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total2 += tl.load(bias + num_outputs + columns, mask=column_mask,
                              other=0.0).to(tl.float32)[None, :]
    result = total.to(dtype)
    if GATED:
        gate = result.to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        result = (gate * total2.to(dtype).to(tl.float32)).to(dtype)
    tl.store(output + lines.to(tl.int64)[:, None] * num_outputs + columns[None, :], result,
             mask=line_mask[:, None] & column_mask[None, :])


@triton.jit
def grouped_product(
    rows, weights, biases, offsets, layer, output,
    num_inputs, num_outputs, expert_stride, output_stride, input_stride, bias_stride,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    FEW_ROWS: tl.constexpr, NUM_ROW_PROGRAMS: tl.constexpr,
):
    """output[r] = rows[r] @ weight (+ bias) for the expert that r belongs to.

    rows [N, num_inputs]; weights, biases: int64 [layers], the address of [experts, ...] each;
    offsets int32 [experts + 1]; layer int32 [1]. output [N, num_outputs]; with GATED the weight
    has 2 x num_outputs outputs and output = silu(first half) * second half, rounded at each step.
    FEW_ROWS: an expert with at most this many rows takes one tile of so many; 0: no such tile.
    Grid: (tiles of outputs, experts, NUM_ROW_PROGRAMS).
    """
    expert = tl.program_id(1)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    first_row = begin + tl.program_id(2) * BLOCK_ROWS
    if first_row >= end:
        return
    dtype: tl.constexpr = rows.dtype.element_ty
    layer_idx = tl.load(layer)
    first = tl.multiple_of(tl.load(weights + layer_idx).to(tl.pointer_type(dtype)), 16)
    weight = first + expert.to(tl.int64) * expert_stride
    columns = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    column = weight + columns.to(tl.int64)[None, :] * output_stride
    second = num_outputs.to(tl.int64) * output_stride
    bias = first
    if HAS_BIAS:
        bias = tl.load(biases + layer_idx).to(tl.pointer_type(dtype)) + expert * bias_stride
    if FEW_ROWS > 0:  # noqa: SIM102 - this one is decided by the compiler
        if end - begin <= FEW_ROWS:
            tile(rows, output, begin, end, column, columns, second, bias, num_inputs, num_outputs,
                 input_stride, GATED, HAS_BIAS, PRECISION, FEW_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS)
            end = begin  # nothing is left for the larger tiles
    for row in range(first_row, end, NUM_ROW_PROGRAMS * BLOCK_ROWS):
        tile(rows, output, row, end, column, columns, second, bias, num_inputs, num_outputs,
             input_stride, GATED, HAS_BIAS, PRECISION, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS)
