"""Memory that can be registered with an HCA and shared with one peer."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass

from ..errors import ConfigError

# ibv_access_flags (rdma-core verbs.h)
ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_ATOMIC = 1, 2, 4, 8


@dataclass(frozen=True)
class MemoryRegion:
    """A registered range: `lkey` (and `rkey`, the same number locally) of `num_bytes` at `addr`."""

    addr: int
    num_bytes: int
    lkey: int
    access: int


class Buffer:
    """Zeroed shared memory of its own memfd: nothing in the file system, gone with its last user.

    The memfd is sealed against shrinking, so that a peer that maps it can never fault.
    """

    def __init__(self, num_bytes: int, name: str = "expertwire"):
        if num_bytes < 1:
            raise ConfigError(f"a buffer needs at least 1 byte, not {num_bytes}")
        self.num_bytes = num_bytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(
                self.fd, fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            self._map = mmap.mmap(self.fd, num_bytes)
        except OSError as err:
            os.close(self.fd)
            raise ConfigError(f"no shared memory of {num_bytes} bytes: {err}") from err
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.addr = ctypes.addressof(self._anchor)
        self._closed = False

    def view(self) -> memoryview:
        """The bytes; release the view before `close`."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmaps and closes. Idempotent."""
        if not self._closed:
            self._closed = True
            del self._anchor
            self._map.close()
            os.close(self.fd)
