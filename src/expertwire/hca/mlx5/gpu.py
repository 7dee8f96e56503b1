"""Queues that GPU kernels post to, and an adapter's register as kernels reach it.

Queues lie in GPU memory (`GpuBlock`: the adapter reads them there, by dmabuf or nvidia-peermem) or
in pinned host memory (`PinnedBlock`). The register page is mapped to the GPU as I/O memory; where
the driver does not allow that, `doorbell="proxy"` has a thread ring. Needs torch with CUDA.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from ...cuda.compile import require
from ...cuda.pinned import PinnedBuffer
from ...errors import HcaError
from ..interface import QpInfo
from .doorbell import Doorbells
from .errors import GpuMemoryRefused
from .memory import PAGE_BYTES
from .queue import Mlx5Qp

ALLOCATION_BYTES = 2 << 20  # an allocation of its own: a dmabuf hands out whole pages of a GPU
# cuda.h CU_MEMHOSTREGISTER_*, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
PORTABLE, DEVICE_MAP, IO_MEMORY = 1, 2, 4
DMA_BUF, SYNC_MEMOPS = 1, 6
DRIVER_OPTIONS = (
    "The NVIDIA driver must be loaded with NVreg_EnableStreamMemOPs=1 and "
    'NVreg_RegistryDwords="PeerMappingOverride=1;" (`expertwire doctor` shows how), else set '
    "EXPERTWIRE_DOORBELL=proxy"
)


def _driver(index: int) -> Any:
    """The driver API, with the device's primary context current on this thread."""
    require("cuda.core").Device(index).set_current()
    return require("cuda.bindings.driver")


def _value(result: tuple, what: str, advice: str) -> Any:
    error, *values = result
    if int(error) != 0:
        raise GpuMemoryRefused(f"{what}: {error.name}. {advice}")
    return values[0] if values else None


class GpuBlock:
    """Zeroed GPU memory (memory.Block). dmabuf=False: the adapter finds it by its address, through
    nvidia-peermem. Raises GpuMemoryRefused."""

    is_host = False

    def __init__(self, num_bytes: int, device: int = 0, *, dmabuf: bool = True):
        self.num_bytes = -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self.addr, self.dmabuf, self._device = 0, None, device
        driver = _driver(device)
        what = f"{self.num_bytes} bytes of GPU {device}"
        self.addr = int(_value(driver.cuMemAlloc(self.num_bytes), what, "It is full"))
        try:
            self.fill(0, self.num_bytes, 0)
            # Copies must not be half done when the adapter looks.
            flag = driver.CUpointer_attribute(SYNC_MEMOPS)
            _value(driver.cuPointerSetAttribute(1, flag, self.addr), what, "A newer driver?")
            if dmabuf:
                kind = driver.CUmemRangeHandleType(DMA_BUF)
                self.dmabuf = int(_value(
                    driver.cuMemGetHandleForAddressRange(self.addr, self.num_bytes, kind, 0),
                    f"a dmabuf of {what}", "It takes the open NVIDIA kernel modules and Linux "
                    "5.12; else `sudo modprobe nvidia-peermem` and dmabuf=False"))
        except BaseException:
            self.close()
            raise

    def fill(self, offset: int, num_bytes: int, value: int) -> None:
        driver = _driver(self._device)
        _value(driver.cuMemsetD8(self.addr + offset, value, num_bytes), "filling GPU memory", "")
        _value(driver.cuCtxSynchronize(), "filling GPU memory", "")

    def close(self) -> None:
        """Frees it. Idempotent."""
        if self.dmabuf is not None:
            os.close(self.dmabuf)
            self.dmabuf = None
        if self.addr:
            addr, self.addr = self.addr, 0
            _driver(self._device).cuMemFree(addr)


class PinnedBlock:
    """Zeroed pinned host memory (memory.Block); CPU, GPU and adapter use one address."""

    dmabuf, is_host = None, True

    def __init__(self, num_bytes: int):
        self._buffer = PinnedBuffer(num_bytes + PAGE_BYTES)
        self.addr = -(-self._buffer.addr // PAGE_BYTES) * PAGE_BYTES
        self.num_bytes = num_bytes

    def fill(self, offset: int, num_bytes: int, value: int) -> None:
        ctypes.memset(self.addr + offset, value, num_bytes)

    def close(self) -> None:
        """Freed with its last user."""
        self.addr = 0


class Mapped:
    """A range of this process's addresses as kernels reach it. io: of a device (an adapter's
    register page), not of memory. Raises GpuMemoryRefused."""

    def __init__(self, addr: int, num_bytes: int, device: int = 0, *, io: bool):
        begin = addr // PAGE_BYTES * PAGE_BYTES
        size = -(-(addr + num_bytes - begin) // PAGE_BYTES) * PAGE_BYTES
        self._device, self._begin = device, 0
        driver = _driver(device)
        flags = PORTABLE | DEVICE_MAP | (IO_MEMORY if io else 0)
        what = f"mapping {'a register page' if io else f'{size} bytes'} to GPU {device}"
        _value(driver.cuMemHostRegister(begin, size, flags), what,
               DRIVER_OPTIONS if io else "Locked memory: ulimit -l unlimited")
        self._begin = begin
        try:
            base = int(_value(driver.cuMemHostGetDevicePointer(begin, 0), what, DRIVER_OPTIONS))
        except HcaError:
            self.close()
            raise
        self.addr = base + addr - begin

    def close(self) -> None:
        """No kernel may use it any more. Idempotent."""
        if self._begin:
            begin, self._begin = self._begin, 0
            _driver(self._device).cuMemHostUnregister(begin)


def kernel_view(qp: Mlx5Qp, register: Mapped | None, words: Mapped | None,
                doorbells: Doorbells | None) -> QpInfo:
    """Where kernels find a queue pair's parts: `qp.info` with the register (doorbell="register")
    or the doorbell word (doorbell="proxy") at its address on the GPU."""
    info = QpInfo.from_buffer_copy(qp.info)
    if register is not None:
        info.uar_addr = register.addr - 0x800
    if words is not None and doorbells is not None:
        info.proxy_addr = words.addr + qp.info.proxy_addr - doorbells.words[0]
    return info
