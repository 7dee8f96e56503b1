"""Kernels by themselves: memory laid out by hand, and the same steps in plain Python as oracle."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np

from expertwire.device_structs import BufferHead, ClientServer, MessageShape, RouteTables
from expertwire.launch import Launch
from expertwire.message import (
    DATA_TYPE_BYTES,
    FLAG_BYTES,
    REQUEST_MAGIC,
    WIRE_VERSION,
    RequestLayout,
    head_checksum,
)

# (blocks, warps per block, lanes per warp). Routing and gathering run in one block.
GEOMETRIES = [(1, 1, 1), (1, 4, 1), (1, 1, 32), (1, 3, 8), (3, 2, 4), (5, 1, 1)]
STALE = 0xA5  # what memory holds before: a byte that nobody wrote is visible


def run(kernel: str, args: ctypes.Structure, geometry: tuple[int, int, int]) -> None:
    grid, warps, warp_size = geometry
    Launch([(kernel, args)], grid=grid, warps=warps, warp_size=warp_size).run()


def memory(num_bytes: int, offset: int = 0) -> np.ndarray:
    """Stale bytes at a 64-byte boundary plus `offset`."""
    raw = np.full(num_bytes + 128, STALE, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + num_bytes]


def strided(rows: np.ndarray, stride: int, offset: int = 0) -> np.ndarray:
    """The same rows (2-D), `stride` elements apart, their first one `offset` elements in."""
    raw = np.full(offset + rows.shape[0] * stride + rows.shape[1], 99, rows.dtype)
    view = np.lib.stride_tricks.as_strided(
        raw[offset:], rows.shape, (stride * rows.itemsize, rows.itemsize)
    )
    view[:] = rows
    return view


@dataclass
class Routing:
    """Decisions of routing, as lists: rows[s] are the tokens that go to server s, in order."""

    rows: list[list[int]]
    num_pairs: list[int]
    pair_server: np.ndarray
    pair_row: np.ndarray
    num_skipped: int = 0
    missing: set[int] = field(default_factory=set)


def route(
    ids: np.ndarray, replicas: list[list[int]], num_servers: int, per_expert: bool
) -> Routing:
    """Which server gets which token, and where each (token, expert) pair is in its reply."""
    num_tokens, top_k = ids.shape
    out = Routing([], [], np.full(ids.shape, -1, np.int32), np.full(ids.shape, -1, np.int32))
    for t in range(num_tokens):
        for k in range(top_k):
            expert = int(ids[t, k])
            if not 0 <= expert < len(replicas):
                out.num_skipped += 1
            elif not replicas[expert]:
                out.missing.add(expert)
            else:
                out.pair_server[t, k] = replicas[expert][t % len(replicas[expert])]
    for s in range(num_servers):
        tokens = [t for t in range(num_tokens) if (out.pair_server[t] == s).any()]
        pairs = 0
        for row, t in enumerate(tokens):
            here = np.flatnonzero(out.pair_server[t] == s)
            if per_expert:
                out.pair_row[t, here] = range(pairs, pairs + len(here))
            else:
                out.pair_row[t, here[0]] = row
            pairs += len(here)
        out.rows.append(tokens)
        out.num_pairs.append(pairs)
    return out


class Tables:
    """Routing tables in memory, empty or as `route` decided."""

    def __init__(
        self, num_servers: int, num_tokens: int, top_k: int, routing: Routing | None = None
    ):
        self.row_stride = num_tokens + 3
        self.batch_size = np.full(num_servers, 77, np.uint32)
        self.num_pairs = np.full(num_servers, 77, np.uint32)
        self.row_token = np.full((num_servers, self.row_stride), 77, np.uint32)
        self.pair_server = np.full((num_tokens, top_k), 77, np.int32)
        self.pair_row = np.full((num_tokens, top_k), 77, np.int32)
        if routing is not None:
            self.batch_size[:] = [len(tokens) for tokens in routing.rows]
            self.num_pairs[:] = routing.num_pairs
            self.pair_server[:], self.pair_row[:] = routing.pair_server, routing.pair_row
            for s, tokens in enumerate(routing.rows):
                self.row_token[s, : len(tokens)] = tokens
        self.struct = RouteTables(
            batch_size=self.batch_size.ctypes.data, num_pairs=self.num_pairs.ctypes.data,
            row_token=self.row_token.ctypes.data, pair_server=self.pair_server.ctypes.data,
            pair_row=self.pair_row.ctypes.data, row_stride=self.row_stride,
            num_servers=num_servers,
        )


def request_bytes(
    shape: MessageShape, hidden: np.ndarray, active: np.ndarray, weights: np.ndarray,
    scales: np.ndarray | None,
) -> bytes:
    """A whole request, head to last section (docs/wire.md).

    hidden: uint8 [rows, row bytes]. active: int32 [rows, K], -1 for none. weights: fp32 [rows, K].
    scales: fp32 [rows, scales per row], or None.
    """
    rows, top_k = active.shape
    num_scales = 0 if scales is None else scales.shape[1]
    layout = RequestLayout.of(rows, top_k, hidden.shape[1], num_scales)
    sections = [active.astype(np.int32).tobytes(), hidden.tobytes(),
                weights.astype(np.float32).tobytes(),
                b"" if scales is None else scales.astype(np.float32).tobytes()]
    head = BufferHead(
        magic=REQUEST_MAGIC, version=WIRE_VERSION, head_bytes=128, num_rows=rows,
        experts_per_row=top_k, active_bytes=layout.hidden_offset - layout.active_offset,
        payload_bytes=layout.end - layout.hidden_offset,
        padding_bytes=sum(-len(section) % 16 for section in sections),
        **{name: getattr(shape, name) for name in (
            "seq", "epoch", "client_id", "layer", "hidden_size", "data_type", "scale_type",
            "scale_block", "num_experts", "reply_mode", "reply_type",
        )},
    )
    head.head_checksum = head_checksum(head)
    return bytes(head) + b"".join(s + bytes(-len(s) % 16) for s in sections)


def slot_bytes(shape: MessageShape, max_rows: int) -> int:
    """Size of a request slot for max_rows rows of this shape."""
    scales = -(-shape.hidden_size // shape.scale_block) if shape.scale_block else 0
    row_bytes = shape.hidden_size * DATA_TYPE_BYTES[shape.data_type]
    return RequestLayout.of(max_rows, shape.experts_per_row, row_bytes, scales).end + FLAG_BYTES


def client_servers(*entries: dict[str, int]) -> ctypes.Array:
    servers = (ClientServer * max(len(entries), 1))()
    for server, values in zip(servers, entries, strict=False):
        for name, value in values.items():
            setattr(server, name, value)
    return servers
