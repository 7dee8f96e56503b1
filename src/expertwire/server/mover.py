"""The server's part in moving experts: load, announce, and drop, while it goes on serving.

In a thread of its own, one request after the other, the newest wins. New experts are announced
once their weights are in memory and the data thread uses them; experts to go are taken off the list
first, and dropped when the registry says that no client routes by the old list any more.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..errors import ConfigError, ExpertwireError, WaitTimeout
from .batch import Experts

if TYPE_CHECKING:
    from .server import Server

log = logging.getLogger("expertwire.server.server")

LOOK_SECONDS = 0.2  # between looks whether the server is closed
SWAP_SECONDS = 60.0  # for the data thread to come to the end of its batch


class MovableExperts(Experts, Protocol):
    """What can be moved: see experts.ExpertShard."""

    def extended(self, other: Any) -> MovableExperts: ...
    def without(self, experts: Sequence[int]) -> MovableExperts: ...
    def unstack(self) -> None: ...


LoadExperts = Callable[[Sequence[int]], MovableExperts]


class Mover:
    """Does what the registry asks one server to hold.

    load: reads experts by their ids; None: this server's experts cannot be changed.
    """

    def __init__(self, server: Server, load: LoadExperts | None):
        self._server = server
        self._load = load
        self._request: tuple[int, list[int]] | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def place(self, serial: int, experts: list[int]) -> None:
        """The registry asks for these experts. Returns at once."""
        with self._changed:
            self._request = serial, experts
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="expertwire-mover", daemon=True
                )
                self._thread.start()

    def close(self, timeout: float) -> None:
        """The server is stopping. A load that takes longer ends with its process."""
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._server.stopped:
            with self._changed:
                if self._request is None:
                    self._changed.wait(LOOK_SECONDS)
                request, self._request = self._request, None
            if request is not None:
                self._fulfil(*request)

    def _fulfil(self, serial: int, wanted: list[int]) -> None:
        reason = None
        try:
            self._move(serial, wanted)
        except _Stopped:
            return
        except (ExpertwireError, MemoryError, OSError, RuntimeError) as err:
            reason = str(err) or type(err).__name__
            log.error("cannot hold experts %s: %s", wanted, reason)
        except Exception as err:  # our own bug must not leave the question open for ever
            log.exception("moving experts failed")
            reason = f"{type(err).__name__}: {err}"
        if reason is not None:
            try:
                self._announce(self._held(), serial, reason)
            except _Stopped:
                return

    def _move(self, serial: int, wanted: list[int]) -> None:
        held = self._held()
        added, dropped = sorted(set(wanted) - set(held)), sorted(set(held) - set(wanted))
        if (added or dropped) and self._load is None:
            raise ConfigError(f"server {self._server.name} cannot load experts while it serves")
        room = self._server.config.room
        if room is not None and added and len(held) + len(added) > room + 1:
            raise ConfigError(
                f"server {self._server.name} has room for {room} experts; {len(held)} held and "
                f"{len(added)} more do not fit"
            )
        if added:
            assert self._load is not None
            log.info("loading experts %s", added)
            self._swap(self._shard().extended(self._load(added)))
        listed = self._announce(wanted, serial)
        dropped = [e for e in dropped if e not in listed]  # what others have, too
        if not dropped:
            return
        while not self._server.lease.settled(LOOK_SECONDS):
            self._go_on()
        self._shard().unstack()
        self._swap(self._shard().without(dropped))
        give_back_memory()
        log.info("dropped experts %s", dropped)

    def _announce(self, experts: list[int], serial: int, failed: str | None = None) -> list[int]:
        while True:
            self._go_on()
            try:
                return self._server.lease.hold(experts, serial, failed)
            except WaitTimeout:  # the registry is away; members stay what they are meanwhile
                with self._changed:
                    self._changed.wait(LOOK_SECONDS)

    def _swap(self, shard: MovableExperts) -> None:
        """The data thread computes with it from its next batch on."""
        done = threading.Event()
        self._server.use_shard(shard, done.set)
        if not done.wait(SWAP_SECONDS):
            self._go_on()
            raise WaitTimeout(f"a batch took more than {SWAP_SECONDS:.0f} s", "swap")

    def _go_on(self) -> None:
        if self._server.stopped:
            raise _Stopped

    def _held(self) -> list[int]:
        return [int(e) for e in self._server.shard.experts]

    def _shard(self) -> MovableExperts:
        return cast(MovableExperts, self._server.shard)


class _Stopped(Exception):
    """The server is being closed."""


def give_back_memory() -> None:
    """Freed weights go back to the system, also those that the allocator would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
