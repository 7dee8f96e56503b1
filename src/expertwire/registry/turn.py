"""The right to move experts: one process at a time, as long as its connection lasts.

Two that plan from the same picture would undo each other's moves. The registry's side: moves.py.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from types import TracebackType

from ..control.frames import Channel, connect_tcp
from ..errors import ProtocolError, WaitTimeout
from .question import ANSWER_SECONDS, question

AWAY_SECONDS = 30.0  # that a registry may be away in the middle: it may be restarting
LOOK_SECONDS = 0.1


class Turn:
    """Asks the registry, as the only one that moves experts.

        with Turn(address, token) as turn:
            turn.ask({"type": "place", ...})

    Raises ConfigError if somebody else has the turn, from the start or after the connection broke;
    WaitTimeout, AuthError, ProtocolError if the registry is not there at the start.
    """

    def __init__(
        self, address: str, token: bytes, *, away_seconds: float = AWAY_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.address = address
        self._token = token
        self._away_seconds = away_seconds
        self._sleep = sleep
        self._channel: Channel | None = self._begin()

    def ask(self, message: dict) -> dict:
        """One question. Waits for a registry that goes away meanwhile, and asks it again.

        Raises ConfigError with the reason if it answers "error", or gave the turn to somebody else;
        WaitTimeout, with what to do now, if it does not come back.
        """
        since = time.monotonic()
        while True:
            try:
                if self._channel is None:
                    self._channel = self._begin()
                return question(self._channel, self.address, message, ANSWER_SECONDS)
            except (WaitTimeout, ProtocolError) as err:
                self.close()
                seconds = time.monotonic() - since
                if seconds > self._away_seconds:
                    raise WaitTimeout(
                        f"the registry at {self.address} has been away for {seconds:.0f} s while "
                        "experts were moved: servers and clients go on, and every expert is held. "
                        f"Start it again (expertwire registry --listen {self.address}), then run "
                        f"`expertwire rebalance` once more ({err})", str(message["type"]),
                        self.address,
                    ) from None
                self._sleep(LOOK_SECONDS)

    def _begin(self) -> Channel:
        channel = connect_tcp(self.address, self._token, ANSWER_SECONDS)
        try:
            who = f"process {os.getpid()} on {socket.gethostname()}"
            question(channel, self.address, {"type": "turn", "who": who}, ANSWER_SECONDS)
        except BaseException:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        """Gives the turn back. Idempotent."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
