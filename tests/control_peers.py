"""Peers of a control connection that talk as a test wants, byte by byte."""

from __future__ import annotations

import json
import socket
import struct

from expertwire.control.frames import UnixListener, connect_unix

TOKEN = b"control-token-0123456789"
OTHER_TOKEN = b"another-token-0123456789"

NASTY_BODIES = {
    "not JSON": b"hello",
    "bad UTF-8": b'{"a":"\xff"}',
    "a list": b"[1]",
    "deep": b"[" * 100_000,
    "a number of 10000 digits": b'{"a":' + b"7" * 10_000 + b"}",
    "empty": b"",
}


def raw_unix(listener: UnixListener) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(3)
    sock.connect("\0" + listener.address)
    return sock


def read_frame(sock: socket.socket) -> dict:
    prefix = b""
    while len(prefix) < 4:
        data = sock.recv(4 - len(prefix))
        assert data, "end of stream instead of a frame"
        prefix += data
    (length,) = struct.unpack(">I", prefix)
    body = b""
    while len(body) < length:
        body += sock.recv(length - len(body))
    return json.loads(body)


def closed_by_peer(sock: socket.socket) -> bool:
    """Reads to the end of the stream; False if it does not come within the socket's timeout."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def accepts(listener: UnixListener, timeout: float = 4.0) -> bool:
    """Whether a proper client gets through."""
    client = connect_unix(listener.address, TOKEN, timeout)
    server = listener.accept(timeout)
    client.close()
    server.close()
    return True
