"""Stages of a device in a trace: stamps of its own timer around each launch, on the host's clock.

A stamp is a kernel of one thread on the same stream, so a captured graph stamps in every replay.
The device's timer is compared with the host's when the stamps are made and when they are collected,
which the end of the trace does (trace_align.fit_clock). Where no trace is active when a client or
server is made, nothing is launched.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np

from ..device_structs import ClockStamp, ClockStampArgs
from ..target import Runnable, Target
from . import recorder as trace
from .align import ClockFit, fit_clock
from .file import KIND_DEVICE, Record

STAMPS = 1 << 16  # kept per device, the last ones
SAMPLES = 16  # comparisons of the clocks, each time


class Call:
    """Something that enqueues work, as a launch."""

    def __init__(self, call: Callable[[], object]):
        self._call = call

    def run(self) -> None:
        self._call()


class _Around:
    """A launch with a stamp before and after it."""

    def __init__(self, *launches: Runnable):
        self._launches = launches

    def run(self) -> None:
        for launch in self._launches:
            launch.run()


class DeviceStamps:
    """Stamps of one stream's stages. name: of its track in the trace.

    `around(stage, launch)` makes the launch stamp; `collect()` writes what was stamped since the
    last time into the trace, and waits for the device.
    """

    def __init__(self, target: Target, name: str, capacity: int = STAMPS):
        self.target, self.name, self._capacity = target, name, capacity
        self._stamps = target.alloc(capacity * ctypes.sizeof(ClockStamp))
        self._count = target.alloc(8)
        self._stages: list[str] = []
        self._collected = 0
        self._clock_stamps, self._clock_count = target.alloc(16), target.alloc(8)
        self._read_clock = self._stamp(self._clock_stamps.addr, self._clock_count.addr, 1, 0)
        self._samples = self._compare()
        trace.before_stop(self.collect)

    def _stamp(self, stamps: int, count: int, capacity: int, mark: int) -> Runnable:
        args = ClockStampArgs(stamps=stamps, count=count, capacity=capacity, mark=mark)
        return self.target.prepare([("clock_stamp", args)])

    def around(self, stage: str, launch: Runnable) -> Runnable:
        """The same launch, with stamps. Stages of one stream follow one another."""
        if stage not in self._stages:
            self._stages.append(stage)
        mark = 2 * self._stages.index(stage)
        place = self._stamps.addr, self._count.addr, self._capacity
        return _Around(self._stamp(*place, mark), launch, self._stamp(*place, mark + 1))

    def _compare(self) -> list[tuple[int, int, int]]:
        samples = []
        for _ in range(SAMPLES):
            self.target.synchronize()
            before = time.perf_counter_ns()
            self._read_clock.run()
            self.target.synchronize()
            after = time.perf_counter_ns()
            samples.append((before, self._clock_stamps.read_struct(ClockStamp).time_ns, after))
        return samples

    def collect(self) -> ClockFit:
        """Writes the stages into the active trace, on the host's clock; how well that is known."""
        self._samples += self._compare()
        fit = fit_clock(self._samples)
        count = int.from_bytes(self._count.read(), "little")
        stamps = np.frombuffer(self._stamps.read(), np.dtype(ClockStamp))
        first = max(self._collected, count - self._capacity)
        open_at: dict[int, int] = {}
        for number in range(first, count):
            stamp = stamps[number % self._capacity]
            if int(stamp["number"]) != (number + 1) & 0xFFFFFFFF:
                continue  # not written yet, or written over
            mark, host_ns = int(stamp["mark"]), fit.to_host(int(stamp["time_ns"]))
            if mark % 2 == 0:
                open_at[mark] = host_ns
            elif mark - 1 in open_at:
                stage = self._stages[mark // 2]
                trace.add(Record(
                    kind=KIND_DEVICE, begin_ns=open_at.pop(mark - 1), end_ns=host_ns,
                    hca=id(self) & 0xFFFFFFFFFFFF, wqe=f"{stage}\0{self.name}".encode()[:64],
                ))
        self._collected = count
        return fit


def stamps_for(target: Target, name: str) -> DeviceStamps | None:
    """Stamps while a trace is active, else None: then nothing is launched."""
    return DeviceStamps(target, name) if trace.active else None
