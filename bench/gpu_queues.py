"""Work queues driven from a GPU: what posting costs, and a put to its completion.

    python bench/gpu_queues.py [--gpus 2]

    post     a put written to a ring in GPU memory and its doorbell rung, nobody consuming
    gpu hca  puts of 64 bytes through the HCA kernel (one block), ring in GPU memory, into another
             GPU's memory where there are two: nanoseconds per put from the first post to the last
             completion; and one put to its completion seen
    pinned   a put of 8 bytes through a ring in pinned host memory that the software HCA consumes,
             beside a bare round trip: the GPU writes a word, a CPU thread answers, the GPU sees it

The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import socket
import sys
import threading
from typing import Any

import torch

from expertwire.cuda.pinned import PinnedBuffer, PinnedQpMemory
from expertwire.device_structs import (
    GpuHcaArgs,
    HcaKey,
    HcaQueue,
    IbgdaKey,
    IbgdaOperation,
    IbgdaPeer,
    IbgdaQp,
    IbgdaRunArgs,
    KernelStatus,
)
from expertwire.hca.soft import CQ_COLLAPSED, CQ_OVERRUN_IGNORE, STATE_RTS, SoftHca
from expertwire.target import Block, GpuTarget
from gpu_rig import TIMEOUT_NS, reach_each_other

PUT, PUT_ALWAYS_POST, QUIET, FILL, AWAIT = 0, 1, 6, 8, 9
DEPTH = 1024
LIFETIME_NS = 10_000_000_000  # of an HCA kernel, whatever happens


def operations_us(gpu: GpuTarget, peer: Any, operations: list[dict], num_warps: int,
                  tries: int = 5) -> float:
    """Microseconds of one launch of the operations on every warp (best of `tries`)."""
    table = gpu.place((IbgdaOperation * (len(operations) * num_warps))(*[
        IbgdaOperation(**operation) for _ in range(num_warps) for operation in operations
    ]))
    status = gpu.alloc(num_warps * ctypes.sizeof(KernelStatus))
    args = IbgdaRunArgs(peer=peer.addr, operations=table.addr, status=status.addr,
                        num_operations=len(operations))
    launch = gpu.prepare([("ibgda_run", args)], grid=num_warps)
    stream, times = torch.cuda.Stream(gpu.device), []
    torch.cuda.current_stream(gpu.device).synchronize()
    for _ in range(tries):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            launch.run()
            end.record()
        stream.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    with torch.cuda.stream(stream):
        codes = {status.read_struct(KernelStatus, i).code for i in range(num_warps)}
    if codes != {0}:
        raise SystemExit(f"queue operations failed with status {codes}")
    return min(times)


def posting(gpu: GpuTarget, num_warps: int) -> float:
    """Nanoseconds per put posted to one ring in GPU memory, the doorbell of each rung."""
    depth, each = 32768, 4096 // num_warps
    ring, doorbells, cq = gpu.alloc(depth * 64), gpu.alloc(64), gpu.alloc(64, 0xFF)
    qp = gpu.place(IbgdaQp(
        sq_addr=ring.addr, dbrec_addr=doorbells.addr, doorbell_addr=doorbells.addr + 16,
        cq_addr=cq.addr, qpn=1, num_wqe=depth, scope=0,
    ))
    keys = gpu.place(IbgdaKey(begin=1 << 40, end=1 << 41, key_be=1))
    peer = gpu.place(IbgdaPeer(
        qps=qp.addr, num_qps=1, local_keys=keys.addr, num_local_keys=1, remote_keys=keys.addr,
        num_remote_keys=1, timeout_ns=TIMEOUT_NS,
    ))
    put = dict(op=PUT_ALWAYS_POST, remote_addr=1 << 40, local_addr=1 << 40, num_bytes=64)
    return 1000 * operations_us(gpu, peer, [put] * each, num_warps) / (each * num_warps)


class HcaWire:
    """One direction (as loopback.Wire) whose queue pair lies in GPU memory, for the HCA kernel."""

    LKEY, RKEY, QPN, UAR = 0x11223344, 0x55667788, 0x123, 4096

    def __init__(self, target: GpuTarget, local: Block, remote: Block, timeout_ns: int,
                 depth: int = DEPTH):
        self.target, self.local, self.remote = target, local, remote
        self.memory = target.alloc(2 * self.UAR + depth * 64 + 4096)
        uar = self.memory.addr
        record, ring = uar + self.UAR, uar + 2 * self.UAR
        cq = ring + depth * 64
        self.memory.write(b"\xff" * 64, 2 * self.UAR + depth * 64)
        self.qp = target.place(IbgdaQp(
            sq_addr=ring, dbrec_addr=record, doorbell_addr=uar + 0x800, cq_addr=cq, qpn=self.QPN,
            num_wqe=depth, scope=target.scope, proxy_addr=record + 128,
        ))
        self._keys = target.place((IbgdaKey * 2)(
            IbgdaKey(local.addr, local.addr + local.num_bytes, socket.htonl(self.LKEY)),
            IbgdaKey(remote.addr, remote.addr + remote.num_bytes, socket.htonl(self.RKEY)),
        ))
        self.peer = target.place(IbgdaPeer(
            qps=self.qp.addr, num_qps=1, local_keys=self._keys.addr, num_local_keys=1,
            remote_keys=self._keys.addr + ctypes.sizeof(IbgdaKey), num_remote_keys=1,
            timeout_ns=timeout_ns,
        ))
        self._hca_keys = target.place((HcaKey * 2)(
            HcaKey(self.LKEY, 15, 1, 1, local.addr, local.num_bytes, local.addr),
            HcaKey(self.RKEY, 15, 1, 0, remote.addr, remote.num_bytes, remote.addr),
        ))
        self.queue = target.place(HcaQueue(
            sq_addr=ring, dbrec_addr=record, uar_addr=uar, cq_addr=cq, cq_dbrec_addr=record + 64,
            proxy_addr=record + 128, local_keys=self._hca_keys.addr, num_local_keys=1,
            remote_keys=self._hca_keys.addr + ctypes.sizeof(HcaKey), num_remote_keys=1,
            qpn=self.QPN, num_wqe=depth, num_cqe=depth,
            cq_flags=CQ_COLLAPSED | CQ_OVERRUN_IGNORE, pd=1, scope=target.scope, state=STATE_RTS,
        ))


@contextlib.contextmanager
def hca_kernel(wire: HcaWire):
    """The HCA kernel consumes the wire's queue (one block) until the end of the block."""
    target = wire.target
    with torch.cuda.device(target.device):
        stop, stream = target.alloc(4), torch.cuda.Stream(target.device, priority=-1)
        torch.cuda.synchronize(target.device)
        args = GpuHcaArgs(queues=wire.queue.addr, stop=stop.addr, lifetime_ns=LIFETIME_NS,
                          num_queues=1)
        with torch.cuda.stream(stream):
            target.prepare([("gpu_hca", args)], grid=1, warps=32).run()
    try:
        yield
    finally:
        with torch.cuda.device(target.device):
            other = torch.cuda.Stream(target.device)
            with torch.cuda.stream(other):
                stop.tensor.fill_(1)
            stream.synchronize()


def gpu_hca(here: GpuTarget, there: GpuTarget) -> dict[str, Any]:
    """ns per put of 64 bytes by warps on one queue, us of one put to its completion."""
    local, remote = here.alloc(4096, 7), there.alloc(4096)
    wire, facts = HcaWire(here, local, remote, TIMEOUT_NS), {}
    put = dict(op=PUT, remote_addr=remote.addr, local_addr=local.addr, num_bytes=64)
    with torch.cuda.device(here.device):
        for num_warps in (1, 8, 32):
            each = DEPTH // 2 // num_warps
            puts = [{**put, "message_idx": i} for i in range(each - 1)]
            puts += [{**put, "op": PUT_ALWAYS_POST}, dict(op=QUIET)]
            with hca_kernel(wire):
                us = operations_us(here, wire.peer, puts, num_warps)
            facts[f"ns_per_put_{num_warps}_warps"] = round(1000 * us / (each * num_warps), 1)
            facts[f"puts_per_s_{num_warps}_warps"] = round(each * num_warps / us * 1e6)
        one = [{**put, "op": PUT_ALWAYS_POST, "num_bytes": 8}, dict(op=QUIET)] * 100
        with hca_kernel(wire):
            facts["put_to_completion_us"] = round(operations_us(here, wire.peer, one, 1) / 100, 2)
    if remote.read(0, 64) != b"\7" * 64:
        raise SystemExit("the HCA kernel did not move the bytes")
    return facts


def pinned_round_trip(gpu: GpuTarget) -> float:
    """Microseconds from a put of 8 bytes to its completion seen, ring in pinned host memory."""
    num_puts, depth = 200, 64
    with contextlib.ExitStack() as stack:
        here, there = SoftHca(thread=True, spin=True), SoftHca(thread=False)
        stack.callback(there.close)
        stack.callback(here.close)
        remote, local = there.alloc(4096), PinnedBuffer(4096)
        stack.callback(remote.close)
        window = there.create_window()
        stack.callback(window.close)
        rkey = window.publish(there.register(remote.addr, 4096, 15), 0)
        imported = here.import_peer(window.fd, there.wake_fd, [remote.fd])
        stack.callback(imported.close)
        lkey = here.register(local.addr, 4096, 15).lkey
        memory = PinnedQpMemory(depth)
        queue = here.create_qp(depth, memory=memory.memory)
        stack.callback(queue.destroy)
        queue.connect(imported, 1)
        info = queue.info
        qp = gpu.place(IbgdaQp(
            sq_addr=info.sq_addr, dbrec_addr=info.dbrec_addr, doorbell_addr=info.uar_addr + 0x800,
            cq_addr=info.cq_addr, qpn=info.qpn, num_wqe=depth, scope=1,
        ))
        keys = gpu.place((IbgdaKey * 2)(
            IbgdaKey(local.addr, local.addr + 4096, socket.htonl(lkey)),
            IbgdaKey(remote.addr, remote.addr + 4096, socket.htonl(rkey)),
        ))
        peer = gpu.place(IbgdaPeer(
            qps=qp.addr, num_qps=1, local_keys=keys.addr, num_local_keys=1,
            remote_keys=keys.addr + ctypes.sizeof(IbgdaKey), num_remote_keys=1,
            timeout_ns=TIMEOUT_NS,
        ))
        put = dict(op=PUT_ALWAYS_POST, remote_addr=remote.addr, local_addr=local.addr, num_bytes=8)
        operations = [put, dict(op=QUIET)] * num_puts
        return operations_us(gpu, peer, operations, 1) / num_puts


def bare_round_trip(gpu: GpuTarget) -> float:
    """Microseconds from a word that the GPU writes to pinned memory to a CPU thread's answer."""
    num_trips = 200
    words = PinnedBuffer(256)
    ping, pong = (ctypes.c_uint64.from_address(words.addr + i) for i in (0, 128))
    stop = False

    def answer() -> None:
        seen = 0
        while not stop:
            if (now := ping.value) != seen:
                pong.value = seen = now

    peer = gpu.place(IbgdaPeer(timeout_ns=TIMEOUT_NS))
    thread = threading.Thread(target=answer)
    thread.start()
    try:
        operations = [
            operation for i in range(1, num_trips + 1) for operation in (
                dict(op=FILL, local_addr=words.addr, num_bytes=8, value=i),
                dict(op=AWAIT, local_addr=words.addr + 128, value=i),
            )
        ]
        return operations_us(gpu, peer, operations, 1, tries=1) / num_trips
    finally:
        stop = True
        thread.join()


def measure(gpus: int) -> dict[str, Any]:
    devices = list(range(min(gpus, torch.cuda.device_count())))
    reach_each_other(devices)
    here, there = GpuTarget(0), GpuTarget(devices[-1])
    facts: dict[str, Any] = {"gpus": len(devices)}
    with torch.cuda.device(0):
        facts["ns_per_post"] = {n: round(posting(here, n), 1) for n in (1, 8, 32)}
        facts["gpu_hca"] = gpu_hca(here, there)
        facts["pinned_put_us"] = round(pinned_round_trip(here), 2)
        facts["bare_cpu_round_trip_us"] = round(bare_round_trip(here), 2)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, default=2, help="1: all within one GPU")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_queues: there is no GPU")
    facts = measure(options.gpus)
    for name, value in facts.items():
        print(f"{name}: {value}")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
