"""Check 12 at 2^32, and what else counts beyond its field: queues that start near the wrap."""

from __future__ import annotations

import pytest

from expertwire.hca.wqe import Cqe
from tests.conformance.rig import LOCAL_QP_OPERATION, NOP, REMOTE_ACCESS, DeviceRig, Rig
from tests.queue_pair import ADD8, PUT_ALWAYS_POST, QUIET

WRAP = 1 << 32


@pytest.mark.parametrize("depth", [16, 128, 32768])
def test_12_index_wraps_at_2_to_the_32(depth):
    with Rig(depth) as rig:
        rig.start_at(WRAP - 24)
        for idx in range(WRAP - 24, WRAP + 24):
            rig.do(rig.inline(0, idx.to_bytes(8, "little")))
            assert rig.cqe().wqe_counter == idx & 0xFFFF
            assert rig.at_remote(0, 8) == idx.to_bytes(8, "little")
            assert rig.qp.indices() == (idx + 1, idx + 1)
        assert rig.error() == 0


@pytest.mark.parametrize("before", [1, 2, 3])
def test_12_entry_of_several_blocks_lies_across_2_to_the_32(before):
    """Across the end of the ring at the same time."""
    with Rig(16) as rig:
        rig.start_at(WRAP - before)
        payload = bytes(1 + i % 250 for i in range(220))
        rig.do(rig.inline(0, payload))
        assert rig.at_remote(0, 220) == payload
        assert rig.qp.indices() == (WRAP - before + 4, WRAP - before + 4) and rig.error() == 0
        assert rig.cqe().wqe_counter == (WRAP - before) & 0xFFFF


def test_12_many_entries_of_one_doorbell_lie_across_2_to_the_32():
    with Rig(64) as rig:
        rig.start_at(WRAP - 32)
        rig.post(*[rig.inline(8 * i, bytes([i + 1] * 8)) for i in range(64)])
        assert rig.run() >= 64 and rig.qp.indices() == (WRAP + 32, WRAP + 32)
        assert rig.at_remote(0, 512) == b"".join(bytes([i + 1] * 8) for i in range(64))


def test_12_error_beyond_2_to_the_32_keeps_its_index():
    with Rig() as rig:
        rig.start_at(WRAP - 2)
        rig.do(*[rig.wqe(NOP) for _ in range(5)], rig.write(rkey=rig.rkey ^ 1), rig.wqe(NOP))
        assert rig.qp.first_error() == (REMOTE_ACCESS, WRAP + 3)
        assert rig.qp.indices() == (WRAP + 5, WRAP + 5)


def test_14_old_doorbells_around_2_to_the_32_are_ignored():
    with Rig(16) as rig:
        rig.start_at(WRAP - 4)
        for _ in range(8):
            rig.do(rig.wqe(NOP))
        for stale in (WRAP + 4, WRAP, WRAP - 1, WRAP - 4):
            rig.set_register(stale)
            rig.set_record(stale)
            assert rig.run() == 0 and rig.qp.indices() == (WRAP + 4, WRAP + 4)
        rig.do(rig.wqe(NOP))
        assert rig.qp.indices() == (WRAP + 5, WRAP + 5) and rig.error() == 0


def test_17_jump_across_2_to_the_32_fails_the_queue():
    with Rig(16) as rig:
        rig.start_at(WRAP - 4)
        rig.set_record(WRAP + 13)
        rig.run()
        assert rig.qp.first_error() == (LOCAL_QP_OPERATION, WRAP - 4)


@pytest.mark.parametrize("wrap", [1 << 24, WRAP])
def test_22_count_of_completions_outgrows_its_24_bits(wrap):
    """The consumer says 24 bits of it: full is noticed exactly when it is, before and after."""
    with Rig(64, num_cqe=16, cq_flags=0) as rig:
        rig.start_at(wrap - 40)
        for count in range(wrap - 40, wrap + 40):
            rig.do(rig.wqe(NOP))
            cqe = Cqe.decode(rig.raw_cqe(count % 16))
            assert (cqe.owner, cqe.wqe_counter) == (count // 16 & 1, count & 0xFFFF)
            rig.set_consumer(count + 1)
        assert rig.error() == 0
        rig.do(*[rig.wqe(NOP) for _ in range(16)])
        assert rig.error() == 0
        rig.do(rig.wqe(NOP))
        assert rig.qp.first_error() == (LOCAL_QP_OPERATION, wrap + 56)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_24_device_code_and_engine_cross_2_to_the_32_together(mode):
    with DeviceRig(16, chunk_bytes=64, doorbell_mode=mode) as rig:
        rig.start_at(WRAP - 50)
        rig.fill(0, bytes(range(160)))
        put = rig.operation(PUT_ALWAYS_POST, 0, 0, num_bytes=160)  # three entries
        add = rig.operation(ADD8, 4096, value=1)
        statuses = rig.launch([[put, add, dict(op=QUIET)] * 10] * 3, warp_size=4)
        assert [s.code for s in statuses] == [0] * 3
        state, end = rig.states[0], WRAP - 50 + 3 * 10 * 4
        assert (state.resv_head, state.ready_head, state.prod_idx, state.cons_idx) == (end,) * 4
        assert rig.qp.indices() == (end, end) and rig.error() == 0
        assert rig.at_remote(0, 160) == bytes(range(160))
        assert rig.at_remote(4096, 8) == (30).to_bytes(8, "little")
