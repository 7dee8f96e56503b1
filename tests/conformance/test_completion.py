"""Checks 18 to 26: completions, the collapsed queue, and waiting for them."""

from __future__ import annotations

import ctypes
import threading

import pytest

from expertwire.hca.wqe import Cqe
from tests.conformance.rig import (
    COLLAPSED,
    LOCAL_QP_OPERATION,
    NOP,
    REMOTE_ACCESS,
    WRITE,
    DeviceRig,
    Rig,
)
from tests.queue_pair import PUT_ALWAYS_POST, QUIET, BareQp
from tests.schedules.scenarios import completions


@pytest.mark.parametrize("cq_flags", [COLLAPSED, 0])
def test_18_fresh_completion_queue_is_filled_with_ff(cq_flags):
    with Rig(64, cq_flags=cq_flags) as rig:
        assert all(rig.raw_cqe(i) == b"\xff" * 64 for i in range(64))
        cqe = rig.cqe()
        assert (cqe.opcode, cqe.owner, cqe.wqe_counter) == (15, 1, 0xFFFF)


def test_18_quiet_on_a_fresh_queue_returns_and_on_a_posted_one_waits():
    with DeviceRig(timeout_ns=2_000_000) as rig:
        (status,) = rig.launch([[dict(op=QUIET)]], engine=False)
        assert status.code == 0
        put, quiet = rig.operation(PUT_ALWAYS_POST, num_bytes=8), dict(op=QUIET)
        (status,) = rig.launch([[put, quiet]], engine=False)
        assert (status.code, status.expected, status.seen) == (3, 1, 0)
        (status,) = rig.launch([[quiet]])
        assert status.code == 0


@pytest.mark.parametrize("num_bytes", [28, 29, 100, 256])
def test_19_counter_is_the_first_block(num_bytes):
    with Rig() as rig:
        rig.do(rig.wqe(NOP), rig.wqe(NOP))
        assert rig.do(rig.inline(0, b"x" * num_bytes)).wqe_counter == 2


def test_20_completion_modes():
    """0: only on error; 1: on the first error; 2 and 3: always."""
    with Rig() as rig:
        for mode in (0, 1):
            rig.do(rig.inline(0, b"silent", fm_ce_se=mode << 2))
            assert rig.raw_cqe() == b"\xff" * 64
        assert rig.at_remote(0, 6) == b"silent"
        assert rig.do(rig.wqe(NOP, fm_ce_se=2 << 2)).wqe_counter == 2
        assert rig.do(rig.wqe(NOP, fm_ce_se=3 << 2)).wqe_counter == 3
        cqe = rig.do(rig.write(rkey=rig.rkey ^ 1, fm_ce_se=0))
        assert (cqe.opcode, cqe.syndrome, cqe.wqe_counter) == (13, REMOTE_ACCESS, 4)


def test_20_fence_bits_do_not_change_the_completion_mode():
    with Rig() as rig:
        for fence in (0x20, 0x40, 0x60, 0x80):
            idx = rig.next_idx
            assert rig.do(rig.inline(0, b"x", fm_ce_se=fence | 8)).wqe_counter == idx


def test_21_collapsed_queue_uses_entry_0_only():
    with Rig(16, num_cqe=16) as rig:
        for i in range(50):
            cqe = rig.do(rig.wqe(NOP))
            assert cqe.wqe_counter == i and cqe.owner == i // 16 % 2
            assert all(rig.raw_cqe(entry) == b"\xff" * 64 for entry in range(1, 16))


def test_22_ring_queue_flips_the_owner_bit():
    with Rig(64, num_cqe=16, cq_flags=0) as rig:
        for i in range(70):
            rig.do(rig.wqe(NOP))
            cqe = rig.cqe(i % 16)
            assert (cqe.opcode, cqe.wqe_counter, cqe.owner) == (0, i, i // 16 % 2)
            ahead = rig.cqe((i + 1) % 16)
            valid = ahead.opcode != 15 and ahead.owner == (i + 1) // 16 % 2
            assert not valid, "the next entry must not look new"
            rig.set_consumer(i + 1)


@pytest.mark.parametrize("depth", [1 << n for n in range(4, 16)])
def test_23_quiet_against_a_64_bit_model(depth):
    """Every state of (reserved, completed) around the wraps of the 16-bit counter."""
    for base in (0, 65536 - depth, 65535, 65536, 131071, (1 << 32) - 1):
        for in_flight in {1, 2, depth // 2, depth - 1, depth}:
            for done in {0, 1, in_flight - 1, in_flight}:
                reserved, completed = base + in_flight, base + done
                qp = BareQp(1, [(0, 1, 1)], [(0, 1, 1)], start=base, timeout_ns=0)
                qp.state.num_wqe = depth
                qp.state.resv_head = qp.state.ready_head = reserved
                if completed:
                    qp.complete(completed - 1)
                (status,) = qp.run([dict(op=QUIET)])
                assert (status.code == 0) == (completed == reserved)
                assert qp.state.cons_idx == completed


def test_24_more_than_65536_entries():
    """Through the device code; the ring is 1024 deep, the counter wraps."""
    with DeviceRig(1024) as rig:
        put, quiet = rig.operation(PUT_ALWAYS_POST, num_bytes=8), dict(op=QUIET)
        for turn in range(66):
            rig.fill(0, turn.to_bytes(8, "little"))
            (status,) = rig.launch([[put] * 1000 + [quiet]], warp_size=1)
            assert status.code == 0
            assert rig.at_remote(0, 8) == turn.to_bytes(8, "little")
        assert rig.states[0].cons_idx == 66_000 and rig.qp.indices() == (66_000, 66_000)
        assert rig.here.stats()["wqes"] == {"RDMA_WRITE": 66_000}


def test_25_fields_of_a_completion():
    """Positions of mlx5dv.h struct mlx5_cqe64, spelled out; other parsers: see docs/hca.md."""
    with Rig() as rig:
        rig.do(rig.wqe(NOP))
        rig.do(rig.write(0, 0, 24))
        raw, qpn = rig.raw_cqe(), rig.qp.info.qpn
        assert raw[44:48] == (24).to_bytes(4, "big")
        assert raw[56:60] == (WRITE << 24 | qpn).to_bytes(4, "big")
        assert raw[60:62] == (1).to_bytes(2, "big") and raw[63] == 0
        rig.do(rig.write(0, 0, 24, rkey=rig.rkey ^ 1))
        raw = rig.raw_cqe()
        assert raw[55] == REMOTE_ACCESS and raw[63] >> 4 == 13
        assert raw[56:60] == (WRITE << 24 | qpn).to_bytes(4, "big")
        assert raw[60:62] == (2).to_bytes(2, "big")


def test_25_large_message_counts_all_its_bytes():
    with Rig(num_bytes=3 << 20) as rig:
        assert rig.do(rig.write(0, 0, (3 << 20) - 5)).byte_count == (3 << 20) - 5


def test_26_counter_is_never_seen_before_the_rest():
    """A reader that sees counter c in the last word sees byte count and opcode of at least c."""
    with Rig(1024) as rig:
        words = (ctypes.c_uint32 * 16).from_address(rig.qp.info.cq_addr)
        stop, torn, seen = threading.Event(), [], set()

        def read():
            while not stop.is_set():
                tail = int(words[15]).to_bytes(4, "little")
                counter = int.from_bytes(tail[:2], "big")
                count = int.from_bytes(int(words[11]).to_bytes(4, "little"), "big")
                if tail[3] >> 4 == 15:
                    continue
                seen.add(counter)
                # Entry i moves i + 1 bytes, so the count runs ahead of the counter, never behind.
                if count < counter + 1:
                    torn.append((counter, count))

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for _ in range(60):
                wqes = [rig.write(0, 0, rig.next_idx + i + 1) for i in range(50)]
                rig.post(*wqes)
                rig.run()
        finally:
            stop.set()
            thread.join()
        assert not torn and len(seen) > 1
        assert Cqe.decode(rig.raw_cqe()).byte_count == 3000


def test_26_no_schedule_shows_a_torn_completion():
    """Device code that sees the last words, with stores of the engine's and loads in any order."""
    for seed in range(20):
        completions(seed)


def test_22_overrun_fails_the_queue_unless_it_is_to_be_ignored():
    with Rig(64, num_cqe=16, cq_flags=0) as rig:
        rig.post(*[rig.wqe(NOP) for _ in range(17)])
        rig.run()
        assert [rig.cqe(i).wqe_counter for i in range(16)] == list(range(16))
        assert rig.cqe(0).owner == 0, "the unread completion was not overwritten"
        assert rig.qp.state == 6
    with Rig(64, num_cqe=16, cq_flags=2) as rig:
        rig.post(*[rig.wqe(NOP) for _ in range(40)])
        rig.run()
        assert rig.error() == 0 and rig.cqe(7).wqe_counter == 39


def test_22_overrun_is_told_although_no_completion_can():
    with Rig(64, num_cqe=16, cq_flags=0) as rig:
        rig.post(*[rig.wqe(NOP) for _ in range(17)])
        rig.run()
        assert rig.qp.first_error() == (LOCAL_QP_OPERATION, 16)
