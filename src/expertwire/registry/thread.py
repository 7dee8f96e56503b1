"""A thread that keeps one connection to the registry, for membership.py and lease.py."""

from __future__ import annotations

import contextlib
import logging
import random
import threading

from ..control.frames import Channel, connect_tcp, parse_address
from ..errors import AuthError, ExpertwireError, ProtocolError
from .question import ANSWER_SECONDS, FIRST_PAUSE, LONGEST_ANSWER_SECONDS, LONGEST_PAUSE

log = logging.getLogger("expertwire.registry.membership")


class RegistryThread:
    """A daemon thread that keeps one channel to the registry, with back-off between attempts."""

    def __init__(self, address: str, token: bytes, name: str):
        parse_address(address)
        self.address = address
        self._token = token
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._answer_seconds = ANSWER_SECONDS  # more after every attempt that failed
        self._welcome = False  # the registry took us in since the last attempt
        self._was_welcome = False  # ever
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
                self._was_welcome |= self._welcome
                self._note(err)
            except Exception as err:  # our own bug must not end membership for good
                log.exception("registry %s", self.address)
                self._note(ProtocolError(f"{type(err).__name__}: {err}"))
            # A registry that accepts and then refuses at once is not hammered either.
            pause = FIRST_PAUSE if self._welcome else min(pause * 2, LONGEST_PAUSE)
            # It may be there, and slow: with as much time again, many would never be taken in.
            self._answer_seconds = ANSWER_SECONDS if self._welcome else min(
                self._answer_seconds * 2, LONGEST_ANSWER_SECONDS)
            # Many that lost the same registry do not come back at the same moment.
            self._stop.wait(pause * random.uniform(0.5, 1.0))

    def _attempt(self) -> None:
        channel = connect_tcp(self.address, self._token, self._answer_seconds, self._stop)
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
            # Who starts with the wrong token is told by whoever waits for the registry, and ends.
            first = isinstance(err, AuthError) and not self._was_welcome
            log.log(logging.INFO if first else logging.WARNING, "registry %s: %s; trying again",
                    self.address, err)

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
