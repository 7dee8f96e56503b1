"""tests/conformance on rings, records and completion queues that the mlx5 bring-up laid out.

Bytes, indices, completions, states, and some of order: the tests are those very functions; only who
makes the queue differs. They fail here too if no queue came from the bring-up.
"""

from __future__ import annotations

import functools
import importlib
import inspect

import pytest
from tests.conformance import rig
from tests.mlx5_over import COLLAPSED, OverMlx5

FILES = ("test_bytes", "test_index", "test_completion", "test_order", "test_state")
NOT_HERE = {
    "no queue pair": {
        "test_01_device_code_and_python_write_the_same_bytes",
        "test_02_walking_ones_through_every_ctrl_field",
        "test_02_walking_ones_through_addresses_keys_and_counts",
        "test_02_walking_ones_through_every_completion_field",
        "test_07_pointer_segments_never_carry_bit_31", "test_23_quiet_against_a_64_bit_model",
    },
    "a completion queue that is a ring": {
        "test_22_ring_queue_flips_the_owner_bit",
        "test_22_overrun_fails_the_queue_unless_it_is_to_be_ignored",
        "test_22_overrun_is_told_although_no_completion_can",
    },
    "of the engine, not of the memory it works on; seconds": {
        "test_24_more_than_65536_entries",
        "test_44_engine_stopped_between_payload_and_flag",
        "test_45_a_waiting_call_has_its_turn_before_the_engine_has_another",
        "test_45_control_calls_do_not_starve_the_engine",
        "test_45_up_to_32_warps_with_puts_of_one_to_three_entries",
    },
}


@pytest.fixture(autouse=True)
def _made_by_mlx5(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rig, "SoftHca", OverMlx5)


def _again(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        before = OverMlx5.laid_out
        test(*args, **kwargs)
        assert OverMlx5.laid_out > before, "no queue pair was laid out by the mlx5 bring-up"

    # Of the kinds of completion queue only the one that an adapter is asked for.
    run.pytestmark = [
        pytest.mark.parametrize("cq_flags", [COLLAPSED]).mark if "cq_flags" in mark.args else mark
        for mark in getattr(test, "pytestmark", [])
    ]
    return run


def test_every_name_that_is_left_out_exists():
    known = {name for file in FILES
             for name in vars(importlib.import_module(f"tests.conformance.{file}"))}
    assert set().union(*NOT_HERE.values()) <= known


for _file in FILES:
    for _name, _test in vars(importlib.import_module(f"tests.conformance.{_file}")).items():
        if (_name.startswith("test_") and inspect.isfunction(_test)
                and not any(_name in names for names in NOT_HERE.values())):
            globals()[_name] = _again(_test)
