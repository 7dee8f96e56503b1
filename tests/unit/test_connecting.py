"""Connecting: cases at the edge of test_handshake.py that need another kind of peer."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from expertwire.control import frames as control
from expertwire.control.frames import Channel, connect_tcp, connect_unix, encode_frame, load_token
from expertwire.errors import AuthError, ConfigError, ProtocolError, WaitTimeout


def test_a_socket_that_connected_to_itself_is_not_a_registry():
    """TCP simultaneous open on a free ephemeral port of this host."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    why = control._connect(sock, sock.getsockname(), time.monotonic() + 2, None)
    sock.close()
    assert "refused" in why


def test_connecting_stops_when_asked(token):
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts, nobody speaks
        timer = threading.Timer(0.1, stopped.set)
        timer.start()
        begin = time.monotonic()
        with pytest.raises(WaitTimeout):
            connect_tcp(f"127.0.0.1:{server.getsockname()[1]}", token, 30, stopped)
        assert time.monotonic() - begin < 5
        timer.join()


def test_port_zero_and_unknown_names_are_named(token):
    with pytest.raises(ConfigError, match="port 0"):
        connect_tcp("127.0.0.1:0", token)
    with pytest.raises(WaitTimeout, match=r"no-such-host\.invalid:7700"):
        connect_tcp("no-such-host.invalid:7700", token, 2)


def test_what_a_peer_says_before_its_proof_is_made_printable(token):
    near, far = socket.socketpair()
    with near:
        near.sendall(encode_frame({"error": "\x1b[31mred\n" + "x" * 3000}))
        channel = Channel(far)
        with pytest.raises(ProtocolError) as caught:
            control.handshake_connect(channel, token, 2)
        channel.close()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_no_secret_in_errors_or_representations(token):
    listener = control.listen_unix(token)
    other = b"another-token-0123456789"
    with pytest.raises(AuthError) as caught:
        connect_unix(listener.address, other)
    channel = connect_unix(listener.address, token)
    for text in (repr(caught.value), repr(listener), repr(channel)):
        assert token.decode() not in text and other.decode() not in text
    channel.close()
    listener.close()


def test_descriptors_sent_right_behind_the_proof_survive_the_handshake(token):
    listener = control.listen_unix(token)
    read_end, write_end = os.pipe()

    def serve():
        far = listener.accept(5)
        far.send({"first": True}, [write_end])
        far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    near = connect_unix(listener.address, token)
    message, fds = near.recv(2)
    assert message == {"first": True} and len(fds) == 1
    near.close()
    thread.join(5)
    for fd in (*fds, read_end, write_end):
        os.close(fd)
    listener.close()


def test_a_fifo_in_place_of_the_token_file_does_not_hang(tmp_path):
    path = tmp_path / "token"
    os.mkfifo(path, 0o600)
    with pytest.raises(AuthError, match=str(path)):
        load_token(path)
