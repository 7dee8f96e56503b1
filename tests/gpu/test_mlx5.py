"""GPU kernels post to queues that the mlx5 bring-up laid out, and ring; no adapter is there: the
verbs are tests/mlx5_fake.py, and a software HCA executes what lies in pinned host memory."""

from __future__ import annotations

import ctypes
import os
import socket

import pytest
import torch

from expertwire.cuda.pinned import PinnedBuffer
from expertwire.device_structs import (
    DOORBELL_PROXY,
    DOORBELL_REGISTER,
    SCOPE_SYSTEM,
    IbgdaKey,
    IbgdaOperation,
    IbgdaPeer,
    IbgdaQp,
    IbgdaRunArgs,
    KernelStatus,
)
from expertwire.hca.mlx5 import Mlx5Hca
from expertwire.hca.mlx5.gpu import GpuBlock, Mapped, PinnedBlock, kernel_view
from expertwire.hca.soft import SoftHca
from tests.mlx5_fake import Fabric, FakeDevice, FakePort, connected
from tests.queue_pair import ADD8, PUT_ALWAYS_POST, QUIET

SIZE = 1 << 16


@pytest.mark.parametrize("doorbell", ["register", "proxy"])
def test_kernel_posts_and_rings(gpu, doorbell):
    fabric = Fabric()
    soft = SoftHca(spin=True)
    here_device = FakeDevice(fabric, "mlx5_0", FakePort(lid=1), soft=soft)
    there_device = FakeDevice(fabric, "mlx5_1", FakePort(lid=2))
    here = Mlx5Hca("mlx5_0", verbs=here_device.verbs, make_block=PinnedBlock, doorbell=doorbell)
    there = Mlx5Hca("mlx5_1", verbs=there_device.verbs)
    local, remote = PinnedBuffer(SIZE), there.alloc(SIZE)
    local_mr, remote_mr = here.register(local.addr, SIZE, 1), there.register(remote.addr, SIZE, 15)
    qp, _ = connected(here, there)
    if doorbell == "register":
        mapped = Mapped(qp.uar.reg_addr, 8, io=False)  # the fake's page is memory
        info, mode = kernel_view(qp, mapped, None, None), DOORBELL_REGISTER
    else:
        mapped = Mapped(*here.doorbells.words, io=False)
        info, mode = kernel_view(qp, None, mapped, here.doorbells), DOORBELL_PROXY
    rkey = there.create_window().publish(remote_mr)
    state = gpu.place(IbgdaQp(
        sq_addr=info.sq_addr, dbrec_addr=info.dbrec_addr, doorbell_addr=info.uar_addr + 0x800,
        cq_addr=info.cq_addr, qpn=info.qpn, num_wqe=info.num_wqe, scope=SCOPE_SYSTEM,
        doorbell_mode=mode, proxy_addr=info.proxy_addr, scratch_addr=local.addr + SIZE - 64,
        scratch_lkey_be=socket.htonl(local_mr.lkey)))
    keys = gpu.place((IbgdaKey * 2)(
        IbgdaKey(local.addr, local.addr + SIZE, socket.htonl(local_mr.lkey)),
        IbgdaKey(remote.addr, remote.addr + SIZE, socket.htonl(rkey))))
    peer = gpu.place(IbgdaPeer(
        qps=state.addr, num_qps=1, local_keys=keys.addr, num_local_keys=1,
        remote_keys=keys.addr + ctypes.sizeof(IbgdaKey), num_remote_keys=1,
        timeout_ns=2_000_000_000))
    local.tensor[:4096] = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
    operations = (IbgdaOperation * 3)(
        IbgdaOperation(op=PUT_ALWAYS_POST, remote_addr=remote.addr + 64, local_addr=local.addr,
                       num_bytes=4096),
        IbgdaOperation(op=ADD8, remote_addr=remote.addr, value=77), IbgdaOperation(op=QUIET))
    table, status = gpu.place(operations), gpu.alloc(ctypes.sizeof(KernelStatus))
    try:
        gpu.prepare([("ibgda_run", IbgdaRunArgs(
            peer=peer.addr, operations=table.addr, status=status.addr, num_operations=3))],
            grid=1, warps=1).run()
        assert status.read_struct(KernelStatus).code == 0
        assert ctypes.c_uint64.from_address(remote.addr).value == 77
        assert ctypes.string_at(remote.addr + 64, 4096) == bytes(range(256)) * 16
    finally:
        torch.cuda.synchronize()
        mapped.close()
        here.close()
        there.close()
        for device in fabric.devices:
            device.close()
        soft.close()
        remote.close()


def test_gpu_memory_has_a_dmabuf_of_its_size(gpu):
    """Needs the open kernel modules, as every GPU that an adapter is to reach does."""
    block = GpuBlock(3 << 20)
    try:
        assert block.num_bytes == 4 << 20 and block.addr % 65536 == 0
        assert os.lseek(block.dmabuf, 0, os.SEEK_END) == block.num_bytes
    finally:
        block.close()
