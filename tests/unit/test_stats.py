"""Counters and stage times: what they keep and forget, what they say with nothing in them."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from expertwire.observe.stats import RING, Ring, ServerCounters, StageTimes


def test_an_empty_ring_says_zero():
    ring = Ring()
    assert (ring.count, ring.total_ns, ring.percentiles_us()) == (0, 0, (0.0, 0.0))


def test_percentiles_are_those_of_the_durations():
    ring = Ring()
    for ns in range(1000, 101_000, 1000):  # 1 to 100 us
        ring.add(ns)
    assert ring.count == 100 and ring.total_ns == 5_050_000
    assert ring.percentiles_us() == pytest.approx((50.5, 99.01))


def test_the_last_durations_count_and_the_sum_goes_on():
    """Memory is bounded: what is older than the ring only counts."""
    ring = Ring()
    for _ in range(RING):
        ring.add(1_000_000)
    assert ring.percentiles_us() == (1000.0, 1000.0)
    for _ in range(RING):
        ring.add(2000)
    assert ring.count == 2 * RING
    assert ring.total_ns == RING * 1_002_000
    assert ring.percentiles_us() == (2.0, 2.0), "the first ones are forgotten"
    ring.add(7_000_000)
    assert ring.percentiles_us()[0] == 2.0


def test_the_layout_is_the_one_native_code_writes():
    """struct ew_ring: count, sum, durations, 64 bits each; here written as native code would."""
    ring = Ring()
    words = (ctypes.c_uint64 * 3).from_address(ring.address)
    words[0], words[1], words[2] = 1, 5000, 5000
    assert (ring.count, ring.total_ns, ring.percentiles_us()) == (1, 5000, (5.0, 5.0))


def test_stages_are_made_on_first_use_and_empty_ones_are_not_shown():
    times = StageTimes()
    assert times.summary() == {}
    assert times.ring("wait") is times.ring("wait")
    assert times.summary() == {}, "asked for, but nothing happened yet"
    times.add("pack", 1500)
    times.add("pack", 2500)
    assert times.summary() == {
        "pack": {"count": 2, "total_ms": 0.004, "p50_us": 2.0, "p99_us": 2.5}
    }


def test_a_summary_while_another_thread_adds_stages():
    times, stop = StageTimes(), threading.Event()

    def write():
        for i in range(2000):
            times.add(f"stage {i % 200}", i)
        stop.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not stop.is_set():
        for stage in times.summary().values():
            assert stage["count"] >= 1
    thread.join()
    assert sum(stage["count"] for stage in times.summary().values()) == 2000


def test_counters_of_one_server():
    counters = ServerCounters()
    assert counters.summary() == {
        "rows": 0, "messages": 0, "bytes_sent": 0, "bytes_received": 0, "p50_us": 0.0,
        "p99_us": 0.0, "wait_ms": 0.0,
    }
    counters.add(rows=3, bytes_sent=100, bytes_received=50, duration_ns=4000)
    counters.add(rows=5, bytes_sent=200, bytes_received=70, duration_ns=8000)
    summary = counters.summary()
    assert summary["p50_us"] == 6.0 and summary["wait_ms"] == 0.012
    assert (summary["rows"], summary["messages"]) == (8, 2)
    assert (summary["bytes_sent"], summary["bytes_received"]) == (300, 120)


def test_counters_do_not_overflow_where_32_bits_would():
    counters = ServerCounters()
    for _ in range(3):
        counters.add(rows=1, bytes_sent=2**40, bytes_received=2**41, duration_ns=2**34)
    assert counters.summary()["bytes_sent"] == 3 * 2**40
    assert counters.summary()["p99_us"] == pytest.approx(2**34 / 1000)


def test_counters_and_their_durations_share_one_block():
    """struct ew_counters: four counters, then an ew_ring."""
    counters = ServerCounters()
    words = np.ctypeslib.as_array((ctypes.c_int64 * (6 + RING)).from_address(counters.address))
    words[:7] = (9, 2, 30, 40, 2, 6000, 2000)
    words[7] = 4000
    assert counters.summary() == {
        "rows": 9, "messages": 2, "bytes_sent": 30, "bytes_received": 40, "p50_us": 3.0,
        "p99_us": pytest.approx(3.98, abs=0.05), "wait_ms": 0.006,
    }
