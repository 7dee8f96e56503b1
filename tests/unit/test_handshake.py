"""How two processes prove to each other that they know the token."""

from __future__ import annotations

import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from tests.control_peers import (
    NASTY_BODIES,
    OTHER_TOKEN,
    TOKEN,
    accepts,
    closed_by_peer,
    raw_unix,
    read_frame,
)
from tests.leftovers import nothing_left_behind

from expertwire.control import frames as control
from expertwire.control.frames import Channel, UnixListener, connect_tcp, connect_unix
from expertwire.errors import AuthError, ExpertwireError, ProtocolError, WaitTimeout


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left_behind():
        yield


@pytest.fixture
def listener():
    listening = UnixListener(TOKEN, handshake_seconds=0.6)
    yield listening
    listening.close()


def test_wrong_token_is_an_auth_error_on_both_sides(listener):
    with pytest.raises(AuthError, match="EXPERTWIRE_TOKEN"):
        connect_unix(listener.address, OTHER_TOKEN)
    with pytest.raises(WaitTimeout):
        listener.accept(0.05)
    assert accepts(listener)


def test_a_server_without_the_token_gets_no_message(listener):
    """The accepting side has to prove itself, too."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    channel = Channel(ours)

    def impostor():
        nonce = "00" * control.NONCE_BYTES
        theirs.sendall(control.encode_frame({"expertwire": 1, "nonce": nonce}))
        read_frame(theirs)
        theirs.sendall(control.encode_frame({"proof": "ab" * 32}))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(AuthError):
        control.handshake_connect(channel, TOKEN, 1)
    thread.join()
    channel.close()
    theirs.close()


def test_a_reflected_proof_is_refused():
    """An impostor that echoes our nonce and our own proof must not pass."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    channel = Channel(ours)

    def mirror():
        theirs.sendall(control.encode_frame(control.hello()))
        theirs.sendall(control.encode_frame({"proof": read_frame(theirs)["proof"]}))

    thread = threading.Thread(target=mirror)
    thread.start()
    with pytest.raises(AuthError):
        control.handshake_connect(channel, TOKEN, 1)
    thread.join()
    channel.close()
    theirs.close()


def test_two_listeners_cannot_be_played_against_each_other(listener):
    """A nonce of one accepting side, answered by nobody who knows the token, gives no proof."""
    first, second = raw_unix(listener), raw_unix(listener)
    nonce = read_frame(first)["nonce"]
    read_frame(second)
    # The second accepting side is made to look at the first one's nonce as if it were ours.
    second.sendall(control.encode_frame({"expertwire": 1, "nonce": nonce, "proof": "00" * 32}))
    answer = read_frame(second)
    assert "proof" not in answer and "error" in answer
    first.close()
    second.close()


def test_a_replayed_proof_is_refused(listener):
    recorded = []
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    accept = threading.Thread(
        target=lambda: recorded.append(_recording_accept(theirs)), name="accept"
    )
    accept.start()
    channel = Channel(ours)
    control.handshake_connect(channel, TOKEN, 1)
    accept.join()
    channel.close()

    sock = raw_unix(listener)
    read_frame(sock)
    sock.sendall(control.encode_frame(recorded[0]))
    assert read_frame(sock) == {"error": "wrong token"}
    assert closed_by_peer(sock)
    sock.close()


def _recording_accept(sock: socket.socket) -> dict:
    mine = control.hello()
    sock.sendall(control.encode_frame(mine))
    answer = read_frame(sock)
    nonces = bytes.fromhex(mine["nonce"]), bytes.fromhex(answer["nonce"])
    sock.sendall(control.encode_frame({"proof": control.proof(TOKEN, b"accept", *nonces)}))
    sock.close()
    return answer


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.5])
def test_another_protocol_version_is_refused_by_name(listener, version):
    sock = raw_unix(listener)
    accept_nonce = bytes.fromhex(read_frame(sock)["nonce"])
    connect_nonce = bytes(control.NONCE_BYTES)
    sock.sendall(
        control.encode_frame(
            {
                "expertwire": version,
                "nonce": connect_nonce.hex(),
                "proof": control.proof(TOKEN, b"connect", accept_nonce, connect_nonce),
            }
        )
    )
    assert "same expertwire release" in read_frame(sock)["error"]
    assert closed_by_peer(sock)
    sock.close()
    with pytest.raises(ProtocolError, match="same expertwire release"):
        control.check_hello({"expertwire": version, "nonce": "00" * control.NONCE_BYTES})


BAD_ANSWERS = {
    "no fields": b'{"expertwire":1}',
    "short nonce": b'{"expertwire":1,"nonce":"00","proof":"00"}',
    "nonce of another type": b'{"expertwire":1,"nonce":[1],"proof":"00"}',
    "proof of another type": b'{"expertwire":1,"nonce":"' + b"00" * 32 + b'","proof":7}',
    "proof not ASCII": b'{"expertwire":1,"nonce":"' + b"00" * 32 + b'","proof":"\\ud800"}',
    "no proof": b'{"expertwire":1,"nonce":"' + b"00" * 32 + b'"}',
    "an error": b'{"error":"no"}',
    **NASTY_BODIES,
}
BAD_ANSWERS["deep"] = b"[" * 4000
BAD_ANSWERS["a number of 10000 digits"] = b'{"a":' + b"7" * 4090 + b"}"
GARBAGE = {name: struct.pack(">I", len(body)) + body for name, body in BAD_ANSWERS.items()}
GARBAGE |= {
    "oversize": struct.pack(">I", control.HANDSHAKE_FRAME_BYTES + 1) + b"x" * 100,
    "huge": b"\xff\xff\xff\xff",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303"),
}


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_its_own_connection_only(listener, answer):
    sock = raw_unix(listener)
    read_frame(sock)
    sock.sendall(answer)
    assert closed_by_peer(sock), "still open after the deadline"
    sock.close()
    assert accepts(listener)


def stall(listener: UnixListener, count: int) -> list[socket.socket]:
    """Connections whose handshake has begun and does not go on."""
    stalled = [raw_unix(listener) for _ in range(count)]
    for i, sock in enumerate(stalled):
        read_frame(sock)
        if i % 2:
            sock.sendall(b"\0\0")  # half a prefix
    return stalled


def test_stalled_handshakes_end_by_the_deadline(listener):
    begin = time.monotonic()
    for sock in stall(listener, 20):
        assert closed_by_peer(sock)
        sock.close()
    assert time.monotonic() - begin < 3.0  # the listener's deadline is 0.6 s


@pytest.fixture
def patient():
    """A listener whose handshakes do not end by themselves while a test runs."""
    listening = UnixListener(TOKEN, handshake_seconds=60)
    yield listening
    listening.close()


def test_stalled_handshakes_block_nobody(patient):
    stalled = stall(patient, 20)
    assert accepts(patient)
    for sock in stalled:
        sock.close()


def test_a_full_house_of_stalled_handshakes_makes_room(patient, monkeypatch):
    monkeypatch.setattr(control, "SLOW_HANDSHAKE_SECONDS", 0.1)
    stalled = stall(patient, control.MAX_HANDSHAKES)
    time.sleep(0.15)
    assert accepts(patient)
    for sock in stalled:
        sock.close()


@pytest.mark.parametrize("speaks", [b"", b"\0", b"\0\0\0\x05{"], ids=["silent", "part", "cut"])
def test_connecting_to_a_stalled_peer_ends_by_the_deadline(speaks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        begin = time.monotonic()
        held = []

        def accept():
            sock, _ = server.accept()
            sock.sendall(speaks)
            held.append(sock)

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(WaitTimeout, match=f"127.0.0.1:{port}"):
            connect_tcp(f"127.0.0.1:{port}", TOKEN, 0.3)
        assert 0.25 < time.monotonic() - begin < 2.0
        thread.join()
        held[0].close()


def test_connecting_to_a_closed_port_and_to_no_server_says_where():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(WaitTimeout, match=f"127.0.0.1:{port}.*is the registry running"):
        connect_tcp(f"127.0.0.1:{port}", TOKEN, 1)
    with pytest.raises(WaitTimeout, match="@expertwire-nobody"):
        connect_unix("expertwire-nobody", TOKEN, 1)
    with pytest.raises(WaitTimeout):
        connect_unix("x" * 200, TOKEN, 1)


def test_a_peer_that_is_no_expertwire_is_a_protocol_error():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            sock, _ = server.accept()
            sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            sock.close()

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(ProtocolError, match="is it an expertwire peer"):
            connect_tcp(f"127.0.0.1:{server.getsockname()[1]}", TOKEN, 2)
        thread.join()


def test_many_connect_at_once(listener):
    errors = []

    def connect():
        try:
            connect_unix(listener.address, TOKEN, 5).close()
        except ExpertwireError as err:
            errors.append(err)

    threads = [threading.Thread(target=connect) for _ in range(40)]
    for thread in threads:
        thread.start()
    for _ in threads:
        listener.accept(5).close()
    for thread in threads:
        thread.join()
    assert not errors


def test_close_ends_pending_handshakes_and_unaccepted_connections():
    listening = UnixListener(TOKEN)  # the full 5 s deadline: close must not wait for it
    stalled = raw_unix(listening)
    waiting = connect_unix(listening.address, TOKEN)
    begin = time.monotonic()
    listening.close()
    listening.close()
    assert time.monotonic() - begin < 3
    with pytest.raises(OSError):
        listening.accept(0.1)
    with pytest.raises(ProtocolError):
        waiting.recv(1)
    assert closed_by_peer(stalled)
    stalled.close()
    waiting.close()


def test_64_servers_and_64_clients_on_one_host():
    """Names never meet, whoever else listens; no file is made that could be stale or another's."""
    listeners = [UnixListener(TOKEN, handshake_seconds=20) for _ in range(64)]
    addresses = {listening.address for listening in listeners}
    assert len(addresses) == 64
    for address in addresses:
        assert not Path(address.removeprefix("unix:").lstrip("@\0")).exists()
    errors = []

    def connect(address):
        try:
            connect_unix(address, TOKEN, 20).close()
        except ExpertwireError as err:
            errors.append(err)

    threads = [threading.Thread(target=connect, args=(a,)) for a in addresses]
    for thread in threads:
        thread.start()
    for listening in listeners:
        listening.accept(20).close()
    for thread in threads:
        thread.join()
    for listening in listeners:
        listening.close()
    assert not errors, errors[0]
