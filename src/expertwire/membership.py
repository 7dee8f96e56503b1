"""Following the registry from the outside: a client's view of the members, a server's lease."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .control import Channel, connect_tcp, parse_address
from .errors import AuthError, ConfigError, ExpertwireError, ProtocolError, WaitTimeout
from .question import ANSWER_SECONDS, FIRST_PAUSE, LONGEST_PAUSE, PlannedExperts, ask, plan

log = logging.getLogger("expertwire.membership")



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


class _RegistryThread:
    """A daemon thread that keeps one channel to the registry, with back-off between attempts."""

    def __init__(self, address: str, token: bytes, name: str):
        parse_address(address)
        self.address = address
        self._token = token
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._welcome = False  # the registry took us in since the last attempt
        self._last_words = ""
        self.failure: ExpertwireError | None = None  # why the last attempt failed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stop.is_set():
            self._welcome = False
            try:
                self._attempt()
            except ExpertwireError as err:
                self._note(err)
            except Exception as err:  # our own bug must not end membership for good
                log.exception("registry %s", self.address)
                self._note(ProtocolError(f"{type(err).__name__}: {err}"))
            # A registry that accepts and then refuses at once is not hammered either.
            pause = FIRST_PAUSE if self._welcome else min(pause * 2, LONGEST_PAUSE)
            # Many that lost the same registry do not come back at the same moment.
            self._stop.wait(pause * random.uniform(0.5, 1.0))

    def _attempt(self) -> None:
        channel = connect_tcp(self.address, self._token, ANSWER_SECONDS, self._stop)
        try:
            with self._lock:
                if self._stop.is_set():
                    return
                self._channel = channel
            self._talk(channel)
        finally:
            with self._lock:
                self._channel = None
            channel.close()

    def _note(self, err: ExpertwireError) -> None:
        if self._stop.is_set():
            return
        self.failure = err
        if str(err) != self._last_words:  # say it once, not with every attempt
            self._last_words = str(err)
            log.warning("registry %s: %s; trying again", self.address, err)

    def _talk(self, channel: Channel) -> None:
        raise TypeError("subclasses say what to talk about")

    @property
    def connected(self) -> bool:
        """Whether the registry is there now, as far as this side knows."""
        return self._welcome and self._channel is not None

    def _end(self, last_message: dict | None = None) -> None:
        self._stop.set()
        with self._lock:
            channel = self._channel
        if channel is not None:
            if last_message is not None:
                with contextlib.suppress(ExpertwireError):
                    channel.send(last_message, timeout=0.5)
            channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(1)  # longer only where the system looks up a name; it ends by itself

    def close(self) -> None:
        self._end()


class Membership(_RegistryThread):
    """A client's view. Keeps the last snapshot while the registry is away, and reconnects.

    After a restart of the registry, servers of the last snapshot stay until they have registered
    again or the new registry says that it has waited long enough for them. Epochs only grow.
    on_change: called from this object's thread after every new snapshot.
    Raises ConfigError for a malformed address; nothing else, the registry need not be there.
    """

    def __init__(
        self, address: str, token: bytes, *, client_name: str = "",
        on_change: Callable[[], None] | None = None,
    ):
        super().__init__(address, token, "expertwire-membership")
        self.client_name = client_name
        self.on_change = on_change
        self._members = Members()
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
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(ExpertwireError):
                channel.send({"type": "report", "server_id": server_id, "what": what[:200]},
                             timeout=1.0)

    def _talk(self, channel: Channel) -> None:
        channel.send({"type": "watch", "client": self.client_name, "epoch": self._members.epoch})
        while True:
            # No deadline: no change is no news. A vanished machine ends it (TCP keep-alive).
            message, _ = channel.recv(None if self._welcome else ANSWER_SECONDS)
            if message.get("type") == "error":
                raise ProtocolError(f"the registry refused: {message.get('reason')}")
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


class Lease(_RegistryThread):
    """A server's membership: registers, sends heartbeats, registers again after a break.

    After a break it asks for the id and seat that it had, and for an epoch above what it saw.
    facts: name, address, pid, model, experts; host_id if wanted.
    stats: called for each heartbeat; a dict for JSON of at most 64 KiB.
    on_drain: called once, from this object's thread, when the registry asks the server to leave.
    """

    def __init__(
        self, address: str, token: bytes, facts: dict[str, Any],
        stats: Callable[[], dict[str, Any]] = dict, on_drain: Callable[[], None] | None = None,
    ):
        super().__init__(address, token, "expertwire-lease")
        self.facts = facts
        self._stats = stats
        self._on_drain = on_drain
        self.server_id: str | None = None
        self.seat = 0
        self.epoch = 0
        self.draining = False
        self._registered = threading.Event()
        self._refused: ConfigError | None = None
        self._thread.start()

    def wait_registered(self, timeout: float) -> str:
        """The id the registry gave. Raises ConfigError if it refuses, AuthError, WaitTimeout."""
        deadline = time.monotonic() + timeout
        while not self._registered.wait(0.02):
            if self._refused is not None:
                raise self._refused
            if isinstance(self.failure, AuthError):
                raise self.failure
            if time.monotonic() > deadline:
                reason = f" ({self.failure})" if self.failure else ""
                raise WaitTimeout(
                    f"not registered at {self.address} within {timeout} s{reason}", "register",
                    self.address,
                )
        assert self.server_id is not None
        return self.server_id

    def _talk(self, channel: Channel) -> None:
        request = {**self.facts, "type": "register"}
        if self._registered.is_set():
            request |= {"server_id": self.server_id, "seat": self.seat, "epoch": self.epoch,
                        "draining": self.draining}
        channel.send(request)
        reply, _ = channel.recv(ANSWER_SECONDS)
        if reply.get("type") == "error":
            self._refused = ConfigError(f"the registry refused this server: {reply.get('reason')}")
            raise self._refused
        try:
            lease_seconds = float(reply["lease_seconds"])
            self.server_id, self.seat = str(reply["server_id"]), int(reply["seat"])
            self.epoch = int(reply["epoch"])
        except (KeyError, TypeError, ValueError):
            raise ProtocolError("the registry's answer to register cannot be read") from None
        self._welcome, self._last_words = True, ""
        self._refused = self.failure = None
        self._registered.set()
        self._keep(channel, max(0.01, lease_seconds / 4), max(ANSWER_SECONDS, lease_seconds))

    def _keep(self, channel: Channel, pause: float, longest_silence: float) -> None:
        """Heartbeats until the connection ends. Waits in recv, so that its end shows at once."""
        next_beat = time.monotonic() + pause
        unanswered_since: float | None = None
        while True:
            now = time.monotonic()
            if now >= next_beat:
                channel.send({"type": "heartbeat", "stats": self._current_stats()})
                next_beat = now + pause
                unanswered_since = unanswered_since or now
            if unanswered_since and now - unanswered_since > longest_silence:
                raise WaitTimeout(f"the registry did not answer for {longest_silence:.0f} s",
                                  "heartbeat", self.address)
            try:
                answer, _ = channel.recv(max(0.001, next_beat - time.monotonic()))
            except WaitTimeout:
                continue
            kind = answer.get("type")
            if kind == "error":
                raise ProtocolError(f"the registry dropped this server: {answer.get('reason')}")
            if kind == "alive":
                unanswered_since = None
                self.epoch = max(self.epoch, int(answer.get("epoch", 0)))
            if kind == "draining" or answer.get("draining") is True:
                self._drain()

    def _current_stats(self) -> dict[str, Any]:
        try:
            return self._stats()
        except Exception:
            log.exception("stats failed")  # a server without statistics is still a server
            return {}

    def _drain(self) -> None:
        if not self.draining:
            self.draining = True
            log.info("the registry asks this server to leave")
            if self._on_drain is not None:
                try:
                    self._on_drain()
                except Exception:
                    log.exception("on_drain failed")

    def close(self) -> None:
        """Leaves the registry."""
        self._end({"type": "leave"})

    @staticmethod
    def plan(
        address: str, token: bytes, model: dict[str, Any], *, num_servers: int | None = None,
        timeout: float = 10.0,
    ) -> PlannedExperts:
        """Which experts a new server should hold: see question.plan."""
        return plan(address, token, model, num_servers=num_servers, timeout=timeout)


__all__ = ["Lease", "Members", "Membership", "PlannedExperts", "ServerInfo", "ask", "plan"]
