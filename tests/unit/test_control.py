"""The control plane's connections: framing, the token, the handshake, descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import threading
import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.leftovers import nothing_left_behind

from expertwire import control
from expertwire.control import Channel, UnixListener, connect_tcp, connect_unix, load_token
from expertwire.errors import AuthError, ConfigError, ExpertwireError, ProtocolError, WaitTimeout

TOKEN = b"control-token-0123456789"
OTHER_TOKEN = b"another-token-0123456789"


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left_behind():
        yield


@pytest.fixture
def listener():
    listening = UnixListener(TOKEN, handshake_seconds=0.6)
    yield listening
    listening.close()


@pytest.fixture
def pair():
    """Two channels that are past the handshake."""
    ends = [Channel(sock) for sock in socket.socketpair(socket.AF_UNIX)]
    for end in ends:
        end.authenticated = True
    yield ends
    for end in ends:
        end.close()


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


# ------------------------------------------------------------------------ addresses and frames


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:7700", ("127.0.0.1", 7700)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:7700", ("::1", 7700)),
        ("node-1.example.org:65535", ("node-1.example.org", 65535)),
    ],
)
def test_address(text, expected):
    assert control.parse_address(text) == expected
    assert control.format_address(*expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "host",
        "host:",
        ":7700",
        "::1:7700",
        "host:65536",
        "host:-1",
        "host:7x",
        "host:\u00b2",
        "[::1]",
        "[nonsense]:1",
        "a" * 70 + ":1",
        "two words:1",
        "host:" + "9" * 5000,
    ],
)
def test_malformed_addresses_are_one_clear_error(text):
    with pytest.raises(ConfigError):
        control.parse_address(text)
    with pytest.raises(ConfigError):
        connect_tcp(text, TOKEN, 0.1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_frame_round_trip(message):
    frame = control.encode_frame(message)
    assert control.frame_length(frame[:4]) == len(frame) - 4
    assert control.decode_body(frame[4:]) == message


@given(st.binary(max_size=40))
def test_any_body_is_a_message_or_a_protocol_error(body):
    with contextlib.suppress(ProtocolError):
        assert isinstance(control.decode_body(body), dict)


NASTY_BODIES = {
    "not JSON": b"hello",
    "bad UTF-8": b'{"a":"\xff"}',
    "a list": b"[1]",
    "deep": b"[" * 100_000,
    "a number of 10000 digits": b'{"a":' + b"7" * 10_000 + b"}",
    "empty": b"",
}


@pytest.mark.parametrize("body", NASTY_BODIES.values(), ids=NASTY_BODIES.keys())
def test_nasty_bodies(body):
    with pytest.raises(ProtocolError):
        control.decode_body(body)


def test_frames_beyond_the_limit_are_refused_on_both_sides(pair):
    fits = {"a": "x" * (control.MAX_FRAME_BYTES - 8)}
    assert len(control.encode_frame(fits)) == 4 + control.MAX_FRAME_BYTES
    with pytest.raises(ProtocolError, match="1048576"):
        control.encode_frame({"a": "x" * (control.MAX_FRAME_BYTES - 7)})
    a, b = pair
    a._socket.send(struct.pack(">I", control.MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="1048577"):
        b.recv(1)


# ------------------------------------------------------------------------ channel


def test_channel_carries_messages_both_ways_in_order(pair):
    a, b = pair
    for i in range(50):
        a.send({"i": i})
    b.send({"back": True})
    assert [b.recv(1)[0]["i"] for _ in range(50)] == list(range(50))
    assert a.recv(1) == ({"back": True}, [])


def test_a_timeout_in_the_middle_of_a_frame_loses_nothing(pair):
    a, b = pair
    frame = control.encode_frame({"text": "x" * 1000})
    for piece in (frame[:2], frame[2:6], frame[6:500]):
        a._socket.send(piece)
        with pytest.raises(WaitTimeout):
            b.recv(0.01)
    a._socket.send(frame[500:])
    a.send({"next": 1})
    assert len(b.recv(1)[0]["text"]) == 1000
    assert b.recv(1)[0] == {"next": 1}


def test_a_trickling_sender_does_not_extend_the_deadline(pair):
    a, b = pair
    frame = control.encode_frame({"text": "x" * 1000})
    stop = threading.Event()

    def trickle():
        for byte in frame:
            if stop.wait(0.02):
                return
            with contextlib.suppress(OSError):
                a._socket.send(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(WaitTimeout):
        b.recv(0.3)
    assert time.monotonic() - begin < 1.0
    stop.set()
    thread.join()


def test_a_peer_that_does_not_read_ends_send_by_its_deadline(pair):
    a, _ = pair
    begin = time.monotonic()
    with pytest.raises(WaitTimeout):
        for _ in range(20):
            a.send({"text": "x" * 500_000}, timeout=0.3)
    assert time.monotonic() - begin < 3
    with pytest.raises(ExpertwireError):  # half a frame is out: no more messages after it
        a.send({"more": 1}, timeout=0.3)


def test_a_waiting_receiver_and_a_sender_do_not_share_time_limits(pair):
    a, b = pair
    got = []
    thread = threading.Thread(target=lambda: got.append(a.recv(None)))
    thread.start()
    for i in range(200):
        a.send({"i": i}, timeout=0.2)
        b.recv(1)
    time.sleep(0.3)  # longer than the sender's limit: the receiver still waits
    assert thread.is_alive()
    cpu = time.thread_time()
    b.send({"late": 1})
    thread.join(2)
    assert got == [({"late": 1}, [])]
    assert time.thread_time() - cpu < 0.1


def test_close_wakes_a_thread_that_waits(pair):
    a, _ = pair
    ended = []

    def wait():
        try:
            a.recv(None)
        except ProtocolError as err:
            ended.append(err)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    a.close()
    thread.join(1)
    assert ended


def test_end_of_stream_is_a_protocol_error(pair):
    a, b = pair
    a.close()
    with pytest.raises(ProtocolError, match="closed"):
        b.recv(1)
    with pytest.raises(ProtocolError):
        for _ in range(3):
            b.send({"a": 1})
    with pytest.raises(ProtocolError):
        a.recv(0.1)


# ------------------------------------------------------------------------ descriptors


def make_fd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def content_of(fds: list[int]) -> list[bytes]:
    content = [os.pread(fd, 100, 0) for fd in fds]
    for fd in fds:
        os.close(fd)
    return content


def test_descriptors_arrive_with_their_message_through_the_listener(listener):
    client = connect_unix(listener.address, TOKEN)
    server = listener.accept(1)
    fds = [make_fd(b"one"), make_fd(b"two")]
    client.send({"with": 2}, fds)
    for fd in fds:
        os.close(fd)  # sent ones are the receiver's own
    message, got = server.recv(1)
    assert message == {"with": 2}
    assert not any(os.get_inheritable(fd) for fd in got), "children must not inherit them"
    assert content_of(got) == [b"one", b"two"]
    client.close()
    server.close()


def test_descriptors_of_one_message_are_not_given_with_another(pair):
    a, b = pair
    fd = make_fd(b"third")
    a.send({"i": 0})
    a.send({"i": 1})
    a.send({"i": 2}, [fd])
    a.send({"i": 3})
    os.close(fd)
    got = [b.recv(1) for _ in range(4)]
    with_fds = [message["i"] for message, fds in got if fds]
    assert [content_of(fds) for _, fds in got if fds] == [[b"third"]]
    assert with_fds == [2]


def test_more_descriptors_than_allowed_are_refused_and_closed(pair):
    a, b = pair
    fd = make_fd(b"x")
    before = psutil.Process().num_fds()
    with pytest.raises(ProtocolError):
        a.send({}, [fd] * (control.MAX_FDS + 1))
    socket.send_fds(a._socket, [control.encode_frame({})], [fd] * (control.MAX_FDS + 5))
    with pytest.raises(ProtocolError, match="descriptors"):
        b.recv(1)
    b.close()
    assert psutil.Process().num_fds() <= before
    os.close(fd)


def test_descriptors_that_nobody_took_are_closed(pair):
    a, b = pair
    fd = make_fd(b"x")
    before = psutil.Process().num_fds()
    frame = control.encode_frame({"a": 1})
    socket.send_fds(a._socket, [frame[:6]], [fd, fd])
    with pytest.raises(WaitTimeout):
        b.recv(0.02)
    b.close()
    assert psutil.Process().num_fds() < before
    os.close(fd)


def test_descriptors_before_the_proof_are_not_kept(listener):
    fd = make_fd(b"x")
    sock = raw_unix(listener)
    read_frame(sock)
    before = psutil.Process().num_fds()
    socket.send_fds(sock, [b"\0\0\0\x10"], [fd] * 8)
    time.sleep(0.1)
    assert psutil.Process().num_fds() <= before
    sock.close()
    os.close(fd)


# ------------------------------------------------------------------------ handshake


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


# ------------------------------------------------------------------------ token


def test_token_file_is_made_private_and_kept(tmp_path):
    path = tmp_path / "deep" / "token"
    first = load_token(path)
    assert len(first) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_token(path) == load_token(path, create=False) == first
    assert [p.name for p in path.parent.iterdir()] == ["token"], "no temporary file stays"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o601, 0o777])
def test_a_token_that_others_may_read_is_refused_with_the_cure(tmp_path, mode):
    path = tmp_path / "token"
    load_token(path)
    path.chmod(mode)
    with pytest.raises(AuthError, match=f"chmod 600 {path}"):
        load_token(path)
    path.chmod(0o600)
    load_token(path)


def test_no_token_short_token_and_unusable_places(tmp_path):
    with pytest.raises(AuthError, match="EXPERTWIRE_TOKEN"):
        load_token(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
    short = tmp_path / "short"
    short.write_text("0123456789abcde\n")
    short.chmod(0o600)
    with pytest.raises(AuthError, match="15 bytes"):
        load_token(short)
    with pytest.raises(AuthError):
        load_token(tmp_path)  # a folder
    with pytest.raises(AuthError):
        load_token(short / "below" / "token")  # under a file


def test_environment_wins_and_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPERTWIRE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("EXPERTWIRE_TOKEN", "from-the-environment-0123\n")
    assert load_token() == b"from-the-environment-0123"
    assert not (tmp_path / "token").exists()
    monkeypatch.setenv("EXPERTWIRE_TOKEN", "short")
    with pytest.raises(AuthError):
        load_token()
    monkeypatch.delenv("EXPERTWIRE_TOKEN")
    assert load_token() == (tmp_path / "token").read_bytes().strip()


def test_racing_creation_gives_all_processes_one_token(tmp_path):
    path = tmp_path / "state" / "expertwire" / "token"
    go_read, go_write = os.pipe()
    out_read, out_write = os.pipe()
    racers = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(go_write)
                os.read(go_read, 1)  # all wait for the end of file
                os.write(out_write, load_token(path) + b"\n")
            finally:
                os._exit(0)
        racers.append(pid)
    for fd in (go_read, go_write, out_write):
        os.close(fd)
    with os.fdopen(out_read, "rb") as out:
        tokens = out.read().split()
    for pid in racers:
        os.waitpid(pid, 0)
    assert len(tokens) == 8
    assert len(set(tokens)) == 1
    assert [p.name for p in path.parent.iterdir()] == ["token"]
