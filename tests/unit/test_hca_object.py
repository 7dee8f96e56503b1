"""The software HCA as an object: lifecycle, closed handles, refused calls, counters."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
from tests.conformance.rig import PEER_LOST, Rig

from expertwire.control.connection import Endpoint
from expertwire.control.memory import Buffer
from expertwire.errors import HcaError
from expertwire.hca.soft import QpMemory, SoftHca


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_maps() -> int:
    with open("/proc/self/maps") as file:
        return sum("expertwire" in line for line in file)


# --- lifecycle ----------------------------------------------------------------------------
@pytest.mark.parametrize("thread", [False, True])
def test_closing_leaves_nothing_behind(thread):
    with Rig(thread=thread):
        pass
    before = (open_fds(), num_maps(), threading.active_count(), len(os.listdir("/proc/self/task")))
    for _ in range(5):
        with Rig(thread=thread) as rig:
            rig.post(rig.write())
            rig.here.kick()
            rig.run_until(lambda: rig.qp.indices()[1] == 1)
    after = (open_fds(), num_maps(), threading.active_count(), len(os.listdir("/proc/self/task")))
    assert after == before


def test_closing_is_refused_while_something_is_open_and_works_afterwards():
    rig = Rig()
    for hca, what in ((rig.here, "1 queue pairs, 0 windows and 1 peers"), (rig.there, "1 windows")):
        with pytest.raises(HcaError, match=what):
            hca.close()
    with pytest.raises(HcaError, match="still connected"):
        rig.peer.close()
    assert not rig.do(rig.write()).is_error, "a refused close changes nothing"
    rig.close()
    rig.here.close()


def test_only_a_fresh_queue_starts_elsewhere():
    with Rig() as rig:
        rig.do(rig.write())
        with pytest.raises(HcaError, match="cannot start at 4294967296: it was used"):
            rig.qp.start_at(1 << 32)
        assert rig.qp.indices() == (1, 1)


def test_a_peer_keeps_its_hca_open():
    rig = Rig()
    rig.qp.destroy()
    with pytest.raises(HcaError, match="1 peers"):
        rig.here.close()
    rig.close()


def test_closed_objects_raise_instead_of_crashing():
    rig = Rig()
    mr, qp, peer, window, hca = rig.local_mr, rig.qp, rig.peer, rig.window, rig.here
    rig.close()
    for call in (
        qp.indices, qp.first_error, lambda: qp.state, lambda: qp.modify(0),
        lambda: qp.connect(peer, 1), lambda: peer.map(1, 2, 3), lambda: window.publish(mr, 0),
        lambda: window.post_recv(1), window.poll_recv, lambda: window.revoke(1), hca.poll,
        hca.kick, hca.stats, hca.alloc_pd, hca.create_window, hca.create_qp,
        lambda: hca.register(0x1000, 1, 1), lambda: hca.revoke(mr),
        lambda: hca.wait([], [], spin_ns=0, timeout_ns=0), lambda: hca.set_hook(None),
        lambda: hca.import_peer(0, 0, []),
    ):
        with pytest.raises(HcaError, match="closed"):
            call()
    for harmless in (qp.destroy, peer.close, peer.lost, peer.notify, window.close, hca.interrupt,
                     hca.close):
        harmless()
    assert hca.pointer == 0


def test_queue_pair_outlives_nothing_it_needs():
    """Destroying it in the middle of a write is fine; the peer is free afterwards."""
    with Rig(num_bytes=1 << 20) as rig:
        rig.post(rig.write(0, 0, 1 << 20))
        assert rig.here.poll(1) == 1
        rig.qp.destroy()
        assert rig.run() == 0


# --- refused calls ------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [0, 8, 15, 17, 1000, 65536])
def test_depth_is_a_power_of_two_from_16_to_32768(depth):
    with SoftHca(thread=False) as hca, pytest.raises(HcaError, match="16 to 32768"):
        hca.create_qp(depth, num_cqe=16)


@pytest.mark.parametrize("num_cqe", [3, 100, 1 << 21, 1 << 31])
def test_completion_queue_sizes(num_cqe):
    with SoftHca(thread=False) as hca, pytest.raises(HcaError, match="completion queue"):
        hca.create_qp(16, num_cqe=num_cqe)


def test_memory_of_the_caller_is_used_and_must_be_complete():
    with SoftHca(thread=False) as hca:
        memory = Buffer(16384)
        base = memory.addr
        with pytest.raises(HcaError, match="without doorbell record"):
            hca.create_qp(16, memory=QpMemory(sq_addr=base))
        with pytest.raises(HcaError, match="must not overrun"):
            hca.create_qp(
                16, cq_flags=0, memory=QpMemory(base, base + 4096, base + 8192, base + 12288)
            )
        qp = hca.create_qp(16, memory=QpMemory(base, base + 4096, base + 8192, base + 12288))
        assert (qp.info.sq_addr, qp.info.cq_addr, qp.info.proxy_addr) == (base, base + 12288, 0)
        assert ctypes.string_at(base + 12288, 16 * 64) == b"\xff" * (16 * 64)
        qp.modify(0)
        qp.modify(1)
        assert hca.poll() == 0
        qp.destroy()
        memory.close()


@pytest.mark.parametrize(("addr", "num_bytes"), [(0x1000, 0), ((1 << 64) - 16, 32)])
def test_ranges_that_cannot_be_registered(addr, num_bytes):
    with SoftHca(thread=False) as hca, pytest.raises(HcaError, match="cannot register"):
        hca.register(addr, num_bytes, 1)


def test_revoking_twice_and_publishing_a_revoked_region():
    with Rig() as rig:
        rig.there.revoke(rig.remote_mr)
        with pytest.raises(HcaError, match="not registered"):
            rig.there.revoke(rig.remote_mr)
        with pytest.raises(HcaError, match="not registered"):
            rig.window.publish(rig.remote_mr, 0)


def test_keys_are_random_and_differ_between_pairs():
    with Rig() as rig:
        other = rig.there.create_window()
        keys = {rig.rkey, rig.lkey, rig.remote_mr.lkey, other.publish(rig.remote_mr, 0)}
        assert len(keys) == 4 and not keys & {0, 0x100}
        other.close()


def test_protection_domains_separate_queue_pairs():
    with Rig() as rig:
        stranger = rig.add_qp(pd=rig.here.alloc_pd())
        rig.place(rig.write(qpn=stranger.info.qpn, index=0), 0, stranger)
        rig.ring(1, stranger)
        rig.run()
        assert rig.error(stranger) == 4
        assert not rig.do(rig.write()).is_error


def memfd(num_bytes: int, seal: bool = True) -> int:
    import fcntl

    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


@pytest.mark.parametrize("case", [
    "unsealed memory", "empty memory", "closed memory", "short window", "long window",
    "window of another kind", "closed wake-up descriptor",
])
def test_importing_a_bad_peer_is_refused_and_leaks_nothing(case):
    with Rig() as rig:
        window, wake, region = rig.window.fd, rig.there.wake_fd, rig.remote.fd
        extra = None
        if case == "unsealed memory":
            region = extra = memfd(4096, seal=False)
        elif case == "empty memory":
            region = extra = memfd(0)
        elif case == "closed memory":
            region = 9999
        elif case == "closed wake-up descriptor":
            wake = 9999
        else:
            size = os.fstat(window).st_size
            size = {"short window": 64, "long window": size + 4096}.get(case, size)
            window = extra = memfd(size)
            if case == "long window":
                os.pwrite(extra, os.pread(rig.window.fd, 64, 0), 0)
        before = (open_fds(), num_maps())
        for _ in range(3):
            with pytest.raises(HcaError, match="importing a peer"):
                rig.here.import_peer(window, wake, [rig.remote.fd, region])
        assert (open_fds(), num_maps()) == before
        if extra is not None:
            os.close(extra)


def test_mapping_follows_the_keys():
    with Rig() as rig:
        addr = rig.peer.map(rig.rkey, rig.remote.addr + 8, 8)
        ctypes.memmove(addr, b"straight", 8)
        assert rig.at_remote(8, 8) == b"straight"
        for rkey, offset, size in [(rig.rkey ^ 1, 0, 8), (rig.rkey, 1 << 16, 1), (rig.rkey, -1, 8)]:
            with pytest.raises(HcaError, match="does not let us"):
                rig.peer.map(rkey, rig.remote.addr + offset, size)


# --- counters -----------------------------------------------------------------------------
def test_stats_count_what_happened():
    with Rig() as rig:
        rig.do(rig.write(0, 0, 100), rig.inline(0, b"abc"), rig.wqe(0, fm_ce_se=0))
        rig.peer.lost()
        rig.do(rig.write())
        stats = rig.here.stats()
        assert (stats["bytes"], stats["cqes"], stats["error_cqes"]) == (103, 3, 1)
        assert stats["doorbells"] == 2 and rig.error() == PEER_LOST
        assert stats["wqes"]["NOP"] == 1


def test_a_completion_queue_that_is_not_filled_is_refused(monkeypatch):
    """Zeros from somebody else's HCA would read as a completion; nothing is left open."""
    with SoftHca(thread=False) as hca:
        create = hca.create_qp

        def zeroed(depth):
            qp = create(depth)
            ctypes.memset(qp.info.cq_addr, 0, 64)
            return qp

        monkeypatch.setattr(hca, "create_qp", zeroed)
        with pytest.raises(HcaError, match="not filled with 0xff"):
            Endpoint(hca, send_bytes=64, recv_bytes=64)
