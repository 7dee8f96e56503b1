"""The protocol that every HCA follows, whatever consumes the queues behind it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64
from typing import Any, Protocol

from ..control.handles import WireHandle
from ..control.memory import MemoryRegion


class QpInfo(ctypes.Structure):
    """Where a queue pair's parts are, for device code. Addresses are this process's."""

    _fields_ = (
        ("qpn", c_uint32), ("num_wqe", c_uint32), ("sq_addr", c_uint64), ("dbrec_addr", c_uint64),
        ("uar_addr", c_uint64), ("cq_addr", c_uint64), ("cq_dbrec_addr", c_uint64),
        ("proxy_addr", c_uint64), ("num_cqe", c_uint32), ("cq_flags", c_uint32),
    )


class Memory(Protocol):
    """Zeroed memory that an HCA moves bytes of; `fd` is what a peer maps it by."""

    fd: int
    addr: int
    num_bytes: int

    def close(self) -> None: ...


class Window(Protocol):
    """The keys that one peer gets. Its `fd` travels to that peer and to nobody else."""

    fd: int

    @property
    def wire(self) -> WireHandle: ...  # of HCAs with `network` only
    def publish(self, mr: MemoryRegion, fd_idx: int, fd_offset: int = 0) -> int: ...
    def revoke(self, rkey: int, timeout: float = 1.0) -> None: ...
    def watch(self, slots_addr: int, slot_bytes: int, num_slots: int) -> None: ...
    def close(self) -> None: ...


class Peer(Protocol):
    """A peer's window and memory, imported."""

    @property
    def pointer(self) -> int: ...

    def map(self, rkey: int, remote_addr: int, num_bytes: int) -> int: ...
    def lost(self) -> None: ...
    def notify(self) -> None: ...
    def close(self) -> None: ...


class QueuePair(Protocol):
    info: QpInfo

    def connect(self, peer: Peer, remote_qpn: int) -> None: ...
    def first_error(self) -> tuple[int, int]: ...
    def destroy(self) -> None: ...


class Hca(Protocol):
    """Registers memory, makes queue pairs, executes what is posted to them."""

    pointer: int
    wake_fd: int
    network: bool  # peers are on other hosts: connect_peer instead of import_peer
    scheme: str  # with `network`: of the addresses of servers that are reached through it
    relaxed_ordering: bool  # writes may land in another order than they were posted
    tells_errors: bool  # a queue's first error ends a wait; otherwise somebody has to look

    def alloc(self, num_bytes: int) -> Memory: ...
    def register(self, addr: int, num_bytes: int, access: int) -> MemoryRegion: ...
    def revoke(self, mr: MemoryRegion, timeout: float = 0.2) -> None: ...
    def create_window(self) -> Window: ...
    def import_peer(self, window_fd: int, wake_fd: int, region_fds: Sequence[int]) -> Peer: ...
    def connect_peer(self, window: Any, wire: WireHandle) -> Peer: ...
    def create_qp(self, depth: int = 1024) -> QueuePair: ...
    def poll(self, max_wqes: int = 256) -> int: ...
    def kick(self) -> None: ...
    def wait(
        self, words: Sequence[int], seen: Sequence[int], *, spin_ns: int, timeout_ns: int
    ) -> int | None: ...
    def interrupt(self) -> None: ...
    def read_word(self, addr: int) -> int: ...
    def stats(self) -> dict: ...
    def close(self) -> None: ...
