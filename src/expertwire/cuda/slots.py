"""The slots of one connection between two GPU processes, as either side has them.

own: what the peer writes (a client's reply slots, a server's request slots); the peer's: what this
side writes. `offer` goes to the peer, `connect` takes what it offered.
"""

from __future__ import annotations

import os
from typing import Any, Protocol, cast

import torch

from ..client.link import parse_hex
from ..control.handles import ConnectionHandle, MemoryHandle
from ..errors import HandleError
from ..hca.interface import Hca
from .endpoint import GpuEndpoint
from .hca import GpuHca
from .ipc import Exported, Imported


class Slots(Protocol):
    """Addresses are of the first slot; the others follow. endpoint: None for mapped slots."""

    @property
    def endpoint(self) -> GpuEndpoint | None: ...
    @property
    def own_addr(self) -> int: ...
    @property
    def peer_addr(self) -> int: ...
    def offer(self) -> tuple[dict[str, Any], list[int]]: ...
    def connect(self, message: dict[str, Any], fds: list[int]) -> None: ...
    def close(self) -> None: ...


class MappedSlots:
    """The peer's slots are mapped here; kernels write straight into them."""

    @property
    def endpoint(self) -> None:
        return None

    def __init__(self, device: torch.device, own_bytes: int, peer_bytes: int):
        self._device, self._peer_bytes = device, peer_bytes
        self._own = Exported(device, own_bytes)
        self._peer: Imported | None = None

    @property
    def own_addr(self) -> int:
        return self._own.addr

    @property
    def peer_addr(self) -> int:
        """As this GPU reaches the peer's memory; once connected."""
        assert self._peer is not None
        return self._peer.addr

    def offer(self) -> tuple[dict[str, Any], list[int]]:
        """Fields of a message, and the descriptors that go with it."""
        return {}, [self._own.fd]

    def connect(self, message: dict[str, Any], fds: list[int]) -> None:
        """Takes over the descriptors. Raises HandleError for memory that is not what it should."""
        self._peer = Imported(self._device, fds, self._peer_bytes)

    def close(self) -> None:
        """No kernel here may use the slots any more; the peer's still can. Idempotent."""
        if self._peer is not None:
            self._peer.close()
        self._own.close()


class QueuedSlots:
    """Messages go through a work queue that the GPU HCA executes, to the peer's own addresses."""

    def __init__(self, hca: GpuHca, own_bytes: int, peer_bytes: int, timeout: float):
        self._peer_bytes = peer_bytes
        self._endpoint = GpuEndpoint(cast(Hca, hca), send_bytes=peer_bytes, recv_bytes=own_bytes,
                                     timeout_ns=int(timeout * 1e9))

    @property
    def endpoint(self) -> GpuEndpoint:
        return self._endpoint

    @property
    def own_addr(self) -> int:
        return self.endpoint.recv.addr

    @property
    def peer_addr(self) -> int:
        """As entries name it; once connected."""
        assert self.endpoint.remote is not None
        return self.endpoint.remote.addr

    def offer(self) -> tuple[dict[str, Any], list[int]]:
        end = self.endpoint
        return {"connection": end.connection_handle().pack().hex(),
                "memory": end.memory_handle().pack().hex()}, end.fds()

    def connect(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            memory = MemoryHandle.unpack(parse_hex(message, "memory"))
            connection = ConnectionHandle.unpack(parse_hex(message, "connection"))
        except HandleError:
            for fd in fds:
                os.close(fd)
            raise
        self.endpoint.connect(connection, memory, fds)
        if memory.num_bytes < self._peer_bytes:
            raise HandleError(f"the peer offers {memory.num_bytes} bytes of slots, "
                              f"{self._peer_bytes} were agreed")

    def close(self) -> None:
        self.endpoint.close()


def make_slots(
    device: torch.device, hca: GpuHca | None, own_bytes: int, peer_bytes: int, timeout: float = 5.0
) -> Slots:
    """hca: for a work queue; None: mapped. timeout: seconds for room in the queue."""
    if hca is None:
        return MappedSlots(device, own_bytes, peer_bytes)
    return QueuedSlots(hca, own_bytes, peer_bytes, timeout)
