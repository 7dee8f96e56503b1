"""TLS for the control plane, as an option: connections to the registry, never instead of the token.

    EXPERTWIRE_TLS_CERT, EXPERTWIRE_TLS_KEY   the registry's certificate chain and private key, PEM
    EXPERTWIRE_TLS_CA                         everybody else: who must have signed it, PEM

With a CA set, a registry that shows no certificate of it for the host's name is refused: there is
no way back to plain TCP. TLS 1.3 only. Data connections are Unix sockets and stay on the machine.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import threading
import time

from ..errors import AuthError, ConfigError, ProtocolError, WaitTimeout
from .credentials import private_file

CERT, KEY, CA = "EXPERTWIRE_TLS_CERT", "EXPERTWIRE_TLS_KEY", "EXPERTWIRE_TLS_CA"


def server_context(cert: str | None = None, key: str | None = None) -> ssl.SSLContext | None:
    """The registry's side, from these files or the environment; None without either.

    Raises ConfigError if only one is given or they cannot be used, AuthError for a key file that
    others can read.
    """
    cert, key = cert or os.environ.get(CERT), key or os.environ.get(KEY)
    if not cert and not key:
        return None
    if not cert or not key:
        raise ConfigError(f"TLS needs both a certificate ({CERT}) and its key ({KEY})")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        private_file(key)
        context.load_cert_chain(cert, key, password=_no_password)
    except OSError as err:  # SSLError is one
        raise ConfigError(f"cannot use {cert} with {key}: {err.strerror or err}") from None
    return context


def client_context() -> ssl.SSLContext | None:
    """Everybody else's side; None if EXPERTWIRE_TLS_CA is not set. Raises ConfigError."""
    ca = os.environ.get(CA)
    if not ca:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(ca)
    except OSError as err:
        raise ConfigError(f"cannot use {ca} ({CA}): {err.strerror or err}") from None
    return context


def _no_password() -> str:
    raise ConfigError(f"the key of {KEY} has a password; give a key without one, mode 0600")


async def accept_tls(
    writer: asyncio.StreamWriter, context: ssl.SSLContext, timeout: float
) -> None:
    """TLS over an accepted connection. Raises OSError if the peer cannot, or not in time."""
    plain = writer.transport
    try:
        await writer.start_tls(context, ssl_handshake_timeout=timeout)
    finally:
        if writer.transport is None:  # closed meanwhile; asyncio expects that there is one
            writer._transport = plain  # type: ignore[attr-defined]


class TlsSocket:
    """A connected TLS socket with the non-blocking calls that Channel makes.

    OpenSSL lets one thread at a time use a connection, so each call holds a lock.
    """

    def __init__(self, sock: ssl.SSLSocket):
        self._socket = sock
        self._lock = threading.Lock()
        self.family = sock.family

    def setblocking(self, flag: bool) -> None:
        self._socket.setblocking(flag)

    def fileno(self) -> int:
        return self._socket.fileno()

    def recv(self, num_bytes: int) -> bytes:
        """At most num_bytes, b"" at the end. Raises BlockingIOError if nothing is there yet."""
        try:
            with self._lock:
                return self._socket.recv(num_bytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: memoryview) -> int:
        """How many bytes were taken. Raises BlockingIOError if none."""
        try:
            with self._lock:
                return self._socket.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        # Of the TCP connection under it: a thread that waits for it wakes up.
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        self._socket.close()


def connect_tls(
    sock: socket.socket, context: ssl.SSLContext, host: str, deadline: float, peer: str,
    stopped: threading.Event | None,
) -> TlsSocket:
    """TLS over a connected, non-blocking socket, which is taken over and closed on failure.

    Raises AuthError if the certificate is not trusted for `host`, ProtocolError if the peer speaks
    no TLS, WaitTimeout.
    """
    secure = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    poller = select.poll()
    try:
        while True:
            try:
                secure.do_handshake()
                return TlsSocket(secure)
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            left = deadline - time.monotonic()
            if left <= 0 or (stopped is not None and stopped.is_set()):
                raise WaitTimeout(f"{peer} did not finish the TLS handshake in time", "handshake",
                                  peer)
            poller.register(secure.fileno(), event)
            poller.poll(1000 * min(left, 0.1))
    except ssl.SSLCertVerificationError as err:
        secure.close()
        raise AuthError(f"{peer}: its certificate is not trusted: {err.verify_message}; {CA} names "
                        "the certificates that are") from None
    except WaitTimeout:  # an OSError, too
        secure.close()
        raise
    except OSError as err:
        secure.close()
        raise ProtocolError(f"{peer}: no TLS connection: {err.strerror or err}; was the registry "
                            f"started with {CERT} and {KEY}?") from None
    except BaseException:
        secure.close()
        raise
