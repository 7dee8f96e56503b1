"""Clients and servers of gpu_scale.py: the kernels of the real path, experts that cost nothing.

A server's pass is poll, group, gather and reply, as cuda/server.py has it, without the products:
replies are made of the gathered rows (bf16) or of a constant (fp8, whose rows are not what replies
are made of).
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from expertwire.cuda.pinned import PinnedBuffer
from expertwire.device_structs import (
    KernelStatus,
    ServerGatherArgs,
    ServerMessage,
    ServerModel,
    ServerPollArgs,
    ServerReplyArgs,
    ServerSlot,
    ServerTakeArgs,
)
from expertwire.loopback import Loopback, StepShape
from expertwire.message import DATA_TYPES, FP8_BLOCK
from expertwire.model.reference import quantise_fp8
from expertwire.target import GpuTarget
from gpu_rig import HIDDEN_SIZE, WARPS, capture

TOP_K, NUM_EXPERTS = 8, 256
PASSES, WAIT_NS, AHEAD = 10, 100_000, 2  # per graph; of one pass; graphs enqueued
BLOCKS = 128


def draw(num_tokens: int, zipf: bool, seed: int) -> torch.Tensor:
    """[T, 8] different experts of 256; Zipf: expert of rank r is drawn in proportion to 1 / r."""
    generator = torch.Generator().manual_seed(seed)
    noise = -torch.log(-torch.log(torch.rand(num_tokens, NUM_EXPERTS, generator=generator)))
    if zipf:
        noise -= torch.log(torch.arange(1, NUM_EXPERTS + 1, dtype=torch.float32))
    return noise.topk(TOP_K, dim=1).indices


def shares(num_servers: int) -> list[list[int]]:
    return [list(range(s, NUM_EXPERTS, num_servers)) for s in range(num_servers)]


class Client:
    """One client: its slots at every server and a trip's two launches. blocks: of the send."""

    def __init__(self, gpu: GpuTarget, servers: Sequence[GpuTarget], num_tokens: int, *,
                 fp8: bool = False, zipf: bool = False, seed: int = 0, blocks: int | None = None,
                 timeout_ns: int = 1_000_000_000):
        self.gpu, self.num_tokens = gpu, num_tokens
        self.ids = draw(num_tokens, zipf, seed)
        hidden = torch.randn(num_tokens, HIDDEN_SIZE).to(torch.bfloat16)
        rows, scales = quantise_fp8(hidden) if fp8 else (hidden, None)
        self.weights = torch.rand(num_tokens, TOP_K)
        self.shape = StepShape(num_tokens, HIDDEN_SIZE, TOP_K, NUM_EXPERTS, shares(len(servers)),
                               fp8=fp8)
        self.step = Loopback(gpu, self.shape, rows, self.ids, self.weights, scales, in_place=True,
                             timeout_ns=timeout_ns, server_targets=servers)
        self._failed = PinnedBuffer(64)
        self.step.combine.failed = self._failed.addr  # as cuda/client.py has it
        self.want = (hidden.float() if not fp8 else torch.ones(())) * self.weights.sum(1)[:, None]
        pieces = num_tokens * -(-HIDDEN_SIZE * 2 // 2048)
        grid = min(BLOCKS, -(-pieces // WARPS))
        with torch.cuda.device(gpu.device):
            self.launch = gpu.prepare(
                [("client_send_direct", self.step.send_args),
                 ("client_combine", self.step.combine)], grid=[(blocks or grid) + 1, grid],
                warps=WARPS)
            self.send = gpu.prepare([("client_send_direct", self.step.send_args)],
                                    grid=(blocks or grid) + 1, warps=WARPS)

    def rows_to(self, num_servers: int) -> list[int]:
        """Rows that each server gets: a token goes to a server once."""
        home = self.ids % num_servers
        return [int((home == s).any(1).sum()) for s in range(num_servers)]

    def check(self) -> None:
        """Raises SystemExit when a kernel reported something or the sums are wrong."""
        status = self.step.status.read_struct(KernelStatus)
        error = (self.step.result().float() - self.want).norm() / self.want.expand(
            self.num_tokens, HIDDEN_SIZE).norm()
        if status.code or not error < 2e-2:
            raise SystemExit(f"{self.num_tokens} tokens: status {status.code} of stage "
                             f"{status.stage}, relative error {error:.2e}")


class Server:
    """Server number `idx` of all these clients; passes follow one another until it is closed.

    experts: what it holds, default its share.
    """

    def __init__(self, gpu: GpuTarget, idx: int, clients: Sequence[Client],
                 experts: Sequence[int] | None = None):
        self.gpu = gpu
        shape, count = clients[0].shape, len(clients)
        experts = shape.shares[idx] if experts is None else experts
        pairs = count * shape.slots.max_rows * TOP_K
        with torch.cuda.device(gpu.device):
            self._memory = self._make(gpu, idx, clients, experts)
            (slots, messages, state, found, local, tables, offsets, cursor, counts, status,
             arrived) = (block.addr for block in self._memory)
            dtype = torch.float8_e4m3fn if shape.fp8 else torch.bfloat16
            self._rows = torch.zeros(pairs, HIDDEN_SIZE, dtype=torch.uint8 if shape.fp8 else dtype,
                                     device=gpu.device)
            scales = torch.zeros(pairs, -(-HIDDEN_SIZE // FP8_BLOCK), device=gpu.device)
            ones = torch.ones_like(self._rows, dtype=torch.bfloat16) if shape.fp8 else self._rows
            self._keep = scales, ones
            self._poll = ServerPollArgs(
                slots=slots, messages=messages, slot_state=state, num_messages=found,
                num_rows=found + 4, num_pairs=found + 8, layer=found + 12, timeout_ns=WAIT_NS,
                num_slots=count, max_messages=count, max_rows=1 << 20,
                model=ServerModel(
                    num_layers=1, hidden_size=HIDDEN_SIZE, num_experts=NUM_EXPERTS,
                    data_type=DATA_TYPES[torch.bfloat16], max_experts_per_row=TOP_K, allow_fp8=1,
                    scale_block=FP8_BLOCK,
                ),
            )
            self._gather = ServerGatherArgs(
                slots=slots, messages=messages, local_expert=local, pair_expert=tables,
                expert_offsets=offsets, cursor=cursor, pair_position=tables + 4 * pairs,
                pair_reply_row=tables + 8 * pairs, gathered=self._rows.data_ptr(),
                gathered_scales=scales.data_ptr(), expert_rows=counts, num_messages=found,
                layer=found + 12, num_local=len(experts), num_experts=NUM_EXPERTS, min_rows=1,
            )
            self._reply = ServerReplyArgs(
                slots=slots, messages=messages, pair_position=tables + 4 * pairs,
                pair_reply_row=tables + 8 * pairs, expert_output=ones.data_ptr(), status=status,
                found=found, arrived=arrived, hidden_size=HIDDEN_SIZE,
                output_type=DATA_TYPES[torch.bfloat16], server_id=idx,
            )
            launch = gpu.prepare(
                [("server_take", ServerTakeArgs(poll=self._poll, gather=self._gather)),
                 ("server_gather_rows", self._gather), ("server_reply_in_place", self._reply)],
                grid=[1, BLOCKS, BLOCKS], warps=[32, WARPS, WARPS])
            self._stream = torch.cuda.Stream(gpu.device, priority=-1)
            torch.cuda.synchronize(gpu.device)
            self._graph = capture(self._stream, [launch.run] * PASSES)
        self._stop = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @staticmethod
    def _make(gpu: GpuTarget, idx: int, clients: Sequence[Client], experts: Sequence[int]) -> list:
        count = len(clients)
        pairs = count * clients[0].shape.slots.max_rows * TOP_K
        entries = (ServerSlot * count)(*[
            client.step.servers[idx].slot.read_struct(ServerSlot) for client in clients
        ])
        local = np.full(NUM_EXPERTS, -1, np.int32)
        local[list(experts)] = np.arange(len(experts))
        return [
            gpu.place(entries), gpu.alloc(count * ctypes.sizeof(ServerMessage)),
            gpu.alloc(count * 4), gpu.alloc(5 * 4), gpu.place(local), gpu.alloc(3 * pairs * 4),
            gpu.alloc((len(experts) + 1) * 4), gpu.alloc(len(experts) * 4),
            gpu.alloc(len(experts) * 8), gpu.alloc(count * ctypes.sizeof(KernelStatus)),
            gpu.alloc(4),
        ]

    def _serve(self) -> None:
        torch.cuda.set_device(self.gpu.device)
        ahead: deque[torch.cuda.Event] = deque()
        with torch.cuda.stream(self._stream):
            while not self._stop:
                self._graph.replay()
                event = torch.cuda.Event(blocking=True)
                event.record()
                ahead.append(event)
                if len(ahead) > AHEAD:
                    ahead.popleft().synchronize()
            self._stream.synchronize()

    def close(self) -> None:
        """Ends the passes, a few waits later. Idempotent."""
        self._stop = True
        self._thread.join(10)


def reroute(client: Client, homes: Sequence[int]) -> None:
    """From the next trip on, expert e is at server homes[e]."""
    client.step.expert_servers.write(np.asarray(homes, np.int32))
    client.step.status.write(bytes(ctypes.sizeof(KernelStatus)))


def empty_slot(client: Client, idx: int) -> None:
    """As a new server `idx` wants the client's slot: with nothing in it."""
    recv = client.step.servers[idx].recv
    recv.write(bytes(16), recv.num_bytes - 16)
