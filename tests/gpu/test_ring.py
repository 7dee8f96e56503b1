"""ibgda_device.cuh on a GPU: a queue pair in GPU memory with no HCA, against the CPU target."""

from __future__ import annotations

import ctypes
import socket

import numpy as np
import pytest
import torch

from expertwire.device_structs import (
    IbgdaKey,
    IbgdaOperation,
    IbgdaPeer,
    IbgdaQp,
    IbgdaRunArgs,
    KernelStatus,
)
from expertwire.target import CpuTarget
from tests.queue_pair import ADD4, ADD8, GET, INLINE, PUT, PUT_ALWAYS_POST, QUIET, SIGNAL_IMM

LOCAL, REMOTE = 0x7F0011223344, 0x7E00AABBCCDD
ONE = [(LOCAL, LOCAL + (1 << 20), 0x11223344)], [(REMOTE, REMOTE + (1 << 20), 0x55667788)]
PUT_8 = dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)


class RingOnly:
    """Ring, doorbells and collapsed CQ in a target's memory; addresses that nobody follows."""

    def __init__(self, target, depth=64, regions=ONE, *, timeout_ns=50_000_000, start=0, mode=0):
        self.target, self.depth = target, depth
        self.ring = target.alloc(depth * 64, 0xEE)
        self.doorbells = target.alloc(64)  # record, register at 16, proxy at 32
        self.cq = target.alloc(64, 0xFF)
        self.state = target.place(IbgdaQp(
            sq_addr=self.ring.addr, dbrec_addr=self.doorbells.addr,
            doorbell_addr=self.doorbells.addr + 16, cq_addr=self.cq.addr, qpn=0xABCDEF,
            num_wqe=depth, scope=target.scope, proxy_addr=self.doorbells.addr + 32,
            doorbell_mode=mode, scratch_addr=LOCAL + 64, scratch_lkey_be=0x44332211,
            resv_head=start, ready_head=start, prod_idx=start, cons_idx=start,
        ))
        tables = [
            target.place((IbgdaKey * len(keys))(*[
                IbgdaKey(begin, end, socket.htonl(key)) for begin, end, key in keys
            ])) for keys in regions
        ]
        self.peer = target.place(IbgdaPeer(
            qps=self.state.addr, num_qps=1, local_keys=tables[0].addr,
            num_local_keys=len(regions[0]), remote_keys=tables[1].addr,
            num_remote_keys=len(regions[1]), timeout_ns=timeout_ns,
        ))
        self._keep = tables

    def complete(self, wqe_idx: int, opcode: int = 0, syndrome: int = 0) -> None:
        self.cq.write(bytes([0, 0, 0, syndrome]), 52)
        self.cq.write(((wqe_idx & 0xFFFF) << 16 | opcode << 4).to_bytes(4, "big"), 60)

    def run(self, operations, *, warps: int = 1, grid: int = 1) -> list[tuple]:
        """The operations on every warp; the warps' statuses as tuples."""
        count = warps * grid
        table = self.target.place((IbgdaOperation * (len(operations) * count))(*[
            IbgdaOperation(**operation) for _ in range(count) for operation in operations
        ]))
        status = self.target.alloc(count * ctypes.sizeof(KernelStatus))
        args = IbgdaRunArgs(peer=self.peer.addr, operations=table.addr, status=status.addr,
                            num_operations=len(operations))
        self.target.prepare([("ibgda_run", args)], grid=grid, warps=warps).run()
        entries = [status.read_struct(KernelStatus, i) for i in range(count)]
        return [tuple(getattr(e, name) for name, *_ in KernelStatus._fields_) for e in entries]

    def see(self) -> tuple:
        state = self.state.read_struct(IbgdaQp)
        heads = [getattr(state, n) for n in ("resv_head", "ready_head", "prod_idx", "cons_idx",
                                             "post_lock", "error")]
        return self.ring.read(), self.doorbells.read(), heads


def pieces(num_chunks: int):
    return ONE[0], [(REMOTE + i * 100, REMOTE + (i + 1) * 100, 0x100 + i)
                    for i in range(num_chunks)]


def cut(num_chunks: int):
    return [dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE + 1, local_addr=LOCAL,
                 num_bytes=num_chunks * 100 - 1)]


KINDS = [
    dict(op=INLINE, remote_addr=REMOTE, value=0x44434241, num_bytes=4),
    dict(op=ADD4, remote_addr=REMOTE, value=5), dict(op=ADD8, remote_addr=REMOTE, value=5),
    dict(op=GET, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=16),
    dict(op=SIGNAL_IMM, remote_addr=REMOTE, value=0x01020304),
]
BATCH = [{**PUT_8, "op": PUT, "message_idx": i} for i in range(6)]
# name: (depth, regions, operations of one launch after another)
RUNS = {
    "one put": (64, ONE, [[PUT_8]]),
    **{f"{n} chunks": (128, pieces(n), [cut(n)]) for n in (2, 31, 32, 33, 70)},
    "every kind": (64, ONE, [KINDS]),
    "batched doorbells, then quiet": (64, ONE, [BATCH[:3], BATCH[3:4], BATCH[:1],
                                                [dict(op=QUIET)]]),
    "nothing": (64, ONE, [[{**PUT_8, "num_bytes": 0}]]),
    "not registered": (64, ONE, [[{**PUT_8, "local_addr": 0x1000}]]),
    "out of the region": (64, ONE, [[{**PUT_8, "remote_addr": REMOTE + (1 << 20) - 4}]]),
    "full ring": (16, ONE, [[PUT_8] * 16, [PUT_8] * 3]),
}


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_entries_and_doorbells(gpu, name, mode):
    depth, regions, launches = RUNS[name]
    rings = [RingOnly(t, depth, regions, mode=mode) for t in (CpuTarget(32), gpu)]
    for operations in launches:
        want, seen = (ring.run(operations) for ring in rings)
        assert want == seen
        assert rings[0].see() == rings[1].see()


def test_error_completion(gpu):
    rings = [RingOnly(target) for target in (CpuTarget(32), gpu)]
    for ring in rings:
        ring.run([PUT_8] * 3)
        ring.complete(1, opcode=13, syndrome=0x13)
    want, seen = (ring.run([dict(op=QUIET)]) for ring in rings)
    assert want == seen == [(2, 5, 0, 0x13, 0, 0, 1)]
    assert rings[1].run([PUT_8])[0][0] == 2, "a failed queue refuses further work at once"


@pytest.mark.parametrize("start", [0, 65530, (1 << 32) - 3, (1 << 40) + 65535])
@pytest.mark.parametrize("depth", [16, 1024, 32768])
def test_quiet_is_right_across_wraps(gpu, start, depth):
    ring = RingOnly(gpu, depth, start=start, timeout_ns=2_000_000)
    if start:
        ring.complete(start - 1)
    assert ring.run([dict(op=QUIET)])[0][0] == 0, "nothing in flight"
    ring.run([PUT_8] * 16)
    for done in (1, 15, 16):
        ring.complete(start + done - 1)
        assert (ring.run([dict(op=QUIET)])[0][0] == 0) == (done == 16)


@pytest.mark.parametrize(("grid", "warps"), [(1, 32), (32, 4), (128, 1)])
def test_many_warps_share_a_queue(gpu, grid, warps):
    """Real concurrency: every index once, every entry whole, nothing rung that is not there."""
    each = 16
    ring = RingOnly(gpu, 4096, timeout_ns=2_000_000_000)
    statuses = ring.run([{**PUT_8, "op": PUT, "message_idx": i} for i in range(each - 1)] + [PUT_8],
                        grid=grid, warps=warps)
    assert {status[0] for status in statuses} == {0}
    total = grid * warps * each
    entries = np.frombuffer(ring.ring.read(), np.uint8).reshape(-1, 64)
    index = entries[:total, 1].astype(int) << 8 | entries[:total, 2]
    assert np.array_equal(index, np.arange(total))
    assert (entries[:total, 3] == 8).all() and (entries[total:] == 0xEE).all()
    assert (entries[:total, 16:48] == entries[0, 16:48]).all()
    _, doorbells, heads = ring.see()
    assert heads[:3] == [total] * 3
    assert int.from_bytes(doorbells[4:8], "big") == total & 0xFFFF


def test_200000_posts_keep_every_field_in_its_bits(gpu):
    depth = 32768
    ring = RingOnly(gpu, depth, timeout_ns=2_000_000_000)
    done = 0
    while done < 200_000:
        statuses = ring.run([PUT_8] * 64, grid=16, warps=16)  # 16384 of them
        assert {status[0] for status in statuses} == {0}
        slots = (done + np.arange(16384)) % depth
        entries = np.frombuffer(ring.ring.read(), np.uint8).reshape(-1, 64)[slots]
        index = entries[:, 1].astype(int) << 8 | entries[:, 2]
        assert np.array_equal(index, (done + np.arange(16384)) & 0xFFFF)
        assert (entries[:, 0] == 0).all() and (entries[:, 3] == 8).all()
        done += 16384
        ring.complete(done - 1)


def test_launch_is_on_the_callers_stream_and_in_graphs(gpu):
    """No launch waits, and a captured one happens when the graph is replayed."""
    ring = RingOnly(gpu)
    table = gpu.place(IbgdaOperation(**PUT_8))
    status = gpu.alloc(ctypes.sizeof(KernelStatus))
    args = IbgdaRunArgs(peer=ring.peer.addr, operations=table.addr, status=status.addr,
                        num_operations=1)
    launch = gpu.prepare([("ibgda_run", args)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    assert ring.see()[2][0] == 0, "capturing runs nothing"
    for _ in range(3):
        graph.replay()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch.run()
    torch.cuda.synchronize()
    assert ring.see()[2][0] == 4
