"""Entries and doorbells against GPUNetIO's device headers: we write and execute what they write."""

from __future__ import annotations

import json
import struct

import pytest

from expertwire.hca.wqe import DataSegment, Wqe, doorbell_record, doorbell_register
from tests.conformance.rig import (
    ATOMIC_CS,
    ATOMIC_FA,
    MASKED_CS,
    MASKED_FA,
    READ,
    WRITE,
    WRITE_IMM,
    Rig,
)
from tests.oracles import gpunetio, unavailable
from tests.queue_pair import ADD4, ADD8, GET, INLINE, PUT_ALWAYS_POST, BareQp

GOLDEN = json.loads(gpunetio.GOLDEN.read_text())["bytes"]
QPN, LKEY, RKEY, REMOTE, LOCAL = 0xABCDEF, 0x11223344, 0x55667788, 0x7E00AABBCCDD, 0x7F0011223344
VALUE = 0x0102030405060708  # what the peer's word holds
TEXT = b"0123456789abcdefghijklmnopqr"


def entry(opcode, index, data=(), **fields) -> Wqe:
    segments = tuple(DataSegment(count, LKEY, LOCAL + at) for at, count in data)
    return Wqe(opcode, index, QPN, REMOTE, RKEY, segments, **fields)


def words(*values) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def longs(*values) -> bytes:
    return struct.pack(f">{len(values)}Q", *values)


OURS = {
    "nop": Wqe(0x00, 1, QPN),
    "write": entry(WRITE, 2, [(0, 4096)]),
    "write_imm": entry(WRITE_IMM, 0xFFFF, [(0, 4096)], imm=0x01020304),
    "write_two": entry(WRITE, 3, [(0, 4096), (4096, 100)]),
    "read": entry(READ, 4, [(0, 16)]),
    "fetch_add": entry(ATOMIC_FA, 5, [(0, 8)], atomic=longs(5, 5)),
    "compare_swap": entry(
        ATOMIC_CS, 6, [(0, 8)], atomic=longs(0x99AABBCCDDEEFF00, VALUE)),
    "masked_fetch_add_4": entry(MASKED_FA, 7, [(0, 4)], opmod=8, atomic=words(5, 0, 0, 0)),
    "masked_fetch_add_8": entry(
        MASKED_FA, 8, [(0, 8)], opmod=9, atomic=longs(0x0102030405060708, 0)),
    "masked_compare_swap_4": entry(
        MASKED_CS, 9, [(0, 4)], opmod=8,
        atomic=words(0x11111111, 0x22222222, 0x33333333, 0x44444444)),
    "masked_compare_swap_8": entry(
        MASKED_CS, 10, [(0, 8)], opmod=9, atomic=longs(
            0x1111111111111111, 0x2222222222222222, 0x3333333333333333, 0x4444444444444444)),
    "dump": Wqe(0x23, 11, QPN, data=(DataSegment(8, LKEY, LOCAL),)),
    **{f"inline_{n}": entry(WRITE, 12, inline=TEXT[:n]) for n in (1, 4, 8, 12, 13, 28)},
}


# The peer's word after the atomic. The masked swaps compare bits 0x44.. with 0x22..: no match.
AFTER = {
    "fetch_add": VALUE + 5, "compare_swap": 0x99AABBCCDDEEFF00, "masked_fetch_add_4": VALUE + 5,
    "masked_fetch_add_8": 2 * VALUE, "masked_compare_swap_4": VALUE,
    "masked_compare_swap_8": VALUE,
}


def defined(raw: bytes) -> bytes:
    """The entry without what writers leave uninitialised: stream id, unused immediate, padding."""
    opcode, segments, opmod = raw[3], raw[7] & 0x3F, raw[0]
    keep = bytearray(raw[: 16 * segments])
    keep[8:11] = bytes(3)
    if opcode != WRITE_IMM:
        keep[12:16] = bytes(4)
    if opcode not in (0x00, 0x23):
        keep[28:32] = bytes(4)
    if opcode == MASKED_FA and opmod == 8:
        keep[40:48] = bytes(8)
    if opcode == WRITE and keep[32] & 0x80:
        keep = keep[: 36 + int.from_bytes(keep[33:36], "big")]
    return bytes(keep)


@pytest.mark.parametrize("name", OURS)
def test_codec_writes_the_same_entries(name):
    golden = bytes.fromhex(GOLDEN[name])
    assert defined(OURS[name].encode()) == defined(golden)
    decoded = Wqe.decode(golden)
    assert (decoded.name, decoded.index, decoded.qpn) == (OURS[name].name, OURS[name].index, QPN)


def test_every_reference_entry_has_its_counterpart():
    assert {n for n in GOLDEN if not n.startswith(("record_", "register_"))} == set(OURS)


@pytest.mark.parametrize(("name", "operation"), [
    ("write", dict(op=PUT_ALWAYS_POST, num_bytes=4096)),
    ("read", dict(op=GET, num_bytes=16)),
    ("masked_fetch_add_4", dict(op=ADD4, value=5)),
    ("masked_fetch_add_8", dict(op=ADD8, value=0x0102030405060708)),
    ("inline_1", dict(op=INLINE, num_bytes=1, value=int.from_bytes(TEXT[:1], "little"))),
    ("inline_4", dict(op=INLINE, num_bytes=4, value=int.from_bytes(TEXT[:4], "little"))),
    ("inline_8", dict(op=INLINE, num_bytes=8, value=int.from_bytes(TEXT[:8], "little"))),
])
def test_device_code_writes_the_same_entries(name, operation):
    golden = bytes.fromhex(GOLDEN[name])
    index = int.from_bytes(golden[1:3], "big")
    qp = BareQp(64, [(LOCAL, LOCAL + 8192, LKEY)], [(REMOTE, REMOTE + 8192, RKEY)], start=index)
    qp.state.scratch_addr, qp.state.scratch_lkey_be = LOCAL, int.from_bytes(words(LKEY), "little")
    (status,) = qp.run([dict(operation, remote_addr=REMOTE, local_addr=LOCAL)])
    assert status.code == 0
    assert defined(qp.wqe(index)) == defined(golden)


@pytest.mark.parametrize("next_idx", [1, 0xFFFF, 0x10000, 0x12345])
def test_doorbells(next_idx):
    """The register's top byte holds index bits 16 to 23 there, 0 here: the adapter ignores it."""
    record, register = (
        bytes.fromhex(GOLDEN[f"{kind}_{next_idx:x}"]) for kind in ("record", "register")
    )
    assert doorbell_record(next_idx)[4:] == record
    assert doorbell_register(next_idx, QPN)[1:] == register[1:]
    qp = BareQp(64, [(LOCAL, LOCAL + 64, LKEY)], [(REMOTE, REMOTE + 64, RKEY)],
                start=next_idx - 1)
    qp.run([dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)])
    assert bytes(qp.dbrec)[4:] == record and qp.register[1:] == register[1:]


@pytest.mark.parametrize("name", OURS)
def test_the_software_hca_executes_the_reference_entries(name):
    """The bytes as they are; only number, keys and addresses become those of a real pair."""
    with Rig() as rig:
        rig.fill(0, b"\x5a" * 8192)
        rig.fill_remote(0, struct.pack("<QQ", VALUE, 0))
        rig.window.post_recv(1)
        raw = bytes.fromhex(GOLDEN[name])
        raw = raw[: 16 * (raw[7] & 0x3F)]
        for old, new in [
            (longs(LOCAL), longs(rig.local.addr)),
            (longs(LOCAL + 4096), longs(rig.local.addr + 4096)),
            (longs(REMOTE), longs(rig.remote.addr)),
            (words(RKEY), words(rig.rkey)), (words(LKEY), words(rig.lkey)),
        ]:
            raw = raw.replace(old, new)
        raw = raw[:1] + b"\0\0" + raw[3:4] + rig.qp.info.qpn.to_bytes(3, "big") + raw[7:]
        rig.next_idx += rig.place(raw)
        rig.ring()
        rig.run()
        assert rig.error() == 0 and rig.cqe().opcode == 0
        remote, (result,) = rig.at_remote(0, 4196), struct.unpack("<Q", rig.at_local(0, 8))
        (value,) = struct.unpack("<Q", remote[:8])
        if name.startswith("inline"):
            assert remote[: int(name[7:])] == TEXT[: int(name[7:])]
        elif name in ("write", "write_imm", "write_two"):
            count = 4196 if name == "write_two" else 4096
            assert remote[:count] == b"\x5a" * count
        elif name in AFTER:
            assert value == AFTER[name]
            four_bytes = name.endswith("_4")  # their results land big-endian
            low = int.from_bytes((VALUE & 0xFFFFFFFF).to_bytes(4, "big"), "little")
            got, want = (result & 0xFFFFFFFF, low) if four_bytes else (result, VALUE)
            assert got == want
        elif name == "read":
            assert rig.at_local(0, 16) == remote[:16]
        if name == "write_imm":
            assert rig.window.poll_recv()[36:40] == b"\1\2\3\4"


def test_the_headers_still_write_these_bytes(request):
    """Live, where a wheel with the headers is installed (extra `oracles`)."""
    found = gpunetio.find_headers()
    if found is None:
        unavailable(request, "no NCCL wheel with GPUNetIO headers (extra `oracles`)")
    fresh = gpunetio.reference_bytes(found[0])
    assert fresh.keys() == GOLDEN.keys()
    for name, raw in fresh.items():
        if name in OURS:
            assert defined(bytes.fromhex(raw)) == defined(bytes.fromhex(GOLDEN[name])), name
        else:
            assert raw == GOLDEN[name], name
