"""A client on a GPU: two launches on the caller's stream, no waiting, capturable in CUDA graphs."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..client.inputs import InputCheck
from ..client.routing import expert_table
from ..device_structs import (
    LOST_DISCONNECTED,
    STAGE_NAMES,
    STATUS_BAD_ARGUMENT,
    STATUS_NAMES,
    STATUS_PEER_LOST,
    STATUS_TIMEOUT,
    ClientServer,
    KernelStatus,
)
from ..errors import (
    ConfigError,
    ExpertwireError,
    RejectedError,
    ServerLostError,
    WaitTimeout,
)
from ..message import DATA_TYPES, REASON_TEXT, Reason, SlotShape, dtype_of
from ..target import GpuTarget
from ..trace.device import stamps_for
from .flight import MAX_FAILOVERS, GpuFlight
from .pinned import PinnedBuffer

if TYPE_CHECKING:
    from .endpoint import GpuEndpoint


@dataclass(frozen=True)
class Peer:
    """A server as this GPU reaches it: its experts and the address of each request slot.

    endpoint: messages are made in its `send` memory and go through its work queue; request_addrs
    are then the server's own. Else the slots are mapped here and written in place.
    """

    server_id: int
    experts: Sequence[int]
    request_addrs: Sequence[int]
    endpoint: GpuEndpoint | None = None


# Where servers are relaunched by a thread of this process, a full launch queue would stop it: the
# caller may be at most two of these ahead of the GPU.
BATCHES_AHEAD = 16
AHEAD_HINT = ("; it works on a stream of its own on this GPU: synchronise every few replays of a "
              "graph, since a full launch queue keeps it from being relaunched")


class GpuHandle:
    """A batch under way. `combine` is called once, on the stream that the result is needed on."""

    def __init__(self, client: GpuClient, flight: GpuFlight, inputs: tuple[torch.Tensor, ...]):
        self._client, self._flight, self._inputs = client, flight, inputs
        self._done = False

    def combine(self, output: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H], written into `output` if given. Enqueues the wait and the sum; does not wait."""
        if self._done:
            raise ExpertwireError("this batch has been combined already")
        hidden = self._inputs[0]
        if output is None:
            output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        self._flight.launch_combine(output)
        self._done = self._flight.free = True
        return output


class GpuClient:
    """Sends batches from GPU memory to servers whose slots this GPU reaches.

    model: name, num_layers, hidden_size, num_experts, top_k and dtype, as servers give it. peers:
    the servers; together they hold every expert. shape: of the connections. timeout: seconds that
    a combine waits for replies. A server that is silent for so long is lost: where each of its
    experts has a replica, the batch goes there in the same step, else its rows become NaN.
    after_send: called after each send, for servers of this process that are to work on the caller's
    stream (and cannot be lost). waits_apart: servers are on the same GPU,
    on streams of their own, so few blocks may wait for them. reply_addrs: zeroed memory
    for each peer's reply slots that other processes can reach; default: of this process alone.

    Calls that share a client are ordered by the caller: one stream, or events between streams.
    Not for several threads at once.
    """

    def __init__(
        self, model: dict, peers: Sequence[Peer], shape: SlotShape, device: torch.device, *,
        client_id: int = 1, timeout: float = 2.0, after_send: Callable[[], None] | None = None,
        waits_apart: bool = False, reply_addrs: Sequence[int] | None = None,
    ):
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError("a client cannot be made while a CUDA graph is being captured: make "
                              "it, and warm up with one call, before")
        self.model_info, self.shape, self.peers = model, shape, list(peers)
        self.target = target = GpuTarget(device.index)
        self.dtype = dtype_of(model["dtype"])
        self.data_type, self.client_id = DATA_TYPES[self.dtype], client_id
        self.num_experts, self.timeout = model["num_experts"], timeout
        self.waits_apart = waits_apart
        table = expert_table([peer.experts for peer in peers], self.num_experts)
        if missing := np.flatnonzero(table[:, 0] < 0).tolist():
            raise ConfigError(f"no server holds experts {missing}")
        self.max_replicas = table.shape[1]
        self.expert_servers = target.place(table)
        self.counts = target.alloc(16)  # u64 ids that are no expert, i32 an expert without server
        self.counts.write(b"\xff" * 4, 8)
        self.status = target.alloc(ctypes.sizeof(KernelStatus))
        self._failed = PinnedBuffer(64)
        self.failed_addr = self._failed.addr
        self._failed_code = ctypes.c_uint32.from_address(self.failed_addr)
        self._lost_words = PinnedBuffer(4 * len(self.peers))
        self._lost = self._lost_words.tensor.numpy()[: 4 * len(self.peers)].view(np.uint32)
        self._replies = []
        if reply_addrs is None:
            size = shape.num_slots * shape.reply_slot_bytes
            self._replies = [target.alloc(size) for _ in peers]
            reply_addrs = [block.addr for block in self._replies]
        self._reply_addrs = reply_addrs
        self.do_ibgda = any(peer.endpoint is not None for peer in peers)
        self.num_failovers = 0 if after_send else min(self.max_replicas - 1, MAX_FAILOVERS)
        self.stamps = stamps_for(target, f"{device} client {client_id:x}")
        self._flights = [GpuFlight(self, i) for i in range(shape.num_slots)]
        self._next = 0
        self._after_send = after_send
        self._ahead: deque[torch.cuda.Event] = deque()
        self._num_dispatched = 0
        self._check_inputs = InputCheck(model, shape.experts_per_row, device)
        torch.cuda.current_stream(device).synchronize()

    def slot_entries(self, slot_idx: int) -> ctypes.Array[ClientServer]:
        """One entry per server for a slot."""
        shape = self.shape
        entries = (ClientServer * len(self.peers))()
        for entry, peer, reply in zip(entries, self.peers, self._reply_addrs, strict=True):
            entry.send_addr = entry.remote_addr = peer.request_addrs[slot_idx]
            if peer.endpoint is not None:
                entry.send_addr = peer.endpoint.send.addr + slot_idx * shape.request_slot_bytes
                entry.peer = peer.endpoint.peer_addr
            entry.request_slot_bytes = shape.request_slot_bytes
            entry.reply_addr = reply + slot_idx * shape.reply_slot_bytes
            entry.reply_slot_bytes = shape.reply_slot_bytes
            entry.in_place = peer.endpoint is None
            entry.max_rows, entry.max_pairs = shape.max_rows, shape.max_reply_rows
            entry.slot_idx, entry.server_id = slot_idx, peer.server_id
        return entries

    def reply_addrs(self, server_idx: int) -> list[int]:
        """Where a server writes its replies, one address a slot."""
        first = self._reply_addrs[server_idx]
        return [first + i * self.shape.reply_slot_bytes for i in range(self.shape.num_slots)]

    def dispatch(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> GpuHandle:
        """Enqueues the sending of a batch of at most max_rows rows; arguments as for `moe`.

        The tensors must not change until the handle is combined. Raises as `moe`, and
        ExpertwireError when all slots are in flight.
        """
        self._check(layer, hidden, topk_ids, topk_weights)
        if hidden.shape[0] > self.shape.max_rows:
            raise ConfigError(f"{hidden.shape[0]} rows; one dispatch takes {self.shape.max_rows}")
        return self._dispatch(layer, hidden, topk_ids, topk_weights)

    def moe(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """One MoE layer: hidden [T, H], topk_ids and topk_weights [T, K] -> [T, H].

        Enqueued on torch's current stream, without waiting; may be captured in a CUDA graph. ids:
        int64 or int32, ones that are no expert are skipped. Raises ConfigError for inputs that do
        not fit, and what `check` raises if an earlier call is known to have failed.
        """
        self._check(layer, hidden, topk_ids, topk_weights)
        num_tokens, most = hidden.shape[0], self.shape.max_rows
        if 0 < num_tokens <= most:
            return self._dispatch(layer, hidden, topk_ids, topk_weights).combine()
        output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        for begin in range(0, num_tokens, most):
            part = slice(begin, begin + most)
            handle = self._dispatch(layer, hidden[part], topk_ids[part], topk_weights[part])
            handle.combine(output[part])
        return output

    def _check(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        if self._failed_code.value:
            self.check()
        self._check_inputs(layer, hidden, ids, weights)

    def _dispatch(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> GpuHandle:
        if self.waits_apart:
            self._stay_near()
        flight = self._free_flight()
        if weights.dtype is not torch.float32:
            weights = weights.to(torch.float32)
        inputs = tuple(t if t.stride(-1) == 1 else t.contiguous() for t in (hidden, ids, weights))
        flight.launch_send(layer, *inputs)
        flight.free = False
        if self._after_send is not None:
            self._after_send()
        return GpuHandle(self, flight, inputs)

    def _stay_near(self) -> None:
        """Waits for the GPU if it is many batches behind. Replays of graphs are not seen here."""
        self._num_dispatched += 1
        if self._num_dispatched % BATCHES_AHEAD or torch.cuda.is_current_stream_capturing():
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.target.device))
        self._ahead.append(event)
        if len(self._ahead) > 1:
            self._ahead.popleft().synchronize()

    def _free_flight(self) -> GpuFlight:
        for _ in self._flights:
            flight = self._flights[self._next]
            self._next = (self._next + 1) % len(self._flights)
            if flight.free:
                return flight
        raise ExpertwireError(f"all {len(self._flights)} slots are in flight: combine one first")

    @property
    def has_failed(self) -> bool:
        """Whether the GPU has said that a batch failed: every further one will."""
        return self._failed_code.value != 0

    @property
    def lost_addr(self) -> int:
        """A word per server, for kernels: whether it is lost (client_failover.cuh)."""
        return self._lost_words.addr

    def disconnected(self, server_idx: int) -> None:
        """Notes that a server is gone: batches under way go to its replicas at once."""
        if not self._lost[server_idx]:
            self._lost[server_idx] = LOST_DISCONNECTED

    def lost_servers(self) -> list[int]:
        """Ids of the servers that batches are routed around, as far as the GPU has said so."""
        return [peer.server_id for peer, lost in zip(self.peers, self._lost, strict=True) if lost]

    def check(self) -> None:
        """Waits for the current stream and raises what went wrong on the GPU, if anything did.

        WaitTimeout, ServerLostError, RejectedError or ExpertwireError. A client that failed stays
        failed, and its results are NaN. A server that was lost is no failure while each of its
        experts has a replica.
        """
        status = self.status.read_struct(KernelStatus)
        if status.code == 0:
            return
        stage = STAGE_NAMES.get(status.stage, "?")
        server = self.peers[status.peer].server_id if status.peer < len(self.peers) else "?"
        if status.code == STATUS_TIMEOUT:
            raise WaitTimeout(
                f"server {server} did not answer within {self.timeout} s"
                + (AHEAD_HINT if self.waits_apart else ""), stage, str(server),
                status.expected, status.seen,
            )
        if status.code == STATUS_PEER_LOST:
            raise ServerLostError(
                f"server {server} is gone and no other holds all of its experts (stage {stage}, "
                f"expected seq {status.expected}, seen {status.seen}); start one that does, and "
                "connect anew", str(server),
            )
        if status.code == STATUS_BAD_ARGUMENT and status.syndrome:
            reason = Reason(status.syndrome)
            raise RejectedError(
                f"server {server} refused a message: {REASON_TEXT[reason]}", reason, str(server)
            )
        raise ExpertwireError(
            f"{stage} failed at server {server}: {STATUS_NAMES.get(status.code, status.code)}"
        )

    @property
    def num_skipped(self) -> int:
        """Ids so far that were no expert; waits for the current stream."""
        return int.from_bytes(self.counts.read(0, 8), "little")
