"""A round trip of T rows of 7168 bf16 inside one GPU: client and server on two streams.

    python bench/gpu_trip.py [--rows 1,8,32,128,512] [--replays 40]

Everything runs from CUDA graphs, several trips a graph; the server answers with the rows it got.

    direct  client_send_direct | server_poll, server_reply_in_place | client_combine: many blocks
    single  route, pack, put, combine and the server's kernels as one block each, the older form
    floor   a bare copy and flag there and back, one kernel a side (gpu_floor.cu)
    memcpy  two cudaMemcpyAsync of the same bytes, device to device: what moving them costs

Block counts of direct and floor are the best of a few, stated. Medians (and 99th percentiles) in
microseconds over graph replays, each divided by the trips of a graph. Also: what posting a put to
a ring in GPU memory costs, and a put of 8 bytes to its completion through a ring in pinned host
memory that the software HCA consumes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that spin must not share one

import torch

from expertwire.cuda.compile import require
from expertwire.cuda.launch import device_arch
from expertwire.cuda.pinned import PinnedBuffer, PinnedQpMemory
from expertwire.device_structs import (
    IbgdaKey,
    IbgdaOperation,
    IbgdaPeer,
    IbgdaQp,
    IbgdaRunArgs,
    KernelStatus,
)
from expertwire.hca.soft import SoftHca
from expertwire.loopback import Loopback, StepShape
from expertwire.target import GpuTarget

HIDDEN_SIZE = 7168
TRIPS = 20  # per graph
TIMEOUT_NS = 50_000_000  # of every wait on the GPU
GRIDS = (4, 8, 16, 32, 64, 128)
WARPS = 8

Enqueue = Callable[[], None]


def capture(stream: torch.cuda.Stream, enqueue: Sequence[Enqueue]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for step in enqueue:
            step()
    return graph


class Pair:
    """Graphs of the client and of the server on a stream each; server None: nobody answers.

    before: what makes another replay possible (outside of what is timed).
    """

    def __init__(self, client: Sequence[Enqueue], server: Sequence[Enqueue] | None,
                 before: Enqueue | None = None):
        self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        self._client = capture(self._streams[0], client)
        self._server = capture(self._streams[1], server) if server else None
        self._before = before
        self._num_trips = TRIPS

    def measure(self, replays: int) -> list[float]:
        """Microseconds per trip, one number a replay, the first two left out."""
        if self._before is not None:
            return [self._once() for _ in range(max(5, replays // 5))][2:]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 3)]
        torch.cuda.synchronize()
        for _ in range(replays + 2):
            if self._server is not None:
                with torch.cuda.stream(self._streams[1]):
                    self._server.replay()
        with torch.cuda.stream(self._streams[0]):
            events[0].record()
            for event in events[1:]:
                self._client.replay()
                event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return [1000 * ms / self._num_trips for ms in times[2:]]

    def _once(self) -> float:
        assert self._before is not None and self._server is not None
        self._before()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._streams[1]):
            self._server.replay()
        with torch.cuda.stream(self._streams[0]):
            begin.record()
            self._client.replay()
            end.record()
        torch.cuda.synchronize()
        return 1000 * begin.elapsed_time(end) / self._num_trips


def make_step(gpu: GpuTarget, num_rows: int, *, in_place: bool) -> Loopback:
    hidden = torch.randn(num_rows, HIDDEN_SIZE).to(torch.bfloat16)
    step = Loopback(
        gpu, StepShape(num_rows, HIDDEN_SIZE, 1, 1, [[0]]), hidden,
        torch.zeros(num_rows, 1, dtype=torch.int64), torch.ones(num_rows, 1),
        in_place=in_place, timeout_ns=TIMEOUT_NS,
    )
    step.servers[0].reply_args.expert_output = 0  # echo
    return step


def check(step: Loopback, name: str) -> None:
    """The rows came back, and no kernel reported anything."""
    code = step.status.read_struct(KernelStatus).code
    num_rows = step.shape.num_tokens
    want = step.hidden.view(torch.bfloat16, num_rows, HIDDEN_SIZE).cpu()
    if code or not torch.equal(step.result(), want):
        raise SystemExit(f"{name}, {num_rows} rows: wrong result or status {code}")


def direct(gpu: GpuTarget, num_rows: int, replays: int, grid: int) -> list[float]:
    step = make_step(gpu, num_rows, in_place=True)
    server = step.servers[0]
    client = gpu.prepare([("client_send_direct", step.send_args),
                          ("client_combine", step.combine)], grid=grid, warps=WARPS)
    serve = gpu.prepare([("server_poll", server.poll),
                         ("server_reply_in_place", server.reply_args)],
                        grid=[1, grid], warps=[1, WARPS])
    pair = Pair([client.run] * TRIPS, [serve.run] * TRIPS)
    step.output.tensor.fill_(0xEE)
    times = pair.measure(replays)
    check(step, "direct")
    return times


def single(gpu: GpuTarget, num_rows: int, replays: int) -> list[float]:
    step = make_step(gpu, num_rows, in_place=False)
    server = step.servers[0]
    client = gpu.prepare([("client_route", step.route), ("client_pack", step.pack),
                          ("client_put_direct", step.put), ("client_combine", step.combine)],
                         warps=32)
    serve = gpu.prepare([("server_poll", server.poll), ("server_reply_direct", server.reply_args)],
                        warps=[1, 32])

    def send(seq: int) -> None:
        step.set_seq(seq)  # by value: every trip of the graph has its own
        client.run()

    def rewind() -> None:
        for block, offset in ((server.recv, server.recv.num_bytes - 16),
                              (step.replies[0], step.replies[0].num_bytes - 16),
                              (server.slot, 48)):
            block.tensor[offset : offset + 8].zero_()

    pair = Pair([lambda i=i: send(i + 1) for i in range(TRIPS)], [serve.run] * TRIPS, rewind)
    times = pair.measure(replays)
    check(step, "single")
    return times


class FloorArgs(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in
        ("source", "slot", "reply", "output", "slot_flag", "reply_flag", "arrived", "count",
         "timeout_ns")
    )


class Floor:
    """The bare kernels of gpu_floor.cu, compiled here."""

    def __init__(self, gpu: GpuTarget):
        core, self._driver = require("cuda.core"), require("cuda.bindings.driver")
        torch.cuda.synchronize(gpu.device)  # makes the device's primary context
        core.Device(gpu.device.index).set_current()
        source = Path(__file__).with_name("gpu_floor.cu").read_text()
        options = core.ProgramOptions(arch=device_arch(gpu.device.index), std="c++17")
        code = core.Program(source, "c++", options).compile("cubin")
        self._kernels = {}
        for name in ("floor_client", "floor_server"):
            error, function = self._driver.cuKernelGetFunction(code.get_kernel(name).handle)
            assert int(error) == 0, error
            (error,) = self._driver.cuFuncLoad(function)
            assert int(error) == 0, error
            self._kernels[name] = function
        self._code = code
        self._gpu = gpu

    def launch(self, name: str, args: FloorArgs, grid: int) -> Enqueue:
        params = (ctypes.c_void_p * 1)(ctypes.addressof(args))

        def run() -> None:
            stream = self._driver.CUstream(torch.cuda.current_stream().cuda_stream)
            (error,) = self._driver.cuLaunchKernel(
                self._kernels[name], grid, 1, 1, 32 * WARPS, 1, 1, 0, stream,
                ctypes.addressof(params), 0,
            )
            assert int(error) == 0, error

        return run

    def measure(self, num_rows: int, replays: int, grid: int) -> list[float]:
        rows = torch.randn(num_rows, HIDDEN_SIZE, device=self._gpu.device).to(torch.bfloat16)
        slot, reply, output = (torch.empty_like(rows) for _ in range(3))
        flags = torch.zeros(32, dtype=torch.int64, device=self._gpu.device)
        args = FloorArgs(
            rows.data_ptr(), slot.data_ptr(), reply.data_ptr(), output.data_ptr(),
            flags.data_ptr(), flags.data_ptr() + 128, flags.data_ptr() + 64,
            rows.numel() * 2 // 16, TIMEOUT_NS,
        )
        pair = Pair([self.launch("floor_client", args, grid)] * TRIPS,
                    [self.launch("floor_server", args, grid)] * TRIPS)
        times = pair.measure(replays)
        if not torch.equal(output, rows):
            raise SystemExit(f"floor, {num_rows} rows: other rows came back")
        return times


def memcpy(gpu: GpuTarget, num_rows: int, replays: int) -> list[float]:
    rows = torch.randn(num_rows, HIDDEN_SIZE, device=gpu.device).to(torch.bfloat16)
    there, back = torch.empty_like(rows), torch.empty_like(rows)

    def trip() -> None:
        there.copy_(rows)
        back.copy_(there)

    times = Pair([trip] * TRIPS, None).measure(replays)
    assert torch.equal(back, rows)
    return times


def best(measure: Callable[[int], list[float]]) -> tuple[float, float, int]:
    """(median, 99th percentile, blocks) of the fastest block count."""
    results = []
    for grid in GRIDS:
        times = measure(grid)
        results.append((statistics.median(times), sorted(times)[int(len(times) * 0.99)], grid))
    return min(results)


# ------------------------------------------------------------------ work queues


def queue_operations(gpu: GpuTarget, peer: Any, operations: list[dict], num_warps: int) -> float:
    """Microseconds of one launch of the operations on every warp (best of 5)."""
    table = gpu.place((IbgdaOperation * (len(operations) * num_warps))(*[
        IbgdaOperation(**operation) for _ in range(num_warps) for operation in operations
    ]))
    status = gpu.alloc(num_warps * ctypes.sizeof(KernelStatus))
    args = IbgdaRunArgs(peer=peer.addr, operations=table.addr, status=status.addr,
                        num_operations=len(operations))
    launch = gpu.prepare([("ibgda_run", args)], grid=num_warps)
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch.run()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end))
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
    put = dict(op=1, remote_addr=1 << 40, local_addr=1 << 40, num_bytes=64)
    return 1000 * queue_operations(gpu, peer, [put] * each, num_warps) / (each * num_warps)


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
        swap = int.from_bytes
        keys = gpu.place((IbgdaKey * 2)(
            IbgdaKey(local.addr, local.addr + 4096, swap(lkey.to_bytes(4, "big"), "little")),
            IbgdaKey(remote.addr, remote.addr + 4096, swap(rkey.to_bytes(4, "big"), "little")),
        ))
        peer = gpu.place(IbgdaPeer(
            qps=qp.addr, num_qps=1, local_keys=keys.addr, num_local_keys=1,
            remote_keys=keys.addr + ctypes.sizeof(IbgdaKey), num_remote_keys=1,
            timeout_ns=TIMEOUT_NS,
        ))
        put = dict(op=1, remote_addr=remote.addr, local_addr=local.addr, num_bytes=8)
        operations = [put, dict(op=6)] * num_puts
        return queue_operations(gpu, peer, operations, 1) / num_puts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1,8,32,128,512", help="numbers of rows, with commas")
    parser.add_argument("--replays", type=int, default=40, help="graph replays per number")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_trip: there is no GPU")
    started = time.monotonic()
    gpu = GpuTarget()
    floor = Floor(gpu)
    facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "trips_per_graph": TRIPS,
                             "threads_per_block": 32 * WARPS, "rows": {}}
    print(f"{'rows':>5} {'kB':>8} {'direct':>8} {'p99':>8} {'blocks':>7} {'floor':>8} {'blocks':>7}"
          f" {'single':>9} {'memcpy':>8} {'direct/floor':>13}")
    for num_rows in (int(text) for text in options.rows.split(",")):
        replays = options.replays
        ours = best(functools.partial(direct, gpu, num_rows, replays))
        bare = best(functools.partial(floor.measure, num_rows, replays))
        copy_us = statistics.median(memcpy(gpu, num_rows, replays))
        single_us = statistics.median(single(gpu, num_rows, replays))
        facts["rows"][num_rows] = {
            "direct_us": round(ours[0], 2), "direct_p99_us": round(ours[1], 2),
            "direct_blocks": ours[2], "floor_us": round(bare[0], 2), "floor_blocks": bare[2],
            "single_us": round(single_us, 1), "memcpy_us": round(copy_us, 2),
            "direct_over_floor": round(ours[0] / bare[0], 3),
        }
        print(f"{num_rows:>5} {num_rows * HIDDEN_SIZE * 2 / 1000:>8.1f} {ours[0]:>8.2f} "
              f"{ours[1]:>8.2f} {ours[2]:>7} {bare[0]:>8.2f} {bare[2]:>7} {single_us:>9.1f} "
              f"{copy_us:>8.2f} {ours[0] / bare[0]:>13.3f}", flush=True)
    facts["ns_per_post"] = {n: round(posting(gpu, n), 1) for n in (1, 8, 32)}
    print("posting to one ring in GPU memory, ns per put, by warps:", facts["ns_per_post"])
    facts["pinned_put_us"] = round(pinned_round_trip(gpu), 2)
    print(f"put of 8 bytes to its completion, pinned ring, soft HCA: {facts['pinned_put_us']} us")
    facts["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
