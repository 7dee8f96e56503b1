"""Rows for the fp8 kernels, and what they must become: the same bytes on every target."""

from __future__ import annotations

import torch
from expertwire.reference import dequantise_fp8

from expertwire.device_structs import ClientQuantiseArgs
from expertwire.message import DATA_TYPES, FP8_BLOCK

SIZES = [1, 64, 128, 300, 2880, 7170]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(hidden_size: int, dtype: torch.dtype, num_tokens: int = 9) -> torch.Tensor:
    """Magnitudes from denormal to largest; a row of zeros, one of infinities, one of NaN."""
    generator = torch.Generator().manual_seed(hidden_size)
    made = torch.randn(num_tokens, hidden_size, generator=generator)
    made *= torch.logspace(-42, 30, num_tokens).unsqueeze(1)
    made[1] = 0
    made[2] = torch.randn(hidden_size, generator=generator)
    made = made.to(dtype)
    made[3, ::7] = float("inf")
    made[4, ::5] = -float("nan")
    return made


def every_code() -> torch.Tensor:
    """[1, 256] all e4m3 codes as a row that quantises to them: 448 in each block, and no NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return codes.nan_to_num(448.0).view(1, 256)


def quantise(target, made: torch.Tensor, **geometry) -> tuple[bytes, bytes]:
    """(codes, scales) as client_quantise writes them; rows lie one element further apart."""
    num_tokens, hidden_size = made.shape
    padded = torch.nn.functional.pad(made, (0, 1))
    blocks = -(-hidden_size // FP8_BLOCK)
    hidden = target.place(padded)
    codes, scales = target.alloc(made.numel(), 0xEE), target.alloc(num_tokens * blocks * 4, 0xEE)
    args = ClientQuantiseArgs(
        hidden=hidden.addr, hidden_stride=padded.stride(0) * padded.itemsize, rows=codes.addr,
        scales=scales.addr, num_tokens=num_tokens, hidden_size=hidden_size,
        data_type=DATA_TYPES[made.dtype], scale_block=FP8_BLOCK,
    )
    target.prepare([("client_quantise", args)], **geometry).run()
    return codes.read(), scales.read()


def gathered_in(dtype: torch.dtype, step, server_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that a server's gather made of fp8 messages when told `dtype`, and what is right.

    step: a Loopback of fp8 rows that was routed, packed and put.
    """
    server, shape = step.servers[server_idx], step.shape
    server.gather.output_type = DATA_TYPES[dtype]
    pairs = shape.num_tokens * shape.top_k
    out = step.target.alloc(pairs * shape.hidden_size * dtype.itemsize)
    scaled = server.gather.gathered
    kernels = [("server_poll", server.poll), ("server_group", server.gather),
               ("server_gather_rows", server.gather)]
    server.gather.gathered = out.addr
    step.target.prepare(kernels, grid=[1, 1, 3], warps=4).run()
    count = server.num_gathered()
    got = out.view(dtype, count, shape.hidden_size).cpu()
    # The same message once more, as fp8 rows with their scales.
    server.gather.output_type, server.gather.gathered = 0, scaled
    step.target.prepare(kernels[2:], warps=4).run()
    step.target.synchronize()
    codes = server.gathered.view(torch.float8_e4m3fn, count, shape.hidden_size).cpu()
    scales = server.scales.view(torch.float32, count, -(-shape.hidden_size // FP8_BLOCK)).cpu()
    return got, dequantise_fp8(codes, scales, dtype)
