"""Checks 39 to 43: queue pair states, errors and flushes."""

from __future__ import annotations

import time

import pytest

from expertwire.errors import HcaError
from expertwire.hca.soft import (
    STATE_ERR,
    STATE_INIT,
    STATE_RESET,
    STATE_RTR,
    STATE_RTS,
)
from tests.conformance.rig import COLLAPSED, FLUSHED, NOP, PEER_LOST, REMOTE_ACCESS, DeviceRig, Rig
from tests.queue_pair import PUT_ALWAYS_POST, QUIET


@pytest.mark.parametrize("mode", ["record", "register"])
@pytest.mark.parametrize("state", [STATE_RESET, STATE_INIT])
def test_39_doorbells_in_reset_and_init_are_ignored(state, mode):
    """The entry stays in the ring: only a later doorbell can announce it."""
    with Rig() as rig:
        rig.qp.modify(STATE_RESET)
        for step in range(STATE_INIT, state + 1):
            rig.qp.modify(step)
        rig.post(rig.inline(0, b"early"), ring=False)
        (rig.set_record if mode == "record" else rig.set_register)(1)
        for step in range(state + 1, STATE_RTS + 1):
            assert rig.run() == 0 and rig.qp.indices() == (0, 0)
            rig.qp.modify(step)
        assert rig.run() == 0 and rig.qp.indices() == (0, 0)
        assert rig.at_remote(0, 5) == b"\0" * 5 and rig.raw_cqe() == b"\xff" * 64
        rig.do(rig.inline(8, b"later"))
        assert rig.at_remote(0, 13) == b"early\0\0\0later" and rig.qp.indices() == (2, 2)


def test_39_nothing_is_sent_in_rtr_but_kept():
    with Rig() as rig:
        rig.qp.modify(STATE_RESET)
        rig.qp.modify(STATE_INIT)
        rig.qp.modify(STATE_RTR)
        rig.post(rig.inline(0, b"early"))
        assert rig.run() == 0 and rig.qp.indices() == (0, 0)
        assert rig.at_remote(0, 5) == b"\0" * 5 and rig.raw_cqe() == b"\xff" * 64
        rig.qp.modify(STATE_RTS)
        rig.run()
        assert rig.at_remote(0, 5) == b"early"


@pytest.mark.parametrize("cq_flags", [COLLAPSED, 0])
def test_40_error_flushes_everything_posted_in_order(cq_flags):
    """Also unsignalled entries, also long ones; then also what is posted later."""
    with Rig(64, cq_flags=cq_flags) as rig:
        rig.post(
            rig.inline(0, b"good"), rig.write(rkey=rig.rkey ^ 1), rig.inline(8, b"x" * 100),
            rig.inline(8, b"y", fm_ce_se=0), rig.wqe(NOP),
        )
        rig.run()
        assert rig.qp.state == STATE_ERR and rig.qp.first_error() == (REMOTE_ACCESS, 1)
        assert rig.at_remote(0, 9) == b"good" + b"\0" * 5
        assert rig.qp.indices() == (7, 7)
        if cq_flags == 0:
            seen = [(c.opcode, c.syndrome, c.wqe_counter) for c in map(rig.cqe, range(5))]
            assert seen == [
                (0, 0, 0), (13, REMOTE_ACCESS, 1), (13, FLUSHED, 2), (13, FLUSHED, 5),
                (13, FLUSHED, 6),
            ]
        else:
            assert (rig.cqe().syndrome, rig.cqe().wqe_counter) == (FLUSHED, 6)
        cqe = rig.do(rig.inline(8, b"later"))
        if cq_flags:
            assert (cqe.syndrome, cqe.wqe_counter) == (FLUSHED, 7)
        assert rig.at_remote(8, 5) == b"\0" * 5 and rig.here.stats()["error_cqes"] == 5


SYNDROMES = [0x01, 0x02, 0x04, 0x05, 0x06, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x22, 0x7F]


@pytest.mark.parametrize("syndrome", SYNDROMES)
def test_40_every_syndrome_reaches_the_device_code(syndrome):
    """Entry 3 fails, the last one posted: the caller learns syndrome and index. With two behind it,
    which are flushed, it learns of the last of these; first_error() keeps the first one."""
    with DeviceRig(num_device_qps=2) as rig:
        rig.here.set_hook(
            lambda _c, qpn, idx, *_: syndrome if (qpn, idx) == (rig.qp.info.qpn, 3) else 0
        )
        put, quiet = rig.operation(PUT_ALWAYS_POST, num_bytes=8, qp_id=0), dict(op=QUIET)
        (status,) = rig.launch([[put] * 4 + [quiet]])
        assert (status.code, status.syndrome, status.wqe_idx) == (2, syndrome, 3)
        assert rig.qp.first_error() == (syndrome, 3)
        other = rig.operation(PUT_ALWAYS_POST, num_bytes=8, qp_id=1)
        (status,) = rig.launch([[other, dict(op=QUIET, qp_id=1)]])
        assert status.code == 0, "check 43: the other queue goes on"
    with DeviceRig() as rig:
        rig.here.set_hook(lambda _c, _qpn, idx, *_: syndrome if idx == 3 else 0)
        put = rig.operation(PUT_ALWAYS_POST, num_bytes=8)
        (status,) = rig.launch([[put] * 6 + [dict(op=QUIET)]])
        assert status.code == 2 and rig.qp.first_error() == (syndrome, 3)
        assert (status.syndrome, status.wqe_idx) in ((syndrome, 3), (FLUSHED, 4), (FLUSHED, 5))


def test_41_lost_peer_fails_what_is_posted_at_once():
    with Rig(num_bytes=1 << 20) as rig:
        rig.do(rig.inline(0, b"alive"))
        rig.peer.lost()
        begin = time.monotonic()
        rig.do(rig.inline(0, b"ghost"), rig.wqe(NOP))
        assert time.monotonic() - begin < 1
        assert rig.qp.first_error() == (PEER_LOST, 1) and rig.qp.indices() == (3, 3)
        assert rig.at_remote(0, 5) == b"alive"


def test_41_peer_lost_in_the_middle_of_a_write():
    with Rig(num_bytes=1 << 20) as rig:
        rig.post(rig.write(0, 0, 1 << 20))
        assert rig.here.poll(1) == 1
        rig.peer.lost()
        rig.run()
        assert rig.qp.first_error() == (PEER_LOST, 0)


def test_41_held_entries_of_a_lost_peer_fail_too():
    with Rig() as rig:
        rig.here.set_hook(lambda *_: 0xFFFFFFFF)
        rig.post(rig.wqe(NOP))
        assert rig.run() == 0
        rig.peer.lost()
        rig.run()
        assert rig.error() == PEER_LOST


def test_43_two_queues_are_independent():
    with Rig() as rig:
        other = rig.add_qp()
        rig.do(rig.write(rkey=0x55))
        assert rig.qp.state == STATE_ERR and other.state == STATE_RTS
        wqe = rig.inline(16, b"still here", qpn=other.info.qpn, index=0)
        rig.place(wqe, 0, other)
        rig.ring(1, other)
        rig.run()
        assert rig.at_remote(16, 10) == b"still here" and rig.error(other) == 0
        assert rig.cqe(qp=other).opcode == 0


@pytest.mark.parametrize("cq_flags", [COLLAPSED, 0])
def test_42_reset_and_again(cq_flags):
    with Rig(16, num_cqe=16, cq_flags=cq_flags) as rig:
        for turn in range(3):
            for i in range(11):
                rig.do(rig.inline(0, bytes([turn, i])))
                rig.set_consumer(i + 1)
            rig.do(rig.write(rkey=rig.rkey ^ 1))
            assert rig.qp.first_error() == (REMOTE_ACCESS, 11)
            rig.qp.modify(STATE_RESET)
            rig.next_idx = 0
            assert rig.qp.indices() == (0, 0) and rig.error() == 0
            assert all(rig.raw_cqe(i) == b"\xff" * 64 for i in range(16))
            for state in (STATE_INIT, STATE_RTR, STATE_RTS):
                rig.qp.modify(state)
            assert rig.run() == 0, "no doorbell of the former life rings"


def test_42_reset_forgets_a_wait_for_a_receive():
    with Rig() as rig:
        rig.post(rig.write(data=(), opcode=0x09))
        rig.run()
        rig.qp.modify(STATE_RESET)
        time.sleep(0.06)  # longer than the engine waits for a receive
        for state in (STATE_INIT, STATE_RTR, STATE_RTS):
            rig.qp.modify(state)
        rig.next_idx = 0
        rig.post(rig.write(data=(), opcode=0x09))
        rig.run()
        assert rig.error() == 0, "the wait began anew"
        rig.window.post_recv(1)
        rig.run()
        assert rig.qp.indices() == (1, 1)


def test_39_states_go_forward_one_by_one():
    with Rig() as rig:
        qp = rig.add_qp(connect=False)
        assert qp.state == STATE_RESET
        for wrong in (STATE_RTR, STATE_RTS, 4, 7, 100):
            with pytest.raises(HcaError, match="from"):
                qp.modify(wrong)
        qp.modify(STATE_INIT)
        with pytest.raises(HcaError, match="no peer"):
            qp.modify(STATE_RTR)
        qp.connect(rig.peer, 1)
        assert qp.state == STATE_RTS
        with pytest.raises(HcaError, match="connected already"):
            qp.connect(rig.peer, 1)
