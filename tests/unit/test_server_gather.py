"""server_gather by itself: rows grouped by expert, against the messages they came from."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from tests.kernel_rig import GEOMETRIES, STALE, memory, request_bytes, run, slot_bytes

from expertwire.device_structs import (
    BufferHead,
    MessageShape,
    ServerGatherArgs,
    ServerMessage,
    ServerSlot,
)
from expertwire.message import DATA_TYPES, Reason, ReplyMode

ONE_BLOCK = [g for g in GEOMETRIES if g[0] == 1]
NUM_EXPERTS, TOP_K, LAYER, NUM_LAYERS = 9, 3, 1, 2
HELD = [7, 2, 4, 0]  # experts of this server, in the order it holds them; 3 gets no row
NOTHING = -1


class Batch:
    """Several messages of one layer in their slots, and the kernel's arguments."""

    def __init__(
        self, row_counts: list[int], *, hidden_size: int = 20, fp8: bool = False,
        min_rows: int = 1, mode: int = ReplyMode.PER_EXPERT, seed: int = 0,
    ):
        rng = np.random.default_rng(seed)
        self.row_bytes = hidden_size * (1 if fp8 else 2)
        self.num_scales = -(-hidden_size // 128) if fp8 else 0
        self.min_rows, self.mode = min_rows, mode
        count = len(row_counts)
        self.slots, self.messages = (ServerSlot * count)(), (ServerMessage * count)()
        self.hidden, self.ids, self.scales, self.memory = [], [], [], []
        begin = 0
        for m, num_rows in enumerate(row_counts):
            shape = MessageShape(
                hidden_size=hidden_size, experts_per_row=TOP_K, num_experts=NUM_EXPERTS,
                data_type=DATA_TYPES[torch.float8_e4m3fn if fp8 else torch.bfloat16],
                scale_type=1 if fp8 else 0, scale_block=128 if fp8 else 0, reply_mode=mode,
                layer=LAYER, seq=m + 1,
            )
            hidden = rng.integers(0, 256, (num_rows, self.row_bytes), dtype=np.uint8)
            ids = rng.choice([*HELD[:3], NOTHING], (num_rows, TOP_K)).astype(np.int32)
            scales = rng.random((num_rows, max(self.num_scales, 1)), dtype=np.float32)
            message = request_bytes(shape, hidden, ids, rng.random(ids.shape),
                                    scales if fp8 else None)
            slot = memory(slot_bytes(shape, num_rows + 2))
            slot[: len(message)] = np.frombuffer(message, np.uint8)
            self.slots[m].recv_addr, self.slots[m].recv_slot_bytes = slot.ctypes.data, slot.size
            self.messages[m].head = BufferHead.from_buffer_copy(message[:128])
            self.messages[m].slot, self.messages[m].pair_begin = m, begin
            begin += ids.size
            self.hidden.append(hidden)
            self.ids.append(ids)
            self.scales.append(scales)
            self.memory.append(slot)
        self.num_pairs = begin

    def ids_addr(self, m: int) -> int:
        return self.memory[m].ctypes.data + 128

    def gather(self, geometry) -> None:
        local = np.full(NUM_EXPERTS, -1, np.int32)
        local[HELD] = range(len(HELD))
        pairs, places = max(self.num_pairs, 1), self.num_pairs + self.min_rows * len(HELD)
        scratch = np.full(pairs, 99, np.int32)
        self.offsets = np.full(len(HELD) + 1, 99, np.uint32)
        self.ends = np.full(len(HELD), 99, np.uint32)
        self.position = np.full(pairs, 99, np.int32)
        self.reply_row = np.full(pairs, 99, np.int32)
        self.gathered = memory(places * self.row_bytes).reshape(places, self.row_bytes)
        self.gathered_scales = np.full((places, max(self.num_scales, 1)), -9, np.float32)
        self.expert_rows = np.full((NUM_LAYERS, len(HELD)), 1000, np.uint64)
        num_messages, layer = ctypes.c_uint32(len(self.messages)), ctypes.c_uint32(LAYER)
        run("server_gather", ServerGatherArgs(
            slots=ctypes.addressof(self.slots), messages=ctypes.addressof(self.messages),
            local_expert=local.ctypes.data, pair_expert=scratch.ctypes.data,
            expert_offsets=self.offsets.ctypes.data, cursor=self.ends.ctypes.data,
            pair_position=self.position.ctypes.data, pair_reply_row=self.reply_row.ctypes.data,
            gathered=self.gathered.ctypes.data,
            gathered_scales=self.gathered_scales.ctypes.data,
            expert_rows=self.expert_rows.ctypes.data,
            num_messages=ctypes.addressof(num_messages), layer=ctypes.addressof(layer),
            num_local=len(HELD), num_experts=NUM_EXPERTS, min_rows=self.min_rows,
        ), geometry)

    def check(self, refused: tuple[int, ...] = ()) -> None:
        """Everything the kernel left, for the messages that were not refused."""
        counts = [
            sum(int((ids == expert).sum()) for m, ids in enumerate(self.ids) if m not in refused)
            for expert in HELD
        ]
        places = [max(count, self.min_rows) if count else 0 for count in counts]
        assert self.offsets.tolist() == [0, *np.cumsum(places)]
        assert self.ends.tolist() == [b + n for b, n in zip(self.offsets, counts, strict=False)]
        assert self.expert_rows[LAYER].tolist() == [1000 + count for count in counts]
        assert (self.expert_rows[1 - LAYER] == 1000).all(), "another layer's statistics"
        taken: set[int] = set()
        for m, ids in enumerate(self.ids):
            if m in refused:
                continue
            begin, reply_rows = self.messages[m].pair_begin, 0
            for i, expert in enumerate(ids.flatten().tolist()):
                position, reply_row = self.position[begin + i], self.reply_row[begin + i]
                if expert == NOTHING:
                    assert (position, reply_row) == (-1, -1)
                    continue
                e = HELD.index(expert)
                assert self.offsets[e] <= position < self.ends[e], "among its expert's rows"
                assert position not in taken, "two pairs in one place"
                taken.add(int(position))
                assert reply_row == reply_rows, "reply rows count up in pair order"
                reply_rows += 1
                row = i // TOP_K
                assert np.array_equal(self.gathered[position], self.hidden[m][row])
                if self.num_scales:
                    assert np.array_equal(self.gathered_scales[position], self.scales[m][row])
            want = reply_rows if self.mode == ReplyMode.PER_EXPERT else len(ids)
            assert self.messages[m].num_reply_rows == want
        for place in set(range(len(self.gathered))) - taken:
            assert (self.gathered[place] == STALE).all(), "wrote a place that is nobody's"


@pytest.mark.parametrize("geometry", ONE_BLOCK, ids=str)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("row_counts", [[1], [5], [40], [7, 1, 12], [3] * 9], ids=str)
def test_rows_are_grouped_by_expert(row_counts, fp8, geometry):
    batch = Batch(row_counts, fp8=fp8, hidden_size=300 if fp8 else 20)
    batch.gather(geometry)
    batch.check()


@pytest.mark.parametrize("hidden_size", [1, 7, 128, 129])
@pytest.mark.parametrize("fp8", [False, True])
def test_any_hidden_size(hidden_size, fp8):
    batch = Batch([6, 5], fp8=fp8, hidden_size=hidden_size)
    batch.gather((1, 2, 4))
    batch.check()


@pytest.mark.parametrize("min_rows", [2, 8, 64])
@pytest.mark.parametrize("geometry", ONE_BLOCK, ids=str)
def test_a_group_has_at_least_min_rows_places(min_rows, geometry):
    """An expert without rows gets none; one with few gets padding, which nobody writes."""
    batch = Batch([4, 3], min_rows=min_rows, seed=5)
    batch.gather(geometry)
    batch.check()


def test_sums_are_one_row_per_token():
    batch = Batch([4, 9], mode=ReplyMode.SUM)
    batch.gather((1, 1, 4))
    batch.check()


@pytest.mark.parametrize("geometry", ONE_BLOCK, ids=str)
@pytest.mark.parametrize("bad", [5, NUM_EXPERTS, -2, 2**31 - 1, -(2**31)])
def test_an_expert_that_is_not_held_refuses_its_message_only(bad, geometry):
    batch = Batch([6, 5, 8])
    ctypes.c_int32.from_address(batch.ids_addr(1) + 4 * 7).value = bad
    batch.gather(geometry)
    assert [message.reason for message in batch.messages] == [
        Reason.OK, Reason.NOT_HELD, Reason.OK
    ]
    batch.check(refused=(1,))


def test_a_message_refused_before_is_not_read():
    batch = Batch([6, 5])
    batch.messages[0].reason = Reason.BYTES
    batch.messages[0].head.num_rows = 2**31  # what polling refused is not believed here
    batch.gather((1, 2, 2))
    batch.check(refused=(0,))


def test_the_checked_head_counts_not_what_the_client_writes_later():
    """The server's copy of the head was checked; the slot's may change at any time."""
    batch = Batch([6, 5])
    ctypes.memset(batch.memory[0].ctypes.data, 0xFF, 128)
    batch.gather((1, 1, 1))
    batch.check()
