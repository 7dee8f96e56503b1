"""What is on its way: a batch (Handle), its parts (Chunk), and the slot that a part is in (Flight).

A flight's kernel arguments are kept and refilled from batch to batch.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from .._native import declare
from ..config import SIGNAL_MODES, ClientConfig
from ..device_structs import (
    ClientCombineArgs,
    ClientPackArgs,
    ClientPutArgs,
    ClientRouteArgs,
    ClientServer,
    KernelStatus,
    MessageShape,
    ReplyHead,
    RouteTables,
)
from ..errors import ConfigError
from ..launch import Launch
from ..message import FLAG_BYTES, ReplyMode, SlotShape
from .inputs import Batch
from .routing import RoutingTable

if TYPE_CHECKING:
    from .client import Client
    from .link import ServerLink


class Chunk:
    """Tokens [begin, end) of one batch."""

    def __init__(self, handle: Handle, begin: int, end: int):
        self.handle = handle
        self.begin, self.end = begin, end
        self.ids: torch.Tensor | None = None  # the batch's, or with experts dropped (send.py)
        self.dropped: dict[int, int] = {}  # expert -> (token, expert) pairs left out
        self.skips_counted = False


class Handle:
    """A batch on its way, made by `Client.dispatch`.

    `combine()` waits for it. Handles may be combined in any order, by any thread, and more than
    once.
    """

    def __init__(self, client: Client, layer: int, batch: Batch):
        self._client = client
        self.layer = layer
        self.batch = batch
        self.num_open = 0  # chunks that are not combined yet
        self.error: Exception | None = None

    def combine(self) -> torch.Tensor:
        """Waits for all replies and returns the layer's output.

        Returns: [T, H] in the dtype of the dispatched hidden states.

        Raises NoServerError if an expert has no server left, ServerLostError or WaitTimeout if
        servers fail one after the other, RejectedError with the reason if a server refuses,
        HcaError, and ConfigError once the client is closed.
        """
        with self._client.lock:
            if self.num_open and self._client.closed:
                raise ConfigError("the client was closed before this batch was combined")
            while self.num_open:
                self._client.finish_oldest()
        if self.error is not None:
            raise self.error
        return self.batch.output


class Flight:
    """Buffers and launches of one slot index, the same index at every server."""

    def __init__(self, slot_idx: int, config: ClientConfig):
        self.slot_idx = slot_idx
        self.config = config
        self.table: RoutingTable | None = None
        self.version = 0  # grows whenever the launches and tables below are made anew
        self.top_k = 0
        self.chunk: Chunk | None = None
        self.issued_ns = 0
        self.waiting: list[int] = []  # server indices whose reply is not in yet
        self.failed: list[int] = []  # of these, the ones that are given up
        self.status = KernelStatus()
        self.num_skipped = ctypes.c_uint64()
        self.missing_expert = ctypes.c_int32()
        self.shape = MessageShape()
        self.arrivals = np.zeros(1, np.uint64)  # when each reply was seen, CLOCK_MONOTONIC ns
        self._wait = declare(
            "ew_client_wait", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64,
        )

    def prepare(self, table: RoutingTable, top_k: int, slots: SlotShape) -> None:
        """Makes the tables fit this routing table and top-k. Free when neither changed."""
        if table is self.table and top_k == self.top_k:
            return
        self.table, self.top_k = table, top_k
        self.version += 1
        num_servers, max_rows = len(table.links), slots.max_rows
        self.batch_size = np.zeros(max(num_servers, 1), np.uint32)
        self.num_pairs = np.zeros(max(num_servers, 1), np.uint32)
        self._row_token = np.zeros((max(num_servers, 1), max_rows), np.uint32)
        self._pair_server = np.zeros((max_rows, top_k), np.int32)
        self._pair_row = np.zeros((max_rows, top_k), np.int32)
        self.servers = (ClientServer * max(num_servers, 1))()
        for entry, link in zip(self.servers, table.links, strict=False):
            self._fill_server(entry, link, slots)
        tables = RouteTables(
            batch_size=self.batch_size.ctypes.data, num_pairs=self.num_pairs.ctypes.data,
            row_token=self._row_token.ctypes.data, pair_server=self._pair_server.ctypes.data,
            pair_row=self._pair_row.ctypes.data, row_stride=max_rows, num_servers=num_servers,
        )
        servers, status = ctypes.addressof(self.servers), ctypes.addressof(self.status)
        self.route = ClientRouteArgs(
            tables=tables, expert_servers=table.expert_servers.ctypes.data,
            num_skipped=ctypes.addressof(self.num_skipped),
            missing_expert=ctypes.addressof(self.missing_expert), experts_per_row=top_k,
            num_experts=table.num_experts, max_replicas=table.max_replicas,
            reply_mode=slots.reply_mode,
        )
        self.pack = ClientPackArgs(servers=servers, tables=tables)
        missing = ctypes.addressof(self.missing_expert)
        self.pack.missing_expert = missing
        self.put = ClientPutArgs(
            servers=servers, tables=tables, status=status, missing_expert=missing,
            max_loaded_servers=self.config.max_servers,
            signal_mode=SIGNAL_MODES[self.config.signal_mode],
        )
        self.combine = ClientCombineArgs(servers=servers, tables=tables, status=status)
        self.arrivals = np.zeros(max(num_servers, 1), np.uint64)
        self._wait_args = (
            servers, self.batch_size.ctypes.data, num_servers, self.arrivals.ctypes.data
        )
        # Views of each reply flag: reading `.value` is all that a look at the flag costs.
        self.flags = [
            ctypes.c_uint64.from_address(self.flag_addr(s)) for s in range(num_servers)
        ]
        put_kernel = "client_put_ibgda" if self.config.do_ibgda else "client_put_direct"
        self.launch_send = Launch([
            ("client_route", self.route), ("client_pack", self.pack), (put_kernel, self.put),
        ])
        self.launch_combine = Launch([("client_combine", self.combine)])

    def wait(self, hca: int, spin_ns: int, timeout_ns: int) -> int:
        """Waits for the replies that are not in yet (native ew_client_wait); its return code."""
        servers, batch_size, num_servers, arrivals = self._wait_args
        return self._wait(
            hca, servers, batch_size, num_servers, self.shape.seq, arrivals, spin_ns, timeout_ns
        )

    def _fill_server(self, entry: ClientServer, link: ServerLink, slots: SlotShape) -> None:
        end = link.endpoint
        assert end.remote is not None, "routing to a server that is not connected"
        entry.request_slot_bytes = slots.request_slot_bytes
        entry.reply_slot_bytes = slots.reply_slot_bytes
        offset = self.slot_idx * slots.request_slot_bytes
        entry.in_place = not self.config.do_ibgda
        entry.send_addr = (end.mapped_addr if entry.in_place else end.send.addr) + offset
        entry.remote_addr = end.remote.addr + offset
        entry.reply_addr = end.recv.addr + self.slot_idx * slots.reply_slot_bytes
        entry.peer = end.peer_addr
        entry.max_rows, entry.max_pairs = slots.max_rows, slots.max_reply_rows
        entry.slot_idx, entry.server_id = self.slot_idx, link.seat

    def loaded(self) -> list[int]:
        """Indices of the servers that this batch sends to."""
        return [s for s, rows in enumerate(self.batch_size.tolist()) if rows]

    def set_shape(self, shape: MessageShape) -> None:
        """The same message shape for every stage of this batch."""
        self.shape = shape
        self.pack.shape = shape
        self.put.shape = shape
        self.combine.shape = shape

    def flag_addr(self, server_idx: int) -> int:
        """Address of the reply flag of one server, a u64 that becomes the batch's seq."""
        entry = self.servers[server_idx]
        return entry.reply_addr + entry.reply_slot_bytes - FLAG_BYTES

    def reply_head(self, server_idx: int) -> ReplyHead:
        """View of the reply head; meaningful once the flag holds the batch's seq."""
        return ReplyHead.from_address(self.flag_addr(server_idx) - ctypes.sizeof(ReplyHead))

    def reply_rows(self, server_idx: int) -> int:
        """Rows that the server's reply has."""
        per_expert = self.shape.reply_mode == ReplyMode.PER_EXPERT
        return int((self.num_pairs if per_expert else self.batch_size)[server_idx])

    def age_ns(self) -> int:
        return time.perf_counter_ns() - self.issued_ns
