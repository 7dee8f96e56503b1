"""Stamps of a device around its stages, on the CPU target: the same kernel, ring and alignment."""

from __future__ import annotations

import time

import pytest
from tests import chrome_trace
from tests.chrome_trace import slices

from expertwire.launch import struct_bytes
from expertwire.target import CpuTarget
from expertwire.trace import recorder as trace
from expertwire.trace.device import Call, DeviceStamps, stamps_for


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.json"


def launch(times, seconds=0.002):
    def run():
        begin = time.perf_counter_ns()
        time.sleep(seconds)
        times.append((begin, time.perf_counter_ns()))

    return Call(run)


@pytest.mark.parametrize("warp_size", [1, 32])
def test_stages_are_where_the_host_saw_them(path, warp_size):
    times: list[tuple[int, int]] = []
    with trace.tracing(path):
        stamps = stamps_for(CpuTarget(warp_size), "GPU 0")
        assert stamps is not None
        send, combine = (stamps.around(s, launch(times)) for s in ("send", "combine"))
        with trace.span("outside"):
            for _ in range(5):
                send.run()
                combine.run()
        fit = stamps.collect()
    events = chrome_trace.read(path)
    found = sorted(slices(events, "send") + slices(events, "combine"), key=lambda e: e["ts"])
    assert [e["name"] for e in found] == ["send", "combine"] * 5
    (outside,) = slices(events, "outside")
    for e, (begin, end) in zip(found, times, strict=True):
        assert outside["ts"] <= e["ts"] + 1000 and e["cat"] == "device"
        assert e["dur"] * 1000 >= (end - begin) - 2 * fit.error_ns
    assert "GPU 0" in {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert fit.rate == pytest.approx(1, abs=0.02)


def test_the_end_of_the_trace_collects_and_nothing_twice(path):
    times: list = []
    with trace.tracing(path):
        stamps = DeviceStamps(CpuTarget(), "GPU 1")
        stage = stamps.around("poll", launch(times, 0))
        stage.run()
        stamps.collect()
        stage.run()
    assert len(slices(chrome_trace.read(path), "poll")) == 2


def test_the_last_stamps_are_kept(path):
    times: list = []
    with trace.tracing(path):
        stamps = DeviceStamps(CpuTarget(), "GPU 1", capacity=6)
        stage = stamps.around("poll", launch(times, 0))
        for _ in range(10):
            stage.run()
    assert len(slices(chrome_trace.read(path), "poll")) == 3


def test_without_a_trace_nothing_is_launched():
    assert stamps_for(CpuTarget(), "GPU") is None


def test_stamps_that_are_gone_are_not_asked(path):
    with trace.tracing(path):
        DeviceStamps(CpuTarget(), "GPU")
    assert not slices(chrome_trace.read(path), "poll")


def test_python_and_native_agree_on_a_stamp():
    import ctypes

    from expertwire.trace.device import ClockStamp

    assert struct_bytes("ClockStamp") == ctypes.sizeof(ClockStamp) == 16
