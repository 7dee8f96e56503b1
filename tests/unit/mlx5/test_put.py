"""Puts by the device code from one adapter to another: registered by MR, posted to the rings that
the firmware was told of, rung at the register page (or by the thread), executed from there."""

from __future__ import annotations

import ctypes
import socket
import time

import pytest
from tests.mlx5_fake import FakePort
from tests.queue_pair import ADD8, INLINE, PUT_ALWAYS_POST, QUIET

from expertwire.control.memory import (
    ACCESS_LOCAL_WRITE,
    ACCESS_REMOTE_ATOMIC,
    ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE,
)
from expertwire.device_structs import (
    DOORBELL_PROXY,
    DOORBELL_REGISTER,
    IbgdaKey,
    IbgdaOperation,
    IbgdaPeer,
    IbgdaQp,
    IbgdaRunArgs,
    KernelStatus,
)
from expertwire.hca.mlx5 import Mlx5Hca
from expertwire.launch import Launch

ALL = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC
SIZE = 1 << 16


class Side:
    """One end: send and receive memory, a queue pair, and the device's view of them."""

    def __init__(self, hca: Mlx5Hca, doorbell_mode: int):
        self.hca = hca
        self.send, self.recv = hca.alloc(SIZE), hca.alloc(SIZE)
        self.send_mr = hca.register(self.send.addr, SIZE, ACCESS_LOCAL_WRITE)
        self.recv_mr = hca.register(self.recv.addr, SIZE, ALL)
        self.window, self.qp = hca.create_window(), hca.create_qp(64)
        self.rkey = self.window.publish(self.recv_mr)
        self.doorbell_mode = doorbell_mode

    def connect(self, there: Side) -> None:
        hca, info = self.hca, self.qp.info
        self.peer = hca.connect_peer(self.window, there.window.wire)
        self.qp.connect(self.peer, there.qp.info.qpn)
        self.state = IbgdaQp(
            sq_addr=info.sq_addr, dbrec_addr=info.dbrec_addr, doorbell_addr=info.uar_addr + 0x800,
            cq_addr=info.cq_addr, qpn=info.qpn, num_wqe=info.num_wqe, scope=1,
            doorbell_mode=self.doorbell_mode, proxy_addr=info.proxy_addr,
            scratch_addr=self.send.addr + SIZE - 64,
            scratch_lkey_be=socket.htonl(self.send_mr.lkey))
        self.local = IbgdaKey(begin=self.send.addr, end=self.send.addr + SIZE,
                              key_be=socket.htonl(self.send_mr.lkey))
        self.remote = IbgdaKey(begin=there.recv.addr, end=there.recv.addr + SIZE,
                               key_be=socket.htonl(there.rkey))
        self.device = IbgdaPeer(
            qps=ctypes.addressof(self.state), num_qps=1, local_keys=ctypes.addressof(self.local),
            num_local_keys=1, remote_keys=ctypes.addressof(self.remote), num_remote_keys=1,
            timeout_ns=500_000_000)

    def run(self, *operations: dict) -> int:
        """Runs operations on one warp; returns the kernel's code, 0 if all went well."""
        table = (IbgdaOperation * len(operations))(*[IbgdaOperation(**o) for o in operations])
        status = KernelStatus()
        args = IbgdaRunArgs(peer=ctypes.addressof(self.device), operations=ctypes.addressof(table),
                            status=ctypes.addressof(status), num_operations=len(operations))
        Launch([("ibgda_run", args)], warps=1, warp_size=4).run()
        return status.code

    def close(self) -> None:
        self.qp.destroy()
        self.peer.close()
        for mr in (self.send_mr, self.recv_mr):
            self.hca.revoke(mr)
        self.send.close()
        self.recv.close()


@pytest.fixture
def sides(opened, request):
    """Two adapters of the link layer and doorbell that the test asks for, connected."""
    layer, doorbell = getattr(request, "param", ("infiniband", "register"))
    ports = [FakePort(lid=1), FakePort(lid=2)]
    if layer == "roce":
        ports = [FakePort(link_layer=2, lid=0, gids=((1, 2, f"::ffff:10.0.0.{i}"),))
                 for i in (1, 2)]
    mode = DOORBELL_REGISTER if doorbell == "register" else DOORBELL_PROXY
    made = [opened(port, doorbell=doorbell) for port in ports]
    here, there = (Side(hca, mode) for _, hca in made)
    here.connect(there)
    there.connect(here)
    yield here, there, [device for device, _ in made]
    here.close()
    there.close()


def execute(device, num_entries: int) -> None:
    """What the adapter does: everything that was rung for, within a deadline."""
    deadline = time.monotonic() + 5
    done = 0
    while done < num_entries:
        done += device.soft.poll(1024)
        assert time.monotonic() < deadline, f"{done} of {num_entries} entries were rung for"


@pytest.mark.parametrize(
    "sides", [("infiniband", "register"), ("roce", "register"), ("infiniband", "proxy")],
    indirect=True, ids=lambda param: "-".join(param))
def test_message_goes_both_ways(sides):
    *pair, devices = sides
    for here, there, device in ((*pair, devices[0]), (*reversed(pair), devices[1])):
        payload = bytes(range(256)) * 16
        ctypes.memmove(here.send.addr, payload, len(payload))
        code = here.run(
            dict(op=PUT_ALWAYS_POST, remote_addr=there.recv.addr + 64, local_addr=here.send.addr,
                 num_bytes=len(payload)),
            dict(op=INLINE, remote_addr=there.recv.addr, value=0xFEEDBEEF,
                 num_bytes=4),
            dict(op=ADD8, remote_addr=there.recv.addr + 8, value=77))
        assert code == 0
        execute(device, 3)
        assert here.run(dict(op=QUIET)) == 0
        assert ctypes.string_at(there.recv.addr + 64, len(payload)) == payload
        assert ctypes.c_uint32.from_address(there.recv.addr).value == 0xFEEDBEEF
        assert ctypes.c_uint64.from_address(there.recv.addr + 8).value == 77
        assert here.qp.first_error() == (0, 0)


def test_rings_wrap_and_completions_free_slots(sides):
    here, there, devices = sides
    for turn in range(40):  # 40 x 4 entries through 64 slots
        ctypes.c_uint64.from_address(here.send.addr).value = turn
        put = dict(op=PUT_ALWAYS_POST, remote_addr=there.recv.addr, local_addr=here.send.addr,
                   num_bytes=8)
        assert here.run(put, put, put, put) == 0
        execute(devices[0], 4)
        assert here.run(dict(op=QUIET)) == 0
        assert ctypes.c_uint64.from_address(there.recv.addr).value == turn


def test_key_that_was_revoked_is_an_error_with_its_syndrome(sides):
    here, there, devices = sides
    there.window.revoke(there.rkey)
    put = dict(op=PUT_ALWAYS_POST, remote_addr=there.recv.addr, local_addr=here.send.addr,
               num_bytes=64)
    assert here.run(put) == 0
    execute(devices[0], 1)
    assert here.qp.first_error() == (0x13, 0)
    assert here.run(dict(op=QUIET)) != 0
    assert ctypes.string_at(there.recv.addr, 64) == bytes(64)


def test_lost_peer_ends_a_quiet(sides):
    here, there, devices = sides
    put = dict(op=PUT_ALWAYS_POST, remote_addr=there.recv.addr, local_addr=here.send.addr,
               num_bytes=64)
    assert here.run(put) == 0
    here.peer.lost()
    devices[0].soft.poll(16)
    assert here.run(dict(op=QUIET)) != 0
    assert here.qp.first_error()[0] == 0x05


def test_memory_is_registered_in_strict_order_and_for_exactly_what_it_is_for(sides):
    here, _, devices = sides
    send, recv = devices[0].asked("MR")
    assert send == dict(length=SIZE, access=ACCESS_LOCAL_WRITE, address=here.send.addr)
    assert recv == dict(length=SIZE, access=ALL, address=here.recv.addr)
    assert not (send["access"] | recv["access"]) & 1 << 20  # IBV_ACCESS_RELAXED_ORDERING


def test_waiting_sees_what_an_adapter_wrote_without_being_woken(opened):
    _, hca = opened()
    word = ctypes.c_uint64(5)
    begin = time.monotonic()
    assert hca.wait([ctypes.addressof(word)], [5], spin_ns=1000, timeout_ns=30_000_000) is None
    assert time.monotonic() - begin >= 0.03

    import threading

    timer = threading.Timer(0.05, lambda: setattr(word, "value", 6))
    timer.start()
    assert hca.wait([ctypes.addressof(word)], [5], spin_ns=1000, timeout_ns=5_000_000_000) == 0
    timer.join()
