"""The HCA that misbehaves on purpose, and the one that remembers (hca/fault.py, hca/trace.py)."""

from __future__ import annotations

import random
import struct

import pytest
from tests.conformance.rig import (
    ATOMIC_FA,
    MASKED_FA,
    NOP,
    READ,
    REMOTE_ACCESS,
    WRITE_IMM,
    DeviceRig,
    Rig,
)
from tests.queue_pair import ADD8, PUT, PUT_ALWAYS_POST, QUIET, SIGNAL_IMM

from expertwire.client.link import check_signal_mode
from expertwire.device_structs import SIGNAL_ADD, SIGNAL_WRITE
from expertwire.errors import ConfigError
from expertwire.hca.fault import Faults, FaultyHca
from expertwire.hca.trace import TracingHca

RELAXED = dict(mtu=256, reorder=True, max_delay=6)


def faulty(rig, **faults):
    """Puts the faults between the test and the initiator."""
    rig.here = FaultyHca(rig.here, Faults(**faults))
    return rig.here


# --- the path -----------------------------------------------------------------------------
@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("num_bytes", [1, 8, 255, 256, 257, 4096, 60_000])
def test_cut_writes_arrive_whole(num_bytes, reorder):
    payload = random.Random(num_bytes).randbytes(num_bytes)
    with Rig() as rig:
        faulty(rig, seed=num_bytes, mtu=256, reorder=reorder, max_delay=3)
        rig.fill(0, payload)
        cqe = rig.do(rig.write(100, 0, num_bytes))
        assert cqe.byte_count == num_bytes and rig.error() == 0
        assert rig.at_remote(100, num_bytes + 1) == payload + b"\0"


def test_a_completion_does_not_wait_for_the_bytes_but_owns_them():
    """The source may change after the completion, whatever is still under way."""
    with Rig() as rig:
        faulty(rig, mtu=64, max_delay=1000)
        rig.fill(0, b"a" * 4096)
        rig.post(rig.write(0, 0, 4096))
        rig.here.poll(1)
        assert rig.cqe().opcode == 0 and rig.at_remote(0, 4096) != b"a" * 4096
        rig.fill(0, b"b" * 4096)
        rig.run()
        assert rig.at_remote(0, 4096) == b"a" * 4096


def sees_flag_first(signal: str, seed: int, faults: dict) -> bool:
    """Payload, then a flag by `signal`; looks at the target after every step of the engine."""
    size = 2000
    with Rig() as rig:
        faulty(rig, seed=seed, **faults)
        rig.fill(0, b"\x55" * size)
        rig.window.post_recv(1)
        flag = {
            "write": lambda: rig.inline(8192, struct.pack("<Q", 1)),
            "add": lambda: rig.atomic(MASKED_FA, struct.pack(">QQ", 1, 0), 8192, 4096, opmod=9),
            "plain add": lambda: rig.atomic(ATOMIC_FA, struct.pack(">QQ", 1, 0), 8192, 4096),
            "immediate": lambda: rig.write(8192, opcode=WRITE_IMM, data=(), imm=1),
        }[signal]()
        rig.post(rig.write(64, 0, size), flag)
        early = False
        while rig.here.poll(1):
            seen = rig.at_remote(8192, 1) == b"\1"
            if signal == "immediate":
                seen = seen or rig.window.poll_recv() is not None
            early |= seen and rig.at_remote(64, size) != b"\x55" * size
        assert rig.error() == 0 and rig.at_remote(64, size) == b"\x55" * size
        return early


def test_44_a_flag_by_write_overtakes_its_payload_where_writes_may():
    caught = [seed for seed in range(20) if sees_flag_first("write", seed, RELAXED)]
    assert len(caught) > 5
    strict = dict(mtu=256, max_delay=6)
    assert not any(sees_flag_first("write", seed, strict) for seed in range(20))


@pytest.mark.parametrize("signal", ["add", "plain add", "immediate"])
def test_44_atomics_and_immediates_never_overtake(signal):
    assert not any(sees_flag_first(signal, seed, RELAXED) for seed in range(100))


def test_reads_come_after_the_writes_before_them():
    for seed in range(20):
        with Rig() as rig:
            faulty(rig, seed=seed, **RELAXED)
            rig.fill(0, bytes([seed + 1]) * 3000)
            rig.do(rig.write(0, 0, 3000), rig.write(0, 8192, 3000, opcode=READ))
            assert rig.at_local(8192, 3000) == bytes([seed + 1]) * 3000


@pytest.mark.parametrize("signal", [ADD8, SIGNAL_IMM])
@pytest.mark.parametrize("seed", range(6))
def test_device_code_signals_that_hold_on_a_relaxed_path(signal, seed):
    """Several warps put and signal; when the target has all signals, it has all bytes."""
    with DeviceRig(64, chunk_bytes=96, timeout_ns=10**9) as rig:
        here = faulty(rig, seed=seed, mtu=32, reorder=True, max_delay=20)
        rig.fill(0, bytes(range(1, 201)))
        rig.window.post_recv(3)
        statuses = rig.launch([
            [rig.operation(PUT, 256 * w, num_bytes=200, message_idx=0),
             rig.operation(signal, 8192, value=1), dict(op=QUIET)] for w in range(3)
        ], seed=seed)
        assert [s.code for s in statuses] == [0, 0, 0]
        landed = struct.unpack("<Q", rig.at_remote(8192, 8))[0]
        while signal == SIGNAL_IMM and rig.window.poll_recv():
            landed += 1
        assert landed == 3
        for w in range(3):
            assert rig.at_remote(256 * w, 200) == bytes(range(1, 201))
        assert here.relaxed_ordering


def test_a_flag_by_write_is_refused_on_a_relaxed_path():
    with Rig() as rig:
        check_signal_mode(rig.here, SIGNAL_WRITE, True)
        here = faulty(rig, reorder=True)
        with pytest.raises(ConfigError, match='use "add"'):
            check_signal_mode(here, SIGNAL_WRITE, True)
        check_signal_mode(here, SIGNAL_ADD, True)
        check_signal_mode(here, SIGNAL_WRITE, False)  # stores into mapped memory take no queue
        here.set_faults(None)
        check_signal_mode(here, SIGNAL_WRITE, True)


def test_dropped_bytes_never_land_and_nothing_says_so():
    """What sequence numbers and deadlines are for: the completion is a good one."""
    with Rig() as rig:
        faulty(rig, seed=1, mtu=64, drop_one_in=4)
        rig.fill(0, b"\x55" * 8192)
        cqe = rig.do(rig.write(0, 0, 8192))
        pieces = [rig.at_remote(64 * i, 64) for i in range(128)]
        assert cqe.opcode == 0 and set(pieces) == {b"\0" * 64, b"\x55" * 64}
        assert 10 < pieces.count(b"\0" * 64) < 60


def test_a_doubled_write_may_undo_a_later_one_but_adds_count_once():
    undone = 0
    for seed in range(20):
        with Rig() as rig:
            faulty(rig, seed=seed, reorder=True, duplicate_one_in=2, max_delay=10)
            rig.do(rig.inline(0, b"old....."), rig.inline(0, b"new....."))
            undone += rig.at_remote(0, 8) == b"old....."
            rig.do(*[rig.atomic(ATOMIC_FA, struct.pack(">QQ", 1, 0), 64) for _ in range(10)])
            assert struct.unpack("<Q", rig.at_remote(64, 8))[0] == 10
    assert undone > 0


def test_a_seed_repeats_itself_and_another_does_not():
    def images(seed):
        with Rig() as rig:
            faulty(rig, seed=seed, **RELAXED)
            rig.fill(0, b"\x55" * 4096)
            rig.post(rig.write(0, 0, 4096))
            while rig.here.poll(1):
                yield rig.at_remote(0, 4096)

    assert list(images(3)) == list(images(3)) != list(images(4))


def test_what_is_under_way_when_a_key_is_revoked_does_not_land():
    with Rig() as rig:
        faulty(rig, mtu=64, max_delay=100)
        rig.fill(0, b"\x55" * 4096)
        rig.post(rig.write(0, 0, 4096))
        rig.here.poll(1)
        rig.window.revoke(rig.rkey)
        before = rig.at_remote(0, 4096)
        rig.run()
        assert rig.at_remote(0, 4096) == before != b"\x55" * 4096


@pytest.mark.parametrize("how", ["reset", "destroy", "no faults"])
def test_what_is_under_way_lands_before_the_queue_goes(how):
    with Rig() as rig:
        here = faulty(rig, seed=9, mtu=64, reorder=True, max_delay=1000)
        rig.fill(0, b"\x55" * 4096)
        rig.post(rig.write(0, 0, 4096))
        rig.here.poll(1)
        if how == "reset":
            rig.qp.modify(0)
        elif how == "destroy":
            rig.qp.destroy()
        else:
            here.set_faults(None)
        assert rig.at_remote(0, 4096) == b"\x55" * 4096


# --- single entries -----------------------------------------------------------------------
@pytest.mark.parametrize("syndrome", [0x01, 0x04, 0x10, 0x13, 0x22])
def test_entry_fails_and_the_rest_is_flushed(syndrome):
    with Rig(cq_flags=0) as rig:
        faulty(rig, fail={2: syndrome})
        rig.post(*[rig.inline(8 * i, b"%8d" % i) for i in range(5)])
        rig.run()
        assert rig.qp.first_error() == (syndrome, 2)
        assert [rig.cqe(i).syndrome for i in range(5)] == [0, 0, syndrome, 5, 5]
        assert rig.at_remote(8, 16) == b"       1" + b"\0" * 8


def test_faults_of_one_queue_leave_the_others_alone():
    with Rig() as rig:
        other = rig.add_qp()
        faulty(rig, fail={0: 0x13}, qpn=rig.qp.info.qpn)
        rig.place(rig.inline(0, b"fine", qpn=other.info.qpn, index=0), 0, other)
        rig.ring(1, other)
        rig.do(rig.wqe(NOP))
        assert (rig.error(), rig.error(other), rig.at_remote(0, 4)) == (0x13, 0, b"fine")


def test_stalled_entry_comes_later_and_holds_up_what_follows():
    with Rig() as rig:
        faulty(rig, stall={1: 3})
        rig.post(*[rig.inline(8 * i, b"x") for i in range(3)])
        done = []
        for _ in range(5):
            rig.here.poll()
            done.append(rig.qp.indices()[1])
        assert done == [1, 1, 1, 3, 3] and rig.error() == 0


def test_peer_that_vanishes_in_the_middle():
    with DeviceRig(timeout_ns=10**9) as rig:
        faulty(rig, vanish_at=2)
        put = rig.operation(PUT_ALWAYS_POST, num_bytes=8)
        (status,) = rig.launch([[put, put, dict(op=QUIET)]])
        assert status.code == 0
        (status,) = rig.launch([[put, dict(op=QUIET)]])
        assert (status.code, status.syndrome) == (2, 0x15)


def test_key_revoked_when_an_entry_is_taken_up():
    with Rig() as rig:
        faulty(rig, call={1: lambda: rig.window.revoke(rig.rkey)})
        rig.post(*[rig.inline(8 * i, b"x") for i in range(3)])
        rig.run()
        assert rig.qp.first_error() == (REMOTE_ACCESS, 1) and rig.at_remote(8, 1) == b"\0"


def test_settings_that_make_no_sense_are_refused():
    for name in ("mtu", "max_delay", "duplicate_one_in", "drop_one_in"):
        with pytest.raises(ConfigError, match=name):
            Faults(**{name: -1})


# --- the tracer ---------------------------------------------------------------------------
def test_tracer_remembers_entries_and_prints_them():
    with Rig() as rig:
        rig.here = TracingHca(rig.here, limit=3)
        rig.do(rig.wqe(NOP), rig.write(16, 0, 100), rig.inline(0, b"abc"),
               rig.atomic(ATOMIC_FA, struct.pack(">QQ", 1, 0)))
        records = list(rig.here.records)
        assert [r.idx for r in records] == [1, 2, 3], "the last three"
        assert [r.wqe.name for r in records] == ["RDMA_WRITE", "RDMA_WRITE", "ATOMIC_FA"]
        assert records[1].raw == rig.inline(0, b"abc", index=2).encode()
        assert f"RDMA_WRITE 100 bytes -> {rig.remote.addr + 16:#x}" in str(records[0])
        assert [r.seconds for r in records] == sorted(r.seconds for r in records)


def test_tracer_takes_bytes_that_are_no_entry():
    with Rig() as rig:
        rig.here = TracingHca(rig.here)
        broken = bytearray(rig.inline(0, b"abc").encode())
        broken[32:36] = struct.pack(">I", 0x80000000 | 500)
        rig.place(bytes(broken))
        rig.ring(1)
        rig.run()
        (record,) = rig.here.records
        assert record.wqe is None and "00000008" in str(record)


def test_wrappers_nest_and_the_outer_one_sees_what_the_inner_one_fails():
    with Rig() as rig:
        rig.here = TracingHca(FaultyHca(rig.here, Faults(fail={1: 0x13})))
        rig.post(rig.wqe(NOP), rig.wqe(NOP))
        rig.run()
        assert [r.idx for r in rig.here.records] == [0, 1] and rig.error() == 0x13
        assert rig.here.pointer == rig.here.inner.inner.pointer
        assert rig.here.stats()["error_cqes"] == 1
