"""`open_hca("gpu")`: kernels post to rings in GPU memory, the HCA kernel moves the bytes."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
import torch

from expertwire.cuda.compile import require
from expertwire.cuda.endpoint import GpuEndpoint
from expertwire.device_structs import IbgdaOperation, IbgdaRunArgs, KernelStatus
from expertwire.errors import ConfigError, HandleError, HcaError
from expertwire.hca import open_hca
from expertwire.hca.ring import read_rings
from tests.queue_pair import ADD8, GET, INLINE, PUT, PUT_ALWAYS_POST, QUIET

SIZE = 4 << 20
COMPLETION_ERROR, NO_KEY = 2, 4
REMOTE_ACCESS, PEER_LOST = 0x13, 0x15


class Pair:
    """Two ends of a connection in one process, on one GPU, each with an HCA of its own."""

    def __init__(self, gpu, *, num_qps: int = 1, depth: int = 64, blocks: int = 1):
        self.gpu = gpu
        self.hcas = [open_hca("gpu", blocks=blocks) for _ in range(2)]
        self.here, self.there = self.ends = [
            GpuEndpoint(hca, send_bytes=SIZE, recv_bytes=SIZE, num_qps=num_qps, depth=depth,
                        timeout_ns=2_000_000_000) for hca in self.hcas
        ]
        for end, other in ((self.here, self.there), (self.there, self.here)):
            end.connect(other.connection_handle(), other.memory_handle(),
                        [os.dup(fd) for fd in other.fds()])

    def operation(self, op: int, remote: int = 0, local: int = 0, **fields) -> dict:
        return dict(op=op, remote_addr=self.here.remote.addr + remote,
                    local_addr=self.here.send.addr + local, **fields)

    def run(self, *per_warp: list[dict]) -> list[tuple[int, int]]:
        """One list of operations per warp, all of one length; (code, syndrome) of each."""
        flat = [IbgdaOperation(**o) for operations in per_warp for o in operations]
        table = self.gpu.place((IbgdaOperation * len(flat))(*flat))
        status = self.gpu.alloc(len(per_warp) * ctypes.sizeof(KernelStatus))
        args = IbgdaRunArgs(peer=self.here.peer_addr, operations=table.addr, status=status.addr,
                            num_operations=len(per_warp[0]))
        self.gpu.prepare([("ibgda_run", args)], warps=len(per_warp)).run()
        entries = [status.read_struct(KernelStatus, i) for i in range(len(per_warp))]
        return [(entry.code, entry.syndrome) for entry in entries]

    def fill(self, offset: int, data: bytes) -> None:
        self.hcas[0].words.write(self.here.send.addr + offset, data)

    def arrived(self, offset: int, num_bytes: int) -> bytes:
        return self.hcas[1].words.read(self.there.recv.addr + offset, num_bytes)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        for end in self.ends:
            end.close()
        for hca in self.hcas:
            hca.close()


@pytest.fixture
def pair(gpu):
    with Pair(gpu) as made:
        yield made


def test_a_message_and_its_flag(pair):
    data = os.urandom(100_001)
    pair.fill(3, data)
    assert pair.run([
        pair.operation(PUT, 1000, 3, num_bytes=len(data)),
        pair.operation(INLINE, 0, value=0x1122334455667788, num_bytes=8), dict(op=QUIET),
    ]) == [(0, 0)]
    assert pair.arrived(1000, len(data)) == data
    assert pair.arrived(0, 8) == 0x1122334455667788.to_bytes(8, "little")
    assert pair.hcas[1].wait([pair.there.recv.addr], [0], spin_ns=0, timeout_ns=10**9) == 0
    assert pair.hcas[1].wait([pair.there.recv.addr + 8], [0], spin_ns=0, timeout_ns=10**7) is None
    assert pair.arrived(8, 992) == bytes(992) and pair.arrived(1000 + len(data), 64) == bytes(64)
    stats = pair.hcas[0].stats()
    assert (stats["executed"], stats["bytes"], stats["error_cqes"]) == (2, len(data) + 8, 0)


def test_the_rings_can_be_written_to_a_file(pair, tmp_path):
    pair.fill(0, b"\x5a" * 64)
    put = pair.operation(PUT_ALWAYS_POST, 0, 0, num_bytes=64)
    assert pair.run([put, dict(op=QUIET)]) == [(0, 0)]
    pair.here.dump(tmp_path / "rings", "GPU 0")
    (ring,) = read_rings(tmp_path / "rings")
    assert ring.name == "GPU 0" and ring.written == ring.rung == 1 and ring.completion()


def test_reads_and_adds(pair):
    pair.hcas[1].words.write(pair.there.recv.addr + 64, b"0123456789abcdef")
    assert pair.run([pair.operation(GET, 64, 128, num_bytes=16),
                     *[pair.operation(ADD8, 512, value=7)] * 5, dict(op=QUIET)]) == [(0, 0)]
    assert pair.hcas[0].words.read(pair.here.send.addr + 128, 16) == b"0123456789abcdef"
    assert pair.arrived(512, 8) == (35).to_bytes(8, "little")


@pytest.mark.parametrize(("num_qps", "warps", "blocks"), [(1, 8, 1), (4, 8, 2)])
def test_many_warps_and_queues(gpu, num_qps, warps, blocks):
    with Pair(gpu, num_qps=num_qps, blocks=blocks) as pair:
        data = os.urandom(warps * 64 * 256)
        pair.fill(0, data)
        order = [[pair.operation(PUT_ALWAYS_POST, at, at, num_bytes=256, qp_id=w)
                  for at in range(w * 64 * 256, (w + 1) * 64 * 256, 256)]
                 + [dict(op=QUIET, qp_id=w)] for w in range(warps)]
        assert set(pair.run(*order)) == {(0, 0)}
        assert pair.arrived(0, len(data)) == data
        assert pair.hcas[0].stats()["executed"] == warps * 64


def test_more_than_65536_entries_through_a_small_ring(gpu):
    with Pair(gpu, depth=1024) as pair:
        operations = [pair.operation(ADD8, 0, value=1)] * 4200
        for _ in range(2):
            assert set(pair.run(*[operations] * 8)) == {(0, 0)}
        assert pair.run([dict(op=QUIET)]) == [(0, 0)]
        assert pair.arrived(0, 8) == (2 * 8 * 4200).to_bytes(8, "little")


def test_a_revoked_key_moves_nothing(pair):
    put = [pair.operation(PUT_ALWAYS_POST, 0, 0, num_bytes=64), dict(op=QUIET)]
    pair.fill(0, b"\x5a" * 64)
    assert pair.run(put) == [(0, 0)]
    pair.hcas[1].words.write(pair.there.recv.addr, bytes(64))
    pair.there._window.revoke(pair.there._rkey)
    assert pair.run(put) == [(COMPLETION_ERROR, REMOTE_ACCESS)]
    assert pair.arrived(0, 64) == bytes(64)
    assert pair.here.first_error() == (REMOTE_ACCESS, 1)
    assert pair.run(put)[0][0] == COMPLETION_ERROR, "a failed queue refuses further work"
    pair.there._rkey = pair.there._window.publish(pair.there._recv_mr)


def test_beyond_the_region_is_refused_before_anything_is_posted(pair):
    assert pair.run([pair.operation(PUT_ALWAYS_POST, SIZE - 4, 0, num_bytes=8)])[0][0] == NO_KEY
    assert pair.hcas[0].stats()["executed"] == 0


def test_a_lost_peer(pair):
    pair.here.peer_lost()
    assert pair.run([pair.operation(PUT_ALWAYS_POST, 0, 0, num_bytes=8), dict(op=QUIET)]) == [
        (COMPLETION_ERROR, PEER_LOST)]
    assert pair.arrived(0, 8) == bytes(8)


def test_synchronising_does_not_wait_for_ever(pair):
    for _ in range(3):
        start = time.monotonic()
        torch.cuda.synchronize()
        assert time.monotonic() - start < 1.0


def test_opening_and_closing(gpu):
    for name in ("gpu:99", "gpu:x", "gpu:"):
        with pytest.raises(ConfigError, match="it is gpu or gpu:N"):
            open_hca(name)
    with pytest.raises(HcaError, match="1 to 2 multiprocessors, not 3"):
        open_hca("gpu:0", blocks=3)
    hca = open_hca("gpu:0")
    qp = hca.create_qp(16)
    with pytest.raises(HcaError, match="1 queue pairs and 0 windows are still open"):
        hca.close()
    with pytest.raises(HcaError, match="depth 24"):
        hca.create_qp(24)
    qp.destroy()
    qp.destroy()
    hca.close()
    hca.close()


def test_a_window_without_memory_or_of_something_else(gpu):
    with open_hca("gpu") as hca:
        window = hca.create_window()
        with pytest.raises(HandleError, match="published no memory"):
            hca.import_peer(window.fd, -1, [window.fd])
        with pytest.raises(HandleError, match="no GPU memory"):
            hca.import_peer(os.memfd_create("no"), -1, [window.fd])
        window.close()


def test_nothing_stays(gpu):
    driver = require("cuda.bindings.driver")
    with Pair(gpu):
        pass
    torch.cuda.empty_cache()
    before = driver.cuMemGetInfo()[1], len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Pair(gpu):
            pass
    torch.cuda.empty_cache()
    assert (driver.cuMemGetInfo()[1], len(os.listdir("/proc/self/fd"))) == before
