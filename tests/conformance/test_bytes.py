"""Checks 1 to 10: the bytes of entries and doorbells. Numbers are those of docs/hca.md."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace

import pytest

from expertwire.hca.wqe import Cqe, DataSegment, Wqe, doorbell_register
from tests.conformance.rig import (
    DUMP,
    LOCAL_LENGTH,
    LOCAL_PROTECTION,
    LOCAL_QP_OPERATION,
    NOP,
    WRITE,
    DeviceRig,
    Rig,
)
from tests.queue_pair import ADD4, ADD8, GET, INLINE, PUT_ALWAYS_POST, SIGNAL_IMM, BareQp

LOCAL, REMOTE, QPN, LKEY, RKEY = 0x7F0011223344, 0x7E00AABBCCDD, 0xABCDEF, 0x11223344, 0x55667788


def bare(**options) -> BareQp:
    qp = BareQp(
        64, [(LOCAL, LOCAL + (1 << 20), LKEY)], [(REMOTE, REMOTE + (1 << 20), RKEY)], **options
    )
    qp.state.scratch_addr = LOCAL
    qp.state.scratch_lkey_be = int.from_bytes(LKEY.to_bytes(4, "big"), "little")
    return qp


SINK4, SINK8 = (DataSegment(n, LKEY, LOCAL) for n in (4, 8))
FROM_DEVICE = {
    "write": (
        dict(op=PUT_ALWAYS_POST, num_bytes=4096),
        Wqe(0x08, 0, QPN, REMOTE, RKEY, (DataSegment(4096, LKEY, LOCAL),)),
    ),
    "inline": (
        dict(op=INLINE, value=0x44434241, num_bytes=4),
        Wqe(0x08, 0, QPN, REMOTE, RKEY, inline=b"ABCD"),
    ),
    "add4": (
        dict(op=ADD4, value=5),
        Wqe(0x15, 0, QPN, REMOTE, RKEY, (SINK4,), None, b"\0\0\0\5".ljust(16, b"\0"), 8),
    ),
    "add8": (
        dict(op=ADD8, value=5),
        Wqe(0x15, 0, QPN, REMOTE, RKEY, (SINK8,), None, b"\5".rjust(8, b"\0").ljust(16, b"\0"), 9),
    ),
    "read": (
        dict(op=GET, num_bytes=16),
        Wqe(0x10, 0, QPN, REMOTE, RKEY, (DataSegment(16, LKEY, LOCAL),)),
    ),
    "write_imm": (
        dict(op=SIGNAL_IMM, value=0x01020304),
        Wqe(0x09, 0, QPN, REMOTE, RKEY, imm=0x01020304),
    ),
}


@pytest.mark.parametrize("kind", FROM_DEVICE)
def test_01_device_code_and_python_write_the_same_bytes(kind):
    """Two spellings of mlx5dv.h, made apart from each other. Other encoders: see docs/hca.md."""
    operation, wqe = FROM_DEVICE[kind]
    qp = bare()
    (status,) = qp.run([dict(remote_addr=REMOTE, local_addr=LOCAL, **operation)])
    assert status.code == 0
    want = wqe.encode()
    assert qp.wqe(0)[: len(want)] == want


CTRL_FIELDS = [  # name, first bit from the left of the ctrl segment, width
    ("opmod", 0, 8), ("index", 8, 16), ("opcode", 24, 8), ("qpn", 32, 24), ("num_segments", 58, 6),
    ("fm_ce_se", 88, 8), ("imm", 96, 32),
]


@pytest.mark.parametrize(("name", "first", "width"), CTRL_FIELDS)
def test_02_walking_ones_through_every_ctrl_field(name, first, width):
    zero = dict(opcode=0, index=0, qpn=0, opmod=0, fm_ce_se=0, imm=0, num_segments=1)
    base = int.from_bytes(Wqe(**zero).encode()[:16], "big")
    for bit in range(width):
        fields = {**zero, name: 1 << bit}
        word = int.from_bytes(Wqe(**fields).encode()[:16], "big")
        if name == "num_segments":
            base = 0
        assert word & ~base == 1 << (127 - first - (width - 1 - bit)), f"{name} bit {bit}"


@pytest.mark.parametrize("bit", range(64))
def test_02_walking_ones_through_addresses_keys_and_counts(bit):
    one = 1 << bit
    raw = Wqe(8, 0, 1, raddr=one, rkey=one & 0xFFFFFFFF,
              data=(DataSegment(one & 0x7FFFFFFF, one & 0xFFFFFFFF, one),)).encode()
    assert raw[16:24] == one.to_bytes(8, "big")
    assert raw[24:28] == (one & 0xFFFFFFFF).to_bytes(4, "big")
    assert raw[28:32] == b"\0" * 4
    assert raw[32:36] == (one & 0x7FFFFFFF).to_bytes(4, "big")
    assert raw[36:40] == (one & 0xFFFFFFFF).to_bytes(4, "big")
    assert raw[40:48] == one.to_bytes(8, "big")


CQE_FIELDS = [  # name, first bit from the left of the completion, width
    ("imm", 288, 32), ("byte_count", 352, 32), ("send_opcode", 448, 8), ("qpn", 456, 24),
    ("wqe_counter", 480, 16), ("opcode", 504, 4), ("owner", 511, 1),
]


@pytest.mark.parametrize(("name", "first", "width"), CQE_FIELDS)
def test_02_walking_ones_through_every_completion_field(name, first, width):
    nothing = Cqe.decode(bytes(64))
    for bit in range(width):
        raw = (1 << (511 - first - (width - 1 - bit))).to_bytes(64, "big")
        assert Cqe.decode(raw) == replace(nothing, **{name: 1 << bit}), f"{name} bit {bit}"


def test_02_engine_compares_every_bit_of_the_queue_number():
    for bit in range(24):
        with Rig() as rig:
            rig.post(rig.wqe(NOP, qpn=rig.qp.info.qpn ^ (1 << bit)))
            rig.run()
            assert rig.error() == LOCAL_QP_OPERATION, f"bit {bit}"


def test_03_keys_are_not_swapped_twice():
    """Tables hold big-endian keys; the device stores them as they are, the engine reads them so."""
    with DeviceRig() as rig:
        rig.fill(0, b"payload!")
        (status,) = rig.launch([[rig.operation(PUT_ALWAYS_POST, 64, 0, num_bytes=8)]])
        rig.run()
        assert status.code == 0 and rig.at_remote(64, 8) == b"payload!"
        wqe = Wqe.decode(ctypes.string_at(rig.qp.info.sq_addr, 64))
        assert (wqe.rkey, wqe.data[0].lkey) == (rig.rkey, rig.lkey)
    with Rig() as rig:
        swapped = int.from_bytes(rig.rkey.to_bytes(4, "big"), "little")
        if swapped != rig.rkey:
            assert rig.do(rig.write(rkey=swapped)).is_error


@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 12, 13, 28, 29, 256, 972])
def test_04_inline_data(num_bytes):
    payload = bytes(1 + i % 251 for i in range(num_bytes))
    with Rig() as rig:
        rig.fill_remote(0, b"\xee" * 2048)
        wqe = rig.inline(512, payload)
        num_segments = 2 + -(-(4 + num_bytes) // 16)
        assert len(wqe.encode()) == 16 * num_segments
        cqe = rig.do(wqe, rig.wqe(NOP))
        assert not cqe.is_error and cqe.wqe_counter == -(-num_segments // 4)
        assert rig.at_remote(512, num_bytes) == payload
        assert rig.at_remote(511, 1) + rig.at_remote(512 + num_bytes, 1) == b"\xee\xee"


def test_04_inline_bytes_after_the_length_are_ignored():
    with Rig() as rig:
        raw = bytearray(rig.inline(0, b"abc").encode())
        raw[39:48] = b"\x5a" * 9
        rig.next_idx += rig.place(bytes(raw))
        rig.ring()
        rig.run()
        assert rig.error() == 0 and rig.at_remote(0, 8) == b"abc" + b"\0" * 5


def test_04_inline_length_beyond_the_entry_is_refused():
    with Rig() as rig:
        raw = bytearray(rig.inline(0, b"x" * 12).encode())
        raw[35] = 13
        rig.next_idx += rig.place(bytes(raw))
        rig.ring()
        rig.run()
        assert rig.error() == LOCAL_QP_OPERATION and rig.at_remote(0, 16) == b"\0" * 16


@pytest.mark.parametrize("num_segments", range(1, 20))
def test_05_length_in_segments(num_segments):
    """ctrl + raddr + pointers; the next entry starts at the next 64-byte block."""
    with Rig() as rig:
        rig.fill(0, bytes(range(1, 65)))
        num_data = num_segments - 2
        if num_data < 0:
            wqe = rig.wqe(NOP)
        else:
            wqe = rig.write(256, data=tuple(rig.segment(3 * i, 3) for i in range(num_data)))
        assert len(wqe.encode()) == 16 * num_segments
        cqe = rig.do(wqe, rig.wqe(NOP))
        assert not cqe.is_error and cqe.wqe_counter == -(-num_segments // 4)
        num_bytes = 3 * max(num_data, 0)
        assert rig.at_remote(256, num_bytes + 1) == bytes(range(1, num_bytes + 1)) + b"\0"


def test_05_length_zero_is_refused_and_a_write_needs_its_address():
    with Rig() as rig:
        raw = bytearray(rig.wqe(NOP).encode())
        raw[7] = 0
        rig.next_idx += rig.place(bytes(raw))
        rig.ring()
        rig.run()
        assert rig.error() == LOCAL_QP_OPERATION
    with Rig() as rig:
        rig.do(rig.wqe(WRITE))
        assert rig.error() == LOCAL_QP_OPERATION


def test_05_largest_entry_of_63_segments():
    with Rig() as rig:
        rig.fill(0, bytes(range(1, 62)))
        wqe = rig.write(0, data=tuple(rig.segment(i, 1) for i in range(61)))
        assert not rig.do(wqe, rig.wqe(NOP)).is_error
        assert rig.at_remote(0, 62) == bytes(range(1, 62)) + b"\0"


def test_06_zero_byte_write_has_two_segments_and_touches_nothing():
    with Rig() as rig:
        wqe = rig.write(raddr=1, rkey=0, data=())
        assert len(wqe.encode()) == 32
        cqe = rig.do(wqe)
        assert (cqe.opcode, cqe.byte_count, cqe.send_opcode) == (0, 0, WRITE)


def test_06_end_of_list_key_ends_the_segments():
    with Rig() as rig:
        rig.fill(0, b"abcdefgh")
        end = DataSegment(0, 0x100, 0)
        assert not rig.do(rig.write(data=(rig.segment(0, 4), end, rig.segment(4, 4)))).is_error
        assert rig.at_remote(0, 8) == b"abcd" + b"\0" * 4


def test_06_byte_count_zero_means_two_gib():
    """INFERRED: refused here, as the message is longer than the queue pair allows."""
    with Rig() as rig:
        rig.do(rig.write(data=(rig.segment(0, 0),)))
        assert rig.error() in (LOCAL_LENGTH, LOCAL_PROTECTION)


@pytest.mark.parametrize("num_bytes", [1, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, (5 << 29) + 3])
def test_07_pointer_segments_never_carry_bit_31(num_bytes):
    qp = BareQp(16, [(1 << 40, 1 << 41, 1)], [(1 << 42, 1 << 43, 2)])
    qp.run([dict(op=PUT_ALWAYS_POST, remote_addr=1 << 42, local_addr=1 << 40, num_bytes=num_bytes)])
    counts = [int.from_bytes(qp.wqe(i)[32:36], "big") for i in range(qp.rung)]
    assert sum(counts) == num_bytes and max(counts) <= 1 << 30


@pytest.mark.parametrize("form", ["index only", "last entry", "24-bit index", "second buffer"])
def test_08_every_doorbell_form_is_accepted(form):
    """The record stays behind, so that only the register can have announced the entries."""
    with Rig() as rig:
        wqes = [replace(rig.wqe(NOP), index=i) for i in range(3)]
        rig.post(*wqes, ring=False)
        qpn = rig.qp.info.qpn
        if form == "index only":
            rig.set_register(3)
        elif form == "last entry":  # its own index: all but itself, the record covers the rest
            rig.set_record(3)
            rig.set_register(0, raw=wqes[2].encode()[:8])
        elif form == "24-bit index":  # bits 16 to 23 of a 64-bit index land in the opmod byte
            rig.set_register(0, raw=struct.pack(">II", 0xAB0003 << 8, qpn << 8))
        else:
            rig.set_register(3, at=0x900)
        rig.run()
        assert rig.qp.indices() == (3, 3) and rig.cqe().wqe_counter == 2


def test_08_opcode_and_length_bytes_of_a_doorbell_are_ignored():
    with Rig() as rig:
        rig.post(rig.wqe(NOP), rig.wqe(NOP), ring=False)
        raw = bytearray(doorbell_register(2, rig.qp.info.qpn))
        raw[0], raw[3], raw[7] = 0xFF, 0xFF, 0x3F
        rig.set_register(0, raw=bytes(raw))
        rig.run()
        assert rig.qp.indices() == (2, 2)


def test_08_doorbell_of_another_queue_is_ignored():
    with Rig() as rig:
        rig.post(rig.wqe(NOP), ring=False)
        rig.set_register(0, raw=doorbell_register(1, rig.qp.info.qpn + 1))
        assert rig.run() == 0
        rig.set_register(1)
        rig.run()
        assert rig.qp.indices() == (1, 1)


def test_09_only_word_1_of_the_doorbell_record_counts():
    with Rig() as rig:
        record = (ctypes.c_uint32 * 2).from_address(rig.qp.info.dbrec_addr)
        rig.post(rig.wqe(NOP), ring=False)
        record[0] = 0x01000000  # be32 1
        assert rig.run() == 0
        rig.set_record(1)
        rig.run()
        assert rig.qp.indices() == (1, 1)
        assert record[0] == 0x01000000, "the engine does not touch the receive counter"


def test_09_high_half_of_the_record_is_ignored():
    with Rig() as rig:
        rig.post(rig.wqe(NOP), ring=False)
        record = (ctypes.c_uint32 * 2).from_address(rig.qp.info.dbrec_addr)
        record[1] = int.from_bytes((0xFFFF0001).to_bytes(4, "big"), "little")
        rig.run()
        assert rig.qp.indices() == (1, 1)


def test_10_whole_entry_through_the_register():
    """BlueFlame as libmlx5 does it: record first, then the entry itself into the register."""
    with Rig() as rig:
        wqe = rig.inline(0, b"blueflame")
        rig.post(wqe, ring=False)
        rig.set_record(1)
        rig.set_register(0, raw=wqe.encode().ljust(64, b"\0"))
        rig.run()
        assert rig.at_remote(0, 9) == b"blueflame" and rig.qp.indices() == (1, 1)


@pytest.mark.parametrize("buffer", [0x800, 0x900])
@pytest.mark.parametrize("num_bytes", [28, 29, 156, 220])
def test_10_whole_entry_of_up_to_four_blocks_in_either_buffer(buffer, num_bytes):
    """Also one that the end of the ring cuts; what the register is left with rings nothing."""
    with Rig(16) as rig:
        rig.do(*[rig.wqe(NOP) for _ in range(15)])
        wqe, payload = rig.inline(0, bytes(range(1, 1 + num_bytes))), bytes(range(1, 1 + num_bytes))
        first = rig.post(wqe, ring=False)
        rig.set_record(rig.next_idx)
        whole = replace(wqe, index=first).encode().ljust(64 * (rig.next_idx - first), b"\0")
        rig.set_register(0, raw=whole, at=buffer)
        rig.run()
        assert rig.at_remote(0, num_bytes + 1) == payload + b"\0" and rig.cqe().wqe_counter == first
        assert rig.qp.indices() == (rig.next_idx, rig.next_idx) and rig.error() == 0
        assert rig.do(rig.inline(512, b"next")).wqe_counter == rig.next_idx - 1
        assert rig.at_remote(512, 4) == b"next"


ACCEPTED = {NOP, WRITE, 0x09, 0x10, 0x11, 0x12, 0x14, 0x15, DUMP}


@pytest.mark.parametrize("opcode", sorted({*range(64), 0xFF} - ACCEPTED))
def test_10_other_opcodes_are_refused(opcode):
    """INFERRED syndrome."""
    with Rig() as rig:
        cqe = rig.do(rig.write(opcode=opcode))
        assert cqe.is_error and rig.error() == LOCAL_QP_OPERATION


def test_10_undefined_bytes_are_ignored():
    """Signature and stream id, imm of entries that have none, tail of a 4-byte atomic."""
    with Rig() as rig:
        raw = bytearray(rig.inline(0, b"x").encode())
        raw[8:11], raw[12:16], raw[28:32] = b"\xee" * 3, b"\xee" * 4, b"\xee" * 4
        rig.next_idx += rig.place(bytes(raw))
        rig.ring()
        rig.run()
        assert rig.error() == 0 and rig.at_remote(0, 1) == b"x"
        add = (5).to_bytes(4, "big") + b"\0" * 4 + b"\xee" * 8
        rig.fill_remote(8, (7).to_bytes(4, "little"))
        assert not rig.do(rig.atomic(0x15, add, 8, sink_bytes=4, opmod=8)).is_error
        assert rig.at_remote(8, 4) == (12).to_bytes(4, "little")
        half_nop = bytearray(rig.wqe(NOP, num_segments=2).encode().ljust(64, b"\xee"))
        rig.next_idx += rig.place(bytes(half_nop))
        rig.ring()
        rig.run()
        assert rig.error() == 0


def test_10_dump_reads_locally_and_sends_nothing():
    with Rig() as rig:
        assert not rig.do(rig.wqe(DUMP, data=(rig.segment(0, 64),))).is_error
        assert rig.at_remote(0, 64) == b"\0" * 64
        rig.do(rig.wqe(DUMP, data=(rig.segment(0, 1 << 17),)))
        assert rig.error() == LOCAL_PROTECTION
