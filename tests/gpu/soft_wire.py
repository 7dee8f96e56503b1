"""A direction between two sides whose queue pair a software HCA consumes, for kernels on a GPU."""

from __future__ import annotations

import ctypes
import socket

import torch

from expertwire.control.memory import Buffer
from expertwire.cuda.pinned import Mapped, PinnedBuffer, PinnedQpMemory
from expertwire.device_structs import SCOPE_SYSTEM, IbgdaKey, IbgdaPeer, IbgdaQp
from expertwire.hca.soft import SoftHca
from expertwire.target import Block, GpuTarget

ALL_ACCESS = 15


class MappedBlock(Block):
    """Shared memory that the GPU reaches; the CPU looks at it only when the GPU is done."""

    def __init__(self, buffer: Buffer, num_bytes: int):
        super().__init__(torch.frombuffer(buffer.view(), dtype=torch.uint8)[:num_bytes])
        self.buffer = buffer
        self.mapped = Mapped(buffer.addr, buffer.num_bytes)

    def read(self, offset: int = 0, num_bytes: int | None = None) -> bytes:
        torch.cuda.synchronize()
        return super().read(offset, num_bytes)


class MappedTarget(GpuTarget):
    """A GPU whose messages lie in shared host memory, so that the software HCA can move them."""

    def __init__(self, gpu: GpuTarget):
        super().__init__(gpu.device.index)
        self._slots: list[MappedBlock] = []

    def alloc_slot(self, num_bytes: int, fill: int = 0) -> Block:
        size = -(-num_bytes // 4096) * 4096
        block = MappedBlock(Buffer(size), num_bytes)
        block.tensor.fill_(fill)
        self._slots.append(block)
        return block

    def __enter__(self) -> MappedTarget:
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        for block in self._slots:
            block.mapped.close()


class SoftWire:
    """What loopback.Wire is, with an HCA behind it and the queue in pinned host memory."""

    def __init__(
        self, target: MappedTarget, local: MappedBlock, remote: MappedBlock, timeout_ns: int,
        depth: int = 64,
    ):
        self.local, self.remote = local, remote
        self.here, self.there = SoftHca(thread=True, spin=True), SoftHca(thread=False)
        self._scratch = PinnedBuffer(64)
        lkey = self.here.register(local.addr, local.num_bytes, ALL_ACCESS).lkey
        scratch_lkey = self.here.register(self._scratch.addr, 64, ALL_ACCESS).lkey
        mr = self.there.register(remote.addr, remote.num_bytes, ALL_ACCESS)
        self.window = self.there.create_window()
        rkey = self.window.publish(mr, 0)
        self._peer = self.here.import_peer(
            self.window.fd, self.there.wake_fd, [remote.buffer.fd]
        )
        self._memory = PinnedQpMemory(depth)
        self._qp = self.here.create_qp(depth, memory=self._memory.memory)
        self._qp.connect(self._peer, 0x77)
        info = self._qp.info
        self.qp = target.place(IbgdaQp(
            sq_addr=info.sq_addr, dbrec_addr=info.dbrec_addr,
            doorbell_addr=info.uar_addr + 0x800, cq_addr=info.cq_addr, qpn=info.qpn,
            num_wqe=info.num_wqe, scope=SCOPE_SYSTEM, proxy_addr=info.proxy_addr,
            scratch_addr=self._scratch.addr, scratch_lkey_be=socket.htonl(scratch_lkey),
        ))
        self._keys = target.place((IbgdaKey * 2)(
            IbgdaKey(local.addr, local.addr + local.num_bytes, socket.htonl(lkey)),
            IbgdaKey(remote.addr, remote.addr + remote.num_bytes, socket.htonl(rkey)),
        ))
        self.peer = target.place(IbgdaPeer(
            qps=self.qp.addr, num_qps=1, local_keys=self._keys.addr, num_local_keys=1,
            remote_keys=self._keys.addr + ctypes.sizeof(IbgdaKey), num_remote_keys=1,
            timeout_ns=timeout_ns,
        ))

    def close(self) -> None:
        self._qp.destroy()
        self._peer.close()
        self.window.close()
        self.here.close()
        self.there.close()
