"""Following the registry from the outside: a client's view of the members."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..control.frames import Channel
from ..errors import AuthError, ExpertwireError, ProtocolError, WaitTimeout
from ..observe.reports import Reporter, stats_of
from .lease import Lease
from .question import PlannedExperts, ask, plan
from .thread import RegistryThread

log = logging.getLogger("expertwire.registry.membership")


@dataclass(frozen=True)
class ServerInfo:
    """One server as the registry describes it."""

    server_id: str
    seat: int
    address: str
    model: dict[str, Any]
    experts: tuple[int, ...]
    draining: bool = False
    epoch_joined: int = 0


@dataclass(frozen=True)
class Members:
    """All servers at one epoch."""

    epoch: int = 0
    servers: tuple[ServerInfo, ...] = field(default=())


def parse_members(message: dict) -> Members:
    """A members message. Raises ProtocolError if it is not one."""
    try:
        return Members(int(message["epoch"]), tuple(
            ServerInfo(
                str(s["server_id"]), int(s["seat"]), str(s["address"]), dict(s["model"]),
                tuple(int(e) for e in s["experts"]), bool(s["draining"]), int(s["epoch_joined"]),
            ) for s in message["servers"]
        ))
    except (KeyError, TypeError, ValueError) as err:
        raise ProtocolError(f"the registry sent a members message that cannot be read: {err!r}") \
            from None


class Membership(RegistryThread):
    """A client's view. Keeps the last snapshot while the registry is away, and reconnects.

    After a restart of the registry, servers of the last snapshot stay until they have registered
    again or the new registry says that it has waited long enough for them. Epochs only grow.
    on_change: called from this object's thread after every new snapshot.
    stats: called from there about once a second; a dict for JSON of at most 64 KiB.
    Raises ConfigError for a malformed address; nothing else, the registry need not be there.
    """

    def __init__(
        self, address: str, token: bytes, *, client_name: str = "",
        on_change: Callable[[], None] | None = None,
        stats: Callable[[], dict[str, Any]] | None = None,
    ):
        super().__init__(address, token, "expertwire-membership")
        self._reporter = Reporter(stats) if stats else None
        self._reported = True  # the registry has taken the last report
        self.client_name = client_name
        self.on_change = on_change
        self._members = Members()
        self._seen = 0  # the oldest epoch that this client still routes by
        self._instance: object = None  # which registry the snapshot is from
        self._inherited: tuple[ServerInfo, ...] = ()  # from the one before, not yet back
        self._changed = threading.Condition()
        self._thread.start()

    def snapshot(self) -> Members:
        return self._members

    def wait(self, ready: Callable[[Members], bool], timeout: float) -> Members:
        """The members once `ready` holds for them. Raises WaitTimeout, AuthError."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not ready(self._members):
                left = deadline - time.monotonic()
                if isinstance(self.failure, AuthError):
                    raise self.failure
                if left <= 0:
                    reason = f" ({self.failure})" if self.failure else ""
                    raise WaitTimeout(
                        f"the registry at {self.address} did not show the members that were "
                        f"waited for within {timeout} s{reason}", "membership", self.address,
                    )
                self._changed.wait(min(left, 0.1))
            return self._members

    def report(self, server_id: str, what: str) -> None:
        """Tells the registry what was observed. An observation, not a change of membership.

        Best effort: nothing happens while the registry is away.
        """
        self._tell({"type": "report", "server_id": server_id, "what": what[:200]})

    def acknowledge(self, epoch: int) -> None:
        """Tells the registry that nothing is, or will be, routed by members before `epoch`."""
        if epoch > self._seen:
            self._seen = epoch
            self._tell({"type": "seen", "epoch": epoch})

    def _tell(self, message: dict) -> None:
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(ExpertwireError):
                channel.send(message, timeout=1.0)

    def _talk(self, channel: Channel) -> None:
        self._reported = True
        channel.send({"type": "watch", "client": self.client_name, "epoch": self._members.epoch,
                      "seen": self._seen})
        while True:
            if not self._welcome:
                message, _ = channel.recv(self._answer_seconds)
            else:
                message = self._news(channel)
            if message.get("type") == "error":
                raise ProtocolError(f"the registry refused: {message.get('reason')}")
            self._reported |= message.get("type") == "reported"
            if message.get("type") != "members":
                continue
            self._take(message)
            self._welcome, self.failure, self._last_words = True, None, ""
            on_change = self.on_change
            if on_change is not None:
                try:
                    on_change()
                except Exception:
                    log.exception("on_change failed")

    def _news(self, channel: Channel) -> dict:
        """The registry's next message; reports while waiting for it, as fast as it takes reports.

        No deadline: no change is no news. A vanished machine ends it (TCP keep-alive).
        """
        reporter = self._reporter
        while reporter is not None:
            try:
                pause = max(0.001, reporter.due - time.monotonic()) if self._reported else None
                return channel.recv(pause)[0]
            except WaitTimeout:
                self._reported = False
                channel.send({"type": "client_report", "stats": stats_of(reporter)})
        return channel.recv(None)[0]

    def _take(self, message: dict) -> None:
        new = parse_members(message)
        if new.epoch < self._members.epoch:
            return
        if message.get("instance") != self._instance:
            self._instance = message.get("instance")
            self._inherited = self._members.servers
        if message.get("settling") is True:
            back = {s.server_id for s in new.servers} | {s.address for s in new.servers}
            models = {s.model["fingerprint"] for s in new.servers}
            self._inherited = tuple(
                s for s in self._inherited
                if s.server_id not in back and s.address not in back
                and models <= {s.model["fingerprint"]}
            )
        else:
            self._inherited = ()
        with self._changed:
            self._members = Members(new.epoch, new.servers + self._inherited)
            self._changed.notify_all()


__all__ = ["Lease", "Members", "Membership", "PlannedExperts", "ServerInfo", "ask", "plan"]
