"""Framed messages over a socket: addresses, frames, deadlines, descriptors."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control_peers import NASTY_BODIES, TOKEN, raw_unix, read_frame
from tests.leftovers import nothing_left_behind

from expertwire.control import frames as control
from expertwire.control.frames import Channel, UnixListener, connect_tcp, connect_unix
from expertwire.errors import ConfigError, ExpertwireError, ProtocolError, WaitTimeout


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


@pytest.mark.parametrize("call", ["send", "recv"])
def test_a_descriptor_is_not_given_back_while_a_thread_may_use_its_number(pair, monkeypatch, call):
    """Otherwise that thread polls or reads the connection that gets the number next."""
    here, _ = pair
    large = {"type": "x" * (control.MAX_FRAME_BYTES - 100)}  # more than a socket holds
    inside, go, raised = threading.Event(), threading.Event(), []

    def wait(*_: object) -> None:
        inside.set()
        assert go.wait(20)

    def work() -> None:
        try:
            here.recv(20) if call == "recv" else here.send(large, timeout=20)
        except ProtocolError as err:
            raised.append(err)

    monkeypatch.setattr(here, "_wait", wait)
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(20)
    here.close()
    assert here.fileno() >= 0
    go.set()
    thread.join(20)
    assert here.fileno() == -1 and len(raised) == 1
    with pytest.raises(ProtocolError, match="closed on this side"):
        here.recv(1)
