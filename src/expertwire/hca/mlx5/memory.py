"""Registered memory: of the host by ibv_reg_mr, of a GPU by a dmabuf and a key of our own.

No region is registered with relaxed ordering: a flag must not become visible before what it
announces. (Leaving the flag away is what keeps the order; it is never the default of verbs.)
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import Any, Protocol

from ...control.memory import (
    ACCESS_LOCAL_WRITE,
    ACCESS_REMOTE_ATOMIC,
    ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE,
)
from . import prm
from .device import Device
from .errors import DeviceRefused, GpuMemoryRefused, HcaError
from .verbs import LOCKED_MEMORY, UMEM_DMABUF, doing

PAGE_BYTES = 4096  # MLX5_ADAPTER_PAGE_SIZE
_ALL_PAGE_SIZES = (1 << 64) - PAGE_BYTES


class Block(Protocol):
    """Memory that queues lie in. dmabuf: a descriptor of GPU memory, None: it has an address that
    the kernel can register. is_host: the CPU may read it."""

    addr: int
    num_bytes: int
    dmabuf: int | None
    is_host: bool

    def fill(self, offset: int, num_bytes: int, value: int) -> None: ...
    def close(self) -> None: ...


class HostBlock:
    """Zeroed pages of this process."""

    dmabuf, is_host = None, True

    def __init__(self, num_bytes: int):
        self.num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        self._map = mmap.mmap(-1, self.num_bytes)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.addr = ctypes.addressof(self._anchor)

    def fill(self, offset: int, num_bytes: int, value: int) -> None:
        ctypes.memset(self.addr + offset, value, num_bytes)

    def close(self) -> None:
        """Unmaps. Idempotent."""
        if self.addr:
            self.addr = 0
            del self._anchor
            self._map.close()


def umem(device: Device, block: Block, offset: int, num_bytes: int, what: str) -> Any:
    """A part of a block as the firmware names it. offset: a multiple of the page size.

    Raises GpuMemoryRefused, DeviceRefused, CommandRefused.
    """
    verbs = device.verbs
    with doing(verbs, f"registering the {what}", gpu_fixes(block)):
        if block.dmabuf is None:
            return verbs.Mlx5UMEM(device.context, num_bytes, block.addr + offset,
                                  access=ACCESS_LOCAL_WRITE)
        return verbs.Mlx5UMEM(
            device.context, num_bytes, offset, access=ACCESS_LOCAL_WRITE,
            pgsz_bitmap=_ALL_PAGE_SIZES, comp_mask=UMEM_DMABUF, dmabuf_fd=block.dmabuf,
        )


def gpu_fixes(block: Block) -> dict:
    if block.dmabuf is None:
        return {}
    advice = ("The kernel (5.12 or newer), rdma-core (34 or newer) and the open NVIDIA driver must "
              "all know dmabuf; else `sudo modprobe nvidia-peermem` and dmabuf=False")
    return {code: (GpuMemoryRefused, advice)
            for code in (errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EPROTONOSUPPORT)}


class Region:
    """One registered range; lkey and rkey are one number, as the wire has it."""

    def __init__(self, addr: int, num_bytes: int, access: int, key: int, rkey: int, parts: list):
        self.addr, self.num_bytes, self.access = addr, num_bytes, access
        self.lkey, self.rkey = key, rkey
        self._parts = parts

    def close(self) -> None:
        """The adapter uses it no more once this returns. Idempotent."""
        while self._parts:
            self._parts.pop().close()


def register_host(device: Device, addr: int, num_bytes: int, access: int) -> Region:
    """Host memory, or GPU memory where nvidia-peermem makes it look like that."""
    fixes: dict[int, tuple[type[HcaError], str]] = {
        errno.EFAULT: (GpuMemoryRefused, "Not memory of this process. If it is a GPU's: use dmabuf "
                       "(open NVIDIA driver), or `sudo modprobe nvidia-peermem`"),
        errno.ENOMEM: (DeviceRefused, f"Usually the limit of locked memory: {LOCKED_MEMORY}"),
    }
    with doing(device.verbs, f"registering {num_bytes} bytes at {addr:#x}", fixes):
        mr = device.verbs.MR(device.pd, num_bytes, access, address=addr)
    return Region(addr, num_bytes, access, mr.lkey, mr.rkey, [mr])


def register_gpu(device: Device, block: Block, access: int) -> Region:
    """GPU memory with a dmabuf. The key is made by the firmware's own command: a dmabuf MR of
    pyverbs begins at address 0 (its offset), and work-queue entries name GPU addresses."""
    part = umem(device, block, 0, block.num_bytes, "GPU memory")
    try:
        flags = {
            "lr": 1, "lw": access & ACCESS_LOCAL_WRITE, "rw": access & ACCESS_REMOTE_WRITE,
            "rr": access & ACCESS_REMOTE_READ, "a": access & ACCESS_REMOTE_ATOMIC,
        }
        raw = prm.command(
            prm.CREATE_MKEY, mkey_umem_valid=1, mkey_umem_id=part.umem_id,
            mkc={**{name: int(bool(value)) for name, value in flags.items()},
                 "access_mode_1_0": prm.ACCESS_MODE_MTT, "qpn": prm.NO_QPN, "pd": device.pdn,
                 "start_addr": block.addr, "len": block.num_bytes},
        )
        with doing(device.verbs, f"a key for {block.num_bytes} bytes of GPU memory"):
            mkey = device.verbs.Mlx5DevxObj(device.context, raw, prm.CREATED_BYTES)
    except BaseException:
        part.close()
        raise
    out = bytes(mkey.out_view)
    key = prm.get(out, prm.CREATED, "number") << 8  # mkey_7_0 is 0
    return Region(block.addr, block.num_bytes, access, key, key, [part, mkey])
