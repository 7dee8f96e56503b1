"""A server's membership: its connection to the registry, and what it is listed with."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ..control.frames import Channel
from ..errors import AuthError, ConfigError, ExpertwireError, ProtocolError, WaitTimeout
from ..observe.reports import REPORT_SECONDS, Reporter, stats_of
from .question import ANSWER_SECONDS, LONGEST_ANSWER_SECONDS, PlannedExperts, plan
from .thread import RegistryThread

log = logging.getLogger("expertwire.registry.membership")


class Lease(RegistryThread):
    """A server's membership: registers, sends heartbeats, registers again after a break.

    After a break it asks for the id and seat that it had, and for an epoch above what it saw.
    facts: name, address, pid, model, experts; host_id if wanted.
    stats: called for each heartbeat; a dict for JSON of at most 64 KiB.
    on_drain: called once, from this object's thread, when the registry asks the server to leave
        as soon as nobody uses it.
    on_leave: called once, from a thread of its own, when it is to leave at once.
    on_place: called from there with (serial, experts) when the server is asked to hold others.
    """

    def __init__(
        self, address: str, token: bytes, facts: dict[str, Any],
        stats: Callable[[], dict[str, Any]] = dict, on_drain: Callable[[], None] | None = None,
        on_leave: Callable[[], None] | None = None,
        on_place: Callable[[int, list[int]], None] | None = None,
    ):
        super().__init__(address, token, "expertwire-lease")
        self.facts = facts
        self._reporter = Reporter(stats, seconds=0)  # with each heartbeat
        self._on_drain, self._on_leave, self._on_place = on_drain, on_leave, on_place
        self._listed = threading.Condition()  # guards the next three
        self._num_listed = self._listed_epoch = self._settled_epoch = 0
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
        reply, _ = channel.recv(self._answer_seconds)
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
        self._note_listed(self.epoch, self.facts["experts"])
        self._keep(channel, max(0.01, lease_seconds / 4),
                   max(LONGEST_ANSWER_SECONDS, 2 * lease_seconds))

    def _keep(self, channel: Channel, pause: float, longest_silence: float) -> None:
        """Heartbeats until the connection ends. Waits in recv, so that its end shows at once.

        A registry that is starved of its processor answers late, and counts what it hears: hanging
        up on it would end the membership. A machine that is gone ends the connection.
        """
        pause = min(pause, REPORT_SECONDS)
        next_beat = time.monotonic() + pause
        unanswered_since: float | None = None
        while True:
            now = time.monotonic()
            if now >= next_beat:
                message: dict[str, Any] = {"type": "heartbeat"}
                if now >= self._reporter.due and unanswered_since is None:
                    message["stats"] = stats_of(self._reporter)
                channel.send(message)
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
            if kind == "leave" and self._on_leave is not None:
                threading.Thread(target=self._on_leave, name="expertwire-leave").start()
                self._on_leave = None
            self._hear_of_experts(kind, answer)

    # ---------------------------------------------------------------- other experts (moves.py)

    def _hear_of_experts(self, kind: object, message: dict) -> None:
        if kind == "place" and self._on_place is not None:
            self._on_place(int(message["serial"]), [int(e) for e in message["experts"]])
        elif kind == "holding":
            self._note_listed(int(message["epoch"]), [int(e) for e in message["experts"]])
        elif kind == "settled":
            with self._listed:
                self._settled_epoch = int(message["epoch"])
                self._listed.notify_all()

    def _note_listed(self, epoch: int, experts: list[int]) -> None:
        with self._listed:
            self.facts["experts"] = experts  # what it registers with after a break
            self._num_listed, self._listed_epoch = self._num_listed + 1, epoch
            self._listed.notify_all()

    def hold(
        self, experts: list[int], serial: int, failed: str | None = None,
        timeout: float = ANSWER_SECONDS,
    ) -> list[int]:
        """Tells the registry what this server holds; returns what it is listed with now.

        Experts that nobody else has stay listed. Raises WaitTimeout if the registry is away, or
        went away meanwhile: what it lists then is what it knew before.
        """
        message = {"type": "holds", "experts": experts, "serial": serial}
        with self._listed:
            channel, before = self._channel, self._num_listed
            if channel is not None and self._welcome:
                with contextlib.suppress(ExpertwireError):
                    channel.send(message | ({"failed": failed} if failed else {}), timeout=timeout)
                    self._listed.wait_for(lambda: self._num_listed != before, timeout)
            if self._num_listed == before or self._channel is not channel:
                raise WaitTimeout("the registry is away", "hold", self.address)
            return list(self.facts["experts"])

    def settled(self, timeout: float) -> bool:
        """Whether, within `timeout`, no client routes by an older list of experts any more."""
        with self._listed:
            return self._listed.wait_for(
                lambda: self._settled_epoch >= self._listed_epoch, timeout
            )

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
