"""One MoE step with the client and its servers in one address space, on the CPU or on one GPU.

No registry, no processes and no HCA: every buffer and every kernel of the step is in the caller's
hands. Kernel tests compare targets with it and benchmarks time it.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .device_structs import (
    ClientCombineArgs,
    ClientPackArgs,
    ClientPutArgs,
    ClientRouteArgs,
    ClientSendArgs,
    ClientServer,
    IbgdaKey,
    IbgdaPeer,
    IbgdaQp,
    KernelStatus,
    MessageShape,
    RouteTables,
    ServerEchoArgs,
    ServerGatherArgs,
    ServerMessage,
    ServerModel,
    ServerPollArgs,
    ServerReplyArgs,
    ServerSlot,
)
from .message import DATA_TYPE_BYTES, DATA_TYPES, FP8_BLOCK, ReplyMode, SlotShape
from .model.reference import dequantise_fp8
from .target import Block, Target

QP_DEPTH = 64
CLIENT_ID = 7
UNTOUCHED = 0xEE  # what memory holds before a kernel writes it


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step. shares: the experts of each server, which may overlap (replicas)."""

    num_tokens: int
    hidden_size: int
    top_k: int
    num_experts: int
    shares: Sequence[Sequence[int]]
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    reply_mode: int = ReplyMode.SUM

    @property
    def slots(self) -> SlotShape:
        return SlotShape(
            num_slots=1, max_rows=max(self.num_tokens, 1), experts_per_row=self.top_k,
            hidden_size=self.hidden_size, element_bytes=self.dtype.itemsize, fp8=self.fp8,
            reply_mode=self.reply_mode, reply_element_bytes=self.dtype.itemsize,
        )


class Wire:
    """One direction between two sides: a queue pair that no HCA consumes, keys, mapped memory."""

    def __init__(self, target: Target, local: Block, remote: Block, timeout_ns: int):
        self.local, self.remote = local, remote
        self.ring = target.alloc(QP_DEPTH * 64, UNTOUCHED)
        self.doorbells = target.alloc(64)  # record, register, proxy, scratch
        self.cq = target.alloc(64, 0xFF)
        base = self.doorbells.addr
        self.qp = target.place(IbgdaQp(
            sq_addr=self.ring.addr, dbrec_addr=base, doorbell_addr=base + 16,
            cq_addr=self.cq.addr, qpn=0xABCDEF, num_wqe=QP_DEPTH, scope=target.scope,
            proxy_addr=base + 32, scratch_addr=base + 48, scratch_lkey_be=socket.htonl(0x999),
        ))
        self._keys = target.place((IbgdaKey * 2)(
            IbgdaKey(local.addr, local.addr + local.num_bytes, socket.htonl(0x111)),
            IbgdaKey(remote.addr, remote.addr + remote.num_bytes, socket.htonl(0x222), 0,
                     remote.addr),
        ))
        self.peer = target.place(IbgdaPeer(
            qps=self.qp.addr, num_qps=1, local_keys=self._keys.addr, num_local_keys=1,
            remote_keys=self._keys.addr + ctypes.sizeof(IbgdaKey), num_remote_keys=1,
            timeout_ns=timeout_ns,
        ))


class LoopbackServer:
    """The server's memory and kernels for one slot of one client."""

    def __init__(self, target: Target, shape: StepShape, experts: Sequence[int], timeout_ns: int):
        slots, num_local = shape.slots, max(len(experts), 1)
        self.shape, self.target = shape, target
        self.recv = target.alloc_slot(slots.request_slot_bytes, UNTOUCHED)
        self.reply = target.alloc_slot(slots.reply_slot_bytes, UNTOUCHED)
        self.recv.write(b"\0" * 16, slots.request_slot_bytes - 16)
        num_pairs = slots.max_rows * slots.experts_per_row
        row_bytes = shape.hidden_size * shape.dtype.itemsize
        local = np.full(shape.num_experts, -1, np.int32)
        local[list(experts)] = np.arange(len(experts))
        self.slot = target.alloc(ctypes.sizeof(ServerSlot))
        self.messages = target.alloc(ctypes.sizeof(ServerMessage), UNTOUCHED)
        self.found = target.alloc(5 * 4)  # num_messages, num_rows, num_pairs, layer, data type
        self.state = target.alloc(4)
        self.local_expert = target.place(local)
        self.pair_expert = target.alloc(num_pairs * 4, UNTOUCHED)
        self.offsets = target.alloc((num_local + 1) * 4, UNTOUCHED)
        self.cursor = target.alloc(num_local * 4, UNTOUCHED)
        self.pair_position = target.alloc(num_pairs * 4, UNTOUCHED)
        self.pair_reply_row = target.alloc(num_pairs * 4, UNTOUCHED)
        self.gathered = target.alloc(num_pairs * row_bytes, UNTOUCHED)
        self.scales = target.alloc(num_pairs * -(-shape.hidden_size // FP8_BLOCK) * 4, UNTOUCHED)
        self.output = target.alloc(num_pairs * row_bytes, UNTOUCHED)
        self.expert_rows = target.alloc(num_local * 8)
        self.status = target.alloc(ctypes.sizeof(KernelStatus))
        self.arrived = target.alloc(4)
        found = self.found.addr
        self.poll = ServerPollArgs(
            slots=self.slot.addr, messages=self.messages.addr, slot_state=self.state.addr,
            num_messages=found, num_rows=found + 4, num_pairs=found + 8, layer=found + 12,
            timeout_ns=timeout_ns, num_slots=1, max_messages=1, max_rows=1 << 20,
            model=ServerModel(
                num_layers=1, hidden_size=shape.hidden_size, num_experts=shape.num_experts,
                data_type=DATA_TYPES[shape.dtype], max_experts_per_row=64, allow_fp8=1,
                scale_block=FP8_BLOCK,
            ),
        )
        self.gather = ServerGatherArgs(
            slots=self.slot.addr, messages=self.messages.addr,
            local_expert=self.local_expert.addr, pair_expert=self.pair_expert.addr,
            expert_offsets=self.offsets.addr, cursor=self.cursor.addr,
            pair_position=self.pair_position.addr, pair_reply_row=self.pair_reply_row.addr,
            gathered=self.gathered.addr, gathered_scales=self.scales.addr,
            expert_rows=self.expert_rows.addr, num_messages=found, layer=found + 12,
            num_local=len(experts), num_experts=shape.num_experts, min_rows=1,
        )
        self.reply_args = ServerReplyArgs(
            slots=self.slot.addr, messages=self.messages.addr,
            pair_position=self.pair_position.addr, pair_reply_row=self.pair_reply_row.addr,
            expert_output=self.output.addr, status=self.status.addr, found=found,
            arrived=self.arrived.addr, hidden_size=shape.hidden_size,
            output_type=DATA_TYPES[shape.dtype], server_id=3,
        )
        echo = ServerReplyArgs.from_buffer_copy(self.reply_args)
        echo.expert_output = 0
        self.seen = target.alloc(4)
        self.echo = ServerEchoArgs(poll=self.poll, reply=echo, seen=self.seen.addr)

    def connect(self, client_reply: Block, wire: Wire, signal_mode: int, in_place: bool) -> None:
        slots = self.shape.slots
        self.wire = wire
        self.slot.write(ServerSlot(
            recv_addr=self.recv.addr, recv_slot_bytes=self.recv.num_bytes,
            reply_addr=client_reply.addr if in_place else self.reply.addr,
            reply_slot_bytes=self.reply.num_bytes, in_place=in_place,
            remote_reply_addr=client_reply.addr, peer=wire.peer.addr, client_id=CLIENT_ID, open=1,
            max_rows=slots.max_rows, max_pairs=slots.max_reply_rows, signal_mode=signal_mode,
        ))

    def num_gathered(self) -> int:
        return int(np.frombuffer(self.offsets.read(), np.uint32)[-1])

    def run_experts(self, expert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """expert(rows [N, H] in the model's dtype) -> the same shape, for all gathered rows.

        Computed on the CPU whatever the target, so that targets differ in nothing else.
        """
        count, size = self.num_gathered(), self.shape.hidden_size
        if count == 0:
            return
        if self.shape.fp8:
            rows = self.gathered.view(torch.float8_e4m3fn, count, size).cpu()
            scales = self.scales.view(torch.float32, count, -(-size // FP8_BLOCK)).cpu()
            inputs = dequantise_fp8(rows, scales, self.shape.dtype)
        else:
            inputs = self.gathered.view(self.shape.dtype, count, size).cpu()
        self.output.write(expert(inputs))


class Loopback:
    """A client, its servers, and the kernels between them.

    hidden: [T, H], fp8 rows with `scales` [T, S]; topk_ids [T, K] int64 or int32; topk_weights
    [T, K] float32. All are copied to the target. offset: bytes that the rows start off alignment.
    wire: makes one direction from (target, local memory, remote memory, timeout in ns). in_place:
    messages and replies are made in the other side's slot, and each launch of the `client_send`
    kernel takes the next sequence number by itself. server_targets: where each server is, default
    where the client is; each side must reach the other's memory.
    """

    def __init__(
        self, target: Target, shape: StepShape, hidden: torch.Tensor, topk_ids: torch.Tensor,
        topk_weights: torch.Tensor, scales: torch.Tensor | None = None, *, signal_mode: int = 0,
        offset: int = 0, timeout_ns: int = 2_000_000_000,
        wire: Callable[[Target, Block, Block, int], Wire] = Wire, in_place: bool = False,
        server_targets: Sequence[Target] | None = None,
    ):
        self.target, self.shape = target, shape
        slots, num_servers = shape.slots, len(shape.shares)
        max_rows = slots.max_rows
        self.servers = [
            LoopbackServer(there, shape, experts, timeout_ns)
            for there, experts in zip(server_targets or [target] * num_servers, shape.shares,
                                      strict=True)
        ]
        self.send = [
            target.alloc_slot(slots.request_slot_bytes, UNTOUCHED) for _ in self.servers
        ]
        self.replies = [
            target.alloc_slot(slots.reply_slot_bytes, UNTOUCHED) for _ in self.servers
        ]
        self.wires = []
        entries = (ClientServer * num_servers)()
        for entry, server, send, reply in zip(
            entries, self.servers, self.send, self.replies, strict=True
        ):
            reply.write(b"\0" * 16, reply.num_bytes - 16)
            to_server = wire(target, send, server.recv, timeout_ns)
            self.wires.append(to_server)
            to_client = wire(server.target, server.reply, reply, timeout_ns)
            server.connect(reply, to_client, signal_mode, in_place)
            entry.send_addr = server.recv.addr if in_place else send.addr
            entry.in_place, entry.request_slot_bytes = in_place, send.num_bytes
            entry.remote_addr, entry.peer = server.recv.addr, to_server.peer.addr
            entry.reply_addr, entry.reply_slot_bytes = reply.addr, reply.num_bytes
            entry.max_rows, entry.max_pairs = max_rows, slots.max_reply_rows
        self.entries = target.place(entries)
        self.batch_size = target.alloc(num_servers * 4, UNTOUCHED)
        self.num_pairs = target.alloc(num_servers * 4, UNTOUCHED)
        self.row_token = target.alloc(num_servers * max_rows * 4, UNTOUCHED)
        self.pair_server = target.alloc(max_rows * shape.top_k * 4, UNTOUCHED)
        self.pair_row = target.alloc(max_rows * shape.top_k * 4, UNTOUCHED)
        self.num_skipped = target.alloc(8)
        self.missing = target.place(np.array([-1], np.int32))
        self.status = target.alloc(ctypes.sizeof(KernelStatus))
        self.seq, self.arrived = target.alloc(8), target.alloc(4)
        self.counts = target.alloc(num_servers * (max_rows + 1) * 8, UNTOUCHED)
        self.row_bytes = hidden.shape[1] * hidden.element_size()
        self.hidden = target.alloc(offset + hidden.shape[0] * self.row_bytes)
        self.hidden.write(hidden.contiguous().view(torch.uint8), offset)
        self.ids, self.weights = target.place(topk_ids), target.place(topk_weights)
        self.scales = target.place(scales if scales is not None else b"\0")
        self.output = target.alloc(max_rows * shape.hidden_size * shape.dtype.itemsize, UNTOUCHED)
        self._make_args(topk_ids, offset, signal_mode, timeout_ns)
        if in_place:
            self.combine.seq = self.seq.addr
        self.set_seq(1)

    def _make_args(
        self, topk_ids: torch.Tensor, offset: int, signal_mode: int, timeout_ns: int
    ) -> None:
        shape, top_k = self.shape, self.shape.top_k
        holders = [
            [s for s, held in enumerate(shape.shares) if expert in held]
            for expert in range(shape.num_experts)
        ]
        max_replicas = max(1, max(map(len, holders)))
        table = np.full((shape.num_experts, max_replicas), -1, np.int32)
        for expert, servers in enumerate(holders):
            table[expert, : len(servers)] = servers
        self.expert_servers = self.target.place(table)
        tables = RouteTables(
            batch_size=self.batch_size.addr, num_pairs=self.num_pairs.addr,
            row_token=self.row_token.addr, pair_server=self.pair_server.addr,
            pair_row=self.pair_row.addr, row_stride=shape.slots.max_rows,
            num_servers=len(shape.shares),
        )
        message = MessageShape(
            hidden_size=shape.hidden_size, experts_per_row=top_k, num_experts=shape.num_experts,
            data_type=DATA_TYPES[torch.float8_e4m3fn if shape.fp8 else shape.dtype],
            scale_type=DATA_TYPES[torch.float32] if shape.fp8 else 0,
            scale_block=FP8_BLOCK if shape.fp8 else 0, reply_mode=shape.reply_mode,
            reply_type=DATA_TYPES[shape.dtype], client_id=CLIENT_ID, epoch=5,
        )
        servers, id_bytes = self.entries.addr, topk_ids.element_size()
        self.route = ClientRouteArgs(
            topk_ids=self.ids.addr, ids_stride=top_k, expert_servers=self.expert_servers.addr,
            tables=tables, num_skipped=self.num_skipped.addr, missing_expert=self.missing.addr,
            id_bytes=id_bytes, num_tokens=shape.num_tokens, experts_per_row=top_k,
            num_experts=shape.num_experts, max_replicas=max_replicas,
            reply_mode=shape.reply_mode,
        )
        self.pack = ClientPackArgs(
            servers=servers, tables=tables, shape=message, hidden=self.hidden.addr + offset,
            hidden_stride=self.row_bytes, topk_ids=self.ids.addr, ids_stride=top_k,
            topk_weights=self.weights.addr, weights_stride=top_k, scales=self.scales.addr,
            scales_stride=-(-shape.hidden_size // FP8_BLOCK), missing_expert=self.missing.addr,
            id_bytes=id_bytes,
        )
        self.put = ClientPutArgs(
            servers=servers, tables=tables, shape=message, status=self.status.addr,
            missing_expert=self.missing.addr, max_loaded_servers=1024, signal_mode=signal_mode,
        )
        self.combine = ClientCombineArgs(
            servers=servers, tables=tables, shape=message, output=self.output.addr,
            output_stride=shape.hidden_size * shape.dtype.itemsize, status=self.status.addr,
            timeout_ns=timeout_ns, output_type=DATA_TYPES[shape.dtype],
            num_tokens=shape.num_tokens,
        )

        self.send_args = ClientSendArgs(
            route=self.route, pack=self.pack, seq=self.seq.addr, arrived=self.arrived.addr,
            counts=self.counts.addr,
        )

    def set_seq(self, seq: int) -> None:
        """The sequence number of the messages that the next launches make."""
        for args in (self.pack, self.put, self.combine):
            args.shape.seq = seq

    def result(self) -> torch.Tensor:
        """[T, H] in the model's dtype, on the CPU."""
        shape = self.shape
        return self.output.view(shape.dtype, shape.num_tokens, shape.hidden_size).cpu()

    def row_bytes_of(self, server_idx: int) -> int:
        """Bytes of hidden rows in the message to a server."""
        rows = np.frombuffer(self.batch_size.read(), np.uint32)[server_idx]
        data_type = torch.float8_e4m3fn if self.shape.fp8 else self.shape.dtype
        return int(rows) * self.shape.hidden_size * DATA_TYPE_BYTES[DATA_TYPES[data_type]]
