"""A server on a GPU: poll, group, gather, experts and reply as one CUDA graph."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..device_structs import (
    KernelStatus,
    ServerGatherArgs,
    ServerMessage,
    ServerModel,
    ServerPollArgs,
    ServerReplyArgs,
    ServerSlot,
    ServerTakeArgs,
)
from ..errors import ConfigError, ExpertwireError
from ..message import DATA_TYPES, FP8_BLOCK, ReplyMode, SlotShape
from ..target import GpuTarget
from ..trace.device import Call, stamps_for
from .experts import GpuExperts
from .passes import Passes

if TYPE_CHECKING:
    from .endpoint import GpuEndpoint

WARPS, REPLY_WARPS = 8, 16


class GpuServer:
    """Serves one client's request slots on the GPU that the experts are on.

    experts: what is held. num_experts: of the model. shape: of the connection; a batch may be all
    of its slots. One pass takes what has arrived of one layer, and does nothing if nothing has.
    wait_us: how long a pass waits for a first message (0: it looks once). requests_addr: zeroed
    memory for the slots that another process can reach; default: of this process alone.

    `enqueue` puts a pass on the caller's stream. `start` makes passes follow one another on a
    stream of the server's own, until `close`.
    """

    def __init__(
        self, experts: GpuExperts, num_experts: int, shape: SlotShape, *, server_id: int = 0,
        wait_us: float = 0.0, requests_addr: int | None = None,
    ):
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError("a server cannot be made while a CUDA graph is being captured")
        self.experts, self.shape = experts, shape
        self.target = target = GpuTarget(experts.device.index)
        slots, num_local = shape.num_slots, len(experts.experts)
        self.max_pairs = slots * shape.max_rows * shape.experts_per_row
        self._requests = None
        if requests_addr is None:
            self._requests = target.alloc(slots * shape.request_slot_bytes)
            requests_addr = self._requests.addr
        self._requests_addr = requests_addr
        self._slots = target.alloc(slots * ctypes.sizeof(ServerSlot))
        self._messages = target.alloc(slots * ctypes.sizeof(ServerMessage))
        self._found = target.alloc(5 * 4)  # num_messages, num_rows, num_pairs, layer, data type
        self._state = target.alloc(slots * 4)
        local = np.full(num_experts, -1, np.int32)
        local[experts.experts] = np.arange(num_local)
        self._local_expert = target.place(local)
        self._pairs = target.alloc(3 * self.max_pairs * 4)  # expert, position, reply row
        self._offsets = target.alloc((num_local + 1) * 4)
        self._cursor = target.alloc(num_local * 4)
        self._expert_rows = target.alloc(experts.num_layers * num_local * 8)
        self._status = target.alloc(slots * ctypes.sizeof(KernelStatus))
        self._arrived = target.alloc(4)
        rows = self.max_pairs, experts.hidden_size
        self._gathered = torch.zeros(rows, dtype=experts.dtype, device=experts.device)
        self._output = torch.zeros_like(self._gathered)
        self._middle = experts.workspace(self.max_pairs)
        self.tiles = experts.choose_tiles(
            slots * shape.max_rows, batch_invariant=shape.reply_mode == ReplyMode.PER_EXPERT
        )
        self._make_args(num_experts, server_id, int(wait_us * 1000))
        blocks = self._blocks()
        self._launch_take = target.prepare(
            [("server_take", ServerTakeArgs(poll=self._poll, gather=self._gather)),
             ("server_gather_rows", self._gather)], grid=[1, blocks], warps=[32, WARPS],
        )
        self._launch_reply = target.prepare(
            [("server_reply_in_place", self._reply)], grid=blocks, warps=WARPS
        )
        self._stamps = stamps_for(target, f"{experts.device} server {server_id}")
        if self._stamps is not None:
            self._launch_take = self._stamps.around("poll, gather", self._launch_take)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._passes: Passes | None = None

    def _blocks(self) -> int:
        """Blocks of the kernels that move rows: few idle ones for small slots, enough for all."""
        row_bytes = self.experts.hidden_size * self.experts.dtype.itemsize
        pieces = self.max_pairs * -(-row_bytes // 2048)
        return min(-(-pieces // WARPS), 128)

    def _make_args(self, num_experts: int, server_id: int, wait_ns: int) -> None:
        experts, shape = self.experts, self.shape
        found, data_type = self._found.addr, DATA_TYPES[experts.dtype]
        pairs, pair_bytes = self._pairs.addr, self.max_pairs * 4
        self._poll = ServerPollArgs(
            slots=self._slots.addr, messages=self._messages.addr, slot_state=self._state.addr,
            num_messages=found, num_rows=found + 4, num_pairs=found + 8, layer=found + 12,
            timeout_ns=wait_ns, num_slots=shape.num_slots, max_messages=shape.num_slots,
            max_rows=shape.num_slots * shape.max_rows,
            model=ServerModel(
                num_layers=experts.num_layers, hidden_size=experts.hidden_size,
                num_experts=num_experts, data_type=data_type,
                max_experts_per_row=shape.experts_per_row, allow_fp8=shape.fp8,
                scale_block=FP8_BLOCK,
            ),
        )
        self._gather = ServerGatherArgs(
            slots=self._slots.addr, messages=self._messages.addr,
            local_expert=self._local_expert.addr, pair_expert=pairs,
            expert_offsets=self._offsets.addr, cursor=self._cursor.addr,
            pair_position=pairs + pair_bytes, pair_reply_row=pairs + 2 * pair_bytes,
            gathered=self._gathered.data_ptr(), expert_rows=self._expert_rows.addr,
            num_messages=found, layer=found + 12, num_local=len(experts.experts),
            num_experts=num_experts, min_rows=1, output_type=data_type,
        )
        self._reply = ServerReplyArgs(
            slots=self._slots.addr, messages=self._messages.addr,
            pair_position=pairs + pair_bytes, pair_reply_row=pairs + 2 * pair_bytes,
            expert_output=self._output.data_ptr(), status=self._status.addr, found=found,
            arrived=self._arrived.addr, hidden_size=experts.hidden_size, output_type=data_type,
            server_id=server_id,
        )

    def request_addr(self, slot_idx: int) -> int:
        """Where the client writes a request."""
        return self._requests_addr + slot_idx * self.shape.request_slot_bytes

    def connect(
        self, client_id: int, reply_addrs: Sequence[int], endpoint: GpuEndpoint | None = None
    ) -> None:
        """Opens the slots for a client; reply_addrs: its reply slots as this GPU reaches them.

        endpoint: replies are made in its `send` memory and go through its work queue; reply_addrs
        are then the client's own.
        Warms up and captures the pass. Raises ExpertwireError when passes run already.
        """
        if self._passes is not None:
            raise ExpertwireError("a client connects before the server starts")
        shape = self.shape
        entries = (ServerSlot * shape.num_slots)()
        for idx, (entry, reply_addr) in enumerate(zip(entries, reply_addrs, strict=True)):
            entry.recv_addr = self.request_addr(idx)
            entry.recv_slot_bytes = shape.request_slot_bytes
            entry.reply_addr = entry.remote_reply_addr = reply_addr
            if endpoint is not None:
                entry.reply_addr = endpoint.send.addr + idx * shape.reply_slot_bytes
                entry.peer = endpoint.peer_addr
            entry.reply_slot_bytes = shape.reply_slot_bytes
            entry.client_id, entry.open, entry.in_place = client_id, 1, endpoint is None
            entry.max_rows, entry.max_pairs = shape.max_rows, shape.max_reply_rows
            entry.slot_idx = idx
        self._slots.write(entries)
        if endpoint is not None:
            self._launch_reply = self.target.prepare(
                [("server_reply_ibgda", self._reply)], warps=REPLY_WARPS
            )
        self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream(self.target.device, priority=-1)
        stream.wait_stream(torch.cuda.current_stream(self.target.device))
        with torch.cuda.stream(stream), torch.inference_mode():
            self.enqueue_kernels()  # compiles and loads what the capture must not
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.enqueue_kernels()
        torch.cuda.current_stream(self.target.device).wait_stream(stream)
        self.stream, self._graph = stream, graph

    def enqueue_kernels(self) -> None:
        """A pass, kernel by kernel, on the current stream (which may be under capture)."""
        self._launch_take.run()
        layer = self._found.tensor[12:16].view(torch.int32)
        offsets = self._offsets.tensor.view(torch.int32)
        experts = Call(lambda: self.experts.run(
            layer, self._gathered, offsets, self._middle, self._output, self.tiles
        ))
        for stage, launch in (("experts", experts), ("reply", self._launch_reply)):
            (launch if self._stamps is None else self._stamps.around(stage, launch)).run()

    def enqueue(self) -> None:
        """A pass on the current stream, as one graph launch unless the stream is captured."""
        if self._graph is None or torch.cuda.is_current_stream_capturing():
            with torch.inference_mode():
                self.enqueue_kernels()
        else:
            self._graph.replay()

    def start(self) -> None:
        """Keeps passes running on the server's own stream, a few of them enqueued ahead."""
        if self._graph is None:
            raise ExpertwireError("a server starts after its client is connected")
        if self._passes is None:
            self._passes = Passes(self.stream, self._graph.replay, "the GPU server")

    def check(self) -> None:
        """Raises what ended the server's passes, if something did."""
        if self._passes is not None:
            self._passes.check()

    def expert_rows(self) -> np.ndarray:
        """Rows that each held expert has served, int64 [layers, held]; waits for the GPU."""
        counts = np.frombuffer(self._expert_rows.read(), np.int64)
        return counts.reshape(self.experts.num_layers, -1)

    def close(self) -> None:
        """Ends the passes, at most a few waits of one pass later. Idempotent."""
        if self._passes is not None:
            self._passes.close()
        with contextlib.suppress(AttributeError):
            self.stream.synchronize()
        if self._stamps is not None:
            self._stamps.collect()  # a trace may end when the server is gone

