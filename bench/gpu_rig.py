"""What the GPU benchmarks share: graphs of trips on one GPU or two, and the bare kernels."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that spin must not share one
# Multicast over NVLink is nothing that is measured here.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch

from expertwire.cuda.compile import require
from expertwire.cuda.launch import device_arch
from expertwire.device_structs import KernelStatus
from expertwire.loopback import Loopback
from expertwire.target import GpuTarget

HIDDEN_SIZE = 7168
TRIPS = 20  # per graph
TIMEOUT_NS = 50_000_000  # of every wait on the GPU
WARPS = 8

Enqueue = Callable[[], None]


def reach_each_other(devices: Sequence[int]) -> None:
    """Kernels of each GPU may use the others' memory. Raises RuntimeError where that is not so."""
    runtime = require("cuda.bindings.runtime")
    for here, there in itertools.permutations(dict.fromkeys(devices), 2):
        torch.zeros(1, device=f"cuda:{there}")
        with torch.cuda.device(here):
            torch.zeros(1, device=f"cuda:{here}")
            (error,) = runtime.cudaDeviceEnablePeerAccess(there, 0)
            if error.name not in ("cudaSuccess", "cudaErrorPeerAccessAlreadyEnabled"):
                raise RuntimeError(f"GPU {here} does not reach GPU {there}: {error.name}")
            runtime.cudaGetLastError()  # "already enabled" is no error of what comes next


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def capture(stream: torch.cuda.Stream, enqueue: Sequence[Enqueue]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    apart = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    with torch.cuda.device(stream.device), apart:  # other threads may go on
        for step in enqueue:
            step()
    return graph


class Pair:
    """Graphs of the client and of the server on a stream each; server None: nobody answers.

    devices: the client's and the server's. before: what makes another replay possible (outside of
    what is timed).
    """

    def __init__(self, client: Sequence[Enqueue], server: Sequence[Enqueue] | None,
                 before: Enqueue | None = None, devices: tuple[int, int] = (0, 0)):
        self._streams = [torch.cuda.Stream(device) for device in devices]
        synchronize(devices)
        self._client = capture(self._streams[0], client)
        self._server = capture(self._streams[1], server) if server else None
        self._before, self._devices, self._num_trips = before, devices, len(client)

    def measure(self, replays: int) -> list[float]:
        """Microseconds per trip, one number a replay, the first two left out."""
        if self._before is not None:
            return [self._once() for _ in range(max(5, replays // 5))][2:]
        with torch.cuda.device(self._devices[0]):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 3)]
        synchronize(self._devices)
        self._serve(replays + 2)
        with torch.cuda.device(self._devices[0]), torch.cuda.stream(self._streams[0]):
            events[0].record()
            for event in events[1:]:
                self._client.replay()
                event.record()
        synchronize(self._devices)
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return [1000 * ms / self._num_trips for ms in times[2:]]

    def _serve(self, replays: int) -> None:
        if self._server is not None:
            with torch.cuda.device(self._devices[1]), torch.cuda.stream(self._streams[1]):
                for _ in range(replays):
                    self._server.replay()

    def _once(self) -> float:
        assert self._before is not None
        self._before()
        self._wait()
        with torch.cuda.device(self._devices[0]):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._serve(1)
        with torch.cuda.device(self._devices[0]), torch.cuda.stream(self._streams[0]):
            begin.record()
            self._client.replay()
            end.record()
        self._wait()
        return 1000 * begin.elapsed_time(end) / self._num_trips

    def _wait(self) -> None:
        """For this pair's streams: an HCA kernel may run beside them."""
        for stream in (*map(torch.cuda.current_stream, self._devices), *self._streams):
            stream.synchronize()


class Rounds:
    """A graph of `per_graph` rounds with an event between any two, so that each is timed."""

    def __init__(self, enqueue: Enqueue, device: int, per_graph: int = 50):
        self.stream = torch.cuda.Stream(device)
        self.per_graph = per_graph
        self._device = device
        with torch.cuda.device(device):
            self._events = [
                torch.cuda.Event(enable_timing=True, external=True) for _ in range(per_graph + 1)
            ]
        steps: list[Enqueue] = [lambda: self._events[0].record(self.stream)]
        for event in self._events[1:]:
            steps += [enqueue, functools.partial(event.record, self.stream)]
        self._graph = capture(self.stream, steps)

    def replay(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream):
            self._graph.replay()

    def times(self) -> list[float]:
        """Microseconds of each round of the replay before; waits for it."""
        self.stream.synchronize()
        return [1000 * a.elapsed_time(b) for a, b in itertools.pairwise(self._events)]


def synchronize(devices: Sequence[int]) -> None:
    for device in dict.fromkeys(devices):
        torch.cuda.synchronize(device)


def check(step: Loopback, name: str) -> None:
    """The rows came back, and no kernel reported anything."""
    code = step.status.read_struct(KernelStatus).code
    num_rows = step.shape.num_tokens
    want = step.hidden.view(torch.bfloat16, num_rows, step.shape.hidden_size).cpu()
    if code or not torch.equal(step.result(), want):
        raise SystemExit(f"{name}, {num_rows} rows: wrong result or status {code}")


class FloorArgs(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in
        ("source", "slot", "reply", "output", "slot_flag", "reply_flag", "arrived", "count",
         "timeout_ns")
    )


class Floor:
    """The bare kernels of gpu_floor.cu, compiled here; client and server on a GPU each."""

    def __init__(self, client: GpuTarget, server: GpuTarget):
        core, self._driver = require("cuda.core"), require("cuda.bindings.driver")
        source = Path(__file__).with_name("gpu_floor.cu").read_text()
        arch = device_arch(client.device.index)
        options = core.ProgramOptions(arch=arch, std="c++17")
        self._code = core.Program(source, "c++", options).compile("cubin")
        self._sides = client.device.index, server.device.index
        self._kernels = {
            side: self._load(name, device) for side, name, device in
            (("client", "floor_client", self._sides[0]), ("server", "floor_server", self._sides[1]))
        }

    def _load(self, name: str, device: int) -> Any:
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # makes the device's primary context
            error, function = self._driver.cuKernelGetFunction(
                self._driver.CUkernel(int(self._code.get_kernel(name).handle)))
            assert int(error) == 0, error
            (error,) = self._driver.cuFuncLoad(function)
            assert int(error) == 0, error
        return function

    def _launch(self, side: str, args: FloorArgs, grid: int) -> Enqueue:
        params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        device = self._sides[side == "server"]

        def run() -> None:
            stream = self._driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
            (error,) = self._driver.cuLaunchKernel(
                self._kernels[side], grid, 1, 1, 32 * WARPS, 1, 1, 0, stream,
                ctypes.addressof(params), 0,
            )
            assert int(error) == 0, error

        return run

    def measure(self, num_rows: int, replays: int, grid: int) -> list[float]:
        """Microseconds per trip, one number a replay."""
        here, there = (torch.device("cuda", index) for index in self._sides)
        rows = torch.randn(num_rows, HIDDEN_SIZE, device=here).to(torch.bfloat16)
        slot, slot_flags = torch.empty_like(rows, device=there), flags(there)
        reply, output, reply_flags = torch.empty_like(rows), torch.empty_like(rows), flags(here)
        # A side's count of arrived blocks lies at home, as its flag does.
        sides = {
            side: FloorArgs(
                rows.data_ptr(), slot.data_ptr(), reply.data_ptr(), output.data_ptr(),
                slot_flags.data_ptr(), reply_flags.data_ptr(), own.data_ptr() + 64,
                rows.numel() * 2 // 16, TIMEOUT_NS,
            ) for side, own in (("client", reply_flags), ("server", slot_flags))
        }
        pair = Pair([self._launch("client", sides["client"], grid)] * TRIPS,
                    [self._launch("server", sides["server"], grid)] * TRIPS, devices=self._sides)
        times = pair.measure(replays)
        if not torch.equal(output, rows):
            raise SystemExit(f"floor, {num_rows} rows: other rows came back")
        return times


def flags(device: torch.device) -> torch.Tensor:
    return torch.zeros(32, dtype=torch.int64, device=device)
