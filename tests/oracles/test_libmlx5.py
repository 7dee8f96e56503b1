"""libmlx5 posts to the software HCA and reads its completions; its bytes are ours.

Live where LIBMLX5_ORACLE names the library that libmlx5.py builds; the bytes that it printed are
committed and compared always.
"""

from __future__ import annotations

import json
import os
import socket
import struct

import pytest

from expertwire.hca.wqe import DataSegment, Wqe, doorbell_record
from tests.conformance.rig import (
    ATOMIC_CS,
    ATOMIC_FA,
    PEER_LOST,
    READ,
    REMOTE_ACCESS,
    WRITE,
    WRITE_IMM,
    Rig,
)
from tests.oracles import libmlx5, unavailable
from tests.oracles.libmlx5 import Libmlx5, PlainQueue, request
from tests.queue_pair import GET, PUT_ALWAYS_POST, SIGNAL_IMM, BareQp

GOLDEN = json.loads(libmlx5.GOLDEN.read_text())["bytes"] if libmlx5.GOLDEN.exists() else {}
QPN, LKEY, RKEY, REMOTE, LOCAL = 0xABCDEF, 0x11223344, 0x55667788, 0x7E00AABBCCDD, 0x7F0011223344
TEXT = bytes(range(1, 201)) + bytes(range(56))
IMM = 0x01020304
RING_CQ = 0  # neither collapsed nor overrun ignored: what libmlx5 expects

# name -> (index, request fields, our entry's fields)
REQUESTS = {
    "write": (0, dict(opcode=libmlx5.WRITE, data=[(LOCAL, 4096, LKEY)]), dict(opcode=WRITE)),
    "write_unsignalled": (
        7, dict(opcode=libmlx5.WRITE, data=[(LOCAL, 1, LKEY)], flags=0),
        dict(opcode=WRITE, fm_ce_se=0)),
    "write_fenced": (
        8, dict(opcode=libmlx5.WRITE, data=[(LOCAL, 1, LKEY)],
                flags=libmlx5.SIGNALED | libmlx5.FENCE | libmlx5.SOLICITED),
        dict(opcode=WRITE, fm_ce_se=0x8A)),
    "write_none": (2, dict(opcode=libmlx5.WRITE), dict(opcode=WRITE)),
    "write_five": (
        3, dict(opcode=libmlx5.WRITE, data=[(LOCAL + 64 * i, 9 + i, LKEY) for i in range(5)]),
        dict(opcode=WRITE)),
    "write_wrapped": (  # two blocks, at the end of a ring of 16 and of the 16-bit index
        0xFFFF, dict(opcode=libmlx5.WRITE, data=[(LOCAL + 64 * i, 9, LKEY) for i in range(3)]),
        dict(opcode=WRITE)),
    "write_imm": (
        1, dict(opcode=libmlx5.WRITE_IMM, data=[(LOCAL, 4096, LKEY)], imm_be=socket.htonl(IMM)),
        dict(opcode=WRITE_IMM, imm=IMM)),
    "write_imm_none": (
        4, dict(opcode=libmlx5.WRITE_IMM, imm_be=socket.htonl(IMM)),
        dict(opcode=WRITE_IMM, imm=IMM)),
    "read": (5, dict(opcode=libmlx5.READ, data=[(LOCAL, 16, LKEY)]), dict(opcode=READ)),
    "fetch_add": (
        6, dict(opcode=libmlx5.FETCH_ADD, data=[(LOCAL, 8, LKEY)], compare_add=5),
        dict(opcode=ATOMIC_FA, atomic=struct.pack(">QQ", 5, 0))),
    "compare_swap": (
        9, dict(opcode=libmlx5.COMPARE_SWAP, data=[(LOCAL, 8, LKEY)], compare_add=5, swap=6),
        dict(opcode=ATOMIC_CS, atomic=struct.pack(">QQ", 6, 5))),
}
INLINE_SIZES = (1, 2, 4, 8, 12, 13, 28, 29, 60, 61, 92, 93, 256)


def ours(name: str, qpn: int = QPN) -> bytes:
    index, asked, fields = REQUESTS[name]
    data = tuple(DataSegment(count, key, addr) for addr, count, key in asked.get("data", ()))
    return Wqe(index=index, qpn=qpn, raddr=REMOTE, rkey=RKEY, data=data, **fields).encode()


def defined(raw: bytes) -> bytes:
    """Without the compare operand of a fetch-and-add, which libmlx5 leaves as it was."""
    return raw[:40] + bytes(8) + raw[48:] if raw[3] == ATOMIC_FA else raw


def post_alone(library: str, name: str) -> tuple[bytes, bytes, bytes]:
    """(entry, doorbell record, register) of one request, posted to a queue in plain memory."""
    index, asked, _ = REQUESTS[name]
    queue = PlainQueue(QPN)
    with Libmlx5(library, queue.info) as libm:
        libm.advance(index)
        libm.post(request(remote_addr=REMOTE, rkey=RKEY, **asked))
    segments = queue.blocks(index, 1)[7] & 0x3F
    raw = queue.blocks(index, -(-segments // 4))[: 16 * segments]
    return raw, bytes(queue.record), queue.register(0x800)


@pytest.fixture
def library(request: pytest.FixtureRequest) -> str:
    path = os.environ.get(libmlx5.ENVIRONMENT)
    if not path:
        unavailable(request, f"{libmlx5.ENVIRONMENT} is not set (python -m tests.oracles.libmlx5)")
    return path


@pytest.mark.parametrize("name", REQUESTS)
def test_committed_bytes_are_ours(name):
    """Entry, record, and a register that holds the first 8 bytes of the entry posted last."""
    index = REQUESTS[name][0]
    entry = bytes.fromhex(GOLDEN[name])
    assert defined(entry) == defined(ours(name))
    num_blocks = -(-len(entry) // 64)
    assert bytes.fromhex(GOLDEN[f"{name} record"]) == doorbell_record(index + num_blocks)
    assert bytes.fromhex(GOLDEN[f"{name} register"]) == entry[:8]


@pytest.mark.parametrize(("name", "operation"), [
    ("write", dict(op=PUT_ALWAYS_POST, num_bytes=4096)), ("read", dict(op=GET, num_bytes=16)),
    ("write_imm_none", dict(op=SIGNAL_IMM, value=IMM)),
])
def test_device_code_writes_the_committed_bytes(name, operation):
    index = REQUESTS[name][0]
    qp = BareQp(64, [(LOCAL, LOCAL + 8192, LKEY)], [(REMOTE, REMOTE + 8192, RKEY)], start=index)
    (status,) = qp.run([dict(operation, remote_addr=REMOTE, local_addr=LOCAL)])
    golden = bytes.fromhex(GOLDEN[name])
    assert status.code == 0 and qp.wqe(index)[: len(golden)] == golden
    assert bytes(qp.dbrec).hex() == GOLDEN[f"{name} record"]


def test_libmlx5_still_writes_these_bytes(library):
    assert libmlx5.golden_bytes(library) == GOLDEN


@pytest.mark.parametrize("length", INLINE_SIZES)
def test_inline_data_is_laid_out_as_ours(library, length):
    """Inline bytes go on at the ring's start where the ring ends: 16 blocks, from block 15 on."""
    queue = PlainQueue(QPN)
    with Libmlx5(library, queue.info) as libm, Rig() as rig:
        rig.fill(0, TEXT)
        libm.advance(15)
        libm.post(request(libmlx5.WRITE, REMOTE, RKEY, [(rig.local.addr, length, LKEY)],
                          flags=libmlx5.SIGNALED | libmlx5.INLINE))
    entry = Wqe(WRITE, 15, QPN, REMOTE, RKEY, inline=TEXT[:length]).encode()
    written = queue.blocks(15, -(-len(entry) // 64))
    assert written[: 36 + length] == entry[: 36 + length]


# ------------------------------------------------------------------ libmlx5 drives the software HCA

@pytest.fixture(params=[False, True], ids=["doorbell", "blue-flame"])
def driven(request, library):
    """A rig whose queue libmlx5 posts to, and whose ring CQ of 16 entries it polls."""
    with Rig(16, num_cqe=16, cq_flags=RING_CQ) as rig, \
            Libmlx5(library, rig.qp.info, blue_flame=request.param) as libm:
        yield rig, libm


def test_every_request_is_executed_and_its_completion_understood(driven):
    rig, libm = driven
    here, there, lkey, rkey = rig.local.addr, rig.remote.addr, rig.lkey, rig.rkey
    rig.fill(0, TEXT)
    rig.fill_remote(1024, struct.pack("<QQ", 40, 50))

    def do(opcode, remote, data=(), **fields):
        libm.post(request(opcode, there + remote, rkey, data, id=opcode + 100, **fields))
        rig.run()
        (done,) = libm.poll()
        assert (done.id, done.status, done.qpn) == (opcode + 100, 0, rig.qp.info.qpn)
        return done

    do(libmlx5.WRITE, 0, [(here, 100, lkey), (here + 100, 156, lkey)])
    assert rig.at_remote(0, 257) == TEXT + b"\0"
    do(libmlx5.WRITE, 0)  # of no bytes
    assert do(libmlx5.READ, 0, [(here + 512, 256, lkey)]).byte_len == 256
    assert rig.at_local(512, 256) == TEXT
    assert do(libmlx5.FETCH_ADD, 1024, [(here + 800, 8, lkey)], compare_add=2).byte_len == 8
    do(libmlx5.COMPARE_SWAP, 1032, [(here + 808, 8, lkey)], compare_add=50, swap=7)
    assert struct.unpack("<QQ", rig.at_remote(1024, 16)) == (42, 7)
    assert struct.unpack("<QQ", rig.at_local(800, 16)) == (40, 50)
    rig.window.post_recv(1)
    do(libmlx5.WRITE_IMM, 2048, [(here, 16, lkey)], imm_be=socket.htonl(IMM))
    assert rig.at_remote(2048, 16) == TEXT[:16]
    for length in range(1, 257):
        rig.fill_remote(4096, bytes(300))
        do(libmlx5.WRITE, 4096, [(here, length, lkey)], flags=libmlx5.SIGNALED | libmlx5.INLINE)
        assert rig.at_remote(4096, 300) == TEXT[:length].ljust(300, b"\0")


def test_chains_wrap_the_ring_the_queue_and_the_16_bit_index(driven):
    """More than 65536 blocks, one doorbell per chain, one signalled entry in each."""
    rig, libm = driven
    posted = 0
    while posted < 70_000:
        values = [posted + i for i in range(5)]
        rig.fill(0, struct.pack("<5Q", *values))
        libm.post(*[
            request(libmlx5.WRITE, rig.remote.addr + 8 * i, rig.rkey,
                    [(rig.local.addr + 8 * i, 8, rig.lkey)], id=values[i],
                    flags=libmlx5.SIGNALED if i == 4 else 0) for i in range(5)
        ])
        rig.run()
        assert [(c.id, c.status) for c in libm.poll()] == [(posted + 4, 0)]
        assert rig.at_remote(0, 40) == struct.pack("<5Q", *values)
        posted += 5


# ibv_wc_status of rdma-core verbs.h by the syndrome that the adapter writes
WC_STATUS = {
    0x01: 1, 0x02: 2, 0x04: 4, 0x05: 5, 0x06: 6, 0x10: 7, 0x11: 8, 0x12: 9, 0x13: 10, 0x14: 11,
    0x15: 12, 0x16: 13, 0x22: 16, 0x33: 21,
}


@pytest.mark.parametrize("syndrome", WC_STATUS, ids=hex)
def test_every_syndrome_is_the_status_that_libmlx5_reports(driven, syndrome):
    """The failed one, then the flushed ones behind it, unsignalled too, in order."""
    rig, libm = driven
    rig.here.set_hook(lambda _c, _q, idx, _a, _n: syndrome if idx == 1 else 0)
    libm.post(*[
        request(libmlx5.WRITE, rig.remote.addr, rig.rkey, [(rig.local.addr, 8, rig.lkey)], id=i,
                flags=0 if i == 2 else libmlx5.SIGNALED) for i in range(4)
    ])
    rig.run()
    rig.here.set_hook(None)
    got = [(c.id, c.status, c.vendor_err) for c in libm.poll()]
    assert got == [(0, 0, 0), (1, WC_STATUS[syndrome], 0), (2, 5, 0), (3, 5, 0)]


def test_real_failures_too(driven):
    rig, libm = driven
    libm.post(request(libmlx5.WRITE, rig.remote.addr, rig.rkey ^ 1,
                      [(rig.local.addr, 8, rig.lkey)]))
    rig.run()
    assert [c.status for c in libm.poll()] == [WC_STATUS[REMOTE_ACCESS]]
    with Rig(16, num_cqe=16, cq_flags=RING_CQ) as other, \
            Libmlx5(os.environ[libmlx5.ENVIRONMENT], other.qp.info) as libm:
        other.peer.lost()
        libm.post(request(libmlx5.READ, other.remote.addr, other.rkey,
                          [(other.local.addr, 8, other.lkey)]))
        other.run()
        assert [c.status for c in libm.poll()] == [WC_STATUS[PEER_LOST]]


def test_receive_completion_of_an_immediate_is_understood(library):
    """What the peer gets, read by a libmlx5 that has the peer's queue number."""
    receiver = PlainQueue(0x77)  # the number that Rig connects to
    with Rig() as rig, Libmlx5(library, receiver.info) as libm:
        rig.window.post_recv(3)
        for turn in range(3):
            rig.do(rig.write(opcode=WRITE_IMM, imm=IMM + turn, num_bytes=77 + turn))
            raw = rig.window.poll_recv()
            assert raw is not None
            receiver.put_completion(turn, raw)
        found = libm.poll()
        assert [(c.status, c.byte_len, socket.ntohl(c.imm_be), c.qpn) for c in found] == [
            (0, 77 + turn, IMM + turn, 0x77) for turn in range(3)
        ]
        assert {(c.opcode, c.flags) for c in found} == {(129, 2)}  # RECV_RDMA_WITH_IMM, WITH_IMM
