"""GPU memory by address, as the CPU reads and writes it while kernels run."""

from __future__ import annotations

import ctypes
from typing import TypeVar

import torch

from ..errors import HcaError
from .compile import require

T = TypeVar("T", bound=ctypes.Structure)


class GpuWords:
    """Reads and writes of a few bytes on a stream of their own: they wait for no kernel."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def _copy(self, name: str, *args: object) -> None:
        require("cuda.core").Device(self.device.index).set_current()
        driver = require("cuda.bindings.driver")
        stream = driver.CUstream(self._stream.cuda_stream)
        (error,) = getattr(driver, name)(*args, stream)
        if int(error) == 0:
            (error,) = driver.cuStreamSynchronize(stream)
        if int(error) != 0:
            raise HcaError(f"copying GPU memory: {error.name}")

    def write(self, addr: int, data: bytes) -> None:
        """Returns when it is there."""
        raw = ctypes.create_string_buffer(data, len(data))
        self._copy("cuMemcpyHtoDAsync", addr, ctypes.addressof(raw), len(data))

    def read(self, addr: int, num_bytes: int) -> bytes:
        raw = ctypes.create_string_buffer(num_bytes)
        self._copy("cuMemcpyDtoHAsync", ctypes.addressof(raw), addr, num_bytes)
        return raw.raw

    def write_fields(self, addr: int, kind: type[ctypes.Structure], **values: int) -> None:
        """Some fields of a structure at addr, one after another in the order given."""
        for name, value in values.items():
            field = getattr(kind, name)
            self.write(addr + field.offset, value.to_bytes(field.size, "little"))

    def read_struct(self, addr: int, kind: type[T]) -> T:
        return kind.from_buffer_copy(self.read(addr, ctypes.sizeof(kind)))
