"""What an adapter would refuse of one entry; where it can, the software HCA says so too."""

from __future__ import annotations

import struct

import pytest
from tests.soft_hca_rig import Rig

from expertwire.hca.check import MAX_MESSAGE_BYTES, check_entry, num_blocks
from expertwire.hca.wqe import DataSegment, Wqe

QPN, RADDR, RKEY, LADDR, LKEY = 0x000101, 0x7E00AABBCCD0, 0x55667788, 0x7F0011223340, 0x11223344
WORD = (DataSegment(8, LKEY, LADDR),)
HALF = (DataSegment(4, LKEY, LADDR),)


def verdict(wqe, *, index=None, left=64, patch=()):
    """patch: (offset, byte) pairs put over the encoded entry."""
    raw = bytearray(wqe.encode().ljust(64, b"\0"))
    for at, value in patch:
        raw[at] = value
    return check_entry(bytes(raw), wqe.index if index is None else index, QPN, left)


def write(index=5, **fields):
    fields = {"raddr": RADDR, "rkey": RKEY, "data": WORD, **fields}
    return Wqe(0x08, index, QPN, **fields)


def atomic(opcode=0x12, raddr=RADDR, data=WORD, opmod=0, size=16, **fields):
    return Wqe(opcode, 5, QPN, raddr, RKEY, data, atomic=bytes(size), opmod=opmod, **fields)


GOOD = {
    "write": write(), "last index": write(0xFFFF), "wrapped index": write(0x12345),
    "zero-byte write": write(data=()), "largest": write(data=(DataSegment(1 << 30, LKEY, LADDR),)),
    "two segments": write(data=(DataSegment(4096, LKEY, LADDR), DataSegment(4, LKEY, LADDR))),
    "inline": write(data=(), inline=b"abcd"), "inline of 28": write(data=(), inline=bytes(28)),
    "inline over two blocks": write(data=(), inline=bytes(29)),
    "list that ends": write(data=(*WORD, DataSegment(0, 0x100, 0))),
    "immediate": Wqe(0x09, 5, QPN, RADDR, RKEY, WORD, imm=7),
    "read": Wqe(0x10, 5, QPN, RADDR, RKEY, WORD), "nop": Wqe(0, 5, QPN),
    "send": Wqe(0x0A, 5, QPN, data=WORD), "fetch-add": atomic(), "compare-swap": atomic(0x11),
    "masked add of 4": atomic(0x15, data=HALF, opmod=8, raddr=RADDR + 4),
    "masked add of 8": atomic(0x15, opmod=9),
    "masked swap of 8, two blocks": atomic(0x14, opmod=9, size=32),
}


@pytest.mark.parametrize("wqe", GOOD.values(), ids=GOOD)
def test_what_adapters_take_is_not_refused(wqe):
    found = verdict(wqe)
    assert (found.refused, found.ignored) == ([], [])


BAD = {
    "wrong index 4: this place is entry 5": dict(wqe=write(4), index=5),
    "wrong index 5: this place is entry 6": dict(wqe=write(5), index=0x10006),
    "wrong QPN 0x000102": dict(wqe=write(), patch=[(6, 2)]),
    "bad opcode 0x3f": dict(wqe=write(), patch=[(3, 0x3F)]),
    "DS is 0": dict(wqe=write(), patch=[(7, 0)]),
    "DS 8 is too large: 2 blocks, and 1": dict(wqe=write(), patch=[(7, 8)], left=1),
    "DS 63 is too large: 16 blocks, and 15": dict(wqe=write(), patch=[(7, 63)], left=15),
    "DS 1 is too small: the remote": dict(wqe=write(), patch=[(7, 1)]),
    "reserved bits 0x40 beside DS": dict(wqe=write(), patch=[(7, 0x43)]),
    "reserved bits 0x01 of fm_ce_se": dict(wqe=write(fm_ce_se=9)),
    "reserved bits 0x10 of fm_ce_se": dict(wqe=write(fm_ce_se=0x18)),
    "opmod 1 where only 0": dict(wqe=write(opmod=1)),
    "reserved word 0x1 after the rkey": dict(wqe=write(), patch=[(31, 1)]),
    "byte count 0 means 2^31": dict(wqe=write(data=(DataSegment(0, LKEY, LADDR),))),
    "1073741825 bytes; a message has 2^30":
        dict(wqe=write(data=(DataSegment(MAX_MESSAGE_BYTES, LKEY, LADDR),
                             DataSegment(1, LKEY, LADDR)))),
    "the local range goes beyond": dict(wqe=write(data=(DataSegment(9, LKEY, (1 << 64) - 8),))),
    "the remote range goes beyond": dict(wqe=write(raddr=(1 << 64) - 4)),
    "lkey 0 is no key": dict(wqe=write(data=(DataSegment(8, 0, LADDR),))),
    "rkey 0 is no key": dict(wqe=write(rkey=0)),
    "inline overrun: 13 bytes do not fit the 12": dict(wqe=write(data=(), inline=b"x" * 12),
                                                       patch=[(35, 13)]),
    "inline overrun: 2147483647 bytes": dict(wqe=write(data=(), inline=b"x"),
                                             patch=[(i, 0xFF) for i in range(32, 36)]),
    "inline data where a result": dict(wqe=Wqe(0x10, 5, QPN, RADDR, RKEY, inline=b"abcd")),
    "inline data after a pointer": dict(wqe=write(inline=b"abcd")),
    "misaligned atomic": dict(wqe=atomic(raddr=RADDR + 4)),
    "is no multiple of 4": dict(wqe=atomic(0x15, data=HALF, opmod=8, raddr=RADDR + 2)),
    "an atomic of 8 bytes returns them to 4": dict(wqe=atomic(data=HALF)),
    "opmod 9 does not go with": dict(wqe=atomic(opmod=9)),
    "opmod 0 does not go with": dict(wqe=atomic(0x15)),
    "DS 3 is too small: this atomic has 4": dict(wqe=atomic(data=())),
    "DS 4 is too small: this atomic has 5": dict(wqe=atomic(0x14, opmod=9), patch=[(7, 4)]),
}


@pytest.mark.parametrize("words", BAD)
def test_what_adapters_refuse_is_named(words):
    found = verdict(**BAD[words])
    assert any(words in why for why in found.refused), found


def test_what_has_no_effect_is_named_and_not_refused():
    found = verdict(write(imm=7), patch=[(8, 0xAB), (9, 1)])
    assert found.refused == []
    assert [words.split()[1] for words in found.ignored] == ["signature,", "stream", "0x7"]
    behind = verdict(write(data=(DataSegment(0, 0x100, 0), *WORD)))
    assert behind.refused == [] and behind.ignored == ["1 segments after the list's end"]


def test_every_length_takes_its_blocks():
    for segments in range(64):
        raw = struct.pack(">II", 0, segments) + bytes(56)
        assert num_blocks(raw) == max(1, -(-segments // 4))


# -------------------------------------------------------------------- the software HCA agrees


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.close()


EXECUTED = {
    "write": (0x08, {}), "byte count 0": (0x08, {"count": 0}),
    "fetch-add": (0x12, {"atomic": bytes(16)}),
    "misaligned": (0x12, {"atomic": bytes(16), "dst": 4}),
    "returns to 4 bytes": (0x12, {"atomic": bytes(16), "count": 4}),
    "opmod of another": (0x12, {"atomic": bytes(16), "opmod": 9}),
    "masked without opmod": (0x15, {"atomic": bytes(16)}),
    "masked": (0x15, {"atomic": bytes(16), "opmod": 9}),
    "unknown opcode": (0x3F, {}), "read": (0x10, {}), "inline": (0x08, {"inline": b"abcdefgh"}),
    "inline for a result": (0x10, {"inline": b"abcdefgh"}),
    "lkey 0": (0x08, {"lkey": 0}), "rkey 0": (0x08, {"rkey": 0}),
    "DS 0": (0x08, {"num_segments": 64}),
}


@pytest.mark.parametrize("name", EXECUTED)
def test_the_software_hca_fails_what_is_refused_and_executes_the_rest(rig, name):
    opcode, options = EXECUTED[name]
    options = dict(options)
    count, lkey = options.pop("count", 8), options.pop("lkey", rig.src_mr.lkey)
    raddr = rig.dst.addr + options.pop("dst", 0)
    data = [] if "inline" in options else [DataSegment(count, lkey, rig.src.addr)]
    wqe = rig.post(opcode, data=data, raddr=raddr, rkey=options.pop("rkey", rig.rkey), **options)
    raw = wqe.encode().ljust(64, b"\0")
    refused = check_entry(raw, 0, rig.qp.info.qpn, 64).refused
    assert bool(refused) == (rig.qp.first_error()[0] != 0), refused
