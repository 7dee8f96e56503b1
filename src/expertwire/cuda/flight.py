"""One slot of a GPU client: tables, arguments and launches of a message there and back."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from ..device_structs import (
    SIGNAL_WRITE,
    ClientCombineArgs,
    ClientFailoverArgs,
    ClientPackArgs,
    ClientPutArgs,
    ClientQuantiseArgs,
    ClientRouteArgs,
    ClientSendArgs,
    MessageShape,
    RouteTables,
)
from ..message import DATA_TYPES, FP8_BLOCK
from ..target import Runnable
from .launch import WARP_SIZE

if TYPE_CHECKING:
    from .client import GpuClient

WARPS = 8
MAX_BLOCKS = 128
# Blocks that may wait for kernels of the same GPU: each may keep a multiprocessor from them, since
# its memory is not divided anew between cache and shared memory while a block runs.
MAX_WAITING_BLOCKS = 8
MAX_FAILOVERS = 2  # of one batch, where there are so many replicas
SEND_PIECE, COMBINE_PIECE = 2048, 1024  # bytes, elements that a warp takes (target_gpu.cuh)


def num_blocks(num_pieces: int) -> int:
    """As many blocks as pieces keep busy, within bounds."""
    return max(1, min(-(-num_pieces // WARPS), MAX_BLOCKS))


class GpuFlight:
    """The sequence number lives on the GPU, so a captured launch is right in every replay."""

    def __init__(self, client: GpuClient, slot_idx: int):
        target, shape, num_servers = client.target, client.shape, len(client.peers)
        self.free = True
        self._target, self._stamps = target, client.stamps
        self._waits_apart = client.waits_apart
        self._row_bytes = shape.hidden_size * (1 if shape.fp8 else client.dtype.itemsize)
        max_pairs = shape.max_rows * shape.experts_per_row
        self._memory = [
            target.place(client.slot_entries(slot_idx)), target.alloc(num_servers * 4),
            target.alloc(num_servers * 4), target.alloc(num_servers * shape.max_rows * 4),
            target.alloc(max_pairs * 4), target.alloc(max_pairs * 4), target.alloc(8),
            target.alloc(4), target.alloc(4), target.alloc(8),
            target.alloc(num_servers * (-(-shape.max_rows // WARP_SIZE) + 1) * 8),
        ]
        (servers, batch_size, num_pairs, row_token, pair_server, pair_row, seq, arrived,
         self._resend, self._counted_before, row_counts) = (block.addr for block in self._memory)
        tables = RouteTables(
            batch_size=batch_size, num_pairs=num_pairs, row_token=row_token,
            pair_server=pair_server, pair_row=pair_row, row_stride=shape.max_rows,
            num_servers=num_servers,
        )
        message = MessageShape(
            hidden_size=shape.hidden_size, num_experts=client.num_experts,
            data_type=client.data_type, reply_mode=shape.reply_mode, reply_type=client.data_type,
            client_id=client.client_id,
        )
        if shape.fp8:
            message.data_type = DATA_TYPES[torch.float8_e4m3fn]
            message.scale_type, message.scale_block = DATA_TYPES[torch.float32], FP8_BLOCK
        self._num_skipped = counts = client.counts.addr
        self._send = ClientSendArgs(
            route=ClientRouteArgs(
                expert_servers=client.expert_servers.addr, tables=tables, num_skipped=counts,
                missing_expert=counts + 8, num_experts=client.num_experts,
                max_replicas=client.max_replicas, reply_mode=shape.reply_mode,
            ),
            pack=ClientPackArgs(
                servers=servers, tables=tables, shape=message, missing_expert=counts + 8
            ),
            seq=seq, arrived=arrived, counts=row_counts,
        )
        self._combine = ClientCombineArgs(
            servers=servers, tables=tables, shape=message, status=client.status.addr, seq=seq,
            failed=client.failed_addr, timeout_ns=int(client.timeout * 1e9),
            output_type=client.data_type,
        )
        self._num_failovers = client.num_failovers
        self._failover = ClientFailoverArgs(
            expert_servers=client.expert_servers.addr, lost=client.lost_addr, resend=self._resend,
            num_experts=client.num_experts, max_replicas=client.max_replicas,
        )
        self._quantise = self._quantised_rows(client) if shape.fp8 else None
        self._put: ClientPutArgs | None = None
        if client.do_ibgda:
            self._send.pack.seq = seq
            self._put = ClientPutArgs(
                servers=servers, tables=tables, shape=message, status=client.status.addr,
                missing_expert=counts + 8, max_loaded_servers=num_servers,
                signal_mode=SIGNAL_WRITE, seq=seq,
            )
        # Views of the nested structures: making one costs more than using it.
        self._route, self._pack = self._send.route, self._send.pack
        self._shapes = [args.shape for args in (self._pack, self._combine, self._put) if args]
        self._launches: dict[tuple[str, int], Runnable] = {}
        self._num_tokens = 0

    def _quantised_rows(self, client: GpuClient) -> ClientQuantiseArgs:
        """Memory of this slot's rows as they are sent, and of their scales."""
        shape, target = client.shape, self._target
        blocks = -(-shape.hidden_size // FP8_BLOCK)
        rows, scales = (target.alloc(shape.max_rows * size)
                        for size in (shape.hidden_size, 4 * blocks))
        self._memory += [rows, scales]
        return ClientQuantiseArgs(
            rows=rows.addr, scales=scales.addr, hidden_size=shape.hidden_size,
            data_type=client.data_type, scale_block=FP8_BLOCK,
        )

    def launch_send(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Route, pack and flag of a checked batch; rows are dense, weights float32."""
        num_tokens, top_k = ids.shape
        self._num_tokens = num_tokens
        for shape in self._shapes:
            shape.layer, shape.experts_per_row = layer, top_k
        route, pack = self._route, self._pack
        route.topk_ids = pack.topk_ids = ids.data_ptr()
        route.ids_stride = pack.ids_stride = ids.stride(0)
        route.id_bytes = pack.id_bytes = ids.itemsize
        route.num_tokens, route.experts_per_row = num_tokens, top_k
        pack.hidden, pack.hidden_stride = hidden.data_ptr(), hidden.stride(0) * hidden.itemsize
        if self._quantise is not None:
            self._launch_quantise(self._quantise)
        pack.topk_weights, pack.weights_stride = weights.data_ptr(), weights.stride(0)
        self._send.only_if, route.num_skipped = 0, self._num_skipped
        self._run_send(again=False)

    def _launch_quantise(self, args: ClientQuantiseArgs) -> None:
        """The rows become e4m3, and what is packed are those."""
        pack, blocks = self._pack, -(-args.hidden_size // FP8_BLOCK)
        args.hidden, args.hidden_stride = pack.hidden, pack.hidden_stride
        args.num_tokens = self._num_tokens
        pack.hidden, pack.hidden_stride = args.rows, args.hidden_size
        pack.scales, pack.scales_stride = args.scales, blocks
        grid = num_blocks(self._num_tokens * blocks)
        self._launch("client_quantise", args, grid).run()

    def _run_send(self, again: bool) -> None:
        if self._put is not None:
            self._launch_put(again).run()
            return
        pieces = self._num_tokens * -(-self._row_bytes // SEND_PIECE)
        self._launch("client_send_direct", self._send, num_blocks(pieces) + 1).run()

    def launch_combine(self, output: torch.Tensor) -> None:
        """Waits on the GPU for the replies and sums them into output [T, H].

        Before that, where there are replicas: sends what servers did not answer to others.
        """
        combine = self._combine
        combine.output = output.data_ptr()
        combine.output_stride = output.stride(0) * output.itemsize
        combine.num_tokens = self._num_tokens
        for _ in range(self._num_failovers):
            self._failover.wait = combine
            self._launch("client_failover", self._failover, 1).run()
            # The second time, ids that are no expert are counted where nobody looks.
            self._send.only_if, self._route.num_skipped = self._resend, self._counted_before
            self._run_send(again=True)
        pieces = self._num_tokens * -(-output.shape[1] // COMBINE_PIECE)
        blocks = num_blocks(pieces)
        if self._waits_apart and blocks > MAX_WAITING_BLOCKS:
            self._launch("client_wait", combine, 1).run()
        self._launch("client_combine", combine, blocks).run()

    def _launch_put(self, again: bool) -> Runnable:
        """Route, pack and put of the work queue: the pack is of many blocks, the others of one."""
        pack, put, grid = self._pack, self._put, num_blocks(self._num_tokens)
        assert put is not None
        # The second time failover says whether anything is packed and put.
        pack.missing_expert = put.missing_expert = (
            self._resend if again else self._route.missing_expert)
        launch = self._launches.get(("client_put_ibgda", grid))
        if launch is None:
            launch = self._target.prepare(
                [("client_route", self._route), ("client_pack", pack), ("client_put_ibgda", put)],
                grid=[1, grid, 1], warps=WARPS,
            )
            if self._stamps is not None:
                launch = self._stamps.around("client_put_ibgda", launch)
            self._launches["client_put_ibgda", grid] = launch
        return launch

    def _launch(self, name: str, args: ctypes.Structure, grid: int) -> Runnable:
        launch = self._launches.get((name, grid))
        if launch is None:
            launch = self._target.prepare([(name, args)], grid=grid, warps=WARPS)
            if self._stamps is not None:
                launch = self._stamps.around(name, launch)
            self._launches[name, grid] = launch
        return launch
