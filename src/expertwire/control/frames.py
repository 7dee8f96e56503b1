"""How two processes connect and prove to each other that they know the token.

Handshake, in frames of channel.py, both ways:

    accepting side -> {"expertwire": 1, "nonce": A}
    connecting side -> {"expertwire": 1, "nonce": B, "proof": HMAC(token, "connect" A B)}
    accepting side -> {"proof": HMAC(token, "accept" A B)}       or {"error": reason}

Nothing else is read from, or given to, a peer before its proof checks. Two transports: TCP (the
registry) and Unix sockets in the abstract namespace (data connections; they carry file descriptors
and leave no file behind).
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time

from ..errors import AuthError, ConfigError, ExpertwireError, ProtocolError, WaitTimeout
from .channel import (
    HANDSHAKE_FRAME_BYTES,
    MAX_FDS,
    MAX_FRAME_BYTES,
    Channel,
    decode_body,
    encode_frame,
    format_address,
    frame_length,
    parse_address,
    receive_frame,
)
from .credentials import (
    CONTROL_PROTOCOL,
    NONCE_BYTES,
    check_hello,
    check_proof,
    hello,
    load_token,
    proof,
    refusal,
    token_path,
)
from .tls import TlsSocket, client_context, connect_tls

HANDSHAKE_SECONDS = 5.0  # for who connects, unless it says otherwise
# For who accepts: longer, a peer that is starved of its processor is no bad one. A bad one holds a
# place, and makes room when all are taken.
ACCEPT_SECONDS = 20.0
MAX_HANDSHAKES = 64  # accepted but not authenticated yet, per listener
# A handshake takes milliseconds. When all places are taken, one that took this long makes room.
SLOW_HANDSHAKE_SECONDS = 1.0
MAX_READY = 256  # authenticated and waiting for accept()


# -------------------------------------------------------------------- handshake


def handshake_connect(channel: Channel, token: bytes, timeout: float) -> None:
    """The connecting side. Raises AuthError, ProtocolError, WaitTimeout after `timeout` s."""
    deadline = time.monotonic() + timeout
    accept_nonce = check_hello(channel.recv(timeout)[0])
    mine = hello()
    connect_nonce = bytes.fromhex(mine["nonce"])
    mine["proof"] = proof(token, b"connect", accept_nonce, connect_nonce)
    channel.send(mine, timeout=_left(deadline))
    answer, _ = channel.recv(_left(deadline))
    check_proof(token, b"accept", accept_nonce, connect_nonce, answer)
    channel.authenticated = True


def handshake_accept(channel: Channel, token: bytes, timeout: float) -> None:
    """The accepting side. Raises AuthError, ProtocolError, WaitTimeout after `timeout` s."""
    deadline = time.monotonic() + timeout
    mine = hello()
    accept_nonce = bytes.fromhex(mine["nonce"])
    channel.send(mine, timeout=timeout)
    try:
        answer, _ = channel.recv(_left(deadline))
        connect_nonce = check_hello(answer)
        check_proof(token, b"connect", accept_nonce, connect_nonce, answer)
    except (AuthError, ProtocolError) as err:
        with contextlib.suppress(ExpertwireError):
            channel.send(refusal(err), timeout=_left(deadline))
        raise
    done = proof(token, b"accept", accept_nonce, connect_nonce)
    channel.send({"proof": done}, timeout=_left(deadline))
    channel.authenticated = True


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _authenticated(
    sock: socket.socket | TlsSocket, token: bytes, deadline: float, peer: str,
    stopped: threading.Event | None = None,
) -> Channel:
    channel = Channel(sock, stopped)
    timeout = _left(deadline)
    try:
        handshake_connect(channel, token, timeout)
    except WaitTimeout:
        channel.close()
        raise WaitTimeout(
            f"{peer} accepts connections but did not finish the handshake within {timeout:.1f} s; "
            "is it an expertwire process, and is it running (not stopped or overloaded)? Does it "
            "want TLS (EXPERTWIRE_TLS_CA)?",
            "handshake", peer,
        ) from None
    except ExpertwireError as err:
        channel.close()
        raise type(err)(f"{peer}: {err}") from None
    channel.stopped = None
    return channel


# -------------------------------------------------------------------- connecting


def connect_tcp(
    address: str, token: bytes, timeout: float = HANDSHAKE_SECONDS,
    stopped: threading.Event | None = None, server: bool = False,
) -> Channel:
    """An authenticated channel to a registry at HOST:PORT, within `timeout` seconds in all.

    server: it is a server's data connection instead. To a registry it is over TLS if
    EXPERTWIRE_TLS_CA is set (tls.py).

    Raises ConfigError for a malformed address, WaitTimeout when nobody answers in time or the
    port is closed (also within 0.1 s of `stopped` being set), AuthError, ProtocolError.
    """
    host, port = parse_address(address)
    if port == 0:
        raise ConfigError(f"{address!r}: nobody can listen on port 0; name the registry's port")
    tls = None if server else client_context()
    deadline = time.monotonic() + timeout
    reason = "no address"
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as err:
        places, reason = [], err.strerror or str(err)
    for idx, (family, _, _, _, place) in enumerate(places):
        # Every address of a name gets its share of the time: the first may be a black hole.
        share = time.monotonic() + _left(deadline) / (len(places) - idx)
        sock = socket.socket(family, socket.SOCK_STREAM)
        reason = _connect(sock, place, share, stopped)
        if not reason:
            secure = connect_tls(sock, tls, host, deadline, address, stopped) if tls else sock
            return _authenticated(secure, token, deadline, address, stopped)
        sock.close()
    hint = ("is the server still there, and may its host be reached" if server else
            f"is the registry running there (expertwire registry --listen {address})")
    raise WaitTimeout(f"nothing answers at {address}: {reason}; {hint}?", "connect", address)


def _connect(
    sock: socket.socket, place: tuple, deadline: float, stopped: threading.Event | None
) -> str:
    """Connects a TCP socket; returns why not, "" for success."""
    sock.setblocking(False)
    code = sock.connect_ex(place)
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    while code == errno.EINPROGRESS:
        left = deadline - time.monotonic()
        if left <= 0 or (stopped is not None and stopped.is_set()):
            return "no answer in time"
        if poller.poll(1000 * min(left, 0.1)):
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            break
    if code:
        return os.strerror(code)
    try:
        # Connecting to a closed local port in the ephemeral range can meet itself (TCP
        # simultaneous open), which would also keep the registry from getting its port back.
        if sock.getsockname() == sock.getpeername():
            return os.strerror(errno.ECONNREFUSED)
        set_tcp_options(sock)
    except OSError as err:  # reset meanwhile
        return err.strerror or str(err)
    return ""


def set_tcp_options(sock: socket.socket) -> None:
    """Small messages at once; a peer whose machine vanished is noticed after about 11 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def connect_unix(
    address: str, token: bytes, timeout: float = HANDSHAKE_SECONDS,
    stopped: threading.Event | None = None,
) -> Channel:
    """An authenticated channel to a server's data socket; errors as for connect_tcp."""
    deadline = time.monotonic() + timeout
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.connect("\0" + address)
                break
            except BlockingIOError:  # its queue of connections is full
                if time.monotonic() > deadline or (stopped is not None and stopped.is_set()):
                    raise
                time.sleep(0.005)
        uid = peer_uid(sock)
    except (OSError, ValueError) as err:
        sock.close()
        reason = err.strerror if isinstance(err, OSError) and err.strerror else err
        raise WaitTimeout(
            f"no server answers at @{address}: {reason}; it may just have ended, or run on another "
            "host or in another network namespace", "connect", address,
        ) from None
    if uid != os.getuid():
        sock.close()
        raise AuthError(f"@{address} belongs to user {uid}, this process runs as {os.getuid()}")
    return _authenticated(sock, token, deadline, "@" + address, stopped)


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid


# -------------------------------------------------------------------- listening


class Listener(abc.ABC):
    """Accepts authenticated data connections at a bound socket; one handshake stalls no other."""

    def __init__(
        self, sock: socket.socket, address: str, token: bytes, handshake_seconds: float
    ):
        self.address = address
        self.data_host = ""  # the one address of this host that data is to go over
        self._token = token
        self._handshake_seconds = handshake_seconds
        self._socket = sock
        self._socket.listen(128)
        self._ready: queue.Queue[Channel | None] = queue.Queue()
        self._lock = threading.Lock()
        self._handshakes: dict[threading.Thread, tuple[Channel, float]] = {}  # oldest first
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="expertwire-listen", daemon=True)
        self._thread.start()

    def accept(self, timeout: float) -> Channel:
        """The next authenticated channel. Raises WaitTimeout, OSError once closed."""
        try:
            channel = self._ready.get(timeout=timeout)
        except queue.Empty:
            raise WaitTimeout(f"nobody connected within {timeout} s", "accept") from None
        if channel is None:
            self._ready.put(None)
            raise OSError("the listener is closed")
        return channel

    def _run(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.05)  # out of descriptors, say: others will be given back
                continue
            try:
                accepted = self._may_speak(sock) and self._begin_handshake(sock)
            except OSError:  # reset meanwhile
                accepted = False
            if not accepted:
                sock.close()

    @abc.abstractmethod
    def _may_speak(self, sock: socket.socket) -> bool:
        """Whether a connection may try to authenticate at all."""

    def _begin_handshake(self, sock: socket.socket) -> bool:
        with self._lock:
            if self._closed or self._ready.qsize() >= MAX_READY:
                return False
            if len(self._handshakes) >= MAX_HANDSHAKES:
                thread, (oldest, since) = next(iter(self._handshakes.items()))
                if time.monotonic() - since < SLOW_HANDSHAKE_SECONDS:
                    return False
                oldest.close()  # its thread ends by itself
                del self._handshakes[thread]
            channel = Channel(sock)
            thread = threading.Thread(
                target=self._handshake, args=(channel,), name="expertwire-handshake", daemon=True
            )
            self._handshakes[thread] = (channel, time.monotonic())
            thread.start()
            return True

    def _handshake(self, channel: Channel) -> None:
        try:
            handshake_accept(channel, self._token, self._handshake_seconds)
        except (ExpertwireError, OSError):
            channel.close()
        finally:
            with self._lock:
                self._handshakes.pop(threading.current_thread(), None)
                if channel.authenticated and not self._closed:
                    self._ready.put(channel)
                else:
                    channel.close()

    def close(self) -> None:
        """Ends all handshakes and drops connections that nobody accepted. Idempotent."""
        with self._lock:
            self._closed = True
            running = dict(self._handshakes)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for channel, _ in running.values():
            channel.close()
        deadline = time.monotonic() + 1.0  # all their sockets are closed
        for thread in [self._thread, *running]:
            thread.join(_left(deadline))
        self._socket.close()
        while True:
            try:
                waiting = self._ready.get_nowait()
            except queue.Empty:
                break
            if waiting is not None:
                waiting.close()
        self._ready.put(None)


class UnixListener(Listener):
    """For processes of this user on this host.

    address: printable name in the abstract namespace, random, for connect_unix.
    """

    def __init__(self, token: bytes, handshake_seconds: float = ACCEPT_SECONDS):
        address = f"expertwire-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + address)
        super().__init__(sock, address, token, handshake_seconds)

    def _may_speak(self, sock: socket.socket) -> bool:
        return peer_uid(sock) == os.getuid()


def listen_unix(token: bytes, handshake_seconds: float = ACCEPT_SECONDS) -> UnixListener:
    """A listener at a fresh, unguessable abstract address."""
    return UnixListener(token, handshake_seconds)


__all__ = [
    "ACCEPT_SECONDS", "CONTROL_PROTOCOL", "HANDSHAKE_FRAME_BYTES", "HANDSHAKE_SECONDS", "MAX_FDS",
    "MAX_FRAME_BYTES",
    "MAX_HANDSHAKES", "NONCE_BYTES", "Channel", "Listener", "UnixListener", "check_hello",
    "check_proof",
    "connect_tcp", "connect_unix", "decode_body", "encode_frame", "format_address", "frame_length",
    "handshake_accept", "handshake_connect", "hello", "listen_unix", "load_token", "parse_address",
    "peer_uid", "proof", "receive_frame", "refusal", "set_tcp_options", "token_path",
]
