"""GPU memory that two processes of one host share: allocations handed over as file descriptors.

Each region is an allocation of its own, so that a peer reaches nothing else. The driver counts who
uses it: it stays whole for a peer that maps it after its owner was killed, and is gone with the
last mapping (CUDA driver API, "Virtual Memory Management"). A peer cannot map more than there is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import HandleError, HcaError
from .compile import require

log = logging.getLogger("expertwire.cuda")

PAGE_BYTES = 2 << 20  # of a mapping


def _driver(device: torch.device) -> Any:
    """The driver, with the device's primary context current on this thread."""
    require("cuda.core").Device(device.index).set_current()
    return require("cuda.bindings.driver")


def _value(result: tuple, what: str) -> Any:
    """What a driver call returned. Raises HcaError if it failed."""
    error, *values = result
    if int(error) != 0:
        raise HcaError(f"{what}: {error.name}")
    return values[0] if values else None


def _note(result: tuple, what: str) -> None:
    # At the end of a connection: nobody could do anything about it.
    if int(result[0]) != 0:
        log.warning("%s: %s", what, result[0].name)


def _location(driver: Any, device: torch.device, owner: Any) -> Any:
    owner.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    owner.location.id = device.index
    return owner


class _Mapping:
    """An allocation at an address of this process, for kernels on `device`."""

    def __init__(self, device: torch.device, handle: Any, num_bytes: int):
        self._device, self._size, self.addr = device, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, 0
        driver = _driver(device)
        addr = _value(driver.cuMemAddressReserve(self._size, 0, 0, 0), "addresses for GPU memory")
        mapped = False
        try:
            _value(driver.cuMemMap(addr, self._size, 0, handle, 0),
                   f"mapping {self._size} bytes of GPU memory")
            mapped = True
            access = _location(driver, device, driver.CUmemAccessDesc())
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _value(driver.cuMemSetAccess(addr, self._size, [access], 1),
                   f"{device} cannot reach this GPU memory")
        except HcaError:
            if mapped:
                _note(driver.cuMemUnmap(addr, self._size), "unmapping GPU memory")
            _note(driver.cuMemAddressFree(addr, self._size), "addresses of GPU memory")
            raise
        self.addr = int(addr)

    def close(self) -> None:
        """Unmaps it; no kernel may use it any more. Idempotent."""
        addr, self.addr = self.addr, 0
        if addr:
            driver = _driver(self._device)
            _note(driver.cuMemUnmap(addr, self._size), "unmapping GPU memory")
            _note(driver.cuMemAddressFree(addr, self._size), "addresses of GPU memory")


class Exported:
    """Zeroed memory on a GPU that one peer may map. `fd`: what the peer needs, ours to close."""

    def __init__(self, device: torch.device, num_bytes: int):
        self.num_bytes, self.fd = num_bytes, -1
        driver = _driver(device)
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        properties = _location(driver, device, driver.CUmemAllocationProp())
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties.requestedHandleTypes = kind
        handle = _value(driver.cuMemCreate(size, properties, 0), f"{size} bytes of GPU memory")
        try:
            self._mapping = _Mapping(device, handle, size)
            self.addr = self._mapping.addr
            try:
                _value(driver.cuMemsetD8(self.addr, 0, size), "clearing GPU memory")
                _value(driver.cuStreamSynchronize(driver.CUstream(0)), "clearing GPU memory")
                self.fd = int(_value(driver.cuMemExportToShareableHandle(handle, kind, 0),
                                     "this GPU's memory cannot be shared between processes"))
            except HcaError:
                self._mapping.close()
                raise
        finally:
            # The mapping and the descriptor keep the memory.
            _note(driver.cuMemRelease(handle), "a handle of GPU memory")

    def close(self) -> None:
        """Lets go of it; a peer that maps it still can use it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self._mapping.close()
        self.addr = 0


class Imported:
    """A peer's exported memory as `device` reaches it. Takes over the descriptors and closes them.

    fds: what came with the peer's message; it must be one. Raises HandleError if it is not, if it
    is no GPU memory of this host, holds less than num_bytes, or cannot be reached from `device`.
    """

    def __init__(self, device: torch.device, fds: Sequence[int], num_bytes: int):
        self.num_bytes = num_bytes
        try:
            if len(fds) != 1:
                raise HandleError(f"the peer's memory comes as one descriptor, not {len(fds)}")
            driver = _driver(device)
            kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            handle = _value(driver.cuMemImportFromShareableHandle(fds[0], kind),
                            "what the peer sent is no GPU memory of this host")
            try:
                self._mapping = _Mapping(device, handle, num_bytes)
            finally:
                _note(driver.cuMemRelease(handle), "a handle of a peer's GPU memory")
        except HcaError as err:
            raise HandleError(f"the peer's memory ({num_bytes} bytes): {err}") from err
        finally:
            for fd in fds:
                os.close(fd)
        self.addr = self._mapping.addr

    def close(self) -> None:
        """Unmaps it; no kernel may use it any more. Idempotent."""
        self._mapping.close()
        self.addr = 0
