"""Single questions to the registry: status, drain, and which experts to hold."""

from __future__ import annotations

import time
import weakref
from typing import Any

from ..control.frames import Channel, connect_tcp
from ..errors import ConfigError, ProtocolError, WaitTimeout

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts to reach the registry
ANSWER_SECONDS = 5.0  # how long the registry may take for an answer
LONGEST_ANSWER_SECONDS = 20.0  # for those who ask again and again


class PlannedExperts(list[int]):
    """Expert ids that the registry keeps for one server as long as this list is alive."""


def plan(
    address: str, token: bytes, model: dict[str, Any], *, num_servers: int | None = None,
    timeout: float = 10.0,
) -> PlannedExperts:
    """Asks the registry which experts a new server should hold.

    The registry counts them as held while the returned list is alive (it keeps the connection),
    so keep it until the server has registered. Waits up to `timeout` seconds for a registry that
    is still starting. Raises ConfigError if the registry serves another model, WaitTimeout,
    AuthError, ProtocolError.
    """
    channel = _connect_patiently(address, token, timeout)
    try:
        request = {"type": "plan", "model": model, "num_servers": num_servers}
        reply = question(channel, address, request, ANSWER_SECONDS)
        planned = PlannedExperts(int(e) for e in reply["experts"])
    except BaseException:
        channel.close()
        raise
    weakref.finalize(planned, channel.close)
    return planned


def _connect_patiently(address: str, token: bytes, timeout: float) -> Channel:
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE
    while True:
        try:
            return connect_tcp(address, token, max(0.1, deadline - time.monotonic()))
        except WaitTimeout:
            if time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def question(channel: Channel, address: str, message: dict, timeout: float) -> dict:
    """One question over a connection that stays open; errors as for `ask`."""
    try:
        channel.send(message, timeout=timeout)
        reply, _ = channel.recv(timeout)
    except WaitTimeout:
        raise WaitTimeout(
            f"the registry at {address} did not answer {message['type']!r} within {timeout} s",
            str(message["type"]), address,
        ) from None
    except ProtocolError as err:
        raise ProtocolError(f"registry {address}: {err}") from None
    if reply.get("type") == "error":
        raise ConfigError(f"the registry refused: {reply.get('reason')}")
    return reply


def ask(address: str, token: bytes, message: dict, timeout: float = ANSWER_SECONDS) -> dict:
    """One question to the registry. Raises ConfigError with the reason if it answers "error",
    WaitTimeout, AuthError, ProtocolError."""
    channel = connect_tcp(address, token, timeout)
    try:
        return question(channel, address, message, timeout)
    finally:
        channel.close()
