"""Steps that two targets must do with the same bytes, and everything that can be seen of them."""

from __future__ import annotations

import struct

import numpy as np
import torch

from expertwire.device_structs import IbgdaQp, KernelStatus
from expertwire.loopback import Loopback, StepShape, Wire
from expertwire.message import FP8_BLOCK, ReplyMode
from expertwire.model.reference import quantise_fp8

SUM, PER_EXPERT = ReplyMode.SUM, ReplyMode.PER_EXPERT


def spread(num_experts: int, num_servers: int) -> list[list[int]]:
    """Expert e on server e mod num_servers."""
    return [list(range(s, num_experts, num_servers)) for s in range(num_servers)]


CASES: dict[str, tuple[StepShape, dict]] = {
    "one row": (StepShape(1, 64, 1, 1, [[0]]), {}),
    "three servers, sums": (StepShape(5, 24, 3, 6, spread(6, 3), torch.float32), {}),
    "three servers, per expert": (
        StepShape(5, 24, 3, 6, spread(6, 3), torch.float32, reply_mode=PER_EXPERT), {},
    ),
    "half precision, odd size": (
        StepShape(33, 7170, 4, 16, spread(16, 2), torch.float16, reply_mode=PER_EXPERT), {},
    ),
    "decode batch": (StepShape(128, 7168, 8, 256, spread(256, 8), reply_mode=PER_EXPERT), {}),
    "fp8": (StepShape(40, 300, 4, 12, spread(12, 3), fp8=True, reply_mode=PER_EXPERT), {}),
    "replicas": (StepShape(70, 100, 2, 4, [[0, 1, 2, 3], [0, 1], [3]]), {}),
    "bad and doubled ids": (
        StepShape(16, 128, 4, 8, spread(8, 2), reply_mode=PER_EXPERT), {"bad_ids": True},
    ),
    "32-bit ids, add signal": (
        StepShape(19, 48, 2, 8, spread(8, 4)), {"int32": True, "signal_mode": 1},
    ),
    "rows two bytes off": (StepShape(9, 1536, 2, 8, spread(8, 2)), {"offset": 2}),
    "all to one of two": (StepShape(50, 2880, 2, 8, spread(8, 2)), {"only": 1}),
}


def inputs(shape: StepShape, seed: int, *, bad_ids: bool = False, int32: bool = False,
           only: int | None = None) -> tuple[torch.Tensor, ...]:
    """(hidden in the model's dtype, ids, weights): random, fresh for every seed."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(shape.num_tokens, shape.hidden_size, generator=generator).to(shape.dtype)
    scores = torch.rand(shape.num_tokens, shape.num_experts, generator=generator)
    if only is not None:
        scores[:, [e for e in range(shape.num_experts) if e not in shape.shares[only]]] -= 2
    ids = scores.topk(shape.top_k, dim=1).indices
    if bad_ids:
        for row, bad in enumerate([-1, -2, -(2**31), shape.num_experts, 2**31 - 1]):
            ids[row, row % shape.top_k] = bad
        ids[6] = ids[6, 0]
        ids[7] = -1
    weights = torch.rand(shape.num_tokens, shape.top_k, generator=generator)
    return hidden, ids.to(torch.int32) if int32 else ids, weights


def make_step(target, name: str, seed: int = 0, **changes) -> tuple[Loopback, tuple]:
    """The named case on a target, and its (hidden, ids, weights)."""
    shape, options = CASES[name]
    options = dict(options)
    loop_options = {k: options.pop(k) for k in ("signal_mode", "offset") if k in options}
    hidden, ids, weights = inputs(shape, seed, **options)
    rows, scales = quantise_fp8(hidden) if shape.fp8 else (hidden, None)
    step = Loopback(target, shape, rows, ids, weights, scales, **{**loop_options, **changes})
    return step, (hidden, ids, weights)


def relative_wqes(wire: Wire) -> list[str]:
    """Entries of the ring with addresses counted from their region, as hex."""
    raw = wire.ring.read()
    entries = []
    for at in range(0, len(raw), 64):
        entry = bytearray(raw[at : at + 64])
        if entry != b"\xee" * 64:
            for offset, base in (
                (16, wire.remote.addr), (40, wire.local.addr), (56, wire.doorbells.addr),
            ):
                (addr,) = struct.unpack_from(">Q", entry, offset)
                if 0 <= addr - base < 1 << 40:
                    struct.pack_into(">Q", entry, offset, addr - base)
        entries.append(entry.hex(" ", 4))
    return entries


def see_wire(wire: Wire) -> dict:
    state = wire.qp.read_struct(IbgdaQp)
    heads = ("post_lock", "resv_head", "ready_head", "prod_idx", "cons_idx", "error")
    return {"wqes": relative_wqes(wire), "doorbells": wire.doorbells.read().hex(),
            **{name: getattr(state, name) for name in heads}}


def see_status(block) -> tuple:
    status = block.read_struct(KernelStatus)
    return tuple(getattr(status, name) for name, *_ in KernelStatus._fields_)


def run_step(step: Loopback, *, grid: int = 1, warps: int = 1, expert=lambda rows: rows * 2
             ) -> dict:
    """One step, puts through the work queue first and then once more directly.

    grid: blocks of the kernels that take many; warps: warps per block of all.
    Returns everything that can be seen, by name.
    """
    target, seen = step.target, {}

    def run(*steps, blocks=1, warps=warps):
        target.prepare(steps, grid=blocks, warps=warps).run()

    run(("client_route", step.route))
    run(("client_pack", step.pack), blocks=grid)
    run(("client_put_ibgda", step.put))
    run(("client_put_sequential", step.put))
    run(("client_put_direct", step.put))
    for name in ("batch_size", "num_pairs", "row_token", "pair_server", "pair_row", "num_skipped",
                 "missing"):
        seen[name] = getattr(step, name).read().hex()
    loaded = np.flatnonzero(np.frombuffer(step.batch_size.read(), np.uint32)).tolist()
    for s, wire in enumerate(step.wires):
        seen[f"put {s}"] = see_wire(wire)
        seen[f"request {s}"] = step.send[s].read().hex()
    for s in loaded:
        server = step.servers[s]
        run(("server_poll", server.poll), ("server_gather", server.gather))
        server.run_experts(expert)
        run(("server_reply_ibgda", server.reply_args))
        run(("server_reply_direct", server.reply_args))
        for name in ("recv", "messages", "found", "local_expert", "pair_expert", "offsets",
                     "cursor", "expert_rows", "pair_reply_row", "reply"):
            seen[f"{name} {s}"] = getattr(server, name).read().hex()
        seen[f"status {s}"] = see_status(server.status)
        seen[f"put back {s}"] = see_wire(server.wire)
        seen[f"gathered {s}"] = gathered_by_pair(step, s)
    run(("client_combine", step.combine), blocks=grid, warps=min(warps, 8))
    for s, reply in enumerate(step.replies):
        seen[f"client's reply {s}"] = reply.read().hex()
    seen["status"] = see_status(step.status)
    seen["output"] = step.output.read().hex()
    return seen


def run_in_place(step: Loopback, *, grid: int = 1, warps: int = 1,
                 expert=lambda rows: rows * 2) -> dict:
    """A step of a loopback that is in place, with the kernels of many blocks."""
    target, seen = step.target, {}

    def run(*steps, blocks=grid):
        target.prepare(steps, grid=blocks, warps=warps).run()

    run(("client_send_direct", step.send_args))
    for s in np.flatnonzero(np.frombuffer(step.batch_size.read(), np.uint32)).tolist():
        server = step.servers[s]
        run(("server_poll", server.poll), ("server_group", server.gather), blocks=1)
        run(("server_gather_rows", server.gather))
        server.run_experts(expert)
        run(("server_reply_in_place", server.reply_args))
        for name in ("recv", "messages", "found", "offsets", "pair_reply_row", "expert_rows"):
            seen[f"{name} {s}"] = getattr(server, name).read().hex()
        seen[f"gathered {s}"] = gathered_by_pair(step, s)
    run(("client_combine", step.combine))
    for s, reply in enumerate(step.replies):
        seen[f"client's reply {s}"] = reply.read().hex()
    for name in ("batch_size", "num_pairs", "row_token", "pair_server", "pair_row", "num_skipped",
                 "output"):
        seen[name] = getattr(step, name).read().hex()
    seen["status"] = see_status(step.status)
    return seen


def gathered_by_pair(step: Loopback, s: int) -> list[str]:
    """The gathered row (and scales) of each pair. Where an expert's rows lie inside its group is
    free; that no two pairs share a place is checked here."""
    server, shape = step.servers[s], step.shape
    num_pairs = int(np.frombuffer(server.found.read(), np.uint32)[2])
    position = np.frombuffer(server.pair_position.read(), np.int32)[:num_pairs]
    expert = np.frombuffer(server.pair_expert.read(), np.int32)[:num_pairs]
    offsets = np.frombuffer(server.offsets.read(), np.uint32).astype(np.int64)
    here = position >= 0
    assert np.array_equal(here, expert >= 0)
    assert len(set(position[here].tolist())) == here.sum() == offsets[-1]
    assert (position[here] >= offsets[expert[here]]).all()
    assert (position[here] < offsets[expert[here] + 1]).all()
    size = shape.hidden_size * (1 if shape.fp8 else shape.dtype.itemsize)
    scale_size = -(-shape.hidden_size // FP8_BLOCK) * 4 if shape.fp8 else 0
    rows, scales = server.gathered.read(), server.scales.read()
    return [
        "-" if p < 0 else rows[p * size : (p + 1) * size].hex()
        + scales[p * scale_size : (p + 1) * scale_size].hex() for p in position.tolist()
    ]


def differences(a: dict, b: dict) -> list[str]:
    """Names of what two runs do not share; b may have less to compare than a."""
    return [name for name, value in b.items() if a.get(name) != value]
