"""The HCA kernel (device/gpu_hca.cuh) between processes and GPUs: `open_hca("gpu")`.

Queues, keys and messages lie in GPU memory; kernels post to the rings, the HCA kernel executes what
is posted, on at most two multiprocessors, in passes of 5 ms that a thread keeps enqueued. What it
writes to is the peer's GPU memory, mapped here (ipc.py). The keys that a peer gets are in a
table in our memory that its HCA reads for every entry, so a revoked key works for nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..control.memory import ACCESS_REMOTE_WRITE, MemoryRegion
from ..device_structs import GpuHcaArgs, HcaKey, HcaQueue
from ..errors import HandleError, HcaError
from ..hca.interface import QpInfo
from ..hca.soft import CQ_COLLAPSED, CQ_OVERRUN_IGNORE, STATE_ERR, STATE_RESET, STATE_RTS
from ..target import Block, GpuTarget
from .ipc import Exported, Imported
from .memory import GpuWords
from .passes import PASSES_AHEAD, Passes
from .pinned import PinnedBuffer

MAX_KEYS, MAX_QUEUES, MAX_BLOCKS = 64, 64, 2
KEY_BYTES, QUEUE_BYTES = ctypes.sizeof(HcaKey), ctypes.sizeof(HcaQueue)
UAR_BYTES = 4096
PASS_NS = 5_000_000  # synchronising the device waits for a few passes
WARPS = 16


class _Keys:
    """A table of HcaKey in GPU memory, with what we wrote kept here."""

    def __init__(self, words: GpuWords, addr: int):
        self._words, self.addr = words, addr
        self._taken: dict[int, int] = {}  # key -> place
        self._lock = threading.Lock()

    def add(self, mr: MemoryRegion, *, pd: int, mapped: int) -> int:
        """The new key of a region. Raises HcaError when the table is full."""
        with self._lock:
            place = next((i for i in range(MAX_KEYS) if i not in self._taken.values()), None)
            if place is None:
                raise HcaError(f"a table holds at most {MAX_KEYS} keys")
            while (key := secrets.randbits(32)) in (0, 0x100, *self._taken):
                pass  # 0x100 ends a scatter list
            self._taken[key] = place
        self._words.write_fields(
            self.addr + place * KEY_BYTES, HcaKey, access=mr.access, pd=pd, base=mr.addr,
            length=mr.num_bytes, mapped=mapped, key=key, valid=1,
        )
        return key

    def remove(self, key: int) -> None:
        with self._lock:
            place = self._taken.get(key)
            if place is None:
                raise HcaError(f"key {key:#x} is not registered")
            self._words.write_fields(self.addr + place * KEY_BYTES, HcaKey, valid=0)
            del self._taken[key]

    def keys(self) -> list[int]:
        return list(self._taken)


class GpuWindow:
    """The keys that one peer gets (interface.Window); `fd` is of GPU memory that only it maps."""

    def __init__(self, hca: GpuHca):
        self._hca = hca
        self._memory = Exported(hca.target.device, MAX_KEYS * KEY_BYTES)
        self._keys = _Keys(hca.words, self._memory.addr)
        self.published: dict[int, int] = {}  # rkey -> lkey
        self.fd = self._memory.fd

    def publish(self, mr: MemoryRegion, fd_idx: int = 0, fd_offset: int = 0) -> int:
        """Lets the peer use a region at fd_offset of the memory that it gets; returns the rkey."""
        if mr.lkey not in self._hca.lkeys():
            raise HcaError(f"key {mr.lkey:#x} is not registered")
        if fd_idx != 0:
            raise HcaError("a peer of the GPU HCA gets one region of memory")
        rkey = self._keys.add(mr, pd=0, mapped=fd_offset)
        self.published[rkey] = mr.lkey
        return rkey

    def revoke(self, rkey: int, timeout: float = 1.0) -> None:
        """The peer's HCA executes nothing with this key any more, but for an entry under way."""
        self._keys.remove(rkey)
        self.published.pop(rkey, None)

    def watch(self, slots_addr: int, slot_bytes: int, num_slots: int) -> None:
        raise HcaError("the GPU HCA has no receives: signal by write or by add")

    def close(self) -> None:
        if self in self._hca.windows:
            self._hca.windows.remove(self)
            for rkey in list(self.published):
                self.revoke(rkey)
            self._memory.close()


class GpuPeer:
    """A peer's keys and its memory as this GPU reaches them (interface.Peer)."""

    pointer = 0

    def __init__(self, hca: GpuHca, window_fd: int, region_fds: Sequence[int]):
        self._hca, self.queues = hca, list[GpuQp]()
        device = hca.target.device
        self._window = Imported(device, [os.dup(window_fd)], MAX_KEYS * KEY_BYTES)
        try:
            self.keys_addr = self._window.addr
            size = max((e.mapped + e.length for e in self._entries()), default=0)
            if size == 0:
                raise HandleError("the peer has published no memory")
            self._region = Imported(device, [os.dup(fd) for fd in region_fds], size)
        except BaseException:
            self._window.close()
            raise
        self.region_addr = self._region.addr

    def _entries(self) -> list[HcaKey]:
        raw = self._hca.words.read(self.keys_addr, MAX_KEYS * KEY_BYTES)
        return [entry for entry in (HcaKey * MAX_KEYS).from_buffer_copy(raw) if entry.valid == 1]

    def map(self, rkey: int, remote_addr: int, num_bytes: int) -> int:
        """Address here of a remote range that the peer lets us write."""
        for entry in self._entries():
            if (entry.key == rkey and entry.access & ACCESS_REMOTE_WRITE
                    and entry.base <= remote_addr
                    and remote_addr + num_bytes <= entry.base + entry.length):
                return self.region_addr + entry.mapped + remote_addr - entry.base
        raise HcaError(f"the peer does not let us write {num_bytes} bytes at {remote_addr:#x}")

    def lost(self) -> None:
        """Everything posted to it from now on completes with syndrome 0x15."""
        for queue in self.queues:
            queue.write(lost=1)

    def notify(self) -> None:
        """Nobody sleeps here."""

    def close(self) -> None:
        """Unmaps the peer's memory. Raises HcaError while queue pairs use it."""
        if self.queues:
            raise HcaError(f"{len(self.queues)} queue pairs still use this peer")
        self._region.close()
        self._window.close()


class GpuQp:
    """One queue pair (interface.QueuePair); its structure lies on the GPU and is read there."""

    def __init__(self, hca: GpuHca, slot: int, struct: HcaQueue, memory: Block):
        self._hca, self.slot, self._memory = hca, slot, memory
        self._addr = hca.queue_addr(slot)
        self.peer: GpuPeer | None = None
        self.info = QpInfo(
            qpn=struct.qpn, num_wqe=struct.num_wqe, sq_addr=struct.sq_addr,
            dbrec_addr=struct.dbrec_addr, uar_addr=struct.uar_addr, cq_addr=struct.cq_addr,
            cq_dbrec_addr=struct.cq_dbrec_addr, proxy_addr=struct.proxy_addr,
            num_cqe=struct.num_cqe, cq_flags=struct.cq_flags,
        )
        hca.words.write(self._addr, bytes(struct))

    def write(self, **fields: int) -> None:
        self._hca.words.write_fields(self._addr, HcaQueue, **fields)

    def read(self) -> HcaQueue:
        return self._hca.words.read_struct(self._addr, HcaQueue)

    def connect(self, peer: GpuPeer, remote_qpn: int) -> None:
        """RESET -> RTS towards the peer's keys. Raises HcaError if it is connected already."""
        if self.peer is not None:
            raise HcaError(f"connecting: queue pair {self.info.qpn:#x} is connected already")
        self.peer = peer
        peer.queues.append(self)
        self.write(remote_keys=peer.keys_addr, num_remote_keys=MAX_KEYS,
                   remote_shift=peer.region_addr, state=STATE_RTS)

    def modify(self, state: int) -> None:
        """To the error state only: what is posted is flushed."""
        if state != STATE_ERR:
            raise HcaError("a queue pair of the GPU HCA is made, connected and destroyed")
        self.write(state=state)

    @property
    def state(self) -> int:
        return self.read().state

    def first_error(self) -> tuple[int, int]:
        """(syndrome, WQE index) of the first error, (0, 0) if none."""
        struct = self.read()
        return struct.first_syndrome, struct.first_error_idx

    def indices(self) -> tuple[int, int]:
        """(producer, consumer) index as the kernel has them, in 64-byte blocks."""
        struct = self.read()
        return struct.pi, struct.ci

    def destroy(self) -> None:
        """Takes the queue from the HCA; it has let go of everything on return. Idempotent."""
        if self.slot in self._hca.queues:
            self.write(state=STATE_RESET)
            self._hca.wait_for_pass()
            if self.peer is not None:
                self.peer.queues.remove(self)
            del self._hca.queues[self.slot]


class GpuHca:
    """An HCA of one GPU for kernels there, between processes of a host.

    device: index, default torch's current one. blocks: multiprocessors that it takes, 1 or 2. It
    keeps the order of writes. For several threads.
    """

    network = False
    relaxed_ordering = False
    tells_errors = True
    pointer = 0  # the fiber scheduler does not drive this one
    pd = 1

    def __init__(self, device: int | None = None, *, blocks: int = 1):
        if not 1 <= blocks <= MAX_BLOCKS:
            raise HcaError(f"the GPU HCA takes 1 to {MAX_BLOCKS} multiprocessors, not {blocks}")
        self.target = target = GpuTarget(device)
        self.words = GpuWords(target.device)
        self.blocks = blocks
        self.windows: list[GpuWindow] = []
        self.queues: dict[int, GpuQp] = {}
        self._next_qpn = 0x100
        self._lock = threading.Lock()
        self._key_memory = target.alloc(MAX_KEYS * KEY_BYTES)
        self._queue_memory = target.alloc(MAX_QUEUES * QUEUE_BYTES)
        self._stop_word = PinnedBuffer(64)
        torch.cuda.current_stream(target.device).synchronize()
        self._keys = _Keys(self.words, self._key_memory.addr)
        self._args = GpuHcaArgs(
            queues=self._queue_memory.addr, stop=self._stop_word.addr, lifetime_ns=PASS_NS,
        )
        self._launch = target.prepare([("gpu_hca", self._args)], grid=blocks, warps=WARPS)
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._passes = Passes(torch.cuda.Stream(target.device, priority=-1), self._launch.run,
                              "the GPU HCA")

    def queue_addr(self, slot: int) -> int:
        return self._queue_memory.addr + slot * QUEUE_BYTES

    def lkeys(self) -> list[int]:
        return self._keys.keys()

    def alloc(self, num_bytes: int) -> Exported:
        """Zeroed memory of this GPU that can be registered and given to a peer."""
        return Exported(self.target.device, num_bytes)

    def register(
        self, addr: int, num_bytes: int, access: int, pd: int | None = None
    ) -> MemoryRegion:
        """A key for GPU memory that this GPU reaches."""
        if num_bytes < 1 or addr + num_bytes >= 1 << 64:
            raise HcaError(f"registering memory: cannot register {num_bytes} bytes at {addr:#x}")
        mr = MemoryRegion(addr, num_bytes, 0, access)
        key = self._keys.add(mr, pd=pd or self.pd, mapped=addr)
        return MemoryRegion(addr, num_bytes, key, access)

    def revoke(self, mr: MemoryRegion, timeout: float = 0.2) -> None:
        """This HCA does not use the region any more on return, and no peer after its entry."""
        self._keys.remove(mr.lkey)
        for window in self.windows:
            for rkey in [r for r, lkey in window.published.items() if lkey == mr.lkey]:
                window.revoke(rkey)
        self.wait_for_pass()

    def create_window(self) -> GpuWindow:
        self.windows.append(GpuWindow(self))
        return self.windows[-1]

    def import_peer(
        self, window_fd: int, wake_fd: int, region_fds: Sequence[int]
    ) -> GpuPeer:
        """Raises HandleError for what is no window of a GPU HCA, or memory that is not whole."""
        return GpuPeer(self, window_fd, region_fds)

    def create_qp(
        self, depth: int = 1024, *, num_cqe: int | None = None,
        cq_flags: int = CQ_COLLAPSED | CQ_OVERRUN_IGNORE, pd: int | None = None,
    ) -> GpuQp:
        """A queue pair whose ring, doorbells and CQ are GPU memory. depth: blocks, from 16 on."""
        num_cqe = num_cqe or depth
        if not 16 <= depth <= 32768 or depth & (depth - 1):
            raise HcaError(f"creating a queue pair: depth {depth} is no power of two from 16 on")
        cq_at = 2 * UAR_BYTES + depth * 64
        memory = self.target.alloc(cq_at + num_cqe * 64)
        memory.tensor[cq_at:].fill_(0xFF)
        torch.cuda.current_stream(self.target.device).synchronize()
        base = memory.addr
        with self._lock:
            slot = next((i for i in range(MAX_QUEUES) if i not in self.queues), None)
            if slot is None:
                raise HcaError(f"an HCA holds at most {MAX_QUEUES} queue pairs")
            self.queues[slot] = qp = GpuQp(self, slot, HcaQueue(
                sq_addr=base + 2 * UAR_BYTES, dbrec_addr=base + UAR_BYTES, uar_addr=base,
                cq_addr=base + cq_at, cq_dbrec_addr=base + UAR_BYTES + 64,
                proxy_addr=base + UAR_BYTES + 128, local_keys=self._keys.addr,
                num_local_keys=MAX_KEYS, qpn=self._next_qpn, num_wqe=depth, num_cqe=num_cqe,
                cq_flags=cq_flags, pd=pd or self.pd, scope=self.target.scope, state=STATE_RESET,
            ), memory)
            self._next_qpn += 1
            self._args.num_queues = max(self.queues) + 1
        return qp

    def wait_for_pass(self, timeout: float = 5.0) -> None:
        """Until every pass that runs now is over. Raises HcaError after `timeout` seconds."""
        end, deadline = self._passes.num_done + PASSES_AHEAD + 2, time.monotonic() + timeout
        while self._passes.num_done < end:
            self._passes.check()
            if time.monotonic() > deadline:
                raise HcaError(f"the GPU HCA's passes did not end within {timeout} s; is the GPU "
                               "full of kernels that wait?")
            time.sleep(0.0005)

    def poll(self, max_wqes: int = 256) -> int:
        """0: the kernel runs by itself. Raises what ended it."""
        self._passes.check()
        return 0

    def kick(self) -> None:
        """Nothing sleeps here."""

    interrupt = kick

    def read_word(self, addr: int) -> int:
        """A u64 of GPU memory as it is now."""
        return int.from_bytes(self.words.read(addr, 8), "little")

    def wait(
        self, words: Sequence[int], seen: Sequence[int], *, spin_ns: int, timeout_ns: int
    ) -> int | None:
        """The index of a word that differs from what was seen of it, None after the timeout."""
        deadline = time.monotonic_ns() + timeout_ns
        while True:
            for i, (addr, value) in enumerate(zip(words, seen, strict=True)):
                if self.read_word(addr) != value:
                    return i
            if time.monotonic_ns() > deadline:
                return None

    def stats(self) -> dict[str, Any]:
        """Entries executed, bytes moved, CQEs and error CQEs of the queue pairs that are open."""
        structs = [qp.read() for qp in self.queues.values()]
        return {"executed": sum(s.num_executed for s in structs),
                "bytes": sum(s.num_bytes for s in structs),
                "cqes": sum(s.num_cqe_written for s in structs),
                "error_cqes": sum(s.num_errors for s in structs), "blocks": self.blocks}

    def close(self) -> None:
        """Ends the kernel. Raises HcaError while queue pairs or windows are open. Idempotent."""
        if self.queues or self.windows:
            raise HcaError(f"{len(self.queues)} queue pairs and {len(self.windows)} windows are "
                           "still open")
        self._stop_word.tensor[:4].fill_(1)
        self._passes.close()
        fd, self.wake_fd = self.wake_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> GpuHca:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
