"""One end of a pairwise connection between a client and a server.

The two ends are independent: each makes its own queue pairs and memory, hands the other a
connection handle and a memory handle, and connects with the peer's. No world, rank or barrier.

    end = Endpoint(hca, send_bytes=..., recv_bytes=...)   # init; registers its memory
    end.connection_handle(), end.memory_handle(), end.fds()  # export
    end.connect(peer_connection, peer_memory, peer_fds)      # import

Towards another host no descriptors travel, and a wire handle does instead (`wire_handle`).

    end.peer_addr, end.remote                                # device state, where to write
    end.close()                                              # deregister, give everything back

`send` is private registered memory that puts read from; `recv` is a memfd of its own that exactly
one peer may write (and nobody else, so a peer can never touch another's slots).
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ..device_structs import DOORBELL_MODES, SCOPE_SYSTEM, IbgdaKey, IbgdaPeer, IbgdaQp
from ..errors import ConfigError, HandleError, HcaError
from ..hca.interface import Hca, Peer
from ..hca.ring import dump_path, write_ring
from .handles import ConnectionHandle, MemoryHandle, WireHandle
from .memory import (
    ACCESS_LOCAL_WRITE,
    ACCESS_REMOTE_ATOMIC,
    ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE,
)


def configured_doorbell() -> int:
    """How device code rings: EXPERTWIRE_DOORBELL, the register if it is not set.

    Raises ConfigError if it names no way.
    """
    name = os.environ.get("EXPERTWIRE_DOORBELL", "register")
    if name not in DOORBELL_MODES:
        raise ConfigError(f"EXPERTWIRE_DOORBELL must be one of {', '.join(DOORBELL_MODES)}, "
                          f"not {name!r}")
    return DOORBELL_MODES[name]


log = logging.getLogger("expertwire.control.connection")

SCRATCH_BYTES = 64  # at the end of the send region: where atomics put the old value


class Endpoint:
    """Queue pairs, send and receive memory towards one peer. Not thread-safe."""

    def __init__(
        self, hca: Hca, *, send_bytes: int, recv_bytes: int, num_qps: int = 1, depth: int = 1024,
        timeout_ns: int = 5_000_000_000, doorbell_mode: int | None = None,
    ):
        if doorbell_mode is None:
            doorbell_mode = configured_doorbell()
        self.hca = hca
        self.peer: Peer | None = None
        self.remote: MemoryHandle | None = None
        self._closed = False
        self.send = hca.alloc(send_bytes + SCRATCH_BYTES)
        self.recv = hca.alloc(recv_bytes)
        self._send_mr = hca.register(
            self.send.addr, self.send.num_bytes, ACCESS_LOCAL_WRITE
        )
        self._recv_mr = hca.register(
            self.recv.addr, self.recv.num_bytes,
            ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC,
        )
        self._window = hca.create_window()
        self._rkey = self._window.publish(self._recv_mr, fd_idx=0)
        self._qps = [hca.create_qp(depth) for _ in range(num_qps)]

        self._qp_states = (IbgdaQp * num_qps)()
        for state, qp in zip(self._qp_states, self._qps, strict=True):
            info = qp.info
            if hca.read_word(info.cq_addr + 56) >> 56 != 0xFF:
                self.close()  # a zero there would read as "entry 0 has completed"
                raise HcaError(f"completion queue of queue pair {info.qpn:#x} not filled with 0xff")
            state.sq_addr, state.dbrec_addr = info.sq_addr, info.dbrec_addr
            state.doorbell_addr, state.cq_addr = info.uar_addr + 0x800, info.cq_addr
            state.qpn, state.num_wqe = info.qpn, info.num_wqe
            state.scope, state.doorbell_mode = SCOPE_SYSTEM, doorbell_mode
            state.proxy_addr = info.proxy_addr
            state.scratch_addr = self.send.addr + send_bytes
            state.scratch_lkey_be = socket.htonl(self._send_mr.lkey)
        self._local_keys = (IbgdaKey * 1)()
        key = self._local_keys[0]
        key.begin, key.end = self.send.addr, self.send.addr + self.send.num_bytes
        key.key_be = socket.htonl(self._send_mr.lkey)
        self._remote_keys = (IbgdaKey * 1)()
        self._peer_state = IbgdaPeer(
            qps=ctypes.addressof(self._qp_states), num_qps=num_qps,
            local_keys=ctypes.addressof(self._local_keys), num_local_keys=1,
            remote_keys=ctypes.addressof(self._remote_keys), num_remote_keys=0,
            timeout_ns=timeout_ns,
        )

    @property
    def peer_addr(self) -> int:
        """Address of the IbgdaPeer that device code takes."""
        return ctypes.addressof(self._peer_state)

    @property
    def peer_pointer(self) -> int:
        """The HCA's handle of the peer, for native code that wakes it."""
        return self.peer.pointer if self.peer is not None else 0

    @property
    def mapped_addr(self) -> int:
        """Where the peer's receive memory is mapped here, for stores without the HCA."""
        return self._remote_keys[0].mapped

    @property
    def qp_states(self) -> ctypes.Array:
        """Device state of the queue pairs, for inspection and tests."""
        return self._qp_states

    def connection_handle(self) -> ConnectionHandle:
        return ConnectionHandle(tuple(qp.info.qpn for qp in self._qps))

    def memory_handle(self) -> MemoryHandle:
        return MemoryHandle(self.recv.addr, self.recv.num_bytes, self._rkey, fd_idx=0)

    def fds(self) -> list[int]:
        """File descriptors that go with the handles: window, wake-up, receive memory."""
        if self.hca.network:
            return []
        return [self._window.fd, self.hca.wake_fd, self.recv.fd]

    def wire_handle(self) -> WireHandle | None:
        """How a peer on another host reaches this end; None on an HCA of one host."""
        return self._window.wire if self.hca.network else None

    def connect(
        self, connection: ConnectionHandle, memory: MemoryHandle, fds: Sequence[int],
        wire: WireHandle | None = None,
    ) -> None:
        """Imports the peer's handles. The descriptors are taken over and closed here.

        Raises HandleError if they do not fit together or the memory is not as large as it says.
        """
        try:
            if len(connection.qpns) != len(self._qps):
                raise HandleError(
                    f"the peer has {len(connection.qpns)} queue pairs, this side {len(self._qps)}"
                )
            self.peer = self._reach(memory, fds, wire)
        finally:
            for fd in fds:
                os.close(fd)
        for qp, qpn in zip(self._qps, connection.qpns, strict=True):
            qp.connect(self.peer, qpn)
        self.remote = memory
        key = self._remote_keys[0]
        key.begin, key.end = memory.addr, memory.addr + memory.num_bytes
        key.key_be = socket.htonl(memory.rkey)
        if not self.hca.network:
            key.mapped = self.peer.map(memory.rkey, memory.addr, memory.num_bytes)
        self._peer_state.num_remote_keys = 1

    def _reach(self, memory: MemoryHandle, fds: Sequence[int], wire: WireHandle | None) -> Peer:
        if self.hca.network:
            if wire is None or fds:
                raise HandleError("the peer is of one host only, this side is behind a network")
            return self.hca.connect_peer(self._window, wire)
        if wire is not None or len(fds) != 3:
            raise HandleError(f"a connection comes with 3 file descriptors, not {len(fds)}")
        self._check_size(fds[2], memory)
        return self.hca.import_peer(fds[0], fds[1], [fds[2]])

    @staticmethod
    def _check_size(fd: int, memory: MemoryHandle) -> None:
        actual = os.fstat(fd).st_size
        if actual < memory.num_bytes:
            raise HandleError(
                f"the peer's memory has {actual} bytes, its handle says {memory.num_bytes}"
            )

    def watch_immediates(self, slot_bytes: int, num_slots: int) -> None:
        """The peer signals by write with immediate: its immediates are numbers of `recv` slots,
        and set their flags. Before `connect`."""
        self._window.watch(self.recv.addr, slot_bytes, num_slots)

    def first_error(self) -> tuple[int, int]:
        """(syndrome, work-queue entry) of the first error completion; (0, 0) if there is none."""
        return next((e for e in (qp.first_error() for qp in self._qps) if e[0]), (0, 0))

    def peer_lost(self) -> None:
        """The peer is gone: everything posted to it completes with an error, at once."""
        if self.peer is not None and not self._closed:
            self.peer.lost()

    def notify(self) -> None:
        """Wakes the peer if it sleeps; needed after direct stores, the HCA does it for puts."""
        if self.peer is not None:
            self.peer.notify()

    def dump(self, path: str | Path, name: str = "") -> None:
        """Writes the send queues' rings to a file, for `expertwire wqe decode`.

        name: shown with them. Raises OSError.
        """
        with open(path, "wb") as out:
            self.dump_to(out, name)

    def dump_to(self, out: BinaryIO, name: str = "") -> None:
        """Appends the rings to an open file."""
        for state in self._qp_states:
            write_ring(out, state, name)

    def _dump_if_wanted(self) -> None:
        folder = os.environ.get("EXPERTWIRE_DUMP")
        if not folder:
            return
        try:
            self.dump(dump_path(folder, self._qps[0].info.qpn))
        except OSError as err:  # closing goes on
            log.warning("EXPERTWIRE_DUMP=%s: %s", folder, err)

    def close(self) -> None:
        """Revokes the keys and gives back queue pairs, mappings and memory. Idempotent.

        With EXPERTWIRE_DUMP=FOLDER the rings are written there first.
        """
        if self._closed:
            return
        self._closed = True
        self._dump_if_wanted()
        for qp in self._qps:
            qp.destroy()
        if self.peer is not None:
            self.peer.close()
        self._window.close()
        self.hca.revoke(self._recv_mr)
        self.hca.revoke(self._send_mr)
        self.recv.close()
        self.send.close()
