"""Where kernels run and where their memory lies: the CPU target or a GPU, behind the same calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

T = TypeVar("T", bound=ctypes.Structure)
Steps = Sequence[tuple[str, ctypes.Structure]]


class Block:
    """A piece of a target's memory. `tensor` is its bytes, uint8 [num_bytes]."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self.addr = tensor.data_ptr()
        self.num_bytes = tensor.numel()

    def read(self, offset: int = 0, num_bytes: int | None = None) -> bytes:
        """The bytes as they are now; on a GPU this waits for the current stream."""
        end = self.num_bytes if num_bytes is None else offset + num_bytes
        if self.tensor.is_cuda:
            # A copy that has to wait may keep other threads from launching what it waits for.
            torch.cuda.current_stream(self.tensor.device).synchronize()
        return self.tensor[offset:end].cpu().numpy().tobytes()

    def read_struct(self, kind: type[T], index: int = 0) -> T:
        size = ctypes.sizeof(kind)
        return kind.from_buffer_copy(self.read(index * size, size))

    def write(self, data: Any, offset: int = 0) -> None:
        """Copies bytes, an array, a tensor or a ctypes object to `offset`."""
        raw = _as_bytes(data)
        self.tensor[offset : offset + raw.numel()] = raw.to(self.tensor.device)

    def view(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The first elements as a tensor that shares this memory."""
        count = int(np.prod(shape)) * dtype.itemsize
        return self.tensor[:count].view(dtype).view(shape)


def _as_bytes(data: Any) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data.contiguous().view(-1).view(torch.uint8)
    raw = data.tobytes() if isinstance(data, np.ndarray) else bytes(data)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class Runnable(Protocol):
    def run(self) -> None: ...


class Closable(Protocol):
    def close(self) -> None: ...


class Target(Protocol):
    """What tests and benchmarks need of a machine that runs the device code."""

    scope: int  # Scope of memory that only this target's device code shares

    def alloc(self, num_bytes: int, fill: int = 0) -> Block: ...
    def alloc_slot(self, num_bytes: int, fill: int = 0) -> Block: ...
    def place(self, data: Any) -> Block: ...
    def reach(self, addr: int, num_bytes: int) -> Closable: ...
    def synchronize(self) -> None: ...
    def prepare(
        self, steps: Steps, *, grid: int | Sequence[int] = 1, warps: int | Sequence[int] = 1
    ) -> Runnable: ...


class _TorchMemory:
    device: torch.device

    def alloc(self, num_bytes: int, fill: int = 0) -> Block:
        """Memory of at least one byte, every byte `fill`, aligned to 64 bytes."""
        return Block(
            torch.full((max(num_bytes, 1),), fill, dtype=torch.uint8, device=self.device)
        )

    def alloc_slot(self, num_bytes: int, fill: int = 0) -> Block:
        """Memory that messages travel through."""
        return self.alloc(num_bytes, fill)

    def place(self, data: Any) -> Block:
        """A copy of bytes, an array, a tensor or a ctypes object in this memory."""
        raw = _as_bytes(data)
        block = self.alloc(raw.numel())
        block.tensor[: raw.numel()] = raw.to(self.device)
        return block


class _Here:
    def close(self) -> None:
        pass


class CpuTarget(_TorchMemory):
    """Kernels as fibers on the calling thread. warp_size: lanes of a warp, 1 to 32."""

    scope = 1
    device = torch.device("cpu")

    def __init__(self, warp_size: int = 1):
        self.warp_size = warp_size

    def reach(self, addr: int, num_bytes: int) -> Closable:
        """Makes host memory reachable for kernels until it is closed: here it is."""
        return _Here()

    def synchronize(self) -> None:
        """Waits for what was launched: here it is done."""

    def prepare(
        self, steps: Steps, *, grid: int | Sequence[int] = 1, warps: int | Sequence[int] = 1
    ) -> Runnable:
        """Kernels that `run` executes one after another, each with its own geometry."""
        from .launch import Launch

        grids = [grid] * len(steps) if isinstance(grid, int) else grid
        counts = [warps] * len(steps) if isinstance(warps, int) else warps
        return _Sequence([
            Launch([step], grid=blocks, warps=count, warp_size=self.warp_size)
            for step, blocks, count in zip(steps, grids, counts, strict=True)
        ])


class _Sequence:
    def __init__(self, launches: Sequence[Runnable]):
        self._launches = launches

    def run(self) -> None:
        for launch in self._launches:
            launch.run()


class GpuTarget(_TorchMemory):
    """Kernels on a GPU, on torch's current stream, with memory of that GPU."""

    scope = 0

    def __init__(self, device: int | None = None):
        index = torch.cuda.current_device() if device is None else device
        self.device = torch.device("cuda", index)

    def reach(self, addr: int, num_bytes: int) -> Closable:
        """Maps host memory of this process for the GPU until it is closed."""
        from .cuda.pinned import Mapped

        return Mapped(addr, num_bytes)

    def synchronize(self) -> None:
        """Waits for what was launched on the current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def prepare(
        self, steps: Steps, *, grid: int | Sequence[int] = 1, warps: int | Sequence[int] = 1
    ) -> Runnable:
        """Kernels that `run` enqueues one after another; it does not wait for them."""
        from .cuda.launch import Launch

        return Launch(steps, grid=grid, warps=warps, device=self.device.index)
