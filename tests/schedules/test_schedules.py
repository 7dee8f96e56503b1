"""The posting paths of the device code in the interleavings of --schedules seeds."""

from __future__ import annotations

import pytest

from tests.schedules import pairs, scenarios
from tests.schedules.replay import command
from tests.schedules.scenarios import SCENARIOS

SEEDS_PER_TEST = 10


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        seeds = metafunc.config.getoption("--schedules")
        if seeds < 1:
            raise pytest.UsageError(f"--schedules must be at least 1, not {seeds}")
        metafunc.parametrize("first_seed", range(0, seeds, SEEDS_PER_TEST))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_interleaving_keeps_its_promises(scenario, first_seed, request):
    last = min(first_seed + SEEDS_PER_TEST, request.config.getoption("--schedules"))
    for seed in range(first_seed, last):
        try:
            SCENARIOS[scenario](seed)
        except Exception as err:
            pytest.fail(f"{type(err).__name__}: {err}\nreplay: {command(scenario, seed)}")


@pytest.mark.parametrize("scenario", ["shared_queue", "full_ring", "errors", "rounds"])
def test_a_seed_is_one_interleaving(scenario, monkeypatch):
    """The same seed makes the engines see the same entries in the same order."""
    traces = []

    class Recorder(scenarios.Watch):
        def _on_entry(self, _context, qpn, idx, wqe, num_bytes):
            traces[-1].append((qpn, idx, num_bytes, self.rig.states[0].prod_idx))
            return super()._on_entry(_context, qpn, idx, wqe, num_bytes)

    class RecordingHca(pairs.SoftHca):
        def __init__(self, **options):
            super().__init__(**options)
            self.set_hook(lambda _, *entry: traces[-1].append((self.pd, *entry[:2])) or 0)

    monkeypatch.setattr(scenarios, "Watch", Recorder)
    monkeypatch.setattr(pairs, "SoftHca", RecordingHca)
    for _ in range(2):
        traces.append([])
        SCENARIOS[scenario](5)
    assert traces[0] == traces[1] and traces[0]
