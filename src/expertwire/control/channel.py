"""Framed messages over a connected socket, and the spelling of addresses.

A frame is a 4-byte big-endian length, then a UTF-8 JSON object of at most 1 MiB. Over a Unix socket
a message can carry file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import select
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError, ProtocolError, WaitTimeout

if TYPE_CHECKING:
    from .tls import TlsSocket

MAX_FRAME_BYTES = 1 << 20
# Before its proof a peer is anybody: what it can make this side hold is small.
HANDSHAKE_FRAME_BYTES = 4096
MAX_FDS = 16
CLOSED = "the peer closed the connection"


def parse_address(text: str) -> tuple[str, int]:
    """Splits HOST:PORT or [IPV6]:PORT, also [IPV6%ZONE]:PORT. Raises ConfigError that says what
    is wrong."""
    try:
        parts = urllib.parse.urlsplit("//" + text)
        host, port = parts.hostname, parts.port
    except ValueError as err:
        raise ConfigError(f"{text!r} is not HOST:PORT (IPv6 as [ADDRESS]:PORT): {err}") from None
    brackets = text.count("[") + text.count("]")
    if not host or port is None or parts.netloc != text or brackets > 2 or "@" in text:
        raise ConfigError(f"{text!r} is not HOST:PORT (IPv6 as [ADDRESS]:PORT)")
    if parts.netloc.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host)), port
        except ValueError:
            raise ConfigError(f"{text!r}: what is in brackets must be an IPv6 address") from None
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigError(f"{text!r}: {host!r} is not a host name") from None
    if not all(c.isalnum() or c in "-._" for c in host):
        raise ConfigError(f"{text!r}: {host!r} is not a host name")
    return host, port


def format_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def encode_frame(message: dict) -> bytes:
    """A message as bytes. Raises ProtocolError beyond 1 MiB."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    return struct.pack(">I", len(body)) + body


def decode_body(body: bytes) -> dict:
    """The message in a frame. Raises ProtocolError unless it is a UTF-8 JSON object."""
    try:
        # ValueError: bad JSON, bad UTF-8, and an integer of more digits than Python converts.
        message = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise ProtocolError("the peer sent a frame that is not JSON") from None
    if not isinstance(message, dict):
        raise ProtocolError("the peer sent a frame that is not a JSON object")
    return message


def frame_length(prefix: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Bytes of the body that follows a 4-byte prefix. Raises ProtocolError above `limit`."""
    (length,) = struct.unpack(">I", prefix)
    if length > limit:
        raise ProtocolError(
            f"the peer announced a frame of {length} bytes; the limit is {limit} "
            "(is it an expertwire peer?)"
        )
    return length


async def receive_frame(reader: asyncio.StreamReader, limit: int) -> dict:
    """One frame's message. Raises ProtocolError, IncompleteReadError at the stream's end."""
    length = frame_length(await reader.readexactly(4), limit)
    return decode_body(await reader.readexactly(length))


class Channel:
    """One connection. Any thread may send; one at a time may receive; any thread may close.

    Until `authenticated` is set it takes small frames only, and no file descriptors.
    stopped: ends waits early with WaitTimeout, within 0.1 s of being set.
    """

    def __init__(
        self, sock: socket.socket | TlsSocket, stopped: threading.Event | None = None
    ):
        # Non-blocking, each wait with its own deadline: a time-out that is set on the socket
        # would be shared by the thread that sends and the one that receives.
        sock.setblocking(False)
        self._socket = sock
        self._is_unix = sock.family == socket.AF_UNIX
        self._send_lock = threading.Lock()
        self._received = bytearray()
        self._fds: list[int] = []
        self._closed = False
        self._num_inside = 0  # threads in send or recv: they hold the descriptor's number
        self._inside_lock = threading.Lock()
        self.stopped = stopped
        self.authenticated = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict, fds: Sequence[int] = (), timeout: float = 5.0) -> None:
        """Sends one message, with at most 16 descriptors (they stay open here).

        Raises WaitTimeout if the peer does not take it in time (the channel is then of no more
        use, half a frame may be out), ProtocolError if the peer is gone or the message too large.
        """
        if fds and not (self._is_unix and len(fds) <= MAX_FDS):
            raise ProtocolError(f"at most {MAX_FDS} descriptors, and over Unix sockets only")
        frame = memoryview(encode_frame(message))
        deadline = time.monotonic() + timeout
        if not self._send_lock.acquire(timeout=timeout):
            raise WaitTimeout(f"the peer took no message within {timeout} s", "send")
        try:
            with self._inside():
                self._send_frame(frame, fds, deadline, timeout)
        except WaitTimeout:
            self._shutdown()
            raise
        finally:
            self._send_lock.release()

    def _send_frame(
        self, frame: memoryview, fds: Sequence[int], deadline: float, timeout: float
    ) -> None:
        while frame:
            try:
                if fds and isinstance(self._socket, socket.socket):
                    sent = socket.send_fds(self._socket, [frame], list(fds))
                    fds = ()
                else:
                    sent = self._socket.send(frame)
                frame = frame[sent:]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, "send", timeout)
            except OSError:
                raise ProtocolError(self._why_gone()) from None

    def recv(self, timeout: float | None) -> tuple[dict, list[int]]:
        """The next message and the descriptors that came with it (close-on-exec, the caller's).

        Raises WaitTimeout, after which it can be called again and nothing is lost; ProtocolError
        at the end of the stream and for bad frames, after which only close makes sense.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        limit = MAX_FRAME_BYTES if self.authenticated else HANDSHAKE_FRAME_BYTES
        while True:
            needed = 4
            if len(self._received) >= 4:
                needed += frame_length(bytes(self._received[:4]), limit)
                if len(self._received) >= needed:
                    body = bytes(self._received[4:needed])
                    del self._received[:needed]
                    fds, self._fds = self._fds, []
                    try:
                        return decode_body(body), fds
                    except ProtocolError:
                        _close_all(fds)
                        raise
            with self._inside():
                self._fill(needed - len(self._received), deadline, timeout)

    def _fill(self, missing: int, deadline: float | None, timeout: float | None) -> None:
        fds: list[int] = []
        flags = 0
        try:
            if isinstance(self._socket, socket.socket) and self._is_unix and self.authenticated:
                # Not a byte beyond this frame: the kernel hands over the descriptors of later
                # bytes with earlier ones, and they would be taken for this message's.
                data, fds, flags = _receive_fds(self._socket, missing)
            else:
                # Plain recv makes the kernel drop descriptors. During the handshake no byte
                # beyond it is read, so that none of the first message's descriptors are lost.
                data = self._socket.recv(65536 if self.authenticated else min(missing, 65536))
        except BlockingIOError:
            self._wait(select.POLLIN, deadline, "receive", timeout)
            return
        except OSError:
            raise ProtocolError(self._why_gone()) from None
        self._fds += fds
        if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS:
            raise ProtocolError(f"the peer sent more than {MAX_FDS} descriptors with a message")
        if not data:
            raise ProtocolError(self._why_gone())
        self._received += data

    def _wait(
        self, event: int, deadline: float | None, stage: str, timeout: float | None
    ) -> None:
        """Until the socket is ready. Looks up at least once a second whether it was closed."""
        poller = select.poll()
        with contextlib.suppress(ValueError):
            poller.register(self._socket.fileno(), event)
        longest = 1.0 if self.stopped is None else 0.1
        while not self._closed:
            left = longest if deadline is None else deadline - time.monotonic()
            if left <= 0 or (self.stopped is not None and self.stopped.is_set()):
                what = "took no message" if stage == "send" else "sent no message"
                raise WaitTimeout(f"the peer {what} within {timeout} s", stage)
            if poller.poll(1000 * min(left, longest)):
                return
        raise ProtocolError(self._why_gone())

    def _why_gone(self) -> str:
        return "the connection was closed on this side" if self._closed else CLOSED

    def _shutdown(self) -> None:
        # Wakes a thread of ours that waits for this socket; close alone would not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent. A thread that waits in send or recv gets ProtocolError."""
        with self._inside_lock:
            self._closed = True
            is_last = self._num_inside == 0
        self._shutdown()
        if is_last:
            self._end()

    @contextlib.contextmanager
    def _inside(self) -> Generator[None]:
        """Nobody gives the descriptor back meanwhile: its number would soon be another's. Who
        leaves last after `close` does."""
        with self._inside_lock:
            if self._closed:
                raise ProtocolError(self._why_gone())
            self._num_inside += 1
        try:
            yield
        finally:
            with self._inside_lock:
                self._num_inside -= 1
                is_last = self._closed and self._num_inside == 0
            if is_last:
                self._end()

    def _end(self) -> None:
        self._socket.close()
        fds, self._fds = self._fds, []
        _close_all(fds)


def _receive_fds(sock: socket.socket, num_bytes: int) -> tuple[bytes, list[int], int]:
    """(data, descriptors, flags). socket.recv_fds ignores its flags argument, hence this."""
    data, ancillary, flags, _ = sock.recvmsg(
        num_bytes, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            count = len(content) // 4
            fds += struct.unpack(f"{count}i", content[: 4 * count])
    return data, fds, flags


def _close_all(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
