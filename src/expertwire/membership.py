"""Following the registry from the outside: a client's view of the members, a server's lease."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .control import Channel, connect_tcp
from .errors import AuthError, ConfigError, ExpertwireError, ProtocolError, WaitTimeout

log = logging.getLogger("expertwire.membership")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # between attempts to reach the registry


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
        self._address = address
        self._token = token
        self._stop = threading.Event()
        self._channel: Channel | None = None
        self.failure: ExpertwireError | None = None  # why the last attempt failed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stop.is_set():
            try:
                channel = connect_tcp(self._address, self._token)
            except (ExpertwireError, OSError) as err:
                self.failure = err if isinstance(err, ExpertwireError) else ProtocolError(str(err))
                if isinstance(err, AuthError):
                    log.error("registry %s: %s", self._address, err)
                self._stop.wait(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
                continue
            self._channel = channel
            if self._stop.is_set():
                channel.close()
                return
            pause = FIRST_PAUSE
            try:
                self._talk(channel)
            except (ExpertwireError, OSError) as err:
                if not self._stop.is_set():
                    log.info("registry %s: %s", self._address, err)
                    self.failure = err if isinstance(err, ExpertwireError) else None
            finally:
                self._channel = None
                channel.close()
            self._stop.wait(FIRST_PAUSE)

    def _talk(self, channel: Channel) -> None:
        raise TypeError("subclasses say what to talk about")

    def close(self) -> None:
        self._stop.set()
        channel = self._channel
        if channel is not None:
            channel.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(6)


class Membership(_RegistryThread):
    """A client's view. Keeps the last snapshot while the registry is away, and reconnects.

    on_change: called from this object's thread after every new snapshot.
    """

    def __init__(
        self, address: str, token: bytes, *, client_name: str = "",
        on_change: Callable[[], None] | None = None,
    ):
        super().__init__(address, token, "expertwire-membership")
        self.client_name = client_name
        self.on_change = on_change
        self._members = Members()
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
                        f"the registry at {self._address} did not show the members that were "
                        f"waited for within {timeout} s{reason}", "membership", self._address,
                    )
                self._changed.wait(min(left, 0.1))
            return self._members

    def report(self, server_id: str, what: str) -> None:
        """Tells the registry what was observed. An observation, not a change of membership."""
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(ExpertwireError, OSError):
                channel.send({"type": "report", "server_id": server_id, "what": what[:200]})

    def _talk(self, channel: Channel) -> None:
        channel.send({"type": "watch", "client": self.client_name})
        while not self._stop.is_set():
            message, _ = channel.recv(None)
            if message.get("type") != "members":
                continue
            members = parse_members(message)
            with self._changed:
                self._members, self.failure = members, None
                self._changed.notify_all()
            on_change = self.on_change
            if on_change is not None:
                on_change()


class Lease(_RegistryThread):
    """A server's membership: registers, sends heartbeats, registers again after a break.

    facts: name, address, pid, model, experts. stats: called for each heartbeat.
    """

    def __init__(
        self, address: str, token: bytes, facts: dict[str, Any],
        stats: Callable[[], dict[str, Any]] = dict,
    ):
        super().__init__(address, token, "expertwire-lease")
        self.facts = facts
        self._stats = stats
        self.server_id: str | None = None
        self.seat = 0
        self.epoch = 0
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
                    f"not registered at {self._address} within {timeout} s{reason}", "register",
                    self._address,
                )
        assert self.server_id is not None
        return self.server_id

    def _talk(self, channel: Channel) -> None:
        channel.send({"type": "register", **self.facts})
        reply, _ = channel.recv(5.0)
        if reply.get("type") == "error":
            self._refused = ConfigError(f"the registry refused this server: {reply.get('reason')}")
            raise self._refused
        self.server_id, self.seat = str(reply["server_id"]), int(reply["seat"])
        self.epoch = int(reply["epoch"])
        self._refused = self.failure = None
        self._registered.set()
        pause = float(reply["lease_seconds"]) / 4
        while not self._stop.wait(pause):
            channel.send({"type": "heartbeat", "stats": self._stats()})
            answer, _ = channel.recv(max(5.0, pause))
            if answer.get("type") == "error":
                raise ProtocolError(f"the registry dropped this server: {answer.get('reason')}")
            self.epoch = int(answer["epoch"])

    def close(self) -> None:
        """Leaves the registry."""
        channel = self._channel
        self._stop.set()
        if channel is not None and self._registered.is_set():
            with contextlib.suppress(ExpertwireError, OSError):
                channel.send({"type": "leave"}, timeout=1.0)
        super().close()

    @staticmethod
    def plan(
        address: str, token: bytes, model: dict[str, Any], *, num_servers: int | None = None
    ) -> list[int]:
        """Asks the registry which experts a new server should hold."""
        reply = ask(address, token, {
            "type": "plan", "num_experts": model["num_experts"], "num_servers": num_servers,
        })
        return [int(e) for e in reply["experts"]]


def ask(address: str, token: bytes, message: dict, timeout: float = 5.0) -> dict:
    """One question to the registry. Raises ConfigError with the reason if it answers "error"."""
    channel = connect_tcp(address, token, timeout)
    try:
        channel.send(message)
        reply, _ = channel.recv(timeout)
    finally:
        channel.close()
    if reply.get("type") == "error":
        raise ConfigError(f"the registry refused: {reply.get('reason')}")
    return reply


__all__: Sequence[str] = ("Lease", "Members", "Membership", "ServerInfo", "ask")
