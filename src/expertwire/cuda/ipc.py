"""GPU memory that two processes of one host share, by CUDA IPC handles.

Each region is an allocation of its own, in whole pages: a handle opens all of its page, and a peer
must not reach anything else.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..errors import HandleError, HcaError
from .compile import require

log = logging.getLogger("expertwire.cuda")

PAGE_BYTES = 2 << 20
HANDLE_BYTES = 64


def _driver(device: torch.device) -> Any:
    """The driver, with the device's primary context current on this thread."""
    require("cuda.core").Device(device.index).set_current()
    return require("cuda.bindings.driver")


def _check(error: Any, what: str) -> None:
    if int(error) != 0:
        raise HcaError(f"{what}: {error.name}")


def _note(error: Any, what: str) -> None:
    # The end of a connection, whose peer may be gone already: nobody could do anything about it.
    if int(error) != 0:
        log.warning("%s: %s", what, error.name)


class Exported:
    """Zeroed memory on a GPU that one peer may map. `handle`: what the peer needs, 64 bytes."""

    def __init__(self, device: torch.device, num_bytes: int):
        self._device, self.num_bytes, self.addr = device, num_bytes, 0
        driver = _driver(device)
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        error, addr = driver.cuMemAlloc(size)
        _check(error, f"{num_bytes} bytes of GPU memory")
        self.addr = int(addr)
        try:
            _check(driver.cuMemsetD8(self.addr, 0, size)[0], "clearing GPU memory")
            _check(driver.cuStreamSynchronize(driver.CUstream(0))[0], "clearing GPU memory")
            error, handle = driver.cuIpcGetMemHandle(self.addr)
            _check(error, "this GPU's memory cannot be shared between processes")
            self.handle = bytes(handle.reserved)
        except HcaError:
            self.close()
            raise

    def close(self) -> None:
        """Frees it, once the peer has closed its side or is gone. Idempotent."""
        addr, self.addr = self.addr, 0
        if addr:
            _note(_driver(self._device).cuMemFree(addr)[0], "freeing shared GPU memory")


class Imported:
    """A peer's exported memory as `device` reaches it. Raises HandleError if it cannot."""

    def __init__(self, device: torch.device, handle: bytes, num_bytes: int):
        if len(handle) != HANDLE_BYTES:
            raise HandleError(f"an IPC handle of {len(handle)} bytes, not {HANDLE_BYTES}")
        self._device, self.num_bytes = device, num_bytes
        driver = _driver(device)
        raw = driver.CUipcMemHandle()
        raw.reserved = handle
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        error, addr = driver.cuIpcOpenMemHandle(raw, int(flags))
        if int(error) != 0:
            raise HandleError(f"{device} cannot map the peer's GPU memory: {error.name}")
        self.addr = int(addr)

    def close(self) -> None:
        """Unmaps it; no kernel may use it any more. Idempotent."""
        addr, self.addr = self.addr, 0
        if addr:
            _note(_driver(self._device).cuIpcCloseMemHandle(addr)[0], "unmapping a peer's memory")
