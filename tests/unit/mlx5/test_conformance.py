"""tests/conformance on rings, records and completion queues that the mlx5 bring-up laid out.

Bytes, indices and completions: every test of those files that an adapter's queue can be asked (one
collapsed completion queue). The tests are those very functions; only who makes the queue differs.
"""

from __future__ import annotations

import functools
import importlib
import inspect

import pytest

from tests.conformance import rig
from tests.mlx5_over import OverMlx5

FILES = ("test_bytes", "test_index", "test_completion", "test_order", "test_state")
# These make completion queues of other kinds, take minutes, or look at what only the software
# HCA's own allocation has.
NOT_HERE = {
    "test_24_more_than_65536_entries", "test_45_up_to_32_warps_with_puts_of_one_to_three_entries",
    "test_44_one_slot_reused_100000_times_with_a_late_payload",
}


@pytest.fixture(autouse=True)
def _made_by_mlx5(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rig, "SoftHca", OverMlx5)


def _again(test):
    """The same test; it fails too if no queue pair came from the bring-up."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        before = OverMlx5.laid_out
        test(*args, **kwargs)
        assert OverMlx5.laid_out > before, "no queue pair was laid out by the mlx5 bring-up"

    return run


for _file in FILES:
    for _name, _test in vars(importlib.import_module(f"tests.conformance.{_file}")).items():
        if _name.startswith("test_") and _name not in NOT_HERE and inspect.isfunction(_test):
            globals()[_name] = _again(_test)
