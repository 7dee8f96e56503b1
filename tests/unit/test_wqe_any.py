"""Any work-queue entry: written by device code and read by Python, and damaged before an engine."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.rig import ATOMIC_FA, MASKED_FA, READ, WRITE, Rig
from tests.queue_pair import ADD4, ADD8, GET, INLINE, PUT_ALWAYS_POST, SIGNAL_IMM, BareQp

from expertwire.hca.wqe import DataSegment, Wqe

SCRATCH, ATOMICS = 4096, {0x11, 0x12, 0x14, 0x15}
key = st.integers(0, 2**32 - 1)
addr = st.integers(0, 2**63)


@settings(deadline=None, max_examples=100)
@given(
    op=st.sampled_from([PUT_ALWAYS_POST, INLINE, ADD4, ADD8, GET, SIGNAL_IMM]), laddr=addr,
    raddr=addr, lkey=key, rkey=key, num_bytes=st.integers(1, 2**30),
    value=st.integers(0, 2**64 - 1), start=st.integers(0, 2**40),
)
def test_what_device_code_writes_is_read_back(
    op, laddr, raddr, lkey, rkey, num_bytes, value, start
):
    if op == INLINE:
        num_bytes = 1 + num_bytes % 8
        value &= (1 << 8 * num_bytes) - 1  # behind its bytes an inline segment may hold anything
    qp = BareQp(16, [(laddr, laddr + num_bytes, lkey)], [(raddr, raddr + num_bytes, rkey)],
                start=start)
    (status,) = qp.run([dict(op=op, remote_addr=raddr, local_addr=laddr, num_bytes=num_bytes,
                             value=value)])
    assert status.code == 0
    wqe = Wqe.decode(qp.wqe(start))
    assert (wqe.index, wqe.qpn, wqe.fm_ce_se) == (start & 0xFFFF, 0xABCDEF, 8)
    assert (wqe.raddr, wqe.rkey) == (raddr, rkey)
    small = value & 0xFFFFFFFF
    expected = {
        PUT_ALWAYS_POST: (WRITE, 0, (DataSegment(num_bytes, lkey, laddr),), None, b"", 0),
        GET: (READ, 0, (DataSegment(num_bytes, lkey, laddr),), None, b"", 0),
        INLINE: (WRITE, 0, (), value.to_bytes(8, "little")[:num_bytes], b"", 0),
        ADD4: (MASKED_FA, 8, (DataSegment(4, 0, 0),), None, struct.pack(">IIQ", small, 0, 0), 0),
        ADD8: (MASKED_FA, 9, (DataSegment(8, 0, 0),), None, struct.pack(">QQ", value, 0), 0),
        SIGNAL_IMM: (0x09, 0, (), None, b"", small),
    }[op]
    assert (wqe.opcode, wqe.opmod, wqe.data, wqe.inline, wqe.atomic, wqe.imm) == expected
    again = wqe.encode()
    assert again == qp.wqe(start)[: len(again)]
    assert qp.rung == start + 1 & 0xFFFF


def changed(before: bytes, after: bytes) -> set[int]:
    return {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(["write", "inline", "read", "add", "masked add"]),
    at=st.integers(0, 4000), num_bytes=st.integers(1, 64),
    damage=st.dictionaries(st.integers(0, 63), st.integers(1, 255), min_size=1, max_size=3),
)
def test_a_damaged_entry_fails_or_does_what_it_says(kind, at, num_bytes, damage):
    """Nothing is written when it fails; else no byte outside the range that its bytes name."""
    with Rig(16, num_bytes=2 * SCRATCH) as rig:
        rig.fill(0, bytes(range(1, 251)) * 32)
        at8 = at & ~7
        entry = {
            "write": rig.write(at, 16, num_bytes),
            "inline": rig.inline(at, b"y" * (num_bytes % 13)),
            "read": rig.write(at, SCRATCH, num_bytes, opcode=READ),
            "add": rig.atomic(ATOMIC_FA, struct.pack(">QQ", 5, 0), at8, SCRATCH),
            "masked add": rig.atomic(MASKED_FA, struct.pack(">IIQ", 5, 0, 0), at8, SCRATCH, 4,
                                     opmod=8),
        }[kind]
        raw = bytearray(entry.encode().ljust(64, b"\0"))
        for place, change in damage.items():
            raw[place] ^= change
        size = 2 * SCRATCH
        remote, local = rig.at_remote(0, size), rig.at_local(0, size)
        rig.place(bytes(raw))
        rig.ring(1)
        rig.run()
        there = changed(remote, rig.at_remote(0, size))
        here = changed(local, rig.at_local(0, size))
        if rig.error():
            assert not there and not here, "nothing is written when a check fails"
            return
        done = Wqe.decode(bytes(raw))
        length = 8 if done.opcode in ATOMICS else len(done.inline or b"") + sum(
            s.num_bytes for s in done.data)
        first = (done.raddr or 0) - rig.remote.addr
        assert there <= set(range(first, first + length))
        results = {
            s.addr - rig.local.addr + i for s in done.data for i in range(s.num_bytes)
        } if done.opcode in ATOMICS | {READ} else set()
        assert here <= results
