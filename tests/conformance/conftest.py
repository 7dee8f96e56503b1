"""Runs each check on every HCA that can: the software HCA, the same over UCX (with --ucx), and the
HCA kernel on the CPU target and, where there is one, on a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from expertwire.hca.kernel import KernelHca
from expertwire.hca.ucx import UcxHca
from expertwire.target import CpuTarget, GpuTarget
from tests.conformance import rig

# What only the software HCA has, and the tests that need it.
SOFT_ONLY = {
    "a hook before every entry": {
        "test_17_more_than_a_ring_in_small_steps_is_caught_too", "test_27_one_gib_is_allowed",
        "test_37_after_revoke_returns_the_memory_is_quiet",
        "test_40_every_syndrome_reaches_the_device_code",
        "test_41_held_entries_of_a_lost_peer_fail_too", "test_46_reserver_that_never_submits",
        "test_47_full_ring_blocks_and_overwrites_nothing", "test_49_quiet_returns_the_syndrome",
    },
    "an engine thread": {
        "test_31_atomics_are_exact_between_two_engines",
        "test_45_a_waiting_call_has_its_turn_before_the_engine_has_another",
        "test_45_control_calls_do_not_starve_the_engine",
    },
    "a large entry in pieces": {
        "test_37_key_revoked_in_flight", "test_41_peer_lost_in_the_middle_of_a_write",
    },
    "receives for immediates": {
        "test_33_immediate_from_the_device_code", "test_33_immediate_is_delivered_once",
        "test_33_no_receive_waits_then_fails_and_writes_nothing",
        "test_33_receives_beyond_the_ring_are_refused",
        "test_33_bad_key_is_told_before_a_missing_receive",
        "test_33_waiting_for_a_receive_shows_the_entry_to_the_hook_once",
        "test_42_reset_forgets_a_wait_for_a_receive",
    },
    "windows in pages shared with other processes": {
        "test_32_word_that_the_peer_placed_at_an_odd_address_is_refused_too",
        "test_35_page_that_the_peer_scribbled_on_harms_nobody",
        "test_35_published_range_outside_the_descriptor_is_refused",
        "test_37_entries_are_reused_and_bounded",
        "test_37_revoking_a_key_that_the_peer_holds_times_out",
    },
    "an engine that launches drive": {
        "test_03_keys_are_not_swapped_twice", "test_14_every_doorbell_mode_of_the_device_code",
        "test_18_quiet_on_a_fresh_queue_returns_and_on_a_posted_one_waits",
        "test_24_device_code_and_engine_cross_2_to_the_32_together",
        "test_24_more_than_65536_entries", "test_26_no_schedule_shows_a_torn_completion",
        "test_27_read_by_the_device_code",
        "test_28_put_cut_at_local_ends_and_at_every_byte",
        "test_28_put_cut_at_region_ends_arrives_whole",
        "test_29_thirty_three_chunks_go_in_rounds_and_no_region_is_an_error",
        "test_30_atomics_of_the_device_code", "test_31_atomics_are_exact_under_many_queues",
        "test_44_one_slot_reused_100000_times_with_a_late_payload",
        "test_45_many_warps_on_one_queue",
        "test_45_up_to_32_warps_with_puts_of_one_to_three_entries",
        "test_48_last_message_always_leaves",
        "test_50_schedules_give_the_same_memory",
    },
}
# What the software HCA over UCX runs with --ucx, less these.
NOT_OVER_UCX = {
    "windows in pages shared with other processes": SOFT_ONLY[
        "windows in pages shared with other processes"
    ] | {"test_27_source_and_target_are_the_same_bytes",
         "test_27_shifted_overlap_stays_inside_its_target"},
    "queues that start elsewhere than at 0": {
        "test_12_entry_of_several_blocks_lies_across_2_to_the_32",
        "test_12_error_beyond_2_to_the_32_keeps_its_index",
        "test_12_index_wraps_at_2_to_the_32",
        "test_12_many_entries_of_one_doorbell_lie_across_2_to_the_32",
        "test_14_old_doorbells_around_2_to_the_32_are_ignored",
        "test_17_jump_across_2_to_the_32_fails_the_queue",
        "test_22_count_of_completions_outgrows_its_24_bits",
        "test_24_device_code_and_engine_cross_2_to_the_32_together",
    },
    "an engine that moves one entry, or one piece, per call": {
        "test_26_no_schedule_shows_a_torn_completion",
        "test_18_quiet_on_a_fresh_queue_returns_and_on_a_posted_one_waits",
        "test_37_key_revoked_in_flight", "test_41_peer_lost_in_the_middle_of_a_write",
        "test_44_engine_stopped_between_payload_and_flag",
        "test_45_a_waiting_call_has_its_turn_before_the_engine_has_another",
    },
    "deadlines shorter than a round trip on a busy machine": {
        "test_33_no_receive_waits_then_fails_and_writes_nothing",
        "test_42_reset_forgets_a_wait_for_a_receive", "test_46_reserver_that_never_submits",
        "test_47_full_ring_blocks_and_overwrites_nothing",
    },
    "a path that misbehaves on purpose": {
        "test_44_one_slot_reused_100000_times_with_a_late_payload",
    },
    "minutes of round trips": {
        "test_02_engine_compares_every_bit_of_the_queue_number",
        "test_12_index_wraps_from_ffff_to_0",
        "test_14_register_left_behind_by_65536_blocks_announces_nothing",
        "test_24_more_than_65536_entries", "test_26_counter_is_never_seen_before_the_rest",
        "test_27_one_gib_is_allowed", "test_31_atomics_are_exact_under_many_queues",
    },
}
MAKERS = {
    "ucx": lambda thread: UcxHca(thread=thread),
    "kernel": lambda _: KernelHca(CpuTarget(2), warps=2),
    "gpu": lambda _: KernelHca(GpuTarget(), warps=8),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "hca_kind" not in metafunc.fixturenames:
        return
    name = metafunc.function.__name__
    kinds = ["soft"]
    if metafunc.config.getoption("--ucx") and not any(name in n for n in NOT_OVER_UCX.values()):
        kinds += ["ucx"]
    if not any(name in names for names in SOFT_ONLY.values()):
        kinds += ["kernel", "gpu"] if torch.cuda.is_available() else ["kernel"]
    metafunc.parametrize("hca_kind", kinds, indirect=True)


@pytest.fixture(autouse=True)
def hca_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which HCA a Rig is made of."""
    if request.param in MAKERS:
        monkeypatch.setattr(rig, "SoftHca", lambda thread=False: MAKERS[request.param](thread))
    return request.param


@pytest.fixture(autouse=True)
def _quick_thread_switches():
    """Readers that poll memory in a Python thread must not hold the interpreter for long: every
    ctypes call gives its lock away, and getting it back costs one interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)
