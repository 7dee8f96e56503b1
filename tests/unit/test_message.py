"""Any message: written by device code and by Python, read as docs/wire.md says, and damaged."""

from __future__ import annotations

import ctypes
import math
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_rig import (
    STALE,
    Tables,
    client_servers,
    memory,
    request_bytes,
    route,
    run,
    slot_bytes,
)

from expertwire._native import declare
from expertwire.device_structs import (
    ClientCombineArgs,
    ClientPackArgs,
    KernelStatus,
    MessageShape,
    ServerGatherArgs,
    ServerMessage,
    ServerModel,
    ServerPollArgs,
    ServerReplyArgs,
    ServerSlot,
)
from expertwire.message import DATA_TYPE_BYTES, Reason, ReplyMode

EXPERTS, LAYERS, MAX_ROWS, TOP_K, BLOCK, FP8 = 7, 3, 6, 3, 16, 4
HELD = [4, 0, 5, 1, 2]  # 3 and 6 are not held
SPARE = 32  # bytes on either side of what a kernel writes
WIRE = (Path(__file__).parents[2] / "docs/wire.md").read_text()


def documented(head: str) -> dict[str, tuple[int, int]]:
    """Field -> (offset, bytes), from the table below the heading that begins with `head`."""
    text = re.split(r"\n##+ ", WIRE[WIRE.index(f"### {head},"):])[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `?(\w+)`? \|", text, re.MULTILINE)
    return {f"{name}@{at}" if name == "reserved" else name: (int(at), int(size))
            for at, size, name in rows}


REQUEST, REPLY = documented("BufferHead"), documented("ReplyHead")


def fields(raw: bytes, table: dict[str, tuple[int, int]]) -> SimpleNamespace:
    return SimpleNamespace(**{
        name: int.from_bytes(raw[at : at + size], "little") for name, (at, size) in table.items()})


def checksum(raw: bytes) -> int:
    """docs/wire.md, "Head checksum"."""
    total, mask = 0x6A09E667F3BCC909, 2**64 - 1
    for (word,) in struct.iter_unpack("<Q", raw):
        total = (total ^ word) * 0x9FB21C651E98DF25 & mask
        total ^= total >> 29
    return total | 1


def sections(raw: bytes, head: SimpleNamespace) -> list[bytes]:
    """ids, hidden rows, weights, scales, without their padding, which must be zero."""
    pairs = head.num_rows * head.experts_per_row
    blocks = math.ceil(head.hidden_size / head.scale_block) if head.scale_block else 0
    sizes = [4 * pairs, head.num_rows * head.hidden_size * DATA_TYPE_BYTES[head.data_type],
             4 * pairs, 4 * head.num_rows * blocks]
    found, at = [], 128
    for size in sizes:
        end = at + size
        found.append(raw[at:end])
        at = -(-end // 16) * 16
        assert not any(raw[end:at]), "padding is zero"
    assert head.active_bytes + head.payload_bytes == at - 128
    assert head.padding_bytes == at - 128 - sum(sizes)
    return found


def test_tables_of_the_document_cover_the_heads():
    for table, size in ((REQUEST, 128), (REPLY, 64)):
        covered = [byte for at, count in table.values() for byte in range(at, at + count)]
        assert covered == list(range(size))


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


expert_ids = st.sampled_from([*HELD, -1])


@st.composite
def messages(draw, types=(1, 2, 3, FP8)):
    """shape, ids [rows, k] (no row of nothing), hidden bytes, weights, scales or None."""
    rows, top_k = draw(st.integers(1, MAX_ROWS)), draw(st.integers(1, TOP_K))
    hidden_size, data_type = draw(st.integers(1, 40)), draw(st.sampled_from(types))
    fp8 = data_type == FP8
    model_type = draw(st.sampled_from([1, 2, 3])) if fp8 else data_type
    shape = MessageShape(
        hidden_size=hidden_size, data_type=data_type, scale_type=fp8, scale_block=BLOCK * fp8,
        experts_per_row=top_k, num_experts=EXPERTS, reply_mode=draw(st.sampled_from(ReplyMode)),
        reply_type=draw(st.sampled_from([1, model_type])), layer=draw(st.integers(0, LAYERS - 1)),
        client_id=draw(st.integers(1, 2**32 - 1)), seq=draw(st.integers(1, 2**64 - 1)),
        epoch=draw(u64),
    )
    table = np.array(draw(st.lists(st.lists(expert_ids, min_size=top_k, max_size=top_k).filter(
        lambda row: any(e >= 0 for e in row)), min_size=rows, max_size=rows)), np.int32)
    bits = np.random.default_rng(draw(u32))
    hidden = bits.integers(0, 256, (rows, hidden_size * DATA_TYPE_BYTES[data_type]), np.uint8)
    weights = np.where(table >= 0, bits.random(table.shape, np.float32), np.float32(0))
    scales = bits.random((rows, math.ceil(hidden_size / BLOCK)), np.float32) if fp8 else None
    return SimpleNamespace(shape=shape, ids=table, hidden=hidden, weights=weights, scales=scales,
                           model_type=model_type)


def pack(m: SimpleNamespace) -> bytes:
    """The slot that client_pack makes of it, for a server that holds everything."""
    num_rows, top_k = m.ids.shape
    slot = memory(slot_bytes(m.shape, num_rows))
    servers = client_servers({"send_addr": slot.ctypes.data, "request_slot_bytes": slot.size})
    routing = route(m.ids, [[0]] * EXPERTS, 1, True)
    missing, scales = ctypes.c_int32(-1), m.scales if m.scales is not None else m.weights
    tables, ids = Tables(1, num_rows, top_k, routing), m.ids.astype(np.int64)
    run("client_pack", ClientPackArgs(
        servers=ctypes.addressof(servers), tables=tables.struct, shape=m.shape,
        hidden=m.hidden.ctypes.data, hidden_stride=m.hidden.strides[0], topk_ids=ids.ctypes.data,
        ids_stride=top_k, id_bytes=8, topk_weights=m.weights.ctypes.data, weights_stride=top_k,
        scales=scales.ctypes.data, scales_stride=scales.shape[1],
        missing_expert=ctypes.addressof(missing),
    ), (1, 2, 4))
    return slot.tobytes()


@settings(deadline=None, max_examples=60)
@given(messages())
def test_what_device_code_writes_is_what_the_document_says(m):
    raw = pack(m)
    head = fields(raw, REQUEST)
    assert raw[:4] == b"EWRQ" and (head.version, head.head_bytes) == (1, 128)
    for name in ("seq", "epoch", "client_id", "layer", "hidden_size", "data_type", "scale_type",
                 "scale_block", "experts_per_row", "num_experts", "reply_mode", "reply_type"):
        assert getattr(head, name) == getattr(m.shape, name), name
    assert head.num_rows == len(m.ids) and head.payload_checksum == 0
    assert not any(getattr(head, name) for name in REQUEST if name.startswith("reserved"))
    assert head.head_checksum == checksum(raw[:120])
    scales = m.scales.tobytes() if m.scales is not None else b""
    assert sections(raw, head) == [m.ids.tobytes(), m.hidden.tobytes(), m.weights.tobytes(), scales]
    assert raw[-16:] == struct.pack("<QQ", m.shape.seq, 0)
    # Python spells the same bytes.
    spelled = request_bytes(m.shape, m.hidden, m.ids, m.weights, m.scales)
    assert raw[: len(spelled)] == spelled


class Guarded:
    """An array between bytes that must stay as they are."""

    def __init__(self, count: int, dtype):
        self.bytes = memory(2 * SPARE + max(count, 1) * np.dtype(dtype).itemsize)
        self.array = self.bytes[SPARE:-SPARE].view(dtype)[:count]
        self.addr = self.bytes.ctypes.data + SPARE

    def check(self) -> None:
        assert (self.bytes[:SPARE] == STALE).all() and (self.bytes[-SPARE:] == STALE).all()


class Server:
    """One slot with these bytes in front of server_poll and server_gather."""

    def __init__(self, m: SimpleNamespace, raw: bytes):
        shape, most = m.shape, MAX_ROWS * TOP_K
        self.recv = memory(len(raw))
        self.recv[:] = np.frombuffer(raw, np.uint8)
        self.reply = Guarded(most * shape.hidden_size * 4 + 80 + 16, np.uint8)
        size = -(-most * shape.hidden_size * 4 // 16) * 16 + 80
        self.slot, self.message, self.status = ServerSlot(), ServerMessage(), KernelStatus()
        self.slot.recv_addr, self.slot.recv_slot_bytes = self.recv.ctypes.data, len(raw)
        self.slot.reply_addr, self.slot.reply_slot_bytes = self.reply.addr, size
        self.slot.client_id, self.slot.open, self.slot.in_place = shape.client_id, 1, 1
        self.slot.max_rows, self.slot.max_pairs = MAX_ROWS, most
        self.found = (ctypes.c_uint32 * 6)()  # messages, rows, pairs, layer, type, arrived
        self.state, local = ctypes.c_uint32(), np.full(EXPERTS, -1, np.int32)
        local[HELD] = range(len(HELD))
        at = [ctypes.addressof(self.found) + 4 * i for i in range(6)]
        slot, message = ctypes.addressof(self.slot), ctypes.addressof(self.message)
        run("server_poll", ServerPollArgs(
            slots=slot, messages=message, slot_state=ctypes.addressof(self.state),
            num_messages=at[0], num_rows=at[1], num_pairs=at[2], layer=at[3],
            model=ServerModel(
                num_layers=LAYERS, hidden_size=shape.hidden_size, num_experts=EXPERTS,
                data_type=m.model_type, max_experts_per_row=TOP_K, allow_fp8=1, scale_block=BLOCK),
            num_slots=1, max_messages=1, max_rows=MAX_ROWS,
        ), (1, 2, 4))
        self.num_rows, self.num_pairs = self.found[1], self.found[2]
        assert self.num_rows <= MAX_ROWS and self.num_pairs <= most
        if not self.found[0]:
            return
        row_bytes = shape.hidden_size * DATA_TYPE_BYTES[shape.data_type]
        self.rows = Guarded(self.num_pairs * row_bytes, np.uint8)
        scales = math.ceil(shape.hidden_size / BLOCK)
        self.scales = Guarded(self.num_pairs * scales, np.float32)
        self.position, self.reply_row, scratch = (
            Guarded(self.num_pairs, np.int32) for _ in range(3))
        offsets, ends = Guarded(len(HELD) + 1, np.uint32), Guarded(len(HELD), np.uint32)
        counts = Guarded(LAYERS * len(HELD), np.uint64)
        counts.array[:] = 0
        run("server_gather", ServerGatherArgs(
            slots=slot, messages=message, local_expert=local.ctypes.data, pair_expert=scratch.addr,
            expert_offsets=offsets.addr, cursor=ends.addr, pair_position=self.position.addr,
            pair_reply_row=self.reply_row.addr, gathered=self.rows.addr,
            gathered_scales=self.scales.addr, expert_rows=counts.addr, num_messages=at[0],
            layer=at[3], num_local=len(HELD), num_experts=EXPERTS, min_rows=1,
        ), (1, 2, 4))
        for table in (self.rows, self.scales, self.position, self.reply_row, scratch, offsets,
                      ends, counts):
            table.check()
        if self.message.reason == Reason.OK:
            assert set(self.position.array) <= set(range(-1, self.num_pairs))


@settings(deadline=None, max_examples=60)
@given(messages())
def test_a_server_reads_what_was_written(m):
    raw = pack(m)
    server = Server(m, raw)
    assert (server.found[0], server.message.reason) == (1, Reason.OK)
    assert bytes(server.message.head) == raw[:128]
    assert (server.num_rows, server.num_pairs) == (len(m.ids), m.ids.size)
    place = server.position.array.reshape(m.ids.shape)
    assert ((place >= 0) == (m.ids >= 0)).all()
    taken = sorted(place[place >= 0].tolist())
    assert taken == list(range(len(taken))), "every pair has a place of its own"
    rows = server.rows.array.reshape(m.ids.size, -1)
    for (row, k), at in np.ndenumerate(place):
        if m.ids[row, k] >= 0:
            assert (rows[at] == m.hidden[row]).all()
            if m.scales is not None:
                assert (server.scales.array.reshape(m.ids.size, -1)[at] == m.scales[row]).all()


@st.composite
def damages(draw, num_bytes: int):
    """Places and what is XORed there: a byte, or some."""
    return draw(st.dictionaries(st.integers(0, num_bytes - 1), st.integers(1, 255), min_size=1,
                                max_size=4))


def damaged(raw: bytes, damage: dict[int, int]) -> bytes:
    out = bytearray(raw)
    for at, change in damage.items():
        out[at] ^= change
    return bytes(out)


@settings(deadline=None, max_examples=100)
@given(messages(), st.data())
def test_any_damage_of_a_request_is_refused_or_stays_within_bounds(m, data):
    raw = pack(m)
    part = data.draw(st.sampled_from(["head", "ids", "anywhere"]))
    if part == "ids":
        at = 128 + 4 * data.draw(st.integers(0, m.ids.size - 1))
        damage = {at + i: v for i, v in data.draw(damages(4)).items()}
    else:
        damage = data.draw(damages(128 if part == "head" else len(raw)))
    raw = damaged(raw, damage)
    server = Server(m, raw)  # checks the bounds
    flag = int.from_bytes(raw[-16:-8], "little")
    if flag == 0:
        assert server.found[0] == 0, "the flag says that nothing is there"
    elif any(at < 128 for at in damage) or flag != m.shape.seq:
        assert server.message.reason not in (Reason.OK, Reason.NOT_HELD), "a head is not believed"
        assert (server.num_rows, server.message.head.num_rows) == (0, 0)
        assert server.message.head.seq == flag
    else:
        ids = np.frombuffer(raw[128 : 128 + m.ids.nbytes], np.int32)
        held = set(ids.tolist()) <= {*HELD, -1}
        assert server.message.reason == (Reason.OK if held else Reason.NOT_HELD)


def reply_to(m: SimpleNamespace) -> bytes:
    """The reply slot that the client gets, its rows being those of the message."""
    server = Server(m, pack(m))
    size = server.slot.reply_slot_bytes
    run("server_reply_in_place", ServerReplyArgs(
        slots=ctypes.addressof(server.slot), messages=ctypes.addressof(server.message),
        status=ctypes.addressof(server.status), found=ctypes.addressof(server.found),
        arrived=ctypes.addressof(server.found) + 20, hidden_size=m.shape.hidden_size,
        output_type=m.shape.reply_type, server_id=77, epoch=2**63 + 5, experts_us=1234,
    ), (3, 2, 4))
    server.reply.check()
    return server.reply.array[:size].tobytes()


def combine(m: SimpleNamespace, raw: bytes) -> tuple[KernelStatus, np.ndarray]:
    slot = memory(len(raw))
    slot[:] = np.frombuffer(raw, np.uint8)
    servers = client_servers({"reply_addr": slot.ctypes.data, "reply_slot_bytes": len(raw)})
    tables = Tables(1, len(m.ids), m.ids.shape[1], route(m.ids, [[0]] * EXPERTS, 1, False))
    output, status = Guarded(m.hidden.size, np.uint8), KernelStatus()
    run("client_combine", ClientCombineArgs(
        servers=ctypes.addressof(servers), tables=tables.struct, shape=m.shape, output=output.addr,
        output_stride=m.hidden.shape[1], status=ctypes.addressof(status), timeout_ns=1,
        output_type=m.shape.reply_type, num_tokens=len(m.ids),
    ), (2, 1, 4))
    output.check()
    return status, output.array.reshape(m.hidden.shape)


@st.composite
def echoes(draw):
    """Messages that can be answered with their own rows, which are numbers."""
    m = draw(messages(types=(1, 2, 3)))
    m.shape.reply_mode, m.shape.reply_type = ReplyMode.SUM, m.shape.data_type
    m.hidden &= 0x3F  # finite in every type
    return m


@settings(deadline=None, max_examples=40)
@given(echoes())
def test_a_reply_is_what_the_document_says_and_is_read_back(m):
    raw = reply_to(m)
    head = fields(raw[-80:-16], REPLY)
    assert raw[-80:-76] == b"EWRP" and (head.version, head.head_bytes) == (1, 64)
    assert (head.seq, head.reason, head.server_id) == (m.shape.seq, 0, 77)
    assert (head.num_rows, head.reply_mode, head.hidden_size, head.reply_type) == (
        len(m.ids), 0, m.shape.hidden_size, m.shape.reply_type)
    assert (head.queue_us, head.experts_us, head.epoch) == (0, 1234, 2**63 + 5)
    assert head.head_checksum == checksum(raw[-80:-24])
    assert raw[: m.hidden.size] == m.hidden.tobytes()
    assert int.from_bytes(raw[-16:-8], "little") == m.shape.seq
    status, output = combine(m, raw)
    assert status.code == 0 and (output == m.hidden).all()


@settings(deadline=None, max_examples=60)
@given(echoes(), st.data())
def test_any_damage_of_a_reply_is_noticed_or_stays_in_its_rows(m, data):
    raw = reply_to(m)
    size = len(raw)
    if data.draw(st.booleans()):
        damage = {size - 80 + i: v for i, v in data.draw(damages(72)).items()}
    else:
        damage = data.draw(damages(m.hidden.size))
    status, output = combine(m, damaged(raw, damage))
    if any(at >= size - 16 for at in damage):
        assert status.code == 3, "without its flag a reply has not come"
    elif any(at >= size - 80 for at in damage):
        assert status.code == 6, "a damaged head is not believed"
    else:
        rows = {at // m.hidden.shape[1] for at in damage}
        whole = [r for r in range(len(m.ids)) if r not in rows]
        assert status.code == 0 and (output[whole] == m.hidden[whole]).all()


@pytest.mark.parametrize("raw", [bytes(56), bytes(range(120))])
def test_the_checksum_is_the_documents(raw):
    native = declare("ew_head_checksum", ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32)
    assert native(raw, len(raw)) == checksum(raw)
