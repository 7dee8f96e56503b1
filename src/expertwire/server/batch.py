"""One server batch: poll -> gather -> experts -> reply, with buffers that only grow."""

from __future__ import annotations

import collections
import ctypes
import logging
import time
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64, c_void_p
from typing import Protocol

import numpy as np
import torch

from .._native import declare
from ..config import ServerConfig
from ..device_structs import (
    STATUS_COMPLETION_ERROR,
    KernelStatus,
    ServerGatherArgs,
    ServerMessage,
    ServerModel,
    ServerPollArgs,
    ServerReplyArgs,
    ServerSlot,
)
from ..errors import ExpertwireError
from ..hca.interface import Hca
from ..launch import Launch, last_error
from ..message import DATA_TYPE_BYTES, DATA_TYPES, FLAG_BYTES, FP8_BLOCK, Reason, dtype_of
from ..model.reference import dequantise_fp8
from ..observe.stats import StageTimes
from ..trace import recorder as trace
from .client_link import ClientLink

log = logging.getLogger("expertwire.server.server")


class Experts(Protocol):
    """What a server computes with: experts.ExpertShard, or echo.EchoShard."""

    echo: bool
    @property
    def experts(self) -> Sequence[int]: ...  # ids held here, ascending

    @property
    def min_rows(self) -> int: ...  # batch-invariant mode: rows of a busy expert's group, at least

    def run(
        self, layer: int, rows: torch.Tensor, offsets: Sequence[int], batch_invariant: bool
    ) -> torch.Tensor: ...


# Of what is refused, the first ones of a client and then few are logged: it decides how many come.
TOLD, TOLD_EVERY = 5, 10_000
LOOK_NS = 50_000_000  # between looks for errors of queues that nobody tells of
NATIVE_STAGES = ("poll", "gather", "reply")


class _NativeServer(ctypes.Structure):
    """struct ew_server of native/trip.hpp."""

    _fields_ = (
        ("hca", c_void_p), ("slots", c_void_p), ("notify", c_void_p), ("poll", c_void_p),
        ("gather", c_void_p), ("reply", c_void_p), ("found", c_void_p),
        ("times", c_void_p * len(NATIVE_STAGES)), ("spin_ns", c_uint64),
        ("num_messages", c_uint64), ("num_rows", c_uint64), ("num_refused", c_uint64),
        ("bytes_received", c_uint64), ("bytes_sent", c_uint64), ("num_failed", c_uint64),
        ("num_slots", c_uint32), ("pair_capacity", c_uint32), ("echo", c_uint32),
        ("queue_depth", c_uint32),
    )


# What ew_server_take returns, if it is not an error.
NOTHING, POLLED, GATHERED, REPLIED, FAILED = range(5)


class Batcher:
    """Owns the slot table and the batch buffers. Used by the server's data thread only."""

    def __init__(self, shard: Experts, model: dict, config: ServerConfig):
        self.config = config
        self.dtype = dtype_of(model["dtype"])
        self.hidden_size = model["hidden_size"]
        self.num_experts = model["num_experts"]
        self.times = StageTimes()
        self.refusals: collections.Counter[str] = collections.Counter()  # messages, by reason
        self.errors: collections.Counter[str] = collections.Counter()  # replies, by syndrome
        self._looked_ns = 0  # when for errors that nobody tells of
        self._num_layers = model["num_layers"]
        # (ids, rows of each layer and id, rows by id with former shards): read by other threads
        self._counted = ([], np.zeros((0, 0), np.int64), np.zeros(self.num_experts, np.int64))
        self.links: list[tuple[ClientLink, int]] = []  # (client, slot index) of each slot
        self.slots = (ServerSlot * 1)()
        self.num_clients = self.num_slots = 0
        self._found = (ctypes.c_uint32 * 5)()  # num_messages, num_rows, num_pairs, layer, data type
        self._poll = ServerPollArgs(
            model=ServerModel(
                num_layers=model["num_layers"], hidden_size=self.hidden_size,
                num_experts=self.num_experts, data_type=DATA_TYPES[self.dtype],
                max_experts_per_row=config.max_experts_per_row, allow_fp8=1, scale_block=FP8_BLOCK,
            ),
            max_rows=config.max_batch_rows,
        )
        found = ctypes.addressof(self._found)
        self._poll.num_messages, self._poll.num_rows = found, found + 4
        self._poll.num_pairs, self._poll.layer = found + 8, found + 12
        self._gather = ServerGatherArgs(
            num_experts=self.num_experts, num_messages=found, layer=found + 12
        )
        self._reply = ServerReplyArgs(
            hidden_size=self.hidden_size, output_type=DATA_TYPES[self.dtype]
        )
        self._rows = torch.empty(0, dtype=torch.uint8)
        self._scales = torch.empty(0)
        self._launch_poll = Launch([("server_poll", self._poll)])
        self._launch_gather = Launch([("server_gather", self._gather)])
        self._launch_reply = Launch([
            ("server_reply_ibgda", self._reply), ("server_reply_direct", self._reply),
        ])
        self._native = _NativeServer(
            poll=self._launch_poll.address, gather=self._launch_gather.address,
            reply=self._launch_reply.address, found=found, spin_ns=int(config.spin_us * 1e3),
            echo=shard.echo,
            times=(c_void_p * len(NATIVE_STAGES))(
                *[self.times.ring(stage).address for stage in NATIVE_STAGES]
            ),
        )
        self._native_address = ctypes.addressof(self._native)
        self.set_shard(shard)
        self._take = declare("ew_server_take", ctypes.c_int, c_void_p, c_uint64)
        self._send = declare("ew_server_reply", ctypes.c_int, c_void_p)

    def set_clients(self, clients: Sequence[ClientLink]) -> None:
        """Rebuilds the slot table; what was already taken from a slot stays known."""
        known = dict(zip(self.links, self.slots, strict=False))
        self.links = [(link, i) for link in clients for i in range(link.shape.num_slots)]
        self.num_clients, self.num_slots = len(clients), len(self.links)
        self.slots = (ServerSlot * max(self.num_slots, 1))()
        for i, (link, slot_idx) in enumerate(self.links):
            if entry := known.get((link, slot_idx)):
                self.slots[i] = entry
            else:
                link.fill_slot(self.slots[i], slot_idx)
        self._notify = (c_void_p * max(self.num_slots, 1))(
            *[link.endpoint.peer_pointer if link.endpoint else 0 for link, _ in self.links]
        )
        self._native.slots = ctypes.addressof(self.slots)
        self._native.notify = ctypes.addressof(self._notify)
        self._native.num_slots = self.num_slots
        self.messages = (ServerMessage * max(self.num_slots, 1))()
        self.statuses = (KernelStatus * max(self.num_slots, 1))()
        self._slot_state = np.zeros(max(self.num_slots, 1), np.uint32)
        poll = self._poll
        poll.slots = self._gather.slots = self._reply.slots = ctypes.addressof(self.slots)
        poll.messages = ctypes.addressof(self.messages)
        self._gather.messages = self._reply.messages = poll.messages
        poll.slot_state = self._slot_state.ctypes.data
        poll.num_slots = poll.max_messages = self.num_slots
        self._reply.status = ctypes.addressof(self.statuses)

    def set_shard(self, shard: Experts) -> None:
        """Computes with these experts from the next batch on."""
        num_local = len(shard.experts)
        self.shard = shard
        self._min_rows = shard.min_rows if self.config.batch_invariant else 1
        rows = np.zeros((self._num_layers, num_local), np.int64)
        self._counted = list(shard.experts), rows, self._total_rows()
        self._local_expert = np.full(self.num_experts, -1, np.int32)
        self._local_expert[list(shard.experts)] = np.arange(num_local)
        self._offsets = np.zeros(num_local + 1, np.uint32)
        self._cursor = np.zeros(max(num_local, 1), np.uint32)
        gather = self._gather
        gather.local_expert = self._local_expert.ctypes.data
        gather.expert_offsets = self._offsets.ctypes.data
        gather.cursor = self._cursor.ctypes.data
        gather.num_local, gather.min_rows = num_local, self._min_rows
        gather.expert_rows = rows.ctypes.data
        self._pair_capacity = self._native.pair_capacity = 0  # `_reserve` depends on both

    def rows_by_layer(self) -> tuple[list[int], np.ndarray]:
        """(ids, [layers, ids]): rows of each layer and held expert since they are held."""
        return self._counted[:2]

    @property
    def expert_rows(self) -> np.ndarray:
        """Rows of each layer and held expert since they are held."""
        return self._counted[1]

    def _total_rows(self) -> np.ndarray:
        ids, rows, earlier = self._counted
        total = earlier.copy()
        total[ids] += rows.sum(axis=0)
        return total

    def rows_by_expert(self) -> dict[str, list[int]]:
        """{"row_experts": ids, "expert_rows": their rows since the start}, held or dropped."""
        total = self._total_rows()
        ids = sorted(set(self._counted[0]) | set(np.flatnonzero(total).tolist()))
        return {"row_experts": ids, "expert_rows": total[ids].tolist()}

    @property
    def counts(self) -> dict[str, int]:
        """Messages, rows, refusals and bytes since the start; messages that wait now."""
        native = self._native
        return {"messages": native.num_messages, "rows": native.num_rows,
                "refused": native.num_refused, "bytes_received": native.bytes_received,
                "bytes_sent": native.bytes_sent, "queue_depth": native.queue_depth}

    @property
    def flag_addrs(self) -> list[int]:
        """Address of each slot's request flag, for inspection and tests."""
        return [slot.recv_addr + slot.recv_slot_bytes - FLAG_BYTES
                for slot in self.slots[: self.num_slots]]

    def serve(self, hca: Hca, epoch: int, seat: int, timeout_ns: int) -> list[ClientLink]:
        """Waits for messages at most timeout_ns; takes what is ready, computes, replies.

        Returns clients that could not be answered.
        """
        if hca.tells_errors:
            return self._serve(hca, epoch, seat, timeout_ns)
        broken = self._serve(hca, epoch, seat, min(timeout_ns, LOOK_NS))
        now = time.monotonic_ns()
        if not broken and now - self._looked_ns >= LOOK_NS:
            self._looked_ns = now
            return self._failed_links()
        return broken

    def _serve(self, hca: Hca, epoch: int, seat: int, timeout_ns: int) -> list[ClientLink]:
        native = self._native
        native.hca = hca.pointer
        reply = self._reply
        reply.epoch, reply.server_id = epoch, seat
        reply.experts_us = reply.expert_output = 0
        taken = self._take(self._native_address, timeout_ns)
        if taken == NOTHING:
            return []
        if taken == FAILED:
            return self._failed_links()
        if taken < 0:
            raise ExpertwireError(f"taking a batch failed: {last_error()}")
        num_messages, _, num_pairs, layer, data_type = self._found
        if taken != REPLIED:
            start = time.perf_counter_ns()
            if taken == POLLED:
                self._reserve(num_pairs)
                self._launch_gather.run()
                self.times.add("gather", self._launch_gather.elapsed_ns(0))
            output = self._run_experts(num_messages, layer, data_type)
            done = time.perf_counter_ns()
            reply.experts_us = (done - start) // 1000
            if trace.active:
                trace.stage("experts", start, done, layer=layer, server=seat,
                            rows=self._offsets[-1].item())
            reply.expert_output = output.data_ptr() if output is not None else 0
            look = self._send(self._native_address)
            if look < 0:
                raise ExpertwireError(f"sending a batch's replies failed: {last_error()}")
            self.times.add("experts", done - start)
            if look == 0:
                return []
        return self._problems(num_messages)

    def _run_experts(self, num_messages: int, layer: int, data_type: int) -> torch.Tensor | None:
        """Gathered rows through the experts: [rows, H], or None when there is nothing to add."""
        offsets = self._offsets.tolist()
        num_gathered = offsets[-1]
        if num_gathered == 0:
            return self._rows
        rows = self._rows[: num_gathered * self.hidden_size * DATA_TYPE_BYTES[data_type]]
        try:
            if data_type == DATA_TYPES[torch.float8_e4m3fn]:
                quantised = rows.view(torch.float8_e4m3fn).view(num_gathered, self.hidden_size)
                per_row = -(-self.hidden_size // FP8_BLOCK)
                scales = self._scales[: num_gathered * per_row].view(num_gathered, per_row)
                inputs = dequantise_fp8(quantised, scales, self.dtype, FP8_BLOCK)
            else:
                inputs = rows.view(self.dtype).view(num_gathered, self.hidden_size)
            output = self.shard.run(layer, inputs, offsets, self.config.batch_invariant)
            return output.contiguous()
        except Exception:
            log.exception("layer %d: the experts failed on %d rows", layer, num_gathered)
            for m in range(num_messages):
                if self.messages[m].reason == Reason.OK:
                    self.messages[m].reason = Reason.EXPERT_FAULT
            return None

    def _reserve(self, num_pairs: int) -> None:
        """Buffers for at least num_pairs (row, expert) pairs of any data type."""
        if num_pairs <= self._pair_capacity:
            return
        self._pair_capacity = capacity = max(num_pairs, 2 * self._pair_capacity)
        self._native.pair_capacity = capacity
        self._pair_expert = np.zeros(capacity, np.int32)
        self._pair_position = np.zeros(capacity, np.int32)
        self._pair_reply_row = np.zeros(capacity, np.int32)
        self._gather.pair_expert = self._pair_expert.ctypes.data
        self._gather.pair_position = self._pair_position.ctypes.data
        self._gather.pair_reply_row = self._pair_reply_row.ctypes.data
        self._reply.pair_position = self._pair_position.ctypes.data
        self._reply.pair_reply_row = self._pair_reply_row.ctypes.data
        # Padding adds at most min_rows - 1 places per busy expert, and each has a pair at least.
        places = capacity + (self._min_rows - 1) * min(capacity, len(self.shard.experts))
        self._scales = torch.zeros(places * -(-self.hidden_size // FP8_BLOCK))
        self._gather.gathered_scales = self._scales.data_ptr()
        self._rows = torch.zeros(
            places * self.hidden_size * self.dtype.itemsize, dtype=torch.uint8
        )
        self._gather.gathered = self._rows.data_ptr()

    def _failed_links(self) -> list[ClientLink]:
        """Clients whose queues had an error: a reply may never come, and they wait for it."""
        broken = []
        for link in {id(link): link for link, _ in self.links}.values():
            assert link.endpoint is not None
            syndrome, _ = link.endpoint.first_error()
            if syndrome:
                self._count_error(link, STATUS_COMPLETION_ERROR, syndrome)
                broken.append(link)
        return broken

    def _count_error(self, link: ClientLink, code: int, syndrome: int) -> None:
        self.errors[f"{syndrome:#04x}"] += 1
        log.warning("reply to client %s failed: status %d, syndrome %#x", link.name, code, syndrome)

    def _problems(self, num_messages: int) -> list[ClientLink]:
        """Logs what was refused; returns the clients whose replies could not be sent."""
        broken = []
        for message, status in zip(self.messages[:num_messages], self.statuses, strict=False):
            link, _ = self.links[message.slot]
            if message.reason != Reason.OK:
                self.refusals[Reason(message.reason).name.lower()] += 1
                link.num_refused += 1
                if link.num_refused <= TOLD or link.num_refused % TOLD_EVERY == 0:
                    log.warning("refused message %d of client %s: %s", link.num_refused, link.name,
                                Reason(message.reason).name)
            if status.code:
                self._count_error(link, status.code, status.syndrome)
                broken.append(link)
        return broken
