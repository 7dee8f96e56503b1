"""client_route, client_pack and client_combine by themselves, against the same steps in Python."""

from __future__ import annotations

import ctypes
import struct
import time

import numpy as np
import pytest
import torch
from tests.kernel_rig import (
    GEOMETRIES,
    STALE,
    Routing,
    Tables,
    client_servers,
    memory,
    request_bytes,
    route,
    run,
    slot_bytes,
    strided,
)

from expertwire.device_structs import (
    STATUS_BAD_ARGUMENT,
    STATUS_TIMEOUT,
    ClientCombineArgs,
    ClientPackArgs,
    ClientRouteArgs,
    KernelStatus,
    MessageShape,
    ReplyHead,
)
from expertwire.message import (
    DATA_TYPES,
    FLAG_BYTES,
    REPLY_MAGIC,
    WIRE_VERSION,
    ReplyMode,
    align16,
    head_checksum,
)

ONE_BLOCK = [g for g in GEOMETRIES if g[0] == 1]
NUM_EXPERTS, NUM_SERVERS = 11, 4
# Expert -> its servers: single homes, replicas, three homes; server 3 has only the last expert.
REPLICAS = [[0], [0, 1], [1], [2, 0, 1], [2], [1, 2], [0], [1], [2, 1], [0, 2], [3]]
ODD_IDS = [-1, -7, NUM_EXPERTS, 2**31 - 1, -(2**31)]


def random_ids(num_tokens: int, top_k: int, seed: int, odd: bool = True) -> np.ndarray:
    """Expert ids with duplicates in a token and, if `odd`, some that do not exist."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, NUM_EXPERTS - 1, (num_tokens, top_k))
    if odd:
        where = rng.random(ids.shape) < 0.15
        ids[where] = rng.choice(ODD_IDS, where.sum())
    return ids


def expert_servers(replicas: list[list[int]], width: int) -> np.ndarray:
    table = np.full((len(replicas), width), -1, np.int32)
    for expert, servers in enumerate(replicas):
        table[expert, : len(servers)] = servers
    return table


class TestRoute:
    def run(
        self, ids: np.ndarray, geometry, *, mode=ReplyMode.PER_EXPERT, replicas=REPLICAS,
        num_servers=NUM_SERVERS,
    ) -> tuple[Tables, int, int]:
        """(tables, skipped ids, missing expert) after routing; ids may have any row stride."""
        homes = expert_servers(replicas, 3)
        tables = Tables(num_servers, *ids.shape)
        skipped, missing = ctypes.c_uint64(0), ctypes.c_int32(-1)
        run("client_route", ClientRouteArgs(
            topk_ids=ids.ctypes.data, ids_stride=ids.strides[0] // ids.itemsize,
            expert_servers=homes.ctypes.data, tables=tables.struct,
            num_skipped=ctypes.addressof(skipped), missing_expert=ctypes.addressof(missing),
            id_bytes=ids.itemsize, num_tokens=ids.shape[0], experts_per_row=ids.shape[1],
            num_experts=len(replicas), max_replicas=3, reply_mode=mode,
        ), geometry)
        return tables, skipped.value, missing.value

    def check(self, tables: Tables, want: Routing) -> None:
        assert tables.batch_size.tolist() == [len(tokens) for tokens in want.rows]
        assert tables.num_pairs.tolist() == want.num_pairs
        assert np.array_equal(tables.pair_server, want.pair_server)
        assert np.array_equal(tables.pair_row, want.pair_row)
        for s, tokens in enumerate(want.rows):
            assert tables.row_token[s, : len(tokens)].tolist() == tokens
            assert (tables.row_token[s, len(tokens) :] == 77).all(), "wrote beyond its rows"

    @pytest.mark.parametrize("geometry", ONE_BLOCK, ids=str)
    @pytest.mark.parametrize("mode", list(ReplyMode))
    @pytest.mark.parametrize("num_tokens", [0, 1, 31, 33, 100])
    def test_equals_the_oracle(self, num_tokens, mode, geometry):
        ids = random_ids(num_tokens, 4, seed=num_tokens)
        want = route(ids, REPLICAS, NUM_SERVERS, mode == ReplyMode.PER_EXPERT)
        tables, skipped, missing = self.run(ids, geometry, mode=mode)
        self.check(tables, want)
        assert (skipped, missing) == (want.num_skipped, -1)

    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    @pytest.mark.parametrize(("stride", "offset"), [(3, 0), (5, 1), (17, 3)])
    def test_id_types_and_odd_strides(self, dtype, stride, offset):
        ids = random_ids(40, 3, seed=1)
        tables, _, _ = self.run(strided(ids.astype(dtype), stride, offset), (1, 2, 4))
        self.check(tables, route(ids, REPLICAS, NUM_SERVERS, True))

    def test_64_bit_ids_are_not_cut_to_32(self):
        ids = np.array([[2**32, 3], [2**40 + 1, -(2**32)]])
        tables, skipped, _ = self.run(ids, (1, 1, 1))
        assert skipped == 3 and tables.batch_size.sum() == 1

    @pytest.mark.parametrize("geometry", ONE_BLOCK, ids=str)
    def test_an_expert_without_a_server_is_named(self, geometry):
        homes = [*REPLICAS[:5], [], *REPLICAS[6:]]
        ids = random_ids(50, 3, seed=2)
        assert (ids == 5).any()
        assert self.run(ids, geometry, replicas=homes)[2] == 5
        ids[ids == 5] = 4
        assert self.run(ids, geometry, replicas=homes)[2] == -1

    def test_more_experts_per_token_than_lanes(self):
        ids = random_ids(9, 40, seed=3)
        tables, _, _ = self.run(ids, (1, 2, 8))
        self.check(tables, route(ids, REPLICAS, NUM_SERVERS, True))


def pack_shape(num_experts: int, hidden_size: int, top_k: int, fp8: bool) -> MessageShape:
    return MessageShape(
        hidden_size=hidden_size, data_type=DATA_TYPES[torch.float8_e4m3fn if fp8 else
                                                      torch.bfloat16],
        scale_type=1 if fp8 else 0, scale_block=128 if fp8 else 0, experts_per_row=top_k,
        num_experts=num_experts, reply_mode=ReplyMode.PER_EXPERT, reply_type=2, client_id=4242,
        layer=3, seq=2**40 + 5, epoch=99,
    )


class TestPack:
    """Every byte of every slot is compared: sections, zero padding, head, flag, and the rest."""

    def run(self, geometry, *, num_tokens=23, hidden_size=50, fp8=False, in_place=False,
            missing=-1, id_type=np.int64):
        top_k, seed = 3, num_tokens + hidden_size
        rng = np.random.default_rng(seed)
        ids = random_ids(num_tokens, top_k, seed)
        routing = route(ids, REPLICAS, NUM_SERVERS, True)
        shape = pack_shape(NUM_EXPERTS, hidden_size, top_k, fp8)
        row_bytes = hidden_size * (1 if fp8 else 2)
        hidden = rng.integers(0, 256, (num_tokens, row_bytes), dtype=np.uint8)
        weights = rng.random((num_tokens, top_k), dtype=np.float32)
        scales = rng.random((num_tokens, -(-hidden_size // 128)), dtype=np.float32)
        given = {  # odd strides and offsets for all of them
            "ids": strided(ids.astype(id_type), top_k + 2, 1),
            "hidden": strided(hidden, row_bytes + 7, 3),
            "weights": strided(weights, top_k + 1, 2), "scales": strided(scales, 9, 1),
        }
        size = slot_bytes(shape, num_tokens + 1)
        slots = [memory(size) for _ in range(NUM_SERVERS)]
        servers = client_servers(*({
            "send_addr": slot.ctypes.data, "request_slot_bytes": size, "in_place": in_place,
        } for slot in slots))
        tables, expert = Tables(NUM_SERVERS, num_tokens, top_k, routing), ctypes.c_int32(missing)
        run("client_pack", ClientPackArgs(
            servers=ctypes.addressof(servers), tables=tables.struct, shape=shape,
            hidden=given["hidden"].ctypes.data, hidden_stride=given["hidden"].strides[0],
            topk_ids=given["ids"].ctypes.data, id_bytes=np.dtype(id_type).itemsize,
            ids_stride=given["ids"].strides[0] // np.dtype(id_type).itemsize,
            topk_weights=given["weights"].ctypes.data,
            weights_stride=given["weights"].strides[0] // 4,
            scales=given["scales"].ctypes.data, scales_stride=given["scales"].strides[0] // 4,
            missing_expert=ctypes.addressof(expert),
        ), geometry)
        wanted = []
        for s, tokens in enumerate(routing.rows):
            want = np.full(size, STALE, np.uint8)
            if tokens:
                here = routing.pair_server[tokens] == s
                message = request_bytes(
                    shape, hidden[tokens], np.where(here, ids[tokens], -1),
                    np.where(here, weights[tokens], 0), scales[tokens] if fp8 else None,
                )
                want[: len(message)] = np.frombuffer(message, np.uint8)
                if not in_place:
                    want[-FLAG_BYTES:] = np.frombuffer(struct.pack("<QQ", shape.seq, 0), np.uint8)
            wanted.append(want)
        return slots, wanted

    @pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
    @pytest.mark.parametrize("fp8", [False, True])
    @pytest.mark.parametrize("in_place", [False, True])
    def test_equals_the_oracle(self, geometry, fp8, in_place):
        slots, wanted = self.run(geometry, fp8=fp8, in_place=in_place)
        assert any((want != STALE).any() for want in wanted), "nothing is sent at all"
        for slot, want in zip(slots, wanted, strict=True):
            assert np.array_equal(slot, want)

    @pytest.mark.parametrize("hidden_size", [1, 7, 128, 129, 1000])
    @pytest.mark.parametrize("fp8", [False, True])
    def test_any_hidden_size(self, hidden_size, fp8):
        slots, wanted = self.run((2, 2, 4), hidden_size=hidden_size, fp8=fp8)
        for slot, want in zip(slots, wanted, strict=True):
            assert np.array_equal(slot, want)

    @pytest.mark.parametrize("num_tokens", [0, 1, 2, 64])
    @pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
    def test_any_number_of_tokens(self, num_tokens, geometry):
        slots, wanted = self.run(geometry, num_tokens=num_tokens, id_type=np.int32)
        for slot, want in zip(slots, wanted, strict=True):
            assert np.array_equal(slot, want)

    def test_nothing_is_packed_when_an_expert_is_missing(self):
        slots, _ = self.run((2, 2, 1), missing=5)
        assert all((slot == STALE).all() for slot in slots)


class TestCombine:
    """The sum over a token's expert slots, ascending, in fp32, whatever the geometry."""

    def prepare(self, *, num_tokens=29, hidden_size=37, top_k=4, reply=torch.float32,
                output=torch.float32, mode=ReplyMode.PER_EXPERT):
        ids = random_ids(num_tokens, top_k, seed=num_tokens)
        routing = route(ids, REPLICAS, NUM_SERVERS, mode == ReplyMode.PER_EXPERT)
        generator = torch.Generator().manual_seed(hidden_size)
        self.seq, self.hidden_size = 77, hidden_size
        expected_rows = (routing.num_pairs if mode == ReplyMode.PER_EXPERT
                         else [len(tokens) for tokens in routing.rows])
        row_bytes = hidden_size * reply.itemsize
        size = align16(num_tokens * top_k * row_bytes) + 64 + FLAG_BYTES
        self.slots, replies, heads = [], [], []
        for s, count in enumerate(expected_rows):
            rows = (torch.randn(count, hidden_size, generator=generator) * 100).to(reply)
            slot = memory(size)
            raw = rows.flatten().view(torch.uint8).numpy()
            slot[: raw.size] = raw
            heads.append(ReplyHead(
                magic=REPLY_MAGIC, version=WIRE_VERSION, head_bytes=64, seq=self.seq, server_id=s,
                num_rows=count, reply_mode=mode, hidden_size=hidden_size,
                reply_type=DATA_TYPES[reply],
            ))
            self.slots.append(slot)
            replies.append(rows)
        for s, head in enumerate(heads):
            self.put_head(s, head)
        self.heads = heads
        self.tables = Tables(NUM_SERVERS, num_tokens, top_k, routing)
        self.servers = client_servers(*(
            {"reply_addr": slot.ctypes.data, "reply_slot_bytes": size} for slot in self.slots
        ))
        want = torch.zeros(num_tokens, hidden_size)
        for t in range(num_tokens):
            for k in range(top_k):
                if routing.pair_row[t, k] >= 0:
                    want[t] += replies[routing.pair_server[t, k]][routing.pair_row[t, k]].float()
        self.status = KernelStatus()
        self.storage = torch.full((num_tokens + 1, hidden_size + 5), 55.0, dtype=output)
        out = self.storage[:num_tokens, 1 : hidden_size + 1]  # an odd stride and offset
        self.args = ClientCombineArgs(
            servers=ctypes.addressof(self.servers), tables=self.tables.struct,
            shape=MessageShape(hidden_size=hidden_size, experts_per_row=top_k, seq=self.seq,
                               reply_mode=mode, reply_type=DATA_TYPES[reply]),
            output=out.data_ptr(), output_stride=out.stride(0) * out.itemsize,
            status=ctypes.addressof(self.status), timeout_ns=10**7,
            output_type=DATA_TYPES[output], num_tokens=num_tokens,
        )
        return out, want.to(output)

    def put_head(self, s: int, head: ReplyHead) -> None:
        head.head_checksum = head_checksum(head)
        end = self.slots[s].size
        self.slots[s][end - 80 : end - 16] = np.frombuffer(bytes(head), np.uint8)
        self.slots[s][end - 16 :] = np.frombuffer(struct.pack("<QQ", self.seq, 0), np.uint8)

    @pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
    @pytest.mark.parametrize("mode", list(ReplyMode))
    def test_equals_the_oracle_to_the_bit(self, geometry, mode):
        out, want = self.prepare(mode=mode)
        run("client_combine", self.args, geometry)
        assert self.status.code == 0
        assert torch.equal(out, want)
        untouched = self.storage.clone()
        untouched[: out.shape[0], 1 : 1 + self.hidden_size] = 55
        assert (untouched == 55).all(), "wrote beside its rows"

    @pytest.mark.parametrize("hidden_size", [1, 1023, 1024, 1025, 2500])
    def test_any_hidden_size(self, hidden_size):
        out, want = self.prepare(hidden_size=hidden_size, num_tokens=5)
        run("client_combine", self.args, (2, 2, 1))
        assert torch.equal(out, want)

    @pytest.mark.parametrize("reply", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("output", [torch.float32, torch.bfloat16, torch.float16])
    def test_types_are_rounded_once(self, reply, output):
        out, want = self.prepare(reply=reply, output=output)
        run("client_combine", self.args, (3, 1, 4))
        assert torch.equal(out, want)

    @pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
    def test_nothing_is_added_before_every_reply_is_in(self, geometry):
        out, _ = self.prepare()
        self.slots[2][-FLAG_BYTES:] = 0
        run("client_combine", self.args, geometry)
        assert (self.status.code, self.status.peer) == (STATUS_TIMEOUT, 2)
        assert (self.status.expected, self.status.seen) == (self.seq, 0)
        assert (out == 55).all()

    def test_a_wait_of_its_own(self):
        """It sums nothing; after one that failed, the combine does not wait again."""
        out, want = self.prepare()
        run("client_wait", self.args, (1, 2, 1))
        assert self.status.code == 0 and (out == 55).all()
        run("client_combine", self.args, (3, 2, 1))
        assert torch.equal(out, want)

        out, _ = self.prepare()
        self.slots[2][-FLAG_BYTES:] = 0
        self.args.timeout_ns = 400_000_000
        run("client_wait", self.args, (1, 2, 1))
        assert (self.status.code, self.status.peer) == (STATUS_TIMEOUT, 2)
        start = time.monotonic()
        run("client_combine", self.args, (3, 2, 1))
        assert time.monotonic() - start < 0.3
        assert self.status.code == STATUS_TIMEOUT and (out == 55).all()

    @pytest.mark.parametrize("change", [
        dict(magic=1), dict(version=2), dict(seq=76), dict(reason=14), dict(num_rows=1000),
        dict(reply_type=2), dict(hidden_size=38), dict(reply_mode=0),
    ], ids=str)
    def test_a_head_that_does_not_fit_is_reported(self, change):
        out, _ = self.prepare()
        for name, value in change.items():
            setattr(self.heads[1], name, value)
        self.put_head(1, self.heads[1])
        run("client_combine", self.args, (1, 2, 2))
        assert (self.status.code, self.status.peer) == (STATUS_BAD_ARGUMENT, 1)
        assert self.status.syndrome == change.get("reason", 0)
        assert (out == 55).all()

    @pytest.mark.parametrize("geometry", [(1, 1, 1), (3, 2, 4), (2, 8, 2)], ids=str)
    @pytest.mark.parametrize("change", [dict(magic=1), dict(reason=14), dict(num_rows=1000)],
                             ids=str)
    def test_what_was_added_is_taken_back(self, change, geometry):
        """Where the failure is told by a word, heads are judged after the rows are added."""
        out, want = self.prepare(num_tokens=9, hidden_size=300)
        failed = ctypes.c_uint32()
        self.args.failed = ctypes.addressof(failed)
        run("client_combine", self.args, geometry)
        assert torch.equal(out, want) and failed.value == 0
        for name, value in change.items():
            setattr(self.heads[1], name, value)
        self.put_head(1, self.heads[1])
        run("client_combine", self.args, geometry)
        assert (self.status.code, self.status.peer) == (STATUS_BAD_ARGUMENT, 1)
        assert failed.value == STATUS_BAD_ARGUMENT and out.isnan().all()
        untouched = self.storage.clone()
        untouched[: out.shape[0], 1 : 1 + self.hidden_size] = 55
        assert (untouched == 55).all(), "wrote beside its rows"

    def test_a_damaged_head_is_reported(self):
        self.prepare()
        self.slots[0][-80 + 40] ^= 1  # a byte that only the checksum covers
        run("client_combine", self.args, (1, 1, 1))
        assert (self.status.code, self.status.peer) == (STATUS_BAD_ARGUMENT, 0)
