"""How two processes prove to each other that they know the token, and what they say then.

Frames: 4-byte big-endian length, then a UTF-8 JSON object of at most 1 MiB. Handshake, both ways:

    accepting side -> {"expertwire": 1, "nonce": A}
    connecting side -> {"expertwire": 1, "nonce": B, "proof": HMAC(token, "connect" A B)}
    accepting side -> {"proof": HMAC(token, "accept" A B)}       or {"error": reason}

HMAC-SHA256 over a label, both 32-byte nonces; the labels differ, so a proof cannot be reflected.
Nothing else is read from, or given to, a peer before its proof checks. Two transports: TCP (the
registry) and Unix sockets in the abstract namespace (data connections; they carry file descriptors
and leave no file behind).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .errors import AuthError, ConfigError, ExpertwireError, ProtocolError, WaitTimeout

CONTROL_PROTOCOL = 1
MAX_FRAME_BYTES = 1 << 20
MAX_FDS = 16
NONCE_BYTES = 32
HANDSHAKE_SECONDS = 5.0
MAX_HANDSHAKES = 64  # accepted but not authenticated yet; more are closed at once
MIN_TOKEN_BYTES = 16


def token_path() -> Path:
    """EXPERTWIRE_TOKEN_FILE, else expertwire/token under the user's state folder."""
    override = os.environ.get("EXPERTWIRE_TOKEN_FILE")
    if override:
        return Path(override)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "expertwire" / "token"


def load_token(path: str | Path | None = None, create: bool = True) -> bytes:
    """The shared secret: EXPERTWIRE_TOKEN, else the token file, made (mode 0600) if `create`.

    Raises AuthError when there is none, when it is shorter than 16 bytes, or when others may read
    the file.
    """
    if path is None and os.environ.get("EXPERTWIRE_TOKEN"):
        return _checked(os.environ["EXPERTWIRE_TOKEN"].encode(), "EXPERTWIRE_TOKEN")
    file = Path(path) if path is not None else token_path()
    if not file.exists():
        if not create:
            raise AuthError(f"no token at {file}; copy it from the registry's machine or set "
                            "EXPERTWIRE_TOKEN")
        _create_token(file)
    mode = file.stat().st_mode & 0o777
    if mode & 0o077:
        raise AuthError(f"{file} can be read by others (mode {mode:04o}); run: chmod 600 {file}")
    return _checked(file.read_bytes().strip(), str(file))


def _create_token(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(secrets.token_hex(32) + "\n")
    try:
        os.link(fresh, file)  # atomic: of several starting processes one wins, all read the same
    except FileExistsError:
        pass
    finally:
        fresh.unlink()


def _checked(token: bytes, source: str) -> bytes:
    if len(token) < MIN_TOKEN_BYTES:
        raise AuthError(f"the token in {source} has {len(token)} bytes; at least {MIN_TOKEN_BYTES} "
                        "are needed")
    return token


def parse_address(text: str) -> tuple[str, int]:
    """"HOST:PORT" or "[V6]:PORT" -> (host, port). Raises ConfigError naming what is wrong."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ConfigError(f"{text!r} is not HOST:PORT (IPv6 as [ADDRESS]:PORT)")
    if not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"{text!r}: the port must be a number from 0 to 65535")
    return (host[1:-1] if bracketed else host), int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def encode_frame(message: dict) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    return struct.pack(">I", len(body)) + body


def decode_body(body: bytes) -> dict:
    try:
        message = json.loads(body)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as err:
        raise ProtocolError(f"the peer sent a frame that is not JSON: {err}") from None
    if not isinstance(message, dict):
        raise ProtocolError("the peer sent a frame that is not a JSON object")
    return message


def frame_length(prefix: bytes) -> int:
    (length,) = struct.unpack(">I", prefix)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"the peer announced a frame of {length} bytes; the limit is {MAX_FRAME_BYTES} "
            "(is it an expertwire peer?)"
        )
    return length


class Channel:
    """Framed messages over a connected socket, with optional file descriptors (Unix only)."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._is_unix = sock.family == socket.AF_UNIX
        self._send_lock = threading.Lock()
        self._received = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict, fds: Sequence[int] = (), timeout: float = 5.0) -> None:
        """Sends one message. Raises WaitTimeout if the peer does not take it, OSError if gone."""
        frame = encode_frame(message)
        with self._send_lock:
            self._socket.settimeout(timeout)
            try:
                sent = 0
                if fds:
                    sent = socket.send_fds(self._socket, [frame], list(fds))
                self._socket.sendall(frame[sent:])
            except TimeoutError:
                raise WaitTimeout(f"the peer took no message within {timeout} s", "send") from None

    def recv(self, timeout: float | None) -> tuple[dict, list[int]]:
        """The next message and the descriptors that came with it.

        Raises WaitTimeout, or ProtocolError at the end of the stream and for bad frames.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        prefix = self._take(4, deadline, timeout)
        body = self._take(frame_length(prefix), deadline, timeout)
        fds, self._fds = self._fds, []
        return decode_body(body), fds

    def _take(self, count: int, deadline: float | None, timeout: float | None) -> bytes:
        while len(self._received) < count:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise WaitTimeout(f"no message from the peer within {timeout} s", "receive")
            self._socket.settimeout(left)
            try:
                if self._is_unix:
                    data, fds, _, _ = socket.recv_fds(self._socket, 65536, MAX_FDS)
                    self._fds += fds
                else:
                    data = self._socket.recv(65536)
            except TimeoutError:
                continue
            if not data:
                raise ProtocolError("the peer closed the connection")
            self._received += data
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        # Shutdown wakes a thread of ours that is in recv; close alone would not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


# -------------------------------------------------------------------- handshake


def proof(token: bytes, label: bytes, accept_nonce: bytes, connect_nonce: bytes) -> str:
    return hmac.new(token, label + accept_nonce + connect_nonce, hashlib.sha256).hexdigest()


def hello() -> dict:
    return {"expertwire": CONTROL_PROTOCOL, "nonce": secrets.token_hex(NONCE_BYTES)}


def check_hello(message: dict) -> bytes:
    """The peer's nonce. Raises ProtocolError for another protocol version or a bad nonce."""
    if "error" in message:
        raise ProtocolError(f"the peer refused: {message['error']}")
    if message.get("expertwire") != CONTROL_PROTOCOL:
        raise ProtocolError(
            f"the peer speaks control protocol {message.get('expertwire')!r}, this side "
            f"{CONTROL_PROTOCOL}: use the same expertwire release on both sides"
        )
    try:
        nonce = bytes.fromhex(message.get("nonce", ""))
    except (TypeError, ValueError):
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError("the peer's hello has no usable nonce")
    return nonce


def check_proof(token: bytes, label: bytes, accept_nonce: bytes, connect_nonce: bytes,
                message: dict) -> None:
    """Raises AuthError unless the message proves knowledge of the token."""
    if "error" in message:
        raise AuthError(f"the peer refused: {message['error']}")
    given = message.get("proof")
    expected = proof(token, label, accept_nonce, connect_nonce)
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), expected.encode()):
        raise AuthError(
            "the peer does not know this token; both sides need the same EXPERTWIRE_TOKEN or "
            f"token file ({token_path()})"
        )


def handshake_connect(channel: Channel, token: bytes, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    first, _ = channel.recv(timeout)
    accept_nonce = check_hello(first)
    mine = hello()
    connect_nonce = bytes.fromhex(mine["nonce"])
    channel.send({**mine, "proof": proof(token, b"connect", accept_nonce, connect_nonce)},
                 timeout=timeout)
    answer, _ = channel.recv(max(0.001, deadline - time.monotonic()))
    check_proof(token, b"accept", accept_nonce, connect_nonce, answer)


def handshake_accept(channel: Channel, token: bytes, timeout: float) -> None:
    mine = hello()
    accept_nonce = bytes.fromhex(mine["nonce"])
    channel.send(mine, timeout=timeout)
    answer, _ = channel.recv(timeout)
    try:
        connect_nonce = check_hello(answer)
        check_proof(token, b"connect", accept_nonce, connect_nonce, answer)
    except ExpertwireError as err:
        with contextlib.suppress(ExpertwireError, OSError):
            reason = "wrong token" if isinstance(err, AuthError) else str(err)
            channel.send({"error": reason}, timeout=1.0)
        raise
    channel.send({"proof": proof(token, b"accept", accept_nonce, connect_nonce)}, timeout=timeout)


# -------------------------------------------------------------------- transports


def connect_tcp(address: str, token: bytes, timeout: float = HANDSHAKE_SECONDS) -> Channel:
    """An authenticated channel to a registry.

    Raises WaitTimeout when nobody answers in time or the port is closed, AuthError, ProtocolError.
    """
    host, port = parse_address(address)
    try:
        sock = socket.create_connection((host, port), timeout=timeout)
    except (OSError, TimeoutError) as err:
        raise WaitTimeout(
            f"nothing answers at {address}: {err}; is the registry running there "
            f"(expertwire registry --listen {address})?", "connect", address,
        ) from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _authenticated(sock, token, timeout, address)


def connect_unix(address: str, token: bytes, timeout: float = HANDSHAKE_SECONDS) -> Channel:
    """An authenticated channel to a server's data socket; errors as for connect_tcp."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect("\0" + address)
    except (OSError, TimeoutError) as err:
        sock.close()
        raise WaitTimeout(
            f"no server answers at @{address}: {err}; it may just have ended, or run on another "
            "host or in another network namespace", "connect", address,
        ) from None
    return _authenticated(sock, token, timeout, "@" + address)


def _authenticated(sock: socket.socket, token: bytes, timeout: float, peer: str) -> Channel:
    channel = Channel(sock)
    try:
        handshake_connect(channel, token, timeout)
    except OSError as err:
        channel.close()
        if isinstance(err, ExpertwireError):
            raise
        raise ProtocolError(f"{peer} closed the connection during the handshake: {err}") from None
    except ExpertwireError:
        channel.close()
        raise
    return channel


class UnixListener:
    """Accepts authenticated data connections of this user; one handshake stalls no other."""

    def __init__(self, token: bytes):
        self.address = f"expertwire-{secrets.token_hex(16)}"
        self._token = token
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.address)
        self._socket.listen(128)
        self._ready: queue.Queue[Channel | None] = queue.Queue()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
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
                return
            if not self._handshakes.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._handshake, args=(sock,), daemon=True).start()

    def _handshake(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        try:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, uid, _ = struct.unpack("3i", credentials)
            if uid != os.getuid():
                raise AuthError(f"a process of user {uid} tried to connect")
            handshake_accept(channel, self._token, HANDSHAKE_SECONDS)
        except (ExpertwireError, OSError):
            channel.close()
        else:
            self._ready.put(channel)
        finally:
            self._handshakes.release()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(2)
        while True:
            try:
                channel = self._ready.get_nowait()
            except queue.Empty:
                break
            if channel is not None:
                channel.close()
        self._ready.put(None)


def listen_unix(token: bytes) -> UnixListener:
    """A listener at a fresh, unguessable abstract address."""
    return UnixListener(token)
