"""The software HCA (native/soft_*.cpp) for Python: shared memory on one host, no NIC, no root."""

from __future__ import annotations

import ctypes
import errno
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_uint32, c_uint64, c_void_p
from types import SimpleNamespace

from .._native import declare
from ..control.memory import Buffer, MemoryRegion
from ..errors import HcaError
from ..launch import last_error
from .interface import QpInfo
from .wqe import OPCODE_NAMES

CQ_COLLAPSED, CQ_OVERRUN_IGNORE = 1, 2
STATE_RESET, STATE_INIT, STATE_RTR, STATE_RTS, STATE_SQE, STATE_ERR = 0, 1, 2, 3, 5, 6

HOOK_TYPE = ctypes.CFUNCTYPE(c_uint32, c_void_p, c_uint32, c_uint64, c_void_p, c_uint32)
HOOK_STALL = 0xFFFFFFFF


class Stats(ctypes.Structure):
    _fields_ = (
        ("num_wqe", c_uint64 * 64), ("bytes", c_uint64), ("num_cqe", c_uint64),
        ("num_error_cqe", c_uint64), ("num_doorbells", c_uint64), ("num_wakes", c_uint64),
    )


class FaultPlan(ctypes.Structure):
    """How the path to the peers misbehaves (hca/fault.py says what each field does)."""

    _fields_ = (
        ("seed", c_uint64), ("mtu", c_uint32), ("reorder", c_uint32), ("max_delay", c_uint32),
        ("duplicate_one_in", c_uint32), ("drop_one_in", c_uint32),
    )


class QpMemory(ctypes.Structure):
    """Caller-provided memory of a queue pair, e.g. pinned; all zero: the HCA allocates."""

    _fields_ = tuple(
        (name, c_uint64) for name in
        ("sq_addr", "dbrec_addr", "uar_addr", "cq_addr", "cq_dbrec_addr", "proxy_addr")
    )


@functools.cache
def _calls() -> SimpleNamespace:
    p, u32, u64 = c_void_p, c_uint32, c_uint64
    return SimpleNamespace(
        create=declare("ew_hca_create", c_int, u32, POINTER(p)),
        destroy=declare("ew_hca_destroy", c_int, p),
        poll=declare("ew_hca_poll", c_int, p, u32),
        kick=declare("ew_hca_kick", None, p),
        pd=declare("ew_hca_pd", c_int, p, POINTER(u32)),
        register=declare("ew_hca_register", c_int, p, u32, u64, u64, u32, POINTER(u32)),
        revoke=declare("ew_hca_revoke", c_int, p, u32, u64),
        wake_fd=declare("ew_hca_wake_fd", c_int, p),
        interrupt=declare("ew_hca_interrupt", None, p),
        wait=declare("ew_hca_wait", c_int, p, p, p, u32, u64, u64),
        stats=declare("ew_hca_get_stats", None, p, POINTER(Stats)),
        set_hook=declare("ew_hca_set_hook", None, p, HOOK_TYPE, p),
        set_faults=declare("ew_hca_set_faults", None, p, POINTER(FaultPlan)),
        window_create=declare("ew_window_create", c_int, p, POINTER(p)),
        window_fd=declare("ew_window_fd", c_int, p),
        window_publish=declare("ew_window_publish", c_int, p, u32, u32, u64, POINTER(u32)),
        window_revoke=declare("ew_window_revoke", c_int, p, u32, u64),
        window_destroy=declare("ew_window_destroy", None, p),
        window_watch=declare("ew_window_watch", c_int, p, u64, u64, u32),
        post_recv=declare("ew_window_post_recv", c_int, p, u32),
        poll_recv=declare("ew_window_poll_recv", c_int, p, p),
        peer_import=declare("ew_peer_import", c_int, p, c_int, c_int, p, u32, POINTER(p)),
        peer_map=declare("ew_peer_map", c_int, p, u32, u64, u64, POINTER(u64)),
        peer_lost=declare("ew_peer_lost", None, p),
        peer_notify=declare("ew_peer_notify", None, p),
        peer_destroy=declare("ew_peer_destroy", c_int, p),
        qp_create=declare(
            "ew_qp_create", c_int, p, u32, u32, u32, u32, POINTER(QpMemory), POINTER(p),
            POINTER(QpInfo),
        ),
        qp_connect=declare("ew_qp_connect", c_int, p, p, u32),
        qp_modify=declare("ew_qp_modify", c_int, p, u32),
        qp_state=declare("ew_qp_state", c_int, p),
        qp_start_at=declare("ew_qp_start_at", c_int, p, u64),
        qp_first_error=declare("ew_qp_first_error", u32, p, POINTER(u64)),
        qp_indices=declare("ew_qp_indices", None, p, POINTER(u64), POINTER(u64)),
        qp_destroy=declare("ew_qp_destroy", None, p),
    )


def _check(code: int, what: str) -> None:
    if code < 0:
        raise HcaError(f"{what}: {last_error()}")


class _Handle:
    """A native object. Using it after it was closed is an error, not a crash."""

    _what = "object"

    def __init__(self):
        self._pointer = c_void_p()

    @property
    def handle(self) -> c_void_p:
        if not self._pointer:
            raise HcaError(f"the {self._what} is closed")
        return self._pointer


class SoftWindow(_Handle):
    """The keys that one peer gets (interface.Window), and the receives posted for it."""

    _what = "window"

    def __init__(self, hca: SoftHca):
        super().__init__()
        self._call = hca._call
        _check(self._call.window_create(hca.handle, byref(self._pointer)), "creating a window")
        self.fd = self._call.window_fd(self._pointer)

    def publish(self, mr: MemoryRegion, fd_idx: int, fd_offset: int = 0) -> int:
        """Lets the peer use a region; returns the rkey, random and for this peer only."""
        rkey = c_uint32()
        _check(
            self._call.window_publish(self.handle, mr.lkey, fd_idx, fd_offset, byref(rkey)),
            "publishing a region",
        )
        return rkey.value

    def revoke(self, rkey: int, timeout: float = 1.0) -> None:
        """After this the peer's engine writes nothing through the key any more."""
        _check(self._call.window_revoke(self.handle, rkey, int(timeout * 1e9)), "revoking a key")

    def watch(self, slots_addr: int, slot_bytes: int, num_slots: int) -> None:
        """The peer's immediates are slot numbers from now on, and set the slots' flags: what the
        peer wrote into the second half of the last 16 bytes of a slot goes to the first half."""
        _check(self._call.window_watch(self.handle, slots_addr, slot_bytes, num_slots),
               "watching for immediates")

    def post_recv(self, count: int) -> None:
        """Allows `count` more writes with immediate from the peer, at most 64 open ones."""
        _check(self._call.post_recv(self.handle, count), "posting receives")

    def poll_recv(self) -> bytes | None:
        """The oldest receive completion, 64 bytes, or None."""
        cqe = ctypes.create_string_buffer(64)
        return cqe.raw if self._call.poll_recv(self.handle, cqe) else None

    def close(self) -> None:
        if self._pointer:
            self._call.window_destroy(self._pointer)
            self._pointer = c_void_p()


class SoftPeer(_Handle):
    """A peer's window and memory, mapped (interface.Peer)."""

    _what = "peer"

    def __init__(
        self, hca: SoftHca, window_fd: int, wake_fd: int, region_fds: Sequence[int]
    ):
        super().__init__()
        self._call = hca._call
        fds = (c_int * max(len(region_fds), 1))(*region_fds)
        _check(
            self._call.peer_import(
                hca.handle, window_fd, wake_fd, fds, len(region_fds), byref(self._pointer)
            ), "importing a peer",
        )

    @property
    def pointer(self) -> int:
        """The native handle, for native code; 0 once closed."""
        return self._pointer.value or 0

    def map(self, rkey: int, remote_addr: int, num_bytes: int) -> int:
        """Address here of a remote range that the peer lets us write."""
        addr = c_uint64()
        _check(
            self._call.peer_map(self.handle, rkey, remote_addr, num_bytes, byref(addr)),
            "mapping the peer's memory",
        )
        return addr.value

    def lost(self) -> None:
        """Everything posted to it from now on completes with syndrome 0x15."""
        if self._pointer:
            self._call.peer_lost(self._pointer)

    def notify(self) -> None:
        """Wakes the peer if it sleeps."""
        if self._pointer:
            self._call.peer_notify(self._pointer)

    def close(self) -> None:
        if self._pointer:
            _check(self._call.peer_destroy(self._pointer), "releasing a peer")
            self._pointer = c_void_p()


class SoftQp(_Handle):
    """One queue pair (interface.QueuePair)."""

    _what = "queue pair"

    def __init__(
        self, hca: SoftHca, depth: int, num_cqe: int, cq_flags: int, pd: int,
        memory: QpMemory | None,
    ):
        super().__init__()
        self._call = hca._call
        self.info = QpInfo()
        _check(
            self._call.qp_create(
                hca.handle, pd, depth, num_cqe, cq_flags, memory, byref(self._pointer),
                byref(self.info),
            ), "creating a queue pair",
        )

    def connect(self, peer: SoftPeer, remote_qpn: int) -> None:
        """RESET -> INIT -> RTR -> RTS towards the peer's queue pair."""
        _check(self._call.qp_connect(self.handle, peer.handle, remote_qpn), "connecting")

    def modify(self, state: int) -> None:
        _check(self._call.qp_modify(self.handle, state), "changing the state")

    def start_at(self, index: int) -> None:
        """For tests of wraps: a fresh queue goes on as if `index` entries had been executed."""
        _check(self._call.qp_start_at(self.handle, index), "choosing the first index")

    @property
    def state(self) -> int:
        return self._call.qp_state(self.handle)

    def first_error(self) -> tuple[int, int]:
        """(syndrome, WQE index) of the first error, (0, 0) if none."""
        idx = c_uint64()
        syndrome = self._call.qp_first_error(self.handle, byref(idx))
        return syndrome, idx.value

    def indices(self) -> tuple[int, int]:
        """(producer, consumer) index as the engine knows them, in 64-byte blocks."""
        pi, ci = c_uint64(), c_uint64()
        self._call.qp_indices(self.handle, byref(pi), byref(ci))
        return pi.value, ci.value

    def destroy(self) -> None:
        if self._pointer:
            self._call.qp_destroy(self._pointer)
            self._pointer = c_void_p()


class SoftHca(_Handle):
    """A software HCA context.

    thread: with its own engine thread; without one, `poll` or `wait` must be called. spin: that
    thread never sleeps, which costs a core; for rings that a GPU posts to, since it cannot kick.
    """

    _what = "HCA"
    network, scheme = False, ""
    tells_errors = True

    def __init__(self, *, thread: bool = True, spin: bool = False):
        super().__init__()
        self._call = _calls()
        self._open((1 if thread else 0) | (2 if spin else 0))
        self.wake_fd = self._call.wake_fd(self.handle)
        pd = c_uint32()
        _check(self._call.pd(self.handle, byref(pd)), "allocating a protection domain")
        self.pd = pd.value
        self._hook = None
        self.relaxed_ordering = False  # writes may pass each other (only with set_faults)
        self._words: dict[int, tuple] = {}

    def _open(self, flags: int) -> None:
        _check(self._call.create(flags, byref(self._pointer)), "opening the soft HCA")

    @property
    def pointer(self) -> int:
        """The native context, as launches take it."""
        return self._pointer.value or 0

    def alloc_pd(self) -> int:
        pd = c_uint32()
        _check(self._call.pd(self.handle, byref(pd)), "allocating a protection domain")
        return pd.value

    def alloc(self, num_bytes: int) -> Buffer:
        """Zeroed shared memory that can be registered and given to a peer."""
        return Buffer(num_bytes)

    def register(
        self, addr: int, num_bytes: int, access: int, pd: int | None = None
    ) -> MemoryRegion:
        key = c_uint32()
        _check(
            self._call.register(self.handle, pd or self.pd, addr, num_bytes, access, byref(key)),
            "registering memory",
        )
        return MemoryRegion(addr, num_bytes, key.value, access)

    def revoke(self, mr: MemoryRegion, timeout: float = 0.2) -> None:
        """Nobody uses the region any more after this, also no peer that it was published to.

        Raises HcaError when a peer that stopped in the middle of a write still holds it after
        `timeout` seconds; the memory must then not be reused.
        """
        _check(self._call.revoke(self.handle, mr.lkey, int(timeout * 1e9)), "revoking memory")

    def create_window(self) -> SoftWindow:
        return SoftWindow(self)

    def import_peer(self, window_fd: int, wake_fd: int, region_fds: Sequence[int]) -> SoftPeer:
        return SoftPeer(self, window_fd, wake_fd, region_fds)

    def create_qp(
        self, depth: int = 1024, *, num_cqe: int | None = None,
        cq_flags: int = CQ_COLLAPSED | CQ_OVERRUN_IGNORE, pd: int | None = None,
        memory: QpMemory | None = None,
    ) -> SoftQp:
        return SoftQp(self, depth, num_cqe or depth, cq_flags, pd or self.pd, memory)

    def poll(self, max_wqes: int = 256) -> int:
        """Executes up to max_wqes; 0 if there is nothing or another thread is doing it."""
        return max(0, self._call.poll(self.handle, max_wqes))

    def kick(self) -> None:
        """Wakes the engine thread if it sleeps."""
        self._call.kick(self.handle)

    def wait(
        self, words: Sequence[int], seen: Sequence[int], *, spin_ns: int, timeout_ns: int
    ) -> int | None:
        """Waits until the u64 at one of the addresses differs from what was seen of it.

        Returns its index, or None after the timeout or `interrupt`. One thread waits at a time.
        """
        count = len(words)
        if count not in self._words:
            self._words[count] = ((c_uint64 * max(count, 1))(), (c_uint64 * max(count, 1))())
        addrs, values = self._words[count]
        addrs[:count], values[:count] = words, seen
        code = self._call.wait(self.handle, addrs, values, count, spin_ns, timeout_ns)
        if code >= 0:
            return code
        if code in (-errno.ETIMEDOUT, -errno.EINTR):
            return None
        raise HcaError(f"waiting failed: {last_error()}")

    def interrupt(self) -> None:
        """Makes a thread in `wait` return."""
        if self._pointer:
            self._call.interrupt(self._pointer)

    @staticmethod
    def read_word(addr: int) -> int:
        """The u64 at an address (a plain load; x86 and the wait above make it fresh enough)."""
        return c_uint64.from_address(addr).value

    def set_hook(self, hook) -> None:
        """Calls hook(context, qpn, wqe_idx, wqe address, bytes) before every WQE."""
        callback = HOOK_TYPE(hook) if hook else HOOK_TYPE()
        self._call.set_hook(self.handle, callback, None)
        self._hook = callback  # only now may the one before go: the engine cannot be in it any more

    def set_faults(self, plan: FaultPlan | None) -> None:
        """Makes the path to the peers misbehave, for tests; None: writes land at once again."""
        self._call.set_faults(self.handle, byref(plan) if plan else None)
        self.relaxed_ordering = bool(plan and plan.reorder)

    def stats(self) -> dict:
        """Executed WQEs by opcode name, bytes moved, CQEs, error CQEs, doorbells, wake-ups."""
        raw = Stats()
        self._call.stats(self.handle, byref(raw))
        return {
            "wqes": {OPCODE_NAMES.get(i, hex(i)): n for i, n in enumerate(raw.num_wqe) if n},
            "bytes": raw.bytes, "cqes": raw.num_cqe, "error_cqes": raw.num_error_cqe,
            "doorbells": raw.num_doorbells, "wakes": raw.num_wakes,
        }

    def close(self) -> None:
        """Stops the engine. Queue pairs, windows and peers must be closed before."""
        if self._pointer:
            _check(self._call.destroy(self._pointer), "closing the soft HCA")
            self._pointer = c_void_p()

    def __enter__(self) -> SoftHca:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
