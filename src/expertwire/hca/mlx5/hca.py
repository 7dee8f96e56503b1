"""`open_hca("mlx5:<device>[:<port>]")`: a ConnectX executes what device code posts.

Queue pairs are made by the firmware's own commands (DevX) in memory that device code writes; from
then on nothing of this file is in the way of a message. Never run on an adapter: docs/mlx5.md.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ...control.handles import WireHandle
from ...control.memory import Buffer, MemoryRegion
from ...errors import ConfigError, HcaError
from ..soft import SoftHca
from . import path
from .address import Address, check_link
from .config import Mlx5Config
from .device import Device
from .doorbell import Doorbells, set_polled
from .memory import Block, HostBlock, Region, register_gpu, register_host
from .queue import Mlx5Qp, block_bytes


class Mlx5Window:
    """What one peer is told (interface.Window): the port's address; the keys are the regions'."""

    fd = -1

    def __init__(self, hca: Mlx5Hca):
        self._hca = hca
        self.psn = secrets.randbits(24)

    @property
    def wire(self) -> WireHandle:
        """What the peer's `connect_peer` takes."""
        device = self._hca.device
        reads = path.log_reads_in(device.caps, device.config)
        return WireHandle(1, Address.of(device.port, reads, self.psn).pack())

    def publish(self, mr: MemoryRegion, fd_idx: int = 0, fd_offset: int = 0) -> int:
        """The region's remote key. An adapter has one per region, and any queue pair of this
        process's protection domain answers to it: give each peer a region of its own."""
        return self._hca.region(mr.lkey).rkey

    def revoke(self, rkey: int, timeout: float = 1.0) -> None:
        """Nobody writes through the key any more, once this returns."""
        self._hca.region(rkey).close()

    def watch(self, slots_addr: int, slot_bytes: int, num_slots: int) -> NoReturn:
        raise HcaError('queue pairs of an mlx5 HCA have no receives: signal_mode="add"')

    def close(self) -> None:
        """Nothing of its own to give back."""


class Mlx5Peer:
    """A peer's port (interface.Peer)."""

    pointer = 0

    def __init__(self, address: Address, own_psn: int):
        self.address, self.own_psn = address, own_psn
        self.queues: list[Mlx5Qp] = []

    def map(self, rkey: int, remote_addr: int, num_bytes: int) -> NoReturn:
        raise HcaError("memory of another host cannot be mapped: leave do_ibgda on")

    def lost(self) -> None:
        """Everything that is posted to it completes as flushed."""
        for qp in self.queues:
            qp.fail()

    def notify(self) -> None:
        """A peer behind an adapter polls: nothing to wake."""

    def close(self) -> None:
        self.queues.clear()


class Mlx5Hca:
    """An adapter's port (interface.Hca).

    device: as in /sys/class/infiniband. doorbell: "register", or "proxy" for a thread here that
    rings for device code which cannot reach the register; None: as EXPERTWIRE_DOORBELL says.
    make_block: where queues lie; host
    memory if it is None, gpu.GpuBlock for kernels. options: of Mlx5Config. verbs: pyverbs.
    Raises an error of errors.py.
    """

    network, scheme = True, "mlx5"
    tells_errors = False  # completions are polled; an event channel would need another interrupt

    def __init__(
        self, device: str, *, doorbell: str | None = None,
        make_block: Callable[[int], Block] | None = None, verbs: Any = None, **options: Any,
    ):
        doorbell = doorbell or os.environ.get("EXPERTWIRE_DOORBELL", "register")
        if doorbell not in ("register", "proxy"):
            raise ConfigError("an mlx5 HCA's doorbell (EXPERTWIRE_DOORBELL) must be register or "
                              f"proxy, not {doorbell!r}")
        config = Mlx5Config.read(**options)
        self.device = Device(device, config, verbs)
        if not config.ordered_path and not self.device.caps.masked_atomics:
            self.device.close()
            raise HcaError(
                f"{device} has no masked 8-byte fetch-and-add, which signal_mode=\"add\" needs. If "
                "the fabric keeps packets in order (no adaptive routing), say so with "
                'EXPERTWIRE_MLX5_ORDERED_PATH=1 and use signal_mode="write"'
            )
        self._make_block = make_block or HostBlock
        self._regions: dict[int, Region] = {}
        self._queues: list[Mlx5Qp] = []
        # Waiting for a word to change and being interrupted are the software HCA's; it has no
        # queues here. Nobody wakes it when the adapter writes.
        self._waiting = SoftHca(thread=False)
        set_polled(self._waiting.pointer)
        self.wake_fd = self._waiting.wake_fd
        self.wait, self.interrupt = self._waiting.wait, self._waiting.interrupt
        self.kick, self.poll = self._waiting.kick, self._waiting.poll
        self.read_word = self._waiting.read_word
        self.doorbells = Doorbells() if doorbell == "proxy" else None

    @property
    def relaxed_ordering(self) -> bool:
        """Whether writes may pass each other: unless the operator has promised otherwise."""
        return not self.device.config.ordered_path

    @property
    def pointer(self) -> int:
        """The native context that waits."""
        return self._waiting.pointer

    # ---------------------------------------------------------------- memory

    def alloc(self, num_bytes: int) -> Buffer:
        """Zeroed host memory that can be registered."""
        return Buffer(num_bytes)

    def register(self, addr: int, num_bytes: int, access: int) -> MemoryRegion:
        """Host memory; access: of memory.py. Raises DeviceRefused, GpuMemoryRefused."""
        return self._add(register_host(self.device, addr, num_bytes, access))

    def register_gpu(self, block: Block, access: int) -> MemoryRegion:
        """GPU memory, whole, through its dmabuf."""
        return self._add(register_gpu(self.device, block, access))

    def _add(self, region: Region) -> MemoryRegion:
        self._regions[region.lkey] = region
        return MemoryRegion(region.addr, region.num_bytes, region.lkey, region.access)

    def region(self, key: int) -> Region:
        for region in self._regions.values():
            if key in (region.lkey, region.rkey):
                return region
        raise HcaError(f"key {key:#x} is not registered")

    def revoke(self, mr: MemoryRegion, timeout: float = 0.2) -> None:
        """The adapter reads and writes the region no more, for whomever, once this returns."""
        self.region(mr.lkey).close()
        del self._regions[mr.lkey]

    # ---------------------------------------------------------------- peers and queues

    def create_window(self) -> Mlx5Window:
        return Mlx5Window(self)

    def connect_peer(self, window: Mlx5Window, wire: WireHandle) -> Mlx5Peer:
        """The peer whose window this describes. Raises HandleError, LinkMismatch."""
        peer = Address.unpack(wire.address)
        check_link(self.device.port, peer)
        return Mlx5Peer(peer, window.psn)

    def import_peer(self, window_fd: int, wake_fd: int, region_fds: Sequence[int]) -> NoReturn:
        raise HcaError("a peer behind an adapter has no descriptors: use connect_peer")

    def create_qp(self, depth: int = 1024) -> Mlx5Qp:
        proxy = self.doorbells.add() if self.doorbells else 0
        try:
            qp = Mlx5Qp(self, depth, self._make_block(block_bytes(depth)), proxy_addr=proxy)
        except BaseException:
            if self.doorbells:
                self.doorbells.remove(proxy)
            raise
        if self.doorbells:
            self.doorbells.serve(proxy, qp.uar.reg_addr, qp.info.qpn)
        self._queues.append(qp)
        return qp

    def forget(self, qp: Mlx5Qp) -> None:
        """A queue pair is about to go: nobody rings for it any more."""
        if qp in self._queues:
            self._queues.remove(qp)
            if self.doorbells:
                self.doorbells.remove(qp.info.proxy_addr)

    def stats(self) -> dict:
        """Of the software HCA that waits: an adapter's own counters are in
        /sys/class/infiniband/<device>/ports/<port>/hw_counters."""
        return self._waiting.stats()

    def close(self) -> None:
        """Gives back what is still open, then the device. Idempotent."""
        for qp in list(self._queues):
            qp.destroy()
        for region in self._regions.values():
            region.close()
        self._regions.clear()
        if self.doorbells:
            self.doorbells.close()
        if self._waiting.pointer:
            self._waiting.close()
            self.device.close()

    def __enter__(self) -> Mlx5Hca:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_mlx5(name: str, **options: Any) -> Mlx5Hca:
    """name: "mlx5:<device>" or "mlx5:<device>:<port>". Raises as Mlx5Hca, and ConfigError."""
    _, _, place = name.partition(":")
    device, _, port = place.partition(":")
    if not device or (port and not port.isdecimal()) or place.endswith(":"):
        raise ConfigError(f"hca {name!r}: it is mlx5:<device> or mlx5:<device>:<port>, with a "
                          "device of /sys/class/infiniband, as in mlx5:mlx5_0:1")
    if port:
        options["port"] = int(port)
    return Mlx5Hca(device, **options)
