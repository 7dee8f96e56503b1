"""Host memory that a GPU reads and writes: where the software HCA's queues lie for GPU kernels."""

from __future__ import annotations

import torch

from ..errors import HcaError
from ..hca.soft import QpMemory

UAR_BYTES = 4096
# cuda_runtime_api.h cudaHostRegisterPortable | cudaHostRegisterMapped
_REGISTER_FLAGS = 1 | 2


class PinnedBuffer:
    """Zeroed pinned host memory; GPU and CPU use the same address. Pages are the GPU's to read
    over the bus, so keep small things and messages in it, not weights."""

    def __init__(self, num_bytes: int):
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.addr, self.num_bytes = self.tensor.data_ptr(), num_bytes


class PinnedQpMemory:
    """Ring, doorbell record, register page and CQ of one queue pair in pinned host memory.

    depth: blocks of the send queue. Keep it as long as the queue pair.
    """

    def __init__(self, depth: int, num_cqe: int | None = None):
        cq_bytes = max((num_cqe or depth) * 64, 4096)
        self._buffer = PinnedBuffer(2 * UAR_BYTES + depth * 64 + cq_bytes)
        base = self._buffer.addr
        self.memory = QpMemory(
            uar_addr=base, dbrec_addr=base + UAR_BYTES, cq_dbrec_addr=base + UAR_BYTES + 64,
            proxy_addr=base + UAR_BYTES + 128, sq_addr=base + 2 * UAR_BYTES,
            cq_addr=base + 2 * UAR_BYTES + depth * 64,
        )


class Mapped:
    """Memory of this process (a mapped memfd, say) made reachable for the GPU while it is open."""

    def __init__(self, addr: int, num_bytes: int):
        self.addr = addr
        error = torch.cuda.cudart().cudaHostRegister(addr, num_bytes, _REGISTER_FLAGS)
        if int(error) != 0:
            raise HcaError(f"the GPU cannot map {num_bytes} bytes at {addr:#x}: {error}")

    def close(self) -> None:
        """Takes it away from the GPU; no kernel may use it any more. Idempotent."""
        if self.addr:
            torch.cuda.cudart().cudaHostUnregister(self.addr)
            self.addr = 0
