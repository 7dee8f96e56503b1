"""A queue pair in plain memory with no HCA behind it, so that tests can see every byte."""

from __future__ import annotations

import ctypes
import socket

from expertwire.device_structs import (
    IbgdaKey,
    IbgdaOperation,
    IbgdaPeer,
    IbgdaQp,
    IbgdaRunArgs,
    KernelStatus,
)
from expertwire.launch import Launch

PUT, PUT_ALWAYS_POST, INLINE, ADD4, ADD8, GET, QUIET, SIGNAL_IMM, FILL, AWAIT, COPY = range(11)


class BareQp:
    """Ring, doorbell record, register page and collapsed CQ, plus key tables the test chooses.

    local, remote: lists of (begin, end, key) regions.
    """

    def __init__(self, depth: int, local, remote, *, timeout_ns: int = 50_000_000, start: int = 0):
        self.ring = (ctypes.c_uint8 * (depth * 64))(*[0xEE] * (depth * 64))
        self.dbrec = (ctypes.c_uint32 * 2)()
        self.uar = (ctypes.c_uint64 * 512)()
        self.cq = (ctypes.c_uint32 * 16)(*[0xFFFFFFFF] * 16)
        self.state = IbgdaQp(
            sq_addr=ctypes.addressof(self.ring), dbrec_addr=ctypes.addressof(self.dbrec),
            doorbell_addr=ctypes.addressof(self.uar) + 0x800, cq_addr=ctypes.addressof(self.cq),
            qpn=0xABCDEF, num_wqe=depth, scope=1, resv_head=start, ready_head=start,
            prod_idx=start, cons_idx=start,
        )
        self.local = self._keys(local)
        self.remote = self._keys(remote)
        self.peer = IbgdaPeer(
            qps=ctypes.addressof(self.state), num_qps=1, local_keys=ctypes.addressof(self.local),
            num_local_keys=len(local), remote_keys=ctypes.addressof(self.remote),
            num_remote_keys=len(remote), timeout_ns=timeout_ns,
        )

    @staticmethod
    def _keys(regions):
        table = (IbgdaKey * max(len(regions), 1))()
        for entry, (begin, end, key) in zip(table, regions, strict=False):
            entry.begin, entry.end, entry.key_be = begin, end, socket.htonl(key)
        return table

    def wqe(self, idx: int) -> bytes:
        slot = idx % self.state.num_wqe * 64
        return bytes(self.ring[slot : slot + 64])

    @property
    def rung(self) -> int:
        """16-bit index that the doorbell record publishes."""
        return socket.ntohl(self.dbrec[1])

    @property
    def register(self) -> bytes:
        return bytes(self.uar)[0x800:0x808]

    def complete(self, wqe_idx: int, opcode: int = 0, syndrome: int = 0) -> None:
        """Writes the CQE that an HCA would after executing WQE wqe_idx."""
        if syndrome:
            self.cq[13] = syndrome << 24
        self.cq[15] = socket.htonl((wqe_idx & 0xFFFF) << 16 | opcode << 4)

    def run(self, operations, *, warps: int = 1, warp_size: int = 4, seed: int | None = None):
        """Runs the operations on every warp; returns the warps' KernelStatus list."""
        table = (IbgdaOperation * (len(operations) * warps))(*[
            IbgdaOperation(**operation) for _ in range(warps) for operation in operations
        ])
        status = (KernelStatus * warps)()
        args = IbgdaRunArgs(
            peer=ctypes.addressof(self.peer), operations=ctypes.addressof(table),
            status=ctypes.addressof(status), num_operations=len(operations),
        )
        launch = Launch([("ibgda_run", args)], warps=warps, warp_size=warp_size)
        if seed is None:
            launch.run()
        else:
            launch.run_seeded(seed)
        return list(status)


def words(raw: bytes) -> str:
    """Bytes as 32-bit words in hex, the way hardware documents print them."""
    return raw.hex(" ", 4)
