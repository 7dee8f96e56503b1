"""The simulation of bench/incast.py: goodput collapses without credits and not with them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from expertwire.pacing import Pace, shares


@pytest.fixture(scope="module")
def incast():
    path = Path(__file__).parents[2] / "bench" / "incast.py"
    spec = importlib.util.spec_from_file_location("bench_incast", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def cases(incast):
    network = incast.Network(segment=64 << 10)
    return {
        (clients, paced): incast.measure(clients, 8, paced, network=network, milliseconds=3)
        for clients in (8, 16, 32) for paced in (False, True)
    }


def test_without_credits_goodput_collapses(cases):
    goodput = {n: cases[n, False]["goodput_gb_per_s"] for n in (8, 16, 32)}
    assert goodput[8] > 40, "as many clients as servers fit"
    assert goodput[32] < 0.65 * goodput[8]
    assert cases[32, False]["dropped_segments"] > 1000
    assert cases[32, False]["carried_gb_per_s"] > 1.4 * goodput[32], "links are full of repeats"


def test_with_credits_it_does_not(cases):
    best = max(cases[n, False]["goodput_gb_per_s"] for n in (8, 16, 32))
    for clients in (16, 32):
        paced, unpaced = cases[clients, True], cases[clients, False]
        assert paced["goodput_gb_per_s"] > 0.9 * best
        assert paced["goodput_gb_per_s"] > unpaced["goodput_gb_per_s"]
    assert not any(cases[n, True]["dropped_segments"] for n in (8, 16, 32)), "nothing overflows"
    assert cases[32, True]["goodput_gb_per_s"] > 1.6 * cases[32, False]["goodput_gb_per_s"]
    assert cases[8, True]["goodput_gb_per_s"] > 0.7 * best, "small credits cost something"


def test_it_runs_the_rules_that_servers_and_clients_run(incast):
    assert incast.shares is shares and incast.Pace is Pace


def test_the_same_seed_gives_the_same_case(incast):
    def run(seed):
        network = incast.Network(segment=64 << 10, buffer=1 << 20)
        return incast.measure(16, 4, False, network=network, milliseconds=0.5, seed=seed)

    assert run(1) == run(1) != run(2)


def test_what_was_sent_arrives_once_and_whole(incast):
    """With a tiny buffer and many losses, every answered message was received in order."""
    network = incast.Network(segment=16 << 10, buffer=64 << 10, timeout=50_000.0)
    result = incast.measure(6, 1, False, network=network, milliseconds=1, max_rows=16)
    assert result["dropped_segments"] > 0 and result["timeouts"] > 0
    assert 0 < result["goodput_gb_per_s"] <= result["carried_gb_per_s"] <= network.rate
