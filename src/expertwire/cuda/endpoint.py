"""One end of a connection whose queue pairs the GPU HCA serves: the device's view is on the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import BinaryIO

from ..control.connection import Endpoint
from ..control.handles import ConnectionHandle, MemoryHandle, WireHandle
from ..device_structs import IbgdaPeer
from ..hca.ring import write_ring
from ..target import Block
from .hca import GpuHca


class GpuEndpoint(Endpoint):
    """An `Endpoint` for kernels of one GPU; arguments as there, hca: the GPU's."""

    hca: GpuHca
    _placed: list[Block]

    def connect(
        self, connection: ConnectionHandle, memory: MemoryHandle, fds: Sequence[int],
        wire: WireHandle | None = None,
    ) -> None:
        """As `Endpoint.connect`; then everything that kernels read is placed on the GPU."""
        super().connect(connection, memory, fds, wire)
        target = self.hca.target
        for state in self._qp_states:
            state.scope = target.scope
        self._placed = [target.place(part) for part in (
            self._qp_states, self._local_keys, self._remote_keys)]
        qps, local, remote = (block.addr for block in self._placed)
        state = self._peer_state
        self._placed.append(target.place(IbgdaPeer(
            qps=qps, num_qps=state.num_qps, local_keys=local, num_local_keys=1,
            remote_keys=remote, num_remote_keys=1, timeout_ns=state.timeout_ns,
        )))

    @property
    def peer_addr(self) -> int:
        """Address of the IbgdaPeer that kernels take: on the GPU, once connected."""
        return self._placed[-1].addr

    @property
    def qp_states(self) -> ctypes.Array:
        """The queue pairs' state as the GPU has it now."""
        kind = type(self._qp_states)
        return kind.from_buffer_copy(self._placed[0].read(0, ctypes.sizeof(kind)))

    def dump_to(self, out: BinaryIO, name: str = "") -> None:
        """Appends the rings to an open file, once connected."""
        for state in self.qp_states if hasattr(self, "_placed") else ():
            write_ring(out, state, name, self.hca.words.read)

    @staticmethod
    def _check_size(fd: int, memory: MemoryHandle) -> None:
        """Mapping tells: no more than there is can be mapped."""
