"""The software HCA executes what GPU kernels post to rings in pinned host memory."""

from __future__ import annotations

import ctypes
import socket

import numpy as np
import pytest
import torch

from expertwire.cuda.pinned import Mapped, PinnedBuffer, PinnedQpMemory
from expertwire.device_structs import (
    SCOPE_SYSTEM,
    IbgdaKey,
    IbgdaOperation,
    IbgdaPeer,
    IbgdaQp,
    IbgdaRunArgs,
    KernelStatus,
)
from expertwire.hca.soft import HOOK_STALL, SoftHca
from expertwire.target import CpuTarget
from tests.gpu.soft_wire import MappedTarget, SoftWire
from tests.queue_pair import ADD4, ADD8, GET, INLINE, PUT, PUT_ALWAYS_POST, QUIET
from tests.steps import make_step, run_step

ALL_ACCESS = 15
SIZE = 1 << 20
SECOND = 1_000_000_000


class PinnedRig:
    """A queue pair driven by GPU kernels towards a region in this process.

    The source is pinned host memory, the target shared memory that the GPU can see as well.
    """

    def __init__(self, gpu, *, depth=64, timeout_ns=SECOND, remote_key=None, doorbell_mode=0):
        self.gpu = gpu
        self.here, self.there = SoftHca(thread=True, spin=True), SoftHca(thread=False)
        self.local = PinnedBuffer(SIZE)
        self.remote = self.there.alloc(SIZE)
        self.mapped = Mapped(self.remote.addr, SIZE)
        self.window = self.there.create_window()
        rkey = self.window.publish(self.there.register(self.remote.addr, SIZE, ALL_ACCESS), 0)
        self.peer = self.here.import_peer(self.window.fd, self.there.wake_fd, [self.remote.fd])
        lkey = self.here.register(self.local.addr, SIZE, ALL_ACCESS).lkey
        self.scratch = PinnedBuffer(64)
        scratch_lkey = self.here.register(self.scratch.addr, 64, ALL_ACCESS).lkey
        self.memory = PinnedQpMemory(depth)
        self.qp = self.here.create_qp(depth, memory=self.memory.memory)
        self.qp.connect(self.peer, 0x77)
        info = self.qp.info
        self.state = gpu.place(IbgdaQp(
            sq_addr=info.sq_addr, dbrec_addr=info.dbrec_addr, doorbell_addr=info.uar_addr + 0x800,
            cq_addr=info.cq_addr, qpn=info.qpn, num_wqe=info.num_wqe, scope=SCOPE_SYSTEM,
            doorbell_mode=doorbell_mode, proxy_addr=info.proxy_addr,
            scratch_addr=self.scratch.addr, scratch_lkey_be=socket.htonl(scratch_lkey),
        ))
        self.keys = gpu.place((IbgdaKey * 2)(
            IbgdaKey(self.local.addr, self.local.addr + SIZE, socket.htonl(lkey)),
            IbgdaKey(self.remote.addr, self.remote.addr + SIZE,
                     socket.htonl(remote_key or rkey)),
        ))
        self.device_peer = gpu.place(IbgdaPeer(
            qps=self.state.addr, num_qps=1, local_keys=self.keys.addr, num_local_keys=1,
            remote_keys=self.keys.addr + ctypes.sizeof(IbgdaKey), num_remote_keys=1,
            timeout_ns=timeout_ns,
        ))

    def __enter__(self) -> PinnedRig:
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.here.set_hook(None)
        self.qp.destroy()
        self.peer.close()
        self.window.close()
        self.here.close()
        self.there.close()
        self.mapped.close()
        self.remote.close()

    def operation(self, op, remote=0, local=0, **fields) -> dict:
        return dict(op=op, remote_addr=self.remote.addr + remote,
                    local_addr=self.local.addr + local, **fields)

    def run(self, per_warp: list[list[dict]], *, warps: int = 1) -> list[KernelStatus]:
        """per_warp: one list of operations for each warp of the launch."""
        flat = [IbgdaOperation(**o) for operations in per_warp for o in operations]
        table = self.gpu.place((IbgdaOperation * len(flat))(*flat))
        status = self.gpu.alloc(len(per_warp) * ctypes.sizeof(KernelStatus))
        args = IbgdaRunArgs(peer=self.device_peer.addr, operations=table.addr,
                            status=status.addr, num_operations=len(per_warp[0]))
        self.gpu.prepare([("ibgda_run", args)], grid=len(per_warp) // warps, warps=warps).run()
        return [status.read_struct(KernelStatus, i) for i in range(len(per_warp))]

    def landed(self, offset: int, num_bytes: int) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(self.remote.addr + offset, num_bytes), np.uint8)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_puts_of_many_sizes_arrive(gpu, mode):
    """Source written by a GPU kernel of the same stream just before the put."""
    with PinnedRig(gpu, doorbell_mode=mode) as rig:
        for seed, num_bytes in enumerate([1, 8, 15, 16, 4096, 14336, 300_001, SIZE - 64]):
            generator = torch.Generator("cuda").manual_seed(seed)
            want = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda",
                                 generator=generator)
            rig.local.tensor[32 : 32 + num_bytes].copy_(want, non_blocking=True)
            (status,) = rig.run([[
                rig.operation(PUT_ALWAYS_POST, 16, 32, num_bytes=num_bytes),
                rig.operation(QUIET),
            ]])
            assert status.code == 0
            assert np.array_equal(rig.landed(16, num_bytes), want.cpu().numpy())


def test_inline_atomics_and_get(gpu):
    with PinnedRig(gpu) as rig:
        ctypes.memmove(rig.remote.addr + 256, bytes(range(64)), 64)
        (status,) = rig.run([[
            rig.operation(INLINE, 0, value=0x44434241, num_bytes=4),
            rig.operation(ADD4, 64, value=5), rig.operation(ADD8, 72, value=1 << 40),
            rig.operation(ADD8, 72, value=7),
            rig.operation(GET, 256, 512, num_bytes=64), rig.operation(QUIET),
        ]])
        assert status.code == 0
        assert rig.landed(0, 4).tobytes() == b"ABCD"
        assert rig.landed(64, 16).view(np.uint64).tolist() == [5, (1 << 40) + 7]
        assert rig.local.tensor[512:576].tolist() == list(range(64))


def test_ring_gives_back_pressure(gpu):
    """Far more posts than slots: every one arrives, none is overwritten."""
    warps, each = 16, 40
    with PinnedRig(gpu, depth=16) as rig:
        words = np.arange(warps * each, dtype=np.uint64) + 1
        rig.local.tensor[: words.nbytes] = torch.from_numpy(words.view(np.uint8).copy())
        statuses = rig.run([
            [rig.operation(PUT, 8 * (w * each + i), 8 * (w * each + i), num_bytes=8,
                           message_idx=i) for i in range(each)] + [rig.operation(QUIET)]
            for w in range(warps)
        ], warps=4)
        assert [status.code for status in statuses] == [0] * warps
        assert np.array_equal(rig.landed(0, words.nbytes).view(np.uint64), words)


def test_stalled_hca_is_an_error_in_time(gpu):
    with PinnedRig(gpu, depth=16, timeout_ns=20_000_000) as rig:
        rig.here.set_hook(lambda *_: HOOK_STALL)
        put = rig.operation(PUT_ALWAYS_POST, num_bytes=8)
        (status,) = rig.run([[put] * 17])
        assert (status.code, status.stage) == (1, 3)


def test_error_completion_comes_back(gpu):
    with PinnedRig(gpu, remote_key=0x1234567) as rig:
        put = rig.operation(PUT_ALWAYS_POST, num_bytes=8)
        (status,) = rig.run([[put, rig.operation(QUIET)]])
        assert (status.code, status.syndrome, status.wqe_idx) == (2, 0x13, 0)
        assert not rig.landed(0, 64).any(), "nothing is written on failure"


@pytest.mark.parametrize("name", [
    "one row", "three servers, per expert", "32-bit ids, add signal", "fp8", "decode batch",
])
def test_a_whole_step_through_pinned_rings(gpu, name):
    """route, pack, put -> HCA -> poll, gather, experts, reply -> HCA -> combine, on the GPU."""
    want = run_step(make_step(CpuTarget(), name, seed=5)[0])["output"]
    target = MappedTarget(gpu)
    wires: list[SoftWire] = []
    with target:
        try:
            step, _ = make_step(
                target, name, seed=5,
                wire=lambda *ends: wires.append(SoftWire(*ends)) or wires[-1],
            )
            gpu.prepare([("client_route", step.route), ("client_pack", step.pack),
                         ("client_put_ibgda", step.put)], grid=[1, 16, 1], warps=8).run()
            loaded = np.flatnonzero(np.frombuffer(step.batch_size.read(), np.uint32))
            for server in (step.servers[s] for s in loaded):
                gpu.prepare([("server_poll", server.poll), ("server_gather", server.gather)],
                            warps=8).run()
                server.run_experts(lambda rows: rows * 2)
                gpu.prepare([("server_reply_ibgda", server.reply_args)], warps=8).run()
            gpu.prepare([("client_combine", step.combine)], grid=8, warps=8).run()
            assert step.status.read_struct(KernelStatus).code == 0
            assert step.output.read().hex() == want
            done = [wire.here.stats()["wqes"] for wire in wires]
            assert all(sum(counts.values()) in (0, 3) for counts in done)
            assert sum(sum(counts.values()) for counts in done) == 6 * len(loaded)
        finally:
            torch.cuda.synchronize()
            for wire in wires:
                wire.close()
