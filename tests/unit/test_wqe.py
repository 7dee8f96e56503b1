"""hca/wqe.py: golden bytes, round trips, refused input."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertwire.hca.wqe import (
    Cqe,
    DataSegment,
    Wqe,
    doorbell_record,
    doorbell_register,
    syndrome_name,
)

QPN, RADDR, RKEY = 0xABCDEF, 0x7E00AABBCCDD, 0x55667788
LADDR, LKEY = 0x7F0011223344, 0x11223344
RADDR_WORDS = "00007e00 aabbccdd 55667788 00000000"


def words(raw: bytes) -> str:
    return raw.hex(" ", 4)


# Printed by libmlx5's own post_send (rdma-core 59 and 65 agree) for these arguments.
GOLDEN = [
    (
        Wqe(0x08, 0, QPN, RADDR, RKEY, (DataSegment(4096, LKEY, LADDR),)),
        f"00000008 abcdef03 00000008 00000000 {RADDR_WORDS} 00001000 11223344 00007f00 11223344",
    ),
    (
        Wqe(0x09, 1, QPN, RADDR, RKEY, (DataSegment(4096, LKEY, LADDR),), imm=0x01020304),
        f"00000109 abcdef03 00000008 01020304 {RADDR_WORDS} 00001000 11223344 00007f00 11223344",
    ),
    (
        Wqe(0x08, 2, QPN, RADDR, RKEY, inline=b"ABCD"),
        f"00000208 abcdef03 00000008 00000000 {RADDR_WORDS} 80000004 41424344 00000000 00000000",
    ),
    (
        Wqe(0x12, 6, QPN, RADDR, RKEY, (DataSegment(8, LKEY, LADDR),),
            atomic=struct.pack(">QQ", 5, 0)),
        f"00000612 abcdef04 00000008 00000000 {RADDR_WORDS} 00000000 00000005 00000000 00000000 "
        "00000008 11223344 00007f00 11223344",
    ),
    (
        Wqe(0x15, 3, QPN, RADDR, RKEY, (DataSegment(4, LKEY, LADDR),),
            atomic=struct.pack(">IIQ", 5, 0, 0), opmod=8),
        f"08000315 abcdef04 00000008 00000000 {RADDR_WORDS} 00000005 00000000 00000000 00000000 "
        "00000004 11223344 00007f00 11223344",
    ),
    (Wqe(0x08, 7, QPN, RADDR, RKEY), f"00000708 abcdef02 00000008 00000000 {RADDR_WORDS}"),
    (Wqe(0x00, 9, QPN), "00000900 abcdef01 00000008 00000000"),
]


@pytest.mark.parametrize(("wqe", "want"), GOLDEN)
def test_golden_bytes(wqe, want):
    assert words(wqe.encode()) == want


@pytest.mark.parametrize(("length", "num_segments"), [(12, 3), (13, 4), (28, 4), (29, 5)])
def test_inline_lengths(length, num_segments):
    raw = Wqe(0x08, 0, QPN, RADDR, RKEY, inline=b"x" * length).encode()
    assert len(raw) == 16 * num_segments and raw[7] == num_segments


def test_doorbells():
    assert words(doorbell_record(1)) == "00000000 00000001"
    assert words(doorbell_record(0x12345)) == "00000000 00002345"
    assert words(doorbell_register(1, QPN)) == "00000100 abcdef00"
    assert words(doorbell_register(0x1FFFF, QPN)) == "00ffff00 abcdef00"


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
data_segments = st.builds(DataSegment, st.integers(0, 2**31 - 1), u32, u64)
common = dict(
    index=st.integers(0, 0xFFFF), qpn=st.integers(0, 0xFFFFFF), fm_ce_se=st.integers(0, 255),
    imm=u32,
)
transfers = st.builds(
    Wqe, opcode=st.sampled_from([0x08, 0x09, 0x10]), raddr=u64, rkey=u32,
    data=st.lists(data_segments, max_size=10).map(tuple), opmod=st.integers(0, 255), **common,
)
inlines = st.builds(
    Wqe, opcode=st.sampled_from([0x08, 0x09]), raddr=u64, rkey=u32,
    inline=st.binary(max_size=300), opmod=st.integers(0, 255), **common,
)
atomics = st.builds(
    Wqe, opcode=st.sampled_from([0x11, 0x12, 0x15]), raddr=u64, rkey=u32,
    atomic=st.binary(min_size=16, max_size=16), data=st.tuples(data_segments),
    opmod=st.sampled_from([0, 8, 9]), **common,
)
wide_swaps = st.builds(
    Wqe, opcode=st.just(0x14), raddr=u64, rkey=u32, atomic=st.binary(min_size=32, max_size=32),
    data=st.tuples(data_segments), opmod=st.just(9), **common,
)
local = st.builds(
    Wqe, opcode=st.sampled_from([0x00, 0x23]), data=st.lists(data_segments, max_size=4).map(tuple),
    opmod=st.integers(0, 255), **common,
)


@given(st.one_of(transfers, inlines, atomics, wide_swaps, local), st.binary(max_size=64))
def test_round_trip(wqe, slot_rest):
    raw = wqe.encode()
    assert len(raw) % 16 == 0
    decoded = Wqe.decode(raw + slot_rest)
    assert decoded.num_segments == len(raw) // 16
    for name in (
        "opcode", "index", "qpn", "raddr", "rkey", "data", "inline", "atomic", "opmod", "fm_ce_se",
        "imm",
    ):
        assert getattr(decoded, name) == getattr(wqe, name), name
    assert decoded.encode() == raw


@given(st.binary(min_size=64, max_size=1008))
def test_any_bytes_decode_or_are_refused(raw):
    try:
        wqe = Wqe.decode(raw)
    except ValueError:
        return
    assert 0 <= wqe.num_segments <= 63 and wqe.name


@pytest.mark.parametrize("raw", [b"", b"\0" * 15, GOLDEN[0][0].encode()[:47]])
def test_cut_off_entries_are_refused(raw):
    with pytest.raises(ValueError, match="bytes"):
        Wqe.decode(raw)


@pytest.mark.parametrize("opcode", [0x11, 0x12, 0x14, 0x15])
def test_atomics_without_their_operands_are_refused(opcode):
    """The bytes behind the entry belong to the next one."""
    raw = struct.pack(">IIII", 9 << 24 | opcode, QPN << 8 | 2, 8, 0) + b"\0" * 112
    with pytest.raises(ValueError, match="cut off"):
        Wqe.decode(raw)


def test_inline_length_beyond_the_entry_is_refused():
    raw = bytearray(Wqe(0x08, 0, QPN, RADDR, RKEY, inline=b"x" * 12).encode() + b"\0" * 64)
    raw[35] = 13
    with pytest.raises(ValueError, match="inline"):
        Wqe.decode(bytes(raw))


@given(
    st.integers(0, 15), st.integers(0, 1), st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFF),
    st.integers(0, 255), u32, st.integers(0, 255), u32,
)
def test_completion_fields(opcode, owner, counter, qpn, send_opcode, count, syndrome, imm):
    raw = bytearray(64)
    raw[36:40] = imm.to_bytes(4, "big")
    raw[44:48] = count.to_bytes(4, "big")
    raw[55] = syndrome
    raw[56:60] = (send_opcode << 24 | qpn).to_bytes(4, "big")
    raw[60:62] = counter.to_bytes(2, "big")
    raw[63] = opcode << 4 | owner
    cqe = Cqe.decode(bytes(raw))
    assert (cqe.opcode, cqe.owner, cqe.wqe_counter, cqe.qpn) == (opcode, owner, counter, qpn)
    assert (cqe.send_opcode, cqe.byte_count, cqe.imm) == (send_opcode, count, imm)
    assert cqe.is_error == (opcode in (13, 14))
    assert cqe.syndrome == (syndrome if cqe.is_error else 0)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_completions_have_64_bytes(length):
    with pytest.raises(ValueError, match="64"):
        Cqe.decode(b"\0" * length)


def test_every_syndrome_has_a_name():
    assert syndrome_name(0x05).startswith("flushed")
    assert "does not answer" in syndrome_name(0x15)
    assert syndrome_name(0x7F) == "general error"
