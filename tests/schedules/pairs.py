"""Clients and servers whose slots, tables and arguments are laid out by hand, fp32 throughout.

Expert e of server s multiplies by its place there plus one, so that a row which went to another
expert, came from an earlier round or was seen half written gives another sum.
"""

from __future__ import annotations

import ctypes
import os
import random

import numpy as np

from expertwire.control.connection import Endpoint
from expertwire.device_structs import (
    ClientCombineArgs,
    ClientPackArgs,
    ClientPutArgs,
    ClientRouteArgs,
    ClientServer,
    KernelStatus,
    MessageShape,
    ServerGatherArgs,
    ServerMessage,
    ServerModel,
    ServerPollArgs,
    ServerReplyArgs,
    ServerSlot,
    ServerTakeArgs,
)
from expertwire.hca.soft import SoftHca
from expertwire.message import ReplyMode, SlotShape
from tests.kernel_rig import Tables, route

TIMEOUT_NS = 20_000_000  # of the virtual clock
HIDDEN, TOP_K, EXPERTS, FP32, DEPTH = 8, 2, 4, 1, 16


def addr(array: np.ndarray | ctypes.Array | ctypes.Structure) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else ctypes.addressof(array)


class ServerRoundsArgs(ctypes.Structure):
    """native/round_checks.hpp."""

    _fields_ = (
        ("take", ServerTakeArgs), ("reply", ServerReplyArgs), ("experts_done", ctypes.c_uint64),
        ("num_messages", ctypes.c_uint32), ("way", ctypes.c_uint32),
    )


class ClientRoundsArgs(ctypes.Structure):
    _fields_ = (
        ("packs", ctypes.c_uint64), ("puts", ctypes.c_uint64), ("combines", ctypes.c_uint64),
        ("num_rounds", ctypes.c_uint32), ("do_ibgda", ctypes.c_uint32),
    )


class Pairs:
    """num_clients x num_servers connections of one slot each, all in this process.

    in_place: who writes does so where it will be read. replicas: expert -> its servers, by default
    expert e is on server e mod num_servers alone.
    """

    def __init__(
        self, choose: random.Random, num_clients: int, num_servers: int, *, signal_mode: int = 0,
        in_place: bool = False, max_tokens: int = 3, replicas: list[list[int]] | None = None,
    ):
        self.mode, self.in_place, self.max_tokens = signal_mode, in_place, max_tokens
        self.reply_mode = choose.choice([ReplyMode.SUM, ReplyMode.PER_EXPERT])
        self.num_servers = num_servers
        self.replicas = replicas or [[e % num_servers] for e in range(EXPERTS)]
        self.shape = SlotShape(1, max_tokens, TOP_K, HIDDEN, 4, False, self.reply_mode, 4)
        self.hcas = [SoftHca(thread=False) for _ in range(num_clients + num_servers)]
        self.keep: list = []  # what arguments point to
        self.ends: dict[tuple[int, int], tuple[Endpoint, Endpoint]] = {}
        request, reply = self.shape.request_slot_bytes, self.shape.reply_slot_bytes
        for c in range(num_clients):
            for s in range(num_servers):
                client, server = (
                    Endpoint(self.hcas[i], send_bytes=mine, recv_bytes=theirs, depth=DEPTH,
                             timeout_ns=TIMEOUT_NS)
                    for i, mine, theirs in ((c, request, reply), (num_clients + s, reply, request))
                )
                if signal_mode == 2:
                    client.watch_immediates(reply, 1)
                    server.watch_immediates(request, 1)
                for end, other in ((client, server), (server, client)):
                    end.connect(other.connection_handle(), other.memory_handle(),
                                [os.dup(fd) for fd in other.fds()])
                self.ends[c, s] = client, server

    def close(self) -> None:
        for pair in self.ends.values():
            for end in pair:
                end.close()
        for hca in self.hcas:
            hca.close()

    def __enter__(self) -> Pairs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new(self, *shape: int, dtype=np.uint32, fill: int = 0) -> np.ndarray:
        self.keep.append(np.full(shape, fill, dtype))
        return self.keep[-1]

    def watched(self) -> list[tuple[int, int]]:
        """What others write to: slots, completion queues, states of the queue pairs."""
        found = []
        for end in (end for pair in self.ends.values() for end in pair):
            found.append((end.recv.addr, end.recv.num_bytes))
            found += [(state.cq_addr, 64) for state in end.qp_states]
            found.append((addr(end.qp_states), ctypes.sizeof(end.qp_states)))
        return found

    def no_errors(self) -> None:
        found = [end.first_error() for pair in self.ends.values() for end in pair]
        assert not any(syndrome for syndrome, _ in found), f"completion errors {found}"


class Round:
    """One batch of one client: its tokens, the arguments of its kernels, and what must come out."""

    def __init__(self, pairs: Pairs, choose: random.Random, client: int, seq: int,
                 status: KernelStatus, ids: np.ndarray | None = None):
        num_tokens = choose.randint(2, pairs.max_tokens)
        if ids is None:
            ids = np.array([choose.sample(range(EXPERTS), TOP_K) for _ in range(num_tokens)])
            ids[0] = [0, 1]  # every server has something to do
        self.ids = ids.astype(np.int64)
        num_tokens = len(ids)
        self.hidden = np.array(
            [[choose.randint(1, 200) for _ in range(HIDDEN)] for _ in ids], np.float32)
        self.weights = np.array([[choose.choice([1, 2, 4]) for _ in range(TOP_K)] for _ in ids],
                                np.float32)
        per_expert = pairs.reply_mode == ReplyMode.PER_EXPERT
        self.routing = route(self.ids, pairs.replicas, pairs.num_servers, per_expert)
        self.tables = Tables(pairs.num_servers, num_tokens, TOP_K, self.routing)
        self.output = np.full((num_tokens, HIDDEN), -1, np.float32)
        self.missing = pairs.new(1, dtype=np.int32, fill=-1)
        self.skipped = pairs.new(1, dtype=np.uint64)
        self.message = MessageShape(
            hidden_size=HIDDEN, data_type=FP32, experts_per_row=TOP_K, num_experts=EXPERTS,
            reply_mode=pairs.reply_mode, reply_type=FP32, client_id=client, seq=seq,
        )
        self.servers = (ClientServer * pairs.num_servers)()
        for s, server in enumerate(self.servers):
            end = pairs.ends[client, s][0]
            server.send_addr = end.mapped_addr if pairs.in_place else end.send.addr
            server.remote_addr, server.reply_addr = end.remote.addr, end.recv.addr
            server.request_slot_bytes = pairs.shape.request_slot_bytes
            server.reply_slot_bytes = pairs.shape.reply_slot_bytes
            server.peer, server.previous_seq, server.server_id = end.peer_addr, seq - 1, s
            server.max_rows, server.max_pairs = pairs.max_tokens, pairs.max_tokens * TOP_K
            server.in_place = pairs.in_place
        self.pack = ClientPackArgs(
            servers=addr(self.servers), tables=self.tables.struct, shape=self.message,
            hidden=addr(self.hidden), hidden_stride=HIDDEN * 4, topk_ids=addr(self.ids),
            ids_stride=TOP_K, topk_weights=addr(self.weights), weights_stride=TOP_K,
            missing_expert=addr(self.missing), id_bytes=8,
        )
        self.put = ClientPutArgs(
            servers=addr(self.servers), tables=self.tables.struct, shape=self.message,
            status=addr(status), missing_expert=addr(self.missing),
            max_loaded_servers=pairs.num_servers, signal_mode=pairs.mode,
        )
        self.combine = ClientCombineArgs(
            servers=addr(self.servers), tables=self.tables.struct, shape=self.message,
            output=addr(self.output), output_stride=HIDDEN * 4, status=addr(status),
            timeout_ns=TIMEOUT_NS, output_type=FP32, num_tokens=num_tokens,
        )
        self.failed = pairs.new(1)
        if seq % 2:  # heads are judged after the rows are added, as on GPUs; else before
            self.combine.failed = addr(self.failed)
        self.expert_servers = np.full((EXPERTS, 2), -1, np.int32)
        for e, servers in enumerate(pairs.replicas):
            self.expert_servers[e, : len(servers)] = servers
        self.route = ClientRouteArgs(
            topk_ids=addr(self.ids), ids_stride=TOP_K, expert_servers=addr(self.expert_servers),
            num_skipped=addr(self.skipped), missing_expert=addr(self.missing), id_bytes=8,
            num_tokens=num_tokens, experts_per_row=TOP_K, num_experts=EXPERTS, max_replicas=2,
            reply_mode=pairs.reply_mode,
        )
        self.routed = Tables(pairs.num_servers, num_tokens, TOP_K)  # what client_send_direct writes
        self.route.tables = self.routed.struct

    def check(self, held: dict[int, list[int]], who: str) -> None:
        """held: server -> its experts in their order."""
        assert not self.failed[0], f"{who} failed with {self.failed[0]}"
        for t, ids in enumerate(self.ids):
            scale = [held[self.routing.pair_server[t, k]].index(e) + 1 for k, e in enumerate(ids)]
            want = self.hidden[t] * float((self.weights[t] * scale).sum())
            assert (self.output[t] == want).all(), f"token {t} of {who}: {self.output[t]} {want}"


class ServerSide:
    """One server: its slots, tables and arguments, for batches of up to all its clients."""

    def __init__(self, pairs: Pairs, server: int, num_clients: int, num_messages: int, way: int):
        self.held = [e for e, where in enumerate(pairs.replicas) if server in where]
        rows, num_pairs = num_clients * pairs.max_tokens, num_clients * pairs.max_tokens * TOP_K
        self.slots = (ServerSlot * num_clients)()
        for c, slot in enumerate(self.slots):
            end = pairs.ends[c, server][1]
            slot.recv_addr, slot.recv_slot_bytes = end.recv.addr, pairs.shape.request_slot_bytes
            slot.reply_addr = end.mapped_addr if pairs.in_place else end.send.addr
            slot.reply_slot_bytes, slot.remote_reply_addr = (
                pairs.shape.reply_slot_bytes, end.remote.addr)
            slot.peer, slot.client_id, slot.open = end.peer_addr, c, 1
            slot.max_rows, slot.max_pairs = pairs.max_tokens, pairs.max_tokens * TOP_K
            slot.signal_mode, slot.in_place = pairs.mode, pairs.in_place
        self.messages = (ServerMessage * num_clients)()
        self.statuses = (KernelStatus * num_clients)()
        self.counts = pairs.new(8)  # messages, rows, pairs, layer, type, experts_done, arrived
        local = pairs.new(EXPERTS, dtype=np.int32, fill=-1)
        local[self.held] = range(len(self.held))
        self.gathered = pairs.new(num_pairs, HIDDEN, dtype=np.float32)
        at = [addr(self.counts) + 4 * i for i in range(8)]
        positions, replies = (pairs.new(num_pairs, dtype=np.int32) for _ in range(2))
        poll = ServerPollArgs(
            slots=addr(self.slots), messages=addr(self.messages),
            slot_state=addr(pairs.new(num_clients)), num_messages=at[0], num_rows=at[1],
            num_pairs=at[2], layer=at[3], timeout_ns=TIMEOUT_NS,
            model=ServerModel(num_layers=1, hidden_size=HIDDEN, num_experts=EXPERTS, data_type=FP32,
                              max_experts_per_row=TOP_K),
            num_slots=num_clients, max_messages=num_clients, max_rows=rows,
        )
        gather = ServerGatherArgs(
            slots=addr(self.slots), messages=addr(self.messages), local_expert=addr(local),
            pair_expert=addr(pairs.new(num_pairs, dtype=np.int32)),
            expert_offsets=addr(pairs.new(len(self.held) + 1)),
            cursor=addr(pairs.new(len(self.held))), pair_position=addr(positions),
            pair_reply_row=addr(replies), gathered=addr(self.gathered),
            expert_rows=addr(pairs.new(len(self.held), dtype=np.uint64)), num_messages=at[0],
            layer=at[3], num_local=len(self.held), num_experts=EXPERTS,
        )
        self.reply = ServerReplyArgs(
            slots=addr(self.slots), messages=addr(self.messages), pair_position=addr(positions),
            pair_reply_row=addr(replies), expert_output=addr(self.gathered),
            status=addr(self.statuses), found=at[0], arrived=at[6], hidden_size=HIDDEN,
            output_type=FP32, server_id=server,
        )
        self.args = ServerRoundsArgs(
            take=ServerTakeArgs(poll=poll, gather=gather), reply=self.reply, experts_done=at[5],
            num_messages=num_messages, way=way,
        )

    def check(self, num_messages: int) -> None:
        codes = [(s.code, s.stage) for s in self.statuses]
        assert not any(code for code, _ in codes), f"statuses of replies {codes}"
        assert self.counts[5] == num_messages, f"{self.counts[5]} of {num_messages} messages came"
