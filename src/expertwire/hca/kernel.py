"""The HCA kernel (device/gpu_hca.cuh) behind the HCA protocol, over host memory.

Queues, keys and peers lie in memory that CPU and kernel both reach; a peer may be in another
process of the host. `poll` launches the kernel for what is posted. For tests: queues in host memory
are slow for a GPU (cuda/hca.py has them in its own).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Any

from ..control.memory import Buffer, MemoryRegion
from ..device_structs import GpuHcaArgs, HcaKey, HcaQueue
from ..errors import HandleError, HcaError
from ..target import Closable, Target
from .interface import QpInfo
from .soft import (
    CQ_COLLAPSED,
    CQ_OVERRUN_IGNORE,
    STATE_ERR,
    STATE_RESET,
    STATE_RTR,
    STATE_RTS,
)

MAX_KEYS, MAX_QUEUES = 64, 64
UAR_BYTES = 4096
TABLE_BYTES = MAX_KEYS * ctypes.sizeof(HcaKey)
_WINDOWS: dict[int, KernelWindow] = {}  # by file descriptor: of this process


def _random_key(taken: Sequence[int]) -> int:
    while (key := secrets.randbits(32)) in (0, 0x100, *taken):  # 0x100 ends a scatter list
        pass
    return key


class _Keys:
    """A table of HcaKey that the kernel reads."""

    def __init__(self, memory: Buffer):
        self.fd, self.addr = memory.fd, memory.addr
        self.entries = (HcaKey * MAX_KEYS).from_address(memory.addr)

    def add(self, mr: MemoryRegion, pd: int) -> int:
        """The new key of a region. Raises HcaError when the table is full."""
        keys = [entry.key for entry in self.entries if entry.valid]
        for entry in self.entries:
            if not entry.valid:
                entry.access, entry.pd, entry.base = mr.access, pd, mr.addr
                entry.length, entry.mapped, entry.key = mr.num_bytes, mr.addr, _random_key(keys)
                entry.valid = 1
                return entry.key
        raise HcaError(f"a table holds at most {MAX_KEYS} keys")

    def remove(self, key: int) -> None:
        for entry in self.entries:
            if entry.valid and entry.key == key:
                entry.valid = 0
                return
        raise HcaError(f"key {key:#x} is not registered")


class KernelWindow:
    """The keys that one peer gets (interface.Window)."""

    def __init__(self, hca: KernelHca):
        self._hca = hca
        self.keys = _Keys(hca.alloc_own(TABLE_BYTES))
        self.published: dict[int, int] = {}  # rkey -> lkey
        self.fd = self.keys.fd
        _WINDOWS[self.fd] = self

    def publish(self, mr: MemoryRegion, fd_idx: int = 0, fd_offset: int = 0) -> int:
        """Lets the peer use a region; returns the rkey, random and for this peer only."""
        if mr.lkey not in self._hca.lkeys():
            raise HcaError(f"key {mr.lkey:#x} is not registered")
        rkey = self.keys.add(mr, 0)
        self.published[rkey] = mr.lkey
        return rkey

    def revoke(self, rkey: int, timeout: float = 1.0) -> None:
        self.keys.remove(rkey)
        self.published.pop(rkey, None)

    def watch(self, slots_addr: int, slot_bytes: int, num_slots: int) -> None:
        raise HcaError("the HCA kernel has no receives: signal by write or by add")

    def close(self) -> None:
        if _WINDOWS.pop(self.fd, None) is not None:
            self._hca.windows.remove(self)
            for entry in self.keys.entries:
                entry.valid = 0


class _Theirs:
    """Shared memory of another process, mapped here."""

    def __init__(self, target: Target, fd: int):
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.addr = ctypes.addressof(self._anchor)
        self._reached = target.reach(self.addr, -(-len(self._map) // 4096) * 4096)

    def close(self) -> None:
        self._reached.close()
        del self._anchor
        self._map.close()


class KernelPeer:
    """A peer's window (interface.Peer), of this process or another one, which gives one region."""

    def __init__(self, target: Target, window_fd: int, region_fds: Sequence[int]):
        self.queues: list[KernelQp] = []
        self._mapped: list[_Theirs] = []
        self.shift = 0  # from what keys say of their memory to where it is here
        if window_fd in _WINDOWS:
            self.keys_addr = _WINDOWS[window_fd].keys.addr
            return
        if len(region_fds) != 1:
            raise HandleError(f"the peer gives {len(region_fds)} regions; of another process one "
                              "is reached: put what is to be written there into one buffer")
        try:
            for fd in (window_fd, *region_fds):
                self._mapped.append(_Theirs(target, fd))
            self.keys_addr, region_addr = (mapped.addr for mapped in self._mapped)
            entry = next((entry for entry in self._entries() if entry.valid), None)
            if entry is None:
                raise HandleError("the peer has published no memory: publish it before connecting")
            self.shift = region_addr - entry.mapped
        except BaseException:
            self.close()
            raise

    def _entries(self) -> ctypes.Array[HcaKey]:
        return (HcaKey * MAX_KEYS).from_address(self.keys_addr)

    def map(self, rkey: int, remote_addr: int, num_bytes: int) -> int:
        """Address here of a remote range that the peer lets us write."""
        for entry in self._entries():
            if (entry.valid and entry.key == rkey and entry.access & 2
                    and entry.base <= remote_addr
                    and remote_addr + num_bytes <= entry.base + entry.length):
                return entry.mapped + self.shift + remote_addr - entry.base
        raise HcaError(f"the peer does not let us write {num_bytes} bytes at {remote_addr:#x}")

    def lost(self) -> None:
        """Everything posted to it from now on completes with syndrome 0x15."""
        for queue in self.queues:
            queue.state_struct.lost = 1

    def notify(self) -> None:
        """Nobody sleeps here."""

    def close(self) -> None:
        if self.queues:
            raise HcaError(f"{len(self.queues)} queue pairs still use this peer")
        while self._mapped:
            self._mapped.pop().close()


class KernelQp:
    """One queue pair (interface.QueuePair)."""

    def __init__(self, hca: KernelHca, struct: HcaQueue):
        self._hca, self.state_struct = hca, struct
        self.peer: KernelPeer | None = None
        self.info = QpInfo(
            qpn=struct.qpn, num_wqe=struct.num_wqe, sq_addr=struct.sq_addr,
            dbrec_addr=struct.dbrec_addr, uar_addr=struct.uar_addr, cq_addr=struct.cq_addr,
            cq_dbrec_addr=struct.cq_dbrec_addr, proxy_addr=struct.proxy_addr,
            num_cqe=struct.num_cqe, cq_flags=struct.cq_flags,
        )

    def connect(self, peer: KernelPeer, remote_qpn: int) -> None:
        """RESET -> INIT -> RTR -> RTS towards the peer's keys."""
        if self.peer is not None:
            raise HcaError(f"connecting: queue pair {self.info.qpn:#x} is connected already")
        self.peer = peer
        peer.queues.append(self)
        self.state_struct.remote_keys = peer.keys_addr
        self.state_struct.remote_shift = peer.shift % (1 << 64)
        self.state_struct.num_remote_keys = MAX_KEYS
        for state in range(self.state + 1, STATE_RTS + 1):
            self.modify(state)

    def modify(self, state: int) -> None:
        """RESET clears the queue; other states go forward one by one."""
        struct = self.state_struct
        forward = state <= STATE_RTS and state == struct.state + 1
        if state not in (STATE_RESET, STATE_ERR) and not forward:
            raise HcaError(f"changing the state: from {struct.state} to {state} is no way")
        if STATE_RTR <= state <= STATE_RTS and self.peer is None:
            raise HcaError("changing the state: the queue pair has no peer yet")
        if state == STATE_RESET:
            self._hca.reset(struct)
        if state == STATE_RTR:  # what was rung in RESET or INIT is ignored
            struct.last_record = ctypes.c_uint32.from_address(struct.dbrec_addr + 4).value
            struct.last_proxy = ctypes.c_uint64.from_address(struct.proxy_addr).value
            for i in range(2):
                register = ctypes.c_uint64.from_address(struct.uar_addr + 0x800 + 0x100 * i)
                struct.last_register[i] = register.value
        struct.state = state

    def start_at(self, index: int) -> None:
        """For tests of wraps: a fresh queue goes on as if `index` entries had been executed."""
        struct = self.state_struct
        struct.pi = struct.ci = struct.num_cqe_written = index
        struct.last_record = int.from_bytes((index & 0xFFFF).to_bytes(4, "big"), "little")
        ctypes.c_uint32.from_address(struct.dbrec_addr + 4).value = struct.last_record
        consumed = int.from_bytes((index & 0xFFFFFF).to_bytes(4, "big"), "little")
        ctypes.c_uint32.from_address(struct.cq_dbrec_addr).value = consumed

    @property
    def state(self) -> int:
        return self.state_struct.state

    def first_error(self) -> tuple[int, int]:
        """(syndrome, WQE index) of the first error, (0, 0) if none."""
        return self.state_struct.first_syndrome, self.state_struct.first_error_idx

    def indices(self) -> tuple[int, int]:
        """(producer, consumer) index as the kernel left them, in 64-byte blocks."""
        return self.state_struct.pi, self.state_struct.ci

    def destroy(self) -> None:
        if self.peer is not None:
            self.peer.queues.remove(self)
            self.peer = None
        self.state_struct.state = STATE_RESET
        self._hca.free(self.state_struct)


class KernelHca:
    """The HCA protocol on a target's kernel, for peers of this host.

    blocks, warps: geometry of the kernel; on a GPU a block takes a multiprocessor while it runs.
    """

    network, scheme = False, ""

    def __init__(self, target: Target, *, blocks: int = 1, warps: int = 1):
        self._target = target
        self._reached: list[Closable] = []
        self._buffers: list[Buffer] = []  # as long as the kernel may look at them
        self._own: list[Buffer] = []  # queues and tables, closed with the HCA
        self._keys = _Keys(self.alloc_own(TABLE_BYTES))
        self.windows: list[KernelWindow] = []
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.pd = 1
        self._num_pds, self._next_qpn = 1, 0x100
        control = self.alloc_own(4096 + MAX_QUEUES * ctypes.sizeof(HcaQueue))
        self._queues = (HcaQueue * MAX_QUEUES).from_address(control.addr + 4096)
        self._used: set[int] = set()
        self._args = GpuHcaArgs(
            queues=control.addr + 4096, stop=control.addr, num_queues=MAX_QUEUES,
            lifetime_ns=1_000_000_000, return_when_idle=1,
        )
        self._launch = target.prepare([("gpu_hca", self._args)], grid=blocks, warps=warps)

    @property
    def pointer(self) -> int:
        """0: the fiber scheduler cannot drive this one; `poll` does."""
        return 0

    def lkeys(self) -> list[int]:
        return [entry.key for entry in self._keys.entries if entry.valid]

    def alloc_pd(self) -> int:
        self._num_pds += 1
        return self._num_pds

    def alloc(self, num_bytes: int) -> Buffer:
        """Zeroed memory that CPU and kernel reach."""
        buffer = Buffer(num_bytes)
        whole_pages = -(-num_bytes // 4096) * 4096
        self._reached.append(self._target.reach(buffer.addr, whole_pages))
        self._buffers.append(buffer)
        return buffer

    def alloc_own(self, num_bytes: int) -> Buffer:
        """As `alloc`, for queues and tables: given back when the HCA is closed."""
        buffer = self.alloc(num_bytes)
        self._own.append(buffer)
        return buffer

    def register(
        self, addr: int, num_bytes: int, access: int, pd: int | None = None
    ) -> MemoryRegion:
        if num_bytes < 1 or addr + num_bytes >= 1 << 64:
            raise HcaError(f"registering memory: cannot register {num_bytes} bytes at {addr:#x}")
        mr = MemoryRegion(addr, num_bytes, 0, access)
        return MemoryRegion(addr, num_bytes, self._keys.add(mr, pd or self.pd), access)

    def revoke(self, mr: MemoryRegion) -> None:
        """The region is not used once this and a `poll` that was running are done."""
        self._keys.remove(mr.lkey)
        for window in self.windows:
            for rkey in [r for r, lkey in window.published.items() if lkey == mr.lkey]:
                window.revoke(rkey)

    def create_window(self) -> KernelWindow:
        self.windows.append(KernelWindow(self))
        return self.windows[-1]

    def import_peer(
        self, window_fd: int, wake_fd: int, region_fds: Sequence[int]
    ) -> KernelPeer:
        return KernelPeer(self._target, window_fd, region_fds)

    def create_qp(
        self, depth: int = 1024, *, num_cqe: int | None = None,
        cq_flags: int = CQ_COLLAPSED | CQ_OVERRUN_IGNORE, pd: int | None = None,
        memory: Any = None,
    ) -> KernelQp:
        num_cqe = num_cqe or depth
        if not 16 <= depth <= 32768 or depth & (depth - 1):
            raise HcaError(f"creating a queue pair: depth {depth} is no power of two from 16 on")
        slot = next((i for i in range(MAX_QUEUES) if i not in self._used), None)
        if slot is None:
            raise HcaError(f"an HCA holds at most {MAX_QUEUES} queue pairs")
        self._used.add(slot)
        block = self.alloc_own(2 * UAR_BYTES + depth * 64 + max(num_cqe * 64, 4096))
        base = block.addr
        struct = self._queues[slot]
        ctypes.memset(ctypes.addressof(struct), 0, ctypes.sizeof(struct))
        struct.uar_addr, struct.dbrec_addr = base, base + UAR_BYTES
        struct.cq_dbrec_addr, struct.proxy_addr = base + UAR_BYTES + 64, base + UAR_BYTES + 128
        struct.sq_addr, struct.cq_addr = base + 2 * UAR_BYTES, base + 2 * UAR_BYTES + depth * 64
        struct.local_keys, struct.num_local_keys = self._keys.addr, MAX_KEYS
        struct.qpn, struct.num_wqe, struct.num_cqe = self._next_qpn, depth, num_cqe
        struct.cq_flags, struct.pd, struct.scope = cq_flags, pd or self.pd, 1
        self._next_qpn += 1
        self.reset(struct)
        return KernelQp(self, struct)

    def reset(self, struct: HcaQueue) -> None:
        """Indices 0, doorbells forgotten, CQ filled with 0xff."""
        struct.pi = struct.ci = struct.num_cqe_written = struct.last_record = 0
        struct.last_register[0] = struct.last_register[1] = struct.last_proxy = 0
        struct.first_syndrome = struct.first_error_idx = 0
        ctypes.memset(struct.cq_addr, 0xFF, struct.num_cqe * 64)
        for addr, count in ((struct.dbrec_addr, 8), (struct.proxy_addr, 8),
                            (struct.cq_dbrec_addr, 8), (struct.uar_addr + 0x800, 8),
                            (struct.uar_addr + 0x900, 8)):
            ctypes.memset(addr, 0, count)

    def free(self, struct: HcaQueue) -> None:
        for i in range(MAX_QUEUES):
            if ctypes.addressof(self._queues[i]) == ctypes.addressof(struct):
                self._used.discard(i)

    def poll(self, max_wqes: int = 256) -> int:
        """Runs the kernel until it is idle or has executed max_wqes; how many it executed."""
        before = sum(queue.num_executed for queue in self._queues)
        self._args.max_entries = max_wqes
        self._launch.run()
        self._target.synchronize()
        return sum(queue.num_executed for queue in self._queues) - before

    def stats(self) -> dict:
        """Entries executed, bytes moved, CQEs and error CQEs of the queue pairs that are open."""
        totals = {"executed": 0, "bytes": 0, "cqes": 0, "error_cqes": 0}
        for queue in self._queues:
            totals["executed"] += queue.num_executed
            totals["bytes"] += queue.num_bytes
            totals["cqes"] += queue.num_cqe_written
            totals["error_cqes"] += queue.num_errors
        return totals

    def kick(self) -> None:
        """Nothing sleeps here."""

    @staticmethod
    def read_word(addr: int) -> int:
        """A u64 of this process's memory."""
        return ctypes.c_uint64.from_address(addr).value

    def close(self) -> None:
        if self._used or self.windows:
            raise HcaError(
                f"{len(self._used)} queue pairs and {len(self.windows)} windows are still open"
            )
        self._target.synchronize()
        fd, self.wake_fd = self.wake_fd, -1
        if fd >= 0:
            os.close(fd)
        for reached in self._reached:
            reached.close()
        self._reached.clear()
        self._buffers.clear()
        while self._own:
            self._own.pop().close()
